"""Counts operations instead of time: the same number on every machine."""

from __future__ import annotations

import gc
import sys


def calls_during(action) -> int:
    """How many Python and C functions are called; compiled modules call fewer, never more with a longer queue."""
    count = 0

    def profile(frame, event, arg):
        nonlocal count
        count += event in ("call", "c_call")

    gc.disable()  # a collection calls whatever is registered for it
    sys.setprofile(profile)
    try:
        action()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count
