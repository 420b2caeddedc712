"""Test recipes/tools.py: the calculator accepts only arithmetic, and zoom shows the right pixels."""

import PIL.Image
import pytest

from recipes.tools import Zoom, calculator


@pytest.mark.parametrize(
    ("expression", "value"), [("(3 + 4) * 1.5", "10.5"), ("-2*-3", "6"), ("1/3", "0.333333333333"), ("10 - 4 - 3", "3")]
)
def test_it_computes(expression, value):
    assert calculator(expression) == value


@pytest.mark.parametrize(
    "expression", ["2**9999999", "9//2", "abs(3)", "__import__('os')", "1" * 201, "", "0x10", "1e9"]
)
def test_it_is_no_python(expression):
    with pytest.raises(ValueError, match="use only numbers"):
        calculator(expression)


@pytest.fixture
def zoom():
    """Return the tool zoom for two images, both seen at half width; pixel (x, y) of the second image is (x, y, 0)."""
    environment, second = Zoom(), PIL.Image.new("RGB", (200, 100))
    second.putdata([(x, y, 0) for y in range(100) for x in range(200)])
    images = [PIL.Image.new("RGB", (80, 80)), second]
    environment.reset(images=images, extents=[(40.0, 80.0), (100.0, 100.0)], problem="?")
    return environment.zoom


def test_a_box_is_of_its_picture_in_the_space_of_the_model(zoom):
    crop = zoom((10, 20, 30, 60), 2)
    assert crop.size == (40, 40)
    assert crop.getpixel((0, 0)) == (20, 20, 0) and crop.getpixel((39, 39)) == (59, 59, 0)
    assert zoom((0, 0, 40, 80)).size == (80, 80)


@pytest.mark.parametrize(("box", "picture", "error"), [
    ((30, 20, 10, 60), 2, "is empty"),
    ((float("nan"), 1, 2, 3), 1, "NaN"),
    ((0, 0, 9, 9), 3, "picture is 3, but it must be between 1 and 2"),
])  # fmt: skip
def test_what_cannot_be_shown_says_why(zoom, box, picture, error):
    with pytest.raises(ValueError, match=error):
        zoom(box, picture)
