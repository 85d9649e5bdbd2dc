from __future__ import annotations

import random

import pytest
from counting import calls_during
from hypothesis import given, settings
from hypothesis import strategies as st
from model import ModelTree

from feather_sglang.cht import Candidate, ChunkedHashTree, chunk_hashes


def same(tree: ChunkedHashTree, model: ModelTree) -> None:
    tree._check()
    assert tree.num_waiting == len(model.waiting)
    assert tree.num_active == len(model.active)
    assert tree.common_depth == model.common_depth
    assert tree.best() == model.best()
    assert tree.best_sharing() == model.best_sharing()
    for rid in model.vectors:
        assert rid in tree
        assert tree.is_active(rid) == (rid in model.active)
        assert tree.missing(rid) == model.missing(rid)
        assert tree.covered(rid) == model.covered(rid)
        assert tree.depth(rid) == len(model.vectors[rid])
        if rid in model.waiting:
            assert tree.held(rid) == model.held(rid)
            assert tree.candidate(rid) == model.candidate(rid)
        else:
            assert tree.nearest_waiting(rid) == model.nearest_waiting(rid)


prompts = st.lists(st.integers(0, 2), max_size=7)
steps = st.lists(
    st.tuples(
        st.sampled_from(["insert"] * 3 + ["activate", "pending", "ready", "deactivate", "remove"]),
        prompts,
        st.integers(0, 10**6),
    ),
    max_size=40,
)


@settings(max_examples=400, deadline=None)
@given(steps)
def test_every_method_agrees_with_the_model(script):
    tree, model = ChunkedHashTree(chunk_size=1), ModelTree()
    for number, (what, prompt, pick) in enumerate(script):
        if what == "insert":
            tree.insert(number, prompt)
            model.insert_hashes(number, chunk_hashes(prompt, 1))
        else:
            pool = model.waiting if what in ("activate", "pending") else model.active
            if what == "remove":
                pool = list(model.vectors)
            if not pool:
                continue
            rid = pool[pick % len(pool)]
            for each in (tree, model):
                if what == "activate":
                    each.activate(rid)
                elif what == "pending":
                    each.activate(rid, ready=False)
                elif what == "ready":
                    each.mark_ready(rid, pick % 9 if pick % 9 < 8 else None)
                else:
                    getattr(each, what)(rid)
        # A prefix half computed inside a compressed run becomes ready only where a node ends; the model has no nodes.
        model.ready_prefixes = _at_nodes(tree, model)
        same(tree, model)


def _at_nodes(tree: ChunkedHashTree, model: ModelTree) -> set[tuple[int, ...]]:
    """The model's ready prefixes, with readiness read where the tree can express it: at the branching points."""
    kept = set(model.ready_prefixes)
    for a in model.active:
        vector = model.vectors[a]
        node = tree._requests[a].home
        while node.home is not None:
            for i in range(node.home.depth, node.depth):
                prefix = tuple(vector[: i + 1])
                (kept.add if node.ready else kept.discard)(prefix)
            node = node.home
    return kept


def test_marking_ready_reaches_exactly_the_nodes_within_the_depth():
    tree = ChunkedHashTree(chunk_size=1)
    for rid, last in {"a": [5, 6], "b": [], "c": [9], "d": [5, 6, 7]}.items():
        tree.insert(rid, [1, 2, 3, 4, *last] if last else [1, 2, 9])
    tree.activate("a", ready=False)
    assert [tree.held(r) for r in "bcd"] == [True, True, True]
    assert tree.best() is None and tree.best_sharing() is None
    assert tree.held_behind("a") == 3
    tree.mark_ready("a", 2)
    assert [tree.held(r) for r in "bcd"] == [False, True, True]
    assert tree.held_behind("a") == 2
    tree.mark_ready("a", 5)
    assert [tree.held(r) for r in "bcd"] == [False, False, True]
    tree.mark_ready("a")
    assert [tree.held(r) for r in "bcd"] == [False, False, False]
    assert tree.held_behind("a") == 0


@pytest.mark.parametrize("seed", range(8))
def test_long_random_runs_stay_sound_and_small(seed):
    rng = random.Random(seed)
    tree, model = ChunkedHashTree(chunk_size=1), ModelTree()
    for number in range(1500):
        roll = rng.random()
        if roll < 0.4 or not model.vectors:
            prompt = [rng.randrange(3) for _ in range(rng.randrange(12))]
            tree.insert(number, prompt)
            model.insert_hashes(number, chunk_hashes(prompt, 1))
        elif roll < 0.6 and model.waiting:
            best = tree.best()
            assert best == model.best()
            tree.activate(best.rid)
            model.activate(best.rid)
        elif roll < 0.75 and model.active:
            rid = rng.choice(model.active)
            tree.deactivate(rid)
            model.deactivate(rid)
        else:
            rid = rng.choice(list(model.vectors))
            tree.remove(rid)
            model.remove(rid)
        if len(model.vectors) > 30:
            rid = rng.choice(list(model.vectors))
            tree.remove(rid)
            model.remove(rid)
        if number % 25 == 0:
            same(tree, model)
    for rid in list(model.vectors):
        tree.remove(rid)
    tree._check()
    assert len(tree._root.children) == 0 and tree._num_covered == 1


def test_errors_leave_the_tree_as_it_was():
    tree = ChunkedHashTree(chunk_size=2)
    tree.insert("w", [1, 2, 3, 4])
    tree.insert("a", [1, 2, 5, 6])
    tree.activate("a")
    with pytest.raises(ValueError, match="already"):
        tree.insert("w", [9, 9])
    with pytest.raises(ValueError, match="already"):
        tree.insert_hashes("a", [9])
    with pytest.raises(OverflowError):
        tree.insert_hashes("n", [-1])
    for call in (tree.activate, tree.deactivate, tree.remove, tree.missing, tree.covered, tree.mark_ready, tree.held):
        with pytest.raises(KeyError):
            call("nobody")
    with pytest.raises(KeyError):
        tree.activate("a")
    with pytest.raises(KeyError):
        tree.deactivate("w")
    with pytest.raises(KeyError):
        tree.mark_ready("w")
    with pytest.raises(KeyError):
        tree.candidate("a")
    with pytest.raises(ValueError):
        ChunkedHashTree(chunk_size=0)
    tree._check()
    assert tree.best() == Candidate("w", missing=1, covered=1, delta=1, sharing=1)
    assert "n" not in tree and tree.num_waiting == 1 and tree.num_active == 1


def test_the_empty_batch_and_the_empty_tree():
    tree = ChunkedHashTree(chunk_size=1)
    assert tree.best() is None and tree.common_depth == 0
    tree.insert("long", [1, 2, 3])
    tree.insert("short", [1, 2])
    tree.insert("tie", [4, 5])
    assert tree.best() == Candidate("short", missing=2, covered=0, delta=0, sharing=2)
    tree.activate("short")
    assert tree.common_depth == 2
    assert tree.best() == Candidate("long", missing=1, covered=2, delta=0, sharing=1)
    tree.deactivate("short")
    assert tree.common_depth == 0 and tree.best().rid == "short"  # its old place before "tie"


def test_namespaces_share_nothing():
    tree = ChunkedHashTree(chunk_size=1)
    tree.insert("a", [1, 2, 3], namespace="lora-a")
    tree.insert("b", [1, 2, 3], namespace="lora-b")
    tree.activate("a")
    assert tree.covered("b") == 0 and tree.missing("b") == 3


@pytest.mark.parametrize("waiting", [300, 3000])
def test_one_admission_touches_a_handful_of_entries_however_many_wait(waiting):
    """The authors' tree pushes chunks x waiting entries here; ours must not grow with the queue."""
    tree = ChunkedHashTree(chunk_size=1)
    prefix = list(range(100))
    for rid in range(waiting):
        tree.insert(rid, [*prefix, 1000 + rid, rid])
    before = tree.num_heap_entries
    touched = calls_during(lambda: (tree.activate(0), tree.best(), tree.remove(0)))
    assert before <= 2 * waiting + 20  # one in its leaf, one in the prefix node
    assert tree.num_heap_entries <= before + 4
    assert touched < 120, touched


def test_operations_do_not_grow_with_the_queue_on_many_shapes():
    def shapes(n):
        prefix = list(range(64))
        yield "one group", [[*prefix, 10**6 + i] for i in range(n)]
        yield "nothing shared", [[10**6 + i] * 3 for i in range(n)]
        yield "same prompt", [prefix for _ in range(n)]
        yield "groups", [[10**7 + i % 8, *prefix, i] for i in range(n)]

    counts: dict[str, list[int]] = {}
    for n in (200, 2000):
        for name, queue in shapes(n):
            tree = ChunkedHashTree(chunk_size=1)
            for rid, prompt in enumerate(queue):
                tree.insert(rid, prompt)

            def admit_eight(tree=tree):
                for _ in range(8):
                    tree.activate(tree.best().rid)
                for rid in [r for r in range(40) if tree.is_active(r)][:4]:
                    tree.deactivate(rid)

            counts.setdefault(name, []).append(calls_during(admit_eight))
            tree._check()
    for name, (small, large) in counts.items():
        assert large <= 1.5 * small + 20, (name, small, large)


def test_churn_does_not_leak_heap_entries():
    tree = ChunkedHashTree(chunk_size=1)
    prefix = list(range(8))
    for rid in range(50):
        tree.insert(rid, [*prefix, rid])
    for turn in range(3000):
        best = tree.best()
        tree.activate(best.rid)
        if turn % 3 == 0:
            tree.deactivate(best.rid)
        else:
            tree.remove(best.rid)
            tree.insert(best.rid, [*prefix, turn])
    tree._check()
    assert tree.num_heap_entries < 50 * 6


@settings(max_examples=300, deadline=None)
@given(steps, st.integers(1, 6))
def test_a_run_is_what_one_admission_after_the_other_would_give(script, limit):
    tree, twin = ChunkedHashTree(chunk_size=1), ChunkedHashTree(chunk_size=1)
    for number, (what, prompt, pick) in enumerate(script):
        waiting = [rid for rid in tree._requests if not tree.is_active(rid)]
        for each in (tree, twin):
            if what in ("insert", "remove") or not waiting:
                each.insert(number, prompt)
            else:
                each.activate(waiting[pick % len(waiting)], ready=what != "pending")
        check_run(tree, twin, limit)


def check_run(tree: ChunkedHashTree, twin: ChunkedHashTree, limit: int) -> None:
    run = tree.best_run(limit)
    tree._check()
    if run is None:
        assert tree.best_sharing() is None
        return
    assert 1 <= len(run.rids) <= limit
    twin.activate_run(run.rids)
    twin._check()
    for number, (rid, missing, holds) in enumerate(zip(run.rids, run.missing, run.holds, strict=True)):
        candidate = tree.best_sharing()
        assert (rid, missing, run.delta, run.sharing - number) == (
            candidate.rid,
            candidate.missing,
            candidate.delta,
            candidate.sharing,
        )
        assert holds == tree.would_hold(rid)
        waiting = [each for each in tree._requests if not tree.is_active(each) and each != rid]
        before = sum(tree.held(each) for each in waiting)
        tree.activate(rid, ready=False)
        assert sum(tree.held(each) for each in waiting) == before + holds
    for rid in tree._requests:
        assert tree.is_active(rid) == twin.is_active(rid)
        assert (tree.covered(rid), tree.held(rid)) == (twin.covered(rid), twin.held(rid))
    assert (tree.best(), tree.best_sharing(), tree.common_depth) == (
        twin.best(),
        twin.best_sharing(),
        twin.common_depth,
    )
    for each in (tree, twin):
        for rid in reversed(run.rids):
            each.deactivate(rid)
        each._check()


def test_a_run_covers_a_whole_group():
    tree = ChunkedHashTree(chunk_size=1)
    for i in range(20):
        tree.insert(i, [1, 2, 3, 10 + i])
    tree.insert("other", [9])
    tree.activate(0)
    assert tree.best_run(99).rids == [1], "the second member moves the common depth"
    tree.activate(1)
    assert tree.best_run(99).rids == list(range(2, 20))
    assert tree.best_run(3).rids == [2, 3, 4]


@pytest.mark.parametrize("shape", ["nothing shared", "one group", "chain", "same prompt"])
def test_the_worst_shapes_stay_sound_and_small(shape):
    n = 1500
    tree = ChunkedHashTree(chunk_size=1)
    prompts = {
        "nothing shared": lambda i: [10**6 + i] * 4,
        "one group": lambda i: [*range(32), 10**6 + i],
        "chain": lambda i: range(i + 1),
        "same prompt": lambda i: range(8),
    }[shape]
    for i in range(n):
        tree.insert(i, list(prompts(i)))
    assert tree.num_heap_entries <= 4 * n
    for i in range(8):
        assert tree.best().rid == i
        tree.activate(i)
    tree._check()
    for i in range(8):
        tree.remove(i)
    for i in range(n - 1, 7, -1):  # a thousand aborts in a row, the latest first
        tree.remove(i)
    tree._check()
    assert tree.num_heap_entries <= 64 and not tree._root.children


def test_a_run_that_meets_a_stranger_leaves_those_before_it_active_and_the_tree_sound():
    tree = ChunkedHashTree()
    for rid in range(6):
        tree.insert_hashes(rid, [1, 2, 100 + rid])
    tree.insert_hashes("other", [9])  # or all would share all
    tree.activate(0)
    tree.activate(1)
    assert tree.best_run(3).rids == [2, 3, 4]
    with pytest.raises(KeyError):
        tree.activate_run([2, 3, "nobody", 4])
    tree._check()
    assert [tree.is_active(rid) for rid in range(6)] == [True] * 4 + [False] * 2
    assert tree.num_active == 4 and tree.num_waiting == 3
