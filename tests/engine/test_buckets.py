"""Which layers are sent together, and by which route."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hvd_adaptive.buckets import ALONE_BYTES, build_buckets, check_gathered
from hvd_adaptive.compressors import parse
from hvd_adaptive.config import CompressionConfig
from hvd_adaptive.engine.routing import make_plan, routes_of
from hvd_adaptive.layers import Layer, PayloadKind

MIB = 1 << 20


def layers_of(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Layer]:
    return [Layer(i, f"layer{i}", shape, dtype) for i, shape in enumerate(shapes)]


def choice(
    spec: str, overrides: dict[str, str] | None = None, feedback: str | None = None
) -> CompressionConfig:
    return CompressionConfig.of(spec, overrides, feedback)


@given(
    sides=st.lists(st.integers(0, 1500), max_size=30),
    cap=st.floats(1.0, 8.0 * MIB),
    spec=st.sampled_from(["none", "fp16", "topk", "bf16"]),
)
def test_every_layer_is_in_exactly_one_bucket(sides: list[int], cap: float, spec: str) -> None:
    layers = layers_of(*[(side, 100) for side in sides])
    routes = routes_of(choice(spec), layers, frozenset())
    buckets = build_buckets(layers, routes, cap)
    assert sorted(layer.index for bucket in buckets for layer in bucket.layers) == list(
        range(len(layers))
    )
    for bucket in buckets:
        assert {routes[layer.name].kind for layer in bucket.layers} == {bucket.kind}
        covered = [i for part in bucket.segments for i in range(part.start, part.stop)]
        assert covered == list(range(len(bucket.layers)))


def test_a_bucket_is_closed_when_it_holds_the_cap() -> None:
    layers = layers_of(*[(256, 1024)] * 5)  # 1 MiB each
    buckets = build_buckets(layers, routes_of(choice("topk"), layers, frozenset()), 2 * MIB)
    assert [len(bucket.layers) for bucket in buckets] == [2, 2, 1]


def test_buckets_launch_in_the_order_in_which_they_are_completed() -> None:
    layers = layers_of((100, 100), (10,), (100, 100), (10,))
    buckets = build_buckets(layers, routes_of(choice("topk"), layers, frozenset()), 25 * MIB)
    assert [bucket.kind for bucket in buckets] == [PayloadKind.ENCODED, PayloadKind.SUMMABLE]
    assert [layer.index for layer in buckets[0].layers] == [0, 2]


def test_a_large_dense_layer_is_sent_alone_so_that_it_is_not_copied() -> None:
    large = (ALONE_BYTES // 4, 1)
    layers = layers_of((10, 10), large, (10, 10))
    buckets = build_buckets(layers, routes_of(choice("none"), layers, frozenset()), 100 * MIB)
    assert [[layer.index for layer in bucket.layers] for bucket in buckets] == [[1], [0, 2]]


def test_groups_stay_together_whatever_their_size() -> None:
    layers = layers_of(*[(256, 1024)] * 4)
    routes = routes_of(choice("topk"), layers, frozenset())
    buckets = build_buckets(layers, routes, 1.0, groups=[["layer0", "layer3"]])
    assert [[layer.index for layer in bucket.layers] for bucket in buckets] == [[1], [2], [0, 3]]


def test_biases_and_small_tensors_are_sent_dense_unless_an_override_names_them() -> None:
    layers = layers_of((4096,), (31, 33), (32, 32))
    assert [choice("topk").compressor_of(layer).name for layer in layers] == ["none", "none", "topk"]
    named = choice("topk", {"layer0": "topk:density=0.5"})
    assert named.compressor_of(layers[0]) == parse("topk:density=0.5")
    assert [choice("fp16").compressor_of(layer).name for layer in layers] == ["fp16"] * 3


@pytest.mark.parametrize(
    ("planned", "small", "buckets"),
    [
        ((), "fp16", 1),
        (("fp16", "fp16"), "fp16", 1),
        (("none", "none"), "none", 1),
        (("fp16", "topk"), "fp16", 2),
        (("topk", "topk"), "none", 2),
    ],
)
def test_small_layers_go_with_those_that_a_planner_sends_in_half_precision(
    planned: tuple[str, ...], small: str, buckets: int
) -> None:
    layers = layers_of((4096,), (32, 32), (64, 64))
    plans = {layer.name: parse(spec) for layer, spec in zip(layers[1:], planned, strict=False)}
    config = replace(
        choice("topk"),
        start=parse("fp16"),
        planned={name: (each, each.level) for name, each in plans.items()},
    )
    routes = routes_of(config, layers, frozenset())
    assert routes["layer0"].compressor == parse(small)
    assert len(build_buckets(layers, routes, 100 * MIB)) == buckets


def test_the_first_override_that_matches_counts() -> None:
    layer = Layer(0, "encoder.0.weight", (100, 100))
    rows = {"encoder.*": "fp16", "*.weight": "none"}
    assert choice("topk", rows).compressor_of(layer).name == "fp16"


def test_an_override_that_matches_nothing_is_a_mistake() -> None:
    with pytest.raises(ValueError, match=r"'\*\.bais' matches no parameter.*a\.weight, a\.bias"):
        choice("topk", {"*.bais": "none"}).check_patterns(["a.weight", "a.bias"])


def test_an_unknown_feedback_is_a_mistake() -> None:
    with pytest.raises(
        ValueError,
        match=r"unknown feedback 'eff' \(did you mean 'ef'\?\): "
        "there are none, ef, ef21, ef21-sgdm, dgc",
    ):
        choice("topk", feedback="eff")


def test_overrides_must_be_a_mapping() -> None:
    with pytest.raises(TypeError, match="must map name patterns"):
        CompressionConfig.of("topk", ["*.bias"], None)  # type: ignore[arg-type]


def test_biased_compressors_get_error_feedback_by_default() -> None:
    layers = layers_of((100, 100))
    assert routes_of(choice("topk"), layers, frozenset())["layer0"].feedback == "ef"
    assert routes_of(choice("topk", feedback="none"), layers, frozenset())["layer0"].feedback == "none"
    assert routes_of(choice("fp16"), layers, frozenset())["layer0"].feedback == "none"
    assert routes_of(choice("fp16", feedback="ef"), layers, frozenset())["layer0"].feedback == "ef"
    assert routes_of(choice("none", feedback="ef"), layers, frozenset())["layer0"].feedback == "none"


def test_what_horovod_cannot_add_is_added_in_float32() -> None:
    for dtype, wire in [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float16),
        (torch.float64, torch.float64),
    ]:
        layers = layers_of((10, 10), dtype=dtype)
        assert routes_of(choice("none"), layers, frozenset())["layer0"].wire_dtype == wire


def test_the_plan_shows_each_layers_bytes_and_its_digest_tells_plans_apart() -> None:
    layers = layers_of((1000, 100), (10,))
    routes = routes_of(choice("topk"), layers, frozenset())
    plan = make_plan(layers, routes, version=0, step=0)
    assert plan.dense_bytes == 400_040
    assert plan.wire_bytes == routes["layer0"].compressor.wire_bytes(100_000, 0.01) + 40
    text = str(plan).splitlines()
    assert text[1].split()[:5] == [
        "layer0", "1000x100", "topk:density=0.01,values=bf16", "allgather", "0.01",
    ]  # fmt: skip
    assert text[-1].split()[0] == "total"
    assert plan.digest == make_plan(layers, routes, version=0, step=0).digest
    assert plan.digest != make_plan(layers, routes, version=1, step=0).digest


@pytest.mark.parametrize(
    ("spec", "shape", "ranks"),
    [
        ("topk:density=0.5,values=fp32", (1 << 14, 1 << 14), 16),
        ("qsgd:bits=8", (1 << 14, 1 << 14), 8),
        ("bf16", (1 << 15, 1 << 15), 2),
    ],
)
def test_what_mpi_cannot_gather_is_refused_with_the_bucket_and_the_remedy(
    spec: str, shape: tuple[int, ...], ranks: int
) -> None:
    layers = layers_of((10, 10), shape)
    buckets = build_buckets(layers, routes_of(choice(spec), layers, frozenset()), 25 * MIB)
    with pytest.raises(ValueError, match=r"bucket \d .*layer1\) would gather .* from .* bucket_cap_mb"):
        check_gathered(buckets, ranks)
    check_gathered(build_buckets(layers[:1], routes_of(choice(spec), layers, frozenset()), 1), ranks)


def test_what_the_data_decide_and_what_is_summed_is_not_refused_beforehand() -> None:
    layers = layers_of((1 << 14, 1 << 14))
    for spec in ("threshold", "randomk:density=1.0", "fp16", "none"):
        check_gathered(build_buckets(layers, routes_of(choice(spec), layers, frozenset()), MIB), 1000)
