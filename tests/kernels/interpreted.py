"""A pytest plugin: Triton's kernels in the place of Numba's, under Triton's interpreter.

``TRITON_INTERPRET=1 python -m pytest -p tests.kernels.interpreted FILE`` runs the tests of the kernels
for host memory, or of anything above them, with those for GPUs. So every contract that the one backend
keeps to is one of the other's. ``tests/kernels/test_triton.py`` does so for those in ``CONTRACTS``.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

import numpy as np
import torch
from hypothesis import settings
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

from hvd_adaptive.kernels.base import REGISTRY

EXAMPLES = 4
"""Of each property: a call takes a tenth of a second here, or several."""

if os.environ.get("TRITON_INTERPRET") != "1":
    raise RuntimeError("set TRITON_INTERPRET=1: it must be known before triton is imported")


def interpret_faster() -> None:
    """Leave out what the interpreter does again for every call of a function by a kernel.

    It patches Triton's language for each such call; once per kernel and module is enough, and takes
    half of the time. Looking up NumPy's type of each result takes a tenth of what is left.
    """
    patched: set[str] = set()
    run = interpreter.GridExecutor.__call__
    dtype_of, dtypes = interpreter._get_np_dtype, dict[str, Any]()

    def known_dtype(kind: Any) -> Any:
        if kind.scalar.is_ptr():
            return dtype_of(kind)
        name = kind.scalar.name
        if name not in dtypes:
            dtypes[name] = dtype_of(kind)
        return dtypes[name]

    def run_kernel(self: Any, *arguments: Any, **keywords: Any) -> None:
        patched.clear()
        run(self, *arguments, **keywords)

    def call(self: Any, *arguments: Any, **keywords: Any) -> Any:
        if self.fn.__module__ not in patched:
            interpreter._patch_lang(self.fn)
            patched.add(self.fn.__module__)
        return self.rewrite()(*arguments, **keywords)

    interpreter.GridExecutor.__call__ = run_kernel
    interpreter.InterpretedFunction.__call__ = call
    interpreter._get_np_dtype = known_dtype


EXACT = {"add": np.add, "sub": np.subtract, "mul": np.multiply}


def refuse_overflow() -> None:
    """Let a sum, difference or product of signed numbers that its type cannot hold be an error.

    Unsigned ones are meant to wrap around, as hashes do. The interpreter's own check takes a third of
    the time, and says nothing unless it is told to debug.
    """

    def check(self: Any, left: Any, right: Any, operation: Any) -> None:
        kind = left.type.scalar
        if not kind.is_int_signed() or kind.int_bitwidth >= 64:
            return
        found = EXACT[operation.__name__](left.handle.data, right.handle.data, dtype=np.int64)
        bound = 1 << (kind.int_bitwidth - 1)
        if found.size and not -bound <= found.min() <= found.max() < bound:
            name = operation.__name__
            raise OverflowError(f"{name}: {kind} cannot hold {found.min()} to {found.max()}")

    TritonSemantic.binary_op_sanitize_overflow_impl = check


def put_in_place() -> None:
    """Let both imports and the registry find Triton's modules where Numba's are looked for."""
    for family, backends in REGISTRY.items():
        if "triton" in backends:
            module = importlib.import_module(backends["triton"])
            package = importlib.import_module("hvd_adaptive.kernels.cpu")
            setattr(package, family, module)
            sys.modules[backends["cpu"]] = module
            backends["cpu"] = backends["triton"]


interpret_faster()
refuse_overflow()
put_in_place()
# Memory from torch.empty() holds NaN then: a kernel that reads what none has written shows.
torch.use_deterministic_algorithms(True, warn_only=True)

from tests.kernels import inputs  # noqa: E402  (it imports the modules that were put in place)

inputs.usual = settings(deadline=None, max_examples=EXAMPLES)
