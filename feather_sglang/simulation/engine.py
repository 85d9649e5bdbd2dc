"""The simulated engine: a discrete-event model of SGLang's scheduler loop without overlap scheduling, page size 1.

Prefill goes before decode. A prefill takes what the budgets allow of the candidates that the policy names, in their
order, and ends at the first that does not fit; a prompt longer than what is left of a chunk is split, one at a time.
Decode steps are taken many at once, up to the next thing that can change anything: a request that ends, an arrival that
the policy would look at, or the KV pool running full, which retracts requests as SGLang does.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from feather_sglang.scheduling import Settings
from feather_sglang.simulation.cache import PrefixCache
from feather_sglang.simulation.cost import Batch, StepCost, scheduling_s
from feather_sglang.simulation.job import Job
from feather_sglang.simulation.metrics import Recorder
from feather_sglang.simulation.names import make_queue
from feather_sglang.simulation.profiles import PassCost
from feather_sglang.simulation.workload import Request, Workload

#: SGLang reserves at most so many output tokens for a request.
_CLIP_OUTPUT = 4096
# The share of running requests' remaining output that is reserved: at first, at least, and less with each decode step.
_RATIO, _LEAST_RATIO = 0.7, 0.7 * 0.14
_DECAY = (_RATIO - _LEAST_RATIO) / 600
# Decode steps for which a retraction makes room.
_RETRACT_STEPS = 20
# Decode steps taken at once; tests take them one by one.
_LONGEST_JUMP = 1 << 30


@dataclass(frozen=True)
class EngineConfig:
    """SGLang's limits, in tokens; the defaults are SGLang's on a GPU of 80 GB."""

    kv_tokens: int
    max_running: int = 256
    max_prefill_tokens: int = 16384
    #: ``None``: prompts are not split.
    chunked_prefill_tokens: int | None = 8192

    @property
    def token_budget(self) -> int:
        """Prompt tokens of one prefill."""
        return min(self.max_prefill_tokens, self.chunked_prefill_tokens or self.max_prefill_tokens)


class Engine:
    """One engine, one policy, one workload. Deterministic: no clock, no chance.

    Args:
        workload: its nodes hold the cache's state, so it serves one engine at a time; they are reset here.
        config: the engine's limits.
        steps: the time of steps.
        passes: the time of scheduling passes.
        policy: one of ``names.POLICIES``.
        settings: Feather's.
        progress: called now and then with the number of finished requests.
    """

    def __init__(
        self,
        workload: Workload,
        config: EngineConfig,
        steps: StepCost,
        passes: PassCost,
        policy: str,
        settings: Settings | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        for node in workload.nodes:
            node.reset()
        self.config = config
        self.cache = PrefixCache(config.kv_tokens)
        self.queue = make_queue(policy, self.cache, settings or Settings(), config.max_running, config.token_budget)
        self.recorder = Recorder()
        self.now_s = 0.0
        self.batch = Batch()
        self._steps, self._passes = steps, passes
        self._fixed_output = workload.fixed_output
        self._requests = workload.requests
        self._next = 0  # of the requests, the first that has not arrived
        self._running: dict[Job, None] = {}  # in order of admission
        self._ends: list[tuple[int, int, Job]] = []  # heap of (finish step, request, job); those retracted drop out
        self._step = 0  # decode steps so far
        self._remaining = 0  # sum of the running requests' finish steps
        self._chunked: Job | None = None
        self._full = False
        self._after_prefill = False
        self._ratio = _RATIO
        self._progress = progress

    def run(self) -> Recorder:
        """Serve the whole workload. O(events), with a few microseconds for each request, prefill and jump."""
        while True:
            self._arrive()
            if not (self._running or len(self.queue) or self._chunked):
                if self._next == len(self._requests):
                    break
                self._ratio = _RATIO
                self.now_s = max(self.now_s, self._requests[self._next].arrival_s)
                continue
            self.queue.begin(self.now_s)
            prefill = self._pass()
            self._charge()
            if prefill:
                self.queue.end(True, 0)
                self._prefill(prefill)
            elif self._running:
                self._decode()
        self.recorder.end_s = self.now_s
        return self.recorder

    def _arrive(self) -> None:
        requests, number = self._requests, self._next
        while number < len(requests) and requests[number].arrival_s <= self.now_s:
            request = requests[number]
            number += 1
            if _needed(request) > self.config.kv_tokens:
                self.recorder.refused += 1
                continue
            self.queue.add(Job(request))
        self._next = number

    # ---------------------------------------------------------------- passes

    def _pass(self) -> list[tuple[Job, int]]:
        """A scheduling pass: whom to prefill, and how many tokens of each."""
        running, chunked = len(self._running), self._chunked
        if not running:
            self._full = False
        if (self._full or not len(self.queue)) and chunked is None:
            return []
        slots = self.config.max_running - running - (chunked is not None)
        if slots <= 0 and chunked is None:
            self._full = True
            return []
        candidates = self.queue.candidates(slots)
        ratio = 1.0 if self._fixed_output else self._ratio
        budget = _Budget(self.config, (self._remaining - running * self._step) * ratio)
        chosen: list[tuple[Job, int]] = []
        if chunked is not None:
            chosen.append((chunked, self._go_on(chunked, budget)))
        admitted: list[Job] = []
        for job in candidates:
            if budget.spent():
                break
            if len(admitted) >= slots:
                self._full = True
                break
            extend = self._admit(job, budget)
            if extend is None:
                break
            admitted.append(job)
            chosen.append((job, extend))
            if budget.reserved >= self.cache.available:
                self._full = True
                break
        self.queue.admitted(admitted)
        return chosen

    def _go_on(self, job: Job, budget: _Budget) -> int:
        """The next chunk of the prompt that is being split."""
        assert budget.chunk is not None
        left = job.to_compute - job.computed
        room = min(budget.chunk, int(self.cache.available - budget.reserved))
        extend = min(left, room if room > 0 else budget.chunk)
        if extend == left:
            self._chunked = None
        budget.take(extend, min(job.to_generate - job.generated, _CLIP_OUTPUT) if extend == left else 0)
        return extend

    def _admit(self, job: Job, budget: _Budget) -> int | None:
        """Take a candidate if it fits; returns the tokens to compute now."""
        cache = self.cache
        matched = cache.match(job)
        extend = job.to_compute - matched
        output = min(max(job.to_generate - job.generated, 0), _CLIP_OUTPUT)
        cache.lock(job)  # what it needs can't be evicted for it
        if extend + output + 1 >= cache.available - budget.reserved:
            cache.unlock(job)
            self._full = bool(self._running) or budget.taken > 0
            return None
        if budget.chunk is None and budget.taken and extend >= budget.tokens:
            cache.unlock(job)
            return None
        if budget.chunk is not None and extend > budget.chunk:
            extend, output = budget.chunk, 0
            self._chunked = job
        if job.started_s < 0:
            job.started_s = self.now_s
            self.recorder.started(job, matched, self.now_s)
        job.computed, job.stored = matched, min(matched, job.prompt)
        budget.take(extend, output)
        return extend

    def _charge(self) -> None:
        """The pass, and what else the policy has done since the last one, takes time."""
        seconds = scheduling_s(self._passes, self.queue.work)
        self.now_s += seconds - self.recorder.scheduling_s
        self.recorder.scheduling_s = seconds

    # ----------------------------------------------------------------- steps

    def _prefill(self, chosen: list[tuple[Job, int]]) -> None:
        cache = self.cache
        tokens = pairs = read = 0
        for job, extend in chosen:
            cache.allocate(extend)
            job.own += extend
            tokens += extend
            read += job.computed
            pairs += extend * job.computed + extend * (extend + 1) // 2
            job.computed += extend
        seconds = self._steps.prefill(tokens, pairs, read)
        self.now_s += seconds
        self.recorder.prefilled(seconds)
        self._after_prefill = True
        for job, _ in chosen:
            cache.store(job, min(job.computed, job.prompt))
            self.queue.progress(job)
            if job is not self._chunked:
                self._join(job)

    def _join(self, job: Job) -> None:
        """A prefill is complete: the request has a token more, and decodes unless that was the last."""
        job.generated += 1
        if job.first_s < 0:
            job.first_s = self.now_s
        if job.generated >= job.to_generate:
            self._done(job)
            return
        job.joined_step = self._step
        job.finish_step = self._step + job.to_generate - job.generated
        self._remaining += job.finish_step
        self._running[job] = None
        heappush(self._ends, (job.finish_step, job.request.number, job))
        batch = self.batch
        batch.requests += 1
        batch.read += job.prompt + job.generated
        batch.distinct += job.generated
        for node in job.nodes:
            node.running += 1
            if node.running == 1:
                batch.distinct += node.length
            elif node.running == 2:
                batch.shared += node.length

    def _depart(self, job: Job) -> None:
        """A request decodes no longer; what it generated is brought up to now."""
        new = self._step - job.joined_step
        job.generated += new
        job.own += new
        del self._running[job]
        self._remaining -= job.finish_step
        self._full = False
        batch = self.batch
        batch.requests -= 1
        batch.read -= job.prompt + job.generated
        batch.distinct -= job.generated
        for node in job.nodes:
            node.running -= 1
            if node.running == 0:
                batch.distinct -= node.length
            elif node.running == 1:
                batch.shared -= node.length

    def _done(self, job: Job) -> None:
        self.cache.finish(job)
        self.queue.left(job)
        self.recorder.finished(job, self.now_s)
        if self._progress is not None and self.recorder.completed % 256 == 0:
            self._progress(self.recorder.completed)

    def _decode(self) -> None:
        """As many decode steps as nothing happens."""
        batch = self.batch
        fit = self.cache.available // batch.requests
        if fit < 1:
            self._retract()
            self.queue.end(False, 0)
            return
        first_s, more_s = self._steps.decode(batch)
        steps = min(self._ends[0][0] - self._step, fit, _LONGEST_JUMP)
        if not self._full and self._next < len(self._requests):
            steps = min(steps, _steps_until(self._requests[self._next].arrival_s - self.now_s, first_s, more_s))
        if self._after_prefill:
            steps = 1  # rewards leave it out
        self._after_prefill = False
        if not self._full and len(self.queue):
            steps = 1 + self.queue.skip(steps - 1)
        seconds = steps * first_s + more_s * steps * (steps - 1) / 2
        tokens = steps * batch.requests
        self.cache.allocate(tokens)
        self.queue.end(False, tokens)
        self.recorder.decoded(batch, self._common_depth(), steps, seconds)
        self.now_s += seconds
        self._step += steps
        self._ratio = max(self._ratio - steps * _DECAY, _LEAST_RATIO)
        batch.read += tokens
        batch.distinct += tokens
        self._arrive()  # before those leave whom an arrival may follow, however many steps were one
        while self._ends and self._ends[0][0] <= self._step:
            job = heappop(self._ends)[2]
            self._depart(job)
            self._done(job)

    def _common_depth(self) -> int:
        """Tokens that all requests of the batch share; 0 for a batch of one."""
        count = self.batch.requests
        depth = 0
        if count > 1:
            for node in next(iter(self._running)).nodes:
                if node.running < count:
                    break
                depth += node.length
        return depth

    def _retract(self) -> None:
        """The KV pool is full: those with the fewest outputs so far lose their KV and wait again."""
        step = self._step
        kept = sorted(self._running, key=lambda job: (job.output_at(step), -job.prompt), reverse=True)
        gone: list[Job] = []
        while len(kept) > 1 and (not gone or self.cache.available < len(kept)):
            job = kept.pop()
            self._depart(job)
            self.cache.drop(job)
            job.retractions += 1
            gone.append(job)
        if self.cache.available < len(kept):
            raise MemoryError("one request alone does not fit, though it was let in")
        out = set(gone)
        self._ends = [end for end in self._ends if end[2] not in out]
        heapify(self._ends)
        outputs = sum(job.output_at(step) for job in kept)
        self._ratio = min(1.0, (outputs + _RETRACT_STEPS * len(kept)) / (sum(job.to_generate for job in kept) + 1))
        for job in gone:
            self.queue.add(job)
        self.recorder.retracted += len(gone)


class _Budget:
    """What is left of one prefill's budgets, in tokens."""

    def __init__(self, config: EngineConfig, reserved: float) -> None:
        self.tokens = config.max_prefill_tokens
        self.chunk = config.chunked_prefill_tokens
        self.reserved = reserved  # of the KV pool, for those who run and those taken
        self.taken = 0

    def take(self, extend: int, output: int) -> None:
        self.tokens -= extend
        if self.chunk is not None:
            self.chunk -= extend
        self.reserved += extend + output + 1
        self.taken += 1

    def spent(self) -> bool:
        return self.tokens <= 0 or (self.chunk is not None and self.chunk <= 0)


def _needed(request: Request) -> int:
    """KV tokens without which a request can never run."""
    return request.prompt_tokens + request.output_tokens + 2


def _steps_until(seconds: float, first_s: float, more_s: float) -> int:
    """Decode steps that have begun before so many seconds are over, at least one: n with first n + more n(n-1)/2."""
    if seconds <= first_s:
        return 1
    half = first_s - more_s / 2  # may be negative, but never as large as the root
    root = math.sqrt(half * half + 2 * more_s * seconds)
    return max(1, math.ceil(2 * seconds / (root + half) if half > 0 else (root - half) / more_s))
