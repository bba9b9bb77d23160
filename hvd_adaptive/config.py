"""What the user asked for, checked, and its digest, which must be equal on all ranks."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

import torch

from hvd_adaptive import feedback as feedback_rules
from hvd_adaptive.collectives import AUTO, check_scheme, reduces_in_nodes, scheme_named
from hvd_adaptive.compressors import (
    REGISTRY,
    CastCompressor,
    Compressor,
    NoCompression,
    format_spec,
    parse,
)
from hvd_adaptive.compressors.base import GatheredCompressor, Level
from hvd_adaptive.feedback import Feedback, format_rule
from hvd_adaptive.layers import SMALL_NUMEL, Layer
from hvd_adaptive.planning import Recipe

Spec: TypeAlias = str | Compressor | type[Compressor]

DEFAULT_SCHEME = "allgather"
"""Of what is encoded, where the user names none."""

_SCHEME_OPTION = re.compile(r"[:,]\s*scheme\s*=\s*([^,]*)")


@dataclass(frozen=True)
class ReducerOptions:
    """How gradients are sent, besides the compressors.

    Args:
        passes: backward passes before a gradient is sent.
        sparse_as_dense: send sparse gradients as dense ones.
        dense_steps: steps at the start that send dense gradients.
        lr_warmup: in the place of ``dense_steps``, send dense gradients until the learning rate has not
            risen for so many steps; 0 counts ``dense_steps``.
        bucket_cap_bytes: dense bytes at which a bucket is closed.
        groups: names of layers that are sent together, or a number of groups, or 0.
        planner: what changes levels during training.
        candidates: compressors that it may choose besides those of the layers.
    """

    passes: int = 1
    sparse_as_dense: bool = False
    dense_steps: int = 0
    lr_warmup: int = 0
    bucket_cap_bytes: float = 25.0 * (1 << 20)
    groups: int | tuple[tuple[str, ...], ...] = 0
    planner: Recipe | None = None
    candidates: tuple[Compressor, ...] = ()


def read_lr_warmup(text: str) -> int:
    """Steps without a rise that ``"lr_warmup"`` or ``"lr_warmup:STEPS"`` waits for.

    Raises:
        ValueError: the text is neither.

    Example:
        >>> read_lr_warmup("lr_warmup"), read_lr_warmup("lr_warmup:500")
        (1, 500)
    """
    name, colon, steps = text.partition(":")
    if name == "lr_warmup" and not colon:
        return 1
    if name != "lr_warmup" or not steps.isdecimal() or not int(steps):
        raise ValueError(
            f"dense_steps={text!r}: write a whole number, 'lr_warmup', or 'lr_warmup:STEPS' where the "
            "rate is set once in so many steps"
        )
    return int(steps)


@dataclass(frozen=True)
class CompressionConfig:
    """What the user asked for, validated.

    Args:
        compressor: of every layer that no override names and that is not small.
        overrides: name patterns and their compressors; the first that matches counts.
        feedback: a rule, or None to let each compressor choose.
        planned: what a planner gives to some layers, by name, in the place of their compressor and
            its level; no compressor means dense.
        sums: levels that a planner gives to sums which a scheme compresses again, by layer, where they
            are not those of the layers.
        schemes: name patterns and the collective schemes of what is encoded, as text; the first that
            matches counts.
        start: what layers do until a planner has decided on them; None for their own compressor.
    """

    compressor: Compressor
    overrides: tuple[tuple[str, Compressor], ...] = ()
    feedback: Feedback | None = None
    planned: Mapping[str, tuple[Compressor | None, Level]] = field(default_factory=dict)
    schemes: tuple[tuple[str, str], ...] = ()
    sums: Mapping[str, Level] = field(default_factory=dict)
    start: CastCompressor | None = None

    @classmethod
    def of(
        cls,
        compression: Spec,
        overrides: Mapping[str, Spec] | None,
        feedback: str | Feedback | None,
        scheme: str | Mapping[str, str] = DEFAULT_SCHEME,
    ) -> CompressionConfig:
        """Parse what was passed to the optimizer; ValueError or TypeError says what is wrong."""
        if overrides is not None and not isinstance(overrides, Mapping):
            raise TypeError(
                f"overrides must map name patterns to compressors, as in {{'*.bias': 'none'}}, got "
                f"{overrides!r}"
            )
        patterns = overrides or {}
        if not all(isinstance(pattern, str) for pattern in patterns):
            raise TypeError(
                f"overrides must map name patterns, as '*.bias', to compressors, got {overrides!r}"
            )
        rows = tuple((pattern, parse_as("overrides", spec)) for pattern, spec in patterns.items())
        schemes = scheme if isinstance(scheme, Mapping) else {"*": scheme}
        for each in schemes.values():
            check_scheme(each)
        choice = cls(
            parse_as("compression", compression),
            rows,
            feedback_rules.parse(feedback),
            schemes=tuple(schemes.items()),
        )
        choice._check_feedback()
        choice._check_levels_of_sums()
        return choice

    @property
    def scheme_texts(self) -> list[str]:
        """All schemes that a layer may get, as text."""
        return [text for _, text in self.schemes]

    @property
    def compressors(self) -> list[Compressor]:
        """All compressors that a layer may get."""
        return list(dict.fromkeys([self.compressor, *(row[1] for row in self.overrides)]))

    def digest(self) -> dict[str, str]:
        """What must be equal on all ranks, by what a message should call it."""
        return {
            "compression": format_spec(self.compressor),
            "overrides": ", ".join(f"{key}={format_spec(spec)}" for key, spec in self.overrides),
            "feedback": "by compressor" if self.feedback is None else format_rule(self.feedback),
            "scheme": ", ".join(f"{pattern}={scheme}" for pattern, scheme in self.schemes),
        }

    def changes_at(self, step: int) -> bool:
        """Whether some level is another one in this step than in the one before."""
        return any(each.level_at(step) != each.level_at(step - 1) for each in self.compressors)

    def check_patterns(self, names: Sequence[str]) -> None:
        """ValueError if an override names no layer: it would be a mistyped one."""
        for pattern, _ in (*self.overrides, *self.schemes):
            if not fnmatch.filter(names, pattern):
                shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
                raise ValueError(
                    f"pattern {pattern!r} matches no parameter; the parameters are {shown}"
                )

    def compressor_of(self, layer: Layer) -> Compressor:
        """The compressor of one layer."""
        for pattern, compressor in self.overrides:
            if fnmatch.fnmatchcase(layer.name, pattern):
                return compressor
        small = len(layer.shape) <= 1 or layer.numel < SMALL_NUMEL
        if small and not isinstance(self.compressor, CastCompressor):
            return self.of_small_layers
        return self.compressor

    @cached_property
    def of_small_layers(self) -> CastCompressor:
        """What layers do that are too small to be compressed: they are sent dense.

        Where others are sent as a planner starts they do the same, in one operation with these: what
        an operation costs by itself is more than their bytes do.
        """
        planned = [compressor for compressor, _ in self.planned.values()]
        if self.start is None or (planned and self.start not in planned):
            return NoCompression()
        return self.start

    def scheme_of(self, layer: Layer) -> str:
        """The scheme of what one layer's compressor encodes, as text."""
        return next(
            (scheme for pattern, scheme in self.schemes if fnmatch.fnmatchcase(layer.name, pattern)),
            DEFAULT_SCHEME,
        )

    def _check_feedback(self) -> None:
        """ValueError if the rule cannot work with one of the compressors, or of the schemes."""
        if self.feedback is not None and self.feedback.needs_all:
            for text in filter(reduces_in_nodes, self.scheme_texts):
                raise ValueError(
                    f"feedback {format_rule(self.feedback)!r} looks at each rank's whole gradient, but "
                    f"scheme {text!r} compresses the sum of a node: use a rule without clipping, or "
                    "scheme='two_shot'"
                )
        if self.feedback is None or not self.feedback.needs_selection:
            return
        for compressor in self.compressors:
            if not compressor.selects and not isinstance(compressor, CastCompressor):
                able = [name for name, member in REGISTRY.items() if member.selects]
                raise ValueError(
                    f"feedback {self.feedback.name!r} clears its velocity where elements were sent, "
                    f"but {compressor.name!r} does not send single elements: use one of "
                    f"{', '.join(able)}, or feedback='ef'"
                )

    def _check_levels_of_sums(self) -> None:
        """ValueError if a scheme compresses sums at a level that a compressor does not have."""
        for text in self.scheme_texts:
            level = 0.0 if text == AUTO else scheme_named(text).level
            for compressor in self.compressors if level else ():
                if not isinstance(compressor, GatheredCompressor):
                    continue
                try:
                    compressor.compress_(torch.zeros(8), level)
                except ValueError as error:
                    raise ValueError(f"scheme {text!r}: {error}") from None


def parse_as(argument: str, spec: Spec) -> Compressor:
    """As :func:`~hvd_adaptive.compressors.parse`; the argument is named in what it raises."""
    try:
        return parse(spec)
    except (ValueError, TypeError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        if isinstance(spec, str) and (found := _SCHEME_OPTION.search(spec)):
            raise kind(
                f"{argument}: {spec!r}: a scheme is no option of a compressor: give it to layers by "
                f"name, as in scheme={{'PATTERN': {found[1]!r}, '*': {DEFAULT_SCHEME!r}}}"
            ) from None
        raise kind(f"{argument}: {error}") from None
