"""How much of a decode step goes into the model's weights: ``Settings.weight_tokens``, found out at start."""

from __future__ import annotations

import logging
from typing import Any

from feather_sglang.engines.sglang import releases

logger = logging.getLogger(__name__)


def weight_tokens(scheduler: Any) -> int:
    """Tokens whose KV is as many bytes as the weights of this rank; 0 where SGLang does not tell.

    Shards may differ by some bytes, and ranks must decide alike, so rank 0's figure is everybody's: every rank has to
    call this at the same moment (SGLang's ``broadcast_pyobj`` in ``srt/utils/common.py``). The input embedding counts
    though a step reads few of its rows.
    """
    parallel = releases.parallel(scheduler)
    found = _of_rank_0(scheduler) if parallel.tp_rank == 0 else 0
    if parallel.tp_size == 1:
        return found
    from sglang.srt.utils import broadcast_pyobj

    group = scheduler.tp_group
    told: list[int] = broadcast_pyobj([found], group.rank, scheduler.tp_cpu_group, src=group.ranks[0])
    return told[0]


def _of_rank_0(scheduler: Any) -> int:
    try:
        model = scheduler.tp_worker.model_runner.model
        weights = sum(each.numel() * each.element_size() for each in model.parameters())
        pool = scheduler.token_to_kv_pool_allocator
        kv = pool.get_kvcache().mem_usage * 2**30 / pool.size  # mem_usage is in GiB
        return int(weights / kv)
    except Exception:
        logger.warning(
            "Feather: the size of the model's weights is unknown, so min_batch does not depend on it; "
            "--feather-weight-tokens sets it.",
            exc_info=True,
        )
        return 0
