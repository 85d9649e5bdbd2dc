"""Named workloads. All random choices are seeded; shapes are stated in ``about``."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

from feather_sglang.simulation.workload import Ask, Workload, build


class _Blocks:
    """Names for blocks of tokens: shared ones by number, own ones never twice."""

    def __init__(self) -> None:
        self._own = 0

    def own(self, tokens: int) -> tuple[int, int]:
        self._own -= 1
        return self._own, tokens


def grouped(
    sizes: Sequence[int], prefix: int, suffix: int, output: int, rng: random.Random, rate: float | None = None
) -> list[Ask]:
    """Requests of groups that share a prefix each, in random order; all at once, or as a Poisson stream."""
    blocks = _Blocks()
    members = [group for group, size in enumerate(sizes) for _ in range(size)]
    rng.shuffle(members)
    times = poisson(rng, rate) if rate else iter(lambda: 0.0, None)
    return [Ask(next(times), [(group, prefix), blocks.own(suffix)], output) for group in members]


def poisson(rng: random.Random, rate: float) -> Iterator[float]:
    """Arrival times in seconds, ``rate`` a second on average."""
    now = 0.0
    while True:
        now += rng.expovariate(rate)
        yield now


def _paper(rng: random.Random) -> Workload:
    return build(
        "paper-800x8",
        "800 requests at once in 8 groups of 100, 4,096 + 64 prompt tokens, 256 output tokens; 400 running slots, so a "
        "policy that mixes runs batches of up to 400 where a homogeneous one has 100",
        grouped([100] * 8, 4096, 64, 256, rng),
        max_running=400,
    )


def _one_divergent(rng: random.Random) -> Workload:
    return build(
        "one-divergent",
        "1,600 requests at once, 63 of every 64 of one group and one of another, 8,192 + 64 prompt tokens, 256 output "
        "tokens; 64 running slots",
        grouped([1575] + [1] * 25, 8192, 64, 256, rng),
        max_running=64,
    )


def _prefix(thousands: int) -> Callable[[random.Random], Workload]:
    def make(rng: random.Random) -> Workload:
        return build(
            f"prefix-{thousands}k",
            f"1,024 requests at once in 16 groups, {thousands * 1024:,} + 64 prompt tokens, 128 output tokens",
            grouped([64] * 16, thousands * 1024, 64, 128, rng),
        )

    return make


def _documents(
    name: str, about: str, documents: int, questions: tuple[int, int], length: tuple[int, int], output: tuple[int, int]
) -> Callable[[random.Random], Workload]:
    """Questions about long documents: log-uniform lengths, each document with its own number of questions."""

    def make(rng: random.Random) -> Workload:
        blocks = _Blocks()
        asks = []
        for document in range(documents):
            tokens = round(length[0] * (length[1] / length[0]) ** rng.random())
            for _ in range(rng.randint(*questions)):
                asks.append(Ask(0.0, [(document, tokens), blocks.own(rng.randint(16, 128))], rng.randint(*output)))
        rng.shuffle(asks)
        return build(name, about, asks)

    return make


def _no_sharing(rng: random.Random) -> Workload:
    blocks = _Blocks()
    times = poisson(rng, 8.0)
    asks = [Ask(next(times), [blocks.own(rng.randint(256, 4096))], rng.randint(32, 384)) for _ in range(2000)]
    return build(
        "no-sharing", "2,000 requests, 8/s, 256 to 4,096 prompt tokens, 32 to 384 output; nothing shared", asks
    )


def _bursty(rng: random.Random) -> Workload:
    blocks = _Blocks()
    asks = []
    for burst in range(20):
        for _ in range(100):
            group = rng.randrange(8)
            at = burst * 10.0 + rng.random()
            asks.append(Ask(at, [(group, 4096), blocks.own(rng.randint(32, 256))], rng.randint(32, 256)))
    return build(
        "bursty", "20 bursts of 100 requests in a second, 10 s apart; 8 groups, 4,096 + 32 to 256, 32 to 256 out", asks
    )


def _hot_group(rng: random.Random) -> Workload:
    blocks = _Blocks()
    times = poisson(rng, 20.0)
    asks = []
    for _ in range(4000):
        own = blocks.own(rng.randint(32, 256))
        prompt = [(0, 4096), own] if rng.random() < 0.8 else [blocks.own(4096), own]
        asks.append(Ask(next(times), prompt, rng.randint(32, 256)))
    return build(
        "hot-group-with-cold-tail",
        "4,000 requests, 20/s: four fifths share 4,096 tokens, the others nothing; 32 to 256 own tokens and output",
        asks,
    )


_MAKE: dict[str, Callable[[random.Random], Workload]] = {
    "paper-800x8": _paper,
    "one-divergent": _one_divergent,
    **{f"prefix-{thousands}k": _prefix(thousands) for thousands in range(1, 11)},
    "leval-like": _documents(
        "leval-like",
        "160 documents of 3,000 to 32,000 tokens (log-uniform), 3 to 10 questions of 16 to 128 tokens each, 16 to 256 "
        "output tokens, all at once in random order: the shape of L-Eval, not its texts",
        160,
        (3, 10),
        (3000, 32000),
        (16, 256),
    ),
    "longbench-like": _documents(
        "longbench-like",
        "400 documents of 2,000 to 14,000 tokens (log-uniform), 1 to 4 questions of 16 to 128 tokens each, 16 to 128 "
        "output tokens, all at once in random order: the shape of LongBench, not its texts",
        400,
        (1, 4),
        (2000, 14000),
        (16, 128),
    ),
    "no-sharing": _no_sharing,
    "bursty": _bursty,
    "hot-group-with-cold-tail": _hot_group,
}

SCENARIOS = tuple(_MAKE)


def make_scenario(name: str, seed: int = 0) -> Workload:
    """One of ``SCENARIOS``. Raises ``KeyError`` for another name."""
    return _MAKE[name](random.Random(seed))
