"""What the documents point to is there: files, headings, and commands with the options that they show."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from wavekit.commands.main import wavekit

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*/README.md"), *ROOT.glob("benchmarks/*.md")]
)
_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", _FENCE.sub("", page.read_text(encoding="utf-8"))):
        if link.startswith(("http:", "https:")):
            continue
        name, _, heading = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), link
        assert target.is_relative_to(ROOT), link
        assert not heading or heading in headings(target), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_have_the_options_that_are_shown(page: Path) -> None:
    for words in commands(page):
        command: click.Command = wavekit
        context = click.Context(wavekit)
        while isinstance(command, click.Group) and words and not words[0].startswith("-"):
            found = command.get_command(context, words.pop(0))
            assert found is not None
            command = found
        known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
        shown = {word.partition("=")[0] for word in words if re.fullmatch(r"-[a-z]|--[a-z][a-z-]*(=.*)?", word)}
        assert shown <= known | {"--help", "-h"}, (command.name, shown - known)


def headings(page: Path) -> set[str]:
    """The anchors that GitHub gives to a page's headings."""
    lines = re.findall(r"^#+ (.*)$", _FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-") for line in lines}


def commands(page: Path) -> Iterator[list[str]]:
    """The words after ``wavekit`` in every command line of a page's blocks."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    for block in (text for language, text in blocks if language in ("", "bash", "sh")):
        for line in block.replace("\\\n", " ").splitlines():
            for part in line.split(" && "):
                found = re.match(r"(?:[A-Z_]+=\S+ )*wavekit (?=[a-z])([^#\[]*)", part)
                if found:
                    yield shlex.split(found[1])
