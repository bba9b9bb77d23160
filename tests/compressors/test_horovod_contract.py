"""Compressors under Horovod's own optimizer: what it calls, in the place of its operations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from hvd_adaptive.compressors import Compression, PowerSGD, RandomK, horovod, parse

SHAPES = ((50, 40), (2000, 1), (64, 32), (40, 50), (7,), (3, 3))


@pytest.fixture(autouse=True)
def _no_rounds_of_other_tests() -> Iterator[None]:
    horovod._rounds.clear()
    yield
    horovod._rounds.clear()


class Rank:
    """One process: it has compressed some rounds, in an order of its own."""

    def __init__(self, compressor: Any, order: list[int]) -> None:
        self.compressor, self.order = compressor, order
        self.rounds: dict[RandomK, Any] = {}

    def step(self, grads: list[Tensor]) -> Iterator[Any]:
        """Yields what is to be reduced, receives the result, and yields the gradients at last."""
        sent: dict[int, tuple[Tensor, Any]] = {}
        with self._here():
            for index in self.order:
                sent[index] = self.compressor.compress(grads[index])
        reduced = yield [sent[index][0] for index in range(len(grads))]
        with self._here():
            yield [self.compressor.decompress(reduced[i], sent[i][1]) for i in range(len(grads))]

    @contextmanager
    def _here(self) -> Iterator[None]:
        """Count this rank's rounds."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(horovod, "_rounds", self.rounds)
            yield


def gradients(seed: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def mean(tensors: list[Tensor]) -> Tensor:
    return torch.stack(tensors).mean(dim=0)


def reduce(
    ranks: list[Rank], grads: list[list[Tensor]], combine: Callable[[list[Tensor]], Tensor] = mean
) -> list[list[Tensor]]:
    running = [rank.step(mine) for rank, mine in zip(ranks, grads, strict=True)]
    given = [next(each) for each in running]
    results = [combine([mine[index] for mine in given]) for index in range(len(SHAPES))]
    return [each.send(results) for each in running]  # type: ignore[attr-defined]


@pytest.mark.filterwarnings("ignore:randomk under")
@pytest.mark.parametrize("values", ["fp32", "fp16"])
@pytest.mark.parametrize("unbiased", [False, True])
def test_ranks_draw_the_same_elements_whatever_the_order_of_their_gradients(
    values: str, unbiased: bool
) -> None:
    compressor = RandomK(density=0.25, values=values, unbiased=unbiased)
    ranks = [Rank(compressor, [0, 1, 2, 3, 4, 5]), Rank(compressor, [5, 3, 2, 4, 1, 0])]
    drawn = []
    for step in range(4):
        grads = [gradients(10 * step + rank) for rank in range(2)]
        results = reduce(ranks, [[each.clone() for each in mine] for mine in grads])
        for one, other in zip(*results, strict=True):
            assert torch.equal(one, other)
        for index, (result, shape) in enumerate(zip(results[0], SHAPES, strict=True)):
            expected = mean([mine[index] for mine in grads])
            assert result.shape == expected.shape
            if len(shape) == 1 or expected.numel() < 1024:
                assert torch.equal(result, expected)
                continue
            sent = result != 0
            assert int(sent.sum()) == round(0.25 * expected.numel())
            factor = 4.0 if unbiased else 1.0
            torch.testing.assert_close(result[sent], factor * expected[sent], rtol=2e-3, atol=2e-3)
        drawn.append(results[0][0] != 0)
    assert not torch.equal(drawn[0], drawn[1])  # each step draws anew
    assert float((drawn[0] & drawn[1]).float().mean()) == pytest.approx(1 / 16, abs=0.03)


def test_the_unbiased_mean_over_the_rounds_is_the_gradient() -> None:
    compressor = RandomK(density=0.25, unbiased=True)
    rank, grads = Rank(compressor, list(range(len(SHAPES)))), gradients(0)
    total = sum(reduce([rank], [grads])[0][0] for _ in range(300))
    assert isinstance(total, Tensor)
    error = (total / 300 - grads[0]).square().mean() / grads[0].square().mean()
    assert float(error) == pytest.approx((1 / 0.25 - 1) / 300, rel=0.15)  # the variance, averaged


def test_sums_and_other_dtypes_come_back_as_they_were_given() -> None:
    compressor = RandomK(density=1.0, unbiased=True)
    for dtype, tolerance in ((torch.float64, 1e-6), (torch.float16, 2e-3), (torch.bfloat16, 1e-2)):
        ranks = [Rank(compressor, list(range(len(SHAPES)))) for _ in range(3)]
        grads = [gradients(rank, dtype) for rank in range(3)]
        results = reduce(ranks, grads, lambda tensors: torch.stack(tensors).sum(dim=0))
        for index, result in enumerate(results[0]):
            assert result.dtype == dtype
            expected = torch.stack([mine[index].double() for mine in grads]).sum(dim=0)
            torch.testing.assert_close(result.double(), expected, rtol=tolerance, atol=5 * tolerance)


def test_a_gradient_that_is_not_finite_on_one_rank_is_so_on_all() -> None:
    compressor = RandomK(density=0.25, unbiased=True)
    ranks = [Rank(compressor, list(range(len(SHAPES)))) for _ in range(2)]
    grads = [gradients(rank) for rank in range(2)]
    grads[1][2][5, 5] = torch.inf
    for result in reduce(ranks, grads):
        assert bool(result[2].isnan().all())
        assert bool(result[0].isfinite().all())


def test_a_rank_that_begins_later_is_noticed() -> None:
    compressor = RandomK(density=0.25, unbiased=True)
    order = list(range(len(SHAPES)))
    old = Rank(compressor, order)
    reduce([old], [gradients(0)])
    new = Rank(compressor, order)

    def steps() -> None:
        for step in range(4):  # one in seven rounds has the same token by chance
            reduce([old, new], [gradients(step), gradients(9)])

    with pytest.raises(RuntimeError, match="ranks have drawn different elements"):
        steps()


def test_what_is_dropped_for_good_is_said_once(recwarn: pytest.WarningsRecorder) -> None:
    compressor = RandomK(density=0.25)
    for _ in range(2):
        compressor.compress(torch.ones(64, 64))
    found = [str(each.message) for each in recwarn if "unbiased=True" in str(each.message)]
    assert len(found) == 1
    assert "0.25 times the whole" in found[0]
    assert "hvd_adaptive.DistributedOptimizer" in found[0]


@pytest.mark.filterwarnings("ignore:randomk under")
def test_the_class_works_as_an_instance_with_its_defaults() -> None:
    x = torch.randn(100, 100)
    sent, context = Compression.randomk.compress(x)
    assert sent.numel() == 100 + 1  # 1 %, and the token
    assert int(Compression.randomk.decompress(sent, context).count_nonzero()) == 100


@pytest.mark.parametrize("compressor", [PowerSGD, PowerSGD(rank=2)])
def test_powersgd_says_why_it_cannot_be_summed_once(compressor: Any) -> None:
    with pytest.raises(TypeError, match=r"powersgd is reduced in several rounds.*use hvd_adaptive\."):
        compressor.compress(torch.ones(64, 64))


@pytest.mark.parametrize("name", ["none", "fp16", "bf16"])
@pytest.mark.parametrize("numel", [0, 1, (1 << 15) + 1, 100_000])
def test_the_error_of_a_cast_is_that_of_its_remainder(name: str, numel: int) -> None:
    """Also where several blocks are looked at, and where numbers become subnormal, or saturate."""
    compressor = parse(name)
    x = torch.logspace(-9, 5, numel) * torch.where(torch.arange(numel) % 3 == 0, -1.0, 1.0)
    rest = x.clone()
    compressor.compress_(rest, compressor.level)
    [error] = compressor.errors(x, [compressor.level])
    assert error == pytest.approx(float(rest.double().square().sum()), rel=1e-12)
