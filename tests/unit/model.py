"""A slow, obvious model of the chunked hash tree: every request is its list of chunk hashes."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from feather_sglang.cht import Candidate, Follower


def shared(a: Sequence[int], b: Sequence[int]) -> int:
    n = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        n += 1
    return n


class ModelTree:
    def __init__(self):
        self.vectors: dict[Hashable, list[int]] = {}
        self.seq: dict[Hashable, int] = {}
        self.waiting: list[Hashable] = []
        self.active: list[Hashable] = []
        self.ready: dict[Hashable, int] = {}
        #: prefixes whose KV is there, as long as they stay covered
        self.ready_prefixes: set[tuple[int, ...]] = set()
        self.n = 0

    def insert_hashes(self, rid, hashes):
        if rid in self.vectors:
            raise ValueError
        self.vectors[rid] = list(hashes)
        self.seq[rid] = self.n
        self.n += 1
        self.waiting.append(rid)

    def activate(self, rid, *, ready=True):
        if rid not in self.waiting:
            raise KeyError
        self.waiting.remove(rid)
        self.active.append(rid)
        if ready:
            self.mark_ready(rid)

    def mark_ready(self, rid, depth=None):
        if rid not in self.active:
            raise KeyError
        vector = self.vectors[rid]
        for i in range(len(vector) if depth is None else min(depth, len(vector))):
            self.ready_prefixes.add(tuple(vector[: i + 1]))

    def _forget_uncovered(self):
        covered = {tuple(self.vectors[a][: i + 1]) for a in self.active for i in range(len(self.vectors[a]))}
        self.ready_prefixes &= covered

    def deactivate(self, rid):
        if rid not in self.active:
            raise KeyError
        self.active.remove(rid)
        self.waiting.append(rid)
        self._forget_uncovered()

    def remove(self, rid):
        del self.vectors[rid]
        del self.seq[rid]
        self.waiting = [w for w in self.waiting if w != rid]
        self.active = [a for a in self.active if a != rid]
        self._forget_uncovered()

    def covered(self, rid):
        return max((shared(self.vectors[rid], self.vectors[a]) for a in self.active), default=0)

    def missing(self, rid):
        held = {h for a in self.active for h in self.vectors[a]}
        return sum(h not in held for h in self.vectors[rid])

    def held(self, rid):
        depth = self.covered(rid)
        return depth > 0 and tuple(self.vectors[rid][:depth]) not in self.ready_prefixes

    def common(self, rids):
        rids = list(rids)
        if not rids:
            return 0
        first = self.vectors[rids[0]]
        return min(shared(first, self.vectors[r]) if r != rids[0] else len(first) for r in rids)

    @property
    def common_depth(self):
        return self.common(self.active)

    @property
    def base_depth(self):
        return self.common(self.vectors)

    def candidate(self, rid):
        remains = self.common([*self.active, rid])
        delta = self.common_depth - remains if self.active else 0
        sharing = sum(shared(self.vectors[w], self.vectors[rid]) >= remains for w in self.waiting)
        return Candidate(rid, self.missing(rid), self.covered(rid), delta, sharing)

    def best(self):
        free = [w for w in self.waiting if not self.held(w)]
        if not free:
            return None
        return self.candidate(min(free, key=lambda w: (self.missing(w), self.seq[w])))

    def best_sharing(self):
        base = self.base_depth
        free = [w for w in self.waiting if not self.held(w) and self.covered(w) > base]
        if not free:
            return None
        return self.candidate(min(free, key=lambda w: (self.candidate(w).delta, self.missing(w), self.seq[w])))

    def nearest_waiting(self, rid):
        if rid not in self.active:
            raise KeyError
        own = self.vectors[rid]
        found = [
            w
            for w in self.waiting
            if self.base_depth < shared(self.vectors[w], own) == self.covered(w) and not self.held(w)
        ]
        if not found:
            return None
        w = min(found, key=lambda w: (-self.covered(w), self.missing(w), self.seq[w]))
        return Follower(w, self.covered(w))
