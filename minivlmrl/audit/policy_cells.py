"""Cells of the policy-gradient losses, of advantages and of the sampler's correction: batches, grids, and our call.

A batch comes from a seed alone. The names of options are ours, which are TRL's but for NAMES_OF_TRL.
"""

import random
from collections.abc import Iterator
from dataclasses import fields
from functools import partial
from itertools import chain, product

import torch
from torch import Tensor

from minivlmrl import advantages, losses
from minivlmrl.algorithms import baselines, grpo_family, policy_losses
from minivlmrl.audit.compare import Cell, Result, loss_cell, named

CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
LOSS_TYPES = (*CLIPPED, "cispo", "sapo", "vespo")
LEVELS = ("token", "sequence")
EPSILONS = [{"epsilon_low": low, "epsilon_high": high} for low, high in ((0.2, 0.2), (0.1, 0.3), (0.2, 0.28))]
NAMES_OF_TRL = {"epsilon_low": "epsilon", "accumulation": "gradient_accumulation_steps", "processes": "num_processes"}
SPLIT = ("accumulation", "processes", "steps_per_generation")  # how TRL splits a step
MASKED = {"row": (1,), "all": (0, 1, 2, 3)}
B, T, MAX_LENGTH, ITEMS = 4, 6, 9, 50  # ITEMS: completion tokens of the generation batch on all processes
WEIGHTS = [0.5, 1.0]
NAN = float("nan")


def trl(question: str, *arguments, **options):
    """Ask the oracle, which imports TRL only now."""
    from minivlmrl.audit import trl_oracle

    return getattr(trl_oracle, question)(*arguments, **options)


def say(options: dict) -> str:
    """The name of a cell."""
    return ", ".join(f"{name}={value}" for name, value in options.items())


def grid(*more: list[dict], **values) -> list[dict]:
    """All choices of options: grid([{"b": 3}], a=(1, 2)) is [{"a": 1, "b": 3}, {"a": 2, "b": 3}]."""
    single = [[{name: value} for value in of] for name, of in values.items()]
    return [dict(chain(*(part.items() for part in parts))) for parts in product(*single, *more)]


def policy_batch(seed: int, old: bool = True, empty=(), by_token: bool = False) -> dict[str, Tensor | None]:
    """Ratios well outside the clip range, rows of 1 to T tokens (0 in `empty`), advantages of both signs and a zero."""
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


def our_loss(
    batch: dict, accumulation: int = 1, processes: int = 1, steps_per_generation: int | None = None, **options
):
    """grpo_loss of the book where it has the options, else policy_loss.

    TRL averages gradients over processes and adds them up over accumulation steps, so its divisors are shares of ours.
    """
    share = accumulation / (steps_per_generation or accumulation) / processes
    counts = losses.Counts(B * accumulation, ITEMS * share, MAX_LENGTH)
    family = policy_losses.FamilyLoss(**options)
    common = {field.name: getattr(family, field.name) for field in fields(losses.PolicyLoss)}
    in_book = family.loss_type in losses.LOSSES and family.importance_sampling_level in LEVELS
    if in_book and family == policy_losses.FamilyLoss(**common) and "importance_sampling_ratio" not in batch:
        tensors = {name: value for name, value in batch.items() if name != "entropies"}
        return losses.grpo_loss(**tensors, options=losses.PolicyLoss(**common), counts=counts)
    inputs = policy_losses.PolicyInputs(**{name: batch[name] for name in batch.keys() - {"advantages", "mask"}})
    return policy_losses.policy_loss(inputs, batch["advantages"], batch["mask"], family, counts)


def grpo_cells(family: str, batches: list[tuple[dict, str]], choices: list[dict], asked=None) -> Iterator[Cell]:
    """GRPOTrainer._compute_loss for each batch, with its title, and each choice of options; `asked`: TRL's alone."""
    asked = {"items": ITEMS, "max_completion_length": MAX_LENGTH} | (asked or {})
    for options, (batch, title) in product(choices, batches):
        told = {NAMES_OF_TRL.get(name, name): value for name, value in options.items()} | asked
        ours = partial(our_loss, **options, **({"loss_type": "rloo"} if asked.get("kind") == "RLOO" else {}))
        split = {name: options[name] for name in SPLIT if options.get(name, 1) != 1}
        shown = say({name: value for name, value in options.items() if name not in SPLIT} | split)
        name = ", ".join(filter(None, (shown, title)))
        yield loss_cell(family, name, batch, ours, partial(trl, "grpo_loss", **told), ("per_token_logps", "entropies"))


def plain(seeds: int) -> list[tuple[dict, str]]:
    """Batches with titles."""
    return [(policy_batch(seed), f"seed={seed}") for seed in range(seeds)]


def with_old(batch: dict, spread: float, of: str = "old_per_token_logps") -> dict:
    """The batch with old log-probabilities `spread` times as far from the policy's as those `of` a name are."""
    logps = batch["per_token_logps"]
    return batch | {"old_per_token_logps": logps + spread * (batch[of] - logps)}


def by_loss_type() -> Iterator[Cell]:
    """Three families for each loss type: term and average, KL, and how a step is split."""
    batches = plain(2) + [(policy_batch(seed, old=False), f"seed={seed}, no old") for seed in range(2)]
    for loss_type in LOSS_TYPES:
        name, base = f"grpo loss_type={loss_type}", {"importance_sampling_level": LEVELS, "loss_type": (loss_type,)}
        deltas = (None, 1.6) if loss_type in CLIPPED else (None,)
        yield from grpo_cells(name, batches, grid(EPSILONS[:2], **base, delta=deltas))
        kl = grid(**base, beta=(0.04, 0.5), use_bias_correction_kl=(True, False))
        yield from grpo_cells(f"{name}, KL", batches, kl)
        for steps, processes in ((3, 1), (1, 2), (3, 2)):
            split = [{"accumulation": steps, "processes": processes}]
            choices = grid(split, **base, beta=(0.0, 0.1), use_bias_correction_kl=(True,))
            yield from grpo_cells(f"{name}, split step", [(policy_batch(steps + processes), "")], choices)


def by_option() -> Iterator[Cell]:
    """A family for each option, over all loss types."""
    base = {"loss_type": LOSS_TYPES, "importance_sampling_level": LEVELS, "use_bias_correction_kl": (True,)}
    kl = {"beta": (0.1,)} | base
    for seed, (batch, title) in enumerate(plain(2)):
        tied = batch | {"entropies": (2 * batch["entropies"]).round() / 2}
        batches = [(batch, title), (tied, f"{title}, tied entropies")]
        yield from grpo_cells("grpo top_entropy_quantile", batches, grid(top_entropy_quantile=(0.2, 0.5), **kl))
        entropy = grid(**base, entropy_coef=(0.1,), top_entropy_quantile=(1.0, 0.5), accumulation=(1, 3))
        yield from grpo_cells("grpo entropy_coef", [(batch, title)], entropy)
        recorded = batch["old_per_token_logps"] + 0.4 * batch["advantages"][:, None]
        recorded[0, 1] += NAN if seed else 0.0
        recorded = batch | {"sampling_per_token_logps": recorded}
        batches = [(batch, title), (recorded, f"{title}, sampler's own{' with NaN' * seed}")]
        thresholds = grid(off_policy_mask_threshold=(0.05, 0.3), **base)
        yield from grpo_cells("grpo off_policy_mask_threshold", batches, thresholds)
        for width in (1, T):
            ratio = policy_batch(seed + 7)["entropies"][:, :width] * (seed + 0.5)
            ratio[1, 0] = 0.0  # masked by the correction
            weighted = [(batch | {"importance_sampling_ratio": ratio}, f"{title}, ratio (B, {width})")]
            yield from grpo_cells("grpo importance_sampling_ratio", weighted, grid(**kl), {"use_vllm": True})
        yield from grpo_cells("grpo advantages (B, T)", [(policy_batch(seed, by_token=True), title)], grid(**kl))
        masked = [(policy_batch(seed, empty=empty), f"{title}, {name}") for name, empty in MASKED.items()]
        yield from grpo_cells("grpo masked rows", masked, grid(**kl))


def by_parameter() -> Iterator[Cell]:
    """What only some loss types have, what is left to the defaults."""
    tau = {"sapo_temperature_pos": (0.5, 2.0), "sapo_temperature_neg": (0.7, 3.0), "importance_sampling_level": LEVELS}
    yield from grpo_cells("grpo sapo temperatures", plain(2), grid(loss_type=("sapo",), **tau))
    shape = {"vespo_k_pos": (1.0, 2.5), "vespo_lambda_pos": (2.0, 5.0), "vespo_k_neg": (0.5, 4.0)}
    shape |= {"vespo_lambda_neg": (0.0, 1.5)}
    yield from grpo_cells("grpo vespo parameters", plain(2), grid(loss_type=("vespo",), **shape))
    halves, twice = ({"accumulation": k, "steps_per_generation": 8 // k} for k in (4, 2))
    by_tokens = grid([halves, twice], loss_type=("dapo", "cispo", "vespo"))  # they divide by the tokens of the step
    yield from grpo_cells("grpo steps_per_generation", plain(2), by_tokens)
    yield from grpo_cells("grpo defaults", plain(3), [{}, {"beta": 0.1}])
    gspo = {"loss_type": CLIPPED[:4], "beta": (0.1,), "use_bias_correction_kl": (False,)}
    gspo |= {"importance_sampling_level": ("sequence_token",), "delta": (None, 1.6)}
    yield from grpo_cells("gspo_token", plain(3), grid(**gspo), {"module": "trl.experimental.gspo_token"})
    for spread, (batch, title) in product((30, 90), plain(4)):  # beyond where log ratios and weight are bounded
        far = [(with_old(batch, spread, "ref_per_token_logps"), f"{title}, far off by {spread}")]
        equal = [{"vespo_k_pos": k, "vespo_k_neg": k} for k in (0.1, 3.0)]
        flat = [{"vespo_lambda_pos": 0.0, "vespo_lambda_neg": 0.0}]
        yield from grpo_cells("grpo vespo parameters", far, grid(equal, flat, loss_type=("vespo",)))


def together() -> Iterator[Cell]:
    """Many options at once, drawn at random: the order in which they are applied. And RLOO, which has few."""
    choices = {
        "loss_type": LOSS_TYPES, "importance_sampling_level": LEVELS, "beta": (0.0, 0.1), "epsilon_high": (0.2, 0.4),
        "use_bias_correction_kl": (True, False), "top_entropy_quantile": (1.0, 0.4), "entropy_coef": (0.0, 0.05),
        "off_policy_mask_threshold": (None, 0.1), "accumulation": (1, 2), "processes": (1, 2), "delta": (None, 1.7),
    }  # fmt: skip
    for seed in range(96):
        draw = random.Random(seed)
        options = {name: draw.choice(values) for name, values in choices.items()}
        by_token, corrected = draw.random() < 0.3, draw.random() < 0.5
        batch, title = policy_batch(seed, by_token=by_token), f"seed={seed}{', advantages (B, T)' * by_token}"
        if corrected:
            batch["importance_sampling_ratio"] = batch["entropies"][:, : draw.choice((1, T))]
            title += ", importance_sampling_ratio"
        asked = {"use_vllm": True} if corrected else {}
        yield from grpo_cells("grpo options together", [(batch, title)], [options], asked)
    near = [(with_old(batch, 0.3), title) for batch, title in plain(6)]
    yield from grpo_cells("rloo loss", near, EPSILONS, {"kind": "RLOO"})


def random_rewards(seed: int, n: int = 12, missing: float = 0.0) -> Tensor:
    """Rewards of 0, 1/2 and 1, (n, 2) float32, a share of them NaN."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 3, (n, 2), generator=generator).float() / 2
    values[torch.rand(n, 2, generator=generator) < missing] = NAN
    return values


def group_advantages() -> Iterator[Cell]:
    """Over the sum of rewards, by scale, and GDPO. TRL works on float32 rewards, so these agree to float32's digits."""

    def ours(rewards: Tensor, size: int, kind: str) -> Result:
        weights = torch.tensor(WEIGHTS)
        if kind == "normalize_then_sum":
            return {"advantages": baselines.normalize_then_sum(rewards, weights, size)}
        combined = advantages.combine(rewards, weights)
        flat = (advantages.group_std(combined, size).abs() < 1e-8).float().mean()
        result = {"advantages": advantages.group_advantages(combined, size, kind)}
        return result | ({"metric frac_reward_zero_std": flat} if kind == "group" else {})

    kinds = {kind: {"scale_rewards": kind} for kind in ("group", "batch", "none")}
    kinds["normalize_then_sum"] = {"multi_objective_aggregation": "normalize_then_sum"}
    for kind, size, missing, seed in product(kinds, (2, 4, 6), (0.0, 0.4), range(3)):
        rewards, name = random_rewards(seed, missing=missing), f"num_generations={size}, missing={missing}, seed={seed}"
        asked = {"num_generations": size, "reward_weights": WEIGHTS, **kinds[kind]}
        sides = partial(ours, rewards, size, kind), partial(trl, "rollout", rewards, **asked)
        yield Cell(f"advantages {kind}", name, *sides, 1e-6)


def rloo_advantages() -> Iterator[Cell]:
    """Rewards are clipped, then pay for the KL of their completion, then are held against the others of the group."""
    grids = grid(num_generations=(2, 4), beta=(0.0, 0.05), normalize=(False, True), clip=(None, (-0.3, 0.6)))
    for seed, (shown, missing) in enumerate(product(grids, (0.0, 0.4))):
        size, beta, normalize, clip = shown.values()
        rewards, batch = random_rewards(seed, n=B * 2, missing=missing), policy_batch(seed)
        names = ("old_per_token_logps", "ref_per_token_logps", "mask")
        old, ref, mask = (batch[name].float().repeat(2, 1) for name in names)
        total = advantages.combine(rewards, torch.tensor(WEIGHTS))
        total = (total if clip is None else total.clamp(*clip)) - beta * ((old - ref) * mask).sum(1)
        asked = {"num_generations": size, "beta": beta, "normalize_advantages": normalize, "reward_clip_range": clip}
        asked |= {"reward_weights": WEIGHTS, "completions": [[5] * int(length) for length in mask.sum(1)]}
        ours = partial(named, "advantages", baselines.leave_one_out, total, size, normalize)
        theirs = partial(trl, "rollout", rewards, "RLOO", (old, ref), **asked)
        yield Cell("rloo advantages", say(shown | {"missing": missing}), ours, theirs, 1e-6)


def sampler_correction() -> Iterator[Cell]:
    """The ratio between trainer and sampler; TRL keeps the sampler's log-probabilities in float32."""
    family, ratio = "importance_sampling_ratio", policy_losses.rollout_importance_ratio
    clips = ((3.0, None), (1.2, 0.8), (None, 0.9))
    for mode, clip, seed in product(policy_losses.CORRECTION_MODES, clips, range(2)):
        batch, option = policy_batch(seed), {"mode": mode, "clip_max": clip[0], "clip_min": clip[1]}
        old, mask = batch["old_per_token_logps"], batch["mask"]
        sampling = (old + 0.3 * (batch["ref_per_token_logps"] - old)).float()
        sampling[0, 2] = NAN if seed else -1.0
        lengths = mask.sum(1).long().tolist()
        asked = {f"vllm_importance_sampling_{name}": value for name, value in option.items()} | {"use_vllm": True}
        asked["sampling"] = [row[:length].tolist() for row, length in zip(sampling, lengths, strict=True)]
        asked |= {"completions": [[5] * length for length in lengths], "output": family}
        ours = partial(named, family, ratio, old, sampling.double() * mask, mask, **option)
        theirs = partial(trl, "rollout", torch.zeros(B, 1), logps=(old, None), **asked)
        yield Cell(family, f"{mode}, clip={clip}, seed={seed}{' with NaN' * seed}", ours, theirs)


def overlong() -> Iterator[Cell]:
    def ours(*arguments: int) -> Result:
        return {"reward": torch.tensor([grpo_family.soft_overlong_punishment(*arguments)], dtype=torch.float64)}

    for length, cache in product((70, 80, 81, 90, 100, 101), (0, 20)):
        sides = partial(ours, length, 100, cache), partial(trl, "soft_overlong_punishment", length, 100, cache)
        yield Cell("soft_overlong_punishment", f"{length} of 100 tokens, cache {cache}", *sides)
