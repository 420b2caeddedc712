"""Names of the tensors and fields of a step; docs/audit.md explains each of them."""


def names(text: str) -> list[str]:
    """Split a text into names."""
    return text.split()


NEEDED = names("input_ids completion_mask per_token_logps")  # tensors that every step needs
# tensors (n, S), or (n, T) for only the last T tokens; the needed tensors have these shapes, too
BY_TOKEN = names(
    "attention_mask prompt_mask tool_mask old_per_token_logps ref_per_token_logps sampler_logps entropies "
    "log_sum_sq_probs logps_gradient entropies_gradient"
)
# tensors (n,) or (n, ...)
BY_ROW = names(
    "advantages micro_batch row pair chosen importance_sampling_ratio rollout_step rollout_tokens rollout_drawn"
)
# tensors of integers
INDICES = names(
    "input_ids micro_batch row group rollout rollout_step pair sampler_ids image_grid_thw num_images "
    "sampler_image_grid_thw sampler_num_images"
)
# tensors with one row for each completion of the rollout
OF_ROLLOUT = names("group rewards rollout_advantages sampler_ids")
# other tensors in a micro-batch of TRL's trainers: TRL's name and our name
INPUTS = {name: name for name in names("pixel_values image_grid_thw num_images")}
INPUTS["sampling_per_token_logps"] = "sampler_logps"
# outputs of TRL's forward for each token: TRL's name, then our names of the output and of its gradient
OUTPUTS = {
    "log_probs": ["per_token_logps", "logps_gradient"],
    "entropy": ["entropies", "entropies_gradient"],
    "log_sum_sq_probs": ["log_sum_sq_probs", ""],
}
# fields of step.json that are named as TRL's options
OPTIONS_OF_A_ROLLOUT = names(
    "num_generations scale_rewards reward_weights multi_objective_aggregation temperature max_completion_length "
    "mask_truncated_completions"
)
# filters of the sampler: names as in TRL, and the values that switch each of them off
FILTERS = {"top_k": [None, 0, -1], "top_p": [None, 1], "min_p": [None, 0]}
# DPO losses that use label_smoothing in TRL
SMOOTHED_LOSSES = names("robust exo_pair aot aot_unpaired")
