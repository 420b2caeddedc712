"""Build trainers of TRL with a tiny Qwen2.5-VL; importing this module needs TRL."""

import json
import os
import random

import datasets
import torch
import transformers
import trl
from transformers.models.qwen2_5_vl import Qwen2_5_VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from minivlmrl.distributed.saving import save_model
from minivlmrl.model.build import random_model
from minivlmrl.tasks import shapes
from tests.helpers import tiny
from tests.helpers.talk import user

CHAT_TEMPLATES = os.path.join(os.path.dirname(trl.__file__), "chat_templates")
QUIET = {"use_cpu": True, "bf16": False, "gradient_checkpointing": False, "report_to": "none", "save_strategy": "no"}
QUIET |= {"disable_tqdm": True, "logging_steps": 1000, "learning_rate": 1e-3}
# tests make the end token likely, so that completions end at different lengths
END = shapes.tokenizer().special_tokens["<|im_end|>"]
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


class ImageOnlyProcessor(Qwen2_5_VLProcessor):
    """A processor for Qwen2.5-VL without a video processor, which would need torchvision."""

    def check_argument_for_proper_class(self, argument_name, argument):
        return type(argument)


def write_model(folder):
    """Save a tiny model whose weights make mistakes visible in its outputs, and return the folder."""
    (folder / "sizes.json").write_text(json.dumps(tiny.RUN_MODEL))
    model, processor = random_model(folder / "sizes.json", shapes.tokenizer(), seed=0)
    tiny.telling_weights(model)
    with torch.no_grad():
        model.lm_head.weight.mul_(0.5)
    save_model(folder / "model", model, processor)
    return folder / "model"


def processor(folder, template="qwen2_5_vl"):
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), eos_token="<|im_end|>", pad_token="<|endoftext|>",
        padding_side="left",
    )  # fmt: skip
    images = Qwen2VLImageProcessorPil.from_pretrained(folder)
    with open(os.path.join(CHAT_TEMPLATES, f"{template}.jinja")) as file:
        return ImageOnlyProcessor(images, tokenizer, video_processor=None, chat_template=file.read())


def model(folder, dtype=torch.float32):
    return transformers.Qwen2_5_VLForConditionalGeneration.from_pretrained(folder).to(dtype)


def picture(seed):
    rng = random.Random(seed)
    return shapes.draw_picture(rng.choice(shapes.LABELS), rng)


def build(name, policy, output, rows, options, processing_class, trainer=None, **arguments):
    """Build a trainer of TRL; `name` is SFT, DPO or GRPO, and `trainer` may replace the class of TRL."""
    config = getattr(trl, f"{name}Config")(output_dir=str(output), **QUIET | options)
    arguments |= {"train_dataset": datasets.Dataset.from_list(rows), "processing_class": processing_class}
    return (trainer or getattr(trl, f"{name}Trainer"))(policy, args=config, **arguments)


def questions(rows):
    return [{"prompt": [user(f"What{'?' * (i % 2)}")], "image": picture(i)} for i in range(rows)]


def distinct(completions, **_):
    return [len(set(message["content"])) / 3 + (len(message["content"]) % 3) / 7 for (message,) in completions]
