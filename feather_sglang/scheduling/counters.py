"""What Feather counts while it schedules: plain numbers, added where a pass comes by anyway, and never read to decide.

They outlive the scheduler that counts: after a failure the next one goes on with the same counters.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

#: Upper bounds, in seconds, for Feather's part of a scheduling pass: from an idle pass to a plan for a long queue.
PASS_BOUNDS_S = (1e-6, 2e-6, 5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 5e-2)
#: Upper bounds for the size of a batch.
BATCH_BOUNDS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0)


class Buckets:
    """How many values were seen up to each bound, each in one bucket, and their sum.

    Args:
        bounds: ascending; a value belongs to the first bound that it does not exceed, or to the last bucket.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        #: One more than there are bounds.
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def add(self, value: float) -> None:
        """O(log bounds)."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    @property
    def number(self) -> int:
        """How many values there were."""
        return sum(self.counts)


class Counters:
    """Since the start of the process; they only grow, but for ``reward``."""

    def __init__(self) -> None:
        #: By name of the batching policy: requests admitted, and plans that it ended although somebody could join.
        self.added: dict[str, int] = {}
        self.stopped: dict[str, int] = {}
        #: Passes in which the longest waiting request was passed over; ``max_passes`` bounds those of one request.
        self.passed_over = 0
        #: Admitted because that bound was reached, and because ``max_wait_s`` was.
        self.forced_by_passes = self.forced_by_wait = 0
        #: Passes planned by the engine's own policy, and failures of Feather's code.
        self.fallback_passes = self.failures = 0
        self.state_saves = 0
        self.decode_steps = 0
        #: Those of a batch of two or more whose requests all share a chunk at least.
        self.homogeneous_decode_steps = 0
        #: One for each request of each decode step.
        self.output_tokens = 0
        #: Seconds in Feather's part of each pass in which it had something to look at.
        self.pass_s = Buckets(PASS_BOUNDS_S)
        #: Size of the batch at each of ``stopped``.
        self.stop_batch = Buckets(BATCH_BOUNDS)
        #: Output tokens/s as last measured for a policy that learns; 0: not yet.
        self.reward = 0.0

    def decided(self, policy: str, added: int, stopped: bool, batch: int) -> None:
        """A pass with a plan is over: ``batch`` requests run now. O(1)."""
        self.added[policy] = self.added.get(policy, 0) + added
        self.stopped[policy] = self.stopped.get(policy, 0) + stopped
        if stopped:
            self.stop_batch.add(batch)

    def decodes(self, running: int, shared: int) -> None:
        """A decode step follows of a batch of ``running``, all of which share ``shared`` chunks. O(1)."""
        self.decode_steps += 1
        self.output_tokens += running
        if running > 1 and shared:
            self.homogeneous_decode_steps += 1

    def totals(self) -> dict[str, int | float]:
        """Everything by name, over all policies. O(policies and buckets)."""
        return {
            "added": sum(self.added.values()),
            "stopped": sum(self.stopped.values()),
            "passed_over": self.passed_over,
            "forced": self.forced_by_passes + self.forced_by_wait,
            "fallback_passes": self.fallback_passes,
            "state_saves": self.state_saves,
            "decode_steps": self.decode_steps,
            "homogeneous_decode_steps": self.homogeneous_decode_steps,
            "output_tokens": self.output_tokens,
            "pass_s_sum": self.pass_s.sum,
            "pass_count": self.pass_s.number,
            "reward": self.reward,
        }
