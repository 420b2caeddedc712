"""Known bugs in training steps, by target: the quantity that a bug changes, such as the mask.

For example, the function `lambda s: s.x / 2` for the quantity "rewards" imitates a trainer that halves all rewards.
Attributes of s:

    x         right value
    c         unknown number, such as a clip bound; the search finds it
    region    part of the step with the bug, such as the first turn
    others    tensors in the recorded step, such as s.advantages
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad

from minivlmrl.extras.parity.formulas import clipped, in_half, rounded, total_by
from minivlmrl.json_files import read_json
from minivlmrl.losses.preference import DPO_LOSSES

PATH = Path(__file__).with_name("bugs.json")


@dataclass(frozen=True)
class Target:
    """Quantity that a trainer may compute wrongly, such as rewards or learning rate; see bugs.json."""

    name: str
    effect: str  # how the mistakes change the training
    stages: str = ""  # stages and loss kinds, separated by commas
    source: str = ""  # code line, paper, issue or pull request
    about: str = ""  # feature that reveals the mistakes
    needs: str = "input_ids"  # required tensor
    used_by: str = ""  # projects that do so on purpose, with their option: the bug is a design
    threshold: float = 0.0  # a smaller fitted number makes the design a mistake
    unread: str = ""  # option or tensor ignored by the design; if the loss has read it, the design is a mistake
    read: str = ""  # option or tensor that a loss with these mistakes must read

    def stage_names(self) -> set[str]:
        return set(self.stages.split(", "))


class Scoped(NamedTuple):
    """Bug in only some rows or tokens, for example in truncated completions."""

    kinds: str  # Dump attributes with the parts, separated by spaces
    formula: Callable | None = None  # None: a part is a wrong order of rows or tokens


regions = partial(Scoped, "regions")
parts = partial(Scoped, "parts")
spans = partial(Scoped, "spans")
ROWS = Scoped("rows")
ROWS_OR_COLUMNS = Scoped("rows columns")
ROLLOUT_ROWS = Scoped("rollout_rows")


# functions that build bug tables


def prefixed(says: str, *tables: dict[str, Callable]) -> dict[str, Callable]:
    return {f"{says} {text}": formula for table in tables for text, formula in table.items()}


def choices(says: str, *values: str) -> dict[str, str]:
    """Return one bug per wrong value of an option, such as "the KL estimator is k1"."""
    return {says.format(value): value for value in values}


def both(formula: Callable) -> dict[str, Callable]:
    """Apply a formula to policy and reference log-probabilities."""
    return {"policy": formula, "reference": formula}


# functions in formulas


def times(s):
    return s.c * s.x


def fitted_number(s):
    return s.c


def row_mean(x, mask):
    return (x * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)


def is_positive(s):
    """Return a mask (n, 1) or (n, S) for positive advantages."""
    return s.advantages.view(len(s.completion_mask), -1) > 0


def shifted(x, by):
    """Shift columns, and fill with 0."""
    return pad(x, (by, -by))


def discount(c, mask):
    """Return token weights: 1 for the first token in the mask, then c, c ** 2, and so on."""
    return c ** (mask.cumsum(1) - 1).clamp(min=0)


def span_shares(s):
    """Weight tokens by 1 / (tokens in their turn, group or micro-batch)."""
    return s.mask / total_by(s.mask, s.region[s.part]).clamp(min=1)


def end_tokens(s):
    """Return a mask for stop tokens, or the last tokens in turns if no stop ids are known."""
    return s.is_stop(s.input_ids) if s.about.get("stop_token_ids") else s.x * (1 - shifted(s.x, -1))


def prompt_tokens(s):
    """Return a mask (n, S) for prompt tokens except the first one, which no token predicts."""
    return (s.attention_mask.cumsum(1) > 1) * s.attention_mask * ~s.completion


def without_missing_ids(s):
    """Imitate a mask that leaves out one or two special tokens everywhere."""
    missing = s.x > s.completion_mask
    ids = s.input_ids[missing].unique()
    return s.x * ~torch.isin(s.input_ids, ids) if len(ids) < 3 and 2 * len(ids) <= missing.sum() else s.x


def inside(s, tensors: dict, is_inside: bool = True) -> dict:
    """Select parameters inside, or outside, one model part, such as the vision tower."""
    return {name: x for name, x in tensors.items() if bool(s.region(name)) == is_inside}


def cispo(bounded: Callable) -> Callable:
    """Return the CISPO formula; `bounded` clips the importance ratio."""
    return lambda s: -bounded(s).detach() * s.advantages * s.per_token_logps * s.weights


def clipped_by_itself(s):
    return clipped(s.x, s.optimizer.get("max_grad_norm"))


def with_rounded_sines(model):
    """Round rotary embeddings in the decoder to bfloat16, and return the model."""

    def rounded_inputs(_, given):
        return given[0], *(x.bfloat16().to(x) for x in given[1:3]), *given[3:]

    for layer in model.model.layers:
        layer.register_forward_pre_hook(rounded_inputs)
    return model


def theirs_in_half(s):
    return in_half(s.x, s.theirs, s.exact)


# red, green and blue means and standard deviations: Qwen's processor, then ImageNet models
MEAN = torch.tensor([[0.48145466], [0.4578275], [0.40821073]])
STD = torch.tensor([[0.26862954], [0.26130258], [0.27577711]])
IMAGENET_MEAN = torch.tensor([[0.485], [0.456], [0.406]])
IMAGENET_STD = torch.tensor([[0.229], [0.224], [0.225]])


def normalized(mean, std) -> Callable:
    """Imitate a trainer that normalizes images with `mean` and `std` instead of Qwen's values."""
    return lambda s: ((s.x.unflatten(1, (3, -1)) * STD + MEAN - mean) / std).flatten(1)


def by_number_of_tokens(s):
    """Imitate a wrong M-RoPE: after an image with 3 by 4 tokens, text continues at position 12 instead of 4."""
    positions = s.x.clone()
    for number in s.pictures.unique()[:-1]:  # last number stands for text
        tokens = s.pictures == number
        side = s.x[:, tokens].max() - s.x[:, tokens].min() + 1
        positions[:, int(tokens.nonzero().max()) + 1 :] += tokens.sum() - side
    return positions


def of_index(s):
    """Imitate a trainer that assumes one image per row: row 2 then starts at image 2 in the micro-batch."""
    return s.flat[s.index :][: len(s.x)]


def replaced_ids(s):
    """Imitate a trainer that replaces one or two special tokens everywhere."""
    differs = (s.their_ids != s.x) & (s.x != s.no_token)
    old, new = s.x[differs].unique(), s.their_ids[differs].unique()
    return s.x.where(~torch.isin(s.x, old), new[0]) if len(old) in (1, 2) and len(new) == 1 else s.x


# errors in any quantity
TIMES = {"is {c} times as large": times}
SIGNED = {"has the wrong sign": lambda s: -s.x, "is left out": lambda s: 0 * s.x}
SCALED = {"is doubled": lambda s: 2 * s.x, "is halved": lambda s: s.x / 2}
LINEAR = SIGNED | SCALED
ROUNDED = {"is in bfloat16": lambda s: s.x.bfloat16().double(), "is in float16": lambda s: s.x.half().double()}
CURVED = {
    "is replaced by its absolute value": lambda s: s.x.abs(),
    "is never below 0": lambda s: s.x.clamp(min=0),
    "is replaced by its sign": lambda s: s.x.sign(),
}
CLAMPED = {"is clamped to -{c} and {c}": lambda s: s.x.clamp(-s.c, s.c), "is at most {c}": lambda s: s.x.clamp(max=s.c)}
BY_TOKEN = {
    "is replaced by the mean of its row": lambda s: row_mean(s.x, s.mask) + 0 * s.x,
    "is replaced by the sum of its row": lambda s: (s.x * s.mask).sum(1, keepdim=True) + 0 * s.x,
    "is detached": lambda s: s.x.detach(),
}
OF_RATIOS = {
    "is the arithmetic instead of the geometric mean of the ratios in its row": lambda s: (
        (row_mean(s.x.exp(), s.mask) + (s.mask.sum(1, keepdim=True) == 0)).log() + 0 * s.x
    ),
    "is at most {c}": lambda s: s.x.clamp(max=math.log(s.c)),
}
OF_ANSWERS = {"is averaged over the pairs before the loss": lambda s: s.x.mean(0) + 0 * s.x}
for answer, is_wrong in (("chosen", torch.tensor([1.0, 0.0])), ("rejected", torch.tensor([0.0, 1.0]))):
    OF_ANSWERS |= {
        f"is detached for the {answer} answer": lambda s, wrong=is_wrong: s.x - wrong * (s.x - s.x.detach()),
        f"is left out for the {answer} answer": lambda s, wrong=is_wrong: s.x - wrong * s.x,
        f"has the wrong sign for the {answer} answer": lambda s, wrong=is_wrong: s.x - 2 * wrong * s.x,
    }
WITH_EPSILON = {"": {}, ", without 1e-4": {"epsilon": 0.0}}
# general bugs, such as a wrong sign: in any quantity, and simulated after specific ones
GENERAL = {
    formula
    for table in (TIMES, LINEAR, ROUNDED, CURVED, CLAMPED, BY_TOKEN, OF_RATIOS, OF_ANSWERS)
    for formula in table.values()
}

# computations to which a bug may be limited, such as a mask that is wrong only in token counts
SCOPES = [
    ("grpo", ["the policy's term", "the KL", "the mean entropy"], ""),
    ("grpo, sft", ["the sum", "the count", "the ratio"], "mask"),
]

# {target and effect: {bug: formula}}; stages and sources are in bugs.json
BUGS: dict[str, dict[str, Any]] = {
    # advantages
    "rewards: completions are rewarded wrongly": {
        "a completion without any reward gets the reward 0": lambda s: s.x.where(~s.x.isnan().all(1, True), 0.0),
        **prefixed("a reward", ROUNDED, CLAMPED),
        "a completion has the rewards of {}": ROLLOUT_ROWS,
        "one missing reward makes its group's mean and standard deviation NaN": {"judged": lambda s: s.rewards},
    },
    "reward weights: the wrong completions are rewarded": {
        "all rewards have weight 1": lambda s: s.x * 0 + 1,
    },
    "total: the wrong completions are rewarded": prefixed(
        "the weighted sum of rewards", CLAMPED
    ),
    "normalize first: the wrong completions are rewarded": {
        "each reward is normalized before the sum instead of the sum, or the other way round": lambda s: not s.x
    },
    "group: the baseline is wrong": {
        "groups contain twice as many completions": lambda s: s.index // (2 * s.group_size),
        "groups contain half as many completions": lambda s: s.index // (s.group_size / 2),
    },
    "group mean: more variance or bias": {
        "no baseline is subtracted": lambda s: s.x * 0,
        "the baseline is the mean of all rewards of the rollout": lambda s: s.all_judged.mean(),
        "the baseline is the mean of the other completions of the group":
            lambda s: (s.judged.sum() - s.rewards) / max(1, len(s.judged) - 1),
        "the baseline is the median of the group": lambda s: s.judged.median(),
        "the baseline is the mean of the group's first half": lambda s: s.judged[: len(s.judged) // 2].mean(),
    },
    "baseline: the baseline is wrong": {
        **prefixed("the baseline", LINEAR),
        "a completion has the baseline of {}": ROLLOUT_ROWS,
    },
    "scaling rewards: prompts are weighted differently": {
        "advantages are not divided by a standard deviation": None,
        "advantages are divided by the standard deviation of their group": lambda s: s.judged,
        "advantages are divided by the standard deviation of all rewards of the rollout": lambda s: s.all_judged,
    },
    "std: prompts are weighted differently": {
        "the standard deviation divides by n instead of n - 1": lambda s: s.scaling_rewards.std(correction=0),
        "the standard error is used instead of the standard deviation": lambda s: s.x / len(s.scaling_rewards) ** 0.5,
        "the number that is added to the standard deviation instead of 1e-4 is 0": {"epsilon": 0.0},
        "the number that is added to the standard deviation instead of 1e-4 is {c}": {"epsilon": fitted_number},
        **{f"advantages are divided by the mean absolute deviation of their group{text}":
            {"std": lambda s: (s.scaling_rewards - s.scaling_rewards.mean()).abs().mean()} | epsilon
            for text, epsilon in WITH_EPSILON.items()},
        **{f"advantages go from 0 to 1 (min-max) instead of being normalized{text}":
            {"group mean": lambda s: s.judged.min(), "std": lambda s: s.judged.max() - s.judged.min()} | epsilon
            for text, epsilon in WITH_EPSILON.items()},
        "the standard deviation is at least the standard deviation of all rewards":
            lambda s: s.x.clamp(min=s.all_judged.std()),
    },
    "deviation: prompts are weighted differently": {
        "a completion's advantage is divided by the standard deviation of {}": ROLLOUT_ROWS,
    },
    "advantages: the wrong completions are rewarded": {
        "advantages are normalized a second time, over the batch": lambda s: (s.x - s.x.mean()) / (s.x.std() + 1e-4),
        "a completion has the advantage of {}": ROLLOUT_ROWS,
    },
    "advantages: rows have the advantages of other rows": {
        "rows were shuffled, but their advantages were not": lambda s: s.rollout_advantages[: len(s.x)]
    },
    "advantages: wrong completions are rewarded": prefixed(
        "an advantage", SIGNED, CURVED
    ),
    "advantages: the wrong rows are rewarded": {
        "a row has the advantage of {}": ROWS
    },
    # tokens, images and masks
    "ids: tokens that were never sampled are trained": {
        "a token is replaced by another one after sampling": {"tokens": replaced_ids},
        "a row has the ids of {}": ROWS,
        "ids of {} were decoded and encoded again": regions(lambda s: s.again(s.x)),
    },
    "pictures: answers see other images": {
        "a row has the images of {}": {"picture rows": ROWS},
        "a row has the images at its own index, as if each row had one": of_index,
        "a row lacks all images, so the model does not see any image": lambda s: [],
    },
    "attended: training uses another model": {
        "the model does not attend to {}": regions(lambda s: s.x & ~s.region),
        "tokens attend to the padding before the prompt": lambda s: s.x | ~s.completion,
    },
    "drop truncated: the wrong completions are trained": {
        "truncated completions are in the loss": False,
        "truncated completions are not in the loss": True,
    },
    "ended: the wrong completions are trained": {
        "a truncated completion is in the loss if an earlier turn ended": lambda s: s.end_tokens.any(1, keepdim=True),
    },
    "mask: the policy never learns to stop": {
        "the end token is not trained on": lambda s: s.x * ~end_tokens(s).bool()
    },
    "mask: padding is trained": {
        "one token after the completion is counted, too": lambda s: torch.maximum(s.x, shifted(s.x, 1) * s.completion),
        "padding is counted as part of the completion": lambda s: s.completion.double(),
    },
    "mask: the wrong tokens are trained": {
        "the last token is not trained on": lambda s: s.x * shifted(s.x, -1),
        "the first token is not trained on": lambda s: s.x * shifted(s.x, 1),
        "the last column of the batch is not trained on": lambda s: shifted(shifted(s.x, 1), -1),
        "one token before the completion is counted, too": lambda s: torch.maximum(s.x, shifted(s.x, -1)),
        "only the first token is counted": lambda s: s.x * (s.x.cumsum(1) == 1),
        "every column is counted": lambda s: torch.ones_like(s.x),
        "prompt tokens except image tokens are counted":
            lambda s: torch.maximum(s.x, prompt_tokens(s) * (s.input_ids != s.about.get("image_token_id"))),
        "prompt tokens are counted": lambda s: torch.maximum(s.x, prompt_tokens(s)),
        "the mask also counts {}": regions(lambda s: s.x + (1 - s.x) * s.region),
        "the mask does not count {}": regions(lambda s: s.x * ~s.region),
        "the mask counts only {}": regions(lambda s: s.completion.double() * s.region),
        "a mask value is taken from {}": ROWS_OR_COLUMNS,
    },
    "mask: padding is trained in some rows": {
        "some padding tokens are counted":
            lambda s: torch.maximum(s.x, s.completion_mask * (s.attention_mask == 0) * s.completion),
    },
    "mask: some tokens are never trained": {
        "tokens are not counted because of their ids": without_missing_ids
    },
    # all losses
    "mean_over: short micro-batches count more": {
        "each micro-batch is averaged by itself, and then the means are averaged": "micro_batch",
        "each micro-batch is averaged by itself, and the means are added":
            {"mean_over": "micro_batch", "factor": lambda s: len(s.micro_batches)},
    },
    "average: completions of other lengths weigh more": {
        "the loss is averaged as in grpo, over the tokens of each row and then over the rows": "grpo",
        "the loss is averaged as in dapo, over all tokens of the step": "dapo",
        "the loss is averaged as in dr_grpo, over a fixed length and then over the rows": "dr_grpo",
        "the loss is averaged as in luspo, summed over the tokens of each row and averaged over the rows": "luspo",
        "the loss is averaged as in bnpo, over the tokens of each micro-batch": "bnpo",
    },
    "mean: the effective learning rate changes with lengths and rows": {
        "the loss is the sum over all tokens instead of a mean": lambda s: s.terms.sum(),
        "the loss is the sum over the rows of their means": lambda s: row_mean(s.terms, s.mask).sum(),
        "the loss is divided by the rows and by the length of the longest completion":
            lambda s: s.terms.sum() / s.mask.sum(1).max() / len(s.all_rows),
        "the loss is divided by a fixed length of {c} for each row": lambda s: s.terms.sum() / s.c / len(s.all_rows),
    },
    "mean: long padding makes the update small, unless the trainer divides later": {
        "the loss is divided by all columns, padding included":
            lambda s: s.terms.sum() / s.completion[0].sum() / len(s.all_rows),
    },
    "average: completion lengths are weights": {
        f"each row of {name} is averaged by itself": {"average": "grpo", "loss_type": name} for name in ("nll", "dft")
    },
    "mean: a completion without tokens makes the loss NaN": {
        "a row without tokens is divided by 0 in the mean over each row": (
            lambda s: (s.terms.sum(1) / s.mask.sum(1)).sum() / len(s.all_rows)
        ),
    },
    "mean: tokens are weighted differently": {
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
        "the mean of the rows is only over those with an advantage other than 0":
            lambda s: row_mean(s.terms, s.mask).sum() / s.has_advantage().sum(),
        "the mean divides only by tokens of rows with a positive advantage":
            lambda s: s.terms.sum() / (s.completion_mask * is_positive(s)).sum().clamp(min=1),
        "the loss is averaged over the rows of each column and then over the columns":
            lambda s: (s.terms.sum(0) / s.mask.sum(0).clamp(min=1)).sum()
            / (s.completion[0].sum() * len(s.micro_batches)),
        "loss terms are averaged twice, over the tokens of {}, then over these means":
            spans(lambda s: (s.terms * span_shares(s)).sum() / span_shares(s).sum().clamp(min=1)
                  / len(s.micro_batches)),
    },
    "mean: padding is trained": {
        "luspo's loss is not masked, but averaged over all columns": {
            "mask": lambda s: s.completion.double(),
            "inside": ["the sum"],
            "weights": lambda s: s.x * s.completion_mask.sum(1, keepdim=True),
            "mean": lambda s: s.terms.sum() / s.completion[0].sum() / len(s.all_rows),
        },
    },
    "average: short micro-batches count more": {
        "the loss is averaged over the tokens only in whole steps, and in micro-batches over each row":
            lambda s: s.x if s.about.get("whole_step", True) else "grpo",
    },
    "mask: the effective learning rate changes": {
        "the mean is computed over the step instead of over each micro-batch": {"mean_over": "step"},
        "sums are divided by one token too many per row, as if counted before labels are shifted":
            {"mask": lambda s: torch.maximum(s.x, s.x.roll(-1, 1)), "inside": ["the count"]},
    },
    "weights: rows are weighted by their advantages": {
        "the loss of a row is multiplied by its advantage": lambda s: s.x * s.advantages.view(len(s.x), -1),
    },
    "weights: rows or tokens are weighted differently": {
        "the loss has no gradient of {}": regions(lambda s: s.x * ~s.region),
        "the loss of a row is multiplied by its token count": lambda s: s.x * s.lengths[:, None],
        "the loss of a row is divided by its token count": lambda s: s.x / s.lengths[:, None].clamp(min=1),
        "a weight is multiplied by {c} for each earlier token": lambda s: discount(s.c, s.mask),
    },
    "logps: the wrong tokens are trained": {
        "a log-probability is taken from {}": ROWS_OR_COLUMNS
    },
    # GRPO and its variants
    "loss_type: the update is different": choices(
        "the policy term of {} is used", "grpo", "cispo", "sapo", "vespo"
    ),
    "importance_sampling_level: the update is different": {
        "each token has its own ratio": "token",
        "each row has one ratio, the geometric mean of its tokens' ratios": "sequence",
        "each row has one ratio, the product of its tokens' ratios": "sequence_sum",
        "each row has one ratio, but each token has its own gradient (GSPO-token)": "sequence_token",
    },
    "old: a second update after a rollout would be biased": {
        "the ratio is 1 because old log-probabilities equal the current ones": lambda s: s.per_token_logps.detach(),
    },
    "old: off-policy steps are biased": {
        "old log-probabilities are not detached": lambda s: s.per_token_logps,
        "an old log-probability is taken from {}": ROWS_OR_COLUMNS,
    },
    "old: ratios contain the sampler's errors": {
        "old log-probabilities are the sampler's": lambda s: s.sampler_logps
    },
    "old: ratios are those of policy and reference": {
        "the old policy is the reference": lambda s: s.ref_per_token_logps
    },
    "ratio: the update is different": {
        "the ratio is the log of the ratio, because exp is missing": lambda s: s.x.log(),
    },
    "ratio: ratios beyond the bound get no gradient": {
        "the log of the ratio is clamped to -{c} and {c}": lambda s: s.x.log().clamp(-s.c, s.c).exp(),
        "the log of the ratio is at most {c}": lambda s: s.x.log().clamp(max=s.c).exp(),
    },
    "log-ratio: off-policy tokens have other weights": {
        "log-probabilities are in bfloat16": dict.fromkeys(("policy", "old"), lambda s: s.x.bfloat16().double()),
        **prefixed("the log of the ratio", LINEAR, BY_TOKEN),
        **prefixed("the ratio", OF_RATIOS),
        "all rows of the batch have one ratio, the product of their tokens' ratios":
            {"log-ratio": lambda s: (s.x * s.mask).sum() + 0 * s.x, "importance_sampling_level": "token"},
        "the log of a row's ratio is divided by all columns, padding included":
            lambda s: (s.x * s.mask).sum(1, keepdim=True) / s.completion[0].sum() + 0 * s.x,
    },
    "terms: tokens with a negative advantage that are much likelier than before get no gradient": {
        "dual clip: with a negative advantage, a ratio counts at most {c}":
            lambda s: s.x.where(s.advantages >= 0, s.x.minimum(-s.c * s.advantages * s.weights)),
    },
    "terms: other ratios get the largest weight": {
        "cispo's ratio is clamped to 1 - epsilon_low and 1 + epsilon_high":
            cispo(lambda s: s.ratio.clamp(1 - s.options.epsilon_low, 1 + s.options.epsilon_high)),
        "cispo's ratio is at most 1 + epsilon_high": cispo(lambda s: s.ratio.clamp(max=1 + s.options.epsilon_high)),
        "cispo's ratio is clamped to 1 - epsilon_low and epsilon_high":
            cispo(lambda s: s.ratio.clamp(1 - s.options.epsilon_low, s.options.epsilon_high)),
    },
    "terms: tokens outside of the bounds are not trained": {
        "no token outside of 1 - epsilon_low to 1 + epsilon_high is trained, whatever its advantage":
            lambda s: -s.ratio * s.advantages * s.weights
            * ((s.ratio >= 1 - s.options.epsilon_low) & (s.ratio <= 1 + s.options.epsilon_high)),
    },
    "terms: off-policy steps are biased": {
        "REINFORCE: a token's term is -A log pi, without a ratio":
            lambda s: -s.advantages * s.per_token_logps * s.weights,
    },
    "terms: the update is different": {
        "sapo's gate is not divided by its temperature": lambda s: s.x
        * torch.where(is_positive(s), s.options.sapo_temperature_pos, s.options.sapo_temperature_neg),
        "cispo's weight multiplies the ratio instead of the log-probability":
            lambda s: -s.ratio.clamp(max=s.options.epsilon_high).detach() * s.advantages * s.ratio * s.weights,
    },
    "sapo_temperature_pos: the update is different": {
        "sapo's two temperatures are swapped": {
            "sapo_temperature_pos": lambda s: s.sapo_temperature_neg,
            "sapo_temperature_neg": lambda s: s.sapo_temperature_pos,
        },
    },
    "terms: the ratio has a gradient, too": {
        "cispo's ratio is not detached":
            lambda s: -s.ratio.clamp(max=s.options.epsilon_high) * s.advantages * s.per_token_logps * s.weights,
        "cispo's ratio has no bound": cispo(lambda s: s.ratio),
    },
    "terms: off-policy updates are too large": {
        "the maximum of the clipped and the unclipped objective is used instead of the minimum":
            {"advantages": lambda s: -s.x, "terms": lambda s: -s.x},
        "only the clipped term is used, without the minimum":
            lambda s: -s.ratio.clamp(1 - s.options.epsilon_low, 1 + s.options.epsilon_high) * s.advantages * s.weights,
        "the policy term is multiplied by the ratio a second time": lambda s: s.x * s.ratio,
        "ratios are not clipped": {"epsilon_low": math.inf, "epsilon_high": math.inf},
        "dual clip also for positive advantages: a ratio counts at least {c}":
            lambda s: s.x.minimum(-s.c * s.advantages * s.weights),
    },
    "epsilon_low: the two bounds are exchanged": {
        "epsilon_low and epsilon_high are swapped": {"epsilon_low": lambda s: s.epsilon_high,
            "epsilon_high": lambda s: s.epsilon_low},
    },
    "epsilon_high: the update is different": {
        "ratios are clipped to exp(-epsilon_low) and exp(epsilon_high)": {
            "epsilon_low": lambda s: -math.expm1(-s.epsilon_low),
            "epsilon_high": lambda s: math.expm1(s.epsilon_high),
        },
        "ratios are not clipped above": math.inf,
        "the upper bound of the clip is epsilon_high instead of 1 + epsilon_high": lambda s: s.x - 1,
        "epsilon_high is {c}": fitted_number,
    },
    "epsilon_high: ratios have one bound, as in PPO": {
        "ratios are clipped with epsilon_low on both sides": lambda s: s.epsilon_low,
    },
    "epsilon_low: the update is different": {
        "ratios are not clipped below": math.inf,
        "ratios are clipped to at least 1 / (1 + epsilon_high)": lambda s: 1 - 1 / (1 + s.epsilon_high),
        "ratios are clipped with epsilon_high on both sides": lambda s: s.epsilon_high,
        "epsilon_low is {c}": fitted_number,
    },
    "terms: off-policy updates with negative advantages are too large": {
        "the maximum of the clipped and the unclipped objective is used for negative advantages":
            lambda s: -s.ratio.clamp(max=1 + s.options.epsilon_high) * s.advantages * s.weights,
    },
    "off_policy_mask_threshold: tokens that are far off-policy are trained": {
        "off_policy_mask_threshold is ignored": None
    },
    "delta: tokens that are far off-policy are trained": {"delta is ignored": None},
    "top_entropy_quantile: other tokens are trained, too": {"top_entropy_quantile is ignored": 1.0},
    "entropy_coef: the policy becomes too sure or too random": {"entropy_coef is ignored": 0.0},
    "terms: rewards have the opposite effect, or none": prefixed(
        "the policy term, without KL and entropy,", SIGNED
    ),
    "terms: the effective beta changes": prefixed(
        "the policy term, without KL and entropy,", SCALED
    ),
    "correction: rows are weighted differently": {
        "the sampler's ratio is not used": lambda s: torch.ones_like(s.x),
    },
    "entropies: the policy becomes too sure or too random": prefixed(
        "the entropy of a token", LINEAR
    ),
    # All steps have input_ids, so these bugs are always tried; without a reference model, the report counts them
    # under "cannot reveal".
    "kl_estimator: another divergence is penalized": choices(
        "the KL estimator is {}", "k3"
    ),
    "kl_estimator: without a ratio as weight, the gradient of k1 is 0 on average": choices(
        "the KL estimator is {}", "k1", "k2"
    ),
    "use_bias_correction_kl: the gradient of the KL is biased off-policy": {
        "the KL is not weighted with the ratio": False
    },
    "use_bias_correction_kl: the gradient of the KL is unbiased off-policy": {
        "the KL is weighted with the ratio": True
    },
    "KL: the policy is not drawn to the reference, or is even pushed away from it": prefixed(
        "the KL", SIGNED
    ),
    "KL: the effective beta changes": {
        "the KL is multiplied by beta twice": lambda s: s.options.beta * s.x,
        "the KL is not multiplied by beta": lambda s: s.x / s.options.beta,
        "the KL estimator is k2, and the ratio that weights it is not detached":
            lambda s: (s.per_token_logps - s.ref_per_token_logps).square() / 2 * s.ratio,
        "the ratio that weights the KL is detached": lambda s: s.x / s.ratio * s.ratio.detach(),
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
        **prefixed("the KL", TIMES, SCALED, CURVED, BY_TOKEN),
    },
    "kl_estimator: the gradient is that of k2, which is unbiased on policy": {
        f"the KL has the value of {name} and the gradient of k2": {"kl_estimator": name, "kl_straight_through": True}
        for name in ("k1", "k3")
    },
    "KL estimate: tokens far from the reference are not drawn back":
        prefixed("the KL", CLAMPED),
    "KL: tokens far from the reference are not drawn back":
        prefixed("the KL, after it is weighted with the ratio,", CLAMPED),
    "reference: tokens far from the reference are not drawn back": {
        "the log-ratio in the KL is clamped to -{c} and {c}":
            lambda s: s.per_token_logps + (s.x - s.per_token_logps).clamp(-s.c, s.c),
        "the log-ratio in the KL is at most {c}":
            lambda s: s.per_token_logps + (s.x - s.per_token_logps).clamp(max=s.c),
    },
    "KL estimate: another divergence is penalized": {
        "the KL is that of torch's kl_div, pi_ref * log(pi_ref / pi)": lambda s:
            s.ref_per_token_logps.exp() * (s.ref_per_token_logps - s.per_token_logps),
        "the KL is pi * log(pi / pi_ref) of the sampled tokens, which are weighted with pi already": lambda s:
            s.per_token_logps.exp() * (s.per_token_logps - s.ref_per_token_logps),
        "k3 has the wrong sign of its log-ratio": lambda s: s.x + 2 * (s.ref_per_token_logps - s.per_token_logps),
        "k3 lacks its log-ratio": lambda s: s.x + s.ref_per_token_logps - s.per_token_logps,
    },
    "KL estimate: the KL is rewarded": {
        "the KL estimator is k1 with the wrong sign": lambda s: s.ref_per_token_logps - s.per_token_logps
    },
    "KL estimate: small KLs are rounding errors": {
        "k3 loses its digits, because it is exp(d) - d - 1 in float32 instead of expm1(d) - d":
            lambda s: s.k3_in_float32 if s.options.kl_estimator == "k3" else s.x,
    },
    "reference: another divergence is penalized": {
        "policy and reference are swapped in the KL": lambda s: 2 * s.per_token_logps - s.ref_per_token_logps,
        "the KL is estimated from the sum of a row's log-ratios":
            lambda s: s.per_token_logps + ((s.x - s.per_token_logps) * s.mask).sum(1, keepdim=True),
        "the reference is the old policy": lambda s: s.old_per_token_logps,
    },
    "reference: the policy may leave the reference": {
        "the reference moves with the policy": lambda s: s.per_token_logps.detach(),
        "the reference is left out, so its log-probabilities are 0": lambda s: 0 * s.x,
        "a log-probability of the reference is taken from {}": ROWS_OR_COLUMNS,
    },
    # DPO and SFT
    "index: the wrong answers are compared": {
        "the rejected answer is preferred": lambda s: s.x.flip(1),
        "a chosen answer is paired with the rejected answer of the next pair": {"rejected": lambda s: s.x.roll(-1)},
        "a chosen answer is paired with the rejected answer of the previous pair": {"rejected": lambda s: s.x.roll(1)},
    },
    "mask: the wrong tokens are compared": {
        f"both answers have the mask of the {answer} answer":
            lambda s, k=k: s.x[((s.pair[:, None] == s.pair) * (s.chosen == k).long()).argmax(1)]
        for k, answer in ((1, "chosen"), (0, "rejected"))
    },
    "beta: the policy is kept at another distance from the reference": {
        "beta is applied twice, so it is squared": lambda s: s.x**2,
        "one over beta is used instead of beta": lambda s: 1 / s.x,
        **prefixed("beta", SCALED),
    },
    "policy: the objective is different": {
        "log-probabilities are averaged over tokens": both(lambda s: s.x / s.mask.sum(1, keepdim=True).clamp(min=1)),
        "beta multiplies only the policy's log-probability": {"reference": lambda s: s.x / s.about["loss"]["beta"]},
        "the first token of each answer is left out": both(lambda s: s.x * (s.mask.cumsum(1) > 1)),
        "the last token of each answer is left out": both(lambda s: s.x * (s.mask.flip(1).cumsum(1).flip(1) > 1)),
        "log-probabilities are averaged over all columns, padding included": both(lambda s: s.x / s.mask.shape[1]),
    },
    "loss_type: the objective is different": {
        f"the loss is {name}": [name] for name in DPO_LOSSES
    },
    "log-ratio: the objective is different": prefixed(
        "the log ratio of an answer", LINEAR, OF_ANSWERS
    ),
    "summed reference: pairs are weighted wrongly": prefixed(
        "the reference's log-probability", OF_ANSWERS
    ),
    "pair loss: pairs that are far from learned get a small gradient": {
        "the log is missing, so the loss is -sigmoid": lambda s: -s.margins.sigmoid().mean(),
        "the loss is exp(-beta * margin)": lambda s: (-s.margins).exp().mean(),
    },
    "log-ratio: the chosen answer must be better by a margin": {
        "{c} is subtracted from beta times the margin": lambda s: s.x - s.c / s.options.beta * torch.tensor([1.0, 0.0]),
    },
    "loss_type: chosen answers become likelier": {
        "an SFT loss with the weight {c} is added":
            {"loss_type": lambda s: [*s.x, "sft"], "loss_weights": lambda s: [1.0, s.c]},
    },
    "log-ratio: long answers weigh more": {
        "the log ratio of an answer is the sum over its tokens instead of their mean":
            lambda s: s.x * s.answer_lengths if {"ipo", "sigmoid_norm"} & {*s.options.loss_type} else s.x,
    },
    "beta: the objective is different": {"beta is ignored": 1.0, "beta is {c}": fitted_number},
    "label_smoothing: the objective is different": {
        "label_smoothing is ignored": 0.0,
        "label_smoothing is {c}": fitted_number,
    },
    "ld_alpha: the objective is different": {"ld_alpha is ignored": None},
    "loss_type: likely tokens are weighted differently": choices(
        "the loss is {}", "nll", "dft"
    ),
    "terms: likely tokens are weighted differently": {
        "the probability that weights a token in dft is not detached":
            lambda s: s.per_token_logps * -s.per_token_logps.exp(),
    },
    # log-probabilities
    "temperature: on-policy ratios are not 1": {
        "logits are not divided by the temperature": 1.0,
        "logits are divided twice by the temperature": lambda s: s.x**2,
        "logits are multiplied by the temperature": lambda s: 1 / s.x,
        "log-probabilities instead of logits are divided by the temperature":
            {"temperature": 1.0, "scores": lambda s: s.x / s.about.get("temperature", 1.0)},
    },
    "labels: the wrong tokens are trained": {
        "the end token is scored as the padding token":
            lambda s: torch.where(s.is_stop(s.x), s.about.get("pad_token_id", -1), s.x),
    },
    "blind: the model is trained to answer without the image": {
        "the model does not see any image": lambda s: ~s.x,
    },
    "pixels: training uses another model": {
        "images are BGR instead of RGB": lambda s: s.x.unflatten(1, (3, -1)).flip(1).flatten(1),
        "pixels are normalized with ImageNet's mean and deviation": normalized(IMAGENET_MEAN, IMAGENET_STD),
        "the patches of each image are in the opposite order": lambda s: s.x.flip(0),
    },
    "positions: training uses another model": {
        "positions are 1-D, without M-RoPE": lambda s: s.indices,
        "text after an image continues at the number of its tokens instead of its largest side": by_number_of_tokens,
        "positions of the completion continue from the largest position of each axis":
            lambda s: s.x if s.own[0] else (s.x[:, ~s.own].amax(1, True) + s.own.cumsum(0)).where(s.own, s.x),
        "the decoder's rotary sines are in bfloat16": {"model": lambda s: with_rounded_sines(s.x)},
    },
    "mode: ratios or KLs are noisy": {
        "rounded to bfloat16": lambda s: rounded(s.x, s.theirs, torch.bfloat16),
        "rounded to float16": lambda s: rounded(s.x, s.theirs, torch.float16),
        "computed in bfloat16": {"dtype": torch.bfloat16, "mode": theirs_in_half},
        "computed under autocast in bfloat16":
            {"dtype": torch.float32, "autocast": torch.bfloat16, "mode": theirs_in_half},
        "the model is in training mode, so its dropout is active, and its outputs cannot be repeated":
            lambda s: s.theirs if s.folder in s.about.get("training", ()) else s.x,
    },
    "model folder: ratios are 1, or KLs are 0": {
        "computed with the weights of the policy instead of the weights that sampled or the reference's":
            lambda s: s.about.get("model") or s.x,
        "computed with the weights of the reference model": lambda s: s.about.get("ref_model") or s.x,
    },
    # gradients and AdamW
    "micro-batch: the update is different": {
        "gradients of earlier micro-batches are dropped": lambda s: s.last,
        "gradients of later micro-batches are dropped": lambda s: s.first,
        "the gradient of each micro-batch is clipped by itself": {"gradients of a part": clipped_by_itself},
    },
    "gradient: parameters are not trained": {
        "some parameters do not get any gradient": lambda s: s.x * bool(s.theirs.any()),
        "gradients of the step before are left: {c} times Adam's first moment": lambda s: s.x + s.c * s.earlier,
        "there is no gradient for {}": parts(lambda s: s.x * (not s.region(s.key))),
    },
    "clip: the update has a different direction": {
        "gradients are not clipped": lambda s: s.gradients,
        "gradients are clipped by value instead of by norm": lambda s: {
            name: g.clamp(-s.max_norm, s.max_norm) for name, g in s.gradients.items()
        },
        "each parameter is clipped by its own norm": lambda s: {
            name: clipped({name: g}, s.max_norm)[name] for name, g in s.gradients.items()
        },
        "{} and all other parameters are clipped separately":
            parts(lambda s: clipped(inside(s, s.gradients), s.max_norm)
                  | clipped(inside(s, s.gradients, False), s.max_norm)),
    },
    "total norm: the update has a different direction": {
        "the norm of all is the sum of the parameters' norms": lambda s: sum(g.norm() for g in s.gradients.values()),
        "max_grad_norm is {c}": {"max_norm": fitted_number},
    },
    "decay: weights decay at a different rate": {
        "weight decay is also applied to norms and biases": lambda s: s.weight_decay,
        "weight decay is not applied": 0.0,
        "weight decay is not multiplied by the learning rate": lambda s: s.x / (s.optimizer["learning_rate"] or 1.0),
        "weight decay is added to the gradient, as in Adam with L2 regularization": {"coupled": True},
        "weight decay is {c}": fitted_number,
        "weight decay leaves out {}": parts(lambda s: s.x * (not s.region(s.key))),
    },
    "step: the update is different": {
        "the moments of Adam were reset": {"moments": lambda s: {}, "step": 1},
        "the bias correction starts again at step 1": 1,
        "the moments have no bias correction": {"bias correction": lambda s: (1, 1)},
        "betas of Adam: beta1 is {c}": {"betas": lambda s: (s.c, s.x[1])},
        "betas of Adam: beta2 is {c}": {"betas": lambda s: (s.x[0], s.c)},
    },
    "eps: the update is different": {"eps of Adam is {c}": fitted_number},
    "weight: small updates are lost": {
        "weights are rounded to bfloat16 after the update": lambda s: rounded(s.x, s.theirs, torch.bfloat16)
    },
    # schedules
    "type: the effective learning rate changes": choices("the schedule is {}", "linear", "cosine", "constant"),
    "step: the effective learning rate changes": {
        "the learning rate is one step behind": lambda s: s.x - 1,
        "the learning rate is one step ahead": lambda s: s.x + 1,
        "the schedule counts micro-batches": lambda s: s.x * len(s.micro_batches),
        "the schedule advances twice per step": lambda s: 2 * s.x,
        "the learning rate decays from step 0 instead of after the warmup": {"progress": lambda s: s.t / s.max_steps},
        "warmup_steps is ignored": {"warmup": 0},
    },
    # any stage
    "factor: the model learns the opposite": {"all values have the wrong sign": -1},
}  # fmt: skip

TARGETS = {key: Target(*key.split(": ", 1), **values) for key, values in read_json(PATH).items()}
