"""Adapters for public projects' losses in PyTorch."""

import enum
from collections import defaultdict

import torch
from torch.nn import functional as F

from docs.scripts.field.reading import Project, Settings, is_sequence, sums


def verl(theirs, b, o):
    """Call verl's policy losses, with its default dual clip of 3."""
    averages = {"dr_grpo": "seq-mean-token-sum-norm", "dapo": "token-mean", "cispo": "token-mean"}
    mode = averages.get(o.loss_type, "seq-mean-token-mean")
    batch = {"batch_num_tokens": o.tokens, "global_batch_size": len(b.mask)}
    batch["loss_scale_factor"] = o.max_completion_length
    bounds = {"clip_ratio": 0.2, "clip_ratio_low": o.epsilon_low, "clip_ratio_high": o.epsilon_high}
    config = Settings(**bounds, global_batch_info=batch, tau_pos=1.0, tau_neg=1.05)
    name = "gspo" if is_sequence(o) else o.loss_type if o.loss_type in ("cispo", "sapo") else "vanilla"
    policy_loss = getattr(theirs, f"compute_policy_loss_{name}")
    loss = policy_loss(b.old, b.logps, b.advantages, b.mask, mode, config)[0]
    if o.beta:
        kl = theirs.kl_penalty(b.logps, b.ref, "low_var_kl")
        loss = loss + o.beta * theirs.agg_loss(kl, b.mask, mode, **batch)
    return loss


def easyr1(theirs, b, o):
    """Call EasyR1's policy losses, with its default dual clip of 3."""
    mode = "token" if o.loss_type in ("dapo", "cispo") else "seq"
    name = "gspo" if is_sequence(o) else o.loss_type if o.loss_type in ("cispo", "sapo") else "default"
    bounds = (o.epsilon_low, o.epsilon_high, 3.0, 1.0, 1.05)
    loss = theirs.compute_policy_loss(b.old, b.logps, b.advantages, b.mask, *bounds, name, mode)[0]
    if o.beta:
        loss = loss + o.beta * theirs.average_loss(theirs.compute_kl(b.logps, b.ref, "low_var_kl"), b.mask, mode)
    return loss


def openrlhf(theirs, b, o):
    is_token = o.loss_type == "dapo"
    policy_loss = theirs.PolicyLoss(
        o.epsilon_low, o.epsilon_high, token_level_loss=is_token, policy_loss_type="gspo" if is_sequence(o) else "ppo"
    )
    batch = {"batch_num_tokens": o.tokens, "global_batch_size": len(b.mask)}
    loss = policy_loss(b.logps, b.old, b.advantages, b.mask, **batch)[0]
    if o.beta:
        kl = theirs.compute_approx_kl(b.logps, b.ref, kl_estimator="k3")
        loss = loss + o.beta * theirs.aggregate_loss(kl, b.mask, is_token, **batch)
    return loss


def openrlhf_sft(theirs, b, o):
    return theirs.SFTLoss()(b.logps, b.mask)


def openrlhf_dpo(theirs, b, o):
    return theirs.DPOLoss(o.beta, o.label_smoothing, ipo=o.loss_type == ["ipo"])(*sums(b))[0]


def rlhf_book(theirs, b, o):
    name = "GSPO" if is_sequence(o) else o.loss_type.upper()
    settings = {"clip_eps_lo": o.epsilon_low, "clip_eps_hi": o.epsilon_high, "beta": o.beta, "kl_estimator": "kl3"}
    loss = getattr(theirs, f"{name}Loss")(**settings, sapo_temp_pos=1.0, sapo_temp_neg=1.05)
    experience = Settings(log_probs_old=b.old, log_probs_ref=b.ref, advantages=b.advantages, action_mask=b.mask)
    return loss(b.logps, experience)


def rlhf_book_dpo(theirs, b, o):
    loss = theirs.IPOLoss(o.beta) if o.loss_type == ["ipo"] else theirs.DPOLoss(o.beta, o.label_smoothing)
    return loss(*sums(b))[0]


def slime(theirs, b, o):
    """Average slime's per-token losses; its own code only sums them over packed samples."""
    bounds = (o.epsilon_low, o.epsilon_high)
    if o.loss_type == "cispo":
        loss = theirs.compute_cispo_loss(b.old - b.logps, b.logps, b.advantages, *bounds)[0]
    else:
        loss = theirs.compute_policy_loss(b.old - b.logps, b.advantages, *bounds)[0]
    if o.beta:
        ratio = (b.logps - b.old).exp() if o.use_bias_correction_kl else None
        loss = loss + o.beta * theirs.compute_approx_kl(b.logps, b.ref, "low_var_kl", ratio)
    loss = loss * b.mask
    return (loss.sum(1) / b.mask.sum(1).clamp(min=1)).mean() if o.loss_type == "grpo" else loss.sum() / o.tokens


def areal(theirs, b, o):
    mask = b.mask.bool()
    if o.loss_type == "sapo":
        return theirs.sapo_loss_fn(b.logps, b.old, b.advantages, 1.0, 1.05, mask)[0]
    return theirs.ppo_actor_loss_fn(
        b.logps, b.old, b.old, b.advantages, o.epsilon_low, mask, o.epsilon_high, None,
        importance_sampling_level=o.importance_sampling_level,
    )[0]  # fmt: skip


def areal_dpo(theirs, b, o):
    """Call AReaL's preference losses, with all rows in one packed sequence."""
    rows = b.mask.flatten(0, 1)
    logps, ref = (F.pad(x.flatten(0, 1), (0, 1)).flatten() for x in (b.logps, b.ref))
    starts = torch.arange(len(rows) + 1) * (rows.shape[1] + 1)
    mask = F.pad(rows, (1, 0)).flatten().bool()
    policy, reference, lengths = theirs.dpo_pair_logratios(logps, ref, starts, mask, torch.ones(len(b.mask)).bool())
    margins = policy - reference
    margins = margins / lengths if o.loss_type == ["ipo"] else margins
    return theirs.dpo_preference_loss(margins[:, 0] - margins[:, 1], beta=o.beta, loss_type=o.loss_type[0]).mean()


def skyrl(theirs, b, o):
    averages = {"dapo": "token_mean", "cispo": "token_mean", "dr_grpo": "seq_mean_token_sum_norm"}
    average = averages.get(o.loss_type, "sequence_mean")
    bounds = {"eps_clip_low": o.epsilon_low, "eps_clip_high": o.epsilon_high}
    cispo = Settings(cispo_eps_clip_low=o.epsilon_low, cispo_eps_clip_high=o.epsilon_high)
    config = Settings(**bounds, policy_loss_type="regular", loss_reduction=average, off_policy_correction=None)
    config.cispo, config.sapo = cispo, Settings(tau_pos=1.0, tau_neg=1.05)
    advantages = theirs.apply_loss_reduction_to_advantages_minibatch(
        b.advantages, b.mask, average, len(b.mask), o.max_completion_length
    )
    names = {"cispo": "compute_policy_loss_cispo", "sapo": "sapo_policy_loss"}
    name = "gspo_policy_loss" if is_sequence(o) else names.get(o.loss_type, "ppo_policy_loss")
    loss = getattr(theirs, name)(b.logps, b.old, advantages, config, b.mask)[0]
    if o.beta:
        kl = theirs.compute_approx_kl(b.logps, b.ref, b.mask)
        loss = loss + o.beta * theirs.masked_mean(kl, b.mask, dim=-1).mean()
    return loss


def unsloth(theirs, b, o):
    return theirs.grpo_compute_loss(
        b.ref, b.logps, b.old, None, b.mask, b.mask, o.beta, b.advantages[:, 0], num_items_in_batch=o.tokens,
        loss_type=o.loss_type, epsilon_low=o.epsilon_low, epsilon_high=o.epsilon_high, sapo_temperature_pos=1.0,
        sapo_temperature_neg=1.05, max_completion_length=o.max_completion_length,
        importance_sampling_level=o.importance_sampling_level, use_bias_correction_kl=o.use_bias_correction_kl,
    )[0]  # fmt: skip


def open_instruct(theirs, b, o):
    bounds = {"clip_lower": o.epsilon_low, "clip_higher": o.epsilon_high}
    config = Settings(loss_fn=theirs.GRPOLossType[o.loss_type], kl_estimator=2, **bounds)
    ratio, ref = (b.logps - b.old).exp(), b.ref if o.beta else None
    loss, _, kl = theirs.compute_grpo_loss(b.logps, ratio, b.advantages, ref, config, torch.ones_like(ratio))
    return ((loss + o.beta * kl) * b.mask).sum() / o.tokens


def open_instruct_dpo(theirs, b, o):
    return theirs.dpo_loss(*sums(b), o.beta, label_smoothing=o.label_smoothing)[0].mean()


def nemo_rl(theirs, b, o):
    config = theirs.ClippedPGLossConfig(
        token_level_loss=o.loss_type in ("dapo", "cispo"), sequence_level_importance_ratios=is_sequence(o),
        ratio_clip_min=o.epsilon_low, ratio_clip_max=o.epsilon_high, reference_policy_kl_penalty=o.beta,
        use_cispo=o.loss_type == "cispo", use_on_policy_kl_approximation=o.use_bias_correction_kl,
    )  # fmt: skip
    names = {"advantages": b.advantages, "prev_logprobs": b.old, "generation_logprobs": b.old}
    names |= {"reference_policy_logprobs": b.ref, "token_mask": b.mask}
    data = {name: F.pad(x, (1, 0)) for name, x in names.items()} | {"sample_mask": torch.ones(len(b.mask))}
    return theirs.ClippedPGLossFn(config)(b.logps, data, torch.tensor(len(b.mask)), torch.tensor(o.tokens))[0]


def nemo_rl_dpo(theirs, b, o):
    logps, ref, mask = (x.flatten(0, 1) for x in (b.logps, b.ref, b.mask))
    data = {"reference_policy_logprobs": F.pad(ref, (0, 1)), "token_mask": F.pad(mask, (1, 0))}
    data["sample_mask"] = torch.ones(len(mask))
    loss = theirs.DPOLossFn(theirs.DPOLossConfig(reference_policy_kl_penalty=o.beta))
    return loss(logps, data, torch.tensor(len(mask)), None)[0]


def vlm_r1(theirs, b, o):
    """Call VLM-R1's compute_loss with num_iterations=2, which uses old log-probabilities."""
    prompt = torch.zeros(len(b.mask), 1)
    inputs = {"prompt_ids": prompt, "prompt_mask": prompt, "completion_ids": b.mask, "completion_mask": b.mask}
    inputs |= {"multimodal_inputs": {}, "advantages": b.advantages[:, 0], "old_per_token_logps": b.old}
    inputs["ref_per_token_logps"] = b.ref
    trainer = Settings(
        state=Settings(global_step=1), num_iterations=2, _buffered_inputs=[inputs], _step=0, beta=o.beta,
        args=Settings(gradient_accumulation_steps=1), epsilon_low=o.epsilon_low, epsilon_high=o.epsilon_high,
        _get_per_token_logps=lambda *_: b.logps, _metrics=defaultdict(list), accelerator=ONE_PROCESS,
    )  # fmt: skip
    return theirs.compute_loss(trainer, None, None)


def ms_swift(theirs, b, o):
    """Call ms-swift's loss in evaluation mode; training mode multiplies by the accumulation steps."""
    off = ("compute_entropy", "overlong_filter", "kl_in_reward", "log_rollout_offpolicy_metrics", "_has_teacher")
    unset = ("rollout_importance_sampling_mode", "off_policy_sequence_mask_delta", "chord_sft_iterator")
    trainer = Settings(
        **dict.fromkeys(off, False), **dict.fromkeys(unset), model=Settings(training=False), args=Settings(delta=None),
        beta=o.beta, epsilon_low=o.epsilon_low, epsilon_high=o.epsilon_high, loss_type=o.loss_type, tau_pos=1.0,
        tau_neg=1.05, importance_sampling_level=o.importance_sampling_level, sdar_loss_coef=0, accelerator=ONE_PROCESS,
        max_completion_length=o.max_completion_length, disable_rollout_importance_sampling=True,
        _get_per_token_logps_and_entropies=lambda *_, **__: (b.logps, None),
        _undo_gradient_accumulation_scaling=lambda loss: loss,
    )  # fmt: skip
    batch = Settings(
        completion_mask=b.mask, truncated_mask=None, ref_per_token_logps=b.ref, advantages=b.advantages,
        old_per_token_logps=b.old, rollout_per_token_logps=None, num_items_in_batch=o.tokens,
    )  # fmt: skip
    return theirs._compute_loss_and_metrics(trainer, None, {}, batch)[0]


def prime_rl_sft(theirs, b, o):
    rows = zip(b.logps, b.mask.bool(), strict=True)
    losses = [
        theirs.ce_loss_fn(Settings(trainer_logprobs=x, loss_mask=mask, loss_weights=None)).loss for x, mask in rows
    ]
    return sum(losses) / b.mask.sum()


def liger(theirs, b, o):
    return theirs.ppo_loss_fn(
        b.logps, b.mask, b.advantages[:, 0], b.mask, b.ref, b.old, o.epsilon_low, o.epsilon_high, o.beta, o.loss_type,
        o.max_completion_length, o.importance_sampling_level, use_bias_correction_kl=o.use_bias_correction_kl,
        num_items_in_batch=o.tokens,
    )[0]  # fmt: skip


def liger_dpo(theirs, b, o):
    chosen, rejected, ref_chosen, ref_rejected = sums(b)
    logits = torch.zeros(2 * len(chosen), 1)  # only for metrics
    settings = (o.beta, o.loss_type[0], o.label_smoothing)
    return theirs.preference_loss_fn(chosen, rejected, logits, ref_chosen, ref_rejected, *settings)[0]


def torchtune(theirs, b, o):
    """Call torchtune's losses: GRPOLoss averages over all tokens, GRPOCompletionLoss has sequence ratios."""
    name = "GRPOCompletionLoss" if is_sequence(o) else {"bnpo": "GRPOLoss"}.get(o.loss_type, "GRPOSimpleLoss")
    if name == "GRPOSimpleLoss":  # takes epsilon and old log-probabilities, but uses neither
        loss, old = theirs.GRPOSimpleLoss(kl_coeff=o.beta), None
    else:
        loss, old = getattr(theirs, name)(o.epsilon_low, o.beta), b.old
    return loss(old, b.logps, b.ref, b.advantages[:, 0], b.mask.bool())[0]


def torchtune_dpo(theirs, b, o):
    chosen, rejected, ref_chosen, ref_rejected = sums(b)
    policy = Settings(chosen_logps=chosen, rejected_logps=rejected)
    ref = Settings(chosen_logps=ref_chosen, rejected_logps=ref_rejected)
    return theirs.DPOLoss(o.beta, o.label_smoothing)(policy, ref)[0].mean()


def torchforge(theirs, b, o):
    return theirs.SimpleGRPOLoss(o.beta)(b.logps, b.ref, b.advantages, b.mask)


def torchtitan(theirs, b, o):
    """Call torchtitan's DAPO loss, with all rows in one packed sequence."""
    config = Settings(ratio_clip_low=o.epsilon_low, ratio_clip_high=o.epsilon_high)
    names = {"generator_logprobs": b.old, "advantages": b.advantages, "loss_mask": b.mask.bool()}
    packed = {name: x.flatten() for name, x in names.items()}
    theirs.compute_logprobs = lambda *_, **__: (b.logps.flatten(), torch.zeros(b.mask.numel()))
    return theirs.DAPOLoss(config)(None, None, o.tokens, **packed)[0]


def megatron(theirs, b, o):
    """Average Megatron-LM's per-token loss over tokens per row, then over rows."""
    bounds = (o.epsilon_low, o.epsilon_high)
    loss = theirs.calculate_grpo_loss(b.logps, b.old, b.ref, b.advantages[:, 0], *bounds, o.beta, 0.0)[0]
    return ((loss * b.mask).sum(1) / b.mask.sum(1).clamp(min=1)).mean()


def minimind(theirs, b, o):
    args = Settings(loss_type=o.loss_type, beta=o.beta)
    if o.loss_type == "cispo":
        args.epsilon_high = o.epsilon_high
    else:
        args.epsilon = o.epsilon_low  # for both sides
    return theirs.grpo_train_epoch(
        per_token_logps=b.logps, old_per_token_logps=b.old, ref_per_token_logps=b.ref, args=args,
        advantages=b.advantages[:, 0], completion_mask=b.mask,
    ).policy_loss  # fmt: skip


def minimind_dpo(theirs, b, o):
    """Call minimind's DPO loss, with all chosen rows before all rejected rows."""
    ref, logps, mask = (x.transpose(0, 1).flatten(0, 1) for x in (b.ref, b.logps, b.mask))
    return theirs.dpo_loss(ref, logps, mask, o.beta)


def simple_grpo(theirs, b, o):
    names = {"engine": Settings(device="cpu"), "tokenizer": Settings(pad_token_id=0), "inputs": b.mask}
    names |= {"per_token_logps": b.logps, "ref_per_token_logps": b.ref, "batch": {"gen_logps": b.old}}
    names |= {"prompt_length": 0, "advantages": b.advantages, "beta": o.beta, "clip_param": o.epsilon_low}
    return theirs.GRPO_step(**names).loss


def nano_aha_moment(theirs, b, o):
    theirs.compute_token_log_probs = lambda *_: b.logps
    theirs.close_to_zero = lambda advantages, mask: mask.sum()
    batch = {"labels_mask": F.pad(b.mask, (1, 0)), "advantages": F.pad(b.advantages, (1, 0))}
    batch |= {"ref_log_probs": b.ref} | dict.fromkeys(("input_ids", "attention_mask", "labels"))
    return theirs.compute_pg_loss(None, batch, torch.tensor(float(o.tokens)), 1.0, o.beta)[0]


def fork_of_openrlhf(theirs, b, o, token_mean, *mask):
    loss = theirs.PolicyLoss(o.epsilon_low, **token_mean)(b.logps, b.old, b.advantages, b.mask)
    if o.beta:
        kl = theirs.compute_approx_kl(b.logps, b.ref, *mask, kl_estimator="k3")
        loss = loss + o.beta * theirs.masked_mean(kl, b.mask, dim=-1).mean()
    return loss


def mm_eureka(theirs, b, o):
    return fork_of_openrlhf(theirs, b, o, {}, b.mask)


def lmm_r1(theirs, b, o):
    return fork_of_openrlhf(theirs, b, o, {"token_level_loss": o.loss_type != "grpo"})


def r1_v(theirs, b, o):
    """Run the last lines of `compute_loss` in R1-V, or in a project with the same lines."""
    names = {"per_token_logps": b.logps, "advantages": b.advantages[:, 0], "completion_mask": b.mask}
    log_ratio = b.ref - b.logps
    names["per_token_kl"] = log_ratio.exp() - log_ratio - 1  # computed in an earlier line of the project
    settings = {"kl_approximator": "k3", "use_kl": bool(o.beta), "entropy_reg": False}  # options in Perception-R1
    return theirs.compute_loss(**names, self=Settings(beta=o.beta, script_args=Settings(**settings))).loss


def llama_factory_dpo(theirs, b, o):
    return theirs.compute_sigmoid_dpo_loss(*sums(b), o.beta, o.label_smoothing).mean()


def original_dpo(theirs, b, o):
    ipo = o.loss_type == ["ipo"]
    return theirs.preference_loss(*sums(b), o.beta, o.label_smoothing, ipo)[0].mean()


def roll_config(o, dual_clip):
    bounds = {"pg_clip": 0.2, "pg_clip_low": o.epsilon_low, "pg_clip_high": o.epsilon_high}
    return Settings(**bounds, use_pg_clip_range=True, dual_clip_loss=dual_clip)


def roll(theirs, b, o, dual_clip=False, advantages=None):
    """Call ROLL's losses, which multiply advantages by the answer mask."""
    if advantages is None:
        advantages = b.advantages * b.mask
    cispo = {"cispo_epsilon_low": o.epsilon_low, "cispo_epsilon_high": o.epsilon_high}
    worker = Settings(pipeline_config=roll_config(o, dual_clip), _cached_metrics={}, _cispo_config_logged=True)
    worker._get_or_cache_config = lambda name, default: cispo.get(name, default)
    ratio = (b.logps - b.old).exp()
    mode = "seq-mean-token-mean" if o.loss_type == "grpo" else "token-mean"
    tokens, rows = {"final_response_mask": o.tokens}, {"final_response_mask": len(b.mask)}
    if o.loss_type == "cispo":
        loss = theirs._compute_cispo_loss(worker, ratio, b.logps, advantages)
    else:
        loss = theirs._compute_ppo_loss(worker, ratio, advantages, b.mask, tokens, rows)
    divisors = {"batch_num_tokens": o.tokens, "global_valid_samples": len(b.mask)}
    loss = theirs.agg_loss(loss, b.mask, mode, **divisors)
    if o.beta:
        kl = theirs.compute_approx_kl(b.logps, b.ref, b.mask, kl_penalty="k3")
        loss = loss + o.beta * theirs.agg_loss(kl, b.mask, mode, **divisors)
    return loss


def roll_filtered(theirs, b, o):
    """Average over tokens that a filter keeps, with the advantages of all tokens."""
    return roll(theirs, b, o, advantages=b.advantages)


def roll_dpo(theirs, b, o):
    return theirs.loss_fn(*sums(b), ipo=o.loss_type == ["ipo"], beta=o.beta, label_smoothing=o.label_smoothing)[0]


def policy_gradients(theirs, b, o):
    name = "GSPOLoss" if is_sequence(o) else {"cispo": "CISPOLoss"}.get(o.loss_type, "GRPOLoss")
    experience = Settings(log_probs_old=b.old, log_probs_ref=b.ref, action_mask=b.mask, advantages=b.advantages)
    return getattr(theirs, name)(o.epsilon_low, o.epsilon_high, o.beta)(b.logps, experience)


def axolotl(theirs, b, o):
    names = ("beta", "epsilon_low", "epsilon_high", "loss_type", "importance_sampling_level", "max_completion_length")
    args = Settings(delta=None, use_bias_correction_kl=o.use_bias_correction_kl)
    args.sapo_temperature_pos, args.sapo_temperature_neg = 1.0, 1.05
    trainer = Settings(
        **{name: getattr(o, name) for name in names}, args=args, use_vllm=False, accelerator=ONE_PROCESS,
        model=Settings(training=False), current_gradient_accumulation_steps=1,
    )  # fmt: skip
    inputs = {"ref_per_token_logps": b.ref, "num_items_in_batch": torch.tensor(float(o.tokens))}
    return theirs._compute_loss(
        self=trainer, inputs=inputs, per_token_logps=b.logps, old_per_token_logps=b.old, mask=b.mask,
        advantages=b.advantages, off_policy_mask=None, entropy_mask=None,
    ).loss  # fmt: skip


def reasoning_from_scratch(theirs, b, o):
    """Average the book's objective, which has one ratio per answer, over rows."""
    found = theirs.compute_grpo_loss(log_ratio=b.logps - b.old, adv=b.advantages, clip_eps=o.epsilon_low)
    return -((found.obj * b.mask).sum(1) / b.mask.sum(1).clamp(min=1)).mean()


class BaseLoss(Settings):
    Config = Settings  # torchtitan's Config


ONE_PROCESS = Settings(gather_for_metrics=lambda x: x, num_processes=1)

PROJECTS = {
    "verl": Project(
        "verl on PyPI", "0.9.1",
        "verl/trainer/ppo/core_algos.py: agg_loss compute_policy_loss_vanilla compute_policy_loss_gspo "
        "compute_policy_loss_cispo compute_policy_loss_sapo kl_penalty kl_penalty_forward; "
        "verl/utils/torch_functional.py: masked_sum masked_mean",
        {verl: "GRPO; GRPO, k3; DAPO; Dr. GRPO; GSPO; CISPO; SAPO"},
        "verl_F", {"ActorConfig": Settings, "AlgoConfig": enum.Enum},
    ),
    "EasyR1": Project(
        "github.com/hiyouga/EasyR1", "b44b311b of 2026-07-30",
        "verl/trainer/core_algos.py: average_loss compute_policy_loss compute_kl; "
        "verl/utils/torch_functional.py: masked_mean",
        {easyr1: "GRPO; GRPO, k3; DAPO; GSPO; CISPO; SAPO"}, "VF",
    ),
    "OpenRLHF": Project(
        "openrlhf on PyPI", "0.11.2",
        "openrlhf/models/loss.py: aggregate_loss PolicyLoss SFTLoss DPOLoss; "
        "openrlhf/models/utils.py: compute_approx_kl masked_mean",
        {openrlhf: "GRPO; GRPO, k3; DAPO; GSPO", openrlhf_dpo: "DPO; IPO", openrlhf_sft: "SFT"},
    ),
    "rlhf-book": Project(
        "github.com/natolambert/rlhf-book", "a66b0bf1 of 2026-08-21",
        "code/policy_gradients/loss.py: approx_kl1 approx_kl2 approx_kl3 get_approx_kl masked_mean GRPOLoss DAPOLoss "
        "GSPOLoss CISPOLoss SAPOLoss; code/direct_alignment/loss.py: DPOLoss IPOLoss",
        {rlhf_book: "GRPO; GRPO, k3; DAPO; GSPO; CISPO; SAPO", rlhf_book_dpo: "DPO; IPO"},
    ),
    "slime": Project(
        "github.com/THUDM/slime", "624b824a of 2026-08-21",
        "slime/utils/ppo_utils.py: compute_approx_kl compute_policy_loss compute_cispo_loss",
        {slime: "GRPO; GRPO, k3; GRPO, weighted k3; DAPO; CISPO"},
    ),
    "AReaL": Project(
        "areal on PyPI", "1.0.4",
        "areal/utils/functional/functional.py: _compute_sequence_level_ratio_and_advantages ppo_actor_loss_fn "
        "sapo_loss_fn dpo_pair_logratios dpo_preference_loss",
        {areal: "DAPO; GSPO; SAPO", areal_dpo: "DPO; IPO"},
    ),
    "SkyRL": Project(
        "skyrl on PyPI", "0.3.0",
        "skyrl_train/utils/ppo_utils.py: compute_approx_kl ppo_policy_loss sapo_policy_loss gspo_policy_loss "
        "compute_policy_loss_cispo reduce_loss apply_loss_reduction_to_advantages_minibatch; "
        "skyrl_train/utils/torch_utils.py: masked_mean safe_exp_delta; "
        "skyrl_train/utils/off_policy_correction_utils.py: apply_off_policy_correction",
        {skyrl: "GRPO; GRPO, k3; DAPO; Dr. GRPO; GSPO; CISPO; SAPO"},
    ),
    "unsloth": Project(
        "unsloth_zoo on PyPI", "2026.10.9", "unsloth_zoo/rl_replacements.py: grpo_compute_loss",
        {unsloth: "GRPO; GRPO, k3; GRPO, weighted k3; DAPO; Dr. GRPO; GSPO; CISPO; SAPO"},
    ),
    "ms-swift": Project(
        "ms-swift on PyPI", "4.6.0",
        "swift/rlhf_trainers/grpo_trainer.py: GRPOTrainer._compute_loss_and_metrics",
        {ms_swift: "GRPO; GRPO, k3; DAPO; Dr. GRPO; GSPO; CISPO; SAPO"},
        others={"WINDOW_NORMALIZED_LOSS_TYPES": ["cispo", "dapo", "fipo"], "gather_object": list}
        | {"nanmin": torch.min, "nanmax": torch.max},
    ),
    "open-instruct": Project(
        "github.com/allenai/open-instruct", "e6c3044a of 2026-08-20",
        "open_instruct/grpo_utils.py: GRPOLossType compute_grpo_loss; open_instruct/model_utils.py: estimate_kl; "
        "open_instruct/dpo_utils.py: dpo_loss",
        {open_instruct: "DAPO; CISPO", open_instruct_dpo: "DPO"}, "model_utils",
    ),
    "NeMo-RL": Project(
        "github.com/NVIDIA-NeMo/RL", "7ea279ab of 2026-08-22",
        "nemo_rl/algorithms/utils.py: calculate_kl masked_mean; "
        "nemo_rl/algorithms/loss/interfaces.py: LossType LossInputType MetricNormalizer; "
        "nemo_rl/algorithms/loss/loss_functions.py: ClippedPGLossConfig ClippedPGLossFn NLLLossFn PreferenceLossFn "
        "DPOLossConfig DPOLossFn",
        {nemo_rl: "GRPO; GRPO, k3; GRPO, weighted k3; DAPO; GSPO; CISPO", nemo_rl_dpo: "DPO"},
        others={"BaseModel": Settings, "LossFunction": Settings},
    ),
    "VLM-R1": Project(
        "github.com/om-ai-lab/VLM-R1", "90052f47 of 2026-07-07",
        "open_r1/trainer/grpo_trainer.py: VLMGRPOTrainer.compute_loss", {vlm_r1: "GRPO; GRPO, k3"},
    ),
    "prime-rl": Project(
        "github.com/PrimeIntellect-ai/prime-rl", "559b4477 of 2026-08-21",
        "prime_rl/trainer/rl/loss.py: _safe_mean ce_loss_fn", {prime_rl_sft: "SFT"},
        others={"LossOutputs": Settings},
    ),
    "Liger-Kernel": Project(
        "github.com/linkedin/Liger-Kernel", "ead96b61 of 2026-08-21",
        "chunked_loss/grpo_loss.py: k3_loss_fn get_gamma_weights sapo_loss_fn clip_coef_fn "
        "LigerFusedLinearGRPOFunction.ppo_loss_fn; chunked_loss/fused_linear_ppo.py: LigerFusedLinearPPOBase; "
        "chunked_loss/dpo_loss.py: LigerFusedLinearDPOFunction.preference_loss_fn",
        {liger: "GRPO; GRPO, k3; GRPO, weighted k3; BNPO; DAPO; Dr. GRPO; GSPO; CISPO; SAPO; LUSPO; "
         "LUSPO, weighted k3; VESPO", liger_dpo: "DPO; hinge; robust"},
        others={"Optional": None, "abstractmethod": lambda function: function},
    ),
    "axolotl": Project(
        "github.com/axolotl-ai-cloud/axolotl", "067b021c of 2026-07-24",
        "core/trainers/grpo/async_trainer.py: AsyncGRPOTrainer._compute_loss[log_ratio:loss]",
        {axolotl: "GRPO; GRPO, k3; GRPO, weighted k3; BNPO; DAPO; Dr. GRPO; GSPO; CISPO; SAPO; LUSPO; "
         "LUSPO, weighted k3"},
    ),
    "torchtune": Project(
        "github.com/meta-pytorch/torchtune", "bd2a0fc7 of 2026-04-23",
        "dev/grpo/loss.py: GRPOLoss GRPOCompletionLoss GRPOSimpleLoss; rlhf/rewards.py: masked_mean masked_sum; "
        "rlhf/loss/dpo.py: PreferenceLoss DPOLoss",
        {torchtune: "GRPO; GRPO, k3; BNPO; GSPO", torchtune_dpo: "DPO"}, "rlhf",
    ),
    "torchforge": Project(
        "github.com/meta-pytorch/torchforge", "6e77f0b3 of 2025-11-15", "losses/grpo_loss.py: SimpleGRPOLoss",
        {torchforge: "GRPO; GRPO, k3"},
    ),
    "torchtitan": Project(
        "github.com/pytorch/torchtitan", "b5bcd76c of 2026-08-21", "experiments/rl/losses/dapo.py: DAPOLoss",
        {torchtitan: "DAPO"},
        others={"BaseLoss": BaseLoss, "_MAX_LOG_RATIO": 10, "dataclass": lambda **_: lambda x: x},
    ),
    "Megatron-LM": Project(
        "github.com/NVIDIA/Megatron-LM", "d98e8a64 of 2026-08-22", "megatron/rl/rl_utils.py: calculate_grpo_loss",
        {megatron: "GRPO; GRPO, k3"},
    ),
    "ROLL": Project(
        "github.com/alibaba/ROLL", "8eb27cc2 of 2026-08-19",
        "roll/utils/functionals.py: compute_approx_kl agg_loss masked_mean masked_sum; "
        "pipeline/rlvr/actor_pg_worker.py: ActorPGWorker._compute_ppo_loss ActorPGWorker._compute_cispo_loss; "
        "pipeline/dpo/actor_worker.py: loss_fn",
        {roll: "GRPO; GRPO, k3; DAPO; DAPO, k3; CISPO", roll_dpo: "DPO; IPO"},
    ),
    "MM-EUREKA": Project(
        "github.com/ModalMinds/MM-EUREKA", "bccddd7 of 2025-04-04",
        "openrlhf/models/loss.py: PolicyLoss; openrlhf/models/utils.py: compute_approx_kl masked_mean",
        {mm_eureka: "GRPO; GRPO, k3"},
    ),
    "lmm-r1": Project(
        "github.com/TideDra/lmm-r1", "f917f18 of 2025-04-29",
        "openrlhf/models/loss.py: PolicyLoss; openrlhf/models/utils.py: compute_approx_kl masked_mean",
        {lmm_r1: "GRPO; GRPO, k3; BNPO"},
    ),
    "R1-V": Project(
        "github.com/Deep-Agent/R1-V", "bbbbe3d of 2025-03-02",
        "src/r1-v/src/open_r1/trainer/grpo_trainer.py: Qwen2VLGRPOTrainer.compute_loss[per_token_loss:loss]",
        {r1_v: "GRPO; GRPO, k3"},
    ),
    "Visual-RFT": Project(
        "github.com/Liuziyu77/Visual-RFT", "9486633 of 2025-05-21",
        "src/virft/src/open_r1/trainer/grpo_trainer.py: Qwen2VLGRPOTrainer.compute_loss[per_token_loss:loss]",
        {r1_v: "GRPO; GRPO, k3"},
    ),
    "CLS-RL": Project(
        "github.com/minglllli/CLS-RL", "0dc42e0 of 2025-09-19",
        "src/cls-rl/src/open_r1/trainer/grpo_trainer.py: Qwen2VLGRPOTrainer.compute_loss[per_token_loss:loss]",
        {r1_v: "GRPO; GRPO, k3"},
    ),
    "open-r1-multimodal": Project(
        "github.com/EvolvingLMMs-Lab/open-r1-multimodal", "232b7ba of 2025-02-08",
        "src/open_r1/trainer/grpo_trainer.py: Qwen2VLGRPOTrainer.compute_loss[per_token_loss:loss]",
        {r1_v: "GRPO; GRPO, k3"},
    ),
    "Perception-R1": Project(
        "github.com/linkangheng/PR1", "48d5558 of 2025-05-19",
        "src/open_r1/trainer/grpo_trainer_vllm.py: Qwen2VLGRPOTrainer.compute_loss[per_token_loss:loss]",
        {r1_v: "GRPO; GRPO, k3"},
    ),
    "minimind": Project(
        "github.com/jingyaogong/minimind", "d65ef2c of 2026-08-21",
        "trainer/train_grpo.py: grpo_train_epoch[kl_div:policy_loss]; trainer/train_dpo.py: dpo_loss",
        {minimind: "GRPO; GRPO, k3; CISPO", minimind_dpo: "DPO"},
    ),
    "simple_GRPO": Project(
        "github.com/lsdefine/simple_GRPO", "4ab94c6 of 2025-08-05",
        "grpo_vllm_one.py: GRPO_step[per_token_kl:loss]", {simple_grpo: "GRPO; GRPO, k3"},
        others={"compute_gen_logps": True},
    ),
    "nano-aha-moment": Project(
        "github.com/McGill-NLP/nano-aha-moment", "6cd0306 of 2025-07-07", "nano_r1_script.py: compute_pg_loss",
        {nano_aha_moment: "DAPO; DAPO, k3"},
    ),
    "policy-gradients": Project(
        "github.com/zafstojano/policy-gradients", "0d112aa of 2026-01-20",
        "policy_gradients/loss.py: approx_kl masked_mean GRPOLoss GSPOLoss CISPOLoss",
        {policy_gradients: "GRPO; GRPO, k3; GSPO; CISPO"},
    ),
    "reasoning-from-scratch": Project(
        "github.com/rasbt/reasoning-from-scratch", "f79c9cd of 2026-04-21",
        "ch07/03_rlvr_grpo_scripts_advanced/7_4_plus_clip_ratio.py: compute_grpo_loss[ratio:obj]",
        {reasoning_from_scratch: "GRPO"},
    ),
    "LLaMA-Factory v1": Project(
        "github.com/hiyouga/LLaMA-Factory", "ff6d4d12 of 2026-08-18",
        "v1/trainers/dpo_trainer.py: compute_sigmoid_dpo_loss", {llama_factory_dpo: "DPO"},
    ),
    "direct-preference-optimization": Project(
        "github.com/eric-mitchell/direct-preference-optimization", "f8b8c0f of 2023-12-14",
        "trainers.py: preference_loss", {original_dpo: "DPO; IPO"},
    ),
}  # fmt: skip
