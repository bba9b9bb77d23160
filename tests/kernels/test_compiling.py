"""Kernels are compiled before they are needed, their examples are right, and their benchmark runs."""

from __future__ import annotations

import doctest
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from hvd_adaptive.compressors import sparse
from hvd_adaptive.kernels.reference import sparse as reference
from hvd_adaptive.wire import frame as wire_frame
from hvd_adaptive.wire import sparse as wire_sparse
from hvd_adaptive.wire import varint


@pytest.mark.parametrize(
    "module", [reference, wire_sparse, wire_frame, varint, sparse], ids=lambda module: module.__name__
)
def test_the_examples_in_docstrings_give_what_they_show(module: ModuleType) -> None:
    results = doctest.testmod(module)
    assert results.attempted > 0
    assert results.failed == 0


def test_warm_says_how_long_it_took() -> None:
    command = [sys.executable, "-m", "hvd_adaptive.commands.precompile"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "kernels ready after" in done.stdout


def test_huffman_coding_is_compiled_beforehand() -> None:
    program = (
        "from hvd_adaptive.commands import precompile\n"
        "from hvd_adaptive.kernels.cpu import entropy, fields, quantized, symbols\n"
        "precompile.precompile()\n"
        "for kernel in (quantized._add_stream, fields.put_stream, fields.stream_bits,\n"
        "               fields.fill_entries, fields.count_symbols, symbols.find_codewords):\n"
        "    assert kernel.signatures, kernel\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_the_benchmark_runs() -> None:
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "benchmarks.micro.kernels", "--quick"]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert "x memcpy" in done.stdout
