"""GRPO from rows to a loss, in the order in which it happens (DeepSeekMath, arXiv 2402.03300):

    rows -> prompts -> G completions each -> rewards (n, K) -> advantages (n,) -> batches -> loss

B prompts of this rank, n = B * G completions, groups in order; R completions, T tokens of the
longest in a micro-batch. The paper's outer loop (a new reference every few hundred steps) is left
out; RLOO, DAPO's sampling and corrections are in trainers/grpo_family.py.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from minivlmrl.config.options import GRPOOptions
from minivlmrl.data.rows import Completion, Processor, Prompt, Row
from minivlmrl.generation.generate import Sampler
from minivlmrl.losses.advantages import combine, group_advantages
from minivlmrl.losses.grpo import Counts, grpo_loss
from minivlmrl.model.logprobs import per_token_logps
from minivlmrl.model.packing import GroupBatch, MicroBatch, Step, pack
from minivlmrl.rewards.text import ask_rewards, reward_columns


@dataclass
class Rollout:
    """Completions of this rank's prompts and what they earned."""

    rows: Sequence[Row]  # B
    prompts: list[Prompt]
    completions: list[list[Completion]]  # B lists of G
    rewards: Tensor  # (n, K) float32 on the CPU, NaN where a reward could not judge
    metrics: dict[str, float] = field(default_factory=dict)  # of all ranks' completions

    def by_prompt(self, indices: Iterable[int]) -> dict[int, list[Completion]]:
        """Sort some of the n completions by their prompts: {index of prompt: completions}."""
        groups = {}
        for index in indices:
            prompt, number = divmod(index, len(self.completions[0]))
            groups.setdefault(prompt, []).append(self.completions[prompt][number])
        return groups


class GRPO:
    """Group relative policy optimization; with sequence-level ratios it is GSPO.

    Stages of a recipe, algorithms/, replace parts: GRPOStage `columns`, `metrics`, `pack`, `split`
    and `diagnose`; Family and PPO `roll_out`, `prepare`, `micro_batches`, `add_logps`, `loss`.

    Args:
        policy: the model that is trained.
        sample: draws completions with the policy.
        rewards: {function: its weight}, see rewards.py.
        world: the ranks of this run, scale/ranks.World.
        reference: what the KL is measured to, with a method logps(GroupBatch, temperature) ->
            (R, T), see trainers/reference.py; not needed with beta 0.
    """

    batch_type = MicroBatch
    pack = staticmethod(pack)  # GRPOStage's knows trajectories

    def __init__(
        self, policy: nn.Module, processor: Processor, sample: Sampler,
        rewards: dict[Callable, float], config: GRPOOptions, world, reference=None,
    ):  # fmt: skip
        self.policy = policy
        self.processor = processor
        self.sample = sample
        self.temperature = sample.sampling.temperature
        self.rewards = list(rewards)
        self.reward_weights = torch.tensor(list(rewards.values()))
        self.config = config
        self.world = world
        self.reference = reference

    def steps(self, batches: Iterable[Sequence[Row]]) -> Iterator[Step]:
        """Yield optimizer steps: each draw of rows is a rollout, which is trained on in parts."""
        for rows in batches:
            rollout = self.roll_out(rows)
            size = len(rollout.rows) // self.config.steps_per_generation
            parts = [range(i, i + size) for i in range(0, len(rollout.rows), size)]
            one_pass = list(zip(self.prepare(rollout, parts), parts, strict=True))
            all_passes = one_pass * self.config.num_iterations
            for number, (micro_batches, part) in enumerate(all_passes, start=1):
                ends_rollout = number == len(all_passes)
                yield Step(micro_batches, rollout.metrics, ends_rollout, rollout, part)

    def roll_out(self, rows: Sequence[Row]) -> Rollout:
        """Sample G completions of each row and ask the rewards about them."""
        prompts = [row.prompt(self.processor) for row in rows]
        completions = self.sample(prompts, self.config.num_generations, [row.key for row in rows])
        rewards = ask_rewards(self.rewards, self.columns(rows, prompts, completions))
        return Rollout(rows, prompts, completions, rewards)

    def columns(self, rows, prompts, completions) -> dict[str, list]:
        """Collect the columns that rewards take as arguments."""
        return reward_columns(rows, completions, self.processor)

    def prepare(self, rollout: Rollout, parts: list[range]) -> list[list[MicroBatch]]:
        """Compare each completion with its group, then pack the prompts of each optimizer step."""
        config = self.config
        rewards = self.world.all_gather(rollout.rewards)  # (all n, K)
        total = combine(rewards, self.reward_weights)  # (all n,)
        rollout.metrics = self.metrics(rollout, rewards, total)
        advantages = group_advantages(total, config.num_generations, config.scale_rewards)
        advantages = self.world.local(advantages)  # (n,)
        return [self.micro_batches(rollout, part, advantages) for part in parts]

    def metrics(self, rollout: Rollout, rewards: Tensor, total: Tensor) -> dict[str, float]:
        """Say what the completions of all ranks earned; GRPOStage says more."""
        return {"reward": total.nanmean().item()}

    @torch.no_grad()
    def micro_batches(
        self, rollout: Rollout, part: range, advantages: Tensor | None = None
    ) -> list[MicroBatch]:
        """Pack these prompts of a rollout, with what stays fixed while they are trained on.

        advantages (n,) are None where they are computed later, from the micro-batches.
        """
        device = self.world.device
        # a loss divides by all that was written, also by rows that `teaching` leaves out below
        written = [c.written for c in chain(*rollout.completions[part.start : part.stop])]
        totals = self.world.sum(len(written), int(torch.cat(written).sum()))
        counts = Counts(*totals, self.sample.sampling.max_new_tokens)
        batches = []
        for rows in self.split(rollout, part):
            if advantages is not None:
                rows = self.teaching(rows, advantages)
            completions = rollout.by_prompt(rows)
            prompts = [rollout.prompts[index] for index in completions]
            group = self.pack(prompts, list(completions.values()), self.policy.config, device)
            batch = self.batch_type(group, group.completion_mask, counts, torch.tensor(rows))
            logps = [completion.logps for completion in chain(*completions.values())]
            batch.sampler_logps = pad_sequence(logps, batch_first=True).to(device)
            if advantages is not None:
                batch.advantages = advantages[rows].to(device)
            self.add_logps(batch)
            batches.append(batch)
        return batches

    def split(self, rollout: Rollout, part: range) -> list[list[int]]:
        """Cut prompts into micro-batches: for each the indices of its completions, below n."""
        G = self.config.num_generations
        size = self.config.micro_batch_size
        starts = range(part.start, part.stop, size)
        return [list(range(i * G, min(i + size, part.stop) * G)) for i in starts]

    def teaching(self, rows: list[int], advantages: Tensor) -> list[int]:
        """Drop rows of advantage 0; keep one, as every rank of a sharded model must run."""
        if self.config.beta:
            return rows
        return [row for row in rows if advantages[row] != 0] or rows[:1]

    def add_logps(self, batch: MicroBatch):
        """Add log-probabilities of the policy, if it moves before the last step, and reference."""
        if self.config.num_iterations * self.config.steps_per_generation > 1:
            batch.old_per_token_logps = batch.group.pad(self.logps(batch.group)[0])
        if self.config.beta:
            batch.ref_per_token_logps = self.reference.logps(batch.group, self.temperature)

    def logps(self, group: GroupBatch) -> tuple[Tensor, Tensor]:
        """(M,) log-probabilities and entropies, at the sampling temperature."""
        return per_token_logps(self.policy, group, self.temperature)

    def loss(self, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute this micro-batch's share of the loss of the step, and its metrics."""
        logps, entropies = self.logps(batch.group)
        loss, metrics = grpo_loss(
            batch.group.pad(logps), batch.advantages, batch.loss_mask, self.config,
            old_per_token_logps=batch.old_per_token_logps,
            ref_per_token_logps=batch.ref_per_token_logps, counts=batch.counts,
        )  # fmt: skip
        return loss, metrics | self.diagnose(batch, logps, entropies)

    def diagnose(self, batch: MicroBatch, logps: Tensor, entropies: Tensor) -> dict[str, Tensor]:
        """Say what else is logged of tokens (M,), without gradient; GRPOStage says more."""
        return {"entropy": batch.mean(entropies)}
