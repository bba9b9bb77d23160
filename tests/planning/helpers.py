"""Tables and steps that tests of planning share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from hvd_adaptive.planning import (
    REGISTRY,
    CandidateTable,
    Decision,
    Measurement,
    Planner,
    PlanningInput,
    StepMeasurements,
    Transfer,
)
from hvd_adaptive.planning.gradient_signals import GradientSignals
from hvd_adaptive.planning.step_time import CompressorCosts, SchemeCosts, StepCosts

RECIPES = {name: name + (":seconds=0.5,warmup=2" if "kimad" in name else "") for name in REGISTRY}
BITS = (8, 6, 4, 3, 2)
FACTORS = [10, 20, 40, 80, 160, 320, 640, 1000, 1280, 2000]
MODEL_FACTORS = np.array([10.0, 20, 40, 80, 160, 320, 640, 1000])
LAYERS = 6
BUCKETS = np.array([0, 0, 1, 1, 2, 2])


def quantizer_table(seed: int, layers: int = 8, **changed: Any) -> CandidateTable:
    """Quantizers on layers of very different size and energy; the default is 4 bits."""
    rng = np.random.default_rng(seed)
    numel = np.round(10 ** rng.uniform(3, 6, layers))
    energy = 10 ** rng.uniform(-4, 2, layers)
    fields: dict[str, Any] = {
        "names": [f"layer{index}" for index in range(layers)],
        "errors": [[e * 4.0**-bits for bits in BITS] for e in energy],
        "sizes": [[n * bits / 8 for bits in BITS] for n in numel],
        "labels": [[f"{bits} bit" for bits in BITS]] * layers,
        "defaults": [2] * layers,
        "dense": 4 * numel,
    }
    return CandidateTable.of(**{**fields, **changed})


def top_k_table(layers: int = 2) -> CandidateTable:
    """Top-k at each factor; the default is 40."""
    return CandidateTable.of(
        [f"layer{index}" for index in range(layers)],
        [[1 - 1 / factor for factor in FACTORS]] * layers,
        [[8000 / factor for factor in FACTORS]] * layers,
        [[f"{factor}x" for factor in FACTORS]] * layers,
        [2] * layers,
        [4000] * layers,
        factors=[FACTORS] * layers,
    )


def transfers_at(step: int, rate: float, latency: float, direction: str = "up") -> list[Transfer]:
    sizes = [1000.0 * (1 + (step + part) % 5) for part in range(3)]
    return [Transfer(size, latency + size / rate, direction) for size in sizes]


def model_table(seed: int = 0) -> CandidateTable:
    """Layers whose energy is in few elements or in many; the default is 40."""
    rng = np.random.default_rng(seed)
    numel = np.round(10 ** rng.uniform(4, 6, LAYERS))
    power = rng.uniform(0.1, 1.0, LAYERS)
    energy = 10 ** rng.uniform(-3, 1, LAYERS)
    return CandidateTable.of(
        [f"layer{index}" for index in range(LAYERS)],
        [e * (1 - (1 / MODEL_FACTORS) ** p) for e, p in zip(energy, power, strict=True)],
        [8 * n / MODEL_FACTORS for n in numel],
        [[f"{factor:g}x" for factor in MODEL_FACTORS]] * LAYERS,
        [2] * LAYERS,
        4 * numel,
        factors=[MODEL_FACTORS] * LAYERS,
    )


def step_facts(
    planner: Planner, rng: np.random.Generator, step: int, factor: float
) -> StepMeasurements:
    """Everything that any planner asks for."""
    return StepMeasurements(
        step,
        seconds=float(rng.uniform(0.5, 1)),
        compute_seconds=0.1,
        samples=64,
        factor=factor,
        gains={theta: 1 - theta / 1000 * float(rng.uniform(0.1, 0.9)) for theta in planner.factors},
        period_energy=rng.uniform(0, 4, LAYERS),
        learning_rate=0.1 if step < 60 else 0.01,
        transfers=[Transfer(1e4 * (1 + part), 1e-3 + 1e-7 * 1e4 * (1 + part)) for part in range(3)],
        bucket_bytes=rng.uniform(1e3, 1e5, 3),
        sync_seconds=float(rng.uniform(0.1, 0.2)),
        launches=sorted(rng.uniform(0, 0.05, 3).tolist(), reverse=True),
        plan=planner.budget.plans,
    )


def costs_of(
    mbit: float = 100.0,
    ranks: int = 4,
    compressors: tuple[str, ...] = ("topk", "qsgdinf"),
    late: float = 0.0,
    **changed: Any,
) -> StepCosts:
    """Of dense gradients, summed, and of compressors whose payloads are gathered, so much later."""
    byte = 8e-6 / mbit
    summed = SchemeCosts("allreduce", 4e-4, 2 * (ranks - 1) / ranks * byte)
    gathered = (
        SchemeCosts("allgather", late + 2e-4, (ranks - 1) * byte, 1e-10, ranks * 1e-10),
        SchemeCosts("two_shot", late + 4e-4, 2 * (ranks - 1) / ranks * byte, 1e-9, 2e-10),
    )
    rows = {spec: CompressorCosts(spec, 0.0, (summed,), True) for spec in ("fp16", "none")}
    rows |= {spec: CompressorCosts("encoded", 1e-9, gathered) for spec in compressors}
    return StepCosts(rows, ranks, **changed)


def with_signals(step: int, table: CandidateTable) -> PlanningInput:
    """Everything that any planner asks for; the first candidate of each layer counts as dense."""
    energy = np.array([10 * row.max() for row in table.errors])
    counts = [len(row) for row in table.sizes]
    signals = GradientSignals(
        energy=energy,
        mean_energy=energy / 2,
        residual=np.zeros(len(counts)),
        nonzero=np.ones(len(counts)),
        numel=(table.dense / 4).astype(np.int64),
        specs=tuple(("none", *["topk"] * (count - 1)) for count in counts),
        payloads=table.sizes,
        unbiased=tuple(np.arange(count) == 0 for count in counts),
        densities=tuple(1 / np.maximum(row, 1.0) for row in table.factors),
        projected=tuple(np.zeros(count, np.bool_) for count in counts),
    )
    # its errors are those of half precision
    errors = tuple(np.where(np.arange(len(row)) == 0, 0.0, row) for row in table.errors)
    buckets = BUCKETS[: len(counts)]
    return PlanningInput(
        step, replace(table, errors=errors), buckets, signals=signals, costs=costs_of()
    )


def drive(planner: Planner, steps: range, factor: float = 1.0) -> list[Decision]:
    """Decisions of a run: each takes effect in the step after it."""
    found: list[Decision] = []
    for step in steps:
        planner.observe(step_facts(planner, np.random.default_rng([0, step]), step, factor))
        if planner.due(step):
            table = model_table(step // 50)
            asks = Measurement.SIGNALS in planner.needs
            found.append(
                planner.plan(with_signals(step, table) if asks else PlanningInput(step, table, BUCKETS))
            )
            factor = found[-1].factor
    return found
