"""The learning rates of an optimizer, and whether they have fallen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.nn import Parameter

from hvd_adaptive.engine.hooks import GradientHooks


class LearningRates:
    """The learning rates of the parameters' groups.

    Args:
        hooks: the parameters.
    """

    def __init__(self, hooks: GradientHooks) -> None:
        self._hooks = hooks
        self.param_groups: Callable[[], list[dict[str, Any]]] = list
        """The optimizer's parameter groups."""
        self.last: tuple[float, ...] = ()
        """The rates of the last step, by parameter group."""

    def of(self, index: int) -> float:
        """The learning rate of a layer; 0 where the optimizer has none."""
        return float(self.group_of(self._hooks.params[index]).get("lr", 0.0))

    def group_of(self, parameter: Parameter) -> dict[str, Any]:
        """The group of a parameter; empty where the optimizer does not have it."""
        for group in self.param_groups():
            if any(member is parameter for member in group["params"]):
                return group
        return {}

    @property
    def rising(self) -> bool:
        """Whether a rate is higher than it was when :meth:`fell` was called last."""
        now = [float(group.get("lr", 0.0)) for group in self.param_groups()]
        return any(rate > before for rate, before in zip(now, self.last, strict=False))

    def fell(self, drop: float) -> bool:
        """Whether a rate has fallen by a share of ``drop`` or more since the last call."""
        before = self.last
        self.last = tuple(float(group.get("lr", 0.0)) for group in self.param_groups())
        kept = 1.0 - drop
        return any(now < kept * then for now, then in zip(self.last, before, strict=False))
