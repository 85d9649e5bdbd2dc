"""Decode attention over paged KV on a CUDA GPU, and its time by batch size, distinct prefixes and prefix length.

The kernel is FlashInfer's paged decode, as SGLang calls it, or the Triton kernel below where FlashInfer is absent or
does not run. The layer is that of a usual 8B model: 32 query heads, 8 KV heads of 128, pages of 16 tokens.

The file also runs by itself, on a machine that has no more than torch and triton::

    python cuda_decode.py --out measured.json

``feather-sglang calibrate --from measured.json --out profile.json`` turns that file into a profile, on any machine.
"""

import argparse
import importlib.util
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

QUERY_HEADS, KV_HEADS, HEAD_DIM, PAGE_TOKENS = 32, 8, 128, 16
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}

#: Tokens that a Triton program reads at a time.
TILE = 64
#: ``tl.dot`` works on no fewer rows; a KV head's group of query heads is padded to it.
_ROWS = 16
_MOST_SPLITS = 64
_WORKSPACE_BYTES = 256 << 20


class Pages(NamedTuple):
    """A batch's page table as FlashInfer and SGLang have it, all int32."""

    #: ``[requests + 1]``: where each request's pages begin in ``indices``.
    indptr: torch.Tensor
    #: ``[pages of all requests]``: numbers of pages in the pool.
    indices: torch.Tensor
    #: ``[requests]``: tokens in each request's last page, from 1.
    last_page_tokens: torch.Tensor

    def to(self, device: str) -> Self:
        """On another device."""
        return type(self)(*(each.to(device) for each in self))


def page_table(prefixes: Sequence[int], tokens: int) -> Pages:
    """Pages of requests that are nothing but their prefix, scattered at random over a pool that is just full.

    Args:
        prefixes: the number of each request's prefix, from 0; requests with the same number share all pages.
        tokens: of each prefix, at least 1.
    """
    per_prefix = -(-tokens // PAGE_TOKENS)
    scattered = torch.randperm((max(prefixes) + 1) * per_prefix, generator=torch.Generator().manual_seed(0))
    table = scattered.to(torch.int32).reshape(-1, per_prefix)[list(prefixes)]
    indptr = torch.arange(len(prefixes) + 1, dtype=torch.int32) * per_prefix
    last = torch.full((len(prefixes),), (tokens - 1) % PAGE_TOKENS + 1, dtype=torch.int32)
    return Pages(indptr, table.flatten(), last)


# ------------------------------------------------------------------------ kernel
#
# Triton reads annotations as code, so those it does not know are strings.


@triton.jit
def _split_kernel(
    query: "Any",
    keys: "Any",
    values: "Any",
    indptr: "Any",
    indices: "Any",
    last_page_tokens: "Any",
    sums: "Any",
    tops: "Any",
    weights: "Any",
    scale: "Any",
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    SPLITS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """One request, one KV head, one of SPLITS stretches of its tokens: online softmax, not normalised."""
    request, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first = tl.load(indptr + request)
    pages = tl.load(indptr + request + 1) - first
    tokens = (pages - 1) * PAGE + tl.load(last_page_tokens + request)
    share = tl.cdiv(tl.cdiv(tokens, SPLITS), TILE) * TILE
    start = split * share
    stop = tl.minimum(start + share, tokens)
    row, column = tl.arange(0, ROWS), tl.arange(0, DIM)
    asks = row < GROUP
    rows = (request * KV_HEADS + head) * GROUP + row
    q = tl.load(query + rows[:, None] * DIM + column[None, :], mask=asks[:, None], other=0.0)
    top = tl.full([ROWS], -1e30, tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    total = tl.zeros([ROWS, DIM], tl.float32)
    for at in range(start, stop, TILE):
        token = at + tl.arange(0, TILE)
        there = token < stop
        page = tl.load(indices + first + token // PAGE, mask=there, other=0)
        slot = page.to(tl.int64) * PAGE + token % PAGE
        place = (slot * KV_HEADS + head)[:, None] * DIM + column[None, :]
        k = tl.load(keys + place, mask=there[:, None], other=0.0)
        logits = tl.where(there[None, :], tl.dot(q, tl.trans(k)) * scale, -1e30)
        higher = tl.maximum(top, tl.max(logits, 1))
        fade = tl.exp(top - higher)
        shares = tl.exp(logits - higher[:, None])
        v = tl.load(values + place, mask=there[:, None], other=0.0)
        total = total * fade[:, None] + tl.dot(shares.to(v.dtype), v)
        weight = weight * fade + tl.sum(shares, 1)
        top = higher
    part = rows * SPLITS + split
    tl.store(sums + part[:, None] * DIM + column[None, :], total, mask=asks[:, None])
    tl.store(tops + part, top, mask=asks)
    tl.store(weights + part, weight, mask=asks)


@triton.jit
def _merge_kernel(
    sums: "Any", tops: "Any", weights: "Any", out: "Any", DIM: tl.constexpr, SPLITS: tl.constexpr
) -> None:
    """One request's query head: its stretches put together. A stretch without tokens weighs nothing."""
    row = tl.program_id(0)
    column, part = tl.arange(0, DIM), row * SPLITS + tl.arange(0, SPLITS)
    top = tl.load(tops + part)
    fade = tl.exp(top - tl.max(top, 0))
    weight = tl.sum(fade * tl.load(weights + part), 0)
    total = tl.sum(fade[:, None] * tl.load(sums + part[:, None] * DIM + column[None, :]), 0)
    tl.store(out + row * DIM + column, (total / weight).to(out.dtype.element_ty))


class TritonDecode:
    """The Triton kernel with its buffers, for one batch."""

    def __init__(self, query: torch.Tensor, pages: Pages, splits: int) -> None:
        """``splits``: stretches that each request is cut into, a power of two."""
        requests, self._heads, self._dim = query.shape
        self._query, self._pages, self._splits = query, pages, splits
        parts = (requests, self._heads, splits)
        new = query.new_empty
        self._parts = (
            new((*parts, self._dim), dtype=torch.float32),
            new(parts, dtype=torch.float32),
            new(parts, dtype=torch.float32),
        )
        self._out = torch.empty_like(query)

    def __call__(self, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Attention over ``[pages, page tokens, kv_heads, head_dim]``; the result is good until the next call."""
        requests, (page, kv_heads) = len(self._query), keys.shape[1:3]
        _split_kernel[requests, kv_heads, self._splits](
            self._query,
            keys,
            values,
            *self._pages,
            *self._parts,
            self._dim**-0.5,
            KV_HEADS=kv_heads,
            GROUP=self._heads // kv_heads,
            ROWS=_ROWS,
            DIM=self._dim,
            PAGE=page,
            SPLITS=self._splits,
            TILE=TILE,
        )
        _merge_kernel[(requests * self._heads,)](*self._parts, self._out, DIM=self._dim, SPLITS=self._splits)
        return self._out


def splits_for(requests: int, tokens: int, processors: int) -> int:
    """Stretches a request: enough that each multiprocessor has four programs, none shorter than two tiles."""
    splits = 1
    while splits < _MOST_SPLITS and requests * KV_HEADS * splits < 4 * processors and tokens >= 4 * splits * TILE:
        splits *= 2
    return splits


# ------------------------------------------------------------------- on a machine


class CudaDecode:
    """One layer's decode attention on the first GPU; the pool holds as many layers as there is memory for.

    Args:
        kv_bytes: of KV to allocate; a batch's footprint may not be larger.
        dtype: of the KV: float16 or bfloat16.
        say: told which kernel it is if that is not the expected one.

    Raises:
        RuntimeError: no GPU. The inputs have been built and the kernel compiled by then, which the message says.
    """

    def __init__(self, kv_bytes: int, dtype: str, say: Callable[[str], None]) -> None:
        if not torch.cuda.is_available():
            raise RuntimeError(f"no CUDA GPU was found; {up_to_the_launch(dtype)}")
        self._dtype = DTYPES[dtype]
        self.layer = {
            "query_heads": QUERY_HEADS,
            "kv_heads": KV_HEADS,
            "head_dim": HEAD_DIM,
            "kv_dtype": dtype,
            "kv_dtype_bytes": 2,
            "page_size_tokens": PAGE_TOKENS,
        }
        shape = (kv_bytes // (2 * 2 * KV_HEADS * HEAD_DIM * PAGE_TOKENS), PAGE_TOKENS, KV_HEADS, HEAD_DIM)
        self._keys, self._values = (torch.full(shape, 0.01, dtype=self._dtype, device="cuda") for _ in range(2))
        self._next_page = 0
        self._workspace = None
        self._properties = torch.cuda.get_device_properties(0)
        if importlib.util.find_spec("flashinfer") is not None:
            try:
                self._workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
                self.prepare([0], PAGE_TOKENS)()
            except Exception as error:  # it compiles on the spot, which takes more than this file can ask for
                self._workspace = None
                reason = str(error).strip().splitlines() or [type(error).__name__]
                say(f"FlashInfer is installed but does not run ({reason[-1]}); measuring the Triton kernel")

    def machine(self) -> dict[str, Any]:
        """The GPU, as CUDA describes it; its L1 caches are too short-lived to count as private caches."""
        found = self._properties
        return {
            "name": found.name,
            "device": "cuda",
            "kernel": "triton" if self._workspace is None else "flashinfer",
            "cores": found.multi_processor_count,
            "threads": found.multi_processor_count * found.max_threads_per_multi_processor,
            "reported_cache_bytes": found.L2_cache_size,
            "reported_private_cache_bytes": 0,
        }

    def prepare(self, prefixes: Sequence[int], tokens: int, stay: bool = False) -> Callable[[], float]:
        """A batch; each call runs one layer and returns the GPU's seconds, by CUDA events.

        Args:
            prefixes: the number of each request's prefix, from 0.
            tokens: of each prefix.
            stay: every call on the same layer, instead of on the next one's KV.
        """
        table = page_table(prefixes, tokens)
        pool = (max(prefixes) + 1) * -(-tokens // PAGE_TOKENS)
        query = torch.full((len(prefixes), QUERY_HEADS, HEAD_DIM), 0.1, dtype=self._dtype, device="cuda")
        attend = self._attention(query, table, tokens)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

        def run() -> float:
            if stay or self._next_page + pool > len(self._keys):
                self._next_page = 0
            mine = slice(self._next_page, self._next_page + pool)
            self._next_page += pool
            torch.cuda._sleep(1_000_000)  # half a millisecond in which all is queued, so that no launch is waited for
            begin.record()
            attend(self._keys[mine], self._values[mine])
            end.record()
            end.synchronize()
            return float(begin.elapsed_time(end)) / 1e3

        run()  # compiles
        return run

    def _attention(
        self, query: torch.Tensor, table: Pages, tokens: int
    ) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        if self._workspace is None:
            splits = splits_for(len(query), tokens, self._properties.multi_processor_count)
            return TritonDecode(query, table.to("cuda"), splits)
        from flashinfer import BatchDecodeWithPagedKVCacheWrapper

        # SGLang takes tensor cores for groups of four and more.
        wrapper = BatchDecodeWithPagedKVCacheWrapper(self._workspace, "NHD", use_tensor_cores=True)
        kinds = {"q_data_type": self._dtype, "kv_data_type": self._dtype}
        wrapper.plan(*table.to("cuda"), QUERY_HEADS, KV_HEADS, HEAD_DIM, PAGE_TOKENS, **kinds)
        return lambda keys, values: wrapper.run(query, (keys, values))


def up_to_the_launch(dtype: str, capability: int = 90) -> str:
    """Build a batch's inputs on the CPU and compile the Triton kernel for a GPU that need not be there; what was done.

    ``capability``: of the GPU, 90 for 9.0.
    """
    table = page_table([0, 0, 1], 1000)
    stored = {"float16": "fp16", "bfloat16": "bf16"}[dtype]
    numbers, floats, ints = f"*{stored}", "*fp32", "*i32"
    sizes = {"DIM": HEAD_DIM, "SPLITS": splits_for(3, 1000, 132)}
    group = {"KV_HEADS": KV_HEADS, "GROUP": QUERY_HEADS // KV_HEADS, "ROWS": _ROWS, "PAGE": PAGE_TOKENS, "TILE": TILE}
    for kernel, types, constants in (
        (_split_kernel, [numbers] * 3 + [ints] * 3 + [floats] * 3 + ["fp32"], sizes | group),
        (_merge_kernel, [floats] * 3 + [numbers], sizes),
    ):
        names = kernel.arg_names
        signature = {name: "constexpr" if name in constants else types[names.index(name)] for name in names}
        triton.compile(ASTSource(kernel, signature, constants), target=GPUTarget("cuda", capability, 32))
    return (
        f"a page table of {len(table.indices)} pages was built and the Triton kernel compiled for compute capability "
        f"{capability / 10:.1f}, and nothing was launched"
    )


# ---------------------------------------------------------------- run by itself
#
# The same cells as feather_sglang/bench/calibrate.py, which this file does not import: a test compares the two.

SWEEP_BYTES = tuple(round(2 ** (22 + step / 4)) for step in range(29))
SWEEP_BATCH = 8
KV_POOL_BYTES = 3 << 30


def grid() -> list[list[tuple[dict[str, Any], list[int]]]]:
    """Cells to measure, with the number of each request's prefix; those of a batch size and prefix length together."""
    groups = []
    for tokens in (1024, 4096, 16_384):
        for batch in (1, 2, 4, 8, 16, 32, 64):
            cells = []
            for distinct in (1, 2, 4, 8, 16):
                if distinct <= batch:
                    cells.append((distinct, "grouped", [each * distinct // batch for each in range(batch)]))
            for distinct in (2, 4, 8, 16):
                if distinct < batch:
                    cells.append((distinct, "interleaved", [each % distinct for each in range(batch)]))
            if batch > 2:
                cells.append((2, "one divergent", [int(each == batch // 2) for each in range(batch)]))
            keys = ("batch", "distinct_prefixes", "prefix_tokens", "order")
            groups.append([(dict(zip(keys, (batch, n, tokens, o), strict=True)), who) for n, o, who in cells])
    return groups


def measure(dtype: str, say: Callable[[str], None]) -> dict[str, Any]:
    """The grid and the sweep of footprints on the first GPU, as the profile holds them; nothing derived."""
    decode = CudaDecode(KV_POOL_BYTES, dtype, say)
    points = []
    for number, cells in enumerate(grid(), 1):
        cell = cells[0][0]
        say(f"[{number}/22] batch {cell['batch']}, prefix {cell['prefix_tokens']} tokens")
        runs = [decode.prepare(prefixes, cell["prefix_tokens"]) for _, prefixes in cells]
        times: list[list[float]] = [[] for _ in runs]
        end = time.perf_counter() + 0.35 * len(runs)
        while len(times[0]) < 5 or time.perf_counter() < end:
            for taken, run in zip(times, runs, strict=True):
                taken.append(run())
        for (names, _), taken in zip(cells, times, strict=True):
            points.append(names | {"time_ms": statistics.median(taken) * 1e3, "repeats": len(taken)})
    say("[22/22] footprints of 4 to 512 MiB")
    sweep = []
    page_bytes = 2 * 2 * KV_HEADS * HEAD_DIM * PAGE_TOKENS
    for footprint in SWEEP_BYTES:
        pages = footprint // SWEEP_BATCH // page_bytes
        run = decode.prepare(range(SWEEP_BATCH), pages * PAGE_TOKENS, stay=True)
        time_s = statistics.median(run() for _ in range(50))
        sweep.append({"footprint_bytes": SWEEP_BATCH * pages * page_bytes, "time_ms": time_s * 1e3})
    return {
        "format": "feather-sglang machine profile",
        "version": 1,
        "machine": decode.machine(),
        "layer": decode.layer,
        "points": points,
        "sweep": sweep,
    }


def main() -> int:
    """Measure and write; returns the exit code: 0 done, 1 no GPU, 2 bad use."""
    parser = argparse.ArgumentParser(description="Measure decode attention on a CUDA GPU.")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.json")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bfloat16", help="of the KV (default: %(default)s)")
    args = parser.parse_args()
    if args.out.is_dir() or not os.access(args.out if args.out.exists() else args.out.parent, os.W_OK):
        print(f"error: can't write {args.out}", file=sys.stderr)  # before the minutes that measuring takes
        return 2
    try:
        measured = measure(args.dtype, lambda text: print(text, file=sys.stderr, flush=True))
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    args.out.write_text(json.dumps(measured, indent=1) + "\n")
    for point in measured["points"]:
        rate = point["batch"] / point["time_ms"] * 1e3
        print(
            f"{point['prefix_tokens']:>6} tokens, batch {point['batch']:>2}, {point['distinct_prefixes']:>2} prefixes "
            f"{point['order']:<14}{point['time_ms']:>9.4f} ms {rate:>10,.0f} tokens/s"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
