"""Gradient hooks: the parameters of one optimizer, and word of each gradient that is complete."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable

from torch import Tensor
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from hvd_adaptive.layers import Layer


class GradientHooks:
    """Parameters with their names, and hooks on those that are trained.

    Args:
        passes: backward passes after which a gradient is complete.
        active: False to install no hooks.
        on_gradient: a bound method, called with a parameter's index after each of its backward
            passes; held weakly, because parameters outlive optimizers.
    """

    def __init__(self, passes: int, active: bool, on_gradient: Callable[[int], None]) -> None:
        self.passes = passes
        self.names: list[str] = []
        self.params: list[Parameter] = []
        self.trained: list[bool] = []
        """Which parameters required a gradient when that was last looked at."""
        self._active = active
        self._on_gradient = weakref.WeakMethod(on_gradient)
        self._handles: list[RemovableHandle | None] = []
        self._remaining: list[int] = []

    def add(self, name: str, parameter: Parameter) -> None:
        """Take one more parameter."""
        self.names.append(name)
        self.params.append(parameter)
        self.trained.append(False)
        self._handles.append(None)
        self._remaining.append(self.passes)
        self._follow(len(self.params) - 1)

    def follow(self) -> bool:
        """Follow every parameter's ``requires_grad``; True if one has changed."""
        changed = [self._follow(index) for index in range(len(self.params))]
        return any(changed)

    def _follow(self, index: int) -> bool:
        parameter = self.params[index]
        if parameter.requires_grad == self.trained[index]:
            return False
        self.trained[index] = parameter.requires_grad
        handle = self._handles[index]
        if handle is not None:
            handle.remove()
        notify = functools.partial(_notify, self._on_gradient, index)
        self._handles[index] = (
            parameter.register_post_accumulate_grad_hook(notify)
            if parameter.requires_grad and self._active
            else None
        )
        return True

    def is_complete(self, index: int) -> bool:
        """Count one backward pass of a parameter; whether its gradient is now complete.

        Raises:
            AssertionError: there were more passes than :attr:`passes`.
        """
        left = self._remaining[index] - 1
        if left < 0:
            raise AssertionError(
                "Gradients were computed more than backward_passes_per_step times before call to "
                "step(). Increase backward_passes_per_step to accumulate gradients locally."
            )
        self._remaining[index] = left
        return left == 0

    def rearm(self) -> None:
        """Count backward passes from 0 again."""
        self._remaining = [self.passes] * len(self.params)

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            if handle is not None:
                handle.remove()

    def layer(self, index: int) -> Layer:
        """One parameter, as a layer."""
        parameter = self.params[index]
        name, shape = self.names[index], tuple(parameter.shape)
        return Layer(index, name, shape, parameter.dtype, parameter.device)

    def layers(self) -> list[Layer]:
        """The layers that are trained now."""
        return [self.layer(index) for index, trained in enumerate(self.trained) if trained]


def _notify(method: weakref.WeakMethod[Callable[[int], None]], index: int, parameter: Tensor) -> None:
    """The hook of one parameter."""
    del parameter
    on_gradient = method()
    if on_gradient is not None:
        on_gradient(index)
