TASK = """
Turn rewards (n,) into advantages (n,). The completions of a group are neighbours, num_generations of them. Subtract
the mean of the group, then divide by a standard deviation plus EPSILON: with "group" the standard deviation of the
group, with "batch" that of all rewards; with "none", do not divide. NaN is the reward of a completion that could not
be judged: leave it out of all means and standard deviations, and set its advantage to 0.
"""

HINT = """
to_groups returns a tensor of shape (groups, num_generations). nanmean and repeat_interleave give each reward the mean
of its group. group_std and nanstd divide by n - 1. Subtract the mean of the group in all three cases.
"""

MEAN_AND_STD = """\
group_mean = to_groups(rewards, num_generations).nanmean(1)  # one mean reward for each group
centred = rewards - group_mean.repeat_interleave(num_generations)  # one value per completion
if scale_rewards == "none":
    return centred.nan_to_num(0.0)
if scale_rewards == "group":
    std = group_std(rewards, num_generations).repeat_interleave(num_generations)"""
TILED = MEAN_AND_STD.replace("repeat_interleave", "repeat")
COLUMNS = TILED.replace("to_groups(rewards, num_generations).nanmean(1)", "columns.nanmean(1)")
COLUMNS = COLUMNS.replace("group_std(rewards, num_generations)", "nanstd(columns)")

WRONG = {
    "you divide by n in the variance; TRL's standard deviation has n - 1": (
        "return (centred",
        'n = num_generations if scale_rewards == "group" else len(rewards)\n'
        "std = std * ((n - 1) / n) ** 0.5\nreturn (centred",
    ),
    "EPSILON is missing, so groups with tiny differences get advantages as large as other groups": (
        "(std + EPSILON)",
        "std",
    ),
    "you take the maximum of the standard deviation and EPSILON; add EPSILON instead": (
        "(std + EPSILON)",
        "std.clamp(min=EPSILON)",
    ),
    "you add EPSILON to the variance; add it to the standard deviation": (
        "(std + EPSILON)",
        "(std.square() + EPSILON).sqrt()",
    ),
    "your advantages have the wrong sign; subtract the mean from the reward": (
        "centred = rewards - group_mean.repeat_interleave(num_generations)",
        "centred = group_mean.repeat_interleave(num_generations) - rewards",
    ),
    "you subtract the median of the group; subtract its mean": (").nanmean(1)", ").nanmedian(1).values"),
    "you divide by the variance; the square root is missing": ("(std + EPSILON)", "(std.square() + EPSILON)"),
    "`repeat` repeats the whole list of groups; use repeat_interleave, because a group's completions are neighbours": [
        ("group_mean.repeat_interleave(", "group_mean.repeat("),
        ("num_generations).repeat_interleave(num_generations)", "num_generations).repeat(num_generations)"),
        (MEAN_AND_STD, TILED),
    ],
    "the completions of a group are neighbours; use view(-1, num_generations), not view(num_generations, -1)": [
        ("group_mean = to", "num_generations = max(1, len(rewards) // num_generations)\ngroup_mean = to"),
        (MEAN_AND_STD, "columns = rewards.view(num_generations, -1).T\n" + COLUMNS),
    ],
    "you subtract the mean of the batch; subtract the mean of each group": (
        "group_mean.repeat_interleave(num_generations)",
        "rewards.nanmean()",
    ),
    'with "batch", you subtract the mean of the batch; only the standard deviation is of the batch': (
        'if scale_rewards == "group":',
        'if scale_rewards == "batch":\n    centred = rewards - rewards.nanmean()\nif scale_rewards == "group":',
    ),
    'with "batch", you use the standard deviation of the centred rewards; use that of the rewards': (
        "nanstd(rewards)",
        "nanstd(centred)",
    ),
    'with "none", you divide by a standard deviation; do not divide': (
        'if scale_rewards == "none":\n    return centred.nan_to_num(0.0)',
        'scale_rewards = scale_rewards.replace("none", "group")',
    ),
    "you count a reward of NaN as 0 in the means; leave it out": (
        "group_mean = to",
        "rewards = rewards.nan_to_num(0.0)\ngroup_mean = to",
    ),
    "one NaN makes its whole group NaN; leave NaN out of the mean": (").nanmean(1)", ").mean(1)"),
    "torch's std returns NaN for a group with one NaN; leave NaN out, as group_std and nanstd do": (
        "return (centred",
        'std = rewards.std()\nif scale_rewards == "group":\n'
        "    std = to_groups(rewards, num_generations).std(1).repeat_interleave(num_generations)\nreturn (centred",
    ),
    "your advantage for a reward of NaN is NaN; it must be 0": (
        "(centred / (std + EPSILON)).nan_to_num(0.0)",
        "centred / (std + EPSILON)",
    ),
    "you subtract the mean of the other completions, which is RLOO; the mean of GRPO includes the completion itself": (
        'if scale_rewards == "none":',
        'centred = centred * (num_generations / (num_generations - 1))\nif scale_rewards == "none":',
    ),
}


def tries(group_advantages):
    import torch

    nan = float("nan")
    equal = [1.0, 1.0, 1.0, 1.0]
    groups = {
        "1, 1, 0, 0": [1.0, 1.0, 0.0, 0.0],
        "two groups": [1.0, 0.0, 0.0, 0.0, 5.0, 4.0, 6.0, 7.0],
        "rewards that differ by a hair, and equal ones": [0.5, 0.50005, 0.5, 0.50005, *equal],
        "one that could not be judged": [nan, 1.0, 0.0, 1.0, 2.0, 0.0, 0.0, 0.0],
    }
    for what, rewards in groups.items():
        for scale in ("group", "batch", "none"):
            yield f"{what}; scale_rewards {scale}", group_advantages(torch.tensor(rewards), 4, scale)
