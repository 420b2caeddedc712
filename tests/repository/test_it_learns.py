"""Test that docs/it_learns.md and its pictures have the numbers of the files in docs/curves."""

import re

import pytest

from docs.scripts import it_learns


def test_the_tables_are_those_of_the_files():
    assert it_learns.PAGE.read_text(encoding="utf-8") == it_learns.page()


@pytest.mark.parametrize("path", it_learns.PICTURES)
def test_the_pictures_are_drawn_from_the_files(path):
    name = re.sub(r"images/|\.svg", "", path)
    drawn = it_learns.PICTURES[path](it_learns.read(name))
    assert (it_learns.DOCS / path).read_text(encoding="utf-8") == drawn
