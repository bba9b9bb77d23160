"""The inner loops of the knapsack, compiled.

Imported where the first problem is solved: Numba takes twice as long to import as all the rest.
"""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from hvd_adaptive.arrays import Float64s, Int64s
from hvd_adaptive.kernel_cache import jit

_kernel: Any = jit(nogil=True)


@_kernel
def hull(weights: Float64s, values: Float64s, starts: Int64s) -> npt.NDArray[np.bool_]:
    """Which points of each front are corners of its lower convex hull."""
    kept = np.zeros(len(weights), np.bool_)
    stack = np.empty(len(weights), np.int64)
    for layer in range(len(starts) - 1):
        size = 0
        for point in range(starts[layer], starts[layer + 1]):
            while size > 1:
                a, b = stack[size - 2], stack[size - 1]
                before = (values[b] - values[a]) / (weights[b] - weights[a])
                after = (values[point] - values[b]) / (weights[point] - weights[b])
                if after > before:
                    break
                size -= 1
            stack[size] = point
            size += 1
        for i in range(size):
            kept[stack[i]] = True
    return kept


@_kernel
def fill(
    steps: Int64s, prices: Float64s, starts: Int64s, most: int
) -> tuple[Float64s, npt.NDArray[np.uint16]]:
    """The least price for every number of bins, and each layer's candidate that leads there."""
    layers = len(starts) - 1
    picks = np.zeros((layers, most + 1), np.uint16)
    before, after = np.zeros(most + 1), np.empty(most + 1)
    pick = np.empty(most + 1, np.int64)  # as wide as prices, so that the inner loop is vectorised
    for layer in range(layers):
        after[:] = np.inf
        pick[:] = 0
        for candidate in range(starts[layer], starts[layer + 1]):
            step, price, number = steps[candidate], prices[candidate], candidate - starts[layer]
            for b in range(max(0, most + 1 - step)):
                cheaper = before[b] + price < after[b + step]
                after[b + step] = before[b] + price if cheaper else after[b + step]
                pick[b + step] = number if cheaper else pick[b + step]
        picks[layer] = pick
        before, after = after, before
    return before, picks


@_kernel
def walk(steps: Int64s, picks: npt.NDArray[np.uint16], starts: Int64s, bins: int) -> Int64s:
    """Back from a number of bins to the candidates that led there."""
    layers = len(starts) - 1
    choice = np.empty(layers, np.int64)
    for layer in range(layers - 1, -1, -1):
        choice[layer] = starts[layer] + np.int64(picks[layer, bins])
        bins -= steps[choice[layer]]
    return choice


@_kernel
def best_move(
    weights: Float64s, values: Float64s, starts: Int64s, choice: Int64s, slack: float
) -> Int64s:
    """The choice after the move that saves most value.

    A layer that moves to less value gains weight. If that is more than the slack, another layer must
    give some back: among those that give enough, the one whose value rises least.
    """
    layers = len(starts) - 1
    room = 0
    for layer in range(layers):
        room += choice[layer] - starts[layer]
    place, owner = np.empty(room, np.int64), np.empty(room, np.int64)
    given = np.empty(room)
    n = 0
    for layer in range(layers):
        for j in range(starts[layer], choice[layer]):
            place[n], owner[n], given[n] = j, layer, weights[choice[layer]] - weights[j]
            n += 1
    order = np.argsort(-given)
    sorted_given = -given[order]
    # for every prefix of that order: the cheapest move, and the cheapest of another layer
    first, second = np.full(room, -1, np.int64), np.full(room, -1, np.int64)
    rise = np.empty(room)
    for k in range(room):
        m = order[k]
        rise[m] = values[place[m]] - values[choice[owner[m]]]
        one, two = (first[k - 1], second[k - 1]) if k else (-1, -1)
        if one < 0 or rise[m] < rise[one]:
            if one >= 0 and owner[one] != owner[m]:
                two = one
            one = m
        elif owner[m] != owner[one] and (two < 0 or rise[m] < rise[two]):
            two = m
        first[k], second[k] = one, two

    best, mover, target, giver = 0.0, -1, -1, -1
    for layer in range(layers):
        for j in range(choice[layer] + 1, starts[layer + 1]):
            saved = values[choice[layer]] - values[j]
            need = weights[j] - weights[choice[layer]] - slack
            partner = -1
            if need > 0:
                k = np.searchsorted(sorted_given, -need, side="right") - 1
                if k < 0:
                    break  # later ones weigh more
                partner = first[k] if first[k] < 0 or owner[first[k]] != layer else second[k]
                if partner < 0:
                    continue
                saved -= rise[partner]
            if saved > best:
                best, mover, target, giver = saved, layer, j, partner
    moved = choice.copy()
    if mover >= 0:
        moved[mover] = target
        if giver >= 0:
            moved[owner[giver]] = place[giver]
    return moved
