"""What is known to be different in other versions of TRL than 1.16, each checked against its source or by a run."""

import re

UP_TO_1_9 = ("0", "1.10")
UP_TO_1_10 = ("0", "1.11")
UP_TO_0_28 = ("0", "0.29")
# (searched in "family: options"; versions from, and below; what is different there)
NOTES: list[tuple[str, str, str, str]] = [
    (r"grpo defaults: beta", *UP_TO_1_9, "use_bias_correction_kl is False by default up to 1.9, True since 1.10"),
    (r"loss_type=(dapo|cispo|vespo)\b.*(accumulation|steps_per_generation)=", *UP_TO_1_9,
     "up to 1.9 dapo, cispo and vespo divide by tokens without gradient accumulation steps / steps per generation"),
    (r"loss_type=(dapo|cispo|vespo)\b.*entropy_coef=0\.[0-9]*[1-9]", *UP_TO_1_9,
     "up to 1.9 dapo, cispo and vespo divide the entropy bonus by the tokens of the step"),
    (r"loss_type=luspo\b", *UP_TO_1_9, "up to 1.9 luspo averages a row over its padding too"),
    (r"advantages \(B, T\).*loss_type=vespo|loss_type=vespo.*advantages \(B, T\)", "0", "1.9",
     "up to 1.8 the logged vespo/phi_seq_mean is over padding too"),
    (r"loss_type=(ipo|sigmoid_norm)\b.*f_divergence_type=", *UP_TO_1_9,
     "up to 1.9 f' is without its constant, which ipo and sigmoid_norm do not cancel"),
    (r"off_policy_mask_threshold: .*with NaN", *UP_TO_1_10, "up to 1.10 a NaN of the sampler drops its row"),
    (r"importance_sampling_ratio: .*with NaN", *UP_TO_1_10, "up to 1.10 a NaN of the sampler stays one"),
    (r"dpo bco_pair|dpo several losses", *UP_TO_0_28, "up to 0.28 bco_pair has a running mean of rewards"),
    (r"dpo sigmoid, label_smoothing", *UP_TO_0_28, "up to 0.28 sigmoid uses label_smoothing (ours: smooth_sigmoid)"),
    (r"dpo several losses", *UP_TO_0_28, "up to 0.28 ipo makes every loss of a list length-normalised"),
    (r"dpo ld_alpha", *UP_TO_0_28, "up to 0.28 ld_alpha counts positions from the prompt on and spares the reference"),
    (r"dpo use_weighting", *UP_TO_0_28, "up to 0.28 the weight of a pair is at most 1"),
    (r"f_divergence_type=alpha", *UP_TO_0_28, "up to 0.28 the alpha coefficient is 1 minus today's"),
    (r"dpo f_divergence_type", *UP_TO_0_28, "up to 0.28 discopop ignores it"),
    (r"dpo sft|dpo several losses", *UP_TO_0_28, "up to 0.28 the sft part leaves out token 0"),
    (r"advantages.*missing=0\.4", "0", "1.6", "up to 1.5 a completion that no function could judge has reward 0"),
    (r"gspo_token", "1.14", "99", "trl.experimental.gspo_token was removed in 1.14"),
    (r"sft loss_type=nll", "0", "1.15", "up to 1.14 the model computes nll, not TRL"),
]  # fmt: skip


def known(title: str, version: str) -> list[str]:
    """What is known to be different in a version for a cell ("family: options"), or for a family by its name."""
    here = numbers(version)
    found = [note for note in NOTES if re.search(note[0], title)]
    return [text for _, since, below, text in found if numbers(since) <= here < numbers(below)]


def numbers(version: str) -> tuple[int, ...]:
    """Numbers that compare as versions do: 1.16.0.dev0 is (1, 16, 0)."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])
