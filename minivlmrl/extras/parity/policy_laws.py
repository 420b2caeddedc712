"""Checks ("laws") of a policy loss: advantages, ratios, clip bounds, averages and the KL.

Most checks test one factor of a token's gradient:

    d loss / d log-prob = -advantage * weight in the loss average * f(ratio)

PPO has f(ratio) = ratio, or 0 where clipping stops the gradient.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from minivlmrl.extras.parity.examined import (
    DEFAULTS_OF,
    MASKS,
    Examined,
    Finding,
    Law,
    described,
    numbers,
    random_batch,
)
from minivlmrl.extras.parity.recomputed import our_loss
from minivlmrl.losses.grpo import AVERAGES

CLIPPED = ("grpo", "dapo", "dr_grpo", "bnpo", "luspo", "rloo")
LOGP = -2.0  # policy log-prob in test batches of one token


def asked_type(loss: Examined) -> str | None:
    """Return the user's loss_type, None if missing or unknown."""
    return loss.loss_type if "loss_type" in loss.given and loss.loss_type in AVERAGES else None


def tokens(
    ratios: Tensor, advantages: Tensor, logp: float | Tensor = LOGP, ref: float | Tensor = LOGP
) -> dict[str, Tensor]:
    """Return a batch with one-token completions; log-probs are numbers or tensors."""
    logps = (ratios * 0 + logp)[:, None]
    batch = {"per_token_logps": logps, "old_per_token_logps": logps - ratios.log()[:, None], "advantages": advantages}
    return batch | {"ref_per_token_logps": (ratios * 0 + ref)[:, None], "mask": torch.ones_like(logps)}


def of_one_token(loss: Examined, beta=0.0, ratio=1.0, advantage=1.0, length=1.0, **logps: float) -> Tensor:
    """Return loss and gradient for a batch with one token, whose weight is 1 in every loss average."""
    batch = tokens(*torch.tensor([[ratio], [advantage]], dtype=torch.float64), **logps)
    value, slope = loss(batch, beta=beta, max_completion_length=length)
    return torch.cat([value.view(1), slope.view(1)])


def token_weights(loss: Examined, batch: dict[str, Tensor]) -> Tensor:
    """Return token weights (B, T) in the loss average: the negative gradient if all ratios and advantages are 1."""
    on_policy = {"old_per_token_logps": batch["per_token_logps"], "advantages": torch.ones_like(batch["advantages"])}
    return -loss.gradient(batch | on_policy, beta=0.0)


def use_its_own_numbers(loss: Examined):
    """Use epsilon_high=5 if the loss is CISPO, and the length of a dr_grpo loss that divides by its own constant."""
    _, slope = of_one_token(loss)
    if not {"loss_type", "epsilon_high"} & loss.given.keys() and slope == -loss.options["epsilon_high"]:
        loss.options |= DEFAULTS_OF["cispo"]
    if asked_type(loss) == "dr_grpo" and slope and slope == of_one_token(loss, length=2)[1]:
        loss.options["max_completion_length"] = (1 / slope).abs().item()


# --------------------------------------------------------------------------------------------------------- advantages


def gradients_are_proportional_to_advantages(loss: Examined) -> Iterator[Finding]:
    """Require the gradient -advantage * weight at ratio 1, whatever other rows' advantages."""
    for mask in MASKS:
        batch = random_batch("grpo", mask)
        advantages = torch.tensor([0.5, -1.0, 0.0, 2.0]).double()[: len(mask)]
        batch |= {"old_per_token_logps": batch["per_token_logps"], "advantages": advantages}
        weights = token_weights(loss, batch)
        if (weights[batch["mask"] > 0] < 1e-9).any():
            yield Finding(
                "a token is not pushed in the direction of its advantage. Smallest batch: mask "
                f"{numbers(batch['mask'])}, all advantages and ratios 1; the gradient is {numbers(-weights)}"
            )
        where = f"{described(batch)}; the gradient is"
        right = -advantages[:, None] * weights
        says = "the gradient of a token is not proportional to its advantage"
        yield from loss.unequal(says, where, loss.gradient(batch, beta=0.0), right)


def one_token_has_the_gradient_of_its_advantage(loss: Examined) -> Iterator[Finding]:
    """Require the gradient -1 for a single token with advantage 1 and ratio 1."""
    if asked_type(loss) != "dr_grpo":
        _, slope = of_one_token(loss)
        where = "one token, advantage 1, ratio 1; the gradient is"
        yield from loss.unequal("the gradient of a token has a wrong size", where, slope, torch.tensor(-1.0))


# ------------------------------------------------------------------------------------------------- ratios and bounds


def ratio_of(batch: dict[str, Tensor]) -> Tensor:
    return (batch["per_token_logps"] - batch["old_per_token_logps"]).exp()


def factors(loss: Examined, batch: dict[str, Tensor]) -> Tensor:
    """Return token gradients (B, T) divided by those at ratio 1."""
    return loss.gradient(batch, beta=0.0) / (-batch["advantages"][:, None] * token_weights(loss, batch))


def ours(loss: Examined, change: dict) -> Examined:
    """Return our loss with user options, except those in `change`."""
    return Examined(our_loss, "grpo", {**loss.options, "loss_type": "grpo", **change})


def many_ratios() -> dict[str, Tensor]:
    """Return a batch with single tokens and ratios from 0.001 to 50."""
    ratios = torch.logspace(-3, 1.7, 700, dtype=torch.float64)
    # advantages 0.5 and -2 show whether the loss clips the ratio, or ratio * advantage
    advantages = torch.tensor([1.0, -1.0, 0.5, -2.0], dtype=torch.float64)
    return tokens(ratios.repeat(4), advantages.repeat_interleave(700))


# {importance_sampling_level: description}
LEVELS = {
    "token": "each token has its own ratio",
    "sequence": "the tokens of a completion have one ratio, the geometric mean of their ratios, as in GSPO",
    "sequence_sum": "the tokens of a completion have one ratio, the product of their ratios",
}


def known_factors(loss: Examined, found: Tensor, ratio: Tensor) -> dict[str, Callable[[dict], Tensor]]:
    """Return {description: function from a batch to factors}: the loss that is asked for, and its variants.

    Args:
        found: factors in the user loss for single tokens with these ratios.
    """
    asked = asked_type(loss)
    clips = asked in (None, *CLIPPED)
    low = loss.options["epsilon_low"]
    cap = of_one_token(loss, ratio=50.0, advantage=-1.0)[0].item()
    first, last = ratio[found != 0].aminmax()
    smallest, largest = found[found != 0].aminmax()
    one_bound = f"only one bound: the ratio is clipped at {1 + low:g}, because epsilon_high is not used"
    dual = f"a dual clip: a token with a negative advantage has no gradient at ratios above {cap:.3g}"
    cispo = f"CISPO's gradient, with weights between {smallest:.3g} and {largest:.3g}"
    changes: dict[str, dict] = {f"{'PPO' if clips else asked}'s gradient": {"loss_type": "grpo" if clips else asked}}
    if clips:
        changes[one_bound] = {"epsilon_high": low}
    if clips and cap > 1 + low:
        changes[dual] = {"delta": cap}
        changes[f"{dual}, and {one_bound}"] = {"delta": cap, "epsilon_high": low}
    known: dict[str, Callable[[Tensor], Tensor]] = {
        "no ratio, which is right for one update after each rollout, and wrong for a second": lambda x: 0 * x + 1
    }
    if asked in (None, "cispo"):
        changes[cispo] = {"loss_type": "cispo", "epsilon_high": largest.item()}
        known[f"{cispo}, per token"] = lambda x: x.clamp(smallest, largest)
    if clips and cap == 0:
        says = f"a mask: only tokens with a ratio from about {first:.3g} to {last:.3g} have a gradient (IcePop)"
        known[says] = lambda x: x * ((x >= first) & (x <= last))
    result = {}
    for level in [loss.options["importance_sampling_level"]] if "importance_sampling_level" in loss.given else LEVELS:
        for says, change in changes.items():
            of_ours = ours(loss, change | {"importance_sampling_level": level})
            result[says if level == "token" else f"{says}; {LEVELS[level]}"] = partial(factors, of_ours)
    return result | {says: partial(of_ratio, function) for says, function in known.items()}


def of_ratio(function: Callable[[Tensor], Tensor], batch: dict[str, Tensor]) -> Tensor:
    return function(ratio_of(batch))


def ratios_act_as_in_a_known_loss(loss: Examined) -> Iterator[Finding]:
    """Check token gradients at several ratios: PPO's, for example, must be 0 beyond clip bounds."""
    batches = [many_ratios(), random_batch("grpo", MASKS[-1], off_policy=0.3)]
    found = [factors(loss, batch) for batch in batches]
    known = known_factors(loss, found[0], ratio_of(batches[0]))
    wrong = {}  # {description: [(batch, row, factors, right ones)] of rows that differ}
    for says, right_of in known.items():
        wrong[says] = [
            (batch, row, theirs, right)
            for batch, x in zip(batches, found, strict=True)
            for row, (theirs, right) in enumerate(zip(x, right_of(batch), strict=True))
            if ((theirs - right).abs() > loss.tolerance * right.abs().clamp(min=1)).any()
        ]
        if not wrong[says]:
            if len(wrong) > 1:
                yield Finding(f"the loss has {says}", "note")
            return
    # the upper bound may use epsilon_high or epsilon_low: show an error for the better fit
    says = min([*wrong][:2], key=lambda says: len(wrong[says]))
    batch, row, slope, right = wrong[says][0]
    where = f"advantage {numbers(batch['advantages'][row])}, ratios {numbers(ratio_of(batch)[row])}"
    says = f"the ratio does not act as in {says}"
    yield from loss.unequal(says, f"{where}; minus gradient / advantage, relative to ratio 1, is", slope, right)


# ----------------------------------------------------------------------------------------------------------- averages


# {loss type: its average}
AVERAGE_SAYS = {
    "grpo": "each completion has the same weight",
    "dapo": "each token has the same weight",
    "dr_grpo": "tokens are divided by a constant",
    "luspo": "tokens are added up in each completion",
}


def the_average_is_that_of_the_loss_type(loss: Examined) -> Iterator[Finding]:
    """Check token weights in the loss average: DAPO, for example, weights all tokens equally."""
    batch = random_batch("grpo", [[1, 1, 1, 1, 0], [1, 0, 0, 0, 0]])
    weights = token_weights(loss, batch)
    right = {name: token_weights(ours(loss, {"loss_type": name}), batch) for name in (*AVERAGE_SAYS, "bnpo")}
    found = [name for name, x in right.items() if not loss.differ(weights, x)]
    says = AVERAGE_SAYS[found[0]] if found else f"the tokens have the weights {numbers(weights)}"
    asked = asked_type(loss)
    if asked not in right or loss.given.get("importance_sampling_level") == "sequence":
        of = f", as in {', '.join(found)}" if found else ""
        yield Finding(says + of, "note")  # trainers average the others, and GSPO, differently
    elif asked not in found:
        where = f"mask {numbers(batch['mask'])}; the weights are"
        yield from loss.unequal(f"{says}, but loss_type is {asked}", where, weights, right[asked])


# ------------------------------------------------------------------------------------------------------------- the KL


NEAR_REFERENCE = "one token with the log-probability -2, and -2.5 for the reference"


def kl_of_one_token(loss: Examined, beta: float = 1.0, **token: float) -> Tensor:
    """Return what the KL adds to loss and gradient for one token."""
    return of_one_token(loss, beta, **token) - of_one_token(loss, **token)


def the_reference_acts_through_beta(loss: Examined) -> Iterator[Finding]:
    """Require a KL gradient proportional to beta, and no effect of the reference if beta is 0."""
    near, far = of_one_token(loss, ref=-2.5), of_one_token(loss, ref=-1.2)
    where = f"{NEAR_REFERENCE}; loss and gradient are, instead of with -1.2 for the reference,"
    yield from loss.unequal("the reference changes the loss even if beta is 0", where, near, far)
    once, twice = (kl_of_one_token(loss, beta, ref=-2.5) for beta in (1.0, 2.0))
    where = f"{NEAR_REFERENCE}; value and gradient of the KL, with beta 2, are"
    yield from loss.unequal("the KL is not proportional to beta", where, twice, 2 * once)
    if once.abs().max() <= loss.tolerance:
        yield Finding("the KL, because beta changes nothing", "not tested")
    elif once[1] == 0:
        yield Finding(f"the KL has no gradient, but only a value. Smallest batch: {NEAR_REFERENCE}")


def the_kl_acts_apart_from_the_advantage(loss: Examined) -> Iterator[Finding]:
    """Check that advantage and clipping do not change the KL gradient."""
    for ratio in (1.0, 0.5, 1.65):
        apart = kl_of_one_token(loss, ratio=ratio, advantage=0.0, ref=-2.5)
        for advantage in (1.0, -1.0):
            kl = kl_of_one_token(loss, ratio=ratio, advantage=advantage, ref=-2.5)
            where = f"{NEAR_REFERENCE}, ratio {ratio:g}, advantage {advantage:g} instead of 0; the KL's gradient is"
            yield from loss.unequal("the KL depends on the advantage", where, kl[1], apart[1])


def the_kl_is_that_of_policy_and_reference(loss: Examined) -> Iterator[Finding]:
    """Require that the expected gradient over a vocabulary is that of KL(policy || reference), or k3's."""
    generator = torch.Generator().manual_seed(3)
    logps, ref = torch.randn(2, 3, generator=generator, dtype=torch.float64).log_softmax(1)
    batch = tokens(torch.ones_like(logps), torch.zeros_like(logps), logps, ref)
    of_kl = loss.gradient(batch, beta=1.0) - loss.gradient(batch, beta=0.0)
    slopes = (of_kl / token_weights(loss, batch))[:, 0]
    probs = logps.exp()
    # gradients with respect to logits
    found, right = (probs * (x - probs @ x) for x in (slopes, logps - ref))
    if not loss.differ(found, 0 * found):
        yield Finding("the KL's expected gradient is 0, so the KL never draws the policy to the reference")
    elif loss.differ(found, probs - ref.exp()):
        where = "one token, averaged over a vocabulary of 3 tokens; its expected gradient is"
        yield from loss.unequal("the KL is not that of policy and reference", where, found, right)


ON_POLICY_LAWS: tuple[Law, ...] = (
    gradients_are_proportional_to_advantages,
    one_token_has_the_gradient_of_its_advantage,
)
KL_LAWS: tuple[Law, ...] = (
    the_reference_acts_through_beta,
    the_kl_acts_apart_from_the_advantage,
    the_kl_is_that_of_policy_and_reference,
)
