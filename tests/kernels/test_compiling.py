"""Kernels are compiled before they are needed, their examples are right, and their benchmark runs."""

from __future__ import annotations

import doctest
import functools
import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

from hvd_adaptive.commands import precompile
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


def test_helpers_stop_where_all_is_compiled_and_are_ended_where_compiling_fails() -> None:
    precompile.precompile()
    with precompile._helpers(2):
        pass
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt), precompile._helpers(2):
        raise KeyboardInterrupt
    assert time.monotonic() - started < 5


@pytest.mark.parametrize("processes", [1, 2, 3, 4, 20])
def test_each_process_begins_elsewhere_and_runs_all(
    processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[int] = []
    uses = [functools.partial(ran.append, each) for each in range(10)]
    monkeypatch.setattr(precompile, "_uses", lambda: uses)
    monkeypatch.setattr(precompile.kernel_cache, "is_complete", lambda: False)
    monkeypatch.setattr(precompile.kernel_cache, "mark_complete", lambda: None)
    begun = set()
    for index in range(processes):
        ran.clear()
        precompile.precompile(index, processes)
        assert sorted(ran) == list(range(10))
        begun.add(ran[0])
    assert len(begun) == min(10, processes)


def test_a_process_that_helps_stops_where_all_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[int] = []
    monkeypatch.setattr(precompile, "_uses", lambda: [functools.partial(ran.append, 1)] * 10)
    monkeypatch.setattr(precompile.kernel_cache, "is_complete", lambda: len(ran) == 3)
    monkeypatch.setattr(precompile.kernel_cache, "mark_complete", lambda: None)
    precompile.precompile(1, 2)
    assert len(ran) == 3


def test_every_kernel_that_python_calls_is_compiled_beforehand() -> None:
    """In a process of its own: in this one other tests have called them."""
    program = (
        "import sys\n"
        "from numba.core.dispatcher import Dispatcher\n"
        "from hvd_adaptive.commands import precompile\n"
        "from hvd_adaptive.kernels.cpu import entropy, fields, quantized, symbols\n"
        "precompile.precompile()\n"
        "for kernel in (quantized._add_stream, fields.put_stream, fields.stream_bits,\n"
        "               fields.fill_entries, fields.count_symbols, symbols.find_codewords):\n"
        "    assert kernel.signatures, kernel\n"
        "ours = [each for name, each in list(sys.modules.items()) if name.startswith('hvd_adaptive')]\n"
        "kernels = {each for module in ours for each in vars(module).values()\n"
        "           if isinstance(each, Dispatcher)}\n"
        "called = {part for each in kernels for name in each.py_func.__code__.co_names\n"
        "          if isinstance(part := each.py_func.__globals__.get(name), Dispatcher)}\n"
        "left = {each.py_func.__name__ for each in kernels - called if not each.signatures}\n"
        "assert len(kernels) > 100 and not left, left\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_the_benchmark_runs() -> None:
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "benchmarks.micro.kernels", "--quick"]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert "x memcpy" in done.stdout
