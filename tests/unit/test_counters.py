"""What the controller counts, against a slow count of what its engine saw; who is told, and the line in the log."""

from __future__ import annotations

import dataclasses
import logging
import random
import time
from types import SimpleNamespace

import pytest
from counting import calls_during
from test_controller import Broken, BrokenController, Engine, Req

from feather_sglang.engines.sglang import startup
from feather_sglang.engines.sglang.admission import around_get_new_batch_prefill
from feather_sglang.engines.sglang.log_line import LogLine
from feather_sglang.scheduling import Settings
from feather_sglang.scheduling.counters import Buckets
from feather_sglang.scheduling.state_file import StateFile

CHUNK = 4  # of Engine's


def group(name, number, prefix=40):
    """Requests that share ``prefix`` tokens."""
    token = sum(map(ord, name))
    return [Req((name, i), [token] * prefix + [1000 * token + i] * CHUNK) for i in range(number)]


def shared_chunks(requests):
    """Full chunks that all prompts share, found token by token."""
    shared = 0
    for tokens in zip(*(req.origin_input_ids for req in requests), strict=False):
        if len(set(tokens)) > 1:
            break
        shared += 1
    return shared // CHUNK


def idle(engine):
    """A pass for which SGLang's own part does nothing; returns the number of calls in it."""
    return calls_during(
        lambda: around_get_new_batch_prefill(
            lambda scheduler, running_batch: (None, running_batch), engine, running_batch=engine.running_batch
        )
    )


@pytest.mark.parametrize("seed", range(5))
def test_counts_equal_what_the_engine_saw(seed):
    rng = random.Random(seed)
    engine, n = Engine(slots=6, min_batch=4), 0
    added = steps = homogeneous = tokens = looked_at = 0
    for _ in range(500):
        for _ in range(rng.choice([0, 0, 0, 0, 1, 2])):
            engine.waiting_queue.append(Req(n, [rng.randrange(3)] * 8 + [rng.randrange(2)] * 8 + [100 + n] * 4))
            n += 1
        running = engine.running_batch.reqs
        while running and rng.random() < 0.3:
            running.pop(rng.randrange(len(running)))
        looked_at += bool(engine.waiting_queue)
        admitted = engine.run_pass()
        added += len(admitted)
        if running and not admitted:
            steps += 1
            tokens += len(running)
            homogeneous += len(running) > 1 and shared_chunks(running) > 0
    counts = engine.controller.counts()
    assert engine.controller.failures == 0 and homogeneous > 10 and steps - homogeneous > 10
    assert counts["added"] == added == n - len(engine.waiting_queue)
    assert counts["decode_steps"] == steps and counts["output_tokens"] == tokens
    assert counts["homogeneous_decode_steps"] == homogeneous
    assert counts["pass_count"] == looked_at and counts["pass_s_sum"] == pytest.approx(engine.controller.hook_s)
    assert counts["fallback_passes"] == counts["state_saves"] == counts["reward"] == counts["exploration_share"] == 0


def stopped():
    """Three of a group run, and a stranger waits because the policy says so."""
    engine = Engine()
    engine.waiting_queue += [*group("a", 3), *group("b", 1)]
    for _ in range(4):
        engine.run_pass()
    assert [r.rid for r in engine.running_batch.reqs] == [("a", 0), ("a", 1), ("a", 2)]
    return engine


def test_a_stop_counts_once_and_each_pass_over_counts():
    engine = stopped()
    before = engine.controller.counts()
    assert before["stopped"] >= 1
    for _ in range(5):
        engine.run_pass()
    after = engine.controller.counts()
    assert after["stopped"] == before["stopped"], "nothing was decided anew"
    assert after["passed_over"] == before["passed_over"] + 5
    assert after["homogeneous_decode_steps"] == before["homogeneous_decode_steps"] + 5
    sizes = engine.controller.counters.stop_batch
    engine.waiting_queue += group("c", 1)
    engine.run_pass()
    assert engine.controller.counts()["stopped"] == sizes.number == before["stopped"] + 1
    assert sizes.counts[2] >= 1, "a batch of three is in the bucket up to four"


def test_those_who_leave_while_nobody_waits_are_noticed():
    engine = Engine(min_batch=8)
    engine.waiting_queue += [*group("a", 2), *group("b", 1)]
    for _ in range(3):
        engine.run_pass()
    assert len(engine.running_batch.reqs) == 3 and not engine.waiting_queue
    assert engine.controller.counts()["homogeneous_decode_steps"] == 0 == engine.controller.shared_tokens
    engine.running_batch.reqs = [req for req in engine.running_batch.reqs if req.rid[0] == "a"]
    engine.run_pass()
    assert engine.controller.counts()["homogeneous_decode_steps"] == 1
    assert engine.controller.shared_tokens == 40
    del engine.running_batch.reqs[0]
    engine.run_pass()
    assert engine.controller.shared_tokens == 0, "one request shares nothing with another"


def test_forced_admissions_are_counted_by_their_bound(monkeypatch):
    engine = Engine(max_passes=3)
    engine.waiting_queue += [*group("a", 3), *group("b", 1)]
    for _ in range(9):
        engine.run_pass()
    counters = engine.controller.counters
    assert not engine.waiting_queue and (counters.forced_by_passes, counters.forced_by_wait) == (1, 0)
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    engine = Engine(max_wait_s=5.0)
    engine.waiting_queue += [*group("a", 3), *group("b", 1)]
    for _ in range(4):
        engine.run_pass()
    now[0] = 60.0
    engine.run_pass(room=0)
    counters = engine.controller.counters
    assert (counters.forced_by_passes, counters.forced_by_wait) == (0, 0), "it is due, and SGLang refused it"
    engine.run_pass()
    assert not engine.waiting_queue and (counters.forced_by_passes, counters.forced_by_wait) == (0, 1)
    assert engine.controller.counts()["forced"] == 1


def test_counts_outlive_failures_and_go_on_after_the_last_one(monkeypatch):
    engine = Engine(controller=BrokenController, max_failures=3)
    told = []
    engine.controller.report_to(lambda controller: told.append(controller.disabled))
    engine.waiting_queue += group("a", 8)
    engine.run_pass(room=1)
    monkeypatch.setattr(Broken, "where", "plan")
    for _ in range(6):
        engine.run_pass(room=1)
    counts = engine.controller.counts()
    assert counts["fallback_passes"] == engine.own_passes == 6
    assert counts["added"] == 1 and engine.controller.counters.failures == 3
    assert told[-1] is True, "that it is off is told at once"
    assert engine.controller._core.counters is engine.controller.counters
    told.clear()
    monkeypatch.setattr(time, "perf_counter", lambda: 1e9)
    engine.run_pass(room=1)
    assert told == [True], "and in every second after it"


def test_an_idle_pass_looks_at_the_clock_twice_and_costs_the_same_however_many_wait(monkeypatch):
    def calls(waiting):
        engine = Engine()
        engine.waiting_queue += [*group("a", 3), *group("b", waiting)]
        for _ in range(5):
            engine.run_pass()
        return idle(engine)

    assert calls(20) == calls(2000)
    engine, looks = stopped(), []
    real = time.perf_counter
    monkeypatch.setattr(time, "perf_counter", lambda: looks.append(1) or real())
    idle(engine)
    assert len(looks) <= 2


def test_decisions_belong_to_the_policy_that_took_them():
    engine = stopped()
    before = engine.controller.counters.added["static"]
    engine.controller._settings = dataclasses.replace(engine.controller._settings, policy="other")
    engine.running_batch.reqs.clear()
    engine.run_pass()
    assert engine.controller.counters.added == {"static": before, "other": 1}
    assert engine.controller.counts()["added"] == before + 1


def test_a_measured_reward_saves_and_trials_are_counted(tmp_path):
    engine = Engine(policy="ucb", state=StateFile(tmp_path / "state.json", 1e-9, {}))
    engine.waiting_queue += group("a", 3)
    for number in range(12):
        for _ in range(4):
            engine.run_pass()
        engine.waiting_queue += group("a", 1)
        if number > 3:
            engine.running_batch.reqs.pop(0)
    engine.controller._state._writer.join()
    counts = engine.controller.counts()
    engine.controller._state.close()
    assert counts["reward"] > 0 and counts["state_saves"] >= 1
    assert engine.controller.counts()["state_saves"] == counts["state_saves"] + 1
    policy = engine.controller._core.policy
    policy.trials.intervals = policy.intervals // 2
    assert 0 < engine.controller.counts()["exploration_share"] <= 0.5


def test_a_reporter_is_called_once_a_second_and_dropped_when_it_raises(monkeypatch, caplog):
    now, told = [100.0], []
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    engine = Engine()

    broke = []

    def broken(controller):
        broke.append(1)
        raise ZeroDivisionError("injected")

    engine.controller.report_to(broken)
    engine.controller.report_to(lambda controller: told.append(controller.waiting))
    for _ in range(30):
        now[0] += 0.1
        engine.run_pass()
    assert 3 <= len(told) <= 4 and len(broke) == 1
    assert caplog.text.count("ZeroDivisionError: injected") == 1 and "it goes on without" in caplog.text
    assert engine.controller.failures == 0


def test_the_log_says_what_happened_since_the_last_line_and_nothing_where_nothing_did(monkeypatch, caplog):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    engine, log_line = Engine(), LogLine(60)
    engine.waiting_queue += [*group("a", 3), *group("b", 1)]
    for _ in range(4):
        engine.run_pass()
    with caplog.at_level(logging.INFO):
        log_line(engine.controller)
        assert not caplog.records, "not yet due"
        now[0] = 61.0
        log_line(engine.controller)
        log_line(engine.controller)
        now[0] = 122.0
        log_line(engine.controller)
        [first] = [record.getMessage() for record in caplog.records]
        assert first.startswith("Feather: 3 added, ") and "at a mean batch of 3.0, " in first
        assert "100.0% homogeneous" in first and first.endswith("0 fallbacks, 1 waiting, policy static")
        caplog.clear()
        engine.run_pass()
        engine.run_pass()
        now[0] = 183.0
        log_line(engine.controller)
        [second] = [record.getMessage() for record in caplog.records]
    assert second.startswith("Feather: 0 added, 0 stops at a mean batch of -, 2 decode steps, 100.0% homogeneous")


def test_there_is_no_log_line_with_an_interval_of_nothing():
    for interval, reporters in ((0, 0), (5, 1)):
        engine = Engine()
        startup._report(engine.controller, SimpleNamespace(metrics_collector=None), Settings(log_interval_s=interval))
        assert len(engine.controller._reporters) == reporters


def test_a_value_belongs_to_the_first_bound_that_it_does_not_exceed():
    buckets = Buckets((1.0, 2.0, 4.0))
    for value in (0.5, 1.0, 1.5, 4.0, 9.0):
        buckets.add(value)
    assert buckets.counts == [2, 1, 1, 1] and buckets.number == 5 and buckets.sum == 16.0
