"""The engine-neutral scheduler: an admission plan for each pass, from the tree and a batching policy.

An engine tells it what happens (arrive, admit, finish, retract, progress, tick) and asks it for a plan before each
prefill: an order, and where to stop. It reads no clock, draws no random number and iterates over no set, so equal event
sequences give equal plans on every tensor parallel rank.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Hashable, Iterable, Sequence
from itertools import islice
from typing import NamedTuple

from mypy_extensions import mypyc_attr

from feather_sglang.cht import Candidate, ChunkedHashTree, Run
from feather_sglang.scheduling.arrivals import ArrivalOrder, Ticket
from feather_sglang.scheduling.counters import Counters
from feather_sglang.scheduling.policies import make_policy
from feather_sglang.scheduling.policy import BatchingPolicy, BatchState
from feather_sglang.scheduling.settings import Settings
from feather_sglang.scheduling.warm import WarmRequests

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


class Upcoming(NamedTuple):
    """A waiting request that a plan would consider first."""

    candidate: Candidate
    #: As in ``BatchState``.
    related: bool
    #: Whether it is served without asking the policy: nobody runs, or it has waited for too long.
    must: bool
    #: Whether it follows a relative that has left the batch, whose prefix is probably cached.
    follows: bool = False


@mypyc_attr(allow_interpreted_subclasses=True)
class FeatherScheduler:
    """Decides whom the engine should admit.

    With one request or none active, nothing shared, or prefix caching off, plans are in order of arrival. A plan is
    never empty while nobody runs and somebody waits.

    Args:
        settings: see :class:`Settings`.
        max_batch: the engine's running slots.
        policy: a batching policy; by default the one that ``settings`` name.
        kv_tokens: tokens that the engine's prefix cache holds, for who follows a group that has left; 0: unknown.
    """

    def __init__(
        self, settings: Settings, max_batch: int, policy: BatchingPolicy | None = None, kv_tokens: int = 0
    ) -> None:
        if max_batch < 1:
            raise ValueError(f"max_batch must be at least 1, got {max_batch}")
        self.tree = ChunkedHashTree(settings.chunk_size)
        #: Of this scheduler, or handed on by the one before it.
        self.counters = Counters()
        self._policy: BatchingPolicy = policy if policy is not None else make_policy(settings, max_batch)
        self._chunk_size = settings.chunk_size
        self._max_passes = settings.max_passes
        self._max_wait_s = settings.max_wait_s or math.inf
        self._queue = ArrivalOrder()  # those who wait
        self._active: dict[Hashable, None] = {}  # in order of admission
        self._computing: dict[Hashable, None] = {}  # active, prefix not fully computed yet; in order of admission
        self._warm = WarmRequests(kv_tokens)
        self._next_seq = 0
        self._passes = 0  # passes in which somebody was passed over
        self._now_s = 0.0  # what the engine last said
        # Values of _passes and of _now_s at which the longest waiting request must be served.
        self._deadline = 0
        self._deadline_s = math.inf
        self._planned: list[Hashable] = []  # the open plan
        self._tickets: list[Ticket] = []  # of those planned
        self._costs: list[int] = []  # of those planned, the tokens to compute
        self._cached: dict[Hashable, int] = {}  # chunks that a relative that left had of those planned that follow it
        self._activated = 0  # how many of it the tree has as active already
        self._open = False
        self._stop = Stop.EMPTY
        self._settled = False  # the last plan was empty by choice, and nothing has changed since
        self._forced = False  # the open plan has served an overdue request
        self._interval = 0  # the decode steps from one admission to the next

    # ----------------------------------------------------------------- events

    def arrive(self, rid: Hashable, hashes: Sequence[int], num_tokens: int) -> None:
        """A request starts to wait. ``hashes`` as from ``chunk_hashes``. Raises ``ValueError`` for a known rid."""
        ticket = Ticket(rid, self._next_seq, self._passes, self._now_s, num_tokens)
        self.tree.insert_hashes(rid, hashes, ticket)
        self._queue.add(ticket)
        self._next_seq += 1
        self._settled = False

    def admit(self, rid: Hashable) -> None:
        """The engine admitted a waiting request outside the plan. Raises ``KeyError`` if it is not waiting."""
        ticket = self._ticket(rid)
        self._activate([rid], [ticket])
        self._warm.discard([ticket])
        self._interval += 1
        self._settled = False

    def leave(self, rid: Hashable, generated: int = 0) -> None:
        """A request finished or was aborted, running or waiting. Raises ``KeyError`` for an unknown one.

        ``generated``: its output tokens.
        """
        ticket = self._ticket(rid)
        follower = self.tree.nearest_waiting(rid) if rid in self._active else None
        self.tree.remove(rid)
        self._active.pop(rid, None)
        self._computing.pop(rid, None)
        self._queue.discard(ticket)
        self._warm.discard([ticket])
        self._warm.computed(generated)
        if follower is not None:
            self._warm.add(self._ticket(follower.rid), follower.depth)
        ticket.rid = None  # the queue may keep the ticket for a while, but not what the engine calls a request
        self._settled = False

    def retract(self, rid: Hashable) -> None:
        """A running request lost its KV and waits again, in its old place. Raises ``KeyError`` if it isn't active."""
        self._deactivate(rid)
        self._settled = False

    def progress(self, rid: Hashable, num_tokens: int | None) -> None:
        """The first ``num_tokens`` of an active request's prompt (``None``: all) have their KV cached.

        Those who wait for that prefix can follow now. Raises ``KeyError`` if it is not active.
        """
        if num_tokens is not None and num_tokens >= self._ticket(rid).tokens:
            num_tokens = None
        self.tree.mark_ready(rid, None if num_tokens is None else num_tokens // self._chunk_size)
        if num_tokens is None:
            self._computing.pop(rid, None)
        self._settled = False

    def tick(self, now_s: float) -> None:
        """The time, in seconds since any moment; for ``max_wait_s``. It never goes backwards."""
        self._now_s = max(self._now_s, now_s)

    # -------------------------------------------------------------- inspection

    def __contains__(self, rid: Hashable) -> bool:
        return rid in self.tree

    @property
    def waiting(self) -> Iterable[Hashable]:
        """Waiting requests, by arrival."""
        return map(_rid, self._queue)

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

    @property
    def policy(self) -> BatchingPolicy:
        """The batching policy, for rewards and for its stored state."""
        return self._policy

    @property
    def now_s(self) -> float:
        """The time as last told, in seconds."""
        return self._now_s

    @property
    def interval(self) -> int:
        """Number of the interval to which the next decode steps belong: it grows with each admission.

        For ``policy.learn``; read it after :meth:`confirm`.
        """
        return self._interval

    @property
    def held(self) -> int:
        """Waiting requests that will join once the prefixes now being prefilled are computed. O(computing)."""
        return sum(self.tree.held_behind(rid) for rid in self._computing)

    def upcoming(self) -> Upcoming | None:
        """Whom the next plan considers first, as far as that is known between two plans; ``None``: nobody waits.

        O(log W) amortised, for reports: nothing is decided.
        """
        if not self._queue:
            return None
        oldest = self._queue.first()
        overdue = self._passes >= oldest.since + self._max_passes or self._now_s >= oldest.since_s + self._max_wait_s
        if overdue:
            return Upcoming(self.tree.candidate(oldest.rid), False, True)
        best = self.tree.best_sharing()
        if best is not None:
            return Upcoming(best, True, False)
        stranger = self._stranger(oldest) or oldest
        follows = self._warm.get(stranger) is not None
        return Upcoming(self.tree.candidate(stranger.rid), False, not self.tree.num_active, follows)

    # ----------------------------------------------------------------- changes

    def reconfigure(self, settings: Settings, policy: BatchingPolicy) -> None:
        """Go on with other settings (not another ``chunk_size``) and another policy; who waits keeps its place. O(1).

        Between two plans, and on every tensor parallel rank between the same two.
        """
        self._policy = policy
        self._max_passes = settings.max_passes
        self._max_wait_s = settings.max_wait_s or math.inf
        self._settled = False

    # ------------------------------------------------------------------- plans

    def unchanged(self) -> bool:
        """Whether the last plan was "admit nobody" and still holds. O(1); counts as a pass."""
        if not self._settled:
            return False
        self._passes += 1
        self.counters.passed_over += 1
        return self._passes < self._deadline and self._now_s < self._deadline_s

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
        self._forced = False
        planned: list[Hashable] = []
        tickets: list[Ticket] = []
        costs: list[int] = []
        self._planned, self._tickets, self._costs = planned, tickets, costs
        self._activated = 0
        held = self.held
        stop: Stop | None = None
        chunk_size = self._chunk_size
        while stop is None:
            if slots <= 0 or token_budget <= 0:
                stop = Stop.SLOTS if slots <= 0 else Stop.TOKENS
                break
            self._activate_planned()  # what comes next depends on it; a last run is left for confirm
            run, related, must = self._next_run(slots)
            if run is None:
                stop = Stop.HELD if self._queue else Stop.EMPTY
                break
            batch = self.tree.num_active
            rids, notes, missing, holds, delta, sharing = run
            depth = self.tree.common_depth
            state = BatchState(batch, delta if batch > 1 else 0, sharing, related, held, depth)
            allowed = len(rids) if must else self._policy.admit_run(state, holds)
            if allowed < len(rids):
                stop = Stop.HELD if held or any(holds[:allowed]) else Stop.POLICY
            for number in range(allowed):
                if token_budget <= 0:
                    stop = Stop.TOKENS
                    break
                ticket: Ticket = notes[number]
                planned.append(rids[number])
                tickets.append(ticket)
                cost = missing[number] * chunk_size + ticket.tokens % chunk_size or 1
                costs.append(cost)
                token_budget -= cost
            held += sum(holds[:allowed])
            slots -= allowed
        self._stop = stop
        return Plan(list(planned), stop)

    def confirm(self, admitted: Iterable[Hashable]) -> None:
        """What the engine really admitted of the last plan; the others wait on, in their old places.

        O(log W) amortised for each planned request that was not admitted.
        """
        if not self._open:
            return
        self._open = False
        planned, tickets, costs, activated = self._planned, self._tickets, self._costs, self._activated
        self._planned, self._tickets, self._costs = [], [], []
        ran = set(admitted)
        if self._forced and planned[0] in ran:
            if self._passes >= tickets[0].since + self._max_passes:
                self.counters.forced_by_passes += 1
            else:
                self.counters.forced_by_wait += 1
        newest = -1
        served: list[Ticket] = []
        joined: list[Hashable] = []
        joined_tickets: list[Ticket] = []
        for number, rid in enumerate(planned):
            ticket = tickets[number]
            if rid in ran:
                newest = max(newest, ticket.seq)
                served.append(ticket)
                self._warm.computed(costs[number])
                if number >= activated:
                    joined.append(rid)
                    joined_tickets.append(ticket)
            elif number < activated:
                self._deactivate(rid)
        self._activate(joined, joined_tickets)
        self._cached.clear()
        self._warm.discard(served)
        if ran:
            self._interval += 1
        self._policy.formed(self._interval, self.tree.num_active)
        if not self._queue:
            return
        oldest = self._queue.first()
        by_choice = ran.issuperset(planned) and self._stop in (Stop.HELD, Stop.POLICY)
        if by_choice or oldest.seq < newest:
            self._passes += 1
            self.counters.passed_over += 1
        self._deadline = oldest.since + self._max_passes
        self._deadline_s = oldest.since_s + self._max_wait_s
        self._settled = by_choice and not planned

    def _activate_planned(self) -> None:
        self._activate(self._planned[self._activated :], self._tickets[self._activated :])
        self._activated = len(self._planned)

    def _next_run(self, slots: int) -> tuple[Run | None, bool, bool]:
        """Whom to consider next; whether they are related to the batch; whether the policy is not to be asked."""
        if not self._queue:
            return None, False, False
        oldest = self._queue.first()
        overdue = not self._forced and (
            self._passes >= oldest.since + self._max_passes or self._now_s >= oldest.since_s + self._max_wait_s
        )
        if overdue:
            self._forced = True  # once a pass: a long queue must not turn it all into FCFS
            return self._alone(oldest.rid), False, True
        run = self.tree.best_run(slots)
        if run is not None:
            return run, True, False
        stranger = self._stranger(oldest)
        return (self._alone(stranger.rid) if stranger is not None else None), False, not self.tree.num_active

    def _stranger(self, oldest: Ticket) -> Ticket | None:
        """Who is next where nobody shares anything with the batch: whose prefix is cached, else the longest waiting."""
        warm = self._warm.first(self._unavailable)
        if warm is not None:
            return warm.ticket
        if not self.tree.num_active:
            return oldest
        for ticket in islice(self._queue, _SCAN):
            if not self.tree.held(ticket.rid):
                return ticket
        return None

    def _unavailable(self, rid: Hashable) -> bool:
        return self.tree.is_active(rid) or self.tree.held(rid)

    def _alone(self, rid: Hashable) -> Run:
        one, ticket = self.tree.candidate(rid), self._ticket(rid)
        warm = self._warm.get(ticket)
        cached = warm.depth if warm is not None else 0
        if cached:
            self._cached[rid] = cached
        holds = self.tree.would_hold(rid, cached)
        missing = one.missing - max(cached - one.covered, 0)
        return Run([rid], [ticket], [missing], [holds], one.delta, one.sharing)

    def _ticket(self, rid: Hashable) -> Ticket:
        ticket: Ticket = self.tree.note(rid)
        return ticket

    def _activate(self, rids: Sequence[Hashable], tickets: Sequence[Ticket]) -> None:
        if not rids:
            return
        self.tree.activate_run(rids)
        for ticket in tickets:
            self._queue.discard(ticket)
        if self._cached:
            for rid in rids:
                if rid in self._cached:  # nobody has to wait for what its relative had
                    self.tree.mark_ready(rid, self._cached[rid])
        now = dict.fromkeys(rids)
        self._active.update(now)
        self._computing.update(now)

    def _deactivate(self, rid: Hashable) -> None:
        self.tree.deactivate(rid)
        self._queue.add(self._ticket(rid))
        del self._active[rid]
        self._computing.pop(rid, None)

    def _check(self) -> None:
        """Assert every invariant. O(everything); for tests."""
        self.tree._check()
        assert self.tree.num_waiting == len(self._queue)
        self._queue._check()
        self._warm._check()
        assert all(warm.ticket.waits or warm.ticket in self._tickets for warm in self._warm._left.values())
        waiting = list(self.waiting)
        assert waiting == sorted(waiting, key=lambda rid: self._ticket(rid).seq)
        assert not any(self.tree.is_active(rid) for rid in waiting)
        assert len(self._active) == self.tree.num_active
        for rid in self._active:
            assert self.tree.is_active(rid)
        assert self._computing.keys() <= self._active.keys()
        assert [ticket.rid for ticket in self._tickets] == self._planned
        assert self._open or not self._cached
        for number, rid in enumerate(self._planned):
            assert self.tree.is_active(rid) == (number < self._activated)


def _rid(ticket: Ticket) -> Hashable:
    return ticket.rid
