"""The best table that a learned policy has had so far: what is stored, and what it falls back to.

A table is learned cell by cell, but what it brings is known only of the whole: where cells stand for clean and for
mixed batches alike, several can change their minds together, and all are worse off. So the whole is judged, too, and
while it is judged it does not change.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from feather_sglang.scheduling.trials import Rate

# Rewards by which a table is judged: enough for several batches to form and drain.
_WINDOW = 200
# A table that brings less than this share of the best one's throughput is given up.
_GIVEN_UP = 0.93
# The best one, measured anew, brings less than this share of what it did: the traffic has changed.
_CHANGED = 0.7
# Weight of a window that is neither better nor that bad: the best one's figure follows slow changes of the load.
_DRIFT = 0.1

Table = TypeVar("Table")


class Champion(Generic[Table]):
    """Has one table in force for a window of rewards, judges it by their mean, and puts the next one in force.

    What is learned within a window decides nothing before it is over, so what is judged is exactly what has acted.

    Args:
        copy: makes a copy of a table that later learning leaves alone.
        table: the first one in force.
    """

    def __init__(self, copy: Callable[[Table], Table], table: Table) -> None:
        self._copy = copy
        self._value: float | None = None  # tokens/s of the best one; None: to be measured anew
        self._before = 0.0  # what that was before
        #: Whether the last reward showed that the best table, in force again, brings much less than before.
        self.changed = False
        #: The best table so far; ``None`` until a window is over.
        self.table: Table | None = None
        self.put_in_force(table)

    def put_in_force(self, table: Table) -> None:
        """A new window begins, with this table as it is now."""
        #: The table that decides.
        self.in_force = self._copy(table)
        self._rate, self._count = Rate(), 0

    def forget(self) -> None:
        """The traffic has changed, so what the best table brought says nothing any more."""
        self.table = None
        self._rate, self._count = Rate(), 0

    def hear(self, reward: float, seconds: float, learned: Table) -> Table | None:
        """What the table in force brought. After a window ``learned`` comes into force.

        Or the best one, where that is necessary: it is returned, for learning to go on with. O(1), but for copies of a
        table once a window.
        """
        self.changed = False
        self._rate.add(reward, seconds)
        self._count += 1
        if self._count < _WINDOW:
            return None
        mean, back = self._rate.mean(), None
        if self.table is None:
            self.table, self._value = self._copy(learned), mean  # nothing to compare with, so what is known by now
        elif self._value is None or mean >= self._value:
            self.changed = self._value is None and mean < _CHANGED * self._before
            self.table, self._value = self.in_force, mean
        elif mean < _GIVEN_UP * self._value:
            self._before, self._value = self._value, None  # what it brings now is measured in the next window
            back = self._copy(self.table)
        else:
            self._value += _DRIFT * (mean - self._value)
        self.put_in_force(learned if back is None else back)
        return back
