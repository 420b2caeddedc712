TASK = """
Compute the loss from per-token log-probabilities. First compute the ratio to the policy that sampled; None means that
the current policy sampled. Then compute the term of `loss_type` for each token, multiply it by token_weights, and add
beta times the KL to the reference if `beta` is not 0 (kl_term, corrected by correct_kl if use_bias_correction_kl is
True). Finally average over the tokens of the mask. TERMS has the term of each loss_type, with `term_options` as its
keywords, and AVERAGES has the average. Set `metrics`, the metrics of the term and "kl", and `loss`.
"""

HINT = """
Current and old log-probabilities are equal at first, but only the current ones may have a gradient; that is why you
need detach. A term takes TermInputs and returns per-token losses and metrics. The loss is minimised, and the KL is a
cost, too. The averages take per-token losses that are 0 outside the mask, the mask, and the normalizer with the
totals of the whole step.
"""

WRONG = {
    "without detach, the ratio is 1 and has no gradient, so nothing is learned": (
        "= per_token_logps.detach()",
        "= per_token_logps",
    ),
    "you ignore old_per_token_logps, so the ratio is always 1": ("if old_per_token_logps is None:", "if True:"),
    'importance_sampling_level is ignored; with "sequence", a row has one ratio': (
        "mask, importance_sampling_level)",
        'mask, "token")',
    ),
    "you exponentiate the sum of the log-ratios of a row; GSPO uses their mean": (
        "importance_sampling_level)",
        'importance_sampling_level)\nif importance_sampling_level == "sequence":\n'
        "    ratio = (log_ratio * mask).sum(-1, keepdim=True).exp()",
    ),
    "the ratio is inverted; divide the current probability by the old one": (
        "per_token_logps - old_per_token_logps",
        "old_per_token_logps - per_token_logps",
    ),
    "the sum includes masked tokens; multiply by the mask": ("(per_token_loss * mask,", "(per_token_loss,"),
    "you divide by the number of columns, including padding; average over the tokens of the mask with `normalizer`": (
        "AVERAGES[loss_type](per_token_loss * mask, mask, normalizer)",
        "(per_token_loss * mask).mean()",
    ),
    "the KL's arguments are exchanged; the policy comes first, then the reference": (
        "kl_term(per_token_logps, ref_per_token_logps,",
        "kl_term(ref_per_token_logps, per_token_logps,",
    ),
    "the KL is detached, so it has no gradient and no effect": [
        ("beta * kl\n", "beta * kl.detach()\n"),
        ("kl_term(per_token_logps, ref", "kl_term(per_token_logps.detach(), ref"),
    ],
    "the KL is in the advantage, as in RLOO; GRPO adds it to each token's loss": [
        (
            "per_token_loss = per_token_loss + beta * kl\n",
            f"inputs.advantages = advantages - beta * kl{detached}\n    per_token_loss = TERMS[loss_type](inputs)[0]\n",
        )
        for detached in (".detach()", "")
    ],
    "the KL has the wrong sign; it is a cost": ("+ beta * kl", "- beta * kl"),
    "beta is missing, so the KL has the weight 1": ("beta * kl\n", "kl\n"),
    "you compute the KL to the old policy; compute it to the reference": (
        "kl_term(per_token_logps, ref_per_token_logps,",
        "kl_term(per_token_logps, old_per_token_logps,",
    ),
    "the correction of the KL by the ratio is missing (use_bias_correction_kl)": (
        "correct_kl(kl, ratio, kl_estimator)",
        "kl",
    ),
    "you divide by the tokens of the step for every loss_type; only dapo averages in this way": (
        "AVERAGES[loss_type](per_token_loss * mask, mask, normalizer)",
        "(per_token_loss * mask).sum() / normalizer.tokens",
    ),
    "you divide by the totals of this batch, but a step may have several batches; use `normalizer`": (
        "AVERAGES[loss_type](per_token_loss * mask, mask, normalizer)",
        "AVERAGES[loss_type](per_token_loss * mask, mask, LossNormalizer(len(mask), mask.sum(), 8))",
    ),
    "the ratio is not clipped": (
        "per_token_loss, metrics = TERMS[loss_type](inputs, **term_options)",
        "per_token_loss, metrics = -ratio * advantages, TERMS[loss_type](inputs)[1]",
    ),
    "you take the larger of the two terms; take the smaller one, which limits the update": (
        "per_token_loss, metrics = TERMS[loss_type](inputs, **term_options)",
        "clip = ratio.clamp(1 - epsilon_low, 1 + epsilon_high)\n"
        "per_token_loss, metrics = -torch.max(ratio * advantages, clip * advantages), "
        "TERMS[loss_type](inputs)[1]",
    ),
    "you clip without the minimum, so a token that moved in the wrong direction has no gradient to come back": (
        "per_token_loss, metrics = TERMS[loss_type](inputs, **term_options)",
        "clip = ratio.clamp(1 - epsilon_low, 1 + epsilon_high)\n"
        "per_token_loss, metrics = -clip * advantages, TERMS[loss_type](inputs)[1]",
    ),
    "you divide by the longest completion of the batch; dr_grpo divides by the constant max_completion_length": (
        "AVERAGES[loss_type](per_token_loss * mask, mask, normalizer)",
        "AVERAGES[loss_type](per_token_loss * mask, mask, normalizer) * (\n"
        '    normalizer.max_completion_length / mask.shape[1] if loss_type == "dr_grpo" else 1\n)',
    ),
    'the metrics are missing; add those of the term, and "kl"': ("loss = AVERAGES", "metrics = {}\nloss = AVERAGES"),
    'metrics has no "kl"': ('    metrics["kl"] = kl\n', ""),
    "your loss has the wrong sign; it must be the negative of the objective": (
        "loss = AVERAGES[loss_type](per_token_loss",
        "loss = AVERAGES[loss_type](-per_token_loss",
    ),
}


def tries(grpo_loss):
    import torch

    from minivlmrl.losses.grpo import LossNormalizer

    logps = torch.tensor([[-1.0, -0.5, -2.0], [-0.3, -0.9, 4.0]])
    old = logps + torch.tensor([[0.1, -0.3, 0.4], [0.4, -0.3, 3.0]])
    ref = logps - 0.2
    mask = torch.tensor([[1.0, 1, 1], [1, 1, 0]])
    advantages = torch.tensor([0.8, -0.5])
    given = {
        "old": {"old_per_token_logps": old},
        "old and reference": {"old_per_token_logps": old, "ref_per_token_logps": ref},
    }
    cases = [(loss_type, what) for what in ("on-policy", *given) for loss_type in ("grpo", "dapo", "dr_grpo")]
    for loss_type, what in [*cases, ("dapo sequence", "old and reference")]:
        tensors = given.get(what, {})
        name, *level = loss_type.split()
        options = {"loss_type": name, "beta": 0.3 if "ref_per_token_logps" in tensors else 0.0}
        if level:
            options["importance_sampling_level"] = level[0]
        leaf = logps.clone().requires_grad_()
        loss, metrics = grpo_loss(leaf, advantages, mask, **options, **tensors, normalizer=LossNormalizer(4, 11, 8))
        gradient = torch.autograd.grad(loss, leaf, allow_unused=True)[0]
        yield (
            f"{loss_type}, {what}",
            {"loss and gradient": [loss.detach(), gradient], "metrics": sorted(metrics.items())},
        )
