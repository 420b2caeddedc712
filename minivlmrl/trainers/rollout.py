"""Sample completions, compute rewards and pack micro-batches.

RolloutTrainer methods, in order:

    sample_and_score: sample G completions per prompt, and compute rewards (n, K).
    split: split samples into micro-batches, by prompts or tokens.
    pack: pack a micro-batch into one sequence.

A rank has B prompts, n = B * G samples in prompt order, and K reward functions. A micro-batch has R samples, T tokens
in the longest completion, and M completion tokens.

GRPOTrainer and PPOTrainer define `build_micro_batches` and `loss`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, groupby

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from minivlmrl.config.options import RunConfig
from minivlmrl.data.loader import Batches
from minivlmrl.data.processor import Processor
from minivlmrl.data.rows import Completion, Row
from minivlmrl.distributed.micro_batching import split_into_micro_batches
from minivlmrl.distributed.process_group import World
from minivlmrl.errors import UserError
from minivlmrl.generation.environments import check_environment, make_sampler, packed_length, samples_trajectories
from minivlmrl.generation.sampler import find_engine
from minivlmrl.kernels.backend import to_device
from minivlmrl.load_extra import load_extra
from minivlmrl.losses.grpo import LossNormalizer
from minivlmrl.model.decoder import VisionLanguageModel
from minivlmrl.model.logprobs import per_token_logps
from minivlmrl.model.packing import GroupBatch, pack_turns
from minivlmrl.model.trainable import trained_parameters
from minivlmrl.rewards.columns import call_rewards, reward_columns
from minivlmrl.rewards.registry import RewardLog, training_rewards
from minivlmrl.trainers.base import MicroBatch, Rollout, Sample, SampledBatch, Step, Trainer, split
from minivlmrl.trainers.rollout_metrics import completion_metrics, logged_metrics, reward_metrics

REWARD_MODEL = "minivlmrl.extras.reward_model", "the reward reward_model"


class RolloutTrainer(Trainer):
    """Base class for trainers with rewards for sampled completions.

    Options must include num_generations, micro_batch_size and max_tokens_per_micro_batch.
    """

    samples_completions = True

    @classmethod
    def check(cls, config: RunConfig):
        """Raise UserError if rewards or sampling options do not fit the stage."""
        if config.sampling.temperature == 0:
            raise UserError(
                "sampling.temperature is 0, so all completions of a group would be identical; "
                "set it to a value greater than 0"
            )
        if not config.rewards:
            raise UserError(
                f"the section rewards is empty, but the stage {cls.stage} needs at least one "
                "reward; add one, for example rewards: {accuracy: 1.0}"
            )
        check_environment(config)
        find_engine(config.sampling).check(config)
        if "reward_model" in config.rewards:
            load_extra(*REWARD_MODEL).check_stage_order(config, cls.stage)

    def __init__(
        self, config: RunConfig, model: VisionLanguageModel, processor: Processor, world: World, steps_done: int = 0
    ):
        super().__init__(config, model, processor, world, steps_done)
        self.sampler = make_sampler(
            model,
            processor,
            config.sampling,
            world,
            config.rollout.gather_weights,
            keeps_vision=self.shares_vision_tower(),
        )
        self.temperature = config.sampling.temperature
        self.reward_log = RewardLog(steps_done, self.options.max_steps)
        self.rewards = [replace(reward, world=world, log=self.reward_log) for reward in training_rewards(config)]
        self.reward_weights = torch.tensor(list(config.rewards.values()))
        self.reward_model = None
        if "reward_model" in config.rewards:
            self.reward_model = load_extra(*REWARD_MODEL).RewardModelScores(config, model, processor, world)

    def shares_vision_tower(self) -> bool:
        """Return True if all models share one frozen vision tower, so that images are encoded only once."""
        is_frozen = not trained_parameters(self.policy.visual)
        return is_frozen and self.config.reference.path is None and "reward_model" not in self.config.rewards

    def build_micro_batches(
        self, rollout: Rollout, parts: Sequence[Sequence[list[Sample]]]
    ) -> list[Sequence[MicroBatch]]:
        """Compute rollout metrics, and pack micro-batches for every optimizer step."""
        raise NotImplementedError

    def steps(self, batches: Batches) -> Iterator[Step]:
        """Sample a rollout for every batch of rows, and yield its optimizer steps.

        Example: with steps_per_generation 4 and num_iterations 2, a rollout of 32 prompts gives 8 steps of 8 prompts.
        """
        self.batches = batches  # set here and not in the generator, because the memory check needs it before step 0
        return self.rollout_steps()

    def rollout_steps(self) -> Iterator[Step]:
        for rows in self.batches:
            rollout = self.generate_rollout(rows)
            parts = split(rollout.groups, len(rollout.groups) // self.options.steps_per_generation)
            with self.phase("scoring", rows):
                one_pass = list(zip(self.build_micro_batches(rollout, parts), parts, strict=True))
            all_passes = one_pass * self.options.num_iterations
            for number, (micro_batches, groups) in enumerate(all_passes, start=1):
                yield Step(micro_batches, rollout.metrics, number == len(all_passes), rollout, groups)
                self.reward_log.global_step += 1

    @property
    def step(self) -> int:
        """Current optimizer step in this stage, from 0; during sampling, the first step on the rollout."""
        return self.reward_log.global_step

    def trial_batches(self, rows: Sequence[Row]) -> Sequence[MicroBatch]:
        """Pack the longest possible completions, to test whether a step fits in memory."""
        if samples_trajectories(self.config.sampling):
            return ()
        length = self.config.sampling.max_new_tokens
        prompts = [row.prompt(self.processor) for row in rows]
        longest = [Completion(prompt.input_ids[-1:].repeat(length), torch.zeros(length)) for prompt in prompts]
        completions = [[completion] * self.options.num_generations for completion in longest]
        num_samples = len(rows) * self.options.num_generations
        # rewards 0 and 1 in every group, because GRPO may drop groups with equal rewards
        rewards = (torch.arange(num_samples) % 2).float()[:, None].expand(-1, len(self.reward_weights))
        rollout = Rollout.join(rows, prompts, completions, rewards, self.world.rank * num_samples)
        [batches] = self.build_micro_batches(rollout, [rollout.groups])
        return batches

    def generate_rollout(self, rows: Sequence[Row]) -> Rollout:
        """Sample a rollout; GRPOTrainer overrides generate_rollout for dynamic sampling."""
        return self.sample_and_score(rows)

    def sample_and_score(self, rows: Sequence[Row]) -> Rollout:
        """Sample completions, and compute their rewards."""
        with self.phase("preparation", rows):
            prompts = [row.prompt(self.processor) for row in rows]
        num_generations = self.options.num_generations
        with self.phase("sampling", rows):
            self.sampler.step = self.step
            completions = self.sampler(prompts, num_generations, [row.key for row in rows])
        lengths = [len(group) for group in completions]
        if lengths != [num_generations] * len(prompts):
            raise UserError(
                f"sampling.engine returned lists of {lengths} completions, but it must return {num_generations} for "
                f"each of the {len(prompts)} prompts"
            )
        if not all(bool(x.sampled_logps.isfinite().all()) for x in chain(*completions)):
            raise UserError("sampling.engine returned log-probabilities that are NaN or infinite")
        self.sampler.verify_logps(rows, prompts, completions, self.config.rollout.max_logp_mismatch)
        with self.phase("rewards", rows):
            scores = None if self.reward_model is None else self.reward_model(prompts, completions)
            columns = reward_columns(rows, prompts, completions, self.processor, scores)
            rewards = call_rewards(self.rewards, columns)
        return Rollout.join(rows, prompts, completions, rewards, self.world.rank * len(rewards))

    def rollout_metrics(self, rollout: Rollout, rewards: Tensor, totals: Tensor) -> dict[str, float]:
        """Compute reward and completion metrics over all ranks, in addition to rollout.metrics."""
        metrics = reward_metrics(rewards, totals, list(self.config.rewards))
        completions = [sample.completion for sample in rollout.samples]
        metrics |= completion_metrics(completions, bool(self.config.sampling.environment), self.world) | rollout.metrics
        return metrics | logged_metrics(self.reward_log, self.world)

    def split(self, groups: Sequence[list[Sample]]) -> list[list[Sample]]:
        """Split samples into micro-batches, by micro_batch_size or max_tokens_per_micro_batch."""
        size = self.options.micro_batch_size
        max_tokens = self.options.max_tokens_per_micro_batch
        if max_tokens is None:
            return [list(chain(*part)) for part in split(groups, size)]
        lengths = [
            (len(group[0].prompt.input_ids), [packed_length(sample.completion) for sample in group]) for group in groups
        ]
        micro_batches = split_into_micro_batches(lengths, size, max_tokens, self.world)
        return [[groups[i][j] for i, j in pairs] for pairs in micro_batches]

    def is_trained(self, sample: Sample) -> bool:
        """Return True if the policy trains on the sample."""
        return True

    def count_tokens(self, groups: Sequence[list[Sample]]) -> LossNormalizer:
        """Count samples and trained tokens in a step, over all ranks."""
        samples = list(chain(*groups))
        tokens = sum(int(sample.completion.policy_mask.sum()) for sample in samples if self.is_trained(sample))
        sequences, tokens = self.world.sum(len(samples), tokens)
        return LossNormalizer(sequences, max(tokens, 1), self.config.sampling.max_new_tokens)

    def pack(self, samples: Sequence[Sample], normalizer: LossNormalizer) -> SampledBatch:
        """Pack samples, which must be ordered by prompt, and compute reference log-probabilities."""
        device = self.world.device
        groups = [list(group) for _, group in groupby(samples, lambda sample: id(sample.prompt))]
        prompts = [group[0].prompt for group in groups]
        completions = [[sample.completion for sample in group] for group in groups]
        group = pack_turns(prompts, completions, self.policy.config, device)
        is_trained = torch.tensor([self.is_trained(sample) for sample in samples])
        return SampledBatch(
            group,
            group.completion_mask * to_device(is_trained, device)[:, None],
            normalizer,
            None if self.reference is None else self.reference.logps(group, self.temperature),
            samples=samples,
            sampler_logps=pad_sequence([sample.completion.sampled_logps for sample in samples], batch_first=True).to(
                device
            ),
        )

    def logps(self, group: GroupBatch) -> tuple[Tensor, Tensor]:
        """Compute log-probabilities and entropies at the sampling temperature."""
        return per_token_logps(self.policy, group, self.temperature)

    def token_metrics(self, batch: SampledBatch, old_logps: Tensor, entropies: Tensor) -> dict[str, Tensor]:
        """Compute the mean entropy, and the difference between log-probabilities of trainer and sampler, in nats.

        Args:
            old_logps: (R, T) trainer log-probabilities before the update.
            entropies: (M,) policy entropies at completion tokens.
        """
        mask = batch.loss_mask
        mismatch = ((old_logps - batch.sampler_logps) * mask).abs()
        mean_square = (mismatch.square() * mask).sum() / mask.sum().clamp(min=1)
        return {
            "entropy": batch.mean(entropies),
            "rollout/logp_mismatch": mismatch.max(),
            "rollout/logp_mismatch_rms": mean_square.sqrt(),
        }
