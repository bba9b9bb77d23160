"""What README, the pages in docs/ and docstrings say is so."""

from __future__ import annotations

import doctest
import functools
import importlib
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from launch.netlab.base import LabError
from tests import documents
from tests.documents import ROOT, Command

NEED_HOROVOD_STARTED = {"hvd_adaptive.optimizer", "hvd_adaptive.comm.startup"}
"""tests/distributed runs their examples."""
OF_EXAMPLES = ("means", "kimad-cgx")
"""Names that only examples in the pages register."""
PUBLIC = ("hvd_adaptive", "hvd_adaptive.compressors", "hvd_adaptive.planning", "hvd_adaptive.telemetry")
"""The modules whose ``__all__`` is promised to users."""


# -------------------------------------------------------------------------------------- examples


def modules_with_examples() -> list[str]:
    """Read from the sources: importing them all would take the kernels along."""
    found = []
    for path in sorted((ROOT / "hvd_adaptive").rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        if ">>> " in path.read_text() and name not in NEED_HOROVOD_STARTED:
            found.append(name)
    return found


MODULES = modules_with_examples()


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_in_docstrings_run(name: str) -> None:
    outcome = doctest.testmod(importlib.import_module(name), raise_on_error=False)
    assert outcome.attempted > 0
    assert outcome.failed == 0


@pytest.mark.parametrize(
    "page", [page for page in documents.PAGES if ">>> " in page.read_text()], ids=documents.name_of
)
def test_the_examples_in_a_page_run(page: Path) -> None:
    from hvd_adaptive import compressors, planning

    before = [(registry, dict(registry)) for registry in (compressors.REGISTRY, planning.REGISTRY)]
    try:
        outcome = doctest.testfile(str(page), module_relative=False)
    finally:
        for registry, members in before:
            registry.clear()
            registry.update(members)  # type: ignore[arg-type]
    assert outcome.attempted > 0
    assert outcome.failed == 0


def test_the_example_of_ones_own_compressor_is_short() -> None:
    lines = (ROOT / "docs" / "extending.md").read_text().splitlines()
    start = next(number for number, line in enumerate(lines) if "class Means" in line)
    stop = next(number for number, line in enumerate(lines) if "REGISTRY[" in line)
    assert stop - start <= 40


# --------------------------------------------------------------------------------------- figures


@pytest.fixture(scope="module")
def results_page() -> ModuleType:
    return importlib.import_module("benchmarks.report.results_page")


def test_the_page_of_results_shows_the_stored_figures(results_page: ModuleType) -> None:
    assert results_page.PAGE.read_text() == results_page.render(), (
        "run: python -m benchmarks.report.results_page"
    )


def test_the_page_of_results_opens_with_answers_that_lead_to_their_tables(
    results_page: ModuleType,
) -> None:
    text = results_page.PAGE.read_text()
    anchors = {results_page.slug(each) for each in re.findall(r"^##+ (.+)$", text, re.MULTILINE)}
    opening = text[text.index("## Answers") : text.index("## Training on slow networks")]
    links = re.findall(r"\]\(#([^)]+)\)", opening)
    assert set(links) <= anchors
    lines = [line for line in opening.splitlines() if re.match(r"\d+\. \*", line)]
    known = [each for each in results_page.ANSWERS if f"### {each}\n" in text]
    assert len(lines) == len(known) >= 9


def test_a_claim_is_judged_by_its_weakest_and_its_best_figure() -> None:
    claim = importlib.import_module("benchmarks.report.results_papers").Claim

    def verdict(better: str, *ours: float) -> str:
        return str(
            claim(
                "", "", (2.0, 4.0) if better == "more" else (0.2, 0.5), ours, "", "", "", better
            ).verdict
        )

    assert verdict("more", 2.0, 9.0) == "reproduced"
    assert verdict("more", 0.5, 2.5) == "partly"
    assert verdict("more", 1.1, 1.9) == "weaker"
    assert verdict("more", 0.9, 1.9) == "not"
    assert verdict("less", 0.5, 0.1) == "reproduced"
    assert verdict("less", 0.9) == "weaker"
    assert verdict("less", 1.1) == "not"


def test_every_table_of_results_stands_below_its_question_and_answer(results_page: ModuleType) -> None:
    text = results_page.PAGE.read_text()
    parts = re.split(r"^### ", text, flags=re.M)[1:]
    assert len(parts) > 30
    for part in parts:
        heading, paragraph, table = part.split("\n\n")[:3]
        assert re.fullmatch(r"\*[^*]+\?\* \S.*", paragraph), heading
        assert table.startswith("| "), heading
    tables = re.findall(r"^\| --- ", text, flags=re.M)
    assert len(tables) == len(parts)


def test_the_figures_in_pages_are_those_stored(results_page: ModuleType) -> None:
    used = []
    for page in results_page.pages():
        text = page.read_text()
        assert results_page.filled(text) == text, (
            f"{page.name} is stale: run python -m benchmarks.report.results_page"
        )
        used += [found[2] for found in results_page.FRAGMENT.finditer(text)]
    assert set(used) == set(results_page.FRAGMENTS)


def test_the_figures_in_prose_hold() -> None:
    from benchmarks.network import training_tables as tables

    cells = importlib.import_module("benchmarks.report.results_markdown").load("training")["cells"]
    performance = (ROOT / "docs/performance.md").read_text()
    steps = [
        tables.ratio(cells, model, rate, method, tables.COMPUTE_ONLY)
        for model, methods in {"lstm": ("topk", "topk-sign"), "mlp": ("topk",)}.items()
        for method in methods
        for rate in tables.RATES
    ]
    assert f"a top-k step takes {min(steps):.1f} to {max(steps):.1f} times" in performance
    fastest = tables.ratio(cells, "lstm", tables.TARGET_RATE, "topk-sign", tables.COMPUTE_ONLY)
    assert f"{fastest:.2f} in the fastest" in performance
    costs = [
        tables.step_of(cells, "lstm", "powersgd", rate)["costs"]
        for rate in ("200mbit", "1gbit", "unshaped")
    ]
    shares = [100 * (each["compress"] + each["decompress"]) / each["total"] for each in costs]
    assert f"PowerSGD spends {min(shares):.0f} to {max(shares):.0f} % of the LSTM's" in performance
    dense, topk = (
        tables.mean_curve(list(tables.runs_of(cells, "transformer", name).values()))
        for name in ("stock-fp32", "topk")
    )
    after = next(each["perplexity"] for each in dense if each["step"] == 60)
    assert topk[-1]["step"] == 300
    assert topk[-1]["perplexity"] > after
    assert "is not yet where dense training is after 60" in performance


def test_readme_is_short() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 150
    assert len(text.encode()) <= 12 * 1024


# ------------------------------------------------------------------------------- specs and links


def readers() -> dict[str, Callable[[str], Any]]:
    from hvd_adaptive import compressors, feedback, planning

    return {
        "compression": lambda spec: (
            planning.parse(spec) if spec.startswith("auto") else compressors.parse(spec)
        ),
        "feedback": feedback.parse,
        "planner": planning.parse,
    }


@pytest.mark.parametrize("option", ["compression", "feedback", "planner"])
def test_every_spec_in_the_pages_is_one(option: str) -> None:
    read = readers()[option]
    found = [spec for spec in documents.specs(option) if not spec.startswith(OF_EXAMPLES)]
    assert found
    for spec in found:
        read(spec)


def test_every_name_with_options_in_the_pages_can_be_read() -> None:
    from hvd_adaptive import compressors, feedback, planning

    found = [text for text in documents.code_words() if not text.startswith(OF_EXAMPLES)]
    assert len(found) > 20
    for text in found:
        # "dgc" is a compressor and a feedback rule
        assert any(_reads(kind.parse, text) for kind in (compressors, feedback, planning)), text


def _reads(parse: Callable[[str], Any], text: str) -> bool:
    try:
        parse(text)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("page", documents.PAGES, ids=documents.name_of)
def test_links_in_a_page_lead_somewhere(page: Path) -> None:
    for _, target in (each for each in documents.links() if each[0] == page):
        path, _, anchor = target.partition("#")
        place = (page.parent / path).resolve() if path else page
        assert place.exists(), f"{page.name}: {target}"
        assert not anchor or anchor in documents.anchors(place), f"{page.name}: {target}"


@pytest.mark.parametrize("module", PUBLIC)
def test_every_public_name_has_a_place_in_the_api_pages(module: str) -> None:
    pages = "\n".join(page.read_text() for page in (ROOT / "docs" / "api").glob("*.md"))
    documented = set(re.findall(r"^::: (\S+)$", pages, re.M))
    names = importlib.import_module(module).__all__
    missing = {f"{module}.{name}" for name in names} - documented
    assert not missing


def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="mkdocs is not installed")
    pytest.importorskip("mkdocstrings", reason="mkdocstrings is not installed")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path / "site"],
        cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    api = (tmp_path / "site" / "api" / "optimizer" / "index.html").read_text()
    assert "named_parameters" in api
    home = (tmp_path / "site" / "index.html").read_text()
    assert not re.search(r'(?:src|href)="(?:https?:)?//[^"]*\.(?:js|css|woff2?)"', home)


# --------------------------------------------------------------------------------- command lines


COMMANDS = list(documents.commands())


def train_options(words: list[str]) -> None:
    """Let train.py read its options; it ends the process where it does not know one."""
    from launch.training import options

    try:
        options.parse(words)
    except SystemExit as ended:
        pytest.fail(f"train.py refuses {words}: status {ended.code}")


def check_run(words: list[str]) -> None:
    """launch/run.sh: what it would start, and train.py's options."""
    if "--help" in words:
        return
    done = subprocess.run(
        [ROOT / "launch" / "run.sh", "--dry-run", *words], capture_output=True, text=True, timeout=60,
        env={**os.environ, "VIRTUAL_ENV": sys.prefix}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    train_options(done.stdout.split("train.py", 1)[1].split())


def check_python(words: list[str]) -> None:
    """A script or module with options that its help names."""
    if words[0] == "-m":
        module, rest = words[1], words[2:]
        if module == "pytest":
            for file in (word for word in rest if "/" in word):
                assert (ROOT / file).exists(), file
        elif module in ("mkdocs", "mypy", "ruff"):
            assert rest[:1] in ([], ["build"], ["check"])
        elif module.startswith(("benchmarks.", "hvd_adaptive.commands.", "launch.packages.")):
            assert importlib.util.find_spec(module), module
            check_options(module, rest)
        else:
            assert importlib.util.find_spec(module), module
            assert not rest
        return
    script, rest = words[0], words[1:]
    if script == "launch/train.py":
        train_options(rest)
        return
    if script in ("train.py", "my.py", "elastic.py"):  # the reader's own
        return
    assert (ROOT / script).exists(), script
    # A benchmark is a module; no other script here has options to look at.
    assert not any(word.startswith("--") for word in rest), rest


def check_options(module: str, rest: list[str]) -> None:
    """A benchmark's options are those that its help names."""
    wanted = [word.partition("=")[0] for word in rest if word.startswith("--")]
    if not wanted:
        return
    shown = help_of(module)
    unknown = [word for word in wanted if not re.search(rf"{re.escape(word)}\b", shown)]
    if "train.py's options" in shown:
        start = next((i for i, word in enumerate(rest) if word in unknown), len(rest))
        train_options(rest[start:])
    else:
        assert not unknown, f"{module} does not know {unknown}"


@functools.cache
def help_of(module: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", module, "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stdout


def check_sbatch(words: list[str]) -> None:
    """A batch script of ours, and train.py's options after it, or those of the reader's own."""
    place = next(index for index, word in enumerate(words) if not word.startswith("-"))
    own = words[place].startswith("slurm/")  # as "hva slurm" writes them
    script = ROOT / ("launch" if own else ".") / words[place]
    assert script.exists(), words[place]
    assert words[place].endswith(".sbatch")
    if not own:
        train_options(words[place + 1 :])


def check_bash(words: list[str]) -> None:
    """A batch script that shows its manual."""
    script, *rest = words
    assert rest == ["--help"]
    check_sbatch([script.removeprefix("launch/")])


def check_launcher(words: list[str]) -> None:
    """horovodrun or mpirun: what it starts."""
    if "hva" in words:
        check_hva(words[words.index("hva") + 1 :])
    elif "python" in words:
        check_python(words[words.index("python") + 1 :])


def check_torchrun(words: list[str]) -> None:
    """The number of ranks, and the script that they run."""
    assert words[0] == "--nproc-per-node"
    assert words[1].isdigit()
    check_python(words[2:])


def check_netlab(words: list[str]) -> None:
    from launch.netlab import main as netlab

    if words != ["--help"]:
        netlab.parse(words)


def check_shell_script(script: str, words: list[str]) -> None:
    """A script of ours: the options that its head names, and files that are there."""
    head = (ROOT / script).read_text()
    for word in words:
        if word.startswith("-"):
            assert re.search(rf"(?<![\w-]){re.escape(word)}\b", head), f"{script}: {word}"
        elif "/" in word:
            assert (ROOT / word).exists(), word
        else:  # a benchmark's name
            assert list((ROOT / script).parent.glob(f"*/{word}.py")), word


def check_hva(words: list[str]) -> None:
    """The command's name and options, and what ``hva run`` and ``hva predict`` would start."""
    from hvd_adaptive.commands import COMMANDS, parse_command
    from hvd_adaptive.commands.run import command_of

    if words[0] == "--help":
        return
    assert words[0] in COMMANDS, words[0]
    if words in (["run"], ["predict"]):  # its name, in a sentence
        return
    try:
        _, options = parse_command(words[0], words[1:])
    except SystemExit as ended:
        pytest.fail(f"hva refuses {words}: status {ended.code}")
    if words[0] in ("run", "predict") and options.command:
        started = command_of([word for word in options.command if word != "--"])
        check_python(started[1:])


def check_pip(words: list[str]) -> None:
    """pip, and this clone."""
    assert words == ["install", "."]


CHECKS = {
    "hva": check_hva,
    "python": check_python,
    "launch/run.sh": check_run,
    "launch/train.py": train_options,
    "launch/netlab.sh": check_netlab,
    "sbatch": check_sbatch,
    "bash": check_bash,
    "horovodrun": check_launcher,
    "mpirun": check_launcher,
    "pip": check_pip,
    "torchrun": check_torchrun,
}


def check(command: Command) -> None:
    """Fails where a command line could not be run as it stands."""
    program, *words = command.words
    if program == "export":
        assert all(re.fullmatch(r"\w+=\S+", word) for word in words)
    elif program in CHECKS:
        CHECKS[program](words)
    else:
        assert os.access(ROOT / program, os.X_OK), f"{program} is no script of this repository"
        check_shell_script(program, words)


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_a_command_line_in_a_page_is_one(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rates.csv").write_text("0,200mbit\n")  # the reader's own
    monkeypatch.chdir(tmp_path)
    check(command)


@pytest.mark.parametrize(
    "wrong",
    [
        "launch/run.sh -np x",
        "launch/run.sh --compression topkk",
        "launch/tests.sh",
        "launch/test.sh tests/test_nothing.py",
        "launch/netlab.sh upp 4 200mbit",
        "python -m benchmarks.micro.kernels --quik",
        "python -m benchmarks.micro.nothing",
        "benchmarks/run_all.sh nothing",
        "python -m benchmarks.accuracy.virtual_training --virtual-ranks 4 --stepss 3",
        "python -m hvd_adaptive.nothing",
        "hva docter",
        "hva doctor --jsn",
        "horovodrun -np 2 hva run --compresion fp16 -- python train.py",
        "sbatch launch/slurm/nothing.sbatch",
        "sbatch launch/slurm/train.sbatch --presett lstm-sotu",
        "horovodrun -np 2 python launch/train.py --densitty 1",
        "torchrun --nproc-per-node 2 launch/nothing.py",
    ],
)
def test_a_wrong_command_line_would_be_found(wrong: str) -> None:
    with pytest.raises((AssertionError, LabError, pytest.fail.Exception)):
        check(Command("nowhere", tuple(wrong.split())))


def test_every_benchmark_is_described_with_its_question() -> None:
    folder = ROOT / "benchmarks"
    listed = re.search(r"^names=\(([^)]*)\)", (folder / "run_all.sh").read_text(), re.M)
    assert listed is not None
    described = re.findall(r"^\| `\w+/(\w+)\.py` \|", (folder / "README.md").read_text(), re.M)
    assert {*listed[1].split()} <= {*described}
    assert all(list(folder.glob(f"*/{name}.py")) for name in described)


def test_pages_hold_command_lines_of_every_kind() -> None:
    assert {*CHECKS} - {command.words[0] for command in COMMANDS} <= {"mpirun"}
