import re
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from parallelisms.pipeline.picture import Look
from parallelisms.pipeline.picture_build import picture_of_plan, picture_of_plans, picture_of_timeline
from parallelisms.pipeline.picture_colours import DARK, LIGHT, fill, readable_on
from parallelisms.pipeline.picture_layout import lay_out, ticks
from parallelisms.pipeline.picture_svg import draw_svg
from parallelisms.pipeline.picture_text import plain_text, print_picture, text_lines
from tests.pipeline.synthetic import measured, schedule_of

SVG = "{http://www.w3.org/2000/svg}"


def drawn(picture, theme="auto"):
    return ElementTree.fromstring(draw_svg(picture, theme))


def rows_of(text):
    """The lanes of a plain picture without names and figures."""
    lines = [line for line in text.splitlines() if line.startswith("rank ")]
    return [re.sub(r"^rank \d+ +|\s+[\d.]+%\s+[\d.]+$", "", line) for line in lines]


def labels(root):
    return [
        text.text
        for group in root.iter(f"{SVG}g")
        if group.get("text-anchor") == "middle"
        for text in group.iter(f"{SVG}text")
    ]


def boxes(root):
    """The rectangles that stand for something in time: those with an explanation."""
    return [each for each in root.iter(f"{SVG}rect") if each.find(f"{SVG}title") is not None]


# As text


def test_the_plain_text_of_1f1b_shows_every_microbatch_where_it_is():
    text = plain_text(picture_of_plan(schedule_of("1F1B", 4, 4)), 100)
    assert rows_of(text) == [
        "F0-F1-F2-F3-..................B0====...B1====...B2====...B3====",
        "...F0-F1-F2-............B0====F3-B1====...B2====...B3====......",
        "......F0-F1-......B0====F2-B1====F3-B2====...B3====............",
        ".........F0-B0====F1-B1====F2-B2====F3-B3====..................",
    ]
    assert "step 21, bound 21, bubble of the step 42.9%" in text
    assert "F forward   B backward   . waiting" in text


def test_in_narrow_text_stages_and_kinds_of_work_are_still_told_apart():
    text = plain_text(picture_of_plan(schedule_of("ZBVZeroBubble", 4, 4)), 60)
    letters = set("".join(rows_of(text)))
    assert set("FfIiWw") <= letters
    assert "small letters: a rank's later stages" in text


def test_text_denser_than_characters_shows_forward_and_backward_in_their_proportion():
    text = plain_text(picture_of_plan(schedule_of("1F1B", 16, 64)), 80)
    rows = rows_of(text)
    assert len(rows) == 16
    for row in rows:
        assert 1.5 < row.count("B") / row.count("F") < 2.7


@given(
    st.sampled_from(["GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble"]),
    st.integers(1, 6),
    st.integers(1, 12),
    st.integers(60, 200),
    st.booleans(),
)
@settings(deadline=None, max_examples=40)
def test_no_line_is_wider_than_the_terminal(name, ranks, microbatches, width, coloured):
    picture = picture_of_plan(schedule_of(name, ranks, microbatches))
    for line in text_lines(picture, width, coloured):
        assert len("".join(piece.text for piece in line)) <= width


def test_a_terminal_with_colours_gets_colours_and_one_without_gets_lines():
    picture = picture_of_plan(schedule_of("1F1B", 2, 2))
    coloured = Console(force_terminal=True, color_system="truecolor", width=80, record=True, file=None)
    with coloured.capture() as capture:
        print_picture(picture, coloured)
    assert "\x1b[" in capture.get()
    assert "B0==" not in capture.get()
    plain = Console(force_terminal=False, width=80)
    with plain.capture() as capture:
        print_picture(picture, plain)
    assert "\x1b[" not in capture.get()
    assert "B0==" in capture.get()


# As SVG


@pytest.mark.parametrize("name", ["GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble"])
def test_the_svg_has_a_box_with_its_number_for_every_action(name):
    schedule = schedule_of(name, 4, 8)
    root = drawn(picture_of_plan(schedule))
    actions = [str(span.action) for spans in schedule.prediction.spans for span in spans]
    told = [each.findtext(f"{SVG}title").split(":")[0] for each in boxes(root)]
    assert sorted(each for each in told if each != "idle") == sorted(actions)
    assert sorted(labels(root)) == sorted(str(re.search(r"\d+$", each)[0]) for each in actions)


def test_numbers_fit_into_the_boxes_at_16_ranks_and_64_microbatches():
    root = drawn(picture_of_plan(schedule_of("1F1B", 16, 64)))
    assert len(labels(root)) == 16 * 64 * 2


def test_the_svg_needs_nothing_from_outside_itself():
    text = draw_svg(picture_of_plan(schedule_of("1F1B", 2, 2)))
    root = ElementTree.fromstring(text)
    defined = {each.get("id") for each in root.iter() if each.get("id")}
    assert set(re.findall(r"url\(#([^)]*)\)", text)) <= defined
    assert "href" not in text
    assert "@import" not in text
    assert text.count("http") == 1  # the name space
    assert "<script" not in text


def test_light_is_explicit_and_dark_follows_the_preference():
    picture = picture_of_plan(schedule_of("1F1B", 2, 2))
    auto = draw_svg(picture)
    before, media = auto.split("@media (prefers-color-scheme:dark)")
    assert LIGHT.background in before
    assert DARK.background in media
    assert "@media" not in draw_svg(picture, "light")
    assert "@media" not in draw_svg(picture, "dark")
    assert LIGHT.background not in draw_svg(picture, "dark").split("</style>")[0]


def test_pictures_in_one_page_share_no_identity_and_style_only_themselves():
    first, second = (drawn(picture_of_plan(schedule_of(name, 2, 2))) for name in ("GPipe", "1F1B"))
    identities = [{each.get("id") for each in root.iter() if each.get("id")} for root in (first, second)]
    assert not identities[0] & identities[1]
    for root in (first, second):
        rules = root.findtext(f"{SVG}style")
        inside = rules.replace("@media (prefers-color-scheme:dark){", "")
        selectors = re.findall(r"([^{}]+)\{", inside)
        assert selectors
        assert all(selector.startswith(f"#{root.get('id')} ") for selector in selectors)


def test_the_same_picture_is_the_same_text():
    assert draw_svg(picture_of_plan(schedule_of("GPipe", 2, 3))) == draw_svg(
        picture_of_plan(schedule_of("GPipe", 2, 3))
    )


def test_every_kind_of_box_has_its_own_colour_and_its_own_pattern():
    root = drawn(picture_of_plan(schedule_of("ZBVZeroBubble", 2, 2)))
    patterns = {each.get("id").split("-")[-1]: each for each in root.iter(f"{SVG}pattern")}
    lines = {name: (each.find(f"{SVG}path")) for name, each in patterns.items()}
    shapes = {name: None if path is None else path.get("d") for name, path in lines.items()}
    first_stages = [shapes[code] for code in ("f0", "b0", "i0", "w0", "c0")]
    assert len(set(first_stages)) == 5
    for palette in (LIGHT, DARK):
        assert len(set(palette.fills.values())) == len(palette.fills)


@pytest.mark.parametrize("palette", [LIGHT, DARK])
@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_numbers_stand_out_from_their_boxes(palette, level):
    def luminance(colour):
        channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for look in palette.fills:
        colour = fill(palette, look, level, 4)
        values = sorted((luminance(colour), luminance(readable_on(colour))))
        assert (values[1] + 0.05) / (values[0] + 0.05) > 3.0, (look, level, colour)


# What is in it


def test_planned_stands_above_measured_on_the_same_scale():
    schedule = schedule_of("1F1B", 4, 8, unit=0.01)
    picture = picture_of_timeline(measured(schedule, delays={"2F0": 0.05}))
    assert [panel.title for panel in picture.panels] == ["planned", "measured"]
    assert picture.seconds
    planned, now = picture.panels
    assert now.figures.step > planned.figures.step
    assert picture.length == pytest.approx(now.figures.step)
    layout = lay_out(picture)
    assert layout.panel_tops[0] < layout.panel_tops[1]
    # One scale for both: the same box of both panels is as wide.
    widths = [layout.x(panel.lanes[0].boxes[0].end) - layout.left for panel in picture.panels]
    assert widths[0] == pytest.approx(widths[1])


def test_a_measured_wait_is_split_where_the_message_had_been_made():
    schedule = schedule_of("1F1B", 2, 1, unit=1.0)
    timeline = measured(schedule_of("1F1B", 2, 1, unit=1.0, transfer=0.25))
    lane = picture_of_timeline(timeline).panels[1].lanes[1]
    assert [(wait.look, wait.start, wait.end) for wait in lane.waits] == [
        (Look.WAITING, 0.0, 1.0),
        (Look.COMMUNICATION, 1.0, 1.25),
    ]
    assert picture_of_plan(schedule).panels[0].lanes[1].waits[0].end == 1.0


def test_the_transfers_of_a_plan_are_shown_as_communication():
    picture = picture_of_plan(schedule_of("1F1B", 2, 2, transfer=0.5))
    assert Look.COMMUNICATION in picture.looks
    assert Look.COMMUNICATION not in picture_of_plan(schedule_of("1F1B", 2, 2)).looks
    first = picture.panels[0].lanes[1].waits
    assert [(box.look, box.end - box.start) for box in first[:2]] == [
        (Look.WAITING, 1.0),
        (Look.COMMUNICATION, 0.5),
    ]


def test_figures_beside_the_picture_are_those_of_the_prediction():
    schedule = schedule_of("ZBVZeroBubble", 4, 8)
    panel = picture_of_plan(schedule).panels[0]
    assert panel.figures.step == schedule.prediction.step
    assert panel.figures.bound == schedule.prediction.bound
    assert panel.figures.step_bubble == schedule.prediction.step_bubble
    assert [lane.bubble for lane in panel.lanes] == list(schedule.prediction.rank_bubbles)
    assert [lane.peak_share for lane in panel.lanes] == list(schedule.proof.peak_share)


def test_several_schedules_share_one_scale():
    schedules = (schedule_of("1F1B", 4, 8), schedule_of("ZBVZeroBubble", 4, 8))
    picture = picture_of_plans(schedules, "Two schedules")
    assert [panel.title for panel in picture.panels] == ["1F1B", "ZBVZeroBubble"]
    assert picture.length == 33
    assert picture.levels == 2


@given(st.floats(1e-7, 1e7))
def test_ticks_are_round_and_few(length):
    marks = ticks(length)
    assert marks[0] == 0
    assert 5 <= len(marks) <= 13
    assert marks[-1] <= length * (1 + 1e-9)
    step = f"{marks[1]:e}"
    assert step[0] in "125"
    assert set(step[2:8]) == {"0"}
