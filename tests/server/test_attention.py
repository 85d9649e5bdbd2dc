"""The CPU platform's own attention backend on the real server."""

from __future__ import annotations

import json
import re
import urllib.request

import pytest
from conftest import BASE, ask_all, prompts

from feather_sglang.bench.server import Server

pytestmark = pytest.mark.server

BUILT = re.compile(r"feather_cpu: paged decode attention, torch\.float32 KV, (\d+) threads?; compiled or loaded in ")
PINNED = "--attention-backend=torch_native"


def outputs(model, tmp_path, *flags, environment=None):
    """What greedy decoding gives on a shared-prefix workload, the backend that served it, and the log."""
    arguments = [f"--model-path={model}", *(flag for flag in BASE if flag != PINNED), "--max-total-tokens=8000", *flags]
    with Server(arguments, tmp_path / "server.log", environment) as server:
        answers = ask_all(server, prompts(groups=4, per_group=6, prefix=300, suffix=20), tokens=24)
        with urllib.request.urlopen(server.url + "/get_server_info") as response:
            backend = json.load(response)["attention_backend"]
        log = server.log.read_text()
    assert all(len(each) == 1 and each[0][0] == 200 for each in answers.values()) and len(answers) == 24
    assert "Traceback" not in log
    return {rid: each[0][1]["output_ids"] for rid, each in answers.items()}, backend, log


@pytest.mark.parametrize("page_size", [1, 16])
def test_the_default_backend_is_ours_and_gives_the_outputs_of_torch_native(model, tmp_path, page_size):
    ours, backend, log = outputs(model, tmp_path, f"--page-size={page_size}")
    assert backend == "feather_cpu" and len(BUILT.findall(log)) == 1
    wanted, backend, log = outputs(model, tmp_path, f"--page-size={page_size}", PINNED)
    assert backend == "torch_native" and not BUILT.search(log)
    assert ours == wanted


def test_each_rank_keeps_to_its_own_core(model, tmp_path):
    bind = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    ours, backend, log = outputs(model, tmp_path, "--tp=2", "--attention-backend=feather_cpu", environment=bind)
    assert backend == "feather_cpu" and BUILT.findall(log) == ["1", "1"]
    assert all(len(each) == 24 for each in ours.values())
