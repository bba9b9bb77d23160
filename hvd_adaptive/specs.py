"""Names with options as text: ``"name:option=value,option=value"``.

What can be named so is a frozen dataclass whose fields are its options, in a registry by its name. An
option is called as its field, or as ``metadata={"option": NAME}`` of the field says; such a field is
written only where it is not at its default.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

T = TypeVar("T")


def read(kind: str, registry: Mapping[str, type[T]], text: object) -> T:
    """Make the member of ``registry`` that ``text`` names.

    Args:
        kind: what the members are, for messages.
        registry: members by name.
        text: ``"name"`` or ``"name:option=value,option=value"``; a value is read as the type of the
            option's default.

    Raises:
        ValueError: unknown name or option, or a value that does not fit; the message lists what is
            valid.
        TypeError: ``text`` is none.

    Example:
        >>> @dataclasses.dataclass(frozen=True)
        ... class Box:
        ...     size: float = 1.0
        >>> read("container", {"box": Box}, "box:size=2")
        Box(size=2.0)
        >>> read("container", {"box": Box}, "bok")
        Traceback (most recent call last):
        ...
        ValueError: unknown container 'bok' (did you mean 'box'?): there are box
    """
    if not isinstance(text, str):
        one = next(iter(registry))
        raise TypeError(f"{kind} must be text such as {one!r} or '{one}:OPTION=VALUE', got {text!r}")
    name, colon, options = (word.strip() for word in text.partition(":"))
    member = registry.get(name)
    if member is None:
        raise ValueError(
            f"unknown {kind} {name!r}{_suggest(name, registry)}: there are {', '.join(registry)}"
        )
    return member(**_options(name, member, options)) if colon else member()


def write(name: str, member: Any, defaults: bool = True, without: str = "") -> str:
    """The text that :func:`read` makes an equal member of, with or without options at their default.

    Args:
        name: of the member.
        member: whose fields are the options.
        defaults: whether options at their default are written, too.
        without: a field that is left out.
    """
    options = [
        f"{option}={_text(getattr(member, field.name))}"
        for option, field in _fields(member).items()
        if field.name != without
        and ((defaults and option == field.name) or getattr(member, field.name) != field.default)
    ]
    return ":".join([name, ",".join(options)]) if options else name


def _text(value: Any) -> str:
    """A value as users write it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _fields(member: Any) -> dict[str, dataclasses.Field[Any]]:
    """The fields of a member, or of its class, by the names of the options; its own ones first."""
    fields = sorted(dataclasses.fields(member), key=lambda field: "option" in field.metadata)
    return {field.metadata.get("option", field.name): field for field in fields}


def _options(name: str, member: type, text: str) -> dict[str, Any]:
    """The options in ``text``, by the names of the fields."""
    fields = _fields(member)
    values: dict[str, Any] = {}
    for item in text.split(","):
        key, equals, value = (word.strip() for word in item.partition("="))
        if not (key or equals):
            raise ValueError(
                f"{name}: an option is missing in {text!r}: write {name}:OPTION=VALUE,OPTION=VALUE "
                f"or {name} alone"
            )
        if key not in fields:
            known = ", ".join(fields) if fields else "none"
            raise ValueError(
                f"{name} has no option {key!r}{_suggest(key, fields)}: its options are {known}"
            )
        if not equals or not value:
            raise ValueError(f"{name}: option {key!r} needs a value: write {key}=VALUE")
        field = fields[key]
        if field.name in values:
            raise ValueError(f"{name}: option {key!r} is given twice")
        values[field.name] = _convert(name, key, value, type(field.default))
    return values


def _convert(name: str, key: str, value: str, kind: type) -> Any:
    """Read ``value`` as the type of the option's default."""
    if kind is bool:
        if value.lower() not in ("true", "false"):
            raise ValueError(f"{name}: {key}={value!r} must be true or false")
        return value.lower() == "true"
    try:
        number = kind(value)
    except ValueError:
        raise ValueError(f"{name}: {key}={value!r} is not of type {kind.__name__}") from None
    if kind in (int, float) and number and not _LEAST <= abs(number) <= _MOST:  # nor nan
        raise ValueError(
            f"{name}: {key}={value} is not 0 and not a number of magnitude {_LEAST:g} to {_MOST:g}"
        )
    return number


# No option is a count or a ratio that reaches beyond; squares and inverses of these stay finite.
_LEAST, _MOST = 1e-15, 1e15


def _suggest(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word.lower(), list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
