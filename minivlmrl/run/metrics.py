"""Metrics of a run as it goes: metrics.jsonl (the same bytes for the same seed), timings.jsonl, a progress bar."""

import json
import math
import time
from contextlib import AbstractContextManager
from pathlib import Path

from torch import Tensor
from tqdm import tqdm

from minivlmrl.advantages import group_std
from minivlmrl.scale.ranks import World

FILES = METRICS, TIMINGS = "metrics.jsonl", "timings.jsonl"
OVER_STEP = {"rollout/logp_mismatch": max, "loss": sum}  # of micro-batches; of all other metrics the mean counts


class MetricsLog(AbstractContextManager):
    """Writes one line per optimizer step, on the first rank; `written` is what the files of a resumed run had.

    `completions`, a CompletionsLog, also gets each step.
    """

    def __init__(self, folder: Path, world: World, written: dict[str, str] | None = None, completions=None):
        self.completions = completions
        self.files = {name: (folder / name).open("w+") for name in FILES if world.is_main}
        self.bar = None
        for name, file in self.files.items():
            print((written or {}).get(name, ""), file=file, end="", flush=True)

    def __exit__(self, *_error):
        """End the line of the bar: what ended the run is printed on a line of its own."""
        if self.bar is not None:
            self.bar.close()
        for file in self.files.values():
            file.close()

    def stage(self, name: str, steps: int, done: int = 0, seconds: float = 0.0):
        """Begin a stage: a new progress bar. `done` steps took `seconds` before the run was resumed."""
        self.name = name
        options = {"disable": not self.files, "mininterval": 0.5, "dynamic_ncols": True}
        self.bar = tqdm(total=steps, initial=done, desc=name, **options)
        self.begin = time.perf_counter() - seconds

    @property
    def seconds(self) -> float:
        """Since the stage began."""
        return time.perf_counter() - self.begin

    def written(self) -> dict[str, str]:
        """What the files hold, for the state of the run."""
        return {name: Path(file.name).read_text() for name, file in self.files.items()}

    def step(self, number: int, metrics: dict[str, float], algorithm=None, step=None):
        """Record one optimizer step."""
        self.bar.update()
        if self.completions is not None:
            self.completions.step(algorithm, step, number)
        if not self.files:
            return
        line = {"stage": self.name, "step": number}
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}  # JSON has no NaN
        print(json.dumps(line | finite), file=self.files[METRICS], flush=True)
        print(json.dumps(line | {"seconds": self.seconds}), file=self.files[TIMINGS], flush=True)
        shown = [name for name in ("reward", "rewards/accuracy", "kl", "loss") if name in metrics]
        self.bar.set_postfix({name.rpartition("/")[2]: f"{metrics[name]:.3f}" for name in shown[:3]}, refresh=False)

    def end_stage(self) -> float:
        """Close the bar; seconds since the stage began."""
        self.bar.close()
        return self.seconds


def merge(parts: list[tuple[dict[str, float], float]]) -> tuple[dict[str, float], float]:
    """Combine (metrics, tokens or pairs that they are means over) of micro-batches or ranks, and add up the latter."""
    total, merged = sum(weight for _, weight in parts), {}
    for name in parts[0][0]:
        if name in OVER_STEP:
            merged[name] = OVER_STEP[name](metrics[name] for metrics, _ in parts)
        else:
            merged[name] = sum(metrics[name] * weight for metrics, weight in parts) / (total or 1)
    return merged, total


def rollout_metrics(algorithm, rollout, rewards: Tensor, total: Tensor) -> dict[str, float]:
    """What a rollout of all ranks earned, (n, K) rewards and (n,) their weighted sums, and how long it is."""
    drawn = [completion for group in rollout.completions for completion in group]
    lengths, cut = sum(len(c.ids) for c in drawn), sum(not c.stopped for c in drawn)
    length, cut, count = algorithm.world.sum(lengths, cut, len(drawn))
    if rewards.isnan().all():
        names = ", ".join(algorithm.run.rewards)
        raise ValueError(f"rewards: {names} judged none of {len(rewards)} completions: there is nothing to learn from")
    rewards, total = rewards.double(), total.double()  # sums that do not depend on the order of the ranks
    metrics = {"reward": total.nanmean().item()}
    metrics |= {f"rewards/{name}": rewards[:, k].nanmean().item() for k, name in enumerate(algorithm.run.rewards)}
    metrics |= {"completions/mean_length": length / count, "completions/clipped_ratio": cut / count}
    if algorithm.stage == "grpo":  # PPO has no groups
        std = group_std(total, algorithm.config.num_generations)
        metrics["reward_std"] = std.nanmean().item()
        metrics["frac_reward_zero_std"] = (std < 1e-8).float().mean().item()  # groups that teach nothing
    return metrics


def policy_metrics(batch, logps: Tensor, entropies: Tensor, fresh: bool) -> dict[str, Tensor]:
    """Entropy; and while the policy is fresh, the one that sampled: do sampler and trainer score a token alike?"""
    metrics = {"entropy": batch.mean(entropies)}
    if fresh:
        metrics["rollout/logp_mismatch"] = (batch.group.pad(logps.detach()) - batch.sampler_logps).abs().max()
    return metrics
