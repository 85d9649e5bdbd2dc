"""What rank 0 measures reaches every rank between the same two passes; nothing else of a rank goes into decisions."""

from __future__ import annotations

import os
import pickle
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_controller import Engine, Req

from feather_sglang.engines.sglang import ranks
from feather_sglang.engines.sglang.admission import around_broadcast
from feather_sglang.engines.sglang.controller import Controller
from feather_sglang.scheduling.state_file import StateFile


class Rank(Engine):
    """One of two; its clock runs ``skew`` times as fast."""

    def __init__(self, rank, skew, state=None, **settings):
        self.rank, self.skew = rank, skew

        def controller(scheduler, chosen, _rank, state):
            return Controller(scheduler, chosen, rank, state, ranks=2)

        super().__init__(6, controller, state, **settings)


class Ranks:
    """Two ranks and the broadcast between them."""

    def __init__(self, monkeypatch, state=None, **settings):
        self.now_s = 0.0
        self.clock_of = None
        for name in ("monotonic", "perf_counter"):
            monkeypatch.setattr(time, name, lambda: 1000 + self.now_s * self.clock_of.skew)
        self.both = []
        for rank, skew in ((0, 1.0), (1, 7.3)):
            self.clock_of = type("Clock", (), {"skew": skew})
            self.both.append(Rank(rank, skew, None if rank else state, **settings))
        self.sent = b""
        self.bytes = []

    def broadcast(self, rank, requests):
        def original(data, rank):
            if rank == 0:
                self.sent = pickle.dumps(data)
                self.bytes.append(len(self.sent) if data else 0)
                return data
            return pickle.loads(self.sent)

        Controller.of_rank = rank.controller
        return around_broadcast(original, requests if rank.rank == 0 else None, rank.rank)

    def step(self, requests=(), seconds=0.01, between=None):
        """Requests arrive at rank 0; both ranks run a pass. What was decided, by rank.

        ``between``: called with each rank before its pass, where SGLang handles what is no request.
        """
        self.now_s += seconds
        decided = []
        for rank in self.both:
            self.clock_of = rank
            got = self.broadcast(rank, list(requests))
            assert [rid for rid, _ in got] == [rid for rid, _ in requests], "news never reaches SGLang"
            rank.waiting_queue += [Req(rid, tokens) for rid, tokens in got]
            if between is not None:
                between(rank)
            rank.run_pass()
            decided.append([req.rid for req in rank.running_batch.reqs])
        return decided


@pytest.fixture(autouse=True)
def alone_afterwards():
    yield
    Controller.of_rank = Controller.in_pass = None


@pytest.mark.parametrize("policy", ["static", "ucb", "qlearning"])
@pytest.mark.parametrize("bounds", [{}, {"max_wait_s": 20.0}], ids=["unbounded", "bounded"])
def test_ranks_with_different_clocks_decide_alike(monkeypatch, policy, bounds):
    rng = random.Random(7)
    ranks_ = Ranks(monkeypatch, policy=policy, exploration=0.5, **bounds)
    number = 0
    for _ in range(1500):
        arriving = []
        for _ in range(rng.randrange(3) if number < 900 else 0):
            group = rng.randrange(4)
            arriving.append((number, [group] * 4 * rng.randrange(4, 9) + [1000 + number] * 4))
            number += 1
        first, second = ranks_.step(arriving, seconds=rng.uniform(0.005, 0.05))
        assert first == second
        if rng.random() < 0.6 and first:
            gone = rng.choice(first)
            for rank in ranks_.both:
                rank.running_batch.reqs = [req for req in rank.running_batch.reqs if req.rid != gone]
    for rank in ranks_.both:
        assert rank.controller.failures == 0
        rank.controller._core._check()
    if policy != "static":
        first, second = (rank.controller._core.policy for rank in ranks_.both)
        assert first.snapshot() == second.snapshot() and first.cells.keys() == second.cells.keys()
        assert first.trials.begun == second.trials.begun > 0 and first.trials.rule == second.trials.rule


def test_the_time_bound_goes_by_rank_0s_clock(monkeypatch):
    ranks_ = Ranks(monkeypatch, max_wait_s=5.0, min_batch=1, max_passes=10**6)
    ranks_.step([(i, [1] * 40 + [100 + i] * 4) for i in range(3)])
    ranks_.step()
    ranks_.step([("cold", [2] * 40)])
    for _ in range(30):  # 3 s for rank 0, 22 s for rank 1
        first, second = ranks_.step(seconds=0.1)
        assert first == second and "cold" not in first
    for _ in range(21):
        first, second = ranks_.step(seconds=0.1)
        assert first == second
    assert "cold" in first


def test_nothing_is_sent_where_there_is_nothing_to_tell(monkeypatch):
    ranks_ = Ranks(monkeypatch)
    for _ in range(20):
        ranks_.step(seconds=1.0)
    assert ranks_.bytes == [0] * 20
    ticking = Ranks(monkeypatch, max_wait_s=3.0)
    for _ in range(100):
        ticking.step(seconds=0.01)
    told = [size for size in ticking.bytes if size]
    assert 8 <= len(told) <= 11 and max(told) < 200, "ten times a second, and small"


def test_what_rank_0_loads_all_ranks_know(monkeypatch, tmp_path):
    path = tmp_path / "state.json"
    rows, thresholds = [[3, 100.0, 90.0, 5.0, 6.0]], [4.0, None]
    donor = Engine(policy="ucb")
    bins = donor.controller._core.policy.bins.describe()
    state = {"policy": "ucb", "bins": bins, "thresholds": thresholds, "cells": rows}
    StateFile(path, 60, {})._write(state)

    ranks_ = Ranks(monkeypatch, state=StateFile(path, 60, {}), policy="ucb")
    assert [bool(rank.controller._core.policy.cells) for rank in ranks_.both] == [True, False]
    ranks_.step()
    for rank in ranks_.both:
        known = rank.controller._core.policy.snapshot()
        assert known["cells"] == rows and known["thresholds"] == thresholds
    ranks_.step()
    assert ranks_.bytes[1] == 0, "told once"


@pytest.mark.parametrize("broken", ["news", "reward"])
def test_a_failure_of_what_only_rank_0_does_changes_no_decision(monkeypatch, caplog, broken):
    def fail(*_):
        raise OSError("broken on purpose")

    monkeypatch.setattr(ranks.Speaker, broken, fail)
    ranks_ = Ranks(monkeypatch, policy="ucb")
    for number in range(200):
        first, second = ranks_.step([(number, [number % 3] * 24 + [1000 + number] * 4)] * (number % 5 == 0))
        assert first == second
        if number % 5 == 4:
            for rank in ranks_.both:
                del rank.running_batch.reqs[:1]
    assert [rank.controller.failures for rank in ranks_.both] == [0, 0]
    assert caplog.text.count("OSError: broken on purpose") == 1, "logged once"


REPLAY = """
import random, sys
from feather_sglang.cht import chunk_hashes
from feather_sglang.scheduling import FeatherScheduler, Settings
settings = Settings.parse({"chunk_size": 4, "policy": sys.argv[1], "max_wait_s": 2.0, "exploration": 0.5}, "test")
scheduler = FeatherScheduler(settings, 12)
rng, running, number = random.Random(3), [], 0
for step in range(3000):
    if number < 1500 and rng.random() < 0.5:
        rid = f"request {number}"
        tokens = [rng.randrange(4)] * 4 * rng.randrange(3, 9) + [100 + number] * 4
        scheduler.arrive(rid, chunk_hashes(tokens, 4), len(tokens))
        number += 1
    if running and rng.random() < 0.4:
        scheduler.leave(running.pop(rng.randrange(len(running))))
    scheduler.tick(step * 0.03)
    plan = scheduler.plan(12 - len(running), rng.randrange(1, 200))
    taken = plan.order[: rng.randrange(len(plan.order) + 1)] if running else plan.order
    scheduler.confirm(taken)
    scheduler.policy.learn(scheduler.interval, rng.uniform(50, 150), 0.5)
    for rid in list(scheduler.computing):
        scheduler.progress(rid, None)
    running += taken
    print(plan.order, plan.stop.name, taken)
print(scheduler.policy.snapshot())
"""


@pytest.mark.parametrize("policy", ["static", "ucb", "qlearning"])
def test_one_log_of_events_replayed_in_two_processes_gives_the_same_plans(policy):
    """Their hashes of strings differ, so an iteration over a set would show."""
    logs = []
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(__file__).parents[2])}
        done = subprocess.run(
            [sys.executable, "-c", REPLAY, policy], capture_output=True, text=True, env=environment, check=True
        )
        logs.append(done.stdout.splitlines())
    assert logs[0] == logs[1] and len(logs[0]) == 3001
    assert policy == "static" or "'cells': []" not in logs[0][-1]
