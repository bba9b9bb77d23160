"""Is a step of lgreco-time faster than one of lgreco where only the last buckets are waited for?

    sudo -E python -m benchmarks.network.bucket_times                  # an hour; resumable
    sudo -E python -m benchmarks.network.bucket_times --only "lstm 4 x 200mbit"
    sudo -E python -m benchmarks.network.bucket_times --quick          # a smoke run; writes no file
    python -m benchmarks.network.bucket_times --check                  # 1 if a stored target is missed

Models whose backward pass hides the first buckets, on hosts with slow links (launch/netlab.sh), one
rank on each: one level for all layers, the planner ``lgreco``, and ``lgreco-time`` after its trials, in
turn within one job, every other block in reverse. The three may make the same error. Medians of the
slowest rank's steps; bytes are those that each host's interfaces counted.
"""

from __future__ import annotations

import math
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import command_line, turns
from benchmarks.harness.turns import step

UNIFORM = "qsgd:bits=4 allgather"
TRIALS, TRIAL_STEPS = 8, 15
PERIOD, PLANS_AFTER = 120, 300
"""Both planners have a plan then from a whole period, and make no other one during their turns."""
STEPS = 8
NOT_SLOWER = 1.02
"""Target: of lgreco-time's step to that of lgreco; it must also be clearly faster somewhere."""
LSTM, RESNET, DEEP = "lstm", "resnet", "deep lstm"
DEVICE_LSTM, DEVICE_MLP = "lstm on a device", "mlp on a device"


@dataclass(frozen=True)
class Case:
    """A model on hosts with links of a rate.

    Args:
        preset: of launch/train.py.
        training: its other options.
        bucket_cap_mb: of its buckets.
        rate: of the links.
        hosts: how many.
        niceness: of the thread that communicates. It shares a core with the one that computes: to hide
            communication at all it must get some of it.
        blocks: turns of each method.
        device: seconds of each backward pass in which the core waits, as for an accelerator.
    """

    preset: str
    training: str
    bucket_cap_mb: float
    rate: str
    hosts: int = 4
    niceness: int = 10
    blocks: int = 6
    device: float = 0.0


MODELS = {
    # the backward pass of long sequences comes between the decoder's bucket and the embedding's
    LSTM: ("lstm-sotu", "--width 192 --vocabulary 5000 --sequence-length 64", 1.0),
    # of the layers, those of the first stage come last: many, and small
    RESNET: ("resnet-fashion", "--width 32 --layers 3 --batch-size 16", 0.5),
}
CASES = {
    f"{name} 4 x {rate}": Case(*model, rate)
    for rate in ("200mbit", "100mbit")
    for name, model in MODELS.items()
}
CASES[f"{DEEP} 2 x 100mbit"] = Case(
    "lstm-sotu",
    "--width 192 --vocabulary 5000 --sequence-length 96 --layers 3",
    1.0,
    "100mbit",
    hosts=2,
    niceness=3,
    blocks=16,
)
"""One rank a core, and long between the decoder's bucket, which is hidden, and the embedding's."""
# As with an accelerator: the core that communicates does not compute meanwhile. The backward pass takes
# so long that the link is idle before the last gradient is there: of the embedding, which is so small
# that its level is the lowest anyway, and of the widest layer.
CASES[f"{DEVICE_LSTM} 2 x 100mbit"] = Case(
    "lstm-sotu",
    "--width 192 --vocabulary 5000 --sequence-length 16 --layers 3",
    1.0,
    "100mbit",
    hosts=2,
    blocks=16,
    device=0.25,
)
CASES[f"{DEVICE_MLP} 2 x 50mbit"] = Case(
    "mlp-fashion",
    "--width 512 --layers 4 --batch-size 16",
    1.0,
    "50mbit",
    hosts=2,
    blocks=16,
    device=0.15,
)
QUICK = Case("mlp-digits", "--width 128", 0.02, "200mbit", hosts=2)


def methods_of(period: int, trials: int, trial_steps: int) -> dict[str, str]:
    """Of turns_rank.py, by name."""
    lengths = f"period={period},trials={trials},trial_steps={trial_steps}"
    return {
        "uniform": UNIFORM,
        "lgreco": f"{UNIFORM} lgreco:period={period}",
        "lgreco-time": f"{UNIFORM} lgreco-time:{lengths}",
    }


def measure(wanted: list[str], cases: dict[str, Any], out: Path | None, quick: bool) -> None:
    """Add each case's figures to ``cases``, by method."""
    names = methods_of(30, 2, 6) if quick else methods_of(PERIOD, TRIALS, TRIAL_STEPS)
    settle = 70 if quick else PLANS_AFTER
    for title in wanted:
        case = QUICK if quick else CASES[title]
        blocks = 1 if quick else case.blocks
        words = ["--preset", case.preset, "--training", case.training]
        words += ["--bucket-cap-mb", str(case.bucket_cap_mb), "--plans-after", str(settle)]
        words += ["--device", str(case.device)]
        words += ["--blocks", str(blocks), "--steps", str(STEPS), "--niceness", str(case.niceness)]
        taken = turns.take(case.hosts, case.rate, list(names.values()), words)
        found = {name: turns.summary(taken[method], "reasons") for name, method in names.items()}
        command_line.keep(cases, title, found, rows, missed, out)


def share(methods: dict[str, Any]) -> float:
    """What a step of lgreco-time takes of one of lgreco."""
    return turns.share(methods, "lgreco-time", ["lgreco"])


def clearly(methods: dict[str, Any]) -> tuple[float, float]:
    """What lgreco-time takes of lgreco in a block: the mean, and two standard errors.

    Example:
        >>> blocks = {"lgreco-time": [0.8, 0.9, 1.0], "lgreco": [1.0, 1.0, 1.0]}
        >>> mean, error = clearly({name: {"blocks": each} for name, each in blocks.items()})
        >>> round(mean, 3), round(error, 3)
        (0.9, 0.115)
    """
    pairs = zip(methods["lgreco-time"]["blocks"], methods["lgreco"]["blocks"], strict=True)
    found = [own / other for own, other in pairs]
    spread = statistics.stdev(found) if len(found) > 1 else math.inf
    return statistics.mean(found), 2 * spread / math.sqrt(len(found))


def learned(methods: dict[str, Any]) -> str:
    """What lgreco-time says of its last plan; empty if it has learned nothing."""
    said = [each for each in methods["lgreco-time"]["reasons"] if each.startswith("times of buckets")]
    return said[-1] if said else ""


def rows(cases: dict[str, Any]) -> list[list[object]]:
    """A table: one row a case and method."""
    found: list[list[object]] = [["case", "method", "step", "of lgreco", "received", "of lgreco", ""]]
    for title, methods in cases.items():
        lgreco = methods["lgreco"]
        for method, figures in methods.items():
            found.append(
                [
                    title,
                    method,
                    f"{1e3 * step(methods, method):.0f} ms",
                    f"{step(methods, method) / step(methods, 'lgreco'):.2f}",
                    f"{figures['received'] / 1e6:.2f} MB",
                    f"{figures['received'] / lgreco['received']:.2f}",
                    "; ".join(figures["reasons"][:1]) if method == "lgreco-time" else "",
                ]
            )
    return found


def missed(cases: dict[str, Any]) -> list[str]:
    """The targets that are missed."""
    problems = []
    for title, methods in cases.items():
        if share(methods) > NOT_SLOWER:
            problems.append(f"{title}: lgreco-time takes {share(methods):.2f} of lgreco's step")
        if not learned(methods):
            problems.append(f"{title}: lgreco-time has learned no times of buckets")
    if cases and min(sum(clearly(methods)) for methods in cases.values()) >= 1:
        problems.append("lgreco-time is faster than lgreco by two standard errors in no case")
    return problems + command_line.left_out(CASES, cases, "cases were not measured")


def main() -> int:
    """Command line."""
    return command_line.cases(__doc__, "bucket_times", CASES, measure, rows, missed)


if __name__ == "__main__":
    sys.exit(main())
