"""A user's mistake is an error on every rank that names what is wrong; nobody hangs."""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd
import pytest
import torch
from torch import nn
from workloads import assert_ranks_agree, loss_of, make_model, ours, plain_step, sgd

OWN_LEVELS = "kimad+:seconds=1,per_worker=true"


def on_last_rank() -> bool:
    return bool(hvd.rank() == hvd.size() - 1)


def still_works() -> None:
    """After the error the ranks can go on together."""
    model = make_model()
    optimizer = ours(sgd(model.parameters()), named_parameters=model.named_parameters())
    for step in range(2):
        plain_step(model, optimizer, step)
    assert_ranks_agree(model)


def test_names_given_twice_are_named() -> None:
    model = make_model()
    named = [("same", parameter) for parameter in model.parameters()]
    with pytest.raises(ValueError, match=r"unique.*same"):
        ours(sgd(model.parameters()), named_parameters=named)
    still_works()


def test_parameters_without_a_name_are_an_error() -> None:
    model = make_model()
    with pytest.raises(ValueError, match=r"not\s+named.*\(48, 40\)"):
        ours(sgd(model.parameters()), named_parameters=list(model.named_parameters())[1:])
    still_works()


def test_named_parameters_without_names_are_an_error() -> None:
    model = make_model()
    with pytest.raises(ValueError, match=r"model\.named_parameters\(\)"):
        ours(sgd(model.parameters()), named_parameters=model.parameters())
    still_works()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compression": "topq"}, "topk"),
        ({"compression": "topk:densty=0.1"}, "density"),
        ({"compression": "topk:density=2"}, r"\(0, 1\]"),
        ({"overrides": {"nothing.*": "none"}}, "nothing"),
        ({"overrides": {"*.bias": "nune"}}, "none"),
        ({"feedback": "eff"}, "ef"),
        ({"feedback": "ef:decay=2"}, "decay"),
        ({"feedback": "dgc", "compression": "powersgd"}, "topk"),
        ({"feedback": "dgc", "compression": "topk"}, "momentum=0"),
        ({"compression": "powersgd:rank=0"}, "rank"),
        ({"compression": "randomk:values=bf16"}, "fp32, fp16"),
        ({"backward_passes_per_step": 0}, "backward_passes_per_step"),
        ({"bucket_cap_mb": 0}, "bucket_cap_mb"),
        ({"bucket_cap_mb": float("nan")}, "bucket_cap_mb"),
        ({"warmup_steps": -1}, "warmup_steps"),
        ({"op": 77}, "op"),
        ({"op": hvd.Sum, "gradient_predivide_factor": 2.0}, "gradient_predivide_factor"),
        ({"groups": -1}, "groups"),
        ({"groups": [["a"]]}, r"torch\.Tensor"),
    ],
    ids=str,
)
def test_a_wrong_argument_on_one_rank_is_an_error_on_every_rank(
    options: dict[str, Any], message: str
) -> None:
    model = make_model()
    with pytest.raises((ValueError, TypeError), match=message) as caught:
        ours(
            sgd(model.parameters()),
            named_parameters=model.named_parameters(),
            **(options if on_last_rank() else {}),
        )
    if not on_last_rank():
        assert f"rank {hvd.size() - 1}" in str(caught.value)
    still_works()


def test_a_wrong_type_of_compression_is_a_type_error_where_it_was_made() -> None:
    model = make_model()
    with pytest.raises(TypeError, match="compression must be text"):
        ours(sgd(model.parameters()), named_parameters=None, compression=0.01)
    still_works()


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"compression": "topk:density=0.1"}, ("compression", "density=0.1", "none")),
        ({"overrides": {"*.bias": "fp16"}}, ("overrides", "bias")),
        ({"op": hvd.Sum}, ("op is",)),
        ({"backward_passes_per_step": 2}, ("passes", "2")),
        ({"bucket_cap_mb": 1.0}, ("bucket_cap", "1048576")),
        ({"sparse_as_dense": True}, ("sparse_as_dense", "True")),
        ({"groups": 2}, ("groups", "2")),
        ({"warmup_steps": 3}, ("warmup_steps", "3")),
        ({"feedback": "ef"}, ("feedback", "ef")),
        ({"seed": 5}, ("seed", "5")),
        ({"gradient_predivide_factor": 2.0}, ("predivide", "2.0")),
    ],
    ids=str,
)
def test_options_that_differ_between_ranks_are_an_error_that_names_them(
    options: dict[str, Any], words: tuple[str, ...]
) -> None:
    model = make_model()
    with pytest.raises(ValueError, match="DistributedOptimizer") as caught:
        ours(
            sgd(model.parameters()),
            named_parameters=model.named_parameters(),
            **(options if on_last_rank() else {}),
        )
    for word in words:
        assert word in str(caught.value)
    still_works()


def another_name(model: nn.Module) -> Any:
    return [(name.replace("last", "final"), value) for name, value in model.named_parameters()]


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("what", ["name", "shape", "dtype", "missing", "order"])
def test_models_that_differ_between_ranks_are_an_error_that_names_the_parameter(what: str) -> None:
    model = make_model()
    named = list(model.named_parameters())
    parameters = list(model.parameters())
    # Each rank names the first item that differs from its own.
    expected = r"(last|final)\.(weight|bias)"
    if on_last_rank():
        if what == "name":
            named = another_name(model)
        elif what == "shape":
            model.last = nn.Linear(48, 6)
        elif what == "dtype":
            model.last.double()
        if what in ("shape", "dtype"):
            named, parameters = list(model.named_parameters()), list(model.parameters())
        if what == "missing":
            named, parameters = named[:-1], parameters[:-1]
        if what == "order":
            parameters = parameters[::-1]
            named = named[::-1]
    if what == "order":
        expected = "order"
    with pytest.raises(ValueError, match=expected):
        ours(torch.optim.SGD(parameters, lr=0.1), named_parameters=named)
    still_works()


@pytest.mark.ranks(2, 4)
def test_ranks_that_freeze_different_parameters_before_the_first_step_are_told() -> None:
    model = make_model()
    optimizer = ours(sgd(model.parameters()), named_parameters=model.named_parameters())
    if on_last_rank():
        model.branch.requires_grad_(False)
    loss_of(model, 0).backward()
    with pytest.raises(ValueError, match=r"branch\.weight"):
        optimizer.step()
    still_works()


def test_wrapping_twice_is_an_error() -> None:
    model = make_model()
    optimizer = ours(sgd(model.parameters()), named_parameters=model.named_parameters())
    with pytest.raises(ValueError, match="wrapped"):
        ours(optimizer, named_parameters=model.named_parameters())
    still_works()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"planner": "lgrec"}, "did you mean 'lgreco'"),
        ({"planner": "lgreco:perod=3"}, "did you mean 'period'"),
        ({"planner": "lgreco", "compression": "fp16"}, "nothing to decide"),
        ({"planner": OWN_LEVELS, "compression": "powersgd"}, "'powersgd' is summed"),
        ({"planner": OWN_LEVELS, "overrides": {"*": "powersgd"}}, "'powersgd' is summed"),
        ({"planner": OWN_LEVELS, "candidates": ["qsgd"]}, "there are candidates"),
    ],
)
def test_a_planner_that_cannot_be_is_an_error(options: dict[str, Any], message: str) -> None:
    model = make_model()
    with pytest.raises(ValueError, match=message):
        ours(sgd(model.parameters()), **{"compression": "topk:density=0.1", **options})
    still_works()


def test_own_levels_cannot_be_kept_with_a_compressor_that_is_summed() -> None:
    model = make_model()
    optimizer = ours(sgd(model.parameters()), compression="topk:density=0.1", planner=OWN_LEVELS)
    plain_step(model, optimizer, 0)
    with pytest.raises(ValueError, match="'powersgd' is summed"):
        optimizer.set_compression("powersgd")
    optimizer.set_compression("qsgd")
    plain_step(model, optimizer, 1)
    assert_ranks_agree(model)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("compression", ["none", "topk:density=0.1"])
@pytest.mark.parametrize("freeze", [True, False], ids=["freezes", "unfreezes"])
def test_a_rank_that_alone_freezes_or_unfreezes_a_parameter_is_an_error_everywhere(
    compression: str, freeze: bool
) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(40, 40), torch.nn.Linear(40, 40))
    model[0].weight.requires_grad_(freeze)
    optimizer = ours(
        torch.optim.SGD(model.parameters(), lr=0.1),
        named_parameters=model.named_parameters(),
        compression=compression,
        bucket_cap_mb=0.001,
    )
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(3, 40)).sum().backward()
        optimizer.step()
    if hvd.rank() == 1:
        model[0].weight.requires_grad_(not freeze)
    optimizer.zero_grad()
    model(torch.ones(3, 40)).sum().backward()
    with pytest.raises(ValueError, match="trains other parameters"):
        optimizer.step()
