"""Building blocks of HTML in which text is escaped unless it was built here: what comes from files stays text."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable

_VOID = frozenset({"br", "img", "meta"})
# Of these, surrogates that stand alone could not even be written.
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff]")


class Html(str):
    """Text that is HTML already. Joining it with other text by `+` or `format` gives text again."""

    __slots__ = ()


def text(value: str) -> Html:
    """The text as HTML that shows it; HTML itself is left as it is."""
    if isinstance(value, Html):
        return value
    return Html(html.escape(printable(value)))


def printable(value: str) -> str:
    """The text without characters that have no place in a page, or could not be written at all."""
    return _UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", value)


def joined(parts: Iterable[str], between: str = "") -> Html:
    """All parts, each escaped unless it is HTML."""
    return Html(text(between).join(text(part) for part in parts))


def element(name: str, *children: str, **attributes: str | int | bool | None) -> Html:
    """`<name ...>children</name>`.

    `class_` and `data_x` stand for the attributes class and data-x; those that are None or False are left out.
    `name` and the names of attributes are the program's own, never from a file.
    """
    opening = "".join(_attribute(key, value) for key, value in attributes.items())
    if name in _VOID:
        return Html(f"<{name}{opening}>")
    return Html(f"<{name}{opening}>{joined(children)}</{name}>")


def _attribute(key: str, value: str | int | bool | None) -> str:
    name = key.rstrip("_").replace("_", "-")
    if value is None or value is False:
        return ""
    if value is True:
        return f" {name}"
    # An attribute is text even if it was built as HTML before.
    return f' {name}="{text(str(value))}"'
