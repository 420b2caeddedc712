"""Dump steps of TRL's trainers, 1.16 in one process, for `python -m minivlmrl audit`.

    with grpo_steps(trainer, "steps"):      # or dpo_steps, sft_steps
        trainer.train()                     # steps/0, steps/1, ...; then: python -m minivlmrl audit steps/0

All is seen from outside of what is checked: log-probabilities at the model's forward and the
gradient where it arrives there, the loss as training_step returns it, rewards as the functions gave
them, the weights around optimizer.step.
"""

import pickle
import re
from contextlib import ExitStack
from functools import partial, wraps
from inspect import iscoroutinefunction
from itertools import takewhile
from operator import eq
from pathlib import Path
from unittest.mock import patch

import torch
from torch.nn import Module
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from transformers import TrainerCallback

from minivlmrl_audit import dump
from minivlmrl_audit.options import options_of
from minivlmrl_audit.step_checks import here_or_later

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
    loss = options_of("dpo", vars(trainer.args))
    if not set(dump.NAMES["smoothed losses"]) & set(loss["loss_type"]):
        loss["label_smoothing"] = 0.0
    about = {"kind": "dpo", "loss": loss, "mean_over": "micro_batch"}

    def rows(inputs: dict) -> dict:
        pairs = len(inputs["input_ids"]) // 2
        number = torch.arange(2 * pairs)
        return {
            "pair": number % pairs,
            "chosen": (number < pairs).long(),
            **prompt_mask(trainer, inputs["input_ids"]),
        }

    return Steps(trainer, folder, steps, about, rows)


def grpo_steps(trainer, folder, steps: int = 1) -> "Steps":
    """Dump a GRPOTrainer's: rewards, groups and advantages of the rollout too."""
    return GRPOSteps(trainer, folder, steps)


def grpo_options(trainer) -> dict:
    """Read the options of GRPO as a step has them."""
    config = dict(vars(trainer.args))
    config["epsilon_low"] = config["epsilon"]
    if config["epsilon_high"] is None:
        config["epsilon_high"] = config["epsilon"]
    return {
        "kind": "grpo",
        "loss": options_of("grpo", config),
        # those of the step that drew a row
        "old_model": "../{}/model",
        "ref_model": trainer.ref_model and "../{}/ref_model",
        "stop_token_ids": list(trainer.eos_token_ids),
        "pad_token_id": trainer._tokenizer.pad_token_id,
        "image_token_id": trainer._image_pad_token_id,
        **{name: config.get(name) for name in dump.NAMES["options of a rollout"]},
    }


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
    start_ids = trainer._tokenizer.encode(generation_prompt, add_special_tokens=False)
    starts = (ids.unfold(1, len(start_ids), 1) == torch.tensor(start_ids)).all(-1)
    ends = pad(starts, (len(start_ids) - 1, 0))
    return {"prompt_mask": here_or_later(ends).long()}


class Steps(ExitStack, TrainerCallback):
    """Writes the first steps into folder/0, folder/1, ...

    `rows` gives the tensors of a micro-batch.
    """

    def __init__(self, trainer, folder, steps: int, about: dict, rows):
        super().__init__()
        self.trainer = trainer
        self.folder = Path(folder)
        self.steps = steps
        self.rows = rows
        self.parts = []  # tensors of each micro-batch so far
        self.tensors = {}  # of the step: rows, weights, gradients, the optimizer's state
        self.rates = []  # of the steps so far
        self.models = {"model": trainer.model}
        if getattr(trainer, "ref_model", None):
            self.models["ref_model"] = trainer.ref_model
        image_token_id = getattr(trainer.model.config, "image_token_id", None)
        names = {name: name for name in self.models}
        self.about = {"image_token_id": image_token_id, **names, **about}
        for model in self.models.values():
            self.callback(model.register_forward_hook(self.forward, with_kwargs=True).remove)
        trainer.add_callback(self)
        self.callback(trainer.remove_callback, self)
        self.wrap("_prepare_inputs", self.begin)
        self.wrap("training_step", self.keep_loss)
        self.wrap("_clip_grad_norm", self.keep_norm)

    def keep_loss(self, loss, *_):
        self.parts[-1]["loss"] = loss.detach().view(1)
        self.copy("grad")

    def keep_norm(self, norm, *_):
        self.tensors["grad_norm"] = torch.as_tensor(norm).view(1)

    def looked(self, inner, look):
        """Wrap a function: look(result, *arguments) comes after it."""

        @wraps(inner)
        def outer(*arguments, **options):
            result = inner(*arguments, **options)
            if self.on:
                look(result, *arguments)
            return result

        return outer

    def wrap(self, name: str, look):
        """Look at what a method of the trainer returns."""
        method = self.looked(getattr(self.trainer, name), look)
        self.enter_context(patch.object(self.trainer, name, method))

    @property
    def on(self) -> bool:
        """Tell whether this step is written; evaluations are not."""
        return self.trainer.state.global_step < self.steps and self.trainer.model.training

    def begin(self, inputs: dict, *_):
        """Keep a micro-batch: its row tensors and pictures."""
        part = self.rows(inputs)
        names = {name: name for name in dump.BY_ROW} | dump.NAMES["inputs"]
        for their_name, name in names.items():
            if inputs.get(their_name) is not None:
                part.setdefault(name, torch.as_tensor(inputs[their_name]))
        rows = next(iter(part.values()))
        part["micro_batch"] = torch.full((len(rows),), len(self.parts))
        self.parts.append(part)

    def forward(self, model, arguments, options, output):
        """Keep what a forward that trains takes and gives, later its gradient; DPO's reference."""
        if model is not self.trainer.model and model.training and any(noises(model)):
            self.about["training"] = ["ref_model"]
        logps = getattr(output, "log_probs", None)
        if not self.parts or logps is None:
            return
        part = self.parts[-1]
        if logps.requires_grad:
            part["input_ids"] = options["input_ids"]
            part["attention_mask"] = options["attention_mask"]
            # what is masked gets a gradient that goes nowhere
            keep_outputs(part, output, output.label_mask)
        elif "pair" in part:
            part.setdefault("ref_per_token_logps", logps.clone())

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
        self.copy("before", "clipped", "exp_avg", "exp_avg_sq")
        self.save_models(self.folder / str(state.global_step))
        self.about |= self.settings(args, state)

    def row_tensors(self, tensors: dict, step: int) -> dict:
        """Return the tensors of a step's rows, and of what they were taken from."""
        return tensors

    def save_models(self, folder: Path):
        """Save the models whose forwards can be computed again, and their tokenizer."""
        if any(noises(self.trainer.model)):  # drawn once
            self.models.pop("model", None)
            self.about["model"] = None
            self.about["old_model"] = None
        for name, model in self.models.items():
            model.save_pretrained(folder / name)
            self.trainer._tokenizer.save_pretrained(folder / name)

    def settings(self, args, state) -> dict:
        """Read the settings of AdamW and of its learning rate as a step has them."""
        model = self.trainer.model
        parameters = model.named_parameters()
        return {
            "optimizer": {
                "name": args.optim.value.partition("_")[0],
                "learning_rate": self.rates[-1],
                "betas": [args.adam_beta1, args.adam_beta2],
                "eps": args.adam_epsilon,
                "no_decay": [name for name, _ in parameters if NO_DECAY.search(name.lower())],
                "weight_decay": args.weight_decay,
                "max_grad_norm": args.max_grad_norm,
                "step": state.global_step + 1,
            },
            "schedule": {
                "type": args.lr_scheduler_type.value,
                "learning_rate": args.learning_rate,
                "warmup_steps": args.get_warmup_steps(state.max_steps),
                "max_steps": state.max_steps,
                "step": state.global_step,
                "rates": self.rates[:-1],
            },
            "dtype": str(model.dtype).removeprefix("torch."),
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
        self.rollouts = []  # tensors of each so far
        self.num_rows = 0  # of these rollouts
        self.conversations = []  # of all rows so far, where completions call tools
        self.given_rewards = {}  # of a rollout, by the number of their function
        self.wrap("_generate_and_score_completions", self.generated)
        self.wrap("_calculate_rewards", self.judged)
        if trainer.tools:
            self.wrap("_generate_single_turn", self.drew)
        functions = list(trainer.reward_funcs)
        for number, function in enumerate(functions):
            # what a model gives is taken from the trainer
            if not (isinstance(function, Module) or iscoroutinefunction(function)):
                keep = partial(self.given_rewards.__setitem__, number)
                functions[number] = self.looked(function, keep)
        self.enter_context(patch.object(trainer, "reward_funcs", functions))

    def drew(self, result, prompts: list, pictures, *_):
        """Keep a turn of some rows, in their order: what the sampler was given, what it drew."""
        if len(self.conversations) == self.num_rows:  # the first turn
            self.conversations += map(Conversation, prompts)
        conversations = self.conversations[self.num_rows :]
        pictures = pictures or [None] * len(prompts)
        row = -1
        for given_ids, shown, drawn_ids in zip(prompts, pictures, result[0], strict=True):
            counts = [x.num_known(given_ids) for x in conversations]
            row = max(range(row + 1, len(counts)), key=counts.__getitem__)
            conversations[row].pictures = shown or []
            conversations[row].add(given_ids, drawn_ids, self.trainer._tokenizer)

    def generated(self, result: dict, examples: list):
        """Keep a rollout: groups, advantages, and what the sampler had."""
        keys = [pickle.dumps(example) for example in examples]  # texts and pictures
        # a prompt may return
        groups = [
            (key, keys[:i].count(key) // self.trainer.num_generations) for i, key in enumerate(keys)
        ]
        begin = self.num_rows
        self.num_rows += len(keys)
        rows = torch.arange(begin, self.num_rows)
        rollout = {
            "group": torch.tensor([begin + groups.index(group) for group in groups]),
            "rollout": rows * 0 + begin,
            "rollout_advantages": result["advantages"].clone(),
            "rewards": self.rewards,
        }
        self.rollouts.append(rollout)
        counted_mask = result["completion_mask"] * result.get("tool_mask", 1)
        drawn_mask = result["completion_ids"] != self.about["pad_token_id"]
        # these go through the trainer's shuffle and split
        result["row"] = rows
        result["rollout_step"] = rows * 0 + self.trainer.state.global_step
        result["rollout_tokens"] = rows * 0 + counted_mask.sum()
        result["rollout_drawn"] = rows * 0 + drawn_mask.sum()

    def judged(self, result, *_):
        """Keep rewards (N, K) as the functions gave them; None is NaN."""
        self.rewards = result.clone().double()
        for number, rewards in self.given_rewards.items():
            self.rewards.numpy()[:, number] = rewards

    def row_tensors(self, tensors: dict, step: int) -> dict:
        """Add the rollouts that the rows of a step are of, and number the rows among theirs."""
        # from the first of theirs on: what was drawn after it is in this step too
        rollouts = dump.join(self.rollouts)
        begin = rollouts["rollout"][tensors["row"]].min()
        tensors["row"] -= begin
        if (tensors["rollout_step"] < step).any():
            # a trainer that keeps no old ones takes the present ones
            tensors.setdefault("old_per_token_logps", tensors["per_token_logps"])
        # the last step of an epoch may have fewer parts
        self.about["steps_per_rollout"] = self.trainer.args.steps_per_generation / len(self.parts)
        if self.conversations:
            tensors |= conversation_tensors(self.conversations[begin:], self.trainer)
        return tensors | {name: x[begin:] for name, x in rollouts.items()}

    def micro_batch(self, inputs: dict) -> dict:
        """Take the tensors of a micro-batch; an adaptive entropy bonus may be off in this step."""
        trainer = self.trainer
        if trainer.args.use_adaptive_entropy:
            is_on = trainer._last_world_entropy <= trainer.args.entropy_target
            self.about["loss"]["entropy_coef"] = trainer.entropy_coef * is_on
        completion_mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)
        return {
            "completion_mask": completion_mask,
            "prompt_mask": pad(inputs["prompt_mask"], (0, completion_mask.shape[1])),
        }


def keep_outputs(part: dict, output, mask=1):
    """Keep what a forward gave of each token (n, T), and later its gradient times a mask."""
    for output_name, (name, slope_name) in dump.NAMES["outputs"].items():
        x = output.get(output_name)
        if x is not None:
            part[name] = x.detach().clone()
        if x is not None and x.requires_grad:
            part[slope_name] = torch.zeros_like(part[name])
            x.register_hook(partial(keep_slope, part, slope_name, mask))


def keep_slope(part: dict, name: str, mask, gradient):
    part[name] = gradient * mask


def noises(model):
    """Yield the sizes of the noise that a model draws in training, as its modules keep them."""
    for module in model.modules():
        for name, value in vars(module).items():
            # of dropout, of attention, of NEFTune
            if re.search("^p$|drop|noise", name) and type(value) in (int, float):
                yield value


class Conversation:
    """What the sampler had of a completion."""

    def __init__(self, prompt: list[int]):
        self.prompt = prompt
        self.tokens = []  # (id, 1: drawn or 0: given) of each after the prompt
        self.forms = [prompt]  # what the last turn had, and that encoded again

    def num_known(self, given_ids: list[int]) -> int:
        """Count the first ids that are those of its last turn."""
        return max(sum(takewhile(bool, map(eq, form, given_ids))) for form in self.forms)

    def add(self, given_ids: list[int], drawn_ids: list[int], tokenizer):
        """Add a turn: what was given, and what was drawn then."""
        new_ids = given_ids[self.num_known(given_ids) :]
        self.tokens += [(x, 0) for x in new_ids] + [(x, 1) for x in drawn_ids]
        later_ids = given_ids[len(self.prompt) :] + drawn_ids
        encoded_again = tokenizer.encode(tokenizer.decode(later_ids), add_special_tokens=False)
        self.forms = [self.prompt + later_ids, self.prompt + encoded_again]


def conversation_tensors(conversations: list[Conversation], trainer) -> dict:
    """Lay out what the sampler had in a rollout; pictures of prompts, then of tools."""
    longest = trainer.max_completion_length  # what is drawn beyond it is cut
    rows = [torch.tensor(x.tokens[:longest]).view(-1, 2) for x in conversations]
    tokens = pad_sequence(rows, batch_first=True, padding_value=-1)
    tensors = {
        "sampler_ids": tokens[..., 0],
        "sampler_mask": tokens[..., 1],
        "sampler_num_images": torch.tensor([len(x.pictures) for x in conversations]),
    }
    pictures = [image for x in conversations for image in x.pictures]
    if pictures:
        fields = trainer.processing_class.image_processor(images=pictures, return_tensors="pt")
        tensors |= {f"sampler_{name}": x for name, x in fields.items()}
    return tensors
