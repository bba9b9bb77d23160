"""What Python imports at the start of a script under ``hva run``.

Needs nothing but the standard library, and does nothing until the script imports ``horovod.torch``.
The environment is then as it was before ``hva run``: what the script starts is not affected.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec, module_from_spec
from sys import path as search_path
from types import ModuleType
from typing import Any

TARGET = "horovod.torch"
PROGRAM = "hva run"
RANKS = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "HOROVOD_RANK", "SLURM_PROCID")
"""Where launchers tell a process its rank; of mpirun in a Slurm job, the first one is right."""


class Substitutes(MetaPathFinder, Loader):
    """Finds ``horovod.torch`` as Python does, and replaces what it holds once it is loaded.

    Args:
        settings: of :func:`hvd_adaptive.commands.substitution.install`.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        self._settings = settings
        self._loader: Loader | None = None
        self._asked_for_horovod = False
        self.replaced: list[str] = []
        """What was said of the calls that were replaced; filled in by what replaces them."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """As Python calls it for every import."""
        self._asked_for_horovod |= name == "horovod"
        if name != TARGET or self._loader is not None:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            self._loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """As Horovod's own loader."""
        assert self._loader is not None
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Load Horovod, then replace."""
        assert self._loader is not None
        self._loader.exec_module(module)
        try:
            from hvd_adaptive.commands import substitution
        except ModuleNotFoundError as error:
            say(f"{sys.executable} cannot import {error.name}: write the Python that has hvd_adaptive")
            raise SystemExit(2) from None
        substitution.install(module, self._settings, self.replaced)

    def report(self) -> None:
        """At the end: why nothing was replaced, if nothing was."""
        if self.replaced:
            return
        program = self._settings.get("program", PROGRAM)
        if "hvd_adaptive.optimizer" in sys.modules:
            why = "the script calls hvd_adaptive.DistributedOptimizer itself; its own arguments count"
        elif TARGET in sys.modules:
            why = "the script imported horovod.torch and did not call hvd.DistributedOptimizer"
        elif self._asked_for_horovod and find_spec("horovod") is None:
            why = f"{sys.executable} has no Horovod: 'hva install-horovod' builds it"
        else:
            why = "the script did not import horovod.torch"
        say(f"replaced nothing: {why}", program)


def say(text: str, program: str = PROGRAM) -> None:
    """A line of rank 0."""
    rank = next((os.environ[name] for name in RANKS if name in os.environ), "0")
    if rank == "0":
        print(f"{program}: {text}", file=sys.stderr, flush=True)


def begin(text: str) -> None:
    """Wait for Horovod, as the variable says that ``hva run`` has set."""
    given = json.loads(text)
    if given["pythonpath"] is None:
        os.environ.pop("PYTHONPATH", None)
    else:
        os.environ["PYTHONPATH"] = given["pythonpath"]
    finder = Substitutes(given["settings"])
    sys.meta_path.insert(0, finder)
    atexit.register(finder.report)


def import_the_next() -> None:
    """The ``sitecustomize`` that this one hides: the user's, or the distribution's."""
    here = os.path.dirname(os.path.abspath(__file__))
    others = [folder for folder in search_path if os.path.abspath(folder) != here]
    spec = PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        module = module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


if "HVA_RUN" in os.environ:
    begin(os.environ.pop("HVA_RUN"))
    import_the_next()
