"""A controller that also measures how long its answers to SGLang's offers take. Used where a trace is written."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from feather_sglang.engines.sglang.controller import Controller


class TimedController(Controller):
    """Offers are many and each answer is quick: only here are they worth two looks at the clock each."""

    def offer(self, add_one_req: Callable[..., Any], adder: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
        """See :class:`Controller`; SGLang's own part is not counted."""
        started = time.perf_counter()

        def original(*given: Any, **named: Any) -> Any:
            entered = time.perf_counter()
            result = add_one_req(*given, **named)
            self.hook_s -= time.perf_counter() - entered
            return result

        try:
            return super().offer(original, adder, req, *args, **kwargs)
        finally:
            self.hook_s += time.perf_counter() - started
