"""Which compressor each layer gets: the user's choice, the overrides, and what stays dense."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import torch

from hvd_adaptive import feedback as feedback_rules
from hvd_adaptive.buckets import ALONE_BYTES, Route
from hvd_adaptive.compressors import (
    REGISTRY,
    CastCompressor,
    Compressor,
    LinearCompressor,
    NoCompression,
    format_spec,
    parse,
)
from hvd_adaptive.compressors.base import Level
from hvd_adaptive.feedback import ErrorFeedback, Feedback, NoFeedback, format_rule
from hvd_adaptive.layers import Collective, Layer
from hvd_adaptive.planning import LayerPlan, Plan
from hvd_adaptive.planning.plan import Expected

Spec: TypeAlias = str | Compressor | type[Compressor]

# Tensors under this size, and biases and norms, travel dense: they are under 1 % of a model's bytes
# and lose most by compression.
SMALL_NUMEL = 1024

# What Horovod can add on CPU and GPU.
_SUMMABLE = (torch.float16, torch.float32, torch.float64)
_SUPPORTED = (*_SUMMABLE, torch.bfloat16)


@dataclass(frozen=True)
class CompressionConfig:
    """What the user asked for, validated.

    Args:
        compressor: of every layer that no override names and that is not small.
        overrides: name patterns and their compressors; the first that matches counts.
        feedback: a rule, or None to let each compressor choose.
        planned: what a planner gives to some layers, by name, in the place of their compressor and
            its level; no compressor means dense.
    """

    compressor: Compressor
    overrides: tuple[tuple[str, Compressor], ...] = ()
    feedback: Feedback | None = None
    planned: Mapping[str, tuple[Compressor | None, Level]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        compression: Spec,
        overrides: Mapping[str, Spec] | None,
        feedback: str | Feedback | None,
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
        choice = cls(parse(compression), rows, feedback_rules.parse(feedback))
        choice._check_feedback()
        return choice

    @property
    def compressors(self) -> list[Compressor]:
        """All compressors that a layer may get."""
        return list(dict.fromkeys([self.compressor, *(row[1] for row in self.overrides)]))

    def routes(
        self, layers: Sequence[Layer], sparse: frozenset[str], step: int = 0, warmup: bool = False
    ) -> dict[str, Route]:
        """The route of every layer, by name.

        Args:
            layers: all layers.
            sparse: names of those with sparse gradients, which go as Horovod sends them.
            step: counted from the end of the dense warm-up.
            warmup: in the warm-up: all layers travel dense, with feedback where its rule says so.
        """
        routes = {layer.name: self._route(layer, layer.name in sparse, step) for layer in layers}
        if warmup:
            return {layer.name: _dense(layer, routes[layer.name]) for layer in layers}
        return _merge_into_feedback_buckets(layers, routes)

    def digest(self) -> dict[str, str]:
        """What must be equal on all ranks, by what a message should call it."""
        return {
            "compression": format_spec(self.compressor),
            "overrides": ", ".join(f"{key}={format_spec(spec)}" for key, spec in self.overrides),
            "feedback": "by compressor" if self.feedback is None else format_rule(self.feedback),
        }

    def changes_at(self, step: int) -> bool:
        """Whether some level is another one in this step than in the one before."""
        return any(each.level_at(step) != each.level_at(step - 1) for each in self.compressors)

    def check_patterns(self, names: Sequence[str]) -> None:
        """ValueError if an override names no layer: it would be a mistyped one."""
        for pattern, _ in self.overrides:
            if not fnmatch.filter(names, pattern):
                shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
                raise ValueError(
                    f"override pattern {pattern!r} matches no parameter; the parameters are {shown}"
                )

    def compressor_of(self, layer: Layer) -> Compressor:
        """The compressor of one layer."""
        for pattern, compressor in self.overrides:
            if fnmatch.fnmatchcase(layer.name, pattern):
                return compressor
        small = len(layer.shape) <= 1 or layer.numel < SMALL_NUMEL
        if small and not isinstance(self.compressor, CastCompressor):
            return NoCompression()
        return self.compressor

    def _route(self, layer: Layer, sparse: bool, step: int) -> Route:
        if sparse:
            none = NoCompression()
            return Route(none, none.level, Collective.SPARSE, layer.dtype)
        compressor, level = self._assigned(layer, step)
        rule = self.feedback or (ErrorFeedback() if compressor.biased else NoFeedback())
        if isinstance(compressor, NoCompression) and not rule.for_dense:
            rule = NoFeedback()
        return Route(
            compressor,
            level,
            compressor.collective,
            wire_dtype(compressor, layer),
            format_rule(rule),
        )

    def _assigned(self, layer: Layer, step: int) -> tuple[Compressor, Level]:
        """What the planner or, where it has not spoken, the user gives to a layer."""
        if layer.name not in self.planned:
            compressor = self.compressor_of(layer)
            return compressor, compressor.level_at(step)
        planned, level = self.planned[layer.name]
        # what a layer has kept is sent with its next gradient once it is dense
        return (NoCompression(), NoCompression().level) if planned is None else (planned, level)

    def _check_feedback(self) -> None:
        """ValueError if the rule cannot work with one of the compressors."""
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


def parse_as(argument: str, spec: Spec) -> Compressor:
    """As :func:`~hvd_adaptive.compressors.parse`; the argument is named in what it raises."""
    try:
        return parse(spec)
    except (ValueError, TypeError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"{argument}: {error}") from None


def _dense(layer: Layer, route: Route) -> Route:
    """The route of the warm-up."""
    if route.collective is Collective.SPARSE:
        return route
    none = NoCompression()
    rule = feedback_rules.parse(route.feedback)
    follows = rule is not None and rule.in_warmup
    return Route(
        none,
        none.level,
        none.collective,
        wire_dtype(none, layer),
        route.feedback if follows else NoFeedback.name,
    )


def _merge_into_feedback_buckets(layers: Sequence[Layer], routes: dict[str, Route]) -> dict[str, Route]:
    """Let layers without feedback share the buckets of layers with error feedback.

    What they do not send is dropped all the same; but a model of several compressors then costs one
    allgather and one allreduce a round for each bucket. Large dense layers still travel alone.
    """
    hosts = {
        (route.collective, route.wire_dtype): route.feedback
        for route in routes.values()
        if _rule_name(route) == ErrorFeedback.name and not isinstance(route.compressor, CastCompressor)
    }
    joined = dict(routes)
    for layer in layers:
        route = routes[layer.name]
        host = hosts.get((route.collective, route.wire_dtype))
        alone = isinstance(route.compressor, CastCompressor) and layer.nbytes >= ALONE_BYTES
        if host is not None and _rule_name(route) == NoFeedback.name and not alone:
            joined[layer.name] = replace(route, feedback=host, keeps=False)
    return joined


def _rule_name(route: Route) -> str:
    return route.feedback.partition(":")[0]


def unfit_dtypes(dtypes: Mapping[str, torch.dtype]) -> dict[str, str]:
    """Names and dtypes of the parameters whose gradients cannot be sent."""
    return {name: str(dtype) for name, dtype in dtypes.items() if dtype not in _SUPPORTED}


def check_dtypes(unfit: Mapping[str, str]) -> None:
    """ValueError if there is any of what :func:`unfit_dtypes` returned on some rank."""
    if not unfit:
        return
    found = ", ".join(f"{name!r} is {dtype}" for name, dtype in unfit.items())
    remedy = (
        "train a complex parameter as a real one of one more dimension (torch.view_as_real), and use "
        "torch.view_as_complex in the model"
        if any("complex" in dtype for dtype in unfit.values())
        else "convert it, as in model.float()"
    )
    raise ValueError(
        "gradients can be reduced in float16, bfloat16, float32 and float64, but parameter "
        f"{found}: {remedy}"
    )


def wire_dtype(compressor: Compressor, layer: Layer) -> torch.dtype | None:
    """dtype in which a linear payload is summed; None where the payload is bytes."""
    if not isinstance(compressor, LinearCompressor):
        return None
    if compressor.wire_dtype is not None:
        return compressor.wire_dtype
    # Horovod cannot add bfloat16; float32 holds its values exactly
    return layer.dtype if layer.dtype in _SUMMABLE else torch.float32


def make_plan(
    layers: Sequence[Layer],
    routes: Mapping[str, Route],
    version: int,
    step: int,
    expected: Mapping[str, Expected] | None = None,
    per_rank_levels: bool = False,
) -> Plan:
    """The routes as a plan; ``expected`` is what a planner foresees of some layers, by name."""
    foreseen = expected or {}
    rows = (_row(layer, routes[layer.name], foreseen.get(layer.name)) for layer in layers)
    return Plan(tuple(rows), version, step, per_rank_levels)


def _row(layer: Layer, route: Route, expected: Expected | None) -> LayerPlan:
    if isinstance(route.compressor, CastCompressor) and route.wire_dtype is not None:
        wire_bytes = layer.numel * route.wire_dtype.itemsize
    else:
        wire_bytes = route.compressor.wire_bytes(layer.numel, route.level, shape=layer.shape)
    spec = "sparse" if route.collective is Collective.SPARSE else format_spec(route.compressor)
    error, energy = expected or (None, None)
    return LayerPlan(
        layer.name, layer.shape, spec, route.level, wire_bytes, layer.nbytes, error, energy
    )
