"""Waiting requests whose prefix nobody in the batch has any more, but whose KV the engine has probably kept."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import NamedTuple

from sortedcontainers import SortedDict

from feather_sglang.scheduling.arrivals import Ticket


class Warm(NamedTuple):
    """A waiting request that follows a relative that has left the batch."""

    ticket: Ticket
    #: Chunks that it shares with that relative.
    depth: int
    #: How many tokens had been computed when the relative left.
    since: int


class WarmRequests:
    """One for each group that left the batch before all of it was served, by order of arrival.

    An engine's prefix cache drops what was used least recently. So a prefix is taken for cached until as many tokens
    have been computed as the cache holds. Where that is wrong it costs locality, and at most one prefill's tokens.

    Args:
        kv_tokens: tokens that the engine's cache holds; 0: unknown, so nothing is taken for cached.
    """

    def __init__(self, kv_tokens: int) -> None:
        self._kv_tokens = kv_tokens
        self._computed = 0
        self._left: SortedDict = SortedDict()  # place in the order of arrival -> Warm

    def __len__(self) -> int:
        return len(self._left)

    def computed(self, tokens: int) -> None:
        """The KV of so many tokens was computed. O(1)."""
        self._computed += tokens

    def add(self, ticket: Ticket, depth: int) -> None:
        """A relative of this waiting request leaves the batch. O(log G) for G groups."""
        if self._kv_tokens:
            self._left[ticket.seq] = Warm(ticket, depth, self._computed)

    def get(self, ticket: Ticket) -> Warm | None:
        """What is known of a request, if it is one of these and still warm. O(1)."""
        warm: Warm | None = self._left.get(ticket.seq)
        return warm if warm is not None and self._is_warm(warm) else None

    def discard(self, tickets: Iterable[Ticket]) -> None:
        """They wait no longer. O(1) for each that is not one of these, else O(log G)."""
        for ticket in tickets:
            if ticket.seq in self._left:
                del self._left[ticket.seq]

    def first(self, unavailable: Callable[[Hashable], bool]) -> Warm | None:
        """The longest waiting that is still warm and not unavailable; those no longer warm are dropped.

        O(log G) amortised, plus the unavailable ones before it.
        """
        cold: list[int] = []
        found: Warm | None = None
        for seq, warm in self._left.items():
            if not self._is_warm(warm):
                cold.append(seq)
            elif not unavailable(warm.ticket.rid):
                found = warm
                break
        for seq in cold:
            del self._left[seq]
        return found

    def _is_warm(self, warm: Warm) -> bool:
        return self._computed - warm.since < self._kv_tokens

    def _check(self) -> None:
        """Assert every invariant. O(G); for tests."""
        assert all(seq == warm.ticket.seq and warm.ticket.rid is not None for seq, warm in self._left.items())
        assert all(warm.since <= self._computed and warm.depth > 0 for warm in self._left.values())
