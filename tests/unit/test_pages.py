"""What the pages name exists: files, headings, scripts, and commands with their flags."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from feather_sglang.cli import make_parser

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "patches" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def anchors(page: Path) -> set[str]:
    """GitHub's names of the headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def commands(page: Path) -> list[str]:
    """All ``feather-sglang ...`` in code, continued lines joined, without comments, pipes and redirections."""
    text = page.read_text().replace("\\\n", " ")
    fenced = re.findall(r"^```.*?\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    inline = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE))
    lines = [*inline, *(line for block in fenced for line in block.splitlines())]
    found = [re.sub(r"^(\w+=\S+ )+", "", line.strip()) for line in lines]
    return [re.split(r" [#|>]", line)[0] for line in found if line.startswith("feather-sglang ")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        file = page.parent / name if name else page
        assert file.exists(), f"{page.name}: {target}"
        assert not anchor or anchor in anchors(file), f"{page.name}: {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_scripts_are_there(page):
    for name in re.findall(r"(?:bash|python) (scripts/[\w./]+)", page.read_text()):
        assert (ROOT / name).exists(), f"{page.name}: {name}"


def test_commands_are_what_the_command_line_takes(capsys):
    parser = make_parser()
    seen = 0
    for page in PAGES:
        for command in commands(page):
            words = shlex.split(command)[1:]
            if "..." in command or not words or words[0].isupper():
                continue  # a part of a command, shown as such
            seen += 1
            if not any(word.startswith("-") for word in words):
                words.append("--help")  # it may be named without what it needs
            try:
                parser.parse_args(words)
            except SystemExit as stop:
                if stop.code == 0:
                    continue
                pytest.fail(f"{page.name}: {command}: {capsys.readouterr().err}")
    assert seen > 20
