"""Why a plan of ``auto`` is the one: what it expects, what the limits were, and what came second."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping

from hvd_adaptive.planning.least_time import LEAST_GAIN, Contender, TimeLimits

__all__ = ["LastChoice", "chosen_by", "explain", "in_ms"]

_CHOSEN = "auto: "
"""How the line begins that says what was chosen."""


def explain(
    limits: TimeLimits,
    chosen: Contender,
    report: Mapping[str, float],
    accuracy: str,
    left: int | None = None,
) -> tuple[str, ...]:
    """Some lines of text.

    Args:
        limits: within which the plan was made.
        chosen: the plan.
        report: its delay and noise, and their limits.
        accuracy: name of the preset.
        left: steps before the end of the training run, where that is what bounds the delay.
    """
    bounds = (
        f"limits ({accuracy}): {_delay(report, left)}, noise {_percent(report['noise'])} of "
        f"{_percent(report['max_noise'])} of the gradient's own"
    )
    if chosen.dense:
        return (*_why_dense(limits, chosen, left), bounds)
    dense = limits.dense
    first = (
        f"{_CHOSEN}{_shares(limits, chosen)}; a step of {in_ms(chosen.seconds)} is foreseen, of which "
        f"{in_ms(chosen.parts.exposed)} exposed communication; "
        f"dense ({dense.name}) {in_ms(dense.seconds)}"
    )
    return first, bounds, _second(limits, chosen)


def chosen_by(reasons: Iterable[str]) -> str:
    """What :func:`explain` says was chosen, among a plan's other reasons; empty if it is not there.

    Example:
        >>> chosen_by(["compressed steps took 30 ms", "auto: left dense (fp16)"])
        'left dense (fp16)'
    """
    said = next((each for each in reasons if each.startswith(_CHOSEN)), "")
    return said.removeprefix(_CHOSEN)


class LastChoice:
    """What was chosen last, to tell another choice from the same one in other numbers.

    Example:
        >>> last = LastChoice()
        >>> last.news(["auto: left dense (fp16): a step of 16 ms is foreseen"])
        'left dense (fp16): a step of 16 ms is foreseen'
        >>> last.news(["auto: left dense (fp16): a step of 17.5 ms is foreseen"])
        ''
    """

    def __init__(self) -> None:
        self._kind = ""

    def news(self, reasons: Iterable[str]) -> str:
        """What was chosen, as :func:`chosen_by` finds it; empty if that is no other choice."""
        choice = chosen_by(reasons)
        kind = re.sub(r"[\d.]+", "", choice)
        if kind in ("", self._kind):
            return ""
        self._kind = kind
        return choice


def _delay(report: Mapping[str, float], left: int | None) -> str:
    """The delay and its limit, or why nothing may wait."""
    if left is not None and not report["max_delay"]:
        return f"no delay, because what waits could not be sent in the {left} steps that are left"
    used = f"delay {_percent(report['delay'])} of {_percent(report['max_delay'])} of the steps so far"
    return used if left is None else f"{used} (lowered, because {left} steps are left to send it)"


def _why_dense(limits: TimeLimits, chosen: Contender, left: int | None) -> tuple[str, ...]:
    first = (
        f"{_CHOSEN}left dense ({chosen.name}): a step of {in_ms(chosen.seconds)} is foreseen, of which "
        f"{_percent(chosen.parts.exposed_share)} exposed communication"
    )
    if limits.only_dense:
        return (f"{first}; a control window, to compare compressed steps with",)
    others = [each for each in limits.contenders if not each.dense]
    if not others and limits.admit:
        return (f"{first}; compressing any layer would take longer than it saves",)
    if not others and left is not None:
        return (f"{first}; {left} steps before the end the limits admit no compression any more",)
    if not others:
        return (f"{first}; the limits on delay and noise admit no compression yet",)
    saved = 1 - others[0].seconds / chosen.seconds
    if saved <= 0:
        return (f"{first}; the best compression ({others[0].name}) would {_slower(-saved)}",)
    return (
        f"{first}; compression ({others[0].name}) would save {_percent(saved)}, less than "
        f"{_percent(LEAST_GAIN)}",
    )


def _second(limits: TimeLimits, chosen: Contender) -> str:
    others = [each for each in limits.contenders if (each.choice != chosen.choice).any()]
    slower = others[0].seconds / chosen.seconds - 1
    if slower < 0:
        if others[0].cautious > chosen.cautious:
            why = "it counts on more overlap"
        else:
            more = limits.loss(others[0].choice) > limits.loss(chosen.choice)
            why = "it loses more" if more else "that is too little for another plan"
        faster = f"{_percent(-slower)} faster, but {why}"
        return f"second: {others[0].name}, {in_ms(others[0].seconds)}, {faster}"
    gap = f"; a better plan could save {_percent(chosen.gap)} of what layers cost" if chosen.gap else ""
    return f"second: {others[0].name}, {in_ms(others[0].seconds)}, {_percent(slower)} slower{gap}"


def _shares(limits: TimeLimits, chosen: Contender) -> str:
    """How many layers each compressor has."""
    pairs = zip(limits.model.specs, chosen.choice, strict=True)
    counts = Counter(specs[index] for specs, index in pairs)
    return ", ".join(f"{spec} on {count} layers" for spec, count in counts.most_common())


def _slower(share: float) -> str:
    """By what share a step is slower, as a verb."""
    return f"be {_percent(share)} slower" if share < 1 else f"take {1 + share:.2g} times as long"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 1 else f"{100 * share:.2g} %"


def in_ms(seconds: float) -> str:
    """As text, of three digits or all of its whole ones.

    Example:
        >>> in_ms(0.1234), in_ms(2.1234)
        ('123 ms', '2,123 ms')
    """
    return f"{1e3 * seconds:,.0f} ms" if seconds >= 0.9995 else f"{1e3 * seconds:.3g} ms"
