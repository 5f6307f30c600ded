"""The page: what is on it, and that nothing from a run folder can become part of its program."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.report.folders import (
    TakenApart,
    assert_harmless,
    make_page,
    plan_text,
    row,
    timeline_of_step,
    write_run,
)

_EVIL = "</script></style></title></svg>--><script>document.documentElement.dataset.hacked='1'</script><img src=x onerror=alert(1)>\"'`>\ud800\x00"
_SECTIONS = ("summary", "curves", "timeline", "plan", "configuration", "environment")


def _data(taken: TakenApart) -> dict[str, Any]:
    return json.loads(taken.all("script")[0].text)


def test_a_run_has_every_section_with_its_content(tmp_path: Path) -> None:
    taken = assert_harmless(make_page(write_run(tmp_path / "my-run", timelines=[3])))
    assert [each.attributes["id"] for each in taken.all("section")] == list(_SECTIONS)
    assert [each.attributes["href"] for each in taken.all("a")] == [f"#{name}" for name in _SECTIONS]
    assert taken.all("h1")[0].text == "my-run"
    assert "30 of 200 steps" in taken.section("summary")
    assert "3.5 lowest, step 30" in taken.section("summary")
    assert "1F1B, step 3" in taken.section("timeline")
    plan = taken.section("plan")
    assert "4 ranks: pipeline 4" in plan
    assert "1F1B, 4 stages, 4 microbatches" in plan
    assert "layers.6, layers.7, norm, output" in plan
    assert "3.11.7" in taken.section("environment")
    # The configuration of the test sets these two differently from the defaults.
    configuration = taken.section("configuration")
    assert "training.steps20010000" in configuration
    assert "optimizer.lr0.0050.0008" in configuration


def test_the_four_curves_are_drawn_with_the_validation_loss_in_the_first(tmp_path: Path) -> None:
    taken = assert_harmless(make_page(write_run(tmp_path / "run")))
    assert [each.attributes["data-key"] for each in taken.all("figure")] == [
        "loss",
        "throughput",
        "lr",
        "grad_norm",
    ]
    looks = [(each.attributes["class"] or "").split()[1] for each in taken.all("path", "line")]
    # Two of them in the legend.
    assert looks == ["plain", "dotted", "plain", "dotted", "points", "plain", "plain", "plain"]
    data = _data(taken)
    assert [len(each["lines"]) for each in data.values()] == [2, 1, 1, 1]
    loss, validation = data["loss"]["lines"]
    assert loss["steps"] == list(range(1, 31))
    assert loss["values"][-1] == pytest.approx(3.11565, rel=1e-5)
    assert (validation["steps"], validation["values"]) == ([15, 30], [4.5, 3.5])


def test_a_line_is_where_its_values_are_and_is_interrupted_where_one_is_not_finite(tmp_path: Path) -> None:
    rows = [row(step, lr=value) for step, value in ((1, 0.0), (2, 1.0), (3, None), (4, 2.0), (5, None))]
    taken = assert_harmless(make_page(write_run(tmp_path / "run", rows=rows)))
    high = _data(taken)["lr"]["y"][1]
    path = taken.all("path", "line")[2].attributes["d"] or ""
    parts = [[float(n) for n in part.rstrip("h0").split(",")] for part in re.split("[ML]", path)[1:]]
    assert re.sub("[0-9.,]", "", path) == "MLMh"
    expected = [[0, 1000], [250, 1000 * (1 - 1 / high)], [750, 1000 * (1 - 2 / high)]]
    assert [pytest.approx(each, abs=0.06) for each in expected] == parts


def test_several_runs_are_over_each_other_with_a_legend_and_what_differs(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a")
    b = write_run(tmp_path / "b", options=["--optimizer.lr", "0.002", "--validation.freq", "7"])
    (b / "environment.json").unlink()
    taken = assert_harmless(make_page(a, b))
    assert taken.all("h1")[0].text == "2 runs compared"
    assert [each.text for each in taken.all("button")] == ["a", "b"]
    assert {
        each.attributes["data-run"] for each in taken.all("path", "line") if "data-run" in each.attributes
    } == {
        "0",
        "1",
    }
    assert [each["name"] for each in _data(taken)["loss"]["lines"]] == [
        "a, training",
        "b, training",
        "a, validation",
        "b, validation",
    ]
    tables = taken.all("table", "compare")
    differing = next(each.text for each in tables if "What differs" in each.text)
    assert differing == "What differsaboptimizer.lr0.0050.002validation.freq1007"
    assert "2.13.0–" in taken.section("environment")


def test_equal_configurations_are_said_to_be_equal(tmp_path: Path) -> None:
    page = make_page(write_run(tmp_path / "a"), write_run(tmp_path / "b"))
    assert "The configurations are the same." in page


def test_many_points_are_thinned_and_drawn_over_by_their_median(tmp_path: Path) -> None:
    rows = [
        row(step, loss=3 + (-1) ** step, grad_norm=900.0 if step == 500 else 1.0) for step in range(1, 5001)
    ]
    page = make_page(write_run(tmp_path / "run", rows=rows))
    taken = assert_harmless(page)
    assert "bold: median of 201 logged steps" in page
    assert "1 value lies above what is shown" in page
    assert len(page) < 300_000
    lines = [each for chart in _data(taken).values() for each in chart["lines"]]
    assert all(len(each["steps"]) <= 802 for each in lines)
    # Thinning never loses a spike.
    assert 900.0 in _data(taken)["grad_norm"]["lines"][0]["values"]


def test_more_runs_than_colours_can_still_be_told_apart(tmp_path: Path) -> None:
    taken = assert_harmless(make_page(*(write_run(tmp_path / f"run-{i}") for i in range(10))))
    chips = [each.attributes["class"] for each in taken.all("span", "chip")[:10]]
    assert len(set(chips)) == 10


def test_the_last_failure_is_at_the_top(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    failure = {
        "rank": 2,
        "reporter": 0,
        "reason": "died",
        "status": "in 1F3 of step 12",
        "stack": "Traceback ...",
        "exit_code": 4,
    }
    (folder / "failure.json").write_text(json.dumps(failure))
    taken = assert_harmless(make_page(folder))
    (box,) = taken.all("div", "failed")
    assert "The last start failed" in box.text
    assert "rank 2 died (in 1F3 of step 12)" in box.text
    assert "Traceback ..." in box.text


def test_what_could_not_be_read_is_on_the_page(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    (folder / "plan.json").write_text('{"mesh": ')
    (folder / "config.toml").unlink()
    taken = assert_harmless(make_page(folder))
    (box,) = taken.all("div", "unread")
    assert "config.toml is missing" in box.text
    assert "plan.json is no whole JSON" in box.text
    assert "No configuration could be read." in taken.section("configuration")
    assert [each.attributes["id"] for each in taken.all("section")] == list(_SECTIONS)


def test_a_run_that_only_has_an_empty_metrics_file_has_a_page(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("")
    taken = assert_harmless(make_page(tmp_path / "run"))
    assert "no step logged" in taken.section("summary")
    assert taken.section("curves").count("nothing was logged") == 4
    assert "No step was measured" in taken.section("timeline")


def test_the_policy_of_the_page_allows_its_own_script_and_nothing_else(tmp_path: Path) -> None:
    taken = assert_harmless(make_page(write_run(tmp_path / "run")))
    (policy,) = [m.attributes["content"] or "" for m in taken.all("meta") if "http-equiv" in m.attributes]
    digest = base64.b64encode(hashlib.sha256(taken.all("script")[1].text.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}';" in policy
    assert policy.startswith("default-src 'none';")
    assert "http" not in policy


def test_nothing_on_the_page_is_loaded_from_anywhere(tmp_path: Path) -> None:
    page = make_page(write_run(tmp_path / "run", timelines=[3]))
    addresses = set(re.findall(r"https?://[^\"' <]*", page))
    assert addresses <= {"http://www.w3.org/2000/svg"}  # the name of the language, which nobody loads
    assert "@import" not in page


def _poisoned(value: Any) -> Any:
    """The value with every string, and a further member of every object, poisoned."""
    if isinstance(value, dict):
        return {key: _poisoned(each) for key, each in value.items()} | {_EVIL: _EVIL}
    if isinstance(value, list):
        return [_poisoned(each) for each in value]
    return _EVIL if isinstance(value, str) else value


def test_a_hostile_folder_cannot_bring_a_script_onto_the_page(tmp_path: Path) -> None:
    hostile = write_run(tmp_path / "<img src=x onerror=alert(1)> & 'run'")
    plan = _poisoned(json.loads(plan_text()))
    (hostile / "plan.json").write_text(json.dumps(plan))
    for name in ("environment.json", "failure.json"):
        failure = {"reason": "", "status": "", "stack": "", "python": "", "rank": 1, "exit_code": 4}
        (hostile / name).write_text(json.dumps(_poisoned(failure)))
    rows = [_poisoned(row(1)), row(2) | {"loss": _EVIL}, {_EVIL: 1}, row(3)]
    (hostile / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    quoted = json.dumps(_EVIL.replace("\ud800", ""))
    (hostile / "config.toml").write_text(
        f"[job]\ndescription = {quoted}\n[{quoted}]\n{quoted} = [{quoted}]\n", encoding="utf-8"
    )
    (hostile / "timeline").mkdir()
    timeline = json.loads(timeline_of_step(3))
    timeline["schedule"]["name"] = timeline["clock"]["method"] = timeline["step"] = _EVIL
    for rank in timeline["ranks"]:
        rank["rank"] = rank["host"] = rank["device"] = _EVIL
        for action in rank["actions"]:
            action["run"] = action["run"]
            if "peer" in action:
                action["peer"] = _EVIL
    (hostile / "timeline" / "step-3.json").write_text(json.dumps(timeline))
    (hostile / "timeline" / "step-4.json").write_text(json.dumps(_poisoned(timeline)))
    (hostile / "timeline" / "step-5.svg").write_text("<svg onload=alert(1)><script>alert(1)</script></svg>")
    for folders in ([hostile], [hostile, write_run(tmp_path / "other")]):
        page = make_page(*folders)
        taken = assert_harmless(page)
        page.encode("utf-8")
        assert "<script>document" not in page
        # It was all there and is shown as what it is.
        assert "dataset.hacked" in taken.section("summary" if len(folders) == 1 else "plan")
        assert "dataset.hacked" in taken.section("timeline")
        assert "dataset.hacked" in taken.section("configuration")
        assert taken.all("img")[0].attributes["src"].startswith("data:image/svg+xml;base64,")


_JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.floats()
    | st.integers()
    | st.sampled_from([10**400, -(10**30), 2**53, _EVIL.replace("\ud800", ""), ""]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_folder_with_any_values_has_a_page(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = write_run(tmp_path_factory.mktemp("any") / "run")
    plan = json.loads(plan_text())
    for _ in range(4):
        _replace_somewhere(plan, data)
    (folder / "plan.json").write_text(json.dumps(plan))
    for name in ("environment.json", "failure.json"):
        keys = st.sampled_from(["rank", "exit_code", "reason", "stack", "python", "device_memory_bytes"])
        (folder / name).write_text(json.dumps(data.draw(st.dictionaries(keys, _JUNK) | _JUNK)))
    keys = st.sampled_from([*row(1), "validation_loss"])
    rows = data.draw(st.lists(st.dictionaries(keys, _JUNK | st.integers(1, 9)), max_size=5))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    assert_harmless(make_page(folder))


def _replace_somewhere(value: dict[str, Any], data: st.DataObject) -> None:
    """Put junk in place of a part of the value, however deep inside."""
    part: Any = value
    while True:
        keys = list(part) if isinstance(part, dict) else list(range(len(part)))
        if not keys:
            return
        key = data.draw(st.sampled_from(keys))
        if not isinstance(part[key], dict | list) or data.draw(st.booleans()):
            part[key] = data.draw(_JUNK)
            return
        part = part[key]
