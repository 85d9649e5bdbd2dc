"""How a learned policy sees the state: batch size, delta and w in a few bins each (paper, Part B)."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from feather_sglang.scheduling.settings import Settings, bin_edges


class Bins:
    """Upper edges, inclusive, of the bins of each part of the state; what is above the last edge has a bin of its own.

    Cells are numbered row by row: batch, delta, sharing.
    """

    def __init__(self, batch: Sequence[int], delta: Sequence[int], sharing: Sequence[int]) -> None:
        self.batch, self.delta, self.sharing = list(batch), list(delta), list(sharing)
        self._rows = len(self.delta) + 1
        self._columns = len(self.sharing) + 1

    @classmethod
    def of(cls, settings: Settings) -> Bins:
        """The bins that the settings name."""
        return cls(bin_edges(settings.batch_bins), bin_edges(settings.delta_bins), bin_edges(settings.sharing_bins))

    def __len__(self) -> int:
        return (len(self.batch) + 1) * self._rows * self._columns

    def cell(self, batch: int, delta: int, sharing: int) -> int:
        """The cell of a state. O(log edges), in C."""
        row = bisect_left(self.batch, batch) * self._rows + bisect_left(self.delta, delta)
        return row * self._columns + bisect_left(self.sharing, sharing)

    def describe(self) -> dict[str, list[int]]:
        """The edges, for the state file."""
        return {"batch": self.batch, "delta": self.delta, "sharing": self.sharing}
