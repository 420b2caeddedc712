"""Known causes of a wrong training step, listed by the quantity of the step's definition that is wrong.

The audit tries single causes first: those without a free number, then those that are limited to one use of a quantity
(SCOPES), then those with a number {c} that is fitted. Each of them is also tried on only a part of the step (units.py).
Then the audit tries pairs of causes.

A cause replaces its quantity by a value or by a formula, which is a function of the values s of its place: s.x is the
right value, s.c the fitted number, and s.region the part of the step. All other attributes are quantities of
step_checks.py and optimizer_checks.py, and tensors and attributes of the Dump.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from minivlmrl_audit.formulas import clipped, in_half, rounded, total_by
from minivlmrl_audit.minivlmrl_api import DPO_LOSSES


@dataclass(frozen=True)
class Quantity:
    """A quantity of a stage's definition that may be wrong."""

    name: str
    stages: str  # names of stages and kinds of losses, separated by commas
    effect: str  # how the mistakes change the training
    source: str = ""  # a line of code, a paper, or an issue or pull request
    about: str = ""  # feature that a step must contain to reveal the mistakes
    needs: str = "input_ids"  # tensor that the step must contain

    def stage_names(self) -> set[str]:
        """Return the names of `stages`."""
        return set(self.stages.split(", "))


class Limited(NamedTuple):
    """A replacement for parts of a step."""

    kinds: str  # attributes of Dump with the parts, separated by spaces
    formula: Callable | None = None  # None means that the parts are orders of the values


# causes that are limited to each part of a kind, whose name replaces {} in their sentences
rows = partial(Limited, "rows")
rows_or_columns = partial(Limited, "rows columns")
rollout_rows = partial(Limited, "rollout_rows")
rollout_sets = partial(Limited, "rollout_sets")
regions = partial(Limited, "regions")
pictures = partial(Limited, "pictures")
parts = partial(Limited, "parts")
spans = partial(Limited, "spans")


def having(says: str, *tables: dict[str, Callable]) -> dict[str, Callable]:
    """Put the name of a quantity before the sentences of tables such as LINEAR."""
    return {f"{says} {text}": formula for table in tables for text, formula in table.items()}


def option(name: str, stages: str, off: Any, effect: str, source: str = "") -> dict[Quantity, dict]:
    """Return the causes of a number that is ignored, so that the option is `off`, or that has another value."""
    return {Quantity(name, stages, effect, source): {f"{name} is ignored": off, f"{name} is {{c}}": fitted_number}}


def in_the_count(formula: Callable) -> dict[str, Any]:
    """Return a change of the mask only where its tokens are counted, and not where terms are summed."""
    return {"mask": formula, "inside": ["the count"]}


def times(s):
    """Multiply by the fitted number."""
    return s.c * s.x


def fitted_number(s):
    """Return the fitted number itself."""
    return s.c


def detached(s):
    """Return the policy's log-probabilities without their gradient."""
    return s.detached_logps


def row_mean(x, mask):
    """Average x over the counted tokens of each row."""
    return (x * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)


def discount(c, mask):
    """Return c to the power of the number of counted tokens before each token."""
    return c ** (mask.cumsum(1) - 1).clamp(min=0)


def shares(s):
    """Return the weight of each token in the mean of its region."""
    return s.mask / total_by(s.mask, s.region).clamp(min=1)


def with_rejected(index, shift: int):
    """Return pairs of rows (pairs, 2) with the rejected answer of another pair."""
    return torch.stack([index[:, 0], index[:, 1].roll(shift)], 1)


MEAN = torch.tensor([0.48145466, 0.4578275, 0.40821073])  # of the colors of an image, see data/image.py
STD = torch.tensor([0.26862954, 0.26130258, 0.27577711])


def in_channels(x, scale, shift):
    """Compute scale * x + shift, with one number for each color, of patches x."""
    return (x.view(len(x), 3, -1) * scale[:, None] + shift[:, None]).flatten(1)


def inside(s, tensors: dict, is_inside: bool = True) -> dict:
    """Return the tensors of the parameters inside the part of the model, or of those outside of it."""
    return {name: x for name, x in tensors.items() if bool(s.region(name)) == is_inside}


def with_rounded_sines(model):
    """Round the rotary embeddings of a model's decoder to bfloat16, and return the model."""

    def rounded_inputs(_, given):
        return given[0], *(x.bfloat16().to(x) for x in given[1:3]), *given[3:]

    for layer in model.model.layers:
        layer.register_forward_pre_hook(rounded_inputs)
    return model


def clipped_by_itself(s):
    """Clip the gradients to max_grad_norm."""
    return clipped(s.x, s.optimizer.get("max_grad_norm"))


def theirs_in_half(s):
    """Return the trainer's values if 16-bit arithmetic explains them."""
    return in_half(s.x, s.theirs, s.exact)


def theirs_if_training(s, model: str):
    """Return the trainer's values if the model was in training mode with dropout, which cannot be repeated."""
    return s.theirs if model in s.about.get("training", ()) else s.x


# ways in which any quantity may be wrong
TIMES = {"is {c} times as large": times}
SIGNED = {"has the wrong sign": lambda s: -s.x, "is left out": lambda s: 0 * s.x}
LINEAR = SIGNED | {"is doubled": lambda s: 2 * s.x, "is halved": lambda s: s.x / 2}
ROUNDED = {"is in bfloat16": lambda s: s.x.bfloat16().double(), "is in float16": lambda s: s.x.half().double()}
CURVED = {
    "is squared": lambda s: s.x**2,
    "is replaced by its absolute value": lambda s: s.x.abs(),
    "is never below 0": lambda s: s.x.clamp(min=0),
    "is never above 0": lambda s: s.x.clamp(max=0),
    "is replaced by its sign": lambda s: s.x.sign(),
    "is passed through tanh": lambda s: s.x.tanh(),
    "is passed through the sigmoid": lambda s: s.x.sigmoid(),
    "is replaced by its exponential": lambda s: s.x.exp(),
}
BOUNDED = {
    "is at most {c}": lambda s: s.x.clamp(max=s.c),
    "is at least {c}": lambda s: s.x.clamp(min=s.c),
    "is at least -{c}": lambda s: s.x.clamp(min=-s.c),
    "is at most -{c}": lambda s: s.x.clamp(max=-s.c),
    "is clamped to -{c} and {c}": lambda s: s.x.clamp(-s.c, s.c),
    "is {c} too large": lambda s: s.x + s.c,
    "is {c} too small": lambda s: s.x - s.c,
}
NONLINEAR = ROUNDED | CURVED | BOUNDED
BY_TOKEN = {
    "is replaced by the mean of its row": lambda s: row_mean(s.x, s.mask) + 0 * s.x,
    "is replaced by the sum of its row": lambda s: (s.x * s.mask).sum(1, keepdim=True) + 0 * s.x,
    "has the mean of its row subtracted": lambda s: s.x - row_mean(s.x, s.mask),
    "has the mean of its micro-batch subtracted": lambda s: s.x - (s.x * s.mask).sum() / s.mask.sum().clamp(min=1),
    "is replaced by the sum up to its token": lambda s: (s.x * s.mask).cumsum(1),
    "is replaced by the sum from its token on": lambda s: (s.x * s.mask).flip(1).cumsum(1).flip(1),
    "is detached": lambda s: s.x.detach(),
    "has half of its gradient": lambda s: (s.x + s.x.detach()) / 2,
}
RATIOS = {
    "is replaced by the mean of its micro-batch": lambda s: (s.x * s.mask).sum() / s.mask.sum().clamp(min=1) + 0 * s.x,
    "gives a ratio that is the mean of the ratios of its row": lambda s: row_mean(s.x.exp(), s.mask).log() + 0 * s.x,
    "gives a ratio that is at most {c}": lambda s: s.x.clamp(max=math.log(s.c)),
    "gives a ratio that is only the policy's probability": lambda s: s.old_per_token_logps + s.x,
}
OF_ANSWERS = {
    "has the mean of the micro-batch subtracted": lambda s: s.x - s.x.mean(),
    "has the detached mean of the micro-batch subtracted": lambda s: s.x - s.x.mean().detach(),
    "is divided by the answer's length": lambda s: s.x / s.lengths,
    "is multiplied by the answer's length": lambda s: s.x * s.lengths,
    "is divided by the length of the pair's longer answer": lambda s: s.x / s.lengths.amax(1, keepdim=True),
    "is divided by the length of the pair's shorter answer": lambda s: s.x / s.lengths.amin(1, keepdim=True),
    "is {c} too small for chosen answers": lambda s: s.x - s.c * torch.tensor([1.0, 0.0]),
    "is {c} too large for chosen answers": lambda s: s.x + s.c * torch.tensor([1.0, 0.0]),
    "is detached for the chosen answer": lambda s: torch.stack([s.x[:, 0].detach(), s.x[:, 1]], 1),
    "is detached for the rejected answer": lambda s: torch.stack([s.x[:, 0], s.x[:, 1].detach()], 1),
}
# formulas that are tried after those that name a mistake
GENERAL = {*TIMES.values(), *LINEAR.values(), *NONLINEAR.values(), *BY_TOKEN.values(), *RATIOS.values()}
GENERAL |= {*OF_ANSWERS.values()}

# a fitted factor that multiplies all numbers of a stage
FACTOR = Quantity("factor", "", "the effective learning rate changes")

# uses of a quantity to which a cause may be limited: stages, uses, and the quantity, or "" for any
SCOPES = [
    ("advantages", ["the reward", "the baseline", "the divisor"], ""),
    ("grpo", ["the policy's term", "the KL", "the mean entropy"], ""),
    ("grpo, sft", ["the sum", "the count", "the ratio"], "mask"),
    ("dpo", ["the policy", "the reference"], ""),
    ("update", ["the first moment", "the second moment"], ""),
]

# features that a step must contain to reveal some causes
BASELINES = "baselines, which need groups with different rewards"
DEVIATIONS = "standard deviations, which need groups with different rewards"
GROUPS = "groups, which need a rollout with several groups"
TRUNCATION = "truncated completions, which need at least one truncated completion"
END_TOKENS = "end tokens, which need a completion that was not truncated"
PADDING = "padding, which needs completions of different lengths"
AVERAGES = "averages, which need completions of different lengths"
MICRO_BATCHES = "averages of micro-batches, which need several micro-batches with different numbers of tokens"
CHANGED = "ratios, which need a policy that has changed since the rollout"
CLIPPING = "clipping, which needs a ratio outside of 1 - epsilon_low to 1 + epsilon_high"
KLS = "KLs, which need beta and a reference"
CLIPPED = "gradient clipping, which needs a norm greater than max_grad_norm"
DECAY = "weight decay, which needs weight_decay > 0"
ADAM = "betas and states of Adam, which need a later step than the first"
SCHEDULES = "schedules, which need a step at which the learning rate changes"
REFERENCE = "ref_per_token_logps"

OF_ADVANTAGES = {
    Quantity("rewards", "advantages", "completions are rewarded wrongly", "TRL PR 5902, R1-V issue 146"): {
        "a completion without any reward gets the reward 0": lambda s: s.x.where(~s.x.isnan().all(1, True), 0.0),
        **having("a reward", TIMES, LINEAR, NONLINEAR),
        "a completion has the rewards of {}": rollout_rows(),
    },
    Quantity("judged", "advantages", "groups with a missing reward are not trained", "ms-swift 8123"): {
        "one missing reward makes the mean and the standard deviation of its group NaN": lambda s: s.rewards
    },
    Quantity("reward weights", "advantages", "the wrong completions are rewarded", "VLM-R1"): {
        "all rewards have weight 1": lambda s: s.x * 0 + 1,
        "the reward weights are in reverse order": lambda s: s.x.flip(0),
        "the first reward does not count": lambda s: torch.cat([0 * s.x[:1], s.x[1:]]),
        "the last reward does not count": lambda s: torch.cat([s.x[:-1], 0 * s.x[-1:]]),
    },
    Quantity("total", "advantages", "the wrong completions are rewarded", "losses/advantages.py: combine"): {
        "a completion has no reward if any reward function returned None": lambda s: s.weighted.sum(1),
        "rewards are averaged over the reward functions that returned a number": lambda s: s.weighted.nanmean(1),
        "rewards are multiplied, not added": lambda s: s.weighted.nan_to_num(1.0).prod(1),
        **having("the weighted sum of rewards", TIMES, NONLINEAR),
        "rewards of {} are 0": rollout_sets(lambda s: s.x * ~s.region),
        "rewards of {} are missing": rollout_sets(lambda s: s.x.masked_fill(s.region, math.nan)),
    },
    Quantity("other aggregation", "advantages", "the wrong completions are rewarded", "GDPO"): {
        "each reward is normalised before the sum instead of the sum, or the other way round": True
    },
    Quantity("group", "advantages", "the baseline is wrong", "R1-V PR 49, NeMo-RL PR 3882", about=GROUPS): {
        "groups contain twice as many completions": lambda s: s.index // (2 * s.group_size),
        "groups contain half as many completions": lambda s: s.index // (s.group_size / 2),
        "prompts with the same text but different images form one group": lambda s: s.of_rollout("prompt_text"),
        "a completion belongs to the group of {}": rollout_rows(),
    },
    Quantity("group mean", "advantages", "more variance or bias", "PipelineRL PR 54", about=BASELINES): {
        "the baseline is the mean of all rewards of the rollout": lambda s: s.all_judged.mean(),
        "no baseline is subtracted": lambda s: s.x * 0,
        "the mean also counts completions without a reward": lambda s: s.judged.sum() / len(s.rewards),
        "the baseline is the mean of the other completions of the group": lambda s: (
            (s.judged.sum() - s.rewards) / max(1, len(s.judged) - 1)
        ),
        "the baseline is the median of the group": lambda s: s.judged.median(),
        "the baseline is the mean of the group's first half": lambda s: s.judged[: len(s.judged) // 2].mean(),
        "the baseline is the mean of the group's second half": lambda s: s.judged[len(s.judged) // 2 :].mean(),
    },
    Quantity("baseline", "advantages", "the baseline is wrong", "R1-V PR 54"): having("the baseline", LINEAR, NONLINEAR)
    | {"a completion has the baseline of {}": rollout_rows()},
    Quantity("scaling rewards", "advantages", "prompts are weighted differently", "TRL PR 3992", about=DEVIATIONS): {
        "advantages are not divided by a standard deviation": None,
        "advantages are divided by the standard deviation of their group": lambda s: s.judged,
        "advantages are divided by the standard deviation of all rewards of the rollout": lambda s: s.all_judged,
    },
    Quantity("std", "advantages", "prompts are weighted differently", "unsloth-zoo PR 832", about=DEVIATIONS): {
        "the standard deviation divides by n instead of n - 1": lambda s: s.scaling_rewards.std(correction=0),
        "the standard error is used instead of the standard deviation": lambda s: s.x / len(s.scaling_rewards) ** 0.5,
        "rewards are divided by the variance instead of the standard deviation": lambda s: s.x**2,
        "epsilon is added to the variance": lambda s: (s.x**2 + s.epsilon).sqrt() - s.epsilon,
        "the standard deviation is at least the standard deviation of all rewards": lambda s: torch.maximum(
            s.x, s.all_judged.std()
        ),
    },
    Quantity(
        "epsilon", "advantages", "none, unless rewards are nearly equal", "losses/advantages.py", about=DEVIATIONS
    ): {
        "the number that is added to the standard deviation instead of 1e-4 is 0": 0.0,
        "the number that is added to the standard deviation instead of 1e-4 is {c}": fitted_number,
    },
    Quantity("deviation", "advantages", "prompts are weighted differently", "R1-V PR 54"): having(
        "the divisor of advantages", NONLINEAR
    )
    | {"a completion's advantage is divided by the standard deviation of {}": rollout_rows()},
    Quantity("advantages", "advantages", "the wrong completions are rewarded", "R1-V PR 54, issue 146"): {
        "advantages are normalised a second time, over the batch": lambda s: (s.x - s.x.mean()) / (s.x.std() + 1e-4),
        "a completion has the advantage of {}": rollout_rows(),
    },
    Quantity("advantages", "rows", "the wrong completions are rewarded", "R1-V PR 54"): {
        "rows were shuffled, but their advantages were not": lambda s: s.rollout_advantages[: len(s.x)]
    },
    Quantity(
        "advantages", "advantages, rows, grpo", "the wrong completions are rewarded", "DeepSeekMath eq. 21"
    ): having("an advantage", SIGNED, NONLINEAR),
    Quantity("advantages", "rows, grpo", "the wrong completions are rewarded", "R1-V PR 54, issue 146"): {
        "a row has the advantage of {}": rows()
    },
}

OF_TOKENS = {
    Quantity("tokens", "tokens", "tokens that were never sampled are trained", "TRL PR 5521"): {
        "a completion is followed by other tokens": lambda s: torch.where(s.x == s.no_token, s.their_ids, s.x),
        "completions are shortened": lambda s: torch.where(s.their_ids == s.no_token, s.no_token, s.x),
    },
    Quantity("ids", "tokens", "tokens that were never sampled are trained", "TRL 5144, verl 6719"): {
        "a row has the ids of {}": rows(),
        "ids of {} were decoded and encoded again": regions(lambda s: s.again(s.x)),
        "ids of {} are missing": regions(lambda s: []),
        "ids of {} occur twice": regions(lambda s: s.x + s.x),
        "ids lack the first token of {}": regions(lambda s: s.x[1:]),
        "ids lack the last token of {}": regions(lambda s: s.x[:-1]),
    },
    Quantity(
        "pictures", "pictures, logps", "answers to other images are trained", "R1-V PR 49, slime 1847, verl 4050"
    ): {
        "a row has the images of {}": rows(),
        "a row lacks {}": pictures(lambda s: []),
        "a row has {} twice": pictures(lambda s: s.x + s.x),
        "a row has {} in reverse": pictures(lambda s: s.x[::-1]),
        "a row has {} shifted by one to later places": pictures(lambda s: s.x[-1:] + s.x[:-1]),
        "a row has {} shifted by one to earlier places": pictures(lambda s: s.x[1:] + s.x[:1]),
        "a row has the first of {} in place of each": pictures(lambda s: s.x[:1] * len(s.x)),
    },
    Quantity("attended", "tokens, logps", "training uses another model", "TRL PR 4976"): {
        "the model does not attend to {}": regions(lambda s: s.x & ~s.region)
    },
    Quantity("drop truncated", "mask", "the wrong completions are trained", "TRL PR 2881", about=TRUNCATION): {
        "truncated completions are in the loss": False,
        "truncated completions are not in the loss": True,
    },
    Quantity("ended", "mask", "the wrong completions are trained", "TRL mask_truncated_completions"): {
        "a truncated completion is in the loss if an earlier turn ended": lambda s: s.end_tokens.any(1, keepdim=True),
        "a completion that ends at the maximum length counts as truncated": lambda s: s.x & (s.sizes < s.longest),
    },
    Quantity("mask", "mask, loss", "the policy never learns to stop", "TRL PR 3200, 7039", about=END_TOKENS): {
        "the end token is not trained on": lambda s: s.x * (1 - s.end_tokens)
    },
    Quantity("mask", "mask, loss", "padding is trained", "ms-swift 3069", about=PADDING): {
        "one token after the completion is counted, too": lambda s: torch.maximum(s.x, s.previous_counts),
        "padding is counted as part of the completion": lambda s: s.completion_columns,
    },
    Quantity("mask", "mask, loss", "the wrong tokens are trained", "TRL PR 4300, 5521"): {
        "no token is in the loss": lambda s: 0 * s.x,
        "the last token is not trained on": lambda s: s.x * s.next_counts,
        "the first token is not trained on": lambda s: s.x * s.previous_counts,
        "one token before the completion is counted, too": lambda s: torch.maximum(s.x, s.next_counts),
        "only the first token is counted": lambda s: s.x * (s.x.cumsum(1) == 1),
        "only the last token is counted": lambda s: s.x * (1 - s.next_counts),
        "prompt tokens are counted": lambda s: torch.maximum(s.x, s.prompt),
        "every column is counted": lambda s: torch.ones_like(s.x),
        "the mask also counts {}": regions(lambda s: s.x + (1 - s.x) * s.region),
        "the mask does not count {}": regions(lambda s: s.x * ~s.region),
        "the mask counts only {}": regions(lambda s: s.completion_columns * s.region),
        "a mask value is taken from {}": rows_or_columns(),
    },
    Quantity("mask", "mask", "the wrong tokens are trained"): {
        "tokens are not counted because of their ids": lambda s: (
            s.x * ~torch.isin(s.ids, gone)
            if 2 * len(gone := s.ids[s.x > s.theirs].unique()) <= (s.x > s.theirs).sum() and len(gone) < 3
            else s.x
        )
    },
}

OF_LOSSES = {
    Quantity(
        "mean_over", "loss", "tokens of short micro-batches count more", "arXiv 2604.23747", about=MICRO_BATCHES
    ): {"each micro-batch is averaged by itself, and then the means are averaged": "micro_batch"},
    Quantity(
        "average", "grpo", "completions are weighted by their lengths", "losses/grpo.py: AVERAGES", about=AVERAGES
    ): {f"the loss is averaged as in {name}": name for name in ("grpo", "dapo", "dr_grpo", "luspo", "bnpo")},
    Quantity("average", "sft", "completions are weighted by their lengths", "arXiv 2604.23747", about=AVERAGES): {
        f"each row of {name} is averaged by itself": {"average": "grpo", "loss_type": name} for name in ("nll", "dft")
    },
    Quantity("mean", "grpo", "tokens are weighted differently", "verl issue 7200, rllm PR 512, TRL PR 6439"): {
        "the means of the rows are added within a micro-batch instead of averaged": lambda s: (
            row_mean(s.terms, s.mask).sum() / len(s.micro_batches)
        ),
        "the mean also divides by tokens of truncated completions": {
            "rollout tokens": lambda s: s.step.get("rollout_drawn")
        },
        "advantages are normalised again within each micro-batch": {
            "whitened": lambda s: (s.x - s.x.mean()) / (s.x.std() + 1e-8)
        },
        "the means of the rows are added over the whole step": lambda s: row_mean(s.terms, s.mask).sum(),
        "the mean of the rows is only over those with an advantage other than 0": lambda s: (
            row_mean(s.terms, s.mask).sum() / s.has_advantage().sum()
        ),
        "the mean divides only by tokens of rows with an advantage other than 0": in_the_count(
            lambda s: s.x * s.has_advantage()[:, None]
        ),
        "loss terms are averaged twice, over the tokens of {}, then over these means": spans(
            lambda s: (s.terms * shares(s)).sum() / shares(s).sum().clamp(min=1) / len(s.micro_batches)
        ),
    },
    Quantity("mask", "loss", "the effective learning rate changes", "losses/grpo.py: AVERAGES"): {
        "the mean is computed over the step instead of over each micro-batch": {"mean_over": "step"},
        "sums are divided by one token too many per row, as if counted before labels are shifted": in_the_count(
            lambda s: torch.maximum(s.x, s.next_counts)
        ),
    },
    Quantity("weights", "grpo", "rows or tokens are weighted differently", "verl 2506"): {
        "the loss of a row is multiplied by its advantage": lambda s: s.x * s.advantages.view(len(s.x), -1),
        "the loss of a row is divided by its advantage": lambda s: s.x / s.advantages.view(len(s.x), -1),
        "the loss has no gradient of {}": regions(lambda s: s.x * ~s.region),
        "the loss counts {} twice": regions(lambda s: s.x * (1 + s.region)),
        "the loss has the wrong sign for {}": regions(lambda s: s.x * (1 - 2 * s.region)),
    },
    Quantity("weights", "grpo, sft", "rows or tokens are weighted differently", "verl 2506"): {
        "the loss of a row is multiplied by the number of its tokens": lambda s: s.x * s.lengths[:, None],
        "the loss of a row is divided by the number of its tokens": lambda s: s.x / s.lengths[:, None],
        "a weight is multiplied, for each token that follows it, by {c}": lambda s: discount(s.c, s.mask.flip(1)).flip(
            1
        ),
        "a weight is multiplied, for each token before it, by {c}": lambda s: discount(s.c, s.mask),
    },
    Quantity("logps", "loss, logps", "the wrong tokens are trained", "model/logprobs.py"): {
        "a log-probability is taken from {}": rows_or_columns()
    },
    Quantity("logps", "logps, sft", "tokens are not trained", "model/logprobs.py"): having(
        "a log-probability", NONLINEAR
    ),
}

OF_POLICY_LOSSES = {
    Quantity("loss_type", "grpo", "the update is different", "losses/grpo.py: TERMS"): {
        f"the policy term of {name} is used": name for name in ("grpo", "cispo", "sapo", "vespo")
    },
    Quantity("importance_sampling_level", "grpo", "the update is different", "GSPO eq. 7", about=CHANGED): {
        "each token has its own ratio": "token",
        "each row has one ratio, the geometric mean of its tokens' ratios": "sequence",
        "each row has one ratio, the product of its tokens' ratios": "sequence_sum",
        "each row has one ratio, but each token has its own gradient (GSPO-token)": "sequence_token",
    },
    Quantity("old", "grpo", "off-policy steps are biased", "TRL issue 2769, mlx-lm-lora 55", about=CHANGED): {
        "the ratio is 1 because old log-probabilities equal the current ones": detached,
        "old log-probabilities are not detached": lambda s: s.per_token_logps,
        "an old log-probability is taken from {}": rows_or_columns(),
    },
    Quantity("old", "grpo", "ratios contain the sampler's errors", needs="sampler_logps"): {
        "old log-probabilities are the sampler's": lambda s: s.sampler_logps
    },
    Quantity("log-ratio", "grpo", "the update is different", "GSPO eq. 7", needs="old_per_token_logps"): {
        **having("the log of the ratio", LINEAR, NONLINEAR, BY_TOKEN, RATIOS),
        "the log of the ratio is averaged over {}": {
            "log-ratio": spans(lambda s: total_by(s.x * shares(s), s.region)),
            "importance_sampling_level": "token",
        },
    },
    Quantity("terms", "grpo", "off-policy updates are too large", "losses/grpo.py: clipped", about=CLIPPING): {
        "the maximum of the clipped and the unclipped objective is used instead of the minimum": {
            "advantages": lambda s: -s.x,
            "terms": lambda s: -s.x,
        },
        "only the clipped term is used, without the minimum": lambda s: -s.clipped_ratio * s.advantages + 0 * s.x,
        "ratios are not clipped": {"epsilon_low": math.inf, "epsilon_high": math.inf},
        "epsilon_low and epsilon_high are swapped": {
            "epsilon_low": lambda s: s.epsilon_high,
            "epsilon_high": lambda s: s.epsilon_low,
        },
    },
    Quantity("epsilon_high", "grpo", "the update is different", "DAPO, clip higher", about=CLIPPING): {
        "ratios are not clipped above": math.inf,
        "ratios are clipped with epsilon_low on both sides": lambda s: s.epsilon_low,
        "epsilon_high is 1 more than configured": lambda s: s.x + 1,
        "epsilon_high is 1 less than configured": lambda s: s.x - 1,
        "epsilon_high is {c}": fitted_number,
    },
    Quantity("epsilon_low", "grpo", "the update is different", "DAPO, clip higher", about=CLIPPING): {
        "ratios are not clipped below": math.inf,
        "ratios are clipped with epsilon_high on both sides": lambda s: s.epsilon_high,
        "epsilon_low is {c}": fitted_number,
    },
    **option("delta", "grpo", None, "large ratios are trained", "INTELLECT-2, arXiv 2505.07291"),
    Quantity("terms", "grpo", "the update is different", "losses/grpo.py: clipped"): having(
        "the policy term, without KL and entropy,", NONLINEAR, BY_TOKEN
    ),
    Quantity("terms", "grpo", "the effective beta changes", "losses/grpo.py: clipped", needs=REFERENCE): having(
        "the policy term, without KL and entropy,", LINEAR
    ),
    Quantity("correction", "grpo", "rows are weighted differently", needs="importance_sampling_ratio"): {
        "the sampler's ratio is not used": lambda s: torch.ones_like(s.x),
        **having("the sampler's ratio", TIMES, LINEAR, NONLINEAR),
        "the sampler's ratio is taken from {}": rows(),
    },
    **option("top_entropy_quantile", "grpo", 1.0, "other tokens are trained, too", "arXiv 2506.01939"),
    **option("entropy_coef", "grpo", 0.0, "the policy becomes too sure or too random"),
    **option("off_policy_mask_threshold", "grpo", None, "off-policy rows are trained"),
    Quantity("entropies", "grpo", "the policy becomes too sure or too random", needs="entropies"): having(
        "the entropy of a token", TIMES, LINEAR, NONLINEAR, BY_TOKEN
    ),
    Quantity("kl_estimator", "grpo", "another divergence is penalised", "NeMo-RL PR 2506", about=KLS): {
        f"the KL estimator is {name}": name for name in ("k1", "k2", "k3")
    },
    Quantity("KL", "grpo", "the effective beta changes", "TRL up to 1.9, PR 6594", about=KLS, needs=REFERENCE): {
        "the KL is not weighted with the ratio although it should be, or the other way round": {
            "use_bias_correction_kl": lambda s: not s.x
        },
        "the KL is multiplied by beta twice": lambda s: s.options.beta * s.x,
        "the KL estimator is k2, and the ratio that weights it is not detached": lambda s: (
            (s.per_token_logps - s.ref_per_token_logps).square() / 2 * s.ratio
        ),
        "the KL is weighted with the ratio of its token instead of its sequence": lambda s: (
            s.x / s.ratio * (s.per_token_logps - s.old_per_token_logps).exp()
        ),
        **having("the KL", TIMES, LINEAR, NONLINEAR, BY_TOKEN),
    },
    Quantity("KL estimate", "grpo", "small KLs are rounding errors", "tunix 2315", about=KLS, needs=REFERENCE): {
        "k3 loses its digits, because it is exp(d) - d - 1 in float32 instead of expm1(d) - d": lambda s: (
            s.k3_in_float32 if s.options.kl_estimator == "k3" else s.x
        ),
        **having("the KL before it is weighted with the ratio", NONLINEAR),
    },
    Quantity("reference", "grpo", "another divergence is penalised", "verl", about=KLS, needs=REFERENCE): {
        "policy and reference are swapped in the KL": lambda s: 2 * s.per_token_logps - s.ref_per_token_logps,
        "the reference is the old policy": lambda s: s.old_per_token_logps,
    },
    Quantity("reference", "grpo, dpo", "the policy may leave the reference", "DPO eq. 7", about=KLS, needs=REFERENCE): {
        "the reference moves with the policy": detached,
        "the reference is left out, so its log-probabilities are 0": lambda s: 0 * s.x,
        **having("the reference's log-probability", LINEAR, NONLINEAR),
        "a log-probability of the reference is taken from {}": rows_or_columns(),
    },
}

OF_OFFLINE_LOSSES = {
    Quantity("index", "dpo", "the wrong answers are compared", "DPO eq. 7"): {
        "the rejected answer is preferred": lambda s: s.x.flip(1),
        "a chosen answer is compared with the rejected answer of the next pair": lambda s: with_rejected(s.x, -1),
        "a chosen answer is compared with the rejected answer of the previous pair": lambda s: with_rejected(s.x, 1),
    },
    Quantity("policy", "dpo", "the objective is different", "DPO eq. 7"): {
        "log-probabilities are averaged over tokens": {
            name: lambda s: s.x / s.mask.sum(1, keepdim=True).clamp(min=1) for name in ("policy", "reference")
        },
        "policy and reference are swapped": {
            "policy": lambda s: s.ref_per_token_logps + (s.per_token_logps - s.detached_logps),
            "reference": detached,
        },
        **having("the policy's log-probability", LINEAR, NONLINEAR),
    },
    Quantity("loss_type", "dpo", "the objective is different", "losses/preference.py"): {
        f"the loss is {name}": [name] for name in DPO_LOSSES
    },
    Quantity("log-ratio", "dpo", "the objective is different", "DPO eq. 7"): having(
        "the log ratio of an answer", LINEAR, NONLINEAR, OF_ANSWERS
    ),
    Quantity("use_weighting", "dpo", "the objective is different", "TRL PR 4171"): {
        "use_weighting is ignored, or applied although it is false": lambda s: not s.x,
        "loss_weights is ignored": {"loss_weights": None},
        "f_divergence_type is ignored": {"f_divergence_type": "reverse_kl"},
    },
    **option("beta", "dpo", 1.0, "the objective is different", "DPO eq. 7"),
    **option("label_smoothing", "dpo", 0.0, "the objective is different", "losses/preference.py"),
    **option("ld_alpha", "dpo", None, "long answers are weighted differently", "LD-DPO, arXiv 2409.06411"),
    Quantity("loss_type", "sft", "likely tokens are weighted differently", "DFT eq. 9"): {
        f"the loss is {name}": name for name in ("nll", "dft")
    },
    Quantity("terms", "sft", "likely tokens are weighted differently", "DFT eq. 9, twinkle PR 291"): {
        "the probability that weights a token in dft is not detached": lambda s: (
            s.per_token_logps * -s.per_token_logps.exp()
        )
    },
}

OF_FORWARDS = {
    Quantity("temperature", "logps", "on-policy ratios are not 1", "TRL PR 3029, 4159"): {
        "logits are not divided by the temperature": 1.0,
        "logits are divided twice by the temperature": lambda s: s.x**2,
        "logits are multiplied by the temperature": lambda s: 1 / s.x,
        "log-probabilities instead of logits are divided by the temperature": {
            "temperature": 1.0,
            "scores": lambda s: s.x / s.about.get("temperature", 1.0),
        },
        "logits are divided by {c}": fitted_number,
    },
    Quantity("logits", "logps", "on-policy ratios are not 1", "TRL 6789"): {
        **having("a logit", ROUNDED),
        "the softmax uses only the most likely tokens; their number is {c}": lambda s: s.x.masked_fill(
            s.x < s.x.topk(min(max(1, int(s.c)), s.x.shape[-1])).values[:, -1:], -math.inf
        ),
    },
    Quantity("labels", "logps", "the wrong tokens are trained", "TRL PR 3200, transformers PR 47395"): {
        "the end token is scored as the padding token": lambda s: torch.where(s.stop, s.pad, s.x),
        "each token is scored as the next token": lambda s: s.x.roll(-1),
        "each token is scored as the previous token": lambda s: s.x.roll(1),
    },
    Quantity("blind", "logps", "the model is trained to answer without the image", "unsloth PR 11031, slime 1847"): {
        "the model does not see any image": lambda s: s.number >= 0,
        "the model does not see {}": pictures(lambda s: s.region),
    },
    Quantity("pixels", "logps", "training uses another model", "data/image.py"): {
        "images are BGR instead of RGB": lambda s: s.x.view(len(s.x), 3, -1).flip(1).flatten(1),
        "pixels are normalised twice": lambda s: in_channels(s.x, 1 / STD, -MEAN / STD),
        "pixels are not normalised": lambda s: in_channels(s.x, STD, MEAN),
        "the patches of each image are in the opposite order": lambda s: s.x.flip(0),
        "each patch has the pixels of the next patch": lambda s: s.x.roll(-1, 0),
        "each patch has the pixels of the previous patch": lambda s: s.x.roll(1, 0),
        "all images are uniformly grey": lambda s: s.x * 0,
    },
    Quantity("positions", "logps", "training uses another model", "TRL 5279, 5785, xtuner PR 2097"): {
        "positions are 1-D, without M-RoPE": lambda s: s.indices,
        "each token has the position of the previous token": lambda s: s.x.roll(1, 1),
        "each token has the position of the next token": lambda s: s.x.roll(-1, 1),
        "height and width are swapped in the positions": lambda s: s.x[[0, 2, 1]],
        "positions of the completion count tokens": lambda s: torch.where(s.own > 0, s.indices, s.x),
        "positions of the completion continue from the largest position of each axis": lambda s: (
            torch.where(s.own > 0, s.x[:, : s.begin].amax(1, True) + 1 + s.indices - s.begin, s.x) if s.begin else s.x
        ),
        "positions of the completion start at 0": lambda s: torch.where(s.own > 0, s.indices - s.begin, s.x),
        "height and width of the image grids are swapped": {"grids": lambda s: s.x[:, [0, 2, 1]]},
        "the marks of image tokens are padded on the other side than ids": {
            "marks": lambda s: torch.cat([s.x[s.padding :], s.x.new_full((s.padding,), -1)])
        },
        "tokens attend to padding, and positions count padding": {"attended": lambda s: torch.ones_like(s.x)},
        "the decoder's rotary sines are in bfloat16": {"model": lambda s: with_rounded_sines(s.x)},
        "positions of the completion are {c} too large": lambda s: s.x + round(s.c) * s.own,
        "positions of the completion are {c} too small": lambda s: s.x - round(s.c) * s.own,
    },
    Quantity("mode", "logps", "the ratios are noisy", "verl, NeMo-RL: sampler and trainer differ"): {
        "rounded to bfloat16": lambda s: rounded(s.x, s.theirs, torch.bfloat16),
        "rounded to float16": lambda s: rounded(s.x, s.theirs, torch.float16),
        "computed in bfloat16": {"dtype": torch.bfloat16, "mode": theirs_in_half},
        "computed under autocast in bfloat16": {
            "dtype": torch.float32,
            "autocast": torch.bfloat16,
            "mode": theirs_in_half,
        },
    },
    Quantity("mode", "logps of reference", "the KL is random", "transformers: Module.train"): {
        "the reference is in training mode, so its dropout is active": lambda s: theirs_if_training(s, "ref_model")
    },
    Quantity("mode", "logps of old", "the ratios are random", "transformers: Module.train"): {
        "the policy is in training mode, so its dropout is active": lambda s: theirs_if_training(s, "old_model")
    },
    Quantity("model folder", "logps of reference, logps of sampler", "the KL is 0", "adapters are not disabled"): {
        "computed with the current weights of the policy": lambda s: s.about.get("model") or s.x
    },
    Quantity("model folder", "logps of old", "ratios are 1", "TRL PR 3725"): {
        "computed with the current weights instead of the weights that sampled": lambda s: s.about.get("model") or s.x
    },
    Quantity("model folder", "logps", "ratios compare with the reference", "adapters are still disabled"): {
        "computed with the weights of the reference model": lambda s: s.about.get("ref_model") or s.x
    },
}

OF_UPDATES = {
    Quantity("micro-batch", "gradients", "the effective batch is smaller", "RAE issue 67; arXiv 2604.23747"): {
        "gradients of earlier micro-batches are dropped": lambda s: s.last,
        "gradients of later micro-batches are dropped": lambda s: s.first,
        "gradients of micro-batches are weighted with their tokens": lambda s: s.tokens / s.tokens.mean(),
        "gradients of micro-batches are divided by their tokens": lambda s: s.tokens.mean() / s.tokens,
        "the gradient of the first micro-batch is left out": lambda s: s.x - s.first,
        "the gradient of the last micro-batch is left out": lambda s: s.x - s.last,
        "the gradient of the first micro-batch is added twice": lambda s: s.x + s.first,
        "the gradient of the last micro-batch is added twice": lambda s: s.x + s.last,
    },
    Quantity("gradients so far", "gradients", "the update has a different direction", "arXiv 2604.23747"): {
        "the accumulated gradient is clipped after each micro-batch": clipped_by_itself
    },
    Quantity("gradients of a part", "gradients", "the update has a different direction", "lingua PR 59"): {
        "the gradient of each micro-batch is clipped by itself": clipped_by_itself
    },
    Quantity("gradient", "gradients", "parameters are not trained", "VLM-R1 52, torchforge PR 71"): {
        "some parameters do not get any gradient": lambda s: s.x * bool(s.theirs.any()),
        "gradients of the step before are left: {c} times Adam's first moment": lambda s: s.x + s.c * s.earlier,
        "there is no gradient for {}": parts(lambda s: s.x * (not s.region(s.key))),
        **having("the gradient of a parameter", NONLINEAR),
    },
    Quantity("clip", "clip", "the update has a different direction", "run/loop.py: optimizer_step", about=CLIPPED): {
        "gradients are not clipped": lambda s: s.gradients,
        "gradients are clipped by value instead of by norm": lambda s: {
            name: g.clamp(-s.max_norm, s.max_norm) for name, g in s.gradients.items()
        },
        "each parameter is clipped by its own norm": lambda s: {
            name: clipped({name: g}, s.max_norm)[name] for name, g in s.gradients.items()
        },
        "gradients with a norm less than max_grad_norm are scaled up": lambda s: {
            name: g * s.max_norm / (s.norm + 1e-6) for name, g in s.gradients.items()
        },
        "only {} are clipped": parts(lambda s: s.x | inside(s, s.gradients, False)),
        "{} and all other parameters are clipped separately": parts(
            lambda s: clipped(inside(s, s.gradients), s.max_norm) | clipped(inside(s, s.gradients, False), s.max_norm)
        ),
    },
    Quantity("normed", "clip", "the update has a different direction", "run/loop.py: optimizer_step"): {
        "the norm leaves out {}": parts(lambda s: inside(s, s.x, False)),
        "the norm counts only {}": parts(lambda s: inside(s, s.x)),
    },
    Quantity("total norm", "clip", "the update has a different direction", "fastmoe PR 65"): {
        "the norm of all is the sum of the parameters' norms": lambda s: sum(g.norm() for g in s.normed.values()),
        "the norm of all is the largest of the parameters' norms": lambda s: max(g.norm() for g in s.normed.values()),
        "the norm of all is the largest entry": lambda s: max(g.abs().max() for g in s.normed.values()),
        "max_grad_norm is {c}": {"max_norm": fitted_number},
        **having("the norm of all gradients", TIMES, LINEAR, CURVED, BOUNDED),
    },
    Quantity("norm", "clip", "the log hides large gradients", "run/loop.py: optimizer_step", about=CLIPPED): {
        "the logged norm is computed after clipping": lambda s: s.norm_after
    },
    Quantity("decay", "update", "weights decay at a different rate", "minGPT", about=DECAY): {
        "weight decay is applied only to the weights that should be excluded from it": lambda s: s.weight_decay - s.x,
        "weight decay is also applied to norms and biases": lambda s: s.weight_decay,
        "weight decay is not applied": 0.0,
        "weight decay is not multiplied by the learning rate": lambda s: s.x / (s.learning_rate or 1.0),
        "weight decay is added to the gradient, as in Adam with L2 regularisation": {"coupled": True},
        "weight decay is {c}": fitted_number,
        "weight decay is {c} where it is not 0": lambda s: s.c * bool(s.x),
    },
    Quantity("decay", "update", "weights decay at a different rate", "minGPT"): {
        "weight decay leaves out {}": parts(lambda s: s.x * (not s.region(s.key))),
        "weight decay applies only to {}": parts(lambda s: s.x * bool(s.region(s.key))),
        "weight decay also applies to {}": parts(lambda s: s.weight_decay if s.region(s.key) else s.x),
    },
    Quantity("first step", "update", "the update has a different size", "arXiv 2604.23747", about=ADAM): {
        "the moments of Adam were reset": {"moments": lambda s: {}, "first step": 1},
        "the bias correction starts again at step 1": 1,
        "the bias correction is one step behind": lambda s: max(1, s.x - 1),
        "the bias correction is one step ahead": lambda s: s.x + 1,
    },
    Quantity("bias correction", "update", "the first steps are too large", "AdamW, algorithm 2"): {
        "the moments have no bias correction": lambda s: (1, 1),
        "the first moment has no bias correction": lambda s: (1, s.x[1]),
        "the second moment has no bias correction": lambda s: (s.x[0], 1),
    },
    Quantity("betas", "update", "the update has a different direction", "AdamW, algorithm 2", about=ADAM): {
        "betas of Adam: they are swapped": lambda s: (s.x[1], s.x[0]),
        "betas of Adam: beta1 is {c}": lambda s: (s.c, s.x[1]),
        "betas of Adam: beta2 is {c}": lambda s: (s.x[0], s.c),
    },
    Quantity("root", "update", "the update is different", "arXiv 1412.6980; Automodel PR 3444"): {
        "eps is added before the bias correction": lambda s: s.variance.sqrt() + s.eps / s.correction**0.5,
        "eps is inside the square root": lambda s: (s.variance + s.eps).sqrt(),
        "eps of Adam is {c}": {"eps": fitted_number},
        "the update is applied twice": {"times": 2},
        "the update uses the gradients before clipping": {"gradients": lambda s: s.parameters("grad")},
        "weights are rounded to bfloat16 after the update": {
            "weight": lambda s: rounded(s.x, s.theirs, torch.bfloat16)
        },
    },
    Quantity("slope", "update", "the update has a different direction", "AdamW, algorithm 2"): having(
        "the gradient of a parameter", TIMES, LINEAR, NONLINEAR
    ),
    Quantity("moment", "update", "small updates are lost", "AdamW, algorithm 2"): having(
        "a moment of Adam, after its update,", ROUNDED
    ),
    Quantity("move", "update", "the update has a different direction", "AdamW, algorithm 2"): {
        "the update is the gradient itself, as in SGD": lambda s: s.gradient,
        "the update is the sign of the gradient": lambda s: s.gradient.sign(),
        **having("Adam's update before it is multiplied by the learning rate", NONLINEAR),
    },
}

RATE = "the effective learning rate changes", "run/optimizer.py: learning_rate; accelerate 963", SCHEDULES
OF_SCHEDULES = {
    Quantity("type", "schedule", *RATE): {f"the schedule is {name}": name for name in ("linear", "cosine", "constant")},
    Quantity("step", "schedule", *RATE): {
        "the learning rate is one step behind": lambda s: s.x - 1,
        "the learning rate is one step ahead": lambda s: s.x + 1,
        "the schedule counts micro-batches": lambda s: s.x * len(s.micro_batches),
        "the schedule advances twice per step": lambda s: 2 * s.x,
        "the step number of the schedule is {c} times as large": times,
        "the step number of the schedule is {c} too small": lambda s: s.x - s.c,
    },
    Quantity("progress", "schedule", *RATE): {
        "the learning rate decays from step 0 instead of from the end of the warmup": lambda s: s.t / s.max_steps,
        "the learning rate decay ends one step early": lambda s: (s.t - s.warmup) / max(1, s.max_steps - s.warmup - 1),
    },
    Quantity("max_steps", "schedule", *RATE): {
        "the number of steps after which the schedule ends is {c}": fitted_number
    },
    Quantity("warmup", "schedule", *RATE): {
        "warmup_steps is ignored": 0,
        "the number of warmup steps is {c}": fitted_number,
    },
    Quantity("rate", "schedule", *RATE): {
        "the learning rate ends at {c} times the largest rate": lambda s: s.c + (1 - s.c) * s.x,
        "the learning rate is at least {c} times the largest rate": lambda s: max(s.x, s.c),
        "the learning rate is too large by {c} times the largest rate": lambda s: s.x + s.c,
    },
}

ALL_STAGES = "advantages, rows, logps, loss, gradients, clip, update, schedule"
QUANTITIES: dict[Quantity, dict[str, Any]] = {
    **OF_ADVANTAGES,
    **OF_TOKENS,
    **OF_LOSSES,
    **OF_POLICY_LOSSES,
    **OF_OFFLINE_LOSSES,
    **OF_FORWARDS,
    **OF_UPDATES,
    **OF_SCHEDULES,
    Quantity("factor", ALL_STAGES, "the model learns the opposite"): {"all values have the wrong sign": -1},
}

# numbers that a fitted factor may be: function of a step d, and a pattern of the tensors to which the number applies
FACTORS = {
    "the temperature": (lambda d: d.about.get("temperature"), ".*logps$|entropies$|grad"),
    "one over the temperature": (lambda d: 1 / (d.about.get("temperature") or 1), ".*logps$|entropies$|grad"),
    "beta": (lambda d: d.about.get("loss", {}).get("beta"), "loss|logps"),
    "the learning rate of the previous step divided by the current one": (
        lambda d: [0.0, *d.schedule.get("rates", [])][-1] / (d.optimizer.get("learning_rate") or 1),
        "after|learning",
    ),
    "the largest learning rate divided by the current one": (
        lambda d: d.schedule.get("learning_rate", 0) / (d.optimizer.get("learning_rate") or 1),
        "after|learning",
    ),
    "bits instead of nats": (lambda d: 1 / math.log(2), ".*logps$|entropies|loss|logps|grad"),
}

# counts that a fitted factor may be, in the same form
COUNTS = {
    "micro-batches": (lambda d: len(d.micro_batches), "loss|logps|grad|after|learning"),
    "rows": (lambda d: len(d.all_rows), "loss|logps"),
    "rows with an advantage other than 0": (
        lambda d: d.has_advantage().sum().item() if "advantages" in d and not d.has_advantage().all() else None,
        "loss|logps",
    ),
    "counted tokens": (lambda d: d["completion_mask"].sum().item(), "loss|logps"),
    "ranks": (lambda d: d.about.get("world_size", 1), ""),
    "completions of a group": (lambda d: d.about.get("num_generations", 1), "advantages|loss|logps"),
    "rewards": (lambda d: d["rewards"].view(len(d["rewards"]), -1).shape[1] if "rewards" in d else 1, "advantages"),
    "steps of a rollout": (lambda d: d.about.get("steps_per_rollout", 1), "loss|logps|learning"),
    "tokens of completions, including padding": (lambda d: d.completion.sum().item(), "loss|logps"),
    "columns": (lambda d: d["input_ids"].numel(), "loss|logps"),
    "tokens of prompts and completions": (lambda d: d["row_lengths"].sum().item(), "loss|logps"),
    "tokens of the longest completion": (lambda d: d["lengths"].max().item(), "loss|logps"),
    "max_completion_length": (lambda d: d.about.get("max_completion_length"), "loss|logps"),
    "rows of a micro-batch": (lambda d: len(d.micro_batches[0]), "loss|logps"),
    "pairs of a micro-batch": (lambda d: len(d.micro_batches[0]) // 2 if "pair" in d else 1, "loss|logps"),
}
