"""A slow, obvious model of the scheduler, over the model of the tree: a plan is tried out on a copy, one by one."""

from __future__ import annotations

import copy
from collections.abc import Hashable

from model import ModelTree, shared

from feather_sglang.scheduling import BatchState, Plan, Settings, StaticPolicy, Stop


class ModelScheduler:
    def __init__(self, settings: Settings, max_batch: int, kv_tokens: int):
        self.tree = ModelTree()
        self.settings = settings
        self.policy = StaticPolicy(settings, max_batch)
        self.kv_tokens = kv_tokens
        self.tokens: dict[Hashable, int] = {}
        self.since: dict[Hashable, int] = {}
        self.warm: dict[Hashable, tuple[int, int]] = {}  # depth, tokens computed when its relative left
        self.cached: dict[Hashable, int] = {}  # of those planned that follow one that left
        self.computing: list[Hashable] = []
        self.computed = 0
        self.passes = 0
        self.settled = False
        self.planned: list[tuple[Hashable, int]] = []  # with its tokens to compute
        self.stop = Stop.EMPTY
        self.open = False

    def arrive(self, rid, hashes, num_tokens):
        self.tree.insert_hashes(rid, hashes)
        self.tokens[rid], self.since[rid] = num_tokens, self.passes
        self.settled = False

    def admit(self, rid):
        self.tree.activate(rid, ready=False)
        self.warm.pop(rid, None)
        self.computing.append(rid)
        self.settled = False

    def leave(self, rid, generated=0):
        follower = self.tree.nearest_waiting(rid) if rid in self.tree.active else None
        self.tree.remove(rid)
        self.warm.pop(rid, None)
        self.computing = [each for each in self.computing if each != rid]
        self.computed += generated
        if follower is not None and self.kv_tokens:
            self.warm[follower.rid] = follower.depth, self.computed
        self.settled = False

    def retract(self, rid):
        self.tree.deactivate(rid)
        self.computing = [each for each in self.computing if each != rid]
        self.settled = False

    def progress(self, rid, num_tokens):
        whole = num_tokens is None or num_tokens >= self.tokens[rid]
        self.tree.mark_ready(rid, None if whole else num_tokens // self.settings.chunk_size)
        if whole:
            self.computing = [each for each in self.computing if each != rid]
        self.settled = False

    def waiting(self, tree):
        return sorted(tree.waiting, key=lambda rid: tree.seq[rid])

    def is_warm(self, rid):
        return rid in self.warm and self.computed - self.warm[rid][1] < self.kv_tokens

    def activate(self, tree, rid):
        tree.activate(rid, ready=False)
        if rid in self.cached:
            tree.mark_ready(rid, self.cached[rid])

    def overdue(self, oldest):
        return self.passes >= self.since[oldest] + self.settings.max_passes

    def unchanged(self):
        if not self.settled:
            return False
        self.passes += 1
        return not self.overdue(self.waiting(self.tree)[0])

    def plan(self, slots, budget):
        self.confirm(())
        self.open = True
        tree, chunk = copy.deepcopy(self.tree), self.settings.chunk_size
        held = sum(self.held_behind(tree, rid) for rid in self.computing)
        forced, self.planned, self.cached = False, [], {}
        while True:
            waiting = self.waiting(tree)
            if slots <= 0 or budget <= 0:
                self.stop = Stop.SLOTS if slots <= 0 else Stop.TOKENS
                break
            if not waiting:
                self.stop = Stop.EMPTY
                break
            related, must = False, not tree.active
            best = tree.best_sharing()
            free = [rid for rid in waiting if not tree.held(rid)]
            warm = [rid for rid in free if self.is_warm(rid)]
            if not forced and self.overdue(waiting[0]):
                rid, must, forced = waiting[0], True, True
            elif best is not None:
                rid, related = best.rid, True
            elif warm:
                rid = warm[0]
            elif free:
                rid = free[0]
            else:
                self.stop = Stop.HELD
                break
            seen = tree.candidate(rid)
            batch = len(tree.active)
            state = BatchState(batch, seen.delta if batch > 1 else 0, seen.sharing, related, held, tree.common_depth)
            if not must and not self.policy.admit(state):
                self.stop = Stop.HELD if held else Stop.POLICY
                break
            own, computed, missing = tree.vectors[rid], seen.covered, seen.missing
            if self.is_warm(rid) and not related:
                self.cached[rid] = self.warm[rid][0]
                computed = max(computed, self.cached[rid])
                missing = len(own) - computed
            held += sum(shared(tree.vectors[w], own) > computed for w in waiting if w != rid)
            cost = missing * chunk + self.tokens[rid] % chunk or 1
            self.planned.append((rid, cost))
            slots, budget = slots - 1, budget - cost
            self.activate(tree, rid)
        return Plan([rid for rid, _ in self.planned], self.stop)

    def held_behind(self, tree, rid):
        """Waiting requests that share more with it than what of it is computed."""
        own = tree.vectors[rid]
        ready = max((n for n in range(len(own) + 1) if not n or tuple(own[:n]) in tree.ready_prefixes), default=0)
        return sum(shared(tree.vectors[w], own) > ready for w in tree.waiting)

    def confirm(self, admitted):
        if not self.open:
            return
        self.open = False
        planned, self.planned = self.planned, []
        ran = [rid for rid, _ in planned if rid in admitted]
        self.computed += sum(cost for rid, cost in planned if rid in ran)
        for rid in ran:
            self.activate(self.tree, rid)
        for rid in ran:
            self.warm.pop(rid, None)
            self.computing.append(rid)
        waiting = self.waiting(self.tree)
        if not waiting:
            return
        newest = max((self.tree.seq[rid] for rid in ran), default=-1)
        by_choice = len(ran) == len(planned) and self.stop in (Stop.HELD, Stop.POLICY)
        if by_choice or self.tree.seq[waiting[0]] < newest:
            self.passes += 1
        self.settled = by_choice and not planned
