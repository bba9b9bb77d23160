"""Training on a GPU: what ranks reduce there is what they reduce on a CPU, also in mixed precision.

On a machine with one: ``python -m pytest tests/gpu``.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from hvd_adaptive import VirtualRanks

DEVICE = torch.device("cuda")
RANKS = 3
STEPS = 6

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def network() -> nn.Module:
    """Convolutions, a normalization and a matrix: layers of all shapes."""
    torch.manual_seed(3)
    return nn.Sequential(
        *(nn.Conv2d(3, 24, 3), nn.BatchNorm2d(24), nn.ReLU(), nn.Conv2d(24, 48, 3)),
        *(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(768, 10)),
    )


def gradients(model: nn.Module, step: int, rank: int) -> dict[str, Tensor]:
    """The same numbers on every device."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return {
        name: torch.randn(parameter.shape, generator=generator).to(parameter.device)
        for name, parameter in model.named_parameters()
    }


def reduced(compression: str, device: torch.device) -> list[list[int]]:
    """The bits of what each step reduces."""
    model = network().to(device)
    ranks = VirtualRanks(RANKS, model.named_parameters(), compression)
    found = []
    for step in range(STEPS):
        ranks.reduce([gradients(model, step, rank) for rank in range(RANKS)])
        flat = torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])
        found.append(flat.cpu().view(torch.int32).tolist())
    return found


@pytest.mark.parametrize(
    "compression", ["topk:density=0.05", "qsgd:bits=4", "natural", "dgc:density=0.05", "alq:bits=3"]
)
def test_steps_are_those_of_a_cpu(compression: str) -> None:
    """Calls are recorded at the second step and replayed from then on; each has other gradients."""
    assert reduced(compression, DEVICE) == reduced(compression, torch.device("cpu"))


def batch(rank: int, step: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Images whose class can be seen."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    labels = torch.randint(0, 10, (32,), generator=generator)
    images = 0.3 * torch.randn(32, 3, 12, 12, generator=generator)
    images[torch.arange(32), labels % 3] += labels.view(-1, 1, 1) / 5
    return images.to(device), labels.to(device)


def losses(model: nn.Module, dtype: torch.dtype | None, compression: str, steps: int) -> list[float]:
    """Of a training in mixed precision, or not; one step in the middle has an Inf.

    Args:
        model: on its device.
        dtype: of autocast; float16 is scaled.
        compression: of the gradients.
        steps: of the training.
    """
    kind = next(model.parameters()).device.type
    ranks = VirtualRanks(2, model.named_parameters(), compression)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler(kind, enabled=dtype is torch.float16)
    found = []
    for step in range(steps):
        total, parts = 0.0, []
        for rank in range(2):
            images, labels = batch(rank, step, next(model.parameters()).device)
            with torch.autocast(kind, dtype=dtype, enabled=dtype is not None):
                loss = functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            parts.append(
                {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
            )
            total += loss.item() / 2
        if dtype is torch.float16 and step == steps // 2:
            parts[1]["6.weight"][3, 5] = torch.inf
        ranks.reduce(parts)
        scaler.step(optimizer)
        scaler.update()
        found.append(total)
    if dtype is torch.float16:
        assert scaler.get_scale() < 2.0**16  # the step with the Inf was skipped
    assert all(bool(p.isfinite().all()) for p in model.parameters())
    return found


@pytest.mark.parametrize("dtype", [None, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("compression", ["topk:density=0.1", "qsgd:bits=4"])
def test_mixed_precision_learns(dtype: torch.dtype | None, compression: str) -> None:
    found = losses(network().to(DEVICE), dtype, compression, 60)
    assert sum(found[-10:]) < 0.8 * sum(found[:10])


def test_channels_last_and_compiled_models_learn() -> None:
    model = network().to(DEVICE, memory_format=torch.channels_last)  # type: ignore[call-overload]
    model.compile()  # in place, so that names stay
    found = losses(model, torch.bfloat16, "topk:density=0.1", 40)
    assert sum(found[-10:]) < 0.8 * sum(found[:10])
