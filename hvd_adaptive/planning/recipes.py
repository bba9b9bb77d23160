"""Recipes: pairs of a budget and an allocator that have a name.

A new one is a frozen dataclass without a body, and one row in :data:`REGISTRY`.
"""

from __future__ import annotations

from abc import ABC
from dataclasses import dataclass
from typing import final

from hvd_adaptive import specs
from hvd_adaptive.planning.allocators import (
    Allocator,
    FollowReference,
    KMeans,
    MinCostKnapsack,
    MinErrorKnapsack,
    Uniform,
)
from hvd_adaptive.planning.budgets import (
    Accuracy,
    Bandwidth,
    BudgetOptions,
    CriticalRegimes,
    Static,
    Throughput,
)
from hvd_adaptive.planning.least_time import LeastTime
from hvd_adaptive.planning.metrics import SQUARED, ErrorMetric
from hvd_adaptive.planning.planner import Planner, Pricing


@dataclass(frozen=True)
class Recipe(BudgetOptions, Allocator, ABC):
    """A budget and an allocator under one name, with the options of both.

    Args:
        period: steps between plans; 0 plans only when the budget asks for it.
        accumulate: measure errors of the mean of all gradients since the last plan, as L-GreCo's paper
            does, which keeps one float32 per element; else they are the mean errors of some of them.
    """

    period: int = 500
    accumulate: bool = False

    def __post_init__(self) -> None:
        if self.accumulate and getattr(self, "exact", False):
            raise ValueError("accumulate=true needs exact=false: exact plans use one step's gradients")
        if self.period < 0:
            raise ValueError(f"period={self.period}: write a number of steps, or 0")
        super().__post_init__()

    @final
    def planner(self, ranks: int = 1) -> Planner:
        """A planner at its start, for a training run on this many ranks."""
        pricing = self if isinstance(self, Pricing) else None
        return Planner(
            self.budget(ranks), self, period=self.period, pricing=pricing, metric=self.error_metric
        )

    @property
    @final
    def error_metric(self) -> ErrorMetric:
        """How errors are measured and added up: as they are, where the recipe has no such options."""
        return self if isinstance(self, ErrorMetric) else SQUARED


@dataclass(frozen=True)
class LGreCo(Static, MinCostKnapsack, Pricing, ErrorMetric, Recipe):
    """``lgreco``: the fewest bytes whose errors, in its metric, add up to no more than the defaults'.

    Options: those of :class:`Static`, :class:`MinCostKnapsack`, :class:`Pricing`, :class:`ErrorMetric`
    and :class:`Recipe`.
    """

    accumulate: bool = True


@dataclass(frozen=True)
class LGreCoTime(LGreCo):
    """``lgreco-time``: as :class:`LGreCo`, but the least time, as far as buckets' times are known.

    The first plans are trials: they keep the bound of the error and differ in which buckets they spare.
    Later plans add to what was learned from them.
    """

    prices: str = "time"
    trials: int = 8
    trial_steps: int = 15


@dataclass(frozen=True)
class Kimad(Bandwidth, Uniform, Recipe):
    """``kimad``: the most faithful label for all layers that keeps a step's time.

    Options: those of :class:`Bandwidth` and :class:`Recipe`; ``seconds`` must be given.
    """

    period: int = 10


@dataclass(frozen=True)
class KimadPlus(Bandwidth, MinErrorKnapsack, Recipe):
    """``kimad+``: the least error that keeps a step's time.

    Options: those of :class:`Bandwidth`, :class:`MinErrorKnapsack` and :class:`Recipe`; ``seconds``
    must be given.
    """

    period: int = 50


@dataclass(frozen=True)
class GraVAC(Throughput, FollowReference, Recipe):
    """``gravac``: the compression factor with the highest throughput x gain, for all layers.

    Options: those of :class:`Throughput` and :class:`Recipe`.
    """

    period: int = 0


@dataclass(frozen=True)
class Accordion(CriticalRegimes, FollowReference, Recipe):
    """``accordion``: little compression for layers in a critical regime, much for the others.

    Options: those of :class:`CriticalRegimes` and :class:`Recipe`.
    """


@dataclass(frozen=True)
class AccordionLGreCo(CriticalRegimes, MinCostKnapsack, Pricing, ErrorMetric, Recipe):
    """``accordion+lgreco``: as :class:`LGreCo`, with Accordion's levels in the place of the defaults.

    Options: those of :class:`CriticalRegimes`, :class:`MinCostKnapsack`, :class:`Pricing`,
    :class:`ErrorMetric` and :class:`Recipe`. Source: L-GreCo, section 5.3.

    Memory: one float32 per element, for the sum of the gradients since the last plan, which serves both
    Accordion's norm and L-GreCo's errors; two with ``residual=true``, whose errors are of another sum.
    """

    accumulate: bool = True


@dataclass(frozen=True)
class GraVACLGreCo(Throughput, MinCostKnapsack, Pricing, ErrorMetric, Recipe):
    """``gravac+lgreco``: as :class:`LGreCo`, with GraVAC's factor in the place of the defaults.

    Options: those of :class:`Throughput`, :class:`MinCostKnapsack`, :class:`Pricing`,
    :class:`ErrorMetric` and :class:`Recipe`; ``accumulate`` is off, because plans come when the factor
    changes.
    """


@dataclass(frozen=True)
class CGX(Static, KMeans, Recipe):
    """``cgx``: one level for every cluster of layers, with no more error than the defaults.

    Options: those of :class:`KMeans` and :class:`Recipe`.
    """


@dataclass(frozen=True)
class Auto(Accuracy, LeastTime, Recipe):
    """``auto``: the least time within limits on delay and noise; dense where that is fastest.

    Options: those of :class:`Accuracy` and :class:`Recipe`.
    """

    period: int = 100

    def __post_init__(self) -> None:
        if self.accumulate:
            raise ValueError(
                "auto: accumulate=true is not possible: residuals are looked at step by step"
            )
        super().__post_init__()


REGISTRY: dict[str, type[Recipe]] = {
    "lgreco": LGreCo,
    "lgreco-time": LGreCoTime,
    "kimad": Kimad,
    "kimad+": KimadPlus,
    "gravac": GraVAC,
    "accordion": Accordion,
    "accordion+lgreco": AccordionLGreCo,
    "gravac+lgreco": GraVACLGreCo,
    "cgx": CGX,
    "auto": Auto,
}
"""Recipes by name; add a row for one of your own."""

# Not by an assignment: type checkers and mkdocstrings read that only where it is a literal. Without
# one they take every public name that is defined here.
globals()["__all__"] = [
    "REGISTRY",
    "Recipe",
    "format_recipe",
    "parse",
    *(member.__name__ for member in REGISTRY.values()),
]


def parse(planner: str | Recipe) -> Recipe:
    """Read a recipe from text.

    Raises:
        ValueError: unknown name or option, or a value that does not fit; the message lists what is
            valid.

    Example:
        >>> parse("accordion+lgreco:period=200,low=4").low
        4.0
    """
    return planner if isinstance(planner, Recipe) else specs.read("planner", REGISTRY, planner)


def format_recipe(recipe: Recipe) -> str:
    """The text of which :func:`parse` makes an equal recipe.

    Example:
        >>> format_recipe(LGreCo(period=200))
        'lgreco:period=200'
    """
    name = next(name for name, member in REGISTRY.items() if member is type(recipe))
    return specs.write(name, recipe, defaults=False)
