"""Entry point of the group ``sglang.srt.platforms``: offers the CPU platform, only when it is asked for by name.

SGLang calls every platform plugin at start. Ours must stay silent on a GPU machine, or it would take the server over,
so it answers only where SGLang's own switch names it (``launch_server --device cpu`` sets that).
"""

from __future__ import annotations

import os

from feather_sglang.engines.sglang.releases import RELEASES, installed

#: SGLang's switch, and our name in it.
PLATFORM_VARIABLE = "SGLANG_PLATFORM"
PLATFORM_NAME = "feather_cpu"

#: How often a thread of GNU OpenMP looks for more work before it sleeps. By default it looks for about 15 ms, and where
#: one more process wants a core, torch's own threads keep each other from running: a step then takes 100 times as long.
_SPIN_VARIABLE = "GOMP_SPINCOUNT"
_SPINS = "1000"

#: Releases whose platforms have to bring more of their own.
_BEFORE = RELEASES[: RELEASES.index("0.5.22")]


def activate() -> str | None:
    """The platform class to use, as ``module:Class``; ``None`` unless ``SGLANG_PLATFORM=feather_cpu``."""
    if os.environ.get(PLATFORM_VARIABLE) != PLATFORM_NAME:
        return None
    os.environ.setdefault(_SPIN_VARIABLE, _SPINS)  # for the processes to come: OpenMP looks when it is loaded
    module = "cpu_before" if installed() in _BEFORE else "cpu"
    return f"feather_sglang.engines.sglang.{module}:CpuPlatform"
