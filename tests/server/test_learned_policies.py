"""Learned policies on the real server: they serve, hear how fast batches decode, and keep what they learned."""

from __future__ import annotations

import json
import os
import signal
import time

import psutil
import pytest
from conftest import ask_all, prompts

pytestmark = pytest.mark.server


@pytest.mark.parametrize("policy", ["ucb", "qlearning"])
def test_a_learned_policy_serves_learns_and_survives_a_kill(serve, tmp_path, policy):
    state = tmp_path / "state.json"
    flags = (
        "--max-running-requests=12",
        "--max-total-tokens=20000",
        f"--feather-policy={policy}",
        "--feather-min-batch=2",
        f"--feather-state={state}",
        "--feather-state-period-s=1",
    )
    server = serve(*flags)
    for wave in range(3):
        requests = prompts(6, 40, 256, 16, seed=wave)
        # Of unequal lengths, so that slots come free one by one and there is always something to decide.
        answers = ask_all(server, requests, tokens=lambda rid: 6 + 5 * (int(rid.split("-")[1]) % 5))
        assert len(answers) == 240
        assert all(len(each) == 1 and each[0][0] == 200 for each in answers.values())
    saved = json.loads(state.read_text())
    assert saved["state"]["policy"] == policy and (saved["state"]["cells"] or any(saved["state"]["thresholds"]))
    assert all(value >= 0 for cell in saved["state"]["cells"] for value in cell)

    family = [*psutil.Process(server.pid).children(recursive=True), psutil.Process(server.pid)]
    for process in family:
        os.kill(process.pid, signal.SIGKILL)
    psutil.wait_procs(family, 20)
    assert json.loads(state.read_text())["state"]["policy"] == policy, "whole, whenever it was killed"

    server = serve(*flags)
    assert "not used" not in server.log.read_text()
    again = ask_all(server, prompts(6, 4, 256, 16, seed=1), tokens=4)
    assert all(each[0][0] == 200 for each in again.values())
    server.stop()

    state.write_text(state.read_text()[:-40])
    server = serve(*flags)
    log = server.log.read_text()
    assert log.count("not used, it is damaged") == 1
    assert state.with_name("state.json.bad").exists()
    deadline = time.monotonic() + 60
    while not state.exists() and time.monotonic() < deadline:
        ask_all(server, prompts(2, 12, 256, 16, seed=int(time.monotonic())), tokens=4)
    assert json.loads(state.read_text())["version"] == 1
