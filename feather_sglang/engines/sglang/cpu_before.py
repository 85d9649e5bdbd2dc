"""The CPU platform for SGLang 0.5.13 to 0.5.21, for tests of those: SGLang's own attention, no binding to cores.

Later releases offer more of this themselves. Earlier ones cannot be imported without CUDA's driver library: their
scheduler imports sgl-kernel (``srt/mem_cache/memory_pool_host.py``).
"""

from __future__ import annotations

import os
from typing import Any

import psutil
import torch
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import SRTPlatform

from feather_sglang.engines.sglang.cpu_threads import VARIABLE


class CpuPlatform(SRTPlatform):  # type: ignore[misc]  # sglang is not typed
    """CPU with torch kernels."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"

    def init_backend(self) -> None:
        """In each worker."""
        if os.environ.get(VARIABLE, "all") != "all":
            raise RuntimeError(f"{VARIABLE} needs SGLang 0.5.22 or later with this platform; unset it")

    def is_pin_memory_available(self, device: Any = None) -> bool:
        """No accelerator to pin memory for."""
        return False

    def get_default_attention_backend(self) -> str:
        """SGLang's; ours needs a later release."""
        return "torch_native"

    def get_device_total_memory(self, device_id: int = 0) -> int:
        """In bytes."""
        return int(psutil.virtual_memory().total)

    def get_current_memory_usage(self, device: Any = None) -> float:
        """In bytes, of the whole machine."""
        memory = psutil.virtual_memory()
        return float(memory.total - memory.available)

    def get_available_memory(self, device_id: int = 0) -> tuple[int, int]:
        """Free and total, in bytes."""
        memory = psutil.virtual_memory()
        return memory.available, memory.total

    def get_device(self, local_rank: int) -> torch.device:
        """All ranks share it."""
        return torch.device("cpu")

    def set_device(self, device: Any) -> None:
        """There is one alone."""

    def get_device_name(self, device_id: int = 0) -> str:
        """For logs."""
        return "cpu"

    def get_device_capability(self, device_id: int = 0) -> None:
        """CUDA's idea."""

    def get_torch_distributed_backend_str(self) -> str:
        """What ranks talk through."""
        return "gloo"

    def get_mha_kv_pool_cls(self) -> Any:
        """SGLang's own."""
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

        return MHATokenToKVPool

    def get_paged_allocator_cls(self) -> Any:
        """SGLang asks for one class, whatever the page size."""
        from sglang.srt.mem_cache import allocator

        def make(size: int, page_size: int, **kwargs: Any) -> Any:
            if page_size == 1:
                return allocator.TokenToKVPoolAllocator(size, **kwargs)
            return allocator.PagedTokenToKVPoolAllocator(size, page_size=page_size, **kwargs)

        return make
