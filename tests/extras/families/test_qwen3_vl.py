"""Compare Qwen3-VL with transformers 5.23: logits, templates, images and videos."""

import copy
import json
import random
from dataclasses import replace
from itertools import islice

import numpy as np
import PIL.Image
import pytest
import torch

from minivlmrl.data.chat_template import DEFAULT_QWEN3, ChatTemplate
from minivlmrl.data.file_dataset import FileDataset
from minivlmrl.data.image import ImageProcessor
from minivlmrl.data.image_settings import RESIZE, read_image_processor
from minivlmrl.data.processor import Processor
from minivlmrl.data.rows import Prompt
from minivlmrl.data.video import Video, frame_size
from minivlmrl.distributed.saving import save_model
from minivlmrl.extras.families import qwen3_vl
from minivlmrl.extras.video_files import sample_indices
from minivlmrl.model import config_json
from minivlmrl.model.build import random_model
from minivlmrl.model.checkpoint import load_model, load_processor
from minivlmrl.model.config import ModelConfig
from minivlmrl.tasks import shapes
from tests.helpers import tiny
from tests.helpers.oracle import CLASSES, in_float64, our_logits, their_inputs, transformers
from tests.helpers.runs import write_lines
from tests.helpers.stages import snapshot
from tests.record.record_vision import digest, film_cases, film_size_cases, noise, recorded, sampling_cases

FAMILY = qwen3_vl.Qwen3VL()


def random_config(model_type: str, rng: random.Random, **more) -> ModelConfig:
    """Return a config with random layers, heads, sections, patch and merge sizes; `more` sets other text values."""
    layers, depth = rng.randint(2, 5), rng.randint(1, 5)
    heads, groups = rng.choice([(4, 2), (3, 1), (2, 2)])
    half = rng.choice([4, 8, 12])  # rotated dimension pairs per head
    height, width = rng.randint(0, half // 3), rng.randint(0, half // 3)
    rope = {"mrope_section": [half - height - width, height, width], "rope_theta": 1e4}
    text = {
        "hidden_size": 40, "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": groups,
        "vocab_size": 300, "intermediate_size": 56, "rms_norm_eps": 1e-6,
    }  # fmt: skip
    vision = {
        "depth": depth, "hidden_size": 8 * rng.choice([1, 2, 4]), "intermediate_size": 24, "num_heads": 2,
        "patch_size": rng.choice([2, 4, 16]), "spatial_merge_size": rng.choice([1, 2, 3]), "out_hidden_size": 40,
        "temporal_patch_size": rng.choice([1, 2]), "num_position_embeddings": rng.randint(1, 6) ** 2,
    }  # fmt: skip
    if model_type.startswith("qwen3_vl"):
        text |= {"head_dim": 2 * half, "rope_scaling": rope}
        vision["deepstack_visual_indexes"] = rng.sample(range(depth), rng.randint(0, min(depth, layers - 1)))
    else:
        share, keys = rng.choice([0.25, 0.5, 1.0]), rng.choice([1, 2, 3])
        rope |= {"rope_type": "default", "partial_rotary_factor": share, "mrope_interleaved": True}
        kinds = [rng.choice(["linear_attention", "full_attention"]) for _ in range(layers)]
        kinds[rng.randrange(layers)] = "full_attention"
        text |= rng.choice([{"layer_types": kinds}, {"full_attention_interval": rng.randint(2, layers)}])
        text |= {
            "head_dim": int(2 * half / share), "rope_parameters": rope, "linear_num_key_heads": keys,
            "linear_num_value_heads": keys * rng.choice([1, 2]), "linear_key_head_dim": rng.choice([4, 8]),
            "linear_value_head_dim": rng.choice([4, 8, 12]), "linear_conv_kernel_dim": rng.choice([2, 3, 4, 7]),
        }  # fmt: skip
    ids = {"image_token_id": tiny.IMAGE, "video_token_id": tiny.VIDEO, "vision_start_token_id": tiny.VISION_START}
    ids |= {"vision_end_token_id": tiny.VISION_END, "tie_word_embeddings": rng.random() < 0.5}
    text |= more
    return config_json.from_dict({"model_type": model_type, **ids, "text_config": text, "vision_config": vision})


def random_prompt(model_config: ModelConfig, generator: torch.Generator, grids: list[tuple[int, int]]):
    vision, merge = model_config.vision_config, model_config.vision_config.spatial_merge_size
    # tiny.prompt assumes 2 x 2 patches per token
    prompt = tiny.prompt(generator, [(1, 2 * h, 2 * w) for h, w in grids])
    grids = [(1, h * merge, w * merge) for h, w in grids]
    prompt.image_grid_thw = torch.tensor(grids, dtype=torch.long).view(-1, 3)
    patches = int(prompt.image_grid_thw.prod(1).sum()) if grids else 0
    prompt.pixel_values = torch.randn(patches, vision.patch_dim, generator=generator, dtype=torch.float64)
    return prompt


@pytest.mark.parametrize("seeds", [range(10), pytest.param(range(10, 40), marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize(("model_type", "close"), [("qwen3_vl", 1e-13), ("qwen3_5", 1e-12)])
def test_logits_of_40_random_configs_equal_transformers(model_type, close, seeds, monkeypatch):
    in_float64(monkeypatch, model_type)
    for seed in seeds:
        config, generator = random_config(model_type, random.Random(seed)), torch.Generator().manual_seed(seed)
        theirs = transformers.AutoConfig.for_model(**config_json.to_dict(config))
        theirs = tiny.telling_weights(CLASSES[model_type]._from_config(theirs).double().eval())
        theirs.tie_weights()
        ours = tiny.model_of(config).double()
        found = {qwen3_vl_name(name): p for name, p in theirs.state_dict().items()}
        ours.load_state_dict(found, strict=not config.tie_word_embeddings)
        rows = [random_prompt(config, generator, grids) for grids in ([], [(2, 3)], [(1, 4), (5, 2)], [(9, 9)])]
        with torch.no_grad():
            for row, logits in zip(rows, our_logits(ours, rows), strict=True):
                expected = theirs(**their_inputs(row)).logits[0]
                assert (logits - expected).abs().max() <= close * expected.abs().max(), seed


def qwen3_vl_name(name: str) -> str:
    return name.replace("model.visual.", "visual.").replace("model.language_model.", "model.")


def read_images(settings, where, *bounds):
    return read_image_processor(FAMILY.images | settings, where, *bounds)


PUBLISHED = {
    "size": {"longest_edge": 16777216, "shortest_edge": 65536}, "patch_size": 16, "temporal_patch_size": 2,
    "merge_size": 2, "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5],
    "processor_class": "Qwen3VLProcessor", "image_processor_type": "Qwen2VLImageProcessorFast",
}  # fmt: skip


@pytest.mark.parametrize("size", [(64, 64), (31, 500), (1000, 37), (333, 777)])
@pytest.mark.parametrize("bounds", [{}, {"min_pixels": 9 * 1024, "max_pixels": 50 * 1024}], ids=["wide", "narrow"])
def test_pixels_equal_transformers(size, bounds):
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    settings = copy.deepcopy(PUBLISHED) | {"image_processor_type": "Qwen2VLImageProcessor"}  # theirs changes its sizes
    image = noise("RGB", size)
    theirs = Qwen2VLImageProcessorPil.from_dict({**settings, **bounds})(images=[image], return_tensors="pt")
    pixels, grid = read_images(settings, "folder", *bounds.values())(image)
    assert torch.equal(pixels, theirs["pixel_values"]) and list(grid) == theirs["image_grid_thw"][0].tolist()
    assert read_images(PUBLISHED, "folder").resize is RESIZE["torch"]
    assert read_images({}, "folder", *bounds.values()) == read_images(settings, "folder", *bounds.values())


@pytest.mark.parametrize("model", ["qwen3_vl", pytest.param("qwen3_5", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["sft", "reward_model", "grpo", "ppo"])
def test_every_stage_trains_every_part(stage, name, model):
    run = stage(name, model=model)
    before = snapshot(run.trainer.trained)
    run.go(2)
    still = {key for key, p in run.trainer.trained.named_parameters() if torch.equal(p, before[key])}
    assert {key.removeprefix("backbone.") for key in still} <= {"lm_head.weight"} and len(before) > 50
    assert not still or name == "reward_model"  # a reward model predicts no tokens


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [tiny.RUN_QWEN3, tiny.RUN_QWEN35], ids=["Qwen3-VL", "Qwen3.5"])
def test_a_whole_run_and_the_commands_on_its_folder(whole_run, sizes):
    folder = whole_run(sizes, CLASSES[sizes["model_type"]])
    template = json.loads((folder / "tokenizer_config.json").read_text()).get("chat_template")
    template = template or (folder / "chat_template.jinja").read_text()
    assert template == DEFAULT_QWEN3


def video_processor(**videos) -> Processor:
    """Return a processor with default settings, which resizes images as torchvision does."""
    images = read_images({}, "")
    images.resize, images.videos = RESIZE["torch"], qwen3_vl.Videos(**videos)
    return Processor(shapes.tokenizer(), images, ChatTemplate(FAMILY.template, "t"))


def test_sampled_frames_of_a_file_match_transformers():
    cases = recorded("qwen3_vl_5.23.0")["sampling"]
    for (total, video_fps, options), expected in zip(islice(sampling_cases(), 500), cases, strict=True):
        if expected[0] > 1:  # a single frame is refused later
            options = {"fps": options["fps"]} if "fps" in options else {}
            indices, _ = sample_indices(total, video_fps, frame_factor=1, **options)
            assert [len(indices), digest(indices)] == expected, (total, video_fps, options)


def test_sizes_of_frames_match_transformers():
    cases, images = recorded("qwen3_vl_5.23.0")["sizes"], video_processor().image_processor
    for (nframes, height, width, least, most), expected in zip(film_size_cases(), cases, strict=True):
        images.videos = qwen3_vl.Videos(shortest_edge=least, longest_edge=most)
        assert list(frame_size(images, nframes, height, width)) == expected, (nframes, height, width, least, most)


def test_a_frame_may_have_its_own_size_bounds():
    images = video_processor().image_processor
    assert frame_size(images, 8, 640, 640) == (288, 288)  # 8 frames with 311 x 311 pixels fill the budget
    assert frame_size(images, 8, 640, 640, max_pixels=64 * 64) == (64, 64)
    assert frame_size(images, 8, 32, 32, min_pixels=96 * 96, total_pixels=10**6) == (96, 96)
    assert frame_size(images, 8, 640, 640, total_pixels=8 * 640 * 640) == (640, 640)
    with pytest.raises(ValueError, match=r"8 frames cannot be resized .* Use at least 2 frames"):
        frame_size(images, 8, 64, 64, min_pixels=10**6)


@pytest.fixture(scope="module")
def their_processor(tmp_path_factory, oracle):
    """Return a Qwen3VLProcessor with our tokenizer, whose video processor returns given results."""
    from transformers.models.qwen3_vl import Qwen3VLProcessor

    class Told:
        merge_size, temporal_patch_size, model_input_names = 2, 2, []

        def __call__(self, videos, **_):
            return {"video_grid_thw": self.grids, "video_metadata": self.metadata}

    folder, tokenizer = tmp_path_factory.mktemp("tokenizer"), shapes.tokenizer()
    images = transformers.models.qwen2_vl.image_processing_pil_qwen2_vl.Qwen2VLImageProcessorPil(
        **{name: PUBLISHED[name] for name in ("patch_size", "size", "image_mean", "image_std")}
    )
    template = FAMILY.template
    return oracle.their_processor(Qwen3VLProcessor, folder, tokenizer, template, images, Told())


def their_ids(processor, messages, images, *videos):
    """Return the ids of transformers for videos, each given as (grid, indices of sampled frames, frames per second)."""
    from transformers.video_utils import VideoMetadata

    told = processor.video_processor
    told.grids = torch.tensor([grid for grid, _, _ in videos])
    told.metadata = [VideoMetadata(total_num_frames=0, fps=fps, frames_indices=frames) for _, frames, fps in videos]
    text = processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    blank = [np.zeros((1, 4, 4, 3), np.uint8) for _ in videos]
    return processor(text=[text], images=images or None, videos=blank, return_tensors="pt")["input_ids"][0]


@pytest.mark.parametrize("number", range(8))
def test_prompts_with_a_video_file_match_transformers(tmp_path, their_processor, number):
    frames, rate, size = list(film_cases())[number]
    indices, grid, expected = recorded("qwen3_vl_5.23.0")["films"][number]
    tiny.write_video(tmp_path / "film.avi", frames, rate)
    write_lines(tmp_path / "rows.jsonl", [{"video": "film.avi", "problem": "What moves, and when?"}])
    [row] = FileDataset(tmp_path / "rows.jsonl")
    prompt = row.prompt(video_processor(**size))
    assert prompt.image_grid_thw.tolist() == [[1, *grid[1:]]] * grid[0]
    assert digest(prompt.pixel_values) == expected
    assert torch.equal(prompt.input_ids, their_ids(their_processor, row.messages, [], (grid, indices, rate)))


def test_a_list_of_frames_beside_an_image_and_a_second_video(their_processor):
    films = [PIL.Image.new("RGB", (96, 64), "gray")] * 5, [PIL.Image.new("RGB", (64, 32))] * 4
    parts = [{"type": "text", "text": "a"}, {"type": "video"}, {"type": "image"}, {"type": "video"}]
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": "0.1 seconds"}]}]
    picture = PIL.Image.new("RGB", (256, 320))
    videos = [Video(film, fps) for film, fps in zip(films, (4.0, 2.0), strict=True)]
    prompt = video_processor(shortest_edge=1024)(messages, [picture], videos)
    assert prompt.image_grid_thw.tolist() == [[1, 4, 6]] * 3 + [[1, 20, 16]] + [[1, 2, 4]] * 2
    assert prompt.second_per_grid_ts.tolist() == [1, 1, 1, 0, 1, 1]
    shown = ((3, 4, 6), list(range(5)), 4.0), ((2, 2, 4), list(range(4)), 2.0)
    ids = their_ids(their_processor, messages, [picture], *shown)
    assert torch.equal(prompt.input_ids, ids)
    for time in ("<0.1 seconds>", "<0.6 seconds>", "<1.0 seconds>"):
        assert time in shapes.tokenizer().decode(ids.tolist())


def film_prompt(generator: torch.Generator, image, *films) -> tuple[Prompt, dict]:
    grids, ids = [image], [torch.randint(3, 280, (4,), generator=generator)]
    parts = [[tiny.VISION_START, *[tiny.IMAGE] * (image[1] * image[2] // 4), tiny.VISION_END]]
    for t, h, w in films:
        step = [tiny.VISION_START, *[tiny.VIDEO] * (h * w // 4), tiny.VISION_END]
        times = torch.randint(3, 280, (t, 3), generator=generator).tolist()
        parts.append([tiny.VISION_START, *[token for time in times for token in time + step], tiny.VISION_END])
        grids += [(1, h, w)] * t
    ids += [torch.tensor(part) for part in parts] + [torch.randint(3, 280, (5,), generator=generator)]
    ids, grids = torch.cat(ids), torch.tensor(grids)
    pixels = torch.randn(int(grids.prod(1).sum()), 1176, generator=generator, dtype=torch.float64)
    patches = int(grids[0].prod())
    theirs = {"input_ids": ids[None], "mm_token_type_ids": (ids == tiny.IMAGE).long()[None]}
    theirs["mm_token_type_ids"] += 2 * (ids == tiny.VIDEO)
    theirs |= {"pixel_values": pixels[:patches], "image_grid_thw": grids[:1]}
    theirs |= {"pixel_values_videos": pixels[patches:], "video_grid_thw": torch.tensor(films)}
    return Prompt(ids, pixels, grids, torch.tensor([0.0, *[1.0] * (len(grids) - 1)])), theirs


@pytest.mark.parametrize(("model_type", "close"), [("qwen3_vl", 1e-13), ("qwen3_5", 1e-12)])
def test_logits_of_videos_equal_transformers(tmp_path, monkeypatch, model_type, close):
    in_float64(monkeypatch, model_type)
    save_model(tmp_path, tiny.model(model_type=model_type), tiny.processor())
    ours = load_model(tmp_path, torch.float64)
    theirs = CLASSES[model_type].from_pretrained(tmp_path, dtype=torch.float64).eval()
    generator = torch.Generator().manual_seed(2)
    pairs = [film_prompt(generator, (1, 4, 6), (3, 4, 6)), film_prompt(generator, (1, 2, 2), (1, 6, 4), (4, 2, 8))]
    with torch.no_grad():
        expected = [theirs(**inputs).logits[0] for _, inputs in pairs]
        for logits, other in zip(our_logits(ours, [row for row, _ in pairs]), expected, strict=True):
            assert (logits - other).abs().max() <= close * other.abs().max()


HUB = {"size": {"longest_edge": 25165824, "shortest_edge": 4096}, "patch_size": 16, "image_mean": [0.5] * 3, "fps": 2.0}
FILES = {
    "of the hub": {"video_preprocessor_config": HUB},
    "of transformers 5": {"processor_config": {"video_processor": HUB}, "video_preprocessor_config": {"size": None}},
}


@pytest.mark.parametrize("files", FILES.values(), ids=FILES)
def test_video_settings_of_a_folder_are_read_and_saved(tmp_path, files):
    config = {**config_json.to_dict(tiny.config(model_type="qwen3_vl")), "vocab_size": len(shapes.tokenizer())}
    config["vision_config"]["patch_size"] = 16
    config["text_config"]["vocab_size"] = len(shapes.tokenizer())
    (tmp_path / "model.json").write_text(json.dumps(config))
    folder = tmp_path / "model"
    save_model(folder, *random_model(tmp_path / "model.json", shapes.tokenizer(), seed=0))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    assert qwen3_vl.Videos() != load_processor(folder).image_processor.videos
    assert load_processor(folder).image_processor.videos == qwen3_vl.Videos(4096, 25165824, {"fps": 2.0})
    save_model(tmp_path / "again", load_model(folder), load_processor(folder))
    again = json.loads((tmp_path / "again" / "video_preprocessor_config.json").read_text())
    assert again["size"] == HUB["size"] and again["video_processor_type"] == "Qwen3VLVideoProcessor"


@pytest.mark.parametrize(("options", "size"), [
    ({"fps": 1, "max_frames": 4}, (131072, 786432)),
    ({"fps": 1, "max_frames": 4, "max_pixels": 40000}, (131072, 160000)),
    ({"nframes": 8, "min_pixels": 50000}, (400000, 786432)),
    ({"total_pixels": 100000}, (100000, 100000)),
    ({"resized_height": 64, "resized_width": 96, "nframes": 4}, (24576, 24580)),
], ids=str)  # fmt: skip
def test_options_for_videos_are_saved_and_read(options, size):
    images = ImageProcessor(patch_size=16, videos=qwen3_vl.Videos())
    written = FAMILY.write_videos(images, options)
    assert (written["size"]["shortest_edge"], written["size"]["longest_edge"]) == size
    videos = FAMILY.read_videos(written, "", images)
    assert videos.sampling == {name: options[name] for name in options.keys() & {"fps", "nframes", "max_frames"}}
    assert FAMILY.write_videos(replace(images, videos=videos), {}) == written


@pytest.mark.parametrize(("message", "needed"), [
    ({"fps": 0}, "options of the video: fps is 0.0, but it must be in"),
    ({"do_sample_frames": False}, "do_sample_frames is False, but it must be True for videos of this model"),
    ({"size": {"longest_edge": 0}}, "size.longest_edge is 0, but it must be >= 1"),
])  # fmt: skip
def test_unsupported_video_settings_are_refused(message, needed):
    with pytest.raises(ValueError) as error:
        FAMILY.read_videos(message, "FOLDER/file.json", read_images({}, ""))
    assert str(error.value).startswith(f"FOLDER/file.json: {needed}")
