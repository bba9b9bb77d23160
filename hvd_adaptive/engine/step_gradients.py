"""This step's gradients: as they were when they arrived, and where their results go."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.nn import Parameter

from hvd_adaptive.engine.hooks import GradientHooks
from hvd_adaptive.feedback import RESIDUAL, LayerStates
from hvd_adaptive.layers import Layer


class StepGradients:
    """The gradients of one step, in whose memory the results are formed.

    Args:
        hooks: the parameters.
    """

    def __init__(self, hooks: GradientHooks) -> None:
        self._hooks = hooks
        self._kept: dict[int, Tensor] = {}
        self._densified: dict[int, Tensor] = {}
        self.frozen: dict[int, None] = {}
        """Layers that were frozen since the last step and took part in this one with zeros."""

    def keep(self, index: int) -> None:
        """Hold on to a gradient: until the step ends, ``grad`` may be bound to another tensor."""
        grad = self._hooks.params[index].grad
        assert grad is not None
        # an alias, because "grad.data = other" changes the tensor itself; sparse ones are written whole
        self._kept[index] = grad.detach() if grad.layout == torch.strided else grad

    def dropped(self) -> list[str]:
        """Layers whose gradients have arrived and have been set to None since."""
        hooks = self._hooks
        return [hooks.names[index] for index in self._kept if hooks.params[index].grad is None]

    def dense(self, index: int) -> Tensor:
        """The gradient that is sent and overwritten; zeros where this rank has none."""
        parameter = self._cleared_if_frozen(index)
        if parameter.grad is None and index not in self._kept:
            parameter.grad = torch.zeros_like(parameter)
        if index not in self._kept:
            self.keep(index)
        grad = self._kept[index]
        if grad.layout != torch.strided:
            grad = self._densified[index] = grad.to_dense()
        return grad

    def sparse(self, layer: Layer) -> Tensor:
        """The gradient of a layer whose gradients are sparse on some rank."""
        parameter = self._cleared_if_frozen(layer.index)
        grad = self._kept.get(layer.index, parameter.grad)
        if grad is None:
            indices = torch.empty((1, 0), dtype=torch.int64, device=layer.device)
            values = torch.empty((0, *layer.shape[1:]), dtype=layer.dtype, device=layer.device)
            grad = parameter.grad = torch.sparse_coo_tensor(indices, values, layer.shape)
        elif grad.layout == torch.strided:
            grad = grad.to_sparse(1)
        self._kept[layer.index] = grad
        return grad

    def _cleared_if_frozen(self, index: int) -> Parameter:
        """The parameter; without a gradient if it was frozen, because that is of an earlier step."""
        parameter = self._hooks.params[index]
        if not self._hooks.trained[index]:
            parameter.grad = None
            self._kept.pop(index, None)
            self.frozen[index] = None
        return parameter

    def result(self, index: int) -> Tensor:
        """The reduced gradient of a layer that was sent in this step, dense where it was sent so."""
        return self._densified.get(index, self._kept[index])

    def seen_sparse(self) -> set[str]:
        """Layers with a sparse gradient on this rank."""
        pairs = zip(self._hooks.names, self._hooks.params, strict=True)
        return {
            name
            for name, parameter in pairs
            if parameter.grad is not None and parameter.grad.layout == torch.sparse_coo
        }

    def bind_results(self) -> None:
        """Put the results into parameters whose ``grad`` was bound to another tensor meanwhile."""
        for index, reduced in self._kept.items():
            parameter = self._hooks.params[index]
            grad = parameter.grad
            if grad is None or grad is reduced:
                continue
            if grad.layout != torch.strided or reduced.layout != torch.strided:
                parameter.grad = reduced
            elif grad.data_ptr() != reduced.data_ptr() or grad.stride() != reduced.stride():
                # as Horovod does: whoever holds the new tensor sees the result, too
                grad.set_(reduced)  # type: ignore[call-overload]

    def restore_layouts(self, sparse: Iterable[str]) -> None:
        """Give layers with sparse gradients, sent as dense ones, sparse gradients again.

        Args:
            sparse: names of layers that are always to have sparse gradients.
        """
        for index, dense in self._densified.items():
            self._hooks.params[index].grad = dense.to_sparse(1)
        for name in sparse:
            parameter = self._hooks.params[self._hooks.names.index(name)]
            if parameter.grad is not None and parameter.grad.layout == torch.strided:
                parameter.grad = parameter.grad.to_sparse(1)

    def take_back_frozen(self, kept: LayerStates, share: Callable[[Tensor], Tensor]) -> None:
        """Layers frozen since the last step have sent what was kept of them: keep it again.

        Args:
            kept: what is kept of each layer, as views.
            share: what each rank must have sent for a reduced gradient.
        """
        for index in self.frozen:
            parameter = self._hooks.params[index]
            residual = kept.get(self._hooks.names[index], {}).get(RESIDUAL)
            if residual is not None and parameter.grad is not None:
                residual.add_(share(parameter.grad.detach().float().reshape(-1)))
            parameter.grad = None

    def clear(self) -> None:
        """Forget the step."""
        self._kept.clear()
        self._densified.clear()
        self.frozen.clear()
