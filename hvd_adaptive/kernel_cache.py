"""Where compiled kernels are kept between runs: in a folder for each version of their sources.

Numba notices changes of the file of a kernel, not of what the kernel inlines from another one. So the
folder has a hash of all sources that are compiled in, and code of other sources is never loaded. It
lies where Numba would keep its own: in ``NUMBA_CACHE_DIR``, in the ``__pycache__`` beside the kernels,
or in the user's cache folder, whichever is the first that can be written. Where none can, it lies in a
folder for this user: a package that an administrator installed could otherwise not be imported by a
user without a home, as Numba refuses to compile then.
"""

# mypy: disable-error-code="attr-defined"

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import stat
import sys
import tempfile
import time
import uuid
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numba
from numba import config, njit

from hvd_adaptive.compile_once import compile_once, leave_terminal_alone

PACKAGE = Path(__file__).resolve().parent
KEPT_VERSIONS = 3
"""Versions whose kernels are kept, this one included; more of them if they were used lately."""
LATELY = 3600.0
"""Seconds since its last start for which a version may still be compiling."""
_PREFIX = "hvd_adaptive-kernels-"
_REMOVED = _PREFIX + "removed-"
_COMPLETE = f"complete-{numba.__version__}-{sys.implementation.cache_tag}"


def jit(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """``numba.njit`` with a cache on disk, or without one where there is no place for it.

    Args:
        options: of ``numba.njit``.

    Example: ``@jit(nogil=True)`` above a function.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        folder = _folder()
        if folder is None:
            return leave_terminal_alone(njit(**options)(function))
        with _kept_in(folder):
            name = f"{function.__module__}.{function.__qualname__}"
            return compile_once(njit(cache=True, **options)(function), folder, name)

    return decorate


@contextmanager
def _kept_in(folder: Path) -> Iterator[None]:
    """Have Numba choose ``folder`` for what is decorated meanwhile, not for other code's functions."""
    before = config.CACHE_DIR
    config.CACHE_DIR = str(folder)
    try:
        yield
    finally:
        config.CACHE_DIR = before


def hash_of_sources(package: Path = PACKAGE) -> str:
    """A hash of everything that is compiled into kernels: their sources, and the wire's constants.

    Args:
        package: the folder of ``hvd_adaptive``.

    Example:
        >>> len(hash_of_sources())
        16
    """
    digest = hashlib.sha256()
    for path in sorted(_sources_in(str(package))):
        with open(path, "rb", buffering=0) as file:
            data = file.read()
        digest.update(f"{path[len(str(package)) :]} {len(data)}\n".encode())
        digest.update(data)
    return digest.hexdigest()[:16]


def _sources_in(package: str) -> Iterator[str]:
    """The files of :func:`hash_of_sources`; not by a glob, which looks through the cache, too."""
    for room in ("kernels", "wire"):
        for folder, folders, files in os.walk(os.path.join(package, room)):
            folders[:] = [name for name in folders if name != "__pycache__"]
            yield from (os.path.join(folder, name) for name in files if name.endswith(".py"))


def current_folder() -> Path | None:
    """Where this version's kernels are kept, the same for all ranks and runs; None where nowhere."""
    return _folder()


def mark_complete() -> None:
    """Note that every kernel is in the cache, for :func:`is_complete`."""
    place = _folder()
    if place is not None:
        (place / _COMPLETE).touch()


def is_complete() -> bool:
    """Whether every kernel of this version has been compiled into the cache, by ``hva precompile``."""
    place = _folder()
    return place is not None and (place / _COMPLETE).exists()


@functools.cache
def _folder() -> Path | None:
    """The folder of this version, the same for all ranks and runs; None where there is no place."""
    name = _PREFIX + hash_of_sources()
    for parent in _places():
        folder = parent / name
        try:
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
        except OSError:
            continue
        with suppress(OSError):  # of a folder that another user made
            os.utime(folder)
        remove_old_versions(parent, name)
        return folder
    private = _folder_for_lack_of_another()
    if private is None:
        return None
    folder = private / name
    folder.mkdir(0o700, exist_ok=True)
    os.utime(folder)
    remove_old_versions(private, name)
    return folder


def _places() -> Iterable[Path]:
    """Where Numba would keep kernels, in its order."""
    if config.CACHE_DIR:
        yield Path(config.CACHE_DIR)
    yield PACKAGE / "kernels" / "__pycache__"
    with suppress(RuntimeError):  # no home
        yield Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "numba"


def remove_old_versions(parent: Path, name: str) -> None:
    """Remove the kernels of all but the versions used last, unless a run may still be compiling them.

    Ranks may do this at the same time: a folder is renamed before it is emptied, which one of them can.
    """
    found: list[tuple[float, Path]] = []
    for path in parent.glob(_PREFIX + "*"):
        with suppress(OSError):  # removed by another rank
            if path.name != name and path.is_dir():
                found.append((path.stat().st_mtime, path))
    found.sort(reverse=True)
    # what is emptied, perhaps by a rank that was killed meanwhile, is no version
    emptied = [row for row in found if row[1].name.startswith(_REMOVED)]
    versions = [row for row in found if row not in emptied]
    for used, path in [*versions[KEPT_VERSIONS - 1 :], *emptied]:
        if time.time() - used < LATELY:
            continue
        doomed = parent / f"{_REMOVED}{uuid.uuid4().hex}"
        with suppress(OSError):
            path.rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)


@functools.cache
def _folder_for_lack_of_another() -> Path | None:
    """A folder that is this user's alone, the same for all ranks and runs; None where there is none.

    Warns, once.
    """
    folder = None
    try:
        folder = private_folder(Path(tempfile.gettempdir()))
        what = f"are kept in {folder}"
    except OSError as error:
        what = f"are compiled again by every process, for a minute or two ({error})"
    warnings.warn(
        f"Numba's kernels {what}, because neither beside the package nor in the user's cache folder "
        "can files be written: set NUMBA_CACHE_DIR to a folder of yours that can",
        stacklevel=5,
    )
    return folder


def private_folder(parent: Path) -> Path:
    """A folder in ``parent`` that nobody but this user can have made, write to or replace.

    What it holds is executed: a folder that another user has planted there must not be taken. Ranks
    that start at once find the same one.

    Args:
        parent: usually where all users may write, such as ``/tmp``.

    Raises:
        OSError: it cannot be made or written, or somebody else could have done so.

    Example:
        >>> with tempfile.TemporaryDirectory() as parent:
        ...     private_folder(Path(parent)).parent == Path(parent)
        True
    """
    user = os.geteuid()
    folder = parent / f"hvd_adaptive-{user}"
    above = parent.stat()
    if above.st_uid not in (0, user) or (above.st_mode & 0o022 and not above.st_mode & stat.S_ISVTX):
        raise PermissionError(f"others could replace what is in {parent}")
    with suppress(FileExistsError):  # made by another rank, by an earlier run, or by somebody else
        folder.mkdir(0o700)
    found = folder.lstat()  # not where a link leads to
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != user or found.st_mode & 0o077:
        raise PermissionError(f"{folder} is not a folder of this user's alone")
    tempfile.TemporaryFile(dir=folder).close()
    return folder
