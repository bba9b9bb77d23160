"""The launcher tells the truth about tests that fail, hang, die, or differ between ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.harness import rank_launcher
from tests.harness.rank_launcher import DISTRIBUTED, ROOT, Function, Launch, Verdict, functions_in, run

pytest.importorskip("horovod.torch", reason="Horovod is not installed")
pytest.importorskip("mpi4py", reason="mpi4py is not installed")

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

CASES = DISTRIBUTED / "harness_cases"


def run_case(
    name: str, folder: Path, size: int = 2, timeout: float = 60.0
) -> tuple[dict[str, Verdict], list[Launch]]:
    functions = [function for function in functions_in(CASES / name) if function.runs_at(size)]
    verdicts, launches = run(size, functions, folder, timeout)
    return {nodeid.partition("::")[2]: verdict for nodeid, verdict in verdicts.items()}, launches


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Verdict]:
    verdicts, launches = run_case("mixed.py", tmp_path_factory.mktemp("mixed"))
    assert len(launches) == 1
    assert launches[0].trouble() is None
    return verdicts


def test_a_test_that_passes_on_all_ranks_has_no_problems(mixed: dict[str, Verdict]) -> None:
    assert mixed["test_passes_everywhere"].problems == []
    assert mixed["test_passes_everywhere"].skipped is None


def test_a_failure_names_its_rank_and_shows_the_assertion_and_the_output(
    mixed: dict[str, Verdict],
) -> None:
    problems = mixed["test_fails_everywhere"].problems
    assert len(problems) == 2
    for rank, problem in enumerate(problems):
        assert f"test_fails_everywhere on rank {rank} failed" in problem
        assert f"AssertionError: rank {rank} fails on purpose" in problem
        assert f"printed by rank {rank}" in problem


def test_a_failure_on_one_rank_for_one_parameter_is_a_failure_that_names_both(
    mixed: dict[str, Verdict],
) -> None:
    (problem,) = mixed["test_fails_on_the_last_rank_for_one_parameter"].problems
    assert "test_fails_on_the_last_rank_for_one_parameter[2] on rank 1 failed" in problem
    assert "only the last rank says so" in problem


def test_an_operation_left_behind_by_a_failure_does_not_disturb_the_next_test(
    mixed: dict[str, Verdict],
) -> None:
    (problem,) = mixed["test_leaves_an_operation_behind_on_rank_0_and_fails"].problems
    assert "on rank 0 failed" in problem
    assert mixed["test_uses_the_name_that_was_left_behind"].problems == []


def test_a_skip_on_all_ranks_is_a_skip_and_on_one_rank_a_failure(mixed: dict[str, Verdict]) -> None:
    assert "for a reason" in (mixed["test_skips_everywhere"].skipped or "")
    assert mixed["test_skips_everywhere"].problems == []
    assert mixed["test_skips_on_rank_1_only"].skipped is None
    (problem,) = mixed["test_skips_on_rank_1_only"].problems
    assert "skipped on rank(s) [1] only" in problem


def test_an_expected_failure_passes(mixed: dict[str, Verdict]) -> None:
    assert mixed["test_fails_as_expected"].problems == []


def test_a_fixture_that_fails_on_one_rank_is_a_failure_in_setup(mixed: dict[str, Verdict]) -> None:
    (problem,) = mixed["test_has_a_fixture_that_fails_on_rank_1"].problems
    assert "on rank 1 failed in setup" in problem
    assert "the fixture is broken here" in problem


def test_a_test_for_another_number_of_ranks_is_not_run(mixed: dict[str, Verdict]) -> None:
    assert "test_is_for_three_ranks" not in mixed


def test_a_hang_shows_the_stack_of_every_rank_and_the_tests_after_it_still_run(
    tmp_path: Path,
) -> None:
    verdicts, launches = run_case("hanging.py", tmp_path, timeout=8.0)
    assert len(launches) == 2
    assert verdicts["test_before"].problems == []
    assert verdicts["test_after"].problems == []
    waiting, failing = verdicts[
        "test_rank_0_waits_for_a_collective_that_the_others_never_join"
    ].problems
    assert "on rank 0 did not finish" in waiting
    assert "in synchronize" in waiting
    assert "hanging.py" in waiting
    assert "on rank 1 failed" in failing
    assert "did not join" in failing
    assert "_wait_for" in launches[0].stacks[1]


def test_a_rank_that_is_killed_fails_its_test_and_the_tests_after_it_still_run(
    tmp_path: Path,
) -> None:
    verdicts, launches = run_case("dying.py", tmp_path)
    assert len(launches) == 2
    problems = verdicts["test_rank_1_is_killed"].problems
    assert any("on rank 1 did not finish" in problem for problem in problems)
    assert any("signal 9" in problem for problem in problems)
    assert verdicts["test_after"].problems == []


def test_ranks_that_collect_different_tests_fail_and_the_difference_is_named(
    tmp_path: Path,
) -> None:
    verdicts, launches = run_case("diverging.py", tmp_path)
    assert len(launches) == 1
    (problem,) = verdicts["test_on_every_rank"].problems
    assert "rank 1 misses" in problem
    assert "test_on_rank_0_only" in problem


def test_a_file_that_one_rank_cannot_import_fails_and_shows_the_error(tmp_path: Path) -> None:
    verdicts, launches = run_case("broken.py", tmp_path)
    assert len(launches) == 1
    (problem,) = verdicts["test_never_runs"].problems
    assert "rank 1 could not collect" in problem
    assert "broken on rank 1" in problem


def test_without_a_launcher_the_same_files_run_in_one_process(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += [f"{CASES / 'mixed.py'}::test_passes_everywhere", f"--basetemp={tmp_path / 't'}"]
    shown = subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env={name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")},
    )
    assert shown.returncode == 0, shown.stdout + shown.stderr
    assert "1 passed" in shown.stdout


def test_a_plain_run_of_the_tests_leaves_the_distributed_folder_to_the_launcher() -> None:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    others = [path for path in (ROOT / "tests").iterdir() if path.is_dir() and path != DISTRIBUTED]
    command += ["tests", "--ignore-glob=tests/test_*", *(f"--ignore={path}" for path in others)]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert "tests/distributed" not in shown.stdout
    assert shown.returncode == pytest.ExitCode.NO_TESTS_COLLECTED, shown.stdout


def test_test_functions_and_their_markers_are_read_without_importing(tmp_path: Path) -> None:
    file = ROOT / "tests" / "distributed" / "harness_cases" / "mixed.py"
    by_name: dict[str, Function] = {function.name: function for function in functions_in(file)}
    assert by_name["test_is_for_three_ranks"].sizes == (3,)
    assert by_name["test_passes_everywhere"].sizes is None
    assert len(by_name) == 10
    classes = tmp_path / "test_classes.py"
    classes.write_text("class TestIt:\n    def test_a(self): ...\n")
    with pytest.raises(ValueError, match="not classes"):
        functions_in(classes)


def test_a_launch_ends_when_the_test_that_waits_for_it_is_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would run on beside the next one, for which all time limits are meant."""
    pid = tmp_path / "pid"
    endless = ["sh", "-c", f"sleep 600 & echo $! > {pid}.new; mv {pid}.new {pid}; wait"]
    monkeypatch.setattr(rank_launcher, "horovodrun", lambda size: endless)

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    def interrupt_once_it_runs() -> None:
        while not pid.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGUSR2)

    previous = signal.signal(signal.SIGUSR2, interrupt)
    threading.Thread(target=interrupt_once_it_runs, daemon=True).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            run_case("mixed.py", tmp_path)
    finally:
        signal.signal(signal.SIGUSR2, previous)
    end = time.monotonic() + 10
    while rank_launcher.lives(int(pid.read_text())) and time.monotonic() < end:
        time.sleep(0.01)
    assert not rank_launcher.lives(int(pid.read_text()))
