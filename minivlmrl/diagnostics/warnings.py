"""Live sentences about a run that learns nothing: what is wrong, the likely cause, and what to do.

A rule looks at the metrics of the last WINDOW optimizer steps, and speaks again after it was quiet.
"""

import json
import math
from collections import Counter, deque
from collections.abc import Callable, Iterator
from itertools import compress
from pathlib import Path

import torch
from torch.optim import Optimizer

from minivlmrl.config.options import RunConfig
from minivlmrl.files import read_lines
from minivlmrl.losses.advantages import combine
from minivlmrl.rewards.registry import training_rewards
from minivlmrl.run.callbacks import Callback
from minivlmrl.run.evaluate import IMAGE_ABLATIONS, metric_name
from minivlmrl.run.metrics import EVALUATIONS, MetricsLog
from minivlmrl.run.rollout_log import Logged
from minivlmrl.run.trainer_state import TrainerState
from minivlmrl.trainers.base import Rollout, Step, Trainer

WINDOW = 10  # optimizer steps in a row for which something must hold
BLIND = 50  # rollouts in which a policy must earn more than one that always answers the same
IDLE = 50  # optimizer steps in which each expert should have a token
# cures that check_completions.py names too
LONGER = "raise it, or ask for shorter answers"
FORM = "say the form in data.prompt_template, train sft first, or drop the reward"


class TrainingWarnings(Callback):
    """Writes the warnings of each step and evaluation to warnings.jsonl and the terminal."""

    def on_run_begin(self, config: RunConfig, log: MetricsLog):
        self.log = log
        self.evaluations = Path(config.output_dir, EVALUATIONS)
        self.eval_reward = config.data.eval_rewards[0]

    def on_stage_begin(self, trainer: Trainer, optimizer: Optimizer, state: TrainerState):
        self.rules = WarningRules(trainer, optimizer)
        if state.step and "alarms" in state.logs:
            self.rules.restore(state.logs["alarms"])

    def on_step_end(self, trainer: Trainer, step: Step, number: int, values: dict):
        if self.log.world.is_main:
            for warning in self.rules.step(values, step.rollout):
                self.log.warn(trainer.stage, number, warning, number + 1)

    def on_evaluation(self, stage: str, steps_done: int, num_rows: int):
        if self.log.world.is_main:
            lines = read_lines(self.evaluations, Logged)
            for rule in (ignores_images, accuracy_regressed):
                warning = rule(lines, num_rows, self.eval_reward)
                if warning:
                    self.log.warn(stage, steps_done, warning, steps_done)

    def state_dict(self) -> dict[str, str]:
        return {"alarms": self.rules.state()}


class WarningRules:
    """The rules of one stage."""

    def __init__(self, trainer: Trainer, optimizer: Optimizer):
        self.trainer, self.optimizer = trainer, optimizer
        self.run = trainer.run
        self.recent = deque(maxlen=WINDOW)  # metrics of the last steps
        self.first: dict[str, float] = {}  # metrics of the first step
        self.broken = set()  # names of the rules that were broken at the last step
        self.rollout = None
        self.earned = deque(maxlen=BLIND)  # solutions and rewards of the last rollouts
        self.extremes = []  # least and most that a completion has earned in all, of any step
        self.idle_steps = []  # (layers, E) steps since an expert had a token; []: no experts

    def step(self, metrics: dict[str, float], rollout: Rollout | None = None) -> list[str]:
        """Take the metrics of a step, and its Rollout if it has one; return the new sentences."""
        if "experts/tokens" in metrics:
            tokens = torch.tensor(metrics["experts/tokens"]).sum(0)  # (layers, E)
            is_idle = (tokens == 0) & tokens.any(1, keepdim=True)  # dense layers have no tokens
            self.idle_steps = ((torch.tensor(self.idle_steps or 0) + 1) * is_idle).tolist()
        if rollout is not None and rollout is not self.rollout:
            self.rollout = rollout
            solutions = [str(row.columns.get("solution")) for row in rollout.rows]
            self.earned.append((solutions, rollout.rewards))
            totals = combine(rollout.rewards, torch.tensor(list(self.run.rewards.values())))
            ordered = sorted([*self.extremes, *totals[~totals.isnan()].tolist()])
            self.extremes = ordered[:1] + ordered[-1:]
        self.recent.append(metrics)
        self.first = self.first or metrics
        broken = dict(self.rules()) if len(self.recent) == WINDOW else {}
        new_sentences = [text for name, text in broken.items() if name not in self.broken]
        self.broken = set(broken) | (self.broken & {"solved"})  # which is said once
        return new_sentences

    def state(self) -> str:
        """Write down what a resumed run must know to say neither less nor more, as JSON."""
        earned = [(solutions, rewards.tolist()) for solutions, rewards in self.earned]
        recent = list(self.recent)
        broken = sorted(self.broken)
        return json.dumps([recent, broken, self.first, earned, self.extremes, *self.idle_steps])

    def restore(self, state: str):
        """Take over what `state` has written down."""
        recent, broken, self.first, earned, self.extremes, *self.idle_steps = json.loads(state)
        self.recent.extend(recent)
        self.broken.update(broken)
        self.earned.extend((solutions, torch.tensor(rewards)) for solutions, rewards in earned)

    def always(self, name: str, holds: Callable[[float], bool]) -> bool:
        """Whether a metric was there, and this held of it, in all the last steps."""
        return all(name in metrics and holds(metrics[name]) for metrics in self.recent)

    def mean(self, name: str) -> float:
        """Mean of a metric over the last steps; NaN where it was not there."""
        return sum(metrics.get(name, math.nan) for metrics in self.recent) / len(self.recent)

    def rules(self) -> Iterator[tuple[str, str]]:
        """Name and sentence of each rule that is broken."""
        stuck = [*self.learning_rules(), *self.entropy_rules()]
        reward = self.mean("reward")
        lowest, highest = self.extremes or (0, 0)
        if stuck and lowest < highest and reward >= lowest + 0.9 * (highest - lowest):
            # what names a fault of a run that fails is how one that succeeds ends
            sentence = (
                f"completions earn {reward:.3g} of {highest:.3g}, the most that one has earned: "
                "little is left to learn from these prompts"
            )
            stuck = [("solved", sentence)]
        yield from stuck
        yield from self.completion_rules()
        yield from self.tool_rules()
        yield from self.blind_rules()
        yield from self.untouched()
        yield from self.idle_experts()

    def learning_rules(self) -> Iterator[tuple[str, str]]:
        """There is nothing to learn from, or nothing changes."""
        rewards = self.run.rewards
        sampling = self.run.sampling
        stds = [f"rewards/{name}/std" for name in rewards]
        if stds and all(self.always(name, lambda std: std == 0) for name in stds):
            metrics = self.recent[-1]
            means = (f"{name} says {metrics[f'rewards/{name}/mean']:.3g}" for name in rewards)
            yield (
                "constant",
                f"of every completion reward {' and '.join(means)}; "
                "look at completions.jsonl and at what these rewards ask for",
            )
        elif self.always("frac_reward_zero_std", lambda share: share == 1):
            yield (
                "equal",
                "all completions of each group earn the same, so nothing is learned; the prompts "
                "are too easy or too hard: take others, or raise num_generations; at a low "
                f"sampling.temperature ({sampling.temperature:g}) or a small top_k "
                f"({sampling.top_k}, 0 is off) the same text is drawn again: take 1.0 and 0",
            )
        elif self.always("grad_norm", lambda norm: norm == 0):
            yield (
                "zero",
                "all gradients are zero, so nothing is learned; is what the rows train frozen, or "
                f"are the weights lost? Then lower {self.trainer.stage}.learning_rate",
            )

    def completion_rules(self) -> Iterator[tuple[str, str]]:
        """Most completions are cut, or none has the form that is asked for."""
        limit = self.run.sampling.max_new_tokens
        if self.always("completions/clipped_ratio", lambda share: share >= 0.9):
            yield (
                "cut",
                f"9 of 10 completions are cut at sampling.max_new_tokens ({limit}); {LONGER}",
            )
        for name in self.run.rewards:
            if "format" in name and self.always(f"rewards/{name}/mean", lambda mean: mean == 0):
                yield name, f"no completion has the form that reward {name} asks for; {FORM}"

    def tool_rules(self) -> Iterator[tuple[str, str]]:
        """Tools answer too few calls, or say more than fits."""
        answered = self.mean("tools/answered_frequency")
        first_answered = self.first.get("tools/answered_frequency", 0)
        expected = max(first_answered, self.mean("tools/call_frequency"))
        if answered < 0.8 * expected:
            yield (
                "unanswered",
                f"tools answer {answered:.2g} calls of a completion, not {expected:.2g} as it makes "
                "or had answered at first, see completions.jsonl; if that does not pass, pay for "
                "calls that are answered (docs/tools.md)",
            )
        if self.always("tools/cut_ratio", lambda share: share >= 0.5):
            limit = self.run.sampling.max_new_tokens
            yield (
                "unfit",
                "half of the completions end as an answer of a tool exceeds "
                f"sampling.max_new_tokens ({limit})",
            )

    def entropy_rules(self) -> Iterator[tuple[str, str]]:
        """The policy is certain of all that it writes, or writes noise."""
        if "reward" not in self.recent[-1]:
            return
        if self.always("entropy", lambda nats: nats < 1e-3):
            yield (
                "certain",
                "the policy is certain of every token (entropy below 0.001) and explores no more; "
                "if it should earn more, lower the learning rate, add beta, or go back to an "
                "earlier checkpoint",
            )
        uniform = math.log(self.trainer.policy.config.vocab_size)
        wrote_text = self.first.get("entropy", uniform) < 0.5 * uniform
        if wrote_text and self.always("entropy", lambda nats: nats > 0.9 * uniform):
            yield (
                "noise",
                f"the policy writes noise now (entropy {self.recent[-1]['entropy']:.1f}); "
                f"lower {self.trainer.stage}.learning_rate",
            )

    def blind_rules(self) -> Iterator[tuple[str, str]]:
        """Rewards that always giving the most frequent solution would earn too.

        Labels that were shuffled end here: no policy that learns from them is better than this.
        """
        if len(self.earned) < BLIND:
            return
        solutions = []
        parts = []
        for row_solutions, rewards in self.earned:
            solutions += row_solutions
            parts.append(rewards.view(len(row_solutions), -1, rewards.shape[1]))
        columns = torch.cat(parts).unbind(2)  # K of (rows, G)
        for reward, column in zip(training_rewards(self.run), columns, strict=True):
            is_judged = ~column.isnan().any(1)  # rows whose completions all were
            if "solution" not in reward.columns or not is_judged.any():
                continue
            counts = Counter(compress(solutions, is_judged.tolist()))
            [(solution, count)] = counts.most_common(1)
            share = count / is_judged.sum().item()
            values = column[is_judged].double()
            low = values.min().item()
            high = values.max().item()
            mean = values.mean().item()
            blind_mean = low + (high - low) * share
            if low < high and mean <= blind_mean:
                yield (
                    f"blind {reward.name}",
                    f"in {BLIND} rollouts reward {reward.name} was {mean:.3g}, and always "
                    f"answering {solution!r:.80} {blind_mean:.3g}; "
                    "are the solutions with the right rows? Else train sft first",
                )

    def untouched(self) -> Iterator[tuple[str, str]]:
        """Name what is trained and never had a gradient: AdamW has no moments of it.

        Experts have a rule of their own, idle_experts.
        """
        names = []
        for name, parameter in self.trainer.trained.named_parameters():
            has_state = parameter in self.optimizer.state
            if parameter.requires_grad and not has_state and ".mlp.experts." not in name:
                names.append(name)
        if not names:
            return
        sentence = f"{len(names)} weights, such as {names[0]}, never had a gradient; freeze them"
        if all("visual" in name for name in names):
            sentence = (
                f"no row had an image that the model saw: {names[0]} and others never had a gradient; "
                "check the image column, or set model.freeze=[vision, merger]"
            )
        yield "untouched", sentence

    def idle_experts(self) -> Iterator[tuple[str, str]]:
        """Name experts that no router has chosen for a while."""
        idle = (torch.tensor(self.idle_steps) >= IDLE).nonzero().tolist()
        if idle:
            layer, expert = idle[0]
            yield (
                "idle",
                f"{len(idle)} experts, such as {expert} of layer {layer}, had no token in {IDLE} "
                "steps, so they learn nothing, which is usual where rows are alike; if all should "
                f"learn, set {self.trainer.stage}.router_aux_loss_coef, for example to 0.001",
            )


def ignores_images(evaluations: list[dict], rows: int, reward: str) -> str | None:
    """Warn if held-out accuracy rises while the benefit of seeing the image shrinks.

    The benefit is the reward with the true image minus the reward with a gray or another image. A
    change counts if it exceeds 1 / sqrt(rows), two standard errors of a fraction of the rows.

    Args:
        evaluations: lines of evaluations.jsonl.
        rows: number of held-out rows.
        reward: name of the first evaluation reward.
    """
    sampled = metric_name(reward, "sampled")
    gray, swapped = (metric_name(reward, way) for way in IMAGE_ABLATIONS)

    def benefit(line: dict) -> float:
        return line[sampled] - max(line[gray], line[swapped])

    if gray not in evaluations[-1]:
        return None
    lines = [line for line in evaluations if gray in line]
    best_line = max(lines, key=benefit)
    last_line = lines[-1]
    rise = last_line[sampled] - best_line[sampled]
    loss = benefit(best_line) - benefit(last_line)
    if min(rise, loss) <= 1 / math.sqrt(rows):
        return None
    return (
        f"held-out {sampled} rose from {best_line[sampled]:.3g} to {last_line[sampled]:.3g}, but "
        f"images now add only {benefit(last_line):.3g} (best: {benefit(best_line):.3g}); the text of "
        "the prompts may reveal the answers, so use rows that cannot be answered without the image"
    )


def accuracy_regressed(evaluations: list[dict], rows: int, reward: str) -> str | None:
    """Warn if greedy answers to held-out rows are worse than before the stage.

    The warning is only for rewards of at most 1, and for a fall of more than 1 / sqrt(rows).

    Args:
        evaluations, rows, reward: see ignores_images.
    """
    greedy = metric_name(reward, "greedy")
    stage = evaluations[-1]["stage"]
    before = math.nan
    for line in evaluations:
        if line["stage"] != stage or line["step"] == 0:
            before = line.get(greedy, math.nan)
    after = evaluations[-1].get(greedy, math.nan)
    if not (after < before - 1 / math.sqrt(rows) and before <= 1):
        return None
    return (
        f"held-out {greedy} fell from {before:.3g} before {stage} to {after:.3g}; lower "
        f"{stage}.learning_rate, or raise {stage}.beta if the stage has one"
    )
