"""Builds what is published: a wheel and an sdist whose links lead to where the project is hosted.

    python -m launch.packages.release --url https://HOST/OWNER/hvd_adaptive [--into dist]

Works on a copy of the files that git tracks: README's relative links and pictures, which nobody finds
outside of the repository, become absolute, and the address becomes a project URL. Needs setuptools;
`twine check --strict` judges the result where twine is installed. Uploads nothing.
"""

from __future__ import annotations

import argparse
import configparser
import importlib.util
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# One process for each: setuptools keeps what the last command was.
BACKEND = "import sys, setuptools.build_meta as b; getattr(b, sys.argv[1])(sys.argv[2])"


def absolute(text: str, url: str, ref: str) -> str:
    """Markdown whose relative links lead to files of the repository.

    Args:
        text: with links relative to the repository's root.
        url: of the repository, as GitHub, GitLab and Gitea lay it out.
        ref: branch or tag.

    Example:
        >>> absolute("![plot](a/b.png), [page](docs/c.md#d), [top](#e)", "https://h/o", "v1")
        '![plot](https://h/o/raw/v1/a/b.png), [page](https://h/o/blob/v1/docs/c.md#d), [top](#e)'
    """

    def lead(found: re.Match[str]) -> str:
        kind = "raw" if found[1] else "blob"
        return f"{found[1]}[{found[2]}]({url}/{kind}/{ref}/{found[3]})"

    return re.sub(r"(!?)\[([^\]]*)\]\((?![a-z]+:|#)([^)\s]+)\)", lead, text)


def copy_tracked(into: Path) -> None:
    """The files that git tracks, as they are now."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached"], cwd=ROOT, capture_output=True, check=True
    ).stdout
    for name in filter(None, listed.decode().split("\0")):
        if (ROOT / name).is_file():
            (into / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, into / name)


def address(copy: Path, url: str, ref: str) -> None:
    """Write where the project is into README and metadata."""
    readme = copy / "README.md"
    readme.write_text(absolute(readme.read_text(encoding="utf-8"), url, ref), encoding="utf-8")
    setup = configparser.ConfigParser()
    setup.read(copy / "setup.cfg", encoding="utf-8")
    pages = {
        "Source": url,
        "Documentation": f"{url}/blob/{ref}/docs/usage.md",
        "Changes": f"{url}/blob/{ref}/CHANGELOG.md",
        "Issues": f"{url}/issues",
    }
    setup["metadata"]["url"] = url
    setup["metadata"]["project_urls"] = "".join(f"\n{name} = {page}" for name, page in pages.items())
    with (copy / "setup.cfg").open("w", encoding="utf-8") as file:
        setup.write(file)


def main(arguments: Sequence[str] | None = None) -> int:
    """Build and check; the exit status is 0 where both went well."""
    parser = argparse.ArgumentParser(prog="release", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--url", required=True, help="the repository's page: https://HOST/OWNER/NAME")
    parser.add_argument("--ref", default="main", help="branch or tag that links lead to (%(default)s)")
    parser.add_argument("--into", type=Path, default=ROOT / "dist", metavar="FOLDER")
    options = parser.parse_args(arguments)
    url = options.url.rstrip("/")
    if not re.fullmatch(r"https://[^\s/]+/\S+", url):
        parser.error(f"--url must be like https://HOST/OWNER/NAME, not {options.url!r}")
    into = options.into.resolve()
    into.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        copy_tracked(Path(folder))
        address(Path(folder), url, options.ref)
        for command in ("build_sdist", "build_wheel"):
            built = subprocess.run(
                [sys.executable, "-c", BACKEND, command, into], cwd=folder, check=False
            )
            if built.returncode:
                return built.returncode
    files = sorted(into.glob("hvd_adaptive-*"))
    if importlib.util.find_spec("twine") is None:
        print("not checked: pip install twine, and run twine check --strict", file=sys.stderr)
        return 0
    check = [sys.executable, "-m", "twine", "check", "--strict", *map(str, files)]
    return subprocess.run(check, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
