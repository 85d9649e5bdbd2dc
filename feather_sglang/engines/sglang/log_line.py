"""One line in SGLang's log, every so often, that says what Feather did since the last one."""

from __future__ import annotations

import logging
import time

from feather_sglang.engines.sglang.controller import Controller

logger = logging.getLogger(__name__)


class LogLine:
    """To be called about once a second. It says nothing while nothing happens.

    Args:
        interval_s: seconds between two lines.
    """

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._due_s = time.monotonic() + interval_s
        self._before: dict[str, float] = {}

    def __call__(self, controller: Controller) -> None:
        """O(1)."""
        now_s = time.monotonic()
        if now_s < self._due_s:
            return
        self._due_s = now_s + self._interval_s
        stop_batch = controller.counters.stop_batch
        now: dict[str, float] = {**controller.counts(), "stop_batch": stop_batch.sum}
        since = {name: value - self._before.get(name, 0) for name, value in now.items()}
        self._before = now
        if since["decode_steps"] or since["added"] or since["fallback_passes"]:
            logger.info("%s", line(since, controller))


def line(since: dict[str, float], controller: Controller) -> str:
    """The line, of what was counted ``since`` the last one; a mean of nothing is a dash."""
    return (
        f"Feather: {since['added']:.0f} added, {since['stopped']:.0f} stops at a mean batch of "
        f"{_mean(since['stop_batch'], since['stopped'], '.1f')}, {since['decode_steps']:.0f} decode steps, "
        f"{_mean(since['homogeneous_decode_steps'], since['decode_steps'], '.1%')} homogeneous, "
        f"{_mean(1e6 * since['pass_s_sum'], since['pass_count'], '.1f')} us a pass, "
        f"{since['forced']:.0f} forced, {since['fallback_passes']:.0f} fallbacks, {controller.waiting} waiting, "
        f"policy {controller.policy}{'' if not controller.disabled else ' (off)'}"
    )


def _mean(total: float, number: float, how: str) -> str:
    return format(total / number, how) if number else "-"
