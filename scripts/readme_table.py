"""Put the results that `bash scripts/demo.sh --json FILE` wrote into the README: python scripts/readme_table.py FILE"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from markers import ROOT, fill

from feather_sglang.bench.serving import Result, table


def main() -> int:
    """Replace the table between the README's markers."""
    if len(sys.argv) != 2:
        print("usage: python scripts/readme_table.py FILE (from: bash scripts/demo.sh --json FILE)", file=sys.stderr)
        return 2
    rows = [Result(**row) for row in json.loads(Path(sys.argv[1]).read_text())["rows"]]
    return fill(ROOT / "README.md", {"demo": table(rows)})


if __name__ == "__main__":
    sys.exit(main())
