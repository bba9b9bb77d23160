"""Where compiled kernels are kept, and that those of other sources are never loaded."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hvd_adaptive import kernel_cache

PACKAGE = Path(kernel_cache.__file__).parent
PROGRAM = """
import warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import hvd_adaptive, hvd_adaptive.planning
    from hvd_adaptive.kernels.cpu.streams import bit_length
    print(bit_length(9), end=" ")
    print(sum(bit_length.stats.cache_hits.values()), end=" ")
    print(*[each.message for each in caught if "NUMBA_CACHE_DIR" in str(each.message)], sep="|")
"""


@pytest.fixture
def read_only(tmp_path: Path) -> Path:
    """A folder with a copy of the package that nobody may write to."""
    copy = tmp_path / "installed" / "hvd_adaptive"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    for folder in [copy, *(path for path in copy.rglob("*") if path.is_dir())]:
        folder.chmod(0o555)
    return copy.parent


def start(installed: Path, temporary: Path) -> subprocess.Popen[str]:
    """A process that compiles a kernel, and may not write wherever root usually may."""
    powers = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.geteuid() == 0 else []
    kept = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}
    return subprocess.Popen(
        [*powers, sys.executable, "-c", PROGRAM],
        cwd=installed,
        env=kept
        | {
            "HOME": "/proc/nonexistent",
            "XDG_CACHE_HOME": "/proc/nonexistent",
            "TMPDIR": str(temporary),
            "PYTHONPATH": str(installed),
            "PYTHONDONTWRITEBYTECODE": "1",
        },
        stdout=subprocess.PIPE,
        text=True,
    )


def outcome(process: subprocess.Popen[str]) -> tuple[int, int, list[str]]:
    """(what a kernel returned, kernels taken from the cache, warnings) of a process."""
    said = process.communicate(timeout=300)[0]
    assert process.returncode == 0
    returned, hits, text = said.strip().split(" ", 2)
    return int(returned), int(hits), text.split("|")


def test_ranks_without_a_home_share_a_cache_of_their_own_and_each_warns_once(
    read_only: Path, tmp_path: Path
) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir(0o1777)
    for hits, ranks in ((0, 2), (1, 1)):
        started = [start(read_only, temporary) for _ in range(ranks)]
        for returned, found, warned in map(outcome, started):
            assert returned == 4
            assert found >= hits  # of two that start at once, one may find what the other wrote
            assert len(warned) == 1
            assert f"kept in {temporary}" in warned[0]
    [folder] = temporary.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert list(folder.rglob("*.nbc"))


def test_without_any_place_kernels_are_compiled_and_one_warning_names_what_to_set(
    read_only: Path, tmp_path: Path
) -> None:
    planted = tmp_path / f"hvd_adaptive-{os.geteuid()}"
    planted.mkdir()
    planted.chmod(0o777)  # as another user would have it
    returned, hits, warned = outcome(start(read_only, tmp_path))
    assert (returned, hits, len(warned)) == (4, 0, 1)
    assert "compiled again" in warned[0]
    assert not list(planted.iterdir())


def test_a_folder_that_another_user_could_have_planted_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_to_all, elsewhere = tmp_path / "open", tmp_path / "elsewhere"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)  # without the bit that keeps others from renaming
    with pytest.raises(PermissionError, match="replace what is in"):
        kernel_cache.private_folder(open_to_all)
    elsewhere.mkdir(0o700)
    folder = tmp_path / f"hvd_adaptive-{os.geteuid()}"
    folder.symlink_to(elsewhere)
    with pytest.raises(PermissionError, match="not a folder of this user's alone"):
        kernel_cache.private_folder(tmp_path)
    folder.unlink()
    assert kernel_cache.private_folder(tmp_path) == kernel_cache.private_folder(tmp_path) == folder
    folder.rename(tmp_path / "hvd_adaptive-12345")
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(PermissionError):
        kernel_cache.private_folder(tmp_path)


def copy_of_the_package(folder: Path) -> Path:
    """A package of this name that anyone may write to."""
    shutil.copytree(PACKAGE, folder / "hvd_adaptive", ignore=shutil.ignore_patterns("__pycache__"))
    return folder / "hvd_adaptive"


def varint_size(package: Path) -> tuple[int, int]:
    """(a bound by a kernel that inlines one of another file, kernels taken from the cache)."""
    program = (
        "from hvd_adaptive.kernels.cpu.layers import sparse_bound\n"
        "print(sparse_bound(100, 1, 0), sum(sparse_bound.stats.cache_hits.values()))"
    )
    said = subprocess.run(
        [sys.executable, "-c", program],
        cwd=package.parent,
        # Python's own cache would be taken in, too, by a file of the same size and age
        env=os.environ | {"PYTHONPATH": str(package.parent), "PYTHONDONTWRITEBYTECODE": "1"},
        check=True,
        capture_output=True,
        text=True,
        timeout=300,
    ).stdout.split()
    return int(said[0]), int(said[1])


def test_a_kernel_is_compiled_again_when_one_that_it_inlines_from_another_file_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    package = copy_of_the_package(tmp_path)
    before = varint_size(package)
    assert before[1] == 0
    assert varint_size(package) == (before[0], 1)  # from the cache
    inlined = package / "kernels" / "cpu" / "streams.py"
    kept = inlined.stat()
    source = inlined.read_text(encoding="utf-8")
    changed = source.replace("return max(1, (bit_length(value)", "return max(3, (bit_length(value)")
    assert changed != source
    inlined.write_text(changed, encoding="utf-8")
    os.utime(inlined, ns=(kept.st_atime_ns, kept.st_mtime_ns))  # as old as before, and of the same size
    assert varint_size(package) == (before[0] + 4, 0)
    inlined.write_text(source, encoding="utf-8")
    assert varint_size(package) == (before[0], 1)  # both versions are kept


def test_kernels_of_old_versions_are_removed_unless_used_lately(tmp_path: Path) -> None:
    hour = 3600
    for age in range(6):
        folder = tmp_path / f"hvd_adaptive-kernels-{age}"
        folder.mkdir()
        (folder / "kernel.nbc").touch()
        started = time.time() - age * hour / 2
        os.utime(folder, (started, started))
    (tmp_path / "hvd_adaptive-0").mkdir()  # the private folder of a user
    kernel_cache.remove_old_versions(tmp_path, "hvd_adaptive-kernels-5")
    kept = sorted(path.name for path in tmp_path.iterdir())
    assert kept == [
        "hvd_adaptive-0",
        *(f"hvd_adaptive-kernels-{age}" for age in (0, 1, 5)),
    ]


def test_ranks_that_remove_old_versions_at_the_same_time_do_not_fail(tmp_path: Path) -> None:
    long_ago = time.time() - 1e6
    for version in range(30):
        folder = tmp_path / f"hvd_adaptive-kernels-{version}"
        folder.mkdir()
        for kernel in range(20):
            (folder / f"{kernel}.nbc").touch()
        os.utime(folder, (long_ago, long_ago + version))
    with ThreadPoolExecutor(16) as ranks:
        done = [
            ranks.submit(kernel_cache.remove_old_versions, tmp_path, "hvd_adaptive-kernels-0")
            for _ in range(16)
        ]
    assert [each.result() for each in done] == [None] * 16
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"hvd_adaptive-kernels-{version}" for version in (0, 28, 29)
    ]
