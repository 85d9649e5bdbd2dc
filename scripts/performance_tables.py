"""Put measured results into docs/performance.md: python scripts/performance_tables.py NAME=FILE ...

Each FILE is what `feather-sglang bench overhead --json FILE` wrote; NAME is the marker in the page.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from markers import ROOT, fill

from feather_sglang.bench.overhead import Row, table


def main() -> int:
    """Replace the table between each pair of markers."""
    tables = {}
    for argument in sys.argv[1:]:
        name, _, path = argument.partition("=")
        report = json.loads(Path(path).read_text())
        tables[name] = table([Row(**row) for row in report["rows"]])
        ratio = report["ratio_dfs_over_feather"]
        if ratio is not None:
            tables[name] += f"\ndfs-weight / feather: {ratio:.0f} for the whole pass"
    return fill(ROOT / "docs" / "performance.md", tables)


if __name__ == "__main__":
    sys.exit(main())
