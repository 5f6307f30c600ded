"""What the sections of the page are made of: sections, tables, lists of figures, things that open."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainer.report.chart import chip
from trainer.report.html import Html, element, joined
from trainer.report.words import UNKNOWN


@dataclass(frozen=True)
class Fact:
    """Something known about one run."""

    name: str
    value: str


def section(identity: str, title: str, *children: str) -> Html:
    """A part of the page with a heading that can be linked to."""
    return element("section", element("h2", title), *children, id=identity)


def table(head: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[int] = ()) -> Html:
    """A table that scrolls in itself where it is too wide; the columns at the positions `numbers` are numbers."""

    def cells(kind: str, row: Sequence[str]) -> Html:
        return joined(
            element(kind, cell, class_="n" if position in numbers else None)
            for position, cell in enumerate(row)
        )

    body = (element("tr", cells("td", row)) for row in rows)
    whole = element(
        "table", element("thead", element("tr", cells("th", head))), element("tbody", joined(body))
    )
    return element("div", whole, class_="scroll")


def facts(items: Sequence[Fact]) -> Html:
    """Names and values of one run below each other."""
    rows = (joined([element("dt", item.name), element("dd", item.value)]) for item in items)
    return element("dl", joined(rows))


def tiles(items: Sequence[Fact]) -> Html:
    """The figures that matter most, large."""
    each = (
        element("div", element("dt", item.name), element("dd", item.value), class_="tile") for item in items
    )
    return element("dl", *each, class_="tiles")


def comparison(run_names: Sequence[str], columns: Sequence[Sequence[Fact]], corner: str = "") -> Html:
    """The facts of several runs side by side; rows in which they differ are marked. `corner`: what the rows are."""
    names = list(dict.fromkeys(fact.name for column in columns for fact in column))
    values = [{fact.name: fact.value for fact in column} for column in columns]
    rows = []
    for name in names:
        row = [value.get(name, UNKNOWN) for value in values]
        cells = joined(element("td", cell) for cell in row)
        rows.append(
            element("tr", element("th", name, scope="row"), cells, class_=_differs(row)),
        )
    head = joined(element("th", chip(index), name, scope="col") for index, name in enumerate(run_names))
    return element(
        "div",
        element(
            "table",
            element("thead", element("tr", element("td", corner, class_="mut"), head)),
            element("tbody", *rows),
            class_="compare",
        ),
        class_="scroll",
    )


def opens(title: str, *children: str, open_: bool = False) -> Html:
    """Something that is shown when its title is clicked."""
    return element("details", element("summary", title), *children, open=open_)


def note(words: str) -> Html:
    """A quiet sentence."""
    return element("p", words, class_="note")


def heading(index: int, name: str, several: bool) -> Html:
    """The name of a run over what is only about it, if there are others."""
    return element("h3", chip(index), name) if several else Html()


def _differs(row: Sequence[str]) -> str | None:
    return "differs" if len(set(row)) > 1 else None
