"""The book's GRPO as a stage of a recipe: its parts, rewards and logs are those of the recipe."""

from dataclasses import dataclass
from itertools import chain

from torch import Tensor

from minivlmrl.config.options import GRPOOptions
from minivlmrl.distributed.micro_batching import pieces
from minivlmrl.generation.environments import (
    check_environment,
    pack_rollout,
    packed_length,
    samples_trajectories,
)
from minivlmrl.generation.sampler import find_engine, make_sampler
from minivlmrl.losses.advantages import group_std, nanstd
from minivlmrl.model.families.routes import join_routes, routes_of
from minivlmrl.model.packing import MicroBatch
from minivlmrl.model.trainable import trained_parameters
from minivlmrl.rewards.registry import RewardLog, recipe_columns, training_rewards
from minivlmrl.trainers.base import Algorithm
from minivlmrl.trainers.grpo import GRPO, Rollout
from minivlmrl.trainers.reward_model import FOLDER, RewardModelScores, check_reward_model


@dataclass
class StageBatch(MicroBatch):
    sampler_routes: Tensor | None = None  # (M,), see model/families/routes.py


class GRPOStage(Algorithm, GRPO):
    """GRPO with the options that the book has; `Family` and PPO are made of it."""

    stage = "grpo"
    config_type = GRPOOptions
    batch_type = StageBatch
    compares_groups = True  # it logs how much the rewards of a group differ
    pack = staticmethod(pack_rollout)

    @classmethod
    def check(cls, run):
        if run.sampling.temperature == 0:
            raise ValueError("sampling.temperature is 0: all completions of a group would be equal")
        if not run.rewards:
            raise ValueError(f"rewards: {cls.stage} needs at least one")
        check_environment(run)
        find_engine(run.sampling).check(run)
        if FOLDER in run.rewards:
            check_reward_model(run, cls.stage)
        if samples_trajectories(run.sampling) and FOLDER in run.rewards:
            raise ValueError("rewards: reward_model reads no trajectories; leave it out")

    @staticmethod
    def has_reference(config) -> bool:
        return bool(config.beta)

    def __init__(self, run, model, processor, world, steps_done=0):
        Algorithm.__init__(self, run, model, processor, world, steps_done)
        has_reward_model = FOLDER in run.rewards
        # a reward model reads prompts with a tower of its own, and so does a reference of a folder
        frozen = not trained_parameters(model.visual) and run.reference.path is None
        sample = make_sampler(
            model,
            processor,
            run.sampling,
            world,
            run.rollout.gather_weights,
            keeps_vision=frozen and not has_reward_model,
        )
        self.reward_log = RewardLog(steps_done, self.config.max_steps)
        rewards = {}
        for reward in training_rewards(run):
            rewards[reward.on(world, self.reward_log)] = run.rewards[reward.name]
        GRPO.__init__(self, model, processor, sample, rewards, self.config, world, self.reference)
        self.steps_per_rollout = self.config.steps_per_generation
        self.reward_model = None
        if has_reward_model:
            self.reward_model = RewardModelScores(run, model, processor, world)

    def after_step(self, steps: int):
        super().after_step(steps)
        self.reward_log.trainer_state.global_step = steps

    def roll_out(self, rows) -> Rollout:
        rollout = super().roll_out(rows)
        self.sample.prove(rollout, self.run.rollout.max_logp_mismatch)
        return rollout

    def columns(self, rows, prompts, completions) -> dict[str, list]:
        columns = recipe_columns(rows, prompts, completions, self.processor)
        if self.reward_model is not None:
            columns["reward_model_scores"] = self.reward_model(prompts, completions)
        return columns

    def metrics(self, rollout: Rollout, rewards: Tensor, total: Tensor) -> dict[str, float]:
        """Say in TRL's words what all ranks earned: (n, K) rewards, (n,) their sums."""
        if rewards.isnan().all():
            names = ", ".join(self.run.rewards)
            raise ValueError(f"rewards: {names} judged none of {len(rewards)} completions")
        # of float64, whose sums do not depend on the order of the ranks
        rewards = rewards.double()
        total = total.double()
        metrics = super().metrics(rollout, rewards, total)
        for name, values in zip(self.run.rewards, rewards.unbind(1), strict=True):
            metrics[f"rewards/{name}/mean"] = values.nanmean().item()
            metrics[f"rewards/{name}/std"] = nanstd(values).item()
        flat = chain(*rollout.completions)
        local = [(int(c.written.sum()), c.stopped, c.calls, len(c.turns)) for c in flat]
        drawn = list(chain(*self.world.gather_objects(local)))
        lengths = [length for length, *_ in drawn]
        terminated = [length for length, stopped, *_ in drawn if stopped]
        metrics |= length_metrics(lengths, terminated)
        if self.run.sampling.environment:
            metrics |= tool_metrics([calls for _, _, calls, _ in drawn])
        num_turns = sum(turns for *_, turns in drawn)
        if num_turns:
            metrics["mean_turns"] = num_turns / len(drawn)
            metrics["completions/mean_turn_length"] = sum(lengths) / num_turns
        if self.compares_groups:
            std = group_std(total, self.config.num_generations)
            metrics["reward_std"] = std.nanmean().item()
            metrics["frac_reward_zero_std"] = (std < 1e-8).float().mean().item()
        return metrics | self.logged_metrics(metrics)

    def logged_metrics(self, metrics: dict[str, float]) -> dict[str, float]:
        """Average what rewards have logged of this rollout on all ranks.

        Raises:
            ValueError: a name is that of one of the rollout's own metrics.
        """
        of_ranks = self.world.gather_objects(self.reward_log.metrics)
        self.reward_log.metrics = {}
        means = {}
        for name in sorted(set(chain(*of_ranks))):
            if name in metrics:
                raise ValueError(f"log_metric: the run logs {name!r} itself; take another name")
            values = list(chain(*(logged.get(name, ()) for logged in of_ranks)))
            means[name] = sum(values) / len(values)
        return means

    def split(self, rollout: Rollout, part: range) -> list[list[int]]:
        config = self.config
        max_tokens = config.max_tokens_per_micro_batch
        if max_tokens is None:
            return super().split(rollout, part)
        lengths = []
        for i in part:
            completion_lengths = [packed_length(c) for c in rollout.completions[i]]
            lengths.append((len(rollout.prompts[i].input_ids), completion_lengths))
        micro_batches = pieces(lengths, config.micro_batch_size, max_tokens, self.world)
        return [[part[i] * config.num_generations + j for i, j in rows] for rows in micro_batches]

    def micro_batches(
        self, rollout: Rollout, part: range, advantages: Tensor | None = None
    ) -> list[StageBatch]:
        batches = super().micro_batches(rollout, part, advantages)
        completions = list(chain(*rollout.completions))
        for batch in batches:
            rows = batch.completion_index.tolist()
            batch.sampler_routes = join_routes([completions[row] for row in rows])
        return batches

    def diagnose(self, batch, logps: Tensor, entropies: Tensor) -> dict[str, Tensor]:
        """Measure by how many nats trainer and sampler differ about a token, too."""
        old_logps = batch.old_per_token_logps
        if old_logps is None:
            old_logps = batch.group.pad(logps.detach())
        mask = batch.loss_mask
        mismatch = ((old_logps - batch.sampler_logps) * batch.group.completion_mask).abs()
        mean_square = (mismatch.square() * mask).sum() / mask.sum().clamp(min=1)
        return super().diagnose(batch, logps, entropies) | {
            "rollout/logp_mismatch": mismatch.max(),
            "rollout/logp_mismatch_rms": mean_square.sqrt(),
        }

    def router_metrics(self, batch, chosen: dict) -> dict[str, Tensor]:
        """Count the tokens, too, that have other experts in training than in sampling."""
        metrics = super().router_metrics(batch, chosen)
        if batch.sampler_routes is not None:
            select = batch.group.layout.predict_index
            routes = routes_of(chosen, self.policy.model, select)
            differs = routes != batch.sampler_routes.to(routes.device)
            metrics["rollout/route_mismatch"] = batch.mean(differs.float())
        return metrics


def length_metrics(lengths: list[int], terminated: list[int]) -> dict[str, float]:
    """Describe the lengths of all completions, and of those that were not cut."""
    metrics = {}
    for name, values in (("length", lengths), ("terminated_length", terminated or [0])):
        metrics[f"completions/mean_{name}"] = sum(values) / len(values)
        metrics[f"completions/min_{name}"] = min(values)
        metrics[f"completions/max_{name}"] = max(values)
    metrics["completions/clipped_ratio"] = 1 - len(terminated) / len(lengths)
    return metrics


def tool_metrics(calls: list[tuple[int, int, bool]]) -> dict[str, float]:
    """Describe the calls of tools: of each completion how many were made, failed, and if cut."""
    made, failed, cut = (sum(values) for values in zip(*calls, strict=True))
    return {
        "tools/call_frequency": made / len(calls),
        "tools/answered_frequency": (made - failed) / len(calls),
        "tools/failure_frequency": failed / max(made, 1),
        "tools/cut_ratio": cut / len(calls),
    }
