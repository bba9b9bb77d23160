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


def memory(spec: str = "ef") -> FeedbackState:
    rule = feedback.parse(spec)
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


def test_bf16_residuals_are_widened_in_the_same_memory_bucket_after_bucket() -> None:
    residuals = memory("ef:dtype=bf16")
    buckets = buckets_of("topk", [layer.name for layer in LAYERS], 1.0)
    residuals.attach(buckets, {})
    places = set()
    for step, bucket in ((step, bucket) for step in range(3) for bucket in buckets if bucket.numel):
        x, adds = residuals.begin(bucket, [], step)
        assert x.tolist() == [float(step)] * bucket.numel
        places.add(x.data_ptr())
        residuals.commit(bucket, x.add_(1.0), adds, [True] * len(bucket.layers), step)
    assert len(places) == 1


def test_bf16_residuals_of_buckets_under_way_at_once_stay_apart() -> None:
    names = [layer.name for layer in LAYERS]
    kept = []
    for at_once in (True, False):
        residuals = memory("ef:dtype=bf16")
        buckets = buckets_of("topk", names, 1.0)
        residuals.attach(buckets, {})
        for step in range(3):
            under_way = []
            for bucket in buckets:
                x, _ = residuals.begin(bucket, [], step)
                under_way.append((bucket, x.add_(torch.arange(1.0, bucket.numel + 1) / 7)))
                if not at_once:
                    residuals.commit(*under_way.pop(), [], [True] * len(bucket.layers), step)
            for bucket, x in under_way:
                residuals.commit(bucket, x, [], [True] * len(bucket.layers), step)
        kept.append(held(residuals))
    assert kept[0] == kept[1]
    assert any(any(values) for values in kept[0].values())
