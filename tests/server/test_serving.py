"""Feather on the real server: spawned processes, HTTP, the unmodified SGLang from PyPI."""

from __future__ import annotations

import re

import pytest
from conftest import admissions, ask_all, prompts, together

pytestmark = pytest.mark.server


def texts(answers):
    assert all(len(each) == 1 and each[0][0] == 200 for each in answers.values())
    return {rid: each[0][1]["output_ids"] for rid, each in answers.items()}


def test_greedy_outputs_equal_those_under_fcfs(serve):
    requests = prompts(groups=8, per_group=8, prefix=300, suffix=20)
    flags = ("--max-total-tokens=8000", "--max-running-requests=12")
    under_feather = serve(*flags)
    got = texts(ask_all(under_feather, requests))
    log = under_feather.log.read_text()
    assert len(re.findall(r"Feather is scheduling: feather-sglang \S+ \([\w ]+\), sglang \S+, slots 12, ", log)) == 1
    assert "Feather failed" not in log
    under_feather.stop()
    under_fcfs = serve(*flags, policy="fcfs")
    assert got == texts(ask_all(under_fcfs, requests))
    assert "Feather" not in under_fcfs.log.read_text(), "without feather chosen nothing of SGLang changes"
    assert len(got) == 64


def test_interleaved_groups_are_served_in_homogeneous_batches(serve, tmp_path):
    # On its own it would be 11 of 12 slots here, since 11 times 512 shared tokens are worth this model's weights.
    flags = ("--max-total-tokens=40000", "--max-running-requests=12", "--feather-min-batch=8")
    requests = prompts(groups=8, per_group=12, prefix=512, suffix=20)
    server = serve(*flags, environment=together(tmp_path / "site", len(requests)))
    texts(ask_all(server, requests, tokens=24))
    records = admissions(server)
    admitted: dict[str, int] = {}
    group = None
    switches = 0
    for record in records:
        groups = {rid.split("-")[0] for rid in record["admitted"]}
        before = record["active"] - len(record["admitted"])
        if before >= 8:  # worth protecting
            assert groups == {group}, records
        assert len(groups) == 1, records
        if groups != {group}:
            assert group is None or admitted[group] == 12, (record, admitted)
            switches += 1
        (group,) = groups
        admitted[group] = admitted.get(group, 0) + len(record["admitted"])
    assert admitted == {f"g{g}": 12 for g in range(8)}
    assert switches == 8, records  # group after group, not back and forth


def test_everybody_gets_one_answer_through_aborts_and_kv_exhaustion(serve):
    """Small KV and long outputs make SGLang retract; a fifth is aborted, waiting or running."""
    server = serve("--max-total-tokens=3000", "--max-running-requests=24", "--chunked-prefill-size=256",
                   "--schedule-conservativeness=0.1", "--page-size=1")  # fmt: skip
    requests = prompts(groups=10, per_group=30, prefix=200, suffix=30)
    doomed = [rid for rid, _ in requests[::5]]
    answers = ask_all(server, requests, tokens=160, abort=doomed, delay=1.0, ignore_eos=False)
    log = server.log.read_text()
    assert set(answers) == {rid for rid, _ in requests} and len(requests) == 300
    assert all(len(each) == 1 for each in answers.values())
    for rid, [(status, answer)] in answers.items():
        reason = answer["meta_info"]["finish_reason"]["type"] if status == 200 else "abort"
        if rid not in doomed:
            assert reason == "stop" or (reason == "length" and len(answer["output_ids"]) == 160), (rid, answer)
    assert "Retract requests" in log, "the test must exhaust the KV cache"
    assert "Feather failed" not in log and "Traceback" not in log
    # still serving, and nothing is left behind
    assert texts(ask_all(server, prompts(1, 3, 64, 8, seed=5), tokens=4))


@pytest.mark.parametrize(
    "flags",
    [
        ("--disable-overlap-schedule", "--page-size=16", "--chunked-prefill-size=128"),
        ("--enable-mixed-chunk", "--chunked-prefill-size=192", "--page-size=8"),
    ],
    ids=["no-overlap-paged", "mixed-chunk"],
)
def test_other_modes_of_sglang_keep_working(serve, flags):
    server = serve("--max-total-tokens=8192", "--max-running-requests=10", *flags)
    requests = prompts(groups=5, per_group=10, prefix=320, suffix=24)
    got = ask_all(server, requests, tokens=20)
    assert all(len(out) == 20 for out in texts(got).values()) and len(got) == 50
    cached = sum(each[0][1]["meta_info"]["cached_tokens"] for each in got.values())
    assert cached >= 0.75 * 50 * 320, "prefixes are computed once"
    # Structured output waits in a queue of SGLang's own until its grammar is compiled. A word is a token here.
    constrained = ask_all(server, prompts(2, 6, 100, 8, seed=9), tokens=8, regex="[bd][a-z]*", ignore_eos=False)
    assert len(constrained) == 12
    for [(status, answer)] in constrained.values():
        assert status == 200 and answer["text"].strip()[0] in "bd", answer
    log = server.log.read_text()
    assert "Feather failed" not in log and "Traceback" not in log


def test_without_a_radix_cache_it_is_fcfs_and_says_so(serve):
    server = serve("--disable-radix-cache", "--max-running-requests=4")
    got = texts(ask_all(server, prompts(3, 6, 100, 10), tokens=8))
    assert len(got) == 18
    assert "Feather: the radix cache is disabled" in server.log.read_text()
