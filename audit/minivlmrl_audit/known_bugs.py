"""Known causes of a wrong training step.

The audit tries single causes first: those of CAUSES in their order, then causes that are limited to one use of a
quantity (SCOPES), then causes with a number {c} that is fitted. Each of them is also tried on only a part of the step
(units.py). Then the audit tries pairs of causes.

A change maps pieces of a stage's definition to their replacements. A replacement is a value, or a function whose
parameters are names of values: x is the original piece, step is the Dump, c is the fitted number, and the other names
come from step_checks.py and optimizer_checks.py.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from minivlmrl_audit.formulas import between, clipped, first, in_half, last, rounded, total_by
from minivlmrl_audit.minivlmrl_api import kept_tokens, kl_term


@dataclass
class Quantity:
    """A quantity of a stage's definition, from which causes are composed, such as "rewards"."""

    name: str
    says: str  # begins the description of each cause, before a term or the name of an operator or unit
    stages: Sequence[str]
    terms: dict[str, Any] = field(default_factory=dict)  # description of a wrong value: replacement
    operators: Sequence[str] = ()  # keys of OPERATORS, whose terms are tried, too
    units: Sequence[
        str
    ] = ()  # attributes of Dump with orders or parts to which a change is limited
    # for units: description, in which {} is the unit, and a function of x and region, or None for a wrong order
    changes: dict[str, Callable | None] = field(default_factory=lambda: {"{}": None})
    also: dict[str, Any] = field(
        default_factory=dict
    )  # changes of other pieces that every cause makes
    needs: str = "input_ids"  # tensor that the step must contain
    source: str = ""  # a line of code, a paper, or an issue or pull request
    costs: str = ""  # the effect of the mistake on training
    about: str = ""  # the feature that a step must contain to reveal the cause


def group(*causes: dict[str, Any], **shared: Any) -> list[dict[str, Any]]:
    """Return causes as arguments of Cause; `shared` holds the fields that they share, unless a cause has its own."""
    return [shared | cause for cause in causes]


def row_means(terms, mask):
    """Average the terms of each row over its tokens."""
    return terms.sum(1) / mask.sum(1).clamp(min=1)


def has_advantage(step):
    """Return a mask (n,) of the rows with an advantage other than 0."""
    return (step["advantages"].view(len(step["input_ids"]), -1) != 0).any(1)


def times(c, x):
    """Multiply by the fitted number."""
    return c * x


# a fitted factor that multiplies all numbers of a stage
FACTOR = {
    "name": "factor {c}", "says": "all values are {c} times as large", "change": {"factor": lambda c: c},
    "costs": "the effective learning rate changes",
}  # fmt: skip

CAUSES = [
    *group(
        {
            "name": "factor -1",
            "says": "all values have the wrong sign",
            "change": {"factor": -1},
            "stages": [
                "advantages",
                "rows",
                "logps",
                "loss",
                "gradients",
                "clip",
                "update",
                "schedule",
            ],
        },
        costs="the model learns the opposite",
    ),
    *group(
        {
            "name": "normalised twice",
            "says": "advantages are normalised a second time, over the batch",
            "change": {"advantages": lambda x: (x - x.mean()) / (x.std() + 1e-4)},
        },
        {
            "name": "normalised twice in groups",
            "says": "advantages are normalised a second time, over their group",
            "change": {
                "advantages": lambda x, step: torch.cat(
                    [
                        (y - y.mean()) / (y.std() + 1e-4)
                        for y in x.split(
                            step["group"].unique_consecutive(return_counts=True)[1].tolist()
                        )
                    ]
                )
            },
        },
        stages=["advantages"],
        source="losses/advantages.py: centred / (std + EPSILON)",
        about="standard deviations, which need groups with different rewards",
    ),
    *group(
        {
            "name": "scaled by none",
            "says": "advantages are not divided by a standard deviation",
            "change": {"scaling rewards": None},
        },
        {
            "name": "scaled by group",
            "says": "advantages are divided by the standard deviation of their group",
            "change": {"scaling rewards": lambda judged: judged},
        },
        {
            "name": "scaled by batch",
            "says": "advantages are divided by the standard deviation of all rewards of the rollout",
            "change": {"scaling rewards": lambda all_judged: all_judged},
        },
        stages=["advantages"],
        source="Dr. GRPO, arXiv 2503.20783",
        costs="hard and easy prompts are weighted differently",
        about="standard deviations, which need groups with different rewards",
    ),
    *group(
        {
            "name": "groups: double",
            "says": "groups contain twice as many completions",
            "change": {"group": lambda index, group_size: index // (2 * group_size)},
        },
        {
            "name": "groups: by text",
            "says": "prompts with the same text but different images form one group",
            "change": {"group": lambda step: step.of_rollout("prompt_text")},
        },
        {
            "name": "groups: halves",
            "says": "groups contain half as many completions",
            "change": {"group": lambda index, group_size: index // (group_size / 2)},
        },
        stages=["advantages"],
        source="R1-V PR 49 and 54",
        costs="rewards of other prompts become the baseline",
        about="groups, which need a rollout with several groups",
    ),
    *group(
        {
            "name": "one reward alone is kept",
            "says": "if only one completion of a group has a reward, its advantage is its reward",
            "change": {
                "mean": lambda x, judged: x if len(judged) > 1 else 0 * x,
                "divisor": lambda x, judged: x if len(judged) > 1 else 1 + 1e-4,
            },
        },
        {
            "name": "statistics over tokens",
            "says": (
                "the mean and standard deviation of a group are computed over tokens, so long completions "
                "count more"
            ),
            "change": {
                "mean": lambda judged, in_group, step: (
                    (judged * (lengths := step.of_rollout("lengths")[in_group])).sum()
                    / lengths.sum()
                ),
                "divisor": lambda judged, in_group, step: (
                    (
                        (
                            of_tokens := judged.repeat_interleave(
                                step.of_rollout("lengths")[in_group].long()
                            )
                        )
                        - of_tokens.mean()
                    )
                    .square()
                    .sum()
                    .div(max(1, len(of_tokens) - 1))
                    .sqrt()
                    + 1e-4
                ),
            },
        },
        {
            "name": "statistics over tokens of the rollout",
            "says": (
                "the mean and standard deviation of the rollout are computed over tokens, so long "
                "completions count more"
            ),
            "change": {
                "mean": lambda x, centre, all_judged, in_rollout, step: (
                    (all_judged * (lengths := step.of_rollout("lengths")[in_rollout])).sum()
                    / lengths.sum()
                    if centre == "batch"
                    else x
                ),
                "divisor": lambda x, centre, all_judged, in_rollout, step: (
                    (
                        (
                            of_tokens := all_judged.repeat_interleave(
                                step.of_rollout("lengths")[in_rollout].long()
                            )
                        )
                        - of_tokens.mean()
                    )
                    .square()
                    .sum()
                    .div(max(1, len(of_tokens) - 1))
                    .sqrt()
                    + 1e-4
                    if centre == "batch"
                    else x
                ),
            },
        },
        {
            "name": "equal rewards merged",
            "says": "the mean and standard deviation of a group count equal rewards only once",
            "change": {"judged": lambda x: x.unique()},
            "costs": "the baseline is different",
        },
        {
            "name": "one missing reward voids its group",
            "says": "one missing reward makes the mean and standard deviation of its whole group NaN",
            "change": {"judged": lambda rewards: rewards},
            "source": "ms-swift 8123",
        },
        {
            "name": "missing is 0",
            "says": "a completion without any reward gets the reward 0",
            "change": {"rewards": lambda x: x.where(~x.isnan().all(1, keepdim=True), 0.0)},
            "source": "TRL up to 1.5",
        },
        {
            "name": "the other aggregation",
            "says": (
                "each reward is normalised before the sum although the sum should be normalised, or the "
                "other way round"
            ),
            "change": {"other aggregation": True},
            "source": "GDPO",
        },
        stages=["advantages"],
        source="losses/advantages.py: combine",
    ),
    *group(
        {
            "name": "advantages negative",
            "says": "advantages have the wrong sign",
            "change": {"advantages": lambda x: -x},
            "costs": "the better completion becomes less likely",
        },
        {
            "name": "advantages zero",
            "says": "advantages are 0",
            "change": {"advantages": lambda x: x * 0},
            "costs": "nothing is learned",
        },
        {
            "name": "rows not shuffled",
            "says": "rows were shuffled, but their advantages were not",
            "change": {"advantages": lambda step, x: step["rollout_advantages"][: len(x)]},
            "stages": ["rows"],
            "costs": "completions are rewarded for other completions",
        },
        stages=["advantages", "rows", "grpo"],
        source="R1-V PR 54, issue 146",
    ),
    *group(
        {
            "name": "truncated counted",
            "says": "truncated completions are in the loss",
            "change": {"drop truncated": False},
        },
        {
            "name": "truncated dropped",
            "says": "truncated completions are not in the loss",
            "change": {"drop truncated": True},
        },
        {
            "name": "as long as allowed is cut",
            "says": "a completion that ends exactly at the maximum length is treated as truncated",
            "change": {"ended": lambda x, sizes, longest: x & (sizes < longest)},
            "about": "",
        },
        {
            "name": "shorter than allowed has ended",
            "says": "only the length decides whether a completion is truncated, even if it has no end token",
            "change": {"ended": lambda sizes, longest: sizes < longest},
            "about": "",
        },
        {
            "name": "ended in any turn",
            "says": "a truncated completion is in the loss if an earlier turn ended with an end token",
            "change": {"ended": lambda end_tokens: end_tokens.any(1, keepdim=True)},
            "about": "",
        },
        stages=["mask"],
        source="TRL mask_truncated_completions; DAPO, overlong filtering",
        about="truncated completions, which need at least one truncated completion",
    ),
    *group(
        {
            "name": "more tokens",
            "says": "a completion is followed by tokens that were never sampled",
            "change": {
                "tokens": lambda their_ids, x, no_token: torch.where(x == no_token, their_ids, x)
            },
        },
        {
            "name": "cut",
            "says": "completions are shorter than what was sampled",
            "change": {
                "tokens": lambda no_token, x, their_ids: torch.where(
                    their_ids == no_token, no_token, x
                )
            },
        },
        stages=["tokens"],
        source="TRL PR 5521",
        costs="tokens that were never sampled are trained, or sampled tokens are not",
    ),
    *group(
        {
            "name": "mask: no token",
            "says": "no token is in the loss",
            "change": {"mask": lambda x: 0 * x},
        },
        {
            "name": "mask: no end",
            "says": "the end token is not trained on",
            "change": {"mask": lambda x, end_tokens: x * (1 - end_tokens)},
            "costs": "the policy never learns to stop",
            "about": "end tokens, which need a completion that was not truncated",
        },
        {
            "name": "mask: no last",
            "says": "the last token is not trained on",
            "change": {"mask": lambda x, next_counts: x * next_counts},
            "costs": "the policy never learns to stop",
        },
        {
            "name": "mask: no first",
            "says": "the first token is not trained on",
            "change": {"mask": lambda x, previous_counts: x * previous_counts},
        },
        {
            "name": "mask: one after",
            "says": "one token after the completion is counted, too",
            "change": {"mask": lambda x, previous_counts: torch.maximum(x, previous_counts)},
            "costs": "padding is trained",
            "about": "padding, which needs completions of different lengths",
        },
        {
            "name": "mask: one before",
            "says": "one token before the completion is counted, too",
            "change": {"mask": lambda x, next_counts: torch.maximum(x, next_counts)},
            "costs": "the prompt is trained",
        },
        {
            "name": "mask: only the first",
            "says": "only the first token is counted",
            "change": {"mask": lambda x: x * (x.cumsum(1) == 1)},
        },
        {
            "name": "mask: padding",
            "says": "padding is counted as part of the completion",
            "change": {"mask": lambda completion: completion},
            "costs": "long and short completions are weighted differently",
            "about": "padding, which needs completions of different lengths",
        },
        {
            "name": "mask: prompt",
            "says": "prompt tokens are counted",
            "change": {"mask": lambda x, prompt: torch.maximum(x, prompt)},
            "costs": "the prompt is trained",
        },
        {
            "name": "mask: everything",
            "says": "every column is counted",
            "change": {"mask": lambda x: torch.ones_like(x)},
            "costs": "long and short completions are weighted differently",
        },
        {
            "name": "mask: first ones",
            "says": "only the first tokens of each completion are counted, the same number for each",
            "change": {"mask": lambda x, theirs: x * (x.cumsum(1) <= theirs.sum(1).max())},
            "stages": ["mask"],
        },
        {
            "name": "mask: last ones",
            "says": "only the last tokens of each completion are counted, the same number for each",
            "change": {
                "mask": lambda x, theirs: x * (x.flip(1).cumsum(1).flip(1) <= theirs.sum(1).max())
            },
            "stages": ["mask"],
        },
        {
            "name": "mask: not the first ones",
            "says": "the first tokens of each completion are not counted, the same number for each",
            "change": {"mask": lambda x, theirs: x * (x.cumsum(1) > (x - theirs).sum(1).max())},
            "stages": ["mask"],
        },
        {
            "name": "mask: not the last ones",
            "says": "the last tokens of each completion are not counted, the same number for each",
            "change": {
                "mask": lambda x, theirs: (
                    x * (x.flip(1).cumsum(1).flip(1) > (x - theirs).sum(1).max())
                )
            },
            "stages": ["mask"],
        },
        {
            "name": "mask: by ids",
            "says": "tokens are not counted because of their ids",
            "change": {
                "mask": lambda x, ids, theirs: (
                    x * ~torch.isin(ids, gone)
                    if 2 * len(gone := ids[x > theirs].unique()) <= (x > theirs).sum()
                    and len(gone) < 3
                    else x
                )
            },
            "stages": ["mask"],
        },
        {
            "name": "mask: between ids",
            "says": "the tokens from one id to another id are not counted, such as a whole tool call",
            "change": {
                "mask": lambda x, ids, theirs: (
                    x
                    * ~between(
                        (ids == ids[first(gone)][0]) & (x > 0),
                        (ids == ids[last(gone)][0]).roll(1, 1),
                    )
                    if first(gone := x > theirs).sum() > 1
                    else x
                )
            },
            "stages": ["mask"],
        },
        {
            "name": "mask: up to an id",
            "says": (
                "the tokens from one id up to, but without, another id are not counted, such as the "
                "arguments of a tool call"
            ),
            "change": {
                "mask": lambda x, ids, theirs: (
                    x
                    * ~between(
                        (ids == ids[first(gone)][0]) & (x > 0),
                        (ids == ids[last(gone).roll(1, 1)][0]) | (x == 0),
                    )
                    if first(gone := x > theirs).sum() > 1
                    else x
                )
            },
            "stages": ["mask"],
        },
        {
            "name": "mask: last ones of the prompt",
            "says": "the last tokens of each prompt are counted, the same number for each",
            "change": {
                "mask": lambda x, prompt, theirs: torch.maximum(
                    x, prompt * (prompt.flip(1).cumsum(1).flip(1) <= (theirs - x).sum(1).max())
                )
            },
            "stages": ["mask"],
        },
        {
            "name": "mask: more after the end",
            "says": "tokens after the end of each completion are counted, the same number for each",
            "change": {
                "mask": lambda x, completion, theirs: torch.maximum(
                    x,
                    completion
                    * (
                        ((last := x.flip(1).cumsum(1).flip(1)) == 0)
                        & ((completion * (last == 0)).cumsum(1) <= (theirs - x).sum(1).max())
                    ),
                )
            },
            "stages": ["mask"],
        },
        {
            "name": "mask: shortest",
            "says": "only columns in which every row has a counted token are counted",
            "change": {"mask": lambda x: x * (x.sum(0) == x.any(1).sum())},
            "costs": "the ends of long completions are not trained",
            "about": "padding, which needs completions of different lengths",
        },
        {
            "name": "mask: only end",
            "says": "only the last token is counted",
            "change": {"mask": lambda x, next_counts: x * (1 - next_counts)},
        },
        stages=["mask", "loss"],
        source="generation/generate.py: a stop token ends a completion",
    ),
    *group(
        {
            "name": "mean of means",
            "says": "each micro-batch is averaged by itself, and then the means are averaged",
            "change": {"mean_over": "micro_batch"},
            "costs": "tokens of short micro-batches have a larger weight",
        },
        {
            "name": "mean of the step",
            "says": "the mean is computed over the step instead of over each micro-batch",
            "change": {"mean_over": "step"},
            "about": "",
        },
        {
            "name": "advantages whitened",
            "says": "advantages are normalised again within each micro-batch",
            "change": {"whitened": lambda x: (x - x.mean()) / (x.std() + 1e-8)},
            "stages": ["grpo"],
            "costs": "the result depends on how the batch is split",
            "about": "",
        },
        stages=["loss"],
        source="losses/grpo.py: LossNormalizer, of the whole optimizer step; arXiv 2604.23747",
        about="averages of micro-batches, which need several micro-batches with different numbers of tokens",
    ),
    *group(
        {
            "name": "tokens that were cut in the mean",
            "says": "the mean also divides by tokens of truncated completions, which are not in the loss",
            "change": {"rollout tokens": lambda step: step.get("rollout_drawn")},
            "source": "TRL PR 6439",
        },
        {
            "name": "luspo over the width",
            "says": "luspo's weighted rows are averaged over all columns, including padding",
            "change": {
                "mask": lambda completion: completion,
                "inside": ["the sum"],
                "mean": lambda step, terms, mask: (
                    (terms * mask.sum(1, keepdim=True)).sum()
                    / terms[:, step.completion.any(0)].numel()
                    / len(step.micro_batches)
                ),
            },
            "source": "TRL PR 6654",
        },
        {
            "name": "divided by the root of the length",
            "says": "the sum of each row is divided by the square root of its length",
            "change": {
                "mask": lambda x: x / x.sum(1, keepdim=True).clamp(min=1).sqrt(),
                "inside": ["the count"],
            },
            "stages": ["loss"],
        },
        {
            "name": "sum of row means",
            "says": "the means of the rows are added within a micro-batch instead of averaged",
            "change": {
                "mean": lambda step, terms, mask: (
                    row_means(terms, mask).sum() / len(step.micro_batches)
                )
            },
            "stages": ["grpo"],
            "source": "verl issue 7200",
            "about": "",
        },
        {
            "name": "sum of row means over the step",
            "says": "the means of the rows are added over the whole step instead of averaged",
            "change": {"mean": lambda terms, mask: row_means(terms, mask).sum()},
            "stages": ["grpo"],
            "source": "verl issue 7200",
            "about": "",
        },
        {
            "name": "mean of rows with an advantage",
            "says": "the mean of the rows is only over those with an advantage other than 0",
            "change": {
                "mean": lambda step, terms, mask: (
                    row_means(terms, mask).sum() / has_advantage(step).sum()
                )
            },
            "stages": ["grpo"],
            "source": "DAPO (arXiv 2503.14476), eq. 11",
            "about": "",
        },
        {
            "name": "tokens of rows with an advantage",
            "says": "the mean divides only by tokens of rows with an advantage other than 0",
            "change": {
                "mask": lambda x, step: x * has_advantage(step)[:, None],
                "inside": ["the count"],
            },
            "stages": ["grpo"],
            "source": "DAPO (arXiv 2503.14476), eq. 11",
            "about": "",
        },
        {
            "name": "dft with gradient",
            "says": "the probability that weights a token in dft is not detached",
            "change": {"terms": lambda per_token_logps: -per_token_logps * per_token_logps.exp()},
            "stages": ["sft"],
            "source": "DFT eq. 9",
        },
        {
            "name": "mean of rows of dft",
            "says": "each row of dft is averaged by itself, and then the means are averaged",
            "change": {"average": "grpo", "loss_type": "dft"},
            "stages": ["sft"],
            "source": "DFT eq. 9",
        },
        {
            "name": "mean of rows",
            "says": "each row is averaged by itself, and then the means are averaged",
            "change": {"average": "grpo", "loss_type": "nll"},
            "stages": ["sft"],
            "source": "losses/grpo.py: LossNormalizer, of the whole optimizer step",
        },
        {
            "name": "divided by one token more",
            "says": "sums are divided by one token too many per row, as if counted before labels are shifted",
            "change": {
                "mask": lambda x, next_counts: torch.maximum(x, next_counts),
                "inside": ["the count"],
            },
            "stages": ["loss"],
            "about": "",
        },
        stages=["grpo"],
        source="losses/grpo.py: AVERAGES",
        costs="long and short completions are weighted differently",
        about="averages, which need completions of different lengths",
    ),
    *group(
        {
            "name": "weight of cispo with gradient",
            "says": "the ratio that weights the log-probabilities is not detached",
            "change": {
                "terms": lambda per_token_logps, advantages, options, log_ratio: (
                    -log_ratio.exp().clamp(max=options.epsilon_high) * advantages * per_token_logps
                )
            },
            "source": "MiniMax-M1 eq. 4",
        },
        {
            "name": "detached ratio",
            "says": "log-probabilities are weighted with a detached ratio, and nothing is clipped",
            "change": {"loss_type": "cispo", "epsilon_high": 1000000000.0},
            "costs": "off-policy updates are too large",
        },
        {
            "name": "no ratio",
            "says": "there is no ratio: log-probabilities are weighted only with advantages (REINFORCE)",
            "change": {
                "loss_type": "cispo",
                "epsilon_high": 1000000000.0,
                "old": lambda detached_logps: detached_logps,
            },
            "costs": "off-policy steps are biased",
        },
        {
            "name": "ratio inverted",
            "says": "the ratio is old / new",
            "change": {
                "policy": lambda per_token_logps, old_per_token_logps: (
                    2 * old_per_token_logps - per_token_logps
                ),
                "reference": lambda ref_per_token_logps, old_per_token_logps, per_token_logps: (
                    ref_per_token_logps + 2 * (old_per_token_logps - per_token_logps)
                ),
            },
            "costs": "good completions become less likely",
            "about": "",
        },
        stages=["grpo"],
        source="losses/grpo.py: importance_ratio (GSPO eq. 7, DeepSeekMath eq. 3)",
        about="ratios, which need a policy that has changed since the rollout",
    ),
    *group(
        {
            "name": "no KL",
            "says": "there is no KL penalty",
            "change": {"KL": lambda x: 0 * x},
            "stages": ["grpo"],
            "costs": "nothing keeps the policy near the reference",
        },
        {
            "name": "KL reversed",
            "says": "policy and reference are swapped in the KL",
            "change": {
                "reference": lambda ref_per_token_logps, per_token_logps: (
                    2 * per_token_logps - ref_per_token_logps
                )
            },
            "stages": ["grpo"],
            "costs": "a different divergence is penalised",
        },
        {
            "name": "KL without gradient",
            "says": "the KL is detached",
            "change": {
                "reference": lambda per_token_logps, ref_per_token_logps: (
                    per_token_logps + (ref_per_token_logps - per_token_logps).detach()
                )
            },
            "stages": ["grpo"],
            "costs": "beta has no effect",
        },
        {
            "name": "KL and its ratio without gradient",
            "says": "the KL is detached, and so is the ratio that weights it",
            "change": {
                "reference": lambda per_token_logps, ref_per_token_logps: (
                    per_token_logps + (ref_per_token_logps - per_token_logps).detach()
                ),
                "kl_straight_through": True,
            },
            "stages": ["grpo"],
            "source": "losses/grpo.py: correct_kl; X-GenGroup/Flow-Factory 122",
            "costs": "beta has no effect",
        },
        {
            "name": "reference carries gradient",
            "says": "the reference is the policy itself",
            "change": {"reference": lambda per_token_logps: per_token_logps},
            "costs": "beta has no effect",
        },
        {
            "name": "reference is the policy",
            "says": "the reference moves with the policy",
            "change": {"reference": lambda detached_logps: detached_logps},
            "costs": "beta has no effect",
        },
        {
            "name": "reference is old",
            "says": "the reference is the old policy",
            "change": {"reference": lambda old_per_token_logps: old_per_token_logps},
            "stages": ["grpo"],
            "costs": "nothing keeps the policy near the reference",
        },
        {
            "name": "no reference",
            "says": "the reference is left out, so its log-probabilities are 0",
            "change": {"reference": lambda ref_per_token_logps: ref_per_token_logps * 0},
            "source": "DPO eq. 7",
            "costs": "the objective is different",
        },
        {
            "name": "policy and reference exchanged",
            "says": "policy and reference are swapped",
            "change": {
                "policy": lambda ref_per_token_logps, per_token_logps, detached_logps: (
                    ref_per_token_logps + (per_token_logps - detached_logps)
                ),
                "reference": lambda detached_logps: detached_logps,
            },
            "source": "DPO eq. 7",
            "costs": "the model learns the opposite preferences",
        },
        {
            "name": "reference exchanged",
            "says": "the chosen answer has the reference of the rejected one",
            "change": {
                "references": lambda mask, x: (
                    mask * ((x * mask).sum(-1, keepdim=True).flip(1) / mask.sum(-1, keepdim=True))
                )
            },
            "stages": ["dpo"],
            "source": "DPO eq. 7",
            "costs": "the objective is different",
        },
        {
            "name": "k3 loses its digits",
            "says": (
                "k3 is computed as exp(d) - d - 1 in float32 instead of expm1(d) - d, so small KLs are "
                "only rounding errors, which may be negative"
            ),
            "change": {
                "KL estimate": lambda x, options, ref_per_token_logps, per_token_logps: (
                    ((d := (ref_per_token_logps - per_token_logps).float()).exp() - d - 1).double()
                    if options.kl_estimator == "k3"
                    else x
                )
            },
            "stages": ["grpo"],
            "source": (
                "https://github.com/google/tunix/issues/2315, "
                "https://github.com/unslothai/unsloth-zoo/pull/1240, https://github.com/natolambert/rlhf-book/issues/525"
            ),
            "costs": "the KL of the log is wrong; its gradient is not",
        },
        {
            "name": "beta twice",
            "says": "the KL is multiplied by beta twice",
            "change": {"KL": lambda x, options: options.beta * x},
            "stages": ["grpo"],
            "costs": "the KL penalty is weaker than configured",
        },
        {
            "name": "KL corrected the other way",
            "says": (
                "the KL is not weighted with the ratio although use_bias_correction_kl is true, or the "
                "other way round"
            ),
            "change": {
                "use_bias_correction_kl": lambda use_bias_correction_kl: not use_bias_correction_kl
            },
            "stages": ["grpo"],
            "source": "losses/grpo.py: correct_kl",
            "costs": "the gradient of the KL is biased",
        },
        {
            "name": "KL times a detached ratio",
            "says": "the ratio that weights the KL is detached",
            "change": {"KL": lambda x, ratio: x / ratio * ratio.detach()},
            "stages": ["grpo"],
            "source": "losses/grpo.py: correct_kl",
        },
        {
            "name": "k2 times the ratio",
            "says": "the KL estimator is k2, and the ratio that weights it is not detached",
            "change": {
                "KL": lambda x, ratio, per_token_logps, ref_per_token_logps: (
                    kl_term(per_token_logps, ref_per_token_logps, "k2") * ratio
                )
            },
            "stages": ["grpo"],
            "source": "losses/grpo.py: correct_kl",
            "costs": "the gradient of the KL is biased",
        },
        {
            "name": "KL times the token's ratio",
            "says": "the KL is weighted with the ratio of its token instead of its sequence",
            "change": {
                "KL": lambda x, ratio, per_token_logps, old_per_token_logps: (
                    x / ratio * (per_token_logps - old_per_token_logps).exp()
                )
            },
            "stages": ["grpo"],
            "source": "TRL PR 6594",
        },
        {
            "name": "KL in the reward",
            "says": "the KL is subtracted from advantages instead of being in the loss",
            "change": {
                "terms": lambda x, options, log_ratio, per_token_logps, ref_per_token_logps: (
                    x
                    + log_ratio.exp()
                    * options.beta
                    * kl_term(per_token_logps, ref_per_token_logps, options.kl_estimator).detach()
                ),
                "KL": lambda x: 0 * x,
            },
            "stages": ["grpo"],
            "source": "docs/notes/bias.md",
        },
        {
            "name": "KL k1 in the reward",
            "says": "the k1 estimate of the KL is subtracted from advantages instead of being in the loss",
            "change": {
                "terms": lambda x, options, log_ratio, per_token_logps, ref_per_token_logps: (
                    x
                    + log_ratio.exp()
                    * options.beta
                    * kl_term(per_token_logps, ref_per_token_logps, "k1").detach()
                ),
                "KL": lambda x: 0 * x,
            },
            "stages": ["grpo"],
            "source": "docs/notes/bias.md",
        },
        stages=["grpo", "dpo"],
        source="losses/grpo.py: kl_term (DeepSeekMath eq. 4)",
        about="KLs, which need beta and a reference",
    ),
    *group(
        {
            "name": "clip on the wrong side",
            "says": "the maximum of the clipped and the unclipped objective is used instead of the minimum",
            "change": {"advantages": lambda x: -x, "terms": lambda x: -x},
            "costs": "only tokens whose ratios have left the range are trained",
        },
        {
            "name": "normalised between both terms",
            "says": "only the clipped term uses advantages that are normalised again",
            "change": {
                "terms": lambda ratio, advantages, options: (
                    -torch.min(
                        ratio * advantages,
                        ratio.clamp(1 - options.epsilon_low, 1 + options.epsilon_high)
                        * (advantages - advantages.mean())
                        / (advantages.std() + 1e-8),
                    )
                )
            },
            "source": "pytorch/rl PR 1033",
        },
        {
            "name": "clamped ratio with gradient",
            "says": "cispo's clamped ratio is the loss term itself, with gradient, instead of a detached weight",
            "change": {
                "terms": lambda advantages, options, log_ratio: (
                    -log_ratio.exp().clamp(max=options.epsilon_high) * advantages
                )
            },
            "source": "MiniMax-M1 eq. 4; open-instruct PR 1269",
        },
        {
            "name": "min of means",
            "says": "the minimum is taken between means over a row instead of for each token",
            "change": {
                "terms": lambda x, ratio, advantages, mask, options: (
                    -torch.min(
                        *(
                            (y * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
                            for y in (
                                ratio * advantages,
                                ratio.clamp(1 - options.epsilon_low, 1 + options.epsilon_high)
                                * advantages,
                            )
                        )
                    )
                    + 0 * x
                )
            },
        },
        {
            "name": "clipped alone",
            "says": "only the clipped term is used, without the minimum",
            "change": {
                "terms": lambda advantages, x, ratio, options: (
                    -ratio.clamp(1 - options.epsilon_low, 1 + options.epsilon_high) * advantages
                    + 0 * x
                )
            },
            "costs": "ratios that have left the range in the wrong direction do not return",
        },
        {
            "name": "no clip",
            "says": "ratios are not clipped",
            "change": {"epsilon_low": 1000000000.0, "epsilon_high": 1000000000.0},
            "costs": "off-policy updates are too large",
        },
        {
            "name": "log of the ratio clipped",
            "says": (
                "the log of the ratio is clipped to -epsilon_low and epsilon_high, instead of the ratio to "
                "1 - epsilon_low and 1 + epsilon_high"
            ),
            "change": {
                "epsilon_low": lambda epsilon_low: 1 - math.exp(-epsilon_low),
                "epsilon_high": lambda epsilon_high: math.exp(epsilon_high) - 1,
            },
        },
        {
            "name": "clip sides exchanged",
            "says": "epsilon_low and epsilon_high are swapped",
            "change": {
                "epsilon_low": lambda epsilon_high: epsilon_high,
                "epsilon_high": lambda epsilon_low: epsilon_low,
            },
            "source": "DAPO, clip higher",
        },
        {
            "name": "dual clip at epsilon_high",
            "says": "ratios greater than 1 + epsilon_high are also clipped where advantages are negative",
            "change": {"delta": lambda epsilon_high: 1 + epsilon_high},
        },
        {
            "name": "no delta",
            "says": "the upper bound delta of the ratio is ignored",
            "change": {"delta": None},
            "source": "INTELLECT-2, arXiv 2505.07291",
        },
        stages=["grpo"],
        source="losses/grpo.py: clipped (PPO eq. 7)",
        about="clipping, which needs a ratio outside of 1 - epsilon_low to 1 + epsilon_high",
    ),
    *group(
        {
            "name": "no correction of the sampler",
            "says": "the sampler's ratio is left out",
            "change": {"correction": lambda x: torch.ones_like(x)},
        },
        {
            "name": "lowest entropies",
            "says": "the tokens with the lowest entropies are kept instead of the highest",
            "change": {
                "kept": lambda mask, quantile, entropies: kept_tokens(-entropies, mask, quantile)
            },
        },
        {
            "name": "off-policy tokens left out",
            "says": "the off-policy mask drops single tokens instead of whole rows",
            "change": {
                "off_policy_mask_threshold": None,
                "terms": lambda x, advantages, old_per_token_logps, per_token_logps, step: (
                    x
                    * ~(
                        (advantages < 0)
                        & (
                            old_per_token_logps - per_token_logps
                            > (step.about["loss"].get("off_policy_mask_threshold") or math.inf)
                        )
                    )
                ),
            },
            "source": "slime PR 1917",
        },
        {
            "name": "sapo temperatures exchanged",
            "says": "the two temperatures of sapo are swapped",
            "change": {
                "sapo_temperature_pos": lambda sapo_temperature_neg: sapo_temperature_neg,
                "sapo_temperature_neg": lambda sapo_temperature_pos: sapo_temperature_pos,
            },
        },
        {
            "name": "vespo for the other sign",
            "says": "k and lambda of vespo for positive and negative advantages are swapped",
            "change": {
                "vespo_k_pos": lambda vespo_k_neg: vespo_k_neg,
                "vespo_k_neg": lambda vespo_k_pos: vespo_k_pos,
                "vespo_lambda_pos": lambda vespo_lambda_neg: vespo_lambda_neg,
                "vespo_lambda_neg": lambda vespo_lambda_pos: vespo_lambda_pos,
            },
        },
        {
            "name": "off-policy rows counted",
            "says": "off_policy_mask_threshold is ignored",
            "change": {"off_policy_mask_threshold": None},
        },
        {
            "name": "quantile by row",
            "says": "the quantile of entropies is computed for each row instead of the micro-batch",
            "change": {
                "kept": lambda quantile, entropies, mask: torch.stack(
                    [kept_tokens(*row, quantile) for row in zip(entropies, mask, strict=True)]
                )
            },
            "source": "arXiv 2506.01939",
        },
        {
            "name": "quantile over padding",
            "says": "the quantile of entropies includes padding",
            "change": {
                "kept": lambda mask, entropies, quantile, completion: (
                    mask * kept_tokens(entropies, completion.double(), quantile)
                )
            },
            "source": "TRL PR 3715; arXiv 2506.01939",
        },
        {
            "name": "all tokens",
            "says": "top_entropy_quantile is ignored",
            "change": {"top_entropy_quantile": 1.0},
            "source": "arXiv 2506.01939",
        },
        stages=["grpo"],
        source="losses/grpo_variants.py",
    ),
    *group(
        {
            "name": "mean log-probabilities",
            "says": "log-probabilities are averaged over tokens",
            "change": {
                "policy": lambda per_token_logps, mask: (
                    per_token_logps / mask.sum(1, keepdim=True).clamp(min=1)
                ),
                "reference": lambda ref_per_token_logps, mask: (
                    ref_per_token_logps / mask.sum(1, keepdim=True).clamp(min=1)
                ),
            },
            "costs": "long and short completions are weighted differently",
        },
        {
            "name": "reverse KL",
            "says": "f_divergence_type is ignored",
            "change": {"f_divergence_type": "reverse_kl"},
            "source": "TRL PR 4171",
        },
        {
            "name": "loss_weights ignored",
            "says": "loss_weights is ignored, so all losses of a sum have weight 1",
            "change": {"loss_weights": None},
        },
        {
            "name": "loss_weights reversed",
            "says": "loss_weights are used in reverse order",
            "change": {"loss_weights": lambda loss_weights: loss_weights and loss_weights[::-1]},
        },
        {
            "name": "use_weighting turned round",
            "says": "use_weighting is ignored, or applied although it is false",
            "change": {"use_weighting": lambda use_weighting: not use_weighting},
        },
        {"name": "no ld_alpha", "says": "ld_alpha is ignored", "change": {"ld_alpha": None}},
        {
            "name": "no label smoothing",
            "says": "label_smoothing is ignored",
            "change": {"label_smoothing": 0.0},
            "source": "losses/preference.py",
        },
        stages=["dpo"],
        source="DPO eq. 7",
    ),
    *group(
        {
            "name": "temperature after the softmax",
            "says": "log-probabilities instead of logits are divided by the temperature",
            "change": {
                "temperature": 1.0,
                "scores": lambda x, step: x / step.about.get("temperature", 1.0),
            },
        },
        stages=["logps"],
        source="TRL PR 3029, 4159",
        costs="on-policy ratios are not 1",
    ),
    *group(
        {
            "name": "picture ignored",
            "says": "the model does not see any image",
            "change": {"blind": lambda number: number >= 0},
            "source": "unsloth PR 11031",
            "costs": "ratio and KL compare two different models",
        },
        {
            "name": "grids transposed",
            "says": "height and width of the image grids are swapped",
            "change": {"grids": lambda x: x[:, [0, 2, 1]]},
        },
        {
            "name": "padding attended",
            "says": "tokens attend to padding, and positions count padding",
            "change": {"attended": lambda x: torch.ones_like(x)},
        },
        {
            "name": "marks padded on the other side",
            "says": (
                "the marks of image tokens are padded on the right although ids are padded on the left, so "
                "positions are wrong"
            ),
            "change": {
                "marks": lambda x, padding: torch.cat([x[padding:], x.new_full((padding,), -1)])
            },
            "source": "TRL 5785",
        },
        {
            "name": "normed twice",
            "says": "the final norm is applied twice",
            "change": {"states": lambda norm, x: norm(x)},
        },
        {
            "name": "windows in every layer",
            "says": "all layers of the vision tower attend within windows",
            "change": {
                "model": lambda x: (
                    setattr(x.visual, "config", replace(x.visual.config, fullatt_block_indexes=()))
                    or x
                )
            },
        },
        {
            "name": "windows in no layer",
            "says": "all layers of the vision tower use full attention instead of windows",
            "change": {
                "model": lambda x: (
                    setattr(
                        x.visual,
                        "config",
                        replace(x.visual.config, fullatt_block_indexes=tuple(range(99))),
                    )
                    or x
                )
            },
        },
        {
            "name": "bfloat16",
            "says": "computed in bfloat16",
            "change": {"dtype": lambda: torch.bfloat16, "mode": in_half},
            "source": "verl, NeMo-RL: sampler and trainer differ",
            "costs": "the ratios are noisy",
        },
        {
            "name": "autocast",
            "says": "computed under autocast in bfloat16",
            "change": {
                "dtype": lambda: torch.float32,
                "autocast": lambda: torch.bfloat16,
                "mode": in_half,
            },
            "source": "verl, NeMo-RL: sampler and trainer differ",
            "costs": "the ratios are noisy",
        },
        {
            "name": "in bfloat16",
            "says": "rounded to bfloat16",
            "change": {"mode": lambda x, theirs: rounded(x, theirs, torch.bfloat16)},
            "source": "verl, NeMo-RL: sampler and trainer differ",
            "costs": "the ratios are noisy",
        },
        {
            "name": "in float16",
            "says": "rounded to float16",
            "change": {"mode": lambda x, theirs: rounded(x, theirs, torch.float16)},
            "source": "verl, NeMo-RL: sampler and trainer differ",
            "costs": "the ratios are noisy",
        },
        {
            "name": "training mode",
            "says": "the reference model is in training mode, so its dropout is active",
            "change": {
                "mode": lambda theirs, x, step: (
                    theirs if "ref_model" in step.about.get("training", ()) else x
                )
            },
            "stages": ["logps of reference"],
            "costs": "the KL is random",
        },
        {
            "name": "weights of the policy",
            "says": "computed with the current weights of the policy",
            "change": {"model folder": lambda x, step: step.about.get("model") or x},
            "stages": ["logps of reference", "logps of sampler"],
            "source": "TRL: a reference whose adapters are not disabled",
            "costs": "the KL is 0, so nothing keeps the policy near the reference",
        },
        {
            "name": "weights of the reference",
            "says": "computed with the weights of the reference model",
            "change": {"model folder": lambda x, step: step.about.get("ref_model") or x},
            "source": "TRL: an adapter that is still disabled",
            "costs": "the ratios compare the policy with the reference",
        },
        stages=["logps"],
        source="transformers PR 40490, TRL 5279",
        costs="training uses a different model than inference",
    ),
    *group(
        {
            "name": "old ones are the present ones",
            "says": (
                "old log-probabilities are computed with the current weights instead of the weights that "
                "sampled the rollout"
            ),
            "change": {"model folder": lambda x, step: step.about.get("model") or x},
        },
        {
            "name": "old ones with dropout",
            "says": "the policy is in training mode, so its dropout is active",
            "change": {
                "mode": lambda theirs, x, step: (
                    theirs if "old_model" in step.about.get("training", ()) else x
                )
            },
            "costs": "the ratios are random",
        },
        stages=["logps of old"],
        source="TRL PR 3725",
        costs="rows that were sampled at an earlier step have a ratio of 1",
    ),
    *group(
        {
            "name": "accumulated in bfloat16",
            "says": "gradients are accumulated in bfloat16",
            "change": {
                "gradients so far": lambda x: {name: g.bfloat16().double() for name, g in x.items()}
            },
        },
        {
            "name": "micro-batches in bfloat16",
            "says": "the gradients of each micro-batch are rounded to bfloat16",
            "change": {
                "gradients of a part": lambda x: {
                    name: g.bfloat16().double() for name, g in x.items()
                }
            },
        },
        {
            "name": "clipped while accumulating",
            "says": "the accumulated gradient is clipped after each micro-batch",
            "change": {
                "gradients so far": lambda x, step: clipped(x, step.optimizer.get("max_grad_norm"))
            },
            "source": "run/loop.py: optimizer_step",
            "costs": "the update has a different direction",
        },
        {
            "name": "clipped before accumulation",
            "says": "the gradient of each micro-batch is clipped by itself",
            "change": {
                "gradients of a part": lambda x, step: clipped(
                    x, step.optimizer.get("max_grad_norm")
                )
            },
            "source": "run/loop.py: optimizer_step",
            "costs": "the update has a different direction",
        },
        stages=["gradients"],
        source="arXiv 2604.23747",
        costs="the effective batch is smaller",
    ),
    *group(
        {
            "name": "gradient of the step before: {c}",
            "says": "gradients of the step before were not cleared ({c} times Adam's first moment is added)",
            "change": {"gradient": lambda x, c, earlier: x + c * earlier},
        },
        stages=["gradients"],
        source="optimizer.zero_grad",
        costs="each step also applies old gradients",
    ),
    *group(
        {
            "name": "no gradient: some parameters",
            "says": "some parameters do not get any gradient",
            "change": {"gradient": lambda x, theirs: x * bool(theirs.any())},
        },
        stages=["gradients"],
        source="requires_grad, or a parameter that no optimizer knows",
        costs="these parameters are not trained",
    ),
    *group(
        {
            "name": "not clipped",
            "says": "gradients are not clipped",
            "change": {"clip": lambda gradients: gradients},
            "costs": "a single bad step can spoil the run",
        },
        {
            "name": "clipped by value",
            "says": "gradients are clipped by value instead of by norm",
            "change": {
                "clip": lambda max_norm, gradients: {
                    name: g.clamp(-max_norm, max_norm) for name, g in gradients.items()
                }
            },
        },
        {
            "name": "each tensor clipped",
            "says": "each parameter is clipped by its own norm",
            "change": {
                "clip": lambda max_norm, gradients: {
                    name: clipped({name: g}, max_norm)[name] for name, g in gradients.items()
                }
            },
        },
        {
            "name": "always scaled",
            "says": "gradients with a norm less than max_grad_norm are scaled up",
            "change": {
                "clip": lambda max_norm, norm, gradients: {
                    name: g * max_norm / (norm + 1e-6) for name, g in gradients.items()
                }
            },
            "costs": "the effective learning rate changes",
            "about": "",
        },
        {
            "name": "norm after clipping",
            "says": "the logged norm is computed after clipping",
            "change": {"norm": lambda norm_after: norm_after},
            "costs": "the log hides large gradients",
        },
        stages=["clip"],
        source="run/loop.py: optimizer_step",
        costs="the update has a different direction",
        about="gradient clipping, which needs a norm greater than max_grad_norm",
    ),
    *group(
        {
            "name": "decay exchanged",
            "says": "weight decay is applied only to the weights that should be excluded from it",
            "change": {"decay": lambda weight_decay, x: weight_decay - x},
        },
        {
            "name": "decay on norms",
            "says": "weight decay is also applied to norms and biases",
            "change": {"decay": lambda weight_decay: weight_decay},
            "costs": "norms shrink over long runs",
        },
        {"name": "no decay", "says": "weight decay is not applied", "change": {"decay": 0.0}},
        {
            "name": "decay without the learning rate",
            "says": "weight decay is not multiplied by the learning rate",
            "change": {"decay": lambda learning_rate, x: x / learning_rate if learning_rate else x},
        },
        {
            "name": "decay not scheduled",
            "says": "weight decay uses the largest learning rate instead of the current one",
            "change": {
                "decay": lambda learning_rate, x, largest_rate: (
                    x * largest_rate / learning_rate if learning_rate else x
                )
            },
        },
        {
            "name": "decay after the move",
            "says": "weight decay is applied after the update instead of before it",
            "change": {
                "weight": lambda x, decay, learning_rate, old: (
                    (x + old * learning_rate * decay) * (1 - learning_rate * decay)
                )
            },
        },
        {
            "name": "L2 instead of decay",
            "says": "weight decay is added to the gradient, as in Adam with L2 regularisation",
            "change": {"coupled": True},
            "costs": "the decay depends on the size of the gradient",
        },
        stages=["update"],
        source="AdamW, arXiv 1711.05101, algorithm 2",
        about="weight decay, which needs weight_decay > 0",
    ),
    *group(
        {
            "name": "state lost",
            "says": "the moments of Adam were reset",
            "change": {"moments": lambda: {}, "first step": 1},
            "costs": "each step is like the first step of Adam",
            "about": "betas and states of Adam, which need a later step than the first",
        },
        {
            "name": "eps before the correction",
            "says": "eps is added before the bias correction, as in TensorFlow's Adam",
            "change": {
                "root": lambda eps, variance, correction: variance.sqrt() + eps / correction**0.5
            },
            "source": "arXiv 1412.6980, section 2: epsilon hat",
            "costs": "none, except where gradients are tiny",
        },
        {
            "name": "epsilon inside",
            "says": "eps is inside the square root",
            "change": {"root": lambda variance, eps: (variance + eps).sqrt()},
        },
        {
            "name": "updated twice",
            "says": "the update is applied twice",
            "change": {"times": 2},
            "costs": "the effective learning rate changes",
        },
        {
            "name": "not clipped",
            "says": "the update uses the gradients before clipping",
            "change": {"gradients": lambda step: step.parameters("grad")},
        },
        {
            "name": "weights in bfloat16",
            "says": "weights are rounded to bfloat16 after the update",
            "change": {"weight": lambda x, theirs: rounded(x, theirs, torch.bfloat16)},
            "source": "NVIDIA-NeMo/Automodel PR 3444",
            "costs": "small updates are lost",
        },
        stages=["update"],
        source="AdamW, arXiv 1711.05101, algorithm 2",
    ),
    *group(
        {"name": "no warmup", "says": "warmup_steps is ignored", "change": {"warmup": 0}},
        stages=["schedule"],
        source="run/optimizer.py: learning_rate",
        costs="the effective learning rate changes",
        about="schedules, which need a step at which the learning rate changes",
    ),
]

# uses of a quantity to which a cause may be limited; `of` names the quantity, otherwise it is any
SCOPES = [
    {"stages": ["advantages"], "uses": ["the reward", "the baseline", "the divisor"]},
    {"stages": ["grpo"], "uses": ["the policy's term", "the KL", "the mean entropy"]},
    {"stages": ["grpo", "sft"], "uses": ["the sum", "the count", "the ratio"], "of": "mask"},
    {"stages": ["dpo"], "uses": ["the policy", "the reference"]},
    {"stages": ["update"], "uses": ["the first moment", "the second moment"]},
]

QUANTITIES = [
    Quantity(
        "mean",
        "",
        stages=["advantages"],
        source="DeepSeekMath eq. 21",
        costs="a different baseline adds variance or bias",
        about="baselines, which need groups with different rewards",
        terms={
            "the baseline is the mean of all rewards of the rollout": lambda all_judged: (
                all_judged.mean()
            ),
            "no baseline is subtracted": lambda x: x * 0,
            "the mean divides by all completions, including those without a reward": lambda rewards, judged: (
                judged.sum() / len(rewards)
            ),
            "the baseline is the mean over the tokens of the group": lambda judged, in_group, step: (
                (judged * (lengths := step.of_rollout("lengths")[in_group])).sum() / lengths.sum()
            ),
            "the baseline is the mean over the turns of the group": lambda judged, in_group, step: (
                (judged * (turns := step.of_rollout("num_turns")[in_group])).sum() / turns.sum()
            ),
            "the baseline is the mean of the nonzero rewards": lambda judged: (
                judged[judged != 0].mean().nan_to_num(0.0)
            ),
            "the baseline is the median of the group": lambda judged: judged.median(),
            "the baseline is the mean of the other completions of the group": lambda rewards, judged: (
                (judged.sum() - rewards) / max(1, len(judged) - 1)
            ),
            "the baseline is the best reward of the group": lambda judged: judged.max(),
            "the baseline is the worst reward of the group": lambda judged: judged.min(),
            "the baseline is the mean of the group's first half": lambda judged: judged[
                : len(judged) // 2
            ].mean(),
            "the baseline is the mean of the group's second half": lambda judged: judged[
                len(judged) // 2 :
            ].mean(),
            "the baseline is the reward of the group's first completion": lambda rewards: rewards[
                0
            ],
        },
    ),
    Quantity(
        "divisor",
        "",
        stages=["advantages"],
        source="losses/advantages.py: centred / (std + EPSILON)",
        costs="hard and easy prompts are weighted differently",
        about="standard deviations, which need groups with different rewards",
        terms={
            "the standard deviation divides by n instead of n - 1": lambda scaling_rewards: (
                scaling_rewards.std(correction=0) + 1e-4
            ),
            (
                "the correction n / (n - 1) of the standard "
                "deviation counts completions without a reward"
            ): lambda rewards, scaling_rewards: (
                (
                    (scaling_rewards - scaling_rewards.mean()).square().mean()
                    * len(rewards)
                    / (len(rewards) - 1)
                ).sqrt()
                + 1e-4
            ),
            (
                "the standard deviation divides by n - 1, where "
                "n counts completions without a reward"
            ): lambda rewards, scaling_rewards: (
                (
                    (scaling_rewards - scaling_rewards.mean()).square().sum() / (len(rewards) - 1)
                ).sqrt()
                + 1e-4
            ),
            "the standard deviation is computed over the other completions of the group": lambda x, scaling_rewards: (
                torch.stack(
                    [
                        torch.cat([scaling_rewards[:i], scaling_rewards[i + 1 :]]).std()
                        for i in range(len(scaling_rewards))
                    ]
                )
                + 1e-4
                if len(scaling_rewards) > 2
                else x
            ),
            "the standard deviation is computed over the tokens of the group": lambda judged, in_group, step: (
                (
                    (
                        judged
                        - (judged * (lengths := step.of_rollout("lengths")[in_group])).sum()
                        / lengths.sum()
                    ).square()
                    * lengths
                )
                .sum()
                .div(lengths.sum())
                .sqrt()
                + 1e-4
            ),
            "epsilon is added to the variance instead of the standard deviation": lambda std: (
                std**2 + 1e-4
            ).sqrt(),
            "rewards are divided by their mean instead of their standard deviation": lambda scaling_rewards: (
                scaling_rewards.mean() + 1e-4
            ),
            "the variance is the mean of squares minus the square of the mean, in float32": lambda scaling_rewards: (
                (
                    (
                        scaling_rewards.float().square().mean()
                        - scaling_rewards.float().mean().square()
                    )
                    * len(scaling_rewards)
                    / (len(scaling_rewards) - 1)
                )
                .clamp(min=0)
                .sqrt()
                .double()
                + 1e-4
            ),
            "the standard error is used instead of the standard deviation": lambda std, scaling_rewards: (
                std / len(scaling_rewards) ** 0.5 + 1e-4
            ),
            "the root mean square is used instead of the standard deviation": lambda scaling_rewards: (
                scaling_rewards.square().mean().sqrt() + 1e-4
            ),
            "the mean absolute deviation is used instead of the standard deviation": lambda scaling_rewards: (
                (scaling_rewards - scaling_rewards.mean()).abs().mean() + 1e-4
            ),
            "rewards are divided by their range instead of the standard deviation": lambda scaling_rewards: (
                scaling_rewards.max() - scaling_rewards.min() + 1e-4
            ),
            (
                "the standard deviation is at least the standard "
                "deviation of all rewards of the rollout"
            ): lambda std, all_judged: torch.maximum(std, all_judged.std()) + 1e-4,
            "rewards are divided by the variance instead of the standard deviation": lambda std: (
                std**2 + 1e-4
            ),
        },
    ),
    Quantity(
        "weights",
        "",
        stages=["advantages"],
        source="losses/advantages.py: combine",
        costs="the wrong completions are rewarded",
        terms={
            "all rewards have weight 1": lambda x: x * 0 + 1,
            "the reward weights are in reverse order": lambda x: x.flip(0),
            "each reward has the weight of the previous reward": lambda x: x.roll(1),
            "each reward has the weight of the next reward": lambda x: x.roll(-1),
            "weights are divided by their number": lambda x: x / len(x),
            "the first reward does not count": lambda x: torch.cat([0 * x[:1], x[1:]]),
            "the last reward does not count": lambda x: torch.cat([x[:-1], 0 * x[-1:]]),
            "only the first reward counts": lambda x: torch.cat([x[:1], 0 * x[1:]]),
            "only the last reward counts": lambda x: torch.cat([0 * x[:-1], x[-1:]]),
        },
    ),
    Quantity(
        "total",
        "",
        stages=["advantages"],
        source="losses/advantages.py: combine",
        costs="the wrong completions are rewarded",
        terms={
            "a completion has no reward if any reward function returned None": lambda weighted: (
                weighted.sum(1)
            ),
            "rewards are averaged over the reward functions that returned a number": lambda weighted: (
                weighted.nanmean(1)
            ),
            "only the largest reward counts": lambda weighted: weighted.nan_to_num(-math.inf).amax(
                1
            ),
            "only the smallest reward counts": lambda weighted: weighted.nan_to_num(math.inf).amin(
                1
            ),
            "rewards are multiplied, not added": lambda weighted: weighted.nan_to_num(1.0).prod(1),
        },
    ),
    Quantity(
        "importance_sampling_level",
        "",
        stages=["grpo"],
        source="losses/grpo.py: importance_ratio (GSPO eq. 7, DeepSeekMath eq. 3)",
        costs="the update is different",
        about="ratios, which need a policy that has changed since the rollout",
        terms={
            "each token has its own ratio": "token",
            "each row has one ratio, the geometric mean of its tokens' ratios": "sequence",
            (
                "each row has one ratio, the product of its tokens' "
                "ratios (the sum of logs instead of the mean)"
            ): "sequence_sum",
            "each row has one ratio, but each token has its own gradient (GSPO-token)": "sequence_token",
        },
    ),
    Quantity(
        "kl_estimator",
        "",
        stages=["grpo"],
        source="losses/grpo.py: kl_term, its table",
        costs="a different divergence is penalised",
        about="KLs, which need beta and a reference",
        terms={
            "the KL estimator is k1": "k1",
            "the KL estimator is k2": "k2",
            "the KL estimator is k3": "k3",
        },
    ),
    Quantity(
        "loss_type",
        "",
        stages=["grpo"],
        source="losses/grpo.py: TERMS",
        costs="the update is different",
        terms={
            "the policy term of grpo is used": "grpo",
            "the policy term of cispo is used": "cispo",
            "the policy term of sapo is used": "sapo",
            "the policy term of vespo is used": "vespo",
        },
    ),
    Quantity(
        "loss_type",
        "",
        stages=["sft"],
        source="DFT eq. 9",
        terms={"the loss is nll": "nll", "the loss is dft": "dft"},
    ),
    Quantity(
        "type",
        "",
        stages=["schedule"],
        source="run/optimizer.py: learning_rate",
        costs="the effective learning rate changes",
        about="schedules, which need a step at which the learning rate changes",
        terms={
            "the schedule is linear": "linear",
            "the schedule is cosine": "cosine",
            "the schedule is constant": "constant",
        },
    ),
    Quantity(
        "micro-batch",
        "",
        stages=["gradients"],
        source="arXiv 2604.23747",
        costs="the effective batch is smaller",
        terms={
            "gradients of earlier micro-batches are dropped": lambda last: last,
            "gradients of later micro-batches are dropped": lambda first: first,
            "gradients of micro-batches are weighted with their numbers of tokens": lambda tokens, x: (
                tokens * len(x) / tokens.sum()
            ),
            "gradients of micro-batches are divided by their numbers of tokens": lambda tokens: (
                tokens.mean() / tokens
            ),
            "the gradient of the first micro-batch is left out": lambda x, first: x - first,
            "the gradient of the last micro-batch is left out": lambda x, last: x - last,
            "the gradient of the first micro-batch is halved": lambda x, first: x - first / 2,
            "the gradient of the last micro-batch is halved": lambda x, last: x - last / 2,
            "the gradient of the first micro-batch is added twice": lambda x, first: x + first,
            "the gradient of the last micro-batch is added twice": lambda x, last: x + last,
        },
    ),
    Quantity(
        "index",
        "",
        stages=["dpo"],
        source="DPO eq. 7",
        costs="answers to different prompts are compared",
        terms={
            "the rejected answer is preferred": lambda x: x.flip(1),
            "a chosen answer is compared with the rejected answer of the next pair": lambda x: (
                torch.stack([x[:, 0], x[:, 1].roll(-1)], 1)
            ),
            "a chosen answer is compared with the rejected answer of the previous pair": lambda x: (
                torch.stack([x[:, 0], x[:, 1].roll(1)], 1)
            ),
            "a chosen answer is compared with the rejected answer of a pair in reverse order": lambda x: (
                torch.stack([x[:, 0], x[:, 1].flip(0)], 1)
            ),
            "a chosen answer is compared with the rejected answer of the first pair": lambda x: (
                torch.stack([x[:, 0], x[:1, 1].expand(len(x))], 1)
            ),
        },
    ),
    Quantity(
        "positions",
        "",
        stages=["logps"],
        source="transformers PR 40490, TRL 5279, mlx-vlm 1527, https://github.com/InternLM/xtuner/pull/2097",
        costs="training uses a different model than inference",
        terms={
            "positions are 1-D, without M-RoPE": lambda indices: indices,
            "each token has the position of the previous token": lambda x: x.roll(1, 1),
            "each token has the position of the next token": lambda x: x.roll(-1, 1),
            "height and width are swapped in the positions": lambda x: x[[0, 2, 1]],
            "positions of the completion are one too large": lambda x, completion: x + completion,
            "positions of the completion are one too small": lambda x, completion: x - completion,
            (
                "positions of the completion count tokens instead of "
                "continuing from the largest position of the image"
            ): lambda indices, x, completion: torch.where(completion > 0, indices, x),
            (
                "positions of the completion continue from the largest position of "
                "each axis instead of the largest position of all axes"
            ): lambda prompt_length, x, completion, indices: (
                torch.where(
                    completion > 0,
                    x[:, :prompt_length].amax(1, keepdim=True) + 1 + indices - prompt_length,
                    x,
                )
                if prompt_length
                else x
            ),
            "positions of the completion start at 0": lambda x, completion, indices, prompt_length: (
                torch.where(completion > 0, indices - prompt_length, x)
            ),
        },
    ),
    Quantity(
        "pixels",
        "",
        stages=["logps"],
        source="data/image.py",
        costs="training uses a different model than inference",
        terms={
            "images are BGR instead of RGB": lambda x: x.view(len(x), 3, -1).flip(1).flatten(1),
            "pixels are normalised twice": lambda x: (
                (x.view(len(x), 3, -1) - torch.tensor([0.48145466, 0.4578275, 0.40821073])[:, None])
                / torch.tensor([0.26862954, 0.26130258, 0.27577711])[:, None]
            ).flatten(1),
            "pixels are scaled to 0 to 1 but not normalised with mean and standard deviation": lambda x: (
                (
                    x.view(len(x), 3, -1)
                    * torch.tensor([0.26862954, 0.26130258, 0.27577711])[:, None]
                    + torch.tensor([0.48145466, 0.4578275, 0.40821073])[:, None]
                ).flatten(1)
            ),
            "pixels are divided by 255 twice": lambda x: (
                (
                    (
                        (
                            x.view(len(x), 3, -1)
                            * (std := torch.tensor([0.26862954, 0.26130258, 0.27577711])[:, None])
                            + (mean := torch.tensor([0.48145466, 0.4578275, 0.40821073])[:, None])
                        )
                        / 255
                    )
                    - mean
                )
                / std
            ).flatten(1),
            "pixels are normalised with the mean and standard deviation of ImageNet": lambda x: (
                (
                    x.view(len(x), 3, -1)
                    * torch.tensor([0.26862954, 0.26130258, 0.27577711])[:, None]
                    + torch.tensor([0.48145466, 0.4578275, 0.40821073])[:, None]
                    - torch.tensor([0.485, 0.456, 0.406])[:, None]
                )
                / torch.tensor([0.229, 0.224, 0.225])[:, None]
            ).flatten(1),
            "pixels are normalised with mean 0.5 and standard deviation 0.5": lambda x: (
                (
                    x.view(len(x), 3, -1)
                    * torch.tensor([0.26862954, 0.26130258, 0.27577711])[:, None]
                    + torch.tensor([0.48145466, 0.4578275, 0.40821073])[:, None]
                )
                * 2
                - 1
            ).flatten(1),
            "patches are ordered row by row instead of by merged squares": lambda x, grid: (
                x.view(int(grid[0]), int(grid[1]) // 2, int(grid[2]) // 2, 2, 2, -1)
                .permute(0, 1, 3, 2, 4, 5)
                .flatten(0, 4)
            ),
            "patches are reordered by merged squares twice": lambda x, grid: (
                x.view(int(grid[0]), int(grid[1]) // 2, 2, int(grid[2]) // 2, 2, -1)
                .permute(0, 1, 3, 2, 4, 5)
                .flatten(0, 4)
            ),
            "the patches of each image are in the opposite order": lambda x: x.flip(0),
            "each patch has the pixels of the next patch": lambda x: x.roll(-1, 0),
            "each patch has the pixels of the previous patch": lambda x: x.roll(1, 0),
            "the first two patches are exchanged": lambda x: torch.cat([x[1:2], x[:1], x[2:]]),
            "rows and columns of patches are exchanged": lambda x, grid: (
                x.view(int(grid[0]), int(grid[1]) // 2, int(grid[2]) // 2, 2, 2, -1)
                .permute(0, 2, 1, 4, 3, 5)
                .flatten(0, 4)
            ),
            "images are upside down": lambda x, grid: (
                x.view(int(grid[0]), int(grid[1]) // 2, int(grid[2]) // 2, 2, 2, 3, 2, 14, 14)
                .flip(1, 3, 7)
                .view(len(x), -1)
            ),
            "images are mirrored": lambda x, grid: (
                x.view(int(grid[0]), int(grid[1]) // 2, int(grid[2]) // 2, 2, 2, 3, 2, 14, 14)
                .flip(2, 4, 8)
                .view(len(x), -1)
            ),
            "height and width are swapped within each patch": lambda x: (
                x.view(len(x), 3, 2, 14, 14).transpose(3, 4).flatten(1)
            ),
            "all images are uniformly grey": lambda x: x * 0,
        },
    ),
    Quantity(
        "epsilon_high",
        "",
        stages=["grpo"],
        source="losses/grpo.py: clipped (PPO eq. 7)",
        costs="the update is different",
        about="clipping, which needs a ratio outside of 1 - epsilon_low to 1 + epsilon_high",
        terms={
            "ratios are not clipped above": 1000000000.0,
            "ratios are clipped with epsilon_low on both sides": lambda epsilon_low: epsilon_low,
        },
    ),
    Quantity(
        "epsilon_low",
        "",
        stages=["grpo"],
        source="losses/grpo.py: clipped (PPO eq. 7)",
        costs="the update is different",
        about="clipping, which needs a ratio outside of 1 - epsilon_low to 1 + epsilon_high",
        terms={
            "ratios are not clipped below": 1000000000.0,
            "ratios are clipped with epsilon_high on both sides": lambda epsilon_high: epsilon_high,
            "the lower clip of the ratio is 1 / (1 + epsilon_high) instead of 1 - epsilon_low": lambda epsilon_high: (
                1 - 1 / (1 + epsilon_high)
            ),
        },
    ),
    Quantity(
        "correction",
        "",
        stages=["update"],
        source="AdamW, arXiv 1711.05101, algorithm 2",
        costs="the first steps are too large",
        terms={
            "the moments have no bias correction": lambda: (1, 1),
            "the first moment has no bias correction": lambda x: (1, x[1]),
            "the second moment has no bias correction": lambda x: (x[0], 1),
        },
    ),
    Quantity(
        "first step",
        "",
        stages=["update"],
        source="AdamW, arXiv 1711.05101, algorithm 2",
        costs="the first steps are too large",
        about="betas and states of Adam, which need a later step than the first",
        terms={
            "the bias correction starts again at step 1": 1,
            "the bias correction is one step behind": lambda x: max(1, x - 1),
            "the bias correction is one step ahead": lambda x: x + 1,
        },
    ),
    Quantity(
        "move",
        "",
        stages=["update"],
        source="AdamW, arXiv 1711.05101, algorithm 2",
        costs="the effective learning rate changes",
        terms={
            "the update is the gradient itself, as in SGD": lambda gradient: gradient,
            "the update is the sign of the gradient": lambda gradient: gradient.sign(),
        },
    ),
    Quantity(
        "step",
        "",
        stages=["schedule"],
        source="run/optimizer.py: learning_rate; accelerate: step_with_optimizer, split_batches",
        costs="the schedule ends too early or too late",
        about="schedules, which need a step at which the learning rate changes",
        terms={
            "the learning rate is one step behind": lambda x: x - 1,
            "the learning rate is one step ahead": lambda x: x + 1,
            "the schedule counts micro-batches": lambda x, step: x * len(step.micro_batches),
            "the schedule advances twice per step": lambda x: 2 * x,
        },
    ),
    Quantity(
        "progress",
        "",
        stages=["schedule"],
        source="run/optimizer.py: learning_rate",
        costs="the effective learning rate changes",
        terms={
            "the learning rate decays from step 0 instead of from the end of the warmup": lambda t, max_steps: (
                t / max_steps
            ),
            "the learning rate decay ends one step early": lambda t, warmup, max_steps: (
                (t - warmup) / max(1, max_steps - warmup - 1)
            ),
        },
    ),
    Quantity(
        "old",
        "",
        stages=["grpo"],
        source="losses/grpo.py: importance_ratio (GSPO eq. 7, DeepSeekMath eq. 3); mlx-lm-lora 55",
        costs="the update is different",
        about="ratios, which need a policy that has changed since the rollout",
        terms={
            "the ratio is 1 because old log-probabilities equal the current ones": lambda detached_logps: (
                detached_logps
            ),
            "old log-probabilities are not detached": lambda per_token_logps: per_token_logps,
            "the ratio is detached": lambda per_token_logps, old_per_token_logps: (
                per_token_logps - (per_token_logps - old_per_token_logps).detach()
            ),
            "the ratio compares the policy with the reference": lambda ref_per_token_logps: (
                ref_per_token_logps
            ),
            (
                "the sequence's ratio divides by the padded length"
            ): lambda per_token_logps, old_per_token_logps, mask, step: (
                per_token_logps
                - (per_token_logps - old_per_token_logps)
                * mask.sum(1, keepdim=True)
                / step.completion.sum(1, keepdim=True).clamp(min=1)
            ),
        },
    ),
    Quantity(
        "temperature",
        "",
        stages=["logps"],
        source="TRL PR 3029, 4159",
        costs="on-policy ratios are not 1",
        terms={
            "logits are not divided by the temperature": 1.0,
            "logits are divided twice by the temperature": lambda x: x**2,
            "logits are multiplied by the temperature": lambda x: 1 / x,
        },
    ),
    Quantity(
        "rewards",
        "a reward",
        needs="group",
        stages=["advantages"],
        source="losses/advantages.py",
        costs="the wrong completions are rewarded",
        operators=["times", "linear", "rounded", "curved", "bounded"],
    ),
    Quantity(
        "total",
        "the weighted sum of rewards",
        needs="group",
        stages=["advantages"],
        source="losses/advantages.py",
        costs="the wrong completions are rewarded",
        operators=["times", "rounded", "curved", "bounded"],
    ),
    Quantity(
        "baseline",
        "the baseline",
        needs="group",
        stages=["advantages"],
        source="DeepSeekMath eq. 21",
        costs="a different baseline adds variance or bias",
        operators=["linear", "rounded", "curved", "bounded"],
    ),
    Quantity(
        "deviation",
        "the divisor of advantages",
        needs="group",
        stages=["advantages"],
        source="losses/advantages.py: centred / (std + EPSILON)",
        costs="hard and easy prompts are weighted differently",
        operators=["rounded", "curved", "bounded"],
    ),
    Quantity(
        "advantages",
        "an advantage",
        stages=["advantages", "rows", "grpo"],
        source="R1-V PR 54, issue 146",
        costs="the wrong completions are rewarded",
        operators=["rounded", "curved", "bounded"],
    ),
    Quantity(
        "log-ratio",
        "the log of the ratio",
        needs="old_per_token_logps",
        stages=["grpo"],
        source="losses/grpo.py: importance_ratio (GSPO eq. 7, DeepSeekMath eq. 3)",
        costs="the update is different",
        operators=["linear", "rounded", "curved", "bounded", "by token", "ratios"],
    ),
    Quantity(
        "KL estimate",
        "the KL before it is weighted with the ratio",
        needs="ref_per_token_logps",
        stages=["grpo"],
        source="losses/grpo.py: kl_term (DeepSeekMath eq. 4)",
        costs="the effective beta changes",
        operators=["rounded", "curved", "bounded"],
    ),
    Quantity(
        "KL",
        "the KL",
        needs="ref_per_token_logps",
        stages=["grpo"],
        source="losses/grpo.py: kl_term (DeepSeekMath eq. 4)",
        costs="the effective beta changes",
        about="KLs, which need beta and a reference",
        operators=["times", "linear", "rounded", "curved", "bounded", "by token"],
    ),
    Quantity(
        "terms",
        "the policy term, without KL and entropy,",
        stages=["grpo"],
        source="losses/grpo.py: clipped (PPO eq. 7)",
        costs="the update is different",
        operators=["rounded", "curved", "bounded", "by token"],
    ),
    Quantity(
        "terms",
        "the policy term, without KL and entropy,",
        needs="ref_per_token_logps",
        stages=["grpo"],
        source="losses/grpo.py: clipped (PPO eq. 7)",
        costs="the effective beta changes",
        operators=["linear"],
    ),
    Quantity(
        "entropies",
        "the entropy of a token is minus the log-probability of",
        needs="entropies",
        stages=["grpo"],
        source="compose-rl PR 85",
        costs="the entropy estimate has more variance and a different gradient",
        terms={"the sampled token": lambda per_token_logps: -per_token_logps},
    ),
    Quantity(
        "entropies",
        "the entropy of a token",
        needs="entropies",
        stages=["grpo"],
        source="losses/grpo_variants.py",
        costs="the policy collapses early or becomes too random",
        operators=["times", "linear", "rounded", "curved", "bounded", "by token"],
    ),
    Quantity(
        "correction",
        "the sampler's ratio",
        needs="importance_sampling_ratio",
        stages=["grpo"],
        source="losses/grpo_variants.py",
        costs="the weights are random",
        operators=["times", "linear", "rounded", "curved", "bounded"],
    ),
    Quantity(
        "log-ratio",
        "the log ratio of an answer",
        stages=["dpo"],
        source="DPO eq. 7",
        costs="the objective is different",
        operators=["linear", "rounded", "curved", "bounded", "of answers"],
    ),
    Quantity(
        "policy",
        "the policy's log-probability",
        stages=["dpo"],
        source="DPO eq. 7",
        costs="the objective is different",
        operators=["linear", "rounded", "curved", "bounded"],
    ),
    Quantity(
        "reference",
        "the reference's log-probability",
        stages=["grpo", "dpo"],
        needs="ref_per_token_logps",
        source="DPO eq. 7, DeepSeekMath eq. 4",
        costs="the objective is different",
        operators=["linear", "rounded", "curved", "bounded"],
    ),
    Quantity(
        "logits",
        "the softmax uses only the most likely tokens; their number is",
        stages=["logps"],
        source="huggingface/trl 6789",
        costs="on-policy ratios are not 1",
        terms={
            "{c}": lambda x, c: x.masked_fill(
                x < x.topk(min(max(1, int(c)), x.shape[-1])).values[:, -1:], -math.inf
            )
        },
    ),
    Quantity(
        "attended",
        "the model does not see the first tokens of each row; their number is",
        stages=["logps"],
        source="max_prompt_length",
        costs="training uses a different prompt than inference",
        terms={"{c}": lambda x, c: x & (x.cumsum(0) > c)},
    ),
    Quantity(
        "positions",
        "positions of the completion are",
        stages=["logps"],
        source="transformers: rope_deltas",
        costs="training uses a different model than inference",
        terms={
            "{c} too large": lambda x, completion, c: x + round(c) * completion,
            "{c} too small": lambda x, completion, c: x - round(c) * completion,
        },
    ),
    Quantity(
        "model",
        "the decoder",
        stages=["logps"],
        source="transformers 25681, DeepSpeed PR 8345, mlx-vlm PR 576",
        costs="training uses a different model than inference",
        terms={
            "uses rotary embeddings whose sines are in bfloat16": lambda x: (
                [
                    layer.register_forward_pre_hook(
                        lambda _, given: (
                            given[0],
                            *(y.bfloat16().to(y) for y in given[1:3]),
                            *given[3:],
                        )
                    )
                    for layer in x.model.layers
                ]
                and x
            ),
            "has the default rope_theta, 10000": lambda x: (
                setattr(x.model, "config", replace(x.model.config, rope_theta=10000.0)) or x
            ),
            "has rope_theta 1000000": lambda x: (
                setattr(x.model, "config", replace(x.model.config, rope_theta=1000000.0)) or x
            ),
            "interleaves the axes of M-RoPE, or does not although it should": lambda x: (
                setattr(
                    x.model,
                    "config",
                    replace(x.model.config, mrope_interleaved=not x.model.config.mrope_interleaved),
                )
                or x
            ),
            "uses the sections of M-RoPE in reverse order": lambda x: (
                setattr(
                    x.model,
                    "config",
                    replace(x.model.config, mrope_section=x.model.config.mrope_section[::-1]),
                )
                or x
            ),
            "has norms with eps 1e-5": lambda x: (
                [setattr(norm, "eps", 1e-5) for norm in x.modules() if hasattr(norm, "eps")] and x
            ),
            "skips the final norm": lambda x: setattr(x.model, "norm", torch.nn.Identity()) or x,
            "skips the last layer": lambda x: setattr(x.model, "layers", x.model.layers[:-1]) or x,
            "uses the embeddings as the output head": lambda x: (
                setattr(x.lm_head, "weight", x.model.embed_tokens.weight) or x
            ),
        },
    ),
    Quantity(
        "labels",
        "",
        stages=["logps"],
        source="TRL PR 3200",
        costs="tokens are trained with the probabilities of other tokens",
        terms={
            "the end token is scored as the padding token": lambda x, stop, pad: torch.where(
                stop, pad, x
            ),
            "each token is scored as the next token": lambda x: x.roll(-1),
            "each token is scored as the previous token": lambda x: x.roll(1),
        },
    ),
    Quantity(
        "logits",
        "the output head is computed in",
        stages=["logps"],
        source="torchtitan PR 3667, TRL PR 4303",
        costs="on-policy ratios are not 1",
        terms={
            "bfloat16": lambda states, head: torch.nn.functional.linear(
                states.bfloat16(), head.weight.bfloat16()
            ).double(),
            "float16": lambda states, head: torch.nn.functional.linear(
                states.half(), head.weight.half()
            ).double(),
        },
    ),
    Quantity(
        "vision index",
        "features of images are inserted",
        stages=["logps"],
        source="model/packing.py",
        costs="the model is trained on answers to other images",
        terms={
            "one place later": lambda x: x.roll(-1),
            "one place earlier": lambda x: x.roll(1),
            "in reverse": lambda x: x.flip(0),
        },
    ),
    Quantity(
        "logits",
        "a logit",
        stages=["logps"],
        source="model/logprobs.py",
        costs="on-policy ratios are not 1",
        operators=["rounded"],
    ),
    Quantity(
        "total",
        "each token of a completion reduces its reward by",
        needs="row",
        stages=["advantages"],
        source="DAPO, arXiv 2503.14476, overlong",
        costs="short completions are preferred",
        terms={"{c}": lambda x, c, step: x - c * step.of_rollout("lengths")},
    ),
    Quantity(
        "total",
        "a completion's summed KL to the reference is subtracted from its reward, multiplied by",
        needs="ref_per_token_logps",
        stages=["advantages"],
        source="docs/notes/bias.md",
        costs="the effective beta changes",
        terms={"{c}": lambda x, c, step: x - c * step.of_rollout("row_kl")},
    ),
    Quantity(
        "total",
        "a completion's summed entropy is added to its reward, multiplied by",
        needs="entropies",
        stages=["advantages"],
        source="losses/advantages.py",
        costs="the policy collapses early or becomes too random",
        terms={"{c}": lambda x, c, step: x + c * step.of_rollout("row_entropies")},
    ),
    Quantity(
        "total",
        "a completion's reward",
        needs="row",
        stages=["advantages"],
        source="losses/advantages.py",
        costs="short completions are preferred",
        terms={
            "is divided by its length": lambda x, step: x / step.of_rollout("lengths"),
            "is multiplied by its length": lambda x, step: x * step.of_rollout("lengths"),
        },
    ),
    Quantity(
        "weights",
        "a token's weight is multiplied, for each token that follows it, by",
        stages=["grpo", "sft"],
        source="losses/grpo_variants.py",
        costs="the first tokens are trained less",
        terms={"{c}": lambda c, mask: c ** ((mask.flip(1).cumsum(1).flip(1) - 1).clamp(min=0))},
    ),
    Quantity(
        "weights",
        "a token's weight is multiplied, for each token before it, by",
        stages=["grpo", "sft"],
        source="losses/grpo_variants.py",
        costs="the last tokens are trained less",
        terms={"{c}": lambda c, mask: c ** ((mask.cumsum(1) - 1).clamp(min=0))},
    ),
    Quantity(
        "terms",
        "the policy term is multiplied by",
        stages=["grpo"],
        source="losses/grpo_variants.py",
        costs="likely tokens are trained more",
        terms={
            "the token's probability": lambda x, per_token_logps: (
                x * per_token_logps.detach().exp()
            ),
            "the probability, with its gradient": lambda x, per_token_logps: (
                x * per_token_logps.exp()
            ),
            "the old probability": lambda x, old_per_token_logps: x * old_per_token_logps.exp(),
            "the detached ratio": lambda x, per_token_logps, old_per_token_logps: (
                x * (per_token_logps - old_per_token_logps).exp().detach()
            ),
        },
    ),
    Quantity(
        "max_steps",
        "the number of steps after which the schedule ends is",
        stages=["schedule"],
        source="run/optimizer.py: learning_rate",
        costs="the schedule ends too early or too late",
        terms={"{c}": lambda c: c},
    ),
    Quantity(
        "rate",
        "the learning rate ends at",
        stages=["schedule"],
        source="run/optimizer.py: learning_rate",
        costs="the effective learning rate changes",
        terms={"{c} times the largest rate": lambda c, x: c + (1 - c) * x},
    ),
    Quantity(
        "warmup",
        "the number of warmup steps is",
        stages=["schedule"],
        source="run/optimizer.py: learning_rate",
        costs="the effective learning rate changes",
        terms={"{c}": lambda c: c},
    ),
    Quantity(
        "step",
        "the step number of the schedule is",
        stages=["schedule"],
        source="run/optimizer.py: learning_rate",
        costs="the effective learning rate changes",
        terms={"{c} times as large": times, "{c} too small": lambda x, c: x - c},
    ),
    Quantity(
        "rate",
        "the learning rate",
        stages=["schedule"],
        source="run/optimizer.py: learning_rate",
        costs="the effective learning rate changes",
        terms={
            "is at least {c} times the largest rate": lambda x, c: max(x, c),
            "is too large by {c} times the largest rate": lambda x, c: x + c,
        },
    ),
    Quantity(
        "logps",
        "a log-probability",
        stages=["logps", "sft"],
        source="model/logprobs.py",
        costs="tokens are not trained",
        operators=["rounded", "curved", "bounded"],
    ),
    Quantity(
        "gradient",
        "the gradient of a parameter",
        stages=["gradients"],
        source="run/loop.py: optimizer_step",
        costs="the update has a different direction",
        operators=["rounded", "curved", "bounded"],
    ),
    Quantity(
        "slope",
        "the gradient of a parameter",
        stages=["update"],
        source="AdamW, arXiv 1711.05101, algorithm 2",
        costs="the update has a different direction",
        operators=["times", "linear", "rounded", "curved", "bounded"],
    ),
    Quantity(
        "moment",
        "a moment of Adam, after its update,",
        stages=["update"],
        source="AdamW, arXiv 1711.05101, algorithm 2",
        costs="small updates are lost",
        operators=["rounded"],
    ),
    Quantity(
        "move",
        "Adam's update before it is multiplied by the learning rate",
        stages=["update"],
        source="AdamW, arXiv 1711.05101, algorithm 2",
        costs="the update has a different direction",
        operators=["rounded", "curved", "bounded"],
    ),
    Quantity(
        "divisor",
        "the number that is added to the standard deviation instead of 1e-4 is",
        stages=["advantages"],
        source="losses/advantages.py: centred / (std + EPSILON)",
        costs="none, except for groups with nearly equal rewards",
        about="standard deviations, which need groups with different rewards",
        terms={"0": lambda std: std, "{c}": lambda std, c: std + c},
    ),
    Quantity("beta", "beta is", stages=["dpo"], source="DPO eq. 7", terms={"{c}": lambda c: c}),
    Quantity(
        "loss_type",
        "the loss is",
        stages=["dpo"],
        source="losses/preference.py",
        costs="the objective is different",
        terms={
            "sigmoid": ["sigmoid"],
            "hinge": ["hinge"],
            "ipo": ["ipo"],
            "robust": ["robust"],
            "nca_pair": ["nca_pair"],
            "bco_pair": ["bco_pair"],
            "apo_zero": ["apo_zero"],
            "apo_down": ["apo_down"],
            "sigmoid_norm": ["sigmoid_norm"],
        },
    ),
    Quantity(
        "total norm",
        "the norm of all gradients is",
        stages=["clip"],
        source="run/loop.py: optimizer_step; fastmoe PR 65",
        costs="the update has a different direction",
        terms={
            "the sum of the parameters' norms": lambda normed: sum(
                g.norm() for g in normed.values()
            ),
            "the largest of the parameters' norms": lambda normed: max(
                g.norm() for g in normed.values()
            ),
            "the mean of the parameters' norms": lambda normed: (
                sum(g.norm() for g in normed.values()) / len(normed)
            ),
            "the sum of the absolute values of all entries": lambda normed: sum(
                g.abs().sum() for g in normed.values()
            ),
            "the largest absolute value of an entry": lambda normed: max(
                g.abs().max() for g in normed.values()
            ),
        },
    ),
    Quantity(
        "total norm",
        "the norm of all gradients",
        stages=["clip"],
        source="run/loop.py: optimizer_step",
        costs="the update has a different direction",
        operators=["times", "linear", "curved", "bounded"],
    ),
    Quantity(
        "log-ratio",
        "the log of the ratio is averaged over",
        needs="old_per_token_logps",
        units=["spans"],
        stages=["grpo"],
        source="GSPO eq. 7",
        costs="the update is different",
        also={"importance_sampling_level": "token"},
        changes={
            "{}": lambda region, x, mask: (
                total_by(x * mask, region) / total_by(mask, region).clamp(min=1)
            )
        },
    ),
    Quantity(
        "mean",
        "loss terms are averaged three times, over",
        stages=["grpo"],
        units=["spans"],
        source="losses/grpo.py: AVERAGES",
        costs="tokens are weighted differently",
        changes={
            "the tokens of {}, then over each row, then over rows": lambda step, terms, mask, region: (
                (
                    (terms * (share := mask / total_by(mask, region).clamp(min=1))).sum(1)
                    / share.sum(1).clamp(min=1)
                ).mean()
                / len(step.micro_batches)
            )
        },
    ),
    Quantity(
        "mean",
        "loss terms are averaged twice, over",
        stages=["grpo"],
        units=["spans"],
        source="losses/grpo.py: AVERAGES",
        costs="tokens are weighted differently",
        changes={
            "the tokens of {}, then over these means": lambda step, terms, mask, region: (
                (terms * (share := mask / total_by(mask, region).clamp(min=1))).sum()
                / share.sum().clamp(min=1)
                / len(step.micro_batches)
            )
        },
    ),
    Quantity(
        "average",
        "the loss is averaged as in",
        stages=["grpo"],
        source="losses/grpo.py: AVERAGES",
        about="averages, which need completions of different lengths",
        costs="long and short completions are weighted differently",
        terms={
            "grpo": "grpo",
            "dapo": "dapo",
            "dr_grpo": "dr_grpo",
            "luspo": "luspo",
            "bnpo": "bnpo",
        },
    ),
    Quantity(
        "eps",
        "eps of Adam is",
        stages=["update"],
        source="AdamW, arXiv 1711.05101, algorithm 2",
        costs="small gradients change the weights too much or too little",
        terms={"{c}": lambda c: c},
    ),
    Quantity(
        "betas",
        "betas of Adam:",
        stages=["update"],
        source="AdamW, arXiv 1711.05101, algorithm 2",
        about="betas and states of Adam, which need a later step than the first",
        terms={
            "beta1 is {c}": lambda c, x: (c, x[1]),
            "beta2 is {c}": lambda c, x: (x[0], c),
            "they are swapped": lambda x: (x[1], x[0]),
            "both are beta1": lambda x: (x[0], x[0]),
            "both are beta2": lambda x: (x[1], x[1]),
        },
    ),
    Quantity(
        "gradient",
        "there is no gradient for",
        stages=["gradients"],
        units=["parts"],
        source="VLM-R1 52",
        costs="this part is not trained",
        changes={"{}": lambda x, region, key: x * (not region(key))},
    ),
    Quantity(
        "normed",
        "the norm",
        stages=["clip"],
        units=["parts"],
        source="run/loop.py: optimizer_step",
        costs="the update has a different direction",
        changes={
            "leaves out {}": lambda x, region: {
                name: g for name, g in x.items() if not region(name)
            },
            "counts only {}": lambda region, x: {name: g for name, g in x.items() if region(name)},
        },
    ),
    Quantity(
        "clip",
        "gradients:",
        stages=["clip"],
        units=["parts"],
        source="run/loop.py: optimizer_step",
        costs="the update has a different direction",
        changes={
            "only {} are clipped": lambda region, gradients, x: {
                name: g if region(name) else gradients[name] for name, g in x.items()
            },
            "{} and all other parameters are clipped separately": lambda max_norm, region, gradients: (
                clipped({name: g for name, g in gradients.items() if region(name)}, max_norm)
                | clipped({name: g for name, g in gradients.items() if not region(name)}, max_norm)
            ),
        },
    ),
    Quantity(
        "decay",
        "weight decay",
        stages=["update"],
        units=["parts"],
        source="AdamW, arXiv 1711.05101, algorithm 2",
        costs="weights decay at a different rate",
        changes={
            "leaves out {}": lambda x, region, key: x * (not region(key)),
            "applies only to {}": lambda x, region, key: x * bool(region(key)),
            "also applies to {}": lambda weight_decay, x, region, key: (
                weight_decay if region(key) else x
            ),
        },
    ),
    Quantity(
        "rewards",
        "a completion has",
        needs="group",
        stages=["advantages"],
        units=["rollout_rows"],
        source="R1-V issue 146",
        costs="completions are rewarded for other completions",
        changes={
            "the first reward of {}": lambda x, region: torch.cat([x[region][:, :1], x[:, 1:]], 1),
            "the last reward of {}": lambda x, region: torch.cat([x[:, :-1], x[region][:, -1:]], 1),
        },
    ),
    Quantity(
        "logps",
        "log-probabilities",
        stages=["loss", "logps"],
        units=["regions"],
        source="model/logprobs.py",
        costs="tokens are not trained",
        changes={"of {} are 0": lambda x, region: x * ~region},
    ),
    Quantity(
        "ids",
        "a row has the ids of",
        stages=["tokens"],
        units=["rows"],
        source="TRL 5144",
        costs="tokens that were never sampled are trained",
    ),
    Quantity(
        "ids",
        "ids",
        stages=["tokens"],
        units=["regions"],
        source="TRL 5144, verl 6719",
        costs="tokens that were never sampled are trained",
        changes={
            "of {} were decoded and encoded again": lambda again, x: again(x),
            "of {} are missing": lambda: [],
            "of {} occur twice": lambda x: x + x,
            "lack the first token of {}": lambda x: x[1:],
            "lack the last token of {}": lambda x: x[:-1],
        },
    ),
    Quantity(
        "pictures",
        "a row",
        stages=["pictures", "logps"],
        units=["pictures"],
        source="slime 1847, verl 4050",
        costs="the model is trained on answers to other images",
        changes={
            "lacks {}": lambda: [],
            "has {} twice": lambda x: x + x,
            "has {} in reverse": lambda x: x[::-1],
            "has {} shifted by one to later places": lambda x: x[-1:] + x[:-1],
            "has {} shifted by one to earlier places": lambda x: x[1:] + x[:1],
            "has the first of {} in place of each": lambda x: x[:1] * len(x),
        },
    ),
    Quantity(
        "mask",
        "the mask",
        stages=["mask", "loss"],
        units=["regions"],
        source="TRL PR 4300, 5521",
        costs="tool responses are trained, or sampled tokens are not",
        changes={
            "also counts {}": lambda x, region: x + (1 - x) * region,
            "does not count {}": lambda x, region: x * ~region,
            "counts only {}": lambda completion, region: completion * region,
        },
    ),
    Quantity(
        "total",
        "rewards of",
        needs="group",
        stages=["advantages"],
        units=["rollout_sets"],
        source="losses/advantages.py",
        costs="the wrong completions are rewarded",
        changes={
            "{} are 0": lambda x, region: x * ~region,
            "{} are missing": lambda region, x: x.masked_fill(region, math.nan),
            "{} have the wrong sign": lambda x, region: x.where(~region, -x),
            "{} are 1 less": lambda x, region: x - region.double(),
        },
    ),
    Quantity(
        "weights",
        "the loss",
        stages=["grpo"],
        units=["regions"],
        source="losses/grpo.py: grpo_loss",
        costs="turns are weighted differently",
        changes={
            "has no gradient of {}": lambda x, region: x * ~region,
            "counts {} twice": lambda x, region: x * (1 + region),
            "has the wrong sign for {}": lambda x, region: x * (1 - 2 * region),
        },
    ),
    Quantity(
        "weights",
        "the loss of a row is",
        needs="advantages",
        stages=["grpo"],
        source="verl 2506",
        costs="rows are weighted differently",
        terms={
            "multiplied by its advantage": lambda x, step: x * step["advantages"].view(len(x), -1),
            "divided by its advantage": lambda x, step: x / step["advantages"].view(len(x), -1),
        },
    ),
    Quantity(
        "weights",
        "the loss of a row is",
        stages=["grpo", "sft"],
        source="verl 2506",
        costs="rows are weighted differently",
        terms={
            "multiplied by the number of its tokens": lambda x, step: x * step["lengths"][:, None],
            "divided by the number of its tokens": lambda x, step: x / step["lengths"][:, None],
        },
    ),
    Quantity(
        "old",
        "old log-probabilities are",
        needs="sampler_logps",
        stages=["grpo"],
        source="losses/grpo.py: importance_ratio (GSPO eq. 7, DeepSeekMath eq. 3)",
        costs="the ratio contains the mismatch between sampler and trainer",
        terms={"the sampler's": lambda step: step["sampler_logps"]},
    ),
    Quantity(
        "old",
        "old log-probabilities",
        needs="old_per_token_logps",
        stages=["grpo"],
        units=["regions"],
        source="Flash-RL 19",
        costs="the ratios are random",
        changes={
            "of {} are 0": lambda x, region: x * ~region,
            "of {} are the current ones": lambda region, detached_logps, x: torch.where(
                region, detached_logps, x
            ),
        },
    ),
    Quantity(
        "reference",
        "log-probabilities of the reference",
        needs="ref_per_token_logps",
        stages=["grpo"],
        units=["regions"],
        source="losses/grpo.py: kl_term (DeepSeekMath eq. 4)",
        costs="the KL is random",
        changes={
            "of {} are 0": lambda x, region: x * ~region,
            "of {} are the policy's": lambda region, detached_logps, x: torch.where(
                region, detached_logps, x
            ),
        },
    ),
    Quantity(
        "blind",
        "the model does not see",
        stages=["logps"],
        units=["pictures"],
        source="slime 1847",
        costs="the model is trained to answer without the image",
        changes={"{}": lambda region: region},
    ),
    Quantity(
        "pixels",
        "a uniform grey replaces",
        stages=["logps"],
        units=["pictures"],
        source="slime 1847",
        costs="the model is trained to answer without the image",
        changes={"{}": lambda x, region: x * ~region},
    ),
    Quantity(
        "attended",
        "the model does not attend to",
        stages=["tokens", "logps"],
        units=["regions"],
        source="TRL PR 4976",
        costs="training uses a different model than inference",
        changes={"{}": lambda x, region: x & ~region},
    ),
    Quantity(
        "positions",
        "positions",
        stages=["logps"],
        units=["regions"],
        source="TRL PR 5323, mlx-vlm 1527",
        costs="training uses a different model than inference",
        changes={
            "of {} are one too large": lambda x, region: x + region.long(),
            "of {} are one too small": lambda x, region: x - region.long(),
            "of {} count all tokens": lambda region, indices, x: torch.where(region, indices, x),
            "of {} count tokens from the end of the prompt": lambda region, x, prompt_length, indices: (
                torch.where(
                    region, x[:, prompt_length : prompt_length + 1] + indices - prompt_length, x
                )
            ),
            "of {} restart at 0": lambda region, x, indices: torch.where(
                region, indices - region.long().argmax(), x
            ),
            "of {} are those of the previous token": lambda region, x: torch.where(
                region, x.roll(1, 1), x
            ),
        },
    ),
    Quantity(
        "tool mask",
        "the flag whether a token belongs to a tool response is taken from",
        stages=["mask"],
        units=["rows", "columns"],
        source="TRL 5144",
        costs="tool responses are trained",
    ),
    Quantity(
        "rewards",
        "a completion has the rewards of",
        needs="group",
        stages=["advantages"],
        units=["rollout_rows"],
        source="R1-V issue 146",
        costs="completions are rewarded for other completions",
    ),
    Quantity(
        "group",
        "a completion belongs to the group of",
        needs="group",
        stages=["advantages"],
        units=["rollout_rows"],
        source="R1-V PR 49 and 54",
        costs="rewards of other prompts become the baseline",
    ),
    Quantity(
        "baseline",
        "a completion has the baseline of",
        needs="group",
        stages=["advantages"],
        units=["rollout_rows"],
        source="StarsfieldAI/R1-V 54",
        costs="rewards of other prompts become the baseline",
    ),
    Quantity(
        "deviation",
        "a completion's advantage is divided by the standard deviation of",
        needs="group",
        stages=["advantages"],
        units=["rollout_rows"],
        source="StarsfieldAI/R1-V 54",
        costs="hard and easy prompts are weighted differently",
    ),
    Quantity(
        "advantages",
        "a completion has the advantage of",
        needs="group",
        stages=["advantages"],
        units=["rollout_rows"],
        source="R1-V PR 54, issue 146",
        costs="completions are rewarded for other completions",
    ),
    Quantity(
        "advantages",
        "a row has the advantage of",
        stages=["rows", "grpo"],
        units=["rows"],
        source="R1-V PR 54, issue 146",
        costs="completions are rewarded for other completions",
    ),
    Quantity(
        "mask",
        "a mask value is taken from",
        stages=["mask", "loss"],
        units=["rows", "columns"],
        source="generation/generate.py: a stop token ends a completion",
        costs="the wrong tokens are trained",
    ),
    Quantity(
        "old",
        "an old log-probability is taken from",
        needs="old_per_token_logps",
        stages=["grpo"],
        units=["rows", "columns"],
        source="losses/grpo.py: importance_ratio (GSPO eq. 7, DeepSeekMath eq. 3)",
        costs="the ratios are random",
    ),
    Quantity(
        "correction",
        "the sampler's ratio is taken from",
        needs="importance_sampling_ratio",
        stages=["grpo"],
        units=["rows"],
        source="losses/grpo_variants.py",
        costs="the weights are random",
    ),
    Quantity(
        "reference",
        "a log-probability of the reference is taken from",
        needs="ref_per_token_logps",
        stages=["grpo", "dpo"],
        units=["rows", "columns"],
        source="losses/grpo.py: kl_term (DeepSeekMath eq. 4)",
        costs="the KL is random",
        about="KLs, which need beta and a reference",
    ),
    Quantity(
        "logps",
        "a log-probability is taken from",
        stages=["loss", "logps"],
        units=["rows", "columns"],
        source="model/logprobs.py",
        costs="a token is trained with the log-probability of another token",
    ),
    Quantity(
        "pictures",
        "a row has the images of",
        stages=["pictures", "logps"],
        units=["rows"],
        source="R1-V PR 49",
        costs="the model is trained on answers to other images",
    ),
    Quantity(
        "decay",
        "weight decay",
        stages=["update"],
        source="AdamW, arXiv 1711.05101, algorithm 2",
        costs="weights decay at a different rate",
        terms={"is {c}": lambda c: c, "is {c} where it is not 0": lambda c, x: c * bool(x)},
    ),
    Quantity(
        "max_norm",
        "max_grad_norm is",
        stages=["clip"],
        source="run/loop.py: optimizer_step",
        costs="the update has a different direction",
        terms={"{c}": lambda c: c},
    ),
    Quantity(
        "temperature",
        "logits are divided by",
        stages=["logps"],
        source="TRL PR 3029, 4159",
        costs="on-policy ratios are not 1",
        terms={"{c}": lambda c: c},
    ),
    Quantity(
        "delta",
        "for negative advantages, ratios are clipped at",
        stages=["grpo"],
        source="dual clip, arXiv 1912.09729",
        costs="the update is different",
        terms={"{c}": lambda c: c},
    ),
    Quantity(
        "epsilon_low",
        "epsilon_low is",
        stages=["grpo"],
        source="losses/grpo.py: clipped (PPO eq. 7)",
        costs="the update is different",
        terms={"{c}": lambda c: c},
    ),
    Quantity(
        "epsilon_high",
        "epsilon_high is",
        stages=["grpo"],
        source="losses/grpo.py: clipped (PPO eq. 7)",
        costs="the update is different",
        terms={
            "1 more than configured": lambda epsilon_high: 1 + epsilon_high,
            "1 less than configured": lambda epsilon_high: epsilon_high - 1,
            "{c}": lambda c: c,
        },
    ),
    Quantity(
        "top_entropy_quantile",
        "top_entropy_quantile is",
        stages=["grpo"],
        source="arXiv 2506.01939",
        costs="the wrong tokens are trained",
        terms={
            "the share to drop instead of the share to keep": lambda top_entropy_quantile: (
                1 - top_entropy_quantile
            ),
            "{c}": lambda c: min(c, 1.0),
        },
    ),
    Quantity(
        "entropy_coef",
        "entropy_coef, the weight of the entropy bonus, is",
        stages=["grpo"],
        source="losses/grpo_variants.py",
        costs="the policy collapses early or becomes too random",
        terms={"{c}": lambda c: c, "-{c}": lambda c: -c, "0": 0.0},
    ),
    Quantity(
        "label_smoothing",
        "label_smoothing is",
        stages=["dpo"],
        source="losses/preference.py",
        costs="the objective is different",
        terms={"{c}": lambda c: c},
    ),
    Quantity(
        "ld_alpha",
        "ld_alpha is",
        stages=["dpo"],
        source="LD-DPO, arXiv 2409.06411",
        costs="long answers are weighted differently",
        terms={"{c}": lambda c: c},
    ),
]

OPERATORS = {
    "times": {"is {c} times as large": times},
    "linear": {
        "has the wrong sign": lambda x: -x,
        "is left out": lambda x: 0 * x,
        "is doubled": lambda x: 2 * x,
        "is halved": lambda x: x / 2,
    },
    "rounded": {
        "is in bfloat16": lambda x: x.bfloat16().double(),
        "is in float16": lambda x: x.half().double(),
    },
    "curved": {
        "is squared": lambda x: x**2,
        "is replaced by its absolute value": lambda x: x.abs(),
        "is never below 0": lambda x: x.clamp(min=0),
        "is never above 0": lambda x: x.clamp(max=0),
        "is replaced by its sign": lambda x: x.sign(),
        "is passed through tanh": lambda x: x.tanh(),
        "is passed through the sigmoid": lambda x: x.sigmoid(),
        "is replaced by its exponential": lambda x: x.exp(),
    },
    "bounded": {
        "is at most {c}": lambda x, c: x.clamp(max=c),
        "is at least {c}": lambda x, c: x.clamp(min=c),
        "is at least -{c}": lambda x, c: x.clamp(min=-c),
        "is at most -{c}": lambda x, c: x.clamp(max=-c),
        "is clamped to -{c} and {c}": lambda c, x: x.clamp(-c, c),
        "is {c} too large": lambda x, c: x + c,
        "is {c} too small": lambda x, c: x - c,
    },
    "by token": {
        "is replaced by the mean of its row": lambda x, mask: (
            (x * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1) + 0 * x
        ),
        "is replaced by the sum of its row": lambda x, mask: (
            (x * mask).sum(1, keepdim=True) + 0 * x
        ),
        "has the mean of its row subtracted": lambda x, mask: (
            x - (x * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
        ),
        "has the mean of its micro-batch subtracted": lambda x, mask: (
            x - (x * mask).sum() / mask.sum().clamp(min=1)
        ),
        "is replaced by the sum up to its token": lambda x, mask: (x * mask).cumsum(1),
        "is replaced by the sum from its token on": lambda x, mask: (
            (x * mask).flip(1).cumsum(1).flip(1)
        ),
        "is detached": lambda x: x.detach(),
        "has half of its gradient": lambda x: (x + x.detach()) / 2,
    },
    "ratios": {
        "is replaced by the mean of its micro-batch": lambda x, mask: (
            (x * mask).sum() / mask.sum().clamp(min=1) + 0 * x
        ),
        "gives a ratio that is the mean of the ratios of its row": lambda x, mask: (
            ((x.exp() * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)).log()
            + 0 * x
        ),
        "gives a ratio that is at most {c}": lambda x, c: x.clamp(max=math.log(c)),
        "gives a ratio that is only the policy's probability": lambda old_per_token_logps, x: (
            old_per_token_logps + x
        ),
    },
    "of answers": {
        "has the mean of the micro-batch subtracted": lambda x: x - x.mean(),
        "has the detached mean of the micro-batch subtracted": lambda x: x - x.mean().detach(),
        "is divided by the answer's length": lambda x, lengths: x / lengths,
        "is multiplied by the answer's length": lambda x, lengths: x * lengths,
        "is {c} too small for chosen answers": lambda x, c: x - c * torch.tensor([1.0, 0.0]),
        "is {c} too large for chosen answers": lambda x, c: x + c * torch.tensor([1.0, 0.0]),
        "is divided by the length of the pair's longer answer": lambda x, lengths: (
            x / lengths.amax(1, keepdim=True)
        ),
        "is divided by the length of the pair's shorter answer": lambda x, lengths: (
            x / lengths.amin(1, keepdim=True)
        ),
        "is detached for the chosen answer": lambda x: torch.stack([x[:, 0].detach(), x[:, 1]], 1),
        "is detached for the rejected answer": lambda x: torch.stack(
            [x[:, 0], x[:, 1].detach()], 1
        ),
    },
}

# numbers that a fitted factor may be: (function, regular expression of the tensors to which it applies)
FACTORS = {
    "the temperature": (lambda about: about.get("temperature"), ".*logps$|entropies$|grad"),
    "one over the temperature": (
        lambda about: 1 / (about.get("temperature") or 1),
        ".*logps$|entropies$|grad",
    ),
    "beta": (lambda about: about.get("loss", {}).get("beta"), "loss|logps"),
    "the learning rate of the previous step divided by the current one": (
        lambda about: (
            ([0.0, *about.get("schedule", {}).get("rates", [])])[-1]
            / (about.get("optimizer", {}).get("learning_rate") or 1)
        ),
        "after|learning",
    ),
    "the largest learning rate divided by the current one": (
        lambda about: (
            about.get("schedule", {}).get("learning_rate", 0)
            / (about.get("optimizer", {}).get("learning_rate") or 1)
        ),
        "after|learning",
    ),
    "bits instead of nats": (lambda: 1 / math.log(2), ".*logps$|entropies|loss|logps|grad"),
}

# counts that a fitted factor may be, in the same form
COUNTS = {
    "micro-batches": (lambda step: len(step.micro_batches), "loss|logps|grad|after|learning"),
    "rows": (lambda step: len(step["input_ids"]), "loss|logps"),
    "rows with an advantage other than 0": (
        lambda step: (
            None
            if step.get("advantages") is None or has_advantage(step).all()
            else has_advantage(step).sum().item()
        ),
        "loss|logps",
    ),
    "counted tokens": (lambda step: step["completion_mask"].sum().item(), "loss|logps"),
    "ranks": (lambda about: about.get("world_size", 1), ""),
    "completions of a group": (
        lambda about: about.get("num_generations", 1),
        "advantages|loss|logps",
    ),
    "rewards": (
        lambda step: (
            1
            if step.get("rewards") is None
            else step["rewards"].view(len(step["rewards"]), -1).shape[1]
        ),
        "advantages",
    ),
    "steps of a rollout": (lambda about: about.get("steps_per_rollout", 1), "loss|logps|learning"),
    "tokens of completions, including padding": (
        lambda step: step.completion.sum().item(),
        "loss|logps",
    ),
    "columns": (lambda step: step["input_ids"].numel(), "loss|logps"),
    "tokens of prompts and completions": (
        lambda step: step["row_lengths"].sum().item(),
        "loss|logps",
    ),
    "tokens of the longest completion": (lambda step: step["lengths"].max().item(), "loss|logps"),
    "max_completion_length": (lambda about: about.get("max_completion_length"), "loss|logps"),
    "rows of a micro-batch": (lambda step: len(step.micro_batches[0]), "loss|logps"),
    "pairs of a micro-batch": (
        lambda step: 1 if step.get("pair") is None else len(step.micro_batches[0]) // 2,
        "loss|logps",
    ),
}
