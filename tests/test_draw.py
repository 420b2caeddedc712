"""The pictures of the README are what docs/draw.py draws today."""

import importlib.util
import xml.etree.ElementTree
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
SPEC = importlib.util.spec_from_file_location("draw", DOCS / "draw.py")
draw = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(draw)


@pytest.mark.parametrize("name", draw.PICTURES)
def test_a_picture_is_as_committed(name):
    """If this fails after a change of the layout, look at the new picture: python docs/draw.py."""
    svg = draw.PICTURES[name]()
    assert (DOCS / name).read_text(encoding="utf-8") == svg
    assert xml.etree.ElementTree.fromstring(svg).tag.endswith("svg")
