"""Damage to compression states: one change that no run would have saved."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

# What a state may lack: it then knows less, and says so.
OPTIONAL = ("rates", "expected", "codecs")


def damaged(state: dict[str, Any], seed: int) -> tuple[dict[str, Any], str]:
    """A copy of a state with one change, drawn by the seed, and the item (first key) that it is in."""
    changed = copy.deepcopy(state)
    draw = random.Random(seed)
    holder, path = _place(changed, draw)
    draw.choice(list(_ways(holder, path[-1], path)))(draw)
    return changed, path[0]


def _place(state: dict[str, Any], draw: random.Random) -> tuple[Any, tuple[Any, ...]]:
    """A place in a state: the dict or list that holds it, and all keys to it.

    Level by level, or one of the numbers in long lists would nearly always be drawn.
    """
    holder: Any = state
    path: tuple[Any, ...] = ()
    while True:
        key = draw.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
        path = (*path, key)
        member = holder[key]
        if not isinstance(member, dict | list) or not member or draw.random() < 0.2:
            return holder, path
        holder = member


def _ways(holder: Any, key: Any, path: tuple[Any, ...]) -> Iterator[Callable[[random.Random], None]]:
    """What can be done to one place."""
    value = holder[key]

    def put(new: Any) -> Callable[[random.Random], None]:
        return lambda draw: holder.__setitem__(key, new)

    others = [3.5, "what", True, {"a": 1}, [1.5], b"x", torch.zeros(3, dtype=torch.int64)]
    wrong = [each for each in others if not _same_kind(each, value)]
    if value is not None and path != ("controller",):  # None: nobody has planned yet
        wrong.append(None)
    yield lambda draw: holder.__setitem__(key, draw.choice(wrong))
    if isinstance(holder, dict) and not any(part in OPTIONAL for part in path[:-1]):
        yield lambda draw: holder.__delitem__(key)
        yield lambda draw: holder.__setitem__(f"{key}x", holder.pop(key))
    if isinstance(value, bool):
        return
    if isinstance(value, int):
        yield put(-2)
    if isinstance(value, int | float):
        yield put(math.nan)
        yield put(-math.inf)
    if isinstance(value, Tensor):
        yield put(value.double())
        yield put(value.to(torch.int32))
        yield put(value[:-1])
        yield put(value.view(1, *value.shape))
        yield lambda draw: _spoil(value, draw)


def _same_kind(new: Any, value: Any) -> bool:
    """Whether it would be a value like the other: then it need not be refused."""
    numbers = (int, float)
    return isinstance(new, type(value)) or (
        isinstance(new, numbers) and isinstance(value, numbers) and not isinstance(new, bool)
    )


def _spoil(tensor: Tensor, draw: random.Random) -> None:
    tensor.view(-1)[draw.randrange(tensor.numel())] = draw.choice([math.nan, math.inf])
