"""Names that were renamed, kept for one version."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Mapping
from typing import Any


def renamed(module: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """A ``__getattr__`` for a module whose members were renamed.

    Args:
        module: name of the module.
        names: where each old name's member is now, as ``package.module.name``.

    Example:
        >>> find = renamed("collections", {"Mapping": "collections.abc.Mapping"})
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     find("Mapping").__name__, str(caught[0].message)
        ('Mapping', 'collections.Mapping was renamed: write collections.abc.Mapping')
    """

    def find(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        warnings.warn(
            f"{module}.{name} was renamed: write {names[name]}", DeprecationWarning, stacklevel=3
        )
        where, _, member = names[name].rpartition(".")
        return getattr(importlib.import_module(where), member)

    return find
