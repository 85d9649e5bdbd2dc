"""What only tensor parallel rank 0 can know, and how every rank hears it between the same two passes.

Clocks and measured speeds differ from rank to rank, and ranks that decide differently hang the server. So rank 0's
count, and travel at the end of the list of requests that SGLang broadcasts before each pass anyway
(``SchedulerRequestReceiver.recv_requests``). Where there is nothing to tell nothing is added, and no byte is sent.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, NamedTuple

# The time is told so often at most: each telling costs the ranks a second broadcast, of less than 200 bytes.
_TICK_S = 0.1


class News(NamedTuple):
    """From rank 0 to all ranks, itself included; it is pickled on the way."""

    #: Seconds since rank 0's start.
    now_s: float
    #: Intervals, what they decoded in output tokens/s, and over how many seconds; see ``BatchingPolicy.learn``.
    rewards: tuple[tuple[int, float, float], ...]
    #: What rank 0 loaded from its state file; see ``BatchingPolicy.restore``.
    learned: Mapping[str, Any] | None


class Speaker:
    """Rank 0's side: collects what is to be told.

    Args:
        ticks: whether the time is to be told, too.
        learned: what to tell first.
        now_s: the time as last told.
    """

    def __init__(self, ticks: bool, learned: Mapping[str, Any] | None = None, now_s: float = 0.0) -> None:
        self._ticks = ticks
        self._learned = learned
        self._rewards: list[tuple[int, float, float]] = []
        self._start_s = time.monotonic() - now_s
        self._told_s = float("-inf")

    def reward(self, interval: int, value: float, seconds: float) -> None:
        """Tell this next time."""
        self._rewards.append((interval, value, seconds))

    @property
    def untold(self) -> Mapping[str, Any] | None:
        """What was learned and has not been told yet."""
        return self._learned

    def news(self) -> News | None:
        """What is to be told now, once; ``None``: nothing."""
        now_s = time.monotonic() - self._start_s
        due = self._ticks and now_s - self._told_s >= _TICK_S
        if not (due or self._rewards or self._learned is not None):
            return None
        news = News(now_s, tuple(self._rewards), self._learned)
        self._told_s, self._rewards, self._learned = now_s, [], None
        return news
