"""The best table that a learned policy has had so far: what is stored, and what it falls back to.

A table is learned cell by cell, but what it brings is known only of the whole: where cells stand for clean and for
mixed batches alike, several can change their minds together, and all are worse off. So the whole is judged, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from feather_sglang.scheduling.trials import Rate

# Rewards by which a table is judged: enough for several batches to form and drain.
_WINDOW = 200
# A table that brings less than this share of the best one's throughput is given up.
_GIVEN_UP = 0.93
# Weight of a window that is neither better nor that bad: the best one's figure follows slow changes of the load.
_DRIFT = 0.1

Table = TypeVar("Table")


class Champion(Generic[Table]):
    """Judges tables by the mean reward of a window.

    Args:
        copy: makes a copy of a table that later learning leaves alone.
    """

    def __init__(self, copy: Callable[[Table], Table]) -> None:
        self._copy = copy
        #: The best table so far; ``None`` until a window is over.
        self.table: Table | None = None
        self._value: float | None = None  # tokens/s; None: to be measured anew
        self.forget()

    def forget(self) -> None:
        """The traffic has changed, so what the best table brought says nothing any more."""
        self.table = None
        self.begin()

    def hear(self, reward: float, seconds: float, table: Table) -> Table | None:
        """What the present table brought; returns the one to go back to, if that is necessary.

        O(1), but for a copy of the table once a window.
        """
        if self._candidate is None:
            self.begin(self._copy(table))
        self._rate.add(reward, seconds)
        self._count += 1
        if self._count < _WINDOW:
            return None
        mean, candidate = self._rate.mean(), self._candidate
        self.begin()
        if self.table is None:
            self.table, self._value = self._copy(table), mean  # nothing to compare with, so what is known by now
        elif self._value is None or mean >= self._value:
            self.table, self._value = candidate, mean
        elif mean < _GIVEN_UP * self._value:
            self._value = None  # what it brings now is measured in the next window
            return self._copy(self.table)
        else:
            self._value += _DRIFT * (mean - self._value)
        return None

    def begin(self, candidate: Table | None = None) -> None:
        """A new window begins, for a table that may have changed at once."""
        self._candidate = candidate  # as it was when the window began
        self._rate, self._count = Rate(), 0
