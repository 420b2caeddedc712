"""GRPO from rows to a loss, in the order in which it happens (DeepSeekMath, arXiv 2402.03300):

    rows -> prompts -> G completions each -> rewards (n, K) -> advantages (n,) -> batches -> loss

B prompts of this rank, n = B * G completions, groups in order; R completions, T tokens of the
longest in a micro-batch. Left out: the paper's outer loop; algorithms/grpo_family.py has options.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor, nn

from minivlmrl.advantages import combine, group_advantages
from minivlmrl.batch import GroupBatch, MicroBatch, Step, pack
from minivlmrl.generate import Completion, sample_completions
from minivlmrl.logprobs import per_token_logps
from minivlmrl.losses import Counts, PolicyLoss, grpo_loss
from minivlmrl.rewards import judge
from minivlmrl.rows import Prompt, Row


@dataclass
class GRPOConfig(PolicyLoss):
    """Options of GRPO: those of its loss, and how a rollout is made and used."""

    num_generations: Annotated[int, ">= 2"] = 8  # G, completions of each prompt: the group
    steps_per_generation: Annotated[int, ">= 1"] = 1  # optimizer steps with prompts of one rollout
    num_iterations: Annotated[int, ">= 1"] = 1  # passes over each rollout
    scale_rewards: Literal["group", "batch", "none"] = "group"  # see group_advantages


@dataclass
class Rollout:
    """Completions of this rank's prompts and what they earned."""

    rows: Sequence[Row]  # B
    prompts: list[Prompt]
    completions: list[list[Completion]]  # B lists of G
    rewards: Tensor  # (n, K) float32 on the CPU, NaN where a reward could not judge


class Algorithm:
    """What train.py needs: steps(batches) yields Steps, loss(micro_batch) its share of the loss."""

    stage: str  # its name, and that of its section in a recipe
    needs = "prompts"  # what its rows must have, see run/batches.py
    steps_per_rollout = 1  # optimizer steps with prompts of one draw of rows
    reference = None  # see algorithms/reference.py

    def __init__(self, run, model: nn.Module, processor, world):
        from minivlmrl.adapters.trained import select_trained

        self.run, self.config, self.world = run, getattr(run, self.stage), world
        self.policy, self.processor, self.trained, self.sampler = model, processor, model, model
        select_trained(model, run.model.freeze)  # also what an earlier stage has frozen

    @staticmethod
    def check(run):
        """Refuse a recipe (ValueError) before anything is loaded."""

    def begin(self, batches, held_out):
        """Prepare the first step; a resumed run has this in its state."""

    def after_step(self, steps: int):
        """Do what follows an update; `steps` of this stage are done."""
        if self.reference is not None:
            self.reference.after_step(steps)

    def modules(self) -> dict[str, nn.Module]:
        """All that has weights which a resumed run needs; state_dict() is the rest."""
        reference = {} if self.reference is None else {"reference": self.reference.model}
        return {"policy": self.policy} | reference

    def state_dict(self) -> dict[str, Tensor]:
        """What else a state keeps, the same on all ranks."""
        return {}

    def load_state_dict(self, state: dict[str, Tensor]):
        """Take what state_dict gave, maybe on another number of ranks."""

    def save(self, folder):
        """Write what was trained into the run's folder (a Path); all ranks call it."""
        from minivlmrl.scale.checkpoint import save_model

        save_model(folder / "checkpoint", self.policy, self.processor, self.world)

    def evaluate(self, rows) -> dict[str, float]:
        """What it can tell of held-out rows besides answers: `pairs` or `loss`."""
        return {}


class GRPO(Algorithm):
    """Group relative policy optimization; with sequence-level ratios it is GSPO."""

    stage, batch_type = "grpo", MicroBatch

    @staticmethod
    def check(run):
        from minivlmrl.algorithms.reference import check_online

        check_online("grpo", run, run.grpo.beta)

    def __init__(self, *args):
        super().__init__(*args)
        from minivlmrl.algorithms.reference import Reference
        from minivlmrl.algorithms.reward_model_scores import build_reward_model

        self.steps_per_rollout = self.config.steps_per_generation
        self.on_policy = self.config.num_iterations == self.steps_per_rollout == 1
        self.reward_weights = torch.tensor(list(self.run.rewards.values()))  # (K,)
        self.reference = Reference(self.policy, self.config) if self.config.beta else None
        self.reward_model = build_reward_model(self.run, self.policy, self.world)

    def steps(self, batches: Iterator[Sequence[Row]]) -> Iterator[Step]:
        while True:
            rollout = self.roll_out(batches)
            steps = self.pack(rollout)
            metrics = self.compute_advantages(rollout, steps)
            last = self.config.num_iterations * len(steps) - 1
            for number in range(last + 1):
                self.fresh = number == 0  # the policy is the one that sampled
                yield Step(steps[number % len(steps)], metrics, number == last, rollout)

    def roll_out(self, batches: Iterator[Sequence[Row]]) -> Rollout:
        """Draw rows, sample G completions of each and let the rewards judge them."""
        from minivlmrl.sampling.kept_prefill import keep_prefill

        rows, run = next(batches), self.run
        prompts = [row.prompt(self.processor) for row in rows]
        self.sampler = keep_prefill(self, prompts)  # training may go on from the same prompts
        completions = sample_completions(
            self.sampler, self.processor, prompts, self.config.num_generations, run.sampling,
            [row.key for row in rows], self.world, run.rollout.gather_weights,
        )  # fmt: skip
        rewards = judge(run.rewards, rows, prompts, completions, self.processor, self.reward_model)
        return Rollout(rows, prompts, completions, rewards)

    @torch.no_grad()
    def pack(self, rollout: Rollout) -> list[list[MicroBatch]]:
        """For each optimizer step its micro-batches, with what stays fixed while it is used."""
        count, size = len(rollout.prompts), len(rollout.prompts) // self.steps_per_rollout
        return [self.pack_step(rollout, range(i, i + size)) for i in range(0, count, size)]

    def pack_step(self, rollout: Rollout, part: range) -> list[MicroBatch]:
        """The micro-batches of one optimizer step: the prompts with these indices."""
        from minivlmrl.sampling.pieces import row_pieces

        device = self.world.device
        lengths = [len(c.ids) for i in part for c in rollout.completions[i]]
        totals = self.world.sum(len(lengths), sum(lengths))
        counts, batches = Counts(*totals, self.run.sampling.max_new_tokens), []
        for piece, rows in row_pieces(rollout, part, self.config, self.world):
            ids = [[rollout.completions[i][j].ids for j in own] for i, own in piece]
            drawn = torch.cat([rollout.completions[i][j].logps for i, own in piece for j in own])
            group = pack([rollout.prompts[i] for i, _ in piece], ids, self.policy.config, device)
            batch = self.batch_type(group, group.completion_mask, counts, rows)
            batch.sampler_logps = group.pad(drawn.to(device))
            self.score(batch)
            batches.append(batch)
        return batches

    def score(self, batch: MicroBatch):
        """Add the log-probabilities of the policy that sampled and of the reference."""
        if not self.on_policy:
            batch.old_per_token_logps = batch.group.pad(self.logps(batch.group)[0])
        if self.reference is not None:
            temperature = self.run.sampling.temperature
            batch.ref_per_token_logps = self.reference.logps(batch.group, temperature)

    def compute_advantages(self, rollout: Rollout, steps: list) -> dict[str, float]:
        """Give the micro-batches their advantages; returns metrics of all ranks' completions."""
        from minivlmrl.run.metrics import rollout_metrics

        rewards = self.world.all_gather(rollout.rewards)  # (all n, K)
        total, config = combine(rewards, self.reward_weights), self.config  # (all n,)
        self.assign(group_advantages(total, config.num_generations, config.scale_rewards), steps)
        return rollout_metrics(self, rollout, rewards, total)

    def assign(self, advantages: Tensor, steps: list[list[MicroBatch]]):
        """Give each micro-batch its part of (all n,) advantages."""
        for batch in (batch for micro_batches in steps for batch in micro_batches):
            batch.advantages = self.world.local(advantages)[batch.rows].to(self.world.device)

    def logps(self, group: GroupBatch) -> tuple[Tensor, Tensor]:
        """(M,) log-probabilities and entropies, at the temperature of the draws."""
        return per_token_logps(self.sampler, group, self.run.sampling.temperature)

    def loss(self, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        from minivlmrl.run.metrics import policy_metrics

        logps, entropies = self.logps(batch.group)
        loss, metrics = grpo_loss(
            batch.group.pad(logps), batch.advantages, batch.loss_mask, self.config,
            old_per_token_logps=batch.old_per_token_logps,
            ref_per_token_logps=batch.ref_per_token_logps, counts=batch.counts,
        )  # fmt: skip
        return loss, metrics | policy_metrics(batch, logps, entropies, self.fresh)
