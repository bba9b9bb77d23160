"""A backward pass on a device beside the core: gradients come after the time that it would take."""

from __future__ import annotations

import time
from collections.abc import Callable

from torch import Tensor, nn


def wait_for_device(model: nn.Module, seconds: float) -> None:
    """Let every gradient of a model arrive later, as if a device computed it.

    A layer's share of the time is that of its parameters; an embedding, which multiplies nothing, has
    none. The core is free meanwhile, as where an accelerator computes, and communication goes on.

    Args:
        model: whose backward pass waits from now on.
        seconds: that a whole backward pass waits.

    Example:
        >>> import torch
        >>> model = nn.Linear(4, 4)
        >>> wait_for_device(model, 0.02)
        >>> started = time.perf_counter()
        >>> model(torch.ones(4)).sum().backward()
        >>> time.perf_counter() - started > 0.02
        True
    """
    looked_up = {
        parameter
        for module in model.modules()
        if isinstance(module, nn.Embedding)
        for parameter in module.parameters(recurse=False)
    }
    computed = [each for each in model.parameters() if each.requires_grad and each not in looked_up]
    total = sum(each.numel() for each in computed)
    for parameter in computed:
        parameter.register_hook(_waiting(seconds * parameter.numel() / total))


def _waiting(seconds: float) -> Callable[[Tensor], None]:
    """A hook that waits before a gradient is there."""

    def wait(_: Tensor) -> None:
        time.sleep(seconds)

    return wait
