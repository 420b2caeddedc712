"""Build small TRL trainers with a tiny Qwen2.5-VL for the audit's tests. Importing needs TRL."""

import inspect
import json
import os
import random

import datasets
import numpy
import torch
import transformers
import trl
from talk import CHATML, assistant, user
from transformers.models.qwen2_5_vl import Qwen2_5_VLProcessor

from minivlmrl.model.build import random_model
from minivlmrl.model.checkpoint import save_model
from minivlmrl.tasks import shapes
from minivlmrl_audit.dump import read
from minivlmrl_audit.trl_steps import dpo_steps, grpo_steps, sft_steps

import tiny

STEPS_OF = {"grpo": grpo_steps, "turns": grpo_steps, "dpo": dpo_steps, "sft": sft_steps}
CHAT_TEMPLATES = os.path.join(os.path.dirname(trl.__file__), "chat_templates")
QUIET = {"use_cpu": True, "bf16": False, "gradient_checkpointing": False, "report_to": "none", "save_strategy": "no"}
QUIET |= {"disable_tqdm": True, "logging_steps": 1000, "learning_rate": 1e-3}
# tests make this token likely, so that completions end at different lengths
END = shapes.tokenizer().special_tokens["<|im_end|>"]
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


class ImageOnlyProcessor(Qwen2_5_VLProcessor):
    """Processor of transformers without its video processor, which would need torchvision."""

    def check_argument_for_proper_class(self, argument_name, argument):
        return type(argument)


def write_model(folder):
    """Save a tiny random model with the tokenizer of the task `shapes`, and return its folder.

    Its weights are chosen so that mistakes change its outputs visibly.
    """
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
    # missing in transformers 4
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    images = Qwen2VLImageProcessorPil.from_pretrained(folder)
    if not os.path.isdir(CHAT_TEMPLATES):  # older releases of TRL have no chat templates
        return ImageOnlyProcessor(images, tokenizer, video_processor=None, chat_template=CHATML)
    with open(os.path.join(CHAT_TEMPLATES, f"{template}.jinja")) as file:
        return ImageOnlyProcessor(images, tokenizer, video_processor=None, chat_template=file.read())


def model(folder, dtype=torch.float32):
    return transformers.Qwen2_5_VLForConditionalGeneration.from_pretrained(folder).to(dtype)


def picture(seed):
    rng = random.Random(seed)
    return shapes.draw_picture(rng.choice(shapes.LABELS), rng)


def distinct(completions, **_):
    return [len(set(message["content"])) / 3 + (len(message["content"]) % 3) / 7 for (message,) in completions]


def lower(completions, **_):
    return [sum(letter.islower() for letter in message["content"]) / 5 for (message,) in completions]


class PlainHead:
    """TRL's fused head, but computed in the hidden states' dtype instead of float32."""

    @staticmethod
    def apply(hidden, weight, bias, labels, temperature, *_):
        logps = (hidden @ weight.T / temperature).log_softmax(-1)
        entropy, squares = -(logps.exp() * logps).sum(-1), (2 * logps).logsumexp(-1)
        return logps.gather(1, labels[:, None])[:, 0], entropy, squares, hidden[:, 0] * 0, logps.argmax(-1) == labels


def plain_norm(self, x):
    """Compute transformers' RMS norm in the hidden states' dtype instead of float32."""
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


class Look:
    """Environment with a tool `look` that returns an image and text, and a tool `tell`."""

    large = False  # whether `look` returns images as large as the prompt's

    def reset(self, image, **columns):
        self.image = image

    def look(self, n: int) -> list:
        """Look.

        Args:
            n: Where.
        """
        width = 28 * (1 + n % 2)
        box = (0, n, 56, 56 + n) if self.large else (14, n + 6, 14 + width, n + 34)
        text = {"type": "text", "text": "seen " * (n % 3)}
        return [{"type": "image", "image": self.image.crop(box)}, text]

    def tell(self, n: int) -> str:
        """Tell.

        Args:
            n: What.
        """
        return "red " * (10 // (n % 4))  # raises ZeroDivisionError if n is a multiple of 4


def unjudged(completions, **_):
    return [None if i in (1, 6) else i % 4 + len(chat[0]["content"]) / 9 for i, chat in enumerate(completions)]


def text(
    folder,
    output,
    name="GRPO",
    columns=("prompt",),
    rewards=("distinct", "lower"),
    pad="<|endoftext|>",
    bias=0.1,
    rows=8,
    **options,
):
    """Build a text-only trainer of any TRL release since 0.15.

    Options that the release does not have are ignored.
    """
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=f"{folder}/tokenizer.json", eos_token="<|im_end|>", pad_token=pad, chat_template=CHATML,
        padding_side="left" if name == "GRPO" else "right", model_input_names=["input_ids", "attention_mask"],
    )  # fmt: skip
    data = [
        {"text": f"{'red ' * (i % 3)}ball<|im_end|>", "prompt": [user(f"What{'?' * (i % 2)}")],
         "chosen": [assistant("red " * (1 + i % 3))], "rejected": [assistant("no" * (1 + i % 2))]}
        for i in range(rows)
    ]  # fmt: skip
    config, policy, size = getattr(trl, f"{name}Config"), model(folder), 8 if name == "GRPO" else 2
    options = {"seed": 1, "num_generations": 4, "max_completion_length": 10, "max_steps": 1,
               "gradient_accumulation_steps": 1} | QUIET | options  # fmt: skip
    options["per_device_train_batch_size"] = size // options["gradient_accumulation_steps"]
    options["generation_kwargs"] = {"sequence_bias": [[[END], bias]]}
    # up to 0.28, the option is an enum member
    kinds = getattr(inspect.getmodule(trl.DPOConfig), "FDivergenceType", str)
    options["f_divergence_type"] = kinds(options.get("f_divergence_type", "reverse_kl"))
    options = {key: x for key, x in options.items() if key in config.__dataclass_fields__}
    if name == "GRPO" and "logits_to_keep" not in inspect.signature(policy.forward).parameters:
        # transformers 4.51 has no logits_to_keep, so the trainer cuts the logits
        forward = type(policy).forward
        type(policy).forward = lambda self, *given, logits_to_keep=0, **named: forward(self, *given, **named)
    policy.config.model_type = "qwen2"  # otherwise DPOTrainer requires a processor
    # TRL 0.19 can load a reference model only with this class
    transformers.AutoModelForCausalLM.register(type(policy.config), type(policy), exist_ok=True)
    trainer = getattr(trl, f"{name}Trainer")(
        policy, args=config(output_dir=str(output), **options), processing_class=tokenizer,
        train_dataset=datasets.Dataset.from_list([{key: row[key] for key in columns} for row in data]),
        **{"reward_funcs": [globals()[judge] for judge in rewards]} if name == "GRPO" else {},
    )  # fmt: skip
    for each in filter(None, (trainer.model, getattr(trainer, "ref_model", None))):
        each.config.model_type = "qwen2_5_vl"
    return trainer


def train(kind, folder, output, steps=1, late=None, **options):
    """Train with a trainer of this module, and dump the first steps; late(trainer) may change it before."""
    trainer = globals()[kind](folder, output / "trainer", **{"max_steps": steps} | options)
    if late:
        late(trainer)
    with STEPS_OF[options.get("name", kind).lower().replace("text", "grpo")](trainer, output, steps):
        trainer.train()


def step_with(bugs, folder, output, put):
    """Put bugs of bugs.py into TRL with `put`, train, and read the step at which they show."""
    options = {}
    for bug in bugs:
        options |= bug.options
        if not bug.late:
            bug.patch(put, None)

    def late(trainer):
        for bug in bugs:
            if bug.late:
                bug.patch(put, trainer)

    at = bugs[0].at
    train(bugs[0].kind, folder, output, at + 1, late, **options)
    return read(output / str(at))


def dump(folder, output, kind, options, **_):
    """Train and dump the steps of a case of audit/history.py with the imported release of TRL.

    If training fails, error.txt has the error.
    """
    output.mkdir(parents=True)
    try:
        train(kind, folder, output, 2, **{"max_steps": 1} | options)
    except Exception as error:  # an old release may raise any error
        (output / "error.txt").write_text(f"{type(error).__name__}: {error}")


def words_of(messages):
    return "".join(part if isinstance(part, str) else "" for message in messages for part in message["content"] or "")


def length(completions, **_):
    return [len(words_of(messages)) % 5 / 3 + len(messages) / 7 for messages in completions]


def variety(completions, **_):
    return [len(set(words_of(messages))) / 9 for messages in completions]


def turns(
    folder,
    output,
    rows=4,
    dtype=torch.float32,
    seed=0,
    calls=0.6,
    tools=("look", "tell"),
    ends=0.8,
    large=False,
    **options,
):
    """Build a GRPOTrainer with tools, whose completions are random tokens.

    Each turn calls a tool with probability `calls`. A turn without a call ends with probability `ends`, and is
    truncated otherwise.
    """
    data = [{"prompt": [user(f"What{'?' * (i % 2)}")], "image": picture(i)} for i in range(rows)]
    options = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_generations": 4, "seed": seed,
               "max_completion_length": 240, "max_steps": 1, "max_tool_calling_iterations": 3} | options  # fmt: skip
    trainer = trl.GRPOTrainer(
        model(folder, dtype), [length, variety], trl.GRPOConfig(output_dir=str(output), **QUIET | options),
        train_dataset=datasets.Dataset.from_list(data), processing_class=processor(folder, "qwen3_vl"),
        environment_factory=type('Look', (Look,), {'large': large}),
    )  # fmt: skip
    # TRL has already selected its parser of tool calls. Remove the description of tools from the template, so that
    # prompts are short.
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
        # a completion that did not end is continued to the longest of the batch
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


def dpo(folder, output, rows=8, dtype=torch.float32, **options):
    answers = [
        {"chosen": [assistant(f"a {'red ' * (i % 3)}ball")], "rejected": [assistant("none" * (1 + i % 2))]}
        for i in range(rows)
    ]
    data = [{"prompt": [user("What?")], "images": [picture(i)], **both} for i, both in enumerate(answers)]
    return offline(trl.DPOTrainer, trl.DPOConfig, data, folder, output, dtype, options)


def answers(rows):
    return [
        {"prompt": [user("What?")], "completion": [assistant(f"a {'red ' * (i % 3)}ball")], "images": [picture(i)]}
        for i in range(rows)
    ]


def sft(folder, output, rows=8, dtype=torch.float32, **options):
    return offline(trl.SFTTrainer, trl.SFTConfig, answers(rows), folder, output, dtype, options)


def kto(folder, output, rows=8, dtype=torch.float32, **options):
    data = [row | {"label": i % 3 != 1} for i, row in enumerate(answers(rows))]
    return offline(trl.KTOTrainer, trl.KTOConfig, data, folder, output, dtype, options)


def offline(trainer, config, data, folder, output, dtype, options):
    sizes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 1, "max_length": None}
    return trainer(
        model(folder, dtype), args=config(output_dir=str(output), **QUIET | sizes | options),
        train_dataset=datasets.Dataset.from_list(data), processing_class=processor(folder),
    )  # fmt: skip
