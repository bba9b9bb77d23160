"""The contract of a controller, and one for optimizers without a planner."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from torch import Tensor

from hvd_adaptive.adaptation.messages import Votes
from hvd_adaptive.adaptation.outlook import Outlook
from hvd_adaptive.adaptation.preconditioning import SecondMoment
from hvd_adaptive.adaptation.timing import CollectiveTiming
from hvd_adaptive.arrays import Float64s
from hvd_adaptive.compressors.base import Compressor, Level
from hvd_adaptive.layers import Layer
from hvd_adaptive.planning import Recipe
from hvd_adaptive.planning.plan import Expected

Chain: TypeAlias = tuple[Compressor, list[tuple[Level, ...]]]
"""What layers are compressed to, one after the other: by a compressor, to a level for each of them."""
Assignment: TypeAlias = tuple[Compressor | None, Level]
"""What a plan gives to one layer; without a compressor it is sent dense."""


class Controller(Protocol):
    """Decides on levels during training; every rank has one.

    In the order of a step: :meth:`votes`, :meth:`observe` for each layer,
    :meth:`decide_before_launch` where :attr:`exact`, :meth:`learn`, :meth:`end_step`, and then what the
    votes of rank 0 asked for: :meth:`start_collection`, :meth:`apply_decision`.
    """

    idle: bool
    """Whether this is the dense warm-up, in which nothing is decided."""
    expected: dict[str, Expected]
    """What the last plan expects of every layer, where errors were measured."""

    @property
    def recipe(self) -> Recipe | None:
        """Of the planner; None where there is none."""

    @property
    def outlook(self) -> Outlook | None:
        """What planners that look ahead know; None where there is no planner."""

    @property
    def plans(self) -> bool:
        """Whether there is a planner."""

    @property
    def exact(self) -> bool:
        """Whether it decides on a step's gradients before they are sent."""

    @property
    def per_rank_levels(self) -> bool:
        """Whether every rank has levels of its own."""

    @property
    def sees_feedback(self) -> bool:
        """Whether it must see what feedback adds to the gradients."""

    def attach(
        self,
        layers: Sequence[tuple[Layer, Compressor, str]],
        buckets: Mapping[str, int],
        other_bytes: float,
        dense_only: bool,
    ) -> None:
        """Plan for these layers."""

    def invalidate(self) -> None:
        """Layers no longer do what the last plan gives them."""

    def assignments(self) -> dict[str, Assignment]:
        """What the last plan gives to every layer."""

    def use_second_moments(self, of: Callable[[Layer], SecondMoment | None]) -> None:
        """Look the optimizer's second moment of a layer up by this."""

    def sum_levels(self) -> dict[str, Level]:
        """Levels at which it has sums compressed again, where they are not those of the layers."""

    def observes(self, step: int) -> bool:
        """Whether :meth:`observe` wants to see the layers of this step."""

    def chain(self, layers: Sequence[Layer]) -> Chain | None:
        """The levels of these layers that it decides between before they are sent."""

    def observe(
        self, layer: Layer, grad: Tensor, x: Tensor, step: int, sent: Float64s | None = None
    ) -> None:
        """Measure one layer."""

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why the plan in force is the one, in words."""

    def report_loss(self, loss: float) -> None:
        """The training loss of this step, which a planner may watch."""

    def set_horizon(self, steps: int) -> None:
        """How many steps the whole training run has."""

    def votes(self, step: int) -> Votes:
        """At the start of a step, what this rank asks all to do at its end."""

    def start_collection(self, step: int) -> None:
        """Start to average, or to gather, what was measured; all ranks call it."""

    def apply_decision(self, step: int) -> dict[str, Assignment] | None:
        """Take over rank 0's decision; all ranks call it."""

    def decide_before_launch(self, step: int) -> dict[str, Assignment] | None:
        """With all of this step's gains measured and nothing sent: plan at once, if that is due."""

    def learn(self) -> None:
        """Learn from the step before, while this one's operations are under way: it costs nothing."""

    def end_step(
        self, step: int, learning_rate: float | None, timings: Sequence[CollectiveTiming]
    ) -> None:
        """A step's gradients have all been reduced; all ranks call it."""

    def state_dict(self) -> dict[str, Any] | None:
        """Everything between two steps; None where there is nothing."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state_dict`."""


class NullController:
    """A controller that decides nothing: levels stay as the user has chosen them."""

    recipe: Recipe | None = None
    plans = False
    exact = False
    per_rank_levels = False
    sees_feedback = False
    outlook: Outlook | None = None

    def __init__(self) -> None:
        self.idle = True
        self.expected: dict[str, Expected] = {}

    def attach(
        self,
        layers: Sequence[tuple[Layer, Compressor, str]],
        buckets: Mapping[str, int],
        other_bytes: float,
        dense_only: bool,
    ) -> None:
        """Nothing is planned."""

    def invalidate(self) -> None:
        """There is no plan."""

    def assignments(self) -> dict[str, Assignment]:
        """None."""
        return {}

    def use_second_moments(self, of: Callable[[Layer], SecondMoment | None]) -> None:
        """Nothing is looked up."""

    def sum_levels(self) -> dict[str, Level]:
        """None."""
        return {}

    def observes(self, step: int) -> bool:
        """Never."""
        del step
        return False

    def chain(self, layers: Sequence[Layer]) -> Chain | None:
        """Nothing is decided."""
        del layers
        return None

    def observe(
        self, layer: Layer, grad: Tensor, x: Tensor, step: int, sent: Float64s | None = None
    ) -> None:
        """Nothing is measured."""

    @property
    def reasons(self) -> tuple[str, ...]:
        """None: there is no plan."""
        return ()

    def report_loss(self, loss: float) -> None:
        """Nobody watches it."""

    def set_horizon(self, steps: int) -> None:
        """Nobody plans for the end."""

    def votes(self, step: int) -> Votes:
        """For nothing."""
        del step
        return Votes()

    def start_collection(self, step: int) -> None:
        """Nothing was measured."""

    def apply_decision(self, step: int) -> dict[str, Assignment] | None:
        """Nothing changes."""
        del step
        return None

    def decide_before_launch(self, step: int) -> dict[str, Assignment] | None:
        """Nothing changes."""
        del step
        return None

    def learn(self) -> None:
        """There is nothing to learn for."""

    def end_step(
        self, step: int, learning_rate: float | None, timings: Sequence[CollectiveTiming]
    ) -> None:
        """Nothing is learned."""

    def state_dict(self) -> dict[str, Any] | None:
        """None: there is nothing to continue from."""
        return None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing is taken from it."""
