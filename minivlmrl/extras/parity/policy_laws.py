"""Test properties ("laws") of a policy loss: advantages, ratios and the KL.

Most laws test one factor of a token's gradient:

    d loss / d log-prob = -advantage * weight in the loss average * f(ratio)

PPO has f(ratio) = ratio, or 0 where clipping stops the gradient.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from minivlmrl.extras.parity.examined import MASKS, Examined, Law, described, numbers, random_batch

NO_KL = "no KL: beta changes nothing"
LOGP = -2.0  # policy log-prob in test batches of one token


def tokens(
    ratios: Tensor, advantages: Tensor, logp: float | Tensor = LOGP, ref: float | Tensor = LOGP
) -> dict[str, Tensor]:
    """Return a batch of B one-token completions.

    Args:
        ratios, advantages: (B,)
        logp, ref: (B,) or number, log-probs under policy and reference.
    """
    logps = (ratios * 0 + logp)[:, None]
    return {
        "per_token_logps": logps,
        "old_per_token_logps": logps - ratios.log()[:, None],
        "ref_per_token_logps": (ratios * 0 + ref)[:, None],
        "mask": torch.ones_like(logps),
        "advantages": advantages,
    }


def of_one_token(loss: Examined, beta=0.0, ratio=1.0, advantage=1.0, **logps: float) -> Tensor:
    """Return loss and gradient (2,) for a batch of one token.

    In every loss average, the weight of this token is 1.
    """
    batch = tokens(torch.tensor([ratio]).double(), torch.tensor([advantage]).double(), **logps)
    value, slope = loss(batch, beta=beta, max_completion_length=1.0)
    return torch.stack([value, slope.squeeze()])


def token_weights(loss: Examined, batch: dict[str, Tensor]) -> Tensor:
    """Return the weights (B, T) of tokens in the loss average.

    With all ratios and advantages 1, the weight of a token is its negative gradient.
    """
    on_policy = dict(batch)
    on_policy["old_per_token_logps"] = batch["per_token_logps"]
    on_policy["advantages"] = torch.ones_like(batch["advantages"])
    return -loss.gradient(on_policy, beta=0.0)


# --------------------------------------------------------------------------------------------------------- advantages


def gradients_are_proportional_to_advantages(loss: Examined) -> Iterator[str]:
    """Require the gradient -advantage * weight at ratio 1, independent of the advantages in other rows."""
    for mask in MASKS:
        batch = random_batch("grpo", mask)
        advantages = torch.tensor([0.5, -1.0, 0.0, 2.0]).double()[: len(mask)]
        batch |= {"old_per_token_logps": batch["per_token_logps"], "advantages": advantages}
        weights = token_weights(loss, batch)
        if (weights[batch["mask"] > 0] < 1e-9).any():
            yield (
                "a token is not pushed in the direction of its advantage. Smallest batch: mask "
                f"{numbers(batch['mask'])}, all advantages and ratios 1; the gradient is {numbers(-weights)}"
            )
        where = f"{described(batch, {})}; the gradient is"
        right = -advantages[:, None] * weights
        says = "the gradient of a token is not proportional to its advantage"
        yield from loss.unequal(says, where, loss.gradient(batch, beta=0.0), right)


def one_token_has_the_gradient_of_its_advantage(loss: Examined) -> Iterator[str]:
    """Require the gradient -1 for a single token with advantage 1 and ratio 1."""
    _, slope = of_one_token(loss)
    where = "one token, advantage 1, ratio 1; the gradient is"
    yield from loss.unequal("the gradient of a token has a wrong size", where, slope, torch.tensor(-1.0))


# ------------------------------------------------------------------------------------------------------------- ratios


def ratios_keep_direction_and_bound(loss: Examined) -> Iterator[str]:
    """Require that no ratio flips a gradient's sign, and that positive advantages have bounded gradients."""
    ratios = torch.logspace(-3, 1.7, 100, dtype=torch.float64)
    for advantage in (1.0, -1.0):
        batch = tokens(ratios, 0 * ratios + advantage)
        pushes = -advantage * loss.gradient(batch, beta=0.0) / token_weights(loss, batch)
        where = f"Smallest batch: one token, advantage {advantage:g}, ratio"
        lowest = int(pushes.argmin())
        if pushes.min() < -loss.tolerance:
            yield f"a token is pushed against its advantage. {where} {ratios[lowest]:.3g}"
        if advantage > 0 and pushes[-1] > 0.99 * ratios[-1]:
            yield f"a token that became likelier is pushed up more, without a bound. {where} {ratios[-1]:.3g}"


# ----------------------------------------------------------------------------------------------------------- averages


def weights_note(loss: Examined) -> Iterator[str]:
    """Report token weights, which show how the loss is averaged. In DAPO, all tokens have the same weight."""
    batch = random_batch("grpo", MASKS[3])
    yield f"with the {described(batch, {})}, the tokens have the weights {numbers(token_weights(loss, batch))}"


# ------------------------------------------------------------------------------------------------------------- the KL


NEAR_REFERENCE = "one token with the log-probability -2, and -2.5 for the reference"


def kl_of_one_token(loss: Examined, beta: float = 1.0, **token: float) -> Tensor:
    """Return what the KL adds to loss and gradient for one token."""
    return of_one_token(loss, beta, **token) - of_one_token(loss, **token)


def the_reference_acts_through_beta(loss: Examined) -> Iterator[str]:
    """Require a KL gradient proportional to beta, and no effect of the reference if beta is 0."""
    near = of_one_token(loss, ref=-2.5)
    far = of_one_token(loss, ref=-1.2)
    where = f"{NEAR_REFERENCE}; loss and gradient are, instead of with -1.2 for the reference,"
    yield from loss.unequal("the reference changes the loss even if beta is 0", where, near, far)
    once = kl_of_one_token(loss, 1.0, ref=-2.5)
    twice = kl_of_one_token(loss, 2.0, ref=-2.5)
    where = f"{NEAR_REFERENCE}; value and gradient of the KL, with beta 2, are"
    yield from loss.unequal("the KL is not proportional to beta", where, twice, 2 * once)
    if once[0].abs() > loss.tolerance and once[1] == 0:
        yield f"the KL has no gradient, but only a value. Smallest batch: {NEAR_REFERENCE}"


def no_kl_note(loss: Examined) -> Iterator[str]:
    """Report that the loss has no KL to test."""
    if kl_of_one_token(loss, ref=-2.5).abs().max() <= loss.tolerance:
        yield NO_KL


def the_kl_acts_apart_from_the_advantage(loss: Examined) -> Iterator[str]:
    """Check that advantage and clipping do not change the KL gradient."""
    for ratio in (1.0, 0.5, 1.65):
        apart = kl_of_one_token(loss, ratio=ratio, advantage=0.0, ref=-2.5)
        for advantage in (1.0, -1.0):
            kl = kl_of_one_token(loss, ratio=ratio, advantage=advantage, ref=-2.5)
            where = f"{NEAR_REFERENCE}, ratio {ratio:g}, advantage {advantage:g} instead of 0; the KL's gradient is"
            yield from loss.unequal("the KL depends on the advantage", where, kl[1], apart[1])


def the_kl_is_that_of_policy_and_reference(loss: Examined) -> Iterator[str]:
    """Require the expected gradient of KL(policy || reference), or of its estimator k3, over a vocabulary."""
    generator = torch.Generator().manual_seed(3)
    logps, ref = torch.randn(2, 3, generator=generator, dtype=torch.float64).log_softmax(1)
    batch = tokens(torch.ones_like(logps), torch.zeros_like(logps), logps, ref)
    of_kl = loss.gradient(batch, beta=1.0) - loss.gradient(batch, beta=0.0)
    weights = token_weights(loss, batch)
    if not (of_kl.any() and weights.all()):
        return
    slopes = (of_kl / weights)[:, 0]
    probs = logps.exp()
    # expected gradients with respect to logits
    found = probs * (slopes - probs @ slopes)
    right = probs * (logps - ref - probs @ (logps - ref))
    if not loss.differ(found, 0 * found):
        yield "the KL's expected gradient is 0, so the KL never draws the policy to the reference"
    elif loss.differ(found, probs - ref.exp()):
        where = "one token, averaged over a vocabulary of 3 tokens; its expected gradient is"
        yield from loss.unequal("the KL is not that of policy and reference", where, found, right)


ON_POLICY_LAWS: tuple[Law, ...] = (
    gradients_are_proportional_to_advantages,
    one_token_has_the_gradient_of_its_advantage,
    ratios_keep_direction_and_bound,
)
KL_LAWS: tuple[Law, ...] = (
    the_reference_acts_through_beta,
    the_kl_acts_apart_from_the_advantage,
    the_kl_is_that_of_policy_and_reference,
)
