"""What the pages of README, docs and CONTRIBUTING hold: command lines, specs and links."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "launch").rglob("README.md")),
    *sorted((ROOT / "benchmarks").glob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]


@dataclass(frozen=True)
class Command:
    """A command line of a page.

    Args:
        page: the page's name.
        words: without the environment, ``sudo`` and comments.
    """

    page: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.page}: {shlex.join(self.words)}"


def name_of(page: Path) -> str:
    """A page's path in the repository."""
    return page.relative_to(ROOT).as_posix()


INLINE = re.compile(
    r"`((?:[A-Z_]+=\S+ )*(?:sudo -E )?(?:launch/|benchmarks/|python |horovodrun |hva )[^`]* [^`]+)`"
)


def commands() -> Iterator[Command]:
    """Every command line: in blocks that are marked bash or console, and in the text."""
    for page in PAGES:
        text = page.read_text()
        blocks = re.findall(r"^```(?:bash|console)\n(.*?)^```", text, re.M | re.S)
        prose = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
        lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
        for line in [*lines, *(" ".join(found.split()) for found in INLINE.findall(prose))]:
            words = shlex.split(line.removeprefix("$ "), comments=True)
            while words and (words[0] in ("sudo", "-E") or re.match(r"[A-Z_a-z]+=", words[0])):
                words = words[1:]
            if words:
                yield Command(name_of(page), tuple(words))


def specs(option: str) -> Iterator[str]:
    """Every value of an argument, written as ``option="..."`` or ``--option ...``."""
    found = re.compile(rf'\b{option}="([^"]+)"|--{option}[ =]([^\s`]+)')
    for page in PAGES:
        for match in found.finditer(page.read_text()):
            yield match[1] or match[2]


def code_words() -> Iterator[str]:
    """Everything of the form `name:option=value` in backticks."""
    for page in PAGES:
        yield from re.findall(r"`\"?([\w+-]+:\w+=[^`\"\s]+)\"?`", page.read_text())


def links() -> Iterator[tuple[Path, str]]:
    """Every relative link and picture: page and target."""
    for page in PAGES:
        text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
        for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", text)):
            if "://" not in target:
                yield page, target


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    return {_slug(heading) for heading in re.findall(r"^#+ (.+)$", text, re.M)}


def _slug(heading: str) -> str:
    return re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", heading.lower()).strip())
