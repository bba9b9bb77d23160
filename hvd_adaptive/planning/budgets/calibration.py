"""What steps have shown of a step's model: computing, and by what factor its communication is off."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from hvd_adaptive.arrays import Int64s
from hvd_adaptive.planning.least_time import TimeLimits
from hvd_adaptive.planning.step_time import StepModel, calibrated, network_factor

__all__ = ["Calibration"]

DRIFTS = (0.5, 3.0)
"""Bounds of what is blamed on the machine, if steps take another time than is foreseen."""


@dataclass(slots=True)
class Calibration:
    """Seconds of computing, and the factor of the network, as dense steps have shown them.

    The factor belongs to the costs that were measured when it was found. Other ones that are measured
    while steps are compressed have two possible reasons: the network has changed, and the factor stays;
    or the costs of before were off, as may be where ranks share cores, and what dense steps took stays.
    What compressed steps wait for tells where between these two the factor is.
    """

    compute: float = 0.0
    """Seconds of forward and backward pass."""
    network: float = 1.0
    """By what factor communication takes longer in steps than it was measured."""
    alone: float = 0.0
    """Seconds of all communication of a dense step, as it was measured then; 0 where nobody knows."""
    drift: float = 1.0
    """Seconds of steps over those foreseen, where the machine has become slower or faster."""

    def by_dense(
        self, limits: TimeLimits, choice: Int64s, seconds: float, computing: float
    ) -> StepModel:
        """The model that foresees for a dense choice what its steps have taken.

        Args:
            limits: whose model is by the costs of now.
            choice: what the steps did.
            seconds: of one of them.
            computing: of these, those that were not exposed communication.
        """
        found = calibrated(limits.model, choice, seconds, computing)
        self.compute, self.network, self.alone = found.compute, found.network, _alone(limits)
        self.drift = 1.0
        return found

    def by_compressed(self, limits: TimeLimits, choice: Int64s, exposed: float | None) -> StepModel:
        """The model with a factor for its costs, where these are not the ones that it was found for.

        Args:
            limits: whose model is by the costs of now, and the factor of before.
            choice: what compressed steps did.
            exposed: seconds of their exposed communication; None where nobody knows.
        """
        alone = _alone(limits)
        if exposed is None or not self.alone or math.isclose(alone, self.alone):
            return limits.model
        least, most = sorted((self.network, self.network * self.alone / alone))
        self.network = min(max(network_factor(limits.model, choice, exposed), least), most)
        self.alone = alone
        return replace(limits.model, network=self.network)

    def blame_machine(self, seconds: float, foreseen: float) -> None:
        """For what the network does not explain of a step's seconds.

        Args:
            seconds: of a step.
            foreseen: with what the machine is blamed for already.
        """
        least, most = DRIFTS
        self.drift = min(max(self.drift * seconds / max(foreseen, 1e-9), least), most)

    def to_dict(self) -> dict[str, Any]:
        """JSON, for the state of a budget."""
        return asdict(self)

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> Calibration:
        """Of :meth:`to_dict`, among whatever else there is; older states lack ``alone``."""
        alone = float(state.get("alone", 0.0))
        return cls(float(state["compute"]), float(state["network"]), alone, float(state["drift"]))


def _alone(limits: TimeLimits) -> float:
    """Seconds of all communication of a step in the first dense way, as it was measured."""
    return replace(limits.model, network=1.0).seconds(limits.denses()[0].choice).network
