"""Small real trainers of TRL on a tiny Qwen2.5-VL, for what the audit is to find in them. Import it where TRL is."""

import os
import random

import datasets
import torch
import transformers
import trl
from talk import assistant, user
from transformers.models.qwen2_5_vl import Qwen2_5_VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from minivlmrl.audit.trl_steps import dpo_steps, grpo_steps, sft_steps
from minivlmrl.scale.checkpoint import random_model, save_model
from minivlmrl.tasks import shapes

import tiny

STEPS_OF = {"grpo": grpo_steps, "dpo": dpo_steps, "sft": sft_steps}
CHAT_TEMPLATE = os.path.join(os.path.dirname(trl.__file__), "chat_templates", "qwen2_5_vl.jinja")
QUIET = {"use_cpu": True, "bf16": False, "gradient_checkpointing": False, "report_to": "none", "save_strategy": "no"}
QUIET |= {"disable_tqdm": True, "logging_steps": 1000, "learning_rate": 1e-3}
END = shapes.tokenizer().special_tokens["<|im_end|>"]  # made likely when sampling: completions of several lengths
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


class ImageOnlyProcessor(Qwen2_5_VLProcessor):
    """transformers' processor without the video processor: checking its type needs torchvision."""

    def check_argument_for_proper_class(self, argument_name, argument):
        return type(argument)


def write_model(folder):
    """A model of shapes' tokenizer with telling weights, in a folder."""
    import json

    (folder / "sizes.json").write_text(json.dumps(tiny.RUN_MODEL))
    model, processor = random_model(folder / "sizes.json", shapes.tokenizer(), seed=0)
    tiny.telling_weights(model)
    with torch.no_grad():
        model.lm_head.weight.mul_(0.5)
    save_model(folder / "model", model, processor)
    return folder / "model"


def processor(folder):
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), eos_token="<|im_end|>", pad_token="<|endoftext|>",
        padding_side="left",
    )  # fmt: skip
    images = Qwen2VLImageProcessorPil.from_pretrained(folder)
    with open(CHAT_TEMPLATE) as template:
        return ImageOnlyProcessor(images, tokenizer, video_processor=None, chat_template=template.read())


def model(folder, dtype=torch.float32):
    return transformers.Qwen2_5_VLForConditionalGeneration.from_pretrained(folder, dtype=dtype)


def picture(seed):
    rng = random.Random(seed)
    return shapes.draw(rng.choice(shapes.LABELS), rng)


def distinct(completions, **_):
    return [len(set(message["content"])) / 3 + (len(message["content"]) % 3) / 7 for (message,) in completions]


def lower(completions, **_):
    return [sum(letter.islower() for letter in message["content"]) / 5 for (message,) in completions]


class PlainHead:
    """TRL's fused head, which computes in float32, by its definition in the hidden states' type."""

    @staticmethod
    def apply(hidden, weight, bias, labels, temperature, *_):
        logps = (hidden @ weight.T / temperature).log_softmax(-1)
        entropy, squares = -(logps.exp() * logps).sum(-1), (2 * logps).logsumexp(-1)
        return logps.gather(1, labels[:, None])[:, 0], entropy, squares, hidden[:, 0] * 0, logps.argmax(-1) == labels


def plain_norm(self, x):
    """transformers' norm, which computes in float32, in the hidden states' type."""
    return self.weight * (x * (x.square().mean(-1, keepdim=True) + self.variance_epsilon).rsqrt())


def grpo(folder, output, rewards=(distinct, lower), rows=4, dtype=torch.float32, **options):
    data = [{"prompt": [user(f"What{'?' * (i % 2)}")], "image": picture(i)} for i in range(rows)]
    options = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_generations": 4,
               "max_completion_length": 10, "max_steps": 1,
               "generation_kwargs": {"sequence_bias": [[[END], 5.0]]}} | options  # fmt: skip
    return trl.GRPOTrainer(
        model(folder, dtype), list(rewards), trl.GRPOConfig(output_dir=str(output), **QUIET | options),
        train_dataset=datasets.Dataset.from_list(data), processing_class=processor(folder),
    )  # fmt: skip


def dpo(folder, output, rows=8, dtype=torch.float32, **options):
    answers = [
        {"chosen": [assistant(f"a {'red ' * (i % 3)}ball")], "rejected": [assistant("none" * (1 + i % 2))]}
        for i in range(rows)
    ]
    data = [{"prompt": [user("What?")], "images": [picture(i)], **both} for i, both in enumerate(answers)]
    return offline(trl.DPOTrainer, trl.DPOConfig, data, folder, output, dtype, options)


def sft(folder, output, rows=8, dtype=torch.float32, **options):
    data = [
        {"prompt": [user("What?")], "completion": [assistant(f"a {'red ' * (i % 3)}ball")], "images": [picture(i)]}
        for i in range(rows)
    ]
    return offline(trl.SFTTrainer, trl.SFTConfig, data, folder, output, dtype, options)


def kto(folder, output, rows=8, dtype=torch.float32, **options):
    data = [
        {"prompt": [user("What?")], "completion": [assistant(f"a {'red ' * (i % 3)}ball")], "images": [picture(i)],
         "label": i % 3 != 1}
        for i in range(rows)
    ]  # fmt: skip
    return offline(trl.KTOTrainer, trl.KTOConfig, data, folder, output, dtype, options)


def offline(trainer, config, data, folder, output, dtype, options):
    sizes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 1, "max_length": None}
    return trainer(
        model(folder, dtype), args=config(output_dir=str(output), **QUIET | sizes | options),
        train_dataset=datasets.Dataset.from_list(data), processing_class=processor(folder),
    )  # fmt: skip
