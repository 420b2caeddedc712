"""Adapters for public projects' losses in JAX and MLX."""

import functools
from dataclasses import dataclass

from docs.scripts.field.reading import Project, Settings, is_sequence


def easydel(theirs, b, o):
    """Call EasyDeL's step in evaluation mode, which returns the loss."""
    theirs.get_per_token_logps = lambda *_, **__: b.logps
    state = Settings(merge=lambda tree: lambda: None, graphstate=None)
    names = ("prompt_ids", "prompt_mask", "completion_ids")
    batch = {name: b.mask for name in names} | {"completion_mask": b.mask, "advantages": b.advantages[:, 0]}
    batch |= {"old_per_token_logps": b.old, "ref_per_token_logps": b.ref, "num_items_in_batch": o.tokens}
    return theirs.grpo_step(
        state, batch, 1, o.beta, is_training=False, loss_type=o.loss_type, epsilon=o.epsilon_low,
        epsilon_high=o.epsilon_high, importance_sampling_level=o.importance_sampling_level,
    ).loss  # fmt: skip


def tunix(theirs, b, o, kl="low_var_kl"):
    for name in ("WeightedMetric", "LossOutput"):
        setattr(theirs, name, dataclass(getattr(theirs, name)))
    theirs.split = lambda model: (None, None)
    theirs.compute_per_token_logps = lambda *_, **__: (b.logps, 0 * b.logps)
    names = {"completion_mask": b.mask, "advantages": b.advantages[:, 0], "completion_ids": None, "prompt_ids": None}
    example = Settings(**names, old_per_token_logps=b.old, ref_per_token_logps=b.ref)
    config = Settings(
        beta=o.beta, epsilon=o.epsilon_low, epsilon_high=o.epsilon_high, temperature=1.0, kl_loss_mode=kl,
        loss_algo="gspo-token" if is_sequence(o) else "grpo", kl_clamp_value=None,
        loss_agg_mode="token-mean" if o.loss_type == "dapo" else "sequence-mean-token-mean",
    )  # fmt: skip
    return theirs.grpo_loss_fn(None, example, config, 0, 1).primary_loss.compute()


def tunix_default_kl(theirs, b, o):
    return tunix(theirs, b, o, kl="kl")


def mlx_lm_lora(theirs, b, o):
    """Call mlx-lm-lora's loss, with log-probabilities in place of model outputs.

    The project has no mask, but counts tokens per row, so the tokens in the mask come first.
    """
    mx = theirs.mx
    T = b.mask.shape[1]
    order = mx.argsort(mx.arange(T) + T * (1 - b.mask), axis=1)
    rows = {name: mx.take_along_axis(x, order, axis=1) for name, x in (("policy", b.logps), ("reference", b.ref))}
    theirs.get_per_token_logps = lambda model, *_: [*rows[model]]
    completions = [mx.zeros((int(length) + 1,), dtype=mx.int32) for length in b.mask.sum(1).tolist()]
    return theirs.grpo_loss(
        "policy", "reference", None, completions, advantages=b.advantages[:, 0], reward_metrics={}, beta=o.beta,
        epsilon=o.epsilon_low, epsilon_high=o.epsilon_high, max_tokens=o.max_completion_length,
        importance_sampling_level=o.importance_sampling_level, grpo_loss_type=o.loss_type,
    )[0]  # fmt: skip


PROJECTS = {
    "EasyDeL": Project(
        "github.com/erfanzar/EasyDeL", "090a03b2 of 2026-04-22",
        "trainers/group_relative_policy_optimization/_fn.py: _masked_sum_and_count grpo_step",
        {easydel: "GRPO; GRPO, k3; BNPO; DAPO; GSPO; CISPO"},
        others={
            "make_assertions_and_get_sizes": lambda **_: (0, 0, None), "LossMetrics": Settings,
            "with_sharding_constraint": lambda arr, sharding: arr,
            **dict.fromkeys(
                ("extract_generation_model_kwargs", "repeat_prompt_aligned_model_kwargs"), lambda *_, **__: {}
            ),
        }, framework="jax",
    ),
    "Tunix": Project(
        "github.com/google/tunix", "c7d8950f of 2026-08-21",
        "tunix/rl/algo_core.py: masked_mean grpo_loss_fn; "
        "tunix/rl/common.py: aggregate_loss reduced_loss_agg compute_kl_divergence; "
        "tunix/sft/utils.py: WeightedMetric LossOutput",
        {tunix: "GRPO; GRPO, k3; DAPO; GSPO"},
        "common nnx sft_utils utils",
        {"flax": Settings(struct=Settings(field=lambda default, **_: default)), "functools": functools},
        framework="jax",
    ),
    "mlx-lm-lora": Project(
        "github.com/Goekdeniz-Guelmez/mlx-lm-lora", "dfaaaed of 2026-08-15",
        "trainer/grpo_trainer.py: compute_log_importance_weights grpo_loss",
        {mlx_lm_lora: "BNPO; BNPO, weighted k3; Dr. GRPO"}, framework="mlx",
    ),
}  # fmt: skip
