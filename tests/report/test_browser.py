"""The page in a real browser: it runs without an error, shows values under the pointer, and runs nothing else."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.report.folders import TakenApart, make_page, write_run

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--enable-logging=stderr",
    "--window-size=1280,1600",
    "--virtual-time-budget=2000",
)

pytestmark = pytest.mark.slow


@pytest.fixture
def browser() -> str:
    found = next((path for name in _NAMES if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip(f"no browser is installed: none of {', '.join(_NAMES)} is found")
    return found


def _load(browser: str, tmp_path: Path, page: str) -> tuple[TakenApart, list[str]]:
    """The page after it was loaded, and what was written to the console."""
    file = tmp_path / "page.html"
    file.write_text(page, encoding="utf-8")
    command = [browser, *_OPTIONS, f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", file.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return TakenApart(done.stdout), console


def _with_script(page: str, script: str) -> str:
    """The page as if its reader did something."""
    free = re.sub(r'<meta content="default-src [^>]*>', "", page)  # its policy would not allow the script
    assert free != page
    return free.replace("</body>", f"<script>{script}</script></body>")


def _two_runs(tmp_path: Path) -> str:
    a = write_run(tmp_path / "a", timelines=[3])
    b = write_run(tmp_path / "b", options=["--optimizer.lr", "0.002"])
    return make_page(a, b)


def test_curves_tables_and_timelines_are_there_and_the_console_is_silent(
    browser: str, tmp_path: Path
) -> None:
    taken, console = _load(browser, tmp_path, _two_runs(tmp_path))
    assert console == []
    assert taken.all("html")[0].attributes["data-ready"] == "yes"
    lines = [each for each in taken.all("path", "line") if "data-run" in each.attributes]
    assert len(lines) == 12
    assert all(each.attributes["d"] for each in lines)
    assert len(taken.all("table")) >= 8
    assert "1F1B, step 3" in taken.section("timeline")
    assert "optimizer.lr0.0050.002" in taken.section("configuration")


def test_values_are_shown_under_the_pointer_and_a_run_can_be_hidden(browser: str, tmp_path: Path) -> None:
    script = """
      const plot = document.querySelector('[data-key=loss] .plot'), box = plot.getBoundingClientRect();
      document.querySelector('.legend button[data-run="1"]').click();
      plot.dispatchEvent(new PointerEvent('pointermove',
        {clientX: box.left + box.width * 14 / 29, clientY: box.top + 9, bubbles: true}));
    """
    taken, console = _load(browser, tmp_path, _with_script(_two_runs(tmp_path), script))
    assert console == []
    tips = [each.text for each in taken.all("div", "tip")]
    assert tips == ["step 15a, training4.3618a, validation4.5", "", "", ""]
    # The same step is marked in all curves.
    assert len(taken.all("figure", "pointed")) == 4
    assert [len(taken.all("figure", "here")), len(taken.all("i", "dot"))] == [1, 5]
    hidden = {
        each.attributes.get("data-run")
        for each in taken.all("path", "line")
        if "none" in (each.attributes.get("style") or "")
    }
    assert hidden == {"1"}


def test_the_keyboard_moves_from_step_to_step(browser: str, tmp_path: Path) -> None:
    script = """
      const figure = document.querySelector('[data-key=loss]');
      for (let i = 0; i < 3; i++)
        figure.dispatchEvent(new KeyboardEvent('keydown', {key: 'ArrowRight', bubbles: true}));
    """
    page = make_page(write_run(tmp_path / "run"))
    taken, console = _load(browser, tmp_path, _with_script(page, script))
    assert console == []
    assert taken.all("div", "tip")[0].text.startswith("step 3training")


def test_nothing_from_a_hostile_folder_runs_even_if_it_came_onto_the_page(
    browser: str, tmp_path: Path
) -> None:
    evil = "document.documentElement.dataset.hacked = 'yes'"
    folder = write_run(tmp_path / "run")
    words = f'</script><script>{evil}</script><img src=x onerror="{evil}">'
    (folder / "environment.json").write_text(json.dumps({"python": words, words: words}))
    (folder / "timeline").mkdir()
    picture = f'<svg xmlns="http://www.w3.org/2000/svg" onload="{evil}"><script>{evil}</script></svg>'
    (folder / "timeline" / "step-3.svg").write_text(picture)
    page = make_page(folder)
    taken, console = _load(browser, tmp_path, page)
    assert console == []
    assert taken.all("html")[0].attributes.get("data-hacked") is None
    # And if the escaping had failed, the page's policy would still not let it.
    taken, console = _load(browser, tmp_path, page.replace("<main>", f"<main>{words}"))
    assert taken.all("html")[0].attributes.get("data-hacked") is None
    assert any("Content Security Policy" in line for line in console)


@pytest.mark.parametrize("width", [400, 1600])
def test_the_page_is_never_wider_than_the_window(browser: str, tmp_path: Path, width: int) -> None:
    page = _two_runs(tmp_path)
    (tmp_path / "inner.html").write_text(page, encoding="utf-8")
    # Browsers have a smallest window; a frame has none. The frame's page tells its size by its address.
    told = "parent.postMessage(document.documentElement.scrollWidth, '*')"
    (tmp_path / "inner.html").write_text(_with_script(page, told), encoding="utf-8")
    frame = (
        "<script>onmessage = (event) => { document.body.dataset.width = event.data }</script>"
        f'<body><iframe src="inner.html" style="width:{width}px;height:900px;border:0"></iframe></body>'
    )
    taken, _ = _load(browser, tmp_path, frame)
    assert int(taken.all("body")[0].attributes["data-width"] or 0) <= width
