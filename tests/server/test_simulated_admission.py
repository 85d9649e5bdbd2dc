"""The simulated engine admits in the same order as the real server, for every policy."""

from __future__ import annotations

import json
import random

import pytest
from conftest import ask_all, fake_plugin, prompts, together

from feather_sglang.scheduling import Settings
from feather_sglang.simulation.cost import StepCost
from feather_sglang.simulation.engine import Engine, EngineConfig
from feather_sglang.simulation.profiles import load_hardware, load_model, load_pass_cost
from feather_sglang.simulation.workload import Ask, build

pytestmark = pytest.mark.server

GROUPS, PER_GROUP, PREFIX, SUFFIX = 6, 10, 192, 24
# Tokens: worth a batch of 10 that shares 192.
WEIGHTS = 480

# Writes down whom SGLang admits, with the tokens cached and computed.
RECORDER = """
import json, os
def register():
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    def record(original, adder, req, *args, **kwargs):
        result = original(adder, req, *args, **kwargs)
        if adder.can_run_list and adder.can_run_list[-1] is req and str(req.rid).startswith("g"):
            with open(os.environ["RECORD"], "a") as file:
                file.write(json.dumps([req.rid, req.prefix_len, req.extend_len]) + "\\n")
        return result
    HookRegistry.register("sglang.srt.managers.schedule_policy.PrefillAdder.add_one_req", record, HookType.AROUND)
"""


def simulated(requests, outputs, policy, config):
    """Admissions of the simulated engine: rid, tokens cached, tokens computed at first."""
    # Token by token, since suffixes can begin alike by chance.
    workload = build(
        "server test", "", [Ask(0.0, [(token, 1) for token in ids], outputs[rid]) for rid, ids in requests]
    )
    steps = StepCost(load_hardware("H100"), load_model("Llama-3-8B"))
    engine = Engine(workload, config, steps, load_pass_cost(policy), policy, Settings(weight_tokens=WEIGHTS))
    admitted = []
    original = engine._admit

    def admit(job, budget):
        extend = original(job, budget)
        if extend is not None:
            admitted.append([requests[job.request.number][0], job.computed, extend])
        return extend

    engine._admit = admit
    engine.run()
    return admitted


@pytest.mark.parametrize("policy", ["fcfs", "lpm", "dfs-weight", "feather"])
@pytest.mark.parametrize("chunk", [None, 256], ids=["unsplit", "chunked"])
def test_admissions_equal_the_servers(serve, tmp_path, policy, chunk):
    """60 requests in 6 groups arrive at one moment, with outputs of unequal lengths and a KV cache that evicts."""
    requests = prompts(GROUPS, PER_GROUP, PREFIX, SUFFIX)
    random.Random(5).shuffle(requests)
    rng = random.Random(6)
    outputs = {rid: rng.randint(4, 40) for rid, _ in requests}
    server = serve(
        "--max-total-tokens=2400",
        "--max-running-requests=12",
        "--page-size=1",
        "--disable-overlap-schedule",
        "--max-prefill-tokens=1000",
        f"--chunked-prefill-size={chunk or -1}",
        f"--feather-weight-tokens={WEIGHTS}",  # two models, and one policy
        policy=policy,
        environment={
            **fake_plugin(tmp_path / "site", RECORDER, "recorder"),
            **together(tmp_path / "site", len(requests)),
            "RECORD": str(tmp_path / "admitted.jsonl"),
        },
    )
    answers = ask_all(server, requests, tokens=outputs.__getitem__)
    assert len(answers) == 60
    real = [json.loads(line) for line in (tmp_path / "admitted.jsonl").read_text().splitlines()]
    config = EngineConfig(2400, 12, max_prefill_tokens=1000, chunked_prefill_tokens=chunk)
    ours = simulated(requests, outputs, "feather-static" if policy == "feather" else policy, config)
    assert len(real) == 60
    assert ours == real
