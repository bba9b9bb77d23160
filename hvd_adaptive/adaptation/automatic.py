"""What ``compression="auto"`` stands for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hvd_adaptive import planning
from hvd_adaptive.compressors import CastCompressor, Float16, parse
from hvd_adaptive.planning import Auto, Recipe

__all__ = ["NAME", "Chosen", "expand"]

NAME = "auto"
OWN = "topk:density=0.01,values=int8,levels=0.001-0.5"
"""From so many elements on that what waits is let pass early in a run: a density of 10 %, which is the
most by default, withholds about ten steps."""
FAMILIES = ("qsgdinf:bits=4,correlated=true",)
"""What ``compression="auto"`` chooses from, besides dense: of each kind of loss the fastest family. Of
quantizers as fast as that it adds the least noise: its levels are fractions of a block's largest value,
and not of the L2 norm, which hardly any value comes near; and the ranks' errors cancel, at no cost."""
DENSE = ("fp16", "none")
"""What ``auto`` always may choose."""
ANY_SCHEME = "auto"


@dataclass(frozen=True)
class Chosen:
    """Arguments of the optimizer, with ``auto`` written out.

    Args:
        compression: of layers.
        planner: what chooses.
        candidates: what it chooses from besides ``compression``.
        scheme: of what is encoded.
        start: what layers do until it has chosen; None for their own compressor.
    """

    compression: Any
    planner: str | Recipe | None
    candidates: Sequence[Any]
    scheme: str | Mapping[str, str]
    start: CastCompressor | None = None


def expand(
    compression: Any,
    planner: str | Recipe | None,
    candidates: Sequence[Any],
    scheme: str | Mapping[str, str],
    default_scheme: str,
    param_groups: Iterable[Mapping[str, Any]] = (),
) -> Chosen:
    """Write ``auto`` out; all else stays as it is.

    Args:
        compression: as of the optimizer; ``"auto"`` or ``"auto:OPTION=VALUE"`` names the planner too.
        planner: as of the optimizer.
        candidates: as of the optimizer.
        scheme: as of the optimizer.
        default_scheme: which counts as none for ``compression="auto"``.
        param_groups: of the torch optimizer: Adam and its kin have ``betas``.

    Raises:
        ValueError: ``compression="auto"`` beside a planner, or a wrong option of it.

    Example:
        >>> found = expand("auto:accuracy=strict", None, (), "allgather", "allgather")
        >>> found.compression, found.scheme, found.start.name
        ('topk:density=0.01,values=int8,levels=0.001-0.5', 'auto', 'fp16')
        >>> found.candidates
        ('qsgdinf:bits=4,correlated=true', 'fp16', 'none')
    """
    if isinstance(compression, str) and compression.partition(":")[0].strip() == NAME:
        if planner is not None:
            raise ValueError(
                f"compression={compression!r} is a planner with what it chooses from: leave planner "
                "out, or name a compressor and candidates beside planner='auto'"
            )
        planner, compression = compression, OWN
        candidates = candidates or FAMILIES
        scheme = ANY_SCHEME if scheme == default_scheme else scheme
    if planner is None:
        return Chosen(compression, planner, candidates, scheme)
    recipe = planning.parse(planner)
    if not isinstance(recipe, Auto):
        return Chosen(compression, planner, candidates, scheme)
    if recipe.metric == "optimizer":
        adaptive = any("betas" in group for group in param_groups)
        recipe = replace(recipe, metric="relative" if adaptive else "l2")
    named = tuple(candidates)
    missing = tuple(each for each in DENSE if not _names(named, each))
    return Chosen(compression, recipe, (*named, *missing), scheme, Float16())


def _names(candidates: Sequence[Any], spec: str) -> bool:
    """Whether a compressor is among some; what cannot be read is somebody else's to refuse."""
    wanted = parse(spec)
    return any(each in (spec, wanted, type(wanted)) for each in candidates)
