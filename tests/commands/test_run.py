"""``hva run``: scripts that know nothing of this package train with its optimizer."""

from __future__ import annotations

import json
import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import pytest

from hvd_adaptive.commands import run
from hvd_adaptive.commands.bootstrap import sitecustomize
from tests.commands.launching import HVA, SCRIPTS, TWO_RANKS, hva, start
from tests.harness.rank_launcher import ROOT

EXAMPLES = ("mnist", "synthetic_benchmark", "imagenet_resnet")
ALL_OF_THEM = """
import runpy, sys
folder = sys.argv.pop(1)
for name in sys.argv.pop(1).split(","):
    sys.argv[1:] = ["--save", f"{folder}/{name}.pt"]
    runpy.run_path(f"{name}.py", run_name="__main__")
"""
"""Several scripts in one launch, as stock Horovod runs them."""


@pytest.fixture(autouse=True)
def horovod() -> None:
    pytest.importorskip("horovod.torch", reason="Horovod is not installed")


def ranks(*words: str, **changes: str) -> tuple[int, str]:
    """``hva run WORDS`` on two ranks: (exit status, all output)."""
    done = start([*TWO_RANKS, *HVA, "run", *words], **changes)
    return done.returncode, done.stdout + done.stderr


def lines_of(said: str) -> list[str]:
    return [line for line in said.splitlines() if "hva run:" in line]


def sums(said: str) -> list[tuple[int, int]]:
    """At the end of each optimizer: the bytes that a step sends, and those of dense gradients."""
    shares = r"\d+ % compute, \d+ % compression, \d+ % exposed communication"
    found = re.findall(rf"hva run: steps of [\d.]+ ms: {shares}; (.+) bytes sent \(dense: (.+)\)", said)
    return [(int(sent.replace(",", "")), int(dense.replace(",", ""))) for sent, dense in found]


# -------------------------------------------------------------------------------- scripts as they are


@pytest.mark.distributed
def test_unchanged_scripts_end_with_the_same_weights_as_with_stock_horovod(tmp_path: Path) -> None:
    import torch

    stock, ours = tmp_path / "stock", tmp_path / "ours"
    stock.mkdir()
    ours.mkdir()
    names = ",".join(EXAMPLES)
    command = [sys.executable, "-c", ALL_OF_THEM]
    done = start([*TWO_RANKS, *command, str(stock), names])
    assert done.returncode == 0, done.stderr
    status, said = ranks("--compression", "none", "--", *command, str(ours), names)
    assert status == 0, said
    line = "hva run: hvd.DistributedOptimizer is hvd_adaptive's: compression none"
    count = len(EXAMPLES)
    assert lines_of(said)[:count] == [line] * count
    assert [0 <= sent - dense < 64 for sent, dense in sums(said)] == [True] * count  # and a vote
    for name in EXAMPLES:
        expected, found = (torch.load(folder / f"{name}.pt") for folder in (stock, ours))
        assert [*expected] == [*found]
        assert all(torch.equal(expected[key], found[key]) for key in expected), name


@pytest.mark.distributed
def test_options_go_before_the_scripts_and_everything_else_is_passed_on(tmp_path: Path) -> None:
    """The script reduces in fp16, and splits the averaging; telemetry shows what was done."""
    status, said = ranks(
        "--compression", "qsgd:bits=4", "--override", "conv*=fp16", "--scheme", "two_shot",
        "--telemetry", str(tmp_path / "logs"), "--", "mnist.py",
        "--epochs", "3", "--fp16-allreduce", "--gradient-predivide-factor", "2",
    )  # fmt: skip
    assert status == 0, said
    [line] = [each for each in lines_of(said) if "DistributedOptimizer" in each]
    assert "compression qsgd:bits=4" in line
    [(sent, dense)] = sums(said)
    assert dense / 8 < sent < dense / 2
    assert "scheme two_shot" in line
    assert "(in the place of the script's fp16)" in line
    accuracy = float(re.findall(r"accuracy ([\d.]+)", said)[-1])
    assert accuracy > 0.8
    logged = "".join(path.read_text() for path in (tmp_path / "logs").rglob("*.jsonl"))
    assert "qsgd" in logged


@pytest.mark.distributed
def test_what_auto_decides_is_said_by_rank_0_or_by_the_scripts_own_logging() -> None:
    once_and_again = """
import logging, runpy, sys
sys.argv[1:] = ["--epochs", "3"]
runpy.run_path("mnist.py", run_name="__main__")
logging.basicConfig(format="own: %(message)s")
runpy.run_path("mnist.py", run_name="__main__")
"""
    status, said = ranks("--compression", "auto", "--", sys.executable, "-c", once_and_again)
    assert status == 0, said
    by_us = re.findall(r"hva run: step \d+: auto: .*", said)
    by_the_script = re.findall(r"own: step \d+: auto: .*", said)
    assert by_us
    assert by_the_script
    assert len(re.findall(r"step \d+: auto: ", said)) == len(by_us) + len(by_the_script)
    assert said.rindex(by_us[-1]) < said.index(by_the_script[0])


# ------------------------------------------------------------------------------ what one process shows


PROGRAM = """
import json, os, sys
print(json.dumps({
    "argv": sys.argv, "main": __name__, "path": os.environ.get("PYTHONPATH"),
    "left": "HVA_RUN" in os.environ, "hidden": os.environ.get("HIDDEN"),
}))
"""


def test_the_script_starts_as_without_the_command(tmp_path: Path) -> None:
    """Same arguments, same environment; a sitecustomize that was hidden is imported, too."""
    script, hidden = tmp_path / "script.py", tmp_path / "hidden"
    script.write_text(PROGRAM)
    hidden.mkdir()
    (hidden / "sitecustomize.py").write_text("import os\nos.environ['HIDDEN'] = 'found'\n")
    path = os.pathsep.join([str(ROOT), str(hidden)])
    done = hva(
        "run", "--", "python", "-u", str(script), "--compression", "x", "--", "y", PYTHONPATH=path
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "argv": [str(script), "--compression", "x", "--", "y"], "main": "__main__", "path": path,
        "left": False, "hidden": "found",
    }  # fmt: skip
    assert done.stderr == "hva run: replaced nothing: the script did not import horovod.torch\n"


def test_a_script_that_wants_horovod_where_there_is_none_hears_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "horovod.torch", raising=False)
    monkeypatch.delitem(sys.modules, "hvd_adaptive.optimizer", raising=False)
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setattr(sitecustomize, "find_spec", lambda name: None)
    substitutes = sitecustomize.Substitutes({})
    assert substitutes.find_spec("horovod", None) is None
    substitutes.report()
    assert capsys.readouterr().err.endswith("has no Horovod: 'hva install-horovod' builds it\n")


@pytest.mark.parametrize(
    ("loaded", "why"),
    [
        ([], "did not import horovod.torch"),
        (["horovod.torch"], "imported horovod.torch and did not call hvd.DistributedOptimizer"),
        (
            ["horovod.torch", "hvd_adaptive.optimizer"],
            "calls hvd_adaptive.DistributedOptimizer itself; its own arguments count",
        ),
    ],
)
@pytest.mark.parametrize("rank", ["0", "1"])
def test_why_nothing_was_replaced_is_said_by_rank_0(
    loaded: list[str],
    why: str,
    rank: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("horovod.torch", "hvd_adaptive.optimizer"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    for name in loaded:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", rank)
    sitecustomize.Substitutes({}).report()
    said = capsys.readouterr().err
    assert said == ("" if rank == "1" else f"hva run: replaced nothing: the script {why}\n")


def test_what_the_optimizer_refuses_is_one_line_and_status_2() -> None:
    """Started side by side, because most of the time is torch's import."""
    with ThreadPoolExecutor(2) as pool:
        spec = pool.submit(hva, "run", "--compression", "topkk", "--", "mnist.py")
        adasum = pool.submit(hva, "run", "--compression", "fp16", "--", "mnist.py", "--use-adasum")
    for done, named in (
        (spec.result(), ("topkk", "topk,")),
        (adasum.result(), ("op=Adasum combines whole gradients", "use op=Average")),
    ):
        assert done.returncode == 2
        [line] = lines_of(done.stderr)
        assert all(word in line for word in named), line
        assert "Traceback" not in done.stderr


def test_one_rank_is_told_that_it_sends_nothing() -> None:
    done = hva("run", "--", "mnist.py", "--epochs", "0", "--fp16-allreduce")
    assert done.returncode == 0, done.stderr
    assert lines_of(done.stderr) == [
        "hva run: hvd.DistributedOptimizer is hvd_adaptive's: compression fp16; one rank sends "
        "nothing: start it with horovodrun, mpirun or srun"
    ]


def test_a_python_without_this_package_says_so(tmp_path: Path) -> None:
    """Not stock Horovod without a word."""
    for name in ("horovod", "horovod/torch"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    other = tmp_path / "python"
    other.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    other.chmod(0o755)
    program = "import sys\nsys.modules['hvd_adaptive'] = None\nimport horovod.torch"
    path = os.pathsep.join([str(ROOT), str(tmp_path)])
    done = hva("run", "--", str(other), "-c", program, PYTHONPATH=path)
    assert done.returncode == 2
    assert "cannot import hvd_adaptive" in lines_of(done.stderr)[0]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "which script? Write 'hva run [OPTIONS] -- python train.py'"),
        (["--"], "which script?"),
        (["--compresion", "fp16", "--", "train.py"], "unrecognized arguments: --compresion"),
        (
            ["--dense-steps", "many", "--", "train.py"],
            "argument --dense-steps: invalid int value: 'many'",
        ),
        (["--override", "conv*", "--", "train.py"], "write PATTERN=SPEC, such as '*.bias=none'"),
        (["--niceness", "20", "--", "train.py"], "argument --niceness: invalid choice"),
        (
            ["--", "horovodrun", "-np", "2", "python", "train.py"],
            "write 'horovodrun -np 2 hva run [OPTIONS] -- python train.py'",
        ),
        (["--", "python", "-E", "train.py"], "Python's -E ignores PYTHONPATH"),
        (["--", "pyhton", "train.py"], "there is no command 'pyhton'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_command_line_is_refused_with_what_to_write(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from hvd_adaptive.commands import run_command

    try:
        status = run_command("run", words)
    except SystemExit as ended:
        status = int(str(ended.code))
    assert status == 2
    assert said in capsys.readouterr().err


def test_the_options_are_arguments_of_the_optimizer() -> None:
    import inspect

    from hvd_adaptive import DistributedOptimizer

    known = inspect.signature(DistributedOptimizer).parameters
    assert {name for name, *_ in run.OPTIONS} <= {*known}


def test_scripts_know_nothing_of_this_package() -> None:
    for script in SCRIPTS.glob("*.py"):
        assert "import hvd_adaptive" not in script.read_text()
