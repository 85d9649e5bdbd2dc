"""Bad use of the command line, in one line instead of argparse's usage of a whole command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from typing import Any, NoReturn

from feather_sglang.engines.sglang.arguments import unknown_flag


class Parser(argparse.ArgumentParser):
    """Its subcommands are parsers of this kind, too."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Nothing unknown is left: each subcommand complains itself, since it knows which flags there are."""
        words = sys.argv[1:] if args is None else list(args)
        found, unknown = super().parse_known_args(words, namespace)
        if unknown:
            self.error(_line(unknown, self._option_string_actions))
        return found, unknown

    def error(self, message: str) -> NoReturn:
        """One line on stderr, exit code 2."""
        self.exit(2, f"{self.prog}: error: {message}\n")


def _line(unknown: list[str], valid: Iterable[str]) -> str:
    flag = next((word for word in unknown if word.startswith("-")), None)
    return f"unknown argument '{unknown[0]}'" if flag is None else unknown_flag(flag, valid)
