"""What the parity tests share: a small model, data that differs by rank, and a by-hand reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias

import horovod.torch as hvd
import torch
from torch import Tensor, nn

import hvd_adaptive as hva
from tests.collectives.helpers import Layers, gradients

Wrap: TypeAlias = Callable[..., Any]
Snapshot: TypeAlias = dict[str, Tensor | None]


class Model(nn.Module):
    """Weights large and small, a norm, and a branch that a step may leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(40, 48)
        self.norm = nn.LayerNorm(48)
        self.branch = nn.Linear(48, 48)
        self.last = nn.Linear(48, 5)

    def forward(self, x: Tensor, branch: bool = True) -> Tensor:
        x = self.norm(self.first(x)).relu()
        if branch:
            x = x + self.branch(x).tanh()
        out: Tensor = self.last(x)
        return out


def make_model(kind: Callable[[], nn.Module] = Model) -> Any:
    """The same weights on every rank and at every call."""
    torch.manual_seed(42)
    return kind()


LAYERS = {"wide": (64, 128), "tall": (3000, 4), "bias": (64,)}
"""Shapes of layers whose gradients are set, not computed."""


def make_layers() -> Any:
    return make_model(lambda: Layers(LAYERS))


def layer_gradients(rank: int, step: int) -> dict[str, Tensor]:
    return gradients(rank, step, LAYERS)


def batch(step: int, features: int = 40, rank: int | None = None) -> Tensor:
    """Inputs that differ by rank and step."""
    rank = hvd.rank() if rank is None else rank
    generator = torch.Generator().manual_seed(1_000 * rank + step)
    return torch.randn(6, features, generator=generator)


def loss_of(model: nn.Module, step: int, **arguments: Any) -> Tensor:
    """A scalar of the size of one."""
    dtype = next(model.parameters()).dtype
    loss: Tensor = model(batch(step).to(dtype), **arguments).square().mean()
    return loss


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=1e-3)


def snapshot(model: nn.Module) -> Snapshot:
    """Copies of all parameters and of their gradients."""
    values: Snapshot = {}
    for name, parameter in model.named_parameters():
        values[name] = parameter.detach().clone()
        grad = parameter.grad
        if grad is not None:
            grad = (grad.to_dense() if grad.is_sparse else grad).clone()
        values[f"{name}.grad"] = grad
    return values


def plain_step(model: nn.Module, optimizer: Any, step: int) -> None:
    optimizer.zero_grad()
    loss_of(model, step).backward()
    optimizer.step()


def train(
    wrap: Wrap,
    one_step: Callable[[Any, Any, int], None] = plain_step,
    *,
    kind: Callable[[], nn.Module] = Model,
    optimizer: Callable[[Any], torch.optim.Optimizer] = sgd,
    steps: int = 4,
    **options: Any,
) -> list[Snapshot]:
    """Parameters and gradients after every step of a run that starts from the same weights."""
    model = make_model(kind)
    options.setdefault("named_parameters", list(model.named_parameters()))
    wrapped = wrap(optimizer(model.parameters()), **options)
    snapshots = [snapshot(model)]
    for step in range(steps):
        one_step(model, wrapped, step)
        snapshots.append(snapshot(model))
    return snapshots


def ours(optimizer: torch.optim.Optimizer, **options: Any) -> Any:
    return hva.DistributedOptimizer(optimizer, **options)


def stock(optimizer: torch.optim.Optimizer, **options: Any) -> Any:
    return hvd.DistributedOptimizer(optimizer, **options)


def residuals_of(optimizer: Any) -> dict[str, Tensor]:
    """This rank's residuals by layer."""
    kept = optimizer.compression_state_dict()["kept"]
    return {name: slots["residual"] for name, slots in kept.items() if "residual" in slots}


class ByHand:
    """A plain optimizer whose gradients are averaged by one blocking operation each.

    For what stock Horovod cannot do: parameters that are added, frozen or unfrozen later, and layouts
    and dtypes that it refuses.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, named_parameters: Any = None, **_options: Any
    ) -> None:
        self.optimizer = optimizer

    def zero_grad(self, *arguments: Any, **keywords: Any) -> None:
        self.optimizer.zero_grad(*arguments, **keywords)

    def add_param_group(self, group: dict[str, Any]) -> None:
        self.optimizer.add_param_group(group)

    def synchronize(self) -> None:
        position = 0
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad:
                    grad = parameter.grad
                    grad = torch.zeros_like(parameter) if grad is None else grad
                    parameter.grad = mean_of(grad, f"byhand.{position}").view_as(parameter)
                position += 1

    def step(self, closure: Callable[[], Tensor] | None = None) -> Any:
        if closure is None:
            self.synchronize()
            return self.optimizer.step()

        def reduced() -> Tensor:
            with torch.enable_grad():
                loss = closure()
            self.synchronize()
            return mean_of(loss.detach().double(), "byhand.loss").to(loss.dtype)

        return self.optimizer.step(reduced)  # type: ignore[arg-type]


def mean_of(value: Tensor, name: str, op: int = hvd.Average) -> Tensor:
    """The mean over the ranks, in the value's own dtype and layout."""
    dtype = torch.float32 if value.dtype == torch.bfloat16 else value.dtype
    sent = value.to(dtype, memory_format=torch.contiguous_format, copy=True)
    mean: Tensor = hvd.allreduce(sent, op=op, name=name)
    return torch.empty_like(value).copy_(mean)


def assert_same(left: list[Snapshot], right: list[Snapshot], *, parameters_only: bool = False) -> None:
    """Every value of every step is the same to the bit, and training changed something."""
    assert len(left) == len(right) > 1
    for step, (mine, other) in enumerate(zip(left, right, strict=True)):
        assert mine.keys() == other.keys()
        for name in mine:
            if not (parameters_only and name.endswith(".grad")):
                assert bits(mine[name]) == bits(other[name]), (
                    f"{name} differs after {step} steps:\n{mine[name]}\n{other[name]}"
                )
    names = [name for name in left[0] if not name.endswith(".grad")]
    assert any(bits(left[0][name]) != bits(left[-1][name]) for name in names), "nothing was trained"


def bits(value: Tensor | None) -> bytes | None:
    if value is None:
        return None
    return value.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def assert_ranks_agree(model: nn.Module, process_set: Any = hvd.global_process_set) -> None:
    """All ranks hold the same parameters to the bit."""
    for name, parameter in model.named_parameters():
        mine = torch.frombuffer(bytearray(bits(parameter) or b"\0"), dtype=torch.uint8)
        everyone = hvd.allgather(mine.view(1, -1), name=f"agree.{name}", process_set=process_set)
        assert bool((everyone == mine).all()), f"{name} differs between ranks"


def set_gradients(model: nn.Module, gradients: Mapping[str, Tensor | None]) -> None:
    """A backward pass that yields exactly these gradients; None leaves the parameter out."""
    loss = torch.zeros(())
    for name, parameter in model.named_parameters():
        gradient = gradients.get(name)
        if gradient is not None:
            loss = loss + (parameter * gradient).sum()
    if loss.requires_grad:
        loss.backward()


@contextmanager
def counted(monkeypatch: Any) -> Iterator[dict[str, int]]:
    """Counts the operations by which gradients are sent."""
    counts: dict[str, int] = {}
    names = ("allreduce_async_", "allgather_async", "alltoall_async", "sparse_allreduce_async")
    with monkeypatch.context() as patched:
        for name in names:
            counts[name] = 0
            patched.setattr(hvd, name, _counting(name, getattr(hvd, name), counts))
        yield counts


def _counting(name: str, function: Any, counts: dict[str, int]) -> Any:
    def call(*arguments: Any, **keywords: Any) -> Any:
        counts[name] += 1
        return function(*arguments, **keywords)

    return call


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": sgd,
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
}
