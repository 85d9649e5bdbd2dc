"""SGLang's own policies: ``fcfs``, ``lpm`` and ``dfs-weight``, after ``srt/managers/schedule_policy.py`` of 0.5.23."""

from __future__ import annotations

from collections.abc import Sequence

from feather_sglang.simulation.cache import PrefixCache
from feather_sglang.simulation.job import Job
from feather_sglang.simulation.queues import Queue
from feather_sglang.simulation.workload import Node

#: With more waiting requests than this LPM is FCFS; so many of the queue are kept fresh in the cache otherwise.
MATCH_MAX = 128
# FCFS refreshes them in one pass of so many.
_REFRESH_PASSES = 32
# LPM: with at most so much cached, a request whose prefix an earlier one of the queue has goes last.
_IN_BATCH_TOKENS = 32


class Fcfs(Queue):
    """First come, first served."""

    def __init__(self, cache: PrefixCache) -> None:
        super().__init__(cache)
        self.jobs: list[Job] = []
        self._blind_passes = 0

    def __len__(self) -> int:
        return len(self.jobs)

    def add(self, job: Job) -> None:
        """At the end. O(1)."""
        self.jobs.append(job)

    def candidates(self, slots: int) -> Sequence[Job]:
        """The queue, sorted as the policy would. The order stays for the next pass."""
        self.work.passes += 1
        self.sort()
        return self.jobs

    def admitted(self, jobs: Sequence[Job]) -> None:
        """O(waiting), in C."""
        self.work.admitted += len(jobs)
        del self.jobs[: len(jobs)]

    def sort(self) -> None:
        """FCFS sorts nothing; now and then it keeps the head's prefixes from being evicted."""
        if self._blind_passes % _REFRESH_PASSES == 0:
            for job in reversed(self.jobs[:MATCH_MAX]):
                self.cache.match(job)
        self._blind_passes += 1


class Lpm(Fcfs):
    """Longest prefix match first, among few; else FCFS."""

    def sort(self) -> None:
        """O(waiting x path), for at most 128 waiting."""
        if len(self.jobs) > MATCH_MAX:
            super().sort()
            return
        match, work = self.cache.match, self.work
        keys: dict[Job, float] = {}
        for job in self.jobs:
            tokens = match(job)
            work.matched += 1
            work.matched_tokens += tokens
            behind = tokens <= _IN_BATCH_TOKENS and self._shared_in_queue(job) >= _IN_BATCH_TOKENS
            keys[job] = float("inf") if behind else -tokens
        self.jobs.sort(key=keys.__getitem__)

    def _shared_in_queue(self, job: Job) -> int:
        """Tokens shared with those of this pass that count as leaders; it becomes one if these are few."""
        shared = 0
        for node in job.nodes:
            if node.seen != self.work.passes:
                break
            shared += node.length
        if shared < _IN_BATCH_TOKENS:
            for node in job.nodes:
                node.seen = self.work.passes
        return shared


class DfsWeight(Fcfs):
    """Depth first through the cached tree, at each fork the branch with the most waiting requests first."""

    def sort(self) -> None:
        """O(waiting + cached nodes with somebody waiting)."""
        groups = self._by_last_cached()
        self.work.matched += len(self.jobs)
        weights: dict[Node | None, int] = {}
        below: dict[Node | None, list[Node]] = {}
        clock = self.cache.clock = self.cache.clock + 1
        for last, jobs in groups.items():
            node = last
            while node is not None:
                node.used = clock
                if node not in weights:
                    weights[node] = 0
                    below.setdefault(node.parent, []).append(node)
                weights[node] += len(jobs)
                node = node.parent
            if last is not None:
                self.work.matched_tokens += len(jobs) * (last.start + last.have)
        order: list[Job] = []
        stack: list[tuple[Node | None, bool]] = [(None, False)]
        while stack:
            at, visited = stack.pop()
            children = below.get(at)
            if visited or children is None:
                order.extend(groups.get(at, ()))
                continue
            stack.append((at, True))
            # The last one pushed is visited first; among equals the one that was cached first.
            children.sort(key=lambda child: (weights[child], -child.born))
            stack.extend((child, False) for child in children)
        self.jobs = order

    def _by_last_cached(self) -> dict[Node | None, list[Job]]:
        """The queue by the deepest node with anything cached; ``None`` for nothing cached."""
        groups: dict[Node | None, list[Job]] = {}
        for job in self.jobs:
            nodes, depth = job.nodes, job.hint
            if depth and not nodes[depth - 1].have:
                while depth and not nodes[depth - 1].have:
                    depth -= 1
            else:
                while depth < len(nodes) and nodes[depth].have:
                    depth += 1
            job.hint = depth
            groups.setdefault(nodes[depth - 1] if depth else None, []).append(job)
        return groups
