"""torch without its compiler, for processes that compile nothing.

The first optimizer of a process makes torch import ``torch._dynamo``: a thousand modules, and about two
seconds of a core in every rank, only to learn that two functions are not to be compiled. Programs that
tests start find ``light/sitecustomize.py`` by their PYTHONPATH, which does the same for them.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

_NAME = "torch._dynamo"
_Function = TypeVar("_Function", bound=Callable[..., Any])

LIGHT = str(Path(__file__).resolve().with_name("light"))
"""A folder for the PYTHONPATH of programs."""
PYTHONPATH = os.pathsep.join([LIGHT, str(Path(__file__).resolve().parents[2])])
"""Of programs that are to find this repository, too."""


class _NotLoaded(ModuleType):
    """What optimizers use of ``torch._dynamo``; asked for anything else, it loads that module."""

    def __init__(self, finder: _Finder) -> None:
        super().__init__(_NAME)
        self._finder = finder
        self._imported = False

    @staticmethod
    def disable(function: _Function, recursive: bool = True, **how: object) -> _Function:
        """Nothing compiles, so there is nothing to keep it from."""
        return function

    @staticmethod
    def graph_break() -> None:
        """There is no graph."""

    def __getattr__(self, name: str) -> Any:
        # the import of a module within it asks for its folder, and so does its own import
        if name.startswith("__") and not (name == "__path__" and self._imported):
            raise AttributeError(name)
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
        if sys.modules.get(_NAME) is self:
            del sys.modules[_NAME]
        return getattr(importlib.import_module(_NAME), name)


class _Finder(MetaPathFinder, Loader):
    """Finds that in the place of ``torch._dynamo``."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname == _NAME else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _NotLoaded(self)

    def exec_module(self, module: ModuleType) -> None:
        assert isinstance(module, _NotLoaded)
        module._imported = True


def without_compiler() -> None:
    """Keeps ``torch._dynamo`` from being imported by optimizers; one that is there already stays."""
    if _NAME not in sys.modules:
        sys.meta_path.insert(0, _Finder())


def make_programs_light() -> None:
    """For all that this process starts without a PYTHONPATH of its own."""
    places = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if LIGHT not in places:
        os.environ["PYTHONPATH"] = os.pathsep.join([LIGHT, *filter(None, places)])
