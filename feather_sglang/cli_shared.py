"""What the subcommands share: reports, complaints, and checks of arguments."""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import sys
import warnings
from collections.abc import Collection, Iterable
from pathlib import Path

from feather_sglang.engines.sglang import platform
from feather_sglang.engines.sglang.platform import PLATFORM_NAME, PLATFORM_VARIABLE

NEEDS_SGLANG = "this needs sglang; run: pip install 'feather-sglang[sglang]'"

Commands = argparse._SubParsersAction  # an alias: it takes parameters only for type checkers


def report(text: str, as_json: str, target: str | None) -> int:
    """Print one of both, and write the JSON where it was asked for; returns exit code 0."""
    print(as_json if target == "-" else text)
    if target and target != "-":
        Path(target).write_text(as_json + "\n")
    return 0


def say(text: str) -> None:
    """Progress, on standard error."""
    print(text, file=sys.stderr, flush=True)


def complain(message: str) -> None:
    """What is wrong, in one line on standard error."""
    print(f"feather-sglang: error: {message}", file=sys.stderr)


def bad_use(message: str) -> int:
    """Complain; returns exit code 2."""
    complain(message)
    return 2


def unknown_name(what: str, given: Iterable[str], valid: Collection[str]) -> str | None:
    """A line about the first name that is none of the valid ones."""
    return next((f"unknown {what} '{name}'; valid: {', '.join(valid)}" for name in given if name not in valid), None)


def positive(text: str) -> int:
    """An argument that must be a positive integer."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be a positive integer, got {text!r}")
    return value


def positive_number(text: str) -> float:
    """An argument that must be a positive, finite number."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"must be a positive, finite number, got {text!r}")
    return value


def refused_outputs(*paths: Path | str | None, plots: Iterable[Path | str | None] = ()) -> str | None:
    """A line about the first file that can't be written, or about matplotlib, without which nothing is drawn."""
    drawn = [path for path in plots if path]
    for path in (*paths, *drawn):
        if path and path != "-" and not _writable(Path(path)):
            return f"can't write '{path}'"
    if drawn and importlib.util.find_spec("matplotlib") is None:
        return "drawing needs matplotlib; run: pip install 'feather-sglang[plots]'"
    return None


def _writable(path: Path) -> bool:
    """Whether a file can be written there, without leaving one."""
    return not path.is_dir() and os.access(path if path.exists() else path.parent, os.W_OK)


def use_cpu_platform() -> None:
    """Without an accelerator SGLang's modules import only on a platform of their own."""
    if "SGLANG_PLATFORM" not in os.environ and not Path("/dev/nvidia0").exists():
        os.environ[PLATFORM_VARIABLE] = PLATFORM_NAME
    platform.activate()  # before torch is imported
    warnings.simplefilter("ignore")
