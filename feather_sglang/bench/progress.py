"""A line on stderr that counts the seconds while something long runs."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator


@contextlib.contextmanager
def ticking(what: str) -> Iterator[None]:
    """Say what is running and for how long: in place on a terminal, otherwise at the start and every half minute."""
    terminal = sys.stderr.isatty()
    done = threading.Event()
    started = time.monotonic()

    def line() -> str:
        return f"{what}: {time.monotonic() - started:.0f} s"

    def tick() -> None:
        while not done.wait(1 if terminal else 30):
            sys.stderr.write(f"\r{line()}" if terminal else line() + "\n")
            sys.stderr.flush()

    print(what, end="" if terminal else "\n", file=sys.stderr, flush=True)
    thread = threading.Thread(target=tick, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        if terminal:
            print(f"\r{line()}", file=sys.stderr, flush=True)
