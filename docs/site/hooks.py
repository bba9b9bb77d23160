"""Pages of the documentation that live elsewhere in the repository.

README.md is the front page; those of benchmarks/ with their pictures, CONTRIBUTING.md and CHANGELOG.md
are pages, too.
Links everywhere are those of the repository, so that they work where it is browsed: here they become
links between pages.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "benchmarks/README.md": "benchmarks.md",
    "benchmarks/RESULTS.md": "results.md",
    "launch/packages/README.md": "packages.md",
}
"""A file of the repository, and the page that it becomes."""
LINK = re.compile(r"(\]\()([^)#:\s]+)((?:#[^)\s]*)?\))")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages, and the pictures that they show."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    for picture in sorted((ROOT / "benchmarks" / "results").glob("*.png")):
        files.append(File.generated(config, f"results/{picture.name}", content=picture.read_bytes()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Make links of the repository links of the documentation."""
    origins = {name: source for source, name in PAGES.items()}
    here = page.file.src_uri
    folder = posixpath.dirname(origins.get(here, f"docs/{here}"))

    def rewrite(match: re.Match[str]) -> str:
        before, target, after = match.groups()
        place = posixpath.normpath(posixpath.join(folder, target))
        return before + posixpath.relpath(_page_of(place), posixpath.dirname(here) or ".") + after

    return LINK.sub(rewrite, markdown)


def _page_of(place: str) -> str:
    """Where the documentation has a file of the repository; what it has not stays, and fails."""
    if place in PAGES:
        return PAGES[place]
    return place.removeprefix("docs/").removeprefix("benchmarks/")
