"""Check properties ("laws") of DPO and SFT losses."""

from collections.abc import Iterator

import torch
from torch import Tensor

from minivlmrl.extras.parity.examined import MASKS, Examined, Finding, Law, described, random_batch
from minivlmrl.losses.preference import DPO_LOSSES

# losses that depend only on the margin: chosen log-ratio minus rejected log-ratio
OF_THE_MARGIN = ("sigmoid", "hinge", "exo_pair", "robust", "discopop", "sigmoid_norm", "ipo")
A_PAIR = "two answers of one token, with the log-ratios {:g} (chosen) and {:g}"
USUAL = 0.4, -0.3  # log-ratios in most pairs


def pair(chosen: float, rejected: float, tokens: int = 1) -> dict[str, Tensor]:
    """Return a batch with one answer pair, whose tokens share the summed log-ratios, in nats, equally."""
    log_ratios = torch.tensor([[[chosen], [rejected]]], dtype=torch.float64) / tokens
    ref = torch.full((1, 2, tokens), -1.5, dtype=torch.float64)
    return {"per_token_logps": ref + log_ratios, "ref_per_token_logps": ref, "mask": torch.ones_like(ref)}


def recognize_ipo(loss: Examined):
    """Set loss_type to "ipo" if the user gave no loss_type, but the loss has the value of IPO."""
    value, _ = loss(pair(*USUAL))
    right = torch.tensor((0.7 - 1 / (2 * loss.options["beta"])) ** 2)
    if "loss_type" not in loss.given and not loss.differ(value, right):
        loss.loss_type = "ipo"


def answers_act_in_their_directions(loss: Examined) -> Iterator[Finding]:
    """Require a loss that falls if the chosen answer becomes likelier, and rises if the rejected one does."""
    # no correct loss has a zero gradient at these log-ratios
    log_ratios = [-0.45 / loss.options["beta"], -0.2 / loss.options["beta"]]
    chosen, rejected = loss.gradient(pair(*log_ratios)).flatten().tolist()
    if chosen >= 0 or (rejected <= 0 and loss.loss_type != "sft"):
        yield Finding(
            "the loss does not fall if the chosen answer gains, or does not rise if the rejected one does. Smallest "
            f"batch: {A_PAIR.format(*log_ratios)}; their gradients are {chosen:.3g} and {rejected:.3g}"
        )


def equal_margins_have_equal_losses(loss: Examined) -> Iterator[Finding]:
    """Require the same loss for other batches with the same beta * margin."""
    usual = pair(*USUAL)
    moved = {name: x if name == "mask" else x + torch.tensor([[[0.5], [-0.7]]]) for name, x in usual.items()}
    three_tokens = pair(1.2, -0.9, 3) if loss.loss_type == "sigmoid_norm" else pair(*USUAL, 3)
    beta = loss.options["beta"]
    margin = [name for name in OF_THE_MARGIN if name != "ipo"]
    others = [name for name in DPO_LOSSES if name not in ("ipo", "sft")]
    # (what is wrong, loss types, other batch with the same loss)
    for says, loss_types, batch, beta_of_batch in (
        ("pairs are not averaged", DPO_LOSSES, {name: x.repeat(3, 1, 1) for name, x in usual.items()}, beta),
        ("the loss depends on more than log-ratios of policy and reference", [*others, "ipo"], moved, beta),
        ("the answers do not have opposite gradients", OF_THE_MARGIN, pair(0.7, 0.0), beta),
        ("beta does not multiply the margin", margin, pair(0.2, -0.15), 2 * beta),
        ("the log-ratios of an answer's tokens are added or averaged wrongly", others, three_tokens, beta),
    ):
        if loss.loss_type in loss_types:
            where = f"{A_PAIR.format(*USUAL)}; in another batch with the same margin the loss is"
            yield from loss.unequal(says, where, loss(batch, beta=beta_of_batch)[0], loss(usual)[0])


def ipo_pulls_to_its_margin(loss: Examined) -> Iterator[Finding]:
    """Require that IPO's loss is 0 at its margin, and grows alike on both sides."""
    if loss.loss_type == "ipo":
        margin = 1 / (2 * loss.options["beta"])
        value, below, above = (loss(pair(margin * share, 0.0))[0] for share in (1.0, 0.5, 1.5))
        where = f"{A_PAIR.format(margin, 0)}; the loss is"
        yield from loss.unequal("the loss is not 0 at IPO's margin 1 / (2 beta)", where, value, torch.zeros(()))
        where = f"{A_PAIR.format(1.5 * margin, 0)}; as far below the margin the loss is the same, but here it is"
        yield from loss.unequal("the loss does not pull the margin back to 1 / (2 beta)", where, above, below)


def tokens_are_averaged(loss: Examined) -> Iterator[Finding]:
    """Require the gradient -1 / (number of tokens) for each log-prob; dft multiplies it by the token's probability."""
    for mask in MASKS:
        batch = random_batch("sft", mask)
        right = -batch["mask"] / batch["mask"].sum()
        if loss.loss_type == "dft":
            right = right * batch["per_token_logps"].exp()
        says = f"the loss is not {loss.loss_type} averaged over all tokens"
        yield from loss.unequal(says, f"{described(batch)}; the gradient is", loss.gradient(batch), right)


DPO_LAWS: tuple[Law, ...] = (answers_act_in_their_directions, equal_margins_have_equal_losses, ipo_pulls_to_its_margin)
