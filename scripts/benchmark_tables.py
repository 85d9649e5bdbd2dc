"""Put measured comparisons into the README and docs/benchmarks.md: python scripts/benchmark_tables.py FILE.json ...

Each FILE is what `bash scripts/demo.sh --json FILE` or `feather-sglang bench serving ... --json FILE` wrote.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from markers import ROOT, fill

from feather_sglang.bench.compare import Row, table


def main() -> int:
    """Replace the tables between the pages' markers: the demo's, and one for each workload."""
    if len(sys.argv) < 2:
        print(__doc__, file=sys.stderr)
        return 2
    for path in sys.argv[1:]:
        report = json.loads(Path(path).read_text())
        rows = [Row.from_dict(row) for row in report["rows"]]
        if report["command"] == "demo":
            page, tables = ROOT / "README.md", {"demo": table(rows)}
        else:
            page, tables = ROOT / "docs" / "benchmarks.md", {rows[0].workload: table(rows)}
        code = fill(page, tables)
        if code:
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
