"""Compression states of one run, made fit for another number of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def merge_compression_states(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The state with which each of any number of ranks goes on after a run of ``len(states)`` ranks.

    What a rank has not sent yet (residuals, velocities, EF21's estimates) becomes the mean over the
    ranks that saved it, so that the mean over ranks stays what it was: no gradient is lost. What all
    ranks hold alike (learnt levels, warm starts) is taken from the first. Cost: a float64 copy of one
    layer at a time, and the result.

    Args:
        states: ``compression_state_dict()`` of every rank of the run that saved them, in rank order.

    Returns:
        For ``load_compression_state_dict()`` on every rank.

    Raises:
        ValueError: there is no state, or they are not of one step of one run.

    Example:
        >>> one, other = (
        ...     {"format": 4, "rounds": 7, "kept": {"w": {"residual": torch.tensor([value])}}}
        ...     for value in (1.0, 2.0)
        ... )
        >>> merge_compression_states([one, other])["kept"]["w"]["residual"]
        tensor([1.5000])
    """
    if not states:
        raise ValueError("there is no compression state to merge: give one of each rank")
    first = states[0]
    for rank, state in enumerate(states):
        for key in ("format", "rounds"):
            if state.get(key) != first.get(key):
                raise ValueError(
                    f"the compression states of rank 0 and rank {rank} are not of one step: {key} is "
                    f"{first.get(key)!r} on the one and {state.get(key)!r} on the other"
                )
    kept = {
        name: {slot: _mean(states, name, slot) for slot in slots}
        for name, slots in first["kept"].items()
    }
    return {**first, "kept": kept}


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
