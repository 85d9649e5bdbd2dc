"""Feather's own scheduler in the simulated engine, told and asked as SGLang's controller does it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from feather_sglang.scheduling import FeatherScheduler, Settings
from feather_sglang.scheduling.decode_meter import DecodeMeter
from feather_sglang.simulation.cache import PrefixCache
from feather_sglang.simulation.job import Job
from feather_sglang.simulation.queues import Queue

#: Decode steps after a prefill that don't count for a reward, without overlap scheduling.
SETTLE = 1


class Feather(Queue):
    """``FeatherScheduler`` as a queue.

    Args:
        cache: the engine's.
        settings: Feather's settings.
        max_running: the engine's running slots.
        token_budget: prompt tokens that one prefill computes at most.
    """

    def __init__(self, cache: PrefixCache, settings: Settings, max_running: int, token_budget: int) -> None:
        super().__init__(cache)
        self.core = FeatherScheduler(settings, max_running, kv_tokens=cache.capacity)
        self._chunk_size = settings.chunk_size
        self._token_budget = token_budget
        self._changed = False  # a skipped pass found that its plan no longer holds
        self._meter = DecodeMeter(SETTLE) if self.core.policy.learns else None

    def __len__(self) -> int:
        return self.core.tree.num_waiting

    def add(self, job: Job) -> None:
        """See ``FeatherScheduler``."""
        if job in self.core:
            self.core.retract(job)
            return
        self.work.arrived += 1
        self.work.arrived_tokens += job.prompt
        self.core.arrive(job, job.request.chunk_hashes(self._chunk_size), job.prompt)

    def candidates(self, slots: int) -> Sequence[Job]:
        """The plan; nobody where the last plan was "nobody" and still holds."""
        self.work.passes += 1
        changed, self._changed = self._changed, False
        # Asked only beside a running batch: with nobody running the plan is never empty.
        if not changed and self.core.unchanged():
            return ()
        return cast(list[Job], self.core.plan(slots, self._token_budget).order)

    def skip(self, passes: int) -> int:
        """O(passes), each an addition and a comparison."""
        for number in range(passes):
            if not self.core.unchanged():
                self._changed = True
                return number
        return passes

    def admitted(self, jobs: Sequence[Job]) -> None:
        """Rewards first: what was decoded so far came of the batch as it was."""
        if jobs and self._meter is not None:
            measured = self._meter.take()
            if measured is not None:
                self.core.policy.learn(self.core.interval, *measured)
        self.work.admitted += len(jobs)
        self.core.confirm(jobs)
        for job in jobs:
            if job.stored:
                self.core.progress(job, job.stored)

    def begin(self, now_s: float) -> None:
        """See ``DecodeMeter`` and ``FeatherScheduler.tick``; within a jump over equal passes the time stands still."""
        self.core.tick(now_s)
        if self._meter is not None:
            self._meter.begin(now_s)

    def end(self, prefill: bool, tokens: int) -> None:
        """See ``DecodeMeter``; several equal decode steps count as one that makes their tokens."""
        if self._meter is not None:
            self._meter.end(prefill, tokens)

    def progress(self, job: Job) -> None:
        """See ``FeatherScheduler``."""
        self.core.progress(job, None if job.stored == job.prompt else job.stored)

    def left(self, job: Job) -> None:
        """See ``FeatherScheduler``."""
        self.work.left += 1
        self.core.leave(job, job.generated)
