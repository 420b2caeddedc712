"""Options of one image: how large the model sees it."""

import pytest

from minivlmrl.data.media_options import check_options


def test_what_is_none_is_left_out():
    assert check_options("image", {"max_pixels": 784, "min_pixels": None}) == {"max_pixels": 784}
    assert check_options("video", {"fps": 2, "nframes": None, "total_pixels": 784}) == {"total_pixels": 784, "fps": 2.0}


@pytest.mark.parametrize(("options", "message"), [
    ({"fps": 2}, "options of the image: unknown key fps; did you mean "),
    ({"max_pixels": 200704.0}, r"max_pixels is 200704.0, it must be of type int"),
    ({"min_pixels": 0}, r"min_pixels is 0, it must be in \[1, 33554432\]"),
    ({"min_pixels": 10**12, "max_pixels": 10**12}, "min_pixels is 1000000000000, it must be in"),
])  # fmt: skip
def test_a_wrong_option_is_named(options, message):
    with pytest.raises(ValueError, match=message):
        check_options("image", options)
