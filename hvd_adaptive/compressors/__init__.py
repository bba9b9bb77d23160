"""The compressors, by name.

A new member is one class and one row of ``REGISTRY``.
"""

from __future__ import annotations

import dataclasses
import difflib
from typing import Any

from hvd_adaptive.compressors.base import (
    Batch,
    CastCompressor,
    CodecState,
    Compressor,
    GatheredCompressor,
    LayerStats,
    Learner,
    Level,
    LinearCompressor,
    MultiLevel,
    Payload,
)
from hvd_adaptive.compressors.dense import BFloat16, Float16, NoCompression
from hvd_adaptive.compressors.sparse import TopK

REGISTRY: dict[str, type[Compressor]] = {
    member.name: member for member in (NoCompression, Float16, BFloat16, TopK)
}


class Compression:
    """The compressors as attributes: ``Compression.fp16``, ``Compression.topk(density=0.01)``."""

    none = NoCompression
    fp16 = Float16
    bf16 = BFloat16
    topk = TopK


def parse(spec: str | Compressor | type[Compressor]) -> Compressor:
    """Make a compressor of ``"name"`` or ``"name:option=value,option=value"``.

    Args:
        spec: text, or a compressor (returned as it is), or a class of one (made with its defaults).

    Raises:
        ValueError: unknown name or option, or a value that does not fit; the message lists what is
            valid.
        TypeError: not a specification of a compressor.

    Example:
        >>> parse("topk:density=0.05,values=int8")
        TopK(density=0.05, values='int8')
        >>> parse("topk:kind=exact")
        Traceback (most recent call last):
        ...
        ValueError: topk has no option 'kind': its options are density, values
    """
    if isinstance(spec, Compressor):
        return spec
    if isinstance(spec, type) and issubclass(spec, Compressor):
        return spec()
    if not isinstance(spec, str):
        raise TypeError(
            f"compression must be text such as 'topk:density=0.01' or a member of Compression, got "
            f"{spec!r}"
        )
    name, _, options = spec.partition(":")
    member = REGISTRY.get(name.strip())
    if member is None:
        raise ValueError(
            f"unknown compressor {name.strip()!r}{_suggest(name, REGISTRY)}: "
            f"the compressors are {', '.join(REGISTRY)}"
        )
    return member(**_options(member, options))


def format_spec(compressor: Compressor) -> str:
    """The text that :func:`parse` reads back as an equal compressor.

    Example:
        >>> format_spec(TopK(density=0.05))
        'topk:density=0.05,values=bf16'
    """
    options = [
        f"{field.name}={getattr(compressor, field.name)}"
        for field in dataclasses.fields(compressor)  # type: ignore[arg-type]
    ]
    return ":".join([compressor.name, ",".join(options)]) if options else compressor.name


def _options(member: type[Compressor], text: str) -> dict[str, Any]:
    fields = {field.name: field for field in dataclasses.fields(member)}  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for item in filter(None, (item.strip() for item in text.split(","))):
        key, equals, value = (word.strip() for word in item.partition("="))
        if key not in fields:
            known = ", ".join(fields) if fields else "none"
            raise ValueError(
                f"{member.name} has no option {key!r}{_suggest(key, fields)}: its options are {known}"
            )
        if not equals or not value:
            raise ValueError(f"{member.name}: option {key!r} needs a value: write {key}=VALUE")
        if key in values:
            raise ValueError(f"{member.name}: option {key!r} is given twice")
        values[key] = _convert(member.name, key, value, type(fields[key].default))
    return values


def _convert(name: str, key: str, value: str, kind: type) -> Any:
    """Read ``value`` as the type of the option's default."""
    if kind is bool:
        if value.lower() not in ("true", "false"):
            raise ValueError(f"{name}: {key}={value!r} must be true or false")
        return value.lower() == "true"
    try:
        return kind(value)
    except ValueError:
        raise ValueError(f"{name}: {key}={value!r} is not of type {kind.__name__}") from None


def _suggest(word: str, known: Any) -> str:
    close = difflib.get_close_matches(word.strip(), list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


__all__ = [
    "REGISTRY",
    "BFloat16",
    "Batch",
    "CastCompressor",
    "CodecState",
    "Compression",
    "Compressor",
    "Float16",
    "GatheredCompressor",
    "LayerStats",
    "Learner",
    "Level",
    "LinearCompressor",
    "MultiLevel",
    "NoCompression",
    "Payload",
    "TopK",
    "format_spec",
    "parse",
]
