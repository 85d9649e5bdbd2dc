"""The waiting requests by order of arrival."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator
from heapq import merge
from operator import itemgetter

from sortedcontainers import SortedDict


class ArrivalOrder:
    """Sequence numbers to requests, in ascending order.

    Nearly all numbers come in ascending order and go into a linked list; those that come back later (retracted, or
    planned and not admitted) are kept sorted on the side.
    """

    def __init__(self) -> None:
        self._fresh: OrderedDict[int, Hashable] = OrderedDict()
        self._returned: SortedDict = SortedDict()
        self._last = -1

    def __len__(self) -> int:
        return len(self._fresh) + len(self._returned)

    def __iter__(self) -> Iterator[Hashable]:
        """The requests, the longest waiting first."""
        if not self._returned:
            return iter(self._fresh.values())
        # Lazily, and with no generator expression: compiled, that would be a list of everybody.
        return map(itemgetter(1), merge(self._returned.items(), self._fresh.items()))

    def add(self, seq: int, rid: Hashable) -> None:
        """O(1) for a number greater than all before, else O(log R) for R that came back."""
        if seq > self._last:
            self._fresh[seq] = rid
            self._last = seq
        else:
            self._returned[seq] = rid

    def discard(self, seq: int) -> None:
        """Take a request out, if it is there. O(1), or O(log R) for one that came back."""
        self.discard_all((seq,))

    def discard_all(self, seqs: Iterable[int]) -> None:
        """:meth:`discard` each."""
        pop = self._fresh.pop
        absent = [seq for seq in seqs if pop(seq, None) is None]
        for seq in absent:
            self._returned.pop(seq, None)

    def first(self) -> tuple[int, Hashable]:
        """The longest waiting request. O(1). Raises ``StopIteration`` if nobody waits."""
        if not self._returned:
            return next(iter(self._fresh.items()))
        back: tuple[int, Hashable] = self._returned.peekitem(0)
        fresh = next(iter(self._fresh.items()), None)
        return back if fresh is None or back[0] < fresh[0] else fresh

    def _check(self) -> None:
        """Assert every invariant. O(everything); for tests."""
        assert list(self._fresh) == sorted(self._fresh)
        assert not self._fresh.keys() & self._returned.keys()
        assert all(seq <= self._last for seq in (*self._fresh, *self._returned))
