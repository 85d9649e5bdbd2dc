"""SGLang on a machine without an accelerator, from the unmodified PyPI package.

SGLang's in-tree CPU engine needs a CPU build of sgl-kernel that PyPI does not carry. An out-of-tree platform needs no
kernels of its own: SGLang then takes its plain torch paths. Only decode attention is ours.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES, add_attention_backend_choices
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform

from feather_sglang.engines.sglang.cpu_threads import bind_threads

#: Ours in ``--attention-backend``; a name of its own, since this module is imported too early for the backend's.
BACKEND_NAME = "feather_cpu"


class CpuPlatform(CpuDeviceMixin, SRTPlatform):  # type: ignore[misc]  # sglang is not typed
    """CPU with torch kernels, and a decode attention of ours."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"
    capabilities = PlatformCapabilities()

    def is_pin_memory_available(self, device: Any = None) -> bool:
        """No accelerator to pin memory for."""
        return False

    def __init__(self) -> None:
        """SGLang does this while it is imported, before it reads ``--attention-backend``."""
        super().__init__()
        if BACKEND_NAME not in ATTENTION_BACKEND_CHOICES:
            add_attention_backend_choices([BACKEND_NAME])

    def apply_server_args_defaults(self, server_args: Any) -> None:
        """Our attention backend, unless ``--attention-backend`` names one.

        What was asked for is in the raw input alone: by now SGLang has filled in its own default for CPUs
        (``srt/arg_groups/platform_hook.py``, ``handle_cpu_backends``), and so never asks for the platform's.
        """
        asked = getattr(server_args, "_raw_input", None) or {}
        if asked.get("attention_backend") is None:
            server_args.attention_backend = self.get_default_attention_backend()

    def get_default_attention_backend(self) -> str:
        """Ours: decode reads the KV pool in place. SGLang's ``torch_native`` can still be chosen."""
        return BACKEND_NAME

    def init_backend(self) -> None:
        """In each worker: the name becomes a backend."""
        from sglang.srt.layers.attention.attention_registry import register_attention_backend

        def create(runner: Any) -> Any:
            from feather_sglang.engines.sglang.cpu_attention import FeatherCpuBackend

            return FeatherCpuBackend(runner)

        register_attention_backend(BACKEND_NAME)(create)

    def post_load_model(self, model: Any) -> None:
        """In each worker, before its attention backend is built: keep to the rank's cores."""
        from sglang.srt.runtime_context import get_device

        bind_threads(get_device().gpu_id)
