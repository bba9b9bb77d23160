"""A user's mistake is an error on every rank that names what is wrong; nobody hangs."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import numpy as np
import pytest
import torch
from torch import nn

from hvd_adaptive.comm.process_set_control import ProcessSetControl
from tests.distributed.workloads import assert_ranks_agree, loss_of, make_model, ours, plain_step, sgd

OWN_LEVELS = "kimad+:seconds=1,per_worker=true"


def on_last_rank() -> bool:
    return bool(hvd.rank() == hvd.size() - 1)


def still_works() -> None:
    """After the error the ranks can continue together."""
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
        ({"feedback": "ef21-sgdm", "compression": "topk"}, "momentum=0 and .*ef21-sgdm:momentum"),
        ({"compression": "powersgd:rank=0"}, "rank"),
        ({"compression": "randomk:values=bf16"}, "fp32, fp16"),
        ({"backward_passes_per_step": 0}, "backward_passes_per_step"),
        ({"bucket_cap_mb": 0}, "bucket_cap_mb"),
        ({"bucket_cap_mb": float("nan")}, "bucket_cap_mb"),
        ({"dense_steps": -1}, "dense_steps"),
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


MISTAKES: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"optimizer": None}, TypeError, r"optimizer must be .*None: write torch\.optim"),
    ({"optimizer": torch.optim.SGD}, TypeError, r"optimizer must be .*torch\.optim"),
    ({"named_parameters": 3}, TypeError, r"named_parameters .*3.*model\.named_parameters\(\)"),
    ({"named_parameters": [(1, nn.Parameter(torch.ones(1)))]}, ValueError, "named_parameters.*name"),
    ({"compression": 3}, TypeError, "compression must be text .*3"),
    ({"compression": ""}, ValueError, "compressor ''"),
    ({"backward_passes_per_step": 1.5}, TypeError, r"backward_passes_per_step .*1\.5"),
    ({"backward_passes_per_step": True}, TypeError, "backward_passes_per_step .*True"),
    ({"op": "sum"}, ValueError, r"op must be hvd\.Average.*'sum'"),
    ({"op": [1]}, ValueError, r"op must be hvd\.Average.*\[1\]"),
    ({"gradient_predivide_factor": math.inf}, ValueError, "gradient_predivide_factor .*inf"),
    ({"gradient_predivide_factor": math.nan}, ValueError, "gradient_predivide_factor .*nan"),
    ({"gradient_predivide_factor": 1e-40}, ValueError, "gradient_predivide_factor .*1e-40"),
    ({"gradient_predivide_factor": "2"}, TypeError, "gradient_predivide_factor .*'2'"),
    ({"num_groups": "x"}, TypeError, "groups .*'x'"),
    ({"groups": 1.5}, TypeError, r"groups .*1\.5"),
    ({"groups": [3]}, ValueError, r"groups must consist of .*torch\.Tensor"),
    ({"groups": [torch.ones(3)]}, ValueError, r"groups must consist of .*torch\.Tensor"),
    ({"sparse_as_dense": "no"}, TypeError, "sparse_as_dense .*'no'"),
    ({"process_set": None}, TypeError, r"process_set .*None.*hvd\.global_process_set"),
    ({"process_set": hvd.ProcessSet([0])}, ValueError, r"process_set .*add_process_set"),
    ({"feedback": 3}, TypeError, "feedback must be text .*3"),
    ({"planner": 3}, TypeError, "planner must be text .*3"),
    ({"planner": "kimad:seconds=1,warmup=99999999999999999999"}, ValueError, "warmup"),
    ({"candidates": "topk"}, TypeError, r"candidates .*'topk'.*write \['topk'\]"),
    ({"candidates": 3}, TypeError, "candidates .*3"),
    ({"candidates": [3]}, TypeError, "candidates: .*3"),
    ({"candidates": ["topq"]}, ValueError, "candidates: .*did you mean 'topk'"),
    ({"dense_steps": 1.5}, TypeError, r"dense_steps .*1\.5"),
    ({"dense_steps": "3"}, TypeError, "dense_steps .*'3'"),
    ({"bucket_cap_mb": math.inf}, ValueError, "bucket_cap_mb .*inf"),
    ({"bucket_cap_mb": 10**400}, ValueError, "bucket_cap_mb .*1000"),
    ({"bucket_cap_mb": "25"}, TypeError, "bucket_cap_mb .*'25'"),
    ({"telemetry": 3}, TypeError, "telemetry=3"),
    ({"telemetry": "a\0b"}, ValueError, "logdir"),
    ({"overrides": 3}, TypeError, "overrides .*3"),
    ({"overrides": {"*.bias": 3}}, TypeError, r"overrides: .*3"),
    ({"overrides": {3: "none"}}, TypeError, r"overrides .*3"),
    ({"seed": "x"}, TypeError, "seed .*'x'"),
    ({"seed": 1.0}, TypeError, r"seed .*1\.0"),
    ({"seed": True}, TypeError, "seed .*True"),
    ({"seed": 2**64}, ValueError, "seed .*18446744073709551616"),
    ({"seed": -(2**63) - 1}, ValueError, "seed .*-9223372036854775809"),
]


@pytest.mark.ranks(2)
@pytest.mark.filterwarnings("ignore:num_groups:DeprecationWarning")
@pytest.mark.parametrize(("options", "kind", "message"), MISTAKES, ids=lambda each: str(each)[:60])
def test_an_argument_of_another_kind_on_one_rank_is_named_on_every_rank(
    options: dict[str, Any], kind: type[Exception], message: str
) -> None:
    model = make_model()
    given: dict[str, Any] = {
        "optimizer": sgd(model.parameters()),
        "named_parameters": model.named_parameters(),
        "compression": "topk:density=0.1",
    }
    if on_last_rank():
        given |= options
    with pytest.raises(kind if on_last_rank() else ValueError, match=message) as caught:
        ours(**given)
    if not on_last_rank():
        assert f"rank {hvd.size() - 1} failed" in str(caught.value)


@pytest.mark.ranks(2)
def test_numbers_that_stock_takes_are_taken() -> None:
    """Numbers of numpy, 0 and 1 as a flag, and more groups than there are parameters."""
    model = make_model()
    optimizer = ours(
        sgd(model.parameters()),
        named_parameters=model.named_parameters(),
        backward_passes_per_step=np.int64(1),
        gradient_predivide_factor=np.float32(2.0),
        groups=10**9,
        sparse_as_dense=1,
        bucket_cap_mb=1,
        seed=-1,
    )
    reference = make_model()
    alone = ours(sgd(reference.parameters()), groups=len(list(model.parameters())))
    for step in range(2):
        plain_step(model, optimizer, step)
        plain_step(reference, alone, step)
    assert_ranks_agree(model)
    for mine, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine, other)


@pytest.mark.ranks(2)
def test_a_wrapped_optimizer_on_one_rank_is_an_error_on_every_rank() -> None:
    model = make_model()
    optimizer = ours(sgd(model.parameters()), named_parameters=model.named_parameters())
    given = optimizer if on_last_rank() else sgd(model.parameters())
    with pytest.raises(ValueError, match="wrapped"):
        ours(given, named_parameters=model.named_parameters())
    still_works()


class OddError(Exception):
    """What no code here knows."""


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "error", [OddError("odd"), AttributeError("odd"), OSError(5, "odd"), MemoryError()]
)
@pytest.mark.parametrize("where", ["build", "digest"])
def test_whatever_a_rank_raises_while_ranks_agree_reaches_the_others(
    error: Exception, where: str
) -> None:
    def fail(*_: Any) -> Any:
        raise error

    control = ProcessSetControl("whatever")
    build, digest = (lambda: 1), (lambda _: {"value": "1"})
    if on_last_rank():
        build, digest = (fail, digest) if where == "build" else (build, fail)
    with pytest.raises(type(error) if on_last_rank() else RuntimeError) as caught:
        control.agree("a test", build, digest)
    if not on_last_rank():
        assert f"a test: rank {hvd.size() - 1} failed: {type(error).__name__}" in str(caught.value)
    assert control.agree("a test", lambda: 1, lambda _: {"value": "1"}) == 1


@pytest.mark.ranks(2)
def test_a_decision_that_cannot_be_told_is_an_error_on_every_rank() -> None:
    control = ProcessSetControl("undecided")
    first = hvd.rank() == 0
    with pytest.raises(TypeError if first else RuntimeError, match="not JSON serializable"):
        control.decide(object)
    assert control.decide(lambda: [1, None]) == [1, None]


@pytest.mark.ranks(1)
def test_an_interrupt_while_ranks_agree_is_let_through() -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ProcessSetControl("interrupted").agree("a test", interrupted, lambda _: {})


@pytest.mark.ranks(2)
@pytest.mark.parametrize("folder", ["file/below", "/proc/nothing/here"])
@pytest.mark.parametrize("everywhere", [True, False], ids=["everywhere", "rank 0"])
def test_telemetry_that_rank_0_cannot_write_is_an_error_on_every_rank(
    folder: str, everywhere: bool, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    path = str(tmp_path / folder)
    model = make_model()
    first = hvd.rank() == 0
    with pytest.raises(OSError if first else RuntimeError, match="telemetry cannot write") as caught:
        ours(sgd(model.parameters()), telemetry=path if first or everywhere else None)
    if first:
        assert path in str(caught.value)
    else:
        assert folder in str(caught.value)
        assert "rank 0 failed" in str(caught.value)
    for reason in ("Not a directory",) if "file" in folder else ("No such file", "nothing"):
        assert reason in str(caught.value)
    still_works()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("everywhere", [True, False], ids=["everywhere", "on one rank"])
def test_compression_that_is_set_in_mid_step_is_a_runtime_error_on_every_rank(everywhere: bool) -> None:
    model = make_model()
    optimizer = ours(sgd(model.parameters()), named_parameters=model.named_parameters())
    plain_step(model, optimizer, 0)
    if everywhere or on_last_rank():
        loss_of(model, 1).backward()
    with pytest.raises(RuntimeError, match=r"before backward\(\), or after step\(\)"):
        optimizer.set_compression("topk:density=0.1")
    if not (everywhere or on_last_rank()):
        loss_of(model, 1).backward()
    optimizer.step()
    assert_ranks_agree(model)
    assert {row.compressor for row in optimizer.plan} == {"none"}


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
        ({"dense_steps": 3}, ("dense_steps", "3")),
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


def caught_while_building(**options: Any) -> list[warnings.WarningMessage]:
    model = make_model()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer = ours(sgd(model.parameters()), named_parameters=model.named_parameters(), **options)
    plain_step(model, optimizer, 0)
    assert_ranks_agree(model)
    return caught


def test_rank_0_warns_where_elements_wait_from_the_first_step_on() -> None:
    (first,) = caught_while_building(compression="topk:density=0.1") or [None]
    if hvd.rank() == 0:
        assert first is not None
        assert "topk:density=0.1,values=bf16' without dense_steps" in str(first.message)
    else:
        assert first is None
    for options in (
        {"compression": "topk:density=0.1", "dense_steps": 1},
        {"compression": "qsgd:bits=4"},
        {"compression": "none"},
    ):
        assert caught_while_building(**options) == []


def test_the_older_name_of_dense_steps_works_and_warns() -> None:
    (caught,) = caught_while_building(compression="topk:density=0.1", warmup_steps=3)
    assert caught.category is DeprecationWarning
    assert "dense_steps" in str(caught.message)
