"""Several schedulers: tensor parallel ranks must decide alike, or the server hangs; data parallel ones are apart."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from conftest import ask_all, fake_plugin, prompts

pytestmark = pytest.mark.server

# Rank 1's clocks run three times as fast, and from another start.
SKEWED = """
import time

def skew(result, scheduler, *args, **kwargs):
    from sglang.srt.runtime_context import get_parallel
    if get_parallel().tp_rank == 1:
        for name in ("time", "monotonic", "perf_counter"):
            setattr(time, name, lambda real=getattr(time, name): 3 * real() + 12345)
        print("CLOCKS ARE SKEWED")
    return result

def register():
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    HookRegistry.register(
        "sglang.srt.managers.scheduler.Scheduler.init_running_status", skew, HookType.AFTER
    )
"""


def decided(path):
    records = [json.loads(line) for line in Path(path).read_text().splitlines()]
    for record in records:
        del record["hook_s"], record["time_s"]
    return records


BIND = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}


# A tight bound turns most admissions into overdue ones, which teach nothing.
@pytest.mark.parametrize(("policy", "max_wait_s"), [("static", 3), ("ucb", 40), ("qlearning", 40)])
def test_two_ranks_with_different_clocks_decide_the_same_in_every_pass(serve, tmp_path, policy, max_wait_s):
    state = tmp_path / "state.json"
    server = serve(
        "--tp=2",
        "--max-total-tokens=6000",
        "--max-running-requests=12",
        "--feather-min-batch=2",
        f"--feather-max-wait-s={max_wait_s}",
        f"--feather-policy={policy}",
        f"--feather-state={state}",
        "--feather-state-period-s=1",
        environment={**BIND, **fake_plugin(tmp_path / "site", SKEWED)},
    )
    requests = prompts(groups=6, per_group=50, prefix=256, suffix=20)
    # Of unequal lengths, so that slots come free one by one and there is always something to decide.
    answers = ask_all(server, requests, tokens=lambda rid: 6 + 5 * (int(rid.split("-")[1]) % 5))
    assert len(answers) == 300 and all(len(each) == 1 and each[0][0] == 200 for each in answers.values())
    log = server.log.read_text()
    assert log.count("CLOCKS ARE SKEWED") == 1 and "Feather failed" not in log
    weights = re.findall(r"weight_tokens=(\d+)", log)
    assert len(weights) == 2 and int(weights[0]) == int(weights[1]) > 0, "rank 0's figure, on both"
    first, second = decided(server.trace), decided(f"{server.trace}.rank1")
    assert first == second and len(first) > 10
    if policy != "static":
        learned = json.loads(state.read_text())["state"]
        assert learned["cells"] or any(learned["thresholds"]), "rank 0's rewards were heard"


def test_data_parallel_schedulers_each_plan_for_their_own_requests(serve):
    flags = ("--dp=2", "--max-total-tokens=6000", "--max-running-requests=12", "--feather-min-batch=2")
    server = serve(*flags, environment=BIND)
    requests = prompts(groups=6, per_group=40, prefix=256, suffix=20)
    answers = ask_all(server, requests, tokens=8)
    assert len(answers) == 240 and all(len(each) == 1 and each[0][0] == 200 for each in answers.values())
    log = server.log.read_text()
    assert len(re.findall("Feather is scheduling: ", log)) == 2 and "Feather failed" not in log
    served = [
        {rid for record in decided(path) for rid in record["admitted"] if rid.startswith("g")}
        for path in (server.trace, f"{server.trace}.dp1")
    ]
    assert served[0] and served[1] and not served[0] & served[1]
    assert served[0] | served[1] == {rid for rid, _ in requests}
