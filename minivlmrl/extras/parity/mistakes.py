"""Table of known mistakes in losses, and of designs: deliberate differences from TRL.

A row says how to change TRL's loss to get the mistake: {quantity: wrong value, or function of s}. In a function, s.x is
the right value, and s.beta, s.ratio and others are quantities of the loss (recomputed.py). The search fits the number
c. Specific rows come before general ones.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from minivlmrl.extras.parity.recomputed import PLACES
from minivlmrl.losses.grpo import row_mean
from minivlmrl.losses.preference import DPO_LOSSES


@dataclass(eq=False)
class Mistake:
    """Mistake or design, and how to simulate it in TRL's loss."""

    says: str
    change: dict  # {quantity: wrong value, or function that computes it}
    kinds: str = "grpo"  # loss kinds in which the mistake is possible
    used_by: str = ""  # projects that do this on purpose, "" = none
    threshold: float = 0.0  # smallest plausible bound, such as of a clamp; a smaller one is a mistake
    number: float = 0.0  # value of {c} found by the search, 0 = none

    @property
    def kind(self) -> str:
        return "design" if self.used_by and abs(self.number or math.inf) >= self.threshold else "mistake"

    @property
    def is_fitted(self) -> bool:
        return "{c}" in self.says

    def with_number(self, number: float) -> "Mistake":
        """Return a copy with a fitted number for {c} in the sentence and the change."""
        change = {name: partial(x, c=number) for name, x in self.change.items()}
        return replace(self, says=self.says.replace("{c}", f"{number:.5g}"), change=change, number=number)


def rows(quantity: str, wrong: dict[str, Any], kinds: str = "grpo", says: str = "", **about) -> list[Mistake]:
    """List mistakes in one quantity of the loss.

    Args:
        wrong: {end of the sentence: wrong value, or function that computes it, or {quantity: one of these}}.
        says: start of the sentence.
    """
    found = []
    for how, x in wrong.items():
        change = x if isinstance(x, dict) else {quantity: x}
        found.append(Mistake(says + how, change, kinds, **about))
    return found


def shifted(x: Tensor, by: int) -> Tensor:
    """Shift columns to the right, filling with 0."""
    return pad(x, (by, -by))


def cispo(bounded: Callable) -> Callable:
    """Return a function for CISPO's loss per token, with importance ratios clipped by `bounded`."""
    return lambda s: -bounded(s).detach() * s.advantages * s.per_token_logps


def normalized(correction: int, epsilon: float, s) -> Tensor:
    """Normalize advantages; `correction` 0 stands for the biased standard deviation."""
    return (s.x - s.x.mean()) / (s.x.std(correction=correction) + epsilon)


def divided_by(count: Callable, s) -> float:
    """Return the factor for a loss divided by a count."""
    return 1 / count(s)


def of_answer(wrong: int, s) -> Tensor:
    """Use one answer's mask for both answers of a DPO pair.

    Args:
        wrong: 0 = mask of the chosen answer, 1 = of the rejected answer.
    """
    return s.x.view(-1, 2, s.num_columns)[:, wrong].repeat_interleave(2, 0)


# {description: function} for mistakes that are possible in any quantity
TAKEN_FROM = {
    "next row": lambda s: s.x.roll(-1, 0),
    "previous row": lambda s: s.x.roll(1, 0),
    "row at the mirrored position": lambda s: s.x.flip(0),
}
TOKEN_TAKEN_FROM = TAKEN_FROM | {
    "next token in its row": lambda s: s.x.roll(-1, 1),
    "previous token in its row": lambda s: s.x.roll(1, 1),
    "next token in its row and 0 for the last": lambda s: shifted(s.x, -1),
    "previous token in its row and 0 for the first": lambda s: shifted(s.x, 1),
}
SIGNED = {"has the wrong sign": lambda s: -s.x, "is left out": lambda s: 0 * s.x}
SCALED = {"is {c} times as large": lambda s, c: c * s.x}
CURVED = {
    "is replaced by its absolute value": lambda s: s.x.abs(),
    "is never below 0": lambda s: s.x.clamp(min=0),
    "is replaced by its sign": lambda s: s.x.sign(),
}
CLAMPED = {"is clamped to -{c} and {c}": lambda s, c: s.x.clamp(-c, c), "is at most {c}": lambda s, c: s.x.clamp(max=c)}
BY_TOKEN = {
    "is replaced by the sum of its row": lambda s: (s.x * s.mask).sum(1, keepdim=True) + 0 * s.x,
    "is detached": lambda s: s.x.detach(),
}
COUNTS = {
    "beta": attrgetter("beta"),
    "the number of rows": attrgetter("num_rows"),
    "the number of pairs": lambda s: s.num_rows / 2,
    "the number of counted tokens": lambda s: s.mask.sum(),
    "the number of tokens of the longest completion": lambda s: s.mask.sum(1).max(),
    "the number of tokens of max_completion_length": attrgetter("max_completion_length"),
}
CHOSEN, REJECTED = torch.eye(2)
OF_ANSWERS = {
    "is averaged over the pairs before the loss": lambda s: s.x.mean(0) + 0 * s.x,
    "has the wrong sign for the chosen answer": lambda s: s.x - 2 * CHOSEN * s.x,
    "is left out for the rejected answer": lambda s: s.x - REJECTED * s.x,
    "has the wrong sign for the rejected answer": lambda s: s.x - 2 * REJECTED * s.x,
}
ALL = "grpo dpo sft"
SUMS = "grpo sft"
NEVER = 1e300  # clip bound that no ratio reaches
BOTH = "policy", "reference"
MISTAKES = [
    # the mask
    *rows("mask", {
        "one token after the completion is counted, too": lambda s: torch.maximum(s.x, shifted(s.x, 1)),
        "padding is counted as part of the completion": lambda s: torch.ones_like(s.x),
        "the last token is not trained on": lambda s: s.x * shifted(s.x, -1),
        "the first token is not trained on": lambda s: s.x * shifted(s.x, 1),
        "the last column of the batch is not trained on": lambda s: shifted(shifted(s.x, 1), -1),
    }, ALL),
    # averages
    *rows("average", {
        "grpo, over the tokens of each row and then over the rows": "grpo",
        "dapo, over all tokens of the step": "dapo",
        "dr_grpo, over a fixed length and then over the rows": "dr_grpo",
        "luspo, summed over the tokens of each row and averaged over the rows": "luspo",
    }, says="the loss is averaged as in ", used_by="TRL: loss_type; verl: loss_agg_mode"),
    *rows("average", {  # TRL PR 6439, arXiv 2604.23747
        "the loss is averaged over the tokens of each micro-batch, as in bnpo": "bnpo",
        "the loss is averaged over the tokens only in whole steps, and in micro-batches over each row":
            lambda s: s.x if s.whole_step else "grpo",
    }),
    *rows("weights", {
        "padding is trained, but not counted": lambda s: torch.ones_like(s.x),
        "the loss has no gradient of the first tokens": lambda s: s.x * pad(s.x[:, 1:], (1, 0)),
        "the loss has no gradient of the last counted tokens": lambda s: s.x * shifted(s.mask, -1),
        "the loss of a row is divided by its token count": lambda s: s.x / s.lengths[:, None].clamp(min=1),
    }, SUMS),
    *rows("mean", {
        "the loss is divided by all columns, padding included": lambda s: s.terms.sum() / s.num_columns / s.num_rows,
        "the loss is the sum over all tokens instead of a mean": lambda s: s.terms.sum(),
        "the loss is divided by the rows and by the length of the longest completion":
            lambda s: s.terms.sum() / s.mask.sum(1).max() / s.num_rows,
    }, SUMS),
    *rows("mean", {
        "the loss is divided by a fixed length of {c} for each row": lambda s, c: s.terms.sum() / c / s.num_rows,
    }, SUMS, used_by="trainers that choose the length: verl's seq-mean-token-sum-norm"),
    *rows("average", {
        "each row of the loss is averaged by itself": "grpo",
        "the tokens of each row are added up": "luspo",
    }, "sft"),
    *rows("mean", {
        "a row without tokens is divided by 0 in the mean over each row":
            lambda s: (s.terms.sum(1) / s.mask.sum(1)).mean(),
        "the mean of the rows is only over rows with a token":
            lambda s: row_mean(s.terms, s.mask).sum() / s.completion_mask.any(1).sum(),
        "the sum of a row is divided by the lengths of all rows, because (B,) and (B, 1) are broadcast":
            lambda s: (s.terms.sum(1) / s.mask.sum(1, keepdim=True).clamp(min=1)).mean(),
        "the mean divides only by tokens of rows with a positive advantage":  # seen in rllm PR 512
            lambda s: s.terms.sum() / (s.completion_mask * (s.advantages > 0)).sum().clamp(min=1),
        "luspo's loss is not masked, but averaged over all columns":  # seen in Liger-Kernel and axolotl
            lambda s: (s.unmasked * s.lengths[:, None]).mean(),
    }),
    *(
        Mistake("advantages are normalized again within each micro-batch", {"advantages": partial(normalized, *how)})
        for how in product((0, 1), (1e-4, 1e-8))
    ),
    # ratios
    *rows("importance_sampling_level", {  # GSPO eq. 7
        "each token has its own ratio": "token",
        "each row has one ratio, the geometric mean of its tokens' ratios": "sequence",
        "each row has one ratio, the product of its tokens' ratios": "sequence_sum",
    }),
    *rows("loss_type", {name: name for name in ("grpo", "cispo", "sapo", "vespo")},
          says="the policy term is that of "),
    *rows("old", {
        "the ratio is 1 because old log-probabilities equal the current ones": lambda s: s.per_token_logps.detach(),
    }, used_by="losses for one update: torchtune, R1-V"),
    *rows("old", {"the old policy is the reference": attrgetter("ref_per_token_logps")}),
    *rows("ratio", {"the ratio is the log of the ratio, because exp is missing": lambda s: s.x.log()}),
    *rows("ratio", {
        "the log of the ratio is clamped to -{c} and {c}": lambda s, c: s.x.clamp(math.exp(-c), math.exp(c)),
    }, used_by="verl, OpenRLHF, EasyR1 and SkyRL, with a bound of 20", threshold=1.0),
    *rows("log-ratio", {
        "log-probabilities are in bfloat16": dict.fromkeys(("policy", "old"), lambda s: s.x.bfloat16().double()),
        "all rows of the batch have one ratio, the product of their tokens' ratios":
            {"log-ratio": lambda s: (s.x * s.mask).sum() + 0 * s.x, "importance_sampling_level": "token"},
        "the log of a row's ratio is divided by all columns, padding included":
            lambda s: (s.x * s.mask).sum(1, keepdim=True) / s.num_columns + 0 * s.x,
        "the ratio is the arithmetic instead of the geometric mean of the ratios in its row":
            lambda s: (row_mean(s.x.exp(), s.mask) + (s.mask.sum(1, keepdim=True) == 0)).log() + 0 * s.x,
    }),
    # clipping
    *rows("terms", {
        "dual clip: with a negative advantage, a ratio counts at most {c}":
            lambda s, c: s.x.where(s.advantages >= 0, s.x.minimum(-c * s.advantages)),
    }, used_by="verl: clip_ratio_c; EasyR1: clip_ratio_dual; TRL: delta", threshold=1.0),
    *rows("terms", {
        "1 - epsilon_low and 1 + epsilon_high": cispo(attrgetter("clipped_ratio")),
        "at most 1 + epsilon_high": cispo(lambda s: s.ratio.clamp(max=1 + s.epsilon_high)),
    }, says="cispo's ratio is clamped to ", used_by="most projects; TRL's epsilon_high is the bound"),
    *rows("terms", {
        "no token outside of 1 - epsilon_low to 1 + epsilon_high is trained, whatever its advantage":
            lambda s: -s.ratio * s.advantages * (s.ratio == s.clipped_ratio),
    }, used_by="IcePop, for the ratio of trainer and sampler"),
    *rows("terms", {
        "REINFORCE: a token's term is -A log pi, without a ratio": lambda s: -s.advantages * s.per_token_logps,
    }, used_by="rlhf-book: the loss reinforce"),
    *rows("terms", {
        "cispo's ratio is not detached":
            lambda s: -s.ratio.clamp(max=s.epsilon_high) * s.advantages * s.per_token_logps,
        "cispo's ratio has no bound": cispo(attrgetter("ratio")),
        "ratios are not clipped": {"epsilon_low": NEVER, "epsilon_high": NEVER},
        "the maximum of the clipped and the unclipped objective is used instead of the minimum":
            {"advantages": lambda s: -s.x, "terms": lambda s: -s.x},
        "only the clipped term is used, without the minimum": lambda s: -s.clipped_ratio * s.advantages,
        "the policy term is multiplied by the ratio a second time": lambda s: s.x * s.ratio,
        "the maximum of the clipped and the unclipped objective is used for negative advantages":
            lambda s: -s.ratio.clamp(max=1 + s.epsilon_high) * s.advantages,
    }),
    *rows("epsilon_high", {
        "ratios are clipped with epsilon_low on both sides": attrgetter("epsilon_low"),
    }, used_by="MM-EUREKA, lmm-r1, minimind, simple_GRPO and torchtune"),
    *rows("epsilon_high", {  # two epsilons: DAPO's clip-higher
        "epsilon_low and epsilon_high are swapped":
            {"epsilon_low": attrgetter("epsilon_high"), "epsilon_high": attrgetter("epsilon_low")},
        "epsilon_high is {c}": lambda s, c: c,
        "epsilon_low is {c}": {"epsilon_low": lambda s, c: c},
        "ratios are clipped to exp(-epsilon_low) and exp(epsilon_high)": {
            "epsilon_low": lambda s: -math.expm1(-s.epsilon_low),
            "epsilon_high": lambda s: math.expm1(s.epsilon_high),
        },
        "the upper bound of the clip is epsilon_high instead of 1 + epsilon_high": lambda s: s.x - 1,
    }),
    # the KL
    *rows("kl_estimator", {"the KL estimator is k1": "k1"}),  # k1 has a gradient of 0 on average (arXiv 2506.09477)
    *rows("kl_estimator", {  # NeMo-RL: k3 times pi / pi.detach()
        "the KL estimator is k2": "k2",
        "the KL has the value of k1 and the gradient of k2": "k1+",
        "the KL has the value of k3 and the gradient of k2": "k3+",
    }, used_by="verl: kl_loss_type"),
    *rows("use_bias_correction_kl", {  # TRL PR 6594
        "the KL is not weighted with the ratio": False,
        "the KL is weighted with the ratio": True,
    }, used_by="most projects do not; DeepSeek-V3.2 and TRL: use_bias_correction_kl"),
    *rows("KL", {
        "multiplied by beta twice": lambda s: s.beta * s.x,
        "not multiplied by beta": lambda s: s.x / s.beta,
        "ratio * pi / pi_ref - log(pi / pi_ref) - 1, which is not least at the reference": {  # as in TRL up to 1.9
            "use_bias_correction_kl": False,
            "KL": lambda s: s.ratio * s.ref_log_ratio.exp() - s.ref_log_ratio - 1,
        },
        "weighted with the ratio, which is detached": {
            "use_bias_correction_kl": False, "KL": lambda s: s.x * s.ratio.detach()
        },
        "weighted with pi / pi_ref": {"use_bias_correction_kl": False, "KL": lambda s: s.x * s.ref_log_ratio.exp()},
    }, says="the KL is "),
    *rows("KL estimate", CLAMPED, says="the KL ", threshold=1.0,
          used_by="verl, EasyR1, OpenRLHF, SkyRL, ms-swift, unsloth and slime, with a bound of 10"),
    *rows("reference", {
        "the log-ratio in the KL is clamped to -{c} and {c}":
            lambda s, c: s.per_token_logps + (s.x - s.per_token_logps).clamp(-c, c),
    }, used_by="verl and EasyR1, with a bound of 20", threshold=1.0),
    *rows("KL estimate", {
        "the KL is that of torch's kl_div, pi_ref * log(pi_ref / pi)":
            lambda s: -s.ref_per_token_logps.exp() * s.ref_log_ratio,
        "k3 has the wrong sign of its log-ratio": lambda s: s.x - 2 * s.ref_log_ratio,
        "k3 lacks its log-ratio": lambda s: s.x - s.ref_log_ratio,
        "the KL estimator is k1 with the wrong sign": lambda s: -s.ref_log_ratio,  # seen in rlhf-book
    }),
    *rows("reference", {
        "the reference is the old policy": attrgetter("old_per_token_logps"),
        "policy and reference are swapped in the KL": lambda s: 2 * s.per_token_logps - s.x,
        "the KL is estimated from the sum of a row's log-ratios":
            lambda s: s.per_token_logps + ((s.x - s.per_token_logps) * s.mask).sum(1, keepdim=True),
    }),
    *rows("reference", {
        "the reference moves with the policy": lambda s: s.per_token_logps.detach(),
        "the reference is left out, so its log-probabilities are 0": lambda s: 0 * s.x,
    }, "grpo dpo"),
    # DPO and SFT
    *rows("index", {"the rejected answer is preferred": lambda s: s.x.flip(1)}, "dpo"),
    *rows("mask", {
        "chosen answer": partial(of_answer, 0),
        "rejected answer": partial(of_answer, 1),
    }, "dpo", "both answers have the mask of the "),
    *rows("beta", {"beta is {c}": lambda s, c: c}, "grpo dpo"),
    *rows("beta", {
        "applied twice, so it is squared": lambda s: s.x**2,
        "replaced by one over beta": lambda s: 1 / s.x,
        "ignored": 1.0,
        "halved": lambda s: s.x / 2,
    }, "dpo", "beta is "),
    *rows("policy", {
        "log-probabilities are averaged over tokens":
            dict.fromkeys(BOTH, lambda s: s.x / s.mask.sum(1, keepdim=True).clamp(min=1)),
        "only the reference's log-probability is averaged over tokens":
            {"summed reference": lambda s: s.x / s.answer_lengths},
        "beta multiplies only the policy's log-probability": {"reference": lambda s: s.x / s.options["beta"]},
        "the first token of each answer is left out": dict.fromkeys(BOTH, lambda s: s.x * shifted(s.mask, 1)),
        "the last token of each answer is left out": dict.fromkeys(BOTH, lambda s: s.x * shifted(s.mask, -1)),
        "log-probabilities are averaged over all columns, padding included":
            dict.fromkeys(BOTH, lambda s: s.x / s.num_columns),
    }, "dpo"),
    *rows("loss_type", {name: [name] for name in DPO_LOSSES}, "dpo", "the loss is "),
    *rows("pair loss", {
        "the log is missing, so the loss is -sigmoid": lambda s: -s.margins.sigmoid().mean(),
    }, "dpo"),
    *rows("log-ratio", {  # arXiv 2402.10571
        "{c} is subtracted from beta times the margin": lambda s, c: s.x - c / s.beta * CHOSEN,
    }, "dpo", used_by="ODPO, SimPO"),
    *rows("loss_type", {  # arXiv 2404.19733
        "an SFT loss with the weight {c} is added":
            {"loss_type": lambda s, c: [*s.x, "sft"], "loss_weights": lambda s, c: [1.0, c]},
    }, "dpo", used_by="TRL: loss_type [sigmoid, sft]"),
    *rows("log-ratio", {
        "the log ratio of an answer is the sum over its tokens instead of their mean":
            lambda s: s.x * s.answer_lengths if {"ipo", "sigmoid_norm"} & {*s.loss_type} else s.x,
    }, "dpo", used_by="the authors' code of DPO and OpenRLHF: ipo"),
    *rows("label_smoothing", {"label_smoothing is {c}": lambda s, c: c}, "dpo"),
    *rows("loss_type", {
        "the loss is nll": "nll",
        "the loss is dft": "dft",
        "the probability that weights a token in dft is not detached":
            {"terms": lambda s: s.per_token_logps * -s.per_token_logps.exp()},
    }, "sft"),
    *rows("factor", {
        "have the wrong sign": -1,
        "are {c} times as large": lambda s, c: c,
        **{f"are multiplied by {name}": count for name, count in COUNTS.items()},
        **{f"are divided by {name}": partial(divided_by, count) for name, count in COUNTS.items()},
    }, ALL, "all values "),
    # mistakes possible in any quantity
    *rows("advantages", SIGNED | CURVED | CLAMPED, says="an advantage "),
    *rows("advantages", TAKEN_FROM, says="an advantage is taken from the "),
    *rows("mask", TOKEN_TAKEN_FROM, ALL, "a mask value is taken from the "),
    *rows("logps", TOKEN_TAKEN_FROM, ALL, "a log-probability is taken from the "),
    *rows("reference", TOKEN_TAKEN_FROM, "grpo dpo", "a log-probability of the reference is taken from the "),
    *rows("log-ratio", SIGNED | SCALED | BY_TOKEN, says="the log of the ratio "),
    *rows("terms", SIGNED | SCALED, says="the policy term, without the KL, "),
    *rows("KL", SIGNED | SCALED | CURVED | BY_TOKEN, says="the KL "),
    *rows("log-ratio", SIGNED | SCALED | OF_ANSWERS, "dpo", "the log ratio of an answer "),
    *rows("summed reference", OF_ANSWERS, "dpo", "the reference's log-probability "),
]  # fmt: skip


def possible(case) -> tuple[list[Mistake], list[Mistake], list[Mistake]]:
    """Return the mistakes that are possible in a test case's kind of loss, as three lists.

    Returns:
        Plain mistakes, mistakes with a number to fit, mistakes in only one of PLACES.
    """
    kind = case.options["kind"]
    plain = []
    fitted = []
    placed = []
    for row in MISTAKES:
        if kind not in row.kinds.split():
            continue
        if row.is_fitted:
            fitted.append(row)
            continue
        plain.append(row)
        if kind == "grpo" and "taken from" not in row.says:
            for place in PLACES:
                says = f"{row.says}, only in {place}"
                placed.append(replace(row, says=says, change=row.change | {"inside": place}, used_by=""))
    return plain, fitted, placed
