"""Cells of the policy-gradient losses, of advantages and of the sampler's correction: batches, grids, and our call.

A batch comes from a seed alone. The names of options are TRL's, which are ours too, but for epsilon (our epsilon_low).
"""

import random
from collections.abc import Iterator
from itertools import product

import torch
from torch import Tensor

from minivlmrl import advantages, rewards
from minivlmrl import losses as policy
from minivlmrl.algorithms import advantages as baselines
from minivlmrl.audit import compare
from minivlmrl.audit.compare import Cell, Result

CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
LOSS_TYPES = (*CLIPPED, "cispo", "sapo", "vespo")
BY_TOKENS = ("dapo", "cispo", "vespo")  # they divide by the tokens of the step
LEVELS = ("token", "sequence")
EPSILONS = ((0.2, 0.2), (0.1, 0.3))
STEPS = ((3, 1), (1, 2), (3, 2))  # (gradient accumulation steps, processes)
B, T, MAX_LENGTH, ITEMS = 4, 6, 9, 50  # ITEMS: completion tokens of the generation batch on all processes
WEIGHTS = [0.5, 1.0]
NAN = float("nan")


def oracle():
    """The module that asks TRL, imported only now."""
    from minivlmrl.audit import trl_oracle

    return trl_oracle


def policy_batch(seed: int, old: bool = True, empty: str = "", by_token: bool = False) -> dict[str, Tensor | None]:
    """Ratios well outside the clip range, rows of 1 to T tokens, advantages of both signs and one zero.

    Args:
        old: False leaves the old log-probabilities to the method.
        empty: "row" masks the second row as a whole, "all" every token.
        by_token: advantages (B, T) instead of (B,).
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    logps = -normal(B, T).abs() - 0.1
    lengths = torch.randint(1, T + 1, (B,), generator=generator)
    lengths[0] = T
    lengths[1 if empty == "row" else slice(B if not empty else 0, None)] *= 0 if empty else 1
    scores = normal(B, T) if by_token else normal(B)
    scores[-1] = 0.0
    return {
        "per_token_logps": logps,
        "advantages": scores,
        "completion_mask": (torch.arange(T) < lengths[:, None]).double(),
        "old_per_token_logps": logps + 0.5 * normal(B, T) if old else None,
        "ref_per_token_logps": logps + 0.3 * normal(B, T),
        "entropies": normal(B, T).abs() + 0.05,
    }


def say(options: dict) -> str:
    """The name of a cell; what all cells share is left out."""
    return ", ".join(f"{name}={value}" for name, value in options.items() if name != "max_completion_length")


def grpo_cell(
    family: str,
    batch: dict,
    title: str,
    *,
    accumulation: int = 1,
    processes: int = 1,
    steps_per_generation: int | None = None,
    asked: dict | None = None,
    **options,
) -> Cell:
    """One call of GRPOTrainer._compute_loss.

    Args:
        batch: see policy_batch.
        title: what distinguishes the batch.
        accumulation, processes, steps_per_generation: TRL averages gradients over processes and adds them up over
            accumulation steps, so its divisors are shares of what our num_sequences and num_tokens say.
        asked: options for TRL alone.
        options: for both.
    """

    def ours() -> Result:
        leaves = {name: batch[name].clone().requires_grad_() for name in ("per_token_logps", "entropies")}
        loss, metrics = policy.grpo_loss(
            **batch | leaves, **options, num_sequences=B * accumulation,
            num_tokens=ITEMS / processes * accumulation / (steps_per_generation or accumulation),
        )  # fmt: skip
        return compare.with_gradients(loss, leaves, metrics)

    def theirs() -> Result:
        told = {"epsilon" if name == "epsilon_low" else name: value for name, value in options.items()}
        return oracle().grpo_loss(
            batch, ITEMS, gradient_accumulation_steps=accumulation, num_processes=processes,
            steps_per_generation=steps_per_generation, **told | (asked or {}),
        )  # fmt: skip

    where = {"accumulation": accumulation, "processes": processes, "steps_per_generation": steps_per_generation}
    where = {name: value for name, value in where.items() if value not in (1, None)}
    return Cell(family, ", ".join(filter(None, (say(options | where), title))), ours, theirs)


def seeded(seeds: int, **kinds) -> Iterator[tuple[dict, str]]:
    """Batches from seeds, with and without old log-probabilities, and their titles."""
    for seed, old in product(range(seeds), (True, False)):
        yield policy_batch(seed, old=old, **kinds), f"seed={seed}" + ("" if old else ", no old")


def by_loss_type() -> Iterator[Cell]:
    """Three families for each loss type: term and average, KL, and how a step is split."""
    for loss_type in LOSS_TYPES:
        family = f"grpo loss_type={loss_type}"
        base = {"loss_type": loss_type, "max_completion_length": MAX_LENGTH}
        deltas = (None, 1.6) if loss_type in CLIPPED else (None,)
        for level, delta, (low, high) in product(LEVELS, deltas, EPSILONS):
            bounds = {"delta": delta, "epsilon_low": low, "epsilon_high": high}
            for batch, title in seeded(2):
                yield grpo_cell(family, batch, title, importance_sampling_level=level, **base, **bounds)
        for level, beta, corrected in product(LEVELS, (0.04, 0.5), (True, False)):
            kl = {"beta": beta, "use_bias_correction_kl": corrected}
            for batch, title in seeded(2):
                yield grpo_cell(f"{family}, KL", batch, title, importance_sampling_level=level, **base, **kl)
        for level, beta, (accumulation, processes) in product(LEVELS, (0.0, 0.1), STEPS):
            step = {"accumulation": accumulation, "processes": processes, "beta": beta, "use_bias_correction_kl": True}
            batch = policy_batch(accumulation + processes)
            yield grpo_cell(f"{family}, split step", batch, "", importance_sampling_level=level, **base, **step)


def by_option() -> Iterator[Cell]:
    """A family for each option, over all loss types."""
    for loss_type, level, seed in product(LOSS_TYPES, LEVELS, range(2)):
        base = {"loss_type": loss_type, "max_completion_length": MAX_LENGTH, "importance_sampling_level": level}
        base["use_bias_correction_kl"] = True
        batch, title = policy_batch(seed), f"seed={seed}"
        tied = batch | {"entropies": (2 * batch["entropies"]).round() / 2}
        for share, (of, what) in product((0.2, 0.5), ((batch, title), (tied, f"{title}, tied entropies"))):
            yield grpo_cell("grpo top_entropy_quantile", of, what, top_entropy_quantile=share, beta=0.1, **base)
        for share, accumulation in product((1.0, 0.5), (1, 3)):
            entropy = {"entropy_coef": 0.1, "top_entropy_quantile": share, "accumulation": accumulation}
            yield grpo_cell("grpo entropy_coef", batch, title, **base, **entropy)
        for drift, recorded in product((0.05, 0.3), (None, 0.4)):
            off = policy_batch(seed)
            if recorded:
                off["sampling_per_token_logps"] = off["old_per_token_logps"] + recorded * off["advantages"][:, None]
                off["sampling_per_token_logps"][0, 1] += NAN if seed else 0.0
            what = f"{title}, sampler's own{' with NaN' * seed}" if recorded else title
            yield grpo_cell("grpo off_policy_mask_threshold", off, what, off_policy_mask_threshold=drift, **base)
        for width in (1, T):
            ratio = policy_batch(seed + 7)["entropies"][:, :width] * (seed + 0.5)
            ratio[1, 0] = 0.0  # masked by the correction
            vllm, what = {"asked": {"use_vllm": True}}, f"{title}, ratio (B, {width})"
            weighted = batch | {"importance_sampling_ratio": ratio}
            yield grpo_cell("grpo importance_sampling_ratio", weighted, what, beta=0.1, **base, **vllm)
        yield grpo_cell("grpo advantages (B, T)", policy_batch(seed, by_token=True), title, beta=0.1, **base)
        for empty in ("row", "all"):
            yield grpo_cell("grpo masked rows", policy_batch(seed, empty=empty), f"{title}, {empty}", beta=0.1, **base)


def by_parameter() -> Iterator[Cell]:
    """What only some loss types have, and what is left to the defaults."""
    for level, seed, pos, neg in product(LEVELS, range(2), (0.5, 2.0), (0.7, 3.0)):
        tau = {"sapo_temperature_pos": pos, "sapo_temperature_neg": neg, "importance_sampling_level": level}
        yield grpo_cell("grpo sapo temperatures", policy_batch(seed), f"seed={seed}", loss_type="sapo", **tau)
    for seed, k_pos, k_neg, lambda_pos, lambda_neg in product(range(2), (1.0, 2.5), (0.5, 4.0), (2.0, 5.0), (0.0, 1.5)):
        shape = {"k_pos": k_pos, "lambda_pos": lambda_pos, "k_neg": k_neg, "lambda_neg": lambda_neg}
        shape = {f"vespo_{name}": value for name, value in shape.items()}
        yield grpo_cell("grpo vespo parameters", policy_batch(seed), f"seed={seed}", loss_type="vespo", **shape)
    for seed, k, spread in product(range(4), (0.1, 3.0), (30, 90)):  # beyond where log ratios and weight are bounded
        batch = policy_batch(seed)
        logps, ref = batch["per_token_logps"], batch["ref_per_token_logps"]
        far = batch | {"old_per_token_logps": logps + spread * (ref - logps)}
        shape = {"vespo_k_pos": k, "vespo_k_neg": k, "vespo_lambda_pos": 0.0, "vespo_lambda_neg": 0.0}
        yield grpo_cell("grpo vespo parameters", far, f"seed={seed}, far off by {spread}", loss_type="vespo", **shape)
    for loss_type, steps, seed in product(BY_TOKENS, ((4, 2), (2, 4)), range(2)):
        split = {"accumulation": steps[0], "steps_per_generation": steps[1]}
        yield grpo_cell("grpo steps_per_generation", policy_batch(seed), f"seed={seed}", loss_type=loss_type, **split)
    for seed, options in product(range(3), ({}, {"beta": 0.1})):
        yield grpo_cell("grpo defaults", policy_batch(seed), f"seed={seed}", **options)
    for loss_type, delta, seed in product(CLIPPED[:4], (None, 1.6), range(3)):
        level = {"importance_sampling_level": "sequence_token", "max_completion_length": MAX_LENGTH, "delta": delta}
        yield grpo_cell(
            "gspo_token", policy_batch(seed), f"seed={seed}", loss_type=loss_type, beta=0.1,
            use_bias_correction_kl=False, asked={"module": "trl.experimental.gspo_token"}, **level,
        )  # fmt: skip


def together() -> Iterator[Cell]:
    """Many options at once, drawn at random: the order in which they are applied."""
    choices = {
        "loss_type": LOSS_TYPES, "importance_sampling_level": LEVELS, "beta": (0.0, 0.1), "epsilon_high": (0.2, 0.4),
        "use_bias_correction_kl": (True, False), "top_entropy_quantile": (1.0, 0.4), "entropy_coef": (0.0, 0.05),
        "off_policy_mask_threshold": (None, 0.1), "accumulation": (1, 2), "processes": (1, 2), "delta": (None, 1.7),
    }  # fmt: skip
    for seed in range(96):
        draw = random.Random(seed)
        options = {name: draw.choice(values) for name, values in choices.items()}
        by_token, corrected, asked = draw.random() < 0.3, draw.random() < 0.5, {}
        batch, title = policy_batch(seed, by_token=by_token), f"seed={seed}{', advantages (B, T)' * by_token}"
        if corrected:
            asked["use_vllm"] = True
            batch["importance_sampling_ratio"] = batch["entropies"][:, : draw.choice((1, T))]
            title += ", importance_sampling_ratio"
        together = {"max_completion_length": MAX_LENGTH, "asked": asked, **options}
        yield grpo_cell("grpo options together", batch, title, **together)


def rloo_losses() -> Iterator[Cell]:
    for seed, (low, high) in product(range(6), (*EPSILONS, (0.2, 0.28))):
        batch = policy_batch(seed)
        batch["old_per_token_logps"] = batch["per_token_logps"] + 0.3 * (
            batch["old_per_token_logps"] - batch["per_token_logps"]
        )
        bounds = {"epsilon_low": low, "epsilon_high": high}
        cell = grpo_cell("rloo loss", batch, f"seed={seed}", **bounds, asked={"kind": "RLOO"})
        cell.ours = lambda batch=batch, bounds=bounds: rloo_loss(batch, bounds)
        yield cell


def rloo_loss(batch: dict, bounds: dict) -> Result:
    leaves = {name: batch[name].clone().requires_grad_() for name in ("per_token_logps", "entropies")}
    loss, metrics = policy.grpo_loss(**batch | leaves, **bounds, loss_type="rloo")
    return compare.with_gradients(loss, leaves, metrics)


def random_rewards(seed: int, n: int = 12, functions: int = 2, missing: float = 0.0) -> Tensor:
    """Rewards of 0, 1/2 and 1, (n, K) float32, a share of them NaN."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 3, (n, functions), generator=generator).float() / 2
    values[torch.rand(n, functions, generator=generator) < missing] = NAN
    return values


def group_advantages() -> Iterator[Cell]:
    """TRL works on float32 rewards, so these agree to float32's digits."""
    for scale, size, missing, seed in product(advantages.SCALES, (2, 4, 6), (0.0, 0.4), range(3)):
        values, weights = random_rewards(seed, missing=missing), torch.tensor(WEIGHTS)

        def ours(values=values, weights=weights, size=size, scale=scale) -> Result:
            combined = advantages.combine(values, weights)
            result = {"advantages": advantages.group_advantages(combined, size, scale)}
            if scale == "group":
                flat = advantages.group_std(combined, size).abs() < 1e-8
                result["metric frac_reward_zero_std"] = flat.float().mean()
            return result

        def theirs(values=values, size=size, scale=scale) -> Result:
            return oracle().rollout(values, num_generations=size, scale_rewards=scale, reward_weights=WEIGHTS)

        name = f"num_generations={size}, missing={missing}, seed={seed}"
        yield Cell(f"advantages {scale}", name, ours, theirs, 1e-6)


def normalized_advantages() -> Iterator[Cell]:
    for size, missing, seed in product((2, 4, 6), (0.0, 0.4), range(3)):
        values = random_rewards(seed, missing=missing)

        def ours(values=values, size=size) -> Result:
            return {"advantages": baselines.normalize_then_sum(values, torch.tensor(WEIGHTS), size)}

        def theirs(values=values, size=size) -> Result:
            option = {"multi_objective_aggregation": "normalize_then_sum", "reward_weights": WEIGHTS}
            return oracle().rollout(values, num_generations=size, **option)

        name = f"num_generations={size}, missing={missing}, seed={seed}"
        yield Cell("advantages normalize_then_sum", name, ours, theirs, 1e-6)


def rloo_advantages() -> Iterator[Cell]:
    """Rewards are clipped, then pay for the KL of their completion, then are held against the others of the group."""
    grid = product((2, 4), (0.0, 0.05), (False, True), (None, (-0.3, 0.6)), (0.0, 0.4))
    for seed, (size, beta, normalize, clip, missing) in enumerate(grid):
        values, batch = random_rewards(seed, n=B * 2, missing=missing), policy_batch(seed)
        old, ref = (batch[f"{name}_per_token_logps"].float().repeat(2, 1) for name in ("old", "ref"))
        mask = batch["completion_mask"].float().repeat(2, 1)

        def ours(values=values, old=old, ref=ref, mask=mask, size=size, beta=beta, normalize=normalize, clip=clip):
            total = advantages.combine(values, torch.tensor(WEIGHTS))
            total = total if clip is None else total.clamp(*clip)
            total = total - beta * ((old - ref) * mask).sum(1)
            return {"advantages": baselines.leave_one_out(total, size, normalize)}

        def theirs(values=values, old=old, ref=ref, mask=mask, size=size, beta=beta, normalize=normalize, clip=clip):
            option = {"num_generations": size, "beta": beta, "normalize_advantages": normalize}
            tokens = [[5] * int(length) for length in mask.sum(1)]
            option |= {"reward_weights": WEIGHTS, "reward_clip_range": clip, "completions": tokens}
            answer = oracle().rollout(values, "RLOO", old=old, ref=ref, **option)
            return {"advantages": answer["advantages"]}

        option = {"num_generations": size, "beta": beta, "normalize": normalize, "clip": clip, "missing": missing}
        yield Cell("rloo advantages", say(option), ours, theirs, 1e-6)


def sampler_correction() -> Iterator[Cell]:
    """The ratio between trainer and sampler; TRL keeps the sampler's log-probabilities in float32."""
    for mode, clips, seed in product(policy.CORRECTION_MODES, ((3.0, None), (1.2, 0.8), (None, 0.9)), range(2)):
        batch = policy_batch(seed)
        old, mask = batch["old_per_token_logps"], batch["completion_mask"]
        sampling = (old + 0.3 * (batch["ref_per_token_logps"] - old)).float()
        sampling[0, 2] = NAN if seed else -1.0

        def ours(old=old, sampling=sampling, mask=mask, mode=mode, clips=clips) -> Result:
            option = {"mode": mode, "clip_max": clips[0], "clip_min": clips[1]}
            ratio = policy.rollout_importance_ratio(old, sampling.double() * mask, mask, **option)
            return {"importance_sampling_ratio": ratio}

        def theirs(old=old, sampling=sampling, mask=mask, mode=mode, clips=clips) -> Result:
            lengths = mask.sum(1).long().tolist()
            option = {"mode": mode, "clip_max": clips[0], "clip_min": clips[1]}
            option = {f"vllm_importance_sampling_{name}": value for name, value in option.items()}
            recorded = [row[:length].tolist() for row, length in zip(sampling, lengths, strict=True)]
            return oracle().rollout(
                torch.zeros(B, 1), completions=[[5] * length for length in lengths], old=old, sampling=recorded,
                wanted=("importance_sampling_ratio",), use_vllm=True, **option,
            )  # fmt: skip

        name = f"{mode}, clip={clips}, seed={seed}{' with NaN' * seed}"
        yield Cell("importance_sampling_ratio", name, ours, theirs)


def overlong() -> Iterator[Cell]:
    for length, cache in product((70, 80, 81, 90, 100, 101), (0, 20)):
        arguments = (length, 100, cache)

        def ours(arguments=arguments) -> Result:
            return {"reward": torch.tensor([rewards.soft_overlong_punishment(*arguments)], dtype=torch.float64)}

        def theirs(arguments=arguments) -> Result:
            return oracle().soft_overlong_punishment(*arguments)

        yield Cell("soft_overlong_punishment", f"{length} of 100 tokens, cache {cache}", ours, theirs)


ALL = (
    by_loss_type, by_option, by_parameter, together, rloo_losses, group_advantages, normalized_advantages,
    rloo_advantages, sampler_correction, overlong,
)  # fmt: skip
