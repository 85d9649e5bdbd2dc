"""Entry point of the group ``sglang.srt.platforms``: offers the CPU platform, only when it is asked for by name.

SGLang calls every platform plugin at start. Ours must stay silent on a GPU machine, or it would take the server over,
so it answers only where SGLang's own switch names it (``launch_server --device cpu`` sets that).
"""

from __future__ import annotations

import os

#: SGLang's switch, and our name in it.
PLATFORM_VARIABLE = "SGLANG_PLATFORM"
PLATFORM_NAME = "feather_cpu"


def activate() -> str | None:
    """The platform class to use, as ``module:Class``; ``None`` unless ``SGLANG_PLATFORM=feather_cpu``."""
    if os.environ.get(PLATFORM_VARIABLE) != PLATFORM_NAME:
        return None
    return "feather_sglang.engines.sglang.cpu:CpuPlatform"
