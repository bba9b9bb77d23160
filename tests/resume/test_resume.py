"""What a script of one's own stops, saves and resumes with, on ranks of torch.distributed.

Horovod's ranks are those of tests/launch/test_train.py and tests/slurm.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.resume.resume_rank import SIGNALED, STEPS
from tests.torch_distributed.launching import torchrun

RANK = Path(__file__).with_name("resume_rank.py")
PAGE = Path(__file__).parents[2] / "docs" / "batch-jobs.md"

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks found."""
    folder = tmp_path_factory.mktemp("resume")
    done = torchrun(2, RANK, folder)
    assert done.returncode == 0, done.stderr[-6000:]
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]


def test_a_signal_on_one_rank_stops_all_at_one_step_with_the_status_of_batch_systems(
    found: list[dict[str, Any]],
) -> None:
    first, second = (rank["stopped"] for rank in found)
    assert first == second
    assert SIGNALED < first["step"] < STEPS
    assert first["status"] == 75


def test_a_run_that_was_stopped_ends_bit_for_bit_as_one_that_was_not(
    found: list[dict[str, Any]],
) -> None:
    for rank in found:
        assert rank["resumed"]["from"] == rank["stopped"]["step"]
        assert rank["resumed"]["weights"] == rank["whole"]["weights"]
        assert (rank["whole"]["from"], rank["whole"]["status"]) == (0, 0)


def test_the_hook_of_ddp_is_saved_and_resumed_as_well(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank["hooked"]["first"] == rank["hooked"]["second"]


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("damaged", "resuming: rank 1: "),
        ("damaged", "it was cut short, changed or replaced"),
        ("other identity", "was written with model = 'small', but this run has 'another'"),
        ("no checkpoint", "no complete checkpoint in "),
        ("other options", "the ranks differ in rate: rank 0 has 0.1, rank 1 has 0.2"),
    ],
)
def test_what_is_wrong_on_one_rank_is_an_error_on_all_that_says_so(
    found: list[dict[str, Any]], case: str, said: str
) -> None:
    assert all(said in rank[case] for rank in found), found


def test_the_page_shows_the_script_that_the_tests_submit() -> None:
    shown = PAGE.read_text().partition("```python\n")[2].partition("```")[0]
    script = RANK.with_name("own_script.py").read_text()
    lines = [line.strip() for line in shown.splitlines() if line.strip()]
    assert len(lines) > 20
    assert [line for line in lines if line not in script] == []
