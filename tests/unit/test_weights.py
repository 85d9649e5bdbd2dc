"""What the weights are worth in tokens of KV, on a stub of SGLang's scheduler."""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
common = pytest.importorskip("sglang.srt.utils")

from feather_sglang.engines.sglang.weights import WITHOUT_LIMIT, weight_tokens
from feather_sglang.scheduling import BatchState, Settings, StaticPolicy


def scheduler(rank=0, ranks=1, parameters=((1000, 50), (1000,)), gib=2**-10, **arguments):
    tensors = [torch.zeros(shape, dtype=torch.bfloat16) for shape in parameters]
    pool = SimpleNamespace(size=1024, get_kvcache=lambda: SimpleNamespace(mem_usage=gib))
    return SimpleNamespace(
        tp_rank=rank,
        tp_size=ranks,
        tp_worker=SimpleNamespace(model_runner=SimpleNamespace(model=SimpleNamespace(parameters=lambda: tensors))),
        token_to_kv_pool_allocator=pool,
        tp_group=SimpleNamespace(rank=rank + 4, ranks=[4, 5]),
        tp_cpu_group="cpu",
        server_args=SimpleNamespace(attention_backend="flashinfer", **arguments),
    )


def test_bytes_of_the_weights_over_bytes_of_a_token():
    assert weight_tokens(scheduler()) == 102_000 // 1024


def test_where_decode_gains_nothing_from_a_shared_prefix_no_batch_is_kept_as_it_is():
    indifferent = scheduler(decode_attention_backend="torch_native")
    assert weight_tokens(indifferent) == WITHOUT_LIMIT
    indifferent.server_args = SimpleNamespace(decode_attention_backend=None, attention_backend="torch_native")
    assert weight_tokens(indifferent) == WITHOUT_LIMIT
    settings = Settings(weight_tokens=WITHOUT_LIMIT)
    assert StaticPolicy(settings, 4096).admit(BatchState(4095, 9, 1, False, 0, depth=10**6))
    assert weight_tokens(scheduler(decode_attention_backend="flashinfer")) == 102_000 // 1024


def test_every_rank_has_rank_0s_figure(monkeypatch):
    sent = []

    def broadcast(data, rank, group, src):
        sent.append((list(data), rank, group, src))
        return [77]

    monkeypatch.setattr(common, "broadcast_pyobj", broadcast)
    assert [weight_tokens(scheduler(rank, 2)) for rank in (0, 1)] == [77, 77]
    assert sent == [([99], 4, "cpu", 4), ([0], 5, "cpu", 4)]


def test_a_pool_that_does_not_tell_its_size_is_no_reason_not_to_start(caplog):
    assert weight_tokens(scheduler(gib=0)) == 0
    assert "--feather-weight-tokens" in caplog.text
