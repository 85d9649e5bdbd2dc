"""What an SGLang patched with ``feather-sglang patch`` calls, where ``feather`` is chosen, as it starts.

Where SGLang's plugin loader ran, Feather's hook has taken the name away by then, and the patch does nothing more than
offer it. So nothing is hooked twice.
"""

from __future__ import annotations

from typing import Any

from feather_sglang.engines.sglang import endpoints, hooks


def init_schedule_policy(scheduler: Any) -> None:
    """Hook this process, and let the hook of ``Scheduler.init_schedule_policy`` do the rest.

    Raises:
        RuntimeError: in one line, what keeps Feather from running here.
    """
    hooks.apply_missing()
    scheduler.init_schedule_policy()


def add_endpoints(app: Any) -> None:
    """Serve ``/feather/...`` beside the endpoints of SGLang's HTTP server, which is about to start."""
    endpoints.add_to(app)
