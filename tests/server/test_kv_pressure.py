"""The setting of SGLang's baselines: 320 requests, 32 groups, 2,048 + 64 tokens, 20,000 KV tokens, 16 running."""

from __future__ import annotations

import pytest

from feather_sglang.bench import serving

pytestmark = pytest.mark.server


def test_most_prompt_tokens_come_from_cache(model, tmp_path):
    """dfs-weight reaches about 83 % here and 87.3 % is the most possible; the client is SGLang's bench_serving."""
    workload = serving.Workload()
    assert workload.most_cached == pytest.approx(0.8727, abs=1e-4)
    flags = (*serving.CPU_FLAGS,)
    result = serving.run_policy("feather", model, flags, workload, log=tmp_path / "server.log")
    assert result.completed == 320
    assert result.cached_share >= 0.85, result
