"""Of processes that start without a cache, one compiles; and nothing is left at a process's end."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hvd_adaptive.compile_once import FileLock, compile_once
from hvd_adaptive.kernel_cache import PACKAGE

PROGRAM = """
import sys, time
from hvd_adaptive.kernels.cpu.layers import sparse_bound as kernel
time.sleep(max(0.0, float(sys.argv[1]) - time.time()))
kernel(100, 1, 0)
print(sum(kernel.stats.cache_misses.values()), sum(kernel.stats.cache_hits.values()))
"""


def environment(folder: Path) -> dict[str, str]:
    return {**os.environ, "NUMBA_CACHE_DIR": str(folder), "PYTHONPATH": str(PACKAGE.parent)}


@pytest.mark.slow
def test_one_of_many_processes_compiles_and_says_so_and_the_others_load(tmp_path: Path) -> None:
    together = str(time.time() + 4)
    started = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, together], env=environment(tmp_path), text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for _ in range(4)
    ]  # fmt: skip
    ended = [process.communicate(timeout=240) for process in started]
    assert [process.returncode for process in started] == [0] * 4, ended
    assert sorted(said.split() for said, _ in ended) == [["0", "1"]] * 3 + [["1", "0"]]
    assert "".join(errors for _, errors in ended).count("hvd_adaptive: compiling kernels") == 1


def test_a_process_leaves_its_terminal_as_it_is(tmp_path: Path) -> None:
    """Launchers give each rank a terminal, which Numba's colorama would reset at the end."""
    program = "from hvd_adaptive.kernels.cpu.streams import bit_length\nprint(bit_length(9))\n"
    reader, writer = pty.openpty()
    with os.fdopen(reader, "rb", 0) as terminal:
        process = subprocess.Popen(
            [sys.executable, "-c", program], env=environment(tmp_path), stdout=writer
        )
        os.close(writer)
        assert process.wait(120) == 0
        said = terminal.read(4096)
    assert said.split() == [b"4"]


def held_elsewhere(path: Path) -> subprocess.Popen[str]:
    """A process that has the lock until it ends."""
    program = (
        "import sys, time\nfrom pathlib import Path\nfrom hvd_adaptive.compile_once import FileLock\n"
        "FileLock(Path(sys.argv[1])).acquire()\nprint('held', flush=True)\ntime.sleep(60)\n"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", program, str(path)],
        env=environment(path.parent), stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    return holder


def test_a_lock_whose_holder_is_killed_is_free(tmp_path: Path) -> None:
    with held_elsewhere(tmp_path / "lock") as holder:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        lock = FileLock(tmp_path / "lock")
        started = time.monotonic()
        lock.acquire()
        assert time.monotonic() - started < 5
        lock.release()


def test_who_waits_too_long_does_it_himself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What holds the lock may be stopped."""
    monkeypatch.setattr("hvd_adaptive.compile_once.LONGEST_WAIT", 0.1)
    with held_elsewhere(tmp_path / "lock") as holder:
        FileLock(tmp_path / "lock").acquire()
        holder.kill()


def test_a_folder_that_cannot_be_locked_locks_nobody(tmp_path: Path) -> None:
    lock = FileLock(tmp_path / "nowhere" / "lock")
    lock.acquire()
    lock.say_once("nobody hears this")
    lock.release()


class _Dispatcher:
    """As Numba's: looks into its cache, compiles what is not there, and may fail."""

    def __init__(self, kept: dict[str, str]) -> None:
        self._cache: Any = self
        self.kept = kept

    def load_overload(self, signature: str, _target: object) -> str | None:
        return self.kept.get(signature)

    def compile(self, signature: str) -> str:
        found: str | None = self._cache.load_overload(signature, None)
        if found is None:
            if signature == "bad":
                raise TypeError("cannot be compiled")
            self.kept[signature] = found = f"compiled {signature}"
        return found


def test_the_lock_is_free_after_each_kernel_also_one_that_cannot_be_compiled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dispatcher = compile_once(_Dispatcher({}), tmp_path, "kernel")
    assert dispatcher.compile("f") == "compiled f"
    with pytest.raises(TypeError, match="cannot be compiled"):
        dispatcher.compile("bad")
    dispatcher.compile("g")
    assert capsys.readouterr().err.count("compiling kernels") == 1
    FileLock(tmp_path / "kernel.lock").acquire()  # as another process's


def test_what_another_process_has_compiled_meanwhile_is_loaded(tmp_path: Path) -> None:
    class Late(dict[str, str]):
        """Whose content arrives between two looks."""

        looks = 0

        def get(self, signature: str, default: Any = None) -> Any:
            self.looks += 1
            return "loaded" if self.looks == 2 else default

    dispatcher = compile_once(_Dispatcher(Late()), tmp_path, "kernel")
    assert dispatcher.compile("f") == "loaded"
    assert dispatcher.kept == {}
    FileLock(tmp_path / "kernel.lock").acquire()


def test_a_kernel_is_compiled_while_another_process_compiles_another_one(tmp_path: Path) -> None:
    with held_elsewhere(tmp_path / "other.lock") as holder:
        dispatcher = compile_once(_Dispatcher({}), tmp_path, "kernel")
        started = time.monotonic()
        assert dispatcher.compile("f") == "compiled f"
        assert time.monotonic() - started < 5
        holder.kill()
