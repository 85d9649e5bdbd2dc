"""Do the learned policies learn? The real scheduler and policies on a synthetic engine with a known throughput surface.

Prefill takes no time here; a decode step takes what a formula of the batch size and of its groups says. A fixed number
of clients sends a new request whenever one is answered, from a few groups at a time, so there is always a queue.
Everything is simulated and reproducible: seeded, no clock.
"""

from __future__ import annotations

import functools
import random
import statistics
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass

from feather_sglang.scheduling.learning import LearnedPolicy
from feather_sglang.scheduling.policies import make_policy
from feather_sglang.scheduling.policy import BatchingPolicy, BatchState, StaticPolicy
from feather_sglang.scheduling.scheduler import FeatherScheduler
from feather_sglang.scheduling.settings import Settings

SLOTS = 64
CLIENTS = 214
#: Chunks of each group's prefix.
DEPTH = 16
POLICIES = ("ucb", "qlearning")
# Requests with which a frozen policy or a fixed table is measured, and those before them that don't count.
_MEASURED, _SETTLING = 4000, 500
_NOISE = 0.05


def _mixing(members: list[int]) -> float:
    """The chance that two requests of the batch are of different groups."""
    return 1 - sum(n * n for n in members) / sum(members) ** 2


@dataclass(frozen=True)
class Surface:
    """A throughput surface."""

    about: str
    #: Milliseconds of a decode step, from the active members of each group.
    step_ms: Callable[[list[int]], float]
    #: The best fixed thresholds found by :func:`search`: strangers join below the first where no depth is left to lose,
    #: anybody who costs depth below the second.
    best: tuple[int, int]


def _ridge(members: list[int]) -> float:
    batch, mixing = sum(members), _mixing(members)
    return 8 + 0.1 * batch + 1.2 * batch * mixing / (mixing + 0.1)


def _flat(members: list[int]) -> float:
    return 20 + 0.2 * sum(members)


def _wide(members: list[int]) -> float:
    batch = sum(members)
    return 30 + 0.1 * batch + 0.15 * batch * _mixing(members)


def _moderate(members: list[int]) -> float:
    batch, groups = sum(members), 1 / (1 - _mixing(members))
    return 15 + 0.1 * batch + 0.25 * batch * max(0.0, groups - 2)


SURFACES = {
    "ridge": Surface("one divergent request spoils a batch: stopping early pays", _ridge, (4, 2)),
    "flat": Surface("homogeneity brings nothing: a full batch is best, as FCFS forms it", _flat, (99, 99)),
    "wide": Surface("homogeneity helps, slots help more: stopping costs", _wide, (99, 99)),
    "moderate": Surface("two groups go together well, more do not", _moderate, (32, 99)),
}


class Table(BatchingPolicy):
    """A fixed decision table: two thresholds on the batch size, those held included."""

    def __init__(self, strangers: int, lossy: int) -> None:
        self._strangers, self._lossy = strangers, lossy

    def admit(self, state: BatchState) -> bool:
        """O(1). Zero-loss relatives and held followers are treated as every policy does."""
        size = state.batch + state.held
        if not state.related and state.held:
            return size < SLOTS // 4
        if not state.delta:
            return state.related or size < self._strangers
        return size < self._lossy


class _Clients:
    """Requests as they come: group, prompt hashes, output tokens."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._groups = 0
        self._open = [self._new_group() for _ in range(6)]

    def _new_group(self) -> tuple[int, list[int], list[int]]:
        self._groups += 1
        hashes = [self._groups * DEPTH + depth for depth in range(DEPTH)]
        return self._groups, hashes, [self._rng.randint(12, 48)]

    def next(self) -> tuple[int, list[int], int]:
        at = self._rng.randrange(len(self._open))
        group, hashes, left = self._open[at]
        left[0] -= 1
        if not left[0]:
            self._open[at] = self._new_group()
        return group, hashes, self._rng.randint(16, 64)


class Engine:
    """A simulated engine under Feather's scheduler.

    Args:
        surface: name of the surface; may be changed between calls of :meth:`run`.
        policy: ``None``: first come, first served, with nothing known about prefixes.
        seed: of the traffic and of the noise on the rewards (5 % either way).
    """

    def __init__(self, surface: str, policy: BatchingPolicy | None, seed: int) -> None:
        self.surface = surface
        self.scheduler = FeatherScheduler(Settings(chunk_size=1), SLOTS, policy)
        self._blind = policy is None
        self._clients = _Clients(seed)
        self._noise = random.Random(seed + 1)
        self._sent = 0
        self._kind: dict[Hashable, tuple[int, int]] = {}  # waiting: group, output tokens
        self._left: dict[Hashable, int] = {}  # running: output tokens to come
        self._members: Counter[int] = Counter()
        self._group: dict[Hashable, int] = {}
        self._interval = 0
        self._tokens = self._ms = 0.0  # of the interval
        self._late: list[tuple[int, float, float]] = []

    def run(self, requests: int) -> float:
        """Serve so many requests; returns output tokens/s over their decode steps."""
        tokens = ms = 0.0
        step_ms = SURFACES[self.surface].step_ms
        while requests > 0:
            self._arrive()
            self._admit()
            self._reward()
            steps = min(self._left.values())
            took = steps * step_ms(list(self._members.values()))
            made = steps * len(self._left)
            tokens, ms = tokens + made, ms + took
            self._tokens, self._ms = self._tokens + made, self._ms + took
            requests -= self._decode(steps)
        return tokens / ms * 1000

    def _arrive(self) -> None:
        while len(self._kind) + len(self._left) < CLIENTS:
            group, hashes, tokens = self._clients.next()
            own = [(1 << 32) + self._sent]
            self.scheduler.arrive(self._sent, own if self._blind else hashes + own, DEPTH + 1)
            self._kind[self._sent] = group, tokens
            self._sent += 1

    def _admit(self) -> None:
        """Prefills go before decode steps, so pass after pass until nobody is admitted."""
        scheduler = self.scheduler
        while not scheduler.unchanged():
            order = scheduler.plan(SLOTS - len(self._left), 10**9).order
            scheduler.confirm(order)
            if not order:
                return
            for rid in order:
                self._group[rid], self._left[rid] = self._kind.pop(rid)
                self._members[self._group[rid]] += 1
                scheduler.progress(rid, None)

    def _reward(self) -> None:
        """An interval's reward arrives when the next but one has begun, as with overlapped scheduling."""
        if self.scheduler.interval == self._interval:
            return
        if self._ms:
            noise = 1 + _NOISE * self._noise.uniform(-1, 1)
            self._late.append((self._interval, self._tokens / self._ms * 1000 * noise, self._ms / 1000))
        if len(self._late) > 1:
            self.scheduler.policy.learn(*self._late.pop(0))
        self._interval, self._tokens, self._ms = self.scheduler.interval, 0.0, 0.0

    def _decode(self, steps: int) -> int:
        done = [rid for rid, left in self._left.items() if left == steps]
        for rid in self._left:
            self._left[rid] -= steps
        for rid in done:
            del self._left[rid]
            group = self._group.pop(rid)
            self._members[group] -= 1
            if not self._members[group]:
                del self._members[group]
            self.scheduler.leave(rid)
        return len(done)


def fixed(surface: str, policy: BatchingPolicy | None, seed: int) -> float:
    """Output tokens/s of a policy that does not learn."""
    engine = Engine(surface, policy, seed)
    engine.run(_SETTLING)
    return engine.run(_MEASURED)


@functools.cache
def yardsticks(surface: str, seed: int) -> tuple[float, float, float]:
    """Output tokens/s of the best fixed table, the static rule and FCFS."""
    top = fixed(surface, Table(*SURFACES[surface].best), seed)
    return top, fixed(surface, StaticPolicy(Settings(), SLOTS), seed), fixed(surface, None, seed)


def learned(policy: LearnedPolicy, surface: str, seed: int) -> float:
    """Output tokens/s of what a policy has learned, frozen, on traffic that it has not seen."""
    copy = make_policy(Settings(policy=policy.name, freeze=True), SLOTS)
    copy.restore(policy.snapshot())
    return fixed(surface, copy, seed + 1000)


def search(surface: str, seeds: int = 1, edges: tuple[int, ...] = (1, 2, 4, 8, 16, 24, 32, 48, 99)) -> tuple[int, int]:
    """The best fixed thresholds of all pairs. About a minute a seed."""

    def mean(pair: tuple[int, int]) -> float:
        return statistics.mean(fixed(surface, Table(*pair), seed) for seed in range(seeds))

    return max(((first, second) for first in edges for second in edges), key=mean)


@dataclass(frozen=True)
class Row:
    """One policy on one surface; shares are of the best fixed table on the same seed, one for each seed."""

    case: str
    policy: str
    decisions: int
    #: Throughput of what was learned, frozen.
    learned: list[float]
    #: Throughput of the last quarter of learning, trials included.
    online: list[float]
    #: The static rule.
    static: list[float]
    #: First come, first served.
    fcfs: list[float]


#: What can be measured: surface, and the one that was learned before it.
CASES: dict[str, tuple[str, str | None]] = {
    **{name: (name, None) for name in SURFACES},
    "ridge after flat": ("ridge", "flat"),
    "flat after ridge": ("flat", "ridge"),
}


def run(policy_name: str, case: str, seeds: Iterable[int], requests: int, say: Callable[[str], None]) -> Row:
    """Learn from a cold start over so many requests, or from what as many on the surface before have taught."""
    shares: dict[str, list[float]] = {"learned": [], "online": [], "static": [], "fcfs": []}
    decisions = []
    surface, before = CASES[case]
    for seed in seeds:
        say(f"{policy_name}: {case}: seed {seed}")
        policy = make_policy(Settings(policy=policy_name), SLOTS)
        assert isinstance(policy, LearnedPolicy)
        engine = Engine(before or surface, policy, seed)
        if before:
            engine.run(requests)
            engine.surface = surface
        start = policy.decisions
        engine.run(requests - requests // 4)
        online = engine.run(requests // 4)
        decisions.append(policy.decisions - start)
        top, static, fcfs = yardsticks(surface, seed + 1000)
        for name, rate in zip(shares, (learned(policy, surface, seed), online, static, fcfs), strict=True):
            shares[name].append(rate / top)
    return Row(case, policy_name, round(statistics.median(decisions)), **shares)


def rows(cases: Iterable[str], seeds: int, requests: int, say: Callable[[str], None]) -> Iterator[Row]:
    """Every learned policy in each of these ``CASES``."""
    for case in cases:
        for policy in POLICIES:
            yield run(policy, case, range(seeds), requests, say)


def table(results: list[Row]) -> str:
    """Shares of the best fixed table: median and worst seed."""
    head = ("case", "policy", "decisions", "static", "fcfs", "learned", "worst", "online", "worst")
    lines = ["{:<18}{:<11}{:>9}{:>9}{:>9}{:>9}{:>9}{:>9}{:>9}".format(*head)]
    for row in results:
        shares = [statistics.median(row.static), statistics.median(row.fcfs)]
        for each in (row.learned, row.online):
            shares += [statistics.median(each), min(each)]
        lines.append(f"{row.case:<18}{row.policy:<11}{row.decisions:>9}" + "".join(f"{x:>9.1%}" for x in shares))
    return "\n".join(lines)
