"""What ``hva predict`` answers: a table, where compression pays, and what auto would do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hvd_adaptive.adaptation.prediction import MOST_RANKS, AutoForecast, Method, Predicted, Predictor
from hvd_adaptive.adaptation.step_trace import StepTrace
from hvd_adaptive.planning.explanation import chosen_by

__all__ = ["Answer", "Question", "answer", "check_ranks"]

MULTIPLES = (1, 2, 4, 8, 16)
BEYOND = "*"
"""Marks what loses more than the limits on delay and noise allow."""


@dataclass(frozen=True, slots=True)
class Question:
    """What is to be predicted.

    Args:
        ranks: of each column; empty takes :data:`MULTIPLES` of those of the trace.
        rate: bits per second of the hosts' links; None leaves them as they are.
        traced_rate: the same of those on which steps were measured; None does not know.
        at_step: steps that training has taken when ``auto`` plans: its limit on delay grows with them.
        total_steps: of the whole training run; 0 where that is not known.
    """

    ranks: tuple[int, ...] = ()
    rate: float | None = None
    traced_rate: float | None = None
    at_step: int = 1000
    total_steps: int = 0


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer as text, and as JSON with the trace that it is from."""

    text: str
    record: dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Row:
    """A line of the table."""

    method: Method
    scheme: str
    cells: tuple[Predicted, ...]
    beyond: bool


def answer(trace: StepTrace, question: Question) -> Answer:
    """Predict. Cost: some seconds for 161 layers.

    Args:
        trace: of dense steps.
        question: what is wanted.

    Raises:
        ValueError: ranks that do not fill hosts, or a trace that cannot be predicted from.
    """
    predictor = Predictor(trace, question.rate, question.traced_rate)
    check_ranks(question.ranks, trace.ranks_per_host)
    ranks = question.ranks or tuple(multiple * trace.ranks for multiple in MULTIPLES)
    autos = [predictor.auto(each, question.at_step, question.total_steps) for each in ranks]
    rows = list(_rows(predictor, ranks, autos[0]))
    pays = [
        (method.name, scheme, predictor.pays(method, scheme))
        for method in predictor.methods
        for scheme in method.schemes
        if not method.dense
    ]
    parts = [
        _heading(predictor),
        *_notes(predictor),
        "",
        *_table(ranks, rows, autos),
        "",
        *_pays(pays),
        "",
        f"auto, {question.at_step:,} steps into training:",
        *(
            f"  {number:>5} ranks  {chosen_by(found.reasons)}"
            for number, found in zip(ranks, autos, strict=True)
        ),
    ]
    record = {
        "trace": trace.to_dict(),
        "question": asdict(question),
        "ranks": list(ranks),
        "rows": [
            {"method": row.method.name, "scheme": row.scheme, "within limits": not row.beyond}
            | {"seconds": [asdict(each) for each in row.cells]}
            for row in rows
        ],
        "auto": [
            {"seconds": asdict(found.predicted), "compresses": found.compresses}
            | {"reasons": list(found.reasons)}
            for found in autos
        ],
        "pays": [{"method": name, "scheme": scheme, "ranks": found} for name, scheme, found in pays],
    }
    return Answer("\n".join(parts), record)


def check_ranks(ranks: Sequence[int], ranks_per_host: int) -> None:
    """ValueError unless these ranks fill hosts."""
    for number in ranks:
        if number < 2 or number % ranks_per_host:
            raise ValueError(
                f"{number} ranks: write at least 2, and multiples of {ranks_per_host}, as many as each "
                "host has"
            )


def _rows(predictor: Predictor, ranks: Sequence[int], auto: AutoForecast) -> Iterator[_Row]:
    limits = auto.limits
    for method in predictor.methods:
        delay, noise = limits.weighed(method.choice)
        beyond = delay > limits.max_delay or noise > limits.max_noise
        for scheme in method.schemes:
            cells = tuple(predictor.seconds(method.choice, number, scheme) for number in ranks)
            yield _Row(method, scheme, cells, beyond and not method.dense)


# --- text -----------------------------------------------------------------------------------------


def _heading(predictor: Predictor) -> str:
    trace = predictor.trace
    where = f"{trace.ranks} ranks on {trace.hosts} host{'s' * (trace.hosts > 1)}"
    if not trace.dense.seconds:
        return f"hva predict: {where}, assumed"
    (low, _), (seconds, computing), (high, _) = map(trace.dense.quantiles, (0.25, 0.5, 0.75))
    return (
        f"hva predict: {where}, {len(trace.dense.seconds)} dense steps of {_ms(seconds)} ms "
        f"({_ms(low)} to {_ms(high)}), of which {_ms(max(0.0, seconds - computing))} ms exposed "
        "communication"
    )


def _notes(predictor: Predictor) -> Iterator[str]:
    trace = predictor.trace
    yield f"network: {trace.measured.link}"
    if not trace.measured.assumed:
        factor = predictor.network_factor
        yield f"in training it takes {factor:.2g} x as long as these operations by themselves"
    if predictor.rate is not None:
        traced = predictor.traced_rate
        told = "" if traced is None else f", {_mbit(traced)} in these steps"
        yield f"links between hosts: {_mbit(predictor.rate)}, as asked for{told}"
    elif trace.hosts == 1:
        yield (
            "note: all ranks were on one host; links between hosts are taken to be as fast: write "
            "--rate, such as --rate 10gbit"
        )


def _mbit(rate: float) -> str:
    return f"{rate / 1e6:,.6g} Mbit/s"


def _table(ranks: Sequence[int], rows: Sequence[_Row], autos: Sequence[AutoForecast]) -> Iterator[str]:
    """Milliseconds of a step, with their ranges; compressors in the order in which they were named."""
    lines = [["ms per step", "", *(f"{number} ranks" for number in ranks)]]
    lines += [
        [row.method.name + BEYOND * row.beyond, row.scheme, *map(_cell, row.cells)] for row in rows
    ]
    lines.append(["auto", "", *(_cell(found.predicted) for found in autos)])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        yield "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
    if any(row.beyond for row in rows):
        yield f"{BEYOND} loses more than auto's limits on delay and noise allow at this step"


def _cell(found: Predicted) -> str:
    return f"{_ms(found.seconds)} ({_ms(found.low)}-{_ms(found.high)})"


def _pays(pays: Sequence[tuple[str, str, list[tuple[int, int]]]]) -> Iterator[str]:
    yield "at least 2 % faster than the fastest dense step:"
    widths = [max(len(row[column]) for row in pays) for column in (0, 1)] if pays else []
    for name, scheme, stretches in pays:
        said = ", ".join(map(_stretch, stretches)) or "never"
        yield f"  {name.ljust(widths[0])}  {scheme.ljust(widths[1])}  {said}"


def _stretch(found: tuple[int, int]) -> str:
    first, last = found
    return f"from {first} ranks on" if last >= MOST_RANKS else f"{first} to {last} ranks"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g}" if seconds < 1 else f"{1e3 * seconds:.0f}"
