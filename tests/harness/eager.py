"""torch without its compiler, for ranks that compile nothing.

The first optimizer of a process makes torch import ``torch._dynamo``: a thousand modules, and about two
seconds of a core in every rank, only to learn that two functions are not to be compiled.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeVar

_NAME = "torch._dynamo"
_Function = TypeVar("_Function", bound=Callable[..., Any])


class _NotLoaded(ModuleType):
    """What optimizers use of ``torch._dynamo``; asked for anything else, it loads that module."""

    @staticmethod
    def disable(function: _Function, recursive: bool = True, **how: object) -> _Function:
        """Nothing compiles, so there is nothing to keep it from."""
        return function

    @staticmethod
    def graph_break() -> None:
        """There is no graph."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if sys.modules[_NAME] is self:
            del sys.modules[_NAME]
        return getattr(importlib.import_module(_NAME), name)


def without_compiler() -> None:
    """Keeps ``torch._dynamo`` from being imported by optimizers; one that is there already stays."""
    import torch

    if _NAME not in sys.modules:
        sys.modules[_NAME] = _NotLoaded(_NAME)
        torch._dynamo = sys.modules[_NAME]
