"""Messages: what is written can be read, and what is none is refused by name."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from hvd_adaptive.adaptation.messages import DecisionMessage, FailureMessage, Votes, from_json

DECISION = DecisionMessage(
    levels=((3, -1), (2, 0)),
    changed=True,
    factor=10.0,
    factors=(10.0, 20.0),
    report={"bytes": 12.5, "max_bytes": math.inf},
    reasons=("dense fits",),
    errors=((0.1, 0.0), (0.2, 0.3)),
    energies=((1.0, 2.0), (3.0, 4.0)),
)


@pytest.mark.parametrize("message", [DECISION, FailureMessage("ZeroDivisionError: nothing")])
def test_a_message_is_its_json(message: Any) -> None:
    text = message.to_json()
    assert from_json(text) == message
    assert from_json(text).to_json() == text


def test_a_decision_keeps_the_keys_that_checkpoints_hold() -> None:
    assert list(json.loads(DECISION.to_json())) == [
        "levels", "changed", "factor", "factors", "report", "reasons", "errors", "energies", "sums",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"levels": None}, "another type"),
        ({"errors": [[0.1, 0.0]]}, "as many rows of levels, errors and energies"),
        ({"levels": [], "errors": [], "energies": []}, "at least one"),
        ({"errors": [[0.1], [0.2, 0.3]]}, "a decision on 2 layers has 1 errors"),
        ({"extra": 1}, "check extra"),
    ],
)
def test_what_is_no_decision_is_refused(changed: dict[str, Any], message: str) -> None:
    fields = {**json.loads(DECISION.to_json()), **changed}
    with pytest.raises(ValueError, match=message):
        from_json(json.dumps(fields))


@pytest.mark.parametrize("text", ["", "{", "[]", '{"levels": [[0]]}'])
def test_what_is_no_message_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        from_json(text)


def test_votes_are_for_nothing_unless_said() -> None:
    assert Votes() == (False, False)
