"""The data sets of train.py: Fashion-MNIST, the State of the Union addresses, scikit-learn's digits.

A data set is found in a folder, checked, and split into what is trained on and what is held out.
Nothing is downloaded here: launch/fetch_data.sh does that.
"""

from __future__ import annotations

import gzip
import hashlib
import math
import os
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

# One batch at a time: a sample at a time costs more than the arithmetic on 28x28 pixels.
Batch = tuple[Tensor, Tensor]
Bytes = npt.NDArray[np.uint8]

SYSTEM_FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")
HELD_OUT_EVERY = 10

_IDX_UNSIGNED_BYTE = 0x08
_WORD = re.compile(r"\w+(?:['’]\w+)*|[^\w\s]")
_UNKNOWN = "<unk>"
_END = "<end>"


class DataError(ValueError):
    """A data set is missing or damaged; the message says which file, why, and what to do."""


class Images(Dataset[Batch]):
    """Gray images, normalized to zero mean and unit deviation when a batch is taken."""

    def __init__(self, pixels: Bytes, labels: Bytes, mean: float, deviation: float) -> None:
        if len(pixels) != len(labels):
            raise DataError(f"{len(pixels)} images but {len(labels)} labels")
        self.pixels = torch.from_numpy(pixels)
        self.labels = torch.from_numpy(labels)
        self.mean = mean
        self.deviation = deviation

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, indices: Sequence[int]) -> Batch:
        chosen = torch.as_tensor(indices)
        pixels = self.pixels[chosen].unsqueeze(1).float()
        return pixels.sub_(self.mean).div_(self.deviation), self.labels[chosen].long()


class Windows(Dataset[Batch]):
    """A stream of tokens, cut into sequences of one length; the target is the next token.

    The incomplete sequence at the end of the stream is left out.
    """

    def __init__(self, tokens: Tensor, length: int) -> None:
        self.tokens = tokens
        self.length = length
        self.offsets = torch.arange(length)

    def __len__(self) -> int:
        return max(0, len(self.tokens) - 1) // self.length

    def __getitem__(self, indices: Sequence[int]) -> Batch:
        positions = torch.as_tensor(indices).unsqueeze(1) * self.length + self.offsets
        return self.tokens[positions].long(), self.tokens[positions + 1].long()


@dataclass(frozen=True)
class Task:
    """A data set, ready to be trained on.

    Args:
        name: as a person would call it.
        source: where it was read.
        train: what is trained on; `dataset[indices]` is a batch.
        held_out: what is evaluated on, and never trained on.
        shape: of one example's input.
        classes: labels, or tokens in the vocabulary.
        is_text: whether perplexity means something.
        fingerprint: equal on two ranks if and only if their data are.
        note: what the user should know, such as that this is a fallback; may be empty.
    """

    name: str
    source: str
    train: Images | Windows
    held_out: Images | Windows
    shape: tuple[int, ...]
    classes: int
    is_text: bool
    fingerprint: str
    note: str = ""


# ---------------------------------------------------------------------------------------- folders


def data_root(argument: Path | None) -> Path | None:
    """The folder that the user named, by argument or by HVA_DATA; None where neither is set."""
    named = argument or (Path(os.environ["HVA_DATA"]) if os.environ.get("HVA_DATA") else None)
    if named is not None and not named.is_dir():
        origin = "--data-dir" if argument else "HVA_DATA"
        raise DataError(f"{origin} names {named}, which is no folder: create it, or name another")
    return named


def default_root() -> Path:
    return Path(__file__).resolve().parents[2] / "data"


def find_folder(candidates: Iterable[Path], marker: str) -> Path | None:
    """The first folder that holds a file whose name matches `marker`."""
    return next((folder for folder in candidates if any(folder.glob(marker))), None)


# -------------------------------------------------------------------------------------- IDX files


def read_idx(path: Path, dimensions: int) -> Bytes:
    """Reads a gzipped IDX file of unsigned bytes (the format of MNIST).

    Args:
        path: the file.
        dimensions: how many the array must have: 3 for images, 1 for labels.

    Raises:
        DataError: it cannot be read, is no such file, or its size is not what its header says.
    """
    try:
        content = gzip.decompress(path.read_bytes())
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"cannot read {path}: {error}; fetch it again") from error
    header = 4 + 4 * dimensions
    magic = bytes((0, 0, _IDX_UNSIGNED_BYTE, dimensions))
    if content[:4] != magic or len(content) < header:
        raise DataError(
            f"{path} is no IDX file of {dimensions} dimension(s): it starts with"
            f" {content[:4].hex() or 'nothing'}, not {magic.hex()}"
        )
    shape = tuple(int(extent) for extent in np.frombuffer(content, ">u4", dimensions, 4))
    expected = header + math.prod(shape)
    if len(content) != expected:
        raise DataError(
            f"{path} holds {len(content)} bytes, but its header announces {expected}"
            f" ({' x '.join(map(str, shape))}); fetch it again"
        )
    # A copy: torch wants memory that may be written to.
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape).copy()


def read_fashion_mnist(folder: Path) -> tuple[Bytes, Bytes, Bytes, Bytes]:
    """Training images and labels, then held-out images and labels."""
    arrays: list[Bytes] = []
    for part in ("train", "t10k"):
        images = read_idx(folder / f"{part}-images-idx3-ubyte.gz", 3)
        labels = read_idx(folder / f"{part}-labels-idx1-ubyte.gz", 1)
        if len(images) != len(labels):
            raise DataError(
                f"{folder}: {part} has {len(images)} images but {len(labels)} labels; fetch it again"
            )
        if len(labels) == 0 or labels.max() > 9:
            raise DataError(f"{folder}: the {part} labels must be 0 to 9, one an image")
        arrays += [images, labels]
    if arrays[0].shape[1:] != arrays[2].shape[1:]:
        raise DataError(
            f"{folder}: training images of {arrays[0].shape[1:]} pixels, held-out ones of"
            f" {arrays[2].shape[1:]}"
        )
    return arrays[0], arrays[1], arrays[2], arrays[3]


def image_task(name: str, source: str, arrays: tuple[Bytes, ...], note: str = "") -> Task:
    pixels, labels, held_pixels, held_labels = arrays
    mean, deviation = mean_and_deviation(pixels)
    return Task(
        name=name,
        source=source,
        train=Images(pixels, labels, mean, deviation),
        held_out=Images(held_pixels, held_labels, mean, deviation),
        shape=(1, *pixels.shape[1:]),
        classes=10,
        is_text=False,
        fingerprint=_fingerprint(arrays),
        note=note,
    )


def mean_and_deviation(pixels: Bytes) -> tuple[float, float]:
    """Of all pixels; in pieces, for `pixels.std()` makes a float64 copy, eight times as large."""
    total = squares = 0.0
    for part in np.array_split(pixels.reshape(-1), max(1, pixels.size >> 20)):
        piece = part.astype(np.float64)
        total += float(piece.sum())
        squares += float(piece @ piece)
    mean = total / pixels.size
    return mean, math.sqrt(max(0.0, squares / pixels.size - mean**2)) or 1.0


def load_fashion(root: Path | None) -> Task:
    """Fashion-MNIST, or the digits where no folder was named and it is in none of the usual ones."""
    named = [root / "fashion-mnist", root] if root else []
    usual = [default_root() / "fashion-mnist", SYSTEM_FASHION_MNIST]
    folder = find_folder(named or usual, "*-ubyte.gz")
    if folder is not None:
        return image_task("Fashion-MNIST", str(folder), read_fashion_mnist(folder))
    looked = ", ".join(str(place) for place in named or usual)
    if root is not None:
        raise DataError(
            f"no Fashion-MNIST in {looked}: expected train-images-idx3-ubyte.gz and its three"
            " siblings. Run launch/fetch_data.sh, or use --data digits"
        )
    note = (
        f"FALLBACK: Fashion-MNIST is not in {looked}, so this run trains on scikit-learn's small"
        " digits instead. launch/fetch_data.sh fetches it."
    )
    return load_digits(root, note=note)


def load_digits(root: Path | None, note: str = "") -> Task:
    """scikit-learn's 1,797 digits of 8x8 pixels, part of the package; every 10th is held out."""
    try:
        from sklearn import datasets
    except ModuleNotFoundError as error:
        raise DataError(
            f"the digits come with scikit-learn, which cannot be imported ({error}):"
            " pip install scikit-learn, or run launch/fetch_data.sh for Fashion-MNIST"
        ) from error
    digits = datasets.load_digits()
    pixels, labels = digits.images.astype(np.uint8), digits.target.astype(np.uint8)
    held = np.arange(len(labels)) % HELD_OUT_EVERY == HELD_OUT_EVERY - 1
    arrays = (pixels[~held], labels[~held], pixels[held], labels[held])
    return image_task("digits", "scikit-learn", arrays, note)


# ------------------------------------------------------------------------------------------ text


def split_speeches(files: Iterable[Path]) -> tuple[list[Path], list[Path]]:
    """Every 10th file in the order of their names is held out; the others are trained on."""
    ordered = sorted(files, key=lambda file: file.name)
    held = ordered[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
    return [file for file in ordered if file not in held], held


def cut_words(text: str) -> list[str]:
    """Words in lower case, and each punctuation mark on its own."""
    return _WORD.findall(text.lower())


def cut_characters(text: str) -> list[str]:
    """Characters, with every run of white space as one blank."""
    return list(" ".join(text.split()))


CUTTERS: dict[str, Callable[[str], list[str]]] = {"char": cut_characters, "word": cut_words}


def make_vocabulary(speeches: Iterable[Sequence[str]], size: int) -> dict[str, int]:
    """The most frequent tokens, `<unk>` and `<end>` among them, at most `size` in all."""
    counts = Counter(token for speech in speeches for token in speech)
    # Ties by the token itself: every rank must number them alike.
    frequent = sorted(counts, key=lambda token: (-counts[token], token))
    words = [_UNKNOWN, _END, *frequent][:size]
    return {word: number for number, word in enumerate(words)}


def encode(speeches: Iterable[Sequence[str]], vocabulary: dict[str, int]) -> Tensor:
    """All speeches as one stream of token numbers (int32), with `<end>` after each."""
    unknown, end = vocabulary[_UNKNOWN], vocabulary[_END]
    numbers: list[int] = []
    for speech in speeches:
        numbers.extend(vocabulary.get(token, unknown) for token in speech)
        numbers.append(end)
    return torch.tensor(numbers, dtype=torch.int32)


def read_speech(path: Path, cutter: Callable[[str], list[str]]) -> list[str]:
    try:
        return cutter(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read {path}: {error}; fetch it again") from error


def load_speeches(root: Path | None, tokens: str, vocabulary_size: int, length: int) -> Task:
    """The State of the Union addresses as a language-modelling task."""
    candidates = [root / "sotu", root] if root else [default_root() / "sotu"]
    folder = find_folder(candidates, "*.txt")
    if folder is None:
        raise DataError(
            f"no *.txt in {' or '.join(map(str, candidates))}: this preset needs the State of the"
            " Union addresses. Run launch/fetch_data.sh, or use an image preset"
        )
    train_files, held_files = split_speeches(folder.glob("*.txt"))
    if not held_files:
        raise DataError(f"{folder} holds {len(train_files)} texts; at least {HELD_OUT_EVERY} needed")
    cutter = CUTTERS[tokens]
    speeches = [read_speech(file, cutter) for file in train_files]
    # From the training speeches only: a held-out word that training never saw is unknown.
    vocabulary = make_vocabulary(speeches, vocabulary_size)
    train = encode(speeches, vocabulary)
    held_out = encode((read_speech(file, cutter) for file in held_files), vocabulary)
    return Task(
        name=f"State of the Union ({tokens}s)",
        source=str(folder),
        train=Windows(train, length),
        held_out=Windows(held_out, length),
        shape=(length,),
        classes=len(vocabulary),
        is_text=True,
        fingerprint=_fingerprint((train.numpy(), held_out.numpy())),
    )


# ------------------------------------------------------------------------------------------- all


def load(
    name: str, root: Path | None, *, tokens: str = "word", vocabulary: int = 10_000, length: int = 32
) -> Task:
    """Reads one data set.

    Args:
        name: "fashion", "digits" or "sotu".
        root: the folder that the user named; None means the usual places.
        tokens: "char" or "word" (text only).
        vocabulary: size of the vocabulary; all other tokens are <unk> (text only).
        length: tokens in one sequence (text only).

    Raises:
        DataError: it is missing, damaged or too small.
    """
    if name == "sotu":
        task = load_speeches(root, tokens, vocabulary, length)
    else:
        task = {"fashion": load_fashion, "digits": load_digits}[name](root)
    if len(task.train) == 0 or len(task.held_out) == 0:
        raise DataError(
            f"{task.name} from {task.source} gives {len(task.train)} training and"
            f" {len(task.held_out)} held-out examples of this size; make the sequences shorter"
        )
    return task


def _fingerprint(arrays: Iterable[npt.NDArray[np.generic]]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for array in arrays:
        digest.update(f"{array.dtype}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()
