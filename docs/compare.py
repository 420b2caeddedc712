"""docs/compare.md: SFT, DPO, GRPO, RLOO and PPO on the same four completions of one picture.

Each loss is the project's own, on the model and the completions of docs/walkthrough.py. `python -m docs.make_pages`
writes the page, and a test compares it.
"""

import copy
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from docs.draw import BLUES, INK, ORANGES, SOFT, Picture
from docs.walkthrough import begin, shade, token
from minivlmrl.advantages import combine, group_advantages
from minivlmrl.algorithms.ppo import PPOConfig
from minivlmrl.batch import pack
from minivlmrl.logprobs import per_token_logps
from minivlmrl.losses import PolicyLoss, grpo_loss
from minivlmrl.objectives.baselines import gae, leave_one_out, token_rewards, whiten
from minivlmrl.objectives.policy_losses import FamilyLoss, PolicyInputs, policy_loss
from minivlmrl.objectives.ppo_loss import PPORollout, ppo_loss
from minivlmrl.objectives.preference_losses import DPOLoss, dpo_loss
from minivlmrl.objectives.sft_loss import sft_loss

SHOWN = (1, 0, 2, 3)  # of the walkthrough's eight: right, wrong, wrong with another thought, without the form
STEP = 0.05  # length of the step that each method takes
HEAD = """\
# Five ways to learn from the same four answers

One picture of a purple triangle, the model of the [walkthrough](walkthrough.md), four answers that it has drawn. What
does each method need to know, what does it compute, and which tokens does it push where?
"""
READ = """\
What to see here:

- SFT knows nothing of the other three answers: they move as far as they share tokens with the right one.
- DPO takes a pair; its beta is 1.0 here. Its first loss is log 2 whatever the answers are.
- GRPO and RLOO need several answers of the model's own, and rewards that differ. GRPO divides by the group's standard
  deviation and gives each answer the same weight, however long it is; RLOO gives each token the whole advantage (answer
  0 has 14).
- PPO gives each token its own advantage. Its critic is new here and says 0, so inside an answer only the discount
  lambda = {lam} tells tokens apart. Then it whitens over all tokens.
- Answer 2 rises with every method, although nobody calls it good: it shares "I see blue" with the right one.
"""


@dataclass
class Scene:
    """Four answers, right one first, and what the methods know of them."""

    policy: torch.nn.Module
    group: object  # GroupBatch
    words: list[list[str]]
    rewards: Tensor  # (4,)
    mask: Tensor  # (4, T)
    logps: Tensor  # (4, T), now: of the sampler and the reference too


@cache
def scene() -> Scene:
    """The walkthrough's prompt with four of its completions."""
    walk, policy = begin()
    ids = [walk.step.rollout.completions[walk.index][number].ids for number in SHOWN]
    group = pack([walk.prompt], [ids], policy.config)
    rewards = combine(walk.step.rollout.rewards, walk.algorithm.reward_weights)[8 * walk.index :][:8][list(SHOWN)]
    with torch.no_grad():
        logps = group.pad(per_token_logps(policy, group)[0])
    return Scene(policy, group, [walk.spell(row) for row in ids], rewards.double(), group.completion_mask, logps)


def advantages() -> dict[str, Tensor]:
    """What the three methods with rewards give: (4,), or of PPO (4, T)."""
    s = scene()
    earned = token_rewards(s.rewards, s.logps, s.logps, s.mask)
    [whitened] = whiten([gae(earned, torch.zeros_like(s.logps))[0] * s.mask], [s.mask])
    return {"GRPO": group_advantages(s.rewards, 4), "RLOO": leave_one_out(s.rewards, 4), "PPO": whitened}


def losses(logps: Tensor) -> dict[str, Tensor]:
    """The loss of each method as a function of (4, T) log-probabilities."""
    s, worth = scene(), advantages()
    pair = [0, 1]  # the right answer and the first wrong one
    rollout = PPORollout(s.logps, torch.zeros_like(s.logps), worth["PPO"], torch.zeros_like(s.logps))
    return {
        "SFT": sft_loss(logps[:1], s.mask[:1]),
        "DPO": dpo_loss(
            logps[pair][None], s.mask[pair][None], DPOLoss(beta=1.0), ref_per_token_logps=s.logps[pair][None]
        )[0],
        "GRPO": grpo_loss(logps, worth["GRPO"], s.mask, PolicyLoss(loss_type="grpo"))[0],
        "RLOO": policy_loss(PolicyInputs(logps), worth["RLOO"], s.mask, FamilyLoss(loss_type="rloo"))[0],
        "PPO": ppo_loss(logps, torch.zeros_like(logps), s.mask, rollout)[0],
    }


@cache
def pushes() -> dict[str, Tensor]:
    """-d loss / d log-probability of each token, (4, T): above 0 it is pushed up."""
    logps = scene().logps.clone().requires_grad_()
    return {name: -torch.autograd.grad(loss, logps, retain_graph=True)[0] for name, loss in losses(logps).items()}


def changes(name: str) -> list[float]:
    """By how much each answer's log-probability moves in one step of length STEP down the gradient of one loss."""
    s = scene()
    policy = copy.deepcopy(s.policy)
    losses(s.group.pad(per_token_logps(policy, s.group)[0]))[name].backward()
    gradients = [p.grad for p in policy.parameters() if p.grad is not None]
    norm = torch.stack([gradient.square().sum() for gradient in gradients]).sum().sqrt()
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.grad is not None:
                parameter -= STEP / norm * parameter.grad
        return ((s.group.pad(per_token_logps(policy, s.group)[0]) - s.logps) * s.mask).sum(1).tolist()


def page() -> str:
    """The page."""
    s, worth = scene(), advantages()
    texts = [repr(begin()[0].algorithm.processor.decode(row)) for row in s.group.split(s.group.completion_ids)]
    totals = (s.logps * s.mask).sum(1).tolist()
    rows = [
        (i, f"`{text[1:-1]}`", f"{r:g}", f"{p:.2f}")
        for i, (text, r, p) in enumerate(zip(texts, s.rewards, totals, strict=True))
    ]
    parts = [HEAD, table(("answer", "text", "reward", "log-probability"), rows), "## What each needs and computes\n"]
    values = {name: f"{loss.item() + 0.0:.3f}".replace("-0.000", "0.000") for name, loss in losses(s.logps).items()}
    listed = {name: " ".join(f"{x:+.2f}" for x in worth[name].tolist()) for name in ("GRPO", "RLOO")}
    first = " ".join(f"{x:+.2f}" for x in worth["PPO"][:, 0].tolist())
    lasts = " ".join(f"{row[int(n) - 1]:+.2f}" for row, n in zip(worth["PPO"].tolist(), s.mask.sum(1), strict=True))
    what = {
        "SFT": ("a right answer (0)", "the mean of its -log-probabilities"),
        "DPO": (
            "a pair: 0 is better than 1; a reference model",
            "beta x (how far the policy has moved from it): 0 so far",
        ),
        "GRPO": ("answers of its own, rewards", f"advantages {listed['GRPO']}"),
        "RLOO": ("answers of its own, rewards", f"advantages {listed['RLOO']}"),
        "PPO": ("answers of its own, rewards, a critic", f"advantages of first tokens {first}, of last {lasts}"),
    }
    parts.append(table(("method", "needs", "computes", "loss"), [(n, *what[n], values[n]) for n in what]))
    parts += ["## Which tokens move where\n", "![four answers under each method](compare.svg)\n"]
    sums = {name: [signed(x) for x in (push * s.mask).sum(1).tolist()] for name, push in pushes().items()}
    head = ("method", *(f"answer {number}" for number in range(4)))
    parts += ["The push on a whole answer, the sum over its tokens of -d loss / d log-probability:\n"]
    parts.append(table(head, [(name, *row) for name, row in sums.items()]))
    parts += [
        "## What one step changes\n",
        f"One step down each loss's gradient, of length {STEP} over all weights for each",
    ]
    parts += ["method, so that only directions count, changes the answers' log-probabilities by:\n"]
    parts.append(table(head, [(name, *map(signed, changes(name))) for name in what]))
    return "\n".join([*parts, READ.format(lam=PPOConfig.lam)])


def signed(value: float) -> str:
    """Two digits with a sign; 0 for nothing."""
    return f"{value:+.2f}" if abs(value) > 1e-9 else "0"


def table(head: tuple, rows: list[tuple]) -> str:
    """A table in Markdown."""
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in (head, *rows)]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:], ""])


def picture() -> str:
    """The answers under each method: blue tokens are pushed up, orange ones down, as strongly as the colour."""
    s = scene()
    width = max(sum(8 + 7.2 * len(word) for word in row) for row in s.words)
    drawn = Picture(int(width) + 170, 60 + 5 * 122, "Which tokens each method pushes up and down")
    drawn.text(
        24,
        28,
        "Pushed up (blue) and down (orange); the shade is relative to the method's strongest",
        14,
        anchor="start",
        bold=True,
    )
    drawn.text(int(width) + 150, 44, "reward", 12, SOFT, "end")
    for block, (name, push) in enumerate(pushes().items()):
        top, strongest = 48 + 122 * block, (push * s.mask).abs().max().item()
        drawn.text(24, top + 62, name, 14, anchor="start", bold=True)
        for number, (row, values) in enumerate(zip(s.words, push.tolist(), strict=True)):
            x, y = 104.0, top + 26 * number
            drawn.text(90, y + 15, str(number), 12, SOFT)
            drawn.text(int(width) + 150, y + 15, f"{s.rewards[number]:g}", 12, INK, "end")
            for word, value in zip(row, values, strict=False):
                x += token(drawn, x, y, word, shade(BLUES[1] if value > 0 else ORANGES[1], abs(value) / strongest))
    return drawn.svg()


PICTURES = {"compare.svg": picture}
