"""Put results of "feather-sglang bench locality --json FILE" into docs/locality.md."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from feather_sglang.bench import batches, locality


def main() -> int:
    """Replace the tables between the page's markers, those that the file has."""
    if len(sys.argv) != 2:
        print("usage: python scripts/locality_tables.py FILE (from: bench locality --json FILE)", file=sys.stderr)
        return 2
    report = json.loads(Path(sys.argv[1]).read_text())
    batch_rows = [batches.BatchRow(**row) for row in report["batches"]]
    rows = [locality.Row(**row) for row in report["rows"]]
    page = Path(__file__).resolve().parent.parent / "docs" / "locality.md"
    text = page.read_text()
    tables = {
        "batches": batches.table(batch_rows) if batch_rows else None,
        "workloads": locality.table(rows) if rows else None,
    }
    for name, block in tables.items():
        if block is not None:
            filled = f"<!-- {name} -->\n```\n{block}\n```\n<!-- /{name} -->"
            text = re.sub(rf"<!-- {name} -->.*?<!-- /{name} -->", lambda _, filled=filled: filled, text, flags=re.S)
    page.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
