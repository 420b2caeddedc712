"""Dump steps of TRL's trainers, 1.16 in one process, for `python -m minivlmrl audit`.

    with grpo_steps(trainer, "steps"):      # or dpo_steps, sft_steps
        trainer.train()                     # steps/0, steps/1, ...; then: python -m minivlmrl audit steps/0

All is seen from outside of what is checked: log-probabilities at the model's forward and the
gradient where it arrives there, the loss as training_step returns it, rewards as the functions gave
them, the weights around optimizer.step.
"""

import re
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial, wraps
from inspect import iscoroutinefunction
from pathlib import Path
from unittest.mock import patch

import torch
from torch.nn import Module
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from transformers import TrainerCallback

from minivlmrl_audit import dump
from minivlmrl_audit.options import DPOOptions, PolicyOptions

OUTPUTS = {
    "log_probs": ("per_token_logps", "logps_gradient"),
    "entropy": ("entropies", "entropies_gradient"),
    "log_sum_sq_probs": ("log_sum_sq_probs", ""),
}
# what transformers.Trainer documents
NO_DECAY = re.compile(r"bias|layernorm|rmsnorm|(^|\.)norm($|\.)|_norm($|\.)")


def sft_steps(trainer, folder, steps: int = 1) -> "Steps":
    """Dump an SFTTrainer's; a model that takes no num_items_in_batch is averaged by micro-batch."""
    if trainer.args.label_smoothing_factor:
        raise ValueError("label_smoothing_factor: the audit has no definition of it; leave it 0")
    about = {
        "kind": "sft",
        "loss": {"loss_type": trainer.args.loss_type.removeprefix("chunked_")},
        "mean_over": "step" if trainer.model_accepts_loss_kwargs else "micro_batch",
    }

    def rows(inputs: dict) -> dict:
        predicted = inputs["attention_mask"].cumsum(1) > 1  # nothing predicts the first token
        tensors = {"completion_mask": ((inputs["labels"] != -100) & predicted).long()}
        if trainer.completion_only_loss:
            return tensors | prompt_mask(trainer, inputs["input_ids"])
        if not trainer.args.assistant_only_loss:
            tensors["prompt_mask"] = (~predicted).long()
        return tensors

    return Steps(trainer, folder, steps, about, rows)


def dpo_steps(trainer, folder, steps: int = 1) -> "Steps":
    """Dump a DPOTrainer's: first all chosen answers, then all rejected ones."""
    config = vars(trainer.args)
    loss = {name: config[name] for name in DPOOptions.__dataclass_fields__ if name in config}
    loss["loss_type"] = list(trainer.loss_types)
    if not set(dump.NAMES["smoothed losses"]) & set(trainer.loss_types):
        loss["label_smoothing"] = 0.0
    about = {"kind": "dpo", "loss": loss, "mean_over": "micro_batch"}

    def rows(inputs: dict) -> dict:
        pairs = len(inputs["input_ids"]) // 2
        number = torch.arange(2 * pairs)
        tensors = {"pair": number % pairs, "chosen": (number < pairs).long()}
        tensors["completion_mask"] = inputs["completion_mask"]
        return tensors | prompt_mask(trainer, inputs["input_ids"])

    return Steps(trainer, folder, steps, about, rows)


def grpo_steps(trainer, folder, steps: int = 1) -> "Steps":
    """Dump a GRPOTrainer's: rewards, groups and advantages of the rollout too."""
    return GRPOSteps(trainer, folder, steps)


def grpo_options(trainer) -> dict:
    """Read the options of GRPO as a step has them."""
    config = dict(vars(trainer.args))
    config["epsilon_low"] = config["epsilon"]
    if config.get("epsilon_high") is None:
        config["epsilon_high"] = config["epsilon"]
    names = PolicyOptions.__dataclass_fields__
    about = {
        "kind": "grpo",
        "loss": {name: value for name, value in config.items() if name in names},
        "stop_token_ids": list(trainer.eos_token_ids),
        "pad_token_id": tokenizer_of(trainer).pad_token_id,
        "image_token_id": trainer._image_pad_token_id,
    }
    return about | {name: config.get(name) for name in dump.NAMES["options of a rollout"]}


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
        self.tensors = {}  # of the step: rows, weights, gradients, the optimizer's state
        self.rates = []  # of the steps so far
        self.is_later = False  # some rows were drawn at an earlier step
        models = {name: getattr(trainer, name, None) for name in ("model", "ref_model")}
        self.models = {name: model for name, model in models.items() if model is not None}
        for model in self.models.values():
            self.callback(model.register_forward_hook(self.forward, with_kwargs=True).remove)
        trainer.add_callback(self)
        self.callback(trainer.remove_callback, self)
        self.wrap("compute_loss", before=self.begin)
        self.wrap("training_step", after=self.keep_loss)
        self.wrap("_clip_grad_norm", lambda *_: self.copy("grad"), self.keep_norm)

    def keep_loss(self, loss, *_):
        self.parts[-1]["loss"] = loss.detach().view(1)

    def keep_norm(self, norm, *_):
        self.tensors["grad_norm"] = torch.as_tensor(norm).view(1)

    def wrap(self, name: str, before=None, after=None):
        """Call before(*arguments) and after(result, *arguments) around a method of the trainer."""
        inner = getattr(self.trainer, name)

        def outer(*arguments, **options):
            if before and self.on:
                before(*arguments)
            result = inner(*arguments, **options)
            if after and self.on:
                after(result, *arguments)
            return result

        self.enter_context(patch.object(self.trainer, name, outer))

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
        if model is not self.trainer.model and model.training and any(dropouts(model)):
            self.about["training"] = ["ref_model"]
        if not self.parts:
            return
        part = self.parts[-1]
        logps = getattr(output, "log_probs", None)
        if logps is None:
            return
        if self.about["kind"] == "dpo" and not logps.requires_grad:
            part.setdefault("ref_per_token_logps", pad(logps, (1, 0)))
        if "per_token_logps" in part or not logps.requires_grad:
            return
        part["input_ids"] = options["input_ids"]
        part["attention_mask"] = options["attention_mask"]
        # what is masked gets a gradient that goes nowhere
        keep_outputs(part, [output.get(name) for name in OUTPUTS], 1, output.label_mask)

    def copy(self, *kinds: str):
        """Clone weights, gradients or the optimizer's state."""
        for name, p in self.trainer.model.named_parameters():
            values = {"before": p, "grad": p.grad, "clipped": p.grad, "after": p}
            values |= self.trainer.optimizer.state.get(p, {})
            for kind in kinds:
                if values.get(kind) is not None:
                    self.tensors[f"{kind}.{name}"] = values[kind].detach().clone()

    def on_pre_optimizer_step(self, args, state, control, **_):
        if not self.on:
            return
        self.rates.append(self.trainer.optimizer.param_groups[0]["lr"])
        self.tensors |= self.row_tensors(dump.join(self.parts), state.global_step)
        if "grad_norm" not in self.tensors:  # nothing was clipped
            self.copy("grad")
        self.copy("before", "clipped", "exp_avg", "exp_avg_sq")
        self.save_models(args, self.folder / str(state.global_step))
        self.about["optimizer"] = self.optimizer_settings(args, state)
        self.about["schedule"] = {
            "type": args.lr_scheduler_type.value,
            "learning_rate": args.learning_rate,
            "warmup_steps": args.get_warmup_steps(state.max_steps),
            "max_steps": state.max_steps,
            "step": state.global_step,
            "rates": self.rates[:-1],
        }
        self.about["dtype"] = str(self.trainer.model.dtype).removeprefix("torch.")

    def row_tensors(self, tensors: dict, step: int) -> dict:
        """Return the tensors of a step's rows, and of what they were taken from."""
        return tensors

    def save_models(self, args, folder: Path):
        """Save the models whose forwards can be computed again, and their tokenizer."""
        lost = {
            "model": args.neftune_noise_alpha or any(dropouts(self.trainer.model)),
            # it may have moved since the rollout
            "ref_model": self.is_later and args.sync_ref_model,
        }
        for name, model in self.models.items():
            self.about[name] = None if lost[name] else name
            if not lost[name]:
                model.save_pretrained(folder / name)
                tokenizer_of(self.trainer).save_pretrained(folder / name)
        if not self.about["model"]:
            self.about["old_model"] = None

    def optimizer_settings(self, args, state) -> dict:
        """Read the settings of AdamW as a step has them."""
        names = [name for name, _ in self.trainer.model.named_parameters()]
        return {
            "name": args.optim.value.partition("_")[0],
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
            dump.write(self.folder / str(state.global_step), self.about, self.tensors)
        self.parts = []
        self.tensors = {}


class GRPOSteps(Steps):
    """Writes steps of a GRPOTrainer, with what their rollouts had."""

    def __init__(self, trainer, folder, steps: int):
        super().__init__(trainer, folder, steps, grpo_options(trainer), self.micro_batch)
        self.rollouts = {}  # tensors of all rollouts so far
        self.conversations = []  # of a rollout whose completions call tools
        self.earlier_conversations = []
        self.rewards = {}  # of a rollout, by the number of their function
        self.wrap("_generate_and_score_completions", after=self.generated)
        self.wrap("_calculate_rewards", after=self.judged)
        if trainer.tools and not trainer._has_async_funcs:
            self.wrap("_generate_single_turn", after=self.drew)
        functions = [self.listened(*pair) for pair in enumerate(trainer.reward_funcs)]
        self.enter_context(patch.object(trainer, "reward_funcs", functions))

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
        begin = len(self.rollouts.get("group", ()))
        tensors = {
            "group": torch.tensor([begin + groups.index(group) for group in groups]),
            "rollout": torch.full((len(keys),), begin),
            "rollout_advantages": result["advantages"].clone(),
        }
        if self.rewards:
            tensors["rewards"] = torch.stack(list(self.rewards.values()), 1)
        self.rewards = {}
        self.rollouts = dump.join([self.rollouts, tensors]) if self.rollouts else tensors
        self.earlier_conversations += self.conversations
        self.conversations = []
        counted_mask = result["completion_mask"] * result.get("tool_mask", 1)
        drawn_mask = result["completion_ids"] != self.about["pad_token_id"]
        # these go through the trainer's shuffle and split
        rows = torch.arange(begin, begin + len(keys))
        result["row"] = rows
        result["rollout_step"] = rows * 0 + self.trainer.state.global_step
        result["rollout_tokens"] = rows * 0 + counted_mask.sum()
        result["rollout_drawn"] = rows * 0 + drawn_mask.sum()

    def listened(self, number: int, function):
        """Wrap a function of rewards to keep what it gives; models are not wrapped."""
        if isinstance(function, Module) or iscoroutinefunction(function):
            return function

        @wraps(function)
        def call(*arguments, **options):
            rewards = function(*arguments, **options)
            values = [torch.nan if reward is None else float(reward) for reward in rewards]
            self.rewards[number] = torch.tensor(values, dtype=torch.float64)
            return rewards

        return call

    def judged(self, result, *_):
        """Order rewards, and keep those of models, which are not wrapped."""
        columns = enumerate(result.double().unbind(1))
        self.rewards = {number: self.rewards.get(number, column) for number, column in columns}

    def row_tensors(self, tensors: dict, step: int) -> dict:
        """Add the rollouts that the rows of a step are of, and number the rows among theirs."""
        rollout = self.rollouts["rollout"]
        rows = torch.isin(rollout, rollout[tensors["row"]]).nonzero()[:, 0]
        tensors["row"] = torch.searchsorted(rows, tensors["row"])
        earlier_steps = set(tensors["rollout_step"].tolist()) - {step}
        exist = all((self.folder / f"{drawn}/model").is_dir() for drawn in earlier_steps)
        self.about["old_model"] = "../{}/model" if exist else None
        if earlier_steps:  # a trainer that keeps no old ones takes the present ones
            tensors.setdefault("old_per_token_logps", tensors["per_token_logps"])
        self.is_later = bool(earlier_steps)
        # the last step of an epoch may have fewer parts
        self.about["steps_per_rollout"] = self.trainer.args.steps_per_generation / len(self.parts)
        if self.earlier_conversations:
            conversations = [self.earlier_conversations[row] for row in rows]
            tensors |= conversation_tensors(conversations, self.trainer.processing_class)
        return tensors | {name: x[rows] for name, x in self.rollouts.items()}

    def micro_batch(self, inputs: dict) -> dict:
        """Take the tensors of a micro-batch; an adaptive entropy bonus may be off in this step."""
        args = self.trainer.args
        coefficient = self.trainer.entropy_coef
        if args.use_adaptive_entropy and self.trainer._last_world_entropy > args.entropy_target:
            coefficient = 0.0
        self.about["loss"]["entropy_coef"] = coefficient
        tensors = {name: inputs[name] for name in dump.BY_ROW if inputs.get(name) is not None}
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


def dropouts(model):
    """Yield the shares that the modules of a model drop, as some keep theirs as numbers."""
    for module in model.modules():
        for name, value in vars(module).items():
            if (name == "p" or "drop" in name) and isinstance(value, float):
                yield value


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
