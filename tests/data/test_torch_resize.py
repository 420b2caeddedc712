"""Compare images resized by torch with transformers' torchvision processor, bit for bit."""

from minivlmrl.data.image import ImageProcessor
from minivlmrl.data.image_settings import RESIZE
from tests.record.record_vision import digest, image_cases, recorded


def test_patches_equal_transformers_torchvision_processor_bit_for_bit():
    cases = recorded("torchvision_0.28.0")["images"]
    assert len(cases) == 48
    for (image, settings_), (grid, expected) in zip(image_cases(), cases, strict=True):
        pixel_values, image_grid_thw = ImageProcessor(**settings_, resize=RESIZE["torch"])(image)
        assert list(image_grid_thw) == grid
        assert digest(pixel_values) == expected, (image, settings_)
