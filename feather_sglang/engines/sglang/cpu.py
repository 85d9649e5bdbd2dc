"""SGLang on a machine without an accelerator, from the unmodified PyPI package.

SGLang's in-tree CPU engine needs a CPU build of sgl-kernel that PyPI does not carry. An out-of-tree platform needs no
kernels of its own: SGLang then takes its plain torch paths.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform


class CpuPlatform(CpuDeviceMixin, SRTPlatform):  # type: ignore[misc]  # sglang is not typed
    """CPU with torch kernels only."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"
    capabilities = PlatformCapabilities()

    def is_pin_memory_available(self, device: Any = None) -> bool:
        """No accelerator to pin memory for."""
        return False

    def get_default_attention_backend(self) -> str:
        """SGLang's backend that needs torch alone."""
        return "torch_native"
