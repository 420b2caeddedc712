"""Comparisons of SFT, DPO and its variants, KTO and the reward model with TRL."""

from functools import partial
from types import SimpleNamespace

import torch
from torch import Tensor

from minivlmrl.extras import kto
from minivlmrl.losses import preference, sft
from tests.parity.compare import Cell, Question, loss_cell
from tests.parity.policy_cells import T, policy_batch, trl


def preference_batch(seed: int, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    generator, shape = torch.Generator().manual_seed(seed), (3, 2, T)
    logps = -torch.rand(shape, generator=generator, dtype=torch.float64) * 2 - 0.05
    ref = logps + 0.6 * torch.randn(shape, generator=generator, dtype=torch.float64)
    mask = (torch.arange(T) < torch.randint(1, T + 1, (3, 2, 1), generator=generator)).double()
    batch = {"per_token_logps": logps, "ref_per_token_logps": ref.clamp(max=-0.01), "mask": mask}
    return {name: value.to(dtype) for name, value in batch.items()}


def dpo_cell(q: Question) -> Cell:
    """Compare with DPOTrainer._compute_loss.

    TRL's alpha_divergence supports no float64, so its batch is float32, and so is the label_smoothing of exo_pair. For
    the loss sigmoid, TRL ignores label_smoothing e, so the expected loss is (1 - e) times TRL's loss plus e times TRL's
    loss with chosen and rejected answers exchanged.
    """
    single = q.options.get("f_divergence_type") == "alpha_divergence"
    batch = preference_batch(q.seed, torch.float32 if single else torch.float64)

    def ours(batch: dict):
        options = dict(q.options)
        if options.pop("precompute_ref_log_probs", False):
            ref = batch.pop("ref_per_token_logps")
            options["ref_logps"] = preference.answer_logps(ref, batch["mask"], options.get("ld_alpha"))
        return preference.dpo_loss(**batch, **options)

    names = [q.options["loss_type"]] if isinstance(q.options["loss_type"], str) else q.options["loss_type"]
    theirs = partial(trl, "dpo_loss", **{"loss_weights": None, "use_weighting": False, **q.options, "loss_type": names})

    def exchanged(batch: dict):
        e = q.options["label_smoothing"]
        loss, metrics = theirs(batch)
        other_loss, _ = theirs({name: pairs.flip(1) for name, pairs in batch.items()})
        return (1 - e) * loss + e * other_loss, metrics

    is_cdpo = names == ["sigmoid"] and "label_smoothing" in q.options
    tolerance = 1e-6 if single or "exo_pair" in names else 1e-10
    return loss_cell(q, batch, ours, exchanged if is_cdpo else theirs, tolerance=tolerance)


def kto_cell(q: Question) -> Cell:
    """Compare with KTOTrainer._compute_loss, where the KL is measured on the same tokens with another mask."""

    def ours(batch: dict):
        kl = kto.kto_kl(batch["per_token_logps"], batch["ref_per_token_logps"], batch["kl_mask"])
        answers = {name: value for name, value in batch.items() if name != "kl_mask"}
        return kto.kto_loss(**answers, **q.options, kl=kl)

    batch, labels = policy_batch(q.seed), torch.arange(4) % 3 == q.seed % 3
    given = {name: batch[name].clamp(max=-0.01) for name in ("per_token_logps", "ref_per_token_logps")}
    given |= {"mask": batch["mask"], "kl_mask": batch["mask"].roll(1, 0), "labels": labels}
    return loss_cell(q, given, ours, partial(trl, "kto_loss", **q.options))


def sft_cell(q: Question) -> Cell:
    """Compare with SFTTrainer.compute_loss, with or without num_items_in_batch (tokens on all processes)."""
    items, processes = q.options["items"], q.options["num_processes"]
    kind = q.options["loss_type"].removeprefix("chunked_")
    normalizer = None if items is None else SimpleNamespace(tokens=items / processes)

    def ours(batch: dict):
        return sft.sft_loss(batch["per_token_logps"], batch["mask"], loss_type=kind, normalizer=normalizer), {}

    return loss_cell(q, policy_batch(q.seed), ours, partial(trl, "sft_loss", **q.options))


def reward_cell(q: Question) -> Cell:
    center = q.options["center_rewards_coefficient"]

    def ours(batch: dict):
        return preference.reward_loss(**batch, center_rewards_coefficient=center)

    chosen, rejected, margin = policy_batch(q.seed)["per_token_logps"][:3]
    batch = {"chosen": chosen, "rejected": rejected, "margin": -margin if q.options["margin"] else None}
    theirs = partial(trl, "reward_loss", center_rewards_coefficient=center)
    return loss_cell(q, batch, ours, theirs, ("chosen", "rejected"))
