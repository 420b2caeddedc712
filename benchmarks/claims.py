"""Test published claims about reinforcement learning with a model that is small enough to enumerate all its answers.

    python benchmarks/claims.py docs/curves/claims.json    # minutes on one core

The model answers each of 32 prompts with a string of at most four tokens (341 strings, float64): an MLP reads the
prompt and the tokens so far. An answer is right if the sum of its tokens modulo 4 is that of the prompt. Success,
entropy, pass@k and KL are exact sums over all strings. CLAIMS was committed before the first run.
"""

from typing import NamedTuple

PROMPTS, VOCABULARY, LENGTH, SEEDS = 32, 5, 4, 5  # token 0 ends a string
END = 0
OFF = 1e9  # a clip bound that never clips


class Claim(NamedTuple):
    """What is tested, and what would count as seen."""

    paper: str  # arXiv number and section
    claim: str  # in our words
    arms: str
    measure: str
    criterion: str
    minutes: float  # expected CPU minutes


CLAIMS = {
    "kl": Claim(
        "2506.09477 section 3; 2512.21852 section 4",
        "In the loss, k1 has an expected gradient of 0, and k3 not that of KL(pi, ref). In the reward, "
        "k1 is right, and so is k3 times the ratio in the loss, as in TRL",
        "k1, k2, k3, k3 times the ratio in the loss; k1 and k3 in the reward",
        "relative error of the expected gradient, exact: of the KL of tokens after their prefix, and of strings",
        "right is below 1e-9, wrong is above 0.01; k1 in the reward is to be right for both",
        0.1,
    ),
    "length": Claim(
        "2503.20783 section 3.1",
        "Dividing by the length of a completion makes wrong answers longer and right answers shorter",
        "1/length (grpo) and a constant (dr_grpo)",
        "derivative of the mean length of right and of wrong answers along the expected gradient, exact",
        "over 20 random models, right: lower with 1/length, wrong: higher with 1/length, in all 20",
        0.1,
    ),
    "deviation": Claim(
        "2503.20783 section 3.1",
        "Dividing by the group's standard deviation gives very easy and very hard prompts a larger weight",
        "divided and not divided, 8 completions",
        "expected weight of a prompt's gradient by success, exact, relative to success 0.5",
        "weight at success 0.05 and 0.95 at least 1.5 times that without division",
        0.1,
    ),
    "gspo": Claim(
        "2507.18071 section 3",
        "The product of the tokens' ratios is noisier in longer answers, and GSPO's geometric mean is not",
        "product and geometric mean, 1 to 64 tokens",
        "variance and mean of the ratio over the old policy's answers, exact",
        "from 1 to 64 tokens, variance rises tenfold for the product and falls for the mean",
        0.1,
    ),
    "two": Claim(
        "2510.00977 section 4",
        "Two completions for each prompt learn as much as sixteen from as many completions",
        "2 x 128 and 16 x 16 completions a step, 200 steps",
        "success at the end",
        "the mean difference over seeds is within 0.03",
        2,
    ),
    "negatives": Claim(
        "2506.01347 section 4",
        "Punishing wrong answers alone raises pass@1 and keeps pass@256; rewarding right answers alone loses pass@256",
        "negative advantages alone, positive advantages alone, 200 steps",
        "pass@1 and pass@256, exact, against the start",
        "in all seeds: negatives raise pass@1 and lose less than 0.01 of pass@256, positives lose more than 0.01",
        2,
    ),
    "clip": Claim(
        "2509.26114 section 4",
        "With random rewards and several steps a rollout, clipping above alone lowers entropy, and below raises it",
        "epsilon_high 0.2 alone, epsilon_low 0.2 alone, no clipping; 4 steps on each of 100 rollouts",
        "change of entropy against no clipping",
        "signs in all seeds",
        3,
    ),
    "pass_at_k": Claim(
        "2504.13837 section 3",
        "After training, pass@1 is higher than at the start, and pass@256 lower",
        "the start, and 200 steps of GRPO with 16 completions",
        "pass@k for k from 1 to 256, exact",
        "signs in all seeds, pass@256 by at least 0.01",
        1,
    ),
    "dpo": Claim(
        "2410.08847 section 3",
        "DPO lowers the likelihood of the chosen answer as well, if both answers are alike",
        "pairs of a right and a wrong answer that differ in the last token, and pairs drawn alone; 100 steps",
        "change of the mean log-probability of chosen and rejected answers",
        "with like pairs, chosen and rejected fall in all seeds, chosen further than with others",
        1,
    ),
    "entropy_tokens": Claim(
        "2506.01939 section 5",
        "The fifth of tokens with the highest entropy suffices; the other four fifths do worse",
        "top_entropy_quantile 0.2, the other 0.8, all tokens; 200 steps",
        "success at the end",
        "the fifth loses at most 0.03 against all tokens, the others lose more than the fifth, on average",
        2,
    ),
    "forgetting": Claim(
        "2509.04259 sections 3 and 4; 2510.18874",
        "At equal success on new prompts, RL forgets less of old ones than SFT, and KL on new prompts predicts it",
        "a model that knows 16 prompts learns 16 others to 0.9: GRPO, and SFT on one right answer each",
        "lost success on the old prompts; KL on the new prompts to the start",
        "less forgetting and less KL with GRPO in all seeds",
        2,
    ),
    "precision": Claim(
        "2510.26788 section 3",
        "Sampler and trainer disagree more in bfloat16 than in float16, and least in float32",
        "log-probabilities of all strings with the product in another order, in three dtypes",
        "root mean square difference in nats",
        "bfloat16 over float16 over float32, in all seeds",
        0.1,
    ),
}


if __name__ == "__main__":
    raise SystemExit("written before the first run; the functions follow")
