"""The engine-neutral scheduler: an admission plan for each pass, from the tree and a batching policy.

An engine tells it what happens (arrive, admit, finish, retract, progress) and asks it for a plan before each prefill:
an order, and where to stop. It keeps no clock, draws no random number and iterates over no set, so equal event
sequences give equal plans on every tensor parallel rank.
"""

from __future__ import annotations

import enum
from collections.abc import Hashable, Iterable, Sequence
from itertools import islice
from typing import NamedTuple

from sortedcontainers import SortedDict

from feather_sglang.cht import Candidate, ChunkedHashTree
from feather_sglang.scheduling.policy import BatchingPolicy, BatchState, StaticPolicy
from feather_sglang.scheduling.settings import Settings

# How far past held requests to look for one that is not; more are held only for the passes of one prefill.
_SCAN = 128


class Stop(enum.Enum):
    """Why a plan ends where it does."""

    EMPTY = "nobody waits"
    SLOTS = "no running slot is left"
    TOKENS = "the prefill token budget is planned"
    HELD = "all that could join wait for a prefix to be computed"
    POLICY = "the batching policy said stop"


class Plan(NamedTuple):
    """Whom to admit, in this order, and nobody after them."""

    order: list[Hashable]
    stop: Stop


class _Waiting(NamedTuple):
    seq: int  # order of arrival
    since: int  # value of the pass counter at arrival
    tokens: int


class FeatherScheduler:
    """Decides whom the engine should admit.

    With one request or none active, nothing shared, or prefix caching off, plans are in order of arrival. A plan is
    never empty while nobody runs and somebody waits.

    Args:
        settings: see :class:`Settings`.
        max_batch: the engine's running slots.
        policy: a batching policy; by default the one that ``settings`` name.
    """

    def __init__(self, settings: Settings, max_batch: int, policy: BatchingPolicy | None = None) -> None:
        if max_batch < 1:
            raise ValueError(f"max_batch must be at least 1, got {max_batch}")
        self.tree = ChunkedHashTree(settings.chunk_size)
        self._policy: BatchingPolicy = policy if policy is not None else StaticPolicy(settings, max_batch)
        self._chunk_size = settings.chunk_size
        self._max_passes = settings.max_passes
        self._info: dict[Hashable, _Waiting] = {}
        self._queue: SortedDict = SortedDict()  # seq -> rid of those who wait, so by arrival
        self._active: dict[Hashable, None] = {}  # in order of admission
        self._computing: dict[Hashable, None] = {}  # active, prefix not fully computed yet; in order of admission
        self._next_seq = 0
        self._passes = 0  # passes in which somebody was passed over
        self._deadline = 0  # value of _passes at which the longest waiting request must be served
        self._planned: list[Hashable] = []  # activated by the open plan, not yet confirmed
        self._open = False
        self._stop = Stop.EMPTY
        self._settled = False  # the last plan was empty by choice, and nothing has changed since
        self._held = 0
        self._forced = False

    # ----------------------------------------------------------------- events

    def arrive(self, rid: Hashable, hashes: Sequence[int], num_tokens: int) -> None:
        """A request starts to wait. ``hashes`` as from ``chunk_hashes``. Raises ``ValueError`` for a known rid."""
        self.tree.insert_hashes(rid, hashes)
        self._info[rid] = _Waiting(self._next_seq, self._passes, num_tokens)
        self._queue[self._next_seq] = rid
        self._next_seq += 1
        self._settled = False

    def admit(self, rid: Hashable) -> None:
        """The engine admitted a waiting request outside the plan. Raises ``KeyError`` if it is not waiting."""
        self._activate(rid)
        self._settled = False

    def leave(self, rid: Hashable) -> None:
        """A request finished or was aborted, running or waiting. Raises ``KeyError`` for an unknown one."""
        self.tree.remove(rid)
        self._active.pop(rid, None)
        self._computing.pop(rid, None)
        self._queue.pop(self._info.pop(rid).seq, None)
        self._settled = False

    def retract(self, rid: Hashable) -> None:
        """A running request lost its KV and waits again, in its old place. Raises ``KeyError`` if it isn't active."""
        self._deactivate(rid)
        self._settled = False

    def progress(self, rid: Hashable, num_tokens: int | None) -> None:
        """The first ``num_tokens`` of an active request's prompt (``None``: all) have their KV cached.

        Those who wait for that prefix can follow now. Raises ``KeyError`` if it is not active.
        """
        if num_tokens is not None and num_tokens >= self._info[rid].tokens:
            num_tokens = None
        self.tree.mark_ready(rid, None if num_tokens is None else num_tokens // self._chunk_size)
        if num_tokens is None:
            self._computing.pop(rid, None)
        self._settled = False

    # -------------------------------------------------------------- inspection

    def __contains__(self, rid: Hashable) -> bool:
        return rid in self._info

    @property
    def waiting(self) -> Iterable[Hashable]:
        """Waiting requests, by arrival."""
        return self._queue.values()  # type: ignore[no-any-return]  # sortedcontainers is not typed

    @property
    def active(self) -> Iterable[Hashable]:
        """Active requests, in order of admission."""
        return self._active

    @property
    def computing(self) -> Iterable[Hashable]:
        """Active requests whose prefill is not known to be complete, in order of admission."""
        return self._computing

    @property
    def last_stop(self) -> Stop:
        """Why the last plan ended."""
        return self._stop

    # ------------------------------------------------------------------- plans

    def unchanged(self) -> bool:
        """Whether the last plan was "admit nobody" and still holds. O(1); counts as a pass."""
        if not self._settled:
            return False
        self._passes += 1
        return self._passes < self._deadline

    def plan(self, slots: int, token_budget: int) -> Plan:
        """Whom to admit in this pass; to be followed by :meth:`confirm`.

        Args:
            slots: requests that the engine can still take into its batch.
            token_budget: tokens that one prefill may compute; the plan goes one request past it, for the engine to
                split or refuse.

        Complexity: O(log W) amortised for each planned request, plus the tree nodes on its path.
        """
        self.confirm(())
        self._open = True
        self._held = sum(self.tree.held_behind(rid) for rid in self._computing)
        self._forced = False
        while True:
            rid = self._next(slots, token_budget)
            if isinstance(rid, Stop):
                self._stop = rid
                break
            waiting = self._info[rid]
            slots -= 1
            missing = self.tree.missing(rid) * self._chunk_size + waiting.tokens % self._chunk_size
            token_budget -= max(missing, 1)
            self._activate(rid)
            self._planned.append(rid)
            self._held += self.tree.held_behind(rid)
        return Plan(list(self._planned), self._stop)

    def confirm(self, admitted: Iterable[Hashable]) -> None:
        """What the engine really admitted of the last plan; the others wait on, in their old places.

        O(log W) amortised for each planned request that was not admitted.
        """
        if not self._open:
            return
        self._open = False
        planned, self._planned = self._planned, []
        ran = set(admitted)
        refused = [rid for rid in planned if rid not in ran]
        newest = max((self._info[rid].seq for rid in planned if rid in ran), default=-1)
        for rid in refused:
            self._deactivate(rid)
        if not self._queue:
            return
        seq, oldest = self._queue.peekitem(0)
        by_choice = not refused and self._stop in (Stop.HELD, Stop.POLICY)
        if by_choice or seq < newest:
            self._passes += 1
        self._deadline = self._info[oldest].since + self._max_passes
        self._settled = by_choice and not planned

    def _next(self, slots: int, tokens: int) -> Hashable | Stop:
        """The next request to plan, or why there is none."""
        if not self._queue:
            return Stop.EMPTY
        if slots <= 0 or tokens <= 0:
            return Stop.SLOTS if slots <= 0 else Stop.TOKENS
        oldest: Hashable = self._queue.peekitem(0)[1]
        overdue = not self._forced and self._passes >= self._info[oldest].since + self._max_passes
        if overdue or not self.tree.num_active:
            self._forced = overdue or self._forced  # once a pass: a long queue must not turn it all into FCFS
            return oldest
        candidate = self.tree.best_sharing()
        related = candidate is not None
        candidate = candidate or self._first_not_held()
        if candidate is None:
            return Stop.HELD
        batch = self.tree.num_active
        delta = candidate.delta if batch > 1 else 0
        if self._policy.admit(BatchState(batch, delta, candidate.sharing, related, self._held)):
            return candidate.rid
        return Stop.HELD if self._held else Stop.POLICY

    def _first_not_held(self) -> Candidate | None:
        for rid in islice(self._queue.values(), _SCAN):
            if not self.tree.held(rid):
                return self.tree.candidate(rid)
        return None

    def _activate(self, rid: Hashable) -> None:
        self.tree.activate(rid, ready=False)
        del self._queue[self._info[rid].seq]
        self._active[rid] = None
        self._computing[rid] = None

    def _deactivate(self, rid: Hashable) -> None:
        self.tree.deactivate(rid)
        self._queue[self._info[rid].seq] = rid
        del self._active[rid]
        self._computing.pop(rid, None)

    def _check(self) -> None:
        """Assert every invariant. O(everything); for tests."""
        self.tree._check()
        assert self.tree.num_waiting == len(self._queue)
        assert len(self.tree) == len(self._info)
        for seq, rid in self._queue.items():
            assert self._info[rid].seq == seq and not self.tree.is_active(rid)
        assert len(self._active) == self.tree.num_active
        for rid in self._active:
            assert self.tree.is_active(rid)
        assert self._computing.keys() <= self._active.keys()
        for rid in self._planned:
            assert rid in self._computing
