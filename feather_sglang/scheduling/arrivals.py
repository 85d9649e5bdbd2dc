"""The waiting requests by order of arrival."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator
from heapq import merge

from sortedcontainers import SortedDict

_SLACK = 64  # a list this short is never worth rebuilding


class Ticket:
    """A request's place in the order of arrival."""

    __slots__ = ("listed", "rid", "seq", "since", "since_s", "tokens", "waits")

    def __init__(self, rid: Hashable, seq: int, since: int, since_s: float, tokens: int) -> None:
        self.rid = rid
        #: Order of arrival, unique.
        self.seq = seq
        #: Value of the scheduler's pass counter at arrival.
        self.since = since
        #: The scheduler's time at arrival, in seconds.
        self.since_s = since_s
        #: Length of the prompt.
        self.tokens = tokens
        self.waits = False  # kept by ArrivalOrder, as is the next
        self.listed = False


class ArrivalOrder:
    """Tickets of the waiting requests, by ascending ``seq``.

    Nearly all numbers come in ascending order and go to the end of a list; those that come back later (retracted, or
    planned and not admitted) are kept sorted on the side. Whoever stops waiting keeps an entry in the list until it
    comes to the front, or more than half of the list is such entries; so leaving touches nothing but the ticket.
    """

    def __init__(self) -> None:
        self._listed: deque[Ticket] = deque()
        self._returned: SortedDict = SortedDict()
        self._last = -1
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator[Ticket]:
        """The tickets, the longest waiting first."""
        # Lazily, and with no generator expression: compiled, that would be a list of everybody.
        listed = filter(_waits, self._listed)
        return merge(self._returned.values(), listed, key=_seq) if self._returned else listed

    def add(self, ticket: Ticket) -> None:
        """O(1) for a number greater than all before or still listed, else O(log R) for R that came back."""
        if ticket.waits:
            raise ValueError(f"request {ticket.rid!r} waits already")
        ticket.waits = True
        self._num_waiting += 1
        if ticket.listed:
            return
        if ticket.seq > self._last:
            ticket.listed = True
            self._listed.append(ticket)
            self._last = ticket.seq
        else:
            self._returned[ticket.seq] = ticket

    def discard(self, ticket: Ticket) -> None:
        """Take a request out, if it is there. O(1) amortised, or O(log R) for one that came back."""
        if not ticket.waits:
            return
        ticket.waits = False
        self._num_waiting -= 1
        if not ticket.listed:
            del self._returned[ticket.seq]
        elif len(self._listed) > 2 * self._num_waiting + _SLACK:
            self._rebuild()

    def first(self) -> Ticket:
        """The longest waiting request. O(1) amortised. Raises ``IndexError`` if nobody waits."""
        listed = self._listed
        while listed and not listed[0].waits:
            listed.popleft().listed = False
        if not self._returned:
            return listed[0]
        back: Ticket = self._returned.peekitem(0)[1]
        return back if not listed or back.seq < listed[0].seq else listed[0]

    def _rebuild(self) -> None:
        kept: deque[Ticket] = deque()
        for ticket in self._listed:
            if ticket.waits:
                kept.append(ticket)
            else:
                ticket.listed = False
        self._listed = kept

    def _check(self) -> None:
        """Assert every invariant. O(everything); for tests."""
        numbers = [ticket.seq for ticket in self._listed]
        assert numbers == sorted(set(numbers)) and all(ticket.listed for ticket in self._listed)
        assert all(seq == back.seq and back.waits and not back.listed for seq, back in self._returned.items())
        assert not self._returned.keys() & set(numbers)
        assert all(seq <= self._last for seq in (*numbers, *self._returned))
        assert self._num_waiting == len(self._returned) + sum(ticket.waits for ticket in self._listed)
        assert len(self._listed) <= 2 * self._num_waiting + _SLACK + len(self._returned)


def _waits(ticket: Ticket) -> bool:
    return ticket.waits


def _seq(ticket: Ticket) -> int:
    return ticket.seq
