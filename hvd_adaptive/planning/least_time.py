"""The allocator of ``auto``: the least seconds of a step within limits on delay and on noise.

A budget grants :class:`TimeLimits`; :class:`LeastTime` picks among their *contenders*: dense, and for
each compressor by itself and for all of them together what the knapsack of two limits finds cheapest.
The knapsack adds up prices of layers, in which overlap counts as one share for all; so the contenders
are compared by :class:`~hvd_adaptive.planning.step_time.StepModel`, which plays a step through.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from hvd_adaptive.arrays import Float64s, Int64s
from hvd_adaptive.planning.allocators import Allocator
from hvd_adaptive.planning.knapsack import total
from hvd_adaptive.planning.measurements import Measurement
from hvd_adaptive.planning.step_time import StepModel, StepSeconds
from hvd_adaptive.planning.table import CandidateTable, Limits
from hvd_adaptive.planning.two_limits import least_cost, padded

__all__ = ["AS_FAST", "LEAST_GAIN", "Contender", "LeastTime", "TimeLimits"]

LEAST_GAIN = 0.02
"""Share of a dense step's seconds that compression must save, or nothing is compressed."""

AS_FAST = 0.01
"""Share of a dense step's seconds that counts as no difference between two plans."""

HIDDEN = 0.1
"""What a second of communication that computing hides counts for between two plans, as it does for
``lgreco-time``: overlap takes cores, too, and is never as good as foreseen."""

AS_GOOD = 1.1
"""Times what a plan uses of the limits that count as no difference to one that uses less."""

EASED = (0.5, 0.25)
"""Of both limits: where hardly a second is to be had by using them up, less is lost."""


@dataclass(frozen=True, eq=False)
class Contender:
    """A choice, and what is foreseen of it.

    Args:
        name: what it is made of.
        choice: ``int64[L]``.
        parts: of its seconds.
        seconds: of a step: the sum of its parts, as far as earlier forecasts were right.
        dense: whether nothing is compressed.
        gap: by what share of its additive price a better choice may exist.
    """

    name: str
    choice: Int64s
    parts: StepSeconds
    seconds: float
    dense: bool = False
    gap: float = 0.0

    @property
    def working(self) -> float:
        """Its seconds without exposed communication, by the share that its parts say."""
        return self.seconds * (1 - self.parts.exposed_share)

    @property
    def cautious(self) -> float:
        """Its seconds, with something added for what is foreseen to be hidden."""
        return self.seconds + HIDDEN * max(0.0, self.parts.network - self.parts.exposed)


@dataclass(frozen=True, eq=False, kw_only=True)
class TimeLimits(Limits):
    """What :class:`LeastTime` needs to know.

    Args:
        model: of a step.
        delays: ``float64[C_l]`` per layer: squared steps withheld, weighted; infinite forbids.
        noises: ``float64[C_l]`` per layer: added variance, weighted; infinite forbids.
        max_delay: limit of the sum of the chosen ``delays``.
        max_noise: limit of the sum of the chosen ``noises``.
        correction: measured over foreseen seconds of compressed steps, beside dense ones.
        drift: the same of all steps, as far as they have all become slower.
        current: the choice in force, which stays where others are hardly better.
        keep: a choice that is to stay, whatever would be faster; None is free to choose.
        only_dense: whether nothing may be compressed.
    """

    model: StepModel
    delays: tuple[Float64s, ...]
    noises: tuple[Float64s, ...]
    max_delay: float
    max_noise: float
    correction: float = 1.0
    drift: float = 1.0
    current: Int64s | None = None
    keep: Int64s | None = None
    only_dense: bool = False

    @functools.cached_property
    def contenders(self) -> tuple[Contender, ...]:
        """All of them, the fastest first. Cost: some knapsacks; 20 to 60 ms for 161 layers."""
        found = self.denses()
        if not self.only_dense:
            found += self._compressed(min(found, key=lambda each: each.seconds))
            found += [
                each
                for each in self.in_force
                if not any(_same(each.choice, other.choice) for other in found)
            ]
        return tuple(sorted(found, key=lambda each: each.seconds))

    @property
    def dense(self) -> Contender:
        """The fastest dense one; the one in force, unless another saves :data:`LEAST_GAIN`."""
        fastest, *others = (each for each in self.contenders if each.dense)
        for each in others:
            in_force = self.current is not None and _same(each.choice, self.current)
            if in_force and fastest.seconds > (1 - LEAST_GAIN) * each.seconds:
                return each
        return fastest

    @functools.cached_property
    def best(self) -> Contender:
        """The fastest, if it saves :data:`LEAST_GAIN`; else the fastest dense one.

        Of those that take next to no longer, also if less is hidden than foreseen, the one that loses
        least. What is in force stays if it is one of these and loses hardly more, or if no other one is
        left and dense would not be faster: what is about equal must not change with every small change
        of what was measured.
        """
        dense = self.dense
        enough = (1 - LEAST_GAIN) * dense.seconds
        able = [each for each in self.contenders if each.seconds < enough and not each.dense]
        bound = min((each.cautious for each in able), default=0.0) + AS_FAST * dense.seconds
        able = [each for each in able if each.cautious < bound]
        best = min(able, key=lambda each: self.loss(each.choice), default=dense)
        for own in self.in_force:
            if any(_same(own.choice, each.choice) for each in able):
                return own if self.loss(own.choice) <= AS_GOOD * self.loss(best.choice) else best
            if best.dense and own.seconds < dense.seconds:
                return own
        return best

    @functools.cached_property
    def in_force(self) -> tuple[Contender, ...]:
        """The choice in force, if there is one and it keeps the limits."""
        if self.current is None or self.only_dense:
            return ()
        delay, noise = self.weighed(self.current)
        fits = delay <= self.max_delay and noise <= self.max_noise
        found = self.of(self.current)
        return (found,) if fits and not found.dense else ()

    def loss(self, choice: Int64s) -> float:
        """What a choice uses of both limits."""
        delay, noise = self.weighed(choice)
        used = (
            each / limit for each, limit in ((delay, self.max_delay), (noise, self.max_noise)) if limit
        )
        return math.sqrt(sum(used))

    def of(self, choice: Int64s) -> Contender:
        """Any choice as a contender."""
        costs = self.model.costs.compressors
        specs = {row[index] for row, index in zip(self.model.specs, choice, strict=True)}
        parts = self.model.seconds(choice)
        dense = all(costs[spec].dense for spec in specs)
        names = sorted(spec for spec in specs if not costs[spec].dense) or sorted(specs)
        seconds = parts.total * self.drift * (1.0 if dense else self.correction)
        return Contender(" + ".join(names), choice, parts, seconds, dense)

    def weighed(self, choice: Int64s) -> tuple[float, float]:
        """The sums of delays and of noises of a choice."""
        return total(_picked(self.delays, choice)), total(_picked(self.noises, choice))

    @property
    def admit(self) -> bool:
        """Whether some layer may be compressed within both limits."""
        costs = self.model.costs.compressors
        return any(
            not costs[spec].dense and delay <= self.max_delay and noise <= self.max_noise
            for specs, delays, noises in zip(self.model.specs, self.delays, self.noises, strict=True)
            for spec, delay, noise in zip(specs, delays, noises, strict=True)
        )

    def denses(self) -> list[Contender]:
        """What sends every element: one for each such compressor."""
        return list(self._dense())

    def _dense(self) -> Iterator[Contender]:
        able = [spec for spec, costs in self.model.costs.compressors.items() if costs.dense]
        fitting = [
            {
                each: index
                for index, each in enumerate(specs)
                if each in able and delays[index] == 0 and noises[index] == 0
            }
            for specs, delays, noises in zip(self.model.specs, self.delays, self.noises, strict=True)
        ]
        for spec in able:
            # where half precision loses too much of a layer, another one
            choice = [found.get(spec, next(iter(found.values()))) for found in fitting]
            yield self.of(np.array(choice, dtype=np.int64))

    def _compressed(self, dense: Contender) -> Iterator[Contender]:
        """The knapsack's choices: of all compressors, and of each by itself."""
        costs = self.model.costs.compressors
        families = [spec for spec in costs if not costs[spec].dense]
        groups = [families, *([each] for each in families if len(families) > 1)]
        hidden = dense.parts.exposed / max(dense.parts.network, 1e-12)
        seen: set[bytes] = set()
        delays, noises = padded(self.delays), padded(self.noises)
        kinds = {spec: number for number, spec in enumerate(costs)}
        kind_of = padded([[kinds[spec] for spec in specs] for specs in self.model.specs])
        prices_at = functools.cache(lambda share: padded(self.model.prices(share)))
        for group, share, eased in self._searches(groups, round(min(1.0, hidden), 2)):
            allowed = [kinds[spec] for spec in costs if costs[spec].dense or spec in group]
            prices = np.where(np.isin(kind_of, allowed), prices_at(share), np.inf)
            # delays are squares
            bounds = eased**2 * self.max_delay, eased * self.max_noise
            thorough = group is families and eased == 1.0
            found = least_cost(prices, delays, noises, *bounds, thorough=thorough)
            made = self.of(found.choice)
            if found.choice.tobytes() not in seen and not made.dense:
                yield replace(made, gap=found.gap)
            seen.add(found.choice.tobytes())
            if len(group) == 1 and eased == 1.0:
                yield from self._joined(made, group[0])

    @staticmethod
    def _searches(groups: list[list[str]], hidden: float) -> Iterator[tuple[list[str], float, float]]:
        """Compressors, the share of communication that is exposed, and the share of both limits."""
        yield from ((group, 1.0, 1.0) for group in groups)
        if hidden < 1.0:
            yield groups[0], hidden, 1.0
        yield from ((groups[0], 1.0, eased) for eased in EASED)

    def _joined(self, found: Contender, family: str) -> Iterator[Contender]:
        """The same with its dense layers compressed as well, if that keeps the limits.

        Small layers are dense where their bytes are not worth it, but then take an operation of their
        own, which no price of a layer says. They get the level that loses least.
        """
        choice = found.choice.copy()
        for layer, specs in enumerate(self.model.specs):
            if specs[choice[layer]] == family:
                continue
            delays, noises = self.delays[layer], self.noises[layer]
            able = [
                index
                for index, spec in enumerate(specs)
                if spec == family and np.isfinite(delays[index]) and np.isfinite(noises[index])
            ]
            if not able:
                return
            choice[layer] = min(able, key=lambda each: (delays[each], noises[each]))
        delay, noise = self.weighed(choice)
        if delay <= self.max_delay and noise <= self.max_noise and (choice != found.choice).any():
            yield replace(self.of(choice), gap=found.gap)


def _same(one: Int64s, other: Int64s) -> bool:
    return bool((one == other).all())


def _picked(rows: Sequence[Float64s], choice: Int64s) -> Float64s:
    return np.array([row[index] for row, index in zip(rows, choice, strict=True)], dtype=np.float64)


@dataclass(frozen=True)
class LeastTime(Allocator):
    """The least foreseen seconds of a step; dense where compression saves less than 2 %."""

    allocator_needs: ClassVar[frozenset[Measurement]] = frozenset(
        {Measurement.ERRORS, Measurement.SIGNALS}
    )

    def allocate(self, table: CandidateTable, allowed: Limits) -> Int64s:
        """The best of the contenders; ValueError unless the limits are :class:`TimeLimits`."""
        del table
        if not isinstance(allowed, TimeLimits):
            raise ValueError("LeastTime needs a budget that grants TimeLimits")
        return allowed.best.choice if allowed.keep is None else allowed.keep
