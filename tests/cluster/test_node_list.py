"""Node lists as SLURM writes them: against a generator that knows what it means, and the forms by name."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.cluster.node_list import expand_counts, expand_nodes
from trainer.errors import ConfigurationError

WORDS = st.from_regex(r"[a-z]([a-z.-]{0,5}[a-z])?", fullmatch=True)
Meaning = tuple[str, list[str]]  # text, names


@st.composite
def ranges(draw: st.DrawFn) -> Meaning:
    """A number or a span of them, with leading zeros or without."""
    first, length, width = draw(st.integers(0, 1100)), draw(st.integers(0, 5)), draw(st.integers(1, 5))
    numbers = [str(number).zfill(max(width, len(str(first)))) for number in range(first, first + length + 1)]
    return (f"{numbers[0]}-{numbers[-1]}" if length or draw(st.booleans()) else numbers[0]), numbers


@st.composite
def brackets(draw: st.DrawFn) -> Meaning:
    parts = draw(st.lists(ranges(), min_size=1, max_size=3))
    return f"[{','.join(text for text, _ in parts)}]", [number for _, numbers in parts for number in numbers]


@st.composite
def items(draw: st.DrawFn) -> Meaning:
    """A name, or a word with up to two brackets, words between and after them."""
    word = draw(WORDS)
    text, names = word, [word]
    for _ in range(draw(st.integers(0, 2))):
        bracket, numbers = draw(brackets())
        after = draw(st.one_of(st.just(""), WORDS))
        text += bracket + after
        names = [name + number + after for name, number in product(names, numbers)]
    return text, names


@given(st.lists(items(), min_size=1, max_size=4))
def test_a_list_means_what_it_was_made_from(made: list[Meaning]) -> None:
    expected = tuple(name for _, names in made for name in names)
    assert expand_nodes(",".join(text for text, _ in made)) == expected


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("node1", "node1"),
        ("node[01-03,07],gpu-a[1,3]b", "node01 node02 node03 node07 gpu-a1b gpu-a3b"),
        ("r[1-2]n[08-10]", "r1n08 r1n09 r1n10 r2n08 r2n09 r2n10"),
        ("n[9-11]", "n9 n10 n11"),
        ("n[098-101].site", "n098.site n099.site n100.site n101.site"),
        ("a,b2,c[3]", "a b2 c3"),
        ("[1-2]x", "1x 2x"),
        ("10.0.0.[1-2]", "10.0.0.1 10.0.0.2"),
    ],
)
def test_the_forms_by_name(text: str, names: str) -> None:
    assert expand_nodes(text) == tuple(names.split())


@pytest.mark.parametrize(
    "text",
    ["", "a,", ",a", "n[", "n]", "n[]", "n[1-]", "n[3-1]", "n[a-b]", "n[1,]", "n[1[2]]", "n[1", "n1]x[2]"],
)
def test_what_is_no_list_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="a list of nodes"):
        expand_nodes(text)


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(1, 9)), min_size=1, max_size=5))
def test_counts_mean_what_they_were_made_from(made: list[tuple[int, int]]) -> None:
    text = ",".join(f"{count}(x{times})" if times > 1 else f"{count}" for count, times in made)
    assert expand_counts(text) == tuple(count for count, times in made for _ in range(times))


@pytest.mark.parametrize("text", ["", "2(x)", "2(3)", "two", "2,", "2(x3"])
def test_what_are_no_counts_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="counts as SLURM writes them"):
        expand_counts(text)
