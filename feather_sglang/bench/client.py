"""``python -m feather_sglang.bench.client``: SGLang's ``bench_serving`` for prompts of given blocks at given times.

None of its own data sets takes token ids with times of arrival: ``mooncake`` makes words that are a token each only for
some tokenizers, and ``custom`` shuffles texts and sends them at a rate. So ``custom`` is replaced in this process; its
file has a JSON line for each request (see ``Line``). Everything else, and every figure, is SGLang's.
"""

from __future__ import annotations

import argparse
import functools
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple


class Line(NamedTuple):
    """One request. Blocks are (number, tokens): equal ones hold equal tokens."""

    arrival_s: float
    blocks: Sequence[tuple[int, int]]
    output_tokens: int

    def prompt(self, vocabulary: Sequence[int]) -> list[int]:
        """Token ids, drawn for each block by its number. O(tokens)."""
        ids: list[int] = []
        for number, tokens in self.blocks:
            ids += random.Random(number).choices(vocabulary, k=tokens)
        return ids


def main() -> None:
    """Replace the data set and its times of arrival, and run SGLang's client."""
    from sglang.benchmark import serving
    from sglang.benchmark.datasets import DATASET_MAPPING, DatasetRow
    from sglang.benchmark.datasets.common import get_available_tokens

    class Lines:
        """A data set, as SGLang's client asks for one."""

        def __init__(self, path: str) -> None:
            self._path = Path(path)

        @classmethod
        def from_args(cls, args: argparse.Namespace) -> Lines:
            """From the client's arguments."""
            return cls(args.dataset_path)

        def load(self, tokenizer: Any, model_id: str | None = None) -> list[Any]:
            """SGLang's rows, in the order of the file."""
            vocabulary = sorted(set(get_available_tokens(tokenizer)) - set(tokenizer.all_special_ids))
            rows = []
            for text in self._path.read_text().splitlines():
                line = Line(**json.loads(text))
                ids = line.prompt(vocabulary)
                rows.append(DatasetRow(ids, len(ids), line.output_tokens, timestamp=1e3 * line.arrival_s))
            return rows

    DATASET_MAPPING["custom"] = Lines
    serving.get_request = functools.partial(serving.get_request, use_trace_timestamps=True)
    serving.cli_main()


if __name__ == "__main__":
    main()
