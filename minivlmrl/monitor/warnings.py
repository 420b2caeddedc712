"""Warn if a run does not learn, and name a likely cause and a fix.

A warning appears if its condition holds for 10 optimizer steps in a row, and is not repeated while the condition holds.
Equal rewards for all completions, the most common problem, are reported after the first step.
"""

import json
import math
from collections import deque
from collections.abc import Iterable, Iterator

from torch.optim import Optimizer

from minivlmrl.config.options import RunConfig
from minivlmrl.errors import pluralize
from minivlmrl.run.callbacks import Watcher
from minivlmrl.run.evaluate import lowered_metrics, noise
from minivlmrl.run.metrics import MetricsLog
from minivlmrl.run.trainer_state import TrainerState
from minivlmrl.trainers.base import Rollout, Step, Trainer

TAG_REWARDS = "format", "box_format"  # reward functions that ask for <think> and <answer> tags
WINDOW = 10  # a warning's condition must hold for this many optimizer steps in a row
FALLEN = 0.2  # warn if the mean reward falls by this fraction of the reward range
MEMORISED = 0.3  # warn if the training reward exceeds the held-out reward by this


class TrainingWarnings(Watcher):
    """Check the metrics after each step, and write warnings to warnings.jsonl and the terminal."""

    def on_run_begin(self, config: RunConfig, log: MetricsLog):
        self.log = log

    def on_stage_begin(self, trainer: Trainer, optimizer: Optimizer, state: TrainerState):
        self.rules = WarningRules(trainer, optimizer, next(reversed(state.results.values()), {}))
        if state.step and "warnings" in state.logs:
            self.rules.restore(state.logs["warnings"])

    def on_step_end(self, trainer: Trainer, step: Step, number: int, values: dict):
        if self.log.world.is_main:
            for warning in self.rules.step(values, step.rollout):
                self.log.warn(trainer.stage, number, warning, number + 1)

    def on_evaluation(self, stage: str, steps_done: int, num_rows: int):
        if self.log.world.is_main and steps_done:
            evaluated = self.log.evaluated
            for warning in (*self.rules.memorized(evaluated), *self.rules.unlearned(evaluated, num_rows)):
                self.log.warn(stage, steps_done - 1, warning, steps_done)

    def state_dict(self) -> dict[str, str]:
        return {"warnings": self.rules.state()}


class WarningRules:
    """Derive warnings from metrics in the last 10 steps."""

    def __init__(self, trainer: Trainer, optimizer: Optimizer, evaluated: dict[str, float]):
        self.trainer = trainer
        self.optimizer = optimizer
        self.config = trainer.config
        self.goals = [name for name, weight in self.config.rewards.items() if weight > 0]
        self.evaluated = evaluated  # metrics from the last evaluation before the stage
        self.demonstrations = f"demonstrations first (--stages=[sft,{trainer.stage}])"
        if "sft" in self.config.stage_names:
            self.demonstrations = "more demonstrations (a larger sft.max_steps)"
        self.recent = deque(maxlen=WINDOW)
        self.active: set[str] = set()  # warnings whose condition held at the last step
        self.rollout = None
        self.extremes = []  # lowest and highest total reward so far
        self.best_mean = -math.inf  # highest mean reward over 10 steps so far

    def step(self, metrics: dict[str, float], rollout: Rollout | None = None) -> list[str]:
        """Add a step's metrics, and return new warnings."""
        if rollout is not None and rollout is not self.rollout:
            self.rollout = rollout
            totals = self.trainer.total_rewards(rollout.samples)
            ordered = sorted([*self.extremes, *totals[~totals.isnan()].tolist()])
            self.extremes = ordered[:1] + ordered[-1:]
        self.recent.append(metrics)
        found = dict(self.violated() if len(self.recent) == WINDOW else self.constant_rewards())
        new = [sentence for name, sentence in found.items() if name not in self.active]
        # report "solved" once per stage
        self.active = set(found) | (self.active & {"solved"})
        return new

    def memorized(self, evaluation: dict[str, float]) -> Iterator[str]:
        """Yield a warning if a reward is far higher on training rows than on held-out rows."""
        for name in self.goals if len(self.recent) == WINDOW else ():
            trained = self.mean(f"rewards/{name}/mean")
            # also compare with greedy answers, because training may sample below temperature 1
            keys = (f"eval/{name}_sampled", f"eval/{name}_greedy")
            held_out = [evaluation[key] for key in keys if key in evaluation]
            if held_out and trained - max(held_out) > MEMORISED:
                yield (
                    f"The mean of reward {name} is {trained:.3g} on training rows, but only {max(held_out):.3g} on "
                    "held-out rows. If the held-out rows are not harder, the model memorizes the training rows; "
                    "use more rows, or fewer steps in each stage."
                )

    def unlearned(self, evaluation: dict[str, float], num_rows: int) -> Iterator[str]:
        """Yield a warning if a reward on held-out rows is far lower than before the stage."""
        falls = []
        for name, before in self.evaluated.items():
            after = evaluation.get(name, before)
            is_goal = name.endswith(("_sampled", "_greedy")) and name not in lowered_metrics(self.config)
            if is_goal and 0 <= after <= before <= 1:
                fall = before - after
                if fall > max(FALLEN, noise(before, after, num_rows)):
                    falls.append((fall, f"{name} has fallen from {before:.3g} to {after:.3g}"))
        if falls:
            cure = f"Lower {self.trainer.stage}.learning_rate"
            if self.trainer.stage == "dpo":
                cure += ", or keep the chosen answers likely with --dpo.loss_type=[sigmoid,sft]"
            yield f"{max(falls)[1]} in this stage. {cure}."

    def state(self) -> str:
        """Return recent metrics and active warnings as JSON, to continue with them after a resume."""
        recent = [*self.recent], sorted(self.active), self.best_mean, self.extremes
        return json.dumps([[*self.config.rewards.items()], *recent])

    def restore(self, state: str):
        """Restore the result of state(), unless reward names or weights have changed since."""
        names_and_weights, *values = json.loads(state)
        if names_and_weights != [[*item] for item in self.config.rewards.items()]:
            return
        recent, active, self.best_mean, *_, self.extremes = values
        self.recent.extend(recent)
        self.active.update(active)

    def always(self, name: str, value: float) -> bool:
        """Return whether a metric had the given value in all recent steps."""
        return all(metrics.get(name) == value for metrics in self.recent)

    def mean(self, name: str) -> float:
        """Average a metric over the last 10 steps; return NaN if a step lacks it."""
        return sum(metrics.get(name, math.nan) for metrics in self.recent) / len(self.recent)

    def violated(self) -> Iterator[tuple[str, str]]:
        """Yield (name, text) for all warnings whose condition held in the last 10 steps."""
        stuck = [*self.stuck_rules()]
        reward = self.mean("reward")
        lowest, highest = self.extremes or (0, 0)
        never = [name for name in self.goals if self.always(f"rewards/{name}/mean", 0)]
        if stuck and not never and lowest < highest and reward >= lowest + 0.9 * (highest - lowest):
            sentence = (
                f"The mean reward is {reward:.3g}, close to the highest reward of any completion "
                f"so far ({highest:.3g}). Little is left to learn from these prompts."
            )
            stuck = [("solved", sentence)]
        yield from stuck
        self.best_mean = max(self.best_mean, reward)  # in this order, max ignores a NaN reward
        if lowest < highest and reward <= self.best_mean - FALLEN * (highest - lowest):
            yield (
                "fallen",
                f"The mean reward has fallen from {self.best_mean:.3g} to {reward:.3g}. Lower "
                f"{self.trainer.stage}.learning_rate; the option best_metric keeps the best checkpoint.",
            )
        for name in self.advised(never) if not self.all_equal() else ():
            yield (
                name,
                f"Reward {name} is 0 for all completions. Compare completions.jsonl with what the reward expects. A "
                "model that never writes such an answer needs a better data.prompt_template, or "
                f"{self.demonstrations}.",
            )
        if min(metrics.get("completions/clipped_ratio", 0) for metrics in self.recent) >= 0.9:
            yield (
                "cut",
                "9 of 10 completions are truncated at sampling.max_new_tokens "
                f"({self.config.sampling.max_new_tokens}). Raise this limit, or ask for shorter answers in "
                "data.prompt_template.",
            )
        yield from self.unused_parameters()

    def advised(self, names: Iterable[str]) -> list[str]:
        """Drop the reward `format` if data.answer_format is not tags, because preflight reports this mistake."""
        has_tags = self.config.data.answer_format == "tags"
        return [name for name in names if name != "format" or has_tags]

    def all_equal(self) -> bool:
        """Return whether every reward was equal for all completions in the last 10 steps."""
        stds = [f"rewards/{name}/std" for name in self.config.rewards]
        return bool(stds) and all(self.always(name, 0) for name in stds)

    def constant_rewards(self) -> Iterator[tuple[str, str]]:
        """Warn if all rewards are equal for all completions."""
        if self.all_equal():
            means = {name: self.recent[-1].get(f"rewards/{name}/mean", 0) for name in self.config.rewards}
            texts = [f"{name} is {mean:.3g}" for name, mean in means.items()]
            zero = [name for name, mean in means.items() if mean == 0]
            asks = [name for name in self.advised(zero) if name in TAG_REWARDS]
            hint = f"{asks[0]} asks for <think> and <answer> tags; name them in data.prompt_template. " if asks else ""
            yield (
                "constant",
                f"The rewards are equal for all completions: {' and '.join(texts)}. {hint}Compare completions.jsonl "
                "with what these reward functions expect. A model that never writes such an answer needs "
                f"{self.demonstrations}.",
            )

    def stuck_rules(self) -> Iterator[tuple[str, str]]:
        """Warn if nothing was learned in the last 10 steps: equal rewards, or zero gradients."""
        sampling = self.config.sampling
        if self.all_equal():
            yield from self.constant_rewards()
        elif self.always("frac_reward_zero_std", 1):
            yield (
                "equal",
                "All completions of each group have the same reward, so nothing is learned. If the prompts are too "
                "easy or too hard, use different prompts or raise num_generations. If sampling.temperature "
                f"({sampling.temperature:g}) is low or sampling.top_k ({sampling.top_k}, 0 disables it) is small, the "
                "same text is sampled repeatedly; set them to 1.0 and 0.",
            )
        elif self.always("grad_norm", 0):
            yield (
                "zero",
                "All gradients are zero, so nothing is learned. Either model.freeze freezes the weights that these "
                "rows would train, or the weights have diverged; in that case lower "
                f"{self.trainer.stage}.learning_rate.",
            )

    def unused_parameters(self) -> Iterator[tuple[str, str]]:
        """Warn about trained parameters without any gradient so far."""
        # without a gradient, a parameter has no AdamW state; this is normal for unused experts
        parameters = self.trainer.trained.named_parameters()
        unused = [name for name, p in parameters if p.requires_grad and p not in self.optimizer.state]
        names = [name for name in unused if ".mlp.experts." not in name]
        if names:
            yield (
                "untouched",
                f"{pluralize(len(names), 'trainable parameter')} never had a gradient, for example {names[0]}. Add "
                "them to model.freeze; parameters of the vision tower have no gradient if no row has an image.",
            )
