"""Record losses and gradients of TRL 1.16 in minivlmrl/losses/fixtures/losses.safetensors, for losses/parity.py:

PYTHONPATH=.:tests/helpers python tests/record/record_losses.py

Cases of the small batches of tests/parity come first. Cases of `step` follow, in which common mistakes differ: all
lengths differ, no completion fills the batch, no advantage is 0, and steps of dapo are also recorded as micro-batches.
"""

import json
from itertools import product

import torch
from safetensors.torch import save_file
from torch import Tensor

from minivlmrl.losses.parity import FIXTURES
from minivlmrl.losses.preference import DPO_LOSSES
from tests.parity import trl_oracle
from tests.parity.compare import FAMILIES
from tests.parity.policy_cells import ITEMS, MAX_LENGTH, policy_batch
from tests.parity.preference_cells import preference_batch

SMOOTHED = ("exo_pair", "robust", "aot", "aot_unpaired")  # DPO losses that need label_smoothing > 0
LEVELS = ("token", "sequence")
LOGPS = ("per_token_logps", "old_per_token_logps", "ref_per_token_logps")
Case = tuple[dict, dict[str, Tensor]]  # options and batch
GRPO, CONSTANTS = {"kind": "grpo"}, {"max_completion_length": MAX_LENGTH, "epsilon_low": 0.2}


def small_cases() -> list[Case]:
    """Return all losses on batches of four rows or three pairs."""
    cases = []
    grid = list(product((True, False), FAMILIES["policy"][0]["options"]["loss_type"], LEVELS, (0.0, 0.1)))
    for number, (whole_step, loss_type, level, beta) in enumerate(grid):
        batch = policy_batch(number % (len(grid) // 2))
        del batch["entropies"]
        tokens = int(batch["mask"].sum()) if whole_step else ITEMS
        options = {"loss_type": loss_type, "importance_sampling_level": level, "beta": beta, "tokens": tokens}
        options |= {"use_bias_correction_kl": True, "epsilon_high": 0.2 if whole_step else 0.28}
        cases.append((GRPO | options | CONSTANTS | {"whole_step": whole_step}, batch))
    for number, loss_type in enumerate(DPO_LOSSES):
        smoothing = 0.1 if loss_type in SMOOTHED else 0.0
        options = {"kind": "dpo", "loss_type": [loss_type], "beta": 0.3, "label_smoothing": smoothing}
        cases.append((options, preference_batch(number)))
    for number, loss_type in enumerate(("nll", "dft")):
        batch = policy_batch(number)
        cases.append(
            ({"kind": "sft", "loss_type": loss_type}, {key: batch[key] for key in ("per_token_logps", "mask")})
        )
    return cases


def sft_case(loss_type: str, batch: dict[str, Tensor]) -> Case:
    """Return a case of SFT, which reads two tensors of the batch."""
    return {"kind": "sft", "loss_type": loss_type}, {key: batch[key] for key in ("per_token_logps", "mask")}


def step(seed: int) -> dict[str, Tensor]:
    """Return a batch (6, 8) of two groups of three completions with 2 to 7 tokens, and their advantages.

    About half of the ratios lie outside of the clip range. Padding has other log-probabilities than 0.
    """
    generator = torch.Generator().manual_seed(seed)
    lengths = 2 + torch.randperm(6, generator=generator)
    noise = torch.randn(4, 6, 8, generator=generator, dtype=torch.float64)
    logps = -noise[0].abs() - 0.1
    rewards = noise[3, :, 0].view(2, 3)
    advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    batch = dict(zip(LOGPS, (logps, logps + 0.4 * noise[1], logps + 0.3 * noise[2]), strict=True))
    return batch | {"advantages": advantages.flatten(), "mask": (torch.arange(8) < lengths[:, None]).double()}


def step_cases() -> list[Case]:
    """Return cases of whole steps, of their micro-batches, and of pairs with answers of different lengths."""
    cases = []
    for seed, (high, (beta, corrected)) in enumerate(product((0.2, 0.28), ((0.0, True), (0.1, True), (0.1, False)))):
        batch = step(seed)
        options = {"loss_type": "dapo", "importance_sampling_level": "token", "beta": beta, "epsilon_high": high}
        options |= {"use_bias_correction_kl": corrected, "tokens": int(batch["mask"].sum())}
        cases.append((GRPO | options | CONSTANTS | {"whole_step": True}, batch))
        for rows in (slice(0, 3), slice(3, 6)):
            part = {key: tensor[rows] for key, tensor in batch.items()}
            cases.append((GRPO | options | CONSTANTS | {"whole_step": False}, part))
    losses = [(loss_type, "token") for loss_type in ("grpo", "bnpo", "dr_grpo", "cispo")] + [("grpo", "sequence")]
    for seed, (loss_type, level) in enumerate(losses, start=6):
        batch = step(seed)
        options = {"loss_type": loss_type, "importance_sampling_level": level, "beta": 0.1, "epsilon_high": 0.28}
        options |= {"use_bias_correction_kl": False, "tokens": int(batch["mask"].sum()), "whole_step": True}
        cases.append((GRPO | options | CONSTANTS, batch))
    for seed, (loss_type, beta) in enumerate([*product(["sigmoid"], (0.05, 0.1, 0.5)), ("ipo", 0.1), ("hinge", 1.0)]):
        batch = step(20 + seed)
        pairs = {key: batch[key].view(3, 2, 8) for key in ("per_token_logps", "ref_per_token_logps", "mask")}
        cases.append(({"kind": "dpo", "loss_type": [loss_type], "beta": beta, "label_smoothing": 0.0}, pairs))
    for seed, loss_type in enumerate(("nll", "dft"), start=30):
        batch = step(seed)
        cases.append(
            ({"kind": "sft", "loss_type": loss_type}, {key: batch[key] for key in ("per_token_logps", "mask")})
        )
    return cases


def main():
    """Compute all cases with TRL and write the file."""
    cases, tensors = {}, {}
    for number, (options, batch) in enumerate(small_cases() + step_cases()):
        name = f"{options['kind']}{number}"
        found = trl_oracle.what_trl_says(batch, options)
        cases[name] = options
        for key, tensor in (batch | {"loss": found["loss"], "gradient": found["gradient"]}).items():
            tensors[f"{name}/{key}"] = tensor.contiguous().clone()
    save_file(tensors, FIXTURES / "losses.safetensors", {"cases": json.dumps(cases), "trl": trl_oracle.VERSION})


if __name__ == "__main__":
    main()
