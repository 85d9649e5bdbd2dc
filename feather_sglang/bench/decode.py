"""Decode attention of ``feather_cpu`` beside ``torch_native``'s, in one run, through SGLang's interface.

Each backend is called as a model's layer calls it: per-step metadata, the new token's K and V into the pool, attention.
Pages are scattered at random over the pool. Each size runs twice: all requests distinct, and all with one prefix.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from feather_sglang.engines.sglang.cpu_attention import FeatherCpuBackend

#: Requests x tokens of each.
SIZES = ((1, 128), (1, 1024), (1, 8192), (4, 512), (16, 1024), (16, 4096), (64, 1024), (64, 8192))
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

#: What a request has of its own where all share a prefix, in tokens.
_OWN = 64
#: Each measurement runs for about this long, and at least three times.
_SECONDS = 0.4


@dataclass(frozen=True)
class Shape:
    """The layer's heads."""

    query_heads: int = 2
    kv_heads: int = 2
    head_dim: int = 128


@dataclass(frozen=True)
class Row:
    """Medians for one size; times in milliseconds for one layer, bandwidth in GB of K and V a second."""

    dtype: str
    page_size: int
    requests: int
    tokens: int
    torch_native_ms: float
    feather_cpu_ms: float
    feather_cpu_gb_s: float
    #: The same batch with one shared prefix.
    torch_native_shared_ms: float
    feather_cpu_shared_ms: float
    feather_cpu_shared_gb_s: float

    @property
    def speedup(self) -> float:
        """How many times faster than ``torch_native``, the smaller of the two batches' ratios."""
        return min(self.torch_native_ms / self.feather_cpu_ms, self.torch_native_shared_ms / self.feather_cpu_shared_ms)


def run(
    sizes: Iterable[tuple[int, int]],
    dtypes: Iterable[str],
    page_sizes: Iterable[int],
    shape: Shape,
    say: Callable[[str], None],
) -> list[Row]:
    """Measure every combination. The pool takes requests x tokens x heads x dimensions x 2 numbers."""
    rows = []
    for dtype in dtypes:
        for page_size in page_sizes:
            for requests, tokens in sizes:
                say(f"{dtype}, page size {page_size}: {requests} x {tokens}")
                rows.append(_measure(dtype, page_size, requests, tokens, shape))
    return rows


def table(rows: list[Row]) -> str:
    """The results for reading."""
    lines = [
        f"{'':<26}{'distinct prefixes':^44}{'one prefix':^44}",
        f"{'KV':<9}{'page':>4}{'batch':>12}"
        + 2 * f"{'torch_native ms':>17}{'feather_cpu ms':>16}{'GB/s':>7}{'':>4}"
        + f"{'one/distinct':>13}",
    ]
    for r in rows:
        lines.append(
            f"{r.dtype:<9}{r.page_size:>4}{f'{r.requests} x {r.tokens}':>12}"
            f"{r.torch_native_ms:>17.3f}{r.feather_cpu_ms:>16.3f}{r.feather_cpu_gb_s:>7.1f}{'':>4}"
            f"{r.torch_native_shared_ms:>17.3f}{r.feather_cpu_shared_ms:>16.3f}{r.feather_cpu_shared_gb_s:>7.1f}{'':>4}"
            f"{r.feather_cpu_ms / r.feather_cpu_shared_ms:>12.2f}x"
        )
    slowest = min(rows, key=lambda r: r.speedup)
    lines.append(
        f"feather_cpu is at least {slowest.speedup:.1f} times as fast as torch_native "
        f"({slowest.dtype}, page size {slowest.page_size}, {slowest.requests} x {slowest.tokens})"
    )
    return "\n".join(lines)


def as_json(shape: Shape, rows: list[Row]) -> str:
    """The results for machines."""
    return json.dumps(
        {"shape": asdict(shape), "threads": torch.get_num_threads(), "rows": [asdict(row) for row in rows]}, indent=2
    )


def _measure(dtype: str, page_size: int, requests: int, tokens: int, shape: Shape) -> Row:
    step = _Step(DTYPES[dtype], page_size, requests, tokens, shape)
    size = 2 * requests * tokens * shape.kv_heads * shape.head_dim * DTYPES[dtype].itemsize
    times = []
    for shared in (False, True):
        step.place(shared)
        times += _alternate([lambda: step.run(step.torch_native), lambda: step.run(step.feather_cpu)])
    native_s, ours_s, native_shared_s, ours_shared_s = times
    return Row(
        dtype=dtype,
        page_size=page_size,
        requests=requests,
        tokens=tokens,
        torch_native_ms=native_s * 1e3,
        feather_cpu_ms=ours_s * 1e3,
        feather_cpu_gb_s=size / ours_s / 1e9,
        torch_native_shared_ms=native_shared_s * 1e3,
        feather_cpu_shared_ms=ours_shared_s * 1e3,
        feather_cpu_shared_gb_s=size / ours_shared_s / 1e9,
    )


def _alternate(calls: list[Callable[[], Any]]) -> list[float]:
    """Median seconds of each; they take turns, so that what disturbs the machine disturbs all."""
    taken: list[list[float]] = [[] for _ in calls]
    for call in calls:
        call()
    begin = time.perf_counter()
    while len(taken[0]) < 3 or time.perf_counter() - begin < _SECONDS * len(calls):
        for times, call in zip(taken, calls, strict=True):
            started = time.perf_counter()
            call()
            times.append(time.perf_counter() - started)
    return [statistics.median(times) for times in taken]


class _Step:
    """A decode step of one layer, on a pool of its own."""

    def __init__(self, dtype: torch.dtype, page_size: int, requests: int, tokens: int, shape: Shape) -> None:
        self._page_size, self._requests, self._tokens = page_size, requests, tokens
        pages = requests * -(-tokens // page_size)
        pool = MHATokenToKVPool(
            pages * page_size, page_size, dtype, shape.kv_heads, shape.head_dim, 1, "cpu", enable_memory_saver=False
        )
        random = torch.Generator().manual_seed(0)
        for buffer in (pool.k_buffer[0], pool.v_buffer[0]):
            buffer.normal_(generator=random)
        self._layer = RadixAttention(shape.query_heads, shape.head_dim, shape.head_dim**-0.5, shape.kv_heads, 0)
        # The first page of the pool is SGLang's, for padding.
        self._pages = np.random.default_rng(0).permutation(pages) + 1
        self._table = torch.zeros((requests, tokens), dtype=torch.int32)
        runner = SimpleNamespace(
            device="cpu", req_to_token_pool=SimpleNamespace(req_to_token=self._table), token_to_kv_pool=pool
        )
        self.torch_native = TorchNativeAttnBackend(runner)
        self.feather_cpu = FeatherCpuBackend(runner)
        self._query = torch.randn((requests, shape.query_heads * shape.head_dim), generator=random).to(dtype)
        self._new = torch.randn((requests, shape.kv_heads, shape.head_dim), generator=random).to(dtype)
        self._batch = SimpleNamespace(
            forward_mode=ForwardMode.DECODE,
            req_pool_indices=torch.arange(requests),
            seq_lens=torch.full((requests,), tokens),
            encoder_lens=None,
            out_cache_loc=None,
        )

    def place(self, shared: bool) -> None:
        """Give every request its slots: none in common, or all but the last page or so those of the first request."""
        per_request = -(-self._tokens // self._page_size)
        pages = self._pages.reshape(self._requests, per_request).copy()
        if shared:
            common = max(self._tokens - _OWN, 0) // self._page_size
            pages[:, :common] = pages[0, :common]
        slots = (pages[:, :, None] * self._page_size + np.arange(self._page_size)).reshape(self._requests, -1)
        self._table.copy_(torch.from_numpy(slots[:, : self._tokens]))
        self._batch.out_cache_loc = self._table[:, -1].to(torch.int64)

    def run(self, backend: Any) -> torch.Tensor:
        """What one layer does in one decode step."""
        backend.init_forward_metadata(self._batch)
        result: torch.Tensor = backend.forward_decode(self._query, self._new, self._new, self._layer, self._batch)
        return result
