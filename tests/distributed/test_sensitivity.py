"""Short runs of benchmarks/accuracy/sensitivity.py, which need a Horovod that has started."""

from __future__ import annotations

import pytest
import torch

from benchmarks.accuracy import sensitivity
from hvd_adaptive.compressors import parse


@pytest.mark.ranks(1)
def test_short_runs_begin_at_the_same_checkpoint_and_compress_one_layer() -> None:
    preset = sensitivity.prepare(sensitivity.QUICK["MLP"])
    plain, rises = [], []
    for checkpoint in sensitivity.checkpoints_of(preset, (3, 6), 4, 2):
        plain += [checkpoint.run(), checkpoint.run()]
        compressor = parse(sensitivity.COMPRESSION)
        rises.append(checkpoint.run((0, compressor, 0.003))[0] - plain[-1][0])
        all_sent, _ = checkpoint.run((0, compressor, 1.0))  # its values are rounded
        assert all_sent == pytest.approx(plain[-1][0], rel=1e-5)
        moment = checkpoint.moments[0].average
        assert moment.shape == plain[-1][1][0].shape
        assert bool((moment > 0).any())
    for first, again in (plain[:2], plain[2:]):
        assert first[0] == again[0]
        assert all(torch.equal(*pair) for pair in zip(first[1], again[1], strict=True))
    assert plain[0][0] != plain[2][0]
    assert all(rise != 0 for rise in rises)
