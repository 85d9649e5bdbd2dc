"""How much of a decode step goes into the model's weights: ``Settings.weight_tokens``, found out at start."""

from __future__ import annotations

import logging
from typing import Any

from feather_sglang.engines.sglang import releases

logger = logging.getLogger(__name__)

# Backends whose decode step costs the same whatever its requests share: SGLang's torch_native copies each one's KV.
_INDIFFERENT = ("torch_native",)
#: More than any batch and any prefix: nothing is gained by keeping a batch as it is.
WITHOUT_LIMIT = 1 << 40


def weight_tokens(scheduler: Any) -> int:
    """Tokens whose KV is as many bytes as the weights of this rank; 0 where SGLang does not tell.

    ``WITHOUT_LIMIT`` where decode attention gains nothing from a shared prefix, as if all of a step were weights.

    Shards may differ by some bytes, and ranks must decide alike, so rank 0's figure is everybody's: every rank has to
    call this at the same moment (SGLang's ``broadcast_pyobj`` in ``srt/utils/common.py``). The input embedding counts
    though a step reads few of its rows.
    """
    arguments = scheduler.server_args
    if (getattr(arguments, "decode_attention_backend", None) or arguments.attention_backend) in _INDIFFERENT:
        return WITHOUT_LIMIT
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
