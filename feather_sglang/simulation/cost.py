"""How long a step takes on a device: a roofline of few, named, physical parameters. docs/paper.md discusses it."""

from __future__ import annotations

from dataclasses import dataclass

from feather_sglang.simulation.profiles import Hardware, Model, PassCost
from feather_sglang.simulation.queues import Work


@dataclass
class Batch:
    """What a decode step reads, in tokens of KV."""

    requests: int = 0
    #: Each token counted for every request that reads it.
    read: int = 0
    #: Each token counted once.
    distinct: int = 0
    #: Those of ``distinct`` that more than one request reads.
    shared: int = 0


class StepCost:
    """Seconds of prefills and decode steps of one model on one device.

    Weights and every distinct token of KV come from memory once a step. What a request reads after another has read it
    comes from the last-level cache if it is still there: layer by layer, the KV that is read more than once competes
    for the cache, and the share of it that fits is the share of re-reads that hit. KV that is read once streams by.
    Linear layers take the longer of their arithmetic and of reading the weights.
    """

    def __init__(self, hardware: Hardware, model: Model) -> None:
        self.overhead_s = hardware.step_overhead_ms / 1e3
        self.weights_s = model.weight_bytes / hardware.memory_gb_s / 1e9
        self.token_s = 2 * model.parameters / hardware.bf16_tflops / 1e12
        # QK and PV: two multiply-adds for each pair of tokens, head and dimension.
        self.pair_s = 4 * model.layers * model.query_heads * model.head_dim / hardware.bf16_tflops / 1e12
        self.memory_s = model.kv_bytes_per_token / hardware.memory_gb_s / 1e9
        self.cache_s = model.kv_bytes_per_token / hardware.cache_gb_s / 1e9
        self.cached_tokens = hardware.cache_mb * 1e6 / (model.kv_bytes_per_token / model.layers)

    def decode(self, batch: Batch) -> tuple[float, float]:
        """A decode step, and what each following one takes longer, as every request has a token more. Seconds."""
        hits = min(1.0, self.cached_tokens / batch.shared) if batch.shared else 0.0
        again_s = hits * self.cache_s + (1 - hits) * self.memory_s
        again = batch.read - batch.distinct
        first = self.overhead_s + max(self.weights_s, batch.requests * self.token_s)
        first += batch.distinct * self.memory_s + again * again_s
        return first, batch.requests * self.memory_s

    def prefill(self, tokens: int, pairs: float, read: int) -> float:
        """Seconds of a prefill: new tokens, the pairs of tokens that attend to each other, and cached tokens."""
        arithmetic = tokens * self.token_s + pairs * self.pair_s
        return self.overhead_s + max(arithmetic, self.weights_s + (read + tokens) * self.memory_s)


def scheduling_s(cost: PassCost, work: Work) -> float:
    """Seconds that a policy's work takes the engine's process."""
    return 1e-6 * (
        work.passes * cost.pass_us
        + work.matched * cost.matched_us
        + work.matched_tokens / 1e3 * cost.matched_1k_tokens_us
        + work.admitted * cost.admitted_us
        + work.arrived * cost.arrived_us
        + work.arrived_tokens / 1e3 * cost.arrived_1k_tokens_us
        + work.left * cost.left_us
    )


def kv_tokens(hardware: Hardware, model: Model, memory_share: float) -> int:
    """Tokens of KV that fit beside the weights, where the engine may use that share of the memory."""
    return int((hardware.memory_gb * 1e9 * memory_share - model.weight_bytes) / model.kv_bytes_per_token)
