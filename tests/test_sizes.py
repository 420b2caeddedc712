"""Options of one image: how large the model sees it."""

import pytest

from minivlmrl.data.sizes import IMAGE_OPTIONS, check_options


@pytest.mark.parametrize(("options", "message"), [
    ({"fps": 2}, "option 'fps' is not one of min_pixels, max_pixels, resized_height, resized_width"),
    ({"max_pixels": "big"}, "max_pixels 'big': need a whole number above 0"),
    ({"max_pixels": 200704.0}, r"max_pixels 200704.0: need a whole number above 0"),
    ({"min_pixels": True}, "min_pixels True: need"),
    ({"min_pixels": 0}, "min_pixels 0: need"),
    ({"min_pixels": 10**12, "max_pixels": 10**12}, "min_pixels 1000000000000 is over"),
    ({"resized_height": 280}, "resized_height and resized_width belong together"),
])  # fmt: skip
def test_a_wrong_option_is_named(options, message):
    with pytest.raises(ValueError, match=message):
        check_options(options, IMAGE_OPTIONS)
