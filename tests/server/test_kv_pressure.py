"""The setting of SGLang's baselines: 320 requests, 32 groups, 2,048 + 64 tokens, 20,000 KV tokens, 16 running."""

from __future__ import annotations

import random

import pytest
from conftest import ask_all, prompts

from feather_sglang.bench import serving

pytestmark = pytest.mark.server


def test_most_prompt_tokens_come_from_cache(serve):
    """dfs-weight reaches about 83 % here; 87.3 % is the most possible. All arrive at once, in random order.

    With one output token every batch ends with its prefill, and what is left of its groups must follow all the same.
    """
    workload = serving.Workload()
    assert workload.most_cached == pytest.approx(0.8727, abs=1e-4)
    server = serve("--max-total-tokens=20000", "--max-running-requests=16")
    for seed, outputs in enumerate((workload.output_tokens, 1)):
        requests = prompts(workload.groups, workload.per_group, workload.prefix_tokens, workload.suffix_tokens, seed)
        random.Random(3).shuffle(requests)
        answers = ask_all(server, requests, tokens=outputs)
        infos = [answer["meta_info"] for [(status, answer)] in answers.values() if status == 200]
        assert len(infos) == 320
        cached = sum(info["cached_tokens"] for info in infos) / sum(info["prompt_tokens"] for info in infos)
        assert cached >= 0.85, (outputs, cached)


def test_the_demos_client_is_sglangs_own(model, tmp_path):
    workload = serving.Workload(groups=3, per_group=8, prefix_tokens=512)
    result = serving.run_policy("feather", model, serving.CPU_FLAGS, workload, log=tmp_path / "server.log")
    assert result.policy == "feather" and result.completed == 24
    assert 0.5 <= result.cached_share <= workload.most_cached
    assert result.requests_per_s > 0 and result.ttft_p99_ms >= result.ttft_p50_ms > 0
