"""Groups that leave the batch before all of them were served."""

from __future__ import annotations

from test_scheduler import CHUNK, arrive, prompt

from feather_sglang.scheduling import FeatherScheduler, Settings
from feather_sglang.scheduling.arrivals import Ticket
from feather_sglang.scheduling.warm import Warm, WarmRequests

PREFIX = 8
TOKENS = (PREFIX + 1) * CHUNK
SLOTS = 4


def make(kv_tokens=10**6, **values):
    settings = Settings.parse({"chunk_size": CHUNK, "min_batch": SLOTS, **values}, "test")
    return FeatherScheduler(settings, SLOTS, kv_tokens=kv_tokens)


def come(scheduler, group, numbers):
    for number in numbers:
        arrive(scheduler, (group, number), prompt(group + 1, PREFIX, 100 * group + number))


def serve(scheduler):
    """A pass; what it admits is prefilled."""
    order = scheduler.plan(SLOTS - scheduler.tree.num_active, 10**9).order
    scheduler.confirm(order)
    scheduler._check()
    for rid in order:
        scheduler.progress(rid, None)
    return order


def everybody_leaves(scheduler):
    for rid in list(scheduler.active):
        scheduler.leave(rid)
        scheduler._check()


def half_served(kv_tokens=10**6):
    """Four of a group of seven have run and left together; "old" has waited longer than the three."""
    scheduler = make(kv_tokens)
    come(scheduler, 0, [0])
    arrive(scheduler, "old", prompt(9, PREFIX, 10**4))
    come(scheduler, 0, range(1, 7))
    assert serve(scheduler) == [(0, 0)]
    assert serve(scheduler) == [(0, 1), (0, 2), (0, 3)]
    everybody_leaves(scheduler)
    return scheduler


def test_what_is_left_of_a_group_follows_it_though_another_waits_longer():
    scheduler = half_served()
    upcoming = scheduler.upcoming()
    assert upcoming.candidate.rid == (0, 4) and upcoming.must
    # In one pass, since their prefix is computed; then who has waited longest, for the batch is small.
    assert serve(scheduler) == [(0, 4), (0, 5), (0, 6), "old"]


def test_where_nothing_is_known_of_the_cache_the_longest_waiting_is_next():
    scheduler = half_served(kv_tokens=0)
    assert len(scheduler._warm) == 0
    assert scheduler.upcoming().candidate.rid == "old"
    assert serve(scheduler)[0] == "old"


def test_how_long_a_prefix_is_taken_for_cached():
    warm, ticket = WarmRequests(100), Ticket("a", 7, 0, 0.0, 64)
    warm.computed(1000)
    warm.add(ticket, 3)
    warm.computed(99)
    assert warm.get(ticket) == warm.first(lambda rid: False) == Warm(ticket, 3, 1000)
    assert warm.first(lambda rid: rid == "a") is None and len(warm) == 1
    warm.computed(1)
    assert warm.get(ticket) is None and len(warm) == 1
    assert warm.first(lambda rid: False) is None and len(warm) == 0
    warm.add(ticket, 3)
    warm.discard([ticket, ticket])
    assert len(warm) == 0


def test_prompts_and_outputs_push_a_prefix_out_of_the_cache():
    scheduler = half_served(kv_tokens=TOKENS + 5)
    scheduler.plan(SLOTS, 10**9)
    scheduler.confirm(["old"])  # the engine's choice
    scheduler.leave("old", 4)
    assert scheduler.upcoming().candidate.rid == (0, 4)
    come(scheduler, 5, [0])
    scheduler.admit((5, 0))
    scheduler.leave((5, 0), 1)
    assert scheduler._warm.first(lambda rid: False) is None


def test_what_is_cached_costs_none_of_the_tokens_of_a_prefill():
    scheduler = half_served()
    assert scheduler.plan(SLOTS, 3 * CHUNK + 1).order == [(0, 4), (0, 5), (0, 6), "old"]


def test_groups_that_left_are_followed_in_order_of_arrival():
    scheduler = make(min_batch=2)
    for number in range(3):
        for group in range(3):
            come(scheduler, group, [number])
    scheduler.admit((0, 0))
    scheduler.admit((1, 0))
    for rid in ((0, 0), (1, 0)):
        scheduler.progress(rid, None)
    for rid in ((1, 0), (0, 0)):
        scheduler.leave(rid)
    # Of the group that never ran, (2, 0) has waited longest.
    assert serve(scheduler) == [(0, 1), (0, 2)]
    everybody_leaves(scheduler)
    assert serve(scheduler) == [(1, 1), (1, 2)]


def test_who_is_warm_comes_before_other_strangers_to_a_batch_too_small():
    scheduler = half_served()
    come(scheduler, 3, [0])
    scheduler.admit((3, 0))
    assert serve(scheduler) == [(0, 4), (0, 5), (0, 6)]


def test_what_the_engine_refuses_is_warm_still():
    scheduler = half_served()
    plan = scheduler.plan(SLOTS, 10**9)
    scheduler.confirm([])
    scheduler._check()
    assert scheduler.plan(SLOTS, 10**9).order == plan.order == [(0, 4), (0, 5), (0, 6), "old"]


def test_nothing_is_kept_of_who_waits_no_longer():
    for end in (lambda scheduler: scheduler.leave((0, 4)), lambda scheduler: scheduler.admit((0, 4)), serve):
        scheduler = half_served()
        assert len(scheduler._warm) == 1
        end(scheduler)
        scheduler._check()
        assert len(scheduler._warm) == 0


def test_an_aborted_prefill_leaves_nothing_warm():
    scheduler = make()
    come(scheduler, 0, range(3))
    scheduler.confirm(scheduler.plan(SLOTS, 10**9).order)
    scheduler.leave((0, 0))
    assert len(scheduler._warm) == 0


def test_only_what_was_cached_is_taken_for_computed():
    """The followers share more with one another than with the one that left: one goes ahead of the others."""
    scheduler = make()
    arrive(scheduler, "short", prompt(1, 4, 7))
    come(scheduler, 0, range(3))  # eight chunks, of which "short" has four
    arrive(scheduler, "another", prompt(9, PREFIX, 10**4))
    assert serve(scheduler) == ["short"]
    assert serve(scheduler) == [(0, 0)]
    scheduler = make()
    arrive(scheduler, "short", prompt(1, 4, 7))
    scheduler.confirm(scheduler.plan(SLOTS, 10**9).order)
    scheduler.progress("short", None)
    come(scheduler, 0, range(3))
    arrive(scheduler, "another", prompt(9, PREFIX, 10**4))
    scheduler.leave("short")
    assert serve(scheduler)[0] == (0, 0)
    assert (0, 1) not in scheduler.active


def test_the_bound_holds_where_a_group_leaves_and_comes_again_and_again():
    """Each request ends with its prefill, so that the batch is empty at every pass."""
    scheduler = make(max_passes=20)
    come(scheduler, 0, range(8))
    arrive(scheduler, "cold", prompt(9, PREFIX, 10**4))
    served = []
    while "cold" not in served and len(served) < 400:
        served += serve(scheduler)
        everybody_leaves(scheduler)
        come(scheduler, 0, range(100 + 4 * len(served), 104 + 4 * len(served)))
    assert 60 < len(served) < 100
