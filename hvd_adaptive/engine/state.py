"""One rank's compression state: made of the engine's parts, and given back to them."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from hvd_adaptive import checkpoint
from hvd_adaptive.compressors import format_spec
from hvd_adaptive.config import ReducerOptions
from hvd_adaptive.engine.codec_states import CodecStates
from hvd_adaptive.engine.feedback_states import FeedbackStates
from hvd_adaptive.engine.hooks import GradientHooks
from hvd_adaptive.engine.layout import Layout, Progress
from hvd_adaptive.feedback import LayerStates


def state_of(
    layout: Layout, feedback: FeedbackStates, codecs: CodecStates, progress: Progress
) -> dict[str, Any]:
    """A rank's state, as :mod:`hvd_adaptive.checkpoint` describes it. All ranks call it."""
    return {
        "format": checkpoint.STATE_FORMAT,
        "order": list(layout.order),
        "routes": {
            layer.name: [format_spec(segment.compressor), bucket.feedback]
            for bucket in layout.buckets or ()
            for segment in bucket.segments
            for layer in bucket.layers[segment.start : segment.stop]
        },
        "kept": feedback.state_dict(),
        "owned": feedback.owned(),
        "shards": layout.shards_dict(),
        "costs": layout.costs_dict(),
        "rates": dict(feedback.context.rates),
        "planned": {
            name: [None if compressor is None else format_spec(compressor), level]
            for name, (compressor, level) in layout.config.planned.items()
        },
        "sums": dict(layout.config.sums),
        "controller": layout.controller.state_dict(),
        **progress_of(codecs, progress),
    }


def progress_of(codecs: CodecStates, progress: Progress) -> dict[str, Any]:
    """What all ranks hold alike, besides the plan."""
    return {
        "rounds": progress.rounds,
        "dense_until": progress.dense_until,
        "flat_steps": progress.flat,
        "last_rates": progress.rates.last,
        "learn_next": codecs.learn_next,
        "codecs": codecs.state_dict(),
    }


def restore_progress(state: Mapping[str, Any], codecs: CodecStates, progress: Progress) -> None:
    """Take what :func:`progress_of` returned."""
    progress.rounds = int(state["rounds"])
    progress.dense_until, progress.flat = state["dense_until"], int(state["flat_steps"])
    progress.rates.last = tuple(state["last_rates"])
    codecs.learn_next = bool(state["learn_next"])
    codecs.load_state_dict(state["codecs"])


def restore_layers(
    state: Mapping[str, Any], hooks: GradientHooks, layout: Layout, feedback: FeedbackStates
) -> None:
    """Take the plan and what was kept of each layer, from what :func:`state_of` returned."""
    if layout.controller.plans and state["controller"] is not None:
        layout.controller.load_state_dict(copy.deepcopy(state["controller"]))
        layout.config = replace(
            layout.config, planned=checkpoint.planned(state), sums=dict(state["sums"])
        )
    layout.load_shards(state["shards"])
    layout.load_costs(state.get("costs"))
    laid_out = layout.buckets is not None
    layout.order = layout.order if laid_out else list(state["order"])
    feedback.replace(_on_devices(state["kept"], hooks), state["rates"], state["owned"])
    if laid_out:
        layout.build()


def _on_devices(kept: Mapping[str, Mapping[str, Tensor]], hooks: GradientHooks) -> LayerStates:
    """Copies of what was kept of each layer, where its parameter is."""
    devices = {
        name: parameter.device for name, parameter in zip(hooks.names, hooks.params, strict=True)
    }
    return {
        name: {slot: held.detach().to(devices[name], copy=True) for slot, held in slots.items()}
        for name, slots in kept.items()
    }


def run_of(hooks: GradientHooks, layout: Layout, options: ReducerOptions, ranks: int) -> checkpoint.Run:
    """What a state is to fit."""
    return checkpoint.Run(
        [hooks.layer(index) for index in range(len(hooks.params))],
        layout.config,
        options,
        options.planner,
        options.candidates,
        ranks,
    )
