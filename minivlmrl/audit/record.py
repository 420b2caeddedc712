"""Watch a transformers Trainer from outside of what is checked, and write its optimizer steps.

Ids and log-probabilities are taken at the model's forward and the gradient where it arrives there, the loss as
training_step returns it, gradients before and after clipping, the weights around optimizer.step.
"""

import re
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from minivlmrl.audit import dump

OUTPUTS = {"log_probs": ("per_token_logps", "logps_gradient"), "entropy": ("entropies", "entropies_gradient")}
OUTPUTS |= {"log_sum_sq_probs": ("log_sum_sq_probs", "")}
NO_DECAY = re.compile(r"bias|layernorm|rmsnorm|(^|\.)norm($|\.)|_norm($|\.)")  # what transformers.Trainer documents


@contextmanager
def recorded(trainer, folder, about: dict, steps: int):
    """Write the first `steps` steps into folder/0, folder/1, ..."""
    from transformers import TrainerCallback

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
            pictures = {"pixel_values": inputs["pixel_values"], "image_grid_thw": grids, "num_images": torch.tensor(number)}
        self.parts.append({name: x.detach().clone() for name, x in (part | pictures).items() if torch.is_tensor(x)})

    def forward(self, model, arguments, options, output):
        """After a forward that trains: its inputs, what it gives, and later the gradient of that. DPO's reference too."""
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
        kind, warmup = str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)), args.get_warmup_steps(state.max_steps)
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
