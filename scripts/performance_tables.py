"""Put measured results into docs/performance.md: python scripts/performance_tables.py NAME=FILE ...

Each FILE is what `feather-sglang bench overhead --json FILE` wrote; NAME is the marker in the page.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from feather_sglang.bench.overhead import Row, table


def main() -> int:
    """Replace the table between each pair of markers."""
    page = Path(__file__).resolve().parent.parent / "docs" / "performance.md"
    text = page.read_text()
    for argument in sys.argv[1:]:
        name, _, path = argument.partition("=")
        report = json.loads(Path(path).read_text())
        block = table([Row(**row) for row in report["rows"]])
        ratio = report["ratio_dfs_over_feather"]
        if ratio is not None:
            block += f"\ndfs-weight / feather: {ratio:.0f} for the whole pass"
        text, found = re.subn(
            rf"<!-- {name} -->.*?<!-- /{name} -->",
            lambda _, name=name, block=block: f"<!-- {name} -->\n```\n{block}\n```\n<!-- /{name} -->",
            text,
            flags=re.S,
        )
        if not found:
            print(f"performance_tables: error: no markers for '{name}' in {page.name}", file=sys.stderr)
            return 1
    page.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
