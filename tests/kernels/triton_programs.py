"""Triton's kernels, compiled for a GPU that is not there: what its interpreter does not see.

``TRITON_INTERPRET=1 python -m tests.kernels.triton_programs record FILE`` runs a little of everything
and writes down how kernels were called; ``python -m tests.kernels.triton_programs compile FILE``
compiles each of them for compute capability 9.0, in another process: the first one interprets what it
imports.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

NAMES = {
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int16: "*i16",
    torch.uint8: "*u8",
}
CAPABILITY = 90
VARIES = ("FORMAT", "NORM", "GRADS", "OTHERS", "ADDS", "BLOCK")
"""Constants of which each value may lead to other code."""
WRITTEN = r"rn\.f32\s+%\w+, (%\w+), %\w+, \1;"
"""The one contraction that is meant: ``x * y + x``, by which a level is rounded as its quotient is."""


def type_of(value: Any) -> str:
    """A kernel's argument in Triton's words."""
    if isinstance(value, torch.Tensor):
        return NAMES[value.dtype]
    if isinstance(value, float):
        return "fp32"
    return "i32" if abs(value) < 2**31 else "i64"


def record(into: Path) -> None:
    """Run all families, and write down every kernel with the types and constants of its first call."""
    from triton.runtime import interpreter

    calls: dict[str, list[Any]] = {}
    run = interpreter.GridExecutor.__call__

    def recorded(self: Any, *arguments: Any, **keywords: Any) -> None:
        given = dict(zip(self.arg_names, arguments, strict=False)) | keywords
        constants = {name: given[name] for name in self.constexprs}
        types = {
            name: "constexpr" if name in constants else type_of(given[name]) for name in self.arg_names
        }
        varies = [constants.get(name) for name in VARIES]
        key = f"{self.fn.__name__} {varies}"
        calls.setdefault(
            key, [self.fn.__module__, self.fn.__name__, types, constants, keywords.get("num_warps", 4)]
        )
        run(self, *arguments, **keywords)

    interpreter.GridExecutor.__call__ = recorded
    run_everything()
    into.write_text(json.dumps(list(calls.values())))


def run_everything() -> None:
    """Each family, with each format and norm that has code of its own."""
    from hvd_adaptive.kernels.quantization import ReceivedBody
    from hvd_adaptive.kernels.triton import quantized, reduction, rotation, sparse, subset
    from hvd_adaptive.wire import ValueFormat
    from hvd_adaptive.wire.quantized import Norm, QuantizationRule, Rounding

    x, one = torch.randn(300), np.array([0, 300])
    for values in ValueFormat:
        body, _ = sparse.compress_(x.clone(), one, np.array([30]), values, [x])
        sparse.decompress_sum_([body], [torch.zeros(300)], 1.0, values, whole=True)
    for histogram in (sparse.spectrum, sparse.sample_spectrum, sparse.summary, sparse.moments):
        histogram(x)
    sparse.refined_spectrum(x, np.array([3]))
    for norm, rounding in (
        (Norm.l2, Rounding.uniform),
        (Norm.power, Rounding.powers),
        (Norm.clipped, Rounding.uniform),
        (Norm.sides, Rounding.sign),
    ):
        rule, bits = QuantizationRule(norm, rounding, clip=2.5), np.array([1])
        body, _ = quantized.compress_(x.clone(), one, bits, rule, rule.tables, [x])
        bodies = [ReceivedBody(body, 0, rule.tables)]
        reduction.reduce_(bodies, one, bits, rule, rule.tables)
        if norm is not Norm.sides:
            quantized.norm_histogram(x, rule, squared=True)
    odd = QuantizationRule(Norm.max, Rounding.uniform, block=100)  # no whole bytes, no whole groups
    body, _ = quantized.compress_(x.clone(), one, np.array([5]), odd, odd.tables, [x])
    quantized.decompress_sum_([ReceivedBody(body, 0, odd.tables)], [torch.zeros(300)], 1.0, odd)
    quantized.decompress_add_(body, 0, [torch.zeros(300)], 1.0, odd, odd.tables)
    large = QuantizationRule(Norm.max, Rounding.uniform, block=2048)  # more than a tile
    body, _ = quantized.compress_(x.clone(), one, np.array([5]), large, large.tables)
    quantized.decompress_sum_([ReceivedBody(body, 0, large.tables)], [torch.zeros(300)], 1.0, large)
    quantized.round_at_random_(torch.empty(300, dtype=torch.bfloat16), x, 5)
    more, _ = sparse.compress_(x.clone(), one, np.array([10]), ValueFormat.fp32)
    sparse.recompress_(more, x.clone(), one, np.array([3]), ValueFormat.fp32)
    subset.add_(x, subset.take_(x, 100, key=5), key=5, scale=0.5)
    rotation.rotate_([x], 1, [x])
    rotation.rotate_back_([x], 1)
    sparse.compress_(x.clone(), one, np.array([30]), ValueFormat.fp16, [x.half()])
    quantized.compress_(x.clone(), one, bits, rule, rule.tables, [x.bfloat16()])
    rotation.rotate_([x.clone()], 1, [x.half()])


def compile_all(found: Path) -> list[str]:
    """What does not compile, or would round once where the format says twice."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    wrong = []
    for module, name, types, constants, warps in json.loads(found.read_text()):
        kernel = getattr(importlib.import_module(module), name)
        places = {(list(types).index(each),): value for each, value in constants.items()}
        options = {"num_warps": warps, "enable_fp_fusion": False}
        try:
            compiled = triton.compile(
                ASTSource(kernel, types, places), GPUTarget("cuda", CAPABILITY, 32), options
            )
        except triton.CompilationError as error:
            wrong.append(f"{name} {constants}: {error} {error.__cause__}")
            continue
        if re.search(rf"\bfma\.(?!{WRITTEN})|\.approx|div\.full", compiled.asm["ptx"]):
            wrong.append(f"{name} {constants}: contracts or approximates floats")
    return wrong


def main() -> int:
    """Record or compile; 1 if something is wrong."""
    what, file = sys.argv[1], Path(sys.argv[2])
    if what == "record":
        record(file)
        return 0
    wrong = compile_all(file)
    print("\n".join(wrong))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
