"""What is asked of the simulated engine: requests as lengths and places in a tree of prefixes, without tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

#: Bits for an offset in a node, below its number: chunk hashes are made of the two.
_OFFSET_BITS = 24


class Node:
    """Tokens at which no request of the workload ends or branches off, and how many of them the engine has cached."""

    __slots__ = (
        "born", "children", "cuts", "have", "length", "locks", "number", "parent", "queued", "running", "seen", "start",
        "total", "used",
    )  # fmt: skip

    def __init__(self, number: int, parent: Node | None, start: int, length: int) -> None:
        self.number = number
        self.parent = parent
        self.start = start  # tokens before it
        self.length = length
        self.total = 0  # requests of the workload that pass through it
        self.reset()

    def reset(self) -> None:
        """As before a run: nothing cached, nothing held."""
        # Kept by PrefixCache:
        self.have = 0  # its first so many tokens are cached
        self.cuts: list[int] = []  # values of ``have`` at which a later prefill went on: evicted piece by piece
        self.children = 0  # with cached tokens
        self.locks = 0  # admitted requests that hold it
        self.used = 0  # time of the last use
        self.born = 0  # time of the first of the cached tokens
        self.queued = False  # in the eviction heap
        # Kept by others:
        self.running = 0  # decoding requests that pass through it
        self.seen = 0  # pass in which LPM last met it in the queue


@dataclass(frozen=True)
class Request:
    """One request; its prompt are the tokens of ``nodes``, from the root down."""

    number: int
    arrival_s: float
    nodes: tuple[Node, ...]
    prompt_tokens: int
    output_tokens: int

    def chunk_hashes(self, chunk_size: int) -> list[int]:
        """One number per full chunk, equal for equal prefixes and only for these. O(chunks)."""
        hashes: list[int] = []
        for node in self.nodes:
            first = chunk_size - node.start % chunk_size
            base = (node.number << _OFFSET_BITS) + 1
            hashes.extend(range(base + first, base + node.length + 1, chunk_size))
        return hashes


@dataclass(frozen=True)
class Workload:
    """Requests in order of arrival, and the nodes of their tree, parents first."""

    name: str
    about: str
    requests: tuple[Request, ...]
    nodes: tuple[Node, ...]
    #: Running slots of the engine that it is meant for; 0: whatever the user says.
    max_running: int = 0
    #: Clients ask for exactly so many output tokens, so the engine reserves them all.
    fixed_output: bool = True

    @property
    def prompt_tokens(self) -> int:
        """Of all requests together."""
        return sum(request.prompt_tokens for request in self.requests)

    @property
    def shared_tokens(self) -> int:
        """Prompt tokens that an earlier request had already: the most that can come from cache."""
        return self.prompt_tokens - sum(node.length for node in self.nodes)


@dataclass(frozen=True)
class Ask:
    """A request as a source gives it: blocks of its prompt as (name, tokens), and the output's length.

    Blocks of one name under the same blocks before them hold the same tokens.
    """

    arrival_s: float
    blocks: Sequence[tuple[int, int]]
    output_tokens: int


def build(name: str, about: str, asks: Iterable[Ask], *, max_running: int = 0, fixed_output: bool = True) -> Workload:
    """Put the requests into a path-compressed tree. O(blocks); requests that arrive together keep their order."""
    ordered = sorted(asks, key=lambda ask: ask.arrival_s)
    # Uncompressed: each block by (number of the one before, name, tokens).
    numbers: dict[tuple[int, int, int], int] = {}
    parents, lengths, branches, last = [-1], [0], [2], []
    for ask in ordered:
        at = 0
        for block, tokens in ask.blocks:
            key = (at, block, tokens)
            number = numbers.get(key)
            if number is None:
                number = numbers[key] = len(parents)
                branches[at] += 1
                parents.append(at)
                lengths.append(tokens)
                branches.append(0)
            at = number
        branches[at] += 2  # where a request ends a node ends
        last.append(at)
    nodes: list[Node] = []
    of_block: list[Node | None] = [None]
    for number in range(1, len(parents)):
        before = of_block[parents[number]]
        if before is not None and branches[parents[number]] == 1:
            before.length += lengths[number]
            of_block.append(before)
            continue
        start = before.start + before.length if before is not None else 0
        node = Node(len(nodes), before, start, lengths[number])
        nodes.append(node)
        of_block.append(node)
    paths: dict[int, tuple[Node, ...]] = {-1: ()}
    requests = []
    for number, (ask, at) in enumerate(zip(ordered, last, strict=True)):
        leaf = of_block[at]
        path = _path(leaf, paths)
        for node in path:
            node.total += 1
        prompt = leaf.start + leaf.length if leaf is not None else 0
        requests.append(Request(number, ask.arrival_s, path, prompt, ask.output_tokens))
    return Workload(name, about, tuple(requests), tuple(nodes), max_running, fixed_output)


def _path(leaf: Node | None, known: dict[int, tuple[Node, ...]]) -> tuple[Node, ...]:
    missing = []
    node = leaf
    while node is not None and node.number not in known:
        missing.append(node)
        node = node.parent
    path = known[node.number if node is not None else -1]
    for node in reversed(missing):
        path = known[node.number] = (*path, node)
    return path
