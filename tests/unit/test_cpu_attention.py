"""The backend ``feather_cpu`` beside ``torch_native``, one layer on a real KV pool; and the threads' cores."""

from __future__ import annotations

import json
import os

import pytest

from feather_sglang import cli, cli_shared
from feather_sglang.engines.sglang import cpu_threads

pytest.importorskip("sglang")
cli_shared.use_cpu_platform()

import torch
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from feather_sglang.bench.decode import Shape, _Step
from feather_sglang.kernels import cpu_decode

GROUPED = Shape(query_heads=6, kv_heads=2, head_dim=64)


@pytest.fixture
def calls(monkeypatch):
    """How often the kernel was asked."""
    counted = []
    real = cpu_decode.decode_attention
    monkeypatch.setattr(cpu_decode, "decode_attention", lambda *args: (counted.append(1), real(*args)))
    return counted


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)], ids=str
)
def test_equals_torch_native(dtype, tolerance, page_size, shared, calls):
    step = _Step(dtype, page_size, requests=5, tokens=200, shape=GROUPED)
    step.place(shared)
    step._batch.seq_lens = torch.tensor([200, 1, 17, 133, 64])
    wanted = step.run(step.torch_native)
    got = step.run(step.feather_cpu)
    assert calls == [1]
    assert got.dtype == wanted.dtype == dtype and got.shape == wanted.shape
    assert (got - wanted).abs().max() <= tolerance * wanted.abs().max()


def test_the_new_token_is_written_before_it_is_read():
    step = _Step(torch.float32, 1, requests=3, tokens=10, shape=GROUPED)
    step.place(False)
    pool = step.feather_cpu.token_to_kv_pool
    step._batch.seq_lens = torch.ones(3, dtype=torch.int64)
    step._batch.out_cache_loc = step._table[:, 0].to(torch.int64)
    got = step.run(step.feather_cpu).view(3, 6, 64)
    for buffer in (pool.k_buffer[0], pool.v_buffer[0]):
        assert torch.equal(buffer[step._batch.out_cache_loc], step._new)
    assert torch.allclose(got, step._new.repeat_interleave(3, dim=1)), "a token alone attends to itself"


@pytest.mark.parametrize(
    "change",
    [
        {"sliding_window_size": 16},
        {"attn_type": AttentionType.ENCODER_ONLY},
        {"logit_cap": 5.0, "logit_capping_method": "other"},
        {"xai_temperature_len": 8},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_the_kernel_cannot_do_falls_back(change, calls):
    step = _Step(torch.float32, 1, requests=3, tokens=60, shape=GROUPED)
    step.place(False)
    for name, value in change.items():
        setattr(step._layer, name, value)
    assert torch.equal(step.run(step.feather_cpu), step.run(step.torch_native))
    assert not calls


def test_encoder_tokens_fall_back(calls):
    step = _Step(torch.float32, 1, requests=3, tokens=60, shape=GROUPED)
    step.place(False)
    step._batch.encoder_lens = torch.tensor([4, 0, 9])
    step._batch.seq_lens -= 9
    assert torch.equal(step.run(step.feather_cpu), step.run(step.torch_native))
    assert not calls


def test_a_soft_cap_is_applied(calls):
    step = _Step(torch.float32, 1, requests=2, tokens=60, shape=GROUPED)
    step.place(False)
    step._query *= 5
    plain = step.run(step.feather_cpu)
    step._layer.logit_cap = 1.0
    assert (step.run(step.feather_cpu) - plain).abs().max() > 0.1 and calls == [1, 1]


def _prefill(step, cached, new):
    """One layer of a prefill: ``new`` tokens of each request behind ``cached`` ones."""
    cached, new = torch.tensor(cached), torch.tensor(new)
    step.place(False)
    step._batch.forward_mode = ForwardMode.EXTEND
    step._batch.seq_lens, step._batch.extend_prefix_lens, step._batch.extend_seq_lens = cached + new, cached, new
    random = torch.Generator().manual_seed(1)
    query = torch.randn((int(new.sum()), 6 * 64), generator=random)
    fresh = torch.randn((len(query), 2, 64), generator=random)
    ends = zip(step._table, cached.tolist(), new.tolist(), strict=True)
    step._batch.out_cache_loc = torch.cat([row[begin : begin + more] for row, begin, more in ends]).long()

    def run(backend):
        backend.init_forward_metadata(step._batch)
        return backend.forward_extend(query, fresh, fresh, step._layer, step._batch)

    return run


def test_a_short_end_of_a_long_cached_prompt_goes_through_the_kernel(calls):
    step = _Step(torch.float32, 1, requests=3, tokens=200, shape=GROUPED)
    run = _prefill(step, [150, 60, 180], [7, 1, 20])
    got = run(step.feather_cpu)
    assert calls == [1]
    wanted = run(step.torch_native)
    assert (got - wanted).abs().max() <= 1e-5 * wanted.abs().max()


def test_the_prefill_of_a_whole_prompt_stays_with_torch(calls):
    step = _Step(torch.float32, 1, requests=3, tokens=200, shape=GROUPED)
    run = _prefill(step, [0, 100, 3], [170, 40, 1])
    assert torch.equal(run(step.feather_cpu), run(step.torch_native))
    assert not calls


def test_a_replaced_buffer_is_noticed():
    """SGLang may release its pool and allocate it anew."""
    step = _Step(torch.float32, 1, requests=2, tokens=30, shape=GROUPED)
    step.place(False)
    step.run(step.feather_cpu)
    pool = step.feather_cpu.token_to_kv_pool
    old = pool.k_buffer[0], pool.v_buffer[0]
    pool.k_buffer[0], pool.v_buffer[0] = old[0].flip(0).contiguous(), old[1].flip(0).contiguous()
    got = step.run(step.feather_cpu)
    assert torch.allclose(got, step.run(step.torch_native), atol=1e-5)


@pytest.mark.parametrize(
    ("setting", "rank", "cores"),
    [("", 0, None), ("all", 1, None), ("0|1", 1, {1}), ("0-2,7|4-5", 0, {0, 1, 2, 7}), ("0-2,7|4-5", 1, {4, 5})],
)
def test_a_ranks_cores(setting, rank, cores):
    assert cpu_threads.rank_cores(setting, rank) == cores


@pytest.mark.parametrize("setting", ["0|1", "0|a|b", "0||x-y"])
def test_cores_that_are_not_there_are_named(setting):
    with pytest.raises(ValueError, match="names no cores for rank 2"):
        cpu_threads.rank_cores(setting, 2)


def test_a_thread_that_ends_meanwhile_is_no_failure(monkeypatch):
    """Threads come and go while a server starts, and one that was listed may be gone when it is to be bound."""
    bound = []

    def bind(thread, cores):
        bound.append(cores)
        if len(bound) == 1:
            raise ProcessLookupError

    monkeypatch.setenv(cpu_threads.VARIABLE, "0|1")
    monkeypatch.setattr(os, "sched_setaffinity", bind)
    monkeypatch.setattr(torch, "set_num_threads", lambda number: bound.append(number))
    cpu_threads.bind_threads(1)
    assert bound[0] == {1} and bound[-1] == 1


def test_bench_decode_reports_every_combination(capsys):
    arguments = ["--sizes", "1x20,3x40", "--dtypes", "float32,bfloat16", "--page-sizes", "1,4", "--json", "-"]
    assert cli.main(["bench", "decode", *arguments, "--head-dim", "64", "--query-heads", "4"]) == 0
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert report["shape"] == {"query_heads": 4, "kv_heads": 2, "head_dim": 64}
    found = [(r["dtype"], r["page_size"], r["requests"], r["tokens"]) for r in report["rows"]]
    assert found == [(d, p, *s) for d in ("float32", "bfloat16") for p in (1, 4) for s in ((1, 20), (3, 40))]
    assert all(value > 0 for row in report["rows"] for value in row.values() if isinstance(value, float))
    assert "bfloat16, page size 4: 3 x 40" in err
    assert cli.main(["bench", "decode", "--dtypes", "int8"]) == 2
    assert cli.main(["bench", "decode", "--query-heads", "3"]) == 2
