"""The scheduler beside a slow, obvious one, over random traffic."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st
from model_scheduler import ModelScheduler
from test_tree import _at_nodes

from feather_sglang.cht import chunk_hashes
from feather_sglang.scheduling import FeatherScheduler, Settings

CHUNK = 2
SLOTS = 5


class Pair:
    """Both are told the same, and must answer alike."""

    def __init__(self, rng: random.Random):
        self.rng = rng
        chosen = Settings(
            chunk_size=CHUNK,
            min_batch=rng.randrange(1, SLOTS),
            depth_tolerance=rng.randrange(3),
            crowd=3,
            crowd_tolerance=rng.randrange(3),
            max_passes=rng.choice([3, 10, 10**6]),
        )
        kv_tokens = rng.choice([0, 12, 30, 10**6])
        self.real = FeatherScheduler(chosen, SLOTS, kv_tokens=kv_tokens)
        self.model = ModelScheduler(chosen, SLOTS, kv_tokens)
        self.arrived = 0

    def tell(self, what: str, *args) -> None:
        for each in (self.real, self.model):
            getattr(each, what)(*args)
        self.check()

    def check(self) -> None:
        self.real._check()
        assert list(self.real.computing) == self.model.computing
        self.model.tree.ready_prefixes = _at_nodes(self.real.tree, self.model.tree)

    def arrive(self) -> None:
        rng = self.rng
        tokens = [rng.randrange(3)] * CHUNK + [rng.randrange(2)] * (CHUNK * rng.randrange(4))
        tokens += [100 + self.arrived] * rng.randrange(2 * CHUNK)
        self.tell("arrive", self.arrived, chunk_hashes(tokens, CHUNK), len(tokens))
        self.arrived += 1

    def one_pass(self) -> None:
        rng, model = self.rng, self.model
        running = len(model.tree.active)
        calm = [each.unchanged() for each in (self.real, model)]
        assert calm[0] == calm[1]
        if calm[0]:
            passes = model.passes
            assert model.plan(SLOTS - running, 10**6).order == []
            model.confirm(())
            model.passes = passes  # looking was no pass
            return
        budget = rng.choice([10**6, rng.randrange(1, 30)])
        plan, expected = (each.plan(SLOTS - running, budget) for each in (self.real, model))
        assert plan == expected
        assert plan.order or running or not model.tree.waiting
        refused = rng.randrange(3) if running and rng.random() < 0.3 else 0
        taken = plan.order[: max(len(plan.order) - refused, 0)]
        self.tell("confirm", taken)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32))
def test_every_plan_is_that_of_the_model(seed):
    rng = random.Random(seed)
    pair = Pair(rng)
    model = pair.model
    for _ in range(40):
        while rng.random() < 0.7 and len(model.tree.waiting) < 12:
            pair.arrive()
        pair.one_pass()
        for rid in list(model.computing):
            if rng.random() < 0.8:
                pair.tell("progress", rid, rng.choice([None, None, None, rng.randrange(9)]))
        if rng.random() < 0.1 and model.tree.waiting:
            pair.tell("leave", rng.choice(sorted(model.tree.waiting)), 0)
        if rng.random() < 0.1 and model.tree.active:
            pair.tell("retract", rng.choice(sorted(model.tree.active)))
        if rng.random() < 0.05 and model.tree.waiting:
            pair.tell("admit", rng.choice(sorted(model.tree.waiting)))
        leaving = rng.choice([0, 0, 1, SLOTS])  # one after the other, or the whole batch
        for rid in rng.sample(sorted(model.tree.active), min(leaving, len(model.tree.active))):
            pair.tell("leave", rid, rng.randrange(3))
