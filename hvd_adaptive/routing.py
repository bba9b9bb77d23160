"""Which compressor each layer gets: the user's choice, the overrides, and what stays dense."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from hvd_adaptive import feedback as feedback_rules
from hvd_adaptive.buckets import Route
from hvd_adaptive.compressors import (
    CastCompressor,
    Compressor,
    LinearCompressor,
    NoCompression,
    format_spec,
    parse,
)
from hvd_adaptive.layers import Collective, Layer
from hvd_adaptive.planning import LayerPlan, Plan

Spec: TypeAlias = str | Compressor | type[Compressor]

# Tensors under this size, and biases and norms, travel dense: they are under 1 % of a model's bytes
# and lose most by compression.
SMALL_NUMEL = 1024

# What Horovod can add on CPU and GPU.
_SUMMABLE = (torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Choice:
    """What the user asked for, validated.

    Args:
        compressor: of every layer that no override names and that is not small.
        overrides: name patterns and their compressors; the first that matches counts.
        feedback: name of a rule, or None to let each compressor choose.
    """

    compressor: Compressor
    overrides: tuple[tuple[str, Compressor], ...] = ()
    feedback: str | None = None

    @classmethod
    def of(
        cls, compression: Spec, overrides: Mapping[str, Spec] | None, feedback: str | None
    ) -> Choice:
        """Parse what was passed to the optimizer; ValueError or TypeError says what is wrong."""
        if overrides is not None and not isinstance(overrides, Mapping):
            raise TypeError(
                f"overrides must map name patterns to compressors, as in {{'*.bias': 'none'}}, got "
                f"{overrides!r}"
            )
        rows = tuple((pattern, parse(spec)) for pattern, spec in (overrides or {}).items())
        return cls(parse(compression), rows, feedback_rules.check_name(feedback))

    def routes(self, layers: Sequence[Layer], sparse: frozenset[str]) -> dict[str, Route]:
        """The route of every layer, by name.

        Args:
            layers: all layers.
            sparse: names of those with sparse gradients, which go as Horovod sends them.
        """
        return {layer.name: self._route(layer, layer.name in sparse) for layer in layers}

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

    def _route(self, layer: Layer, sparse: bool) -> Route:
        if sparse:
            none = NoCompression()
            return Route(none, none.level, Collective.SPARSE, layer.dtype)
        compressor = self.compressor_of(layer)
        rule = self.feedback or ("ef" if compressor.biased else "none")
        if isinstance(compressor, NoCompression):
            rule = "none"
        return Route(
            compressor, compressor.level, compressor.collective, wire_dtype(compressor, layer), rule
        )


def wire_dtype(compressor: Compressor, layer: Layer) -> torch.dtype | None:
    """dtype in which a linear payload is summed; None where the payload is bytes."""
    if not isinstance(compressor, LinearCompressor):
        return None
    if compressor.wire_dtype is not None:
        return compressor.wire_dtype
    # Horovod cannot add bfloat16; float32 holds its values exactly
    return layer.dtype if layer.dtype in _SUMMABLE else torch.float32


def make_plan(layers: Sequence[Layer], routes: Mapping[str, Route], version: int, step: int) -> Plan:
    """The routes as a plan."""
    return Plan(tuple(_row(layer, routes[layer.name]) for layer in layers), version=version, step=step)


def _row(layer: Layer, route: Route) -> LayerPlan:
    if route.wire_dtype is not None:
        wire_bytes = layer.numel * route.wire_dtype.itemsize
    else:
        wire_bytes = route.compressor.wire_bytes(layer.numel, route.level)
    spec = "sparse" if route.collective is Collective.SPARSE else format_spec(route.compressor)
    return LayerPlan(layer.name, layer.shape, spec, route.level, wire_bytes, layer.nbytes)
