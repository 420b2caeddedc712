"""Cells of what learns from demonstrations and preferences: SFT, DPO and its family, KTO, the reward model."""

from collections.abc import Iterator
from functools import partial
from itertools import product
from types import SimpleNamespace

import torch
from torch import Tensor

from minivlmrl.algorithms import preference_losses as preference
from minivlmrl.algorithms import sft_loss as sft
from minivlmrl.audit.compare import Cell, loss_cell
from minivlmrl.audit.policy_cells import grid, policy_batch, say, trl

SMOOTHED = ("sigmoid", "exo_pair", "robust", "aot", "aot_unpaired")  # sigmoid: TRL ignores it
# Weights multiply in place in TRL, which breaks the gradient of hinge and crashes with sft; aot refuses them.
WEIGHTABLE = tuple(name for name in preference.DPO_LOSSES if name not in ("aot", "aot_unpaired", "sft", "hinge"))
DIVERGENCES = grid(f_divergence_type=("forward_kl", "js_divergence"))
DIVERGENCES += grid(f_divergence_type=("alpha_divergence",), f_alpha_divergence_coef=(0.0, 0.5, 1.0, 1.5))
LISTS = (  # MPO's own mixture first
    (["sigmoid", "bco_pair", "sft"], [0.8, 0.2, 1.0]),
    (["sigmoid", "sft"], [1.0, 0.1]),
    (["ipo", "hinge", "apo_zero"], None),
    (["sigmoid_norm", "sppo_hard"], [2.0, 0.01]),
    (["aot", "discopop", "nca_pair", "robust"], [0.1, 0.2, 0.3, 0.4]),
)
B, T = 3, 6


def preference_batch(seed: int, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Pairs (B, 2, T) with answers of 1 to T tokens."""
    generator = torch.Generator().manual_seed(seed)
    logps = -torch.rand(B, 2, T, generator=generator, dtype=torch.float64) * 2 - 0.05
    ref = logps + 0.6 * torch.randn(B, 2, T, generator=generator, dtype=torch.float64)
    mask = (torch.arange(T) < torch.randint(1, T + 1, (B, 2, 1), generator=generator)).double()
    batch = {"per_token_logps": logps, "ref_per_token_logps": ref.clamp(max=-0.01), "mask": mask}
    return {name: value.to(dtype) for name, value in batch.items()}


def dpo_cell(family: str, seed: int, use_weighting: bool = False, **options) -> Cell:
    """One call of DPOTrainer._compute_loss.

    In TRL alpha_divergence knows no float64 (so the batch is float32), and exo_pair's label_smoothing is float32.
    """
    single = options.get("f_divergence_type") == "alpha_divergence"
    batch = preference_batch(seed, torch.float32 if single else torch.float64)
    shown, given = options, {}
    if use_weighting:  # of the oracle's two tokens, p and 1 - p
        batch["per_token_logps"] *= 0.1 if seed % 2 else 1.0  # likely tokens: a weight over 1
        p = batch["per_token_logps"].exp()
        shown, given = options | {"use_weighting": True}, {"log_sum_sq_probs": (p.square() + (1 - p).square()).log()}

    def ours(batch: dict):
        return preference.dpo_loss(**batch, **given, options=preference.DPOLoss(**shown))

    names = [options["loss_type"]] if isinstance(options["loss_type"], str) else options["loss_type"]
    told = {"loss_weights": None, "use_weighting": use_weighting} | options | {"loss_type": names}
    tolerance = 1e-6 if single or "exo_pair" in names else 1e-10
    sides = ours, partial(trl, "dpo_loss", **told)
    return loss_cell(family, f"{say(shown)}, seed={seed}", batch, *sides, tolerance=tolerance)


def dpo_losses() -> Iterator[Cell]:
    """Each loss, its label smoothing, and its other options; TRL's defaults for what is not said."""
    for loss_type, beta, seed in product(preference.DPO_LOSSES, (0.1, 0.5), range(4)):
        smoothing = {"label_smoothing": 0.01} if loss_type == "exo_pair" else {}
        yield dpo_cell(f"dpo {loss_type}", seed, loss_type=loss_type, beta=beta, **smoothing)
    for loss_type, smoothing, seed in product(SMOOTHED, (0.1, 0.3), range(2)):
        options = {"loss_type": loss_type, "label_smoothing": smoothing, "beta": 0.5}
        yield dpo_cell(f"dpo {loss_type}, label_smoothing", seed, **options)
    # a family for each option over all losses that take it; exo_pair, of fewer digits, has its own
    choices = [*product(DIVERGENCES, preference.ANY_DIVERGENCE)]
    choices += product(grid(ld_alpha=(0.0, 0.4)), preference.DPO_LOSSES)
    choices += product(grid(use_weighting=(True,)), WEIGHTABLE)
    for (option, loss_type), seed in product(choices, range(2)):
        name, value = next(iter(option.items()))
        family = f"dpo {name}={value}" if name == "f_divergence_type" else f"dpo {name}"
        family = "dpo exo_pair, other options" if loss_type == "exo_pair" else family
        smoothing = {"label_smoothing": 0.1} if loss_type in ("exo_pair", "robust") else {}
        yield dpo_cell(family, seed, loss_type=loss_type, beta=0.3, **option, **smoothing)
    for (names, weights), beta, seed in product(LISTS, (0.1, 0.5), range(2)):
        yield dpo_cell("dpo several losses", seed, loss_type=names, loss_weights=weights, beta=beta)
    for tau, seed in product((0.01, 0.5), range(2)):
        yield dpo_cell("dpo discopop_tau", seed, loss_type="discopop", discopop_tau=tau, beta=0.5)


def kto_losses() -> Iterator[Cell]:
    """The KL is measured on the same tokens with another mask."""

    def ours(batch: dict, **options):
        kl = preference.kto_kl(batch["per_token_logps"], batch["ref_per_token_logps"], batch["kl_mask"])
        answers = {name: value for name, value in batch.items() if name != "kl_mask"}
        return preference.kto_loss(**answers, options=preference.KTOLoss(**options), kl=kl)

    choices = product(preference.KTO_LOSS_TYPES, ((1.0, 1.0), (1.3, 0.7)), (0.1, 0.5), range(3))
    for loss_type, (good, bad), beta, seed in choices:
        batch = policy_batch(seed)
        mask = batch["mask"]
        batch = {name: batch[name].clamp(max=-0.01) for name in ("per_token_logps", "ref_per_token_logps")}
        batch |= {"mask": mask, "kl_mask": mask.roll(1, 0), "labels": torch.arange(4) % 3 == seed % 3}
        options = {"loss_type": loss_type, "beta": beta, "desirable_weight": good, "undesirable_weight": bad}
        sides = partial(ours, **options), partial(trl, "kto_loss", **options)
        yield loss_cell(f"kto loss_type={loss_type}", f"{say(options)}, seed={seed}", batch, *sides)


def sft_losses() -> Iterator[Cell]:
    """With and without num_items_in_batch, which counts the tokens of the step on all processes."""

    def ours(batch: dict, loss_type: str, counts):
        return sft.sft_loss(batch["per_token_logps"], batch["mask"], loss_type, counts=counts), {}

    kinds = (("nll", "nll"), ("dft", "dft"), ("chunked_nll", "nll"))
    for (asked, loss_type), items, processes, seed in product(kinds, (None, 37), (1, 3), range(3)):
        counts = None if items is None else SimpleNamespace(tokens=items / processes)
        name = say({"num_items": items, "processes": processes, "seed": seed})
        theirs = partial(trl, "sft_loss", items=items, num_processes=processes, loss_type=asked)
        sides = partial(ours, loss_type=loss_type, counts=counts), theirs
        yield loss_cell(f"sft loss_type={asked}", name, policy_batch(seed), *sides)


def reward_losses() -> Iterator[Cell]:
    def ours(batch: dict, center: float | None):
        options, pairs = preference.RewardLoss(center), (batch["chosen"], batch["rejected"])
        return preference.reward_loss(*pairs, options, margin=batch["margin"])

    for with_margin, center, seed in product((False, True), (None, 0.01, 0.5), range(3)):
        chosen, rejected, margin = policy_batch(seed)["per_token_logps"][:3]
        batch = {"chosen": chosen, "rejected": rejected, "margin": -margin if with_margin else None}
        name = say({"margin": with_margin, "center_rewards_coefficient": center, "seed": seed})
        sides = partial(ours, center=center), partial(trl, "reward_loss", center_rewards_coefficient=center)
        yield loss_cell("reward loss", name, batch, *sides, ("chosen", "rejected"))
