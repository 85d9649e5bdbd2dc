"""The decode kernel against float64 arithmetic on the same stored values.

Errors are measured against the largest output of the batch: an output near zero is a sum that cancels.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("numba")

from feather_sglang.kernels import cpu_decode

TOLERANCE = 1e-5
KV_TYPES = {"float32": np.float32, "bfloat16": np.uint16, "float16": np.int16}


@pytest.fixture(autouse=True)
def threads_for_every_size(monkeypatch):
    monkeypatch.setattr(cpu_decode, "_SMALL", 0)


def store(numbers, kind):
    """As the pool holds them, and what they stand for."""
    if kind == "bfloat16":
        stored = (numbers.view(np.uint32) >> 16).astype(np.uint16)
        return stored, (stored.astype(np.uint32) << 16).view(np.float32)
    if kind == "float16":
        half = numbers.astype(np.float16)
        return half.view(np.int16), half.astype(np.float32)
    return numbers, numbers


class Case:
    """A batch over a pool of scattered pages; ``shared`` leading tokens of every request lie in the first's slots."""

    def __init__(
        self, lengths, *, kv_heads=2, group=1, head_dim=64, v_dim=None, page=1, shared=0, kind="float32", seed=0
    ):
        rng = np.random.default_rng(seed)
        v_dim = v_dim or head_dim
        requests = len(lengths)
        context = -(-max(lengths) // page) * page
        pages = rng.permutation(requests * context // page).reshape(requests, -1)
        pages[:, : shared // page] = pages[0, : shared // page]
        slots = (pages[:, :, None] * page + np.arange(page)).reshape(requests, context)
        pool = requests * context
        self.keys, self.real_keys = store(rng.standard_normal((pool, kv_heads, head_dim), np.float32), kind)
        self.values, self.real_values = store(rng.standard_normal((pool, kv_heads, v_dim), np.float32), kind)
        self.query = 2 * rng.standard_normal((requests, kv_heads * group, head_dim), np.float32)
        # Rows that are not of this batch, and a batch that is not in the rows' order.
        self.rows = rng.permutation(requests + 2)[:requests]
        self.slots = np.full((requests + 2, context), -1, np.int32)
        self.slots[self.rows] = slots
        self.lengths = np.array(lengths, np.int64)
        self.scale = head_dim**-0.5

    def run(self, threads=1, soft_cap=0.0):
        out = np.full((*self.query.shape[:2], self.values.shape[2]), np.nan, np.float32)
        cpu_decode.decode_attention(
            self.query, self.keys, self.values, self.slots, self.rows, self.lengths, out, self.scale, soft_cap, threads
        )
        return out

    def reference(self, soft_cap=0.0):
        group = self.query.shape[1] // self.keys.shape[1]
        out = np.empty((*self.query.shape[:2], self.values.shape[2]))
        for request, (row, length) in enumerate(zip(self.rows, self.lengths, strict=True)):
            listed = self.slots[row, :length]
            for head in range(self.query.shape[1]):
                keys = self.real_keys[listed, head // group].astype(np.float64)
                logits = keys @ self.query[request, head].astype(np.float64) * self.scale
                if soft_cap:
                    logits = soft_cap * np.tanh(logits / soft_cap)
                weights = np.exp(logits - logits.max())
                out[request, head] = (
                    weights / weights.sum() @ self.real_values[listed, head // group].astype(np.float64)
                )
        return out

    def check(self, threads=1, soft_cap=0.0):
        wanted = self.reference(soft_cap)
        error = np.abs(self.run(threads, soft_cap) - wanted).max() / np.abs(wanted).max()
        assert error < TOLERANCE


@settings(max_examples=150, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=7),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 5),
    head_dim=st.sampled_from([64, 80, 128, 20]),
    v_dim=st.sampled_from([None, 64, 24]),
    page=st.sampled_from([1, 2, 16]),
    shared=st.sampled_from([0, 32, 128]),
    kind=st.sampled_from(list(KV_TYPES)),
    threads=st.integers(1, 4),
    soft_cap=st.sampled_from([0.0, 3.0]),
    seed=st.integers(0, 1000),
)
def test_equals_float64(lengths, kv_heads, group, head_dim, v_dim, page, shared, kind, threads, soft_cap, seed):
    case = Case(
        lengths,
        kv_heads=kv_heads,
        group=group,
        head_dim=head_dim,
        v_dim=v_dim,
        page=page,
        shared=min(shared, *lengths),
        kind=kind,
        seed=seed,
    )
    case.check(threads, soft_cap)


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, cpu_decode.TILE - 1, cpu_decode.TILE, cpu_decode.TILE + 1, 20_000])
def test_lengths_around_the_tile(length):
    Case([length]).check()


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_requests_take_turns_block_by_block(threads):
    block = cpu_decode.BLOCK
    Case([block - 1, 3 * block, 5, block, block + 1, 2 * block + 7], group=2).check(threads)


@pytest.mark.parametrize("threads", [2, 3, 7])
def test_threads_that_meet_in_a_request_agree(threads):
    """One KV head and one request: every thread has a part of it; or short ones beside a long one."""
    Case([5_000], kv_heads=1, group=3).check(threads)
    Case([1, 4_000, 2], kv_heads=1).check(threads)
    Case([3], kv_heads=1).check(threads)


def test_large_logits_neither_overflow_nor_vanish():
    case = Case([200], kind="float32")
    case.query *= 300
    wanted, got = case.reference(), case.run()
    assert np.isfinite(got).all()
    assert np.abs(got - wanted).max() < 1e-3 * np.abs(wanted).max()  # a logit of 1,000 has an error of 1e-4


def test_the_largest_logit_may_come_last():
    """What was summed before has to fade, tile after tile."""
    case = Case([5 * cpu_decode.TILE], kv_heads=1)
    order = np.argsort(case.real_keys[:, 0] @ case.query[0, 0])
    case.slots[case.rows[0]] = order
    case.query *= 4
    case.check()
    case.check(threads=3)


def test_a_slot_outside_the_list_is_not_read():
    """Slots past the length are left over from other requests."""
    case = Case([70, 3])
    before = case.run()
    for row, length in zip(case.rows, case.lengths, strict=True):
        unread = case.slots[row, length:]
        case.keys[unread] = np.nan
        case.slots[row, length:] = -(10**8)
    assert np.array_equal(case.run(), before)


def test_two_python_threads_at_once():
    case = Case([400, 300, 200])
    wanted = case.run(threads=2)
    different = []

    def repeat():
        for _ in range(200):
            if not np.array_equal(case.run(threads=2), wanted):
                different.append(1)

    workers = [threading.Thread(target=repeat) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not different


def test_without_openmp_one_thread_does_it(monkeypatch):
    monkeypatch.setattr(cpu_decode, "_openmp", lambda: None)
    Case([100, 30]).check(threads=2)


def test_a_cache_that_cannot_be_written_is_no_failure(tmp_path):
    """Neither beside the source nor in the user's folder, nor once the kernel is running."""
    blocked = tmp_path / "file"
    blocked.write_text("")
    code = (
        "import numba.core.caching as caching, numpy, sys\n"
        "if sys.argv[1] == 'nowhere':\n"
        "    caching.CacheImpl._locator_classes = []\n"
        "else:\n"
        "    def full(*_): raise OSError(28, 'No space left on device')\n"
        "    caching.IndexDataCacheFile.save = full\n"
        "    caching.IndexDataCacheFile.load = lambda *_: None\n"
        "from feather_sglang.kernels import cpu_decode\n"
        "cpu_decode.warm_up(numpy.float32)\n"
        "print('warm')\n"
    )
    for how in ("nowhere", "full"):
        done = subprocess.run(
            [sys.executable, "-c", code, how], capture_output=True, text=True, timeout=300, check=False, env=os.environ
        )
        assert done.stdout == "warm\n", done.stderr


def test_the_kernel_needs_nothing_of_an_engine():
    code = (
        "import sys\n"
        "sys.modules.update(dict.fromkeys(('sglang', 'torch')))\n"
        "import feather_sglang\n"
        "before = set(sys.modules)\n"
        "import feather_sglang.kernels.cpu_decode\n"
        "ours = {m for m in set(sys.modules) - before if m.startswith('feather_sglang')}\n"
        "assert ours == {'feather_sglang.kernels', 'feather_sglang.kernels.cpu_decode'}, ours\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
