"""Tables that commands printed, between the markers of a page of the docs."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def fill(page: Path, tables: dict[str, str], fence: str = "```\n") -> int:
    """Replace what stands between ``<!-- NAME -->`` and ``<!-- /NAME -->``; exit code 1 and no change without them.

    An empty ``fence`` is for tables in Markdown.
    """
    text = page.read_text()
    for name, table in tables.items():
        block = f"<!-- {name} -->\n{fence}{table}\n{fence}<!-- /{name} -->"
        text, found = re.subn(rf"<!-- {name} -->.*?<!-- /{name} -->", lambda _, block=block: block, text, flags=re.S)
        if not found:
            print(f"error: {page.name} has no markers for '{name}'", file=sys.stderr)
            return 1
    page.write_text(text)
    return 0
