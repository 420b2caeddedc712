"""Test properties ("laws") of DPO and SFT losses."""

from collections.abc import Iterator

import torch
from torch import Tensor

from minivlmrl.extras.parity.examined import MASKS, Examined, Law, described, random_batch
from minivlmrl.losses.preference import DPO_LOSSES

# losses that depend only on the margin: chosen log-ratio minus rejected log-ratio
OF_THE_MARGIN = ("sigmoid", "hinge", "exo_pair", "robust", "discopop", "sigmoid_norm")
A_PAIR = "two answers of one token, with the log-ratios {:g} (chosen) and {:g}"
USUAL = 0.4, -0.3  # default log-ratios of the chosen and rejected answer, in nats


def pair(chosen: float, rejected: float, tokens: int = 1) -> dict[str, Tensor]:
    """Return a batch with one answer pair.

    Args:
        chosen, rejected: log-ratios of the answers, in nats, summed over tokens.
        tokens: tokens per answer; all have the same log-ratio.
    """
    log_ratios = torch.tensor([[[chosen], [rejected]]], dtype=torch.float64) / tokens
    ref = torch.full((1, 2, tokens), -1.5, dtype=torch.float64)
    return {"per_token_logps": ref + log_ratios, "ref_per_token_logps": ref, "mask": torch.ones_like(ref)}


def answers_act_in_their_directions(loss: Examined) -> Iterator[str]:
    """Require a loss that falls if the chosen answer becomes likelier, and rises if the rejected one does."""
    # no correct loss has a zero gradient at these log-ratios
    log_ratios = [-0.45 / loss.options["beta"], -0.2 / loss.options["beta"]]
    chosen, rejected = loss.gradient(pair(*log_ratios)).flatten().tolist()
    if chosen >= 0 or (rejected <= 0 and loss.loss_type != "sft"):
        yield (
            "the loss does not fall if the chosen answer gains, or does not rise if the rejected one does. Smallest "
            f"batch: {A_PAIR.format(*log_ratios)}; their gradients are {chosen:.3g} and {rejected:.3g}"
        )


def equal_margins_have_equal_losses(loss: Examined) -> Iterator[str]:
    """Require the same loss for all batches with the same beta * margin."""
    usual = pair(*USUAL)
    beta = loss.options["beta"]
    three_tokens = pair(*USUAL, 3)
    if loss.loss_type == "sigmoid_norm":
        three_tokens = pair(1.2, -0.9, 3)
    three_pairs = {name: x.repeat(3, 1, 1) for name, x in usual.items()}
    moved = dict(usual)
    for name in ("per_token_logps", "ref_per_token_logps"):
        moved[name] = usual[name] + torch.tensor([[[0.5], [-0.7]]])
    others = [name for name in DPO_LOSSES if name not in ("ipo", "sft")]
    # (error message, loss types to test, other batch that must have the same loss, beta for it)
    for says, loss_types, batch, beta_of_batch in (
        ("pairs are not averaged", DPO_LOSSES, three_pairs, beta),
        ("the loss depends on more than log-ratios of policy and reference", (*others, "ipo"), moved, beta),
        ("the answers do not have opposite gradients", (*OF_THE_MARGIN, "ipo"), pair(0.7, 0.0), beta),
        ("beta does not multiply the margin", OF_THE_MARGIN, pair(0.2, -0.15), 2 * beta),
        ("the log-ratios of an answer's tokens are added or averaged wrongly", others, three_tokens, beta),
    ):
        if loss.loss_type in loss_types:
            where = f"{A_PAIR.format(*USUAL)}; in another batch with the same margin the loss is"
            yield from loss.unequal(says, where, loss(batch, beta=beta_of_batch)[0], loss(usual)[0])


def tokens_are_averaged(loss: Examined) -> Iterator[str]:
    """Require the gradient -1 / (number of tokens) for log-probs of unmasked tokens.

    In dft losses, this is multiplied by the token's probability.
    """
    for mask in MASKS:
        batch = random_batch("sft", mask)
        right = -batch["mask"] / batch["mask"].sum()
        if loss.loss_type == "dft":
            right = right * batch["per_token_logps"].exp()
        says = f"the loss is not {loss.loss_type} averaged over all tokens"
        yield from loss.unequal(says, f"{described(batch, {})}; the gradient is", loss.gradient(batch), right)


DPO_LAWS: tuple[Law, ...] = (answers_act_in_their_directions, equal_margins_have_equal_losses)
