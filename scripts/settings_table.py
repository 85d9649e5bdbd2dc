"""Put every setting into the table of docs/settings.md: python scripts/settings_table.py"""

from __future__ import annotations

import dataclasses
import sys

from markers import ROOT, fill

from feather_sglang.engines.sglang.arguments import flag_of, variable_of
from feather_sglang.scheduling import Settings
from feather_sglang.scheduling.settings import shown, valid_values

_COLUMNS = ("key", "flag", "environment variable", "default", "valid values", "meaning")


def table() -> str:
    """A row for each setting."""
    rows = [_COLUMNS, ("---",) * len(_COLUMNS)]
    rows += [
        (
            f"`{spec.name}`",
            f"`{flag_of(spec.name)}`",
            f"`{variable_of(spec.name)}`",
            f"`{shown(spec.name, spec.default)}`",
            valid_values(spec),
            spec.metadata["help"],
        )
        for spec in dataclasses.fields(Settings)
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main() -> int:
    """Replace the table between the page's markers."""
    return fill(ROOT / "docs" / "settings.md", {"settings": table()}, fence="")


if __name__ == "__main__":
    sys.exit(main())
