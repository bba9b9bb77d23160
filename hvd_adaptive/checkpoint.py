"""Compression states: what they hold, whether one fits a run, and one for another number of ranks.

A state is what ``optimizer.compression_state_dict()`` returns on one rank: a dict of numbers, text,
tensors, and dicts and lists of these. ``shared`` items are the same on all ranks.

==============  ======  ==============================================================================
``format``      shared  :data:`STATE_FORMAT`
``rounds``      shared  how often gradients were synchronized
``dense_until`` shared  after how many of them the learning rate's warm-up had ended; None before that
``flat_steps``  shared  steps since the learning rate has risen, as long as that counts
``order``       shared  names of the layers that were trained, in the order in which they are sent
``routes``      shared  of these layers, compressor and feedback rule, as text; none before a step
``kept``                of each layer, by slot, what its feedback rule keeps, 1-D; and its residual,
                        whatever the rule: it is sent with the next gradient
``owned``               of some layers, pieces of what the rank owns of sums that were compressed
                        again: where each begins, and 1-D float32; in the units of a sum over the ranks
``shards``      shared  how buckets are shared out among the owners of their sums, by their first layer
``costs``       shared  what ``scheme="auto"`` has measured; None where it has not. May be missing
``rates``               of some layers, the learning rate with which the residual was kept
``last_rates``          the learning rates of the last step
``learn_next``  shared  whether compressors that learn do so in the next step
``planned``     shared  of some layers, compressor (None: dense) and level that a planner gave them
``sums``        shared  of some layers, the level at which a planner has their sums compressed again
``codecs``      shared  what compressors have learned, by their text
``controller``               what the planner's driver knows, as ``_PILOT`` below says; None without one
==============  ======  ==============================================================================

With per-rank levels, those in ``planned`` and ``controller`` are not shared. Nothing
here needs Horovod.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from hvd_adaptive import feedback
from hvd_adaptive.adaptation.candidates import Candidate, candidates_of
from hvd_adaptive.adaptation.layer_samples import measured_numbers
from hvd_adaptive.adaptation.sampling import preconditions
from hvd_adaptive.adaptation.sketch import SKETCH
from hvd_adaptive.compressors import CastCompressor, Compressor, format_spec, parse
from hvd_adaptive.compressors.base import CodecState, Level
from hvd_adaptive.config import CompressionConfig, ReducerOptions
from hvd_adaptive.engine.routing import routes_of
from hvd_adaptive.feedback import RESIDUAL, FeedbackContext, FeedbackState
from hvd_adaptive.layers import Layer
from hvd_adaptive.planning import DENSE, Measurement, Recipe

STATE_FORMAT = 11


@dataclass(frozen=True)
class Run:
    """What a state is to fit.

    Args:
        layers: all parameters, trained or not.
        choice: the user's compressors.
        options: how it sends gradients.
        recipe: of the planner; None without one.
        alternatives: compressors whose levels the planner may choose besides those of ``choice``.
        ranks: how many there are.
    """

    layers: Sequence[Layer]
    choice: CompressionConfig
    options: ReducerOptions = field(default_factory=ReducerOptions)
    recipe: Recipe | None = None
    alternatives: tuple[Compressor, ...] = ()
    ranks: int = 1


def check_state(state: Any, run: Run | None = None) -> None:
    """Refuse what no run has saved, or what this run cannot continue from; changes nothing.

    Cost: a pass over all tensors.

    Args:
        state: of one rank.
        run: what it is to fit; None checks the state alone.

    Raises:
        ValueError: names the item, and says what is wrong with it.
    """
    if not isinstance(state, Mapping):
        raise _refused("it", f"is {_shown(state)} and no dict")
    if type(state.get("format")) is not int or state["format"] != STATE_FORMAT:
        raise _refused("format", f"is {_shown(state.get('format'))}, expected {STATE_FORMAT}")
    _STATE(state, "")
    _maybe(_COSTS)(state.get("costs"), "costs")
    _maybe(_by_name(_number))((state.get("costs") or {}).get("tried"), "costs['tried']")
    _check_routes(state)
    _check_owners(state)
    codecs = _check_codecs(state)
    _check_controller(state)
    if run is None:
        return
    layers = {layer.name: layer for layer in run.layers}
    _check_names(state, codecs, layers)
    _check_slots(state, run, layers)
    _check_levels(state, run, layers)
    if run.recipe is not None and state["controller"] is not None:
        _check_planner(state["controller"], run.recipe, run.ranks)


def shared(state: Mapping[str, Any]) -> dict[str, str]:
    """What of a state (a checked one) must be equal on all ranks, by its name, as short text."""
    controller = dict(state["controller"] or {})
    assigned: Any = state["planned"]
    items = ["recipe", "factor", "decided", "factors", "factors_since", "sampled"]
    items += ["told", "sums", "levels"]
    if len(controller.get("told", ())) > 1:  # each rank has its own levels
        assigned = {name: compressor for name, (compressor, _) in assigned.items()}
        items.remove("levels")
    found = {key: state[key] for key in ("format", "rounds", "order", "routes", "learn_next")}
    found |= {"planned": assigned, "codecs": state["codecs"], "shards": state["shards"]}
    found["costs"] = state.get("costs")
    found |= {key: state[key] for key in ("sums", "dense_until", "flat_steps")}
    found |= {f"controller['{key}']": controller[key] for key in items if key in controller}
    return {key: _brief(value) for key, value in found.items()}


def planned(state: Mapping[str, Any]) -> dict[str, tuple[Compressor | None, Level]]:
    """What a (checked) state's planner gave to some layers: compressor and level by name."""
    return {
        name: (None if spec is None else parse(spec), level)
        for name, (spec, level) in state["planned"].items()
    }


def merge_compression_states(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The state with which each of any number of ranks continues after a run of ``len(states)`` ranks.

    What a rank has not sent yet (residuals, velocities, EF21's estimates) becomes the mean over the
    ranks that saved it, so that the mean over ranks stays what it was: no gradient is lost. What all
    ranks hold alike (learned levels, warm starts) is taken from the first. Cost: a float64 copy of one
    layer at a time, and the result.

    Args:
        states: ``compression_state_dict()`` of every rank of the run that saved them, in rank order.

    Returns:
        For ``load_compression_state_dict()`` on every rank.

    Raises:
        ValueError: there is no state, one is damaged, or they are not of one step of one run; names
            the rank and the item.

    Example:
        >>> import horovod.torch as hvd, hvd_adaptive as hva
        >>> hvd.init()
        >>> model = torch.nn.Linear(64, 64)
        >>> optimizer = hva.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        >>> merged = merge_compression_states([optimizer.compression_state_dict()] * 2)
        >>> optimizer.load_compression_state_dict(merged)
    """
    if not states:
        raise ValueError("there is no compression state to merge: give one of each rank")
    for rank, state in enumerate(states):
        try:
            check_state(state)
        except ValueError as error:
            raise ValueError(f"rank {rank}: {error}") from None
    first = shared(states[0])
    for rank, state in enumerate(states):
        other = shared(state)
        for key in [*first, *other]:
            if first.get(key) != other.get(key):
                raise ValueError(
                    f"the compression states of rank 0 and rank {rank} are not of one step of one run: "
                    f"{key} is {first.get(key)} on the one and {other.get(key)} on the other"
                )
    states = [{**state, "kept": _with_owned(state)} for state in states]
    kept = {
        name: {slot: _mean(states, name, slot) for slot in slots}
        for name, slots in states[0]["kept"].items()
    }
    return {**states[0], "kept": kept, "owned": {}, "shards": {}, "costs": None}


def _with_owned(state: Mapping[str, Any]) -> dict[str, dict[str, Tensor]]:
    """What is kept of each layer, with what the rank owns, which counts as its own rest does."""
    kept = {name: dict(slots) for name, slots in state["kept"].items()}
    for name, pieces in state["owned"].items():
        slot = _slot_for_owned(kept[name])
        total = kept[name][slot] = kept[name][slot].clone()
        for start, piece in pieces:
            total[start : start + piece.numel()] += piece
    return kept


def _mean(states: Sequence[Mapping[str, Any]], name: str, slot: str) -> Tensor:
    """Of one layer over the ranks."""
    first: Tensor = states[0]["kept"][name][slot]
    total = torch.zeros_like(first, dtype=torch.float64)
    for rank, state in enumerate(states):
        held = state["kept"].get(name, {}).get(slot)
        if held is None or held.shape != first.shape:
            raise ValueError(
                f"the compression state of rank {rank} does not hold the {slot} of {name!r} that rank "
                "0's does: they are of different runs"
            )
        total += held
    return (total / len(states)).to(first.dtype)


# --- what each item is ----------------------------------------------------------------------------

_Check: TypeAlias = Callable[[Any, str], None]
"""Raises ValueError unless a value, at a path that messages name, is as it must be."""


def _refused(path: str, problem: str) -> ValueError:
    return ValueError(
        f"compression state: {path} {problem}; load what compression_state_dict() returned on this "
        "rank of the same run, unchanged"
    )


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of {value.dtype} and shape {tuple(value.shape)}"
    return reprlib.repr(value)


def _of(wanted: str, fits: Callable[[Any], bool]) -> _Check:
    def check(value: Any, path: str) -> None:
        if not fits(value):
            raise _refused(path, f"must be {wanted}, got {_shown(value)}")

    return check


def _kind(value: Any) -> type:
    """Numbers of numpy count as Python's, and truth is no number."""
    kinds = (bool, int, float)
    return next((kind for kind in kinds if isinstance(value, kind)), type(value))


def _is_number(value: Any) -> bool:
    return _kind(value) in (int, float)


def _is_finite(value: Any) -> bool:
    return _is_number(value) and abs(value) < math.inf


_count = _of("a whole number of at least 0", lambda value: _kind(value) is int and 0 <= value < 1 << 63)
_index = _of("the index of a level", lambda value: _kind(value) is int and value >= DENSE)
_number = _of("a finite number", _is_finite)
_above_0 = _of("a finite number above 0", lambda value: _is_finite(value) and value > 0)
_flag = _of("True or False", lambda value: _kind(value) is bool)
_text = _of("text", lambda value: isinstance(value, str))
_any_number = _of("a number", _is_number)


def _maybe(check: _Check) -> _Check:
    """None, or that."""
    return lambda value, path: None if value is None else check(value, path)


def _list_of(check: _Check) -> _Check:
    def every(value: Any, path: str) -> None:
        if not isinstance(value, list | tuple):
            raise _refused(path, f"must be a list, got {_shown(value)}")
        for position, member in enumerate(value):
            check(member, f"{path}[{position}]")

    return every


def _row(*checks: _Check) -> _Check:
    """A list with these members."""

    def each(value: Any, path: str) -> None:
        if not isinstance(value, list | tuple) or len(value) != len(checks):
            raise _refused(path, f"must be a list of {len(checks)}, got {_shown(value)}")
        for position, (check, member) in enumerate(zip(checks, value, strict=True)):
            check(member, f"{path}[{position}]")

    return each


def _by_name(check: _Check) -> _Check:
    def every(value: Any, path: str) -> None:
        if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
            raise _refused(path, f"must be a dict by name, got {_shown(value)}")
        for name, member in value.items():
            check(member, f"{path}[{name!r}]")

    return every


def _record(**checks: _Check) -> _Check:
    """A dict with these keys."""

    def each(value: Any, path: str) -> None:
        if not isinstance(value, Mapping):
            raise _refused(path, f"must be a dict, got {_shown(value)}")
        for key, check in checks.items():
            place = f"{path}[{key!r}]" if path else key
            if key not in value:
                raise _refused(place, "is missing")
            check(value[key], place)

    return each


def _if_there(**checks: _Check) -> _Check:
    """A dict that may have these keys."""

    def each(value: Any, path: str) -> None:
        there = {key: check for key, check in checks.items() if key in value}
        _record(**there)(value, path)

    return each


def _values(dtypes: Sequence[torch.dtype]) -> _Check:
    names = " or ".join(str(dtype) for dtype in dtypes)

    def check(value: Any, path: str) -> None:
        fits = isinstance(value, Tensor) and value.layout == torch.strided and value.dim() == 1
        if not fits or value.dtype not in dtypes:
            raise _refused(path, f"must be a 1-D tensor of {names}, got {_shown(value)}")
        if not bool(value.isfinite().all()):
            raise _refused(path, "holds NaN or Inf")

    return check


def _unique_names(value: Any, path: str) -> None:
    _list_of(_text)(value, path)
    repeated = next((name for name in value if value.count(name) > 1), None)
    if repeated is not None:
        raise _refused(path, f"names {repeated!r} twice")


def _compressor(value: Any, path: str) -> None:
    _text(value, path)
    try:
        parse(value)
    except ValueError as error:
        raise _refused(path, f"is no compressor: {error}") from None


def _rule(value: Any, path: str) -> None:
    _text(value, path)
    try:
        feedback.parse(value)
    except ValueError as error:
        raise _refused(path, f"is no feedback rule: {error}") from None


def _table(value: Any, path: str) -> None:
    """One row that is the mean over the ranks, or a row of each."""
    rows = isinstance(value, list) and bool(value) and isinstance(value[0], list)
    (_list_of(_list_of(_number)) if rows else _list_of(_number))(value, path)


def _message(value: Any, path: str) -> None:
    """A decision that ranks have not been told yet."""
    _text(value, path)
    try:
        told = json.loads(value)
    except ValueError:
        raise _refused(path, f"is no JSON: {_shown(value)}") from None
    if not (isinstance(told, dict) and isinstance(told.get("error"), str)):
        _DECISION(told, path)


_DECISION = _record(
    levels=_list_of(_list_of(_index)),
    changed=_flag,
    factor=_above_0,
    factors=_list_of(_above_0),
    report=_by_name(_any_number),
    reasons=_list_of(_text),
    errors=_list_of(_list_of(_number)),
    energies=_list_of(_list_of(_number)),
    sums=_list_of(_index),
)
_PILOT = _record(
    recipe=_text,  # the planner's class
    planner=_by_name(lambda value, path: None),  # see _check_planner
    levels=_by_name(_index),  # of each layer, under the last decision
    told=_list_of(_list_of(_index)),  # the last decision: a row for all ranks, or one for each
    sums=_list_of(_index),  # the same of sums that are compressed again; none where there is none
    expected=_by_name(_row(_number, _number)),  # squared error and energy of layers
    factor=_above_0,
    decided=_flag,
    factors=_list_of(_above_0),  # at which gains are measured
    factors_since=_count,
    trigger=_maybe(_count),  # the step at which the table was asked for
    message=_maybe(_message),
    table=_maybe(_table),
    sampled=_count,
    # of each layer: sums, of how many gradients and how many sizes, and the gradients' sum where they
    # are accumulated; the sum of the period's gradients, and how many these are
    measured=_by_name(
        _row(
            _list_of(_number),
            _count,
            _count,
            _maybe(_values([torch.float32])),
            _maybe(_values([torch.float32])),
            _count,
        )
    ),
)
_PILOT_BY_NOW = _if_there(  # older states lack these
    # of layers: the step in which errors were measured, and each candidate's as a share of the energy
    shares=_maybe(_by_name(_row(_count, _list_of(_number)))),
    patience=_of("a whole number above 0", lambda value: _kind(value) is int and value > 0),
    planned=_count,
    hurries=_flag,
)


def _codec_costs(value: Any, path: str) -> None:
    """What a compressor takes; older states know nothing of the bytes that it makes."""
    _record(compress=_number, decompress=_number, decompress_byte=_number)(value, path)
    _if_there(compress_byte=_number)(value, path)


_OPERATIONS = {
    "allgather": _number,
    "alltoall": _number,
    "allgather_byte": _number,
    "alltoall_byte": _number,
}
_COSTS = _record(
    ranks=_row(_count, _count),
    link=_record(
        **_OPERATIONS,
        layers=_maybe(
            _record(ranks_per_node=_count, node=_record(**_OPERATIONS), peers=_record(**_OPERATIONS))
        ),
    ),
    codecs=_by_name(_codec_costs),
)
_STATE = _record(
    rounds=_count,
    dense_until=_maybe(_count),
    flat_steps=_count,
    order=_unique_names,
    routes=_by_name(_row(_compressor, _rule)),
    kept=_by_name(_by_name(_values([torch.float32, torch.bfloat16]))),
    shards=_by_name(
        _record(bounds=_list_of(_count), loads=_list_of(_count), steps=_count, window=_count)
    ),
    owned=_by_name(_list_of(_row(_count, _values([torch.float32])))),
    rates=_by_name(_above_0),
    last_rates=_list_of(_number),
    learn_next=_flag,
    planned=_by_name(_row(_maybe(_compressor), _number)),
    sums=_by_name(_above_0),
    codecs=_by_name(_of("a dict", lambda value: isinstance(value, Mapping))),
    controller=_maybe(_PILOT),
)


# --- whether the items fit each other --------------------------------------------------------------


def _memory_of(rule: str) -> tuple[frozenset[str], torch.dtype]:
    """What a feedback rule keeps of each layer: slots and dtype."""
    held = _state_of(rule)
    return frozenset(held.slots), held.dtype


def _slot_for_owned(slots: Mapping[str, Tensor]) -> str:
    """What a rank owns of a layer is of the kind of the first slot of the layer's rule."""
    firsts = [_state_of(rule).slots[:1] for rule in feedback.REGISTRY]
    return next(
        (slot for (slot, *_) in filter(None, firsts) if slot in slots and slot != RESIDUAL), RESIDUAL
    )


@functools.cache
def _state_of(rule: str) -> FeedbackState:
    parsed = feedback.parse(rule)
    assert parsed is not None
    return parsed.new_state(FeedbackContext(lambda _: 0.0, lambda: 1))


_SLOTS = frozenset().union(*(_memory_of(name)[0] for name in feedback.REGISTRY))


def _check_routes(state: Mapping[str, Any]) -> None:
    """Every layer that was sent has kept what its rule keeps."""
    order, routes, kept = state["order"], state["routes"], state["kept"]
    if routes and set(routes) != set(order):
        (name, *_) = sorted(set(routes) ^ set(order))
        raise _refused("routes", f"and order must name the same layers: {name!r} is in one of them")
    for name, slots in kept.items():
        for slot in slots:
            if slot not in _SLOTS:
                known = ", ".join(sorted(_SLOTS))
                raise _refused(f"kept[{name!r}]", f"has the slot {slot!r}: there are {known}")
    for name, (_, rule) in routes.items():
        wanted, dtype = _memory_of(rule)
        found = kept.get(name)
        if found is None or not wanted <= set(found) <= wanted | {RESIDUAL}:
            raise _refused(
                f"kept[{name!r}]",
                f"has the slots {sorted(found or ())}: its feedback {rule!r} keeps {sorted(wanted)}",
            )
        for slot in wanted:
            if found[slot].dtype != dtype:
                raise _refused(
                    f"kept[{name!r}][{slot!r}]",
                    f"is of {found[slot].dtype}: its feedback {rule!r} keeps {dtype}",
                )


def _check_owners(state: Mapping[str, Any]) -> None:
    """Shards share something out, and what is owned belongs to layers that keep something."""
    for name, found in state["shards"].items():
        bounds = found["bounds"]
        if (
            sorted(bounds) != list(bounds)
            or len(bounds) != len(found["loads"]) + 1
            or not found["window"]
        ):
            raise _refused(
                f"shards[{name!r}]", f"has the bounds {_shown(bounds)}, which share nothing out"
            )
    for name, pieces in state["owned"].items():
        ends = [start + piece.numel() for start, piece in pieces]
        slots = state["kept"].get(name, {})
        held = slots.get(_slot_for_owned(slots))
        if held is None or max(ends, default=0) > held.numel():
            raise _refused(
                f"owned[{name!r}]", "must be pieces of a layer whose feedback keeps something"
            )


def _check_codecs(state: Mapping[str, Any]) -> dict[str, CodecState]:
    """What each compressor learned, as its own state; everything that one needs is there."""
    found: dict[str, CodecState] = {}
    for spec, learned in state["codecs"].items():
        path = f"codecs[{spec!r}]"
        _compressor(spec, path)
        key = parse(spec).state_key
        codec = key.new_state()
        if codec is None or parse(spec) != key:
            raise _refused(path, "is of a compressor that learns nothing, or not under this name")
        _restore(codec, learned, path)
        found[format_spec(key)] = codec
    for name, (spec, _) in state["routes"].items():
        key = parse(spec).state_key
        if key.new_state() is not None and format_spec(key) not in found:
            raise _refused(f"codecs[{format_spec(key)!r}]", f"is missing: layer {name!r} needs it")
    return found


def _restore(restored: Any, state: Any, path: str) -> None:
    """Load it where nothing depends on it; what is saved again must be the same."""
    try:
        restored.load_state_dict(state)
    except Exception as error:  # whatever a loader meets in a damaged state
        raise _refused(path, f"cannot be loaded: {type(error).__name__}: {error}") from None
    _check_same(state, restored.state_dict(), path)


def _check_same(given: Any, again: Any, path: str) -> None:
    """Whether both are the same, of the same types; lists and tuples count as one."""
    if isinstance(again, Mapping) and isinstance(given, Mapping):
        if set(given) != set(again):
            raise _refused(path, f"has the keys {_shown([*given])}, expected {_shown([*again])}")
        for key in again:
            _check_same(given[key], again[key], f"{path}[{key!r}]")
    elif isinstance(again, list | tuple) and isinstance(given, list | tuple):
        if len(given) != len(again):
            raise _refused(path, f"has {len(given)} members, expected {len(again)}")
        for position, pair in enumerate(zip(given, again, strict=True)):
            _check_same(*pair, f"{path}[{position}]")
    elif isinstance(again, Tensor) and isinstance(given, Tensor):
        if given.dtype != again.dtype or not torch.equal(given.cpu(), again.cpu()):
            raise _refused(path, f"must be {_shown(again)} of finite numbers, got {_shown(given)}")
    elif _kind(given) is not _kind(again) or given != again:
        raise _refused(path, f"is {_shown(given)}, which is no value of it")


def _check_controller(state: Mapping[str, Any]) -> None:
    """Levels, tables and decisions are of the same layers."""
    controller = state["controller"]
    if controller is None:
        if state["planned"]:
            raise _refused("planned", "must be empty where controller is None")
        return
    count = len(controller["levels"])
    if list(controller["measured"]) != list(controller["levels"]):
        raise _refused("controller['measured']", "and controller['levels'] must name the same layers")
    _PILOT_BY_NOW(controller, "controller")
    rows = {"controller['told']": controller["told"]}
    if controller["sums"]:
        rows["controller['sums']"] = [controller["sums"]]
    decision = _decision_of(controller)
    if decision is not None:
        if controller["trigger"] is None:
            raise _refused(
                "controller['trigger']", "must be the step that controller['message'] belongs to"
            )
        rows |= {f"controller['message']: {key}": decision[key] for key in ("levels", "errors")}
        if decision["sums"]:
            rows["controller['message']: sums"] = [decision["sums"]]
        if len({len(decision[key]) for key in ("levels", "errors", "energies")}) != 1:
            raise _refused("controller['message']", "must have as many levels as errors and energies")
    for path, lists in rows.items():
        if any(len(row) != count for row in lists):
            raise _refused(path, f"must have a number for each of {count} layers")


def _decision_of(controller: Mapping[str, Any]) -> dict[str, Any] | None:
    """What its message says; None if there is none, or an error."""
    told: dict[str, Any] = json.loads(controller["message"] or "{}")
    return told if "levels" in told else None


# --- whether the state fits a run -------------------------------------------------------------------


def _check_names(
    state: Mapping[str, Any], codecs: Mapping[str, CodecState], layers: Mapping[str, Layer]
) -> None:
    """Everything is of layers that the model has, and of their sizes."""
    names: dict[str, Any] = {key: state[key] for key in ("order", "kept", "rates", "planned", "sums")}
    controller = state["controller"] or {"levels": (), "measured": {}, "expected": ()}
    names |= {f"controller['{key}']": controller[key] for key in ("levels", "expected")}
    for path, found in names.items():
        for name in found:
            if name not in layers:
                raise _refused(path, f"names {name!r}: the model has no parameter of that name")
    tensors = [
        (f"kept[{name!r}][{slot!r}]", name, tensor)
        for name, slots in state["kept"].items()
        for slot, tensor in slots.items()
    ]
    tensors += [
        (f"controller['measured'][{name!r}][{place}]", name, row[place])
        for name, row in controller["measured"].items()
        for place in (3, 4)
        if row[place] is not None
    ]
    for path, name, tensor in tensors:
        if tensor.numel() != layers[name].numel:
            raise _refused(
                path,
                f"has {tensor.numel()} elements, the model's parameter {layers[name].numel}: it "
                "belongs to another model",
            )
    for spec, codec in codecs.items():
        try:
            codec.check_layers({name: layer.shape for name, layer in layers.items()})
        except ValueError as error:
            raise _refused(f"codecs[{spec!r}]", f"belongs to another model: {error}") from None


def _check_slots(state: Mapping[str, Any], run: Run, layers: Mapping[str, Layer]) -> None:
    """Each slot is one that the layer's rule in this run has."""
    choice = run.choice if run.recipe is None else replace(run.choice, planned=planned(state))
    until = state["dense_until"] if run.options.lr_warmup else run.options.dense_steps
    step = -1 if until is None else state["rounds"] - until
    routes = routes_of(choice, run.layers, frozenset(), max(0, step), warmup=step < 0)
    for name, slots in state["kept"].items():
        rule = routes[name].feedback
        allowed = _memory_of(rule)[0] | {RESIDUAL}
        for slot in slots:
            if slot not in allowed:
                raise _refused(
                    f"kept[{name!r}]",
                    f"has the slot {slot!r}, but in this run the layer's feedback is {rule!r}, which "
                    f"has {', '.join(sorted(allowed))}: set the compression and feedback of the run "
                    "that saved it before loading",
                )


def _check_levels(state: Mapping[str, Any], run: Run, layers: Mapping[str, Layer]) -> None:
    """Levels are among the candidates that there are."""
    for name, (compressor, level) in planned(state).items():
        if not _can_be_given(level, compressor, layers[name], run.recipe):
            raise _refused(f"planned[{name!r}]", f"has the level {level}, which is none of its own")
    for name, level in state["sums"].items():
        compressor, _ = planned(state).get(name, (None, 0))
        if compressor is None or level not in compressor.levels(layers[name]):
            raise _refused(f"sums[{name!r}]", f"has the level {level}, which is none of its layer's")
    controller = state["controller"]
    if run.recipe is None or controller is None:
        return
    rows = {name: _candidates(run, layers[name]) for name in controller["levels"]}
    if not all(rows.values()):
        return  # of layers for which nobody plans in this run: it is of no use
    for position, (name, candidates) in enumerate(rows.items()):
        for path, index in _indices(controller, name, position):
            if index >= len(candidates):
                raise _refused(path, f"is {index}: layer {name!r} has {len(candidates)} candidates")
        if len(controller["measured"][name][0]) != _measured(candidates, run.recipe):
            raise _refused(
                f"controller['measured'][{name!r}][0]",
                f"must have {_measured(candidates, run.recipe)} numbers, for the candidates of this "
                "run: resume with the same compression, candidates and metric",
            )
        shares = (controller.get("shares") or {}).get(name)
        if shares is not None and len(shares[1]) != len(candidates):
            raise _refused(
                f"controller['shares'][{name!r}]",
                f"must have {len(candidates)} shares, one a candidate",
            )
    total = sum(_measured(candidates, run.recipe) for candidates in rows.values())
    if Measurement.PERIOD_ENERGY in run.recipe.planner(run.ranks).needs:
        total += sum(min(layers[name].numel, SKETCH) + 1 for name in rows)
    table = controller["table"] or []
    for row in table if table and isinstance(table[0], list) else [table]:
        if len(row) not in (0, total):
            raise _refused("controller['table']", f"must have {total} numbers, got {len(row)}")
    if controller["decided"] and controller["told"]:
        _check_assigned(state, rows)


def _can_be_given(
    level: Level, compressor: Compressor | None, layer: Layer, recipe: Recipe | None
) -> bool:
    """Whether a planner can have given the level to the layer: this run's, or any where it has none."""
    if compressor is None:
        return level == DENSE + 1
    factors = [1 / level] if recipe is None and 0 < level <= 1 else []
    factors += [] if recipe is None else recipe.candidate_factors()
    exact = [compressor.level_of_factor(factor) for factor in factors]
    return level in compressor.levels(layer) or any(
        each is not None and math.isclose(each, level) for each in exact
    )


def _check_assigned(state: Mapping[str, Any], rows: Mapping[str, tuple[Candidate, ...]]) -> None:
    """Layers do what the last decision says."""
    assigned = planned(state)
    for name, candidates in rows.items():
        index = state["controller"]["levels"][name]
        chosen = candidates[index]
        wanted = (None, 0) if index == DENSE else (chosen.compressor, chosen.level)
        if assigned.get(name) != wanted:
            raise _refused(
                f"planned[{name!r}]",
                f"is {_shown(state['planned'].get(name))}: controller['levels'] gives "
                f"level {wanted[1]:g}",
            )


def _indices(controller: Mapping[str, Any], name: str, position: int) -> Iterator[tuple[str, int]]:
    """Every index of a level that the driver knows of one layer."""
    yield f"controller['levels'][{name!r}]", controller["levels"][name]
    for row in controller["told"]:
        yield "controller['told']", row[position]
    for row in (_decision_of(controller) or {"levels": ()})["levels"]:
        yield "controller['message']: levels", row[position]
    for sums in (controller["sums"], (_decision_of(controller) or {"sums": ()})["sums"]):
        if sums:
            yield "controller['sums']", sums[position]


def _candidates(run: Run, layer: Layer) -> tuple[Candidate, ...]:
    """What the planner may give to a layer; none where nobody plans for it."""
    own = run.choice.compressor_of(layer)
    if isinstance(own, CastCompressor) or own.whole_model:
        return ()
    factors = () if run.recipe is None else run.recipe.candidate_factors()
    return candidates_of(layer, tuple(dict.fromkeys([own, *run.alternatives])), factors)


def _measured(candidates: Sequence[Candidate], recipe: Recipe) -> int:
    """How many numbers are measured of a layer for a planner."""
    signals = Measurement.SIGNALS in recipe.planner().needs
    return measured_numbers(candidates, signals, preconditions(recipe))


def _check_planner(controller: Mapping[str, Any], recipe: Recipe, ranks: int) -> None:
    """It is this run's planner that wrote it."""
    if controller["recipe"] != type(recipe).__name__:
        raise _refused(
            "controller['recipe']",
            f"is the planner {controller['recipe']}, this run has {type(recipe).__name__}",
        )
    _check_numbers(controller["planner"], "controller['planner']")
    _restore(recipe.planner(ranks), controller["planner"], "controller['planner']")
    budget = controller["planner"]["budget"]
    for key in ("energy", "norms"):
        found = budget.get(key)
        if found is not None and not (
            isinstance(found, list) and len(found) == len(controller["levels"])
        ):
            raise _refused(
                f"controller['planner']['budget'][{key!r}]",
                f"must have a number for each of {len(controller['levels'])} layers",
            )


def _check_numbers(value: Any, path: str) -> None:
    """What planners know are finite numbers, and counts from 0 on."""
    if isinstance(value, Mapping):
        for key, member in value.items():
            _check_numbers(member, f"{path}[{key!r}]")
    elif isinstance(value, list | tuple):
        for position, member in enumerate(value):
            _check_numbers(member, f"{path}[{position}]")
    elif value is not None and _kind(value) is not bool:
        (_count if _kind(value) is int else _number)(value, path)


def _brief(value: Any) -> str:
    """As text of one line: long ones by a digest."""
    text = json.dumps(value, sort_keys=True, default=_of_tensor)
    if len(text) <= 80:
        return text
    return f"sha256 {hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _of_tensor(tensor: Tensor) -> list[Any]:
    data = tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
    return [str(tensor.dtype), list(tensor.shape), hashlib.sha256(data).hexdigest()]
