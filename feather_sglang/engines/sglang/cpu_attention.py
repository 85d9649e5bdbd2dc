"""SGLang's attention backend ``feather_cpu``: decode, and short ends of long prompts, by the paged kernel.

``torch_native`` copies each request's K and V out of the pool before it computes
(``srt/layers/attention/torch_native_backend.py``); here the pool is read in place. Prefill is ``torch_native``'s, but
for one case: where a few new tokens follow a long cached prefix, it computes the attention of the whole prompt anew and
throws nearly all of it away, as much work as with no cache. There each new token goes to the kernel as if it were
decoded. What the kernel can't do falls back to ``torch_native``, layer by layer.
"""

from __future__ import annotations

import logging
import time
from typing import Any

import numpy as np
import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

from feather_sglang.kernels import cpu_decode

logger = logging.getLogger(__name__)

#: How the kernel wants to be handed what numpy has no type for.
_STORED_AS = {torch.float32: torch.float32, torch.bfloat16: torch.uint16, torch.float16: torch.int16}
#: A pair of query and key costs the kernel about this many times what it costs torch in a full prefill.
_PAIR_COST = 8

_NUMPY = {torch.float32: np.float32, torch.bfloat16: np.uint16, torch.float16: np.int16}


class FeatherCpuBackend(TorchNativeAttnBackend):  # type: ignore[misc]  # sglang is not typed
    """Decode straight from ``[slots, kv_heads, head_dim]`` buffers, through the rows of ``req_to_token``.

    Any page size: the rows list slots, not pages. As many threads as torch has here. The kernel is compiled when the
    backend is built, so that no request waits for that.
    """

    def __init__(self, model_runner: Any) -> None:
        super().__init__(model_runner)
        self._threads = torch.get_num_threads()
        self._slots = self.req_to_token_pool.req_to_token.numpy()
        #: For each new token of the batch that runs: its row of ``req_to_token``, and how many tokens it attends to.
        self._batch = (np.zeros(0, np.int64), np.zeros(0, np.int64))
        #: Address of a layer's K buffer, and numpy views of its K and V.
        self._views: dict[int, tuple[int, np.ndarray, np.ndarray]] = {}
        stored = _NUMPY.get(self.token_to_kv_pool.dtype)
        if stored is not None:
            started = time.perf_counter()
            cpu_decode.warm_up(stored)
            logger.info(
                "feather_cpu: paged decode attention, %s KV, %d threads; compiled or loaded in %.1f s",
                self.token_to_kv_pool.dtype,
                self._threads,
                time.perf_counter() - started,
            )

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Once a step: the batch's rows and lengths; without a copy when it decodes."""
        super().init_forward_metadata(forward_batch)
        rows = forward_batch.req_pool_indices.to(torch.int64).numpy()
        lengths = forward_batch.seq_lens.to(torch.int64).numpy()
        mode = forward_batch.forward_mode
        if mode.is_extend() and not mode.is_target_verify():
            rows, lengths = _new_tokens(rows, lengths, forward_batch.extend_seq_lens.to(torch.int64).numpy())
        self._batch = (rows, lengths)

    def forward_decode(
        self, q: torch.Tensor, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True
    ) -> torch.Tensor:
        """One layer's decode step; ``[requests, query_heads * v_head_dim]``, of the query's type."""
        out = self._paged(q, k, v, layer, forward_batch, save_kv_cache)
        return super().forward_decode(q, k, v, layer, forward_batch, save_kv_cache) if out is None else out

    def forward_extend(
        self, q: torch.Tensor, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True
    ) -> torch.Tensor:
        """One layer's prefill; ``[new tokens, query_heads * v_head_dim]``, of the query's type."""
        out = self._paged(q, k, v, layer, forward_batch, save_kv_cache)
        return super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache) if out is None else out

    def _paged(
        self, q: torch.Tensor, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool
    ) -> torch.Tensor | None:
        """The layer by the kernel; ``None``, and nothing done, where that is not possible or not worth it."""
        rows, lengths = self._batch
        buffers = self._buffers(layer) if _plain(layer) and forward_batch.encoder_lens is None else None
        query = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        if buffers is None or len(rows) != len(query):
            return None
        if save_kv_cache and k is not None and v is not None:
            place = KVWriteLoc(forward_batch.out_cache_loc, self.swa_out_cache_loc)
            self.token_to_kv_pool.set_kv_buffer(layer, place, k, v)
        out = torch.empty((len(query), layer.tp_q_head_num, layer.v_head_dim))
        cpu_decode.decode_attention(
            query.float().contiguous().numpy(),
            *buffers,
            self._slots,
            rows,
            lengths,
            out.numpy(),
            layer.scaling,
            max(layer.logit_cap, 0.0),
            self._threads,
        )
        return out.view(len(query), -1).to(q.dtype)

    def _buffers(self, layer: Any) -> tuple[np.ndarray, np.ndarray] | None:
        """The layer's K and V as the kernel takes them; ``None`` if it can't."""
        keys = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        known = self._views.get(layer.layer_id)
        if known is not None and known[0] == keys.data_ptr():
            return known[1:]
        values = self.token_to_kv_pool.get_value_buffer(layer.layer_id)
        fits = (
            not self.use_sliding_window_kv_pool  # two pools behind one: not every layer's slots are those listed
            and keys.dtype in _STORED_AS
            and keys.dtype == values.dtype
            and keys.shape[1:] == (layer.tp_k_head_num, layer.qk_head_dim)
            and values.shape[1:] == (layer.tp_k_head_num, layer.v_head_dim)
            and keys.is_contiguous()
            and values.is_contiguous()
            and layer.tp_q_head_num % layer.tp_k_head_num == 0
        )
        if not fits:
            return None
        stored = _STORED_AS[keys.dtype]
        views = (keys.view(stored).numpy(), values.view(stored).numpy())
        self._views[layer.layer_id] = (keys.data_ptr(), *views)
        return views


def _new_tokens(rows: np.ndarray, lengths: np.ndarray, new: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Row and length of each new token of a prefill, ``[new tokens]``; empty if torch is faster. All int64."""
    if _PAIR_COST * (new * lengths).sum() > (lengths * lengths).sum():
        return rows[:0], lengths[:0]
    first = np.repeat(lengths - new, new)
    number = np.arange(len(first)) - np.repeat(np.cumsum(new) - new, new)
    return np.repeat(rows, new), first + number + 1


def _plain(layer: Any) -> bool:
    """Whether a decode step of this layer is attention to all of the request's own tokens."""
    return bool(
        layer.sliding_window_size < 0
        and not layer.is_cross_attention
        and layer.attn_type != AttentionType.ENCODER_ONLY
        and (layer.logit_cap <= 0 or layer.logit_capping_method == "tanh")
        and layer.xai_temperature_len <= 0
    )
