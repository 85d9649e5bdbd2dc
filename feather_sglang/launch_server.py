"""``python -m feather_sglang.launch_server``: SGLang's own launcher, with Feather's flags and the CPU platform.

It takes every argument that ``python -m sglang.launch_server`` takes. Two things are added: ``--device cpu`` works on
a machine without an accelerator, and a package that is not properly installed is an error instead of a server without
Feather.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import itertools
import os
import runpy
import sys
import warnings

from feather_sglang.engines.sglang.arguments import refuse
from feather_sglang.engines.sglang.platform import PLATFORM_NAME, PLATFORM_VARIABLE


def main() -> None:
    """Check the installation, choose the platform, and run SGLang's launcher in this process."""
    if importlib.util.find_spec("sglang") is None:
        refuse("sglang is not installed; run: pip install 'feather-sglang[sglang]'")
    plugins = importlib.metadata.entry_points(group="sglang.srt.plugins")
    if "feather" not in plugins.names:
        refuse("feather-sglang is not installed here, so SGLang cannot find it; run: pip install -e .")
    allowed = os.environ.get("SGLANG_PLUGINS", "")
    if allowed and "feather" not in [name.strip() for name in allowed.split(",")]:
        refuse(f"SGLANG_PLUGINS={allowed} leaves Feather out; add 'feather' to it")
    if wants_cpu(sys.argv[1:]):
        os.environ.setdefault(PLATFORM_VARIABLE, PLATFORM_NAME)
    warnings.filterwarnings("ignore", message=".*sglang.launch_server.*", category=UserWarning)
    runpy.run_module("sglang.launch_server", run_name="__main__")


def wants_cpu(argv: list[str]) -> bool:
    """Whether ``--device cpu`` is among the arguments."""
    return "--device=cpu" in argv or any(a == "--device" and b == "cpu" for a, b in itertools.pairwise(argv))


if __name__ == "__main__":
    main()
