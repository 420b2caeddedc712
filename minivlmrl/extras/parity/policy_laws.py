"""Checks ("laws") of a policy loss: advantages, ratios, clip bounds, averages and the KL.

Most checks test one factor of a token's gradient:

    d loss / d log-prob = -advantage * weight in the loss average * f(ratio)

PPO has f(ratio) = ratio, or 0 where clipping stops the gradient.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from minivlmrl.extras.parity.common_laws import masked_tokens_are_inert, micro_batches_add_up, padding_changes_nothing
from minivlmrl.extras.parity.examined import (
    DEFAULTS_OF,
    MASKS,
    Examined,
    Finding,
    Law,
    contrast,
    described,
    numbers,
    random_batch,
    smallest,
)
from minivlmrl.losses.grpo import AVERAGES, LossNormalizer, TermInputs
from minivlmrl.losses.grpo_variants import RATIOS, TERMS

CLIPPED = ("grpo", "dapo", "dr_grpo", "bnpo", "luspo", "rloo")
LOSS_TYPES = (*CLIPPED, "cispo", "sapo", "vespo")
LOGP = -2.0  # policy log-prob in test batches of one token


def asked_type(loss: Examined) -> str | None:
    """Return the user's loss_type, None if missing or not in LOSS_TYPES."""
    return loss.loss_type if "loss_type" in loss.given and loss.loss_type in LOSS_TYPES else None


def one_token(ratio: float = 1.0, advantage: float = 1.0, ref: float = LOGP, logp: float = LOGP) -> dict[str, Tensor]:
    """Return a batch with one token."""
    logps = {"per_token_logps": logp, "old_per_token_logps": logp - math.log(ratio), "ref_per_token_logps": ref}
    batch = {name: torch.full((1, 1), x, dtype=torch.float64) for name, x in logps.items()}
    return batch | {"mask": torch.ones(1, 1).double(), "advantages": torch.tensor([advantage]).double()}


def of_one_token(loss: Examined, beta: float = 0.0, **token: float) -> tuple[float, float]:
    """Return loss and gradient for a batch with one token, whose weight is 1 in every loss average."""
    value, slope = loss(one_token(**token), beta=beta, max_completion_length=1)
    return value.item(), slope.item()


def on_policy(batch: dict[str, Tensor], advantages: Tensor) -> dict[str, Tensor]:
    """Return the batch with all ratios 1, and with these advantages."""
    return batch | {"old_per_token_logps": batch["per_token_logps"], "advantages": advantages.double()}


def use_its_own_numbers(loss: Examined):
    """Use epsilon_high=5 if the loss is CISPO. Rescale a dr_grpo loss that divides by its own constant."""
    if not {"loss_type", "epsilon_high"} & loss.given.keys():
        usual = of_one_token(loss)[1]
        loose = loss.gradient(one_token(), beta=0.0, max_completion_length=1, **DEFAULTS_OF["cispo"]).item()
        if usual == -loss.options["epsilon_high"] and loose == -1:
            loss.options |= DEFAULTS_OF["cispo"]
    if asked_type(loss) != "dr_grpo":
        return
    once, again = (loss.gradient(one_token(), beta=0.0, max_completion_length=length).item() for length in (1, 2))
    if once == again != 0:
        my_loss, constant = loss.my_loss, abs(1 / once)
        loss.my_loss = lambda batch, options: my_loss(batch, options) * constant / options["max_completion_length"]


def token_weights(loss: Examined, batch: dict[str, Tensor]) -> Tensor:
    """Return token weights (B, T) in the loss average: the negative gradient if all ratios and advantages are 1."""
    return -loss.gradient(on_policy(batch, torch.ones(len(batch["mask"]))), beta=0.0)


# --------------------------------------------------------------------------------------------------------- advantages


@smallest
def tokens_follow_their_advantage(loss: Examined) -> Iterator[Finding]:
    """Require that training raises log-probs for positive advantages, and lowers them for negative ones."""
    for mask in MASKS:
        for shift in range(3):
            advantages = torch.tensor([1.0, -1.0, 0.0, 0.5]).roll(shift)[: len(mask)]
            batch = on_policy(random_batch("grpo", mask), advantages)
            slope = loss.gradient(batch, beta=0.0)
            direction = -(slope * (slope.abs() > loss.tolerance / 1000)).sign()
            wrong = batch["mask"].bool() & (direction != advantages[:, None].sign()) & ~slope.isnan()
            for row, token in wrong.nonzero().tolist():
                what = "a token is not pushed in the direction of its advantage"
                if advantages[row] == 0:
                    what = "a token whose advantage is 0 is trained, although beta is 0"
                yield Finding(
                    f"{what}. Smallest batch: {described(batch)}; the gradient of token {token} in row {row} is "
                    f"{numbers(slope[row, token])}"
                )


@smallest
def one_token_has_the_gradient_of_its_advantage(loss: Examined) -> Iterator[Finding]:
    """Require the gradient -advantage at ratio 1."""
    for advantage in (1.0, -0.5):
        slope = loss.gradient(one_token(advantage=advantage), beta=0.0, max_completion_length=1)
        where = f"one token, advantage {advantage:g}, ratio 1; the gradient is"
        yield from loss.unequal("the gradient of a token has a wrong size", where, slope, 0 * slope - advantage)


@smallest
def advantages_act_alone(loss: Examined) -> Iterator[Finding]:
    """Require that an advantage does not change the gradient of other rows."""
    for mask in MASKS[4:]:
        batch = random_batch("grpo", mask)
        before = loss.gradient(batch, beta=0.0)
        advantages = batch["advantages"].clone()
        advantages[-1] = -advantages[-1] - 1
        after = loss.gradient(batch | {"advantages": advantages}, beta=0.0)
        where = f"{described(batch)}; if the last advantage is {advantages[-1]:.3g}, the gradient of the first rows is"
        yield from loss.unequal("an advantage changes the gradient of other rows", where, after[:-1], before[:-1])


# ------------------------------------------------------------------------------------------------- ratios and bounds


@dataclass
class GradientFactor:
    """Formula for a token's gradient as a function of ratio and advantage."""

    says: str
    weight: Callable[[Tensor, Tensor], Tensor]  # (ratio, advantage) -> token gradient divided by -advantage
    loss_types: tuple[str, ...]  # loss types that have this formula, or may have it
    is_variant: bool = False  # a deliberate variant of these loss types


def of_term(loss_type: str, epsilon_low: float, epsilon_high: float, **options) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the formula of one of our losses, measured for tokens in rows of their own."""

    def weight(ratio: Tensor, advantage: Tensor) -> Tensor:
        logps = torch.zeros_like(ratio).view(-1, 1).requires_grad_()
        log_ratio = logps + ratio.log().view(-1, 1)
        inputs = (logps, log_ratio, log_ratio.exp(), advantage.reshape(-1, 1), torch.ones_like(logps))
        terms, _ = TERMS[loss_type](TermInputs(*inputs, epsilon_low, epsilon_high), **options)
        [slope] = torch.autograd.grad(terms.sum(), logps)
        return -slope.view_as(ratio) / advantage

    return weight


def measured_tokens(loss: Examined) -> Tensor:
    """Measure gradients of single tokens, with ratios just below and above all clip bounds.

    Returns (3, n): ratios, advantages, weights. A weight is a gradient divided by the gradient at ratio 1.
    """
    low, high = loss.options["epsilon_low"], loss.options["epsilon_high"]
    bounds = [1 - low, 1 + low, 1 - high, 1 + high, math.exp(-low), math.exp(high)]
    near = [bound + step for bound in bounds for step in (-0.01, 0.01)]
    ratios = {1e-3, 0.3, 0.61, 0.95, 1.0, 1.05, 1.65, 2.5, 3.5, 7.0, 12.0, 50.0, *near}
    tokens = []
    # advantages 0.5 and -2 show whether the loss clips the ratio, or ratio * advantage
    for advantage in (1.0, -1.0, 0.5, -2.0):
        _, unit = of_one_token(loss, advantage=advantage)
        for ratio in sorted(ratio for ratio in ratios if ratio > 0):
            _, slope = of_one_token(loss, ratio=ratio, advantage=advantage)
            tokens.append((ratio, advantage, slope / unit))
    return torch.tensor(tokens, dtype=torch.float64).T


def known_factors(loss: Examined, tokens: Tensor) -> list[GradientFactor]:
    """List known formulas for a token's gradient, such as PPO's."""
    low, high = loss.options["epsilon_low"], loss.options["epsilon_high"]
    _, advantages, weights = tokens
    weights = weights[(advantages == 1) & (weights != 0)].tolist() or [0.0]
    smallest, largest = min(weights), max(weights)
    cap = edge(loss, 50.0, advantage=-1.0)
    factors = []
    for delta in (None, cap) if cap > 1.05 * (1 + high) else (None,):
        for upper in (high, low):
            variants = []
            if delta:
                variants.append(
                    f"a dual clip: a token with a negative advantage has no gradient at ratios above {delta:.3g}"
                )
            if upper != high:
                variants.append(
                    f"only one bound: the ratio is clipped at {1 + low:g} instead of {1 + high:g}, because "
                    "epsilon_high is not used"
                )
            says = ", and ".join(variants) or "PPO's gradient"
            formula = of_term("grpo", low, upper, delta=delta)
            factors.append(GradientFactor(says, formula, CLIPPED, is_variant=bool(variants)))
    factors += [
        GradientFactor(
            "no ratio, which is right for one update after each rollout, and wrong for a second update",
            lambda ratio, advantage: torch.ones_like(ratio),
            LOSS_TYPES,
            is_variant=True,
        ),
        GradientFactor("SAPO's gradient", of_term("sapo", low, high), ("sapo",)),
        GradientFactor("VESPO's gradient", of_term("vespo", low, high), ("vespo",)),
        GradientFactor(
            f"CISPO's gradient, with weights between {smallest:.3g} and {largest:.3g}",
            lambda ratio, advantage: ratio.clamp(smallest, max(smallest, largest)),
            ("cispo",),
        ),
    ]
    value, _ = of_one_token(loss, ratio=50.0)
    if value == 0:  # loss 0 at a large ratio: tokens are masked, not clipped
        first, last = edge(loss, 1e-3), edge(loss, 50.0)
        factors.append(
            GradientFactor(
                f"a mask: no token with a ratio below {first:.3g} or above {last:.3g} has a gradient (IcePop)",
                lambda ratio, advantage: ratio * ((ratio >= first) & (ratio <= last)),
                CLIPPED,
                is_variant=True,
            )
        )
    return factors


def edge(loss: Examined, outside: float, advantage: float = 1.0) -> float:
    """Return the ratio at which a token's gradient becomes 0, by bisection from 1 to `outside`."""
    inside = 1.0
    for _ in range(40):
        middle = (inside + outside) / 2
        _, slope = of_one_token(loss, ratio=middle, advantage=advantage)
        inside, outside = (middle, outside) if slope else (inside, middle)
    return outside


def misfits(factor: GradientFactor, tokens: Tensor, tolerance: float) -> list[list[float]]:
    """Return [ratio, advantage, weight, expected weight] for measured tokens that contradict a formula; ignore NaN."""
    ratios, advantages, weights = tokens
    expected = factor.weight(ratios, advantages)
    is_wrong = (weights - expected).abs() > tolerance * expected.abs().clamp(min=1)
    return torch.stack([*tokens, expected], 1)[is_wrong].tolist()


def right_and_fitting_factor(loss: Examined) -> tuple[GradientFactor, GradientFactor | None, Tensor]:
    """Return the correct gradient formula, the known formula that fits the loss (or None), and measured gradients."""
    tokens = measured_tokens(loss)
    factors = known_factors(loss, tokens)
    asked = asked_type(loss) or "grpo"
    right = next(factor for factor in factors if asked in factor.loss_types and not factor.is_variant)
    fitting = [factor for factor in factors if not misfits(factor, tokens, loss.tolerance)]
    return right, right if right in fitting else next(iter(fitting), None), tokens


def the_ratio_acts_within_its_bounds(loss: Examined) -> Iterator[Finding]:
    """Check token gradients at several ratios: PPO's, for example, must be 0 beyond clip bounds."""
    right, fitting, tokens = right_and_fitting_factor(loss)
    asked = asked_type(loss)
    if fitting is None:
        # the upper clip bound may use epsilon_high or epsilon_low: show errors for the better fit
        low = loss.options["epsilon_low"]
        one_bound = replace(right, weight=of_term("grpo", low, low))
        factors = [right, one_bound] if right.loss_types == CLIPPED else [right]
        wrong = [(factor, misfits(factor, tokens, loss.tolerance)) for factor in factors]
        yield from sentences(*min(wrong, key=lambda pair: len(pair[1])))
    elif fitting is not right and asked and asked not in fitting.loss_types:
        yield Finding(f"the loss has {fitting.says}, but loss_type is {asked}")
    elif fitting is not right:
        yield Finding(f"the loss has {fitting.says}", "note")


def sentences(right: GradientFactor, wrong: list[list[float]]) -> Iterator[Finding]:
    """Yield one sentence per kind of wrong gradient."""
    seen = set()
    for ratio, advantage, weight, expected in wrong:
        sign = "> 0" if advantage > 0 else "< 0"
        if weight == 0 and "cispo" in right.loss_types:
            says = "a token outside of the bounds has no gradient, but CISPO keeps every token's gradient"
        elif weight == 0:
            says = f"A {sign}: a token has no gradient where the loss must act"
        elif expected == 0:
            stops = "the clip must stop it" if right.loss_types == CLIPPED else "it must have none"
            says = f"A {sign}: a token has a gradient where {stops}"
        else:
            says = "the gradient of a token is wrong"
        if says not in seen:
            seen.add(says)
            slope = -weight * advantage + 0.0  # + 0.0: show 0 instead of -0
            comma = "," if "," in right.says else ""
            yield Finding(
                f"{says}. Smallest batch: one token, advantage {advantage:g}, ratio {ratio:.3g}; its "
                f"gradient is {slope:.4g}, but {right.says}{comma} is {-expected * advantage + 0.0:.4g}"
            )


# {importance_sampling_level: description}
LEVELS = {
    "token": "each token has its own ratio",
    "sequence": "the tokens of a completion have one ratio, the geometric mean of their ratios, as in GSPO",
    "sequence_sum": "the tokens of a completion have one ratio, the product of their ratios",
}


def ratios_belong_to_their_tokens(loss: Examined) -> Iterator[Finding]:
    """Require that a token's gradient uses its own ratio, or the mean or product of all ratios in its completion."""
    _, factor, _ = right_and_fitting_factor(loss)
    if factor is None:
        return
    is_sum = asked_type(loss) in ("rloo", "vespo")
    right = "sequence_sum" if is_sum else loss.options["importance_sampling_level"]
    left = list(LEVELS)
    for mask in MASKS:
        batch = random_batch("grpo", mask, off_policy=0.3)
        advantages = batch["advantages"][:, None]
        slope = loss.gradient(batch, beta=0.0)
        expected = {}
        for level in left:
            log_ratio = batch["per_token_logps"] - batch["old_per_token_logps"]
            ratio = RATIOS[level](log_ratio, batch["mask"])
            weights = factor.weight(ratio, advantages.expand_as(ratio)) * token_weights(loss, batch)
            expected[level] = -advantages * weights
        fitting = [level for level, x in expected.items() if not loss.differ(slope, x)]
        if not fitting:
            level = right if right in expected else left[0]
            wrong_slope, right_slope = contrast(slope, expected[level])
            yield Finding(
                f"a token has a wrong ratio. Smallest batch: {described(batch)}; the gradient is {wrong_slope}, but if "
                f"{LEVELS[level]}, it is {right_slope}"
            )
            return
        left = fitting
    if right not in left:
        is_asked = is_sum or "importance_sampling_level" in loss.given
        but = f", but importance_sampling_level is {right}" if is_asked else ""
        yield Finding(LEVELS[left[0]] + but, "broken" if is_asked else "note")


# ----------------------------------------------------------------------------------------------------------- averages


# {loss type: its average}
AVERAGE_SAYS = {
    "grpo": "each completion has the same weight",
    "dapo": "each token has the same weight",
    "dr_grpo": "tokens are divided by a constant",
    "luspo": "tokens are added up in each completion",
}
DEFINED_BY_THEIR_AVERAGES = (*AVERAGE_SAYS, "bnpo")  # loss types that all trainers average alike


def our_weights(loss_type: str, mask: Tensor, length: int) -> Tensor:
    """Return the weight of each token in the average of one of our losses."""
    terms = torch.zeros_like(mask).requires_grad_()
    loss = AVERAGES[loss_type](terms * mask, mask, LossNormalizer(len(mask), mask.sum(), length))
    return torch.autograd.grad(loss, terms)[0]


def the_average_is_that_of_the_loss_type(loss: Examined) -> Iterator[Finding]:
    """Check token weights in the loss average: DAPO, for example, weights all tokens equally."""
    batch = random_batch("grpo", [[1, 1, 1, 1, 0], [1, 0, 0, 0, 0]])
    mask, length = batch["mask"], loss.options["max_completion_length"]
    _, unit = of_one_token(loss)
    weights = token_weights(loss, batch) / -unit
    found = [name for name in AVERAGES if not loss.differ(weights, our_weights(name, mask, length), 1e-2)]
    found = [name for name in found if name != "rloo"]  # its ratio adds up a completion's tokens
    says = next(
        (AVERAGE_SAYS[name] for name in found if name in AVERAGE_SAYS),
        f"the tokens have the weights {numbers(weights)}",
    )
    asked = asked_type(loss)
    is_gspo = loss.given.get("importance_sampling_level") == "sequence"
    if asked not in DEFINED_BY_THEIR_AVERAGES or is_gspo:
        of = f", as in {', '.join(found)}" if found else ""
        yield Finding(says + of, "note")
    elif asked not in found:
        yield Finding(
            f"{says}, but loss_type is {asked}. Smallest batch: mask {numbers(mask)}; the weights are "
            "{} instead of {}".format(*contrast(weights, our_weights(asked, mask, length)))
        )


# ------------------------------------------------------------------------------------------------------------- the KL


NEAR_REFERENCE = "one token with the log-probability -2, and -2.5 for the reference"


def kl_of_one_token(loss: Examined, beta: float = 1.0, **token: float) -> tuple[float, float]:
    """Return what the KL adds to loss and gradient for one token."""
    with_kl = of_one_token(loss, beta, **token)
    without = of_one_token(loss, **token)
    return with_kl[0] - without[0], with_kl[1] - without[1]


def the_reference_acts_through_beta(loss: Examined) -> Iterator[Finding]:
    """Require a KL gradient proportional to beta, and no effect of the reference if beta is 0."""
    near, far = (of_one_token(loss, ref=ref) for ref in (-2.5, -1.2))
    if near != far and math.isfinite(near[1]):
        yield Finding(
            "the reference changes the loss even if beta is 0. Smallest batch: one token with the log-probability -2; "
            f"its gradient is {near[1]:.3g} if the reference is -2.5, and {far[1]:.3g} if it is -1.2"
        )
    if max(map(abs, kl_of_one_token(loss, ref=-2.5))) <= loss.tolerance:
        yield Finding("the KL, because beta changes nothing", "not tested")
        return
    (_, once), (_, twice) = (kl_of_one_token(loss, beta, ref=-2.5) for beta in (1.0, 2.0))
    if once == 0:
        yield Finding(f"the KL has no gradient, but only a value. Smallest batch: {NEAR_REFERENCE}")
    elif abs(twice - 2 * once) > loss.tolerance * abs(once):
        yield Finding(
            f"the KL is not proportional to beta. Smallest batch: {NEAR_REFERENCE}; the KL's gradient is {once:.3g} "
            f"with beta 1, and {twice:.3g} with beta 2"
        )


@smallest
def the_kl_acts_apart_from_the_advantage(loss: Examined) -> Iterator[Finding]:
    """Check that advantage and clipping do not change the KL gradient."""
    for ratio in (1.0, 0.5, 1.65):
        _, unmoved = kl_of_one_token(loss, ratio=ratio, advantage=0.0, ref=-2.5)
        for advantage in (1.0, -1.0):
            _, slope = kl_of_one_token(loss, ratio=ratio, advantage=advantage, ref=-2.5)
            where = f"{NEAR_REFERENCE}, ratio {ratio:g}, advantage {advantage:g} instead of 0; the KL's gradient is"
            yield from loss.unequal(
                "the KL depends on the advantage", where, torch.tensor(slope), torch.tensor(unmoved)
            )


def the_kl_is_that_of_policy_and_reference(loss: Examined) -> Iterator[Finding]:
    """Require that the expected KL over a vocabulary equals KL(policy || reference) in value, in gradient or both."""
    generator = torch.Generator().manual_seed(3)
    logits, ref_logits = torch.randn(2, 7, generator=generator, dtype=torch.float64)
    logps, ref = logits.log_softmax(0), ref_logits.log_softmax(0)
    tokens = zip(logps.tolist(), ref.tolist(), strict=True)
    pairs = [kl_of_one_token(loss, advantage=0.0, logp=logp, ref=ref_logp) for logp, ref_logp in tokens]
    values, slopes = torch.tensor(pairs, dtype=torch.float64).T
    probs = logps.exp()
    log_ratio = logps - ref
    value, right_value = probs @ values, probs @ log_ratio
    # gradients with respect to logits
    gradient, right_gradient = (probs * (x - probs @ x) for x in (slopes, log_ratio))
    has_value = not loss.differ(value, right_value)
    has_gradient = not loss.differ(gradient, right_gradient)
    if not (has_value or has_gradient):
        swapped = probs @ (log_ratio.expm1() - log_ratio)
        why = "" if loss.differ(value, swapped) else ". Policy and reference are swapped"
        yield Finding(
            "the KL is not that of policy and reference. Smallest batch: one token, averaged over a vocabulary of 7 "
            f"tokens; its expectation is {value:.4f} nats instead of {right_value:.4f}{why}"
        )
    elif not loss.differ(gradient, torch.zeros(7)):
        yield Finding("the KL's expected gradient is 0, so the KL never draws the policy to the reference")


POLICY_LAWS: tuple[Law, ...] = (
    tokens_follow_their_advantage,
    one_token_has_the_gradient_of_its_advantage,
    advantages_act_alone,
    the_ratio_acts_within_its_bounds,
    ratios_belong_to_their_tokens,
    the_average_is_that_of_the_loss_type,
    the_reference_acts_through_beta,
    the_kl_acts_apart_from_the_advantage,
    the_kl_is_that_of_policy_and_reference,
    micro_batches_add_up,
)
ADVANTAGE_ACTS = {tokens_follow_their_advantage, advantages_act_alone}
MASK_ACTS = {masked_tokens_are_inert, padding_changes_nothing}
# {check: checks that must pass first}
POLICY_NEEDS: dict[Law, set[Law]] = {
    one_token_has_the_gradient_of_its_advantage: ADVANTAGE_ACTS,
    the_ratio_acts_within_its_bounds: ADVANTAGE_ACTS,
    ratios_belong_to_their_tokens: ADVANTAGE_ACTS | MASK_ACTS,
    the_average_is_that_of_the_loss_type: ADVANTAGE_ACTS | MASK_ACTS,
    the_kl_acts_apart_from_the_advantage: {the_reference_acts_through_beta},
    the_kl_is_that_of_policy_and_reference: {the_reference_acts_through_beta},
    micro_batches_add_up: ADVANTAGE_ACTS | MASK_ACTS,
}
