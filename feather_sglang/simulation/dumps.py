"""The requests that a running SGLang recorded (``--dump-requests-folder``, ``srt/managers/tokenizer_manager.py``)."""

from __future__ import annotations

import array
import math
import pickle
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path
from typing import Any

from feather_sglang.simulation.workload import Ask

_BLOCK_TOKENS = 64
# Of prompts that were recorded as text.
_CHARACTERS_PER_TOKEN = 4
# Classes that a dump may name and that do nothing but hold numbers.
_SAFE = {("array", "array"): array.array, ("array", "_array_reconstructor"): getattr(array, "_array_reconstructor")}  # noqa: B009  # not in the stubs


class _Stub:
    """Stands for an object of any class: its attributes are kept, and nothing of the class is imported or run."""

    def __new__(cls, *_: Any, **__: Any) -> _Stub:
        return super().__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None:
        return

    def __setstate__(self, state: Any) -> None:
        for part in state if isinstance(state, tuple) else (state,):
            if isinstance(part, dict):
                self.__dict__.update(part)

    def __setitem__(self, key: Any, value: Any) -> None:
        return

    def append(self, value: Any) -> None:
        """For what is pickled as a sequence."""

    def extend(self, values: Any) -> None:
        """For what is pickled as a sequence."""


class _Unpickler(pickle.Unpickler):
    """A pickle can name any function to call; here every name but a few harmless ones is a stub."""

    def find_class(self, module: str, name: str) -> Any:
        return _SAFE.get((module, name), _Stub)


def read_dump(path: Path, reject: Callable[[int, str], None]) -> Iterator[Ask]:
    """The requests of one dump, or of all dumps in a folder by name. Raises ``OSError``.

    Prompts recorded as token ids are taken as they are; of those recorded as text four characters count as a token.
    ``reject`` is told of each request that is no use: its number and why.
    """
    number = 0
    names: dict[Hashable, int] = {}
    for file in sorted(path.glob("*.pkl")) if path.is_dir() else [path]:
        for record in _records(file):
            number += 1
            try:
                yield _parse(record, names)
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                reject(number, f"not a recorded request: {error}")


def _records(file: Path) -> list[Any]:
    try:
        with file.open("rb") as stream:
            content = _Unpickler(stream).load()
        records = content["requests"]
    except OSError:
        raise
    except Exception as error:  # a damaged pickle can raise anything
        raise OSError(f"{file} is no request dump of SGLang: {type(error).__name__}: {error}") from None
    return list(records) if isinstance(records, list | tuple) else []


def _parse(record: Any, names: dict[Hashable, int]) -> Ask:
    asked, answer, created_s = record[0], record[1], float(record[2])
    if not math.isfinite(created_s):
        raise ValueError(f"created at {created_s}")
    output = int(answer["meta_info"]["completion_tokens"])
    prompt = int(answer["meta_info"]["prompt_tokens"])
    ids = getattr(asked, "input_ids", None)
    content, step = (ids, _BLOCK_TOKENS) if ids is not None else (asked.text, _BLOCK_TOKENS * _CHARACTERS_PER_TOKEN)
    if len(content) == 0 or prompt < 1 or output < 1:
        raise ValueError("no prompt or no output")
    if ids is not None and len(ids) != prompt:
        raise ValueError(f"{len(ids)} input_ids, but {prompt} prompt_tokens")
    blocks: list[tuple[int, int]] = []
    for start in range(0, len(content), step):
        left = prompt - len(blocks) * _BLOCK_TOKENS
        if left <= 0:
            break
        piece = content[start : start + step]
        key: Hashable = piece if isinstance(piece, str) else tuple(piece)
        last = start + step >= len(content)
        tokens = left if last else min(left, _BLOCK_TOKENS)
        blocks.append((names.setdefault(key, len(names)), tokens))
    return Ask(created_s, blocks, output)
