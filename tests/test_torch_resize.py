"""Images resized by torch's kernel: equal to transformers' torchvision processor to the bit."""

from record_vision import digest, image_cases, noise, recorded

from minivlmrl.hub.preprocessor import RESIZE
from minivlmrl.image import ImageProcessor


def test_patches_equal_transformers_torchvision_processor_bit_for_bit():
    cases = recorded("torchvision_0.28.0")["images"]
    assert len(cases) == 48
    for (image, settings_), (grid, expected) in zip(image_cases(), cases, strict=True):
        pixel_values, image_grid_thw = ImageProcessor(**settings_, resize=RESIZE["torch"])(image)
        assert list(image_grid_thw) == grid
        assert digest(pixel_values) == expected, (image, settings_)


def test_the_two_filters_differ_by_grey_levels_and_without_resizing_by_rounding():
    image = noise("RGB", (112, 56))
    ours, torchs = (ImageProcessor(resize=RESIZE[resize])(image)[0] for resize in ("pil", "torch"))
    assert 0 < (ours - torchs).abs().max() < 1e-6
    image = noise("RGB", (300, 200))
    ours, torchs = (
        ImageProcessor(max_pixels=28 * 28 * 30, resize=RESIZE[resize])(image)[0] for resize in ("pil", "torch")
    )
    assert 1 / 255 < (ours - torchs).abs().max() < 30 / 255 / 0.26
