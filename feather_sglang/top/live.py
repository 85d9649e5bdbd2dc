"""Frames on a terminal in place, or one after the other elsewhere."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import json
import os
import queue
import shutil
import signal
import sys
import threading
from collections.abc import Iterator

from rich.console import Console, Group
from rich.live import Live

from feather_sglang.top.client import View
from feather_sglang.top.frame import frame
from feather_sglang.top.terminal import keys

# How long a key or a change of the terminal's size may wait.
_TICK_S = 0.1


def run(views: Iterator[View], url: str, *, once: bool, as_json: bool) -> int:
    """Show them until the user has seen enough; returns exit code 0.

    Raises:
        RuntimeError: in one line, why there is nothing to show, nor will be.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # request ids hold any letter, terminals over ssh may not
    if once:
        _print(_second(views), url, as_json)
        return 0
    try:
        _watch(views, url, as_json)
    except KeyboardInterrupt:
        pass  # how one leaves
    except BrokenPipeError:  # as with "| head": nobody reads on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _second(views: Iterator[View]) -> View:
    """What has rates."""
    for view in itertools.islice(views, 2):
        if view.error:
            raise RuntimeError(view.error)
    return view


def _watch(views: Iterator[View], url: str, as_json: bool) -> None:
    first = next(views)
    if first.final:  # later it may be a server that is starting, behind a proxy
        raise RuntimeError(first.error)
    if sys.stdout.isatty() and not as_json and os.environ.get("TERM") != "dumb":
        _live(first, views, url)
        return
    for view in itertools.chain([first], views):
        _print(view, url, as_json)


def _print(view: View, url: str, as_json: bool) -> None:
    if as_json:
        schedulers = [
            {**dataclasses.asdict(scheduler), "rates": rates and dataclasses.asdict(rates)}
            for scheduler, rates in view.schedulers
        ]
        print(json.dumps({"error": view.error or None, "schedulers": [] if view.error else schedulers}), flush=True)
    else:
        lines = frame(view, url, shutil.get_terminal_size((120, 0)).columns)
        print("\n".join(line.plain for line in lines), end="\n\n", flush=True)


def _live(view: View, views: Iterator[View], url: str) -> None:
    """In place, until ``q``. Questions have a thread of their own: a server that hangs must not hold up the keys."""
    answers: queue.SimpleQueue[View | Exception] = queue.SimpleQueue()
    threading.Thread(target=_collect, args=(views, answers), daemon=True).start()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # leave the terminal as it was then, too
    console = Console()
    drawn: object = None
    with keys() as pressed, Live(console=console, screen=True, auto_refresh=False) as screen:
        while True:
            with contextlib.suppress(queue.Empty):
                while True:  # to the newest
                    answer = answers.get_nowait()
                    if isinstance(answer, Exception):
                        raise answer
                    view = answer
            if drawn != (view, console.size):
                drawn = (view, console.size)
                screen.update(Group(*frame(view, url, *console.size)), refresh=True)
            if pressed(_TICK_S) in ("q", "Q"):
                return


def _collect(views: Iterator[View], answers: queue.SimpleQueue[View | Exception]) -> None:
    try:
        for view in views:
            answers.put(view)
    except Exception as error:
        answers.put(error)
