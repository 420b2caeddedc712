"""Test that values in preprocessor_config.json mean the same as in transformers."""

import json

import pytest
import torch

from minivlmrl.data import image_settings
from minivlmrl.data.image import ImageProcessor
from tests.record.record_vision import digest, image_cases, noise, recorded


def test_errors_in_bounds_name_the_recipe_or_the_folder():
    with pytest.raises(ValueError, match=r"^data: max_pixels is 10, but it must be at least min_pixels, which is 3136"):
        image_settings.read_image_processor({}, "folder.json", max_pixels=10)
    with pytest.raises(ValueError, match=r"^folder\.json: max_pixels is 3136, .* min_pixels, which is 4000"):
        image_settings.read_image_processor({"min_pixels": 4000, "max_pixels": 3136}, "folder.json")


def read(content, **bounds):
    return image_settings.read_image_processor(content, "preprocessor_config.json", **bounds)


HUB_CONFIG = {
    "min_pixels": 3136, "max_pixels": 12845056, "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2,
    "image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711],
    "image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen2_5_VLProcessor",
}  # fmt: skip


@pytest.mark.parametrize(("config", "bounds"), [
    ({}, (3136, 1003520)),  # the defaults of transformers' class differ from the files on the Hub
    ({"size": {"shortest_edge": 784, "longest_edge": 5000}}, (784, 5000)),
    ({"size": {"shortest_edge": 784, "longest_edge": 5000}, "max_pixels": 4000}, (784, 4000)),
    ({"size": None, "min_pixels": None, "max_pixels": 4000}, (3136, 4000)),
    ({"size": {"shortest_edge": 784, "longest_edge": None, "height": None}}, (784, 1003520)),
])  # fmt: skip
def test_pixel_bounds_of_a_folder(config, bounds):
    processor = read(config)
    assert (processor.min_pixels, processor.max_pixels) == bounds


@pytest.mark.parametrize("config", [{}, HUB_CONFIG | {"max_pixels": 4000}])
def test_settings_of_a_folder_mean_the_same_as_in_transformers(config, transformers):
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    image = noise("RGB", (1200, 900))
    expected = Qwen2VLImageProcessorPil.from_dict(dict(config))(images=[image], return_tensors="pt")
    assert torch.equal(read(config)(image)[0], expected["pixel_values"])


def test_the_hubs_settings_are_the_defaults_and_arguments_override_them():
    assert read(HUB_CONFIG) == ImageProcessor()
    assert read(HUB_CONFIG, min_pixels=784, max_pixels=1000) == ImageProcessor(min_pixels=784, max_pixels=1000)
    assert read({"image_processor_type": "Qwen2VLImageProcessorFast"}).resize is image_settings.RESIZE["torch"]


CUSTOM = {
    "patch_size": 7, "temporal_patch_size": 1, "merge_size": 3, "min_pixels": 441, "max_pixels": 9000,
    "image_mean": (0.5, 0.25, 0.125), "image_std": (0.5, 0.3, 1.0),
}  # fmt: skip


@pytest.mark.parametrize("resize", ["pil", "torch"])
def test_settings_come_back_as_they_were_written_and_transformers_reads_them(tmp_path, resize, transformers):
    processor, image = ImageProcessor(**CUSTOM, resize=image_settings.RESIZE[resize]), noise("RGB", (200, 120))
    written = json.dumps(image_settings.write_image_processor(processor, {}))
    assert read(json.loads(written)) == processor
    (tmp_path / "preprocessor_config.json").write_text(written)
    theirs = transformers.AutoImageProcessor.from_pretrained(tmp_path, backend="pil")
    expected = theirs(images=[image], return_tensors="pt")
    assert torch.equal(ImageProcessor(**CUSTOM)(image)[0], expected["pixel_values"])


@pytest.mark.parametrize("options", [
    {}, {"max_pixels": 3000}, {"min_pixels": 8000}, {"min_pixels": 2000, "max_pixels": 3000},
    {"resized_height": 60, "resized_width": 100}, {"resized_height": 600, "resized_width": 1000},
], ids=str)  # fmt: skip
def test_a_saved_folder_has_the_sizes_of_training(tmp_path, options, transformers):
    """A fixed size is saved as an area, so that an image of the same shape has this size in transformers."""
    processor, image = ImageProcessor(**CUSTOM), noise("RGB", (200, 120))
    (tmp_path / "preprocessor_config.json").write_text(
        json.dumps(image_settings.write_image_processor(processor, options))
    )
    theirs = transformers.AutoImageProcessor.from_pretrained(tmp_path, backend="pil")
    expected, grid = processor(image, **options)
    found = theirs(images=[image], return_tensors="pt")
    assert grid == tuple(found["image_grid_thw"][0].tolist()) and torch.equal(expected, found["pixel_values"])


VIDEO = {"video_processor_type": "Qwen2VLVideoProcessor", "size": {"shortest_edge": 100352, "longest_edge": 602112}}
CHOSEN = {"do_sample_frames": True, "fps": 2.0}


@pytest.mark.parametrize(("options", "written"), [
    ({"fps": 1, "max_frames": 4}, CHOSEN | {"fps": 1, "max_frames": 4}),
    ({"min_frames": 8}, CHOSEN | {"min_frames": 8}),
    ({"nframes": 6}, CHOSEN | {"fps": None, "num_frames": 6}),
    ({"max_pixels": 200704}, {"size": {"shortest_edge": 100352, "longest_edge": 200704}}),
    ({"min_pixels": 1, "max_pixels": 784}, {"size": {"shortest_edge": 1, "longest_edge": 784}}),
    ({"resized_height": 56, "resized_width": 84}, {"size": {"shortest_edge": 4704, "longest_edge": 4705}}),
    ({"total_pixels": 705600}, {"cap_pixels_per_frame": True, "max_video_tokens": 1000}),
], ids=str)  # fmt: skip
def test_a_saved_folder_has_the_frames_of_training(options, written):
    found = image_settings.write_video_processor(ImageProcessor(), options)
    assert {name: found[name] for name in VIDEO | written} == VIDEO | written
    assert found["patch_size"] == 14 and ("fps" in found) == ("fps" in written)
    expected = {name: options[name] for name in options.keys() & image_settings.SAMPLING}
    assert image_settings.read_sampling(found) == expected | ({"fps": 2.0} if found.get("fps") == 2.0 else {})


def test_without_options_for_videos_the_file_of_the_base_model_is_kept():
    assert image_settings.write_video_processor(ImageProcessor(), {}) == {}


@pytest.mark.parametrize(("field", "value"), [
    *[(name, False) for name in ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb")],
    *[(name, True) for name in ("do_center_crop", "do_pad")],
    ("do_resize", "no"), ("rescale_factor", 1.0), ("rescale_factor", "1/255"), ("resample", 2), ("resample", [3]),
    ("image_processor_type", "CLIPImageProcessor"), ("image_processor_type", ["a"]),
    ("patch_size", 10**9), ("merge_size", {}), ("temporal_patch_size", -2), ("image_mean", 0.5),
    ("image_std", [0.5, 0, 0.5]), ("image_std", [True, 1, 1]), ("image_std", [1, 1, 10**400]),
])  # fmt: skip
def test_unsupported_settings_are_reported(field, value):
    with pytest.raises(ValueError, match="one token" if (field, value) == ("patch_size", 10**9) else field):
        read({**HUB_CONFIG, field: value})


def test_patches_equal_transformers_torchvision_processor_bit_for_bit():
    cases = recorded("torchvision_0.28.0")["images"]
    assert len(cases) == 48
    for (image, settings), (grid, expected) in zip(image_cases(), cases, strict=True):
        pixel_values, image_grid_thw = ImageProcessor(**settings, resize=image_settings.RESIZE["torch"])(image)
        assert list(image_grid_thw) == grid and digest(pixel_values) == expected, (image, settings)
