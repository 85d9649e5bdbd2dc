"""Homogeneous and mixed decode batches on one real server: output tokens/s by batch size and number of prefixes.

The server runs ``fcfs`` with all prefixes cached, so a batch is exactly the requests that the client sends together.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import aiohttp  # comes with sglang

#: Requests, and the prefixes among them; the last is a homogeneous batch and one divergent request.
BATCHES = ((8, 1), (8, 8), (16, 1), (16, 8), (32, 1), (32, 8), (64, 1), (64, 8))
DIVERGENT = (9, 2)

#: When an answer had how many tokens.
Track = list[tuple[float, int]]


@dataclass(frozen=True)
class BatchRow:
    """Medians over the runs for one kind of batch."""

    requests: int
    prefixes: int
    #: Output tokens per second of the whole batch while all of it decodes; prefill is left out.
    tokens_per_s: float
    #: The lowest and the highest run.
    spread: tuple[float, float]

    @property
    def step_ms(self) -> float:
        """One decode step of the batch."""
        return 1e3 * self.requests / self.tokens_per_s


class Prompts:
    """Random prompts of word ids 3 to 1999, by prefix."""

    def __init__(self, prefixes: int, prefix_tokens: int, suffix_tokens: int) -> None:
        self._random = random.Random(3)
        self._suffix_tokens = suffix_tokens
        self._prefixes = [self._words(prefix_tokens) for _ in range(prefixes)]

    def one(self, prefix: int) -> list[int]:
        """A prompt that nobody had before."""
        return self._prefixes[prefix] + self._words(self._suffix_tokens)

    def _words(self, count: int) -> list[int]:
        return self._random.choices(range(3, 2000), k=count)


def groups(requests: int, prefixes: int) -> list[int]:
    """Which prefix each request has: in turn, as requests in random order have; a divergent one comes last."""
    if (requests, prefixes) == DIVERGENT:
        return [0] * (requests - 1) + [1]
    return [number % prefixes for number in range(requests)]


def measure(url: str, prompts: Prompts, output_tokens: int, runs: int, say: Callable[[str], None]) -> list[BatchRow]:
    """Each kind of batch ``runs`` times, interleaved. Raises ``aiohttp.ClientError`` if the server fails."""
    kinds = (*BATCHES, DIVERGENT)
    for prefix in range(max(prefixes for _, prefixes in kinds)):
        asyncio.run(send(url, [prompts.one(prefix)], 1))
    found: dict[tuple[int, int], list[float]] = {kind: [] for kind in kinds}
    for run in range(runs):
        for kind in kinds if run % 2 == 0 else reversed(kinds):
            say(f"batches, run {run + 1} of {runs}: {kind[0]} requests, {kind[1]} prefixes")
            batch = [prompts.one(prefix) for prefix in groups(*kind)]
            found[kind].append(decode_rate(asyncio.run(send(url, batch, output_tokens))))
    return [BatchRow(*kind, statistics.median(rates), (min(rates), max(rates))) for kind, rates in found.items()]


def table(rows: Sequence[BatchRow]) -> str:
    """The rows for reading, and what they say."""
    lines = [f"{'requests':>8}{'prefixes':>10}{'output tok/s':>14}{'step ms':>10}{'lowest-highest':>18}"]
    for row in rows:
        spread = f"{row.spread[0]:.0f}-{row.spread[1]:.0f}"
        lines.append(f"{row.requests:>8}{row.prefixes:>10}{row.tokens_per_s:>14.0f}{row.step_ms:>10.1f}{spread:>18}")
    by_kind = {(row.requests, row.prefixes): row for row in rows}
    for size in sorted({row.requests for row in rows if (row.requests, 8) in by_kind}):
        times = by_kind[size, 1].tokens_per_s / by_kind[size, 8].tokens_per_s
        lines.append(f"{size} of one prefix beside {size} of eight: {times:.2f} times the tokens/s")
    small, large = by_kind[8, 1], by_kind[64, 8]
    lines.append(
        f"8 of one prefix beside 64 of eight: {small.tokens_per_s / large.tokens_per_s:.2f} times the tokens/s"
    )
    more = by_kind[DIVERGENT].step_ms / small.step_ms - 1
    lines.append(f"one divergent request more in a batch of 8: the step takes {more:+.0%}")
    return "\n".join(lines)


def decode_rate(tracks: Sequence[Track]) -> float:
    """Tokens/s between the last request's first token and the first request's end."""
    begin = max(track[0][0] for track in tracks)
    end = min(track[-1][0] for track in tracks)
    tokens = sum(_tokens_at(track, end) - _tokens_at(track, begin) for track in tracks)
    if end <= begin or tokens <= 0:
        raise RuntimeError("the batch never decoded as a whole: ask for more output tokens")
    return tokens / (end - begin)


async def send(url: str, prompts: list[list[int]], output_tokens: int) -> list[Track]:
    """Send one batch and follow its answers. Raises ``aiohttp.ClientError`` if the server fails."""
    import aiohttp

    timeout = aiohttp.ClientTimeout(total=600)
    connector = aiohttp.TCPConnector(limit=len(prompts))
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        return await asyncio.gather(*(_stream(session, url, each, output_tokens) for each in prompts))


def _tokens_at(track: Track, moment: float) -> int:
    return max((tokens for at, tokens in track if at <= moment), default=0)


async def _stream(session: aiohttp.ClientSession, url: str, prompt: list[int], output_tokens: int) -> Track:
    """When the answer had how many tokens."""
    track = []
    sampling = {"max_new_tokens": output_tokens, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": prompt, "stream": True, "sampling_params": sampling}
    async with session.post(f"{url}/generate", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.content:
            if line.startswith(b"data: {"):
                tokens = json.loads(line[6:])["meta_info"]["completion_tokens"]
                track.append((time.perf_counter(), tokens))
    return track
