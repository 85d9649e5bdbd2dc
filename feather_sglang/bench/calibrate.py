"""What a decode step costs on this machine, by batch size, distinct prefixes and prefix length; written as a profile.

One layer's decode attention is timed with the kernel that the engine uses. Requests consist of their prefix alone: what
a request has of its own costs the same in every batch. Two layouts of a batch of several prefixes are measured, since a
CPU works through a batch in its order: ``grouped``, siblings next to each other, and ``interleaved``, siblings as far
apart as can be, which is what arrival order comes to. A GPU runs all requests at once and hardly tells them apart.

The measurements are a list of ``Point`` and a list of ``SweepPoint``; ``derive`` turns them into the machine's figures
and is a pure function. Importing this module needs neither torch nor numba.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

#: Of the profile; the version goes up when a field changes its meaning.
FORMAT, VERSION = "feather-sglang machine profile", 1

BATCHES = (1, 2, 4, 8, 16, 32, 64)
DISTINCT_PREFIXES = (1, 2, 4, 8, 16)
PREFIX_TOKENS = (1024, 4096, 16_384)
GROUPED, INTERLEAVED, ONE_DIVERGENT = "grouped", "interleaved", "one divergent"

#: Footprints of the sweep for the cache's size: 4 MiB to 512 MiB in steps of a fourth root of two.
SWEEP_BYTES = tuple(round(2 ** (22 + step / 4)) for step in range(29))
#: Requests of the sweep, all distinct.
SWEEP_BATCH = 8

#: Of all layers together, beyond the largest footprint: far above any cache.
_OTHER_KV_BYTES = 1 << 30
#: Seconds spent on each cell and on each footprint of the sweep; a cell is run at least _LEAST times.
_CELL_SECONDS, _SWEEP_SECONDS, _LEAST = 0.35, 0.25, 5
#: Other processes' share of a core from which on the report warns. The kernel's threads wait for the slowest of them.
_BUSY_CORES = 0.1


@dataclass(frozen=True)
class Cell:
    """A batch to measure: ``distinct_prefixes`` prefixes of ``prefix_tokens`` tokens shared out over ``batch``."""

    batch: int
    distinct_prefixes: int
    prefix_tokens: int
    order: str

    def prefixes(self) -> list[int]:
        """The number of each request's prefix, in batch order."""
        if self.order == ONE_DIVERGENT:
            return [int(request == self.batch // 2) for request in range(self.batch)]
        if self.order == INTERLEAVED:
            return [request % self.distinct_prefixes for request in range(self.batch)]
        return [request * self.distinct_prefixes // self.batch for request in range(self.batch)]


@dataclass(frozen=True)
class Point(Cell):
    """A measured cell: median time of one layer's decode attention."""

    time_ms: float
    repeats: int


@dataclass(frozen=True)
class SweepPoint:
    """The same ``footprint_bytes`` of KV read again and again, every byte once a time: median time of one reading."""

    footprint_bytes: int
    time_ms: float


@dataclass(frozen=True)
class Layer:
    """The attention layer that was measured."""

    query_heads: int
    kv_heads: int
    head_dim: int
    kv_dtype: str
    kv_dtype_bytes: int
    page_size_tokens: int

    @property
    def kv_bytes_per_token(self) -> int:
        """K and V of one token."""
        return 2 * self.kv_heads * self.head_dim * self.kv_dtype_bytes


#: The demo model's: what is left of a layer when decode attention dominates.
CPU_LAYER = Layer(query_heads=2, kv_heads=2, head_dim=128, kv_dtype="float32", kv_dtype_bytes=4, page_size_tokens=1)


@dataclass(frozen=True)
class Machine:
    """What was measured on. Cache sizes as the system states them; 0 where it does not."""

    name: str
    device: str
    kernel: str
    cores: int
    threads: int
    reported_cache_bytes: int
    #: Of all cores' own caches together, below the last level.
    reported_private_cache_bytes: int


@dataclass(frozen=True)
class Divergence:
    """One request of another prefix in the middle of a batch that is otherwise of one prefix.

    ``cost_ms`` is what the step takes longer than one of as many requests all of one prefix; ``cost_relative`` is that
    as a share of the homogeneous step.
    """

    batch: int
    prefix_tokens: int
    homogeneous_ms: float
    divergent_ms: float
    cost_ms: float
    cost_relative: float


@dataclass(frozen=True)
class Derived:
    """What follows from the measurements; see ``derive``. GB are 10**9 bytes."""

    memory_gb_s: float
    cache_gb_s: float
    #: None where the sweep does not cross between the two bandwidths.
    cache_bytes: int | None
    divergence: tuple[Divergence, ...]


@dataclass(frozen=True)
class Profile:
    """A machine, its measurements, and what follows from them."""

    machine: Machine
    layer: Layer
    #: Cores that other processes of this system used while it was measured; None where that can't be told.
    busy_elsewhere_cores: float | None
    points: tuple[Point, ...]
    sweep: tuple[SweepPoint, ...]
    derived: Derived


# ------------------------------------------------------------------------ files


def as_json(profile: Profile) -> str:
    """The profile as it is stored."""
    return json.dumps({"format": FORMAT, "version": VERSION} | asdict(profile), indent=1)


def from_json(text: str) -> Profile:
    """A stored profile, or what ``cuda_decode.py`` measured by itself. All that is derived is derived anew.

    Raises:
        ValueError: not a profile, or of another version; in one line.
    """
    try:
        found = json.loads(text)
        if (found["format"], found["version"]) != (FORMAT, VERSION):
            raise ValueError(f"'{found['format']}' of version {found['version']}, not '{FORMAT}' of version {VERSION}")
        machine, layer = Machine(**found["machine"]), Layer(**found["layer"])
        points = tuple(Point(**each) for each in found["points"])
        sweep = tuple(SweepPoint(**each) for each in found["sweep"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"not a '{FORMAT}': {error}") from None
    busy = found.get("busy_elsewhere_cores")
    return Profile(machine, layer, busy, points, sweep, derive(machine, layer, points, sweep))


# ------------------------------------------------------------------- derivations


def derive(machine: Machine, layer: Layer, points: Sequence[Point], sweep: Sequence[SweepPoint]) -> Derived:
    """The machine's figures from the grid and the sweep. O(points).

    Raises:
        ValueError: the grid lacks a batch of distinct prefixes, or batches of two sizes with one prefix, or of these
            the larger took no longer.
    """
    memory = memory_gb_s(layer, points)
    cache = cache_gb_s(layer, points, machine.reported_private_cache_bytes)
    return Derived(memory, cache, cache_bytes(sweep, memory, cache), divergence(points))


def memory_gb_s(layer: Layer, points: Iterable[Point]) -> float:
    """Bandwidth from memory: bytes over time of the batch with the largest footprint in which no prefix comes twice.

    No byte of it is read twice in a step, and other layers' KV passed through the caches since the step before.
    """
    distinct = [point for point in points if point.distinct_prefixes == point.batch]
    if not distinct:
        raise ValueError("the grid has no batch of distinct prefixes")
    largest = max(distinct, key=lambda point: point.batch * point.prefix_tokens)
    return largest.batch * largest.prefix_tokens * layer.kv_bytes_per_token / largest.time_ms / 1e6


def cache_gb_s(layer: Layer, points: Iterable[Point], private_cache_bytes: int) -> float:
    """Bandwidth from the last-level cache: bytes of a prefix over the time that one more request of that prefix adds.

    The first request of a batch brings the prefix into the cache, the others find it there; so the slope of time over
    batch size, between the smallest batch and the largest, is that of the others. The prefix is the shortest that is
    more than twice the cores' own caches, so that these don't hold it, or the longest there is.
    """
    by_tokens: dict[int, list[Point]] = {}
    for point in points:
        if point.distinct_prefixes == 1:
            by_tokens.setdefault(point.prefix_tokens, []).append(point)
    usable = [tokens for tokens in by_tokens if tokens * layer.kv_bytes_per_token > 2 * private_cache_bytes] or [
        max(by_tokens, default=0)
    ]
    chosen = sorted(by_tokens.get(min(usable), []), key=lambda point: point.batch)
    if len(chosen) < 2:
        raise ValueError("the grid has no two batches of one prefix")
    first, last = chosen[0], chosen[-1]
    if last.time_ms <= first.time_ms:
        raise ValueError("a larger batch took no longer than a smaller one: something else kept the machine busy")
    more_bytes = (last.batch - first.batch) * last.prefix_tokens * layer.kv_bytes_per_token
    return more_bytes / (last.time_ms - first.time_ms) / 1e6


def cache_bytes(sweep: Iterable[SweepPoint], memory_gb_s: float, cache_gb_s: float) -> int | None:
    """Effective size of the last-level cache: the footprint at which the bandwidth of reading it again and again falls
    below the geometric mean of the two; between two footprints of the sweep, linear in the logarithms of both.

    Less than the system reports where a virtual machine shares the cache, and where the cache replaces what is needed
    next. None where the sweep lies on one side.
    """
    middle = math.log(math.sqrt(memory_gb_s * cache_gb_s))
    curve = [(math.log(p.footprint_bytes), math.log(p.footprint_bytes / p.time_ms / 1e6)) for p in sweep]
    curve.sort()
    # Small footprints may be slow too, where a call's fixed cost outweighs their reading: so, from the fastest one on.
    curve = curve[max(range(len(curve)), key=lambda number: curve[number][1]) :]
    for (size, above), (next_size, below) in itertools.pairwise(curve):
        if below <= middle < above:
            return round(math.exp(size + (above - middle) / (above - below) * (next_size - size)))
    return None


def divergence(points: Iterable[Point]) -> tuple[Divergence, ...]:
    """Each batch with one divergent request, beside the homogeneous batch of the same size and prefix length."""
    found = []
    by_cell = {(p.batch, p.prefix_tokens, p.distinct_prefixes, p.order): p.time_ms for p in points}
    for (batch, tokens, _, order), divergent_ms in sorted(by_cell.items(), key=lambda item: (item[0][1], item[0][0])):
        if order == ONE_DIVERGENT:
            alone_ms = by_cell[batch, tokens, 1, GROUPED]
            cost_ms = divergent_ms - alone_ms
            found.append(Divergence(batch, tokens, alone_ms, divergent_ms, cost_ms, cost_ms / alone_ms))
    return tuple(found)


# ------------------------------------------------------------------- measurement


def grid(
    batches: Sequence[int] = BATCHES,
    distinct: Sequence[int] = DISTINCT_PREFIXES,
    prefix_tokens: Sequence[int] = PREFIX_TOKENS,
) -> list[list[Cell]]:
    """Cells to measure, those of one batch size and prefix length together.

    Orders that come to the same batch are there once, as ``grouped``.
    """
    groups = []
    for tokens in prefix_tokens:
        for batch in batches:
            cells = [Cell(batch, each, tokens, GROUPED) for each in distinct if each <= batch]
            cells += [Cell(batch, each, tokens, INTERLEAVED) for each in distinct if 1 < each < batch]
            if batch > 2:
                cells.append(Cell(batch, 2, tokens, ONE_DIVERGENT))
            groups.append(cells)
    return groups


class CpuDecode:
    """One layer's ``decode_attention`` over fp32 KV, the slots scattered at random, as many layers as memory is for.

    Args:
        threads: for the kernel; as torch has them by default, which is what the engine uses.
        kv_bytes: of KV to allocate; a cell's footprint may not be larger.
    """

    def __init__(self, kv_bytes: int, threads: int | None = None) -> None:
        import torch

        from feather_sglang.kernels import cpu_decode

        self.threads = threads or torch.get_num_threads()
        self._kernel = cpu_decode.decode_attention
        self._scale = CPU_LAYER.head_dim**-0.5
        shape = (kv_bytes // CPU_LAYER.kv_bytes_per_token, CPU_LAYER.kv_heads, CPU_LAYER.head_dim)
        # By torch, as SGLang's pool: it does not ask for huge pages, numpy would. Written to, or it has no memory.
        self._keys, self._values = (torch.full(shape, 0.01).numpy() for _ in range(2))
        self._next = 0
        cpu_decode.warm_up(np.float32)

    def machine(self) -> Machine:
        """This machine, as the system describes it."""
        private, last = _cpu_cache_bytes(self.threads)
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return Machine(_cpu_name(), "cpu", "feather_cpu", cores, self.threads, last, private)

    def prepare(self, prefixes: Sequence[int], tokens: int, stay: bool = False) -> Callable[[], float]:
        """A batch; each call runs one layer and returns its seconds.

        Every call takes the KV after that of the call before, whichever batch that was, and starts over at the end: so
        a layer's KV has left the caches when its turn comes again.

        Args:
            prefixes: the number of each request's prefix, from 0.
            tokens: of each prefix.
            stay: every call on the same KV.
        """
        requests, distinct = len(prefixes), max(prefixes) + 1
        pool = distinct * tokens
        slots = np.random.default_rng(0).permutation(pool).astype(np.int32).reshape(distinct, tokens)[list(prefixes)]
        rows, lengths = np.arange(requests), np.full(requests, tokens, np.int64)
        query = np.full((requests, CPU_LAYER.query_heads, CPU_LAYER.head_dim), 0.1, np.float32)
        out = np.empty_like(query)

        def run() -> float:
            if stay or self._next + pool > len(self._keys):
                self._next = 0
            mine = slice(self._next, self._next + pool)
            self._next += pool
            keys, values = self._keys[mine], self._values[mine]
            started = time.perf_counter()
            self._kernel(query, keys, values, slots, rows, lengths, out, self._scale, threads=self.threads)
            return time.perf_counter() - started

        return run


def measure_cpu(say: Callable[[str], None], groups: list[list[Cell]] | None = None) -> Profile:
    """Measure this machine's CPU: about 80 s for the whole grid. Needs torch, numba and 2 GB of memory.

    Args:
        say: told of the progress.
        groups: as from ``grid``, which is the default.
    """
    groups = groups or grid()
    largest = max(cell.distinct_prefixes * cell.prefix_tokens for cells in groups for cell in cells)
    decode = CpuDecode(_OTHER_KV_BYTES + largest * CPU_LAYER.kv_bytes_per_token)
    machine, points, sweep = decode.machine(), [], []
    busy_elsewhere_cores = _watch_others()
    for number, cells in enumerate(groups, 1):
        say(f"[{number}/{len(groups) + 1}] batch {cells[0].batch}, prefix {cells[0].prefix_tokens} tokens")
        taken = _in_turn([decode.prepare(cell.prefixes(), cell.prefix_tokens) for cell in cells], _CELL_SECONDS)
        for cell, times in zip(cells, taken, strict=True):
            points.append(Point(**asdict(cell), time_ms=statistics.median(times) * 1e3, repeats=len(times)))
    say(f"[{len(groups) + 1}/{len(groups) + 1}] footprints of {SWEEP_BYTES[0] >> 20} to {SWEEP_BYTES[-1] >> 20} MiB")
    for wanted_bytes in SWEEP_BYTES:
        tokens = wanted_bytes // SWEEP_BATCH // CPU_LAYER.kv_bytes_per_token
        run = decode.prepare(range(SWEEP_BATCH), tokens, stay=True)
        run()  # brings into the cache what stays there
        (times,) = _in_turn([run], _SWEEP_SECONDS)
        footprint_bytes = SWEEP_BATCH * tokens * CPU_LAYER.kv_bytes_per_token
        sweep.append(SweepPoint(footprint_bytes, statistics.median(times) * 1e3))
    derived = derive(machine, CPU_LAYER, points, sweep)
    return Profile(machine, CPU_LAYER, busy_elsewhere_cores(), tuple(points), tuple(sweep), derived)


def measure_cuda(dtype: str, say: Callable[[str], None]) -> Profile:
    """Measure the first GPU, with KV of ``dtype``.

    Raises:
        RuntimeError: there is none.
    """
    from feather_sglang.kernels import cuda_decode

    return from_json(json.dumps(cuda_decode.measure(dtype, say)))


def _in_turn(runs: list[Callable[[], float]], seconds_each: float) -> list[list[float]]:
    """Seconds of each run; they take turns, so that what disturbs the machine disturbs all."""
    taken: list[list[float]] = [[] for _ in runs]
    end = time.perf_counter() + seconds_each * len(runs)
    while len(taken[0]) < _LEAST or time.perf_counter() < end:
        for times, run in zip(taken, runs, strict=True):
            times.append(run())
    return taken


def _watch_others() -> Callable[[], float | None]:
    """Call what is returned for the cores that other processes have used on average since."""

    def ticks() -> float | None:
        try:
            user, nice, system = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:4]
        except (OSError, ValueError):
            return None
        own = os.times()
        return (int(user) + int(nice) + int(system)) / os.sysconf("SC_CLK_TCK") - own.user - own.system

    before, started = ticks(), time.perf_counter()

    def cores() -> float | None:
        after = ticks()
        if before is None or after is None:
            return None
        return max(0.0, (after - before) / (time.perf_counter() - started))

    return cores


def _cpu_name() -> str:
    """As the kernel names it; Intel's cloud models say no more than "Xeon", so family and model go with it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    found = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    name = found.get("model name", platform.machine())
    return f"{name}, family {found['cpu family']} model {found['model']}" if "cpu family" in found else name


def _cpu_cache_bytes(threads: int) -> tuple[int, int]:
    """Bytes of the cores' own caches, all threads' together, and of the last level, as Linux states them; else 0."""
    levels: dict[int, int] = {}
    for index in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"):
        try:
            if (index / "type").read_text().strip() == "Instruction":
                continue
            level, size = int((index / "level").read_text()), (index / "size").read_text().strip()
            levels[level] = int(size.rstrip("KM")) << (20 if size.endswith("M") else 10)
        except (OSError, ValueError):
            continue
    if not levels:
        return 0, 0
    last = levels.pop(max(levels))
    return threads * max(levels.values(), default=0), last


# ----------------------------------------------------------------------- reports


def table(profile: Profile) -> str:
    """Tokens/s of every cell, then what follows from them."""
    machine, layer, derived = profile.machine, profile.layer, profile.derived
    rate = {(p.prefix_tokens, p.batch, p.distinct_prefixes, p.order): p.batch / p.time_ms * 1e3 for p in profile.points}
    distinct = sorted({point.distinct_prefixes for point in profile.points})
    columns = [(each, GROUPED) for each in distinct] + [(each, INTERLEAVED) for each in distinct if each > 1]
    columns.append((2, ONE_DIVERGENT))
    lines = [f"{machine.name}, {machine.cores} cores, {machine.threads} threads, kernel {machine.kernel}"]
    if profile.busy_elsewhere_cores is not None and profile.busy_elsewhere_cores > _BUSY_CORES:
        lines.append(
            f"other processes kept {profile.busy_elsewhere_cores:.1f} cores busy meanwhile: times are too long"
        )
    lines += [
        f"one layer: {layer.query_heads} query heads, {layer.kv_heads} KV heads x {layer.head_dim}, {layer.kv_dtype}, "
        f"page size {layer.page_size_tokens}; tokens/s by batch size and number of distinct prefixes",
    ]
    for tokens in sorted({point.prefix_tokens for point in profile.points}):
        size = tokens * layer.kv_bytes_per_token / 1e6
        lines += [
            "",
            f"prefix of {tokens:,} tokens, {size:.1f} MB of KV",
            f"{'':>5}{'siblings together':^{9 * len(distinct)}}"
            f"{'siblings apart':^{9 * (len(distinct) - 1)}}{'one':>11}",
            f"{'batch':>5}{''.join(f'{each:>9}' for each, _ in columns[:-1])}{'divergent':>11}",
        ]
        for batch in sorted({point.batch for point in profile.points if point.prefix_tokens == tokens}):
            cells = [rate.get((tokens, batch, *column)) for column in columns]
            texts = ["-" if cell is None else f"{cell:,.0f}" for cell in cells]
            lines.append(f"{batch:>5}{''.join(f'{text:>9}' for text in texts[:-1])}{texts[-1]:>11}")
    size_text = "not within the sweep"
    if derived.cache_bytes is not None:
        size_text = f"{derived.cache_bytes / 1e6:.0f} MB"
    lines += [
        "",
        f"bandwidth from memory            {derived.memory_gb_s:8.1f} GB/s",
        f"bandwidth from last-level cache  {derived.cache_gb_s:8.1f} GB/s",
        f"its effective size               {size_text:>13}"
        + (f" (the system says {machine.reported_cache_bytes / 1e6:.0f} MB)" if machine.reported_cache_bytes else ""),
        "",
        "one divergent request in a homogeneous batch",
        f"{'prefix':>8}{'batch':>7}{'alike ms':>11}{'divergent ms':>14}{'cost ms':>10}{'cost':>8}",
    ]
    lines += [
        f"{d.prefix_tokens:>8,}{d.batch:>7}{d.homogeneous_ms:>11.3f}{d.divergent_ms:>14.3f}{d.cost_ms:>10.3f}"
        f"{d.cost_relative:>8.1%}"
        for d in derived.divergence
    ]
    return "\n".join(lines)


def plot(profile: Profile, path: str) -> None:
    """Draw tokens/s against batch size, a line for each number of distinct prefixes; needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lengths = sorted({point.prefix_tokens for point in profile.points})
    figure, grid_of_axes = pyplot.subplots(
        2, len(lengths), figsize=(4 * len(lengths), 7), sharex=True, sharey="col", squeeze=False
    )
    for row, (order, title) in enumerate(((GROUPED, "siblings together"), (INTERLEAVED, "siblings apart"))):
        for column, tokens in enumerate(lengths):
            axes = grid_of_axes[row][column]
            for distinct in sorted({point.distinct_prefixes for point in profile.points}):
                # With one prefix, or one for each request, there is but one order.
                line = [
                    (p.batch, p.batch / p.time_ms * 1e3)
                    for p in profile.points
                    if (p.prefix_tokens, p.distinct_prefixes) == (tokens, distinct)
                    and (p.order == order or (p.order == GROUPED and p.distinct_prefixes in (1, p.batch)))
                ]
                axes.plot(*zip(*sorted(line), strict=True), marker="o", label=f"{distinct} distinct")
            axes.set(title=f"{tokens:,} tokens, {title}", ylim=(0, None))
            axes.set_xscale("log", base=2)
            axes.grid(True, alpha=0.3)
    for axes in grid_of_axes[-1]:
        axes.set_xlabel("batch size")
    for axes in grid_of_axes[:, 0]:
        axes.set_ylabel("tokens/s of one layer's attention")
    grid_of_axes[0][0].legend(title="prefixes")
    figure.suptitle(f"{profile.machine.name}, {profile.machine.threads} threads, {profile.machine.kernel}")
    figure.tight_layout()
    figure.savefig(path, dpi=100)
