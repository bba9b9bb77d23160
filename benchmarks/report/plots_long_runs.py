"""Draws how hard planners compress during the runs of benchmarks/accuracy/long_runs.py.

    python -m benchmarks.report.plots_long_runs    # results/long_runs_ratio.png

A picture for each model, one run of each planner: how many times fewer bytes than dense training it
sends, over the steps, as in L-GreCo's figure 9. Needs matplotlib.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.accuracy.seeds import DENSE, SEEDS, by_seed, ratios
from benchmarks.report import report
from benchmarks.report.plots import SHADES, chosen_results
from benchmarks.report.results_long_runs import PLANNERS, PLOTTED


def compression(cases: Mapping[str, Any], path: Path) -> bool:
    """The ratio of each planner over the steps of its run of the first seed.

    Returns:
        Whether there was anything to draw.
    """
    seed = SEEDS[0]
    found = {model: curves(cases, model, seed) for model in PLOTTED}
    models = [model for model, known in found.items() if known]
    if not models:
        return False
    figure, axes = report.pyplot().subplots(
        1, len(models), figsize=(3.6 * len(models), 3.4), squeeze=False
    )
    lines: dict[str, Any] = {}
    for place, model in zip(axes[0], models, strict=True):
        for method, (steps, values) in found[model].items():
            shade = SHADES[method.replace(" ", "+")]
            (lines[method],) = place.plot(steps, values, drawstyle="steps-post", color=shade)
        place.set(title=model, xlabel="step", yscale="log")
        place.grid(alpha=0.25)
    axes[0][0].set_ylabel("times fewer bytes than dense")
    figure.legend(lines.values(), lines.keys(), loc="lower center", ncols=len(lines), fontsize=8)
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    figure.savefig(path, dpi=110)
    print(f"written to {path}")
    return True


def curves(cases: Mapping[str, Any], model: str, seed: int) -> dict[str, tuple[list[int], list[float]]]:
    """Of each planner that was run: the steps at which its ratio changes, with the last, and ratios."""
    dense = by_seed(cases, model, DENSE).get(seed)
    found = {}
    for method in PLANNERS:
        run = by_seed(cases, model, method).get(seed)
        if run is not None and dense is not None:
            steps, values = (list(each) for each in zip(*ratios(run, dense), strict=True))
            found[method] = ([*steps, run["steps"]], [*values, values[-1]])
    return found


def main() -> int:
    """Command line."""
    folder, found = chosen_results(__doc__, "long_runs", "benchmarks/accuracy/long_runs.py")
    return int(found is None or not compression(found["cases"], folder / "long_runs_ratio.png"))


if __name__ == "__main__":
    sys.exit(main())
