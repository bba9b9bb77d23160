"""Routing: which compressor each layer gets, at which level, with which feedback."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from hvd_adaptive import feedback as feedback_rules
from hvd_adaptive.buckets import ALONE_BYTES, Route
from hvd_adaptive.collectives import scheme_for
from hvd_adaptive.compressors import (
    CastCompressor,
    Compressor,
    LinearCompressor,
    NoCompression,
    format_spec,
)
from hvd_adaptive.compressors.base import Level
from hvd_adaptive.config import CompressionConfig
from hvd_adaptive.feedback import ErrorFeedback, Feedback, NoFeedback, format_rule
from hvd_adaptive.layers import Layer, PayloadKind
from hvd_adaptive.planning import LayerPlan, Plan
from hvd_adaptive.planning.plan import Expected

# What Horovod can add on CPU and GPU.
_SUMMABLE = (torch.float16, torch.float32, torch.float64)
_SUPPORTED = (*_SUMMABLE, torch.bfloat16)


def routes_of(
    config: CompressionConfig,
    layers: Sequence[Layer],
    sparse: frozenset[str],
    step: int = 0,
    warmup: bool = False,
) -> dict[str, Route]:
    """The route of every layer, by name.

    Args:
        layers: all layers.
        sparse: names of those with sparse gradients, which go as Horovod sends them.
        step: counted from the end of the dense warm-up.
        warmup: in the warm-up: all layers are sent dense, with feedback where its rule says so.
    """
    routes = {layer.name: _route(config, layer, layer.name in sparse, step) for layer in layers}
    if warmup:
        return {layer.name: _dense(layer, routes[layer.name]) for layer in layers}
    return _merge_into_feedback_buckets(layers, routes)


def _route(config: CompressionConfig, layer: Layer, sparse: bool, step: int) -> Route:
    if sparse:
        none = NoCompression()
        return Route(none, none.level, PayloadKind.SPARSE, scheme_for(PayloadKind.SPARSE), layer.dtype)
    compressor, level = _assigned(config, layer, step)
    rule = config.feedback or (ErrorFeedback() if compressor.biased else NoFeedback())
    if isinstance(compressor, NoCompression) and not rule.for_dense:
        rule = NoFeedback()
    return Route(
        compressor,
        level,
        compressor.payload_kind,
        scheme_for(compressor.payload_kind, config.scheme_of(layer)),
        wire_dtype(compressor, layer),
        format_rule(rule),
        sum_level=config.sums.get(layer.name, 0.0),
    )


def _assigned(config: CompressionConfig, layer: Layer, step: int) -> tuple[Compressor, Level]:
    """What the planner or, where it has not spoken, the user gives to a layer."""
    if layer.name not in config.planned:
        compressor = config.compressor_of(layer)
        if config.start is not None and not isinstance(compressor, CastCompressor):
            compressor = config.start
        return compressor, compressor.level_at(step)
    planned, level = config.planned[layer.name]
    # what a layer has kept is sent with its next gradient once it is dense
    return (NoCompression(), NoCompression().level) if planned is None else (planned, level)


def _dense(layer: Layer, route: Route) -> Route:
    """The route of the warm-up."""
    if route.kind is PayloadKind.SPARSE:
        return route
    none = NoCompression()
    follows = _rule_of(route).in_warmup
    return Route(
        none,
        none.level,
        none.payload_kind,
        scheme_for(none.payload_kind),
        wire_dtype(none, layer),
        route.feedback if follows else NoFeedback.name,
    )


def _merge_into_feedback_buckets(layers: Sequence[Layer], routes: dict[str, Route]) -> dict[str, Route]:
    """Let layers without feedback share the buckets of layers with error feedback.

    What they do not send is dropped all the same; but a model of several compressors then costs one
    allgather and one allreduce per round for each bucket. Large dense layers still are sent alone.
    """
    hosts = {
        (route.scheme, route.wire_dtype): route.feedback
        for route in routes.values()
        if _rule_of(route).hosts_others and not isinstance(route.compressor, CastCompressor)
    }
    joined = dict(routes)
    for layer in layers:
        route = routes[layer.name]
        host = hosts.get((route.scheme, route.wire_dtype))
        alone = isinstance(route.compressor, CastCompressor) and layer.nbytes >= ALONE_BYTES
        if host is not None and not _rule_of(route).keeps and not alone:
            joined[layer.name] = replace(route, feedback=host, keeps=False)
    return joined


def _rule_of(route: Route) -> Feedback:
    rule = feedback_rules.parse(route.feedback)
    assert rule is not None
    return rule


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
    reasons: tuple[str, ...] = (),
) -> Plan:
    """The routes as a plan.

    Args:
        layers: of the plan.
        routes: of the layers, by name.
        version: of the plan.
        step: at which it takes effect.
        expected: what a planner foresees of some layers, by name.
        per_rank_levels: whether other ranks have other levels.
        reasons: why schemes were chosen.
    """
    foreseen = expected or {}
    rows = (_row(layer, routes[layer.name], foreseen.get(layer.name)) for layer in layers)
    return Plan(tuple(rows), version, step, per_rank_levels, reasons)


def _row(layer: Layer, route: Route, expected: Expected | None) -> LayerPlan:
    if isinstance(route.compressor, CastCompressor) and route.wire_dtype is not None:
        wire_bytes = layer.numel * route.wire_dtype.itemsize
    else:
        wire_bytes = route.compressor.wire_bytes(layer.numel, route.level, shape=layer.shape)
    spec = "sparse" if route.kind is PayloadKind.SPARSE else format_spec(route.compressor)
    error, energy = expected or (None, None)
    return LayerPlan(
        layer.name,
        layer.shape,
        spec,
        route.level,
        route.scheme,
        wire_bytes,
        layer.nbytes,
        error,
        energy,
        route.sum_level,
    )
