"""Test recipes/miniwob.py: many completions' clicks in one browser, page rewards, and browser errors."""

import base64
import functools
import importlib.metadata
import io
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import PIL.Image
import pytest
from runs import summary

from recipes import miniwob

INSTALLED = all(map(find_spec, ("selenium", "miniwob"))) and all(map(shutil.which, ("chromium", "chromedriver")))


class BrowserError(Exception):
    """Stands for an exception from selenium or its connection."""


@functools.cache
def png(width, height, color):
    """Encode a one-colour image as Chromium does."""
    file = io.BytesIO()
    PIL.Image.new("RGB", (width, height), color).save(file, "png")
    return base64.b64encode(file.getvalue()).decode()


class FakeDriver:
    """A page whose right half is right (1), and whose left half is wrong (-1), except for the first column."""

    def __init__(self, num_failures=0):
        self.num_failures = num_failures
        self.closed = False

    def execute_script(self, script, seed=None):
        if script == miniwob.START:
            self.seed, self.reward, self.num_clicks = seed, None, 0
        if script == miniwob.TARGETS["click-color"].script:
            return ["Click on the red colored box.", "red", [["red", 100, 40, 40, 40], ["blue", 20, 40, 40, 40.6]]]
        return self.reward

    def execute_cdp_cmd(self, name, options):
        if self.num_failures:
            self.num_failures -= 1
            raise BrowserError("tab crashed")
        if name == "Page.captureScreenshot":
            color = (len(self.seed), self.num_clicks, 0 if self.reward is None else 255)
            return {"data": png(options["clip"]["width"], options["clip"]["height"], color)}
        if options["type"] == "mouseReleased":
            self.num_clicks += 1
            if options["x"] > 0:
                self.reward = 1 if options["x"] >= 80 else -1
        return {}

    def quit(self):
        self.closed = True


class Drivers(list):
    """The browsers to open; `opened` has the open browser."""


@pytest.fixture
def drivers(monkeypatch):
    """Replace the browser; the list has the drivers to open."""
    waiting, opened = Drivers([FakeDriver()]), []

    def open_browser(page):
        if not opened:
            opened.append(waiting.pop(0))
        return opened[-1]

    open_browser.cache_clear = opened.clear
    for cached in (miniwob.page_reward, miniwob.png, miniwob.puzzle):
        cached.cache_clear()
    monkeypatch.setattr(miniwob, "open_browser", open_browser)
    waiting.opened = opened
    return waiting


def begin(seed="a/0", page="click-color", blind=False, max_tool_calls=1):
    environment = miniwob.Page()
    environment.max_tool_calls = max_tool_calls
    environment.reset(page=page, page_seed=seed, blind=blind, solution="")
    return environment


def test_completions_that_share_a_browser_do_not_mix(drivers):
    first, second = begin(max_tool_calls=2), begin(seed="a longer seed", max_tool_calls=2)
    assert first.click(0, 0).getpixel((0, 0)) == (3, 1, 0) and not first.done  # a click beside everything
    assert second.click(10, 5) == "The episode has ended."
    first.click(100, 5)
    assert drivers.opened[-1].num_clicks == 2  # also the former click
    assert first.done and second.done and (first.get_reward(), second.get_reward()) == (1.0, -1.0)
    assert first.clicks == [(0, 0), (100, 5)]


def test_the_browser_is_asked_once_for_the_same_clicks(drivers):
    begin().click(100, 5)
    drivers.opened[-1].num_clicks = 7
    again = begin()
    again.click(100, 5)
    assert again.get_reward() == 1.0 and again.done and drivers.opened[-1].num_clicks == 7
    begin().click(101, 5)
    assert drivers.opened[-1].num_clicks == 1


def test_demonstrations_of_a_second_epoch_do_not_need_the_browser(drivers):
    rows = miniwob.Pages(4200, "0/sft", "click-color", demonstrated=True)
    first = [row.completion for row in rows]
    drivers.opened[-1].execute_script = drivers.opened[-1].execute_cdp_cmd = None
    assert [row.completion for row in rows] == first


def test_an_episode_without_an_end_is_no_better_than_a_wrong_click(drivers):
    environment = begin()
    for x, y in [(160, 0), (0, 210), (-1, 0)]:
        with pytest.raises(ValueError, match=r"outside of the page, which has 160 columns and 210 rows"):
            environment.click(x, y)
    assert environment.get_reward() == -1.0 and not environment.done and environment.clicks == []


def test_the_last_click_ends_the_episode_without_a_screenshot(drivers, monkeypatch):
    monkeypatch.setattr(miniwob, "screenshot", None)
    environment = begin()
    assert environment.click(0, 0) == "The episode has ended." and environment.done and environment.get_reward() == -1.0


def test_a_killed_tab_is_tried_again_once(drivers):
    broken, whole = FakeDriver(num_failures=1), FakeDriver()
    drivers[:] = [broken, whole]
    environment = begin()
    environment.click(100, 0)
    assert environment.get_reward() == 1.0 and broken.closed and not whole.closed
    drivers[:] = [FakeDriver(num_failures=1)]
    whole.num_failures = 1
    with pytest.raises(BrowserError):
        begin().click(101, 0)
    assert whole.closed


def test_the_time_limit_closes_the_browser(drivers):
    [driver] = drivers
    driver.execute_cdp_cmd = lambda *_: exec("raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        begin().click(1, 1)
    assert driver.closed


def test_rows_and_the_blind_control(drivers):
    rows = miniwob.Pages(2, "eval", "click-color")
    assert len(rows) == 2 and rows[1].columns["page_seed"] == "eval/1" and rows[1].images[0].size == (160, 210)
    assert rows[0].images[0].getpixel((0, 0)) == (6, 0, 0)
    assert rows[0].columns["problem"] == "Click on the red colored box." and rows[0].completion is None
    blind = begin(blind=True, max_tool_calls=2)
    assert blind.click(0, 0).getcolors() == [(160 * 210, (128, 128, 128))] and not blind.done
    assert blind.click(100, 0) == "The episode has ended." and blind.get_reward() == 1.0
    assert miniwob.Pages(1, "eval", "click-color", blind=True)[0].images[0].getpixel((0, 0)) == (128, 128, 128)


def test_demonstrations_click_at_the_named_box_or_at_any_box(drivers, monkeypatch):
    clicks = [row.completion for row in miniwob.Pages(40, "sft", "click-color", demonstrated=True, wrong=0.5)]
    red, blue = "I see red <click>120, 60</click>", "I see red; blue <click>40, 60</click>"
    assert {*clicks} == {red, blue}
    assert 4 <= clicks.count(blue) <= 16  # half the random boxes are right
    assert {row.completion for row in miniwob.Pages(9, "sft", "click-color", demonstrated=True)} == {red}
    for look, seen in {"": "", "{name} {y}": "I see red 60 ", "{x}": "I see 120 "}.items():
        monkeypatch.setitem(miniwob.TARGETS, "click-color", replace(miniwob.TARGETS["click-color"], look=look))
        [row] = miniwob.Pages(1, "sft", "click-color", demonstrated=True)
        assert row.completion == f"{seen}<click>120, 60</click>"
    training, held_out = miniwob.TASK.datasets(SimpleNamespace(eval_rows=3), 0, "click-color", demonstrations=5)
    assert (len(training["demonstrations"]), len(held_out)) == (5, 3)
    assert training["prompts"][0].columns["page_seed"] == "0/grpo/0" and training["prompts"][0].completion is None
    ids = miniwob.tokenizer().encode(blue)
    assert len(ids) < 16 and miniwob.tokenizer().decode(ids) == blue
    for word in (*miniwob.COLORS, *miniwob.BUTTONS, "field", "text"):  # one token is easy to compare with another
        assert len(miniwob.tokenizer().encode(f" {word}")) == 1


def test_baselines_and_the_number_of_chance(drivers):
    found = miniwob.puzzle("click-color", "a")
    assert found.centers() == [(120, 60), (40, 60)] and found.centers("red") == [(120, 60)]
    assert [found.is_right(x, 60) for x in (99, 100, 139, 140, 40)] == [False, True, True, False, False]
    assert miniwob.chance(miniwob.Pages(3, "eval", "click-color")) == 0.5
    numbers = miniwob.baselines("click-color", 40, "eval")
    assert numbers["best pixel of each instruction"] == 1 and 0.2 < numbers["random element"] < 0.8
    with pytest.raises(ValueError, match=r"the page is 'click', but it must be one of click-color, identify-shape"):
        miniwob.Pages(3, "eval", "click")


def test_missing_packages_are_named(monkeypatch):
    with pytest.raises(ValueError, match=r"no_such_package.*needs: pip install miniwob selenium"):
        miniwob.import_package("no_such_package")

    def not_found(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", not_found)
    with pytest.raises(ValueError, match=r"miniwob; recipes/miniwob.py needs: pip install miniwob selenium"):
        miniwob.serve_pages.__wrapped__()
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(FileNotFoundError, match=r"program chromium is not installed; apt-get install chromium"):
        miniwob.find_program("chromium")


def close_browser(page):
    miniwob.open_browser(page).quit()
    miniwob.open_browser.cache_clear()


@pytest.mark.slow
@pytest.mark.skipif(not INSTALLED, reason="needs miniwob, selenium, chromium and chromedriver")
@pytest.mark.parametrize("page", miniwob.TARGETS)
def test_the_real_pages_agree_about_the_right_element(page):
    try:
        for seed in map("a/{}".format, range(8)):
            found = miniwob.puzzle(page, seed)
            for x, y in found.centers():
                environment = begin(seed, page=page)
                environment.click(x, y)
                covering = [n for n, left, top, w, h in found.boxes if left <= x < left + w and top <= y < top + h]
                assert environment.get_reward() == (1 if covering[-1] == found.right else -1), (seed, x, y)
            assert found.instruction in miniwob.TARGETS[page].texts
            beside = begin(seed, page=page)
            beside.click(1, 209)
            assert beside.reward is None and beside.get_reward() == -1
        [first, again, other] = [miniwob.Pages(2, s, page)[0].images[0].tobytes() for s in ("a", "a", "c")]
        assert first == again != other
        miniwob.open_browser(page).quit()  # the next call finds a dead browser, and starts a new one
        miniwob.puzzle.cache_clear()
        assert miniwob.puzzle(page, seed) == found
    finally:
        close_browser(page)


def processes_of(folder):
    """Return the ids of all processes whose command line names a folder."""
    named = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if os.fsencode(folder) in path.read_bytes():
                named.append(int(path.parent.name))
    return named


def wait_until(condition):
    ends = time.monotonic() + 30
    while not condition() and time.monotonic() < ends:
        time.sleep(0.05)
    return condition()


# how the process that started the browser ends: {name: code that it runs}
ENDS = {
    "return": "",
    "os._exit": "os._exit(0)",
    "SIGKILL": "os.kill(os.getpid(), signal.SIGKILL)",
    "killed chromedriver": "[one] = child_processes(started); os.kill(one, signal.SIGKILL); time.sleep(999)",
}


@pytest.mark.skipif(sys.platform != "linux", reason="counts processes in /proc")
@pytest.mark.parametrize("end", ENDS)
def test_a_program_ends_with_its_parent(tmp_path, end):
    """The program has a child, and a grandchild in its own session, like Chromium below chromedriver."""
    script = Path(miniwob.__file__).with_name("end_with_parent.py")
    inner = f"import time; '{tmp_path}'; time.sleep(999)"
    program = (
        "import subprocess, sys, time\n"
        f"subprocess.Popen([sys.executable, '-c', {inner!r}])\n"
        f"subprocess.Popen([sys.executable, '-c', {inner!r}], start_new_session=True)\n"
        f"open({str(tmp_path / 'ready')!r}, 'w').close()\ntime.sleep(999)\n"
    )
    command = [sys.executable, str(script), sys.executable, "-c", program]
    code = f"""
import os, signal, subprocess, time
from recipes.end_with_parent import child_processes
started = subprocess.Popen({command}, stdin=subprocess.PIPE).pid
while not os.path.exists({str(tmp_path / "ready")!r}):
    time.sleep(0.01)
{ENDS[end]}
"""
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=script.parents[1])
    try:
        assert wait_until(lambda: processes_of(tmp_path) in ([], [parent.pid]) and (tmp_path / "ready").exists())
    finally:
        parent.kill()
        parent.wait()
        for pid in processes_of(tmp_path):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.skipif(not INSTALLED, reason="needs miniwob, selenium, chromium and chromedriver")
@pytest.mark.parametrize("end", ENDS)
def test_the_browser_ends_with_the_process(tmp_path, end):
    """chromedriver puts the profile, which all Chromium processes name, into the folder for temporary files."""
    code = f"""
import os, signal, time
from recipes import miniwob
from recipes.end_with_parent import child_processes
started = miniwob.open_browser('click-color').service.process.pid
open({str(tmp_path / "ready")!r}, "w").close()
{ENDS[end]}
"""
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=Path(miniwob.__file__).parents[1], env=environment)
    try:
        assert wait_until(lambda: (tmp_path / "ready").exists() and processes_of(tmp_path) in ([], [parent.pid]))
    finally:
        parent.kill()
        parent.wait()


@pytest.mark.slow
@pytest.mark.skipif(not INSTALLED, reason="needs miniwob, selenium, chromium and chromedriver")
def test_the_recipe_runs(run, plain):
    steps = [f"--{stage}.{option}" for stage in ("sft", "grpo") for option in ("max_steps=1", "prompts_per_step=2")]
    task = "--data.task=recipes/miniwob.py:TASK(demonstrations=4)"
    folder = run(task, "--data.eval_rows=2", "--grpo.num_generations=2", *steps, recipe="recipes/miniwob.yaml")
    assert list(summary(folder)) == ["chance", "start", "after_sft", "after_grpo", "seconds"]
