"""Put the results that `bash scripts/demo.sh --json FILE` wrote into the README: python scripts/readme_table.py FILE"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from feather_sglang.bench.serving import Result, table


def main() -> int:
    """Replace the table between the README's markers."""
    if len(sys.argv) != 2:
        print("usage: python scripts/readme_table.py FILE (from: bash scripts/demo.sh --json FILE)", file=sys.stderr)
        return 2
    rows = [Result(**row) for row in json.loads(Path(sys.argv[1]).read_text())["rows"]]
    readme = Path(__file__).resolve().parent.parent / "README.md"
    block = f"<!-- demo -->\n```\n{table(rows)}\n```\n<!-- /demo -->"
    text, found = re.subn(r"<!-- demo -->.*<!-- /demo -->", lambda _: block, readme.read_text(), flags=re.S)
    if not found:
        print("readme_table: error: README.md has no <!-- demo --> markers", file=sys.stderr)
        return 1
    readme.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
