"""Layer agreement: which layers all ranks train, in which order they are sent, and which are sparse."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hvd_adaptive.comm.agreement import Control
from hvd_adaptive.engine.routing import check_dtypes, unfit_dtypes
from hvd_adaptive.layers import Layer


@dataclass(frozen=True)
class LayerReport:
    """What one rank reports of its layers.

    Args:
        rounds: steps that it has synchronized.
        layers: names of those that are trained.
        arrivals: names in the order in which their gradients arrived.
        order: names in the order that was agreed on before.
        sparse: names of those with sparse gradients.
        unfit: dtypes of those whose gradients cannot be sent, by name.
    """

    rounds: int
    layers: list[str]
    arrivals: list[str]
    order: list[str]
    sparse: list[str]
    unfit: dict[str, str]


@dataclass(frozen=True)
class AgreedLayers:
    """What all ranks then know: the number of the step, the order, and which layers are sparse."""

    rounds: int
    order: list[str]
    sparse: frozenset[str]


def agree_on_layers(control: Control, mine: LayerReport) -> AgreedLayers:
    """Learn from all ranks which layers are trained, in which order, and which are sparse.

    Args:
        control: agreement between ranks; all of them call it.
        mine: this rank's report.

    Raises:
        ValueError: ranks train different layers, or some dtype cannot be sent; on all ranks.
    """
    everyone = [LayerReport(**each) for each in control.allgather(vars(mine))]
    first = everyone[0]
    for rank, other in enumerate(everyone):
        different = set(other.layers) ^ set(first.layers)
        if different:
            raise ValueError(
                f"rank {rank} of the process set trains other parameters than rank 0: "
                f"requires_grad differs for {', '.join(sorted(different))}; freeze and unfreeze "
                "the same parameters at the same step on all ranks"
            )
        check_dtypes(other.unfit)
    known = dict.fromkeys([*first.order, *first.arrivals])
    # gradients become ready from the last layer to the first
    known.update(dict.fromkeys(reversed(mine.layers)))
    trained = set(mine.layers)
    return AgreedLayers(
        first.rounds,
        [name for name in known if name in trained],
        frozenset(name for other in everyone for name in other.sparse),
    )


def report_layers(layers: Sequence[Layer], **rest: Any) -> LayerReport:
    """This rank's report; ``rest`` holds the fields that layers do not tell."""
    unfit = unfit_dtypes({layer.name: layer.dtype for layer in layers})
    return LayerReport(layers=[layer.name for layer in layers], unfit=unfit, **rest)


def refuse_dropped(control: Control, dropped: Sequence[str]) -> None:
    """Raise RuntimeError on all ranks: some parameter would be updated on some of them only.

    Args:
        control: agreement between ranks; all of them call it.
        dropped: layers whose gradients were dropped here.
    """
    everyone = control.allgather(list(dropped))
    found = [f"{', '.join(names)} on rank {rank}" for rank, names in enumerate(everyone) if names]
    raise RuntimeError(
        "gradients that had been sent during backward() were None in step() or synchronize(): "
        f"{'; '.join(found)} of the process set. The other ranks would step with them, and ranks "
        "would differ from then on: to leave a parameter out, call optimizer.synchronize() first "
        "and drop its gradient on all ranks, then step within optimizer.skip_synchronize()"
    )
