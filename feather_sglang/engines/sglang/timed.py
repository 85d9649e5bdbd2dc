"""A controller that also measures its own share of the scheduler's time. Used where a trace is written."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from feather_sglang.engines.sglang.controller import Controller


class TimedController(Controller):
    """Adds up the seconds spent in each of Feather's hooks; decisions do not depend on them."""

    def nothing_to_do(self, running_batch: Any) -> bool:
        """See :class:`Controller`."""
        started = time.perf_counter()
        try:
            return super().nothing_to_do(running_batch)
        finally:
            self.hook_s += time.perf_counter() - started

    def order(self, waiting_queue: list[Any], running_batch: Any = None, *args: Any, **kwargs: Any) -> bool:
        """See :class:`Controller`."""
        started = time.perf_counter()
        try:
            return super().order(waiting_queue, running_batch, *args, **kwargs)
        finally:
            self.hook_s += time.perf_counter() - started

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

    def end_pass(self, prefill: bool, running: int) -> None:
        """See :class:`Controller`."""
        started = time.perf_counter()
        super().end_pass(prefill, running)
        self.hook_s += time.perf_counter() - started
