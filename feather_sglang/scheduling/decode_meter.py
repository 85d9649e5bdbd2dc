"""How fast a batch decodes: the reward of the decisions that formed it."""

from __future__ import annotations


class DecodeMeter:
    """Output tokens per second of the decode steps since the last admission.

    It is told of every scheduling pass. A pass that gives SGLang nothing to prefill is followed by a decode step, so
    the time to the next pass is that step's. The first steps after a prefill don't count: with overlap scheduling
    SGLang waits for the prefill's result while the first decode step runs (``Scheduler.event_loop_overlap``).

    Args:
        settle: decode steps after a prefill that don't count.
    """

    def __init__(self, settle: int) -> None:
        self._settle = settle
        self._steps = 0  # decode steps since the last prefill
        self._running = 0  # requests in the step that runs now; 0: no step, or one that doesn't count
        self._began_s = 0.0
        self._seconds = 0.0
        self._tokens = 0

    def begin(self, now_s: float) -> None:
        """A scheduling pass begins, so the step before it is over. ``now_s`` is any clock in seconds."""
        if self._running:
            self._seconds += now_s - self._began_s
            self._tokens += self._running
        self._began_s = now_s

    def end(self, prefill: bool, running: int) -> None:
        """The pass is over: a prefill follows, or a decode step of ``running`` requests."""
        self._steps = 0 if prefill else self._steps + 1
        self._running = running if self._steps > self._settle else 0

    def take(self) -> tuple[float, float] | None:
        """Tokens per second since the last call, and over how many seconds; ``None`` without a step that counts."""
        tokens, seconds = self._tokens, self._seconds
        self._tokens, self._seconds = 0, 0.0
        return (tokens / seconds, seconds) if tokens and seconds > 0 else None
