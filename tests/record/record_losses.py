"""Record TRL 1.16's losses and gradients in minivlmrl/extras/parity/fixtures/losses.safetensors:

PYTHONPATH=. python tests/record/record_losses.py

The small batches from tests/parity come first. Cases from `step` follow, in which common mistakes differ: all lengths
differ, no completion fills the batch, no advantage is 0, and dapo's steps are also recorded as micro-batches.
`extreme_cases` are a completion without tokens, and policies that moved far. `usual_cases` come last: the plain KL,
sequence ratios, and ratios at which a dual clip acts, as most of the field computes them.
"""

import json
from itertools import product

import torch
from safetensors.torch import save_file
from torch import Tensor

from minivlmrl.extras.parity.loss import FIXTURES
from minivlmrl.losses.preference import DPO_LOSSES
from tests.parity import trl_oracle
from tests.parity.compare import FAMILIES
from tests.parity.policy_cells import ITEMS, MAX_LENGTH, policy_batch
from tests.parity.preference_cells import preference_batch

SMOOTHED = ("exo_pair", "robust", "aot", "aot_unpaired")  # DPO losses that need label_smoothing > 0
LEVELS = ("token", "sequence")
LOGPS = ("per_token_logps", "old_per_token_logps", "ref_per_token_logps")
LOG_RATIOS = ((0.5, 12.0), (3.0, 25.0), (-3.0, -25.0))
Case = tuple[dict, dict[str, Tensor]]  # options and batch
GRPO, CONSTANTS = {"kind": "grpo"}, {"max_completion_length": MAX_LENGTH, "epsilon_low": 0.2}


def small_cases() -> list[Case]:
    """Return all losses on batches with four rows or three pairs."""
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
        cases.append(sft_case(loss_type, policy_batch(number)))
    return cases


def sft_case(loss_type: str, batch: dict[str, Tensor]) -> Case:
    """Return an SFT case, which reads two tensors from the batch."""
    return {"kind": "sft", "loss_type": loss_type}, {key: batch[key] for key in ("per_token_logps", "mask")}


def step(seed: int) -> dict[str, Tensor]:
    """Return a batch (6, 8): two groups of three completions with 2 to 7 tokens; half the ratios are clipped."""
    generator = torch.Generator().manual_seed(seed)
    lengths = 2 + torch.randperm(6, generator=generator)
    noise = torch.randn(4, 6, 8, generator=generator, dtype=torch.float64)
    logps = -noise[0].abs() - 0.1
    rewards = noise[3, :, 0].view(2, 3)
    advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    batch = dict(zip(LOGPS, (logps, logps + 0.4 * noise[1], logps + 0.3 * noise[2]), strict=True))
    return batch | {"advantages": advantages.flatten(), "mask": (torch.arange(8) < lengths[:, None]).double()}


def step_cases() -> list[Case]:
    """Return cases with whole steps, their micro-batches, and pairs whose answers differ in length."""
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
        cases.append(sft_case(loss_type, step(seed)))
    return cases


def empty_row(seed: int) -> dict[str, Tensor]:
    """Return a batch (3, 8) whose second completion has no token in the mask."""
    batch = {name: tensor[:3].clone() for name, tensor in step(seed).items()}
    batch["mask"][1] = 0
    return batch


def far(seed: int, first: float, last: float, name: str) -> dict[str, Tensor]:
    """Return a batch (2, 8) whose log-ratios to the tensor `name` go from `first` to `last` nats in each row."""
    batch = {key: tensor[:2].clone() for key, tensor in step(seed).items()}
    batch[name] = batch["per_token_logps"] - torch.linspace(first, last, 8, dtype=torch.float64)
    advantages = torch.tensor([1.0, -0.5], dtype=torch.float64)
    return batch | {"advantages": advantages, "mask": torch.ones_like(batch["mask"])}


def extreme_cases() -> list[Case]:
    """Return cases for all losses with a zero row in the mask, and with large log-ratios.

    The tolerance is relative to the largest number in a case. Therefore positive and negative log-ratios, and
    log-ratios to the old policy and to the reference, are separate cases, so that none hides another. The log-ratios
    from 0.5 to 12 come first, because the audit names a clamp best from a case with smaller and larger log-ratios than
    its bound.
    """
    cases = []
    for seed, loss_type in enumerate(FAMILIES["policy"][0]["options"]["loss_type"], start=40):
        batches = []
        for level in LEVELS:
            batches.append((level, 0.1, empty_row(seed)))
            batches += [(level, 0.0, far(seed, *span, "old_per_token_logps")) for span in LOG_RATIOS]
        batches += [("token", 0.1, far(seed, *span, "ref_per_token_logps")) for span in LOG_RATIOS[1:]]
        for level, beta, batch in batches:
            options = {"loss_type": loss_type, "importance_sampling_level": level, "beta": beta, "epsilon_high": 0.28}
            options |= {"use_bias_correction_kl": True, "tokens": int(batch["mask"].sum()), "whole_step": True}
            cases.append((GRPO | options | CONSTANTS, batch))
    for seed, loss_type in enumerate(DPO_LOSSES, start=60):
        smoothing = 0.1 if loss_type in SMOOTHED else 0.0
        options = {"kind": "dpo", "loss_type": [loss_type], "beta": 0.3, "label_smoothing": smoothing}
        # the first pair prefers the chosen answer by 56 nats, and the second one the rejected answer
        batch = {key: tensor[:4].view(2, 2, 8) for key, tensor in step(seed).items() if key in (*LOGPS[::2], "mask")}
        signs = torch.tensor([[1.0, -1.0], [-1.0, 1.0]], dtype=torch.float64)[:, :, None]
        batch["ref_per_token_logps"] = batch["per_token_logps"] - 3.5 * signs
        cases.append((options, batch | {"mask": torch.ones_like(batch["mask"])}))
    return cases


def usual_cases() -> list[Case]:
    """Return cases with a KL that no ratio weights, with sequence ratios, and with ratios far above 1.

    With ratios from 0.4 to 20, a dual clip acts on the negative advantages. TRL's own dual clip, its option delta, is
    recorded for the same batches.
    """
    plain, without = {"beta": 0.1, "use_bias_correction_kl": False}, {"beta": 0.0, "use_bias_correction_kl": True}
    cases = []
    for seed, loss_type in enumerate(FAMILIES["policy"][0]["options"]["loss_type"], start=80):
        found = []  # (options, batch)
        for level in LEVELS:
            found += [({"importance_sampling_level": level} | plain, step(seed)) for seed in (seed, seed + 20)]
            batches = [empty_row(seed), *(far(seed, *span, "ref_per_token_logps") for span in LOG_RATIOS)]
            chosen = batches if level == "token" else batches[:1]
            found += [({"importance_sampling_level": level} | plain, batch) for batch in chosen]
        if loss_type in ("grpo", "bnpo", "dr_grpo", "dapo"):
            near = far(seed, -1.0, 3.0, "old_per_token_logps")
            for level in LEVELS:
                found.append(({"importance_sampling_level": level} | without, near))
            found += [({"importance_sampling_level": "token", "delta": 3.0} | each, near) for each in (plain, without)]
            found += [({"importance_sampling_level": "sequence"} | without, step(seed + 40))]
            # ratios from 0.74 to 0.86 and from 1.16 to 1.35, so that other clip ranges than 0.2 and 0.28 are seen
            for span in ((-0.3, -0.15), (0.15, 0.3)):
                found.append(({"importance_sampling_level": "token"} | without, far(seed, *span, LOGPS[1])))
        for options, batch in found:
            options |= {"loss_type": loss_type, "epsilon_high": 0.28, "tokens": int(batch["mask"].sum())}
            cases.append((GRPO | options | CONSTANTS | {"whole_step": True}, batch))
    return cases


def main():
    """Compute all cases with TRL and write the file."""
    cases, tensors = {}, {}
    for number, (options, batch) in enumerate(small_cases() + step_cases() + extreme_cases() + usual_cases()):
        name = f"{options['kind']}{number}"
        found = trl_oracle.what_trl_says(batch, options)
        cases[name] = options
        for key, tensor in (batch | {"loss": found["loss"], "gradient": found["gradient"]}).items():
            tensors[f"{name}/{key}"] = tensor.contiguous().clone()
    save_file(tensors, FIXTURES / "losses.safetensors", {"cases": json.dumps(cases), "trl": trl_oracle.VERSION})


if __name__ == "__main__":
    main()
