"""Tensor parallel ranks: each runs a scheduler of its own, and all must decide alike, or the server hangs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import ask_all, prompts

pytestmark = pytest.mark.server


def test_two_ranks_admit_the_same_requests_in_the_same_passes(serve):
    server = serve(
        "--tp=2",
        "--max-total-tokens=6000",
        "--max-running-requests=12",
        environment={"SGLANG_CPU_OMP_THREADS_BIND": "0|1"},
    )
    answers = ask_all(server, prompts(groups=6, per_group=20, prefix=256, suffix=20), tokens=24)
    assert len(answers) == 120 and all(each[0][0] == 200 for each in answers.values())
    ranks = []
    for path in (server.trace, Path(f"{server.trace}.rank1")):
        records = [json.loads(line) for line in path.read_text().splitlines()]
        for record in records:
            del record["hook_s"], record["time_s"]
        ranks.append(records)
    assert ranks[0] == ranks[1] and len(ranks[0]) > 10
