TASK = """
Turn rewards (n,) into advantages (n,), groups of num_generations in order: subtract the mean of the group, then divide
by a standard deviation plus EPSILON, that of the "group" or of the whole "batch", or by nothing ("none"). A reward of
NaN could not be judged: it counts in no mean and no standard deviation, and its advantage is 0.
"""

HINT = """
to_groups returns a tensor of shape (groups, num_generations). nanmean and repeat_interleave give each reward the mean
of its group. group_std and nanstd divide by n - 1. Subtract the mean of the group in all three cases.
"""

MEAN_AND_STD = """\
group_mean = to_groups(rewards, num_generations).nanmean(1)  # (n / num_generations,)
centred = rewards - group_mean.repeat_interleave(num_generations)  # (n,)
if scale_rewards == "none":
    return centred.nan_to_num(0.0)
if scale_rewards == "group":
    std = group_std(rewards, num_generations).repeat_interleave(num_generations)  # (n,)"""
TILED = MEAN_AND_STD.replace("repeat_interleave", "repeat")
COLUMNS = TILED.replace("to_groups(rewards, num_generations).nanmean(1)", "columns.nanmean(1)")
COLUMNS = COLUMNS.replace("group_std(rewards, num_generations)", "nanstd(columns)")

WRONG = {
    "you divide by n in the variance; TRL's standard deviation has n - 1": (
        "return (centred",
        'n = num_generations if scale_rewards == "group" else len(rewards)\n'
        "std = std * ((n - 1) / n) ** 0.5\nreturn (centred",
    ),
    "EPSILON is missing: groups that differ by a hair get advantages as large as any": ("(std + EPSILON)", "std"),
    "you take the larger of the deviation and EPSILON; it is added": ("(std + EPSILON)", "std.clamp(min=EPSILON)"),
    "EPSILON is added to the standard deviation; yours is added to the variance": (
        "(std + EPSILON)",
        "(std.square() + EPSILON).sqrt()",
    ),
    "an advantage is the reward less the mean; yours is the mean less the reward": (
        "centred = rewards - group_mean.repeat_interleave(num_generations)",
        "centred = group_mean.repeat_interleave(num_generations) - rewards",
    ),
    "the baseline is the mean of the group; yours is its median": (").nanmean(1)", ").nanmedian(1).values"),
    "you divide by the variance: the square root is missing": ("(std + EPSILON)", "(std.square() + EPSILON)"),
    "`repeat` tiles the groups' numbers one after the other; each belongs to neighbours: repeat_interleave": [
        ("group_mean.repeat_interleave(", "group_mean.repeat("),
        ("num_generations).repeat_interleave(num_generations)", "num_generations).repeat(num_generations)"),
        (MEAN_AND_STD, TILED),
    ],
    "the completions of a group are neighbours: view(-1, num_generations), not view(num_generations, -1)": [
        ("group_mean = to", "num_generations = max(1, len(rewards) // num_generations)\ngroup_mean = to"),
        (MEAN_AND_STD, "columns = rewards.view(num_generations, -1).T\n" + COLUMNS),
    ],
    "the mean is the batch's; completions are compared with their group": (
        "group_mean.repeat_interleave(num_generations)",
        "rewards.nanmean()",
    ),
    "also with \"batch\" the mean is the group's; only the deviation is the batch's": (
        'if scale_rewards == "group":',
        'if scale_rewards == "batch":\n    centred = rewards - rewards.nanmean()\nif scale_rewards == "group":',
    ),
    'with "batch" the deviation is of the rewards; yours is of the centred ones': (
        "nanstd(rewards)",
        "nanstd(centred)",
    ),
    '"none" divides by nothing; you divide always': (
        'if scale_rewards == "none":\n    return centred.nan_to_num(0.0)',
        'scale_rewards = scale_rewards.replace("none", "group")',
    ),
    "a reward of NaN counts as 0 in your means; it counts in none": (
        "group_mean = to",
        "rewards = rewards.nan_to_num(0.0)\ngroup_mean = to",
    ),
    "one NaN makes its whole group NaN: leave it out of the mean": (").nanmean(1)", ").mean(1)"),
    "torch's std makes a group with one NaN NaN: leave it out, as group_std and nanstd do": (
        "return (centred",
        'std = rewards.std()\nif scale_rewards == "group":\n'
        "    std = to_groups(rewards, num_generations).std(1).repeat_interleave(num_generations)\nreturn (centred",
    ),
    "the advantage of a reward of NaN is 0; yours is NaN": (
        "(centred / (std + EPSILON)).nan_to_num(0.0)",
        "centred / (std + EPSILON)",
    ),
    "that is leave one out, RLOO's baseline: GRPO's mean has the completion itself in it": (
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
