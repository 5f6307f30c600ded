"""HTML: text stays text."""

from __future__ import annotations

from html.parser import HTMLParser

from hypothesis import given
from hypothesis import strategies as st

from trainer.report.html import Html, element, joined, text


class _Reader(HTMLParser):
    def __init__(self, source: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.values: list[str | None] = []
        self.said = ""
        self.feed(source)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.values += [value for _, value in attrs]

    def handle_data(self, data: str) -> None:
        self.said += data


_ANY = st.text(st.characters(exclude_characters="\r\n\t", exclude_categories=["Cc", "Cs"]))


@given(_ANY, _ANY)
def test_any_text_and_attribute_is_read_back_and_makes_no_tag(words: str, title: str) -> None:
    reader = _Reader(element("p", words, title=title))
    assert reader.tags == ["p"]
    assert reader.values == [title]
    assert reader.said == words


@given(st.text(st.characters(codec=None)))
def test_any_string_can_be_written_as_utf_8(words: str) -> None:
    assert b"\x00" not in text(words + "\ud800\x00").encode("utf-8")


def test_html_is_not_escaped_again_but_what_is_joined_to_it_is() -> None:
    inner = element("b", "1 < 2")
    assert element("p", inner, " & ") == "<p><b>1 &lt; 2</b> &amp; </p>"
    assert joined([inner, "<"], "&") == "<b>1 &lt; 2</b>&amp;&lt;"
    assert not isinstance(inner + "<", Html)


def test_attributes_are_left_out_bare_or_quoted() -> None:
    made = element("details", open=True, id=None, class_="a", data_run=3, hidden=False)
    assert made == '<details open class="a" data-run="3"></details>'
    assert element("meta", charset="utf-8") == '<meta charset="utf-8">'
