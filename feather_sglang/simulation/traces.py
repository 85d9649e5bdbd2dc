"""Recorded traffic as a workload: Mooncake's and Alibaba Bailian's JSONL. SGLang's own dumps are in ``dumps``."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from feather_sglang.simulation.dumps import read_dump
from feather_sglang.simulation.workload import Ask, Workload, build

#: Tokens for each of the hash ids.
MOONCAKE_BLOCK, _BAILIAN_BLOCK = 512, 16


class TraceError(ValueError):
    """A trace can't be read: one line that says what and where."""


@dataclass
class Trace:
    """What was read: the workload, and the lines that were left out, with why."""

    workload: Workload
    bad_lines: list[tuple[int, str]] = field(default_factory=list)


def read_trace(path: Path, *, requests: int | None = None, speedup: float = 1.0, strict: bool = False) -> Trace:
    """Read a trace of any known format.

    Args:
        path: a .jsonl file (Mooncake's or Bailian's, told apart by ``chat_id``), or a .pkl file or a folder of such, as
            ``--dump-requests-folder`` of SGLang writes them.
        requests: only the first so many.
        speedup: arrivals come so many times as fast.
        strict: stop at the first malformed line instead of leaving it out.

    Raises:
        TraceError: nothing to read, or with ``strict`` a malformed line.
    """
    bad: list[tuple[int, str]] = []

    def reject(number: int, why: str) -> None:
        if strict:
            raise TraceError(f"{path}:{number}: {why}")
        bad.append((number, why))

    dump = path.is_dir() or path.suffix == ".pkl"
    try:
        asks = list(_first(read_dump(path, reject) if dump else _lines(path, reject), requests))
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"can't read '{path}': {error}") from None
    if not asks:
        what = f"malformed lines: {len(bad)}, the first {bad[0][0]}: {bad[0][1]}" if bad else "it is empty"
        raise TraceError(f"no request in '{path}': {what}")
    start = min(ask.arrival_s for ask in asks)
    asks = [Ask((ask.arrival_s - start) / speedup, ask.blocks, ask.output_tokens) for ask in asks]
    about = f"{len(asks):,} recorded requests" + (f", {speedup:g} times as fast" if speedup != 1 else "")
    return Trace(build(path.name, about, asks, fixed_output=False), bad)


def _first(asks: Iterator[Ask], count: int | None) -> Iterator[Ask]:
    for number, ask in enumerate(asks):
        if number == count:
            return
        yield ask


def _lines(path: Path, reject: Callable[[int, str], None]) -> Iterator[Ask]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                ask = _parse(json.loads(line))
            except json.JSONDecodeError as error:
                reject(number, f"not valid JSON: {error.msg}")
            except RecursionError:
                reject(number, "not valid JSON: nested too deeply")
            except ValueError as error:
                reject(number, str(error))
            else:
                yield ask


def _parse(record: Any) -> Ask:
    if not isinstance(record, dict):
        raise ValueError(f"must be a JSON object, got a {type(record).__name__}")
    bailian = "chat_id" in record
    block = _BAILIAN_BLOCK if bailian else MOONCAKE_BLOCK
    when = _number(record, "timestamp") / (1 if bailian else 1000)
    prompt, output = _count(record, "input_length"), _count(record, "output_length")
    ids = record.get("hash_ids")
    if not isinstance(ids, list) or not all(type(each) is int for each in ids):
        raise ValueError("hash_ids must be a list of integers")
    if len(ids) != -(-prompt // block):
        raise ValueError(
            f"{len(ids)} hash_ids don't fit an input_length of {prompt}: blocks of {block} tokens make "
            f"{-(-prompt // block)}"
        )
    blocks = [(each, block) for each in ids]
    blocks[-1] = (ids[-1], prompt - block * (len(ids) - 1))
    return Ask(when, blocks, output)


def _number(record: dict[str, Any], name: str) -> float:
    value = record.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise ValueError(f"{name} must be a finite number of at least 0, got {value!r}")
    return float(value)


def _count(record: dict[str, Any], name: str) -> int:
    value = record.get(name)
    if type(value) is not int or value < 1:
        raise ValueError(f"{name} must be a positive integer, got {value!r}")
    return value
