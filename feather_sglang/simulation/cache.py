"""The KV pool with its prefix cache: a radix tree with LRU eviction, leaves first, as SGLang's."""

from __future__ import annotations

from heapq import heappop, heappush

from feather_sglang.simulation.job import Job
from feather_sglang.simulation.workload import Node


class PrefixCache:
    """Counts KV tokens: free, cached and held by nobody (evictable), the rest held by requests.

    The tree is the workload's own (``Node``); a node's cached tokens are a prefix of it. What requests generate is
    cached too when they finish, in leaves that no other request ever matches.

    Args:
        capacity: KV tokens.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.free = capacity
        self.evictable = 0
        self.clock = 0
        self._made = 0
        self._leaves: list[tuple[int, int, Node]] = []  # (used, number, node), lazily kept

    @property
    def available(self) -> int:
        """Tokens that can be had at once, by eviction if need be."""
        return self.free + self.evictable

    def match(self, job: Job) -> int:
        """Cached tokens of the prompt, all but the last at most; they count as used now. O(path)."""
        self.clock += 1
        tokens = 0
        for node in job.nodes:
            have = node.have
            if not have:
                break
            node.used = self.clock
            tokens += have
            if have < node.length:
                break
        # One token is always left to compute, or there would be no output.
        job.matched = min(tokens, job.to_compute - 1)
        return job.matched

    def lock(self, job: Job) -> None:
        """Hold what matches. O(path)."""
        for node in job.nodes:
            if not node.have:
                break
            self._hold(node)
            job.locked += 1
            if node.have < node.length:
                break

    def unlock(self, job: Job) -> None:
        """Hold nothing any more. O(path + log nodes)."""
        for node in job.nodes[: job.locked]:
            node.locks -= 1
            if not node.locks:
                self.evictable += node.have
                self._offer(node)
        job.locked = 0

    def allocate(self, tokens: int) -> None:
        """Take tokens for a request, evicting what was used least recently. Raises ``MemoryError`` if they lack."""
        if tokens > self.free:
            self._evict(tokens - self.free)
        if tokens > self.free:
            raise MemoryError(f"{tokens} KV tokens asked for, {self.free} there")
        self.free -= tokens

    def store(self, job: Job, depth: int) -> None:
        """The first ``depth`` tokens of a job's prompt, computed by now, go into the tree and are held. O(path)."""
        self.clock += 1
        gained = 0
        for place, node in enumerate(job.nodes):
            if node.start >= depth:
                break
            if place >= job.locked:
                self._hold(node)
                job.locked += 1
            node.used = self.clock
            want = min(node.length, depth - node.start)
            if want > node.have:
                gained += want - node.have
                self._grow(node, want)
        new = depth - job.stored
        job.own -= new
        job.stored = depth
        self.free += new - gained  # what others had stored meanwhile is not kept twice

    def finish(self, job: Job) -> None:
        """A job is done: what it generated is cached, and it holds nothing. O(path + log nodes)."""
        if job.own:
            self._made += 1
            # Numbers below zero: nodes of the workload are numbered from 0.
            tail = Node(-self._made, job.nodes[-1] if job.nodes else None, job.prompt, job.own)
            tail.used = self.clock
            self._grow(tail, job.own)
            self.evictable += job.own
            job.own = 0
            self._offer(tail)
        self.unlock(job)

    def drop(self, job: Job) -> None:
        """A job is retracted: its own KV is lost, its prompt's stays as long as there is room."""
        self.free += job.own
        job.own = job.stored = 0
        self.unlock(job)

    def _hold(self, node: Node) -> None:
        if not node.locks:
            self.evictable -= node.have
        node.locks += 1

    def _grow(self, node: Node, want: int) -> None:
        if node.have:
            node.cuts.append(node.have)
        else:
            node.born = self.clock
            if node.parent is not None:
                node.parent.children += 1
        node.have = want

    def _offer(self, node: Node) -> None:
        """Let it be evicted, if it is a leaf that nobody holds."""
        if not (node.locks or node.children or node.queued) and node.have:
            node.queued = True
            heappush(self._leaves, (node.used, node.number, node))

    def _evict(self, tokens: int) -> None:
        leaves = self._leaves
        while tokens > 0 and leaves:
            used, _, node = heappop(leaves)
            node.queued = False
            if node.locks or node.children:
                continue  # offered again when that ends
            if node.used != used:
                self._offer(node)
                continue
            keep = node.cuts.pop() if node.cuts else 0
            gone = node.have - keep
            node.have = keep
            tokens -= gone
            self.free += gone
            self.evictable -= gone
            if keep:
                self._offer(node)
            elif node.parent is not None:
                node.parent.children -= 1
                self._offer(node.parent)

    def _check(self, jobs: list[Job], nodes: tuple[Node, ...]) -> None:
        """Assert the invariants, but for generated tails. O(everything); for tests."""
        assert 0 <= self.free <= self.capacity and self.evictable >= 0
        for node in nodes:
            assert 0 <= node.have <= node.length
            assert node.locks == sum(node in job.nodes[: job.locked] for job in jobs)
            if node.have and node.parent is not None:
                assert node.parent.have == node.parent.length, "cached nodes hang together"
        tails = {id(node): node for _, _, node in self._leaves if node.number < 0}.values()
        unheld = sum(node.have for node in (*nodes, *tails) if not node.locks)
        held = sum(node.have for node in nodes if node.locks)
        assert self.evictable == unheld
        assert self.free + unheld + held + sum(job.own for job in jobs) == self.capacity
