"""Compare our models with transformers, which this file imports."""

import functools
import importlib
import inspect
import re
import sys

import pytest
import torch

from minivlmrl.model import checkpoint, config_json, packing
from tests.helpers import tiny

transformers = pytest.importorskip("transformers", reason="oracle missing: pip install transformers==5.23.0")

CLASSES = {
    "qwen2_5_vl": transformers.Qwen2_5_VLForConditionalGeneration,
    "qwen2_vl": transformers.Qwen2VLForConditionalGeneration,
    "qwen3_vl": transformers.Qwen3VLForConditionalGeneration,
    "qwen3_5": transformers.Qwen3_5ForConditionalGeneration,
    "qwen3_vl_moe": transformers.Qwen3VLMoeForConditionalGeneration,
    "qwen3_5_moe": transformers.Qwen3_5MoeForConditionalGeneration,
}

# largest logit difference by float32 rounding, as a share of the largest logit; recurrent layers accumulate errors
ROUNDING = {**dict.fromkeys(CLASSES, 1e-5), **dict.fromkeys(("qwen3_5", "qwen3_5_moe"), 1e-4)}
EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}


def saved_pair(folder, model_type: str = "qwen2_5_vl", tied: bool = False, dtype=torch.float32):
    """Return a tiny transformers model whose weights reveal mistakes, and our model loaded from its folder."""
    config = transformers.AutoConfig.for_model(**config_json.to_dict(tiny.config(tied, model_type=model_type)))
    theirs = CLASSES[model_type]._from_config(config, **EAGER).to(dtype)
    tiny.telling_weights(theirs)
    theirs.tie_weights()
    theirs.save_pretrained(folder)
    return theirs.eval(), checkpoint.load_model(folder)


def in_float64(monkeypatch, model_type: str):
    """Let transformers compute in float64 during the test, also where its source says float32.

    Rotary frequencies stay float32, as in the training of released models.
    """
    for name in (CLASSES[model_type].__module__, "transformers.vision_utils"):
        module, lifted = lifted_module(name)
        for key, made in lifted.items():
            was = vars(module).get(key)
            if inspect.isclass(made) and made is not was and "forward" in vars(made):
                monkeypatch.setattr(was, "forward", made.forward)
            if inspect.isfunction(made) and made is not was:
                monkeypatch.setattr(module, key, made)
    interpolation = "get_vision_interpolation_indices_and_weights"
    if hasattr(modeling := sys.modules[CLASSES[model_type].__module__], interpolation):
        monkeypatch.setattr(modeling, interpolation, getattr(module, interpolation))


@functools.cache
def lifted_module(name: str) -> tuple:
    """Return a transformers module, and {name: value} from a copy whose source says float64 instead of float32."""
    module = importlib.import_module(name)
    lifted = dict(vars(module))
    parts = re.split(r"(?m)^(?=@|class |def )", inspect.getsource(module))
    lift = functools.partial(re.sub, r"torch\.float(32)?\b|(?<=\.)float(?=\(\))", lambda found: LIFTED[found[0]])
    source = "".join(part if "RotaryEmbedding(" in part else lift(part) for part in parts)
    exec(compile(source, module.__file__, "exec"), lifted)
    return module, lifted


LIFTED = {"torch.float32": "torch.float64", "torch.float": "torch.float64", "float": "double"}


def their_processor(kind, folder, tokenizer, template, images, videos=None):
    """Return a transformers processor with our tokenizer, without video processor, which needs torchvision."""

    class TinyProcessor(kind):
        def check_argument_for_proper_class(self, name, argument):
            return type(argument)

    tokenizer.save(folder / "tokenizer.json")
    (folder / "tokenizer_config.json").write_text('{"pad_token": "<|endoftext|>"}')
    theirs = transformers.Qwen2Tokenizer.from_pretrained(folder)
    return TinyProcessor(images, theirs, videos, chat_template=template)


def their_inputs(prompt):
    ids = prompt.input_ids[None]
    # without mm_token_type_ids, transformers uses 1-D positions
    inputs = {"input_ids": ids, "mm_token_type_ids": (ids == tiny.IMAGE).long() + 2 * (ids == tiny.VIDEO).long()}
    is_video = prompt.image_grid_thw[:, 0] > 1
    patches = is_video.repeat_interleave(prompt.image_grid_thw.prod(1))
    for kind, rows, key in ((~is_video, ~patches, ""), (is_video, patches, "_videos")):
        if kind.any():
            inputs[f"pixel_values{key}"] = prompt.pixel_values[rows]
            inputs["video_grid_thw" if key else "image_grid_thw"] = prompt.image_grid_thw[kind]
    return inputs


def our_logits(model, rows):
    """Return logits for all rows, computed in one packed batch and split by row."""
    batch = packing.pack(rows, [[] for _ in rows], model.config)
    return model.lm_head(model(batch)).split(batch.layout.prompt_lengths)


def worst_difference(theirs, ours, rows):
    """Return the largest logit difference in any row, as a share of its largest logit."""
    with torch.no_grad():
        expected = [theirs(**their_inputs(row)).logits[0] for row in rows]
        return max(
            ((a - b).abs().max() / b.abs().max()).item() for a, b in zip(our_logits(ours, rows), expected, strict=True)
        )
