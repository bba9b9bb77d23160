"""Payloads that must not change: what every registered compressor sends of fixed tensors.

    python tests/wire/golden_payloads.py            compare with tests/wire/golden/payloads.json
    python tests/wire/golden_payloads.py --write    replace it, where the wire format changes on purpose

A digest of the bytes stands for a payload. Factors of PowerSGD come out of BLAS, whose last digits
depend on the processor: of them, sizes and rounded norms are kept.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hvd_adaptive.compressors import REGISTRY, parse
from hvd_adaptive.compressors.base import LayerContext

GOLDEN = Path(__file__).resolve().parent / "golden" / "payloads.json"
SIZES = (1, 5_000, 150_001)
"""One element, one block, and more than 2^16 elements, of which several blocks are not full."""
OPTIONS = (
    "topk:values=fp32",
    "topk:values=fp16",
    "topk:values=int8",
    "topk:values=sign",
    "redsync:values=sign",
    "randomk:values=fp16",
    "randomk:unbiased=true",
    "qsgd:bits=2,coding=huffman",
    "qsgd:bits=8",
    "alq:coding=fixed",
    "terngrad:clip=2.5",
    "qsgdinf:bits=3,rotate=hadamard",
    "qsgd:bits=2,coding=huffman,rotate=hadamard",
)
"""Beside every member as it is: other formats of values and codes."""
KEY = 12_345


def tensor(numel: int) -> Tensor:
    """Heavy tails, exactly the same on every machine: cubes of integers."""
    cubes = np.random.default_rng(numel).integers(-(1 << 15), 1 << 15, numel).astype(np.float64) ** 3
    return torch.from_numpy((cubes / 2.0**45).astype(np.float32))


def payloads() -> dict[str, dict[str, Any]]:
    """What stands for the payloads of all members and sizes."""
    return {
        f"{spec} of {numel}": _describe(spec, numel)
        for spec in (*REGISTRY, *OPTIONS)
        for numel in SIZES
    }


def _describe(spec: str, numel: int) -> dict[str, Any]:
    compressor, x = parse(spec), tensor(numel)
    data = compressor.compress_(x, compressor.level, LayerContext(key=KEY)).data
    size = {"bytes": data.nbytes}
    if compressor.name == "powersgd":
        return {**size, "norm": float(f"{float(data.double().norm()):.3g}")}
    raw = data.contiguous().view(torch.uint8).numpy().tobytes()
    return {**size, "sha256": hashlib.sha256(raw).hexdigest()}


def main(arguments: list[str]) -> int:
    """Compare, or write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--write", action="store_true", help="replace the file")
    found = payloads()
    if parser.parse_args(arguments).write:
        rows = ",\n".join(f"  {json.dumps(key)}: {json.dumps(row)}" for key, row in found.items())
        GOLDEN.write_text("{\n" + rows + "\n}\n")
        return 0
    expected = json.loads(GOLDEN.read_text())
    different = [key for key in {**expected, **found} if expected.get(key) != found.get(key)]
    for key in different:
        print(f"{key}: expected {expected.get(key)}, got {found.get(key)}")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
