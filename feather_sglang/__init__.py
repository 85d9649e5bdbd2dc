"""Prefix-homogeneous batch scheduling for SGLang.

Importing this package needs neither sglang nor torch; only ``feather_sglang.engines`` does.
"""

from feather_sglang.cht import Candidate, ChunkedHashTree, chunk_hashes

__version__ = "0.1.0"

__all__ = ["Candidate", "ChunkedHashTree", "__version__", "chunk_hashes"]
