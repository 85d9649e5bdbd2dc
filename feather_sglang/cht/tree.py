"""The chunked hash tree: which waiting request shares most with the active batch (paper, Part A).

A path-compressed tree over cumulative chunk hashes; a run of chunks at which no request ends or branches off is one
node. Every request ends at a node. A node is *covered* while an active request passes through it, and the root always
is, so the covered nodes are a connected top of the tree: the working set of the paper.

Two ideas keep every operation off the waiting requests:

- A request's missing count is its depth less the depth of the deepest covered node above it, and that node is common to
  everything that hangs below it. So a whole uncovered subtree is represented by its request of least depth: each node
  keeps a heap of the requests that end at it and of its uncovered children, each child by its own best (a tournament).
  Covering a node changes no key anywhere below it.
- Only covered nodes take part in the *frontier*, a heap by missing count. Activating a request adds and removes the
  nodes that it newly covers, and nothing else.

Heaps are lazy: a key that changed is pushed again and the old entry is dropped when it surfaces; a heap that is more
than half stale is rebuilt, so memory follows the live requests.

Below, "path" is the number of nodes from a request's own node to the root. It is at most the request's chunks and,
path-compressed, usually two to four. Updating the per-node counts of waiting requests costs one addition a path node.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from typing import Any, Final, NamedTuple

from feather_sglang.cht.hashing import DEFAULT_CHUNK_SIZE, TokenIds, chunk_hashes

# Heap keys pack (chunks, sequence number) into one integer: comparisons stay in C and ties go to the earliest.
_SEQ_BITS: Final = 40
_NOTHING: Final = 1 << 62  # the best of an empty heap; greater than every key
_SLACK: Final = 16  # a heap this small is never worth rebuilding


class Candidate(NamedTuple):
    """A waiting request seen from the active batch; all counts are in chunks, except ``sharing``."""

    rid: Hashable
    #: Its chunks that no active request has.
    missing: int
    #: Its chunks that some active request has.
    covered: int
    #: How much of ``common_depth`` would be lost by adding it; 0 on an empty batch.
    delta: int
    #: Waiting requests, itself included, that share the common depth that would remain.
    sharing: int


class Run(NamedTuple):
    """Waiting requests that would be offered one after the other; see :meth:`ChunkedHashTree.best_run`."""

    rids: list[Hashable]
    #: Of each, what :meth:`ChunkedHashTree.insert_hashes` was given.
    notes: list[Any]
    #: Of each, as in ``Candidate``.
    missing: list[int]
    #: Waiting requests that activating each with ``ready=False`` would hold.
    holds: list[int]
    #: As in ``Candidate``, the same for all.
    delta: int
    #: As in ``Candidate``, of the first; one less for each that follows.
    sharing: int


class Follower(NamedTuple):
    """A waiting request, and how many chunks it shares with the one that it follows."""

    rid: Hashable
    depth: int


class Group(NamedTuple):
    """Requests whose longest prefix shared with another request is the same."""

    #: Chunks of that prefix.
    depth: int
    waiting: int
    active: int


class _Request:
    """Competes in the heap of the node where it ends while it waits (``support`` is 0)."""

    __slots__ = ("best", "home", "note", "rid", "support")

    def __init__(self, rid: Hashable, note: Any, home: _Node, key: int) -> None:
        self.rid = rid
        self.note = note
        self.home: _Node | None = home
        self.best = key
        self.support = 0

    def __lt__(self, other: object) -> bool:
        return False  # equal keys name the same request; at most one of the entries is live


_NO_CHILDREN: dict[int, _Node] = {}


class _Node:
    """A run of chunks. Competes in its parent's heap while it is uncovered (``support`` is 0)."""

    __slots__ = (
        "active",
        "best",
        "children",
        "count",
        "covered_key",
        "depth",
        "heap",
        "home",
        "label",
        "own",
        "ready",
        "support",
        "top",
    )

    def __init__(self, home: _Node | None, label: array[int], depth: int) -> None:
        self.home = home
        self.label = label  # the hashes of its chunks; the first is its key in the parent
        self.depth = depth  # chunks from the root to its end
        self.children = _NO_CHILDREN  # replaced before the first child goes in; most nodes are leaves
        self.count = 0  # waiting requests in its subtree
        self.own = 0  # requests that end here, waiting or active
        self.active = 0  # active requests that end here
        self.support = 0  # active requests that end here, plus covered children; covered while positive
        self.covered_key = 0  # exclusive or of the covered children's keys: names the child when there is one
        self.ready = False  # covered, and its KV is computed
        self.heap: list[tuple[int, _Request | _Node]] = []
        self.best = _NOTHING
        self.top: _Request | _Node | None = None  # whose key ``best`` is: saves a way down the tree from the heaps

    def __lt__(self, other: object) -> bool:
        return False


class ChunkedHashTree:
    """Index of waiting and active requests by shared prefix.

    Not thread-safe. Deterministic: the same calls give the same answers in every process.

    Args:
        chunk_size: tokens per chunk, used by :meth:`insert`.
    """

    def __init__(self, chunk_size: int = DEFAULT_CHUNK_SIZE) -> None:
        if chunk_size < 1:
            raise ValueError(f"chunk_size must be at least 1, got {chunk_size}")
        self.chunk_size = chunk_size
        self._root = _Node(None, array("Q"), 0)
        self._root.support = 1
        self._root.ready = True
        self._requests: dict[Hashable, _Request] = {}
        self._next_seq = 0
        self._num_active = 0
        self._num_covered = 1
        self._common: _Node | None = None  # the deepest node that all active requests pass through
        # The frontier: covered, ready nodes with something waiting, by (missing, sequence number). Nodes above the
        # common node are kept apart, since a request there costs common depth.
        self._inner: list[tuple[int, _Node]] = []
        self._outer: list[tuple[int, _Node]] = []
        # What ``best_run`` took out of a node's heap: most is activated next, and would only be in the way there.
        self._taken: list[tuple[int, _Request | _Node]] = []
        self._taken_from: _Node | None = None

    # ---------------------------------------------------------------- reading

    def __contains__(self, rid: Hashable) -> bool:
        return rid in self._requests

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def num_waiting(self) -> int:
        """Waiting requests. O(1)."""
        return self._root.count

    @property
    def num_active(self) -> int:
        """Active requests. O(1)."""
        return self._num_active

    @property
    def common_depth(self) -> int:
        """Chunks that all active requests share; 0 on an empty batch. O(1)."""
        return self._common.depth if self._common is not None else 0

    @property
    def base_depth(self) -> int:
        """Chunks that every request in the tree shares, so that they set nobody apart. O(1)."""
        return self._base().depth

    @property
    def num_heap_entries(self) -> int:
        """Entries in all heaps, stale ones included: a small multiple of the requests. O(nodes); for reports."""
        self._put_back()
        return sum(len(node.heap) for node in _walk(self._root)) + len(self._inner) + len(self._outer)

    def is_active(self, rid: Hashable) -> bool:
        """Whether the request is active. O(1). Raises ``KeyError`` for an unknown one."""
        return self._requests[rid].support > 0

    def note(self, rid: Hashable) -> Any:
        """What :meth:`insert_hashes` was given with the request. O(1). Raises ``KeyError`` for an unknown one."""
        return self._requests[rid].note

    def depth(self, rid: Hashable) -> int:
        """The request's full chunks. O(1). Raises ``KeyError`` for an unknown one."""
        return _node_of(self._requests[rid]).depth

    def covered(self, rid: Hashable) -> int:
        """Chunks of the request that an active request has; an active request's are all covered. O(path)."""
        return _covered_node(_node_of(self._requests[rid])).depth

    def missing(self, rid: Hashable) -> int:
        """Chunks of the request that no active request has. O(path). Raises ``KeyError`` for an unknown one."""
        node = _node_of(self._requests[rid])
        return node.depth - _covered_node(node).depth

    def held(self, rid: Hashable) -> bool:
        """Whether the longest prefix it shares with the batch is still being computed. O(path)."""
        return not _covered_node(_node_of(self._requests[rid])).ready

    def held_behind(self, rid: Hashable) -> int:
        """Waiting requests held until this active request's prefix is computed. O(path)."""
        first_pending: _Node | None = None
        node = _node_of(self._requests[rid])
        while not node.ready:
            if node.support:
                first_pending = node
            node = _parent(node)
        return first_pending.count if first_pending is not None else 0

    def would_hold(self, rid: Hashable, ready: int = 0) -> int:
        """Waiting requests that activating this waiting one, and marking ``ready`` chunks, would hold. O(path)."""
        node = _node_of(self._waiting(rid))
        first_pending: _Node | None = None
        while not node.support and node.depth > ready:
            first_pending = node
            node = _parent(node)
        return first_pending.count - 1 if first_pending is not None else 0

    def candidate(self, rid: Hashable) -> Candidate:
        """The waiting request seen from the batch. O(path). Raises ``KeyError`` if it is unknown or active."""
        request = self._waiting(rid)
        node = _node_of(request)
        return self._candidate(request, node, _covered_node(node))

    def groups(self) -> list[Group]:
        """Who shares a prefix: each request counts once, at the longest prefix that another one has, too.

        Most waiting first, then deepest; requests that share nothing are left out. O(requests), for reports.
        """
        found: dict[int, tuple[int, list[int]]] = {}  # by id: compiled nodes have no hash
        for request in self._requests.values():
            node = _node_of(request)
            if node.depth and node.own < 2 and not node.children:
                node = _parent(node)  # where others end or branch off, or it would be one node with this one
            if node.depth:
                found.setdefault(id(node), (node.depth, [0, 0]))[1][request.support] += 1
        groups = [Group(depth, waiting, active) for depth, (waiting, active) in found.values()]
        return sorted(groups, key=lambda group: (-group.waiting, -group.depth))

    def best(self) -> Candidate | None:
        """The waiting request with the fewest missing chunks, ties to the earliest inserted; ``None`` if none waits.

        Requests held by a prefix that is not ready (see :meth:`activate`) are not offered.
        O(log W) amortised, plus the nodes from the frontier down to the request.
        """
        self._put_back()
        inner = self._top(self._inner, inner=True)
        outer = self._top(self._outer, inner=False)
        if inner is None and outer is None:
            return None
        if outer is None or (inner is not None and inner[0] < outer[0]):
            assert inner is not None
            return self._winner(inner[1])
        return self._winner(outer[1])

    def best_sharing(self) -> Candidate | None:
        """The waiting request that costs the least common depth, then with the fewest missing chunks.

        Only requests that share more than :attr:`base_depth` with some active request, and are not held, are offered.
        O(log W) amortised, plus the nodes between the common node and the one where the request branches off.
        """
        self._put_back()
        node = self._nearest()
        return self._winner(node) if node is not None else None

    def nearest_waiting(self, rid: Hashable) -> Follower | None:
        """Who would follow an active request best, now that it is about to leave.

        Of those that branch off from its computed prefix last, and below :attr:`base_depth`, the first with the fewest
        chunks; ``None`` if there is none. Those that share more with another active request don't count. O(path).
        Raises ``KeyError`` if ``rid`` is unknown or waiting.
        """
        node = _node_of(self._active(rid))
        base = self._base()
        while node is not base and node.depth:
            if node.ready and node.best != _NOTHING:
                return Follower(_winner_below(node).rid, node.depth)
            node = _parent(node)
        return None

    def best_run(self, limit: int) -> Run | None:
        """What :meth:`best_sharing` would offer, again and again, if each were activated with ``ready=False``.

        A prefix of that sequence, of at most ``limit`` requests and as long as they branch off at the same node;
        ``None`` only if ``best_sharing`` is ``None``. Cheaper than going one by one: O(log W) amortised a request, and
        the tree is left as it is.
        """
        self._put_back()
        node = self._nearest()
        common = self._common
        if node is None or common is None:
            return None
        if node.depth < common.depth or self._num_active < 2:
            one = self._winner(node)  # it moves the common node, so what comes next is another question
            hold = node.top.count - 1 if type(node.top) is _Node else 0
            return Run([one.rid], [self.note(one.rid)], [one.missing], [hold], one.delta, one.sharing)
        rids: list[Hashable] = []
        notes: list[Any] = []
        missing: list[int] = []
        holds: list[int] = []
        heap, depth, taken, pop = node.heap, node.depth, self._taken, heappop
        self._taken_from = node
        worst = self._rival(node) + (depth << _SEQ_BITS)
        last: _Request | _Node | None = None
        while limit and heap:
            entry = heap[0]
            key, each = entry
            if key > worst:
                break
            pop(heap)
            if each is last or each.home is not node or each.best != key or each.support:
                continue  # stale, or a double
            taken.append(entry)
            last = each
            missing.append((key >> _SEQ_BITS) - depth)
            if type(each) is _Node:
                holds.append(each.count - 1)
                each = _winner_below(each)
            else:
                holds.append(0)
            assert type(each) is _Request
            rids.append(each.rid)
            notes.append(each.note)
            limit -= 1
        return Run(rids, notes, missing, holds, 0, common.count)

    # --------------------------------------------------------------- changing

    def insert(self, rid: Hashable, token_ids: TokenIds, *, namespace: str = "") -> None:
        """Add a waiting request by its tokens. O(T + path + log W). Raises ``ValueError`` for a duplicate."""
        self._refuse_duplicate(rid)
        self.insert_hashes(rid, chunk_hashes(token_ids, self.chunk_size, namespace=namespace))

    def insert_hashes(self, rid: Hashable, hashes: Sequence[int], note: Any = None) -> None:
        """Add a waiting request by its cumulative chunk hashes (see :func:`chunk_hashes`).

        ``note`` is kept with it, for the caller: what a plan needs to know of a request is then at hand with it.
        O(chunks + path + log W), the chunks copied in C. Raises ``ValueError`` for a duplicate rid and
        ``OverflowError`` for a hash outside 0 to 2**64 - 1; nothing changes then.
        """
        self._refuse_duplicate(rid)
        self._put_back()
        node = self._reach(array("Q", hashes))
        request = _Request(rid, note, node, node.depth << _SEQ_BITS | self._next_seq)
        self._next_seq += 1
        self._requests[rid] = request
        node.own += 1
        _count(node, 1)
        _push(node, request)
        self._refresh(node)

    def activate(self, rid: Hashable, *, ready: bool = True) -> None:
        """A waiting request joins the batch.

        With ``ready=False`` the chunks that it newly covers have no KV yet: the waiting requests that share them are
        *held* (offered by no query) until :meth:`mark_ready` says that they are computed.

        O(log W) amortised per newly covered node, plus the path. Raises ``KeyError`` if it is unknown or active.
        """
        request = self._waiting(rid)
        self._put_back()
        end = _node_of(request)
        request.support = 1
        _count(end, -1)
        self._num_active += 1
        end.active += 1
        fresh: list[_Node] = []
        node = end
        while True:
            node.support += 1
            if node.support > 1:
                break
            fresh.append(node)
            parent = _parent(node)
            parent.covered_key ^= node.label[0]
            node = parent
        self._num_covered += len(fresh)
        for covered in fresh:
            covered.ready = False
            covered.best = _live_best(covered)
        self._refresh(node)
        if self._common is None:
            self._set_common(end)
        elif node.depth < self._common.depth:  # then the branching point is above: covered nodes form one tree
            self._set_common(node)
        if ready:
            self.mark_ready(rid)

    def activate_run(self, rids: Iterable[Hashable]) -> None:
        """:meth:`activate` each, with ``ready=False``. Cheaper for siblings: the node above them is updated once.

        Raises ``KeyError`` at the first that is unknown or active; those before it are active then.
        """
        parent: _Node | None = None
        joined = 0
        try:
            for rid in rids:
                request = self._waiting(rid)
                leaf = _node_of(request)
                above = leaf.home
                if (
                    leaf.own > 1
                    or leaf.children
                    or above is None
                    or not above.support
                    or self._common is None
                    or above.depth < self._common.depth
                ):
                    self._finish_run(parent, joined)
                    parent, joined = None, 0
                    self.activate(rid, ready=False)
                    continue
                if above is not parent:
                    self._finish_run(parent, joined)
                    parent, joined = above, 0
                request.support = leaf.support = leaf.active = 1
                leaf.count = 0
                leaf.ready = False
                leaf.best = _NOTHING  # its heap is left alone: the entry in it is stale now
                leaf.top = None
                above.support += 1
                above.covered_key ^= leaf.label[0]
                joined += 1
        finally:  # also for those before one that is unknown
            self._finish_run(parent, joined)

    def _finish_run(self, parent: _Node | None, joined: int) -> None:
        if parent is not None:
            self._put_back()
            _count(parent, -joined)
            self._num_active += joined
            self._num_covered += joined
            self._refresh(parent)

    def mark_ready(self, rid: Hashable, depth: int | None = None) -> None:
        """The KV of an active request is computed down to ``depth`` chunks (default: all of it).

        O(log W) amortised per node that becomes ready, plus the nodes below that do not. Raises ``KeyError`` if the
        request is unknown or waiting.
        """
        node = _node_of(self._active(rid))
        limit = node.depth if depth is None else depth
        while not node.ready:
            if node.depth <= limit:
                node.ready = True
                self._offer(node)
            node = _parent(node)

    def deactivate(self, rid: Hashable) -> None:
        """An active request waits again, in its old place among equals. Cost and errors as :meth:`activate`."""
        request = self._active(rid)
        self._put_back()
        end = _node_of(request)
        request.support = 0
        _count(end, 1)
        _push(end, request)
        self._uncover(end)

    def remove(self, rid: Hashable) -> None:
        """Forget a waiting or an active request.

        O(log W) amortised per node newly uncovered or whose best request it was, plus the path. Raises ``KeyError``
        for an unknown one.
        """
        request = self._requests.pop(rid)
        self._put_back()
        end = _node_of(request)
        request.home = None
        end.own -= 1
        if request.support:
            self._uncover(end)
        else:
            _count(end, -1)
            self._refresh(end)
        _trim(end)
        self._prune(end)

    # ------------------------------------------------------------- the shape

    def _reach(self, hashes: array[int]) -> _Node:
        """The node that ends with the last hash, made if need be."""
        node, at, end = self._root, 0, len(hashes)
        while at < end:
            child = node.children.get(hashes[at])
            if child is None:
                leaf = _Node(node, hashes[at:], end)
                if not node.children:
                    node.children = {}
                node.children[hashes[at]] = leaf
                return leaf
            length = len(child.label)
            if length <= end - at and child.label[-1] == hashes[at + length - 1]:
                node, at = child, at + length  # hashes are cumulative: an equal last one makes the whole run equal
                continue
            shared = _shared_run(child.label, hashes, at)
            node, at = self._split(child, shared), at + shared
        return node

    def _split(self, lower: _Node, length: int) -> _Node:
        """Cut the first ``length`` chunks of a node off into a new parent of it. O(chunks of the node), in C."""
        parent = _parent(lower)
        upper = _Node(parent, lower.label[:length], lower.depth - len(lower.label) + length)
        lower.label = lower.label[length:]
        lower.home = upper
        upper.children = {lower.label[0]: lower}
        upper.count = lower.count
        parent.children[upper.label[0]] = upper
        if lower.support:
            upper.support = 1
            upper.ready = lower.ready
            upper.covered_key = lower.label[0]
            self._num_covered += 1
        elif lower.best != _NOTHING:
            _push(upper, lower)
            upper.best = lower.best
            upper.top = lower
            _push(parent, upper)
            if parent.top is lower:
                parent.top = upper
        return upper

    def _prune(self, node: _Node) -> None:
        """Drop a node that no request needs any more, or join it with its only child."""
        if node is not self._root and not node.own and not node.children:
            parent = _parent(node)
            del parent.children[node.label[0]]
            node.home = None
            node = parent
            _trim(node)
        if node is self._root or node.own or len(node.children) != 1:
            return
        parent = _parent(node)
        (child,) = node.children.values()
        child.label = node.label + child.label
        child.home = parent
        parent.children[child.label[0]] = child
        node.home = None
        if node.support:
            node.support = 0
            self._num_covered -= 1
        elif child.best != _NOTHING:
            _push(parent, child)
            if parent.top is node:
                parent.top = child

    def _uncover(self, end: _Node) -> None:
        """An active request that ended here left the batch."""
        self._num_active -= 1
        end.active -= 1
        node = end
        while True:
            node.support -= 1
            if node.support:
                break
            node.ready = False
            node.best = _live_best(node)
            self._num_covered -= 1
            parent = _parent(node)
            parent.covered_key ^= node.label[0]
            if node.best != _NOTHING:
                _push(parent, node)
            node = parent
        self._refresh(node)
        if not self._num_active:
            self._set_common(None)
            return
        common = self._common
        assert common is not None
        while not common.active and common.support - (common is self._root) == 1:
            common = common.children[common.covered_key]
        self._set_common(common)

    def _set_common(self, node: _Node | None) -> None:
        """Move the common node, and the nodes in between to the other part of the frontier."""
        old, self._common = self._common, node
        if old is node:
            return
        low, high = (old, node) if (old.depth if old else 0) > (node.depth if node else 0) else (node, old)
        stop = high.depth if high is not None else 0
        while low is not None and low.depth >= stop:
            if low.support:
                self._offer(low)
            low = low.home

    def _base(self) -> _Node:
        root = self._root
        if not root.own and len(root.children) == 1:
            (only,) = root.children.values()
            return only
        return root

    # ------------------------------------------------------------- the heaps

    def _put_back(self) -> None:
        """End what ``best_run`` began: entries of requests that still wait return to their heap."""
        node = self._taken_from
        if node is None:
            return
        self._taken_from = None
        for entry in self._taken:
            key, each = entry
            if each.home is node and each.best == key and not each.support:
                heappush(node.heap, entry)
        self._taken.clear()

    def _refresh(self, node: _Node) -> None:
        """A node's contestants changed: carry its new best up through the uncovered nodes, to the frontier."""
        while True:
            best = _live_best(node)
            if best == node.best:
                return
            node.best = best
            if node.support:
                self._offer(node)
                return
            parent = _parent(node)
            if best != _NOTHING:
                _push(parent, node)
            node = parent

    def _offer(self, node: _Node) -> None:
        """Put a covered node into the part of the frontier where it belongs now."""
        if not node.ready or node.best == _NOTHING:
            return
        inner = node.depth >= self.common_depth
        heap = self._inner if inner else self._outer
        heappush(heap, (_missing_key(node), node))
        if len(heap) > 2 * self._num_covered + _SLACK:
            live = {key: node for key, node in heap if self._valid(key, node, inner)}  # keys are unique: no doubles
            heap[:] = live.items()
            heapify(heap)

    def _valid(self, key: int, node: _Node, inner: bool) -> bool:
        return (
            node.ready and node.support > 0 and _missing_key(node) == key and (node.depth >= self.common_depth) is inner
        )

    def _top(self, heap: list[tuple[int, _Node]], *, inner: bool) -> tuple[int, _Node] | None:
        while heap:
            if self._valid(*heap[0], inner):
                return heap[0]
            heappop(heap)
        return None

    def _best_inside(self, base: _Node) -> _Node | None:
        """The frontier's first node at or below the common node, the base left out."""
        aside: tuple[int, _Node] | None = None
        top = self._top(self._inner, inner=True)
        while top is not None and top[1] is base:
            aside = heappop(self._inner)
            top = self._top(self._inner, inner=True)
        if aside is not None:
            heappush(self._inner, aside)
        return top[1] if top is not None else None

    def _nearest(self) -> _Node | None:
        """Where the request branches off that costs the least common depth; see :meth:`best_sharing`."""
        common = self._common
        if common is None:
            return None
        base = self._base()
        node = self._best_inside(base)
        if node is None and common is not base:
            above = common.home
            while above is not None and above is not base:
                if above.ready and above.best != _NOTHING:
                    return above
                above = above.home
        return node

    def _rival(self, node: _Node) -> int:
        """The missing key of the best node at or below the common one, ``node`` and the base left out."""
        aside: list[tuple[int, _Node]] = []
        base = self._base()
        top = self._top(self._inner, inner=True)
        while top is not None and (top[1] is base or top[1] is node):
            aside.append(heappop(self._inner))
            top = self._top(self._inner, inner=True)
        for entry in {entry[0]: entry for entry in aside}.values():  # without doubles
            heappush(self._inner, entry)
        return top[0] if top is not None else _NOTHING

    def _winner(self, node: _Node) -> Candidate:
        """The best waiting request that branches off at a covered node."""
        request = _winner_below(node)
        return self._candidate(request, _node_of(request), node)

    def _candidate(self, request: _Request, end: _Node, branch: _Node) -> Candidate:
        """``branch`` is the deepest covered node above the request."""
        common = self._common
        if common is None:
            remains, delta = end, 0
        elif branch.depth < common.depth:
            remains, delta = branch, common.depth - branch.depth
        else:
            remains, delta = common, 0
        return Candidate(request.rid, end.depth - branch.depth, branch.depth, delta, remains.count)

    # ---------------------------------------------------------------- errors

    def _refuse_duplicate(self, rid: Hashable) -> None:
        if rid in self._requests:
            raise ValueError(f"request {rid!r} is already in the tree")

    def _waiting(self, rid: Hashable) -> _Request:
        request = self._requests[rid]
        if request.support:
            raise KeyError(f"request {rid!r} is active, not waiting")
        return request

    def _active(self, rid: Hashable) -> _Request:
        request = self._requests[rid]
        if not request.support:
            raise KeyError(f"request {rid!r} is waiting, not active")
        return request

    # ------------------------------------------------------------ invariants

    def _check(self) -> None:
        """Assert every invariant. O(everything); for tests."""
        self._put_back()
        root = self._root
        assert not _NO_CHILDREN
        assert root.home is None and root.depth == 0 and root.ready
        nodes = list(_walk(root))
        by_node: dict[int, list[_Request]] = {}
        for rid, request in self._requests.items():
            assert request.rid == rid and request.home is not None and request.support in (0, 1)
            by_node.setdefault(id(request.home), []).append(request)
        assert set(by_node) <= {id(node) for node in nodes}, "a request ends outside the tree"
        for node in reversed(nodes):  # children before parents
            own = by_node.get(id(node), [])
            children = list(node.children.values())
            covered = [child for child in children if child.support]
            if node is not root:
                assert node.own or len(children) > 1, "a node that neither ends a request nor branches"
                assert node.depth == _parent(node).depth + len(node.label) and len(node.label) > 0
            assert all(child.home is node and key == child.label[0] for key, child in node.children.items())
            assert node.own == len(own)
            assert node.active == sum(request.support for request in own)
            assert node.support == node.active + len(covered) + (node is root)
            assert not node.ready or node.support
            key = 0
            for child in covered:
                key ^= child.label[0]
            assert node.covered_key == key
            waiting = [request for request in own if not request.support]
            assert node.count == len(waiting) + sum(child.count for child in children)
            contestants: list[_Request | _Node] = [*waiting]
            contestants += [child for child in children if not child.support and child.best != _NOTHING]
            assert node.best == min((each.best for each in contestants), default=_NOTHING)
            assert node.top is next((each for each in contestants if each.best == node.best), None)
            entries = {(key, id(each)) for key, each in node.heap}
            assert all((each.best, id(each)) in entries for each in contestants)
            assert len(node.heap) <= 2 * (len(node.children) + node.own) + _SLACK
            for i in range(1, len(node.heap)):
                assert node.heap[(i - 1) // 2][0] <= node.heap[i][0]
        all_covered = [node for node in nodes if node.support]
        assert self._num_covered == len(all_covered)
        assert self._num_active == sum(node.active for node in nodes)
        if not self._num_active:
            assert self._common is None
        else:
            deepest = root
            while not deepest.active and deepest.support - (deepest is root) == 1:
                (deepest,) = [child for child in deepest.children.values() if child.support]
            assert self._common is deepest
        inner = {(key, id(node)) for key, node in self._inner}
        outer = {(key, id(node)) for key, node in self._outer}
        for node in all_covered:
            if node.ready and node.best != _NOTHING:
                frontier = inner if node.depth >= self.common_depth else outer
                assert (_missing_key(node), id(node)) in frontier, "a covered node is not on the frontier"


def _node_of(request: _Request) -> _Node:
    assert request.home is not None
    return request.home


def _parent(node: _Node) -> _Node:
    assert node.home is not None
    return node.home


def _covered_node(node: _Node) -> _Node:
    while not node.support:
        node = _parent(node)
    return node


def _winner_below(node: _Node) -> _Request:
    """The best waiting request at or below a node that has one."""
    at: _Node | _Request | None = node
    while type(at) is _Node:
        at = at.top
    assert type(at) is _Request
    return at


def _missing_key(node: _Node) -> int:
    return node.best - (node.depth << _SEQ_BITS)


def _count(node: _Node, by: int) -> None:
    at: _Node | None = node
    while at is not None:
        at.count += by
        at = at.home


def _live_best(node: _Node) -> int:
    """Drop stale entries from the top of a node's heap, note whose entry is first then, and return its key."""
    heap = node.heap
    while heap:
        key, each = heap[0]
        if each.home is node and each.best == key and not each.support:
            node.top = each
            return key
        heappop(heap)
    node.top = None
    return _NOTHING


def _push(node: _Node, contestant: _Request | _Node) -> None:
    if node.heap:
        heappush(node.heap, (contestant.best, contestant))
        _trim(node)
    else:
        node.heap = [(contestant.best, contestant)]  # of exactly one slot: most nodes never get a second


def _trim(node: _Node) -> None:
    """Rebuild a node's heap when more than half of it is stale: amortised O(1) a change."""
    heap = node.heap
    if len(heap) > 2 * (len(node.children) + node.own) + _SLACK:
        live = {key: each for key, each in heap if each.home is node and each.best == key and not each.support}
        heap[:] = live.items()
        heapify(heap)


def _shared_run(label: array[int], hashes: array[int], at: int) -> int:
    """How many chunks of ``label`` equal ``hashes[at:]``, at least one. O(log): cumulative hashes differ for good."""
    low, high = 1, min(len(label), len(hashes) - at)
    while low < high:
        middle = (low + high + 1) // 2
        if label[middle - 1] == hashes[at + middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low


def _walk(root: _Node) -> Iterator[_Node]:
    """Every node, parents before children."""
    stack = [root]
    while stack:
        node = stack.pop()
        yield node
        stack.extend(node.children.values())
