"""Count how often `parity` names two mistakes that a loss has at once, in random pairs from a table of mistakes."""

import itertools
import random

import pytest
import torch
from torch.nn.functional import logsigmoid

from minivlmrl.extras.parity.loss import judge

DAPO = {"loss_type": "dapo", "importance_sampling_level": "token", "use_bias_correction_kl": False}
DPO = {"kind": "dpo", "loss_type": "sigmoid"}


def clipped(ratio, advantages, low, high):
    return torch.min(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)


def maximum(ratio, advantages, low, high):
    other = torch.max(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)
    return clipped(ratio, advantages, low, high).where(advantages >= 0, other)


def k3(d):
    return d.exp() - d - 1


# {quantity: [how a loss computes it, mistakes]}
OF_DAPO = {
    "ratio": [
        lambda logps, old, ref: (logps - old).exp(),
        lambda logps, old, ref: (logps - ref).exp(),
        lambda logps, old, ref: logps - old,
        lambda logps, old, ref: (logps - logps.detach()).exp(),
    ],
    "objective": [
        clipped,
        lambda ratio, advantages, low, high: clipped(ratio, advantages, low, low),
        lambda ratio, advantages, low, high: clipped(ratio, advantages, high, low),
        lambda ratio, advantages, low, high: ratio.clamp(1 - low, 1 + high) * advantages,
        maximum,
    ],
    "kl": [
        lambda d, beta: k3(d),
        lambda d, beta: 0 * d,
        lambda d, beta: -d,
        lambda d, beta: d.square() / 2,
        lambda d, beta: k3(-d),
        lambda d, beta: beta * k3(d),
        lambda d, beta: k3(d) / 2,
    ],
    "mean": [
        lambda terms, mask, tokens: (terms * mask).sum() / tokens,
        lambda terms, mask, tokens: ((terms * mask).sum(1) / mask.sum(1).clamp(min=1)).mean(),
        lambda terms, mask, tokens: (terms * mask).sum() / mask.sum(),
        lambda terms, mask, tokens: (terms * mask).mean(),
        lambda terms, mask, tokens: (terms * mask).sum(),
    ],
    "advantages": [lambda x: x, lambda x: -x, lambda x: x.abs(), lambda x: x.sign()],
}
OF_DPO = {
    "sum": [
        lambda logps, mask: (logps * mask).sum(-1),
        lambda logps, mask: (logps * mask).sum(-1) / mask.sum(-1),
        lambda logps, mask: logps.sum(-1),
        lambda logps, mask: (logps * mask * (mask.cumsum(-1) > 1)).sum(-1),
    ],
    "reference": [lambda logps, ref: ref, lambda logps, ref: 0 * ref, lambda logps, ref: logps.detach()],
    "margin": [lambda x: x[:, 0] - x[:, 1], lambda x: x[:, 1] - x[:, 0]],
    "beta": [lambda x: x, lambda x: 2 * x, lambda x: 1.0, lambda x: x**2],
    "function": [logsigmoid, torch.sigmoid],
    "mean": [lambda x: x.mean(), lambda x: x.sum()],
}


def dapo(chosen):
    def loss(batch, options):
        logps, old, ref = (batch[f"{name}per_token_logps"] for name in ("", "old_", "ref_"))
        advantages = chosen["advantages"](batch["advantages"])[:, None]
        ratio = chosen["ratio"](logps, old, ref)
        objective = chosen["objective"](ratio, advantages, options["epsilon_low"], options["epsilon_high"])
        terms = options["beta"] * chosen["kl"](ref - logps, options["beta"]) - objective
        return chosen["mean"](terms, batch["mask"], options["tokens"])

    return loss


def dpo(chosen):
    def loss(batch, options):
        logps, ref = batch["per_token_logps"], batch["ref_per_token_logps"]
        policy, reference = (chosen["sum"](x, batch["mask"]) for x in (logps, chosen["reference"](logps, ref)))
        margin = chosen["margin"](policy - reference)
        return -chosen["mean"](chosen["function"](chosen["beta"](options["beta"]) * margin))

    return loss


def random_pairs(table, count):
    pairs = [
        {first: a, then: b}
        for first, then in itertools.combinations(table, 2)
        for a, b in itertools.product(table[first][1:], table[then][1:])
    ]
    right = {name: functions[0] for name, functions in table.items()}
    return [right | pair for pair in random.Random(0).sample(pairs, count)]


@pytest.mark.slow
@pytest.mark.parametrize("make, table, count, only, least", [
    (dapo, OF_DAPO, 40, DAPO, 38),
    (dpo, OF_DPO, 40, DPO, 30),
], ids=["dapo", "dpo"])  # fmt: skip
def test_pairs_of_mistakes_are_named(make, table, count, only, least):
    verdicts = [judge(make(chosen), **only) for chosen in random_pairs(table, count)]
    assert sum(bool(verdict.kinds) for verdict in verdicts) >= least
    silent = [verdict for verdict in verdicts if not verdict.kinds and not verdict.broken]
    assert not silent and not any(verdict.agrees for verdict in verdicts)
