"""The second moments that an optimizer keeps of its parameters' gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from hvd_adaptive.adaptation.preconditioning import SecondMoment
from hvd_adaptive.engine.hooks import GradientHooks
from hvd_adaptive.engine.learning_rates import LearningRates
from hvd_adaptive.layers import Layer


class SecondMoments:
    """Looks second moments up in the optimizer's state: of Adam and its kin, and of RMSprop.

    Args:
        hooks: the parameters.
        rates: their groups, which hold the options of the averages.
    """

    def __init__(self, hooks: GradientHooks, rates: LearningRates) -> None:
        self._hooks = hooks
        self._rates = rates
        self.state: Callable[[], Mapping[Parameter, Mapping[str, Any]]] = dict
        """The optimizer's state of each parameter."""

    def of(self, layer: Layer) -> SecondMoment | None:
        """The second moment of a layer; None before its first step, or where none is kept."""
        parameter = self._hooks.params[layer.index]
        found = self.state().get(parameter, {})
        group = self._rates.group_of(parameter)
        averages = (
            (found.get("exp_avg_sq"), group.get("betas", (0.9, 0.999))[1]),
            (found.get("square_avg"), group.get("alpha", 0.99)),
        )
        for average, decay in averages:
            if isinstance(average, Tensor) and average.numel() == layer.numel:
                flat = average.detach().reshape(-1).float()
                return SecondMoment(flat, float(decay), float(group.get("eps", 1e-8)))
        return None
