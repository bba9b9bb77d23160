"""RESULTS.md, and the tables of figures in README.md and docs/, from the JSON files under results/.

    python -m benchmarks.report.results_page            # rewrites what is stale

Pages hold *fragments*: what stands between ``<!-- NAME: begin ... -->`` and ``<!-- NAME: end -->``, on
lines of its own or within one, is made here, and a test compares it with the stored figures.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from benchmarks.report.report import RESULTS
from benchmarks.report.results_fragments import FRAGMENTS
from benchmarks.report.results_papers import papers
from benchmarks.report.results_sections import PARTS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "benchmarks" / "RESULTS.md"
TITLE = """\
# Results

Made by `python -m benchmarks.report.results_page` from the JSON files in `benchmarks/results`: do not
edit. How each figure is measured is in the script that its section names."""
ANSWERS = (
    "auto, dense and fixed choices",
    "Steps: lstm",
    "Time to the target of dense training",
    "Dense, one level for all layers, and planners",
    "One epoch with each compressor",
    "Quantizers of 3 bits",
    "Steps",
    "Positions of sparse payloads",
    "Knapsacks",
    "Memory",
)
"""The headings whose questions and answers open the page."""
FRAGMENT = re.compile(r"(<!-- (\w+): begin [^>]*-->(\n?))(.*?)(<!-- \2: end -->)", re.DOTALL)


def render() -> str:
    """The whole page: contents, and a section for each benchmark that has been run."""
    parts = [part() for name, part in PARTS.items() if (RESULTS / f"{name}.json").exists()]
    body = "\n\n".join([papers(slug), *parts])
    body = f"## Answers\n\n{answers(body)}\n\n{body}"
    lines = []
    for level, heading in re.findall(r"^(##|###) (.+)$", body, re.MULTILINE):
        lines.append(f"{'' if level == '##' else '    '}- [{heading}](#{slug(heading)})")
    return "\n\n".join([TITLE, "\n".join(lines), body]) + "\n"


def answers(body: str) -> str:
    """Questions and answers of the most important tables, each with a link to its table."""
    found = dict(re.findall(r"^### (.+)\n\n(\*[^\n]+\?\* [^\n]+)$", body, re.MULTILINE))
    return "\n".join(
        f"{number}. {found[heading]} [Figures](#{slug(heading)})"
        for number, heading in enumerate((each for each in ANSWERS if each in found), 1)
    )


def slug(heading: str) -> str:
    """The anchor of a heading, on the site and where the repository is browsed."""
    words = re.sub(r"[^\w\s-]", "", heading.lower()).strip()
    return re.sub(r"\s", "-", words)


def filled(text: str) -> str:
    """A page with every fragment as the figures are now."""
    return FRAGMENT.sub(lambda found: found[1] + FRAGMENTS[found[2]]() + found[3] + found[5], text)


def pages() -> list[Path]:
    """The pages that may hold fragments."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def main() -> int:
    """Command line."""
    new = {PAGE: render(), **{path: filled(path.read_text()) for path in pages()}}
    for path, text in new.items():
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
            print(f"written to {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
