"""What a scheduling pass costs: SGLang's own policies and Feather, on identical queues, in one process and one run.

SGLang's policies are timed as its scheduler calls them, ``SchedulePolicy.calc_priority`` over a radix tree of the kind
that the installed SGLang uses by default, holding every group's prefix. Feather is timed through the hooks that the
server installs: looking for changes, planning, putting the plan at the head of the queue, answering for each request
that SGLang offers, and hearing what was admitted.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
import tracemalloc
from array import array
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

from feather_sglang.cht import chunk_hashes
from feather_sglang.engines.sglang import admission
from feather_sglang.engines.sglang.controller import Controller
from feather_sglang.scheduling import FeatherScheduler, Settings


@dataclass(frozen=True)
class Config:
    """The queue and how often to measure; lengths in tokens."""

    waiting: int = 1400
    groups: int = 8
    prefix_tokens: int = 4096
    suffix_tokens: int = 64
    admit: int = 16
    repeat: int = 20
    #: Empty the processor's caches before each measurement of Feather, as a decode step between two passes does.
    cold: bool = False


@dataclass(frozen=True)
class Row:
    """Medians for one policy; ``None`` where a figure has no meaning for it."""

    policy: str
    waiting: int
    prompt_tokens: int
    #: The whole pass in which ``admit`` requests are admitted, reordering of the list included.
    pass_ms: float
    #: Of that, choosing them and where to stop.
    decision_ms: float
    #: The same with one request to admit.
    first_admission_us: float | None
    #: A pass in which nothing changed.
    idle_pass_us: float
    #: One request arriving, hashing included.
    arrival_us: float | None
    #: One running request finishing.
    finish_us: float | None
    #: Memory of the index for one waiting request.
    bytes_per_request: float | None
    #: Entries in all heaps.
    heap_entries: int | None


def prompts(config: Config, seed: int = 0) -> Iterator[array[int]]:
    """Endless prompts, a group after the other, each with a suffix of its own."""
    rng = random.Random(seed)
    prefixes = [array("q", rng.choices(range(100_000), k=config.prefix_tokens)) for _ in range(config.groups)]
    while True:
        for prefix in prefixes:
            yield prefix + array("q", rng.choices(range(100_000), k=config.suffix_tokens))


def run(config: Config, policies: tuple[str, ...], say: Callable[[str], None]) -> list[Row]:
    """Measure each policy. Needs sglang installed, no GPU. Minutes for large queues under dfs-weight."""
    rows = []
    for policy in policies:
        say(f"{policy}: {config.waiting} waiting, {config.prefix_tokens} + {config.suffix_tokens} tokens")
        rows.append(_feather(config) if policy == "feather" else _sglang(config, policy))
    return rows


def ratio(rows: list[Row]) -> float | None:
    """How many times cheaper Feather's pass is than dfs-weight's, if both were measured."""
    by_policy = {row.policy: row.pass_ms for row in rows}
    if "dfs-weight" not in by_policy or "feather" not in by_policy:
        return None
    return by_policy["dfs-weight"] / by_policy["feather"]


def as_dict(config: Config, rows: list[Row]) -> dict[str, Any]:
    """The results for machines."""
    return {"config": asdict(config), "rows": [asdict(row) for row in rows], "ratio_dfs_over_feather": ratio(rows)}


def table(rows: list[Row]) -> str:
    """The results for reading."""

    def cell(value: float | None, width: int, digits: int = 1) -> str:
        return f"{'-' if value is None else format(value, f',.{digits}f'):>{width}}"

    lines = [
        f"{'policy':<12}{'waiting':>8}{'prompt':>8}{'pass ms':>10}{'decision':>10}{'first us':>10}{'idle us':>10}"
        f"{'arrival us':>11}{'finish us':>10}{'B/request':>10}{'entries':>9}"
    ]
    for r in rows:
        lines.append(
            f"{r.policy:<12}{r.waiting:>8}{r.prompt_tokens:>8}{cell(r.pass_ms, 10, 3)}{cell(r.decision_ms, 10, 3)}"
            f"{cell(r.first_admission_us, 10)}{cell(r.idle_pass_us, 10)}{cell(r.arrival_us, 11)}{cell(r.finish_us, 10)}"
            f"{cell(r.bytes_per_request, 10, 0)}{cell(r.heap_entries, 9, 0)}"
        )
    return "\n".join(lines)


# ------------------------------------------------------------------- SGLang's


def _sglang(config: Config, policy: str) -> Row:
    from sglang.srt.managers.schedule_policy import SchedulePolicy

    source = prompts(config)
    queue = [_request(number, next(source)) for number in range(config.waiting)]
    own = SchedulePolicy(policy, _radix_tree(config), False, False, False)
    running = SimpleNamespace(reqs=[])
    # SGLang sorts the queue anew at every pass, so a pass in which nothing changed costs the same.
    taken = [_timed(lambda: own.calc_priority(queue, running)) for _ in range(max(3, min(config.repeat, 10)))]
    pass_s = statistics.median(taken)
    return Row(
        policy=policy,
        waiting=config.waiting,
        prompt_tokens=config.prefix_tokens + config.suffix_tokens,
        pass_ms=pass_s * 1e3,
        decision_ms=pass_s * 1e3,
        first_admission_us=None,
        idle_pass_us=pass_s * 1e6,
        arrival_us=None,
        finish_us=None,
        bytes_per_request=None,
        heap_entries=None,
    )


def _request(number: int, tokens: array[int]) -> Any:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    return Req(str(number), "", tokens, SamplingParams(max_new_tokens=16))


def _radix_tree(config: Config) -> Any:
    """The installed SGLang's default radix tree, with every group's prefix in it."""
    import torch
    from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
    from sglang.srt.mem_cache.base_prefix_cache import InsertParams
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
    from sglang.srt.mem_cache.radix_cache import RadixKey
    from sglang.srt.mem_cache.unified_cache.components.base import ComponentType
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
    from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

    set_global_server_args_for_scheduler(ServerArgs(model_path="dummy", device="cpu", page_size=1))
    size = config.groups * config.prefix_tokens + 16
    half = torch.float16
    kv = MHATokenToKVPool(
        size=size, page_size=1, dtype=half, head_num=1, head_dim=1, layer_num=1, device="cpu", enable_memory_saver=False
    )
    slots = TokenToKVPoolAllocator(size=size, dtype=half, device="cpu", kvcache=kv, need_sort=False)
    rows = ReqToTokenPool(size=1, max_context_len=16, device="cpu", enable_memory_saver=False)
    tree = UnifiedRadixCache(
        params=CacheInitParams(
            disable=False,
            req_to_token_pool=rows,
            token_to_kv_pool_allocator=slots,
            page_size=1,
            tree_components=(ComponentType.FULL,),
        )
    )
    source = prompts(config)
    for _ in range(config.groups):
        prefix = next(source)[: config.prefix_tokens]
        tree.insert(InsertParams(key=RadixKey(prefix), value=slots.alloc(len(prefix))))
    return tree


# ------------------------------------------------------------------ Feather's


class _Engine:
    """What Feather's hooks see of SGLang's scheduler: a queue, a batch, budgets. Admits until its slots are full."""

    def __init__(self, config: Config) -> None:
        from sglang.srt.managers.schedule_policy import AddReqResult, SchedulePolicy

        self.go_on = AddReqResult.CONTINUE
        self.waiting_queue: list[Any] = []
        self.chunked_req = None
        self.running_batch = SimpleNamespace(reqs=[], batch_is_full=False)
        self.max_running_requests = config.admit + 2
        self.max_prefill_tokens, self.chunked_prefill_size, self.max_total_num_tokens = 10**9, None, 10**6
        self.policy = SchedulePolicy("fcfs", SimpleNamespace(disable=True), False, False, False)
        # Protect the batch from its third member on, so that a full group leaves the others waiting.
        self.controller = Controller(self, Settings(min_batch=2), 0)
        self.controller.attach()

    def scheduling_pass(self) -> list[Any]:
        admitted = admission.around_get_new_batch_prefill(_Engine._prefill, self, running_batch=self.running_batch)
        return cast("list[Any]", admitted[0] or [])

    def _prefill(self, running_batch: Any) -> tuple[list[Any] | None, Any]:
        if running_batch.batch_is_full:
            return None, running_batch
        admission.around_calc_priority(_own_policy, self.policy, self.waiting_queue, running_batch)
        admitted: list[Any] = []
        adder = SimpleNamespace(can_run_list=admitted, running_batch=running_batch)
        room = self.max_running_requests - len(running_batch.reqs)
        for req in self.waiting_queue:
            if len(admitted) >= room:
                break
            if admission.around_add_one_req(self._add_one, adder, req) is not self.go_on:
                break
        return admitted or None, running_batch

    def pass_without_feather(self) -> None:
        """The stand-in's own loop over the admitted requests, which is not Feather's and is taken off."""
        admitted: list[Any] = []
        adder = SimpleNamespace(can_run_list=admitted, running_batch=self.running_batch)
        room = self.max_running_requests - len(self.running_batch.reqs)
        for req in self.waiting_queue:
            if len(admitted) >= room:
                break
            if self._add_one(adder, req) is not self.go_on:
                break

    def _add_one(self, adder: Any, req: Any) -> Any:
        adder.can_run_list.append(req)
        return self.go_on

    def take(self, admitted: list[Any]) -> None:
        """SGLang's own part after a pass: the admitted leave the queue and are prefilled."""
        chosen = set(admitted)
        self.waiting_queue = [req for req in self.waiting_queue if req not in chosen]
        self.running_batch.reqs += admitted
        for req in admitted:
            req.output_ids.append(0)


def _own_policy(*_: Any, **__: Any) -> None:
    raise RuntimeError("Feather handed the pass over to SGLang's policy: the measurement is void")


def _feather(config: Config) -> Row:
    engine, source, number = _Engine(config), prompts(config), config.waiting
    engine.waiting_queue = [_request(n, next(source)) for n in range(config.waiting)]
    engine.take(engine.scheduling_pass())  # everybody arrives, and the first group's leader goes ahead
    prefix = engine.running_batch.reqs[0].origin_input_ids[: config.prefix_tokens]
    gc.collect()
    gc.freeze()  # as SGLang's server does after its start
    times: dict[str, list[float]] = {name: [] for name in ("pass", "first", "decision", "finish")}

    evict = _evictor() if config.cold else _nothing

    def timed_pass(name: str, room: int) -> None:
        engine.max_running_requests = len(engine.running_batch.reqs) + room
        bare = min(_timed(engine.pass_without_feather) for _ in range(3))
        evict()
        started = time.perf_counter()
        admitted = engine.scheduling_pass()
        times[name].append(time.perf_counter() - started - bare)
        engine.take(admitted)

    for _ in range(config.repeat):
        timed_pass("first", 1)
        core, batch = engine.controller._core, engine.running_batch
        engine.controller._observe(batch)
        evict()
        times["decision"].append(_timed(partial(core.plan, config.admit, 10**9)))
        core.confirm(())
        timed_pass("pass", config.admit)
        # Everybody but the leader finishes, and as many siblings arrive.
        while len(batch.reqs) > 1:
            times["finish"].append(_timed(partial(core.leave, batch.reqs.pop())))
            engine.waiting_queue.append(_request(number, prefix + next(source)[config.prefix_tokens :]))
            number += 1
        engine.controller._observe(batch)
    gc.unfreeze()
    arrival, size, entries = _index_costs(config)
    median = {name: statistics.median(taken) for name, taken in times.items()}
    return Row(
        policy="feather",
        waiting=config.waiting,
        prompt_tokens=config.prefix_tokens + config.suffix_tokens,
        pass_ms=median["pass"] * 1e3,
        decision_ms=median["decision"] * 1e3,
        first_admission_us=median["first"] * 1e6,
        idle_pass_us=_idle_us(config),
        arrival_us=arrival,
        finish_us=median["finish"] * 1e6,
        bytes_per_request=size,
        heap_entries=entries,
    )


def _idle_us(config: Config) -> float:
    """A pass in which nothing changed: a group runs, has nobody waiting, and is worth protecting from the others."""
    engine, source = _Engine(config), prompts(config)
    engine.max_running_requests = 64
    running = array("q", range(config.prefix_tokens))
    engine.waiting_queue = [_request(n, running + array("q", [n] * 64)) for n in range(4)]
    for _ in range(3):
        engine.take(engine.scheduling_pass())
    engine.waiting_queue = [_request(4 + n, next(source)) for n in range(config.waiting)]
    engine.scheduling_pass()
    if not engine.controller.nothing_to_do(engine.running_batch):
        raise RuntimeError("the pass is not idle: the measurement is void")
    return statistics.median(_timed(engine.scheduling_pass) for _ in range(100)) * 1e6


def _index_costs(config: Config) -> tuple[float, float, int]:
    """One arrival in microseconds, bytes of the index for one waiting request, entries in all heaps."""
    core = FeatherScheduler(Settings(), config.admit)
    source = prompts(config)
    queue = [next(source) for _ in range(config.waiting)]
    rids = list(range(config.waiting))
    gc.collect()
    tracemalloc.start()
    for rid, tokens in zip(rids, queue, strict=True):
        core.arrive(rid, chunk_hashes(tokens), len(tokens))
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    arrivals = []
    for extra in range(max(50, config.repeat)):
        tokens = next(source)
        started = time.perf_counter()
        core.arrive(("new", extra), chunk_hashes(tokens), len(tokens))
        arrivals.append(time.perf_counter() - started)
    entries = core.tree.num_heap_entries
    return statistics.median(arrivals) * 1e6, size / config.waiting, entries


def _evictor() -> Callable[[], object]:
    """Reads more memory than the processor's caches hold."""
    import numpy

    return numpy.ones(2**24).sum  # 128 MB


def _nothing() -> None:
    """Leave the caches as the last measurement left them."""


def _timed(action: Callable[[], Any]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


SWEEP_WAITING = (100, 1000, 4000, 16_000, 64_000)
SWEEP_TOKENS = (512, 2048, 8192, 32_768, 100_000)


def sweep(repeat: int, say: Callable[[str], None], cold: bool = False) -> list[Row]:
    """Feather alone, one admission: queue lengths at 1,024 + 64 tokens, then prompt lengths at 1,000 waiting."""
    base = Config(repeat=repeat, admit=1, cold=cold)
    configs = [replace(base, waiting=waiting, prefix_tokens=1024) for waiting in SWEEP_WAITING]
    configs += [replace(base, waiting=1000, prefix_tokens=tokens - 64) for tokens in SWEEP_TOKENS]
    return [row for config in configs for row in run(config, ("feather",), say)]


def plot(rows: list[Row], path: str) -> None:
    """Draw a sweep: one admission, an idle pass and an arrival, against queue length and prompt length."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True)
    by_queue, by_prompt = rows[: len(SWEEP_WAITING)], rows[len(SWEEP_WAITING) :]
    for axes, part, name in ((left, by_queue, "waiting"), (right, by_prompt, "prompt_tokens")):
        across = [getattr(row, name) for row in part]
        for label, values in (
            ("pass, one admission", [row.pass_ms * 1e3 for row in part]),
            ("decision, one admission", [row.decision_ms * 1e3 for row in part]),
            ("arrival, hashing included", [row.arrival_us for row in part]),
            ("pass in which nothing changed", [row.idle_pass_us for row in part]),
        ):
            axes.plot(across, values, marker="o", label=label)
        axes.set(xscale="log", yscale="log", xlabel=name.replace("_", " "))
        axes.grid(True, which="both", alpha=0.3)
    left.set_ylabel("microseconds (median)")
    left.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
