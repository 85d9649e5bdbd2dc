"""What a scheduler says of itself is what it does next, and saying it changes nothing."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model import shared
from test_scheduler import CHUNK, arrive, make, prompt

from feather_sglang.cht import ChunkedHashTree, chunk_hashes
from feather_sglang.scheduling import BatchState, FeatherScheduler, Settings, StaticPolicy
from feather_sglang.scheduling.describe import describe

SETTINGS = Settings.parse({"chunk_size": CHUNK, "min_batch": 2}, "test")


def four_passes(scheduler):
    for _ in range(4):
        scheduler.confirm(scheduler.plan(64, 10**9).order)
        for rid in list(scheduler.computing):
            scheduler.progress(rid, None)


def told(scheduler, slots=64, full=False, values=SETTINGS):
    return describe(scheduler, values, slots, full)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(st.lists(st.integers(0, 2), max_size=6), st.sampled_from(["wait", "run", "gone"])), max_size=20)
)
def test_groups_are_those_of_a_comparison_of_everybody_with_everybody(requests):
    tree = ChunkedHashTree(chunk_size=1)
    for number, (tokens, _) in enumerate(requests):
        tree.insert(number, tokens)
    for number, (_, state) in enumerate(requests):
        if state == "run":
            tree.activate(number)
        elif state == "gone":
            tree.remove(number)
    known = {n: (chunk_hashes(tokens, 1), state) for n, (tokens, state) in enumerate(requests) if state != "gone"}
    counts = {}
    for number, (hashes, state) in known.items():
        longest = max((shared(hashes, other) for n, (other, _) in known.items() if n != number), default=0)
        if longest:
            counts.setdefault(tuple(hashes[:longest]), [0, 0])[state == "run"] += 1
    wanted = sorted((-waiting, -len(prefix), active) for prefix, (waiting, active) in counts.items())
    groups = tree.groups()
    assert sorted((-group.waiting, -group.depth, group.active) for group in groups) == wanted
    assert [(-g.waiting, -g.depth) for g in groups] == sorted((-g.waiting, -g.depth) for g in groups)
    tree._check()


@settings(max_examples=500, deadline=None)
@given(
    st.builds(BatchState, st.integers(1, 20), st.integers(0, 12), st.integers(1, 20), st.booleans(), st.integers(0, 9)),
    st.integers(0, 10),
    st.integers(0, 10),
    st.integers(1, 12),
)
def test_the_static_rule_explains_what_it_would_do(state, tolerance, crowd_tolerance, min_batch):
    values = {"depth_tolerance": tolerance, "crowd_tolerance": crowd_tolerance, "min_batch": min_batch}
    policy = StaticPolicy(Settings.parse(values, "test"), 64)
    admitted, why = policy.explain(state, 64)
    assert admitted == policy.admit(state) and why


@pytest.mark.parametrize("seed", range(40))
def test_the_best_candidate_is_the_one_that_the_next_plan_begins_with_or_stops_at(seed):
    """Beside a twin that is never asked."""
    rng = random.Random(seed)
    values = {"min_batch": rng.choice([1, 2, 5]), "depth_tolerance": rng.choice([0, 2, 9]), "max_passes": 30}
    one, twin = make(12, **values), make(12, **values)
    chosen = Settings.parse({"chunk_size": CHUNK, **values}, "test")
    running, number, asked = [], 0, 0
    for _ in range(250):
        for _ in range(rng.randrange(3)):
            tokens = prompt(rng.randrange(4), rng.randrange(1, 9), number, rng.randrange(3))
            for each in (one, twin):
                arrive(each, number, tokens)
            number += 1
        while running and rng.random() < 0.4:
            gone = running.pop(rng.randrange(len(running)))
            for each in (one, twin):
                each.leave(gone)
        best = told(one, 12, False, chosen)["best"]
        plan = one.plan(12 - len(running), 10**9)
        assert plan == twin.plan(12 - len(running), 10**9)
        assert (best is None) == (one.tree.num_waiting == 0 and not plan.order)
        if best is not None:
            asked += 1
            assert best["admitted"] == bool(plan.order), best
            assert not plan.order or plan.order[0] == best["rid"]
        for each in (one, twin):
            each.confirm(plan.order)
        running += plan.order
        for rid in [rid for rid in one.computing if rng.random() < 0.6]:
            for each in (one, twin):
                each.progress(rid, None)
    assert asked > 30
    one._check()


def test_a_batch_that_is_protected_says_what_the_candidate_would_cost():
    scheduler = make(min_batch=2)
    for rid in range(3):
        arrive(scheduler, ("a", rid), prompt(1, 8, rid))
    for rid in range(5):
        arrive(scheduler, ("b", rid), prompt(2, 6, 100 + rid))
    four_passes(scheduler)
    said = told(scheduler)
    assert said["batch"] == {"requests": 3, "shared_tokens": 32, "held": 0}
    assert said["groups"] == [{"tokens": 24, "waiting": 5, "active": 0}]
    assert said["last_stop"] == "policy"
    assert said["best"] == {
        "rid": ("b", 0),
        "shared_tokens": 0,
        "loses_tokens": 32,
        "sharing": 5,
        "admitted": False,
        "why": "adding it would cost the batch 32 of 32 shared tokens (none are given up for a stranger)",
    }
    arrive(scheduler, ("a", 9), prompt(1, 3, 999))
    assert told(scheduler)["best"]["why"].endswith("20 of 32 shared tokens (at most 16 are given up)")
    assert told(scheduler)["groups"][0]["waiting"] == 5 and len(told(scheduler)["groups"]) == 2


def test_what_is_not_the_policys_is_said_first():
    scheduler = make(min_batch=2, max_passes=3)
    assert told(scheduler)["best"] is None and told(scheduler)["last_stop"] == "empty"
    for rid in range(4):
        arrive(scheduler, rid, prompt(1, 8, rid))
    assert told(scheduler)["best"]["why"] == "nobody runs, and it has waited longest"
    scheduler.confirm(scheduler.plan(64, 10**9).order)
    best = told(scheduler)["best"]
    assert not best["admitted"] and best["why"].startswith("it follows once the prefix")
    assert told(scheduler)["batch"]["held"] == 3
    scheduler.progress(0, None)
    assert told(scheduler)["best"]["admitted"] and told(scheduler)["best"]["loses_tokens"] == 0, "a batch of one"
    assert told(scheduler, slots=1)["best"]["why"] == "no running slot is free, all 1 are taken"
    assert told(scheduler, full=True)["best"]["why"] == "the engine says that its batch is full"
    scheduler.confirm(scheduler.plan(64, 10**9).order)
    arrive(scheduler, "stranger", prompt(2, 8, 50))
    for _ in range(4):
        assert not told(scheduler)["best"]["admitted"]
        scheduler.confirm(scheduler.plan(64, 10**9).order)
        for rid in list(scheduler.computing):
            scheduler.progress(rid, None)
        if told(scheduler)["best"]["admitted"]:
            break
    assert told(scheduler)["best"]["why"] == "it has been passed over for long enough"


def test_a_policy_that_cannot_say_beforehand_is_not_asked():
    values = Settings.parse({"chunk_size": CHUNK, "policy": "ucb", "min_batch": 2}, "test")
    scheduler = make(policy="ucb", min_batch=2)
    for rid in range(3):
        arrive(scheduler, ("a", rid), prompt(1, 8, rid))
    arrive(scheduler, "b", prompt(2, 6, 100))
    four_passes(scheduler)
    policy = scheduler.policy
    before = (policy.decisions, policy._shared, dict(policy._taken), dict(policy._chosen))
    best = told(scheduler, values=values)["best"]
    assert not best["admitted"] and best["why"].endswith("32 of 32 shared tokens (ucb stopped the batch here)")
    assert (policy.decisions, policy._shared, policy._taken, policy._chosen) == before


def test_only_the_biggest_groups_are_listed():
    scheduler = make()
    for group in range(30):
        for rid in range(2 + group % 7):
            arrive(scheduler, (group, rid), prompt(group, 2 + group, 1000 * group + rid))
    groups = told(scheduler)["groups"]
    assert len(groups) == 20 and [each["waiting"] for each in groups] == sorted(
        (each["waiting"] for each in groups), reverse=True
    )
    assert groups[0] == {"tokens": CHUNK * (2 + 27), "waiting": 8, "active": 0}


def test_who_follows_a_group_that_has_left():
    scheduler = FeatherScheduler(Settings(chunk_size=CHUNK), 1, kv_tokens=1000)
    scheduler.arrive("first", (1, 2), 2 * CHUNK)
    scheduler.confirm(scheduler.plan(1, 100).order)
    scheduler.progress("first", None)
    scheduler.arrive("stranger", (5,), CHUNK)
    scheduler.arrive("second", (1, 3), 2 * CHUNK)
    scheduler.leave("first")
    best = told(scheduler)["best"]
    assert best["rid"] == "second" and best["why"] == "nobody runs, and its prefix is cached"
