"""Known mistakes in losses, and designs: differences from TRL that some projects have on purpose.

Each row simulates one in recomputed.py: {quantity: wrong value, or function of s}, where s.x is the right value, s.c a
number that the search fits, and s.beta, s.ratio and others are quantities of the loss.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
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
    change: dict  # {quantity: wrong value, or function}
    effect: str  # on training
    kinds: str = "grpo"  # kinds of losses that may have it
    source: str = ""  # code, paper, issue or pull request
    used_by: str = ""  # projects that do this on purpose: a design
    threshold: float = 0.0  # smallest deliberate bound; smaller ones are mistakes
    unread: str = ""  # what a loss with this design does not read: otherwise it is a mistake
    read: str = ""  # tried only for losses that read this option or tensor
    is_clip: bool = False  # not tried for SAPO and VESPO, which do not clip
    is_general: bool = False  # may happen to any tensor; tried after specific mistakes
    number: float = 0.0  # fitted number

    @property
    def kind(self) -> str:
        return "design" if self.used_by and abs(self.number or math.inf) >= self.threshold else "mistake"

    @property
    def is_fitted(self) -> bool:
        return "{c}" in self.says

    def inside(self, place: str) -> "Mistake":
        """Limit the mistake to one place, such as the count of the mask."""
        change = self.change | {"inside": [*self.change.get("inside", ()), place]}
        return replace(self, says=f"{self.says}, only in {place}", change=change, is_clip=False)

    def with_number(self, number: float) -> "Mistake":
        """Put a fitted number into the sentence and the change."""
        change = {name: with_number(x, number) for name, x in self.change.items()}
        return replace(self, says=self.says.replace("{c}", f"{number:.5g}"), change=change, number=number)


def with_number(wrong: Any, number: float) -> Any:
    """Put a fitted number into one change: as s.c, or instead of "{c}"."""
    if not callable(wrong):
        return number if wrong == "{c}" else wrong

    def changed(s):
        s.c = number
        return wrong(s)

    return changed


def rows(effect: str, quantity: str, wrong: dict[str, Any], **about) -> list[Mistake]:
    """List mistakes in one quantity, {what it says: wrong value, function, or {quantity: ...} for other quantities}."""
    changes = {says: x if isinstance(x, dict) else {quantity: x} for says, x in wrong.items()}
    return [Mistake(says, change, effect, **about) for says, change in changes.items()]


def shifted(x: Tensor, by: int) -> Tensor:
    """Shift columns to the right, filling with 0."""
    return pad(x, (by, -by))


def cispo(bounded: Callable) -> Callable:
    """Return CISPO's loss per token; `bounded` clips the importance ratio."""
    return lambda s: -bounded(s).detach() * s.advantages * s.per_token_logps


def normalized_again(s, correction: int, epsilon: float) -> Tensor:
    """Normalize advantages of the micro-batch to mean 0 and standard deviation 1."""
    return (s.x - s.x.mean()) / (s.x.std(correction=correction) + epsilon)


def of_answer(wrong: int, s) -> Tensor:
    """Give both answers of a pair the mask of the chosen (0) or rejected (1) one."""
    return s.x.view(-1, 2, s.num_columns)[:, wrong].repeat_interleave(2, 0)


# mistakes that any quantity may have
TAKEN_FROM = {
    "the next row": lambda s: s.x.roll(-1, 0),
    "the previous row": lambda s: s.x.roll(1, 0),
    "the first row": lambda s: s.x[:1].expand_as(s.x),
    "the row at the mirrored position": lambda s: s.x.flip(0),
}
TOKEN_TAKEN_FROM = TAKEN_FROM | {
    "the next token in its row": lambda s: s.x.roll(-1, 1),
    "the previous token in its row": lambda s: s.x.roll(1, 1),
    "the first token in its row": lambda s: s.x[:, :1].expand_as(s.x),
    "the token at the mirrored position in its row": lambda s: s.x.flip(1),
    "the next token in its row and 0 for the last": lambda s: shifted(s.x, -1),
    "the previous token in its row and 0 for the first": lambda s: shifted(s.x, 1),
}
SIGNED = {"has the wrong sign": lambda s: -s.x, "is left out": lambda s: 0 * s.x}
SCALED = {"is doubled": lambda s: 2 * s.x, "is halved": lambda s: s.x / 2}
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
CHOSEN, REJECTED = torch.eye(2)
OF_ANSWERS = {
    "is averaged over the pairs before the loss": lambda s: s.x.mean(0) + 0 * s.x,
    "is left out for the chosen answer": lambda s: s.x - CHOSEN * s.x,
    "has the wrong sign for the chosen answer": lambda s: s.x - 2 * CHOSEN * s.x,
    "is left out for the rejected answer": lambda s: s.x - REJECTED * s.x,
    "has the wrong sign for the rejected answer": lambda s: s.x - 2 * REJECTED * s.x,
}


def general(effect: str, quantity: str, says: str, wrong: dict[str, Callable], **about) -> list[Mistake]:
    """List general mistakes in a quantity: "an advantage" has the wrong sign, is left out and so on."""
    table = {f"{says} {how}": x for how, x in wrong.items()}
    return rows(effect, quantity, table, is_general=True, **about)


ALL = "grpo dpo sft"
SUMS = "grpo sft"
NEVER = 1e300  # a bound without effect
BOTH = "policy", "reference"
IN_BFLOAT16 = dict.fromkeys(("policy", "old"), lambda s: s.x.bfloat16().double())
MISTAKES = [
    # advantages
    *general("wrong completions are rewarded", "advantages", "an advantage", SIGNED | CURVED | CLAMPED),
    *general("the wrong rows are rewarded", "advantages", "an advantage is taken from", TAKEN_FROM),
    # the mask, and weights of tokens
    *rows("padding is trained", "mask", {
        "one token after the completion is counted, too": lambda s: torch.maximum(s.x, shifted(s.x, 1)),
        "padding is counted as part of the completion": lambda s: torch.ones_like(s.x),
    }, kinds=ALL),
    *rows("the wrong tokens are trained", "mask", {
        "the last token is not trained on": lambda s: s.x * shifted(s.x, -1),
        "the first token is not trained on": lambda s: s.x * shifted(s.x, 1),
        "the last column of the batch is not trained on": lambda s: shifted(shifted(s.x, 1), -1),
        "one token before the completion is counted, too": lambda s: torch.maximum(s.x, shifted(s.x, -1)),
    }, kinds=ALL),
    *general("the wrong tokens are trained", "mask", "a mask value is taken from", TOKEN_TAKEN_FROM, kinds=ALL),
    *rows("rows or tokens are weighted differently", "weights", {
        "the loss of a row is multiplied by its advantage": lambda s: s.x * s.advantages,
    }, source="verl 2506"),
    *rows("rows or tokens are weighted differently", "weights", {
        "the loss has no gradient of the first tokens": lambda s: s.x * pad(s.x[:, 1:], (1, 0)),
        "the loss has no gradient of the last counted tokens": lambda s: s.x * shifted(s.mask, -1),
        "the loss of a row is divided by its token count": lambda s: s.x / s.lengths[:, None].clamp(min=1),
    }, kinds=SUMS),
    *general("the wrong tokens are trained", "logps", "a log-probability is taken from", TOKEN_TAKEN_FROM, kinds=ALL),
    # averages
    *rows("completions of other lengths weigh more", "average", {
        "the loss is averaged as in grpo, over the tokens of each row and then over the rows": "grpo",
        "the loss is averaged as in dapo, over all tokens of the step": "dapo",
        "the loss is averaged as in dr_grpo, over a fixed length and then over the rows": "dr_grpo",
        "the loss is averaged as in luspo, summed over the tokens of each row and averaged over the rows": "luspo",
    }, used_by="TRL: loss_type; verl: loss_agg_mode; OpenRLHF: token_level_loss"),
    *rows("short micro-batches count more: divide by the tokens of the whole step", "average", {
        "the loss is averaged over the tokens of each micro-batch, as in bnpo": "bnpo",
        "the loss is averaged over the tokens only in whole steps, and in micro-batches over each row":
            lambda s: s.x if s.whole_step else "grpo",
    }, source="TRL PR 6439, arXiv 2604.23747"),
    *rows("long padding makes the update small", "mean", {
        "the loss is divided by all columns, padding included": lambda s: s.terms.sum() / s.num_columns / s.num_rows,
    }, kinds=SUMS),
    *rows("the effective learning rate changes with lengths and rows", "mean", {
        "the loss is the sum over all tokens instead of a mean": lambda s: s.terms.sum(),
        "the loss is the sum over the rows of their means": lambda s: row_mean(s.terms, s.mask).sum(),
        "the loss is divided by the rows and by the length of the longest completion":
            lambda s: s.terms.sum() / s.mask.sum(1).max() / s.num_rows,
    }, kinds=SUMS),
    *rows("the effective learning rate changes with the length", "mean", {
        "the loss is divided by a fixed length of {c} for each row": lambda s: s.terms.sum() / s.c / s.num_rows,
    }, kinds=SUMS, used_by="trainers that choose the length: verl's seq-mean-token-sum-norm"),
    *rows("completion lengths are weights", "average", {
        f"{says} of {name} {how}": {"average": average, "loss_type": name}
        for average, says, how in (("grpo", "each row", "is averaged by itself"),
                                   ("luspo", "the tokens of each row", "are added up"))
        for name in ("nll", "dft")
    }, kinds="sft", source="arXiv 2604.23747"),
    *rows("tokens are weighted differently", "mean", {
        "the mean of the rows is only over rows with a token":
            lambda s: row_mean(s.terms, s.mask).sum() / s.completion_mask.any(1).sum(),
        **{
            f"advantages are normalized again within each micro-batch{how}, with an epsilon of {epsilon:g}":
                {"advantages": partial(normalized_again, correction=correction, epsilon=epsilon)}
            for correction, how in ((1, ""), (0, " by the biased standard deviation"))
            for epsilon in (1e-8, 1e-6, 1e-4)
        },
        "the sum of a row is divided by the lengths of all rows, because (B,) and (B, 1) are broadcast":
            lambda s: (s.terms.sum(1) / s.mask.sum(1, keepdim=True).clamp(min=1)).mean(),
        "the mean divides only by tokens of rows with a positive advantage":
            lambda s: s.terms.sum() / (s.completion_mask * (s.advantages > 0)).sum().clamp(min=1),
    }, source="verl issue 7200, rllm PR 512"),
    *rows("padding is trained", "mean", {
        "luspo's loss is not masked, but averaged over all columns": {
            "mask": lambda s: torch.ones_like(s.x),
            "inside": ["the sum"],
            "weights": lambda s: s.x * s.lengths[:, None],
            "mean": lambda s: s.terms.sum() / s.num_columns / s.num_rows,
        },
    }, source="Liger-Kernel and axolotl"),
    *rows("the effective learning rate changes", "mask", {
        "sums are divided by one token too many per row, as if counted before labels are shifted":
            {"mask": lambda s: torch.maximum(s.x, s.x.roll(-1, 1)), "inside": ["the count"]},
    }, kinds=ALL),
    # ratios
    *rows("the update is different", "loss_type", {
        f"the policy term of {name} is used": name for name in ("grpo", "cispo", "sapo", "vespo")
    }),
    *rows("the update is different", "importance_sampling_level", {
        "each token has its own ratio": "token",
        "each row has one ratio, the geometric mean of its tokens' ratios": "sequence",
        "each row has one ratio, the product of its tokens' ratios": "sequence_sum",
        "each row has one ratio, but each token has its own gradient (GSPO-token)": "sequence_token",
    }, source="GSPO eq. 7"),
    *rows("a second update after a rollout would be biased", "old", {
        "the ratio is 1 because old log-probabilities equal the current ones": lambda s: s.per_token_logps.detach(),
    }, source="TRL issue 2769", unread="old_per_token_logps", used_by="losses for one update: torchtune, R1-V"),
    *rows("off-policy steps are biased", "old", {
        "old log-probabilities are not detached": attrgetter("per_token_logps"),
    }, source="mlx-lm-lora 55"),
    *general("off-policy steps are biased", "old", "an old log-probability is taken from", TOKEN_TAKEN_FROM),
    *rows("ratios are those of policy and reference", "old", {
        "the old policy is the reference": attrgetter("ref_per_token_logps"),
    }),
    *rows("the update is different", "ratio", {
        "the ratio is the log of the ratio, because exp is missing": lambda s: s.x.log(),
    }),
    *rows("ratios beyond the bound get no gradient", "ratio", {
        "the log of the ratio is clamped to -{c} and {c}": lambda s: s.x.clamp(math.exp(-s.c), math.exp(s.c)),
        "the log of the ratio is at most {c}": lambda s: s.x.clamp(max=math.exp(s.c)),
    }, used_by="verl, OpenRLHF, EasyR1 and SkyRL, with a bound of 20", threshold=2.0),
    *rows("off-policy tokens have other weights", "log-ratio", {
        "log-probabilities are in bfloat16": IN_BFLOAT16,
        "all rows of the batch have one ratio, the product of their tokens' ratios":
            {"log-ratio": lambda s: (s.x * s.mask).sum() + 0 * s.x, "importance_sampling_level": "token"},
        "the log of a row's ratio is divided by all columns, padding included":
            lambda s: (s.x * s.mask).sum(1, keepdim=True) / s.num_columns + 0 * s.x,
    }, source="GSPO eq. 7"),
    *general("off-policy tokens have other weights", "log-ratio", "the log of the ratio", SIGNED | SCALED | BY_TOKEN),
    *general("off-policy tokens have other weights", "log-ratio", "the ratio", OF_RATIOS),
    # bounds
    *rows("tokens with a negative advantage that are much likelier than before get no gradient", "terms", {
        "dual clip: with a negative advantage, a ratio counts at most {c}":
            lambda s: s.x.where(s.advantages >= 0, s.x.minimum(-s.c * s.advantages)),
    }, is_clip=True, used_by="verl: clip_ratio_c; EasyR1: clip_ratio_dual; TRL: delta", threshold=1.0),
    *rows("other ratios get the largest weight", "terms", {
        "cispo's ratio is clamped to 1 - epsilon_low and 1 + epsilon_high": cispo(attrgetter("clipped_ratio")),
        "cispo's ratio is at most 1 + epsilon_high": cispo(lambda s: s.ratio.clamp(max=1 + s.epsilon_high)),
        "cispo's ratio is clamped to 1 - epsilon_low and epsilon_high":
            cispo(lambda s: s.ratio.clamp(1 - s.epsilon_low, s.epsilon_high)),
    }, is_clip=True, used_by="most projects; TRL's and ms-swift's epsilon_high is the bound itself"),
    *rows("tokens outside of the bounds are not trained", "terms", {
        "no token outside of 1 - epsilon_low to 1 + epsilon_high is trained, whatever its advantage":
            lambda s: -s.ratio * s.advantages * (s.ratio == s.clipped_ratio),
    }, is_clip=True, used_by="IcePop, for the ratio of trainer and sampler"),
    *rows("off-policy steps are biased", "terms", {
        "REINFORCE: a token's term is -A log pi, without a ratio": lambda s: -s.advantages * s.per_token_logps,
    }, unread="old_per_token_logps", used_by="rlhf-book: the loss reinforce"),
    *rows("the update is different", "terms", {
        "sapo's gate is not divided by its temperature":
            lambda s: s.x * torch.where(s.advantages > 0, s.sapo_temperature_pos, s.sapo_temperature_neg),
        "cispo's weight multiplies the ratio instead of the log-probability":
            lambda s: -s.ratio.clamp(max=s.epsilon_high).detach() * s.advantages * s.ratio,
    }, source="SAPO eq. 6; MiniMax-M1 eq. 5"),
    *rows("the update is different", "", {
        "sapo's two temperatures are swapped": {
            "sapo_temperature_pos": attrgetter("sapo_temperature_neg"),
            "sapo_temperature_neg": attrgetter("sapo_temperature_pos"),
        },
        "sapo has the same temperature for both signs": {"sapo_temperature_neg": attrgetter("sapo_temperature_pos")},
    }),
    *rows("the ratio has a gradient, too", "terms", {
        "cispo's ratio is not detached":
            lambda s: -s.ratio.clamp(max=s.epsilon_high) * s.advantages * s.per_token_logps,
        "cispo's ratio has no bound": cispo(attrgetter("ratio")),
    }, source="MiniMax-M1 eq. 5"),
    *rows("off-policy updates are too large", "terms", {
        "ratios are not clipped": {"epsilon_low": NEVER, "epsilon_high": NEVER},
        "the maximum of the clipped and the unclipped objective is used instead of the minimum":
            {"advantages": lambda s: -s.x, "terms": lambda s: -s.x},
        "only the clipped term is used, without the minimum": lambda s: -s.clipped_ratio * s.advantages,
        "the policy term is multiplied by the ratio a second time": lambda s: s.x * s.ratio,
        "dual clip also for positive advantages: a ratio counts at least {c}":
            lambda s: s.x.minimum(-s.c * s.advantages),
    }, is_clip=True),
    *rows("the two bounds are exchanged", "", {
        "epsilon_low and epsilon_high are swapped":
            {"epsilon_low": attrgetter("epsilon_high"), "epsilon_high": attrgetter("epsilon_low")},
    }, is_clip=True, read="epsilon_high"),
    *rows("the update is different", "epsilon_high", {
        "ratios are not clipped above": NEVER,
        "epsilon_high is {c}": "{c}",
        "ratios are clipped to exp(-epsilon_low) and exp(epsilon_high)": {
            "epsilon_low": lambda s: -math.expm1(-s.epsilon_low),
            "epsilon_high": lambda s: math.expm1(s.epsilon_high),
        },
        "the upper bound of the clip is epsilon_high instead of 1 + epsilon_high": lambda s: s.x - 1,
    }, is_clip=True, source="DAPO, clip higher"),
    *rows("ratios have one bound, as in PPO", "epsilon_high", {
        "ratios are clipped with epsilon_low on both sides": attrgetter("epsilon_low"),
    }, is_clip=True, unread="epsilon_high", used_by="MM-EUREKA, lmm-r1, minimind, simple_GRPO and torchtune"),
    *rows("the update is different", "epsilon_low", {
        "ratios are not clipped below": NEVER,
        "epsilon_low is {c}": "{c}",
        "ratios are clipped with epsilon_high on both sides": attrgetter("epsilon_high"),
        "ratios are clipped to at least 1 / (1 + epsilon_high)": lambda s: 1 - 1 / (1 + s.epsilon_high),
    }, is_clip=True, source="DAPO, clip higher"),
    *rows("off-policy updates with negative advantages are too large", "terms", {
        "the maximum of the clipped and the unclipped objective is used for negative advantages":
            lambda s: -s.ratio.clamp(max=1 + s.epsilon_high) * s.advantages,
    }, is_clip=True, source="PPO eq. 7"),
    *rows("tokens that are far off-policy are trained", "delta", {"delta is ignored": None}),
    *general("rewards have the opposite effect, or none", "terms", "the policy term, without the KL,", SIGNED | SCALED),
    # the KL
    *rows("another divergence is penalized", "kl_estimator", {"the KL estimator is k3": "k3"}),
    *rows("without a ratio as weight, the gradient of k1 is 0 on average", "kl_estimator", {
        "the KL estimator is k1": "k1",
        "the KL estimator is k2": "k2",
    }, source="arXiv 2506.09477", used_by="verl: kl_loss_type"),
    *rows("the gradient of the KL is biased off-policy", "use_bias_correction_kl", {
        "the KL is not weighted with the ratio": False,
    }, source="TRL PR 6594", used_by="most projects"),
    *rows("the gradient of the KL is unbiased off-policy", "use_bias_correction_kl", {
        "the KL is weighted with the ratio": True,
    }, source="TRL PR 6594", used_by="DeepSeek-V3.2; TRL: use_bias_correction_kl"),
    *general("the policy is not drawn to the reference, or is even pushed away from it", "KL", "the KL", SIGNED),
    *general("the effective beta changes", "KL", "the KL",
             {"is {c} times as large": lambda s: s.c * s.x} | SCALED | CURVED | BY_TOKEN),
    *rows("the effective beta changes", "beta", {"beta is {c}": "{c}"}),
    *rows("the effective beta changes", "KL", {
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
    }, source="TRL up to 1.9, PR 6594"),
    *rows("the gradient is that of k2, which is unbiased on policy", "kl_estimator", {
        "the KL has the value of k1 and the gradient of k2": "k1+",
        "the KL has the value of k3 and the gradient of k2": "k3+",
    }, used_by="NeMo-RL, which multiplies k3 by the policy over itself"),
    *[
        replace(row, used_by="verl, EasyR1, OpenRLHF, SkyRL, ms-swift, unsloth and slime, with a bound of 10",
                threshold=1.0, is_general=False)
        for row in (
            *general("tokens far from the reference are not drawn back", "KL estimate", "the KL", CLAMPED),
            *general("tokens far from the reference are not drawn back", "KL",
                     "the KL, after it is weighted with the ratio,", CLAMPED),
        )
    ],
    *rows("tokens far from the reference are not drawn back", "reference", {
        "the log-ratio in the KL is clamped to -{c} and {c}":
            lambda s: s.per_token_logps + (s.x - s.per_token_logps).clamp(-s.c, s.c),
        "the log-ratio in the KL is at most {c}":
            lambda s: s.per_token_logps + (s.x - s.per_token_logps).clamp(max=s.c),
    }, used_by="verl and EasyR1, with a bound of 20", threshold=1.0),
    *rows("another divergence is penalized", "KL estimate", {
        "the KL is that of torch's kl_div, pi_ref * log(pi_ref / pi)":
            lambda s: -s.ref_per_token_logps.exp() * s.ref_log_ratio,
        "the KL is pi * log(pi / pi_ref) of the sampled tokens, which are weighted with pi already":
            lambda s: s.per_token_logps.exp() * s.ref_log_ratio,
        "k3 has the wrong sign of its log-ratio": lambda s: s.x - 2 * s.ref_log_ratio,
        "k3 lacks its log-ratio": lambda s: s.x - s.ref_log_ratio,
    }),
    *rows("the KL is rewarded", "KL estimate", {
        "the KL estimator is k1 with the wrong sign": lambda s: -s.ref_log_ratio,
    }, source="rlhf-book: approx_kl1"),
    *rows("another divergence is penalized", "reference", {
        "the reference is the old policy": attrgetter("old_per_token_logps"),
        "policy and reference are swapped in the KL": lambda s: 2 * s.per_token_logps - s.x,
        "the KL is estimated from the sum of a row's log-ratios":
            lambda s: s.per_token_logps + ((s.x - s.per_token_logps) * s.mask).sum(1, keepdim=True),
    }, source="verl"),
    *rows("the policy may leave the reference", "reference", {
        "the reference moves with the policy": lambda s: s.per_token_logps.detach(),
        "the reference is left out, so its log-probabilities are 0": lambda s: 0 * s.x,
    }, kinds="grpo dpo", source="DPO eq. 7"),
    *general("the policy may leave the reference", "reference", "a log-probability of the reference is taken from",
             TOKEN_TAKEN_FROM, kinds="grpo dpo"),
    # DPO and SFT
    *rows("the wrong answers are compared", "index", {
        "the rejected answer is preferred": lambda s: s.x.flip(1),
        "a chosen answer is paired with the rejected answer of the next pair": {"rejected": lambda s: s.x.roll(-1)},
        "a chosen answer is paired with the rejected answer of the previous pair": {"rejected": lambda s: s.x.roll(1)},
    }, kinds="dpo", source="DPO eq. 7"),
    *rows("the wrong tokens are compared", "mask", {
        "both answers have the mask of the chosen answer": partial(of_answer, 0),
        "both answers have the mask of the rejected answer": partial(of_answer, 1),
    }, kinds="dpo", source="DPO eq. 7"),
    *rows("the policy is kept at another distance from the reference", "beta", {
        "beta is applied twice, so it is squared": lambda s: s.x**2,
        "one over beta is used instead of beta": lambda s: 1 / s.x,
        "beta is ignored": 1.0,
        "beta is {c}": "{c}",
        **{f"beta {how}": x for how, x in SCALED.items()},
    }, kinds="dpo", source="DPO eq. 7"),
    *rows("the objective is different", "policy", {
        "log-probabilities are averaged over tokens":
            dict.fromkeys(BOTH, lambda s: s.x / s.mask.sum(1, keepdim=True).clamp(min=1)),
        "only the reference's log-probability is averaged over tokens":
            {"summed reference": lambda s: s.x / s.answer_lengths},
        "only the policy's log-probability is averaged over tokens":
            {"policy": lambda s: s.x / s.mask.sum(1, keepdim=True).clamp(min=1)},
        "beta multiplies only the policy's log-probability": {"reference": lambda s: s.x / s.options["beta"]},
        "the first token of each answer is left out": dict.fromkeys(BOTH, lambda s: s.x * shifted(s.mask, 1)),
        "the last token of each answer is left out": dict.fromkeys(BOTH, lambda s: s.x * shifted(s.mask, -1)),
        "log-probabilities are averaged over all columns, padding included":
            dict.fromkeys(BOTH, lambda s: s.x / s.num_columns),
    }, kinds="dpo", source="DPO eq. 7"),
    *rows("the objective is different", "loss_type", {f"the loss is {name}": [name] for name in DPO_LOSSES},
          kinds="dpo"),
    *general("the objective is different", "log-ratio", "the log ratio of an answer", SIGNED | SCALED | OF_ANSWERS,
             kinds="dpo"),
    *general("pairs are weighted wrongly", "summed reference", "the reference's log-probability", OF_ANSWERS,
             kinds="dpo"),
    *rows("pairs that are far from learned get a small gradient", "pair loss", {
        "the log is missing, so the loss is -sigmoid": lambda s: -s.margins.sigmoid().mean(),
        "the loss is exp(-beta * margin)": lambda s: (-s.margins).exp().mean(),
    }, kinds="dpo", source="DPO eq. 7"),
    *rows("the chosen answer must be better by a margin", "log-ratio", {
        "{c} is subtracted from beta times the margin": lambda s: s.x - s.c / s.beta * CHOSEN,
    }, kinds="dpo", source="arXiv 2402.10571", used_by="ODPO, SimPO"),
    *rows("chosen answers become likelier", "loss_type", {
        "an SFT loss with the weight {c} is added":
            {"loss_type": lambda s: [*s.x, "sft"], "loss_weights": lambda s: [1.0, s.c]},
    }, kinds="dpo", source="arXiv 2404.19733", used_by="TRL: loss_type [sigmoid, sft]"),
    *rows("long answers weigh more", "log-ratio", {
        "the log ratio of an answer is the sum over its tokens instead of their mean":
            lambda s: s.x * s.answer_lengths if {"ipo", "sigmoid_norm"} & {*s.loss_type} else s.x,
    }, kinds="dpo", source="IPO eq. 17", used_by="the authors' code of DPO and OpenRLHF: ipo"),
    *rows("the objective is different", "label_smoothing", {
        "label_smoothing is ignored": 0.0,
        "label_smoothing is {c}": "{c}",
    }, kinds="dpo"),
    *rows("likely tokens are weighted differently", "loss_type", {
        "the loss is nll": "nll",
        "the loss is dft": "dft",
        "the probability that weights a token in dft is not detached":
            {"terms": lambda s: s.per_token_logps * -s.per_token_logps.exp()},
    }, kinds="sft", source="DFT eq. 9"),
    *rows("the model learns the opposite", "factor", {"all values have the wrong sign": -1}, kinds=ALL),
]  # fmt: skip


def possible(case) -> list[Mistake]:
    """List the mistakes that a loss of this kind may have, specific ones first."""
    kind, loss_type = case.options["kind"], case.options["loss_type"]
    clips = loss_type not in ("sapo", "vespo")
    result = [
        replace(row, used_by="") if row.unread in case.read else row
        for row in MISTAKES
        if kind in row.kinds.split() and (clips or not row.is_clip) and (not row.read or row.read in case.read)
    ]
    result.sort(key=lambda row: row.is_general)
    places = {"grpo": PLACES, "dpo": (), "sft": PLACES[1:]}[kind]
    for names in places:
        for row in [row for row in result if not row.is_fitted and "inside" not in row.change]:
            of_mask = "mask" in row.change
            if of_mask or (names is PLACES[0] and "taken from" not in row.says):
                result += [row.inside(name) for name in names]
    return result
