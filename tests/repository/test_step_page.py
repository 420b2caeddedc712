"""Check the page of docs/scripts/step.py: the code of minimal.py, and the values that its lines computed."""

import json
import re

import pytest

from docs.scripts import step, walkthrough
from tests.helpers.links import ROOT
from tests.monitor.test_page import browse

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """Return the path of the page, which no file of the repository contains."""
    path = tmp_path_factory.mktemp("page") / "step.html"
    path.write_text(step.page(), encoding="utf-8")
    return path


def test_the_page_shows_what_the_lines_of_minimal_computed(page):
    assert page.stat().st_size <= 1_000_000
    text = page.read_text("utf-8")
    assert not re.search(r'(src|href)="(?!#|\$|data:)', text), "one file, no network"
    page = json.loads(re.findall(r'<script id="data" type="application/json">(.*?)</script>', text, re.DOTALL)[0])
    assert page["code"] == (ROOT / "minimal.py").read_text("utf-8")
    names = {name for name, _ in page["calls"]}
    assert names > {"train", "grpo", "patchify", "Vision.forward", "QwenVL.forward", "sample", "reward", "grpo_loss"}
    lines = page["code"].splitlines()
    executed = {lines[line - 1].partition("  #")[0].strip() for kind, _, line, *_ in page["events"] if kind == "line"}
    assert executed >= {"loss.backward()", "optimizer.step()", "ratio = log_ratio.exp()"}
    made = [(name, value) for *_, made, _ in page["events"] for _, name, value in made]
    rewards = [page["values"][value]["rows"][0] for name, value in made if name == "rewards"]
    assert len(rewards) == 6 and all({0.5, 1.5} <= {*group} for group in rewards)


def test_the_page_opens_where_the_loss_is_returned(page, tmp_path):
    shown = browse(page, "", tmp_path)
    assert re.search(r'class="on"[^>]*>grpo_loss</button>', shown) and "<b>returns</b> float64 ()" in shown
    assert re.search('class="row ran now".*?<span class="k">return</span> per_completion.mean', shown)
    assert re.search(r'class="on"[^>]*>train</button>', browse(page, "0", tmp_path))


def test_the_walkthrough_is_right_about_the_update():
    rewards, change = walkthrough.numbers()["grpo"]["rewards"].tolist(), walkthrough.numbers()["train"]["change"]
    for reward, moved in zip(rewards, change, strict=True):
        assert reward == 0.5 or (moved > 0) == (reward == 1.5)
