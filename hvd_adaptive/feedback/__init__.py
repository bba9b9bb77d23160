"""The feedback rules, by name: what happens to what compression left out.

A new member is one module and one row of ``REGISTRY``. See :mod:`hvd_adaptive.feedback.base`.
"""

from __future__ import annotations

from collections.abc import Mapping

from hvd_adaptive import specs
from hvd_adaptive.deprecation import renamed
from hvd_adaptive.feedback.base import (
    RESIDUAL,
    Feedback,
    FeedbackContext,
    FeedbackState,
    LayerStates,
    copied,
    split,
)
from hvd_adaptive.feedback.ef21 import EF21, EF21SGDM
from hvd_adaptive.feedback.error_feedback import ErrorFeedback
from hvd_adaptive.feedback.momentum_correction import MomentumCorrection
from hvd_adaptive.feedback.none import NoFeedback

__all__ = [
    "EF21",
    "EF21SGDM",
    "REGISTRY",
    "RESIDUAL",
    "ErrorFeedback",
    "Feedback",
    "FeedbackContext",
    "FeedbackState",
    "LayerStates",
    "MomentumCorrection",
    "NoFeedback",
    "copied",
    "format_rule",
    "parse",
    "split",
]

REGISTRY: Mapping[str, type[Feedback]] = {
    rule.name: rule for rule in (NoFeedback, ErrorFeedback, EF21, EF21SGDM, MomentumCorrection)
}


def parse(spec: str | Feedback | None) -> Feedback | None:
    """Make a rule of ``"name"`` or ``"name:option=value"``; None stays None.

    Raises:
        ValueError: unknown name or option, or a value that does not fit.
        TypeError: not a specification of a rule.

    Example:
        >>> parse("ef:dtype=bf16")
        ErrorFeedback(decay=1.0, dtype='bf16', lr_correction=False)
    """
    if spec is None or isinstance(spec, Feedback):
        return spec
    if not isinstance(spec, str):
        raise TypeError(f"feedback must be text such as 'ef' or 'ef:decay=0.9', or None, got {spec!r}")
    return specs.read("feedback", REGISTRY, spec)


def format_rule(rule: Feedback) -> str:
    """The text that :func:`parse` reads back as an equal rule: its name, and what is not default.

    Example:
        >>> format_rule(ErrorFeedback()), format_rule(ErrorFeedback(decay=0.9))
        ('ef', 'ef:decay=0.9')
    """
    return specs.write(rule.name, rule, defaults=False)


__getattr__ = renamed(
    __name__,
    {
        "Kept": "hvd_adaptive.feedback.LayerStates",
        "Memory": "hvd_adaptive.feedback.FeedbackState",
        "Situation": "hvd_adaptive.feedback.FeedbackContext",
    },
)
