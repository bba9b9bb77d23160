"""What feedback keeps, when buckets are built again."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from hvd_adaptive import feedback
from hvd_adaptive.buckets import Bucket, build_buckets
from hvd_adaptive.config import CompressionConfig
from hvd_adaptive.engine.routing import routes_of
from hvd_adaptive.feedback import FeedbackContext, FeedbackState
from hvd_adaptive.layers import Layer

LAYERS = [Layer(i, f"layer{i}", (size,), torch.float32) for i, size in enumerate((3, 1, 0, 4, 2))]


def buckets_of(spec: str, names: list[str], cap: float) -> tuple[Bucket, ...]:
    layers = [layer for layer in LAYERS if layer.name in names]
    routes = routes_of(CompressionConfig.of(spec, None, "ef"), layers, frozenset())
    return build_buckets(layers, routes, cap)


def memory() -> FeedbackState:
    rule = feedback.parse("ef")
    assert rule is not None
    return rule.new_state(FeedbackContext(lambda index: 0.1, lambda: 1))


def held(of: FeedbackState) -> dict[str, list[float]]:
    return {name: slots[feedback.RESIDUAL].tolist() for name, slots in of.kept().items()}


@given(
    st.lists(
        st.tuples(
            st.sets(st.sampled_from([layer.name for layer in LAYERS])).map(sorted),
            st.sampled_from([1.0, 16.0, 1e9]),
        ),
        min_size=1,
        max_size=6,
    )
)
def test_residuals_follow_their_layers(layouts: list[tuple[list[str], float]]) -> None:
    residuals = memory()
    expected: dict[str, list[float]] = {}
    for number, (names, cap) in enumerate(layouts):
        residuals.attach(buckets_of("topk", names, cap), residuals.kept())
        sizes = {layer.name: layer.numel for layer in LAYERS if layer.name in names}
        expected = {name: expected.get(name, [0.0] * size) for name, size in sizes.items()}
        assert held(residuals) == expected
        for name, slots in residuals.kept().items():
            slots[feedback.RESIDUAL].add_(number + 1)
            expected[name] = [value + number + 1 for value in expected[name]]


def test_a_change_of_levels_needs_no_new_memory() -> None:
    residuals = memory()
    names = [layer.name for layer in LAYERS]
    places = []
    for spec in ("topk:density=0.1", "topk:density=0.2", "qsgd:bits=4"):
        residuals.attach(buckets_of(spec, names, 1e9), residuals.kept())
        places.append([slots[feedback.RESIDUAL].data_ptr() for slots in residuals.kept().values()])
    assert places[0] == places[1] == places[2]


def test_what_is_not_kept_begins_with_zeros() -> None:
    residuals = memory()
    buckets = buckets_of("topk", ["layer0", "layer3"], 1e9)
    residuals.attach(buckets, {})
    for slots in residuals.kept().values():
        slots[feedback.RESIDUAL].fill_(7.0)
    loaded = {"layer3": {feedback.RESIDUAL: torch.tensor([1.0, 2.0, 3.0, 4.0])}}
    residuals.attach(buckets, loaded)
    assert held(residuals) == {"layer0": [0.0] * 3, "layer3": [1.0, 2.0, 3.0, 4.0]}
    assert loaded == {"layer3": {}}
