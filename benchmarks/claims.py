"""Test published claims about reinforcement learning with a model that is small enough to enumerate all its answers.

    python benchmarks/claims.py --json docs/curves/claims.json    # minutes on one core

The model answers each of 32 prompts with a string of at most four tokens (341 strings, float64): an MLP reads the
prompt and the tokens so far. An answer is right if the sum of its tokens modulo 4 is that of the prompt. Success,
entropy, pass@k and KL are exact sums over all strings. CLAIMS was committed before the first run.
"""

import sys
from collections.abc import Iterable
from itertools import product, takewhile
from math import comb
from operator import sub
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from benchmarks import common  # noqa: E402
from minivlmrl.losses.advantages import group_advantages  # noqa: E402
from minivlmrl.losses.grpo import correct_kl, grpo_loss, kl_term  # noqa: E402

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
        "In the loss, the expected gradient of k1 is 0, and that of k3 differs from KL's. In the reward, "
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


# -------------------------------------------------------------------- a model with countable answers

PREFIXES = [prefix for n in range(LENGTH) for prefix in product(range(1, VOCABULARY), repeat=n)]
ANSWERS = [*PREFIXES, *product(range(1, VOCABULARY), repeat=LENGTH)]
TOKENS = torch.tensor([[*answer, *[END] * (LENGTH - len(answer))] for answer in ANSWERS])  # (S, T)
LENGTHS = torch.tensor([min(len(answer) + 1, LENGTH) for answer in ANSWERS])  # tokens with the end token
MASK = (torch.arange(LENGTH) < LENGTHS[:, None]).double()  # (S, T)
# (S, T) prefix before each token
PLACES = torch.tensor([[PREFIXES.index(x[: min(t, len(x), LENGTH - 1)]) for t in range(LENGTH)] for x in ANSWERS])
RIGHT = (TOKENS.sum(1) % 4 == torch.arange(PROMPTS)[:, None] % 4).double()  # (P, S)


class Policy(nn.Module):
    """MLP on a prompt's embedding and the tokens so far."""

    def __init__(self, seed: int, width: int = 32):
        super().__init__()
        torch.manual_seed(seed)
        self.features = F.one_hot(TOKENS[: len(PREFIXES)], VOCABULARY).flatten(1).double()
        self.prompts = nn.Embedding(PROMPTS, width)
        self.prefix = nn.Linear(LENGTH * VOCABULARY, width)
        self.hidden = nn.Linear(width, width)
        self.head = nn.Linear(width, VOCABULARY)
        self.double()

    def hidden_states(self) -> Tensor:
        features = self.features.to(self.head.weight.dtype)
        return torch.tanh(self.hidden(torch.tanh(self.prompts.weight[:, None] + self.prefix(features))))

    def next_tokens(self) -> Tensor:
        """Return log-probabilities after each prefix: (P, prefixes, V)."""
        return self.head(self.hidden_states()).log_softmax(-1)

    def forward(self) -> Tensor:
        """Return log-probabilities of all tokens in all answers: (P, S, T)."""
        flat = self.next_tokens().flatten(1)
        return flat.index_select(1, (PLACES * VOCABULARY + TOKENS).flatten()).view(PROMPTS, -1, LENGTH) * MASK

    def answers(self) -> Tensor:
        """Return the probabilities of all answers: (P, S)."""
        return self().sum(-1).exp()

    def right(self) -> Tensor:
        """Return the probabilities of a right answer: (P,)."""
        return (self.answers() * RIGHT).sum(1)


def optimize(policy: Policy, losses: Iterable[Tensor]) -> int:
    """Run Adam on losses, each computed after the step before; return their number."""
    optimizer = torch.optim.Adam(policy.parameters(), 1e-2)
    steps = 0
    for loss in losses:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        steps += 1
    return steps


def begin(seed: int, prompts=slice(None), share: float = 0.5, steps: int = 60) -> Policy:
    """Train a policy on eight answers to each of `prompts`, of which `share` are right."""
    policy = Policy(seed)
    odds = torch.where(RIGHT == 1, share / RIGHT.sum(1, True), (1 - share) / (1 - RIGHT).sum(1, True))
    shown = torch.multinomial(odds, 8)[prompts]
    optimize(policy, (-policy().sum(-1)[prompts].gather(1, shown).mean() for _ in range(steps)))
    return policy


def grpo(policy: Policy, prompts: int = 16, group: int = 16, rollouts=range(200), reuse: int = 1, keep=(-OFF, OFF),
         weigh=None, rewards=None, pool=range(PROMPTS), low=0.2, high=0.2) -> int:  # fmt: skip
    """Train with GRPO, and return the number of optimizer steps.

    Args:
        rollouts: yields once for each rollout.
        reuse: optimizer steps on a rollout.
        keep: bounds of advantages.
        weigh: (token entropies, mask) -> token weights, None = 1.
        rewards: right answers -> rewards, None = the same.
        pool: prompts to draw from.
        low, high: clip ratios of negative advantages at 1 - low, of positive ones at 1 + high.
    """

    def losses():
        for _ in rollouts:
            rows = torch.tensor(pool)[torch.randint(len(pool), (prompts,))]
            drawn = torch.multinomial(policy.answers().detach()[rows], group, replacement=True)
            scores = RIGHT[rows].gather(1, drawn).flatten()
            advantages = group_advantages(rewards(scores) if rewards else scores, group).clamp(*keep)
            mask = MASK[drawn].flatten(0, 1)
            # (advantages, epsilon_low, epsilon_high); grpo_loss refuses an epsilon_low above epsilon_high
            signed = (advantages.clamp(max=0), low, OFF), (advantages.clamp(min=0), 0.0, high)
            places = rows[:, None, None] * len(PREFIXES) + PLACES[drawn]
            old = None
            for _ in range(reuse):
                table = policy.next_tokens()
                picked = table.flatten().gather(0, (places * VOCABULARY + TOKENS[drawn]).flatten())
                logps = picked.view_as(mask) * mask
                old = logps.detach() if old is None else old
                entropy = -(table.exp() * table).detach().sum(-1).flatten()[places].view_as(mask)
                options = {"old_per_token_logps": old, "token_weights": weigh(entropy, mask) if weigh else None}
                yield sum(
                    grpo_loss(logps, part, mask, epsilon_low=below, epsilon_high=above, **options)[0]
                    for part, below, above in signed
                )

    return optimize(policy, losses())


def success(policy: Policy, prompts=slice(None)) -> float:
    return policy.right()[prompts].mean().item()


def pass_at(policy: Policy, *counts: int) -> list[float]:
    """Return the probability of a right answer among k, averaged over prompts, for each k."""
    return [(1 - (1 - policy.right()) ** k).mean().item() for k in counts]


def entropy_of(policy: Policy) -> float:
    answers = policy.answers()
    return -(answers * answers.log()).sum(1).mean().item()


def gradient(policy: Policy, value: Tensor) -> Tensor:
    parameters = [*policy.parameters()]
    found = torch.autograd.grad(value, parameters, retain_graph=True, allow_unused=True, materialize_grads=True)
    return torch.cat([g.flatten() for g in found])


def over_seeds(arms: dict, measure) -> dict[str, list]:
    """Return {arm: [measure(seed, arm's value), one per seed]}."""
    return {name: [measure(seed, value) for seed in range(SEEDS)] for name, value in arms.items()}


def trained(measure, arms: dict) -> dict[str, list]:
    """Measure policies of all seeds after `grpo` with an arm's options, None = before training."""

    def run(seed: int, options: dict | None):
        policy = begin(seed)
        if options is not None:
            grpo(policy, **options)
        return measure(policy)

    return over_seeds(arms, run)


# ------------------------------------------------------------------------------- one function a claim


def kl() -> tuple[dict, bool]:
    policy, reference = Policy(0), Policy(1)
    logps, ref = policy(), reference().detach()
    odds = policy.answers().detach()[..., None]  # (P, S, 1)
    table = policy.next_tokens()
    of_prefix = (table.exp() * (table - reference.next_tokens().detach())).sum(-1)[:, PLACES] * MASK
    exact = {"tokens": odds * of_prefix, "strings": policy.answers() * (logps - ref).sum(-1)}
    exact = {target: gradient(policy, value.sum()) for target, value in exact.items()}
    ratio = (logps - logps.detach()).exp()
    terms = {name: kl_term(logps, ref, name) * MASK for name in ("k1", "k2", "k3")}
    losses = {f"{name} in the loss": term for name, term in terms.items()}
    losses["k3 times the ratio in the loss"] = correct_kl(terms["k3"], ratio, "k3")
    for name in ("k1", "k3"):
        losses[f"{name} in the reward"] = terms[name].detach() * logps
        losses[f"{name} in the reward, string"] = terms[name].detach().sum(-1, True) * logps
    found = {name: gradient(policy, (odds * loss).sum()) for name, loss in losses.items()}
    errors = {
        target: {name: ((g - right).norm() / right.norm()).item() for name, g in found.items()}
        for target, right in exact.items()
    }
    tokens, strings = errors["tokens"], errors["strings"]
    k1 = (found["k1 in the loss"].norm() / exact["tokens"].norm()).item()
    zeros = (
        k1,
        tokens["k3 times the ratio in the loss"],
        tokens["k1 in the reward"],
        strings["k1 in the reward, string"],
    )
    return {"size of k1 in the loss": k1, **errors}, max(zeros) < 1e-9 and tokens["k3 in the loss"] > 0.01


def length() -> tuple[dict, bool]:
    slopes = {"1/length": [], "constant": []}
    for seed in range(20):
        policy = Policy(seed)
        odds = policy.answers()
        kinds = odds * RIGHT, odds * (1 - RIGHT)
        means = [gradient(policy, ((kind * LENGTHS).sum(1) / kind.sum(1)).mean()) for kind in kinds]
        weights = (odds * (RIGHT - policy.right()[:, None])).detach()
        for name, divisor in (("1/length", LENGTHS), ("constant", LENGTH)):
            step = gradient(policy, (weights * policy().sum(-1) / divisor).sum())
            slopes[name].append([(mean @ step / step.norm()).item() for mean in means])
    slopes = {name: torch.tensor(values) for name, values in slopes.items()}  # (seeds, 2)
    change = slopes["1/length"] - slopes["constant"]
    shorter, longer = (change[:, 0] < 0).sum().item(), (change[:, 1] > 0).sum().item()
    found = {name: values.mean(0).tolist() for name, values in slopes.items()}
    numbers = {"mean slope of right, wrong": found, "right shorter": shorter, "wrong longer": longer}
    return numbers, shorter == longer == 20


def deviation() -> tuple[dict, bool]:
    def weight(p: float, scale: str) -> float:
        total = 0.0
        for k in range(9):
            rewards = torch.tensor([1.0] * k + [0.0] * (8 - k), dtype=torch.float64)
            chance = comb(8, k) * p**k * (1 - p) ** (8 - k)
            total += chance * (group_advantages(rewards, 8, scale) * (rewards - p)).sum().item()
        return total

    ratios = {p: weight(p, "group") / weight(p, "none") for p in (0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99)}
    ratios = {p: ratio / ratios[0.5] for p, ratio in ratios.items()}
    return {"weight by success": ratios}, min(ratios[0.05], ratios[0.95]) >= 1.5


def gspo() -> tuple[dict, bool]:
    torch.manual_seed(0)
    old_logits = torch.randn(VOCABULARY).double()
    old, new = old_logits.softmax(0), (old_logits + 0.3 * torch.randn(VOCABULARY)).softmax(0)

    def moment(power: float) -> float:
        return (old * (new / old) ** power).sum().item()

    found = {"product": {}, "geometric mean": {}}
    for n in (1, 2, 4, 8, 16, 32, 64):
        for name, power in (("product", 1), ("geometric mean", 1 / n)):
            mean = moment(power) ** n
            found[name][n] = {"mean": mean, "variance": moment(2 * power) ** n - mean**2}
    product, geometric = ([values[n]["variance"] for n in (1, 64)] for values in found.values())
    return found, product[1] > 10 * product[0] and geometric[1] < geometric[0]


def two() -> tuple[dict, bool]:
    found = trained(success, {"128 x 2": {"prompts": 128, "group": 2}, "16 x 16": {}})
    gap = sum(map(sub, *found.values())) / SEEDS
    return {**found, "mean difference": gap}, abs(gap) <= 0.03


def negatives() -> tuple[dict, bool]:
    arms = {"start": None, "negatives": {"keep": (-OFF, 0)}, "positives": {"keep": (0, OFF)}}
    found = trained(lambda policy: pass_at(policy, 1, 256), arms)
    holds = [
        negative[0] > start[0] and negative[1] > start[1] - 0.01 and positive[1] < start[1] - 0.01
        for start, negative, positive in zip(*found.values(), strict=True)
    ]
    return found, all(holds)


def clip() -> tuple[dict, bool]:
    shared = {"reuse": 4, "rollouts": range(100), "rewards": lambda scores: torch.randint(2, scores.shape).double()}
    bounds = {"above alone": (1.0, 0.2), "below alone": (0.2, OFF), "none": (1.0, OFF)}
    arms = {name: shared | {"low": low, "high": high} for name, (low, high) in bounds.items()}
    found = trained(entropy_of, {"start": None, **arms})
    return found, all(above < none < below for _, above, below, none in zip(*found.values(), strict=True))


def pass_at_k() -> tuple[dict, bool | None]:
    found = trained(lambda policy: pass_at(policy, *(2**power for power in range(9))), {"start": None, "grpo": {}})
    pairs = list(zip(*found.values(), strict=True))
    if all(min(a[-1], b[-1]) > 0.999 for a, b in pairs):
        return found, None  # every prompt is solved within 256 answers, before and after
    return found, all(b[0] > a[0] and b[-1] < a[-1] - 0.01 for a, b in pairs)


def dpo() -> tuple[dict, bool]:
    def change(seed: int, are_alike: bool) -> list[float]:
        policy = begin(seed)
        start = policy().sum(-1).detach()
        chosen = torch.multinomial(RIGHT * (LENGTHS == LENGTH), 1)
        prefix = (TOKENS[chosen][..., :-1] == TOKENS[:, :-1]).all(-1).double()  # (P, S)
        rejected = torch.multinomial((1 - RIGHT) * (prefix if are_alike else 1), 1)

        def gains() -> list[Tensor]:
            return [(policy().sum(-1) - start).gather(1, answers) for answers in (chosen, rejected)]

        optimize(policy, (-F.logsigmoid(0.1 * sub(*gains())).mean() for _ in range(100)))
        return [gain.mean().item() for gain in gains()]

    found = over_seeds({"alike": True, "others": False}, change)
    pairs = zip(*found.values(), strict=True)
    return found, all(max(alike) < 0 and alike[0] < other[0] for alike, other in pairs)


def entropy_tokens() -> tuple[dict, bool]:
    def is_top(entropy: Tensor, mask: Tensor) -> Tensor:
        return (entropy >= entropy[mask == 1].quantile(0.8)).double()

    weights = {"all": None, "top fifth": is_top, "others": lambda entropy, mask: 1 - is_top(entropy, mask)}
    found = trained(success, {name: {"weigh": weigh} for name, weigh in weights.items()})
    everything, top, others = (sum(values) / SEEDS for values in found.values())
    return found, top >= everything - 0.03 and others < top


def forgetting() -> tuple[dict, bool]:
    old, new = range(PROMPTS // 2), range(PROMPTS // 2, PROMPTS)

    def learn(seed: int, with_rewards: bool) -> dict:
        policy = begin(seed, old, share=1.0, steps=300)
        start, known = policy.answers().detach(), success(policy, old)
        shown = torch.multinomial(RIGHT, 1)
        left = takewhile(lambda _: success(policy, new) < 0.9, range(2000))
        if with_rewards:
            steps = grpo(policy, rollouts=left, pool=new)
        else:
            steps = optimize(policy, (-policy().sum(-1).gather(1, shown)[new].mean() for _ in left))
        divergence = (start * (start.log() - policy.answers().log())).sum(1)[new].mean().item()
        return {"steps": steps, "success": success(policy, new), "forgotten": known - success(policy, old),
                "kl": divergence}  # fmt: skip

    found = over_seeds({"grpo": True, "sft": False}, learn)
    pairs = zip(*found.values(), strict=True)
    return found, all(a["forgotten"] < b["forgotten"] and a["kl"] < b["kl"] for a, b in pairs)


def precision() -> tuple[dict, bool]:
    def mismatch(seed: int, dtype: torch.dtype) -> float:
        policy = begin(seed).to(dtype)
        states, weight = policy.hidden_states().detach(), policy.head.weight
        halves = [states[..., part] @ weight[:, part].T for part in (slice(0, 16), slice(16, 32))]
        other = (halves[0] + halves[1] + policy.head.bias).log_softmax(-1)
        return (policy.next_tokens() - other).double().square().mean().sqrt().item()

    found = over_seeds({name: getattr(torch, name) for name in ("bfloat16", "float16", "float32")}, mismatch)
    return found, all(a > b > c for a, b, c in zip(*found.values(), strict=True))


VERDICTS = {True: "holds here", False: "does not hold here", None: "cannot be seen at this size"}
FUNCTIONS = kl, length, deviation, gspo, two, negatives, clip, pass_at_k, dpo, entropy_tokens, forgetting, precision
TESTS = {function.__name__: function for function in FUNCTIONS}


def measure(name: str) -> dict:
    numbers, holds = TESTS[name]()
    return {**CLAIMS[name]._asdict(), "numbers": numbers, "verdict": VERDICTS[holds]}


def main():
    options = common.study_options(__doc__, arms=CLAIMS).parse_args()
    torch.set_num_threads(1)
    results = common.study(options.json, [{"name": name} for name in options.only], measure)
    for run in results["runs"]:
        if run["name"] in options.only:
            print(f"{run['name']}: {run['verdict']}")


if __name__ == "__main__":
    main()
