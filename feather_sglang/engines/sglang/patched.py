"""What an SGLang patched with ``feather-sglang patch`` calls where it builds its policy and ``feather`` is chosen.

Where SGLang's plugin loader ran, Feather's hook has taken the name away by then, and the patch does nothing more than
offer it. So nothing is hooked twice.
"""

from __future__ import annotations

from typing import Any

from feather_sglang.engines.sglang import hooks


def init_schedule_policy(scheduler: Any) -> None:
    """Hook this process, and let the hook of ``Scheduler.init_schedule_policy`` do the rest.

    Raises:
        RuntimeError: in one line, what keeps Feather from running here.
    """
    hooks.apply_missing()
    scheduler.init_schedule_policy()
