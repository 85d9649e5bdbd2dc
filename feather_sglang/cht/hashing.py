"""Cumulative chunk hashes: hash *i* stands for all tokens up to the end of chunk *i* (paper, Part A)."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import mmh3
import numpy as np

DEFAULT_CHUNK_SIZE = 64

#: Token ids of one request: a list, an ``array('q')`` or a one-dimensional int32/int64 NumPy array.
TokenIds = Sequence[int] | np.ndarray[Any, Any]

_TOKEN_BYTES = 8


def chunk_hashes(token_ids: TokenIds, chunk_size: int = DEFAULT_CHUNK_SIZE, *, namespace: str = "") -> Sequence[int]:
    """One cumulative unsigned 64-bit hash per full chunk of ``chunk_size`` tokens.

    Equal hashes at the same place mean equal prefixes in the same namespace, up to a collision of a 64-bit hash;
    hashes of different namespaces differ. A last, partial chunk has no hash.

    Complexity: O(T) for T tokens, in C per chunk. An ``array('q')`` or an int64 array is read in place; a list or an
    int32 array is converted first.

    Raises:
        ValueError: ``chunk_size`` is not positive, or an array is not one-dimensional.
        TypeError: the ids are not integers.
        OverflowError: an id does not fit into 64 bits.
    """
    if chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, got {chunk_size}")
    data = memoryview(_as_int64(token_ids)).cast("B")
    step = chunk_size * _TOKEN_BYTES
    hasher = mmh3.mmh3_x64_128()
    # The namespace goes first and at a fixed width, so that no namespace can be mistaken for tokens.
    hasher.update(mmh3.mmh3_x64_128_digest(namespace.encode()))
    update, digest = hasher.update, hasher.utupledigest
    hashes: list[int] = []
    for start in range(0, len(data) - step + 1, step):
        update(data[start : start + step])
        hashes.append(digest()[0])
    return hashes


def _as_int64(token_ids: TokenIds) -> Any:  # a buffer of int64; "Buffer" has no public name in Python 3.11
    if isinstance(token_ids, array) and token_ids.typecode == "q":
        return token_ids
    if isinstance(token_ids, np.ndarray):
        if token_ids.ndim != 1:
            raise ValueError(f"token ids must be one-dimensional, got shape {token_ids.shape}")
        if token_ids.dtype.kind not in "iu":
            raise TypeError(f"token ids must be integers, got an array of {token_ids.dtype}")
        return np.ascontiguousarray(token_ids, dtype=np.int64)
    return array("q", token_ids)
