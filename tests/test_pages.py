"""The pages of docs/ that code prints are what it prints today: python -m docs.make_pages writes them."""

import xml.etree.ElementTree

import numpy as np
import PIL.Image
import pytest

from docs import make_pages, walkthrough
from minivlmrl.image import load_image


@pytest.mark.parametrize("name", make_pages.PAGES)
def test_a_page_is_as_committed(name):
    """If this fails after a change, read the new page: python -m docs.make_pages."""
    text = make_pages.PAGES[name]()
    assert (make_pages.DOCS / name).read_text(encoding="utf-8") == text
    assert not name.endswith(".svg") or xml.etree.ElementTree.fromstring(text).tag.endswith("svg")


def test_the_walkthrough_begins_with_its_file():
    file = np.asarray(load_image(make_pages.DOCS / "walkthrough.png"))
    assert np.array_equal(file, walkthrough.data("RGB")["pixels"])
    assert PIL.Image.open(make_pages.DOCS / "walkthrough.png").size == (56, 56)
