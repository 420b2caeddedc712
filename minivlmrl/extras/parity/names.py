"""Known bugs in training steps, sorted by the wrong tensor or option, such as the mask.

bugs.json lists simple bugs, such as the KL estimator k1 instead of k3. FORMULAS has other bugs, as functions of an
object s: `lambda s: s.x / 2` under "rewards" halves rewards. A function may read:

    s.x: correct tensor or option
    s.c: number that the search fits, such as an unknown clip bound
    s.region: mask of the tokens to change, such as prompt tokens
    s.advantages, s.beta and others: tensors and loss options of the recorded step
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad

from minivlmrl.extras.parity.formulas import clipped, rounded
from minivlmrl.json_files import read_json
from minivlmrl.losses.grpo import row_mean
from minivlmrl.losses.preference import DPO_LOSSES


class Scoped(NamedTuple):
    """Simulated bug in only some tokens, such as the prompt, or with wrong row or token indices."""

    # what to try (units.py): "regions" (tokens to change), or "rows", "rollout_rows", "columns" (wrong indices)
    kinds: str
    formula: Callable | None = None


regions = partial(Scoped, "regions")
BOTH = "policy", "reference"  # log-prob tensors


def shifted(x, by):
    """Shift columns to the right, filling with 0."""
    return pad(x, (by, -by))


def cispo(bounded: Callable) -> Callable:
    """Return a function for CISPO's loss per token; `bounded` clips the importance ratio."""
    return lambda s: -bounded(s).detach() * s.gain * s.per_token_logps


def k3_in_float32(d):
    return (d.exp() - d - 1).double()


def encoded_again(s):
    """Replace sampled ids by the ids used in training, in rows that decode to the same text."""
    is_same = [s.text(row) == s.text(others) for row, others in zip(s.x, s.their_ids, strict=True)]
    return s.their_ids.where(torch.tensor(is_same)[:, None], s.x)


def normalized_again(s, correction: int, epsilon: float):
    parts = [s.x[part] for part in s.micro_batches]
    return torch.cat([(x - x.mean()) / (x.std(correction=correction) + epsilon) for x in parts])


def of_answers(column: int) -> dict[str, Callable]:
    """Return {bug: function} for bugs in only chosen (column 0) or only rejected (column 1) answers."""
    wrong = torch.eye(2)[column]
    answer = ("chosen", "rejected")[column]
    return {
        f"is left out for the {answer} answer": lambda s: s.x - wrong * s.x,
        f"has the wrong sign for the {answer} answer": lambda s: s.x - 2 * wrong * s.x,
    }


# bugs that any tensor may have, such as a wrong sign; tried after more specific bugs
GENERAL: dict[str, dict[str, Callable]] = {
    "signed": {"has the wrong sign": lambda s: -s.x, "is left out": lambda s: 0 * s.x},
    "scaled": {"is doubled": lambda s: 2 * s.x, "is halved": lambda s: s.x / 2},
    "times": {"is {c} times as large": lambda s: s.c * s.x},
    "curved": {
        "is replaced by its absolute value": lambda s: s.x.abs(),
        "is never below 0": lambda s: s.x.clamp(min=0),
        "is replaced by its sign": lambda s: s.x.sign(),
    },
    "clamped": {
        "is clamped to -{c} and {c}": lambda s: s.x.clamp(-s.c, s.c),
        "is at most {c}": lambda s: s.x.clamp(max=s.c),
    },
    "by_token": {
        "is replaced by the mean of its row": lambda s: row_mean(s.x, s.mask) + 0 * s.x,
        "is replaced by the sum of its row": lambda s: (s.x * s.mask).sum(1, keepdim=True) + 0 * s.x,
        "is detached": lambda s: s.x.detach(),
    },
    "of_ratios": {
        "is the arithmetic instead of the geometric mean of the ratios in its row": lambda s: (
            (row_mean(s.x.exp(), s.mask) + (s.mask.sum(1, keepdim=True) == 0)).log() + 0 * s.x
        ),
        "is at most {c}": lambda s: s.x.clamp(max=math.log(s.c)),
    },
    "of_answers": {
        "is averaged over the pairs before the loss": lambda s: s.x.mean(0) + 0 * s.x,
        **of_answers(0),
        **of_answers(1),
    },
}
GENERAL_FORMULAS = {formula for table in GENERAL.values() for formula in table.values()}

# a mask, for example, may be wrong in only the token count: (loss kinds, loss parts, wrong tensor or "" = any)
SCOPES = [("grpo", ["the policy's term", "the KL"], ""), ("grpo, sft", ["the sum", "the count", "the ratio"], "mask")]

# keys: wrong tensor or option, and effect on training; values: {bug description: function that simulates the bug}
FORMULAS: dict[str, dict[str, Any]] = {
    # advantages
    "rewards: completions are rewarded wrongly": {
        "a completion without any reward gets the reward 0": lambda s: s.x.where(~s.x.isnan().all(1, True), 0.0),
    },
    "normalize first: the wrong completions are rewarded": {
        "each reward is normalized before the sum instead of the sum, or the other way round": lambda s: not s.x
    },
    "group: the baseline is wrong": {
        "groups contain twice as many completions": lambda s: s.index // (2 * s.group_size),
        "groups contain half as many completions": lambda s: s.index // (s.group_size / 2),
    },
    "group mean: more variance or bias": {
        "the baseline is the mean of all rewards of the rollout": lambda s: s.all_judged.mean(),
        "the baseline is the mean of the other completions of the group":
            lambda s: (s.judged.sum() - s.rewards) / max(1, len(s.judged) - 1),
        "the baseline is the mean of the group's first half": lambda s: s.judged[: len(s.judged) // 2].mean(),
    },
    "std: prompts are weighted differently": {
        "the standard deviation divides by n instead of n - 1": lambda s: s.scaling_rewards.std(correction=0),
        "advantages go from 0 to 1 (min-max) instead of being normalized":
            {"group mean": lambda s: s.judged.min(), "std": lambda s: s.judged.max() - s.judged.min()},
    },
    "advantages: the wrong completions are rewarded": {
        "advantages are normalized a second time, over the batch": lambda s: (s.x - s.x.mean()) / (s.x.std() + 1e-4),
    },
    "advantages: rows have the advantages of other rows": {
        "rows were shuffled, but their advantages were not": lambda s: s.rollout_advantages[: len(s.x)]
    },
    # tokens, images and masks
    "tokens: tokens that were never sampled are trained": {
        "token ids were decoded and encoded again": encoded_again,
    },
    "pictures: answers see other images": {
        "a row has the images of {}": {"picture rows": Scoped("rows")},
    },
    "attended: training uses another model": {
        "the model does not attend to {}": regions(lambda s: s.x & ~s.region),
        "tokens attend to the padding before the prompt": lambda s: s.x | ~s.completion,
    },
    "ended: the wrong completions are trained": {
        "a truncated completion is in the loss if an earlier turn ended": lambda s: s.end_tokens.any(1, keepdim=True),
    },
    "mask: the policy never learns to stop": {
        "the end token is not trained on": lambda s: s.x * ~s.is_stop(s.input_ids)
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
        "the mask also counts {}": regions(lambda s: s.x + (1 - s.x) * s.region),
        "the mask does not count {}": regions(lambda s: s.x * ~s.region),
        "the mask counts only {}": regions(lambda s: s.completion.double() * s.region),
    },
    "mask: padding is trained in some rows": {
        "some padding tokens are counted":
            lambda s: torch.maximum(s.x, s.completion_mask * (s.attention_mask == 0) * s.completion),
    },
    # all losses
    "mean_over: short micro-batches count more": {
        "each micro-batch is averaged by itself, and the means are added":
            {"mean_over": "micro_batch", "factor": lambda s: len(s.micro_batches)},
    },
    "mean: long padding makes the update small, unless the trainer divides later": {
        "the loss is divided by all columns, padding included": lambda s: s.terms.sum() / s.num_columns / s.num_rows,
    },
    "mean: the effective learning rate changes with lengths and rows": {
        "the loss is the sum over all tokens instead of a mean": lambda s: s.terms.sum(),
        "the loss is the sum over the rows of their means": lambda s: row_mean(s.terms, s.mask).sum(),
        "the loss is divided by the rows and by the length of the longest completion":
            lambda s: s.terms.sum() / s.mask.sum(1).max() / s.num_rows,
        "the loss is divided by a fixed length of {c} for each row": lambda s: s.terms.sum() / s.c / s.num_rows,
    },
    "mean: tokens are weighted differently": {
        "the means of the rows are added within a micro-batch instead of averaged":
            lambda s: row_mean(s.terms, s.mask).sum() / len(s.micro_batches),
        "the mean of the rows is only over rows with a token":
            lambda s: row_mean(s.terms, s.mask).sum() / s.completion_mask.any(1).sum(),
        **{
            f"advantages are normalized again within each micro-batch{text}, with an epsilon of {epsilon:g}":
                {"advantages": partial(normalized_again, correction=correction, epsilon=epsilon)}
            for correction, text in ((1, ""), (0, " by the biased standard deviation"))
            for epsilon in (1e-8, 1e-6, 1e-4)
        },
        "the sum of a row is divided by the lengths of all rows, because (B,) and (B, 1) are broadcast": lambda s: (
            s.terms.sum(1) / s.mask.sum(1, keepdim=True).clamp(min=1)
        ).mean() / len(s.micro_batches),
        "the mean divides only by tokens of rows with a positive advantage":
            lambda s: s.terms.sum() / (s.completion_mask * (s.advantages.view(s.num_rows, -1) > 0)).sum().clamp(min=1),
    },
    "mean: padding is trained": {
        "luspo's loss is not masked, but averaged over all columns": {
            "mask": lambda s: s.completion.double(),
            "inside": ["the sum"],
            "weights": lambda s: s.x * s.completion_mask.sum(1, keepdim=True),
            "mean": lambda s: s.terms.sum() / s.num_columns / s.num_rows,
        },
    },
    "average: short micro-batches count more": {
        "the loss is averaged over the tokens only in whole steps, and in micro-batches over each row":
            lambda s: s.x if s.about.get("whole_step", True) else "grpo",
    },
    "mask: the effective learning rate changes": {
        "sums are divided by one token too many per row, as if counted before labels are shifted":
            {"mask": lambda s: torch.maximum(s.x, s.x.roll(-1, 1)), "inside": ["the count"]},
    },
    "weights: rows are weighted by their advantages": {
        "the loss of a row is multiplied by its advantage": lambda s: s.x * s.advantages.view(len(s.x), -1),
    },
    "weights: rows or tokens are weighted differently": {
        "the loss has no gradient of {}": regions(lambda s: s.x * ~s.region),
        "the loss of a row is divided by its token count": lambda s: s.x / s.lengths[:, None].clamp(min=1),
    },
    # GRPO and its variants
    "old: a second update after a rollout would be biased": {
        "the ratio is 1 because old log-probabilities equal the current ones": lambda s: s.per_token_logps.detach(),
    },
    "ratio: the update is different": {
        "the ratio is the log of the ratio, because exp is missing": lambda s: s.x.log(),
    },
    "ratio: ratios beyond the bound get no gradient": {
        "the log of the ratio is clamped to -{c} and {c}": lambda s: s.x.clamp(math.exp(-s.c), math.exp(s.c)),
        "the log of the ratio is at most {c}": lambda s: s.x.clamp(max=math.exp(s.c)),
    },
    "log-ratio: off-policy tokens have other weights": {
        "log-probabilities are in bfloat16": dict.fromkeys(("policy", "old"), lambda s: s.x.bfloat16().double()),
        "all rows of the batch have one ratio, the product of their tokens' ratios":
            {"log-ratio": lambda s: (s.x * s.mask).sum() + 0 * s.x, "importance_sampling_level": "token"},
        "the log of a row's ratio is divided by all columns, padding included":
            lambda s: (s.x * s.mask).sum(1, keepdim=True) / s.num_columns + 0 * s.x,
    },
    "terms: tokens with a negative advantage that are much likelier than before get no gradient": {
        "dual clip: with a negative advantage, a ratio counts at most {c}":
            lambda s: s.x.where(s.advantages >= 0, s.x.minimum(-s.c * s.gain)),
    },
    "terms: other ratios get the largest weight": {
        "cispo's ratio is clamped to 1 - epsilon_low and 1 + epsilon_high": cispo(lambda s: s.clipped_ratio),
        "cispo's ratio is at most 1 + epsilon_high": cispo(lambda s: s.ratio.clamp(max=1 + s.epsilon_high)),
        "cispo's ratio is clamped to 1 - epsilon_low and epsilon_high":
            cispo(lambda s: s.ratio.clamp(1 - s.epsilon_low, s.epsilon_high)),
    },
    "terms: tokens outside of the bounds are not trained": {
        "no token outside of 1 - epsilon_low to 1 + epsilon_high is trained, whatever its advantage":
            lambda s: -s.ratio * s.gain * (s.ratio == s.clipped_ratio),
    },
    "terms: off-policy steps are biased": {
        "REINFORCE: a token's term is -A log pi, without a ratio": lambda s: -s.gain * s.per_token_logps,
    },
    "terms: the update is different": {
        "sapo's gate is not divided by its temperature":
            lambda s: s.x * torch.where(s.advantages > 0, s.sapo_temperature_pos, s.sapo_temperature_neg),
        "cispo's weight multiplies the ratio instead of the log-probability":
            lambda s: -s.ratio.clamp(max=s.epsilon_high).detach() * s.gain * s.ratio,
    },
    "terms: the ratio has a gradient, too": {
        "cispo's ratio is not detached":
            lambda s: -s.ratio.clamp(max=s.epsilon_high) * s.gain * s.per_token_logps,
        "cispo's ratio has no bound": cispo(lambda s: s.ratio),
    },
    "terms: off-policy updates are too large": {
        "the maximum of the clipped and the unclipped objective is used instead of the minimum":
            {"advantages": lambda s: -s.x, "terms": lambda s: -s.x},
        "only the clipped term is used, without the minimum": lambda s: -s.clipped_ratio * s.gain,
        "the policy term is multiplied by the ratio a second time": lambda s: s.x * s.ratio,
        "dual clip also for positive advantages: a ratio counts at least {c}": lambda s: s.x.minimum(-s.c * s.gain),
    },
    "epsilon_high: the update is different": {
        "ratios are clipped to exp(-epsilon_low) and exp(epsilon_high)": {
            "epsilon_low": lambda s: -math.expm1(-s.epsilon_low),
            "epsilon_high": lambda s: math.expm1(s.epsilon_high),
        },
        "the upper bound of the clip is epsilon_high instead of 1 + epsilon_high": lambda s: s.x - 1,
    },
    "epsilon_low: the update is different": {
        "ratios are clipped to at least 1 / (1 + epsilon_high)": lambda s: 1 - 1 / (1 + s.epsilon_high),
    },
    "terms: off-policy updates with negative advantages are too large": {
        "the maximum of the clipped and the unclipped objective is used for negative advantages":
            lambda s: -s.ratio.clamp(max=1 + s.epsilon_high) * s.gain,
    },
    "correction: rows are weighted differently": {
        "the sampler's ratio is not used": lambda s: torch.ones_like(s.x),
    },
    "KL: the effective beta changes": {
        "the KL is multiplied by beta twice": lambda s: s.beta * s.x,
        "the KL is not multiplied by beta": lambda s: s.x / s.beta,
        "the ratio that weights the KL is detached": lambda s: s.x / s.ratio * s.ratio.detach(),
        "the KL is weighted with the ratio of its token instead of its sequence":
            lambda s: s.x / s.ratio * (s.per_token_logps - s.old_per_token_logps).exp(),
        "the KL is ratio * pi / pi_ref - log(pi / pi_ref) - 1, which is not least at the reference": {
            "use_bias_correction_kl": False,
            "KL": lambda s: s.ratio * s.ref_log_ratio.exp() - s.ref_log_ratio - 1,
        },
        "the KL is weighted with pi / pi_ref":
            {"use_bias_correction_kl": False, "KL": lambda s: s.x * s.ref_log_ratio.exp()},
        "the KL is weighted with the clipped ratio":
            {"use_bias_correction_kl": False, "KL": lambda s: s.x * s.clipped_ratio},
    },
    "reference: tokens far from the reference are not drawn back": {
        "the log-ratio in the KL is clamped to -{c} and {c}":
            lambda s: s.per_token_logps + (s.x - s.per_token_logps).clamp(-s.c, s.c),
        "the log-ratio in the KL is at most {c}":
            lambda s: s.per_token_logps + (s.x - s.per_token_logps).clamp(max=s.c),
    },
    "KL estimate: another divergence is penalized": {
        "the KL is that of torch's kl_div, pi_ref * log(pi_ref / pi)":
            lambda s: -s.ref_per_token_logps.exp() * s.ref_log_ratio,
        "the KL is pi * log(pi / pi_ref) of the sampled tokens, which are weighted with pi already":
            lambda s: s.per_token_logps.exp() * s.ref_log_ratio,
        "k3 has the wrong sign of its log-ratio": lambda s: s.x - 2 * s.ref_log_ratio,
        "k3 lacks its log-ratio": lambda s: s.x - s.ref_log_ratio,
    },
    "KL estimate: the KL is rewarded": {
        "the KL estimator is k1 with the wrong sign": lambda s: -s.ref_log_ratio
    },
    "KL estimate: small KLs are rounding errors": {
        "k3 loses its digits, because it is exp(d) - d - 1 in float32 instead of expm1(d) - d":
            lambda s: k3_in_float32(-s.ref_log_ratio.float()) if s.kl_estimator == "k3" else s.x,
    },
    "reference: another divergence is penalized": {
        "policy and reference are swapped in the KL": lambda s: 2 * s.per_token_logps - s.x,
        "the KL is estimated from the sum of a row's log-ratios":
            lambda s: s.per_token_logps + ((s.x - s.per_token_logps) * s.mask).sum(1, keepdim=True),
    },
    "reference: the policy may leave the reference": {
        "the reference moves with the policy": lambda s: s.per_token_logps.detach(),
        "the reference is left out, so its log-probabilities are 0": lambda s: 0 * s.x,
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
        for k, answer in enumerate(("rejected", "chosen"))
    },
    "beta: the policy is kept at another distance from the reference": {
        "beta is applied twice, so it is squared": lambda s: s.x**2,
        "one over beta is used instead of beta": lambda s: 1 / s.x,
    },
    "policy: the objective is different": {
        "log-probabilities are averaged over tokens":
            dict.fromkeys(BOTH, lambda s: s.x / s.mask.sum(1, keepdim=True).clamp(min=1)),
        "beta multiplies only the policy's log-probability": {"reference": lambda s: s.x / s.about["loss"]["beta"]},
        "the first token of each answer is left out": dict.fromkeys(BOTH, lambda s: s.x * shifted(s.mask, 1)),
        "the last token of each answer is left out": dict.fromkeys(BOTH, lambda s: s.x * shifted(s.mask, -1)),
        "log-probabilities are averaged over all columns, padding included":
            dict.fromkeys(BOTH, lambda s: s.x / s.mask.shape[1]),
    },
    "loss_type: the objective is different": {
        f"the loss is {name}": [name] for name in DPO_LOSSES
    },
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
    "terms: likely tokens are weighted differently": {
        "the probability that weights a token in dft is not detached":
            lambda s: s.per_token_logps * -s.per_token_logps.exp(),
    },
    # log-probabilities
    "temperature: on-policy ratios are not 1": {
        "logits are divided twice by the temperature": lambda s: s.x**2,
        "logits are multiplied by the temperature": lambda s: 1 / s.x,
        "log-probabilities instead of logits are divided by the temperature":
            {"temperature": 1.0, "scores": lambda s: s.x / s.about.get("temperature", 1.0)},
    },
    "labels: the wrong tokens are trained": {
        "the end token is scored as the padding token":
            lambda s: torch.where(s.is_stop(s.x), s.about.get("pad_token_id", -1), s.x),
    },
    "pixels: training uses another model": {
        "the images are gray": lambda s: 0 * s.x,
    },
    "positions: training uses another model": {
        "positions of the completion continue from the number of tokens": lambda s: s.indices.where(s.own, s.x),
        "positions of the completion continue from the largest position of each axis":
            lambda s: s.x if s.own[0] else (s.x[:, ~s.own].amax(1, True) + s.own.cumsum(0)).where(s.own, s.x),
    },
    "mode: ratios or KLs are noisy": {
        "rounded to bfloat16": lambda s: rounded(s.x, s.theirs, torch.bfloat16),
        "rounded to float16": lambda s: rounded(s.x, s.theirs, torch.float16),
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
        "the gradient of each micro-batch is clipped by itself":
            {"gradients of a part": lambda s: clipped(s.x, s.optimizer.get("max_grad_norm"))},
    },
    "gradient: parameters are not trained": {
        "some parameters do not get any gradient": lambda s: s.x * bool(s.theirs.any()),
        "gradients of the step before are left: {c} times Adam's first moment": lambda s: s.x + s.c * s.earlier,
    },
    "total norm: the update has a different direction": {
        "the norm of all is the sum of the parameters' norms": lambda s: sum(g.norm() for g in s.gradients.values()),
    },
    "weight: small updates are lost": {
        "weights are rounded to bfloat16 after the update": lambda s: rounded(s.x, s.theirs, torch.bfloat16)
    },
    # schedules
    "step: the effective learning rate changes": {
        "the learning rate is one step behind": lambda s: s.x - 1,
        "the learning rate is one step ahead": lambda s: s.x + 1,
        "the schedule counts micro-batches": lambda s: s.x * len(s.micro_batches),
        "the schedule advances twice per step": lambda s: 2 * s.x,
    },
}  # fmt: skip


@dataclass(frozen=True)
class Target:
    """Entry in bugs.json: known mistakes in a tensor or option, such as rewards."""

    name: str
    effect: str  # effect on training
    stages: str = ""  # stages and loss kinds that may have the mistakes, such as "mask, grpo"
    source: str = ""  # code, paper, issue or pull request
    about: str = ""  # topic: "clipping", "padding" or ""
    needs: str = "input_ids"  # tensor without which the mistakes are not tested
    used_by: str = ""  # projects that differ from TRL like this on purpose, with their option
    threshold: float = 0.0  # smallest deliberate clip bound; smaller bounds are mistakes
    unread: str = ""  # a loss that reads this option or tensor differs by mistake, whatever used_by says
    read: str = ""  # bugs are tried only in losses that read this option or tensor
    values: dict = field(default_factory=dict)  # {bug description: wrong value; "{c}" = number to fit}
    instead: dict[str, dict] = field(default_factory=dict)  # {bug description: {tensor: tensor used instead}}
    # {bug description: what is indexed wrongly, "rows", "rollout_rows" or "columns" (tokens)}
    orders: dict[str, str] = field(default_factory=dict)
    general: dict[str, str] = field(default_factory=dict)  # {tensor: "signed scaled" = wrong sign or scale (GENERAL)}

    def stage_names(self) -> set[str]:
        return set(self.stages.split(", "))

    def bugs(self) -> dict[str, Any]:
        """Return {bug description: wrong value, or function that returns a wrong value}."""
        result = dict(self.values)
        for says, names in self.instead.items():
            result[says] = {name: attrgetter(other) for name, other in names.items()}
        result |= {says: Scoped(kinds) for says, kinds in self.orders.items()}
        for quantity, tables in self.general.items():
            for table in tables.split():
                result |= {f"{quantity} {says}": formula for says, formula in GENERAL[table].items()}
        return result


TARGETS = {
    key: Target(*key.split(": ", 1), **values)
    for key, values in read_json(Path(__file__).with_name("bugs.json")).items()
}
BUGS = {key: FORMULAS.get(key, {}) | target.bugs() for key, target in TARGETS.items()}
