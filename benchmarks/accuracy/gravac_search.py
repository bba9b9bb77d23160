"""Does GraVAC's search visit its factors, and end at the one with the best compression throughput?

    python -m benchmarks.accuracy.gravac_search                         # resumable; one core
    python -m benchmarks.accuracy.gravac_search --only "mlp 0.7 seed 1"
    python -m benchmarks.accuracy.gravac_search --quick                 # a smoke run; writes no file
    python -m benchmarks.accuracy.gravac_search --check                 # 1 if a stored target is missed

Presets train with the gradients of 4 virtual ranks (virtual_training.py) until a factor has been kept
for half a window, with the paper's two thresholds of the gain. A step's seconds are assumed, so that
noise decides nothing: computing, and the plan's bytes on a link. Gains, and all decisions, are real.
Factors grow exponentially, as in the paper's figures 7 to 9, or geometrically, as in its figure 10.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from benchmarks.accuracy.seeds import changes
from benchmarks.harness import command_line
from hvd_adaptive.collectives import planned_link_bytes
from hvd_adaptive.planning import GraVAC, Plan, StepMeasurements
from hvd_adaptive.planning.budgets import Budget
from hvd_adaptive.planning.budgets.throughput import ThroughputBudget

RANKS = 4
WINDOW = 200
PRESETS = {"mlp": "mlp-fashion", "resnet": "resnet-fashion"}
EPSILONS = (0.7, 0.9)
SEEDS = (1, 2, 3)
COMPRESSION = "topk:density=0.01"
MBIT, COMPUTE_SECONDS = 100, 0.05
"""Of the link, and of forward and backward pass: assumed."""


@dataclass(frozen=True)
class Case:
    """A run: a model of :data:`PRESETS`, GraVAC's threshold of the gain and policy, and the seed."""

    model: str
    epsilon: float
    seed: int
    policy: str = "exponential"

    def recipe(self, window: int = WINDOW) -> GraVAC:
        """The planner."""
        return GraVAC(epsilon=self.epsilon, window=window, policy=self.policy)


CASES = {
    f"{model} {epsilon} seed {seed}": Case(model, epsilon, seed)
    for model in PRESETS
    for epsilon in EPSILONS
    for seed in SEEDS
} | {
    # the paper's figure 10
    f"resnet geometric {EPSILONS[0]} seed {seed}": Case("resnet", EPSILONS[0], seed, "geometric")
    for seed in SEEDS
}


def most_steps(recipe: GraVAC) -> int:
    """Steps that two searches may take, with some for what comes before and after each."""
    return 2 * recipe.window * (len(recipe.candidate_factors()) + 1)


@dataclass
class Search:
    """What the planner of a run did, step by step.

    Args:
        sent: factor of every step; 1 is dense.
        candidates: of every step.
        kept: the budget's figures when the factor was kept that still is; None where none is.
        held: for how many steps it has been.
    """

    sent: list[float] = field(default_factory=list)
    candidates: list[float] = field(default_factory=list)
    kept: dict[str, float] | None = None
    held: int = 0

    def add(self, facts: StepMeasurements, figures: dict[str, float]) -> None:
        """A step that the budget has learned from."""
        self.sent.append(facts.factor)
        if not figures["ideal"]:
            self.kept, self.held = None, 0
            self.candidates.append(figures["theta"])
        elif self.kept is None:
            self.kept = figures
        else:
            self.held += 1

    def figures(self) -> dict[str, Any]:
        """As the file holds them."""
        kept = self.kept or {}
        return {
            "steps": len(self.sent),
            "sent": changes(self.sent),
            "candidates": changes(self.candidates),
            "kept": kept.get("ideal"),
            **{key: _by_factor(kept, key) for key in ("gain", "throughput")},
        }


def _by_factor(figures: Mapping[str, float], key: str) -> dict[str, float]:
    """Those of a budget's figures that are of a factor, such as gain_20x."""
    found = {
        name.partition("_")[2]: each for name, each in figures.items() if name.startswith(f"{key}_")
    }
    return {name.removesuffix("x"): float(f"{each:.5g}") for name, each in found.items()}


def observed(recipe: GraVAC) -> tuple[GraVAC, Search]:
    """The same planner, and what will be seen of it: only that of rank 0 observes steps."""
    search = Search()

    class ObservedBudget(ThroughputBudget):
        def observe(self, facts: StepMeasurements) -> None:
            super().observe(facts)
            search.add(facts, self.report())

    class ObservedGraVAC(GraVAC):
        def budget(self, ranks: int = 1) -> Budget:
            return ObservedBudget(self, ranks)

    options = {each.name: getattr(recipe, each.name) for each in fields(recipe) if each.init}
    return ObservedGraVAC(**options), search


def seconds_of(plan: Plan) -> float:
    """Of a step with this plan: nothing is hidden behind computing."""
    nbytes = sum(planned_link_bytes(row.wire_bytes, row.scheme, RANKS) for row in plan.layers)
    return COMPUTE_SECONDS + 8e-6 * nbytes / MBIT


def train(preset_name: str, recipe: GraVAC, seed: int) -> dict[str, Any]:
    """One run until its search is over, and a while longer."""
    # need Horovod, which tables do not
    from benchmarks.accuracy.virtual_training import SHOW_EVERY, one_step
    from benchmarks.workers.presets import prepare
    from hvd_adaptive import VirtualRanks

    planner, search = observed(recipe)
    preset = prepare(["--preset", preset_name, "--seed", str(seed)])
    now, limit = 0.0, most_steps(recipe)
    virtual = VirtualRanks(
        RANKS,
        preset.model.named_parameters(),
        COMPRESSION,
        planner=planner,
        seed=seed,
        clock=lambda: now,
    )
    batches = preset.forever_of_all(RANKS)
    for step in range(limit):
        preset.set_rate(step, limit, RANKS)
        now += seconds_of(virtual.plan)
        one_step(preset, virtual, next(batches))
        if step % SHOW_EVERY == SHOW_EVERY - 1 and search.sent:
            print(f"step {step + 1:>6,}  sends at {search.sent[-1]:g}x", flush=True)
        if search.held >= recipe.window // 2:
            break
    return search.figures()


def measure(wanted: list[str], cases: dict[str, Any], out: Path | None, quick: bool) -> None:
    """Add each run to ``cases``."""
    import hvd_adaptive as hva

    hva.init()
    for title in wanted:
        case = CASES[title]
        recipe = case.recipe(20 if quick else WINDOW)
        found = train("mlp-digits" if quick else PRESETS[case.model], recipe, case.seed)
        command_line.keep(cases, title, found, rows, missed, out)


# --- what it shows ------------------------------------------------------------------------------------


def visited(case: Mapping[str, Any]) -> list[float]:
    """The candidates in the order in which they first came."""
    return list(dict.fromkeys(theta for _, theta in case["candidates"]))


def longest_dense(case: Mapping[str, Any]) -> int:
    """Most dense steps, one after the other."""
    starts = [step for step, _ in case["sent"]]
    ends = [*starts[1:], case["steps"]]
    stretches = zip(starts, ends, case["sent"], strict=True)
    return max((end - start for start, end, (_, factor) in stretches if factor == 1), default=0)


def suffice(case: Mapping[str, Any], epsilon: float) -> dict[float, float]:
    """Throughput x gain of each factor that was sent and whose gain suffices, when one was kept."""
    return {
        float(theta): speed
        for theta, speed in case["throughput"].items()
        if float(theta) > 1 and case["gain"][theta] >= epsilon
    }


def faults(case: Mapping[str, Any], recipe: GraVAC) -> list[str]:
    """What must hold of a search, and does not."""
    if case["kept"] is None:
        return [f"no factor was kept in {case['steps']} steps"]
    found = []
    speeds = suffice(case, recipe.epsilon)
    smallest, *others = recipe.candidate_factors()
    tried = [theta for theta in visited(case) if theta != smallest]
    two = sorted(speeds.values())[-2:]
    saturated = len(two) == 2 and two[1] <= two[0] * (1 + recipe.omega)
    if tried != others and (tried != others[: len(tried)] or not saturated):
        found.append(f"tried {tried}, not {others}")
    best = max(speeds, key=lambda theta: speeds[theta], default=None)
    if best is None or case["kept"] not in speeds:
        found.append(f"kept {case['kept']:g}x, whose gain does not suffice")
    elif speeds[case["kept"]] * (1 + recipe.omega) < speeds[best]:
        found.append(f"kept {case['kept']:g}x, but {best:g}x has a higher throughput")
    if (dense := longest_dense(case)) >= recipe.window:
        found.append(f"sent {dense} dense steps one after the other")
    if case["sent"][-1][1] != case["kept"]:
        found.append(f"kept {case['kept']:g}x, but sends at {case['sent'][-1][1]:g}x")
    return found


def rows(cases: Mapping[str, Any]) -> list[list[object]]:
    """A table: one row a run."""
    heading = ("run", "tried", "kept", "its gain", "steps per second x gain")
    table: list[list[object]] = [[*heading, "next best that suffices", "dense in a row", "steps"]]
    for title, case in cases.items():
        speeds = suffice(case, CASES[title].epsilon)
        own = speeds.pop(case["kept"], None)
        best = max(speeds, key=lambda theta: speeds[theta], default=None)
        table.append(
            [
                title,
                ", ".join(f"{theta:g}x" for theta in visited(case)),
                "none" if case["kept"] is None else f"{case['kept']:g}x",
                f"{case['gain'][format(case['kept'], 'g')]:.2f}" if own else "-",
                f"{own:.2f}" if own else "-",
                f"{best:g}x ({speeds[best] / own:.2f} of it)" if own and best else "-",
                longest_dense(case),
                case["steps"],
            ]
        )
    return table


def missed(cases: Mapping[str, Any]) -> list[str]:
    """The targets that are missed, and how many runs are."""
    problems = [
        f"{title}: {fault}"
        for title, case in cases.items()
        for fault in faults(case, CASES[title].recipe())
    ]
    return problems + command_line.left_out(CASES, cases, "runs are missing")


def main() -> int:
    """Command line."""
    return command_line.cases(__doc__, "gravac_search", CASES, measure, rows, missed)


if __name__ == "__main__":
    sys.exit(main())
