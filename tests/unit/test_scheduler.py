from __future__ import annotations

import gc
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from feather_sglang.cht import chunk_hashes
from feather_sglang.scheduling import BatchingPolicy, BatchState, FeatherScheduler, Settings, StaticPolicy, Stop

CHUNK = 4


def make(slots=64, **values) -> FeatherScheduler:
    return FeatherScheduler(Settings.parse({"chunk_size": CHUNK, **values}, "test"), slots)


def prompt(group: int, chunks: int, own: int, tail: int = 1) -> list[int]:
    """``chunks`` chunks of the group's prefix, then ``tail`` chunks of its own."""
    return [1000 * group + i for i in range(chunks * CHUNK)] + [10**6 + own] * (tail * CHUNK)


def arrive(scheduler, rid, tokens):
    scheduler.arrive(rid, chunk_hashes(tokens, CHUNK), len(tokens))


def run(scheduler, slots=64, budget=10**9, *, finish=True, most=1000):
    """Engine with instant prefill: each pass admits the whole plan. Returns the passes."""
    passes, running = [], []
    for _ in range(most):
        plan = scheduler.plan(slots - len(running), budget)
        scheduler.confirm(plan.order)
        scheduler._check()
        passes.append(plan.order)
        running += plan.order
        for rid in list(scheduler.computing):
            scheduler.progress(rid, None)
        if not plan.order and finish:
            if not running:
                return passes[:-1]
            scheduler.leave(running.pop(0))
    raise AssertionError("did not come to an end")


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=40), st.integers(1, 9), st.integers(1, 400))
def test_nothing_shared_is_exactly_fcfs(lengths, slots, budget):
    scheduler = make(slots)
    for rid, n in enumerate(lengths):
        arrive(scheduler, rid, [10**6 * (rid + 1) + i for i in range(n)])
    order = [rid for each in run(scheduler, slots, budget) for rid in each]
    assert order == list(range(len(lengths)))


def test_a_prefix_common_to_all_separates_nobody():
    scheduler = make()
    for rid, tail in enumerate([5, 1, 3, 2]):
        arrive(scheduler, rid, prompt(0, 20, rid, tail))
    assert run(scheduler)[:2] == [[0], [1, 2, 3]]


def test_the_first_member_is_the_one_that_waited_longest_whatever_its_length():
    scheduler = make()
    arrive(scheduler, "long", prompt(1, 50, 1))
    arrive(scheduler, "short", prompt(2, 1, 2))
    assert scheduler.plan(64, 10**9).order[0] == "long"


def test_interleaved_groups_are_served_one_after_the_other():
    scheduler = make(slots=64, min_batch=4)
    for i in range(10):
        for group in range(8):
            arrive(scheduler, (group, i), prompt(group + 1, 32, 100 * group + i))
    order = [rid for each in run(scheduler) for rid in each]
    assert len(order) == 80
    for start in range(0, 80, 10):
        assert len({group for group, _ in order[start : start + 10]}) == 1


def test_one_leader_goes_ahead_of_an_uncached_prefix():
    scheduler = make(min_batch=4)
    for i in range(8):
        arrive(scheduler, i, prompt(1, 32, i))
    arrive(scheduler, "stranger", prompt(2, 32, 99))
    plan = scheduler.plan(64, 10**9)
    scheduler.confirm(plan.order)
    assert plan.order == [0] and plan.stop is Stop.HELD  # the seven that follow outnumber min_batch
    assert scheduler.plan(64, 10**9).order == []  # not computed yet
    scheduler.confirm(())
    scheduler.progress(0, 31 * CHUNK)  # one chunk short of the shared prefix
    assert scheduler.plan(64, 10**9).order == []
    scheduler.confirm(())
    scheduler.progress(0, 32 * CHUNK)
    assert scheduler.plan(64, 10**9).order == [1, 2, 3, 4, 5, 6, 7]


def test_leaders_of_small_groups_go_together():
    """Pairs would otherwise be prefilled one leader a pass, slower than FCFS."""
    scheduler = make(min_batch=8)
    for i in range(2):
        for group in range(3):
            arrive(scheduler, (group, i), prompt(group + 1, 32, 10 * group + i))
    assert scheduler.plan(64, 10**9).order == [(0, 0), (1, 0), (2, 0)]


def test_stops_at_the_next_group_only_when_the_batch_is_worth_protecting():
    for members, expected in ((8, Stop.POLICY), (3, Stop.EMPTY)):
        scheduler = make(min_batch=8)
        for i in range(members):
            arrive(scheduler, i, prompt(1, 32, i))
        scheduler.confirm(scheduler.plan(64, 10**9).order)
        scheduler.progress(0, 10**9)
        arrive(scheduler, "other", prompt(2, 32, 99))
        plan = scheduler.plan(64, 10**9)
        scheduler.confirm(plan.order)
        assert plan.stop is expected
        assert ("other" in plan.order) == (members == 3)


def test_a_request_that_costs_little_depth_joins():
    scheduler = make(min_batch=2, depth_tolerance=4)
    for i in range(3):
        arrive(scheduler, i, prompt(1, 32, i))
    arrive(scheduler, "near", prompt(1, 28, 50))
    arrive(scheduler, "far", prompt(1, 27, 51))
    arrive(scheduler, "other", prompt(2, 27, 52))
    scheduler.confirm(scheduler.plan(64, 10**9).order)
    scheduler.progress(0, 10**9)
    plan = scheduler.plan(64, 10**9)
    assert plan.order[:3] == [1, 2, "near"]
    # "near" took the common depth to 28, and 27 is one below that
    assert plan.order[3:] == ["far"] and plan.stop is Stop.POLICY


def test_a_batch_is_never_empty_while_somebody_waits():
    class Never(BatchingPolicy):
        def admit(self, state):
            return False

    scheduler = FeatherScheduler(Settings(chunk_size=CHUNK), 8, Never())
    for i in range(5):
        arrive(scheduler, i, prompt(i, 3, i))
    order = [rid for each in run(scheduler) for rid in each]
    assert order == [0, 1, 2, 3, 4]


def test_nobody_is_passed_over_more_than_the_bound():
    scheduler = make(slots=8, min_batch=2, max_passes=20)
    for i in range(4):
        arrive(scheduler, i, prompt(1, 32, i))
    arrive(scheduler, "cold", prompt(2, 32, 10**4))
    running = []
    n = 0
    for n in range(60):
        if not scheduler.unchanged():
            plan = scheduler.plan(8 - len(running), 10**9)
            scheduler.confirm(plan.order)
            running += plan.order
            if "cold" in plan.order:
                break
        for rid in list(scheduler.computing):
            scheduler.progress(rid, None)
        if len(running) > 4:  # the hot group never stops coming
            scheduler.leave(running.pop(0))
        arrive(scheduler, ("hot", n), prompt(1, 32, 100 + n))
    assert 15 <= n <= 21, n


def test_the_bound_holds_where_every_slot_is_taken_by_later_arrivals():
    scheduler = make(slots=3, min_batch=2, max_passes=20)
    for i in range(3):
        arrive(scheduler, i, prompt(1, 32, i))
    arrive(scheduler, "cold", prompt(2, 32, 10**4))
    running, order = [], []
    for n in range(100):
        for i in range(3):  # more come than go
            arrive(scheduler, ("hot", n, i), prompt(1, 32, 100 + 3 * n + i))
        plan = scheduler.plan(3 - len(running), 10**9)
        scheduler.confirm(plan.order)
        order += plan.order
        running += plan.order
        if "cold" in order:
            break
        for rid in list(scheduler.computing):
            scheduler.progress(rid, None)
        if len(running) == 3:
            scheduler.leave(running.pop(0))
    assert "cold" in order and 20 <= len(order) <= 26, order


def test_the_bound_holds_while_nothing_changes():
    scheduler = make(min_batch=2, max_passes=30)
    for i in range(4):
        arrive(scheduler, i, prompt(1, 32, i))
    arrive(scheduler, "cold", prompt(2, 32, 99))
    for _ in range(2):
        scheduler.confirm(scheduler.plan(64, 10**9).order)
        scheduler.progress(0, 10**9)
    for rid in list(scheduler.computing):
        scheduler.progress(rid, None)
    scheduler.confirm(scheduler.plan(64, 10**9).order)
    calm = 0
    while scheduler.unchanged():
        calm += 1
        assert calm < 100
    assert scheduler.plan(64, 10**9).order == ["cold"] and 25 <= calm <= 31


def test_the_bound_in_seconds_holds_in_busy_passes_and_in_idle_ones():
    scheduler = make(slots=8, min_batch=2, max_passes=10**9, max_wait_s=20)
    scheduler.tick(1000.0)
    for i in range(4):
        arrive(scheduler, i, prompt(1, 32, i))
    for number in range(2):
        arrive(scheduler, ("cold", number), prompt(2 + number, 32, 10**4))
    running, served = [], {}
    for n in range(60):
        scheduler.tick(1000.0 + n)
        scheduler.tick(0.0)  # a clock that goes backwards changes nothing
        if not scheduler.unchanged():
            plan = scheduler.plan(8 - len(running), 10**9)
            scheduler.confirm(plan.order)
            running += plan.order
            served.update(dict.fromkeys(plan.order, n))
            assert n != 20 or plan.order[0] == ("cold", 0), "first, whatever the policy says"
        for rid in list(scheduler.computing):
            scheduler.progress(rid, None)
        if len(running) > 4:  # the hot group never stops coming, but for some quiet seconds before the bound
            scheduler.leave(running.pop(0))
        if not 14 < n < 24:
            arrive(scheduler, ("hot", n), prompt(1, 32, 100 + n))
    assert served["cold", 0] == 20 and served["cold", 1] <= 21


def test_what_the_engine_refuses_waits_on_in_its_old_place():
    scheduler = make()
    for i in range(4):
        arrive(scheduler, i, prompt(i, 8, i))
    plan = scheduler.plan(64, 10**9)
    assert plan.order == [0, 1, 2, 3]
    scheduler.confirm([0])
    scheduler._check()
    assert scheduler.plan(64, 10**9).order == [1, 2, 3]


def test_slots_and_tokens_bound_the_plan():
    scheduler = make()
    for i in range(10):
        arrive(scheduler, i, prompt(i, 8, i))
    plan = scheduler.plan(3, 10**9)
    assert plan.order == [0, 1, 2] and plan.stop is Stop.SLOTS
    plan = scheduler.plan(64, 9 * CHUNK + 1)
    assert plan.order == [0, 1] and plan.stop is Stop.TOKENS


def test_unchanged_until_anything_happens():
    def settled():
        scheduler = make(min_batch=2)
        for i in range(3):
            arrive(scheduler, i, prompt(1, 32, i))
        arrive(scheduler, "x", prompt(2, 32, 77))
        for _ in range(3):
            scheduler.confirm(scheduler.plan(64, 10**9).order)
            for rid in list(scheduler.computing):
                scheduler.progress(rid, None)
        scheduler.confirm(scheduler.plan(64, 10**9).order)
        assert scheduler.unchanged()
        return scheduler

    for event in (
        lambda s: arrive(s, "new", prompt(3, 1, 5)),
        lambda s: s.leave(1),
        lambda s: s.leave("x"),
        lambda s: s.retract(2),
        lambda s: s.admit("x"),
    ):
        scheduler = settled()
        event(scheduler)
        assert not scheduler.unchanged()


def test_retracted_and_aborted_requests():
    scheduler = make(min_batch=2)
    for i in range(4):
        arrive(scheduler, i, prompt(1, 8, i))
    scheduler.confirm(scheduler.plan(64, 10**9).order)
    scheduler.progress(0, 10**9)
    scheduler.confirm(scheduler.plan(64, 10**9).order)
    scheduler.retract(1)
    scheduler.leave(3)
    scheduler.leave(0)
    scheduler._check()
    for unknown in (scheduler.leave, scheduler.retract, scheduler.admit):
        with pytest.raises(KeyError):
            unknown("nobody")
    with pytest.raises(ValueError):
        arrive(scheduler, 1, [1])
    assert scheduler.plan(64, 10**9).order[0] == 1


def test_an_aborted_leader_lets_its_followers_go():
    scheduler = make(min_batch=4)
    for i in range(8):
        arrive(scheduler, i, prompt(1, 32, i))
    scheduler.confirm(scheduler.plan(64, 10**9).order)
    scheduler.leave(0)
    assert scheduler.plan(64, 10**9).order == [1]  # the next leader


@pytest.mark.parametrize("seed", range(6))
def test_random_traffic_is_served_completely_and_the_same_on_every_rank(seed):
    rng = random.Random(seed)
    floor = rng.choice([1, 3, 6])
    ranks = [make(slots=6, min_batch=floor, max_passes=25) for _ in range(2)]
    waiting, running, served, n = set(), [], [], 0
    for turn in range(600):
        while turn < 400 and rng.random() < 0.5:
            tokens = prompt(rng.randrange(4), rng.randrange(6), n, rng.randrange(3))
            for each in ranks:
                arrive(each, n, tokens)
            waiting.add(n)
            n += 1
        if turn % 7 == 3 and waiting:
            gone = rng.choice(sorted(waiting))
            waiting.discard(gone)
            for each in ranks:
                each.leave(gone)
            served.append(gone)
        if turn % 11 == 5 and running:
            back = running.pop(rng.randrange(len(running)))
            waiting.add(back)
            for each in ranks:
                each.retract(back)
        calm = [each.unchanged() for each in ranks]
        assert calm[0] == calm[1]
        if not calm[0]:
            plans = [each.plan(6 - len(running), 40) for each in ranks]
            assert plans[0] == plans[1]
            order = plans[0].order
            assert order or running or not waiting, "stopped on an empty batch"
            taken = order[: rng.randrange(len(order) + 1)] if running else order
            for each in ranks:
                each.confirm(taken)
                each._check()
            running += taken
            waiting -= set(taken)
        for rid in list(ranks[0].computing):
            tokens = rng.choice([CHUNK, 10**9])
            for each in ranks:
                each.progress(rid, tokens)
        if running and rng.random() < 0.6:
            done = running.pop(rng.randrange(len(running)))
            for each in ranks:
                each.leave(done)
            served.append(done)
    while running or waiting:
        plan = ranks[0].plan(6 - len(running), 10**6)
        ranks[0].confirm(plan.order)
        running += plan.order
        waiting -= set(plan.order)
        for rid in list(ranks[0].computing):
            ranks[0].progress(rid, 10**9)
        done = running.pop(0)
        ranks[0].leave(done)
        served.append(done)
    assert sorted(served) == list(range(n))


def test_the_static_rule():
    policy = StaticPolicy(Settings(depth_tolerance=4, crowd=10, crowd_tolerance=6, min_batch=8), 64)

    def admit(batch, delta, sharing, related, held):
        return policy.admit(BatchState(batch, delta, sharing, related, held))

    assert admit(100, 4, 1, True, 0) and not admit(100, 5, 1, True, 0)
    assert admit(100, 6, 10, True, 0) and not admit(100, 6, 9, True, 0) and not admit(100, 7, 10, True, 0)
    assert admit(7, 50, 1, False, 0) and not admit(8, 50, 1, False, 0)
    assert admit(8, 0, 1, False, 0), "nothing to protect"
    assert not admit(1, 0, 1, False, 7) and admit(1, 0, 1, False, 6)
    assert not StaticPolicy(Settings(), 64).admit(BatchState(16, 9, 1, False, 0))
    assert StaticPolicy(Settings(), 64).admit(BatchState(15, 9, 1, False, 0))
    assert not StaticPolicy(Settings(), 4).admit(BatchState(8, 9, 1, False, 0))


def test_a_batch_is_protected_where_what_it_shares_outweighs_the_weights():
    def admit(batch, depth, slots=256, **values):
        values = {"weight_tokens": 64 * 100, **values}
        return StaticPolicy(Settings(**values), slots).admit(BatchState(batch, depth, 1, False, 0, depth))

    assert admit(99, 4) and not admit(100, 4), "4 x 100 chunks of weights over 4 shared chunks"
    assert admit(63, 100) and not admit(64, 100), "deep enough: a quarter of the slots"
    assert admit(255, 1) and not admit(256, 1), "slots bound it"
    assert not admit(64, 4, weight_tokens=0) and not admit(8, 4, min_batch=8), "unknown, or set by the operator"


def test_the_scheduler_tells_the_policy_what_the_batch_shares():
    seen = []

    class Seeing(StaticPolicy):
        def admit(self, state):
            seen.append((state.batch, state.delta, state.depth))
            return True

        def admit_run(self, state, holds):
            return BatchingPolicy.admit_run(self, state, holds)

    scheduler = FeatherScheduler(Settings(), 8, Seeing(Settings(), 8))
    for rid, hashes in enumerate(((1, 2, 3), (1, 2, 4), (1, 5, 6))):
        scheduler.arrive(rid, hashes, 192)
    scheduler.plan(1, 1000)
    scheduler.confirm([0])
    scheduler.progress(0, None)
    scheduler.plan(2, 1000)
    assert seen == [(1, 0, 3), (2, 1, 2)]


@given(
    st.integers(1, 40), st.integers(0, 9), st.integers(1, 30), st.booleans(), st.lists(st.integers(0, 3), max_size=12)
)
def test_deciding_a_run_at_once_is_deciding_one_by_one(batch, delta, sharing, related, holds):
    policy = StaticPolicy(Settings(), 64)
    state = BatchState(batch, delta, sharing, related, 0)
    assert policy.admit_run(state, holds) == BatchingPolicy.admit_run(policy, state, holds)


def test_a_million_operations_leave_no_more_behind_than_a_hundred_thousand():
    scheduler = FeatherScheduler(Settings(min_batch=2), 64)
    rng = random.Random(5)
    running, waiting, sizes, number, done = [], [], [], 0, 0
    for target in (100_000, 1_000_000):
        while done < target:
            while len(waiting) < 500:
                group = rng.randrange(8)
                scheduler.arrive(number, [group * 10, group * 10 + 1, 1000 + number], 3 * 64)
                waiting.append(number)
                number, done = number + 1, done + 1
            for _ in range(40):  # aborts, from anywhere
                at = rng.randrange(len(waiting))
                waiting[at], waiting[-1] = waiting[-1], waiting[at]
                scheduler.leave(waiting.pop())
            plan = scheduler.plan(64 - len(running), 10**9).order
            scheduler.confirm(plan)
            chosen = set(plan)
            waiting = [rid for rid in waiting if rid not in chosen]
            for rid in plan:
                scheduler.progress(rid, None)
            running += plan
            for rid in running[::2]:
                scheduler.leave(rid)
            back = running[1::4]  # retracted
            for rid in back:
                scheduler.retract(rid)
            waiting += back
            gone = set(running[::2] + back)
            running = [rid for rid in running if rid not in gone]
            done += 42 + 3 * len(plan)
        gc.collect()
        sizes.append((scheduler.tree.num_heap_entries, len(scheduler._queue._listed), len(gc.get_objects())))
    scheduler._check()
    for early, late in zip(*sizes, strict=True):
        assert late < early + 1500, sizes  # 900,000 operations later; some 2,000 entries and 10,000 objects are alive
