"""What GRPO and PPO share: completions that the policy draws itself, their rewards, their micro-batches."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from minivlmrl.advantages import combine
from minivlmrl.algorithms.algorithm import Algorithm, MicroBatch, Step
from minivlmrl.algorithms.buffer import Buffer, Saved
from minivlmrl.algorithms.reference import Reference
from minivlmrl.algorithms.reward_model import FOLDER
from minivlmrl.algorithms.value_model import ScalarModel, check_scalar_folder, load_scalar_model
from minivlmrl.batch import pack
from minivlmrl.run.batches import shuffled
from minivlmrl.run.config import GRPOConfig, PPOConfig, RunConfig
from minivlmrl.run.evaluate import Rollout, rollout
from minivlmrl.scale.sharding import is_sharded


@dataclass
class RolloutBatch(MicroBatch):
    """Completions of a rollout, with what stays fixed while it is trained on."""

    rows: slice | None = None  # which of this rank's completions; None: no one's, it is idle
    sampler_logps: Tensor | None = None  # (R, T) what the sampler recorded
    fresh: bool = True  # the policy is still the one that sampled
    advantages: Tensor | None = None  # (R,) or (R, T)
    old_per_token_logps: Tensor | None = None  # (R, T)
    ref_per_token_logps: Tensor | None = None  # (R, T)

    def part(self, per_row: Tensor) -> Tensor:
        """What belongs to this micro-batch of a (n,) tensor over the rank's completions."""
        return per_row.new_zeros(1) if self.idle else per_row[self.rows]


class Online(Algorithm):
    """Samples completions. What is drawn depends on the recipe alone, not on how many ranks draw it.

    Args:
        steps: optimizer steps whose prompts make one rollout.
        times: how often each rollout is gone through.
    """

    batch_type = RolloutBatch

    def __init__(self, config: GRPOConfig | PPOConfig, reference_weight: float, steps: int, times: int, *args):
        super().__init__(*args)
        self.config, self.steps, self.times = config, steps, times
        self.buffer: Buffer | None = None  # the rollout that is being trained on
        self.rollouts = 0  # made so far; further ones have other draws
        self.reference = Reference(self.model, config) if reference_weight else None
        self.reward_weights = torch.tensor(list(self.run.rewards.values()))
        self.reward_model: ScalarModel | None = None
        if FOLDER in self.run.rewards:
            path = self.run.reward_model.path or Path(self.run.output_dir) / FOLDER
            self.reward_model = self.load_scalar(path).requires_grad_(False)

    def load_scalar(self, path: str | Path) -> ScalarModel:
        """A reward model or critic that reads what the policy writes."""
        sharding = self.model.sharding if is_sharded(self.model) else None
        model = load_scalar_model(path, self.model.lm_head.weight.dtype, self.world.device, sharding)
        if model.backbone.config.vocab_size != self.model.config.vocab_size:
            raise ValueError(f"{path}: this model has another vocabulary than the policy")
        return model

    def batches(self) -> Iterator[Step]:
        stream = self.rollout_rows()
        while True:
            if self.buffer is None:
                self.buffer = self.make(stream)
            yield from self.buffer.remaining()
            self.buffer = None

    def make(self, stream: Iterator[dict[int, int]]) -> Buffer:
        """A rollout with all that is computed before it is trained on."""
        raise NotImplementedError

    def after_step(self):
        super().after_step()
        self.buffer.after_step()

    def state_dict(self) -> dict:
        buffer = None if self.buffer is None else self.buffer.state_dict()
        return super().state_dict() | {"rollouts": self.rollouts, "buffer": buffer}

    def load_state_dict(self, parts: list[dict]):
        super().load_state_dict(parts)
        self.rollouts = parts[0]["rollouts"]
        if parts[0]["buffer"] is None:
            return
        saved = Saved.share([part["buffer"] for part in parts], self.world)
        prompts_in_all = sum(len(part["buffer"]["groups"]) for part in parts)
        now = self.steps, self.times, self.steps * self.config.prompts_per_step
        if (len(saved.values), saved.times, prompts_in_all) != now:
            raise ValueError(f"resume: the state is in the middle of a rollout; keep how {self.stage} goes through it")
        places, numbers = ([group[name] for group in saved.groups] for name in ("place", "row"))
        prompts = [self.dataset[number].prompt(self.processor) for number in numbers]
        result = Rollout(prompts, saved.completions, [], torch.zeros(0), [], places, numbers)
        steps = self.micro_batches(result, self.steps, saved.learnt)
        saved.fill(steps)
        self.buffer = Buffer(result, steps, saved.metrics, self.times, saved.done)

    def rollout_rows(self) -> Iterator[dict[int, int]]:
        """This rank's row numbers of each rollout, by their places in it; a rollout feeds several optimizer steps."""
        size, steps = self.config.prompts_per_step, self.steps
        places = [i for step in range(steps) for i in self.world.share(range(step * size, (step + 1) * size))]
        for numbers in shuffled(len(self.dataset), size * steps, self.run.seed, self.drawn):
            self.drawn += size * steps
            yield {place: numbers[place] for place in places}

    def sample(self, numbers: dict[int, int]) -> Rollout:
        """A rollout of some rows, given by their places in it."""
        keys = [f"{self.random_key()}/{place}" for place in numbers]
        rows = [self.dataset[number] for number in numbers.values()]
        result = rollout(
            self.model, self.processor, rows, self.config.num_generations, self.run.sampling,
            list(self.run.rewards), keys, self.reward_model,
            None if self.run.rollout.gather_weights else self.world,
        )  # fmt: skip
        result.places, result.rows = list(numbers), list(numbers.values())
        self.rollouts += 1
        return result

    def random_key(self) -> str:
        """What all randomness until the next rollout depends on."""
        return f"{self.run.seed}/{self.stage}/{self.rollouts}"

    def combined(self, result: Rollout) -> Tensor:
        """(n,) the weighted sum of a rollout's rewards."""
        return combine(result.rewards, self.reward_weights)

    def micro_batches(self, result: Rollout, steps: int, keep: Tensor | None = None) -> list[list[RolloutBatch]]:
        """Pack a rollout: for each of its optimizer steps the micro-batches.

        Args:
            keep: (n,) bool, False for completions that are not learnt from; None: all are.
        """
        config, G, packed = self.config, self.config.num_generations, []
        lengths = torch.tensor([len(c.ids) for group in result.completions for c in group], dtype=torch.long)
        keep = torch.ones(len(lengths), dtype=torch.bool) if keep is None else keep
        step_of = [place // config.prompts_per_step for place in result.places]
        for step in range(steps):
            groups = range(step_of.index(step), step_of.index(step) + step_of.count(step)) if step in step_of else ()
            learnt = sum(int((lengths * keep)[i * G : (i + 1) * G].sum()) for i in groups)
            counts = self.world.sum(len(groups) * G, learnt)
            pieces = self.in_step(config.micro_batch_size, groups, None)
            packed.append([self.spare_batch(counts) if idle else self.batch(result, some, keep, counts)
                           for some, idle in pieces])  # fmt: skip
        return packed

    def batch(self, result: Rollout, groups: range, keep: Tensor, counts: Sequence[float]) -> RolloutBatch:
        """Pack some groups of a rollout, given by their numbers in it."""
        G, device = self.config.num_generations, self.world.device
        rows = slice(groups.start * G, groups.stop * G)
        completions = [result.completions[i] for i in groups]
        ids = [[c.ids for c in group] for group in completions]
        group = pack([result.prompts[i] for i in groups], ids, self.model.config, device)
        mask = group.completion_mask * keep[rows].to(device)[:, None]
        logps = torch.cat([c.logps for group in completions for c in group]).to(device)
        return self.batch_type(group, mask, *counts, rows=rows, sampler_logps=group.pad(logps))

    def spare_batch(self, counts: Sequence[float]) -> RolloutBatch:
        group = pack([self.spare_prompt()], [[self.spare_completion()]], self.model.config, self.world.device)
        zeros = torch.zeros_like(group.completion_mask)  # (1, 1)
        return self.batch_type(group, zeros, *counts, idle=True, sampler_logps=zeros)

    def mismatch(self, batch: RolloutBatch, logps: Tensor) -> dict[str, Tensor]:
        """How far the sampler's log-probabilities are from the trainer's, while both are of the same policy."""
        if not batch.fresh:
            return {}
        return {"rollout/logp_mismatch": (batch.group.pad(logps.detach()) - batch.sampler_logps).abs().max()}

    def everyones(self, result: Rollout, per_row: Tensor) -> Tensor:
        """(n, ...) over this rank's completions -> the same over all ranks', in the order of the places."""
        groups = per_row.reshape(len(result.places), -1, *per_row.shape[1:]) if len(per_row) else per_row
        parts = [part for part in self.world.gather_objects((result.places, groups)) if part[0]]
        order = torch.tensor([place for places, _ in parts for place in places]).argsort()
        return torch.cat([groups for _, groups in parts])[order].flatten(0, 1)

    def mine(self, result: Rollout, per_row: Tensor) -> Tensor:
        """What everyones began with."""
        groups = per_row.unflatten(0, (-1, self.config.num_generations))
        return groups[torch.tensor(result.places, dtype=torch.long)].flatten(0, 1)

    def figures(self, result: Rollout, combined: Tensor) -> dict[str, float]:
        """What there is to report of all ranks' completions."""
        each, everyones = self.everyones(result, result.rewards), self.everyones(result, combined)
        lengths = [len(c.ids) for group in result.completions for c in group]
        cut = sum(not c.stopped for group in result.completions for c in group)
        length, cut, count = self.world.sum(sum(lengths), cut, len(lengths))
        return {
            "reward": everyones.nanmean().item(),
            **{f"rewards/{name}": each[:, k].nanmean().item() for k, name in enumerate(self.run.rewards)},
            "completions/mean_length": length / count,
            "completions/clipped_ratio": cut / count,
        }


def check_online(stage: str, run: RunConfig, reference_weight: float):
    """Refuse recipes that cannot sample, have nothing to judge with, or set what has no effect."""
    if run.sampling.temperature == 0:
        raise ValueError("sampling.temperature is 0: all completions of a group would be equal; use more than 0")
    if not run.rewards:
        raise ValueError(f"rewards: {stage} needs at least one")
    if FOLDER in run.rewards and run.reward_model.path is not None:
        check_scalar_folder(run.reward_model.path)
    elif FOLDER in run.rewards and FOLDER not in run.stages[: run.stages.index(stage)]:
        raise ValueError(
            f"rewards.reward_model: there is no reward model for {stage}; set reward_model.path to the folder of one, "
            "or put reward_model before it in stages"
        )
    for name in ("sync_ref_model", "num_shared_layers"):
        if getattr(getattr(run, stage), name) and not reference_weight:
            raise ValueError(f"{stage}.{name} needs a reference model; the weight of the KL to it is 0")
