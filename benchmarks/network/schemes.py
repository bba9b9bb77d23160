"""What is a scheme worth at so many ranks, and does scheme="auto" choose the better one?

    sudo -E python -m benchmarks.network.schemes                   # an hour; resumable
    sudo -E python -m benchmarks.network.schemes --only "12 x 200mbit"
    sudo -E python -m benchmarks.network.schemes --quick           # a smoke run; writes no file
    python -m benchmarks.network.schemes --check                   # 1 if a stored target is missed

Trains the LSTM on hosts with slow links (launch/netlab.sh): stock Horovod fp16, and a quantizer and a
sparsifier by each scheme and as ``auto`` chooses, in turn within one job, every other block in reverse.
Medians of the slowest rank's steps, and of the blocks' ratios; bytes are those that each host's
interfaces counted.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import command_line, turns
from benchmarks.harness.turns import share, step

PRESET = "lstm-sotu"
COMPRESSORS = ("qsgd:bits=4", "topk:density=0.01")
STOCK = "stock fp16"
FLAT = ("allgather", "two_shot", "auto")
LAYERED = ("allgather", "two_shot", "hierarchical", "auto")
"""Of hosts with several ranks."""


@dataclass(frozen=True)
class Case:
    """So many hosts, each with so many ranks, on links of a rate."""

    hosts: int
    rate: str
    ranks_per_host: int = 1

    @property
    def schemes(self) -> tuple[str, ...]:
        """What is compared."""
        return LAYERED if self.ranks_per_host > 1 else FLAT

    @property
    def methods(self) -> tuple[str, ...]:
        """Of turns_rank.py."""
        encoded = (f"{compressor} {scheme}" for compressor in COMPRESSORS for scheme in self.schemes)
        return (STOCK, *encoded)

    @property
    def launcher(self) -> tuple[str, ...]:
        """Further arguments of mpirun."""
        if self.ranks_per_host == 1:
            return ()
        ranks = str(self.hosts * self.ranks_per_host)
        return ("--oversubscribe", "--map-by", f"ppr:{self.ranks_per_host}:node", "-np", ranks)


CASES = {f"{hosts} x 200mbit": Case(hosts, "200mbit") for hosts in (2, 4, 8, 12, 16)}
CASES |= {
    f"{hosts} x {rate}": Case(hosts, rate)
    for rate in ("100mbit", "1gbit")
    for hosts in (2, 4, 8, 12, 16)
}
CASES["4 x 4 x 200mbit"] = Case(4, "200mbit", 4)
BLOCKS, STEPS = 6, 3
"""Many short turns: a slow phase of the machine then meets all methods."""
FEW_HOSTS, MORE_BLOCKS = 4, 16
"""Steps of so few hosts are short: they vary by more than what is asked of them."""
HALF_AT = "12 x 200mbit"
HALF, NOT_SLOWER, AUTO = 0.5, 1.03, 1.05
"""Targets: of two_shot to stock fp16 at 12 hosts; to the allgather at 4; of auto to the fastest one."""


def measure(wanted: list[str], cases: dict[str, Any], out: Path | None, quick: bool) -> None:
    """Add each case's figures to ``cases``, by method."""
    words = ["--preset", PRESET, "--steps", str(STEPS)]
    for title in wanted:
        case = CASES[title]
        blocks = MORE_BLOCKS if case.hosts * case.ranks_per_host <= FEW_HOSTS else BLOCKS
        own = [*words, "--blocks", str(1 if quick else blocks)]
        taken = turns.take(case.hosts, case.rate, case.methods, own, case.launcher)
        found = {method: turns.summary(ranks, "schemes") for method, ranks in taken.items()}
        command_line.keep(cases, title, found, rows, missed, out, preset=PRESET)


def rows(cases: dict[str, Any]) -> list[list[object]]:
    """A table: one row a case and method."""
    found: list[list[object]] = [
        ["hosts", "method", "step", "of stock fp16", "received", "of fp16", ""]
    ]
    for title, methods in cases.items():
        stock = step(methods, STOCK)
        for method, figures in methods.items():
            chosen = ", ".join(each for each in figures["schemes"] if method.endswith("auto"))
            found.append(
                [
                    title,
                    method,
                    f"{1e3 * step(methods, method):.0f} ms",
                    f"{step(methods, method) / stock:.2f}",
                    f"{figures['received'] / 1e6:.2f} MB",
                    f"{figures['received'] / methods[STOCK]['received']:.2f}",
                    chosen,
                ]
            )
    return found


def auto_share(title: str, methods: dict[str, Any], compressor: str) -> float:
    """What auto takes of the fastest scheme of a case."""
    return share(methods, f"{compressor} auto", _fixed(title, compressor))


def _fixed(title: str, compressor: str) -> list[str]:
    """The schemes of a case without auto."""
    return [f"{compressor} {scheme}" for scheme in CASES[title].schemes if scheme != "auto"]


def missed(cases: dict[str, Any]) -> list[str]:
    """The targets that are missed."""
    problems = []
    for title, methods in cases.items():
        case = CASES[title]
        for compressor in COMPRESSORS:
            fixed = _fixed(title, compressor)
            taken = auto_share(title, methods, compressor)
            if taken > AUTO:
                fastest = min(fixed, key=lambda method: step(methods, method))
                same = methods[fastest]["schemes"] == methods[f"{compressor} auto"]["schemes"]
                problems.append(
                    f"{title}, {compressor}: auto takes {taken:.2f} of the fastest one"
                    + (", which is the scheme that it chose" if same else "")
                )
            taken = share(methods, f"{compressor} two_shot", [f"{compressor} allgather"])
            if case.hosts * case.ranks_per_host == 4 and taken > NOT_SLOWER:
                problems.append(f"{title}, {compressor}: two_shot takes {taken:.2f} of the allgather")
        taken = share(methods, "qsgd:bits=4 two_shot", [STOCK])
        if title == HALF_AT and taken > HALF:
            problems.append(f"{title}: 4 bit in two shots takes {taken:.2f} of stock fp16's step")
    return problems + [f"{HALF_AT} was not measured"] * (HALF_AT not in cases)


def main() -> int:
    """Command line."""
    return command_line.cases(__doc__, "schemes", CASES, measure, rows, missed)


if __name__ == "__main__":
    sys.exit(main())
