"""What users of torchrun do, on a machine that has neither Horovod nor mpi4py."""

from __future__ import annotations

import functools
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from tests.harness.rank_launcher import ROOT
from tests.torch_distributed.launching import RANK, results, torchrun

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

PLANNED = ("lgreco", "auto")
CASES = (
    *(f"planned:{name}" for name in PLANNED),
    "resumed:two_shot_sparse", "spoiled:topk", "spoiled:two_shot", "hooked:topk",
    "hooked:two_shot", "refused:", "channel:", "without_store:",
)  # fmt: skip


@functools.cache
def found() -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        return results("torch", 2, Path(folder), CASES)


@pytest.mark.parametrize("name", PLANNED)
def test_planners_switch_all_ranks_alike(name: str) -> None:
    mine, theirs = (rank[f"planned:{name}"] for rank in found())
    assert mine[:2] == theirs[:2]
    assert mine[1] > 0, f"the plan never changed:\n{mine[2]}"


def test_a_run_continues_from_its_checkpoints_to_the_bit() -> None:
    for rank in found():
        whole, continued = rank["resumed:two_shot_sparse"]
        assert whole == continued


@pytest.mark.parametrize("name", ["topk", "two_shot"])
def test_what_is_not_finite_on_one_rank_is_so_on_all_and_then_over(name: str) -> None:
    mine, theirs = (rank[f"spoiled:{name}"] for rank in found())
    assert mine == theirs
    assert mine[0] == [True, False, True]


def test_ddp_with_our_hook_trains_as_our_optimizer_does() -> None:
    for rank in found():
        ours, hooked, kept, measured = rank["hooked:topk"]
        assert hooked == ours
        assert kept > 0
        assert measured


def test_ddp_with_our_hook_keeps_ranks_alike_where_rounding_is_random() -> None:
    mine, theirs = (rank["hooked:two_shot"] for rank in found())
    assert mine == theirs
    # other buckets draw other numbers
    assert mine[1] != found()[0]["hooked:topk"][1]


def test_wrong_arguments_are_named_on_all_ranks() -> None:
    for rank in found():
        differs, adasum, no_group = rank["refused:"]
        assert differs.startswith("ValueError: DistributedOptimizer: ")
        assert "on rank 0" in differs
        assert "on rank 1" in differs
        assert adasum.startswith("ValueError: op=Adasum is Horovod's alone: with torch.distributed")
        assert no_group.startswith(
            "TypeError: process_set must be a process group of torch.distributed"
        )


def test_what_planners_tell_each_other_reaches_all_ranks() -> None:
    for rank in found():
        mean, least, rows, nothing, texts, first = rank["channel:"]
        assert mean == [0.5, -0.5, 1e-3]
        assert least == [0.0, -1.0, 1e-3]
        assert rows == [[0.0, 0.0, 1e-3], [1.0, -1.0, 1e-3]]
        assert nothing == [2, 0]
        assert texts == ["é\n", "é\n" * 1001]
        assert first == "first"


def test_groups_are_made_where_torch_has_no_store_for_them() -> None:
    for rank in found():
        assert rank["without_store:"] == [1]


def test_a_group_of_some_ranks_reduces_among_them(tmp_path: Path) -> None:
    cases = results("torch", 3, tmp_path, ["subset:topk"])
    first, second, outside = (rank["subset:topk"] for rank in cases)
    assert first == second != outside


def test_a_rank_that_fails_ends_the_others_and_is_named(tmp_path: Path) -> None:
    started = time.monotonic()
    done = torchrun(2, RANK, "torch", tmp_path, "dies:topk")
    assert done.returncode == 1
    assert time.monotonic() - started < 90
    assert "hvd_adaptive: rank 1 failed, and the others end with it: ZeroDivisionError" in done.stderr
    assert "training went on without rank 1" not in done.stderr


@pytest.mark.parametrize("compression", ["qsgd:bits=4", "auto"])
def test_the_example_of_the_readme_trains(compression: str) -> None:
    words = "--steps", 60, "--compression", compression
    done = torchrun(2, ROOT / "launch" / "train_torchrun.py", *words)
    assert done.returncode == 0, done.stderr[-4000:]
    assert (": auto: " in done.stderr) == (compression == "auto"), "what is decided, and why"
    assert "compression ratio" in done.stdout
    [score] = [line for line in done.stdout.splitlines() if line.startswith("held-out accuracy")]
    assert float(score.split()[2].rstrip("%")) > 80


def test_no_thread_of_ours_is_left_when_python_ends(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    example = ROOT / "launch" / "train_torchrun.py"
    script.write_text(
        "import atexit, runpy, sys\nfrom pathlib import Path\n"
        "def say():\n"
        "    tasks = Path('/proc/self/task').iterdir()\n"
        "    left = [name for task in tasks if 'gloo' in (name := (task / 'comm').read_text())]\n"
        "    print(f'threads left: {left}\\n', end='', flush=True)\n"
        "atexit.register(say)  # the first one is called last\n"
        f"sys.argv = [{str(example)!r}, '--steps', '10', '--planner', 'lgreco']\n"
        f"runpy.run_path({str(example)!r}, run_name='__main__')\n"
    )
    done = torchrun(2, script)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count("threads left: []\n") == 2, done.stdout


def test_one_process_needs_no_launcher() -> None:
    program = (
        "import sys\nsys.modules['horovod'] = sys.modules['mpi4py'] = None\n"
        "import torch, hvd_adaptive as hva\nhva.init()\nmodel = torch.nn.Linear(64, 64)\n"
        "optimizer = hva.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), "
        "model.named_parameters(), compression='topk')\n"
        "model(torch.ones(1, 64)).sum().backward()\noptimizer.step()\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], cwd=ROOT, check=True, timeout=120)


def test_who_forgets_to_connect_the_ranks_hears_what_to_call() -> None:
    program = (
        "import sys\nsys.modules['horovod'] = None\n"
        "import torch, hvd_adaptive as hva\nmodel = torch.nn.Linear(2, 2)\n"
        "hva.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.stderr.splitlines()[-1].startswith(
        "ValueError: the ranks are not connected: call hvd_adaptive.init() first"
    )
