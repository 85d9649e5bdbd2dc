"""Prefix-homogeneous batch scheduling for SGLang.

Importing this package needs neither sglang nor torch; only ``feather_sglang.engines`` does.
"""

from pathlib import Path

try:
    from feather_sglang.cht import Candidate, ChunkedHashTree, chunk_hashes
except ImportError as error:
    folder = Path(__file__).parent
    if not any(folder.rglob("*.so")):
        raise
    raise ImportError(
        f"feather_sglang: the compiled modules are of another version of the source ({error}); "
        f"delete them: find '{folder}' -name '*.so' -delete"
    ) from error

__version__ = "0.1.0"

__all__ = ["Candidate", "ChunkedHashTree", "__version__", "chunk_hashes"]
