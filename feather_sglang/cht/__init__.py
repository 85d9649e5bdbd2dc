"""Layer 1, the prefix index: chunk hashes and the chunked hash tree (paper, Part A)."""

from feather_sglang.cht.hashing import DEFAULT_CHUNK_SIZE, TokenIds, chunk_hashes
from feather_sglang.cht.tree import Candidate, ChunkedHashTree, Follower, Group, Run

__all__ = ["DEFAULT_CHUNK_SIZE", "Candidate", "ChunkedHashTree", "Follower", "Group", "Run", "TokenIds", "chunk_hashes"]
