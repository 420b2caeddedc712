"""Build trainers of TRL with a tiny Qwen2.5-VL; importing this module needs TRL."""

import json
import os
import random

import datasets
import numpy
import torch
import transformers
import trl
from transformers.models.qwen2_5_vl import Qwen2_5_VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from minivlmrl.distributed.saving import save_model
from minivlmrl.extras.parity.step import read
from minivlmrl.model.build import random_model
from minivlmrl.tasks import shapes
from tests.helpers import tiny
from tests.helpers.talk import assistant, user
from tests.record.trl_steps import dpo_steps, grpo_steps, sft_steps

STEPS_OF = {"grpo": grpo_steps, "turns": grpo_steps, "dpo": dpo_steps, "sft": sft_steps}
CHAT_TEMPLATES = os.path.join(os.path.dirname(trl.__file__), "chat_templates")
QUIET = {"use_cpu": True, "bf16": False, "gradient_checkpointing": False, "report_to": "none", "save_strategy": "no"}
QUIET |= {"disable_tqdm": True, "logging_steps": 1000, "learning_rate": 1e-3}
# tests make the end token likely, so that completions end at different lengths
END = shapes.tokenizer().special_tokens["<|im_end|>"]
STEP = {"gradient_accumulation_steps": 2, "max_steps": 1}
# options for trainers that sample completions, and for trainers that read answers
SAMPLED = STEP | {"per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 10}
READ = STEP | {"per_device_train_batch_size": 2, "max_length": None}
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


def answers(rows, name="completion"):
    answers = ([assistant(f"a {'red ' * (i % 3)}ball")] for i in range(rows))
    return [{"prompt": [user("What?")], name: answer, "images": [picture(i)]} for i, answer in enumerate(answers)]


def sft(folder, output, rows=8, **options):
    return build("SFT", model(folder), output, answers(rows), READ | options, processor(folder))


def dpo(folder, output, rows=8, **options):
    pairs = [row | {"rejected": [assistant("none" * (1 + i % 2))]} for i, row in enumerate(answers(rows, "chosen"))]
    return build("DPO", model(folder), output, pairs, READ | options, processor(folder))


def words_of(messages):
    return "".join(part if isinstance(part, str) else "" for message in messages for part in message["content"] or "")


def distinct(completions, **_):
    return [len(set(message["content"])) / 3 + (len(message["content"]) % 3) / 7 for (message,) in completions]


def lower(completions, **_):
    return [sum(letter.islower() for letter in message["content"]) / 5 for (message,) in completions]


def length(completions, **_):
    return [len(words_of(messages)) % 5 / 3 + len(messages) / 7 for messages in completions]


def variety(completions, **_):
    return [len(set(words_of(messages))) / 9 for messages in completions]


def grpo(folder, output, rewards=(distinct, lower), rows=4, **options):
    policy, judges = model(folder), list(rewards)
    options = SAMPLED | {"generation_kwargs": {"sequence_bias": [[[END], 5.0]]}} | options
    return build("GRPO", policy, output, questions(rows), options, processor(folder), reward_funcs=judges)


class Look:
    """An environment with the tools `look`, which returns an image and text, and `tell`, which returns text."""

    large = False  # whether `look` returns images as large as the prompt's

    def reset(self, image, **columns):
        self.image = image

    def look(self, n: int) -> list:
        """Look.

        Args:
            n: Where.
        """
        box = (0, n, 56, 56 + n) if self.large else (14, n + 6, 14 + 28 * (1 + n % 2), n + 34)
        return [{"type": "image", "image": self.image.crop(box)}, {"type": "text", "text": "seen " * (n % 3)}]

    def tell(self, n: int) -> str:
        """Tell.

        Args:
            n: What.
        """
        return "red " * (10 // (n % 4))  # raises ZeroDivisionError for n = 0, 4 and 8


def turns(folder, output, rows=4, seed=0, calls=0.6, tools=("look", "tell"), ends=0.8, large=False, **options):
    """Build a GRPOTrainer with tools, whose completions are random tokens.

    Each turn calls a tool with probability `calls`. A turn without a call ends with probability `ends`, and is
    truncated otherwise.
    """
    options = SAMPLED | {"seed": seed, "max_completion_length": 240, "max_tool_calling_iterations": 3} | options
    trainer = build(
        "GRPO", model(folder), output, questions(rows), options, processor(folder, "qwen3_vl"),
        reward_funcs=[length, variety], environment_factory=type("Look", (Look,), {"large": large}),
    )  # fmt: skip
    # TRL has already selected its parser for tool calls, and prompts are short without the descriptions of tools
    template = trainer.processing_class.chat_template
    trainer.processing_class.chat_template = template.replace("if tools", "if false", 1)
    rng, encode = random.Random(seed), trainer._tokenizer.encode

    def generate(input_ids, generation_config, **_):
        completions = []
        for _ in input_ids:
            ids, asks = [rng.randrange(256) for _ in range(rng.randrange(1, 9))], rng.random() < calls
            if asks:
                arguments = f'{{"name": "{rng.choice(tools)}", "arguments": {{"n": {rng.randrange(9)}}}}}'
                ids += encode(f"<tool_call>\n{arguments}\n</tool_call>")
            ids = ids + [END] * (asks or rng.random() < ends)
            completions.append(torch.tensor(ids[: generation_config.max_new_tokens]))
        # completions without an end token are continued to the length of the longest completion
        width = max(map(len, completions))
        for i, ids in enumerate(completions):
            more = torch.tensor([rng.randrange(256) for _ in range(width - len(ids))]).long()
            padding = torch.full_like(more, trainer._tokenizer.pad_token_id)
            completions[i] = torch.cat([ids, padding if ids[-1] == END else more])
        return torch.cat([input_ids, torch.stack(completions)], 1)

    tokenize = trainer._tokenize_prompts

    # without torchvision, the processor returns lists, which TRL's tool loop cannot split
    def as_tensors(prompts):
        ids, images, fields = tokenize(prompts)
        given = {name: torch.tensor(numpy.array(fields[name])) for name in ("pixel_values", "image_grid_thw")}
        return ids, images, fields | given

    trainer._tokenize_prompts, trainer.model.generate = as_tensors, generate
    return trainer


def train(kind, folder, output, steps=1, late=None, **options):
    """Train a new trainer and record its first steps; late(trainer) may change the trainer before."""
    trainer = globals()[kind](folder, output / "trainer", **{"max_steps": steps} | options)
    if late:
        late(trainer)
    with STEPS_OF[kind](trainer, output, steps):
        trainer.train()


def dumped(folder, output, kind, late=None, at=0, **options):
    """Train a trainer, and return the recorded step with the number `at`."""
    train(kind, folder, output, at + 1, late, **options)
    return read(output / str(at))


def step_with(bug, folder, output, put, **options):
    """Put a bug into TRL with `put`, train, and return the recorded step that shows the bug."""
    return dumped(folder, output, bug.kind, lambda trainer: bug.patch(put, trainer), **options | bug.options)
