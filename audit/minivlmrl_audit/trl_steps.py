"""Dump steps of TRL's trainers, 0.15 to 1.16 in one process, for `python -m minivlmrl audit`.

    with grpo_steps(trainer, "steps"):      # or dpo_steps, sft_steps
        trainer.train()                     # steps/0, steps/1, ...; then: python -m minivlmrl audit steps/0

All is seen from outside of what is checked: log-probabilities at the model's forward and the
gradient where it arrives there, the loss as training_step returns it, rewards as the functions gave
them, the weights around optimizer.step.
"""

import re
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
from torch.nn import Dropout
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from transformers import TrainerCallback

from minivlmrl_audit import dump
from minivlmrl_audit.options import DPOOptions, PolicyOptions

ROLLOUT = (
    "num_generations",
    "scale_rewards",
    "reward_weights",
    "multi_objective_aggregation",
    "temperature",
    "max_completion_length",
    "mask_truncated_completions",
)
# what a release does that lacks an option of GRPO; before 0.16 rows were averaged
OLDER = {
    "scale_rewards": True,
    "use_bias_correction_kl": False,
    "loss_type": "bnpo",
    "epsilon": 0.2,
    "epsilon_high": None,
}
SCALES = {True: "group", False: "none"}  # up to 0.21
# of a trainer, the newest first: what generates, what gives log-probabilities
GENERATES = ("_generate_and_score_completions", "_prepare_inputs")
SCORES = ("_get_per_token_logps_and_entropies", "_get_per_token_logps")
OUTPUTS = {
    "log_probs": ("per_token_logps", "logps_gradient"),
    "entropy": ("entropies", "entropies_gradient"),
    "log_sum_sq_probs": ("log_sum_sq_probs", ""),
}
# what transformers.Trainer documents
NO_DECAY = re.compile(r"bias|layernorm|rmsnorm|(^|\.)norm($|\.)|_norm($|\.)")


def sft_steps(trainer, folder, steps: int = 1) -> "Steps":
    """Dump an SFTTrainer's; a model that takes no num_items_in_batch is averaged by micro-batch."""
    if getattr(trainer.args, "label_smoothing_factor", 0):
        raise ValueError("label_smoothing_factor: the audit has no definition of it; leave it 0")
    loss_type = getattr(trainer.args, "loss_type", "nll").removeprefix("chunked_")
    about = {
        "kind": "sft",
        "loss": {"loss_type": loss_type},
        "mean_over": "step" if trainer.model_accepts_loss_kwargs else "micro_batch",
    }

    def rows(inputs: dict) -> dict:
        predicted = inputs["attention_mask"].cumsum(1) > 1  # nothing predicts the first token
        tensors = {"completion_mask": ((inputs["labels"] != -100) & predicted).long()}
        if getattr(trainer, "completion_only_loss", False):
            return tensors | prompt_mask(trainer, inputs["input_ids"])
        if not getattr(trainer.args, "assistant_only_loss", False):
            tensors["prompt_mask"] = (~predicted).long()
        return tensors

    return Steps(trainer, folder, steps, about, rows)


def dpo_steps(trainer, folder, steps: int = 1) -> "Steps":
    """Dump a DPOTrainer's: first all chosen answers, then all rejected ones."""
    config = vars(trainer.args)
    loss = {name: config[name] for name in DPOOptions.__dataclass_fields__ if name in config}
    types = getattr(trainer, "loss_types", config["loss_type"])
    loss["loss_type"] = [types] if isinstance(types, str) else list(types)
    loss = {name: getattr(x, "value", x) for name, x in loss.items()}  # of enumerations, up to 0.28
    about = {"kind": "dpo", "loss": loss, "mean_over": "micro_batch"}

    def rows(inputs: dict) -> dict:
        prompts = inputs.get("prompt_attention_mask")  # up to 0.28, which joins them later
        pairs = len(inputs["input_ids"]) // 2 if prompts is None else len(prompts)
        number = torch.arange(2 * pairs)
        tensors = {"pair": number % pairs, "chosen": (number < pairs).long()}
        if prompts is not None:
            tensors["prompt_lengths"] = prompts.sum(1).repeat(2)
            return tensors
        tensors["completion_mask"] = inputs["completion_mask"]
        return tensors | prompt_mask(trainer, inputs["input_ids"])

    return Steps(trainer, folder, steps, about, rows)


def grpo_steps(trainer, folder, steps: int = 1) -> "Steps":
    """Dump a GRPOTrainer's: rewards, groups and advantages of the rollout too."""
    return GRPOSteps(trainer, folder, steps)


def grpo_options(trainer) -> dict:
    """Read the options of GRPO as a step has them, of any release."""
    config = OLDER | vars(trainer.args)
    config["scale_rewards"] = SCALES.get(config["scale_rewards"], config["scale_rewards"])
    if not hasattr(trainer.args, "epsilon"):
        config["loss_type"] = "grpo"
    config["epsilon_low"] = config["epsilon"]
    if config["epsilon_high"] is None:
        config["epsilon_high"] = config["epsilon"]
    tokenizer = tokenizer_of(trainer)
    parts = config["gradient_accumulation_steps"]
    names = PolicyOptions.__dataclass_fields__
    about = {
        "kind": "grpo",
        "loss": {name: value for name, value in config.items() if name in names},
        "stop_token_ids": list(getattr(trainer, "eos_token_ids", [tokenizer.eos_token_id])),
        "pad_token_id": tokenizer.pad_token_id,
        "steps_per_rollout": config.get("steps_per_generation", parts) / parts,
        "image_token_id": getattr(trainer, "_image_pad_token_id", None),
    }
    return about | {name: config.get(name) for name in ROLLOUT}


def tokenizer_of(trainer):
    """Return the tokenizer, whatever holds it."""
    return getattr(trainer.processing_class, "tokenizer", trainer.processing_class)


def prompt_mask(trainer, ids: torch.Tensor) -> dict:
    """Find where prompts of chats end: after the last generation prompt.

    {} where there is no template."""
    processor = trainer.processing_class
    chat = [{"role": "user", "content": "x"}]
    if not processor.chat_template:
        return {}
    render = partial(processor.apply_chat_template, chat, tokenize=False)
    generation_prompt = render(add_generation_prompt=True).removeprefix(
        render(add_generation_prompt=False)
    )
    start_ids = tokenizer_of(trainer).encode(generation_prompt, add_special_tokens=False)
    starts = (ids.unfold(1, len(start_ids), 1) == torch.tensor(start_ids)).all(-1)
    ends = torch.where(starts, torch.arange(starts.shape[1]) + len(start_ids), 0).amax(
        1, keepdim=True
    )
    return {"prompt_mask": (torch.arange(ids.shape[1]) < ends).long()}


class Steps(ExitStack, TrainerCallback):
    """Writes the first steps into folder/0, folder/1, ...

    `rows` gives the tensors of a micro-batch.
    """

    def __init__(self, trainer, folder, steps: int, about: dict, rows):
        super().__init__()
        self.trainer = trainer
        self.folder = Path(folder)
        self.steps = steps
        self.about = about
        self.rows = rows
        self.parts = []  # tensors of each micro-batch so far
        self.tensors = {}  # of the step: weights, gradients, the optimizer's state
        self.rollout = {}
        models = {name: getattr(trainer, name, None) for name in ("model", "ref_model")}
        self.models = {name: model for name, model in models.items() if model is not None}
        for model in self.models.values():
            self.callback(model.register_forward_hook(self.forward, with_kwargs=True).remove)
        trainer.add_callback(self)
        self.callback(trainer.remove_callback, self)
        self.wrap("compute_loss", before=self.begin)
        self.wrap("training_step", after=self.keep_loss)
        if hasattr(trainer, "_clip_grad_norm"):
            clips = ("_clip_grad_norm", trainer)
        else:  # before transformers 5
            clips = ("clip_grad_norm_", trainer.accelerator)
        self.wrap(*clips, lambda *_: self.copy("grad"), self.keep_norm)

    def keep_loss(self, loss, *_):
        self.parts[-1]["loss"] = loss.detach().view(1)

    def keep_norm(self, norm, *_):
        self.tensors["grad_norm"] = torch.as_tensor(norm).view(1)

    def wrap(self, name: str, owner=None, before=None, after=None):
        """Call before(*arguments) and after(result, *arguments) around a method of the trainer."""
        owner = owner or self.trainer
        inner = getattr(owner, name)

        def outer(*arguments, **options):
            if before and self.on:
                before(*arguments)
            result = inner(*arguments, **options)
            if after and self.on:
                after(result, *arguments)
            return result

        self.enter_context(patch.object(owner, name, outer))

    @property
    def on(self) -> bool:
        """Tell whether this step is written; evaluations are not."""
        return self.trainer.state.global_step < self.steps and self.trainer.model.training

    def begin(self, model, inputs: dict, *_):
        """Keep a micro-batch: its row tensors and pictures."""
        part = self.rows(inputs)
        for name in ("pixel_values", "image_grid_thw", "num_images"):
            if inputs.get(name) is not None:
                part[name] = torch.as_tensor(inputs[name])
        rows = next(iter(part.values()))
        part["micro_batch"] = torch.full((len(rows),), len(self.parts))
        self.parts.append(part)

    def forward(self, model, arguments, options, output):
        """Keep what a forward that trains takes and gives, later its gradient; DPO's reference."""
        if not self.parts:
            return
        part = self.parts[-1]
        logps = getattr(output, "log_probs", None)
        if logps is None:
            if self.about["kind"] != "grpo":
                ids = options.get("input_ids", arguments[0] if arguments else None)
                self.from_logits(part, ids, options["attention_mask"], output.logits)
            return
        if self.about["kind"] == "dpo" and not logps.requires_grad:
            part.setdefault("ref_per_token_logps", pad(logps, (1, 0)))
        if "per_token_logps" in part or not logps.requires_grad:
            return
        part["input_ids"] = options["input_ids"]
        part["attention_mask"] = options["attention_mask"]
        # what is masked gets a gradient that goes nowhere
        keep_outputs(part, [output.get(name) for name in OUTPUTS], 1, output.label_mask)

    def scored(self, result, model, input_ids, attention_mask, *_):
        """Keep what a trainer's own method gives, where the model gives logits alone."""
        if isinstance(result, dict):
            result = (result["logps"], result.get("entropies"))
        outputs = (result, None) if isinstance(result, torch.Tensor) else result
        part = self.parts[-1] if self.parts else None
        if part is None or "per_token_logps" in part or not outputs[0].requires_grad:
            return
        part["input_ids"] = input_ids
        part["attention_mask"] = attention_mask
        keep_outputs(part, outputs[:2])

    def from_logits(self, part: dict, ids, attention_mask, logits):
        """Keep log-probabilities of logits (n, S, V), and the gradient that comes through them."""
        labels = ids[:, 1:, None]
        logps = logits.detach()[:, :-1].log_softmax(-1)
        label_logps = pad(logps.gather(2, labels)[..., 0], (1, 0))
        if not logits.requires_grad:
            part.setdefault("ref_per_token_logps", label_logps)
            return
        part["input_ids"] = ids
        part["attention_mask"] = attention_mask
        part["per_token_logps"] = label_logps
        prompt_lengths = part.pop("prompt_lengths", None)
        if prompt_lengths is not None:
            completion = attention_mask.cumsum(1) > prompt_lengths[:, None]
            part["completion_mask"] = (completion & attention_mask.bool()).long()
            part["prompt_mask"] = attention_mask - part["completion_mask"]

        def keep(gradient):
            along = (-logps.exp()).scatter_add(2, labels, torch.ones(labels.shape))
            slope = (gradient[:, :-1] * along).sum(-1) / along.square().sum(-1)
            part["logps_gradient"] = pad(slope, (1, 0))

        logits.register_hook(keep)

    def copy(self, *kinds: str):
        """Clone weights, gradients or the optimizer's state."""
        for name, p in self.trainer.model.named_parameters():
            values = {"before": p, "grad": p.grad, "clipped": p.grad, "after": p}
            values.update(self.trainer.optimizer.state.get(p, {}))
            for kind in kinds:
                if values.get(kind) is not None:
                    self.tensors[f"{kind}.{name}"] = values[kind].detach().clone()

    def on_pre_optimizer_step(self, args, state, control, **_):
        if not self.on:
            return
        self.copy("before", "clipped", "exp_avg", "exp_avg_sq")
        if "grad_norm" not in self.tensors:
            self.copy("grad")
        self.save_models(args, self.folder / str(state.global_step))
        self.about["optimizer"] = self.optimizer_settings(args, state)
        self.about["schedule"] = {
            "type": text_of(args.lr_scheduler_type),
            "learning_rate": args.learning_rate,
            "warmup_steps": args.get_warmup_steps(state.max_steps),
            "max_steps": state.max_steps,
            "step": state.global_step,
        }
        self.about["dtype"] = str(self.trainer.model.dtype).removeprefix("torch.")

    def save_models(self, args, folder: Path):
        """Save the models whose forwards can be computed again, and their tokenizer."""
        dropouts = [x.p for x in self.trainer.model.modules() if isinstance(x, Dropout)]
        is_later = self.about["kind"] == "grpo" and not self.about.get("old_model")
        lost = {
            "model": args.neftune_noise_alpha or any(dropouts),
            "ref_model": is_later and args.sync_ref_model,  # it may have moved since the rollout
        }
        for name, model in self.models.items():
            self.about[name] = None if lost[name] else name
            if not lost[name]:
                model.save_pretrained(folder / name)
                tokenizer_of(self.trainer).save_pretrained(folder / name)

    def optimizer_settings(self, args, state) -> dict:
        """Read the settings of AdamW as a step has them."""
        names = [name for name, _ in self.trainer.model.named_parameters()]
        return {
            "name": text_of(args.optim).partition("_")[0],
            "learning_rate": self.trainer.optimizer.param_groups[0]["lr"],
            "betas": [args.adam_beta1, args.adam_beta2],
            "eps": args.adam_epsilon,
            "no_decay": [name for name in names if NO_DECAY.search(name.lower())],
            "weight_decay": args.weight_decay,
            "max_grad_norm": args.max_grad_norm,
            "step": state.global_step + 1,
        }

    def on_optimizer_step(self, args, state, control, **_):
        if self.on:
            self.copy("after")
            self.about["old_model"] = self.about.get("old_model") and self.about["model"]
            tensors = dump.join(self.parts) | self.rollout | self.tensors
            dump.write(self.folder / str(state.global_step), self.about, tensors)
        self.parts = []
        self.tensors = {}
        self.about["old_model"] = None


class GRPOSteps(Steps):
    """Writes steps of a GRPOTrainer, with what their rollouts had."""

    def __init__(self, trainer, folder, steps: int):
        super().__init__(trainer, folder, steps, grpo_options(trainer), self.row_tensors)
        self.conversations = []  # of a rollout whose completions call tools
        self.wrap(first_method(trainer, GENERATES), after=self.generated)
        self.wrap(first_method(trainer, SCORES), after=self.scored)
        if hasattr(trainer, "_calculate_rewards"):
            self.wrap("_calculate_rewards", after=self.judged)
        if getattr(trainer, "tools", None) and not getattr(trainer, "_has_async_funcs", False):
            self.wrap("_generate_single_turn", after=self.drew)

    def drew(self, result, prompts: list, pictures, *_):
        """Keep a turn: the ids that the sampler was given, and what it drew."""
        drawn_ids = result[0]
        if self.conversations:
            go_on(self.conversations, prompts, drawn_ids, self.trainer)
            return
        pictures = pictures or [[]] * len(prompts)
        for prompt, ids, row_pictures in zip(prompts, drawn_ids, pictures, strict=True):
            flags = [1] * len(ids)
            conversation = Conversation(prompt, ids, flags, ids, list(row_pictures or []))
            self.conversations.append(conversation)
        # each row has its own dictionary of tools
        for row, tools in enumerate(self.trainer._sync_tool_dicts):
            for name, tool in tools.items():
                tools[name] = partial(self.call, self.conversations[row], tool)

    @staticmethod
    def call(conversation: "Conversation", tool, **arguments):
        """Call a tool for a row, and keep the pictures that it answers."""
        answer = tool(**arguments)
        parts = answer if isinstance(answer, list) else []
        pictures = [part["image"] for part in parts if part.get("type") == "image"]
        conversation.answered += pictures
        return answer

    def generated(self, result: dict, examples: list):
        """Keep a rollout: groups, advantages, and what the sampler had."""
        keys = [prompt_key(example) for example in examples]
        groups = []
        for i, key in enumerate(keys):  # a prompt may return
            groups.append((key, keys[:i].count(key) // self.trainer.args.num_generations))
        self.rollout["group"] = torch.tensor([groups.index(group) for group in groups])
        self.rollout["rollout_advantages"] = result["advantages"].clone()
        result["row"] = torch.arange(len(keys))  # goes through the trainer's shuffle and split
        counted_mask = result["completion_mask"] * result.get("tool_mask", 1)
        drawn_mask = result["completion_ids"] != self.about["pad_token_id"]
        self.about["rollout_tokens"] = int(counted_mask.sum())
        self.about["rollout_drawn"] = int(drawn_mask.sum())
        self.about["old_model"] = "model"
        if self.conversations:
            processor = self.trainer.processing_class
            self.rollout |= conversation_tensors(self.conversations, processor)
            self.conversations = []

    def judged(self, result, *_):
        self.rollout["rewards"] = result.clone()

    def row_tensors(self, inputs: dict) -> dict:
        """Take the tensors of a micro-batch; an adaptive entropy bonus may be off in this step."""
        args = self.trainer.args
        coefficient = getattr(self.trainer, "entropy_coef", 0.0)
        is_adaptive = getattr(args, "use_adaptive_entropy", False)
        if is_adaptive and self.trainer._last_world_entropy > args.entropy_target:
            coefficient = 0.0
        self.about["loss"]["entropy_coef"] = coefficient
        row_inputs = {name: x for name, x in inputs.items() if name in dump.BY_ROW}
        tensors = {name: x for name, x in row_inputs.items() if x is not None}
        completion_length = inputs["completion_ids"].shape[1]
        tensors["completion_mask"] = inputs["completion_mask"] * inputs.get("tool_mask", 1)
        tensors["prompt_mask"] = pad(inputs["prompt_mask"], (0, completion_length))
        if inputs.get("sampling_per_token_logps") is not None:
            tensors["sampler_logps"] = inputs["sampling_per_token_logps"]
        return tensors


def keep_outputs(part: dict, outputs, missing_columns: int = 0, mask=1):
    """Keep what a forward gave of each token (n, T), and later its gradient times a mask."""
    for x, (name, slope_name) in zip(outputs, OUTPUTS.values(), strict=False):
        if x is None:
            continue
        part[name] = pad(x.detach(), (missing_columns, 0))
        if x.requires_grad:
            part[slope_name] = torch.zeros_like(part[name])
            x.register_hook(partial(keep_slope, part, slope_name, missing_columns, mask))


def keep_slope(part: dict, name: str, missing_columns: int, mask, gradient):
    part[name] = pad(gradient * mask, (missing_columns, 0))


def first_method(trainer, names: tuple[str, ...]) -> str:
    """Find the first of these methods that a trainer has."""
    return next(name for name in names if hasattr(trainer, name))


def text_of(option) -> str:
    """Return the text of an option that may be an enumeration's."""
    return str(getattr(option, "value", option))


def prompt_key(example: dict) -> tuple:
    """Tell prompts apart, by their texts and pictures."""
    pictures = example.get("images") or [example.get("image")]
    return str(example["prompt"]), *(image and image.tobytes() for image in pictures)


@dataclass
class Conversation:
    """What the sampler had of a completion."""

    prompt: list[int]
    ids: list[int]  # after the prompt
    flags: list[int]  # 1: drawn, 0: given
    last: list[int]  # what the last turn had after the prompt, maybe encoded again
    pictures: list
    answered: list = field(default_factory=list)  # pictures of tools since the last turn

    def agreement(self, given_ids: list[int], encoded_again: list[int]) -> tuple[bool, int]:
        """Say whether given ids go on with this, or with it encoded again, and for how many."""
        best = (False, 0)
        for form in (self.last, encoded_again):
            start_ids = self.prompt + form
            count = shared(start_ids, given_ids)
            best = max(best, (count == len(start_ids), count))
        return best

    def add(self, given_ids: list[int], encoded_again: list[int], drawn_ids: list[int]):
        """Add a turn: what was given after the prompt, and what was drawn then."""
        begin = shared(self.last, given_ids)
        for form in (encoded_again, self.last):
            if given_ids[: len(form)] == form:
                begin = len(form)
        new_ids = given_ids[begin:]
        self.ids = self.ids + new_ids + drawn_ids
        self.flags = self.flags + [0] * len(new_ids) + [1] * len(drawn_ids)
        self.last = given_ids + drawn_ids
        self.pictures = self.pictures + self.answered


def go_on(conversations: list[Conversation], prompts: list, drawn_ids: list, trainer):
    """Add a later turn of some rows, in their order: each goes on with the ids of its row."""
    tokenizer = tokenizer_of(trainer)
    encoded_again = []
    for conversation in conversations:
        text = tokenizer.decode(conversation.last)
        encoded_again.append(tokenizer.encode(text, add_special_tokens=False))
    row = -1
    for given_ids, row_drawn in zip(prompts, drawn_ids, strict=True):
        fits = [
            x.agreement(given_ids, form)
            for x, form in zip(conversations, encoded_again, strict=True)
        ]
        row = max(range(row + 1, len(fits)), key=fits.__getitem__)
        given_ids = given_ids[len(conversations[row].prompt) :]
        room = trainer.max_completion_length - len(given_ids)
        conversations[row].add(given_ids, encoded_again[row], row_drawn[:room])
    for conversation in conversations:
        conversation.answered = []


def conversation_tensors(conversations: list[Conversation], processor) -> dict:
    """Lay out what the sampler had in a rollout; pictures of prompts, then of tools."""
    tensors = {
        "sampler_ids": pad_sequence([torch.tensor(x.ids) for x in conversations], True, -1),
        "sampler_mask": pad_sequence([torch.tensor(x.flags) for x in conversations], True, -1),
        "sampler_num_images": torch.tensor([len(x.pictures) for x in conversations]),
    }
    pictures = [image for x in conversations for image in x.pictures]
    if pictures:
        fields = processor.image_processor(images=pictures, return_tensors="pt")
        tensors["sampler_pixel_values"] = fields["pixel_values"]
        tensors["sampler_image_grid_thw"] = fields["image_grid_thw"]
    return tensors


def shared(x: list, y: list) -> int:
    """Count how many first tokens are the same; all of x where y ends before they differ."""
    for i, (x_token, y_token) in enumerate(zip(x, y, strict=False)):
        if x_token != y_token:
            return i
    return len(x)
