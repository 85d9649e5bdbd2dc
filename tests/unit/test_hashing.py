from __future__ import annotations

from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from feather_sglang.cht import chunk_hashes

ids = st.lists(st.integers(0, 2**31 - 1), max_size=60)


@given(ids, st.integers(1, 9))
def test_one_hash_a_full_chunk_and_the_same_from_every_container(tokens, size):
    hashes = chunk_hashes(tokens, size)
    assert len(hashes) == len(tokens) // size
    assert all(0 <= h < 2**64 for h in hashes)
    for other in (array("q", tokens), array("i", tokens), np.array(tokens, np.int32), np.array(tokens, np.int64)):
        assert list(chunk_hashes(other, size)) == list(hashes)
    assert list(chunk_hashes(np.repeat(np.array(tokens, np.int64), 2)[::2], size)) == list(hashes)


@given(ids, ids, st.integers(1, 5))
def test_equal_hashes_mean_equal_prefixes(a, b, size):
    for i, (x, y) in enumerate(zip(chunk_hashes(a, size), chunk_hashes(b, size), strict=False)):
        n = (i + 1) * size
        assert (x == y) == (a[:n] == b[:n])


@given(ids.filter(lambda t: len(t) >= 4), st.text(max_size=8), st.text(max_size=8))
def test_namespaces_are_kept_apart(tokens, one, two):
    a, b = chunk_hashes(tokens, 2, namespace=one), chunk_hashes(tokens, 2, namespace=two)
    assert (list(a) == list(b)) == (one == two)
    if one != two:
        assert not set(a) & set(b)


def test_a_namespace_cannot_be_mistaken_for_tokens():
    first = array("q", [65])
    assert chunk_hashes([65, 66], 1)[-1] != chunk_hashes([66], 1, namespace=first.tobytes().decode())[-1]


def test_the_hashes_are_stable():
    """Ranks and releases must agree: a changed hash would be noticed here."""
    assert list(chunk_hashes(range(128), 64)) == list(chunk_hashes(list(range(128)), 64))
    assert chunk_hashes(list(range(64)), 64)[0] == chunk_hashes(list(range(100)), 64)[0]


def test_bad_input():
    with pytest.raises(ValueError):
        chunk_hashes([1], 0)
    with pytest.raises(ValueError):
        chunk_hashes(np.zeros((2, 2), np.int64))
    with pytest.raises(TypeError):
        chunk_hashes(np.zeros(4, np.float32))
    with pytest.raises(TypeError):
        chunk_hashes([1.5])  # type: ignore[list-item]
    with pytest.raises(OverflowError):
        chunk_hashes([2**63])
