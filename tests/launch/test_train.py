"""launch/train.py and the modules beside it: data, models, pieces of the loop, real launches."""

from __future__ import annotations

import gc
import gzip
import importlib.util
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch

from launch.training import data, models, options
from tests.harness.eager import PYTHONPATH
from tests.harness.side_by_side import selected, side_by_side
from tests.launch.idx_files import write_idx

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = ROOT / "launch"

needs_horovod = pytest.mark.skipif(
    importlib.util.find_spec("horovod") is None, reason="Horovod is not installed"
)

ENVIRONMENT = {
    "PYTHONPATH": PYTHONPATH,
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_MCA_hwloc_base_binding_policy": "none",
    # A busy machine may need longer than the second that mpirun grants after a signal.
    "OMPI_MCA_odls_base_sigkill_timeout": "3",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMP_NUM_THREADS": "1",
}


# ------------------------------------------------------------------------------ data made for tests


def write_images(folder: Path) -> None:
    """Real digits at the size of Fashion-MNIST: 400 to train on, 101 held out."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    large = np.kron(digits.images[:501], np.ones((3, 3))) * 15
    images = np.pad(large, ((0, 0), (2, 2), (2, 2))).astype(np.uint8)
    labels = digits.target[:501].astype(np.uint8)
    folder.mkdir(parents=True)
    for part, chosen in (("train", slice(0, 400)), ("t10k", slice(400, 501))):
        write_idx(folder / f"{part}-images-idx3-ubyte.gz", images[chosen])
        write_idx(folder / f"{part}-labels-idx1-ubyte.gz", labels[chosen])


def write_speeches(folder: Path) -> None:
    """Real English, as 21 texts: this repository's licence, in pieces."""
    text = (ROOT / "LICENSE").read_text()
    length = len(text) // 21
    folder.mkdir(parents=True)
    for number in range(21):
        piece = text[number * length : (number + 1) * length]
        (folder / f"{1800 + number}_speaker.txt").write_text(piece)


@pytest.fixture(scope="module")
def data_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data")
    write_images(root / "fashion-mnist")
    write_speeches(root / "sotu")
    return root


# --------------------------------------------------------------------------------------- IDX files


def test_an_idx_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    array = np.arange(2 * 3 * 4, dtype=np.uint8).reshape(2, 3, 4)
    write_idx(tmp_path / "a.gz", array)
    assert np.array_equal(data.read_idx(tmp_path / "a.gz", 3), array)


def _header(*shape: int, kind: int = 8) -> bytes:
    return bytes((0, 0, kind, len(shape))) + np.array(shape, ">u4").tobytes()


DAMAGED = {
    "empty": gzip.compress(b""),
    "no gzip": b"not a gzip file at all",
    "gzip cut short": gzip.compress(_header(5) + bytes(range(5)))[:-6],
    "gzip with a wrong checksum": gzip.compress(_header(5) + bytes(5))[:-8] + bytes(8),
    "another magic number": gzip.compress(b"\1" + _header(5)[1:] + bytes(5)),
    "floats, not bytes": gzip.compress(_header(5, kind=0x0D) + bytes(20)),
    "another number of dimensions": gzip.compress(_header(5, 1) + bytes(5)),
    "header cut short": gzip.compress(_header(5)[:6]),
    "too few bytes": gzip.compress(_header(5) + bytes(4)),
    "too many bytes": gzip.compress(_header(5) + bytes(6)),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_idx_file_is_an_error_that_names_it(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "labels.gz"
    path.write_bytes(DAMAGED[damage])
    with pytest.raises(data.DataError, match=re.escape(str(path))):
        data.read_idx(path, 1)


def test_a_missing_idx_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(data.DataError, match=re.escape(str(tmp_path / "none.gz"))):
        data.read_idx(tmp_path / "none.gz", 1)


def test_images_and_labels_must_be_equally_many(tmp_path: Path) -> None:
    write_images(tmp_path / "fashion-mnist")
    write_idx(tmp_path / "fashion-mnist/t10k-labels-idx1-ubyte.gz", np.zeros(100, np.uint8))
    with pytest.raises(data.DataError, match="101 images but 100 labels"):
        data.load("fashion", tmp_path)


def test_a_label_above_nine_is_an_error(tmp_path: Path) -> None:
    write_images(tmp_path / "fashion-mnist")
    write_idx(tmp_path / "fashion-mnist/t10k-labels-idx1-ubyte.gz", np.full(101, 10, np.uint8))
    with pytest.raises(data.DataError, match="labels must be 0 to 9"):
        data.load("fashion", tmp_path)


# -------------------------------------------------------------------------------------- data sets


def test_images_are_normalized_and_keep_their_labels(data_root: Path) -> None:
    task = data.load("fashion", data_root)
    pixels, labels = task.train[list(range(400))]
    assert (len(task.train), len(task.held_out), task.shape) == (400, 101, (1, 28, 28))
    assert pixels.shape == (400, 1, 28, 28)
    assert pixels.mean().item() == pytest.approx(0, abs=1e-4)
    assert pixels.std().item() == pytest.approx(1, abs=1e-4)
    assert labels[:5].tolist() == [0, 1, 2, 3, 4]


def test_the_fashion_mnist_that_is_here_is_whole() -> None:
    places = [data.default_root() / "fashion-mnist", data.SYSTEM_FASHION_MNIST]
    if data.find_folder(places, "*-ubyte.gz") is None:
        pytest.skip("Fashion-MNIST is not on this machine")
    task = data.load("fashion", None)
    assert (len(task.train), len(task.held_out)) == (60_000, 10_000)
    assert isinstance(task.train, data.Images)
    # The published mean and deviation of its training pixels, of 255.
    assert task.train.mean / 255 == pytest.approx(0.2860, abs=1e-4)
    assert task.train.deviation / 255 == pytest.approx(0.3530, abs=1e-4)


def test_without_fashion_mnist_the_digits_step_in_and_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data, "default_root", lambda: tmp_path)
    monkeypatch.setattr(data, "SYSTEM_FASHION_MNIST", tmp_path / "system")
    task = data.load("fashion", None)
    assert task.name == "digits"
    assert "FALLBACK" in task.note
    assert str(tmp_path / "system") in task.note


def test_a_folder_that_was_named_is_never_replaced_by_the_digits(tmp_path: Path) -> None:
    with pytest.raises(data.DataError, match="no Fashion-MNIST in"):
        data.load("fashion", tmp_path)


def test_the_argument_wins_over_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HVA_DATA", str(ROOT))
    assert data.data_root(None) == ROOT
    assert data.data_root(tmp_path) == tmp_path
    monkeypatch.setenv("HVA_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(data.DataError, match=r"HVA_DATA names .*nowhere"):
        data.data_root(None)


def test_every_tenth_digit_is_held_out() -> None:
    task = data.load("digits", None)
    assert (len(task.train), len(task.held_out)) == (1618, 179)


def test_every_tenth_speech_by_name_is_held_out(tmp_path: Path) -> None:
    files = [tmp_path / f"{1790 + number}_x.txt" for number in range(25)]
    train, held = data.split_speeches(reversed(files))
    assert held == [files[9], files[19]]
    assert train == [file for file in files if file not in held]


def test_the_vocabulary_is_capped_and_the_rest_unknown() -> None:
    speeches = [["a", "a", "b"], ["b", "a", "c"]]
    vocabulary = data.make_vocabulary(speeches, 4)
    assert vocabulary == {"<unk>": 0, "<end>": 1, "a": 2, "b": 3}
    assert data.encode(speeches, vocabulary).tolist() == [2, 2, 3, 1, 3, 2, 0, 1]


def test_the_vocabulary_knows_only_training_speeches(tmp_path: Path) -> None:
    write_speeches(tmp_path / "sotu")
    held = tmp_path / "sotu/1809_speaker.txt"
    before = data.load("sotu", tmp_path)
    held.write_text("xyzzy " * 500)
    after = data.load("sotu", tmp_path)
    assert after.classes == before.classes
    assert isinstance(after.held_out, data.Windows)
    assert set(after.held_out.tokens[:400].tolist()) == {0}


def test_a_sequence_is_followed_by_its_next_tokens() -> None:
    windows = data.Windows(torch.arange(10, dtype=torch.int32), 3)
    assert len(windows) == 3
    inputs, targets = windows[[0, 2]]
    assert inputs.tolist() == [[0, 1, 2], [6, 7, 8]]
    assert targets.tolist() == [[1, 2, 3], [7, 8, 9]]
    assert len(data.Windows(torch.arange(9), 3)) == 2


def test_missing_texts_are_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(data.DataError, match=r"launch/fetch_data\.sh"):
        data.load("sotu", tmp_path)


def test_a_text_that_is_not_utf8_is_an_error_that_names_it(tmp_path: Path) -> None:
    write_speeches(tmp_path / "sotu")
    (tmp_path / "sotu/1805_speaker.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(data.DataError, match="1805_speaker"):
        data.load("sotu", tmp_path)


def test_sequences_longer_than_the_texts_are_an_error(data_root: Path) -> None:
    with pytest.raises(data.DataError, match="make the sequences shorter"):
        data.load("sotu", data_root, length=10**6)


# ---------------------------------------------------------------------------------------- models


def preset_model(preset: str, shape: tuple[int, ...], classes: int) -> torch.nn.Module:
    chosen = options.parse(["--preset", preset])
    sizes = models.Sizes(chosen.width, chosen.layers, chosen.heads, chosen.dropout)
    return models.build(chosen.model, shape, classes, sizes)


def test_the_lstm_preset_has_about_6_75_million_parameters() -> None:
    model = preset_model("lstm-sotu", (16,), 10_000)
    assert models.count_parameters(model) == pytest.approx(6.75e6, rel=0.001)


def test_the_mlp_preset_has_large_layers() -> None:
    model = preset_model("mlp-fashion", (1, 28, 28), 10)
    shapes = [tuple(each.shape) for each in model.parameters() if each.dim() == 2]
    assert shapes == [(2048, 784), (2048, 2048), (10, 2048)]


@pytest.mark.parametrize("name", models.IMAGE_MODELS)
@pytest.mark.parametrize("side", [8, 28])
def test_an_image_model_gives_one_row_of_logits_an_image(name: str, side: int) -> None:
    model = models.build(name, (1, side, side), 10, models.Sizes(16, 1))
    assert model(torch.zeros(3, 1, side, side)).shape == (3, 10)


@pytest.mark.parametrize("name", models.TEXT_MODELS)
def test_a_text_model_gives_logits_for_each_token_and_sees_no_later_one(name: str) -> None:
    torch.manual_seed(0)
    model = models.build(name, (12,), 50, models.Sizes(16, 2, heads=4)).eval()
    tokens = torch.randint(50, (2, 12))
    changed = tokens.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % 50
    logits, others = model(tokens), model(changed)
    assert logits.shape == (2, 12, 50)
    assert torch.allclose(logits[:, :7], others[:, :7], atol=1e-6)
    assert not torch.allclose(logits[:, 7], others[:, 7], atol=1e-4)


@pytest.mark.parametrize("name", models.MODELS)
def test_no_model_has_buffers_that_ranks_would_have_to_exchange(name: str) -> None:
    shape = (1, 28, 28) if name in models.IMAGE_MODELS else (12,)
    assert list(models.build(name, shape, 10, models.Sizes(16, 1)).buffers()) == []


# ---------------------------------------------------------------------------------- command line


@pytest.mark.parametrize("preset", options.PRESETS)
def test_a_preset_can_be_parsed_and_its_options_overridden(preset: str) -> None:
    chosen = options.parse(["--preset", preset, "--batch-size", "3"])
    assert chosen.batch_size == 3
    assert chosen.model == options.PRESETS[preset]["model"]


@pytest.mark.parametrize("preset", options.PRESETS)
def test_each_preset_can_be_compared_with_horovods_own_optimizer(preset: str) -> None:
    chosen = options.parse(["--preset", preset, "--distributed", "horovod"])
    assert (chosen.compression, chosen.dense_steps) == ("none", 0)


WRONG = {
    "--preset nonsense": "resnet-fashion",
    "--batch-size 0": "must be at least 1",
    "--steps 0": "must be at least 1",
    "--lr nan": "must be at least 0",
    "--momentum 1": "below 1",
    "--model lstm": "is for text",
    "--preset lstm-sotu --model resnet": "is for images",
    "--preset transformer-sotu --width 10": "multiple of --heads",
    "--epochs 0": "trains nothing",
    "--compression topk:densty=0.01": "did you mean 'density'",
    "--compression nonsense": "unknown compressor",
    "--override bias": "PATTERN=SPEC",
    "--override *.bias=nonsense": "unknown compressor",
    "--feedback nonsense": "unknown feedback",
    "--distributed horovod --compression topk:density=0.01": "knows --compression none and fp16",
    "--distributed horovod --feedback ef": "need --distributed adaptive",
    "--resume": "need --checkpoint-dir",
    "--checkpoint-every 5": "need --checkpoint-dir",
    "--bucket-cap-mb 0": "more than 0",
    "--batch 5": "unrecognized arguments",
}


OLD_NAMES = {
    "--warmup-steps 7": ("lr_warmup_steps", 7, "write --lr-warmup-steps"),
    "--warmup-steps=7": ("lr_warmup_steps", 7, "write --lr-warmup-steps"),
    "--compression-warmup-steps 7": ("dense_steps", 7, "write --dense-steps"),
    "--update adamw": ("optimizer", "adamw", "write --optimizer"),
    "--optimizer stock": ("distributed", "horovod", "write --distributed horovod"),
    "--optimizer=stock": ("distributed", "horovod", "write --distributed horovod"),
    "--optimizer adaptive": ("distributed", "adaptive", "write --distributed adaptive"),
}


@pytest.mark.parametrize("line", OLD_NAMES)
def test_an_option_s_old_name_still_counts_and_a_warning_says_what_to_write(line: str) -> None:
    field, value, advice = OLD_NAMES[line]
    with pytest.warns(DeprecationWarning, match=advice):
        chosen = options.parse(line.split())
    assert getattr(chosen, field) == value


def test_an_option_s_own_name_is_not_warned_of(recwarn: pytest.WarningsRecorder) -> None:
    line = "--lr-warmup-steps 1 --dense-steps 1 --optimizer adamw --distributed adaptive"
    assert options.parse(line.split()).optimizer == "adamw"
    assert not recwarn.list


def test_the_identity_of_an_older_checkpoint_is_that_of_the_same_options_today() -> None:
    mine = options.parse(["--preset", "transformer-sotu", "--distributed", "horovod"]).identity()
    older = dict(mine)
    del older["distributed"]
    older |= {"update": "adamw", "optimizer": "stock"}
    assert options.renamed_identity(older) == mine
    assert options.renamed_identity(mine) == mine


@pytest.mark.parametrize("line", WRONG)
def test_a_wrong_command_line_is_refused_with_a_reason(
    line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        options.parse(line.split())
    assert end.value.code == 2
    assert WRONG[line] in capsys.readouterr().err


def test_help_tells_the_exit_status_of_each_signal(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        options.parse(["--help"])
    text = capsys.readouterr().out
    for number in ("129", "130", "143", "75"):
        assert number in text


# ------------------------------------------------------------------------- the pieces of the loop


@needs_horovod
def test_the_collector_does_not_look_at_what_was_there_before_the_loop() -> None:
    from launch.training.loop import spared_from_collection

    before: list[list[int]] = [[] for _ in range(1000)]
    inside: list[list[int]] = []
    with spared_from_collection():
        inside = [[] for _ in range(1000)]
        seen = set(map(id, gc.get_objects()))
        assert not seen & set(map(id, before))
        assert seen >= set(map(id, inside))
    assert set(map(id, gc.get_objects())) >= {*map(id, before), *map(id, inside)}


@needs_horovod
@pytest.mark.parametrize("limit", [0, 1, 7, 100, 1000])
@pytest.mark.parametrize("ranks", [1, 2, 3, 16])
def test_each_held_out_example_is_scored_on_exactly_one_rank(limit: int, ranks: int) -> None:
    from launch.training.loop import held_out_share

    shares = [held_out_share(101, limit, rank, ranks) for rank in range(ranks)]
    together = sorted(number for share in shares for number in share)
    assert len(together) == len(set(together)) == min(limit or 101, 101)
    assert set(together) <= set(range(101))
    assert max(map(len, shares)) == len(shares[0])


@needs_horovod
def test_the_learning_rate_rises_linearly_and_falls_as_its_schedule_says() -> None:
    from launch.training.loop import learning_rate

    rates = [learning_rate(step, 100, 10, 0.5, "cosine") for step in range(100)]
    assert rates[:10] == pytest.approx([0.05 * step for step in range(1, 11)])
    assert (rates[10], rates[55]) == pytest.approx((0.5, 0.25))
    assert all(after < before for before, after in itertools.pairwise(rates[10:]))
    assert learning_rate(99, 100, 10, 0.5, "constant") == 0.5
    falls = [learning_rate(step, 100, 10, 0.5, "step") for step in (49, 50, 74, 75)]
    assert falls == pytest.approx([0.5, 0.05, 0.05, 0.005])


@needs_horovod
def test_the_learning_rate_grows_with_the_ranks_unless_gradients_are_summed() -> None:
    from launch.training.loop import learning_rate_scale

    assert learning_rate_scale("linear", 8, 2, averaged=True) == 16
    assert learning_rate_scale("linear", 8, 2, averaged=False) == 2
    assert learning_rate_scale("sqrt", 8, 2, averaged=True) == 4
    assert learning_rate_scale("none", 8, 2, averaged=True) == 1


# ----------------------------------------------------------------------------------- real launches


@dataclass(frozen=True)
class Result:
    """What one command line did, on both ranks."""

    statuses: list[int]
    output: str

    def figure(self, label: str) -> float:
        found = re.search(rf"^{label} +([\d.,]+)", self.output, re.MULTILINE)
        assert found, self.output
        return float(found[1].replace(",", ""))


SMALL = ["--log-every", "2", "--eval-examples", "40", "--threads", "1"]
TINY: dict[str, list[str]] = {
    "resnet-fashion": ["--width", "8", "--layers", "1", "--batch-size", "8"],
    "mlp-fashion": ["--width", "64", "--batch-size", "8"],
    "mlp-digits": ["--width", "32", "--batch-size", "8"],
    "lstm-sotu": ["--width", "32", "--vocabulary", "300"],
    "transformer-sotu": ["--width", "32", "--layers", "1", "--batch-size", "2"],
}
# Dropout, accumulation and an end of an epoch within the run: what a resumed run could get wrong.
RESUMABLE = [*TINY["mlp-fashion"], "--preset", "mlp-fashion", "--dropout", "0.3", "--accumulate", "2",
             "--steps", "16", "--eval-every", "5", *SMALL]  # fmt: skip
KINDS = {
    "stock": ["--distributed", "horovod"],
    "topk": ["--compression", "topk:density=0.05", "--bucket-cap-mb", "0.05"],
}
DAMAGES = {
    ("remove", "rank-1.pt"): "is missing",
    ("tear", "rank-1.pt"): "is not the file that was saved",
    ("flip", "rank-0.pt"): "is not the file that was saved",
    ("exchange", "rank-1.pt"): "is not the file that was saved",
    ("remove", "pt"): "is missing",
    ("tear", "pt"): "is not the file that was saved",
    ("tear", "json"): "is damaged or no manifest",
    ("empty", "json"): "is damaged or no manifest",
    ("deep", "json"): "is damaged or no manifest",
    ("list", "json"): "is no manifest of this program (format 2)",
    ("number", "json"): "is no manifest of this program (format 2)",
    ("null", "json"): "is no manifest of this program (format 2)",
}
# Where in a manifest, and what is wrong to have there.
WRONG_VALUES: dict[tuple[str, ...], list[Any]] = {
    ("format",): ["2", 3, None],
    ("identity",): [[], "x", None],
    ("position",): [[], 16],
    ("position", "step"): ["16", -1, 16.0, 17],
    ("position", "epoch"): [True, None, 10**30],
    ("position", "step_in_epoch"): [[4], -4],
    ("position", "more"): [1],
    ("ranks",): ["2", 0, 1, None],
    ("sha256",): [[], "x"],
    ("sha256", "step-000000016.pt"): [7, None],
}
# Which file is missed where the values do not fit each other.
WRONG_ALSO: dict[str, tuple[tuple[str, ...], list[Any], str]] = {
    "another number of ranks": (("ranks",), [10**9], "step-000000016.rank-2.pt"),
    "no files": (("sha256",), [{}], "step-000000016.pt"),
    "no place": (("position",), [{}], "step"),
}
# By name: where, what, and what the error names.
WRONG_MANIFESTS = (
    {
        f"{keys[-1]} is {value!r}": (keys, [value], keys[-1])
        for keys, values in WRONG_VALUES.items()
        for value in values
    }
    | {f"no {keys[-1]}": (keys, [], keys[-1]) for keys in WRONG_VALUES if keys[-1] != "more"}
    | WRONG_ALSO
)


def commands(folder: Path) -> Iterator[dict[str, Any]]:
    """The command lines that one launch runs, in order."""
    for preset, sizes in TINY.items():
        arguments = ["--preset", preset, "--steps", "4", *sizes, *SMALL]
        yield {"name": preset, "arguments": arguments}
    for kind, extra in KINDS.items():
        whole, resumed = str(folder / f"{kind}-whole"), str(folder / f"{kind}-resumed")
        line = [*RESUMABLE, *extra, "--checkpoint-every", "8", "--checkpoint-dir"]
        yield {"name": f"{kind} whole", "arguments": [*line, whole]}
        yield {
            "name": f"{kind} resumed",
            "arguments": [*line, resumed, "--resume"],
            "copy": [whole, resumed, 8],
        }
    taken = ["--checkpoint-dir", str(folder / "topk-whole")]
    topk = [*RESUMABLE, *KINDS["topk"]]
    yield {"name": "not resumed", "arguments": [*topk, *taken]}
    yield {"name": "foreign", "arguments": [*topk, *taken, "--resume", "--seed", "9"]}
    empty = ["--checkpoint-dir", str(folder / "empty")]
    yield {"name": "no checkpoint", "arguments": [*topk, *empty, "--resume"]}
    yield {"name": "no checkpoint yet", "arguments": [*topk, *empty, "--resume", "auto"]}
    for how, file in DAMAGES:
        broken = folder / f"{how} {file}"
        yield {
            "name": f"{how} {file}",
            "arguments": [*topk, "--checkpoint-dir", str(broken), "--resume"],
            "copy": [str(folder / "topk-whole"), str(broken), 16],
            "damage": [how, str(broken / f"step-000000016.{file}")],
        }
    for name, (keys, value, _) in WRONG_MANIFESTS.items():
        broken = folder / name
        yield {
            "name": name,
            "arguments": [*topk, "--checkpoint-dir", str(broken), "--resume"],
            "copy": [str(folder / "topk-whole"), str(broken), 16],
            "edit": [str(broken / "step-000000016.json"), keys, *value],
        }
    yield {"name": "no data", "arguments": [*RESUMABLE, "--data-dir", str(folder / "nowhere")]}
    yield {"name": "too large a batch", "arguments": [*RESUMABLE, "--batch-size", "1000"]}
    yield {"name": "no such parameter", "arguments": [*RESUMABLE, "--override", "nobody.*=none"]}
    yield {"name": "diverged", "arguments": [*RESUMABLE, "--lr", "1e30"]}
    yield {"name": "bad logdir", "arguments": [*RESUMABLE, "--logdir", str(ROOT / "LICENSE")]}
    yield {"name": "logs", "arguments": [*RESUMABLE, "--logdir", str(folder / "logs")]}
    for kind, extra in KINDS.items():
        file = str(folder / "files" / f"{kind}.json")
        yield {"name": f"{kind} result", "arguments": [*RESUMABLE, *extra, "--result", file]}
    yield {"name": "bad result", "arguments": [*RESUMABLE, "--result", str(folder)]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


def environment(data_root: Path) -> dict[str, str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**os.environ, **ENVIRONMENT, "HVA_DATA": str(data_root), "PATH": path}


@pytest.fixture(scope="module")
def results(folder: Path, data_root: Path) -> dict[str, Result]:
    """One launch of two ranks that runs all of `commands`."""
    list_of_commands = list(commands(folder))
    (folder / "commands.json").write_text(json.dumps(list_of_commands))
    done = subprocess.run(
        ["horovodrun", "-np", "2", sys.executable, "-m", "tests.launch.train_driver",
         str(folder / "commands.json"), str(folder / "results")],
        env=environment(data_root), capture_output=True, text=True, timeout=480, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    ranks = [json.loads((folder / f"results-{rank}.json").read_text()) for rank in (0, 1)]
    return {
        first["name"]: Result([first["status"], second["status"]], first["output"])
        for first, second in zip(*ranks, strict=True)
    }


pytestmark_launch = [needs_horovod, pytest.mark.distributed, pytest.mark.slow]


class TestTwoRanks:
    """What the command lines of one launch did."""

    pytestmark = pytestmark_launch

    @pytest.mark.parametrize("preset", TINY)
    def test_a_preset_trains_and_prints_the_table(
        self, results: dict[str, Result], preset: str
    ) -> None:
        result = results[preset]
        assert result.statuses == [0, 0], result.output
        assert result.figure("samples per second") > 0
        assert result.figure("held-out loss") > 0
        assert result.figure("  payload sent") > 0
        if preset.endswith("sotu"):
            assert result.figure("held-out perplexity") > 1

    @pytest.mark.parametrize("kind", KINDS)
    def test_a_resumed_run_equals_one_that_never_stopped(
        self, results: dict[str, Result], folder: Path, kind: str
    ) -> None:
        assert results[f"{kind} whole"].statuses == [0, 0], results[f"{kind} whole"].output
        assert results[f"{kind} resumed"].statuses == [0, 0], results[f"{kind} resumed"].output
        assert "resumed at step 8" in results[f"{kind} resumed"].output
        names = ["step-000000016.pt", "step-000000016.rank-0.pt", "step-000000016.rank-1.pt"]
        for name in names:
            whole, resumed = (
                torch.load(folder / f"{kind}-{which}" / name, weights_only=True)
                for which in ("whole", "resumed")
            )
            assert same(whole, resumed), name
        if kind == "topk":
            slots = [slots for slots in whole["compression"]["kept"].values() if slots]
            assert any(held["residual"].abs().max() > 0 for held in slots)

    def test_only_the_newest_two_checkpoints_are_kept(
        self, results: dict[str, Result], folder: Path
    ) -> None:
        names = sorted(file.name for file in (folder / "topk-whole").iterdir())
        stems = ["step-000000008", "step-000000016"]
        endings = [".json", ".pt", ".rank-0.pt", ".rank-1.pt"]
        assert names == [stem + ending for stem in stems for ending in endings]

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("not resumed", "add --resume"),
            ("foreign", "seed = 0, but this run has 9"),
            ("no checkpoint", "no complete checkpoint"),
            ("no data", "nowhere, which is no folder"),
            ("too large a batch", "make --batch-size smaller"),
            ("no such parameter", "matches no parameter"),
            ("diverged", "try a smaller --lr"),
            ("bad logdir", "LICENSE"),
            ("bad result", "is a folder: name a file"),
        ],
    )
    def test_an_error_ends_all_ranks_with_its_reason(
        self, results: dict[str, Result], name: str, message: str
    ) -> None:
        assert results[name].statuses == [1, 1], results[name].output
        assert message in results[name].output

    @pytest.mark.parametrize(("how", "file"), DAMAGES)
    def test_a_damaged_checkpoint_is_an_error_that_names_the_file(
        self, results: dict[str, Result], folder: Path, how: str, file: str
    ) -> None:
        result = results[f"{how} {file}"]
        assert result.statuses == [1, 1], result.output
        path = folder / f"{how} {file}" / f"step-000000016.{file}"
        assert f"{path} {DAMAGES[how, file]}" in result.output

    @pytest.mark.parametrize("name", WRONG_MANIFESTS)
    def test_a_manifest_without_a_key_or_with_a_wrong_value_is_an_error_of_one_line_that_names_it(
        self, results: dict[str, Result], folder: Path, name: str
    ) -> None:
        result = results[name]
        assert result.statuses == [1, 1], result.output
        lines = [line for line in result.output.splitlines() if "train.py:" in line]
        assert len(lines) == 1
        file = f"{folder / name / 'step-000000016.json'}"
        before, named, said = lines[0].partition(file)
        assert (before, named) == ("train.py: looking for checkpoints: rank 0: ", file)
        assert WRONG_MANIFESTS[name][2] in said
        assert "Traceback" not in result.output

    @pytest.mark.parametrize("ranks", [1, 4])
    def test_another_number_of_ranks_continues_and_says_so(
        self, results: dict[str, Result], folder: Path, data_root: Path, ranks: int
    ) -> None:
        assert results["topk whole"].statuses == [0, 0]
        mine = folder / f"of-{ranks}"
        shutil.copytree(folder / "topk-whole", mine)
        done = subprocess.run(
            ["horovodrun", "-np", str(ranks), sys.executable, str(LAUNCH / "train.py"), *RESUMABLE,
             *KINDS["topk"], "--steps", "18", "--checkpoint-dir", str(mine), "--resume"],
            env=environment(data_root), capture_output=True, text=True, timeout=240, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"the checkpoint is of 2 ranks, this run has {ranks}" in done.stdout
        assert "resumed at step 16" in done.stdout
        newest = json.loads((mine / "step-000000018.json").read_text())
        assert newest["ranks"] == ranks
        assert len(newest["sha256"]) == ranks + 1

    def test_resume_auto_starts_from_the_beginning_where_there_is_no_checkpoint(
        self, results: dict[str, Result]
    ) -> None:
        assert results["no checkpoint yet"].statuses == [0, 0]
        assert "starting at step 0" in results["no checkpoint yet"].output

    def test_losses_and_scores_are_in_the_logs(self, results: dict[str, Result], folder: Path) -> None:
        lines = (folder / "logs/telemetry.jsonl").read_text().splitlines()
        tags = {tag for line in lines for tag in json.loads(line).get("scalars", {})}
        assert {"train/loss", "train/learning_rate", "held_out/accuracy"} <= tags
        assert f"tensorboard --logdir {folder / 'logs'}" in results["logs"].output

    def test_the_result_file_holds_the_steps_the_costs_and_every_evaluation(
        self, results: dict[str, Result], folder: Path
    ) -> None:
        assert results["topk result"].statuses == [0, 0], results["topk result"].output
        found = json.loads((folder / "files/topk.json").read_text())
        assert found["identity"]["compression"] == "topk:density=0.05"
        assert found["options"]["bucket_cap_mb"] == "0.05"
        assert (found["ranks"], found["samples_per_step"], found["steps"]) == (2, 32, 16)
        assert len(found["step_seconds"]) == 16
        warm = sorted(found["step_seconds"][6:])
        assert found["seconds_per_step"]["median"] == pytest.approx((warm[4] + warm[5]) / 2)
        assert found["seconds_per_step"]["p90"] == warm[8]
        costs = found["costs"]
        parts = sum(costs[name] for name in ("compute", "compress", "communicate", "decompress"))
        assert parts == pytest.approx(costs["total"])
        assert 0 < costs["payload_bytes"] < found["dense_bytes"] / 4
        assert [each["step"] for each in found["evaluations"]] == [5, 10, 15, 16]
        sums = [sum(found["step_seconds"][:step]) for step in (5, 10, 15, 16)]
        assert [each["seconds"] for each in found["evaluations"]] == pytest.approx(sums)
        assert found["held_out"]["loss"] == found["evaluations"][-1]["loss"]
        assert f"{found['held_out']['loss']:.4f}" in results["topk result"].output
        assert [file.name for file in (folder / "files").glob("*topk*")] == ["topk.json"]

    def test_what_horovods_own_optimizer_cannot_tell_is_null_in_the_result_file(
        self, results: dict[str, Result], folder: Path
    ) -> None:
        assert results["stock result"].statuses == [0, 0], results["stock result"].output
        costs = json.loads((folder / "files/stock.json").read_text())["costs"]
        assert costs["total"] > 0
        assert costs["communicate"] is None


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def ranks_below(launcher: int) -> dict[int, int]:
    """The processes of the ranks below a launcher, by rank."""
    import psutil

    found: dict[int, int] = {}
    for process in psutil.Process(launcher).children(recursive=True):
        rank = process.environ().get("OMPI_COMM_WORLD_RANK")
        if rank is not None and str(LAUNCH / "train.py") in process.cmdline():
            found[int(rank)] = process.pid
    return found


Signal: TypeAlias = tuple[str, int, str]
"""A launcher, the signal's number, and who gets it."""

Ended: TypeAlias = tuple[int, str, list[str]]
"""The launcher's status, what was printed, and the files in the folder of checkpoints."""


def signalled(case: Signal, folder: Path, data_root: Path) -> Ended:
    """Sends a signal to ranks that train."""
    launcher, number, target = case
    log, saved = folder / "log", folder / "checkpoints"
    with log.open("w") as file:
        process = subprocess.Popen(
            [launcher, "-np", "2", sys.executable, str(LAUNCH / "train.py"), *SMALL,
             "--preset", "mlp-fashion", *TINY["mlp-fashion"], "--steps", "1000000",
             "--checkpoint-dir", str(saved)],
            # Beside other tests a vote and a checkpoint may take seconds.
            env={**environment(data_root), "OMPI_MCA_odls_base_sigkill_timeout": "10"},
            stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    try:
        # Kernels may have to be compiled first.
        wait_for(lambda: process.poll() or "step 2/" in log.read_text(), 180, log)
        assert process.poll() is None, log.read_text()
        ranks = ranks_below(process.pid)
        assert sorted(ranks) == [0, 1]
        if target == "terminal":
            # Ctrl-C reaches the whole foreground group.
            os.killpg(process.pid, number)
        else:
            os.kill(ranks[1] if target == "rank 1" else process.pid, number)
        returned = process.wait(timeout=120)
        wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in ranks.values()), 60, log)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    return returned, log.read_text(), sorted(file.name for file in saved.glob("*"))


@pytest.fixture(scope="module")
def signals(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, data_root: Path
) -> Iterator[Mapping[Signal, Future[Ended]]]:
    def work(case: Signal) -> Ended:
        return signalled(case, tmp_path_factory.mktemp("signalled"), data_root)

    with side_by_side(work, selected(request, "launcher", "number", "target"), 2) as found:
        yield found


@pytest.mark.parametrize(
    ("launcher", "number", "target", "status"),
    [
        # The launcher's own status at a signal to it is not ours to say: mpirun gives 1.
        ("horovodrun", signal.SIGTERM, "rank 1", 143),
        ("horovodrun", signal.SIGHUP, "rank 1", 129),
        ("mpirun", signal.SIGTERM, "launcher", None),
        ("mpirun", signal.SIGUSR1, "launcher", 75),
        ("horovodrun", signal.SIGINT, "terminal", None),
    ],
)
@needs_horovod
@pytest.mark.distributed
@pytest.mark.slow
def test_a_signal_ends_all_ranks_after_a_checkpoint(
    signals: Mapping[Signal, Future[Ended]], launcher: str, number: int, target: str, status: int | None
) -> None:
    returned, text, files = signals[launcher, number, target].result()
    assert returned == (status if status is not None else returned)
    assert returned != 0
    stopped = re.search(r"stopped by (\w+) at step (\d+)", text)
    assert stopped, text
    step = int(stopped[2])
    assert step > 0
    assert files == [f"step-{step:09d}{end}" for end in (".json", ".pt", ".rank-0.pt", ".rank-1.pt")]


def wait_for(condition: Any, seconds: float, log: Path) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, log.read_text()
        time.sleep(0.1)
