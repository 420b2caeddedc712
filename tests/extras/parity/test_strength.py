"""Twenty mistakes that were written without looking at the names, and twenty right but unusual losses.

A mistake is named if a line says what was done, and silent if all cases agree; no wrong name may be given. A right loss
agrees in all cases.
"""

import math
import re

import pytest
import torch
from torch.nn.functional import logsigmoid, relu, softplus

from minivlmrl.extras.parity.loss import judge

WHOLE = {"loss_type": "grpo", "importance_sampling_level": "token", "whole_step": True}
ON_POLICY = WHOLE | {"beta": 0.0}
PLAIN = WHOLE | {"beta": 0.1, "use_bias_correction_kl": False}
DAPO = WHOLE | {"loss_type": "dapo", "beta": 0.0}
GSPO = ON_POLICY | {"importance_sampling_level": "sequence"}
DPO = {"kind": "dpo", "loss_type": "sigmoid"}


def unpack(batch):
    names = ("per_token_logps", "old_per_token_logps", "ref_per_token_logps", "mask")
    logps, old, ref, mask = (batch[name] for name in names)
    return logps, old, ref, mask, batch["advantages"][:, None]


def rows(x, mask):
    """Average over each row's tokens, then over the rows."""
    return ((x * mask).sum(1) / mask.sum(1).clamp(min=1)).mean()


def surrogate(ratio, advantages, low=0.2, high=0.28):
    return -torch.min(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)


def grpo(change):
    """Return GRPO with change(quantities) before the term, where the quantities are a dict that it may edit."""

    def loss(batch, options):
        logps, old, ref, mask, advantages = unpack(batch)
        q = {"logps": logps, "old": old, "ref": ref, "mask": mask, "advantages": advantages, "beta": options["beta"]}
        q |= {"low": options["epsilon_low"], "high": options["epsilon_high"]}
        change(q)
        d = q["ref"] - q["logps"]
        terms = surrogate((q["logps"] - q["old"]).exp(), q["advantages"], q["low"], q["high"])
        return rows(terms + q["beta"] * q.get("kl", d.exp() - d - 1), q["mask"])

    return loss


def put(**formulas):
    return grpo(lambda q: q.update({name: formula(q) for name, formula in formulas.items()}))


def dpo(change=lambda u, v: (u, v), sign=1.0, of=lambda x, mask: (x * mask).sum(-1)):
    def loss(batch, options):
        log_ratio = batch["per_token_logps"] - batch["ref_per_token_logps"]
        u, v = change(*of(log_ratio, batch["mask"]).unbind(1))
        return -logsigmoid(sign * options["beta"] * (u - v)).mean()

    return loss


def drop_last(batch, options):
    """Forget each row's last token in the sum, and not in the count."""
    logps, old, _, mask, advantages = unpack(batch)
    kept = mask * mask.roll(-1, 1)
    terms = surrogate((logps - old).exp(), advantages, options["epsilon_low"], options["epsilon_high"])
    return ((terms * kept).sum(1) / mask.sum(1).clamp(min=1)).mean()


def gspo_of_sums(batch, options):
    logps, old, _, mask, advantages = unpack(batch)
    ratio = ((logps - old) * mask).sum(1, keepdim=True).exp()
    return rows(surrogate(ratio, advantages, options["epsilon_low"], options["epsilon_high"]), mask)


def gspo_of_all_columns(batch, options):
    """Divide the log-ratio by the width of the batch instead of the row's tokens."""
    logps, old, _, mask, advantages = unpack(batch)
    ratio = ((logps - old) * mask).mean(1, keepdim=True).exp()
    return rows(surrogate(ratio, advantages, options["epsilon_low"], options["epsilon_high"]), mask)


def clipped_log_ratio(batch, options):
    """Clip the log-ratio to -epsilon_low and epsilon_high instead of the ratio."""
    logps, old, _, mask, advantages = unpack(batch)
    d = logps - old
    clipped = d.clamp(-options["epsilon_low"], options["epsilon_high"]).exp()
    return rows(-torch.min(d.exp() * advantages, clipped * advantages), mask)


def maximum_for_negative(batch, options):
    """Take the maximum for negative advantages."""
    logps, old, _, mask, advantages = unpack(batch)
    ratio = (logps - old).exp()
    clipped = ratio.clamp(1 - options["epsilon_low"], 1 + options["epsilon_high"])
    one, other = ratio * advantages, clipped * advantages
    return rows(-torch.where(advantages >= 0, torch.min(one, other), torch.max(one, other)), mask)


def kl_of_rows(batch, options):
    """Average the policy term over tokens of the step, and the KL over rows."""
    logps, old, ref, mask, advantages = unpack(batch)
    d = ref - logps
    terms = surrogate((logps - old).exp(), advantages, options["epsilon_low"], options["epsilon_high"])
    return rows(terms, mask) + options["beta"] * ((d.exp() - d - 1) * mask).sum() / mask.sum()


# name: loss, options of the cases, what a line must say; "" if nothing is named ("located")
MISTAKES = {
    "old and new are swapped": (put(old=lambda q: 2 * q["logps"] - q["old"]), ON_POLICY, "has the wrong sign"),
    "advantages are absolute": (put(advantages=lambda q: q["advantages"].abs()), ON_POLICY, "absolute value"),
    "advantages are reversed": (put(advantages=lambda q: q["advantages"].flip(0)), ON_POLICY, "mirrored position"),
    "the sign of the loss": (put(advantages=lambda q: -q["advantages"]), ON_POLICY, "wrong sign"),
    "beta is squared": (put(beta=lambda q: q["beta"] ** 2), PLAIN, "multiplied by beta twice|KL is 0.1 times as large"),
    "beta has a wrong sign": (put(beta=lambda q: -q["beta"]), PLAIN, "the KL has the wrong sign"),
    "k2 instead of k3": (put(kl=lambda q: (q["ref"] - q["logps"]).square() / 2), PLAIN, "estimator is k2"),
    "absolute KL": (put(kl=lambda q: (q["ref"] - q["logps"]).abs()), PLAIN, "the KL is replaced by its absolute"),
    "KL without gradient": (
        put(kl=lambda q: ((d := (q["ref"] - q["logps"]).detach()).exp() - d - 1)), PLAIN, "the KL is detached"),
    "the old policy is the reference": (put(ref=lambda q: q["old"]), PLAIN, "the reference is the old policy"),
    "clip range of 0.2 above": (put(high=lambda _: 0.2), ON_POLICY, "epsilon_low on both sides|epsilon_high is 0.2"),
    "clip range of 1.2": (put(high=lambda _: 1.2), ON_POLICY, "epsilon_high is 1.2"),
    "no clipping": (put(high=lambda _: math.inf, low=lambda _: math.inf), ON_POLICY, "ratios are not clipped"),
    "first token is not trained": (put(mask=lambda q: q["mask"] * (q["mask"].cumsum(1) > 1)), ON_POLICY, "first token"),
    "last token is not in the sum": (drop_last, ON_POLICY, "last token is not trained on, only in the sum"),
    "GSPO of sums": (gspo_of_sums, GSPO, "the product of its tokens' ratios"),
    "GSPO divides by the width": (gspo_of_all_columns, GSPO, ""),
    "clipped log-ratio": (clipped_log_ratio, ON_POLICY, ""),
    "maximum for negative advantages": (maximum_for_negative, ON_POLICY, "is used for negative advantages"),
    "two averages": (kl_of_rows, PLAIN, "averaged as in|all tokens"),
}  # fmt: skip


def by_loop(batch, options):
    """Add up tokens in Python."""
    logps, old, _, mask, advantages = unpack(batch)
    total = 0.0
    for i in range(len(logps)):
        row = 0.0 * logps[i].sum()
        for t in mask[i].nonzero()[:, 0]:
            row = row + surrogate(
                (logps[i, t] - old[i, t]).exp(), advantages[i, 0], options["epsilon_low"], options["epsilon_high"]
            )
        total = total + row / max(1, int(mask[i].sum()))
    return total / len(logps)


def packed(batch, options):
    """Compute all tokens in one sequence, as for packed batches."""
    logps, old, _, mask, advantages = unpack(batch)
    chosen = mask.bool()
    row = torch.arange(len(mask))[:, None].expand_as(mask)[chosen]
    terms = surrogate((logps - old)[chosen].exp(), advantages[row, 0], options["epsilon_low"], options["epsilon_high"])
    lengths = mask.sum(1).clamp(min=1)
    return (terms / lengths[row]).sum() / len(mask)


def by_cases(batch, options):
    """Choose between the branches of the minimum with where."""
    logps, old, _, mask, advantages = unpack(batch)
    ratio = (logps - old).exp()
    too_high = (advantages > 0) & (ratio > 1 + options["epsilon_high"])
    too_low = (advantages < 0) & (ratio < 1 - options["epsilon_low"])
    bound = torch.where(too_high, 1 + options["epsilon_high"], 1 - options["epsilon_low"])
    return rows(-torch.where(too_high | too_low, bound, ratio) * advantages, mask)


def by_relu(batch, options):
    """Write the clipped term with two hinges."""
    logps, old, _, mask, advantages = unpack(batch)
    ratio, positive, negative = (logps - old).exp(), relu(advantages), relu(-advantages)
    high, low = 1 + options["epsilon_high"], 1 - options["epsilon_low"]
    return rows(-(positive * (high - relu(high - ratio)) - negative * (low + relu(ratio - low))), mask)


def score_function(batch, options):
    """Compute the gradient as ratio.detach() * advantage * grad log pi, with the right value."""
    logps, old, _, mask, advantages = unpack(batch)
    ratio = (logps - old).exp().detach() * (logps - logps.detach() + 1)
    return rows(surrogate(ratio, advantages, options["epsilon_low"], options["epsilon_high"]), mask)


def micro_batches(batch, options):
    """Accumulate the loss of single rows."""
    parts = [{name: x[i : i + 1] for name, x in batch.items()} for i in range(len(batch["mask"]))]
    return sum(put()(part, options) for part in parts) / len(parts)


def in_columns(batch, options):
    """Turn rows and columns around, as (T, B) code does."""
    logps, old, _, mask, _ = unpack(batch)
    ratio = (logps - old).T.exp()
    terms = surrogate(ratio, batch["advantages"], options["epsilon_low"], options["epsilon_high"]) * mask.T
    return (terms.sum(0) / mask.sum(1).clamp(min=1)).mean()


def weighted_tokens(batch, options):
    """Multiply by weights 1 / length before the sum."""
    logps, old, _, mask, advantages = unpack(batch)
    weights = mask / mask.sum(1, keepdim=True).clamp(min=1) / len(mask)
    return (weights * surrogate((logps - old).exp(), advantages, options["epsilon_low"], options["epsilon_high"])).sum()


def dapo(batch, options):
    logps, old, _, mask, advantages = unpack(batch)
    terms = surrogate((logps - old).exp(), advantages, options["epsilon_low"], options["epsilon_high"])
    return terms[mask.bool()].mean()


def gspo(batch, options):
    """Compute GSPO by a product of powers."""
    logps, old, _, mask, advantages = unpack(batch)
    powers = (logps - old).exp() ** (mask / mask.sum(1, keepdim=True).clamp(min=1))
    ratio = powers.where(mask > 0, 1.0).prod(1, keepdim=True)
    return rows(surrogate(ratio, advantages, options["epsilon_low"], options["epsilon_high"]), mask)


def expm1(q):
    d = q["ref"] - q["logps"]
    return torch.expm1(d) - d


def weighted_by_probabilities(q):
    """Write k3 with ratios of probabilities."""
    ratio = q["ref"].exp() / q["logps"].exp()
    return ratio - ratio.log() - 1


def cispo(batch, options):
    logps, old, _, mask, advantages = unpack(batch)
    weight = torch.minimum((logps - old).exp(), torch.tensor(options["epsilon_high"], dtype=torch.float64)).detach()
    return -(weight * advantages * logps * mask).sum() / mask.sum()


def dr_grpo(batch, options):
    logps, old, _, mask, advantages = unpack(batch)
    terms = surrogate((logps - old).exp(), advantages, options["epsilon_low"], options["epsilon_high"]) * mask
    return (terms / (len(mask) * options["max_completion_length"])).sum()


def sft(batch, _):
    return -(batch["per_token_logps"][batch["mask"] > 0]).mean()


def dft(batch, _):
    logps = batch["per_token_logps"][batch["mask"] > 0]
    return -(logps.exp().detach() * logps).mean()


def ipo(batch, options):
    log_ratio = (batch["per_token_logps"] - batch["ref_per_token_logps"]) * batch["mask"]
    u, v = (log_ratio.sum(-1) / batch["mask"].sum(-1)).unbind(1)
    return ((u - v) * 2 * options["beta"] - 1).square().mean() / (4 * options["beta"] ** 2)


def dpo_by_softplus(batch, options):
    logps, ref = ((batch[name] * batch["mask"]).sum(-1) for name in ("per_token_logps", "ref_per_token_logps"))
    return softplus(options["beta"] * ((logps[:, 1] - logps[:, 0]) - (ref[:, 1] - ref[:, 0]))).mean()


RIGHT = {
    "loop": (by_loop, ON_POLICY),
    "packed": (packed, ON_POLICY),
    "cases": (by_cases, ON_POLICY),
    "hinges": (by_relu, ON_POLICY),
    "score function": (score_function, ON_POLICY),
    "micro-batches": (micro_batches, ON_POLICY),
    "columns": (in_columns, ON_POLICY),
    "weights": (weighted_tokens, ON_POLICY),
    "expm1": (put(kl=expm1), PLAIN),
    "probabilities": (put(kl=weighted_by_probabilities), PLAIN),
    "ratio of exponentials": (put(old=lambda q: q["old"].exp().log()), ON_POLICY),
    "padding with infinities": (put(old=lambda q: q["old"].where(q["mask"] > 0, 0.0)), ON_POLICY),
    "DAPO over chosen tokens": (dapo, DAPO),
    "GSPO as a product": (gspo, GSPO),
    "CISPO": (cispo, DAPO | {"loss_type": "cispo"}),
    "Dr. GRPO": (dr_grpo, ON_POLICY | {"loss_type": "dr_grpo"}),
    "SFT": (sft, {"kind": "sft", "loss_type": "nll"}),
    "DFT": (dft, {"kind": "sft", "loss_type": "dft"}),
    "IPO": (ipo, {"kind": "dpo", "loss_type": "ipo"}),
    "DPO by softplus": (dpo_by_softplus, DPO),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MISTAKES)
def test_an_unseen_mistake_gets_no_wrong_name(name):
    loss, only, says = MISTAKES[name]
    verdict = judge(loss, seconds=math.inf, **only)
    assert verdict.differences
    found = [line for line in verdict.names if line.startswith(("mistake", "design", "  or"))]
    assert bool(verdict.kinds) == bool(says), str(verdict)
    assert not says or any(re.search(says, line) for line in found), str(verdict)


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_but_unusual_loss_agrees(name):
    loss, only = RIGHT[name]
    verdict = judge(loss, seconds=0, **only)
    assert not verdict.differences and verdict.cases > 1, str(verdict)
