"""The pages of docs/ that code prints are what it prints today: python -m docs.make_pages writes them."""

import re
import xml.etree.ElementTree

import numpy as np
import PIL.Image
import pytest

from docs import compare, make_pages, walkthrough
from minivlmrl.image import load_image

NUMBER = re.compile(r"[+-]?\d+(?:\.\d+)?")


@pytest.mark.parametrize("name", make_pages.PAGES)
def test_a_page_is_as_committed(name):
    """If this fails after a change, read the new page: python -m docs.make_pages.

    Another processor may round the last of two or more decimals otherwise.
    """
    text = make_pages.PAGES[name]()
    committed = (make_pages.DOCS / name).read_text(encoding="utf-8")
    assert NUMBER.sub("0", text) == NUMBER.sub("0", committed)
    for mine, theirs in zip(NUMBER.findall(text), NUMBER.findall(committed), strict=True):
        decimals = max(len(number.partition(".")[2]) for number in (mine, theirs))
        off = 1.01 * 10**-decimals if decimals > 1 else 0
        assert float(mine) == pytest.approx(float(theirs), rel=0, abs=off)
    assert not name.endswith(".svg") or xml.etree.ElementTree.fromstring(text).tag.endswith("svg")


def test_the_walkthrough_begins_with_its_file():
    file = np.asarray(load_image(make_pages.DOCS / "walkthrough.png"))
    assert np.array_equal(file, walkthrough.data("RGB")["pixels"])
    assert PIL.Image.open(make_pages.DOCS / "walkthrough.png").size == (56, 56)


def test_what_the_pages_say_is_so():
    """Sentences without numbers: who rises and who falls."""
    moved = dict(enumerate(walkthrough.data("Update")["change"]))
    worth = [one["reward"] for one in walkthrough.data("Rewards")["completions"]]
    assert [number for number, reward in enumerate(worth) if reward == 1.5] == [1, 5] and moved[1] > 0 and moved[5] > 0
    assert [number for number, reward in enumerate(worth) if reward == 0] == [3, 6] and moved[3] < 0 and moved[6] < 0
    assert sum(moved[number] > 0 for number in (0, 2, 4, 7)) == 3
    for name, push in compare.pushes().items():
        assert compare.changes(name)[2] > 0, f"answer 2 rises with {name}"
        assert name in ("SFT", "DPO") or (push[3][compare.scene().mask[3].bool()] < 0).all()
