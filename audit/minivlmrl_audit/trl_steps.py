"""Dump steps of TRL's trainers, 0.15 to 1.16 in one process, for `python -m minivlmrl audit`.

    with grpo_steps(trainer, "steps"):      # or dpo_steps, sft_steps
        trainer.train()                     # steps/0, steps/1, ...; then: python -m minivlmrl audit steps/0

All is seen from outside of what is checked: log-probabilities at the model's forward and the
gradient where it arrives there, the loss as training_step returns it, rewards as the functions gave
them, the weights around optimizer.step.
"""

import re
from contextlib import ExitStack
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
    *("num_generations", "scale_rewards", "reward_weights", "multi_objective_aggregation"),
    *("temperature", "max_completion_length", "mask_truncated_completions"),
)
# what a release does that lacks an option of GRPO; before 0.16 rows were averaged
OLDER = {"scale_rewards": True, "use_bias_correction_kl": False, "loss_type": "bnpo"}
OLDER |= {"epsilon": 0.2, "epsilon_high": None}
SCALES = {True: "group", False: "none"}  # up to 0.21
# of a trainer, the newest first: what generates, what gives log-probabilities
GENERATES = "_generate_and_score_completions", "_prepare_inputs"
SCORES = "_get_per_token_logps_and_entropies", "_get_per_token_logps"
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
    kind = getattr(trainer.args, "loss_type", "nll").removeprefix("chunked_")
    about = {"kind": "sft", "loss": {"loss_type": kind}}
    about["mean_over"] = "step" if trainer.model_accepts_loss_kwargs else "micro_batch"

    def rows(inputs: dict) -> dict:
        follows = inputs["attention_mask"].cumsum(1) > 1  # nothing predicts the first token
        prompt = {"prompt_mask": (~follows).long()}
        if getattr(trainer, "completion_only_loss", False):
            prompt = prompt_mask(trainer, inputs["input_ids"])
        elif getattr(trainer.args, "assistant_only_loss", False):
            prompt = {}
        return {"completion_mask": ((inputs["labels"] != -100) & follows).long()} | prompt

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
        asked = inputs.get("prompt_attention_mask")  # up to 0.28, which joins them later
        pairs = len(inputs["input_ids"]) // 2 if asked is None else len(asked)
        count = torch.arange(2 * pairs)
        tensors = {"pair": count % pairs, "chosen": (count < pairs).long()}
        if asked is not None:
            return tensors | {"asked": asked.sum(1).repeat(2)}
        tensors["completion_mask"] = inputs["completion_mask"]
        return tensors | prompt_mask(trainer, inputs["input_ids"])

    return Steps(trainer, folder, steps, about, rows)


def grpo_steps(trainer, folder, steps: int = 1) -> "Steps":
    """Dump a GRPOTrainer's: rewards, groups and advantages of the rollout too."""
    a = trainer.args
    has = OLDER | vars(trainer.args)
    has["scale_rewards"] = SCALES.get(has["scale_rewards"], has["scale_rewards"])
    if not hasattr(a, "epsilon"):
        has["loss_type"] = "grpo"
    loss = {name: x for name, x in has.items() if name in PolicyOptions.__dataclass_fields__}
    high = has["epsilon"] if has["epsilon_high"] is None else has["epsilon_high"]
    loss |= {"epsilon_low": has["epsilon"], "epsilon_high": high}
    about = {"kind": "grpo", "loss": loss} | {name: has.get(name) for name in ROLLOUT}
    tokenizer = tokenizer_of(trainer)
    parts = a.gradient_accumulation_steps
    about["stop_token_ids"] = list(getattr(trainer, "eos_token_ids", [tokenizer.eos_token_id]))
    about["pad_token_id"] = tokenizer.pad_token_id
    about["steps_per_rollout"] = has.get("steps_per_generation", parts) / parts
    about["image_token_id"] = getattr(trainer, "_image_pad_token_id", None)
    log = []  # of a rollout: (prompts, what was drawn, pictures) of turns, (row, pictures) of calls

    def drew(result, ids, images, *_):
        if not log:  # each row has its own dictionary of tools
            for row, tools in enumerate(trainer._sync_tool_dicts):
                tools |= {name: partial(called, row, tool) for name, tool in tools.items()}
        log.append(([*ids], [*result[0]], images))  # the loop writes into these lists

    def called(row: int, tool, **arguments):
        answer = tool(**arguments)
        parts = answer if isinstance(answer, list) else []
        log.append((row, [part["image"] for part in parts if part.get("type") == "image"]))
        return answer

    def generated(result: dict, examples: list):
        images = [e.get("images") or [e.get("image")] for e in examples]
        keys = [
            (str(e["prompt"]), *(x and x.tobytes() for x in own))
            for e, own in zip(examples, images, strict=True)
        ]
        # a prompt may return
        group = [(key, keys[:i].count(key) // a.num_generations) for i, key in enumerate(keys)]
        record.rollout["group"] = torch.tensor([group.index(key) for key in group])
        record.rollout["rollout_advantages"] = result["advantages"].clone()
        result["row"] = torch.arange(len(keys))  # goes through the trainer's shuffle and split
        counted = result["completion_mask"] * result.get("tool_mask", 1)
        about["rollout_tokens"] = int(counted.sum())
        about["rollout_drawn"] = int((result["completion_ids"] != tokenizer.pad_token_id).sum())
        about["old_model"] = "model"
        if log:
            record.rollout |= conversations(trainer, log)
            log.clear()

    def judged(result, *_):
        record.rollout["rewards"] = result.clone()

    def rows(inputs: dict) -> dict:
        off = has.get("use_adaptive_entropy") and trainer._last_world_entropy > a.entropy_target
        loss["entropy_coef"] = 0.0 if off else getattr(trainer, "entropy_coef", 0.0)
        prompt = pad(inputs["prompt_mask"], (0, inputs["completion_ids"].shape[1]))
        counted = inputs["completion_mask"] * inputs.get("tool_mask", 1)
        own = {"completion_mask": counted, "prompt_mask": prompt}
        if inputs.get("sampling_per_token_logps") is not None:
            own["sampler_logps"] = inputs["sampling_per_token_logps"]
        known = {name: x for name, x in inputs.items() if name in dump.BY_ROW and x is not None}
        return known | own

    record = Steps(trainer, folder, steps, about, rows)
    record.wrap(next(name for name in GENERATES if hasattr(trainer, name)), after=generated)
    record.wrap(next(name for name in SCORES if hasattr(trainer, name)), after=record.scored)
    if hasattr(trainer, "_calculate_rewards"):
        record.wrap("_calculate_rewards", after=judged)
    if getattr(trainer, "tools", None) and not getattr(trainer, "_has_async_funcs", False):
        record.wrap("_generate_single_turn", after=drew)
    return record


def tokenizer_of(trainer):
    """Return the tokenizer, whatever holds it."""
    return getattr(trainer.processing_class, "tokenizer", trainer.processing_class)


def conversations(trainer, log: list) -> dict:
    """Lay out what the sampler had in a rollout, drawn or given; pictures of prompts, then tools.

    A later turn belongs to the row whose ids it goes on with, maybe encoded again.
    """
    (prompts, drawn, images), *log = log
    ids = [[*x] for x in drawn]
    flags = [[1] * len(x) for x in drawn]
    had = [*drawn]
    shows = [[*(x or [])] for x in images or [()] * len(ids)]
    waiting = [[] for _ in ids]
    for row, of_turn, *turn in log:
        if not turn:
            waiting[row] += of_turn
            continue
        at = -1
        encode = partial(tokenizer_of(trainer).encode, add_special_tokens=False)
        again = [encode(tokenizer_of(trainer).decode(own)) for own in had]
        for given, new in zip(row, of_turn, strict=True):
            fits = [
                max((shared(x + own, given) == len(x + own), shared(x + own, given)) for own in of)
                for x, *of in zip(prompts, had, again, strict=True)
            ]
            at = max(range(at + 1, len(ids)), key=fits.__getitem__)
            given, own = given[len(prompts[at]) :], had[at]
            if given[: len(own)] != own:
                own = again[at]
            cut = len(own) if given[: len(own)] == own else shared(had[at], given)
            new = new[: trainer.max_completion_length - len(given)]
            flags[at] += [0] * len(given[cut:]) + [1] * len(new)
            ids[at] += given[cut:] + new
            had[at], shows[at] = given + new, shows[at] + waiting[at]
        waiting = [[] for _ in ids]
    padded = (pad_sequence(list(map(torch.tensor, x)), True, -1) for x in (ids, flags))
    tensors = dict(zip(("sampler_ids", "sampler_mask"), padded, strict=True))
    tensors["sampler_num_images"] = torch.tensor([*map(len, shows)])
    if flat := [image for own in shows for image in own]:
        given = trainer.processing_class.image_processor(images=flat, return_tensors="pt")
        tensors |= {f"sampler_{name}": given[name] for name in ("pixel_values", "image_grid_thw")}
    return tensors


def shared(x: list, y: list) -> int:
    """Count how many first tokens are the same."""
    return next((i for i, pair in enumerate(zip(x, y, strict=False)) if len({*pair}) > 1), len(x))


def prompt_mask(trainer, ids: torch.Tensor) -> dict:
    """Find where prompts of chats end: after the last generation prompt.

    {} where there is no template."""
    processor = trainer.processing_class
    chat = [{"role": "user", "content": "x"}]
    if not processor.chat_template:
        return {}
    render = partial(processor.apply_chat_template, chat, tokenize=False)
    without, asked = (render(add_generation_prompt=on) for on in (False, True))
    tokenizer = getattr(processor, "tokenizer", processor)
    start = tokenizer.encode(asked.removeprefix(without), add_special_tokens=False)
    starts = (ids.unfold(1, len(start), 1) == torch.tensor(start)).all(-1)
    ends = torch.where(starts, torch.arange(starts.shape[1]) + len(start), 0).amax(1, keepdim=True)
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
        self.about, self.rows = about, rows
        self.parts = []
        self.tensors = {}
        self.rollout = {}
        models = {name: getattr(trainer, name, None) for name in ("model", "ref_model")}
        self.models = {name: model for name, model in models.items() if model is not None}
        for model in self.models.values():
            self.callback(model.register_forward_hook(self.forward, with_kwargs=True).remove)
        trainer.add_callback(self)
        self.callback(trainer.remove_callback, self)
        self.wrap("compute_loss", self.begin)
        self.wrap("training_step", after=self.keep_loss)
        own = hasattr(trainer, "_clip_grad_norm")  # not before transformers 5
        clips = (trainer, "_clip_grad_norm") if own else (trainer.accelerator, "clip_grad_norm_")
        self.wrap(clips[1], lambda *_: self.copy("grad"), self.keep_norm, clips[0])

    def keep_loss(self, loss, *_):
        self.parts[-1]["loss"] = loss.detach().view(1)

    def keep_norm(self, norm, *_):
        self.tensors["grad_norm"] = torch.as_tensor(norm).view(1)

    def wrap(self, name: str, before=lambda *_: None, after=lambda *_: None, owner=None):
        """Call before(*arguments) and after(result, *arguments) around a method of the trainer."""
        owner = owner or self.trainer
        inner = getattr(owner, name)

        def outer(*arguments, **options):
            if self.on:
                before(*arguments)
            result = inner(*arguments, **options)
            if self.on:
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
        part["micro_batch"] = torch.full((len(next(iter(part.values()))),), len(self.parts))
        self.parts.append(part)

    def forward(self, model, arguments, options, output):
        """Keep what a forward that trains takes and gives, later its gradient; DPO's reference."""
        part = self.parts[-1] if self.parts else {}
        logps = getattr(output, "log_probs", None)
        if part and logps is None and self.about["kind"] != "grpo":
            ids = options.get("input_ids", arguments[0] if arguments else None)
            self.from_logits(part, ids, options["attention_mask"], output.logits)
        if not part or logps is None:
            return
        if self.about["kind"] == "dpo" and not logps.requires_grad:
            part.setdefault("ref_per_token_logps", pad(logps, (1, 0)))
        if "per_token_logps" in part or not logps.requires_grad:
            return
        part.update({name: options[name] for name in ("input_ids", "attention_mask")})
        for name, (ours, slope) in OUTPUTS.items():
            x = output.get(name)
            if x is not None:
                part[ours] = pad(x.detach(), (1, 0))
            if x is not None and x.requires_grad:
                # what is masked gets a gradient that goes nowhere
                part[slope] = torch.zeros_like(part[ours])
                keep = partial(self.keep_slope, part, slope, output.label_mask)
                x.register_hook(keep)

    def scored(self, result, model, input_ids, attention_mask, *_):
        """Keep what a trainer's own method gives, where the model gives logits alone."""
        part = self.parts[-1] if self.parts else {"per_token_logps": None}
        if isinstance(result, dict):
            result = result["logps"], result.get("entropies")
        logps, entropies, *_ = (result, None) if isinstance(result, torch.Tensor) else result
        if "per_token_logps" in part or not logps.requires_grad:
            return
        part.update(input_ids=input_ids, attention_mask=attention_mask)
        for x, (ours, slope) in zip((logps, entropies), OUTPUTS.values(), strict=False):
            if x is not None:
                part[ours] = x.detach()
            if x is not None and x.requires_grad:
                part[slope] = torch.zeros_like(x)
                x.register_hook(partial(part.__setitem__, slope))

    def from_logits(self, part: dict, ids, attention_mask, logits):
        """Keep log-probabilities of logits (n, S, V), and the gradient that comes through them."""
        labels = ids[:, 1:, None]
        logps = logits.detach()[:, :-1].log_softmax(-1)
        own = pad(logps.gather(2, labels)[..., 0], (1, 0))
        if not logits.requires_grad:
            part.setdefault("ref_per_token_logps", own)
            return
        part.update(input_ids=ids, attention_mask=attention_mask, per_token_logps=own)
        if (asked := part.pop("asked", None)) is not None:
            after = attention_mask.cumsum(1) > asked[:, None]
            part["completion_mask"] = (after & attention_mask.bool()).long()
            part["prompt_mask"] = attention_mask - part["completion_mask"]

        def keep(gradient):
            along = (-logps.exp()).scatter_add(2, labels, torch.ones(labels.shape))
            slope = (gradient[:, :-1] * along).sum(-1) / along.square().sum(-1)
            part["logps_gradient"] = pad(slope, (1, 0))

        logits.register_hook(keep)

    @staticmethod
    def keep_slope(part: dict, name: str, mask, gradient):
        part[name] = pad(gradient * mask, (1, 0))

    def copy(self, *kinds: str):
        """Clone weights, gradients or the optimizer's state."""
        for name, p in self.trainer.model.named_parameters():
            of = {"before": p, "grad": p.grad, "clipped": p.grad, "after": p}
            of |= self.trainer.optimizer.state.get(p, {})
            for kind in (kind for kind in kinds if of.get(kind) is not None):
                self.tensors[f"{kind}.{name}"] = of[kind].detach().clone()

    def on_pre_optimizer_step(self, args, state, control, **_):
        if not self.on:
            return
        self.copy("before", "clipped", "exp_avg", "exp_avg_sq")
        if "grad_norm" not in self.tensors:
            self.copy("grad")
        drops = (part.p for part in self.trainer.model.modules() if isinstance(part, Dropout))
        later = self.about["kind"] == "grpo" and not self.about.get("old_model")
        # whose forward cannot be computed again: a reference may have moved since the rollout
        noisy = args.neftune_noise_alpha or any(drops)
        lost = {"model": noisy, "ref_model": later and args.sync_ref_model}
        for name, model in self.models.items():
            self.about[name] = None if lost[name] else name
            if not lost[name]:
                for part in (model, tokenizer_of(self.trainer)):
                    part.save_pretrained(self.folder / str(state.global_step) / name)
        names = (name for name, _ in self.trainer.model.named_parameters())
        warmup = args.get_warmup_steps(state.max_steps)
        kind = args.lr_scheduler_type
        self.about["optimizer"] = {
            "name": str(getattr(args.optim, "value", args.optim)).partition("_")[0],
            "learning_rate": self.trainer.optimizer.param_groups[0]["lr"],
            "betas": [args.adam_beta1, args.adam_beta2],
            "eps": args.adam_epsilon,
            "no_decay": [name for name in names if NO_DECAY.search(name.lower())],
            "weight_decay": args.weight_decay,
            "max_grad_norm": args.max_grad_norm,
            "step": state.global_step + 1,
        }
        self.about["schedule"] = {
            "type": str(getattr(kind, "value", kind)),
            "learning_rate": args.learning_rate,
            "warmup_steps": warmup,
            "max_steps": state.max_steps,
            "step": state.global_step,
        }
        self.about["dtype"] = str(self.trainer.model.dtype).removeprefix("torch.")

    def on_optimizer_step(self, args, state, control, **_):
        if self.on:
            self.copy("after")
            self.about["old_model"] = self.about.get("old_model") and self.about["model"]
            tensors = dump.join(self.parts) | self.rollout | self.tensors
            dump.write(self.folder / str(state.global_step), self.about, tensors)
        self.parts = []
        self.tensors = {}
        self.about["old_model"] = None
