"""Text that names a compressor, a feedback rule or a planner: a mistake in it says what to write."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest

from hvd_adaptive import compressors, feedback, planning
from hvd_adaptive.adaptation.candidates import short_spec

PARSERS: dict[str, Callable[[Any], Any]] = {
    "compressor": compressors.parse,
    "feedback": feedback.parse,
    "planner": planning.parse,
}

MISTAKES = [
    ("compressor", "", "unknown compressor '': there are none, "),
    ("compressor", " : ", "unknown compressor ''"),
    ("compressor", ",topk", "unknown compressor ',topk'"),
    ("compressor", "TopK", r"unknown compressor 'TopK' \(did you mean 'topk'\?\)"),
    ("compressor", "topk:", "topk: an option is missing in '': write topk:OPTION=VALUE"),
    ("compressor", "topk:,", "topk: an option is missing in ','"),
    ("compressor", "topk:density=0.1,", "topk: an option is missing in 'density=0.1,'"),
    ("compressor", "topk:density=0.1,,values=fp16", "topk: an option is missing"),
    ("compressor", "topk:=1", "topk has no option ''"),
    ("compressor", "topk:density", "topk: option 'density' needs a value: write density=VALUE"),
    ("compressor", "topk:density=", "topk: option 'density' needs a value"),
    ("compressor", "topk:density=0.1,density=0.2", "topk: option 'density' is given twice"),
    ("compressor", "topk:density=x", "topk: density='x' is not of type float"),
    ("compressor", "topk:density=nan", "topk: density=nan is not 0 and not a number of magnitude"),
    ("compressor", "topk:density=1e-300", "topk: density=1e-300 is not 0 and not a number"),
    ("compressor", "threshold:threshold=inf", "threshold: threshold=inf is not"),
    ("compressor", "threshold:threshold=-1", "threshold is the least magnitude"),
    ("compressor", "terngrad:clip=-inf", "terngrad: clip=-inf is not"),
    ("compressor", "qsgd:bits=4.5", "qsgd: bits='4.5' is not of type int"),
    ("compressor", "qsgd:bits=99999999999999999999", "qsgd: bits=99999999999999999999 is not"),
    ("compressor", "qsgd:block=" + "9" * 5000, "qsgd: block=.* is not of type int"),
    ("compressor", "powersgd:rank=-1", "powersgd: rank is at least 1"),
    ("compressor", "dgc:ramp=-1", "dgc: ramp is the number of steps"),
    ("compressor", "randomk:unbiased=1", "randomk: unbiased='1' must be true or false"),
    ("compressor", "alq:updates=1/x", "alq: updates='1/x' are no steps: write updates=100/2000"),
    ("feedback", "", "unknown feedback ''"),
    ("feedback", "ef:", "ef: an option is missing"),
    ("feedback", "ef:decay=nan", "ef: decay=nan is not"),
    ("feedback", "ef:decay=0", r"ef: decay must lie in \(0, 1\]"),
    ("feedback", "ef:decay=0.5,decay=0.5", "ef: option 'decay' is given twice"),
    ("feedback", "dgc:clip=inf", "dgc: clip=inf is not"),
    ("feedback", "dgc:momentum=nan", "dgc: momentum=nan is not"),
    ("planner", "", "unknown planner ''"),
    ("planner", "lgreco:period=200,", "lgreco: an option is missing"),
    ("planner", "lgreco:period=-1", "period=-1: write a number of steps, or 0"),
    ("planner", "lgreco:period=nan", "lgreco: period='nan' is not of type int"),
    ("planner", "lgreco:bins=0", "bins=0: write a number from 1 to 1,000,000"),
    ("planner", "lgreco:bins=100000000000", "bins=100000000000: write a number from 1"),
    ("planner", "kimad+:seconds=1,bins=-1", "bins=-1: write a number from 1"),
    ("planner", "lgreco:trials=-1", "trials=-1 must be at least 0"),
    ("planner", "kimad:seconds=inf", "kimad: seconds=inf is not"),
    ("planner", "kimad:seconds=nan", "kimad: seconds=nan is not"),
    ("planner", "kimad:seconds=0", "seconds=0.0: write the wanted time of a step, above 0"),
    ("planner", "kimad:seconds=1,warmup=99999999999999999999", "kimad: warmup=9+ is not"),
    ("planner", "gravac:window=0", "window=0 must be at least 1"),
    ("planner", "gravac:omega=nan", "gravac: omega=nan is not"),
    ("planner", "gravac:theta_max=inf", "gravac: theta_max=inf is not"),
    ("planner", "accordion:eta=inf", "accordion: eta=inf is not"),
    ("planner", "accordion:drop=nan", "accordion: drop=nan is not"),
    ("planner", "cgx:clusters=1", "clusters=1: write at least 2"),
]


@pytest.mark.parametrize(("kind", "text", "message"), MISTAKES, ids=lambda each: str(each)[:40])
def test_a_mistake_in_the_text_is_a_value_error_that_says_what_is_wrong(
    kind: str, text: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        PARSERS[kind](text)


@pytest.mark.parametrize("kind", PARSERS)
@pytest.mark.parametrize("given", [3, 1.5, b"topk", ["topk"], {"topk": 1}, True])
def test_what_is_no_text_is_a_type_error_that_says_what_to_write(kind: str, given: Any) -> None:
    wanted = {"compressor": "compression must be text", "feedback": "feedback must be text"}
    with pytest.raises(TypeError, match=wanted.get(kind, "planner must be text such as 'lgreco'")):
        PARSERS[kind](given)


def test_blanks_and_zeros_are_taken() -> None:
    assert compressors.parse(" topk : density = 0.05 , values=fp16 ") == compressors.TopK(0.05, "fp16")
    assert compressors.parse("terngrad:clip=0") == compressors.TernGrad()
    assert planning.parse("lgreco:period=0").period == 0


def test_what_is_written_is_what_users_write() -> None:
    quantizer = compressors.parse("qsgdinf:bits=4,correlated=true")
    assert short_spec(quantizer) == "qsgdinf:correlated=true"
    assert compressors.parse(compressors.format_spec(quantizer)) == quantizer


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        ("planning", "Facts", "PlanningInput"),
        ("planning", "Need", "Measurement"),
        ("planning", "StepFacts", "StepMeasurements"),
        ("planning", "Table", "CandidateTable"),
        ("feedback", "Kept", "LayerStates"),
        ("feedback", "Memory", "FeedbackState"),
        ("feedback", "Situation", "FeedbackContext"),
        ("compressors", "Batch", "LinearBatch"),
    ],
)
def test_a_name_that_was_renamed_still_works_and_warns(module: str, old: str, new: str) -> None:
    room = importlib.import_module(f"hvd_adaptive.{module}")
    with pytest.warns(
        DeprecationWarning, match=f"{old} was renamed: write hvd_adaptive.{module}.{new}"
    ):
        found = getattr(room, old)
    assert found is getattr(room, new)
    with pytest.raises(AttributeError, match="no attribute 'Nobody'"):
        _ = room.Nobody
