"""Options of one image: how large the model sees it."""

import pytest
import torch
from record_vision import noise

from minivlmrl.data.sizes import IMAGE_OPTIONS, check_options
from minivlmrl.image import ImageProcessor


def test_options_of_one_image_take_the_place_of_the_processors():
    image = noise("RGB", (300, 200))
    for options in ({"min_pixels": 100_352}, {"max_pixels": 20_000}, {"min_pixels": 784, "max_pixels": 784}):
        pixel_values, grid = ImageProcessor()(image, **options)
        expected, expected_grid = ImageProcessor(**options)(image)
        assert grid == expected_grid != ImageProcessor()(image)[1]
        assert torch.equal(pixel_values, expected)


@pytest.mark.parametrize(
    ("options", "grid"),
    [
        ({"resized_height": 280, "resized_width": 420}, (1, 20, 30)),
        ({"resized_height": 290, "resized_width": 430}, (1, 20, 30)),  # to the nearest multiples of 28
        ({"resized_height": 1, "resized_width": 1}, (1, 4, 4)),  # the processor's bounds hold
        ({"resized_height": 84, "resized_width": 112, "min_pixels": 10**6}, (1, 6, 8)),  # the image's own do not
    ],
)
def test_resized_height_and_width(options, grid):
    assert ImageProcessor()(noise("RGB", (300, 200)), **options)[1] == grid


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_pixels": 783, "min_pixels": 1}, "max_pixels 783 must be .* one token of 28 x 28 pixels"),
        ({"max_pixels": 3000}, "max_pixels 3000 must be at least min_pixels 3136"),
        ({"resized_height": 2000, "resized_width": 9}, "9 x 2000 pixels: its aspect ratio"),
    ],
)
def test_a_size_that_no_image_can_have_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        ImageProcessor()(noise("RGB", (30, 20)), **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fps": 2}, "option 'fps' is not one of min_pixels, max_pixels, resized_height, resized_width"),
        ({"total_pixels": 10**6}, "option 'total_pixels' is not one of"),
        ({"max_pixels": "big"}, "max_pixels 'big': need a whole number above 0"),
        ({"max_pixels": 200704.0}, r"max_pixels 200704.0: need a whole number above 0"),
        ({"min_pixels": True}, "min_pixels True: need"),
        ({"min_pixels": 0}, "min_pixels 0: need"),
        ({"min_pixels": -5}, "min_pixels -5: need"),
        ({"min_pixels": 10**12, "max_pixels": 10**12}, "min_pixels 1000000000000 is over"),
        ({"resized_height": 280}, "resized_height and resized_width belong together"),
        ({"resized_width": 280}, "resized_height and resized_width belong together"),
    ],
)
def test_a_wrong_option_is_named(options, message):
    with pytest.raises(ValueError, match=message):
        check_options(options, IMAGE_OPTIONS)
