"""Live sentences about a run that learns nothing: what is wrong, the likely cause, and what to do.

A rule looks at the metrics of the last WINDOW optimizer steps, and speaks again after it was quiet.
"""

import json
import math
from collections import Counter, deque
from collections.abc import Iterator
from itertools import chain, compress

import torch

WINDOW = 10  # optimizer steps in a row for which something must hold
BLIND = 50  # rollouts in which a policy must earn more than one that always answers the same
# cures that tools/check.py names too
LONGER = "raise it, or ask for shorter answers"
FORM = "say the form in data.prompt_template, train sft first, or drop the reward"


class Alarms:
    """The rules of one stage."""

    def __init__(self, algorithm, optimizer):
        self.algorithm, self.optimizer = algorithm, optimizer
        self.last = deque(maxlen=WINDOW)
        self.said = set()
        self.first = None  # metrics of the first step
        # solutions and rewards of the last rollouts
        self.rollout = None
        self.earned = deque(maxlen=BLIND)

    def step(self, metrics: dict[str, float], rollout=None) -> list[str]:
        """Take the metrics of a step, and its Rollout if it has one; return the new sentences."""
        if rollout is not None and rollout is not self.rollout:
            self.rollout = rollout
            solutions = [str(row.columns.get("solution")) for row in rollout.rows]
            self.earned.append((solutions, rollout.rewards))
        self.last.append(metrics)
        self.first = self.first or metrics
        rules = chain(self.rules(), self.blind(), self.untouched())
        true = dict(rules) if len(self.last) == WINDOW else {}
        new = [sentence for name, sentence in true.items() if name not in self.said]
        self.said = set(true)
        return new

    def state(self) -> str:
        """Write down what a resumed run must know to say neither less nor more, as JSON."""
        earned = [(solutions, rewards.tolist()) for solutions, rewards in self.earned]
        return json.dumps([list(self.last), sorted(self.said), self.first, earned])

    def restore(self, state: str):
        """Take over what `state` has written down."""
        last, said, self.first, earned = json.loads(state)
        self.last.extend(last)
        self.said.update(said)
        self.earned.extend((solutions, torch.tensor(rewards)) for solutions, rewards in earned)

    def always(self, name: str, holds) -> bool:
        """Whether a metric was there, and this held of it, in all the last steps."""
        return all(name in metrics and holds(metrics[name]) for metrics in self.last)

    def rules(self) -> Iterator[tuple[str, str]]:
        """Name and sentence of each rule that is broken."""
        run = self.algorithm.run
        stage = self.algorithm.stage
        last = self.last[-1]
        alike = "all completions of each group earn the same, so nothing is learned"
        equal = self.always("frac_reward_zero_std", lambda share: share == 1)
        if all(self.always(f"rewards/{name}/std", lambda std: std == 0) for name in run.rewards):
            says = (f"{name} says {last[f'rewards/{name}/mean']:.3g}" for name in run.rewards)
            cure = "look at completions.jsonl and at what these rewards ask for"
            yield "constant", f"of every completion reward {' and '.join(says)}; {cure}"
        elif equal and (run.sampling.temperature < 0.2 or run.sampling.top_k == 1):
            cause = f"temperature {run.sampling.temperature:g} and top_k {run.sampling.top_k}"
            yield "cold", f"{alike}; sampling.{cause} draw the same text again; take 1.0 and 0"
        elif equal:
            cure = "the prompts are too easy or too hard: take others, or raise num_generations"
            yield "equal", f"{alike}; {cure}"
        elif self.always("grad_norm", lambda norm: norm == 0):
            cause = "is everything frozen?"
            if self.first.get("grad_norm"):
                cause = f"the weights are lost: lower {stage}.learning_rate"
            yield "zero", f"all gradients are zero, so nothing is learned; {cause}"
        if self.always("completions/clipped_ratio", lambda share: share >= 0.9):
            limit = f"sampling.max_new_tokens ({run.sampling.max_new_tokens})"
            yield "cut", f"9 of 10 completions are cut at {limit}; {LONGER}"
        calls, cure = "tools/call_frequency", "pay for calls that are answered (docs/tools.md)"
        if self.always("tools/failure_frequency", lambda share: share >= 0.2):
            yield "failed", f"a fifth of the calls of tools fail, see completions.jsonl; {cure}"
        if self.always(calls, lambda count: count < 0.75 * self.first.get(calls, 0)):
            was = f"not {self.first[calls]:.2g} as at first; if they need it"
            yield "fewer calls", f"a completion calls {last[calls]:.2g} tools, {was}, {cure}"
        if self.always("tools/cut_ratio", lambda share: share >= 0.5):
            limit = f"sampling.max_new_tokens ({run.sampling.max_new_tokens})"
            yield "unfit", f"half of the completions end as an answer of a tool exceeds {limit}"
        for name in (name for name in run.rewards if "format" in name):
            if self.always(f"rewards/{name}/mean", lambda mean: mean == 0):
                yield name, f"no completion has the form that reward {name} asks for; {FORM}"
        if "reward" not in last:
            return
        if self.always("entropy", lambda nats: nats < 1e-3):
            cure = "lower the learning rate, add beta, or go back to an earlier checkpoint"
            yield "certain", f"the policy is certain of every token (entropy below 0.001); {cure}"
        uniform = math.log(self.algorithm.policy.config.vocab_size)
        became = self.first.get("entropy", uniform) < 0.5 * uniform
        if became and self.always("entropy", lambda nats: nats > 0.9 * uniform):
            cure = f"lower {stage}.learning_rate"
            yield "noise", f"the policy writes noise now (entropy {last['entropy']:.1f}); {cure}"

    def blind(self) -> Iterator[tuple[str, str]]:
        """Rewards that always giving the most frequent solution would earn too.

        Labels that were shuffled end here: no policy that learns from them is better than this.
        """
        if len(self.earned) < BLIND:
            return
        solutions = [solution for some, _ in self.earned for solution in some]
        rewards = [given.view(len(some), -1, given.shape[1]) for some, given in self.earned]
        columns = torch.cat(rewards).unbind(2)
        for reward, values in zip(self.algorithm.run.training_rewards, columns, strict=True):
            judged = ~values.isnan().any(1)  # rows whose completions all were
            if "solution" not in reward.columns or not judged.any():
                continue
            [(always, count)] = Counter(compress(solutions, judged.tolist())).most_common(1)
            values, share = values[judged].double(), count / judged.sum().item()
            low = values.min().item()
            high = values.max().item()
            mean = values.mean().item()
            blind = low + (high - low) * share
            if low < high and mean <= blind:
                earns = f"was {mean:.3g}, and always answering {always!r:.80} {blind:.3g}"
                cure = "are the solutions with the right rows? Else train sft first"
                name = reward.name
                yield f"blind {name}", f"in {BLIND} rollouts reward {name} {earns}; {cure}"

    def untouched(self) -> Iterator[tuple[str, str]]:
        """Name what is trained and never had a gradient: AdamW has no moments of it."""
        named = self.algorithm.trained.named_parameters()
        state = self.optimizer.state
        names = [name for name, p in named if p.requires_grad and p not in state]
        if names:
            cause, cure = "", "freeze them"
            if all("visual" in name for name in names):
                cause = "no row had an image that the model saw: "
                cure = "check the image column, or set model.freeze=[vision, merger]"
            several = f"{names[0]} and {len(names) - 1} others" if len(names) > 1 else names[0]
            yield "untouched", f"{cause}{several} never had a gradient; {cure}"


def looks_away(evaluations: list[dict], rows: int) -> str | None:
    """Say that the reward rose while pictures became worth less than where they were worth most.

    A picture is worth what is sampled with it and not with another or a grey one. Changes count
    from 1 / sqrt(rows) on, two standard errors of a share of the held-out rows.
    """

    def worth(line: dict) -> float:
        return line["sampled"] - max(line["grey"], line["swapped"])

    seen = [line for line in evaluations if "grey" in line]
    most = max(seen, key=worth)
    now = seen[-1]
    if min(now["sampled"] - most["sampled"], worth(most) - worth(now)) <= 1 / math.sqrt(rows):
        return None
    what = f"rose from {most['sampled']:.3g} to {now['sampled']:.3g}, but pictures add"
    cure = "the text gives answers away: take rows that need their pictures"
    added = f"{worth(now):.3g} to it instead of {worth(most):.3g}"
    return f"what is sampled of held-out rows {what} {added}; {cure}"


def check_mismatch(run, metrics: dict[str, float]):
    """Stop a run whose sampler and trainer disagree about tokens that were just drawn (ValueError):
    in float32 about one of them, in 16 bits, where single tokens do, on average."""
    bound, tokens, name = run.rollout.max_logp_mismatch, "a token", "rollout/logp_mismatch"
    if (run.model.compute_dtype or run.model.dtype) in ("bfloat16", "float16"):
        bound, tokens, name = bound / 10, "tokens (root mean square)", f"{name}_rms"
    found = metrics.get(name, 0.0)
    if found > bound and not run.adapter.dropout:  # which the sampler has not
        cause = f"{found:.3g} nats about {tokens}: a bug, or a dtype too coarse"
        cure = f"rollout.max_logp_mismatch bounds it by {bound}, .inf does not check"
        raise ValueError(f"sampler and trainer differ by {cause}; {cure}")
