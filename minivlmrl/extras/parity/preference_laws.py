"""Check properties ("laws") of DPO and SFT losses."""

from collections.abc import Iterator

import torch
from torch import Tensor

from minivlmrl.extras.parity.common_laws import micro_batches_add_up
from minivlmrl.extras.parity.examined import MASKS, Examined, Finding, Law, described, numbers, random_batch, smallest

# losses that depend only on the margin: chosen log-ratio minus rejected log-ratio
OF_THE_MARGIN = ("sigmoid", "hinge", "exo_pair", "robust", "discopop", "sigmoid_norm", "ipo")
OF_MEANS = ("ipo", "sigmoid_norm")  # losses that average log-ratios over answer tokens
A_PAIR = "two answers of one token, with the log-ratios {:g} (chosen) and {:g}"
USUAL = 0.4, -0.3  # log-ratios of most pairs


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
            f"the loss does not {verb} if the {name} answer gains. Smallest batch: {A_PAIR.format(*log_ratios)}; their "
            f"gradients are {chosen:.3g} and {rejected:.3g}",
            "note" if is_sft else "broken",
        )


def only_log_ratios_count(loss: Examined) -> Iterator[Finding]:
    """Require the same loss after adding the same number to policy and reference log-probs."""
    if loss.loss_type == "sft":
        return
    batch = pair(*USUAL)
    both = torch.tensor([[[0.5], [-0.7]]], dtype=torch.float64)
    moved = {name: x if name == "mask" else x + both for name, x in batch.items()}
    yield from loss.unequal(
        "the loss depends on more than log-ratios of policy and reference",
        f"{A_PAIR.format(*USUAL)}; if policy and reference both have 0.5 nats more for the chosen answer and 0.7 less "
        "for the rejected one, the loss is",
        loss(moved)[0],
        loss(batch)[0],
    )


@smallest
def answers_have_opposite_gradients(loss: Examined) -> Iterator[Finding]:
    """Require that losses of the margin move both answers alike."""
    if loss.loss_type not in OF_THE_MARGIN:
        return
    for log_ratios in (USUAL, (-0.5, 0.9)):
        chosen, rejected = loss.gradient(pair(*log_ratios)).flatten()
        where = f"{A_PAIR.format(*log_ratios)}; the gradient of the rejected one is"
        yield from loss.unequal("the answers do not have opposite gradients", where, rejected, -chosen)


def beta_multiplies_the_margin(loss: Examined) -> Iterator[Finding]:
    """Require the same loss for twice the margin as for twice beta; IPO has a margin of its own."""
    if loss.loss_type not in OF_THE_MARGIN:
        return
    if loss.loss_type == "ipo":
        yield from pulls_to_its_margin(loss)
        return
    beta = loss.options["beta"]
    once, _ = loss(pair(0.8, -0.6), beta=beta)
    twice, _ = loss(pair(*USUAL), beta=2 * beta)
    where = f"{A_PAIR.format(*USUAL)}; instead of with twice the log-ratios, with beta {2 * beta:g} the loss is"
    yield from loss.unequal("beta does not multiply the margin", where, twice, once)


@smallest
def pulls_to_its_margin(loss: Examined) -> Iterator[Finding]:
    """Require that IPO's loss is 0 at its margin, and grows alike on both sides."""
    margin = 1 / (2 * loss.options["beta"])
    value, below, above = (loss(pair(margin * share, 0.0))[0] for share in (1.0, 0.5, 1.5))
    where = f"{A_PAIR.format(margin, 0)}; the loss is"
    yield from loss.unequal("the loss is not 0 at IPO's margin 1 / (2 beta)", where, value, torch.zeros(()))
    where = f"{A_PAIR.format(1.5 * margin, 0)}; as far below the margin the loss is the same, but here it is"
    yield from loss.unequal("the loss does not pull the margin back to 1 / (2 beta)", where, above, below)


def log_ratios_are_added_or_averaged(loss: Examined) -> Iterator[Finding]:
    """Check whether the loss depends on the sum or the mean of an answer's log-ratios."""
    if loss.loss_type == "sft":
        return
    one_token, _ = loss(pair(*USUAL))
    same_sum, _ = loss(pair(*USUAL, tokens=3))
    same_mean, _ = loss(pair(1.2, -0.9, tokens=3))
    found = [verb for verb, x in (("added", same_sum), ("averaged", same_mean)) if not loss.differ(x, one_token)]
    right = "averaged" if loss.loss_type in OF_MEANS else "added"
    if found != [right]:
        what = f"{found[0]} instead of {right}" if len(found) == 1 else f"not {right}"
        yield Finding(
            f"the log-ratios of an answer's tokens are {what}. Smallest batch: {A_PAIR.format(*USUAL)}; the loss is "
            f"{numbers(one_token)}, with the same sums over three tokens {numbers(same_sum)}, and with the same means "
            f"{numbers(same_mean)}",
            "note" if loss.loss_type == "ipo" and found else "broken",  # the DPO authors sum log-ratios in IPO
        )


def labels_are_smoothed(loss: Examined) -> Iterator[Finding]:
    """Check label smoothing: a mean over both answer orders (cDPO), or the unbiased loss (robust)."""
    if loss.loss_type not in ("sigmoid", "robust"):
        return
    e = 0.1
    plain, exchanged = (loss(pair(*ratios), label_smoothing=0.0)[0] for ratios in (USUAL, (USUAL[1], USUAL[0])))
    smoothed, _ = loss(pair(*USUAL), label_smoothing=e)
    is_robust = loss.loss_type == "robust"
    right = ((1 - e) * plain - e * exchanged) / (1 - 2 * e) if is_robust else (1 - e) * plain + e * exchanged
    is_ignored = not loss.differ(smoothed, plain)
    if is_ignored and is_robust:
        yield Finding("the loss ignores label_smoothing")
    elif is_ignored:
        yield Finding("label smoothing, because label_smoothing changes nothing", "not tested")
    else:
        where = f"{A_PAIR.format(*USUAL)}; with label_smoothing {e} the loss is"
        yield from loss.unequal("label_smoothing acts in a wrong way", where, smoothed, right)


def pairs_are_averaged(loss: Examined) -> Iterator[Finding]:
    """Require that three equal pairs have the loss of one."""
    one, _ = loss(pair(*USUAL))
    three, _ = loss({name: x.repeat(3, 1, 1) for name, x in pair(*USUAL).items()})
    yield from loss.unequal("pairs are not averaged", f"three times {A_PAIR.format(*USUAL)}; the loss is", three, one)


@smallest
def tokens_are_averaged(loss: Examined) -> Iterator[Finding]:
    """Require the gradient -1 / (number of tokens) for each log-prob; dft multiplies it by the token's probability."""
    for mask in MASKS:
        batch = random_batch("sft", mask)
        wanted = -batch["mask"] / batch["mask"].sum()
        loss_is = "minus the mean over all tokens"
        if loss.loss_type == "dft":
            wanted = wanted * batch["per_token_logps"].exp()
            loss_is += " of their log-probabilities times their detached probabilities"
        where = f"{described(batch)}; the gradient is"
        yield from loss.unequal(f"the loss is not {loss_is}", where, loss.gradient(batch), wanted)


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
