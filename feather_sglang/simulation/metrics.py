"""What a simulated run is measured by."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from feather_sglang.simulation.cost import Batch
from feather_sglang.simulation.job import Job


@dataclass(frozen=True)
class Result:
    """One policy's figures; everything is simulated. Times in seconds, depths in tokens, shares between 0 and 1."""

    policy: str
    completed: int
    #: Requests that can never fit into the KV pool.
    refused: int
    duration_s: float
    output_tokens_per_s: float
    requests_per_s: float
    #: Output tokens over the time of decode steps alone.
    decode_tokens_per_s: float
    ttft_p50_s: float
    ttft_p95_s: float
    ttft_p99_s: float
    tpot_p50_s: float
    tpot_p95_s: float
    tpot_p99_s: float
    #: From arrival to first admission.
    longest_wait_s: float
    #: Of prompt tokens, at first admission.
    cached_share: float
    #: Requests in a decode step, and tokens that all of them share (0 for a batch of one).
    mean_batch: float
    mean_shared_depth: float
    #: Time of scheduling passes beside the time of prefills and decode steps.
    scheduling_share: float
    retracted: int


class Recorder:
    """Collects while the engine runs."""

    def __init__(self) -> None:
        self.completed = self.refused = self.retracted = 0
        self.scheduling_s = self.end_s = 0.0
        self.order: list[int] = []  # numbers of requests, in order of first admission
        self._first_s = math.inf
        self._prefill_s = self._decode_s = 0.0
        self._steps = self._step_tokens = self._outputs = 0
        self._depth_steps = 0
        self._prompt = self._cached = 0
        self._longest_wait_s = 0.0
        self._ttft_s: list[float] = []
        self._tpot_s: list[float] = []

    def started(self, job: Job, cached: int, now_s: float) -> None:
        """First admission."""
        self.order.append(job.request.number)
        self._prompt += job.prompt
        self._cached += cached
        self._first_s = min(self._first_s, job.request.arrival_s)
        self._longest_wait_s = max(self._longest_wait_s, now_s - job.request.arrival_s)

    def prefilled(self, seconds: float) -> None:
        """A prefill has run."""
        self._prefill_s += seconds

    def decoded(self, batch: Batch, common_depth: int, steps: int, seconds: float) -> None:
        """So many decode steps of the same batch have run."""
        self._decode_s += seconds
        self._steps += steps
        self._step_tokens += steps * batch.requests
        self._depth_steps += steps * common_depth

    def finished(self, job: Job, now_s: float) -> None:
        """A request has its last token."""
        self.completed += 1
        self._outputs += job.generated
        self._ttft_s.append(job.first_s - job.request.arrival_s)
        if job.generated > 1:
            self._tpot_s.append((now_s - job.first_s) / (job.generated - 1))

    def result(self, policy: str) -> Result:
        """The figures. O(requests log requests)."""
        duration_s = self.end_s - self._first_s if self.completed else 0.0
        ttft, tpot = sorted(self._ttft_s), sorted(self._tpot_s)
        return Result(
            policy=policy,
            completed=self.completed,
            refused=self.refused,
            duration_s=duration_s,
            output_tokens_per_s=_ratio(self._outputs, duration_s),
            requests_per_s=_ratio(self.completed, duration_s),
            decode_tokens_per_s=_ratio(self._step_tokens, self._decode_s),
            ttft_p50_s=percentile(ttft, 50),
            ttft_p95_s=percentile(ttft, 95),
            ttft_p99_s=percentile(ttft, 99),
            tpot_p50_s=percentile(tpot, 50),
            tpot_p95_s=percentile(tpot, 95),
            tpot_p99_s=percentile(tpot, 99),
            longest_wait_s=self._longest_wait_s,
            cached_share=_ratio(self._cached, self._prompt),
            mean_batch=_ratio(self._step_tokens, self._steps),
            mean_shared_depth=_ratio(self._depth_steps, self._steps),
            scheduling_share=_ratio(self.scheduling_s, self._prefill_s + self._decode_s),
            retracted=self.retracted,
        )


def percentile(ascending: Sequence[float], percent: float) -> float:
    """Nearest rank; 0 of nothing."""
    if not ascending:
        return 0.0
    return ascending[max(0, math.ceil(percent / 100 * len(ascending)) - 1)]


def _ratio(a: float, b: float) -> float:
    return a / b if b else 0.0
