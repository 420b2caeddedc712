"""Comparisons of policy-gradient losses, advantages and the sampler correction with TRL.

A batch depends only on its seed. Options have our names, which equal TRL's names except for NAMES_OF_TRL.
"""

import random
import re
from functools import partial

import torch
from torch import Tensor

from minivlmrl.losses import advantages, grpo_variants
from minivlmrl.trainers import grpo as grpo_trainer
from tests.helpers.by_hand import loss_of
from tests.parity.compare import Cell, Question, Result, loss_cell

NAMES_OF_TRL = {"epsilon_low": "epsilon", "accumulation": "gradient_accumulation_steps", "processes": "num_processes"}
MASKED = {"a row masked": (1,), "all rows masked": (0, 1, 2, 3)}
B, T, MAX_LENGTH, ITEMS = 4, 6, 9, 50  # ITEMS: completion tokens in the generation batch on all processes
WEIGHTS = [0.5, 1.0]


def trl(question: str, *arguments, **options):
    """Call a function of trl_oracle.py, which is imported only when a cell is computed, because it imports TRL."""
    from tests.parity import trl_oracle

    return getattr(trl_oracle, question)(*arguments, **options)


def policy_batch(seed: int, old: bool = True, empty=(), by_token: bool = False) -> dict[str, Tensor | None]:
    """Return rows of 1 to T tokens (0 in `empty`), ratios far outside of the clip range, and mixed-sign advantages."""
    generator = torch.Generator().manual_seed(seed)
    normal = partial(torch.randn, generator=generator, dtype=torch.float64)
    logps = -normal(B, T).abs() - 0.1
    lengths = torch.randint(1, T + 1, (B,), generator=generator)
    lengths[0] = T
    lengths[list(empty)] = 0
    scores = normal(B, T) if by_token else normal(B)
    scores[-1] = 0.0
    batch = {"per_token_logps": logps, "advantages": scores, "mask": (torch.arange(T) < lengths[:, None]).double()}
    batch["old_per_token_logps"] = logps + 0.5 * normal(B, T) if old else None
    batch["ref_per_token_logps"] = logps + 0.3 * normal(B, T)
    return batch | {"entropies": normal(B, T).abs() + 0.05}


def our_loss(batch: dict, accumulation: int = 1, processes: int = 1, steps_per_generation=None, **options):
    """Compute grpo_loss with the totals that follow from options of TRL.

    TRL averages gradients over processes and sums them over accumulation steps, so its divisors are fractions of ours.
    """
    share = accumulation / (steps_per_generation or accumulation) / processes
    totals = {"sequences": B * accumulation, "tokens": ITEMS * share, "max_completion_length": MAX_LENGTH}
    return loss_of(**batch, **options, **totals)


def batch_of(kind: str, seed: int) -> dict[str, Tensor | None]:
    """Return the batch for a kind in families.yaml, such as "no old"."""
    batch = policy_batch(seed, kind != "no old", MASKED.get(kind, ()), "advantages (B, T)" in kind)
    logps, far = batch["per_token_logps"], re.match(r"far off by (\d+)", kind)
    if kind == "tied entropies":
        batch["entropies"] = (2 * batch["entropies"]).round() / 2
    if kind.startswith("sampler's own"):
        batch["sampling_per_token_logps"] = batch["old_per_token_logps"] + 0.4 * batch["advantages"][:, None]
        batch["sampling_per_token_logps"][0, 1] += torch.nan if "NaN" in kind else 0.0
    if width := re.search(r"ratio \(B, (\d)", kind):
        ratio = policy_batch(seed + 7)["entropies"][:, : int(width[1])] * (seed + 0.5)
        ratio[1, 0] = 0.0  # masked by the correction
        batch["importance_sampling_ratio"] = ratio
    if far or kind == "near":
        other, times = (batch["ref_per_token_logps"], int(far[1])) if far else (batch["old_per_token_logps"], 0.3)
        batch["old_per_token_logps"] = logps + times * (other - logps)
    return batch


def grpo_cell(q: Question) -> Cell:
    told = {NAMES_OF_TRL.get(name, name): value for name, value in q.options.items()} | q.requested
    ours = partial(our_loss, **q.options, **({"loss_type": "rloo"} if q.requested.get("kind") == "RLOO" else {}))
    sides = ours, partial(trl, "grpo_loss", items=ITEMS, max_completion_length=MAX_LENGTH, **told)
    return loss_cell(q, batch_of(q.kind, q.seed), *sides, ("per_token_logps", "entropies"))


def together_cell(q: Question) -> Cell:
    """Compare many random options at once, because their order of application matters."""
    draw = random.Random(q.seed)
    options = {name: draw.choice(values) for name, values in q.requested.items()}
    kind = "advantages (B, T)" if draw.random() < 0.3 else "plain"
    corrected = f"ratio (B, {draw.choice((1, T))})" if draw.random() < 0.5 else kind
    requested = {"use_vllm": True} if kind != corrected else {}
    return grpo_cell(Question(q.family, options, f"{kind}, {corrected}", q.seed, requested))


def random_rewards(seed: int, n: int = 12, missing: float = 0.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 3, (n, 2), generator=generator).float() / 2
    values[torch.rand(n, 2, generator=generator) < missing] = torch.nan
    return values


def advantages_cell(q: Question) -> Cell:
    """Compare advantages (or GDPO) to 1e-6, because TRL computes with float32 rewards."""
    rewards, size = random_rewards(q.seed, missing=q.options["missing"]), q.options["num_generations"]

    def ours() -> Result:
        weights, scale = torch.tensor(WEIGHTS), q.options.get("scale_rewards")
        if scale is None:
            return {"advantages": advantages.normalize_then_sum(rewards, weights, size)}
        combined = advantages.combine(rewards, weights)
        flat = (advantages.group_std(combined, size).abs() < 1e-8).float().mean()
        result = {"advantages": advantages.group_advantages(combined, size, scale)}
        return result | ({"metric frac_reward_zero_std": flat} if scale == "group" else {})

    requested = {name: x for name, x in q.options.items() if name != "missing"} | {"reward_weights": WEIGHTS}
    return Cell(q.name, ours, partial(trl, "rollout", rewards, **requested), 1e-6)


def rloo_advantages_cell(q: Question) -> Cell:
    """Compare advantages of RLOO with clipped rewards, from which the KL of the completion is subtracted."""
    size, beta, normalize, clip, missing = q.options.values()
    rewards, batch = random_rewards(q.seed, n=B * 2, missing=missing), policy_batch(q.seed)
    names = "old_per_token_logps", "ref_per_token_logps", "mask"
    old, ref, mask = (batch[name].float().repeat(2, 1) for name in names)
    total = advantages.combine(rewards, torch.tensor(WEIGHTS))
    total = (total if clip is None else total.clamp(*clip)) - beta * ((old - ref) * mask).sum(1)
    requested = {name: x for name, x in q.options.items() if name != "missing"} | {"reward_weights": WEIGHTS}
    requested["completions"] = [[5] * int(length) for length in mask.sum(1)]
    theirs = partial(trl, "rollout", rewards, "RLOO", (old, ref), **requested)
    ours = lambda: {"advantages": advantages.leave_one_out(total, size, normalize)}  # noqa: E731
    return Cell(q.name, ours, theirs, 1e-6)


def correction_cell(q: Question) -> Cell:
    """Compare the ratio of trainer and sampler, whose log-probabilities TRL keeps in float32."""
    batch = policy_batch(q.seed)
    old, mask, lengths = batch["old_per_token_logps"], batch["mask"], batch["mask"].sum(1).long().tolist()
    sampling = (old + 0.3 * (batch["ref_per_token_logps"] - old)).float()
    sampling[0, 2] = torch.nan if q.kind == "with NaN" else -1.0
    requested = {f"vllm_importance_sampling_{name}": value for name, value in q.options.items()} | {"use_vllm": True}
    requested["sampling"] = [row[:length].tolist() for row, length in zip(sampling, lengths, strict=True)]
    requested |= {"completions": [[5] * length for length in lengths], "output": q.family}
    ratio = partial(grpo_variants.rollout_importance_ratio, old, sampling.double() * mask, mask, **q.options)
    theirs = partial(trl, "rollout", torch.zeros(B, 1), logps=(old, None), **requested)
    return Cell(q.name, lambda: {q.family: ratio()}, theirs)


def overlong_cell(q: Question) -> Cell:
    inputs, name = (q.options["tokens"], 100, q.options["cache"]), "soft_overlong_punishment"
    sides = partial(getattr(grpo_trainer, name), *inputs), partial(trl, name, *inputs)
    return Cell(q.name, *(lambda of=side: {"reward": torch.tensor(of())} for side in sides))
