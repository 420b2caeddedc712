"""Dump optimizer steps in TRL 0.15 to 1.15, for audit/history.py; trl_steps.py supports TRL 1.16.

Older releases lack some options, which get defaults here. If a model's forward returns no log-probabilities, they are
computed from its logits.
"""

from unittest.mock import patch

import torch
from torch.nn.functional import pad

from minivlmrl_audit import trl_steps

# Option values in TRL 1.16 that describe how releases without these options compute. Exception: before 0.16, GRPO
# always averaged over completions, which is loss_type "grpo"; prepare() sets it.
OPTIONS = {
    "sft": {"loss_type": "nll", "label_smoothing_factor": 0, "assistant_only_loss": False},
    "dpo": {},
    "grpo": {
        "scale_rewards": True, "use_bias_correction_kl": False, "loss_type": "bnpo", "epsilon_high": None,
        "use_adaptive_entropy": False, "entropy_coef": 0.0,
    },
}  # fmt: skip
SCALES = {True: "group", False: "none"}  # up to 0.21, scale_rewards was a bool
# trainer methods that return log-probabilities, the newest first
SCORES = ("_get_per_token_logps_and_entropies", "_get_per_token_logps")


def set_missing(owner, **values):
    """Set the attributes that `owner` lacks."""
    for name, value in values.items():
        if not hasattr(owner, name):
            setattr(owner, name, value)


def prepare(trainer, kind: str):
    """Set TRL 1.16's options and attributes that this release's trainer lacks."""
    config = trainer.args
    if kind == "grpo":
        if not hasattr(config, "epsilon"):
            set_missing(config, loss_type="grpo", epsilon=0.2)
        set_missing(config, steps_per_generation=config.gradient_accumulation_steps)
    set_missing(config, **OPTIONS[kind])
    tokenizer = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
    set_missing(trainer, completion_only_loss=False, tools=None, _image_pad_token_id=None, _tokenizer=tokenizer)
    set_missing(trainer, eos_token_ids=[trainer._tokenizer.eos_token_id])
    if kind == "dpo":
        types = config.loss_type
        set_missing(trainer, loss_types=[types] if isinstance(types, str) else types)


class OlderSteps(trl_steps.Steps):
    """Dump steps in an older release."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        # before transformers 5, the trainer calls accelerate instead
        if not hasattr(self.trainer, "_clip_grad_norm"):
            accelerator = self.trainer.accelerator
            clip = self.looked(accelerator.clip_grad_norm_, self.keep_norm)
            self.enter_context(patch.object(accelerator, "clip_grad_norm_", clip))

    def wrap(self, name: str, look):
        """Wrap a trainer method if this release has it."""
        if hasattr(self.trainer, name):
            super().wrap(name, look)

    def forward(self, model, arguments, options, output):
        """Record a forward's outputs, with log-probabilities computed from logits if missing."""
        if not self.parts or getattr(output, "log_probs", None) is not None:
            super().forward(model, arguments, options, output)
        elif self.about["kind"] != "grpo":
            ids = options.get("input_ids", arguments[0] if arguments else None)
            self.from_logits(self.parts[-1], ids, options["attention_mask"], output.logits)

    def from_logits(self, part: dict, ids, attention_mask, logits):
        """Record log-probabilities from logits (n, S, V), and in backward their gradient."""
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


class OlderGRPOSteps(OlderSteps, trl_steps.GRPOSteps):
    """Dump GRPO steps in an older release."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.wrap(next(name for name in SCORES if hasattr(self.trainer, name)), self.scored)

    def begin(self, inputs: dict, examples, *_):
        """Record a micro-batch, and its rollout if this release generates it in _prepare_inputs."""
        if not hasattr(self.trainer, "_generate_and_score_completions"):
            self.generated(inputs, examples)
        super().begin(inputs)

    def generated(self, result: dict, examples: list):
        """Record a rollout, and its rewards if this release has no _calculate_rewards."""
        if not hasattr(self.trainer, "_calculate_rewards"):
            self.judged(torch.zeros(len(examples), len(self.given_rewards)))
        super().generated(result, examples)

    def scored(self, result, model, input_ids, attention_mask, *_):
        """Record the log-probabilities that a trainer method returns, if the model returns only logits."""
        if isinstance(result, dict):
            result = (result["logps"], result.get("entropies"))
        outputs = (result, None) if isinstance(result, torch.Tensor) else result
        part = self.parts[-1] if self.parts else None
        if part is None or "per_token_logps" in part or not outputs[0].requires_grad:
            return
        part["input_ids"] = input_ids
        part["attention_mask"] = attention_mask
        trl_steps.keep_outputs(part, dict(zip(("log_probs", "entropy"), outputs, strict=False)))


def sft_steps(trainer, folder, steps: int = 1):
    """Return a context manager that dumps an SFTTrainer's first steps."""
    prepare(trainer, "sft")
    with patch.object(trl_steps, "Steps", OlderSteps):
        return trl_steps.sft_steps(trainer, folder, steps)


def dpo_steps(trainer, folder, steps: int = 1):
    """Return a context manager that dumps a DPOTrainer's first steps.

    Up to TRL 0.28, a batch holds prompts and answers separately, and the trainer concatenates them in the forward.
    """
    prepare(trainer, "dpo")
    with patch.object(trl_steps, "Steps", OlderSteps):
        result = trl_steps.dpo_steps(trainer, folder, steps)
    rows = result.rows
    options = result.about["loss"]
    options["loss_type"] = list(trainer.loss_types)
    options["label_smoothing"] = getattr(trainer.args, "label_smoothing", 0.0)
    # an enum member is replaced by its value
    options.update({name: getattr(x, "value", x) for name, x in options.items()})

    def joined_later(inputs: dict) -> dict:
        prompts = inputs.get("prompt_attention_mask")
        if prompts is None:
            return rows(inputs)
        number = torch.arange(2 * len(prompts))
        tensors = {"pair": number % len(prompts), "chosen": (number < len(prompts)).long()}
        return tensors | {"prompt_lengths": prompts.sum(1).repeat(2)}

    result.rows = joined_later
    return result


def grpo_steps(trainer, folder, steps: int = 1):
    """Return a context manager that dumps a GRPOTrainer's first steps."""
    prepare(trainer, "grpo")
    result = OlderGRPOSteps(trainer, folder, steps)
    scale = result.about["scale_rewards"]
    result.about["scale_rewards"] = SCALES.get(scale, scale)
    return result


STEPS_OF = {"grpo": grpo_steps, "turns": grpo_steps, "dpo": dpo_steps, "sft": sft_steps}
