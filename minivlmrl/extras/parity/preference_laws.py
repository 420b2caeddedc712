"""Check properties ("laws") of DPO and SFT losses."""

from collections.abc import Iterator

import torch
from torch import Tensor

from minivlmrl.extras.parity.common_laws import micro_batches_add_up
from minivlmrl.extras.parity.examined import MASKS, Examined, Finding, Law, described, numbers, random_batch

# losses that depend only on the margin: chosen log-ratio minus rejected log-ratio
OF_THE_MARGIN = ("sigmoid", "hinge", "exo_pair", "robust", "discopop", "sigmoid_norm", "ipo")
OF_MEANS = ("ipo", "sigmoid_norm")  # losses that average log-ratios over answer tokens
TWO_TOKENS = "Smallest batch: two answers of one token, with the log-ratios"


def pair(chosen: float, rejected: float, tokens: int = 1) -> dict[str, Tensor]:
    """Return a batch with one answer pair, whose tokens share the summed log-ratios, in nats, equally."""
    log_ratios = torch.tensor([[[chosen], [rejected]]], dtype=torch.float64) / tokens
    ref = torch.full((1, 2, tokens), -1.5, dtype=torch.float64)
    return {"per_token_logps": ref + log_ratios, "ref_per_token_logps": ref, "mask": torch.ones_like(ref)}


def recognize_ipo(loss: Examined):
    """Set loss_type to "ipo" if the user gave no loss_type, but the loss has the value of IPO."""
    beta = loss.options["beta"]
    value, _ = loss(pair(0.4, -0.3))
    if "loss_type" not in loss.given and not loss.differ(value, torch.tensor((0.7 - 1 / (2 * beta)) ** 2)):
        loss.loss_type = "ipo"


def answers_act_in_their_directions(loss: Examined) -> Iterator[Finding]:
    """Require a loss that falls if the chosen answer becomes likelier, and rises if the rejected one does."""
    # no correct loss has a zero gradient at these log-ratios
    log_ratios = [-0.45 / loss.options["beta"], -0.2 / loss.options["beta"]]
    chosen, rejected = loss.gradient(pair(*log_ratios)).flatten().tolist()
    for name, slope, verb in (("chosen", -chosen, "fall"), ("rejected", rejected, "rise")):
        if slope > 0:
            continue
        is_sft = loss.loss_type == "sft" and name == "rejected"
        yield Finding(
            f"the loss does not {verb} if the {name} answer gains. {TWO_TOKENS} {log_ratios[0]:g} (chosen) "
            f"and {log_ratios[1]:g}; their gradients are {chosen:.3g} and {rejected:.3g}",
            "note" if is_sft else "broken",
        )


def only_log_ratios_count(loss: Examined) -> Iterator[Finding]:
    """Require the same loss after adding the same number to policy and reference log-probs."""
    if loss.loss_type == "sft":
        return
    batch = pair(0.4, -0.3)
    both = torch.tensor([[[0.5], [-0.7]]], dtype=torch.float64)
    moved = {name: x if name == "mask" else x + both for name, x in batch.items()}
    value, slope = loss(batch)
    other_value, other_slope = loss(moved)
    if loss.differ(other_value, value) or loss.differ(other_slope, slope):
        yield Finding(
            f"the loss depends on more than log-ratios of policy and reference. {TWO_TOKENS} 0.4 (chosen) and -0.3; if "
            "policy and reference both have 0.5 nats more for the chosen answer and 0.7 less for the rejected one, "
            f"the loss is {numbers(other_value)} instead of {numbers(value)}"
        )


def answers_have_opposite_gradients(loss: Examined) -> Iterator[Finding]:
    if loss.loss_type not in OF_THE_MARGIN:
        return
    for chosen, rejected in ((0.4, -0.3), (-0.5, 0.9)):
        slope = loss.gradient(pair(chosen, rejected)).flatten()
        if loss.differ(slope[0], -slope[1]):
            yield Finding(
                f"the answers do not have opposite gradients. {TWO_TOKENS} {chosen:g} (chosen) and {rejected:g}; their "
                f"gradients are {numbers(slope)}"
            )
            return


def beta_multiplies_the_margin(loss: Examined) -> Iterator[Finding]:
    if loss.loss_type not in OF_THE_MARGIN:
        return
    if loss.loss_type == "ipo":
        target = 1 / (2 * loss.options["beta"])
        value, _ = loss(pair(target / 2, -target / 2))
        if loss.differ(value, torch.zeros(())):
            yield Finding(
                f"the loss is not 0 at IPO's margin 1 / (2 beta). {TWO_TOKENS} {target / 2:g} (chosen) and "
                f"{-target / 2:g}; the loss is {numbers(value)}"
            )
        below, above = (loss(pair(target * share, 0.0))[0] for share in (0.5, 1.5))
        if not loss.differ(value, torch.zeros(())) and loss.differ(above, below):
            yield Finding(
                f"the loss does not pull the margin back to 1 / (2 beta). {TWO_TOKENS} {1.5 * target:g} (chosen) "
                f"and 0; the loss is {numbers(above)}, but {numbers(below)} as far below IPO's margin"
            )
        return
    beta = loss.options["beta"]
    once, _ = loss(pair(0.8, -0.6), beta=beta)
    twice, _ = loss(pair(0.4, -0.3), beta=2 * beta)
    if loss.differ(once, twice):
        yield Finding(
            f"beta does not multiply the margin. {TWO_TOKENS} 0.4 (chosen) and -0.3; with beta {2 * beta:g} the loss "
            f"is {numbers(twice)}, but with twice the log-ratios and beta {beta:g} it is {numbers(once)}"
        )


def log_ratios_are_added_or_averaged(loss: Examined) -> Iterator[Finding]:
    if loss.loss_type == "sft":
        return
    one_token, _ = loss(pair(0.4, -0.3))
    same_sum, _ = loss(pair(0.4, -0.3, tokens=3))
    same_mean, _ = loss(pair(1.2, -0.9, tokens=3))
    found = [verb for verb, x in (("added", same_sum), ("averaged", same_mean)) if not loss.differ(x, one_token)]
    right = "averaged" if loss.loss_type in OF_MEANS else "added"
    if found != [right]:
        what = f"{found[0]} instead of {right}" if len(found) == 1 else f"not {right}"
        yield Finding(
            f"the log-ratios of an answer's tokens are {what}. {TWO_TOKENS} 0.4 (chosen) and -0.3; the loss is "
            f"{numbers(one_token)}, with the same sums over three tokens {numbers(same_sum)}, and with the same means "
            f"{numbers(same_mean)}",
            "note" if loss.loss_type == "ipo" and found else "broken",  # the DPO authors sum log-ratios in IPO
        )


def labels_are_smoothed(loss: Examined) -> Iterator[Finding]:
    """Check label smoothing: a mean over both answer orders (cDPO), or the unbiased loss (robust)."""
    if loss.loss_type not in ("sigmoid", "robust"):
        return
    e = 0.1
    plain, exchanged = (loss(pair(*ratios), label_smoothing=0.0)[0] for ratios in ((0.4, -0.3), (-0.3, 0.4)))
    smoothed, _ = loss(pair(0.4, -0.3), label_smoothing=e)
    is_robust = loss.loss_type == "robust"
    right = ((1 - e) * plain - e * exchanged) / (1 - 2 * e) if is_robust else (1 - e) * plain + e * exchanged
    is_ignored = not loss.differ(smoothed, plain)
    if is_ignored and is_robust:
        yield Finding("the loss ignores label_smoothing")
    elif is_ignored:
        yield Finding("label smoothing, because label_smoothing changes nothing", "not tested")
    elif loss.differ(smoothed, right):
        yield Finding(
            f"label_smoothing acts in a wrong way. {TWO_TOKENS} 0.4 (chosen) and -0.3; with label_smoothing {e} the "
            f"loss is {smoothed:.4f} instead of {right:.4f}"
        )


def pairs_are_averaged(loss: Examined) -> Iterator[Finding]:
    one, _ = loss(pair(0.4, -0.3))
    three, _ = loss({name: x.repeat(3, 1, 1) for name, x in pair(0.4, -0.3).items()})
    if loss.differ(three, one):
        yield Finding(
            f"pairs are not averaged. {TWO_TOKENS} 0.4 (chosen) and -0.3; the loss is {numbers(one)}, but three such "
            f"pairs have {numbers(three)}"
        )


def tokens_are_averaged(loss: Examined) -> Iterator[Finding]:
    """Require the gradient -1 / (number of tokens) for each log-prob; dft multiplies it by the token's probability."""
    for mask in MASKS:
        batch = random_batch("sft", mask)
        slope = loss.gradient(batch)
        wanted = -batch["mask"] / batch["mask"].sum()
        loss_is = "minus the mean over all tokens"
        if loss.loss_type == "dft":
            wanted = wanted * batch["per_token_logps"].exp()
            loss_is += " of their log-probabilities times their detached probabilities"
        if loss.differ(slope, wanted):
            yield Finding(
                f"the loss is not {loss_is}. Smallest batch: {described(batch)}; the gradient is "
                f"{numbers(slope)} instead of {numbers(wanted)}"
            )
            return


DPO_LAWS: tuple[Law, ...] = (
    answers_act_in_their_directions,
    only_log_ratios_count,
    answers_have_opposite_gradients,
    beta_multiplies_the_margin,
    log_ratios_are_added_or_averaged,
    labels_are_smoothed,
    pairs_are_averaged,
    micro_batches_add_up,
)
# {check: checks that must pass first}
DPO_NEEDS: dict[Law, set[Law]] = {
    beta_multiplies_the_margin: {answers_act_in_their_directions, only_log_ratios_count},
    log_ratios_are_added_or_averaged: {answers_act_in_their_directions, only_log_ratios_count},
    labels_are_smoothed: {answers_act_in_their_directions, answers_have_opposite_gradients, beta_multiplies_the_margin},
}
SFT_LAWS: tuple[Law, ...] = (tokens_are_averaged, micro_batches_add_up)
