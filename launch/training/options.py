"""The command line of train.py: its options, its presets, and what is checked before any rank starts.

Everything that one process can find wrong alone is found here, before Horovod starts: an error then
ends each rank at once and cannot leave another one waiting.
"""

from __future__ import annotations

import argparse
import math
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from hvd_adaptive import feedback
from hvd_adaptive import planning as planners
from hvd_adaptive.adaptation import automatic
from hvd_adaptive.collectives import check_scheme
from hvd_adaptive.compressors import REGISTRY
from hvd_adaptive.compressors import parse as parse_compression
from hvd_adaptive.config import DEFAULT_SCHEME

from . import data
from .models import IMAGE_MODELS, MODELS

# What a preset sets; every one of these is an option too, and the option wins.
PRESETS: dict[str, dict[str, Any]] = {
    "resnet-fashion": {
        "data": "fashion", "model": "resnet", "width": 16, "layers": 1,
        "batch_size": 32, "epochs": 2.0, "lr": 0.05, "momentum": 0.9, "weight_decay": 5e-4,
    },
    "mlp-fashion": {
        "data": "fashion", "model": "mlp", "width": 2048, "layers": 2,
        "batch_size": 64, "epochs": 1.0, "lr": 0.02, "momentum": 0.9, "weight_decay": 1e-4,
    },
    "mlp-digits": {
        "data": "digits", "model": "mlp", "width": 512, "layers": 2,
        "batch_size": 16, "epochs": 20.0, "lr": 0.02, "momentum": 0.9, "weight_decay": 1e-4,
    },
    "lstm-sotu": {
        "data": "sotu", "tokens": "word", "vocabulary": 10_000, "sequence_length": 16,
        "model": "lstm", "width": 276, "layers": 2, "dropout": 0.1, "eval_examples": 2000,
        "batch_size": 4, "epochs": 0.1, "lr": 10.0, "lr_scaling": "sqrt",
        "momentum": 0.0, "clip": 1.0,
    },
    "transformer-sotu": {
        "data": "sotu", "tokens": "char", "vocabulary": 256, "sequence_length": 64,
        "model": "transformer", "width": 128, "layers": 4, "heads": 4, "eval_examples": 2000,
        "batch_size": 16, "epochs": 0.1, "optimizer": "adamw", "lr": 2e-3, "lr_scaling": "sqrt",
        # Without it, the loss of a transformer stays at that of single characters for long.
        "weight_decay": 0.01, "clip": 1.0, "dense_steps": 50,
    },
}  # fmt: skip
DEFAULT_PRESET = "resnet-fashion"

# Options that decide what the numbers in a checkpoint mean: a run may only resume with the same ones.
IDENTITY = (
    "data", "tokens", "vocabulary", "sequence_length", "model", "width", "layers", "heads",
    "batch_size", "accumulate", "optimizer", "seed", "distributed", "compression", "overrides",
    "feedback", "scheme", "planner", "candidates",
)  # fmt: skip

EPILOG = """\
Exit status: 0 when the training is complete; 1 after an error that all ranks agree on; 2 for a wrong
command line; 129 after SIGHUP (the terminal was closed), 130 after SIGINT (Ctrl-C), 143 after SIGTERM
and 75 after SIGUSR1 ("try again later": batch systems send it ahead of a time limit). Any of the four,
on any rank, ends all ranks at the same step, after a checkpoint if --checkpoint-dir is given; a second
one, a second or more later, ends the process at once, unless it is SIGHUP. A SIGHUP that is ignored
at the start, as under nohup, stays ignored. The launcher's own exit status may differ.

mpirun answers SIGINT (which is Ctrl-C under horovodrun, too), SIGTERM and SIGHUP with SIGTERM to its
ranks a second later, and kills them after another second. A large model needs longer to be saved: with
OMPI_MCA_odls_base_sigkill_timeout=10 both waits are 10 seconds (launch/run.sh and launch/slurm set
5). A second of these within 5 seconds makes it kill its ranks at once, and a terminal that is closed
may send two: launch/run.sh, which tells the ranks itself, saves also then. SIGUSR1 to mpirun reaches
the ranks at once and kills nobody. SIGTERM to horovodrun ends horovodrun alone: its ranks train on.

The data come from --data-dir, else from the environment variable HVA_DATA, else from data/ in this
repository (launch/fetch_data.sh puts them there) or Debian's package dataset-fashion-mnist. Where
none of these has Fashion-MNIST, training falls back to scikit-learn's digits and says so.
"""


@dataclass(frozen=True)
class TrainingOptions:
    """The command line; the meaning of each field is the help of its option."""

    preset: str
    data: str
    data_dir: Path | None
    tokens: str
    vocabulary: int
    sequence_length: int
    model: str
    width: int
    layers: int
    heads: int
    dropout: float
    epochs: float
    steps: int | None
    batch_size: int
    accumulate: int
    eval_every: int
    eval_examples: int
    optimizer: str
    lr: float
    lr_scaling: str
    lr_schedule: str
    lr_warmup_steps: int | None
    momentum: float
    weight_decay: float
    clip: float
    distributed: str
    compression: str
    overrides: tuple[tuple[str, str], ...]
    feedback: str | None
    scheme: str
    planner: str | None
    candidates: tuple[str, ...]
    dense_steps: int | str
    bucket_cap_mb: float
    op: str
    gradient_predivide_factor: float
    num_groups: int
    groups: int | None
    sparse_as_dense: bool
    seed: int
    threads: int | None
    niceness: int
    log_every: int
    logdir: Path | None
    result: Path | None
    checkpoint_dir: Path | None
    checkpoint_every: int
    resume: str

    def identity(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in IDENTITY}

    def as_text(self) -> dict[str, str]:
        return {name: str(value) for name, value in asdict(self).items()}


def number(
    kind: type[int] | type[float], least: float, below: float = math.inf
) -> Callable[[str], float]:
    """A converter for argparse: a number of one kind in [least, below)."""

    def convert(text: str) -> float:
        value = kind(text)
        # The comparison is False for a NaN, too.
        if not least <= value < below:
            limit = "" if below == math.inf else f" and below {below:g}"
            raise argparse.ArgumentTypeError(f"{text} must be at least {least:g}{limit}")
        return value

    convert.__name__ = kind.__name__
    return convert


def dense_steps(text: str) -> int | str:
    """A number of steps, or until when the learning rate rises; the library checks the rest."""
    return text if text.startswith("lr_warmup") else int(number(int, 0)(text))


def override(text: str) -> tuple[str, str]:
    pattern, equals, spec = text.partition("=")
    if not (pattern and equals and spec):
        raise argparse.ArgumentTypeError(
            f"{text!r} must be PATTERN=SPEC, such as '*.bias=none' or 'head.*=topk:density=0.1'"
        )
    return pattern, compression(spec)


def compression(text: str) -> str:
    try:
        if text.partition(":")[0] == automatic.NAME:
            planners.parse(text)
        else:
            parse_compression(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def feedback_rule(text: str) -> str:
    try:
        feedback.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def collective_scheme(text: str) -> str:
    try:
        return check_scheme(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def planner(text: str) -> str:
    try:
        planners.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="train.py",
        description="Trains a model on real data with compressed gradients, on as many ranks as the"
        " launcher starts: launch/run.sh, horovodrun, mpirun, srun, or none of them for one rank.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--preset", choices=PRESETS, default=DEFAULT_PRESET,
        help="a model, its data and settings that suit both; the defaults shown here are its"
        " (%(default)s)",
    )  # fmt: skip
    _add_task(parser.add_argument_group("data and model"))
    _add_training(parser.add_argument_group("training"))
    _add_compression(parser.add_argument_group("gradient exchange"))
    _add_running(parser.add_argument_group("running"))
    return parser


def _add_task(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--data", choices=("fashion", "digits", "sotu"), help="data set (%(default)s)")
    add("--data-dir", type=Path, metavar="DIR", help="folder of the data sets; see below")
    add("--tokens", choices=data.CUTTERS, default="word", help="what a token of text is"
        " (%(default)s)")  # fmt: skip
    add("--vocabulary", type=number(int, 2), default=10_000, metavar="N",
        help="size of the vocabulary; all other tokens become <unk> (%(default)s)")  # fmt: skip
    add("--sequence-length", type=number(int, 1), default=16, metavar="N",
        help="tokens in one sequence of text (%(default)s)")  # fmt: skip
    add("--model", choices=MODELS, help="(%(default)s)")
    add("--width", type=number(int, 1), metavar="N",
        help="channels of the first stage, or units of a layer (%(default)s)")  # fmt: skip
    add("--layers", type=number(int, 1), metavar="N",
        help="layers; of a resnet: blocks in each of its three stages (%(default)s)")  # fmt: skip
    add("--heads", type=number(int, 1), default=4, metavar="N",
        help="attention heads of a transformer (%(default)s)")  # fmt: skip
    add("--dropout", type=number(float, 0, 1), default=0.0, metavar="P", help="(%(default)s)")


def _add_training(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--epochs", type=number(float, 0), metavar="X",
        help="passes over the training data, fractions allowed (%(default)s)")  # fmt: skip
    add("--steps", type=number(int, 1), metavar="N", help="optimizer steps, in place of --epochs")
    add("--batch-size", type=number(int, 1), metavar="N",
        help="examples of one rank in one backward pass (%(default)s)")  # fmt: skip
    add("--accumulate", type=number(int, 1), default=1, metavar="N",
        help="backward passes in one step: backward_passes_per_step (%(default)s)")  # fmt: skip
    add("--eval-every", type=number(int, 0), default=0, metavar="N",
        help="evaluate every N steps, too; 0: only at the end (%(default)s)")  # fmt: skip
    add("--eval-examples", type=number(int, 0), default=0, metavar="N",
        help="evaluate on N held-out examples, evenly spread; 0: all (%(default)s)")  # fmt: skip
    add("--optimizer", choices=("sgd", "adamw"), default="sgd", help="update rule (%(default)s)")
    add("--lr", type=number(float, 0), metavar="X",
        help="learning rate of one rank's batch, before --lr-scaling (%(default)s)")  # fmt: skip
    add("--lr-scaling", choices=("linear", "sqrt", "none"), default="linear",
        help="how it grows with ranks x --accumulate (%(default)s)")  # fmt: skip
    add("--lr-schedule", choices=("cosine", "step", "constant"), default="cosine",
        help="after the warm-up; step: a tenth from half of the steps on, a hundredth from three "
        "quarters (%(default)s)")  # fmt: skip
    add("--lr-warmup-steps", type=number(int, 0), metavar="N",
        help="steps of linear learning-rate warm-up (a twentieth of the run)")  # fmt: skip
    add("--momentum", type=number(float, 0, 1), default=0.9, metavar="X",
        help="of SGD; beta1 of AdamW (%(default)s)")  # fmt: skip
    add("--weight-decay", type=number(float, 0), default=0.0, metavar="X", help="(%(default)s)")
    add("--clip", type=number(float, 0), default=0.0, metavar="X",
        help="largest norm of the averaged gradient; 0: no clipping (%(default)s)")  # fmt: skip


def _add_compression(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--distributed", choices=("adaptive", "horovod"), default="adaptive",
        help="hvd_adaptive.DistributedOptimizer, or Horovod's own to compare with"
        " (%(default)s)")  # fmt: skip
    add("--compression", type=compression, metavar="SPEC",
        help="such as topk:density=0.01,values=int8; there are " + ", ".join(REGISTRY)
        + " (topk:density=0.01; with --distributed horovod: none)")  # fmt: skip
    add("--override", dest="overrides", type=override, action="append", metavar="PATTERN=SPEC",
        help="another compression for the parameters whose names match; may be repeated")  # fmt: skip
    add("--feedback", type=feedback_rule, metavar="RULE",
        help="what becomes of what is not sent: " + ", ".join(feedback.REGISTRY)
        + " (the compressor's own choice)")  # fmt: skip
    add("--scheme", type=collective_scheme, default=DEFAULT_SCHEME, metavar="SCHEME",
        help="how encoded payloads meet: allgather; two_shot, whose traffic does not grow with the"
        " ranks; hierarchical, which adds on each host first; or auto, the faster of the first two for"
        " each bucket (%(default)s)")  # fmt: skip
    add("--planner", type=planner, metavar="PLANNER",
        help="what chooses each layer's level during training, such as lgreco:period=200; there are "
        + ", ".join(planners.REGISTRY) + " (none)")  # fmt: skip
    add("--candidate", dest="candidates", type=compression, action="append", metavar="SPEC",
        help="another compression whose levels the planner may choose; may be repeated")  # fmt: skip
    add("--dense-steps", type=dense_steps, default=0, metavar="N",
        help="first steps, which send dense gradients (%(default)s); or lr_warmup: until the learning "
        "rate stops rising")  # fmt: skip
    add("--bucket-cap-mb", type=number(float, 0), default=25.0, metavar="X",
        help="gradients that are sent together (%(default)s)")  # fmt: skip
    add("--op", choices=("average", "sum"), default="average", help="(%(default)s)")
    add("--gradient-predivide-factor", type=number(float, 0), default=1.0, metavar="X",
        help="divides before the sum what is multiplied after it (%(default)s)")  # fmt: skip
    add("--num-groups", type=number(int, 0), default=0, metavar="N", help="(%(default)s)")
    add("--groups", type=number(int, 0), metavar="N", help="groups of gradients that are sent together")
    add("--sparse-as-dense", action="store_true", help="send sparse gradients as dense ones")


def _add_running(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--seed", type=number(int, 0), default=0, metavar="N", help="(%(default)s)")
    add("--threads", type=number(int, 1), metavar="N",
        help="threads of one rank's arithmetic (its share of the cores)")  # fmt: skip
    add("--niceness", type=number(int, 0, 20), default=10, metavar="N",
        help="how far Horovod's thread stands back behind computing, 0 to 19; 0: not at all"
        " (%(default)s)")  # fmt: skip
    add("--log-every", type=number(int, 1), default=10, metavar="N",
        help="steps between two reports of the loss (%(default)s)")  # fmt: skip
    add("--logdir", type=Path, metavar="DIR", help="TensorBoard and JSON logs of rank 0")
    add("--result", type=Path, metavar="FILE",
        help="a JSON file of what the run cost and how good its model became, written by rank 0 at"
        " the end")  # fmt: skip
    add("--checkpoint-dir", type=Path, metavar="DIR",
        help="where checkpoints go; a folder that all ranks share, or one on each host")  # fmt: skip
    add("--checkpoint-every", type=number(int, 0), default=0, metavar="N",
        help="steps between two checkpoints; 0: only at the end or when stopped"
        " (%(default)s)")  # fmt: skip
    add("--resume", choices=("never", "must", "auto"), nargs="?", const="must", default="never",
        help="continue from the newest checkpoint of --checkpoint-dir; auto: if any")  # fmt: skip


# For one version: what has another name now, and the values whose names have changed, too.
_RENAMED = {
    "--warmup-steps": "--lr-warmup-steps",
    "--compression-warmup-steps": "--dense-steps",
    "--update": "--optimizer",
}
_WRAPPERS = {"adaptive": "adaptive", "stock": "horovod"}


def renamed(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """A command line in today's spelling, and what to say of each option that has an old name."""
    found, advice = list(arguments), []
    for index, word in enumerate(arguments):
        name, equals, value = word.partition("=")
        following = arguments[index + 1] if index + 1 < len(arguments) else ""
        given = value if equals else following
        if name == "--optimizer" and given in _WRAPPERS:
            new, text = "--distributed", _WRAPPERS[given]
            advice.append(f"--optimizer {given} is an old name: write --distributed {text}")
        elif name in _RENAMED:
            new, text = _RENAMED[name], given
            advice.append(f"{name} is an old name: write {new}")
        else:
            continue
        found[index] = f"{new}={text}" if equals else new
        if not equals and following:
            found[index + 1] = text
    return found, advice


def renamed_identity(identity: dict[str, Any]) -> dict[str, Any]:
    """The identity in a checkpoint that was written while its options had their old names."""
    if "update" not in identity:
        return identity
    wrapper = identity.get("optimizer")
    return {key: value for key, value in identity.items() if key != "update"} | {
        "optimizer": identity["update"],
        "distributed": _WRAPPERS.get(str(wrapper), wrapper),
    }


def parse(arguments: Sequence[str] | None = None) -> TrainingOptions:
    """Reads the command line; a wrong one ends the process with status 2 and a message."""
    arguments, advice = renamed(sys.argv[1:] if arguments is None else arguments)
    for each in advice:
        warnings.warn(each, DeprecationWarning, stacklevel=1)
    parser = make_parser()
    # Two passes: the preset first, because it sets the defaults of the others.
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--preset", default=DEFAULT_PRESET)
    first.add_argument("--distributed")
    early = first.parse_known_args(arguments)[0]
    defaults = dict(PRESETS.get(early.preset, {}))
    if early.distributed == "horovod":
        # Horovod's own has none; asking for it by the option is still an error.
        defaults.pop("dense_steps", None)
    parser.set_defaults(**defaults)
    values = vars(parser.parse_args(arguments))
    values["overrides"] = tuple(values["overrides"] or ())
    values["candidates"] = tuple(values["candidates"] or ())
    values["compression"] = _default_compression(values)
    options = TrainingOptions(**{field.name: values[field.name] for field in fields(TrainingOptions)})
    try:
        _check(options)
    except ValueError as error:
        parser.error(str(error))
    return options


def _default_compression(values: dict[str, Any]) -> str:
    default = "none" if values["distributed"] == "horovod" else "topk:density=0.01"
    chosen: str = values["compression"] or default
    return chosen


def _check(options: TrainingOptions) -> None:
    """What concerns several options."""
    if (options.model in IMAGE_MODELS) == (options.data == "sotu"):
        kind = "images" if options.model in IMAGE_MODELS else "text"
        raise ValueError(f"--model {options.model} is for {kind}; --data {options.data} is not")
    if options.model == "transformer" and options.width % options.heads:
        raise ValueError(f"--width {options.width} must be a multiple of --heads {options.heads}")
    if options.epochs == 0 and options.steps is None:
        raise ValueError("--epochs 0 trains nothing: write --epochs 1, or --steps N")
    if options.bucket_cap_mb == 0 or options.gradient_predivide_factor == 0:
        raise ValueError("--bucket-cap-mb and --gradient-predivide-factor must be more than 0")
    if options.distributed == "horovod":
        _check_horovod(options)
    is_auto = options.compression.partition(":")[0] == automatic.NAME
    if options.candidates and not (options.planner or is_auto):
        raise ValueError("--candidate needs a --planner that chooses")
    if options.checkpoint_dir is None and (options.checkpoint_every or options.resume != "never"):
        raise ValueError("--checkpoint-every and --resume need --checkpoint-dir")


def _check_horovod(options: TrainingOptions) -> None:
    if options.compression not in ("none", "fp16"):
        raise ValueError(
            f"--distributed horovod knows --compression none and fp16, not {options.compression}"
        )
    scheme = options.scheme != DEFAULT_SCHEME
    ours = (options.overrides, options.feedback, scheme, options.planner, options.dense_steps)
    if any(ours):
        raise ValueError(
            "--override, --feedback, --scheme, --planner and --dense-steps need --distributed adaptive"
        )
