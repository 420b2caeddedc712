"""Compare minimal.py with the package in float64: inputs, log-probabilities, losses, gradients, steps and samples."""

import inspect
import io
import os
import struct
import zlib
from argparse import Namespace
from types import SimpleNamespace

import PIL.Image
import pytest
import torch

import minimal
from minivlmrl.config.options import GRPOOptions, OptimizerOptions, TrainingOptions
from minivlmrl.data.image import ImageProcessor
from minivlmrl.data.media import PROGRAMS, fetch_image
from minivlmrl.data.messages import conversation
from minivlmrl.data.processor import Processor
from minivlmrl.data.rows import Completion
from minivlmrl.distributed.process_group import World
from minivlmrl.distributed.saving import save_model
from minivlmrl.errors import UserError
from minivlmrl.generation.generate import generate, make_token_sampler
from minivlmrl.losses import grpo, preference, sft
from minivlmrl.losses.advantages import group_advantages
from minivlmrl.model import checkpoint, config_json, logprobs, packing, rope
from minivlmrl.rewards.text import accuracy, find_answer, tag_format
from minivlmrl.run.optimizer import build_optimizer, finish_gradients, learning_rate
from tests.helpers import tiny
from tests.helpers.by_hand import tensor
from tests.helpers.draws import seeded
from tests.minimal import pairs
from tests.record.record_vision import noise

TOLERANCE = 1e-12  # for log-probabilities and losses
OF_GRADIENTS = 1e-10  # relative to the largest gradient of the parameter
# the names of tokens that structure a conversation stay text, unlike in transformers
STRUCTURE = "<|im_end|>\n<image><|image_pad|><|im_start|> <|vision_end|><|video_pad|><|endoftext|>"
PROMPTS = pairs.ROWS | {"structure in a text": (STRUCTURE, [(90, 30)])}


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def both(request, tmp_path_factory):
    """Return a model folder of the package, and the models that minimal.py and the package read from the folder."""
    folder = tmp_path_factory.mktemp("run") / "folder"
    model = tiny.model_of(config_json.from_dict(pairs.hub_config(request.param))).double()
    smallest, largest = pairs.PIXELS
    save_model(folder, model, Processor(pairs.TOKENIZER, ImageProcessor(min_pixels=smallest, max_pixels=largest)))
    package = checkpoint.load_model(folder)
    return SimpleNamespace(
        ours=pairs.in_float64(folder), package=package, processor=checkpoint.load_processor(folder), folder=folder
    )


def prompts(both, name: str):
    row = pairs.row_of(*PROMPTS[name])
    messages = conversation(row["problem"], {"image": len(row["images"])})
    return minimal.make_prompt(both.ours, row), both.processor(messages, row["images"])


IMAGES = {
    "small": noise("RGB", (5, 3)), "odd": noise("RGB", (113, 61)), "large": noise("RGB", (1201, 907)),
    "wide": noise("RGB", (900, 11)), "gray": noise("L", (60, 45)), "transparent": noise("RGBA", (97, 30)),
    "palette": noise("P", (50, 50)), "gray with alpha": noise("LA", (30, 77)), "black and white": noise("1", (64, 33)),
    "CMYK": noise("CMYK", (31, 32)),
}  # fmt: skip


@pytest.mark.parametrize("name", IMAGES)
@pytest.mark.parametrize(("patch", "merge"), [(14, 2), (7, 2), (8, 3)])
def test_patches_are_equal_bit_for_bit(name, patch, merge):
    for bounds in ((784, 12845056), (3136, 200704), (784, 1000)):  # the last leaves some images one token
        package = ImageProcessor(patch_size=patch, merge_size=merge, min_pixels=bounds[0], max_pixels=bounds[1])
        expected, grid = package(IMAGES[name])
        patches, h, w = minimal.patchify(minimal.load_image(IMAGES[name]), patch, merge, *bounds)
        assert (1, h, w) == grid and torch.equal(patches, expected)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA"])
def test_files_are_read_equally(tmp_path, mode, orientation):
    image = noise(mode, (7, 4))
    image.getexif()[0x0112] = orientation
    image.save(tmp_path / "image.png", exif=image.getexif())
    expected = fetch_image(tmp_path / "image.png")
    loaded = minimal.load_image(tmp_path / "image.png")
    assert loaded.mode == "RGB" and loaded.size == ((7, 4) if orientation < 5 else (4, 7))
    assert loaded.tobytes() == expected.tobytes()


def encoded(image: PIL.Image.Image, kind: str, **options) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def png(width: int, height: int) -> bytes:
    """Return a PNG file that declares a size, and has nearly no pixels."""
    head = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    crc = struct.pack(">I", zlib.crc32(head))
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + head + crc + b"\0\0\0\4IDATxxxx"


ROTATED = PIL.Image.Exif()
ROTATED[0x0112] = 6
HOSTILE = {
    "Ghostscript": encoded(IMAGES["small"], "EPS"),
    "13,378 x 13,377 pixels": png(13_378, 13_377),
    "no pixels": png(100, 0),
    "201 times as long as wide": png(201, 1),
    "201 times as wide as long": png(1, 201),
    "float": encoded(PIL.Image.new("F", (9, 9)), "TIFF"),
    "32 bits": encoded(PIL.Image.new("I", (9, 9)), "TIFF"),
    "half a file": encoded(IMAGES["odd"], "TGA")[:200],
    "no image": b"no image",
    "nothing": b"",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_image_files_are_refused_by_both(tmp_path, name, monkeypatch):
    monkeypatch.setattr("PIL.EpsImagePlugin.Ghostscript", lambda *_, **__: pytest.fail("Ghostscript"))
    (tmp_path / "image.png").write_bytes(HOSTILE[name])
    with pytest.raises(UserError, match=r"image\.png"):
        fetch_image(tmp_path / "image.png")
    with pytest.raises(minimal.InputError, match=r"image\.png cannot be read as an image: "):
        minimal.load_image(tmp_path / "image.png")
    assert minimal.PROGRAMS == PROGRAMS


def test_a_pipe_is_refused_by_both(tmp_path):
    os.mkfifo(tmp_path / "image.png")
    with pytest.raises(UserError, match="a pipe"):
        fetch_image(tmp_path / "image.png")
    with pytest.raises(minimal.InputError, match=r"image\.png cannot be read as an image: no such file"):
        minimal.load_image(tmp_path / "image.png")


@pytest.mark.parametrize("mode", ["I", "F", "I;16", "I;16B"])
def test_images_with_more_than_8_bits_are_refused_by_minimal(mode):
    """The package converts 16 bits; minimal.py would see white instead, and black for floats from 0 to 1."""
    with pytest.raises(minimal.InputError, match="save the image with 8 bits per color"):
        minimal.load_image(PIL.Image.new(mode, (9, 9)))


@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_a_rotated_tiff_is_read_as_by_the_package(tmp_path, mode):
    (tmp_path / "image.tiff").write_bytes(encoded(noise(mode, (7, 4)), "TIFF", exif=ROTATED))
    ours, package = minimal.load_image(tmp_path / "image.tiff"), fetch_image(tmp_path / "image.tiff")
    assert ours.size == (4, 7) and ours.tobytes() == package.tobytes()


@pytest.mark.parametrize("name", PROMPTS)
def test_prompts_are_equal(both, name):
    ours, package = prompts(both, name)
    assert torch.equal(ours.ids, package.input_ids)
    patches = [torch.zeros(0, 1176), *(patches for patches, _, _ in ours.images)]
    assert torch.equal(torch.cat(patches), package.pixel_values)
    grids = [(1, h, w) for _, h, w in ours.images]
    assert grids == list(map(tuple, package.image_grid_thw.tolist()))
    positions = rope.get_rope_index(package.input_ids, package.image_grid_thw, both.package.config)
    assert torch.equal(ours.positions, positions)
    assert ours.ids.tolist().count(pairs.IMAGE) == sum(h * w // 4 for _, h, w in grids)


def sampled() -> list[torch.Tensor]:
    """Return completions: one is a single token, and all others contain a sampled <|image_pad|>."""
    answers = pairs.completions()
    answers[1][0] = answers[2][3] = answers[3][-1] = pairs.IMAGE
    return answers


def logps_of(both, name: str, answers: list[torch.Tensor]):
    """Return log-probabilities (G, T) of a row's completions by minimal.py and by the package, and the mask."""
    ours, package = prompts(both, name)
    ids, mask = pairs.padded(answers)
    batch = packing.pack([package], [[Completion(answer) for answer in answers]], both.package.config)
    logps, _ = logprobs.per_token_logps(both.package, batch)
    assert torch.equal(batch.completion_mask, mask.float())
    return minimal.log_probabilities(both.ours, ours, ids), batch.pad(logps), mask


def check_gradients(both, ours, package):
    assert (ours - package).abs() <= TOLERANCE * package.abs().clamp(min=1)
    for model, loss in ((both.ours, ours), (both.package, package)):
        model.zero_grad()
        loss.backward()
    expected = {parameter: p.grad for parameter, p in both.package.named_parameters()}
    for parameter, p in both.ours.named_parameters():
        assert pairs.largest_difference(p.grad, expected.pop(parameter)) <= OF_GRADIENTS, parameter
    assert not expected


@pytest.mark.parametrize("name", PROMPTS)
def test_log_probabilities_are_equal(both, name):
    with torch.no_grad():
        ours, package, mask = logps_of(both, name, sampled())
    assert pairs.largest_difference(ours[mask], package[mask]) <= TOLERANCE


def noisy(logps, scale: float, seed: int):
    generator = torch.Generator().manual_seed(seed)
    return logps.detach() + scale * torch.randn(logps.shape, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("beta", [0.0, 0.3], ids=["no KL", "KL"])
@pytest.mark.parametrize("far", [0.0, 0.5], ids=["on-policy", "clipped"])
def test_grpo_is_equal(both, far, beta):
    ours, package, mask = logps_of(both, "images come first", sampled())
    old, ref = noisy(package, far, 1), noisy(package, 0.4, 2)
    advantages = tensor(1.5, -0.5, 1.0, -2.0)
    given = {"beta": beta, "epsilon_high": 0.28, "old_per_token_logps": old, "ref_per_token_logps": ref}
    loss, metrics = grpo.grpo_loss(package, advantages, mask, loss_type="grpo", **given)
    assert [metrics[f"clip_ratio/{side}_mean"] > 0.05 for side in ("low", "high")] == [far > 0] * 2
    check_gradients(both, minimal.grpo_loss(ours, advantages, mask, **given), loss)


@pytest.mark.parametrize("padding", [-1e4, 1e4])
def test_huge_log_ratios_at_padding_change_nothing(padding):
    mask = torch.tensor([[True, True, False]])
    found = []
    for last in (0.0, padding):
        logps = torch.tensor([[-1.0, -0.5, last]], requires_grad=True)
        old, ref = torch.tensor([[[-1.2, -0.1, 0.0]], [[-0.9, -0.7, -last]]])
        given = {"beta": 0.3, "old_per_token_logps": old, "ref_per_token_logps": ref}
        loss = minimal.grpo_loss(logps, torch.ones(1), mask, **given)
        found.append([loss.item(), *torch.autograd.grad(loss, logps)[0][0].tolist()])
    assert found[0] == found[1] and found[1][-1] == 0


def test_defaults_are_those_of_the_package_but_for_the_average():
    """The package averages over all tokens of a step, as TRL does; docstrings of both say so."""
    ours, package = (
        {name: parameter.default for name, parameter in inspect.signature(loss).parameters.items()}
        for loss in (minimal.grpo_loss, grpo.grpo_loss)
    )
    package["epsilon_high"] = 0.2  # None
    assert ours == {name: package[name] for name in ours} and package["loss_type"] == "dapo"
    options = GRPOOptions()
    assert {name: getattr(options, name) for name in ("epsilon_low", "epsilon_high", "beta")}.items() <= ours.items()
    assert options.scale_rewards == "group" and options.use_bias_correction_kl and options.loss_type == "dapo"


@pytest.mark.parametrize("num_tokens", [None, 40])
def test_sft_is_equal(both, num_tokens):
    ours, package, mask = logps_of(both, "an image", sampled())
    expected = sft.sft_loss(package, mask.double()) * mask.sum() / (num_tokens or mask.sum())
    check_gradients(both, minimal.sft_loss(ours, mask, num_tokens=num_tokens), expected)


@pytest.mark.parametrize("text", [
    "<think>I see red</think><answer>red square</answer>", "<think>a</think>\n <answer> Red Square\n</answer>\n",
    "<think>a</think><answer>red circle</answer>", "<think></think><answer>red square</answer>",
    "<think>a</think><answer></answer>", "<answer>red square</answer>", "red square", "",
    "<think>a</think>no<answer>red square</answer>", "<think>a</think><answer>red square</answer> or so",
    "<think>a</think><answer>blue square</answer><answer>red square</answer>",
    "<think>a</think><answer>blue square</answer><think>b</think><answer>red square</answer>",
])  # fmt: skip
def test_rewards_are_equal(text):
    """The reward is the weighted sum of recipes/shapes.yaml if the form is right, and otherwise 0."""
    [form] = tag_format([text])
    [right] = accuracy([find_answer(text)], ["red square"])
    assert minimal.reward(text, "red square") == (0.5 + right if form else 0.0)


TEXTS = ["<think>a</think><answer>red</answer>", "<think>b</think><answer>no</answer>", "red", "<think>", "a long one"]
ANSWERS = {"problem": "Which?", "solution": "red", "completion": TEXTS[0], "chosen": TEXTS[0], "rejected": TEXTS[1]}


def package_loss(both, stage, rows, reference, beta):
    config, encode = both.package.config, both.processor.tokenizer.encode
    packed = [both.processor(conversation(row["problem"], {"image": 1}), row["images"]) for row in rows]
    texts = {minimal.sft: TEXTS[:1], minimal.dpo: TEXTS[:2], minimal.grpo: TEXTS}[stage]
    group = [Completion(torch.tensor([*encode(text), pairs.IDS["<|im_end|>"]])) for text in texts]
    batch = packing.pack(packed, [group] * len(packed), config)
    (logps, _), mask = logprobs.per_token_logps(both.package, batch), batch.completion_mask
    with torch.no_grad():
        ref = batch.pad(logprobs.per_token_logps(reference, batch)[0])
    if stage is minimal.sft:
        return sft.sft_loss(batch.pad(logps), mask)
    if stage is minimal.dpo:
        shape = (len(rows), 2, -1)
        given = {"beta": beta, "ref_per_token_logps": ref.view(shape)}
        return preference.dpo_loss(batch.pad(logps).view(shape), mask.view(shape), **given)[0]
    forms, right = tag_format(TEXTS), accuracy([find_answer(text) for text in TEXTS], ["red"] * len(TEXTS))
    rewards = tensor(*(0.5 * form + (form and truth) for form, truth in zip(forms, right, strict=True)))
    advantages = group_advantages(rewards.repeat(len(rows)), len(TEXTS))
    given = {"loss_type": "grpo", "beta": beta, "ref_per_token_logps": ref}
    return grpo.grpo_loss(batch.pad(logps), advantages, mask, **given)[0]


@pytest.mark.parametrize(
    ("stage", "beta"), [(minimal.sft, 0.0), (minimal.dpo, 0.3), (minimal.grpo, 0.0), (minimal.grpo, 0.5)]
)
def test_steps_end_with_equal_weights(both, stage, beta, monkeypatch, capsys):
    rows = [
        ANSWERS | {"images": pairs.row_of(*pairs.ROWS[name])["images"][:1]}
        for name in ("an image", "images come first")
    ]
    ours, package, reference = (
        pairs.in_float64(both.folder),
        *(checkpoint.load_model(both.folder, torch.float64) for _ in range(2)),
    )
    advantages = minimal.group_advantages  # of float32 rewards, which round differently
    monkeypatch.setattr(minimal, "group_advantages", lambda rewards, n: advantages(rewards.double(), n))
    monkeypatch.setattr(minimal, "sample", lambda model, *_: minimal.tokenize_answers(model, TEXTS))
    options = Namespace(
        max_steps=4, prompts_per_step=2, learning_rate=1e-3, warmup_steps=2, beta=beta, num_generations=5,
        max_new_tokens=9, reward=minimal.reward,
    )  # fmt: skip
    minimal.train(ours, rows, stage, options)
    config = TrainingOptions(max_steps=4, learning_rate=1e-3, warmup_steps=2, min_lr_ratio=0.1, adam_beta2=0.99)
    optimizer = build_optimizer(package, config, OptimizerOptions())
    pair = SimpleNamespace(package=package, processor=both.processor)
    norms = []
    for step in range(4):
        loss = package_loss(pair, stage, rows, reference, beta)
        loss.backward()
        norms.append(finish_gradients(package, World(), 1.0))
        optimizer.param_groups[0]["lr"] = learning_rate(step, config)
        optimizer.step()
        optimizer.zero_grad()
    expected = package.state_dict()
    for name, weight in ours.state_dict().items():
        assert pairs.largest_difference(weight, expected[name]) <= OF_GRADIENTS, name
    assert norms[0] > 1  # the first step clipped its gradients
    number = 0.4 if stage is minimal.grpo else loss  # the mean reward
    assert f"{stage.__name__} step 4 of 4: {number:.3f}\n" in capsys.readouterr().out


@pytest.mark.parametrize("name", PROMPTS)
@pytest.mark.parametrize("G", [2, 3])
def test_the_same_seed_samples_the_tokens_of_the_package(both, name, G, monkeypatch):
    """minimal.py continues ended completions until all have ended, so the package samples without stop tokens."""
    prompt, package = prompts(both, name)
    [group] = generate(both.package, [package], G, 12, make_token_sampler(1.0, (), seeded(3)))
    expected = torch.stack([completion.ids for completion in group])
    ends = {"<|im_end|>": expected[0, 4].item(), "<|endoftext|>": expected[1, 2].item()}
    monkeypatch.setattr(both.ours, "tokenizer", SimpleNamespace(token_to_id=ends.get))
    torch.manual_seed(3)
    ids, mask = minimal.sample(both.ours, prompt, G, 12)
    assert torch.equal(ids, expected[:, : ids.shape[1]])
    lengths = [next((t for t, x in enumerate(row, 1) if x in ends.values()), 12) for row in expected.tolist()]
    assert mask.tolist() == [[t < length for t in range(ids.shape[1])] for length in lengths]
    assert ids.shape[1] == max(lengths) and (G > 2 or max(lengths) <= 5)


@pytest.mark.parametrize("end", ["<|im_end|>", "<|endoftext|>", ""])
@pytest.mark.parametrize("text", ["red", "", " caf\u00e9 \n", "<|im_start|>red", "<|image_pad|>"])
def test_decoded_texts_are_equal(both, text, end):
    encode = minimal.Tokenizer.from_file(str(both.folder / "tokenizer.json")).encode  # reads names as control tokens
    ids = torch.tensor(encode(text + end, add_special_tokens=False).ids).long()
    [decoded] = minimal.decode(both.ours, ids[None], torch.ones(1, len(ids), dtype=torch.bool))
    assert decoded == both.processor.decode(ids) == text
