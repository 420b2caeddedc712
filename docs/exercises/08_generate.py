TASK = """
Sample one token for each row with a number in [0, 1): take the first token at which the cumulative probability
exceeds the row's number. Return ids (r,). Count probabilities in whole UNITS as int64, so that sums are exact. The
number is a share of the row's own total. A token with probability 0 must never be sampled.
"""

HINT = """
The cumulative sums of probs * UNITS as int64 are exact. torch.searchsorted with right=True finds the first entry that
is greater than the target. Why must you multiply the number by the last cumulative sum, and not by UNITS? Because
rounding or a filter can make the total a little smaller than 1.
"""

WRONG = {
    "you take the most likely token, which is greedy decoding and not sampling": (
        "units = running_sum((probs * UNITS).long())",
        "return probs.argmax(-1)\nunits = None",
    ),
    "a token of probability 0 can be sampled; the cumulative sum must exceed the number, not just reach it": (
        "right=True",
        "right=False",
    ),
    "the total of a row is a little less than 1; multiply the number by this total": ("units[:, -1]", "UNITS"),
    "you convert uniform to float32, so the target is rounded to the wrong token; keep float64": (
        "(uniform * units[:, -1]).long()",
        "(uniform.float() * units[:, -1]).long().clamp(max=units[0, -1] - 1)",
    ),
    "if no sum exceeds the number, argmax returns 0; multiply the number by the total of the row": (
        "units = running_sum((probs * UNITS).long())",
        "return (probs.double().cumsum(-1) > uniform[:, None]).int().argmax(-1)\nunits = None",
    ),
    "you sample from the other end; the first token begins at 0": ("uniform *", "(1 - uniform) *"),
    "your token is one too far": ("chosen.clamp(", "chosen.add(1).clamp("),
    "each row has its own number": ("uniform * units", "uniform[:1] * units"),
    "float32 sums lose probabilities below 1e-7; count in int64": (
        "running_sum((probs * UNITS).long())",
        "probs.cumsum(-1).double().mul_(UNITS).long()",
    ),
}


def tries(inverse_cdf):
    import torch

    cases = {
        "two rows": ([[0.25, 0.25, 0.5], [0.25, 0.25, 0.5]], [0.1, 0.3]),
        "a number between the likeliest": ([[0.5, 0.25, 0.25], [0.5, 0.25, 0.25]], [0.6, 0.9]),
        "the number 0, a token of probability 0": ([[0.0, 0.5, 0.5]], [0.0]),
        "probabilities that add up to 0.5": ([[0.25, 0.25, 0.0]], [0.75]),
        "a rare last token": ([[1.0, 1e-9, 0.0]], [1 - 1e-12]),
        "between two tokens": ([[0.5, 0.5]], [0.5 - 1e-10]),
        "its last token": ([[0.5, 0.5]], [0.999]),
    }
    for what, (probs, uniform) in cases.items():
        yield (
            f"{what}: {probs}, {uniform}",
            inverse_cdf(torch.tensor(probs), torch.tensor(uniform, dtype=torch.float64)),
        )
