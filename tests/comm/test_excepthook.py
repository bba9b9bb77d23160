"""What a rank that fails says: one of them in full, the others in a line."""

from __future__ import annotations

import pytest

pytest.importorskip("horovod.torch", reason="Horovod is not installed")

from hvd_adaptive.comm import watchdog
from hvd_adaptive.comm.excepthook import last_words
from hvd_adaptive.comm.failure import told_by, told_here


@pytest.fixture
def another_failed_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "failed", lambda what: watchdog.Event(1, "failed: ValueError: bad"))


@pytest.mark.usefixtures("another_failed_first")
def test_of_ranks_that_raise_for_one_reason_the_one_that_has_it_says_it_in_full() -> None:
    words, in_full = last_words(0, told_here(ValueError("bad")))
    assert in_full
    assert words == "hvd_adaptive: rank 0 failed, and the others end with it: ValueError: bad\n"
    words, in_full = last_words(1, told_by("rank 0", ValueError("bad")))
    assert not in_full
    assert words == "hvd_adaptive: rank 1 failed as well as rank 0, which says more: ValueError: bad\n"


@pytest.mark.usefixtures("another_failed_first")
def test_a_rank_that_fails_for_a_reason_of_its_own_names_the_one_that_failed_first() -> None:
    words, in_full = last_words(2, ValueError("worse"))
    assert not in_full
    assert words.startswith("hvd_adaptive: rank 2 failed as well as rank 1")
