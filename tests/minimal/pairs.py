"""Rows with images of odd sizes, tiny folders, completions and the command line, for tests of minimal.py."""

import json
import signal
import sys

import pytest
import torch

import minimal
from minivlmrl.tasks import shapes
from tests.helpers import tiny
from tests.helpers.hub_configs import tiny_config
from tests.record.record_vision import noise

TOKENIZER = shapes.tokenizer()
IDS = TOKENIZER.special_tokens
IMAGE = IDS["<|image_pad|>"]
PIXELS = (28 * 28, 28 * 28 * 90)  # smallest and largest area of an image
# question and image sizes (width, height); the windows of the vision tower have 112 x 112 pixels
ROWS = {
    "an image": ("What is it?", [(61, 97)]),
    "images come first": ("Which?", [(300, 170), (29, 143)]),
    "text around images": ("Is <image> left\nof <image>?", [(56, 84), (113, 112)]),
    "no text around images": ("<image><image> and <image>", [(40, 40), (1000, 31), (225, 57)]),
    "no image": ("2 + 2?\n\n", []),
    "control tokens in a text": ("Where is <|object_ref_start|>a cat<|object_ref_end|>? <|box_start|>", [(90, 30)]),
}  # fmt: skip


def row_of(problem: str, sizes: list[tuple[int, int]]) -> dict:
    return {"problem": problem, "images": [noise("RGB", size, seed) for seed, size in enumerate(sizes)]}


def hub_config(tied: bool) -> dict:
    """Return a config.json as on the Hub, where no value is left out."""
    names = {f"{kind}_token_id": IDS[f"<|{kind}_pad|>"] for kind in ("image", "video")}
    names |= {f"vision_{end}_token_id": IDS[f"<|vision_{end}|>"] for end in ("start", "end")}
    return tiny_config("qwen2_5_vl", tied) | names | {"vocab_size": len(TOKENIZER)}


def write_folder(folder, tied: bool, **options):
    """Let transformers write a folder with options of save_pretrained, and return its model with telling weights."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    from tests.helpers.oracle import CLASSES, EAGER, transformers

    (folder / "config.json").write_text(json.dumps(hub_config(tied)))
    config = transformers.AutoConfig.from_pretrained(folder)
    model = CLASSES["qwen2_5_vl"]._from_config(config, **EAGER).double().eval()
    tiny.telling_weights(model)
    model.tie_weights()
    model.save_pretrained(folder, **options)
    TOKENIZER.save(folder / "tokenizer.json")
    names = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    transformers.Qwen2Tokenizer.from_pretrained(folder).save_pretrained(folder)
    smallest, largest = PIXELS
    Qwen2VLImageProcessorPil(min_pixels=smallest, max_pixels=largest).save_pretrained(folder)
    return model


def completions(count: int = 4, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(min(IDS.values()), (2 * i + 1,), generator=generator) for i in range(count)]


def padded(answers: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and mask (G, T) of completions, as minimal.sample does; ids outside of the mask are 7."""
    ids = torch.nn.utils.rnn.pad_sequence(answers, batch_first=True, padding_value=7)
    lengths = torch.tensor([len(answer) for answer in answers])
    return ids, torch.arange(ids.shape[1]) < lengths[:, None]


def largest_difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    assert ours.shape == theirs.shape and theirs.abs().max() > 0
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


def in_float64(folder) -> minimal.QwenVL:
    return minimal.load(folder, dtype=torch.float64)


def main(*arguments):
    """Run `python minimal.py` with the given arguments in the process of the test."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", ["minimal.py", *map(str, arguments)])
            minimal.main()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
