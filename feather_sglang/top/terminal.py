"""Single keys from a terminal, without Enter."""

from __future__ import annotations

import contextlib
import functools
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def keys() -> Iterator[Callable[[float], str]]:
    """A function that waits so many seconds for a key and returns it, or an empty string.

    The terminal's modes are as before afterwards. Where standard input is no terminal, nothing is ever pressed.
    """
    if not sys.stdin.isatty():
        yield _nothing
        return
    source = sys.stdin.fileno()
    before = termios.tcgetattr(source)
    try:
        tty.setcbreak(source)  # Ctrl-C stays a signal
        yield functools.partial(_key, source)
    finally:
        termios.tcsetattr(source, termios.TCSADRAIN, before)


def _key(source: int, seconds: float) -> str:
    ready, _, _ = select.select([source], [], [], seconds)
    # The end of the input is that of the terminal.
    return os.read(source, 1).decode(errors="replace") or "q" if ready else ""


def _nothing(seconds: float) -> str:
    time.sleep(seconds)
    return ""
