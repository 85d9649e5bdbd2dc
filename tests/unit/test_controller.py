"""The controller against stand-ins for the few SGLang attributes it reads; everything else runs on the real server."""

from __future__ import annotations

import json
import logging
import random
import time
from array import array
from types import SimpleNamespace
from typing import ClassVar

import pytest
from counting import calls_during

from feather_sglang.engines.sglang.admission import (
    around_add_one_req,
    around_calc_priority,
    around_get_new_batch_prefill,
)
from feather_sglang.engines.sglang.controller import Controller, controller_of, namespace_of
from feather_sglang.scheduling import FeatherScheduler, Settings, StaticPolicy
from feather_sglang.scheduling.state_file import StateFile


class Req:
    def __init__(self, rid, tokens, **key):
        self.rid, self.origin_input_ids, self.output_ids, self.prefix_len = rid, array("q", tokens), [], 0
        self.__dict__.update(key)

    def __repr__(self):
        return f"<{self.rid}>"


class Engine:
    """SGLang's scheduler, reduced to its queue, its batch and a pass that admits whom the policy puts first."""

    def __init__(self, slots=8, controller=Controller, state=None, **settings):
        self.waiting_queue, self.chunked_req, self.tree_cache = [], None, None
        self.running_batch = SimpleNamespace(reqs=[], batch_is_full=False)
        self.max_running_requests, self.max_prefill_tokens, self.chunked_prefill_size = slots, 10**6, None
        self.max_total_num_tokens = 10**6
        self.policy = SimpleNamespace()
        self.own_passes = 0
        chosen = Settings.parse({"chunk_size": 4, "min_batch": 2, **settings}, "test")
        self.controller = controller(self, chosen, 0, state)
        self.controller.attach()

    def run_pass(self, room=10**9):
        self.finish_prefills()
        return around_get_new_batch_prefill(Engine.prefill, self, room, running_batch=self.running_batch)[0] or []

    def prefill(self, room, running_batch):
        if running_batch.batch_is_full or not self.waiting_queue:
            return None, running_batch
        around_calc_priority(Engine.own_policy, self.policy, self.waiting_queue, running_batch)
        chunked = [self.chunked_req] if self.chunked_req else []
        adder = SimpleNamespace(can_run_list=list(chunked), running_batch=running_batch)
        for req in self.waiting_queue:
            if len(adder.can_run_list) + len(running_batch.reqs) >= self.max_running_requests:
                break
            if around_add_one_req(Engine.add_one, adder, req, room) != "continue":
                break
        self.waiting_queue = [req for req in self.waiting_queue if req not in adder.can_run_list]
        admitted = adder.can_run_list[len(chunked) :]
        running_batch.reqs += admitted
        return admitted or None, running_batch

    def own_policy(self, *_):
        Engine.last.own_passes += 1

    @staticmethod
    def add_one(adder, req, room):
        if len(adder.can_run_list) >= room:
            return "no token"
        adder.can_run_list.append(req)
        return "continue"

    def finish_prefills(self):
        Engine.last = self
        for req in self.running_batch.reqs:
            req.output_ids.append(0)


def agrees(engine):
    core = engine.controller._core
    core._check()
    assert list(core.waiting) == sorted(core.waiting, key=lambda r: core.tree.note(r).seq)
    assert set(core.waiting) == set(engine.waiting_queue)
    engine.controller._check_order(engine.waiting_queue)
    assert set(core.active) == set(engine.running_batch.reqs)


@pytest.mark.parametrize("seed", range(5))
def test_it_follows_whatever_happens_between_passes(seed):
    rng = random.Random(seed)
    engine, n, served = Engine(), 0, []
    for _ in range(400):
        for _ in range(rng.randrange(3)):
            engine.waiting_queue.append(Req(n, [rng.randrange(3)] * 8 + [n] * rng.randrange(9)))
            n += 1
        if engine.waiting_queue and rng.random() < 0.2:  # aborts, from anywhere in the queue
            for _ in range(min(len(engine.waiting_queue), rng.randrange(4))):
                engine.waiting_queue.pop(rng.randrange(len(engine.waiting_queue)))
        running = engine.running_batch.reqs
        if running and rng.random() < 0.2:  # retracted
            back = running.pop(rng.randrange(len(running)))
            engine.waiting_queue.append(back)
        if running and rng.random() < 0.5:
            served.append(running.pop(rng.randrange(len(running))))
        was_waiting, was_running = list(engine.waiting_queue), list(running)
        admitted = engine.run_pass(rng.choice([0, 1, 10**9]) if running else 10**9)
        assert admitted or was_running or not was_waiting, "stopped on an empty batch"
        if not engine.running_batch.batch_is_full and engine.waiting_queue:
            agrees(engine)
    assert engine.controller.failures == 0 and engine.own_passes == 0 and served


def test_the_plan_goes_first_and_the_rest_keeps_its_order():
    engine = Engine(slots=40)
    for i in range(30):
        engine.waiting_queue.append(Req(i, [i % 3] * 40 + [100 + i] * 4))
    arrived = list(engine.waiting_queue)
    engine.run_pass()
    assert [r.rid for r in engine.running_batch.reqs] == [0]
    engine.run_pass(room=4)  # SGLang takes four of the nine that are planned
    assert [r.rid for r in engine.running_batch.reqs] == [0, 3, 6, 9, 12]
    assert [r.rid for r in engine.waiting_queue[:5]] == [15, 18, 21, 24, 27]
    engine.waiting_queue.remove(arrived[18])  # aborted, out of those in front
    engine.waiting_queue.append(engine.running_batch.reqs.pop())  # 12 is retracted
    engine.run_pass(room=1)
    engine.controller._check_order(engine.waiting_queue)
    strangers = [r.rid for r in engine.waiting_queue if r.rid % 3]
    assert strangers == sorted(strangers)
    engine.waiting_queue.reverse()  # somebody else sorts the queue
    while engine.run_pass(room=3) or engine.running_batch.reqs:
        if len(engine.running_batch.reqs) > 3:
            del engine.running_batch.reqs[:3]
        elif not engine.waiting_queue:
            break
        else:
            engine.running_batch.reqs.clear()
    assert not engine.waiting_queue and engine.controller.failures == 0


def test_an_idle_pass_is_skipped_and_asks_sglang_for_nothing():
    engine = Engine()
    for i in range(3):
        engine.waiting_queue.append(Req(("a", i), [1] * 40 + [100 + i] * 4))
    engine.waiting_queue.append(Req("b", [2] * 40))
    for _ in range(4):
        engine.run_pass()
    assert [r.rid for r in engine.running_batch.reqs] == [("a", 0), ("a", 1), ("a", 2)]
    calls = []

    def spy(scheduler, running_batch):
        calls.append(running_batch.batch_is_full)
        return None, running_batch

    around_get_new_batch_prefill(spy, engine, running_batch=engine.running_batch)
    assert calls == [True] and engine.running_batch.batch_is_full is False
    engine.waiting_queue.append(Req("c", [1] * 40))
    around_get_new_batch_prefill(spy, engine, running_batch=engine.running_batch)
    assert calls == [True, False], "an arrival opens a new pass"
    assert Controller.in_pass is None


def test_an_idle_pass_costs_the_same_however_many_wait():
    def calls(waiting):
        engine = Engine()
        engine.waiting_queue += [Req(("a", i), [1] * 40 + [100 + i] * 4) for i in range(3)]
        engine.waiting_queue += [Req(("b", i), [2] * 40 + [1000 + i] * 4) for i in range(waiting)]
        for _ in range(5):
            engine.run_pass()
        idle = []
        count = calls_during(lambda: idle.append(engine.controller.nothing_to_do(engine.running_batch)))
        assert idle == [True]
        return count

    assert calls(20) == calls(2000) < 40


class Recorder(StaticPolicy):
    """Static, and keeps what it is told."""

    heard: ClassVar[list] = []
    fail = False

    def learn(self, interval, reward, seconds):
        if Recorder.fail:
            raise RuntimeError("broken on purpose")
        Recorder.heard.append((interval, reward, seconds))

    def snapshot(self):
        return {"heard": len(Recorder.heard)}

    def restore(self, data):
        Recorder.heard.append(("restored", data["heard"]))


@pytest.fixture
def recorder():
    Recorder.heard.clear()
    Recorder.fail = False
    return f"{__name__}:Recorder"


def test_a_policy_hears_how_fast_its_batch_decoded_once_the_batch_changes(recorder):
    engine = Engine(policy=recorder)
    engine.waiting_queue += [Req(i, [1] * 40 + [100 + i] * 4) for i in range(3)]
    for _ in range(6):
        engine.run_pass()
    assert engine.controller._core.interval == 2, "a leader, then its followers"
    assert not Recorder.heard, "nobody has joined a batch that decodes"
    engine.waiting_queue.append(Req(9, [1] * 40 + [900] * 4))
    engine.run_pass()
    engine.run_pass()
    [(interval, reward, seconds)] = Recorder.heard
    assert interval == 2 and reward > 0 and seconds > 0
    assert engine.controller._core.interval == 3


def test_a_static_policy_is_not_measured_for():
    assert Engine().controller._meter is None


def test_what_was_learned_survives_a_failure_and_a_policy_that_fails_is_no_end(recorder, caplog):
    engine = Engine(policy=recorder)
    engine.waiting_queue += [Req(i, [1] * 40 + [100 + i] * 4) for i in range(3)]
    for _ in range(6):
        engine.run_pass()
    Recorder.fail = True
    engine.waiting_queue.append(Req(9, [1] * 40 + [900] * 4))
    engine.run_pass()
    engine.run_pass()
    assert engine.controller.failures == 1 and "while learning" in caplog.text
    assert ("restored", 0) in Recorder.heard
    engine.waiting_queue.append(Req(10, [1] * 40 + [901] * 4))
    for _ in range(3):  # the new state learns first which prefixes are computed
        engine.run_pass()
    engine.waiting_queue.append(Req(11, [2] * 40))
    engine.run_pass()
    agrees(engine)
    assert len(engine.running_batch.reqs) >= 5


def test_a_policy_that_learns_nothing_leaves_a_state_file_alone(tmp_path):
    path = tmp_path / "state.json"
    path.write_text('{"version": 1, "identity": {}, "state": {"policy": "ucb"}}')
    Engine(state=StateFile(path, 60, {}))
    assert [each.name for each in tmp_path.iterdir()] == ["state.json"]


def test_the_state_is_loaded_at_start_and_saved_while_learning(recorder, tmp_path):
    path = tmp_path / "state.json"
    for heard in (1, 2):
        engine = Engine(policy=recorder, state=StateFile(path, 1e-9, {}))
        engine.waiting_queue += [Req(i, [1] * 40 + [100 + i] * 4) for i in range(3)]
        for number in range(6):
            engine.run_pass()
            engine.run_pass()
            engine.run_pass()
            engine.waiting_queue.append(Req(("late", number), [1] * 40 + [900 + number] * 4))
            engine.run_pass()
            engine.running_batch.reqs.pop(0)
        engine.run_pass()
        engine.controller._state.close()
        assert json.loads(path.read_text())["state"]["heard"] > 2
        assert (heard == 2) == any(entry[0] == "restored" for entry in Recorder.heard)


class Broken(FeatherScheduler):
    """Raises in one of its methods. Subclassed, not patched: compiled classes cannot be patched."""

    where = ""

    def plan(self, slots, token_budget):
        self.fail("plan")
        return super().plan(slots, token_budget)

    def confirm(self, admitted):
        self.fail("confirm")
        super().confirm(admitted)

    def unchanged(self):
        self.fail("unchanged")
        return super().unchanged()

    def leave(self, rid):
        self.fail("leave")
        super().leave(rid)

    def arrive(self, rid, hashes, num_tokens):
        self.fail("arrive")
        super().arrive(rid, hashes, num_tokens)

    def fail(self, where):
        if where == Broken.where:
            raise ZeroDivisionError("injected")


class BrokenController(Controller):
    def _new_core(self):
        return Broken(self._settings, self._scheduler.max_running_requests)


@pytest.fixture
def break_in(monkeypatch):
    yield lambda where: monkeypatch.setattr(Broken, "where", where)


def test_a_failure_is_logged_once_hands_over_and_recovers(caplog, break_in):
    engine = Engine(controller=BrokenController)
    for i in range(6):
        engine.waiting_queue.append(Req(i, [i] * 12))
    with caplog.at_level(logging.INFO):
        break_in("plan")
        engine.run_pass(room=1)
        engine.run_pass(room=1)
        break_in("")
    assert engine.own_passes == 2 and engine.controller.failures == 2
    assert caplog.text.count("Traceback") == 1 and len(engine.running_batch.reqs) == 2
    engine.run_pass(room=1)  # state is built anew from what SGLang holds
    assert engine.own_passes == 2 and len(engine.running_batch.reqs) == 3
    agrees(engine)


def test_it_gives_up_after_the_configured_number_of_failures(break_in):
    engine = Engine(controller=BrokenController, max_failures=3)
    engine.waiting_queue += [Req(i, [i] * 12) for i in range(5)]
    break_in("plan")
    for failures in (1, 2, 3):
        assert not engine.controller.disabled
        engine.run_pass(room=1)
        assert engine.controller.failures == failures
    assert engine.controller.disabled


def test_a_failure_does_not_make_everybody_overdue(break_in, monkeypatch):
    engine = Engine(controller=BrokenController, max_wait_s=5.0)
    engine.waiting_queue += [Req(i, [i] * 12) for i in range(5)]
    monkeypatch.setattr(time, "monotonic", lambda: 1e9)
    break_in("plan")
    engine.run_pass(room=1)
    break_in("")
    engine.run_pass(room=1)
    core = engine.controller._core
    assert all(core.tree.note(req).since_s == core.now_s > 0 for req in engine.waiting_queue)


def test_failures_of_ever_new_texts_do_not_fill_the_log(break_in, caplog, monkeypatch):
    engine = Engine(controller=BrokenController, max_failures=1000)
    numbers = iter(range(1000))

    def fail(self, where):
        raise ValueError(f"failure {next(numbers)}")

    monkeypatch.setattr(Broken, "fail", fail)
    for i in range(50):
        engine.waiting_queue.append(Req(i, [i] * 12))
        engine.run_pass(room=1)
    assert caplog.text.count("Traceback") == 20 and engine.controller.failures >= 50


@pytest.mark.parametrize("where", ["unchanged", "confirm", "plan", "leave", "arrive"])
def test_failures_anywhere_never_reach_sglang_and_end_in_giving_up(where, break_in, caplog):
    engine = Engine(controller=BrokenController)
    break_in(where)
    served = 0
    for i in range(60):
        engine.waiting_queue.append(Req(i, [i] * 12))
        engine.run_pass()
        while len(engine.running_batch.reqs) > 1:
            engine.running_batch.reqs.pop(0)
            served += 1
    assert served + len(engine.running_batch.reqs) + len(engine.waiting_queue) == 60
    assert engine.controller.disabled and controller_of(engine) is None
    assert caplog.text.count("is off until the server is restarted") == 1
    assert Controller.in_pass is None


def test_a_failure_while_the_queue_is_reordered_loses_nobody(caplog):
    engine = Engine(slots=40)
    for i in range(30):
        engine.waiting_queue.append(Req(i, [i % 3] * 40 + [100 + i] * 4))
    engine.run_pass()
    engine.run_pass(room=2)  # leaves planned ones in front
    before = set(engine.waiting_queue)
    engine.waiting_queue.append(engine.running_batch.reqs.pop())  # so that the next plan is another one
    before.add(engine.waiting_queue[-1])
    del engine.waiting_queue[1]._feather_place
    engine.run_pass(room=0)
    assert engine.controller.failures == 1 and engine.own_passes == 1
    assert set(engine.waiting_queue) == before and len(engine.waiting_queue) == len(before)
    engine.run_pass()
    assert engine.controller.failures == 1


def test_an_offer_that_cannot_be_judged_goes_to_sglang(caplog):
    engine = Engine()
    engine.waiting_queue += [Req(i, [i] * 12) for i in range(3)]
    Engine.last = engine
    around_calc_priority(Engine.own_policy, engine.policy, engine.waiting_queue, engine.running_batch)
    answer = around_add_one_req(lambda adder, req: "sglang's answer", SimpleNamespace(), Req("x", [1]))
    assert answer == "sglang's answer" and engine.controller.failures == 1 and Controller.in_pass is None


def test_kv_that_sglang_keeps_apart_is_kept_apart():
    plain = namespace_of(Req(0, []))
    assert plain == "" == namespace_of(Req(0, [], lora_id=None, extra_key=None, cache_salt=None))
    keys = [{}, {"lora_id": "x"}, {"extra_key": "x"}, {"cache_salt": "x"}, {"lora_id": "x", "cache_salt": "x"}]
    assert len({namespace_of(Req(0, [], **key)) for key in keys}) == len(keys)
    engine = Engine()
    for i, key in enumerate(keys):
        engine.waiting_queue.append(Req(i, [7] * 40, **key))
    engine.run_pass()
    assert len(engine.running_batch.reqs) == len(keys), "nobody waits for a prefix that it cannot share"


def test_prompts_of_embeddings_share_nothing():
    engine = Engine()
    for i in range(4):
        engine.waiting_queue.append(Req(i, [1] * 40, input_embeds=[[0.0]]))
    engine.run_pass()
    assert len(engine.running_batch.reqs) == 4


def test_followers_go_as_soon_as_a_chunk_of_the_leader_is_cached():
    engine = Engine()
    engine.waiting_queue += [Req(i, [1] * 40 + [100 + i] * 40) for i in range(4)]
    engine.run_pass()
    leader = engine.running_batch.reqs.pop()
    engine.chunked_req = leader  # a chunked prefill is outside the batch
    around_get_new_batch_prefill(Engine.prefill, engine, 9, running_batch=engine.running_batch)
    assert len(engine.waiting_queue) == 3
    leader.prefix_len = 40
    around_get_new_batch_prefill(Engine.prefill, engine, 9, running_batch=engine.running_batch)
    assert not engine.waiting_queue


def test_a_group_whose_requests_end_with_their_prefill_stays_together():
    engine = Engine(slots=2)
    shared = [7] * 32
    engine.waiting_queue = [
        Req(0, [*shared, 1]),
        Req("stranger", [9] * 32),
        *(Req(number, [*shared, *[number] * 4]) for number in (1, 2)),
    ]
    order = []
    for _ in range(6):
        admitted = engine.run_pass()
        order.append([req.rid for req in admitted])
        for req in admitted:
            req.output_ids.append(5)
        engine.running_batch.reqs = []
    assert order[:3] == [[0], [1, 2], ["stranger"]] and engine.controller.failures == 0


def test_outputs_of_who_left_take_room_in_the_cache():
    engine = Engine()
    engine.waiting_queue = [Req(0, [7] * 8)]
    [req] = engine.run_pass()
    req.output_ids += [5] * 3
    engine.running_batch.reqs = []
    engine.waiting_queue = [Req(1, [9] * 8)]
    engine.run_pass()
    assert engine.controller.core._warm._computed == 8 + 3 + 8
