"""Dump steps of TRL's GRPOTrainer, DPOTrainer and SFTTrainer for `python -m minivlmrl audit`: copy this file.

    with grpo_steps(trainer, "steps"):
        trainer.train()                     # steps/0, steps/1, ...; then: python -m minivlmrl audit steps/0

What is written is seen from outside of what is checked: ids and log-probabilities at the model's forward and the
gradient where it arrives there, the loss as training_step returns it, rewards as the functions gave them, gradients
before and after clipping, the weights around optimizer.step. Made for TRL 1.16 in one process.
"""

import re
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from transformers import TrainerCallback

from minivlmrl.audit import dump

LOSS = ("loss_type", "importance_sampling_level", "beta", "delta", "use_bias_correction_kl", "top_entropy_quantile")
LOSS += ("off_policy_mask_threshold", "sapo_temperature_pos", "sapo_temperature_neg")
LOSS += ("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg")
ROLLOUT = ("num_generations", "scale_rewards", "temperature", "max_completion_length", "mask_truncated_completions")
ROLLOUT += ("reward_weights", "multi_objective_aggregation")
DPO_LOSS = ("loss_weights", "beta", "label_smoothing", "f_divergence_type", "f_alpha_divergence_coef", "ld_alpha")
DPO_LOSS += ("use_weighting", "discopop_tau")

OUTPUTS = {"log_probs": ("per_token_logps", "logps_gradient"), "entropy": ("entropies", "entropies_gradient")}
OUTPUTS |= {"log_sum_sq_probs": ("log_sum_sq_probs", "")}
NO_DECAY = re.compile(r"bias|layernorm|rmsnorm|(^|\.)norm($|\.)|_norm($|\.)")  # what transformers.Trainer documents


@contextmanager
def sft_steps(trainer, folder, steps: int = 1):
    """Of an SFTTrainer; a model that takes no num_items_in_batch is averaged by micro-batch."""
    over = "step" if trainer.model_accepts_loss_kwargs else "micro_batch"
    about = {"kind": "sft", "loss": {"loss_type": trainer.args.loss_type.removeprefix("chunked_")}, "mean_over": over}
    with recorded(trainer, folder, about, steps) as record:

        def begin(model, inputs, *_, **__):
            only = prompt_mask(trainer, inputs) if trainer.completion_only_loss else {}
            record.begin({"completion_mask": (inputs["labels"] != -100).long(), **only}, inputs)

        record.wrap("compute_loss", begin)
        yield


@contextmanager
def dpo_steps(trainer, folder, steps: int = 1):
    """Of a DPOTrainer."""
    loss = {name: getattr(trainer.args, name) for name in DPO_LOSS} | {"loss_type": list(trainer.loss_types)}
    with recorded(trainer, folder, {"kind": "dpo", "loss": loss, "mean_over": "micro_batch"}, steps) as record:

        def begin(model, inputs, *_):
            count, pairs = torch.arange(len(inputs["input_ids"])), len(inputs["input_ids"]) // 2
            part = {
                "completion_mask": inputs["completion_mask"],
                "pair": count % pairs,
                "chosen": (count < pairs).long(),
            }
            record.begin(part | prompt_mask(trainer, inputs), inputs)

        record.wrap("_compute_loss", begin)
        yield


@contextmanager
def grpo_steps(trainer, folder, steps: int = 1):
    """Of a GRPOTrainer: rewards, groups and advantages of the rollout too."""
    a, rollout = trainer.args, {}
    loss = {name: getattr(a, name) for name in LOSS}
    loss |= {"epsilon_low": a.epsilon, "epsilon_high": a.epsilon if a.epsilon_high is None else a.epsilon_high}
    about = {"kind": "grpo", "loss": loss} | {name: getattr(a, name) for name in ROLLOUT}
    about |= {"stop_token_ids": list(trainer.eos_token_ids), "pad_token_id": trainer._tokenizer.pad_token_id}
    about["steps_per_rollout"] = a.steps_per_generation / a.gradient_accumulation_steps
    with recorded(trainer, folder, about, steps) as record:

        def generated(result, examples):
            keys, seen, groups = [str(e["prompt"]) + image_bytes(e) for e in examples], Counter(), {}
            for key in keys:
                groups.setdefault((key, seen[key] // a.num_generations), []).append(sum(seen.values()))
                seen[key] += 1
            group = {i: number for number, members in enumerate(groups.values()) for i in members}
            record.rollout["group"] = torch.tensor([group[i] for i in range(len(keys))])
            record.rollout["rollout_advantages"] = result["advantages"].clone()
            rollout.update(ids=[tokens(result, i) for i in range(len(keys))])
            about["rollout_tokens"] = int((result["completion_mask"] * result.get("tool_mask", 1)).sum())
            record.fresh = True

        def begin(model, inputs):
            part = {name: inputs[name] for name in dump.BY_ROW if name in inputs}
            part["prompt_mask"] = pad(inputs["prompt_mask"], (0, inputs["completion_ids"].shape[1]))
            part["completion_mask"] = inputs["completion_mask"] * inputs.get("tool_mask", 1)
            known, has = record.rollout["rollout_advantages"], inputs["advantages"].tolist()
            part["row"] = torch.zeros(len(has), dtype=torch.long)
            for i, value in enumerate(has):  # of equal completions the one with this advantage
                same = [j for j, ids in enumerate(rollout["ids"]) if ids == tokens(inputs, i)]
                part["row"][i] = min(same, key=lambda j: abs(known[j].item() - value))
            off = trainer.use_adaptive_entropy and trainer._last_world_entropy > a.entropy_target
            loss["entropy_coef"] = 0.0 if off else trainer.entropy_coef
            record.begin(part, inputs)

        record.wrap("_generate_and_score_completions", after=generated)
        record.wrap("_calculate_rewards", after=lambda result, *_: record.rollout.update(rewards=result.clone()))
        record.wrap("_compute_loss", begin)
        yield


def tokens(inputs: dict, row: int) -> tuple[list, list]:
    """Prompt and completion of a row, without padding."""
    parts = (("prompt_ids", "prompt_mask"), ("completion_ids", "completion_mask"))
    return tuple(inputs[ids][row][inputs[mask][row].bool()].tolist() for ids, mask in parts)


def image_bytes(example: dict) -> str:
    """Tells equal questions about different pictures apart."""
    images = example.get("images") or [example.get("image")]
    return str([hash(image.tobytes()) for image in images if image is not None])


@contextmanager
def recorded(trainer, folder, about: dict, steps: int):
    """Write the first `steps` steps into folder/0, folder/1, ..."""
    record = Record(trainer, Path(folder), about, steps)
    events = {name: getattr(record, name) for name in ("on_step_begin", "on_pre_optimizer_step", "on_optimizer_step")}
    callback = type("Watch", (TrainerCallback,), {name: staticmethod(call) for name, call in events.items()})()
    trainer.add_callback(callback)
    models = [model for model in (trainer.model, getattr(trainer, "ref_model", None)) if model is not None]
    hooks = [model.register_forward_hook(record.forward, with_kwargs=True) for model in models]
    record.wrap("training_step", after=record.lost)
    record.wrap("_clip_grad_norm", lambda model: record.parameters("grad"), record.clipped)
    try:
        yield record
    finally:
        for hook in hooks:
            hook.remove()
        trainer.remove_callback(callback)
        for name, before in reversed(record.wrapped):
            trainer.__dict__.pop(name)
            if before is not None:
                setattr(trainer, name, before)


class Record:
    """What of the present step is known so far."""

    def __init__(self, trainer, folder: Path, about: dict, steps: int):
        self.trainer, self.folder, self.about, self.steps = trainer, folder, about, steps
        self.wrapped, self.parts, self.tensors, self.rollout, self.fresh, self.step = [], [], {}, {}, False, -1

    def wrap(self, name: str, before=None, after=None):
        """Call before(*arguments) and after(result, *arguments) around a method of the trainer."""
        inner = getattr(self.trainer, name)
        self.wrapped.append((name, vars(self.trainer).get(name)))

        def outer(*arguments, **options):
            if before and self.on and self.trainer.model.training:
                before(*arguments, **options)
            result = inner(*arguments, **options)
            if after and self.on and self.trainer.model.training:
                after(result, *arguments, **options)
            return result

        setattr(self.trainer, name, outer)

    @property
    def on(self) -> bool:
        """Whether this step is written."""
        return 0 <= self.step < self.steps

    def begin(self, part: dict, inputs: dict):
        """A micro-batch: its row tensors, and pictures from its inputs."""
        grids, number = inputs.get("image_grid_thw"), inputs.get("num_images")
        pictures = {}
        if grids is not None:
            n = len(part["completion_mask"])
            number = [len(grids) // n] * n if number is None else number
            pictures = {
                "pixel_values": inputs["pixel_values"],
                "image_grid_thw": grids,
                "num_images": torch.tensor(number),
            }
        self.parts.append({name: x.detach().clone() for name, x in (part | pictures).items() if torch.is_tensor(x)})

    def forward(self, model, arguments, options, output):
        """After a forward that trains: its inputs, what it gives, and later its gradient. Also DPO's reference."""
        part, logps = self.parts[-1] if self.parts else {}, getattr(output, "log_probs", None)
        if logps is None or "completion_mask" not in part:
            return
        if self.about["kind"] == "dpo" and not logps.requires_grad:
            part.setdefault("ref_per_token_logps", pad(logps, (1, 0)))
        if not logps.requires_grad or "per_token_logps" in part:
            return
        part |= {name: options[name].clone() for name in ("input_ids", "attention_mask")}
        for name, (ours, slope) in OUTPUTS.items():
            x = output.get(name)
            if x is not None:
                part[ours] = pad(x.detach(), (1, 0))
            if x is not None and x.requires_grad:
                part[slope] = torch.zeros_like(part[ours])  # what is masked gets a gradient that goes nowhere
                x.register_hook(lambda g, to=slope: part.update({to: pad(g * output.label_mask, (1, 0))}))

    def lost(self, result, *_):
        self.parts[-1]["loss"] = result.detach().clone().view(1)

    def clipped(self, result, *_):
        self.tensors["grad_norm"] = torch.as_tensor(result).detach().clone().view(1)

    def parameters(self, kind: str):
        """Copy weights, gradients or a state of the optimizer."""
        for name, p in self.trainer.model.named_parameters():
            state = self.trainer.optimizer.state.get(p, {}) if kind.startswith("exp") else {}
            x = p.grad if kind in ("grad", "clipped") else state.get(kind) if kind.startswith("exp") else p
            if x is not None:
                self.tensors[f"{kind}.{name}"] = x.detach().cpu().clone()

    def on_step_begin(self, args, state, control, **_):
        self.step, self.parts, self.tensors, self.fresh = state.global_step, [], {}, False
        if self.on:
            self.parameters("before")
            reference = getattr(self.trainer, "ref_model", None)
            for name, model in (("model", self.trainer.model), ("ref_model", reference)):
                if model is not None:
                    model.save_pretrained(self.folder / str(self.step) / name)
                    self.about[name] = name

    def on_pre_optimizer_step(self, args, state, control, **_):
        if not self.on:
            return
        for kind in ("clipped", "exp_avg", "exp_avg_sq"):
            self.parameters(kind)
        if not any(name.startswith("grad.") for name in self.tensors):
            self.parameters("grad")
        model, done = self.trainer.model, state.global_step
        plain = [name for name, _ in model.named_parameters() if NO_DECAY.search(name.lower())]
        rate = self.trainer.optimizer.param_groups[0]["lr"]
        optimizer = {"name": str(getattr(args.optim, "value", args.optim)).partition("_")[0], "learning_rate": rate}
        optimizer |= {"betas": [args.adam_beta1, args.adam_beta2], "eps": args.adam_epsilon, "no_decay": plain}
        optimizer |= {"weight_decay": args.weight_decay, "max_grad_norm": args.max_grad_norm, "step": done + 1}
        kind, warmup = (
            str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)),
            args.get_warmup_steps(state.max_steps),
        )
        schedule = {"type": kind, "learning_rate": args.learning_rate, "warmup_steps": warmup}
        self.about |= {"optimizer": optimizer, "schedule": schedule | {"max_steps": state.max_steps, "step": done}}
        self.about |= {"dtype": str(model.dtype).removeprefix("torch."), "old_model": "model" if self.fresh else None}

    def on_optimizer_step(self, args, state, control, **_):
        if not self.on:
            return
        self.parameters("after")
        pictures = ("pixel_values", "image_grid_thw", "num_images", "loss")
        tensors = {name: torch.cat([part[name] for part in self.parts]) for name in pictures if name in self.parts[0]}
        for name in dump.BY_ROW:
            if name in self.parts[0]:
                of = [part[name].flip(1) if part[name].dim() == 2 else part[name] for part in self.parts]
                x = [row for part in of for row in part]
                tensors[name] = pad_sequence(x, batch_first=True).flip(1) if x[0].dim() else torch.stack(x)
        sizes = torch.tensor([len(part["input_ids"]) for part in self.parts])
        tensors["micro_batch"] = torch.arange(len(sizes)).repeat_interleave(sizes)
        if "pair" in tensors:
            tensors["pair"] = tensors["pair"] + 10**6 * tensors["micro_batch"]
        dump.write(self.folder / str(self.step), self.about, tensors | self.rollout | self.tensors)


def prompt_mask(trainer, inputs: dict) -> dict:
    """Where the prompts of chats end: after the last generation prompt. {} where there is no template."""
    processor = trainer.processing_class
    tokenizer = getattr(processor, "tokenizer", processor)
    if not processor.chat_template:
        return {}
    chat = [{"role": "user", "content": "x"}]
    texts = [processor.apply_chat_template(chat, tokenize=False, add_generation_prompt=on) for on in (False, True)]
    start = tokenizer(texts[1].removeprefix(texts[0]), add_special_tokens=False)["input_ids"]
    windows = inputs["input_ids"].unfold(1, len(start), 1)
    found = (windows == torch.tensor(start)).all(-1)
    ends = torch.where(found, torch.arange(found.shape[1]) + len(start), 0).amax(1, keepdim=True)
    return {"prompt_mask": (torch.arange(inputs["input_ids"].shape[1]) < ends).long()}
