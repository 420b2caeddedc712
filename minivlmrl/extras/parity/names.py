"""Known bugs of training steps, listed by the quantity that a bug changes, such as the reward or the mask.

For example, the function `lambda s: s.x / 2` for the quantity "rewards" imitates a trainer that halves all rewards. The
attributes of its argument s are:

    x         the right value
    c         an unknown number, such as a clip bound, for which the search finds a value
    region    the part of the step that has the bug, such as the first turn
    others    the tensors of the recorded step, such as s.advantages
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad

from minivlmrl.extras.parity.formulas import clipped, in_half, rounded, total_by
from minivlmrl.losses.preference import DPO_LOSSES


@dataclass(frozen=True)
class Quantity:
    """A quantity that a trainer may compute wrongly, such as the rewards or the learning rate."""

    name: str
    stages: str  # stages and kinds of losses, separated by commas
    effect: str  # how the mistakes change the training
    source: str = ""  # a line of code, a paper, or an issue or pull request
    about: str = ""  # feature that a step must contain to reveal the mistakes
    needs: str = "input_ids"  # tensor that the step must contain
    who: str = ""  # projects that do so on purpose, with their option; a bug with `who` is called a design
    least: float = 0.0  # a fitted number below this makes the design a mistake
    unread: str = ""  # option or tensor that the design ignores; if the loss has read it, the design is a mistake
    read: str = ""  # option or tensor that the loss must have read to have these mistakes

    def stage_names(self) -> set[str]:
        return set(self.stages.split(", "))


class Limited(NamedTuple):
    """A bug in only some rows or tokens, for example in truncated completions."""

    kinds: str  # Dump attributes that hold the parts, separated by spaces
    formula: Callable | None = None  # None if each part is a wrong order of rows or tokens


regions = partial(Limited, "regions")
parts = partial(Limited, "parts")
spans = partial(Limited, "spans")
rollout_sets = partial(Limited, "rollout_sets")
ROWS = Limited("rows")
ROWS_OR_COLUMNS = Limited("rows columns")
ROLLOUT_ROWS = Limited("rollout_rows")


# functions that build tables of bugs


def having(says: str, *tables: dict[str, Callable]) -> dict[str, Callable]:
    return {f"{says} {text}": formula for table in tables for text, formula in table.items()}


def choices(says: str, *values: str) -> dict[str, str]:
    """Return one bug for each wrong value of an option, such as "the KL estimator is k1"."""
    return {says.format(value): value for value in values}


def options(stages: str, effect: str, **off_values) -> dict[Quantity, dict]:
    """Return two bugs for each option of a loss, such as "beta is ignored" and "beta is 0.3"."""
    return {
        Quantity(name, stages, effect): {f"{name} is ignored": off, f"{name} is {{c}}": fitted_number}
        for name, off in off_values.items()
    }


# functions that the formulas use


def times(s):
    return s.c * s.x


def fitted_number(s):
    return s.c


def row_mean(x, mask):
    return (x * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)


def is_positive(s):
    """Return a mask (n, 1) or (n, S) of positive advantages."""
    return s.advantages.view(len(s.completion_mask), -1) > 0


def shifted(x, by):
    """Move the values in each row of x by a number of columns, and fill with 0."""
    return pad(x, (by, -by))


def discount(c, mask):
    """Return weights for the tokens of a row: 1 for the first token in the mask, then c, c ** 2, and so on."""
    return c ** (mask.cumsum(1) - 1).clamp(min=0)


def span_shares(s):
    """Weight each token by 1 / (number of tokens in its turn, group or micro-batch)."""
    return s.mask / total_by(s.mask, s.region[s.part]).clamp(min=1)


def end_tokens(s):
    """Return a mask of the stop tokens; if no stop ids are known, the last token of each turn counts as one."""
    return s.is_stop(s.input_ids) if s.about.get("stop_token_ids") else s.x * (1 - shifted(s.x, -1))


def prompt_tokens(s):
    """Return a mask (n, S) of all prompt tokens except the first one, which no earlier token predicts."""
    return (s.attention_mask.cumsum(1) > 1) * s.attention_mask * ~s.completion


def without_missing_ids(s):
    """Imitate a trainer whose mask leaves out one or two special tokens wherever they occur."""
    missing = s.x > s.completion_mask
    ids = s.input_ids[missing].unique()
    return s.x * ~torch.isin(s.input_ids, ids) if len(ids) < 3 and 2 * len(ids) <= missing.sum() else s.x


def inside(s, tensors: dict, is_inside: bool = True) -> dict:
    """Select the tensors of the parameters inside, or outside, one part of the model, such as the vision tower."""
    return {name: x for name, x in tensors.items() if bool(s.region(name)) == is_inside}


def cispo(bounded: Callable) -> Callable:
    """Return the formula of the CISPO loss, in which the function `bounded` clips the importance ratio."""
    return lambda s: -bounded(s).detach() * s.advantages * s.per_token_logps * s.weights


def clipped_by_itself(s):
    return clipped(s.x, s.optimizer.get("max_grad_norm"))


def with_rounded_sines(model):
    """Round the rotary embeddings in a model's decoder to bfloat16, and return the model."""

    def rounded_inputs(_, given):
        return given[0], *(x.bfloat16().to(x) for x in given[1:3]), *given[3:]

    for layer in model.model.layers:
        layer.register_forward_pre_hook(rounded_inputs)
    return model


def theirs_in_half(s):
    return in_half(s.x, s.theirs, s.exact)


# Means and standard deviations of the red, green and blue channels: Qwen's processor, then ImageNet models
MEAN = torch.tensor([[0.48145466], [0.4578275], [0.40821073]])
STD = torch.tensor([[0.26862954], [0.26130258], [0.27577711]])
IMAGENET_MEAN = torch.tensor([[0.485], [0.456], [0.406]])
IMAGENET_STD = torch.tensor([[0.229], [0.224], [0.225]])


def normalized(mean, std) -> Callable:
    """Imitate a trainer that normalizes images with `mean` and `std` instead of the values of Qwen's processor."""
    return lambda s: ((s.x.unflatten(1, (3, -1)) * STD + MEAN - mean) / std).flatten(1)


def by_number_of_tokens(s):
    """Imitate a wrong M-RoPE: after an image of 3 by 4 tokens, text continues at position 12 instead of 4."""
    positions = s.x.clone()
    for number in s.pictures.unique()[:-1]:  # the last number stands for text
        tokens = s.pictures == number
        side = s.x[:, tokens].max() - s.x[:, tokens].min() + 1
        positions[:, int(tokens.nonzero().max()) + 1 :] += tokens.sum() - side
    return positions


def of_index(s):
    """Imitate a trainer that assumes one image per row: row 2 then starts at image 2 of the micro-batch."""
    return s.flat[s.index :][: len(s.x)]


def replaced_ids(s):
    """Imitate a trainer that replaces one or two special tokens everywhere with another token."""
    differs = (s.their_ids != s.x) & (s.x != s.no_token)
    old, new = s.x[differs].unique(), s.their_ids[differs].unique()
    return s.x.where(~torch.isin(s.x, old), new[0]) if len(old) in (1, 2) and len(new) == 1 else s.x


# ways in which any quantity may be wrong
TIMES = {"is {c} times as large": times}
SIGNED = {"has the wrong sign": lambda s: -s.x, "is left out": lambda s: 0 * s.x}
SCALED = {"is doubled": lambda s: 2 * s.x, "is halved": lambda s: s.x / 2}
LINEAR = SIGNED | SCALED
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
CLAMPED = {"is clamped to -{c} and {c}": lambda s: s.x.clamp(-s.c, s.c), "is at most {c}": lambda s: s.x.clamp(max=s.c)}
BOUNDED = CLAMPED | {
    "is at least {c}": lambda s: s.x.clamp(min=s.c),
    "is at least -{c}": lambda s: s.x.clamp(min=-s.c),
    "is at most -{c}": lambda s: s.x.clamp(max=-s.c),
    "is {c} too large": lambda s: s.x + s.c,
    "is {c} too small": lambda s: s.x - s.c,
}
NONLINEAR = ROUNDED | CURVED | BOUNDED
UNCLAMPED = {text: formula for text, formula in BOUNDED.items() if text not in CLAMPED}
BY_TOKEN = {
    "is replaced by the mean of its row": lambda s: row_mean(s.x, s.mask) + 0 * s.x,
    "is replaced by the sum of its row": lambda s: (s.x * s.mask).sum(1, keepdim=True) + 0 * s.x,
    "has the mean of its row subtracted": lambda s: s.x - row_mean(s.x, s.mask),
    "is replaced by the sum up to its token": lambda s: (s.x * s.mask).cumsum(1),
    "is replaced by the sum from its token on": lambda s: (s.x * s.mask).flip(1).cumsum(1).flip(1),
    "is detached": lambda s: s.x.detach(),
    "has half of its gradient": lambda s: (s.x + s.x.detach()) / 2,
}
OF_RATIOS = {
    "is the arithmetic instead of the geometric mean of the ratios in its row": lambda s: (
        (row_mean(s.x.exp(), s.mask) + (s.mask.sum(1, keepdim=True) == 0)).log() + 0 * s.x
    ),
    "is at most {c}": lambda s: s.x.clamp(max=math.log(s.c)),
    "is only the policy's probability": lambda s: s.old_per_token_logps + s.x,
}
OF_ANSWERS = {
    "is divided by the answer's length": lambda s: s.x / s.answer_lengths,
    "is {c} too small for chosen answers": lambda s: s.x - s.c * torch.tensor([1.0, 0.0]),
    "is {c} too large for chosen answers": lambda s: s.x + s.c * torch.tensor([1.0, 0.0]),
    "is detached for the chosen answer": lambda s: torch.stack([s.x[:, 0].detach(), s.x[:, 1]], 1),
    "is detached for the rejected answer": lambda s: torch.stack([s.x[:, 0], s.x[:, 1].detach()], 1),
    "is averaged over the pairs before the loss": lambda s: s.x.mean(0) + 0 * s.x,
    "is left out for the rejected answer": lambda s: s.x * torch.tensor([1.0, 0.0]),
    "is left out for the chosen answer": lambda s: s.x * torch.tensor([0.0, 1.0]),
    "has the wrong sign for the rejected answer": lambda s: s.x * torch.tensor([1.0, -1.0]),
    "has the wrong sign for the chosen answer": lambda s: s.x * torch.tensor([-1.0, 1.0]),
}
IN_A_LIST = {
    "twice": lambda s: s.x + s.x,
    "in reverse": lambda s: s.x[::-1],
    "shifted by one to later places": lambda s: s.x[-1:] + s.x[:-1],
    "shifted by one to earlier places": lambda s: s.x[1:] + s.x[:1],
    "replaced by the first": lambda s: s.x[:1] * len(s.x),
}
WITH_EPSILON = {"": {}, ", without 1e-4": {"epsilon": 0.0}}
# General bugs, such as a wrong sign, can occur in every quantity; the search simulates specific bugs first.
GENERAL = {*(LINEAR | TIMES).values(), *NONLINEAR.values(), *(BY_TOKEN | OF_RATIOS | OF_ANSWERS).values()}

FACTOR = Quantity("factor", "", "the effective learning rate changes")
OWN_LENGTH = Quantity("factor", "", "the effective learning rate changes", who="Dr. GRPO losses with a constant length")

of_kl = partial(Quantity, about="KLs, which need beta and a reference", needs="ref_per_token_logps")

# computations to which a bug may be limited: a mask, for example, may be wrong only where tokens are counted
SCOPES = [
    ("advantages", ["the reward", "the baseline", "the divisor"], ""),
    ("grpo", ["the policy's term", "the KL", "the mean entropy"], ""),
    ("grpo, sft", ["the sum", "the count", "the ratio"], "mask"),
    ("dpo", ["the policy", "the reference"], ""),
]

# for each kind of bug, what a recorded step must contain to reveal the bug
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
CLIPPED = "gradient clipping, which needs a norm greater than max_grad_norm"
DECAY = "weight decay, which needs weight_decay > 0"
ADAM = "betas and states of Adam, which need a later step than the first"
SCHEDULES = "schedules, which need a step at which the learning rate changes"

ALL_STAGES = "advantages, rows, logps, loss, gradients, clip, update, schedule"
RATE = "the effective learning rate changes", "run/optimizer.py: learning_rate; accelerate 963", SCHEDULES
QUANTITIES: dict[Quantity, dict[str, Any]] = {
    # advantages
    Quantity("rewards", "advantages", "completions are rewarded wrongly", "TRL PR 5902, R1-V 146, ms-swift 8123"): {
        "a completion without any reward gets the reward 0": lambda s: s.x.where(~s.x.isnan().all(1, True), 0.0),
        **having("a reward", TIMES, LINEAR, NONLINEAR),
        "a completion has the rewards of {}": ROLLOUT_ROWS,
        "one missing reward makes its group's mean and standard deviation NaN": {"judged": lambda s: s.rewards},
    },
    Quantity("reward weights", "advantages", "the wrong completions are rewarded", "VLM-R1"): {
        "all rewards have weight 1": lambda s: s.x * 0 + 1,
        "the reward weights are in reverse order": lambda s: s.x.flip(0),
        "the first reward does not count": lambda s: s.x * (torch.arange(len(s.x)) > 0),
        "the last reward does not count": lambda s: s.x * (torch.arange(len(s.x)) < len(s.x) - 1),
    },
    Quantity("total", "advantages", "the wrong completions are rewarded", "losses/advantages.py: combine"): {
        "a completion has no reward if any reward function returned None": lambda s: s.weighted.sum(1),
        "rewards are averaged over the reward functions that returned a number": lambda s: s.weighted.nanmean(1),
        "rewards are multiplied, not added": lambda s: s.weighted.nan_to_num(1.0).prod(1),
        **having("the weighted sum of rewards", TIMES, NONLINEAR),
        "rewards of {} are 0": rollout_sets(lambda s: s.x * ~s.region),
        "rewards of {} are missing": rollout_sets(lambda s: s.x.masked_fill(s.region, math.nan)),
    },
    Quantity("normalize first", "advantages", "the wrong completions are rewarded", "losses/advantages.py; GDPO"): {
        "each reward is normalized before the sum instead of the sum, or the other way round": lambda s: not s.x
    },
    Quantity("group", "advantages", "the baseline is wrong", "R1-V PR 49, NeMo-RL PR 3882", about=GROUPS): {
        "groups contain twice as many completions": lambda s: s.index // (2 * s.group_size),
        "groups contain half as many completions": lambda s: s.index // (s.group_size / 2),
        "a completion belongs to the group of {}": ROLLOUT_ROWS,
    },
    Quantity("group mean", "advantages", "more variance or bias", "PipelineRL PR 54", about=BASELINES): {
        "no baseline is subtracted": lambda s: s.x * 0,
        "the baseline is the mean of all rewards of the rollout": lambda s: s.all_judged.mean(),
        "the baseline is the mean of the other completions of the group":
            lambda s: (s.judged.sum() - s.rewards) / max(1, len(s.judged) - 1),
        "the mean also counts completions without a reward": lambda s: s.judged.sum() / len(s.rewards),
        "the baseline is the median of the group": lambda s: s.judged.median(),
        "the baseline is the mean of the group's first half": lambda s: s.judged[: len(s.judged) // 2].mean(),
    },
    Quantity("baseline", "advantages", "the baseline is wrong", "R1-V PR 54"): {
        **having("the baseline", LINEAR, NONLINEAR),
        "a completion has the baseline of {}": ROLLOUT_ROWS,
    },
    Quantity("scaling rewards", "advantages", "prompts are weighted differently", "TRL PR 3992", about=DEVIATIONS): {
        "advantages are not divided by a standard deviation": None,
        "advantages are divided by the standard deviation of their group": lambda s: s.judged,
        "advantages are divided by the standard deviation of all rewards of the rollout": lambda s: s.all_judged,
    },
    Quantity("std", "advantages", "prompts are weighted differently", "unsloth-zoo PR 832", about=DEVIATIONS): {
        "the standard deviation divides by n instead of n - 1": lambda s: s.scaling_rewards.std(correction=0),
        "the standard error is used instead of the standard deviation": lambda s: s.x / len(s.scaling_rewards) ** 0.5,
        "rewards are divided by the variance instead of the standard deviation": lambda s: s.x**2,
        "the number that is added to the standard deviation instead of 1e-4 is 0": {"epsilon": 0.0},
        "the number that is added to the standard deviation instead of 1e-4 is {c}": {"epsilon": fitted_number},
        **{f"advantages are divided by the mean absolute deviation of their group{text}":
            {"std": lambda s: (s.scaling_rewards - s.scaling_rewards.mean()).abs().mean()} | epsilon
            for text, epsilon in WITH_EPSILON.items()},
        **{f"advantages go from 0 to 1 (min-max) instead of being normalized{text}":
            {"group mean": lambda s: s.judged.min(), "std": lambda s: s.judged.max() - s.judged.min()} | epsilon
            for text, epsilon in WITH_EPSILON.items()},
        "epsilon is added to the variance": lambda s: (s.x**2 + s.epsilon).sqrt() - s.epsilon,
        "the standard deviation is at least the standard deviation of all rewards":
            lambda s: s.x.clamp(min=s.all_judged.std()),
    },
    Quantity("deviation", "advantages", "prompts are weighted differently", "R1-V PR 54"): {
        **having("the divisor of advantages", NONLINEAR),
        "a completion's advantage is divided by the standard deviation of {}": ROLLOUT_ROWS,
    },
    Quantity("advantages", "advantages", "the wrong completions are rewarded", "R1-V PR 54, issue 146"): {
        "advantages are normalized a second time, over the batch": lambda s: (s.x - s.x.mean()) / (s.x.std() + 1e-4),
        "a completion has the advantage of {}": ROLLOUT_ROWS,
    },
    Quantity("advantages", "rows", "the wrong completions are rewarded", "R1-V PR 54"): {
        "rows were shuffled, but their advantages were not": lambda s: s.rollout_advantages[: len(s.x)]
    },
    Quantity("advantages", "advantages, rows, grpo", "wrong completions are rewarded", "DeepSeekMath eq. 21"): having(
        "an advantage", SIGNED, NONLINEAR
    ),
    Quantity("advantages", "rows, grpo", "the wrong completions are rewarded", "R1-V PR 54, issue 146"): {
        "a row has the advantage of {}": ROWS
    },
    # tokens, images and masks
    Quantity("ids", "tokens", "tokens that were never sampled are trained", "TRL 5144, PR 5521, verl 6719"): {
        "a token is replaced by another one after sampling": {"tokens": replaced_ids},
        "a completion is followed by other tokens": {"tokens": lambda s: s.their_ids.where(s.x == s.no_token, s.x)},
        "completions are shortened": {"tokens": lambda s: s.x.where(s.their_ids != s.no_token, s.no_token)},
        "a row has the ids of {}": ROWS,
        "ids of {} were decoded and encoded again": regions(lambda s: s.again(s.x)),
        "ids of {} are missing": regions(lambda s: []),
        "ids of {} occur twice": regions(lambda s: s.x + s.x),
        "ids lack the first token of {}": regions(lambda s: s.x[1:]),
        "ids lack the last token of {}": regions(lambda s: s.x[:-1]),
    },
    Quantity("pictures", "pictures, logps", "answers see other images", "R1-V PR 49, slime 1847, verl 4050"): {
        "a row has the images of {}": {"picture rows": ROWS},
        "a row has the images at its own index, as if each row had one": of_index,
        "a row has the image at its own index, as if each row had one": lambda s: s.flat[s.index :][:1],
        "a row lacks all images, so the model does not see any image": lambda s: [],
        "a row lacks all images except the first": lambda s: s.x[:1],
        "a row lacks all images except the last": lambda s: s.x[-1:],
        "a row lacks the first image": lambda s: s.x[1:],
        "a row lacks the last image": lambda s: s.x[:-1],
        "a row lacks the images of the prompt": lambda s: s.x[s.num_given :],
        "a row lacks the images of tool responses": lambda s: s.x[: s.num_given],
        **having("a row has all images", IN_A_LIST),
    },
    Quantity("tool pictures", "pictures, logps", "answers see other images", "slime 1847, verl 4050"): having(
        "a row has the images of tool responses", IN_A_LIST
    ),
    Quantity("attended", "tokens, logps", "training uses another model", "TRL PR 4976"): {
        "the model does not attend to {}": regions(lambda s: s.x & ~s.region),
        "tokens attend to the padding before the prompt": lambda s: s.x | ~s.completion,
    },
    Quantity("drop truncated", "mask", "the wrong completions are trained", "TRL PR 2881", about=TRUNCATION): {
        "truncated completions are in the loss": False,
        "truncated completions are not in the loss": True,
    },
    Quantity("ended", "mask", "the wrong completions are trained", "TRL mask_truncated_completions"): {
        "a truncated completion is in the loss if an earlier turn ended": lambda s: s.end_tokens.any(1, keepdim=True),
        "a completion that ends at the maximum length counts as truncated":
            lambda s: s.x & (
                (s.text_follows & s.completion).sum(1, True) < (s.about.get("max_completion_length") or s.width)),
    },
    Quantity("mask", "mask, loss", "the policy never learns to stop", "TRL PR 3200, 7039", about=END_TOKENS): {
        "the end token is not trained on": lambda s: s.x * ~end_tokens(s).bool()
    },
    Quantity("mask", "mask, loss", "padding is trained", "ms-swift 3069", about=PADDING): {
        "one token after the completion is counted, too": lambda s: torch.maximum(s.x, shifted(s.x, 1) * s.completion),
        "padding is counted as part of the completion": lambda s: s.completion.double(),
    },
    Quantity("mask", "mask, loss", "the wrong tokens are trained", "TRL PR 4300, 5521"): {
        "no token is in the loss": lambda s: 0 * s.x,
        "the last token is not trained on": lambda s: s.x * shifted(s.x, -1),
        "the first token is not trained on": lambda s: s.x * shifted(s.x, 1),
        "the last column of the batch is not trained on": lambda s: shifted(shifted(s.x, 1), -1),
        "one token before the completion is counted, too": lambda s: torch.maximum(s.x, shifted(s.x, -1)),
        "only the first token is counted": lambda s: s.x * (s.x.cumsum(1) == 1),
        "only the last token is counted": lambda s: s.x * (1 - shifted(s.x, -1)),
        "every column is counted": lambda s: torch.ones_like(s.x),
        "prompt tokens except image tokens are counted":
            lambda s: torch.maximum(s.x, prompt_tokens(s) * (s.input_ids != s.about.get("image_token_id"))),
        "prompt tokens are counted": lambda s: torch.maximum(s.x, prompt_tokens(s)),
        "the mask also counts {}": regions(lambda s: s.x + (1 - s.x) * s.region),
        "the mask does not count {}": regions(lambda s: s.x * ~s.region),
        "the mask counts only {}": regions(lambda s: s.completion.double() * s.region),
        "a mask value is taken from {}": ROWS_OR_COLUMNS,
    },
    Quantity("mask", "mask", "the wrong tokens are trained"): {
        "tokens are not counted because of their ids": without_missing_ids
    },
    # all losses
    Quantity("mean_over", "loss", "short micro-batches count more", "arXiv 2604.23747", about=MICRO_BATCHES): {
        "each micro-batch is averaged by itself, and then the means are averaged": "micro_batch",
        "each micro-batch is averaged by itself, and the means are added":
            {"mean_over": "micro_batch", "factor": lambda s: len(s.micro_batches)},
    },
    Quantity("average", "grpo", "completions of other lengths weigh more", "losses/grpo.py: AVERAGES", AVERAGES,
        who="TRL: loss_type; verl: loss_agg_mode; OpenRLHF: token_level_loss"): {
        "the loss is averaged as in grpo, over the tokens of each row and then over the rows": "grpo",
        "the loss is averaged as in dapo, over all tokens of the step": "dapo",
        "the loss is averaged as in dr_grpo, over a fixed length and then over the rows": "dr_grpo",
        "the loss is averaged as in luspo, summed over the tokens of each row and averaged over the rows": "luspo",
        "the loss is averaged as in bnpo, over the tokens of each micro-batch": "bnpo",
    },
    Quantity("mean", "grpo, sft", "the effective learning rate changes with lengths and rows", about=AVERAGES,
        who="trainers that divide later, or choose the length: verl's seq-mean-token-sum-norm"): {
        "the loss is the sum over all tokens instead of a mean": lambda s: s.terms.sum(),
        "the loss is the sum over the rows of their means": lambda s: row_mean(s.terms, s.mask).sum(),
        "the loss is divided by the rows and by the length of the longest completion":
            lambda s: s.terms.sum() / s.mask.sum(1).max() / len(s.all_rows),
        "the loss is divided by a fixed length of {c} for each row": lambda s: s.terms.sum() / s.c / len(s.all_rows),
    },
    Quantity("mean", "grpo, sft", "long padding makes the update small, unless the trainer divides later",
        about=AVERAGES): {
        "the loss is divided by all columns, padding included":
            lambda s: s.terms.sum() / s.completion[0].sum() / len(s.all_rows),
    },
    Quantity("average", "sft", "completion lengths are weights", "arXiv 2604.23747", about=AVERAGES): {
        f"each row of {name} is averaged by itself": {"average": "grpo", "loss_type": name} for name in ("nll", "dft")
    },
    Quantity("mean", "grpo", "a completion without tokens makes the loss NaN", "verl issue 7200", about=AVERAGES): {
        "a row without tokens is divided by 0 in the mean over each row": (
            lambda s: (s.terms.sum(1) / s.mask.sum(1)).sum() / len(s.all_rows)
        ),
    },
    Quantity("mean", "grpo", "tokens are weighted differently", "verl issue 7200, rllm PR 512, TRL PR 6439"): {
        "the means of the rows are added within a micro-batch instead of averaged":
            lambda s: row_mean(s.terms, s.mask).sum() / len(s.micro_batches),
        "the mean of the rows is only over rows with a token":
            lambda s: row_mean(s.terms, s.mask).sum() / (s.completion_mask.sum(1) > 0).sum(),
        **{
            f"advantages are normalized again within each micro-batch{text}, with an epsilon of {epsilon:g}": {
                "advantages": lambda s, correction=correction, epsilon=epsilon: torch.cat([
                    (x - x.mean()) / (x.std(correction=correction) + epsilon)
                    for x in (s.x[part] for part in s.micro_batches)
                ])
            }
            for correction, text in ((1, ""), (0, " by the biased standard deviation"))
            for epsilon in (1e-8, 1e-6, 1e-4)
        },
        "the sum of a row is divided by the lengths of all rows, because (B,) and (B, 1) are broadcast": lambda s: (
            s.terms.sum(1) / s.mask.sum(1, keepdim=True).clamp(min=1)
        ).mean() / len(s.micro_batches),
        "the mean divides only by tokens of rows with an advantage other than 0":
            {"mask": lambda s: s.x * s.has_advantage()[:, None], "inside": ["the count"]},
        "the mean of the rows is only over those with an advantage other than 0":
            lambda s: row_mean(s.terms, s.mask).sum() / s.has_advantage().sum(),
        "the mean divides only by tokens of rows with a positive advantage":
            lambda s: s.terms.sum() / (s.completion_mask * is_positive(s)).sum().clamp(min=1),
        "the mean of the rows is only over those with a positive advantage":
            lambda s: row_mean(s.terms, s.mask).sum() / is_positive(s).any(1).sum().clamp(min=1),
        "the loss is averaged over the rows of each column and then over the columns":
            lambda s: (s.terms.sum(0) / s.mask.sum(0).clamp(min=1)).sum()
            / (s.completion[0].sum() * len(s.micro_batches)),
        "loss terms are averaged twice, over the tokens of {}, then over these means":
            spans(lambda s: (s.terms * span_shares(s)).sum() / span_shares(s).sum().clamp(min=1)
                  / len(s.micro_batches)),
    },
    Quantity("mean", "grpo", "padding is trained", "Liger-Kernel and axolotl: LUSPO", about=PADDING): {
        "luspo's loss is not masked, but averaged over all columns": {
            "mask": lambda s: s.completion.double(),
            "inside": ["the sum"],
            "weights": lambda s: s.x * s.completion_mask.sum(1, keepdim=True),
            "mean": lambda s: s.terms.sum() / s.completion[0].sum() / len(s.all_rows),
        },
    },
    Quantity("average", "grpo", "short micro-batches count more", about=MICRO_BATCHES): {
        "the loss is averaged over the tokens only in whole steps, and in micro-batches over each row":
            lambda s: s.x if s.about.get("whole_step", True) else "grpo",
    },
    Quantity("mask", "loss", "the effective learning rate changes", "losses/grpo.py: AVERAGES"): {
        "the mean is computed over the step instead of over each micro-batch": {"mean_over": "step"},
        "sums are divided by one token too many per row, as if counted before labels are shifted":
            {"mask": lambda s: torch.maximum(s.x, s.x.roll(-1, 1)), "inside": ["the count"]},
    },
    Quantity("weights", "grpo", "rows or tokens are weighted differently", "verl 2506"): {
        "the loss of a row is multiplied by its advantage": lambda s: s.x * s.advantages.view(len(s.x), -1),
    },
    Quantity("weights", "grpo, sft", "rows or tokens are weighted differently", "verl 2506"): {
        "the loss has no gradient of {}": regions(lambda s: s.x * ~s.region),
        "the loss counts {} twice": regions(lambda s: s.x * (1 + s.region)),
        "the loss of a row is multiplied by its token count": lambda s: s.x * s.lengths[:, None],
        "the loss of a row is divided by its token count": lambda s: s.x / s.lengths[:, None].clamp(min=1),
        "a weight is multiplied by {c} for each later token": lambda s: discount(s.c, s.mask.flip(1)).flip(1),
        "a weight is multiplied by {c} for each earlier token": lambda s: discount(s.c, s.mask),
    },
    Quantity("logps", "loss, logps", "the wrong tokens are trained", "model/logprobs.py"): {
        "a log-probability is taken from {}": ROWS_OR_COLUMNS
    },
    Quantity("logps", "logps, sft", "tokens are not trained", "model/logprobs.py"): having(
        "a log-probability", NONLINEAR
    ),
    # GRPO and its variants
    Quantity("loss_type", "grpo", "the update is different", "losses/grpo.py: TERMS"): choices(
        "the policy term of {} is used", "grpo", "cispo", "sapo", "vespo"
    ),
    Quantity("importance_sampling_level", "grpo", "the update is different", "GSPO eq. 7", about=CHANGED): {
        "each token has its own ratio": "token",
        "each row has one ratio, the geometric mean of its tokens' ratios": "sequence",
        "each row has one ratio, the product of its tokens' ratios": "sequence_sum",
        "each row has one ratio, but each token has its own gradient (GSPO-token)": "sequence_token",
    },
    Quantity("old", "grpo", "a second update after a rollout would be biased", "TRL issue 2769", CHANGED,
        who="losses for one update after each rollout: torchtune, torchforge, R1-V",
        unread="old_per_token_logps"): {
        "the ratio is 1 because old log-probabilities equal the current ones": lambda s: s.per_token_logps.detach(),
    },
    Quantity("old", "grpo", "off-policy steps are biased", "TRL issue 2769, mlx-lm-lora 55", about=CHANGED): {
        "old log-probabilities are not detached": lambda s: s.per_token_logps,
        "an old log-probability is taken from {}": ROWS_OR_COLUMNS,
    },
    Quantity("old", "grpo", "ratios contain the sampler's errors", needs="sampler_logps"): {
        "old log-probabilities are the sampler's": lambda s: s.sampler_logps
    },
    Quantity("old", "grpo", "off-policy steps are biased", needs="ref_per_token_logps"): {
        "the old policy is the reference": lambda s: s.ref_per_token_logps
    },
    Quantity("ratio", "grpo", "the update is different", needs="old_per_token_logps"): {
        "the ratio is the log of the ratio, because exp is missing": lambda s: s.x.log(),
    },
    Quantity("ratio", "grpo", "ratios beyond the bound get no gradient", needs="old_per_token_logps",
        who="verl, OpenRLHF, EasyR1 and SkyRL, with a bound of 20", least=2.0): {
        "the log of the ratio is clamped to -{c} and {c}": lambda s: s.x.log().clamp(-s.c, s.c).exp(),
        "the log of the ratio is at most {c}": lambda s: s.x.log().clamp(max=s.c).exp(),
    },
    Quantity("log-ratio", "grpo", "off-policy tokens have other weights", "GSPO eq. 7", needs="old_per_token_logps"): {
        "log-probabilities are in bfloat16": dict.fromkeys(("policy", "old"), lambda s: s.x.bfloat16().double()),
        **having("the log of the ratio", LINEAR, ROUNDED, CURVED, UNCLAMPED, BY_TOKEN),
        **having("the ratio", OF_RATIOS),
        "the log of the ratio is averaged over {}": {
            "log-ratio": spans(lambda s: total_by(s.x * span_shares(s), s.region)),
            "importance_sampling_level": "token",
        },
        "all rows of the batch have one ratio, the product of their tokens' ratios":
            {"log-ratio": lambda s: (s.x * s.mask).sum() + 0 * s.x, "importance_sampling_level": "token"},
        "the log of a row's ratio is divided by all columns, padding included":
            lambda s: (s.x * s.mask).sum(1, keepdim=True) / s.completion[0].sum() + 0 * s.x,
    },
    Quantity("terms", "grpo", "tokens with a negative advantage that are much likelier than before get no gradient",
        "arXiv 1912.09729", CLIPPING,
        who="verl: clip_ratio_c; EasyR1: clip_ratio_dual; slime: eps_clip_c; TRL: delta", least=1.0): {
        "dual clip: with a negative advantage, a ratio counts at most {c}":
            lambda s: s.x.where(s.advantages >= 0, s.x.minimum(-s.c * s.advantages * s.weights)),
    },
    Quantity("terms", "grpo", "other ratios get the largest weight", "MiniMax-M1 eq. 5", CLIPPING,
        who="most projects; TRL's and ms-swift's epsilon_high is the bound itself"): {
        "cispo's ratio is clamped to 1 - epsilon_low and 1 + epsilon_high":
            cispo(lambda s: s.ratio.clamp(1 - s.options.epsilon_low, 1 + s.options.epsilon_high)),
        "cispo's ratio is at most 1 + epsilon_high": cispo(lambda s: s.ratio.clamp(max=1 + s.options.epsilon_high)),
        "cispo's ratio is clamped to 1 - epsilon_low and epsilon_high":
            cispo(lambda s: s.ratio.clamp(1 - s.options.epsilon_low, s.options.epsilon_high)),
    },
    Quantity("terms", "grpo", "tokens outside of the bounds are not trained", "arXiv 2510.18855", CLIPPING,
        who="IcePop, for the ratio of trainer and sampler"): {
        "no token outside of 1 - epsilon_low to 1 + epsilon_high is trained, whatever its advantage":
            lambda s: -s.ratio * s.advantages * s.weights
            * ((s.ratio >= 1 - s.options.epsilon_low) & (s.ratio <= 1 + s.options.epsilon_high)),
    },
    Quantity("terms", "grpo", "off-policy steps are biased", "Williams 1992", who="rlhf-book: the loss reinforce"): {
        "REINFORCE: a token's term is -A log pi, without a ratio":
            lambda s: -s.advantages * s.per_token_logps * s.weights,
    },
    Quantity("terms", "grpo", "the update is different", "SAPO eq. 6; MiniMax-M1 eq. 5"): {
        "sapo's gate is not divided by its temperature": lambda s: s.x
        * torch.where(is_positive(s), s.options.sapo_temperature_pos, s.options.sapo_temperature_neg),
        "cispo's weight multiplies the ratio instead of the log-probability":
            lambda s: -s.ratio.clamp(max=s.options.epsilon_high).detach() * s.advantages * s.ratio * s.weights,
    },
    Quantity("sapo_temperature_pos", "grpo", "the update is different", "SAPO"): {
        "sapo's two temperatures are swapped": {
            "sapo_temperature_pos": lambda s: s.sapo_temperature_neg,
            "sapo_temperature_neg": lambda s: s.sapo_temperature_pos,
        },
    },
    Quantity("terms", "grpo", "the ratio has a gradient, too", "MiniMax-M1 eq. 5"): {
        "cispo's ratio is not detached":
            lambda s: -s.ratio.clamp(max=s.options.epsilon_high) * s.advantages * s.per_token_logps * s.weights,
        "cispo's ratio has no bound": cispo(lambda s: s.ratio),
    },
    Quantity("terms", "grpo", "off-policy updates are too large", "losses/grpo.py: clipped", about=CLIPPING): {
        "the maximum of the clipped and the unclipped objective is used instead of the minimum":
            {"advantages": lambda s: -s.x, "terms": lambda s: -s.x},
        "only the clipped term is used, without the minimum":
            lambda s: -s.ratio.clamp(1 - s.options.epsilon_low, 1 + s.options.epsilon_high) * s.advantages * s.weights,
        "the policy term is multiplied by the ratio a second time": lambda s: s.x * s.ratio,
        "ratios are not clipped": {"epsilon_low": math.inf, "epsilon_high": math.inf},
        "dual clip also for positive advantages: a ratio counts at least {c}":
            lambda s: s.x.minimum(-s.c * s.advantages * s.weights),
    },
    Quantity("epsilon_low", "grpo", "the update is different", "DAPO, clip higher", about=CLIPPING,
        read="epsilon_high"): {
        "epsilon_low and epsilon_high are swapped": {"epsilon_low": lambda s: s.epsilon_high,
            "epsilon_high": lambda s: s.epsilon_low},
    },
    Quantity("epsilon_high", "grpo", "the update is different", "DAPO, clip higher", about=CLIPPING): {
        "ratios are clipped to exp(-epsilon_low) and exp(epsilon_high)": {
            "epsilon_low": lambda s: -math.expm1(-s.epsilon_low),
            "epsilon_high": lambda s: math.expm1(s.epsilon_high),
        },
        "ratios are not clipped above": math.inf,
        "the upper bound of the clip is epsilon_high instead of 1 + epsilon_high": lambda s: s.x - 1,
        "epsilon_high is {c}": fitted_number,
    },
    Quantity("epsilon_high", "grpo", "ratios have one bound, as in PPO", "PPO eq. 7", CLIPPING,
        who="MM-EUREKA, lmm-r1, minimind, simple_GRPO and torchtune", unread="epsilon_high"): {
        "ratios are clipped with epsilon_low on both sides": lambda s: s.epsilon_low,
    },
    Quantity("epsilon_low", "grpo", "the update is different", "DAPO, clip higher", about=CLIPPING): {
        "ratios are not clipped below": math.inf,
        "ratios are clipped to at least 1 / (1 + epsilon_high)": lambda s: 1 - 1 / (1 + s.epsilon_high),
        "ratios are clipped with epsilon_high on both sides": lambda s: s.epsilon_high,
        "epsilon_low is {c}": fitted_number,
    },
    Quantity("terms", "grpo", "off-policy updates are too large", "PPO eq. 7", about=CLIPPING): {
        "the maximum of the clipped and the unclipped objective is used for negative advantages":
            lambda s: -s.ratio.clamp(max=1 + s.options.epsilon_high) * s.advantages * s.weights,
    },
    **options("grpo", "tokens that are far off-policy are trained", off_policy_mask_threshold=None),
    Quantity("delta", "grpo", "tokens that are far off-policy are trained"): {"delta is ignored": None},
    **options("grpo", "other tokens are trained, too", top_entropy_quantile=1.0),
    **options("grpo", "the policy becomes too sure or too random", entropy_coef=0.0),
    Quantity("terms", "grpo", "the update is different", "losses/grpo.py: clipped"): having(
        "the policy term, without KL and entropy,", NONLINEAR, BY_TOKEN
    ),
    of_kl("terms", "grpo", "rewards have the opposite effect, or none", "losses/grpo.py: clipped", about=""): having(
        "the policy term, without KL and entropy,", SIGNED
    ),
    of_kl("terms", "grpo", "the effective beta changes", "losses/grpo.py: clipped", about=""): having(
        "the policy term, without KL and entropy,", SCALED
    ),
    Quantity("correction", "grpo", "rows are weighted differently", needs="importance_sampling_ratio"): {
        "the sampler's ratio is not used": lambda s: torch.ones_like(s.x),
        **having("the sampler's ratio", TIMES, LINEAR, NONLINEAR),
        "the sampler's ratio is taken from {}": ROWS,
    },
    Quantity("entropies", "grpo", "the policy becomes too sure or too random", needs="entropies"): having(
        "the entropy of a token", TIMES, LINEAR, NONLINEAR, BY_TOKEN
    ),
    # Every step has input_ids, so these bugs are always tried. If the step has no reference model, the report counts
    # them under "cannot reveal".
    of_kl("kl_estimator", "grpo", "another divergence is penalized", "NeMo-RL PR 2506", needs="input_ids"): choices(
        "the KL estimator is {}", "k3"
    ),
    of_kl("kl_estimator", "grpo", "without a ratio as weight, the gradient of k1 is 0 on average", "arXiv 2506.09477",
        needs="input_ids", who="verl: kl_loss_type"): choices(
        "the KL estimator is {}", "k1", "k2"
    ),
    of_kl("use_bias_correction_kl", "grpo", "the gradient of the KL is biased off-policy", "TRL up to 1.9, PR 6594",
        who="most projects"): {"the KL is not weighted with the ratio": False},
    of_kl("use_bias_correction_kl", "grpo", "the gradient of the KL is unbiased off-policy", "TRL up to 1.9, PR 6594",
        who="DeepSeek-V3.2; TRL: use_bias_correction_kl"): {"the KL is weighted with the ratio": True},
    of_kl("KL", "grpo", "the policy is not drawn to the reference, or is even pushed away from it"): having(
        "the KL", SIGNED
    ),
    of_kl("KL", "grpo", "the effective beta changes", "TRL up to 1.9, PR 6594"): {
        "the KL is multiplied by beta twice": lambda s: s.options.beta * s.x,
        "the KL is not multiplied by beta": lambda s: s.x / s.options.beta,
        "the KL estimator is k2, and the ratio that weights it is not detached":
            lambda s: (s.per_token_logps - s.ref_per_token_logps).square() / 2 * s.ratio,
        "the KL is weighted with the ratio of its token instead of its sequence":
            lambda s: s.x / s.ratio * (s.per_token_logps - s.old_per_token_logps).exp(),
        "the KL is ratio * pi / pi_ref - log(pi / pi_ref) - 1, which is not least at the reference": {
            "use_bias_correction_kl": False,
            "KL": lambda s: s.ratio * (s.per_token_logps - s.ref_per_token_logps).exp()
            - (s.per_token_logps - s.ref_per_token_logps) - 1,
        },
        "the KL is weighted with pi / pi_ref": {
            "use_bias_correction_kl": False,
            "KL": lambda s: s.x * (s.per_token_logps - s.ref_per_token_logps).exp(),
        },
        "the KL is weighted with the clipped ratio": {
            "use_bias_correction_kl": False,
            "KL": lambda s: s.x * s.ratio.clamp(1 - s.options.epsilon_low, 1 + s.options.epsilon_high),
        },
        **having("the KL", TIMES, SCALED, ROUNDED, CURVED, UNCLAMPED, BY_TOKEN),
    },
    of_kl("kl_estimator", "grpo", "the gradient is that of k2, which is unbiased on policy", needs="input_ids",
        who="NeMo-RL, which multiplies k3 by the policy over itself; minivlmrl: k1+ and k3+"): {
        f"the KL has the value of {name} and the gradient of k2": {"kl_estimator": name, "kl_straight_through": True}
        for name in ("k1", "k3")
    },
    of_kl("KL estimate", "grpo", "tokens far from the reference are not drawn back",
        who="verl, EasyR1, OpenRLHF, SkyRL, ms-swift, unsloth and slime, with a bound of 10", least=1.0):
        having("the KL", CLAMPED),
    of_kl("KL", "grpo", "tokens far from the reference are not drawn back",
        who="slime, unsloth and NeMo-RL, with a bound of 10", least=1.0):
        having("the KL, after it is weighted with the ratio,", CLAMPED),
    of_kl("reference", "grpo", "tokens far from the reference are not drawn back",
        who="verl and EasyR1, with a bound of 20", least=1.0): {
        "the log-ratio in the KL is clamped to -{c} and {c}":
            lambda s: s.per_token_logps + (s.x - s.per_token_logps).clamp(-s.c, s.c),
        "the log-ratio in the KL is at most {c}":
            lambda s: s.per_token_logps + (s.x - s.per_token_logps).clamp(max=s.c),
    },
    of_kl("KL estimate", "grpo", "another divergence is penalized", "losses/grpo.py: kl_term"): {
        "the KL is that of torch's kl_div, pi_ref * log(pi_ref / pi)": lambda s:
            s.ref_per_token_logps.exp() * (s.ref_per_token_logps - s.per_token_logps),
        "the KL is pi * log(pi / pi_ref) of the sampled tokens, which are weighted with pi already": lambda s:
            s.per_token_logps.exp() * (s.per_token_logps - s.ref_per_token_logps),
        "k3 has the wrong sign of its log-ratio": lambda s: s.x + 2 * (s.ref_per_token_logps - s.per_token_logps),
        "k3 lacks its log-ratio": lambda s: s.x + s.ref_per_token_logps - s.per_token_logps,
    },
    of_kl("KL estimate", "grpo", "the KL is rewarded", "rlhf-book: approx_kl1"): {
        "the KL estimator is k1 with the wrong sign": lambda s: s.ref_per_token_logps - s.per_token_logps
    },
    of_kl("KL estimate", "grpo", "small KLs are rounding errors", "tunix 2315"): {
        "k3 loses its digits, because it is exp(d) - d - 1 in float32 instead of expm1(d) - d":
            lambda s: s.k3_in_float32 if s.options.kl_estimator == "k3" else s.x,
    },
    of_kl("reference", "grpo", "another divergence is penalized", "verl"): {
        "policy and reference are swapped in the KL": lambda s: 2 * s.per_token_logps - s.ref_per_token_logps,
        "the KL is estimated from the sum of a row's log-ratios":
            lambda s: s.per_token_logps + ((s.x - s.per_token_logps) * s.mask).sum(1, keepdim=True),
        "the reference is the old policy": lambda s: s.old_per_token_logps,
    },
    of_kl("reference", "grpo, dpo", "the policy may leave the reference", "DPO eq. 7"): {
        "the reference moves with the policy": lambda s: s.per_token_logps.detach(),
        "the reference is left out, so its log-probabilities are 0": lambda s: 0 * s.x,
        **having("the reference's log-probability", LINEAR, NONLINEAR),
        "a log-probability of the reference is taken from {}": ROWS_OR_COLUMNS,
    },
    # DPO and SFT
    Quantity("index", "dpo", "the wrong answers are compared", "DPO eq. 7"): {
        "the rejected answer is preferred": lambda s: s.x.flip(1),
        "a chosen answer is paired with the rejected answer of the next pair": {"rejected": lambda s: s.x.roll(-1)},
        "a chosen answer is paired with the rejected answer of the previous pair": {"rejected": lambda s: s.x.roll(1)},
    },
    Quantity("mask", "dpo", "the wrong tokens are compared", "DPO eq. 7"): {
        "both answers have the mask of the chosen answer":
            lambda s: s.x[((s.pair[:, None] == s.pair) * s.chosen).argmax(1)],
        "both answers have the mask of the rejected answer":
            lambda s: s.x[((s.pair[:, None] == s.pair) * (1 - s.chosen)).argmax(1)],
    },
    Quantity("beta", "dpo", "the policy is kept at another distance from the reference", "DPO eq. 7"): {
        "beta is applied twice, so it is squared": lambda s: s.x**2,
        "one over beta is used instead of beta": lambda s: 1 / s.x,
        **having("beta", SCALED),
    },
    Quantity("policy", "dpo", "the objective is different", "DPO eq. 7"): {
        "log-probabilities are averaged over tokens":
            {name: lambda s: s.x / s.mask.sum(1, keepdim=True).clamp(min=1) for name in ("policy", "reference")},
        "beta multiplies only the policy's log-probability": {"reference": lambda s: s.x / s.about["loss"]["beta"]},
        "the first token of each answer is left out":
            {name: lambda s: s.x * (s.mask.cumsum(1) > 1) for name in ("policy", "reference")},
        "the last token of each answer is left out":
            {name: lambda s: s.x * (s.mask.flip(1).cumsum(1).flip(1) > 1) for name in ("policy", "reference")},
        "log-probabilities are averaged over all columns, padding included":
            {name: lambda s: s.x / s.mask.shape[1] for name in ("policy", "reference")},
        **having("the policy's log-probability", LINEAR, NONLINEAR),
    },
    Quantity("loss_type", "dpo", "the objective is different", "losses/preference.py"): {
        f"the loss is {name}": [name] for name in DPO_LOSSES
    },
    Quantity("log-ratio", "dpo", "the objective is different", "DPO eq. 7"): having(
        "the log ratio of an answer", LINEAR, NONLINEAR, OF_ANSWERS
    ),
    Quantity("summed reference", "dpo", "pairs are weighted wrongly", "DPO eq. 7"): having(
        "the reference's log-probability", OF_ANSWERS
    ),
    Quantity("pair loss", "dpo", "pairs that are far from learned get a small gradient", "DPO eq. 7"): {
        "the log is missing, so the loss is -sigmoid": lambda s: -s.margins.sigmoid().mean(),
        "the loss is exp(-beta * margin)": lambda s: (-s.margins).exp().mean(),
    },
    Quantity("log-ratio", "dpo", "the chosen answer must be better by a margin", "arXiv 2402.10571",
        who="ODPO, SimPO"): {
        "{c} is subtracted from beta times the margin": lambda s: s.x - s.c / s.options.beta * torch.tensor([1.0, 0.0]),
    },
    Quantity("loss_type", "dpo", "chosen answers become likelier", "arXiv 2404.19733",
        who="TRL: loss_type [sigmoid, sft]"): {
        "an SFT loss with the weight {c} is added":
            {"loss_type": lambda s: [*s.x, "sft"], "loss_weights": lambda s: [1.0, s.c]},
    },
    Quantity("log-ratio", "dpo", "long answers weigh more", "IPO eq. 17; losses/preference.py: DPO_LOSSES",
        who="the authors' code of DPO and OpenRLHF: ipo"): {
        "the log ratio of an answer is the sum over its tokens instead of their mean":
            lambda s: s.x * s.answer_lengths if {"ipo", "sigmoid_norm"} & {*s.options.loss_type} else s.x,
    },
    Quantity("use_weighting", "dpo", "the objective is different", "TRL PR 4171"): {
        "use_weighting is ignored, or applied although it is false": lambda s: not s.x,
        "loss_weights is ignored": {"loss_weights": None},
        "f_divergence_type is ignored": {"f_divergence_type": "reverse_kl"},
    },
    **options("dpo", "the objective is different", beta=1.0, label_smoothing=0.0, ld_alpha=None),
    Quantity("loss_type", "sft", "likely tokens are weighted differently", "DFT eq. 9"): choices(
        "the loss is {}", "nll", "dft"
    ),
    Quantity("terms", "sft", "likely tokens are weighted differently", "DFT eq. 9, twinkle PR 291"): {
        "the probability that weights a token in dft is not detached":
            lambda s: s.per_token_logps * -s.per_token_logps.exp(),
    },
    # log-probabilities
    Quantity("temperature", "logps", "on-policy ratios are not 1", "TRL PR 3029, 4159"): {
        "logits are not divided by the temperature": 1.0,
        "logits are divided twice by the temperature": lambda s: s.x**2,
        "logits are multiplied by the temperature": lambda s: 1 / s.x,
        "log-probabilities instead of logits are divided by the temperature":
            {"temperature": 1.0, "scores": lambda s: s.x / s.about.get("temperature", 1.0)},
        "logits are divided by {c}": fitted_number,
    },
    Quantity("logits", "logps", "on-policy ratios are not 1", "TRL 6789"): {
        **having("a logit", ROUNDED),
        "the softmax uses only the most likely tokens; their number is {c}":
            lambda s: s.x.masked_fill(s.x < s.x.topk(min(max(1, int(s.c)), s.x.shape[-1])).values[:, -1:], -math.inf),
    },
    Quantity("labels", "logps", "the wrong tokens are trained", "TRL PR 3200, transformers PR 47395"): {
        "the end token is scored as the padding token":
            lambda s: torch.where(s.is_stop(s.x), s.about.get("pad_token_id", -1), s.x),
        "each token is scored as the next token": lambda s: s.x.roll(-1),
        "each token is scored as the previous token": lambda s: s.x.roll(1),
    },
    Quantity("blind", "logps", "the model is trained to answer without the image", "unsloth PR 11031, slime 1847"): {
        "the model does not see any image": lambda s: ~s.x,
        "the model does not see the images of tool responses": lambda s: s.numbers >= s.num_given,
    },
    Quantity("pixels", "logps", "training uses another model", "data/image.py"): {
        "images are BGR instead of RGB": lambda s: s.x.unflatten(1, (3, -1)).flip(1).flatten(1),
        "pixels are normalized twice": lambda s: ((s.x.unflatten(1, (3, -1)) - MEAN) / STD).flatten(1),
        "pixels are not normalized": normalized(0, 1),
        "pixels are normalized with ImageNet's mean and deviation": normalized(IMAGENET_MEAN, IMAGENET_STD),
        "pixels are normalized with the mean 0.5 and the deviation 0.5": normalized(0.5, 0.5),
        "the patches of each image are in the opposite order": lambda s: s.x.flip(0),
        "each patch has the pixels of the next patch": lambda s: s.x.roll(-1, 0),
        "each patch has the pixels of the previous patch": lambda s: s.x.roll(1, 0),
        "all images are uniformly gray": lambda s: s.x * 0,
    },
    Quantity("positions", "logps", "training uses another model", "TRL 5279, 5785, xtuner PR 2097"): {
        "positions are 1-D, without M-RoPE": lambda s: s.indices,
        "each token has the position of the previous token": lambda s: s.x.roll(1, 1),
        "each token has the position of the next token": lambda s: s.x.roll(-1, 1),
        "height and width are swapped in the positions": lambda s: s.x[[0, 2, 1]],
        "height and width of the image grids are swapped": {"grids": lambda s: s.x[:, [0, 2, 1]]},
        "text after an image continues at the number of its tokens instead of its largest side": by_number_of_tokens,
        "positions of the completion count tokens": lambda s: s.indices.where(s.own, s.x),
        "positions of the completion start at 0": lambda s: (s.indices - (~s.own).sum()).where(s.own, s.x),
        "positions of the completion are {c} too large": lambda s: s.x + round(s.c) * s.own,
        "positions of the completion are {c} too small": lambda s: s.x - round(s.c) * s.own,
        "positions of the completion continue from the largest position of each axis":
            lambda s: s.x if s.own[0] else (s.x[:, ~s.own].amax(1, True) + s.own.cumsum(0)).where(s.own, s.x),
        "tokens attend to padding, and positions count padding": {"attended": lambda s: torch.ones_like(s.x)},
        "the decoder's rotary sines are in bfloat16": {"model": lambda s: with_rounded_sines(s.x)},
    },
    Quantity("mode", "logps", "ratios or KLs are noisy", "verl, NeMo-RL: sampler and trainer differ"): {
        "rounded to bfloat16": lambda s: rounded(s.x, s.theirs, torch.bfloat16),
        "rounded to float16": lambda s: rounded(s.x, s.theirs, torch.float16),
        "computed in bfloat16": {"dtype": torch.bfloat16, "mode": theirs_in_half},
        "computed under autocast in bfloat16":
            {"dtype": torch.float32, "autocast": torch.bfloat16, "mode": theirs_in_half},
        "the model is in training mode, so its dropout is active, and its outputs cannot be repeated":
            lambda s: s.theirs if s.folder in s.about.get("training", ()) else s.x,
    },
    Quantity("model folder", "logps", "ratios are 1, or KLs are 0", "TRL PR 3725; adapters are not disabled"): {
        "computed with the weights of the policy instead of the weights that sampled or the reference's":
            lambda s: s.about.get("model") or s.x,
        "computed with the weights of the reference model": lambda s: s.about.get("ref_model") or s.x,
    },
    # gradients and AdamW
    Quantity("micro-batch", "gradients", "the update is different", "RAE issue 67; lingua PR 59; arXiv 2604.23747"): {
        "gradients of earlier micro-batches are dropped": lambda s: s.last,
        "gradients of later micro-batches are dropped": lambda s: s.first,
        "gradients of micro-batches are weighted with their tokens": lambda s: s.tokens / s.tokens.mean(),
        "gradients of micro-batches are divided by their tokens": lambda s: s.tokens.mean() / s.tokens,
        "the gradient of the first micro-batch is left out": lambda s: s.x - s.first,
        "the gradient of the last micro-batch is left out": lambda s: s.x - s.last,
        "the gradient of the first micro-batch is added twice": lambda s: s.x + s.first,
        "the gradient of the last micro-batch is added twice": lambda s: s.x + s.last,
        "the gradient of each micro-batch is clipped by itself": {"gradients of a part": clipped_by_itself},
        "the accumulated gradient is clipped after each micro-batch": {"gradients so far": clipped_by_itself},
    },
    Quantity("gradient", "gradients", "parameters are not trained", "VLM-R1 52, torchforge PR 71"): {
        "some parameters do not get any gradient": lambda s: s.x * bool(s.theirs.any()),
        "gradients of the step before are left: {c} times Adam's first moment": lambda s: s.x + s.c * s.earlier,
        "there is no gradient for {}": parts(lambda s: s.x * (not s.region(s.key))),
        **having("the gradient of a parameter", NONLINEAR),
    },
    Quantity("clip", "clip", "the update has a different direction", "run/loop.py: optimizer_step", about=CLIPPED): {
        "gradients are not clipped": lambda s: s.gradients,
        "the logged norm is computed after clipping": {"norm": lambda s: s.norm_after},
        "gradients are clipped by value instead of by norm": lambda s: {
            name: g.clamp(-s.max_norm, s.max_norm) for name, g in s.gradients.items()
        },
        "gradients with a norm less than max_grad_norm are scaled up": lambda s: {
            name: g * s.max_norm / (s.norm + 1e-6) for name, g in s.gradients.items()
        },
        "only {} are clipped": parts(lambda s: s.x | inside(s, s.gradients, False)),
        "each parameter is clipped by its own norm": lambda s: {
            name: clipped({name: g}, s.max_norm)[name] for name, g in s.gradients.items()
        },
        "{} and all other parameters are clipped separately":
            parts(lambda s: clipped(inside(s, s.gradients), s.max_norm)
                  | clipped(inside(s, s.gradients, False), s.max_norm)),
    },
    Quantity("total norm", "clip", "the update has a different direction", "fastmoe PR 65"): {
        "the norm leaves out {}": {"normed": parts(lambda s: inside(s, s.x, False))},
        "the norm counts only {}": {"normed": parts(lambda s: inside(s, s.x))},
        "the norm of all is the sum of the parameters' norms": lambda s: sum(g.norm() for g in s.normed.values()),
        "the norm of all is the largest of the parameters' norms": lambda s: max(g.norm() for g in s.normed.values()),
        "the norm of all is the largest entry": lambda s: max(g.abs().max() for g in s.normed.values()),
        "max_grad_norm is {c}": {"max_norm": fitted_number},
        **having("the norm of all gradients", TIMES, LINEAR, CURVED, BOUNDED),
    },
    Quantity("decay", "update", "weights decay at a different rate", "minGPT", about=DECAY): {
        "weight decay is also applied to norms and biases": lambda s: s.weight_decay,
        "weight decay is applied only to the weights that should be excluded from it": lambda s: s.weight_decay - s.x,
        "weight decay is not applied": 0.0,
        "weight decay is not multiplied by the learning rate": lambda s: s.x / (s.optimizer["learning_rate"] or 1.0),
        "weight decay is added to the gradient, as in Adam with L2 regularization": {"coupled": True},
        "weight decay is {c}": fitted_number,
        "weight decay is {c} where it is not 0": lambda s: s.c * bool(s.x),
        "weight decay leaves out {}": parts(lambda s: s.x * (not s.region(s.key))),
        "weight decay applies only to {}": parts(lambda s: s.x * bool(s.region(s.key))),
        "weight decay also applies to {}": parts(lambda s: s.weight_decay if s.region(s.key) else s.x),
    },
    Quantity("step", "update", "the update is different", "AdamW, algorithm 2; arXiv 2604.23747", about=ADAM): {
        "the moments of Adam were reset": {"moments": lambda s: {}, "step": 1},
        "the bias correction starts again at step 1": 1,
        "the moments have no bias correction": {"bias correction": lambda s: (1, 1)},
        "the first moment has no bias correction": {"bias correction": lambda s: (1, s.x[1])},
        "the second moment has no bias correction": {"bias correction": lambda s: (s.x[0], 1)},
        "the bias correction is one step behind": lambda s: max(1, s.x - 1),
        "the bias correction is one step ahead": lambda s: s.x + 1,
        "betas of Adam: they are swapped": {"betas": lambda s: s.x[::-1]},
        "betas of Adam: beta1 is {c}": {"betas": lambda s: (s.c, s.x[1])},
        "betas of Adam: beta2 is {c}": {"betas": lambda s: (s.x[0], s.c)},
    },
    Quantity("eps", "update", "the update is different", "arXiv 1412.6980"): {"eps of Adam is {c}": fitted_number},
    Quantity("root", "update", "the update is different", "arXiv 1412.6980"): {
        "eps is added before the bias correction": lambda s: s.variance.sqrt() + s.eps / s.correction**0.5,
        "eps is inside the square root": lambda s: (s.variance + s.eps).sqrt(),
        "the update is applied twice": {"times": 2},
        "the update uses the gradients before clipping": {"gradients": lambda s: s.parameters("grad")},
    },
    Quantity("moment", "update", "small updates are lost", "AdamW, algorithm 2"): having(
        "a moment of Adam, after its update,", ROUNDED
    ),
    Quantity("weight", "update", "small updates are lost", "Automodel PR 3444"): {
        "weights are rounded to bfloat16 after the update": lambda s: rounded(s.x, s.theirs, torch.bfloat16)
    },
    Quantity("slope", "update", "the update has a different direction", "AdamW, algorithm 2"): having(
        "the gradient of a parameter", TIMES, LINEAR, NONLINEAR
    ),
    Quantity("move", "update", "the update has a different direction", "AdamW, algorithm 2"): {
        "the update is the gradient itself, as in SGD": lambda s: s.slope,
        "the update is the sign of the gradient": lambda s: s.slope.sign(),
        **having("Adam's update before it is multiplied by the learning rate", NONLINEAR),
    },
    # schedules
    Quantity("type", "schedule", *RATE): choices("the schedule is {}", "linear", "cosine", "constant"),
    Quantity("step", "schedule", *RATE): {
        "the learning rate is one step behind": lambda s: s.x - 1,
        "the learning rate is one step ahead": lambda s: s.x + 1,
        "the schedule counts micro-batches": lambda s: s.x * len(s.micro_batches),
        "the schedule advances twice per step": lambda s: 2 * s.x,
        "the step number of the schedule is {c} times as large": times,
        "the step number of the schedule is {c} too small": lambda s: s.x - s.c,
        "the learning rate decays from step 0 instead of after the warmup": {"progress": lambda s: s.t / s.max_steps},
        "the learning rate decay ends one step early": {"max_steps": lambda s: s.x - 1},
        "the number of steps after which the schedule ends is {c}": {"max_steps": fitted_number},
        "warmup_steps is ignored": {"warmup": 0},
        "the number of warmup steps is {c}": {"warmup": fitted_number},
        "the learning rate ends at {c} times the largest rate": {"rate": lambda s: s.c + (1 - s.c) * s.x},
        "the learning rate is at least {c} times the largest rate": {"rate": lambda s: max(s.x, s.c)},
        "the learning rate is too large by {c} times the largest rate": {"rate": lambda s: s.x + s.c},
    },
    # any stage
    Quantity("factor", ALL_STAGES, "the model learns the opposite"): {"all values have the wrong sign": -1},
}  # fmt: skip

# Numbers by which a trainer may wrongly multiply or divide, such as the temperature: {name: (function that reads the
# number from a step, pattern for the names of the tensors that may be wrong)}
FACTORS = {
    "the temperature": (lambda d: d.about.get("temperature"), ".*logps$|entropies$|grad"),
    "one over the temperature": (lambda d: 1 / (d.about.get("temperature") or 1), ".*logps$|entropies$|grad"),
    "beta": (lambda d: d.about.get("loss", {}).get("beta"), "loss|logps"),
    "the learning rate of the previous step divided by the current one":
        (lambda d: [0.0, *d.schedule.get("rates", [])][-1] / (d.optimizer.get("learning_rate") or 1), "after|learning"),
    "the largest learning rate divided by the current one":
        (lambda d: d.schedule.get("learning_rate", 0) / (d.optimizer.get("learning_rate") or 1), "after|learning"),
    "1 / ln 2, as in bits": (lambda d: 1 / math.log(2), ".*logps$|entropies|loss|logps|grad"),
}  # fmt: skip
COUNTS = {
    "micro-batches": (lambda d: len(d.micro_batches), "loss|logps|grad|after|learning"),
    "rows": (lambda d: len(d.all_rows), "loss|logps"),
    "rows with an advantage other than 0":
        (lambda d: int(d.has_advantage().sum()) if "advantages" in d and not d.has_advantage().all() else None,
         "loss|logps"),
    "counted tokens": (lambda d: d["completion_mask"].sum().item(), "loss|logps"),
    "ranks": (lambda d: d.about.get("world_size", 1), ""),
    "completions of a group": (lambda d: d.about.get("num_generations", 1), "advantages|loss|logps"),
    "rewards": (lambda d: d["rewards"].view(len(d["rewards"]), -1).shape[1] if "rewards" in d else 1, "advantages"),
    "steps of a rollout": (lambda d: d.about.get("steps_per_rollout", 1), "loss|logps|learning"),
    "tokens of completions, including padding": (lambda d: d.completion.sum().item(), "loss|logps"),
    "columns": (lambda d: d["input_ids"].numel(), "loss|logps"),
    "tokens of prompts and completions": (lambda d: d["row_lengths"].sum().item(), "loss|logps"),
    "tokens of the longest completion": (lambda d: d["lengths"].max().item(), "loss|logps"),
    "tokens of max_completion_length": (lambda d: d.about.get("max_completion_length"), "loss|logps"),
    "rows of a micro-batch": (lambda d: len(d.micro_batches[0]), "loss|logps"),
    "pairs of a micro-batch": (lambda d: len(d.micro_batches[0]) // 2 if "pair" in d else 1, "loss|logps"),
}  # fmt: skip
