"""Suggestions for names that are not options: option names from other projects and from earlier versions.

docs/coming_from.md explains the names of other projects.
"""

# {option of TRL, transformers, VLM-R1 or ms-swift: option here}
HERE = {
    "lr": "STAGE.learning_rate",
    "num_train_epochs": "max_epochs",
    "overwrite_output_dir": "resume=never",
    "max_completion_length": "sampling.max_new_tokens",
    "max_prompt_length": "data.max_prompt_tokens",
    "max_length": "data.max_prompt_tokens",
    "reward_funcs": "rewards",
    "reward_weights": "rewards",
    "chat_template_kwargs": "data.chat_template_kwargs",
    "model_name_or_path": "model.path",
    "torch_dtype": "model.dtype",
    "dataset_name": "data.train_file",
    "dataset_config": "data.train_file",
    "train_dataset": "data.train_file",
    "eval_dataset": "data.eval_file",
    "data.path": "data.train_file",
    "data_seed": "seed",
    "run_name": "output_dir",
    "save_only_model": "save_steps",
    "gradient_checkpointing": "model.activation_checkpointing",
    "deepspeed": "sharding.enabled",
    "ddp_timeout": "timeout",
    "dataloader_num_workers": "data.image_workers",
    "epsilon": "grpo.epsilon_low and grpo.epsilon_high",
    "per_device_train_batch_size": "STAGE.micro_batch_size, of prompts",
    "gradient_accumulation_steps": "STAGE.prompts_per_step, of an update on all ranks",
    "bf16": "model.compute_dtype=bfloat16",
    "freeze_vision_modules": "model.freeze=[vision, merger]",
    "create_reference_model": "model.freeze",
    "num_shared_layers": "model.freeze",
    "vllm_enable_prefix_caching": "sampling.vllm={enable_prefix_caching: true}",
}

# {name: why no option is needed}
NOTHING = {
    "device": "a run uses a GPU if PyTorch sees one, and otherwise the CPU; CUDA_VISIBLE_DEVICES selects GPUs, and "
    "CUDA_VISIBLE_DEVICES=-1 the CPU",
    "attn_implementation": "there is only one, which uses the fastest attention kernel that the GPU has",
    "use_liger_loss": "our own kernel computes log-probabilities without keeping all logits in memory",
    "use_liger_kernel": "our own kernel computes log-probabilities without keeping all logits in memory",
    "remove_unused_columns": "a run keeps every column, and passes it to the rewards",
    "trust_remote_code": "code in a model's folder is never run",
    "logging_steps": "every step is logged",
    "vllm_device": "vLLM runs on the GPU of its rank",
    "vllm_guided_decoding_regex": "completions are sampled freely; use a reward for the format",
    "local_rank": "torchrun sets the rank in the environment",
}

# {removed options: what to use instead}
REMOVED = {
    "adapter.dora": "LoRA with adapter.r",
    "data.add_vision_id": "data.chat_template_kwargs: {add_vision_id: true}",
    "data.allow_urls": "recipes/download.py, once",
    "data.demonstrations data.pairs data.wrong_demonstrations": (
        "arguments of the task: data.task: shapes(demonstrations=96, pairs=1024)"
    ),
    "data.rescale_boxes": "recipes/rescale_boxes.py",
    "data.val_split": "data.eval_file",
    "dpo.discopop_tau dpo.smooth_sigmoid": "an argument of dpo_loss, dpo.label_smoothing",
    (
        "grpo.delta grpo.kl_straight_through grpo.off_policy_mask_threshold grpo.sapo_temperature_neg "
        "grpo.sapo_temperature_pos grpo.vespo_k_neg grpo.vespo_k_pos grpo.vespo_lambda_neg "
        "grpo.vespo_lambda_pos"
    ): "arguments of grpo_loss in a loss of your own",
    "grpo.normalize_advantages grpo.reward_clip_range": "leave_one_out(normalize=...), your own reward",
    "grpo.rollout_correction_min grpo.rollout_correction_max": "grpo.rollout_correction_bounds",
    "grpo.shuffle_rewards": "recipes/shuffled.py",
    "keep_states save_total_limit": "two states and the last checkpoint/ are kept",
    (
        "kto.adam_beta2 kto.beta kto.desirable_weight kto.learning_rate kto.loss_type "
        "kto.lr_scheduler_type kto.max_steps kto.micro_batch_size kto.min_lr_ratio kto.prompts_per_step "
        "kto.undesirable_weight kto.warmup_steps"
    ): "a stage of your own that calls kto_loss",
    "model.tower_pieces": "model.activation_checkpointing",
    "overwrite": "resume: never",
    "ppo.cliprange_value ppo.whiten_rewards": "ppo.cliprange, whiten(..., shift_mean=False)",
    "reference.num_shared_layers reference.pattern": (
        "model.freeze: a reference shares all frozen weights with the policy"
    ),
    "rollout.batch_invariant": (
        "nothing; rollout/logp_mismatch is the difference between sampler and trainer, and "
        "rollout.max_logp_mismatch bounds it"
    ),
    (
        "dpo.router_aux_loss_coef grpo.router_aux_loss_coef kto.router_aux_loss_coef "
        "ppo.router_aux_loss_coef reward_model.router_aux_loss_coef sft.router_aux_loss_coef"
    ): "nothing; add a load-balancing loss in a stage of your own if you pretrain experts",
    "reference.teacher reference.teacher_prompt reference.teacher_beta": (
        "a stage of your own, such as git show 02c5e6bc:recipes/distill.py"
    ),
    "sampling.max_tool_calls": "the attribute max_tool_calls of the environment",
    "sampling.min_new_tokens": "a reward for length, as in recipes/lengths.py",
    "state_minutes state_steps keep_best": "checkpoint_minutes, checkpoint_steps, best_metric",
    "data.answer data.template data.resize data.eval_blind": (
        "data.answer_format, data.chat_template_kwargs, data.resize_backend, data.eval_without_images"
    ),
    "sampling.graph sampling.max_tokens_at_once": "sampling.cuda_graph, sampling.max_batch_tokens",
}


def answer(section: str, key: str, dashes: str, options: list[str]) -> str:
    """Return what to write in place of an unknown name, or "" for a name that is in none of the tables.

    Args:
        section: path of the section that contains the name, with a dot at the end, or "".
        key: the unknown name.
        dashes: "--" on the command line, otherwise "".
        options: paths of all options.
    """
    path = section + key
    here = HERE.get(key) or HERE.get(path)
    if here:
        return f"the name in minivlmrl is {dashes}{here.replace(' and ', f' and {dashes}')}"
    if key in NOTHING:
        return f"minivlmrl has no such option: {NOTHING[key]}"
    current = {option.rpartition(".")[2] for option in options}
    for names, instead in REMOVED.items():
        for name in names.split():
            is_last_part = not section and name.endswith(f".{key}") and key not in current
            if name.startswith(f"{path}."):  # a whole section
                name = f"{path}.*"
            elif path != name and not is_last_part:
                continue
            return f"{name} was removed. Instead: {instead}"
    return ""
