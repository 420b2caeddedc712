"""What GRPO and PPO share: completions that the policy draws itself, their rewards, their micro-batches."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from minivlmrl.config import GRPOConfig, PPOConfig, RunConfig
from minivlmrl.data.sources import shuffled
from minivlmrl.model.batch import pack
from minivlmrl.model.scalar import ScalarModel, check_scalar_folder, load_scalar_model
from minivlmrl.rollout.advantages import combine
from minivlmrl.rollout.rollout import Rollout, rollout
from minivlmrl.training.algorithms.algorithm import Algorithm, MicroBatch, Step, chunks
from minivlmrl.training.algorithms.reward_model import FOLDER
from minivlmrl.training.reference import Reference


@dataclass
class RolloutBatch(MicroBatch):
    """Completions of a rollout, with what stays fixed while it is trained on."""

    rows: slice | None = None  # which of this rank's completions
    sampler_logps: Tensor | None = None  # (R, T) what the sampler recorded
    fresh: bool = True  # the policy is still the one that sampled
    advantages: Tensor | None = None  # (R,) or (R, T)
    old_per_token_logps: Tensor | None = None  # (R, T)
    ref_per_token_logps: Tensor | None = None  # (R, T)


class Online(Algorithm):
    """Samples completions. What is drawn depends on the recipe alone, not on how many ranks draw it."""

    stage: str  # its name in a recipe
    batch_type = RolloutBatch

    def __init__(self, config: GRPOConfig | PPOConfig, reference_weight: float, *args):
        super().__init__(*args)
        self.config = config
        self.rollouts = 0  # made so far; further ones have other draws
        self.reference = Reference(self.model, config) if reference_weight else None
        self.reward_weights = torch.tensor(list(self.run.rewards.values()))
        self.reward_model: ScalarModel | None = None
        if FOLDER in self.run.rewards:
            path = self.run.reward_model.path or Path(self.run.output_dir) / FOLDER
            self.reward_model = self.load_scalar(path).requires_grad_(False)

    def load_scalar(self, path: str | Path) -> ScalarModel:
        """A reward model or critic that reads what the policy writes."""
        model = load_scalar_model(path, self.model.lm_head.weight.dtype, self.world.device)
        if model.backbone.config.vocab_size != self.model.config.vocab_size:
            raise ValueError(f"{path}: this model has another vocabulary than the policy")
        return model

    def rollout_rows(self, steps: int) -> Iterator[dict[int, int]]:
        """This rank's row numbers of each rollout, by their places in it; a rollout feeds several optimizer steps."""
        size = self.config.prompts_per_step
        places = [i for step in range(steps) for i in self.world.share(range(step * size, (step + 1) * size))]
        for numbers in shuffled(len(self.dataset), size * steps, self.run.seed):
            yield {place: numbers[place] for place in places}

    def sample(self, numbers: dict[int, int]) -> Rollout:
        """A rollout of some rows, given by their places in it."""
        keys = [f"{self.random_key()}/{place}" for place in numbers]
        rows = [self.dataset[number] for number in numbers.values()]
        result = rollout(
            self.model, self.processor, rows, self.config.num_generations, self.run.sampling,
            list(self.run.rewards), keys, self.reward_model,
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
        config, G, device = self.config, self.config.num_generations, self.world.device
        lengths = torch.tensor([len(c.ids) for group in result.completions for c in group])
        keep = torch.ones(len(lengths), dtype=torch.bool) if keep is None else keep
        prompts_per_step, packed = len(result.prompts) // steps, []
        for step in range(steps):
            groups = range(step * prompts_per_step, (step + 1) * prompts_per_step)
            rows = slice(groups.start * G, groups.stop * G)
            counts = self.world.sum(len(groups) * G, int((lengths * keep)[rows].sum()))
            batches = []
            for (some,) in chunks(config.micro_batch_size, groups):
                rows = slice(some.start * G, some.stop * G)
                completions = [result.completions[i] for i in some]
                ids = [[c.ids for c in group] for group in completions]
                group = pack([result.prompts[i] for i in some], ids, self.model.config, device)
                mask = group.completion_mask * keep[rows].to(device)[:, None]
                logps = torch.cat([c.logps for group in completions for c in group]).to(device)
                batches.append(self.batch_type(group, mask, *counts, rows=rows, sampler_logps=group.pad(logps)))
            packed.append(batches)
        return packed

    def epochs(self, steps: list[list[RolloutBatch]], metrics: dict[str, float], times: int) -> Iterator[Step]:
        """The optimizer steps of a rollout, gone through several times."""
        for _ in range(times):
            for batches in steps:
                yield Step(batches, metrics)
                if self.reference is not None:
                    self.reference.after_step()
                for batch in (batch for batches in steps for batch in batches):
                    batch.fresh = False  # from here on the policy is no longer the one that sampled

    def mismatch(self, batch: RolloutBatch, logps: Tensor) -> dict[str, Tensor]:
        """How far the sampler's log-probabilities are from the trainer's, while both are of the same policy."""
        if not batch.fresh:
            return {}
        return {"rollout/logp_mismatch": (batch.group.pad(logps.detach()) - batch.sampler_logps).abs().max()}

    def figures(self, result: Rollout, combined: Tensor) -> dict[str, float]:
        """What there is to report of all ranks' completions."""
        each = self.world.gather(result.rewards.to(self.world.device)).cpu()
        lengths = [len(c.ids) for group in result.completions for c in group]
        cut = sum(not c.stopped for group in result.completions for c in group)
        length, cut, count = self.world.sum(sum(lengths), cut, len(lengths))
        everyones = self.world.gather(combined.to(self.world.device)).cpu()
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
