"""Where compiled kernels are kept between runs: where Numba keeps them, or in a folder for this user.

Numba takes the first of ``NUMBA_CACHE_DIR``, the ``__pycache__`` beside the source, and the user's
cache folder that can be written, and without any it refuses to compile: a package that an administrator
installed could then not even be imported by a user without a home.
"""

# mypy: disable-error-code="attr-defined"

from __future__ import annotations

import functools
import os
import stat
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from numba import config, njit


def jit(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """``numba.njit`` with a cache on disk, or without one where there is no place for it.

    Args:
        options: of ``numba.njit``.

    Example: ``@jit(nogil=True)`` above a function.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        try:
            return njit(cache=True, **options)(function)
        except RuntimeError as error:
            if "no locator available" not in str(error):
                raise
        folder = _folder_for_lack_of_another()
        if folder is None:
            return njit(**options)(function)
        with _kept_in(folder):
            return njit(cache=True, **options)(function)

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
        what = f"are compiled anew by every process, for up to a minute ({error})"
    warnings.warn(
        f"Numba's kernels {what}, because neither beside the package nor in the user's cache folder "
        "can files be written: set NUMBA_CACHE_DIR to a folder of yours that can",
        stacklevel=4,
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
