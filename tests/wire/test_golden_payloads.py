"""The bytes on the wire do not change by accident."""

from __future__ import annotations

import json

import pytest

from tests.wire.golden_payloads import GOLDEN, payloads

EXPECTED = json.loads(GOLDEN.read_text())


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, object]]:
    return payloads()


def test_every_registered_compressor_has_a_golden_payload(found: dict[str, dict[str, object]]) -> None:
    assert list(found) == list(EXPECTED)


@pytest.mark.parametrize("case", EXPECTED)
def test_a_payload_is_what_it_was(case: str, found: dict[str, dict[str, object]]) -> None:
    assert found[case] == EXPECTED[case]
