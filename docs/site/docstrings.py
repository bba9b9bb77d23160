"""Docstrings as Markdown: roles such as :class:`~a.B` become `B`, and a final :: becomes a colon."""

from __future__ import annotations

import re
from typing import Any

import griffe

ROLE = re.compile(r":(?:class|func|meth|attr|mod|data|exc):`~?([^`]+)`")


class PlainRoles(griffe.Extension):
    """Rewrites every docstring that is loaded."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """One object's."""
        del kwargs
        if obj.docstring is not None:
            text = ROLE.sub(lambda match: f"`{match[1].rpartition('.')[2]}`", obj.docstring.value)
            text = re.sub(r"^Example:$", "Examples:", text, flags=re.MULTILINE)  # the section's name
            obj.docstring.value = re.sub(r"::$", ":", text, flags=re.MULTILINE)
