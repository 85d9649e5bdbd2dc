"""Put results of "feather-sglang bench locality --json FILE" into docs/locality.md."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from markers import ROOT, fill

from feather_sglang.bench import batches, compare


def main() -> int:
    """Replace the tables between the page's markers, those that the file has."""
    if len(sys.argv) != 2:
        print("usage: python scripts/locality_tables.py FILE (from: bench locality --json FILE)", file=sys.stderr)
        return 2
    report = json.loads(Path(sys.argv[1]).read_text())
    batch_rows = [batches.BatchRow(**row) for row in report["batches"]]
    rows = [compare.Row.from_dict(row) for row in report["rows"]]
    tables = {"batches": batches.table(batch_rows)} if batch_rows else {}
    for name in {row.workload for row in rows}:
        tables[name] = compare.table([row for row in rows if row.workload == name])
    return fill(ROOT / "docs" / "locality.md", tables)


if __name__ == "__main__":
    sys.exit(main())
