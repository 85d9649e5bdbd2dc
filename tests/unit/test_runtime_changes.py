"""Changes at run time on the scheduler's side: nobody is lost, all ranks agree, and errors change nothing."""

from __future__ import annotations

import json
import random
import time
from types import SimpleNamespace

import pytest
from test_controller import BrokenController, Engine, Recorder, Req, agrees, break_in, recorder
from test_rank_agreement import Ranks, alone_afterwards

from feather_sglang.engines.sglang import controller as controller_module
from feather_sglang.engines.sglang import runtime
from feather_sglang.engines.sglang.controller import attached_to, controller_of
from feather_sglang.scheduling.state_file import StateFile

__all__ = ["alone_afterwards", "break_in", "recorder"]  # fixtures

ALL = ("static", "ucb", "qlearning", "fcfs", "lpm", "dfs-weight")
ROWS = [[3, 100.0, 90.0, 5.0, 6.0]]


def own(engine):
    """Give it what SGLang's own policy has."""

    def chosen(name, tree_cache):
        return SimpleNamespace(value=name)

    vars(engine.policy).update(tree_cache=None, policy=chosen("fcfs", None), _validate_and_adjust_policy=chosen)
    return engine


def make(*args, **settings):
    return own(Engine(*args, **settings))


def ask(engine, do, given=None):
    return runtime.answer(engine, runtime.question(do, given))


def switch(engine, name):
    status, body = ask(engine, "policy", {"policy": name})
    assert status == 200, body
    return body


def state(engine):
    status, body = ask(engine, "state")
    assert status == 200, body
    json.dumps(body, allow_nan=False)
    return body


@pytest.mark.parametrize("seed", range(6))
def test_switching_through_everything_under_load_loses_nobody(seed):
    rng = random.Random(seed)
    engine, number, served = make(slots=6), 0, []
    for step in range(900):
        for _ in range(rng.randrange(3) if step < 500 else 0):
            engine.waiting_queue.append(Req(number, [rng.randrange(3)] * 4 * rng.randrange(2, 9) + [100 + number] * 4))
            number += 1
        running = engine.running_batch.reqs
        while running and rng.random() < 0.4:
            served.append(running.pop(rng.randrange(len(running))).rid)
        if rng.random() < 0.15:
            name = rng.choice(ALL)
            waiting = list(engine.waiting_queue)
            body = switch(engine, name)
            assert engine.waiting_queue == waiting
            learned = name in ("static", "ucb", "qlearning")
            assert body["scheduling"] == ("feather" if learned else name)
            assert not learned or body["policy"] == name
        if rng.random() < 0.1:
            said = state(engine)
            assert said["waiting"] == len(engine.waiting_queue)
        engine.run_pass()
        if controller_of(engine) and engine.waiting_queue:
            agrees(engine)
    assert not engine.waiting_queue and sorted(served + [req.rid for req in running]) == list(range(number))
    assert engine.controller.failures == 0 and engine.own_passes > 10


def test_sglangs_policy_is_alone_in_charge_until_feather_is_back():
    engine = make(fallback_policy="lpm")
    engine.waiting_queue += [Req(i, [i % 2] * 40 + [100 + i] * 4) for i in range(12)]
    engine.run_pass()
    assert engine.policy.waiting_queue_prefix_matched([]) is False
    assert switch(engine, "dfs-weight") == {"policy": "static", "scheduling": "dfs-weight"}
    assert controller_of(engine) is None and controller_of(engine.policy) is None
    assert "waiting_queue_prefix_matched" not in vars(engine.policy)
    assert len(engine.controller.core.tree) == 0, "no finished request is kept alive"
    said = state(engine)
    assert (said["scheduling"], said["why"], said["groups"], said["best"]) == ("dfs-weight", "switched", [], None)
    assert said["batch"]["requests"] == 1 and said["waiting"] == 11
    before = engine.own_passes
    engine.run_pass(room=2)
    assert engine.own_passes == before + 1 and len(engine.running_batch.reqs) == 3
    assert switch(engine, "static") == {"policy": "static", "scheduling": "feather"}
    assert engine.policy.policy.value == "lpm", "the fallback is the fallback again"
    engine.running_batch.reqs.clear()
    engine.run_pass()
    agrees(engine)
    assert engine.own_passes == before + 1 and state(engine)["why"] == ""


def test_a_switch_is_reported_at_once():
    engine, in_charge = make(), []
    engine.controller.report_to(lambda controller: in_charge.append(not controller.disabled))
    switch(engine, "lpm")
    switch(engine, "static")
    assert in_charge == [False, True]


def test_another_policy_of_feathers_keeps_everybodys_place():
    engine = make(slots=2)
    engine.waiting_queue += [Req(i, [i] * 12) for i in range(6)]
    for _ in range(3):
        engine.run_pass()
    core = engine.controller.core
    places = [core.tree.note(req).since for req in core.waiting]
    switch(engine, "ucb")
    assert engine.controller.core is core and core.policy.learns
    assert [core.tree.note(req).since for req in core.waiting] == places
    assert engine.controller._meter is not None and engine.controller._speaker is not None
    switch(engine, "static")
    assert engine.controller._meter is None and engine.controller._speaker is None


def test_a_policy_that_stopped_is_asked_again_after_a_change():
    engine = make()
    engine.waiting_queue += [Req(("a", i), [1] * 40 + [100 + i] * 4) for i in range(3)]
    engine.waiting_queue.append(Req("b", [2] * 40))
    for _ in range(5):
        engine.run_pass()
    assert len(engine.running_batch.reqs) == 3 and engine.controller.core.unchanged()
    assert state(engine)["best"]["rid"] == "b" and not state(engine)["best"]["admitted"]
    assert ask(engine, "config", {"min_batch": 8})[0] == 200
    assert state(engine)["best"]["admitted"]
    engine.run_pass()
    assert len(engine.running_batch.reqs) == 4


def learn(engine):
    policy = engine.controller.core.policy
    policy.restore({**policy.snapshot(), "cells": ROWS})


@pytest.mark.parametrize("between", [["static"], ["lpm"], ["lpm", "fcfs", "qlearning"], ["qlearning", "dfs-weight"]])
def test_a_learned_policy_keeps_what_it_learned(between):
    engine = make(policy="ucb")
    learn(engine)
    for name in between:
        switch(engine, name)
        assert name not in ("static", "qlearning") or engine.controller.core.policy.snapshot().get("cells") != ROWS
    switch(engine, "ucb")
    assert engine.controller.core.policy.snapshot()["cells"] == ROWS


def test_settings_of_the_policy_take_effect_and_leave_what_was_learned():
    engine = make(policy="ucb")
    learn(engine)
    policy = engine.controller.core.policy
    status, body = ask(engine, "config", {"freeze": True, "min_batch": 5})
    assert status == 200 and body["settings"]["freeze"] is True and body["settings"]["min_batch"] == 5
    assert body["settings"]["policy"] == "ucb" and body["settings"]["chunk_size"] == 4
    frozen = engine.controller.core.policy
    assert frozen is not policy and frozen.freeze and frozen.snapshot()["cells"] == ROWS
    ask(engine, "config", {"max_passes": 7, "max_wait_s": 3})
    assert engine.controller.core.policy is frozen, "nothing of the policy's has changed, so its trials go on"
    assert engine.controller.core._max_passes == 7 and engine.controller.core._max_wait_s == 3.0
    ask(engine, "config", {"fallback_policy": "lpm", "max_failures": 3})
    assert engine.policy.policy.value == "lpm" and engine.controller.settings.max_failures == 3
    switch(engine, "fcfs")
    ask(engine, "config", {"fallback_policy": "dfs-weight"})
    assert engine.policy.policy.value == "fcfs", "what was asked for by name stays"


def test_a_bound_on_the_wait_that_comes_later_counts_from_then(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    engine = make(slots=8, max_passes=10**6)
    engine.waiting_queue += [Req(i, [1] * 40 + [100 + i] * 4) for i in range(3)]
    engine.waiting_queue.append(Req("cold", [2] * 40))
    for _ in range(4):
        engine.run_pass()
    now[0] += 500
    ask(engine, "config", {"max_wait_s": 5})
    for advance, served in ((4, False), (2, True)):
        now[0] += advance
        engine.run_pass()
        assert ("cold" in [req.rid for req in engine.running_batch.reqs]) == served
    ask(engine, "config", {"max_wait_s": 7})
    assert engine.controller._speaker.news().now_s >= 6, "the clock goes on"


def test_feather_is_on_again_after_its_failures(break_in):
    engine = own(Engine(controller=BrokenController, max_failures=2))
    engine.waiting_queue += [Req(i, [i] * 12) for i in range(8)]
    break_in("plan")
    for _ in range(2):
        engine.run_pass(room=1)
    said = state(engine)
    assert (said["scheduling"], said["why"], said["failures"]) == ("fcfs", "failures", 2)
    assert said["waiting"] == len(engine.waiting_queue) == 6 and said["batch"]["requests"] == 2
    break_in("")
    switch(engine, "static")
    said = state(engine)
    assert (said["scheduling"], said["why"], said["failures"]) == ("feather", "", 0)
    engine.run_pass(room=1)
    agrees(engine)
    assert engine.own_passes == 2 and len(engine.running_batch.reqs) == 3
    break_in("plan")
    engine.run_pass(room=1)
    assert not engine.controller.disabled, "it may fail as often as before"


def test_the_state_file_of_one_policy_is_never_anothers(recorder, tmp_path):
    path = tmp_path / "state.json"
    engine = make(policy=recorder, state=StateFile(path, 1e-9, {}))
    engine.waiting_queue += [Req(i, [1] * 40 + [100 + i] * 4) for i in range(3)]
    late = iter(range(900, 2000))

    def decode():
        for _ in range(4):
            for _ in range(3):
                engine.run_pass()
            engine.waiting_queue.append(Req(n := next(late), [1] * 40 + [n] * 4))
            engine.run_pass()
            engine.running_batch.reqs.pop(0)
        engine.run_pass()

    decode()
    heard = len(Recorder.heard)
    assert heard > 2
    for name in ("static", "ucb", "lpm"):
        switch(engine, name)
        decode()
        assert engine.controller._state is None
    engine.controller._memory.file_of(recorder).close()
    assert json.loads(path.read_text())["state"]["heard"] == heard
    assert [each.name for each in tmp_path.iterdir()] == ["state.json"]
    switch(engine, recorder)
    assert ("restored", heard) in Recorder.heard
    decode()
    engine.controller._state.close()
    assert json.loads(path.read_text())["state"]["heard"] > heard + 2


@pytest.mark.parametrize("give_state", [False, True])
def test_ranks_that_are_switched_together_decide_alike(monkeypatch, tmp_path, give_state, alone_afterwards):
    path = tmp_path / "state.json"
    policy = make(policy="ucb").controller.core.policy
    StateFile(path, 60, {})._write({**policy.snapshot(), "cells": ROWS, "thresholds": [4.0, None]})
    rng = random.Random(11)
    pair = Ranks(monkeypatch, StateFile(path, 60, {}) if give_state else None, exploration=0.5)
    for rank in pair.both:
        own(rank)
    number, loaded = 0, False
    for step in range(1500):
        given = {"max_wait_s": rng.choice([0, 0.4, 2])}, {"min_batch": 3}, {"exploration": 0.4}
        questions = [("policy", {"policy": rng.choice(ALL)}), ("config", rng.choice(given)), ("state", None)]
        questions = [question for question in questions if rng.random() < 0.06]

        def between(rank, questions=questions):
            assert all(ask(rank, *question)[0] == 200 for question in questions)

        arriving = []
        for _ in range(rng.randrange(3) if step < 1000 else 0):
            arriving.append((number, [rng.randrange(4)] * 4 * rng.randrange(4, 9) + [1000 + number] * 4))
            number += 1
        first, second = pair.step(arriving, rng.uniform(0.005, 0.05), between)
        assert first == second
        digests = [json.dumps(rank.controller.core.policy.snapshot()) for rank in pair.both]
        assert digests[0] == digests[1]
        loaded = loaded or "4.0" in digests[0]
        if rng.random() < 0.6 and first:
            gone = rng.choice(first)
            for rank in pair.both:
                rank.running_batch.reqs = [req for req in rank.running_batch.reqs if req.rid != gone]
    for rank in pair.both:
        assert rank.controller.failures == 0
    assert loaded or not give_state, "rank 1 has heard what rank 0 found in its file"


BAD = [
    ("policy", None, 'must be {"policy": NAME}'),
    ("policy", {"policy": 3}, 'must be {"policy": NAME}'),
    ("policy", {"policy": "ucb", "more": 1}, 'must be {"policy": NAME}'),
    ("policy", {"policy": "magic"}, "must be one of static, ucb, qlearning or package.module:Class, got 'magic'"),
    ("policy", {"policy": "no.such:Policy"}, "no.such:Policy cannot be imported"),
    ("config", None, "must be settings"),
    ("config", {}, "must be settings"),
    ("config", [1], "must be settings"),
    ("config", {"min_bach": 3}, "the body: unknown setting 'min_bach'; did you mean 'min_batch'?"),
    ("config", {"min_batch": -3}, "the body: min_batch must be an integer of at least 0, got -3"),
    ("config", {"min_batch": 5, "crowd": "many"}, "crowd must be an integer of at least 1, got 'many'"),
    ("config", {"chunk_size": 32}, "chunk_size cannot be changed by /feather/config; valid: depth_tolerance"),
    ("config", {"policy": "ucb"}, "policy cannot be changed by /feather/config"),
    ("config", {"min_batch": 5, "batch_bins": "1,2"}, "batch_bins cannot be changed"),
    ("config", {"a\nb\ud800": 1}, "unknown setting 'a b"),
]


@pytest.mark.parametrize(("do", "given", "message"), BAD)
def test_a_bad_body_is_refused_in_one_line_and_changes_nothing(do, given, message):
    engine = make(policy="ucb")
    before = (engine.controller.settings, engine.controller.core.policy)
    status, body = ask(engine, do, given)
    assert status == 400 and message in body["error"] and "\n" not in body["error"], body
    body["error"].encode()
    assert before == (engine.controller.settings, engine.controller.core.policy)


def test_a_failure_while_changing_is_answered_and_changes_nothing(monkeypatch, caplog):
    engine = make()
    engine.waiting_queue += [Req(i, [1] * 40 + [100 + i] * 4) for i in range(3)]
    engine.run_pass()

    def fail(*_):
        raise ZeroDivisionError("injected\nhere")

    monkeypatch.setattr(controller_module, "make_policy", fail)
    before = (engine.controller.settings, engine.controller.core.policy)
    for do, given in (("policy", {"policy": "ucb"}), ("config", {"min_batch": 9})):
        status, body = ask(engine, do, given)
        assert status == 500 and body["error"].startswith("ZeroDivisionError: injected here;")
    monkeypatch.setattr(engine.policy, "_validate_and_adjust_policy", fail, raising=False)
    assert ask(engine, "policy", {"policy": "lpm"})[0] == 500
    assert caplog.text.count("Traceback") == 3
    assert before == (engine.controller.settings, engine.controller.core.policy) and not engine.controller.disabled
    engine.run_pass()
    assert engine.controller.failures == 0


def test_without_feather_there_is_one_line():
    status, body = ask(SimpleNamespace(), "state")
    assert status == 404 and "--schedule-policy feather" in body["error"]


def test_sglangs_own_questions_are_sglangs():
    for rid in (None, "HEALTH_CHECK_1"):
        request = SimpleNamespace(rid=rid)
        assert runtime.around_get_internal_state(lambda *given: given, "scheduler", request) == ("scheduler", request)


def test_what_is_told_of_a_batch_that_runs():
    engine = make(slots=8, policy="ucb", min_batch=2)
    engine.waiting_queue += [Req(("a", i), [1] * 40 + [100 + i] * 4) for i in range(3)]
    engine.waiting_queue += [Req(("b", i), [2] * 20 + [200 + i] * 4) for i in range(4)]
    for _ in range(4):
        engine.run_pass()
    engine.waiting_queue.append(Req("new", [2] * 20 + [999] * 4))  # no pass has seen it yet
    said = state(engine)
    assert said["batch"] == {"requests": 3, "shared_tokens": 40, "held": 0}
    assert said["groups"] == [{"tokens": 20, "waiting": 5, "active": 0}] and said["waiting"] == 5
    assert said["best"]["rid"] == str(("b", 0)) and said["best"]["loses_tokens"] == 40
    assert (said["policy"], said["scheduling"], said["slots"], said["passes"]) == ("ucb", "feather", 8, 4)
    assert said["settings"]["min_batch"] == 2 and said["counts"]["added"] == 3 and said["fallback_policy"] == "fcfs"
    engine.running_batch.batch_is_full = True
    assert state(engine)["best"]["why"] == "the engine says that its batch is full"
    assert attached_to(engine) is engine.controller
