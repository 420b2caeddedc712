"""Test that each picture of the pages can be made again; test_docs.py compares the diagrams with their scripts."""

import xml.etree.ElementTree

import PIL.Image
import pytest

from docs.scripts import first_run, screenshots
from tests.monitor.test_page import CHROMIUM


@pytest.mark.slow
def test_the_animation_shows_the_moments_of_a_run(tmp_path):
    small = "--sft.max_steps=1", "--grpo.max_steps=5", "--grpo.prompts_per_step=2", "--data.eval_rows=4"
    rows, moments = first_run.record_run([*small, f"--output_dir={tmp_path}", "--num_threads=1"])
    assert [moment.step for moment in moments] == [0, 4, 5] and len(rows) == first_run.SHOWN
    picture = first_run.draw(rows, moments)
    words = [*xml.etree.ElementTree.fromstring(picture).itertext()]
    assert [word for word in words if word.startswith("step ")] == ["step 0", "step 4", "step 5"]
    assert words.count("no answer") == sum(moment.answers.count(None) for moment in moments)
    assert picture.count("<image") == 4 and picture.count("repeatCount='indefinite'") == 9


@pytest.mark.slow
def test_a_screenshot_is_sharp_on_a_phone(tmp_path):
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine: apt install chromium")
    (page := tmp_path / "page.html").write_text("<body style='background: red'>")
    screenshots.screenshot(page, tmp_path / "page.png", 300)
    picture = PIL.Image.open(tmp_path / "page.png")
    assert picture.size == (1240, 600) and picture.convert("RGB").getpixel((620, 300)) == (255, 0, 0)
    with pytest.raises(SystemExit, match=r"lost\.html is missing"):
        screenshots.screenshot(tmp_path / "lost.html", tmp_path / "page.png", 300)
