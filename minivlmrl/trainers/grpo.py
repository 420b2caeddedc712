"""GRPO (DeepSeekMath, arXiv 2402.03300), in order of computation:

        rollout (B groups, G samples each) -> rewards (n, K) -> advantages (n,) -> micro-batches -> loss

RolloutTrainer samples the completions. Your own method is a subclass that overrides `prepare`, `token_weights` or
`extra_loss`; see docs/your_paper.md. DAPO, Dr. GRPO, GSPO, RLOO, CISPO and others are options in the section `grpo`.
With reference.sync_ref_model and ref_model_mixup_alpha 1, the policy replaces the reference at intervals, as in
DeepSeekMath.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from minivlmrl.config.import_utils import resolve_function, with_arguments
from minivlmrl.config.loss_forms import like_grpo_loss
from minivlmrl.config.options import GRPOOptions, RunConfig
from minivlmrl.data.rows import Row
from minivlmrl.errors import UserError, error_context, truncate
from minivlmrl.generation.environments import packed_length
from minivlmrl.losses.advantages import ADVANTAGES
from minivlmrl.losses.grpo import AVERAGES, grpo_loss
from minivlmrl.losses.grpo_variants import kept_tokens, mean_entropy, rollout_importance_ratio, top_entropy_threshold
from minivlmrl.trainers.base import Rollout, Sample, SampledBatch, checked_loss
from minivlmrl.trainers.rollout import RolloutTrainer
from minivlmrl.trainers.rollout_metrics import CLIP_RATIOS, group_metrics


@dataclass(kw_only=True)
class GRPOBatch(SampledBatch):
    """A micro-batch for GRPO and its variants."""

    advantages: Tensor  # (R,), or per token (R, T)
    old_per_token_logps: Tensor | None = None  # (R, T) log-probabilities before the first update
    importance_sampling_ratio: Tensor | None = None  # (R, T) or (R, 1): trainer probability / sampler probability
    entropy_threshold: float | None = None  # minimum entropy of the tokens to train on, in nats
    num_entropy_tokens: float | None = None  # how many tokens in the optimizer step reach entropy_threshold


class GRPOTrainer(RolloutTrainer):
    """Trainer for GRPO and its variants."""

    stage = "grpo"
    config_type = GRPOOptions
    batch_type = GRPOBatch  # a subclass may add fields with defaults, which `prepare` fills
    options: GRPOOptions

    @classmethod
    def check(cls, config: RunConfig):
        super().check(config)
        options = getattr(config, cls.stage)
        find_loss(options)
        find_advantages(options)
        if ":" in options.loss_type and cls.token_weights is not GRPOTrainer.token_weights:
            raise UserError(
                f"{cls.stage}.loss_type {options.loss_type} would ignore {cls.__name__}.token_weights; weight the "
                f"tokens in that function, or set {cls.stage}.loss_type to a built-in loss, such as dapo"
            )

    @staticmethod
    def has_reference(options: GRPOOptions) -> bool:
        return options.beta > 0

    def generate_rollout(self, rows: Sequence[Row]) -> Rollout:
        if self.options.max_num_gen_batches == 1:
            return self.sample_and_score(rows)
        from minivlmrl.trainers.dynamic_sampling import sample_until_groups_differ

        return sample_until_groups_differ(self, rows)

    def total_rewards(self, samples: Sequence[Sample]) -> Tensor:
        """Compute weighted reward sums, with DAPO's penalty for overlong completions."""
        total = super().total_rewards(samples)
        limit = self.config.sampling.max_new_tokens
        cache = self.options.soft_punish_cache
        if not cache:
            return total
        # longest turn, because max_new_tokens limits a turn and not a whole trajectory
        lengths = [max(len(turn.ids) for turn in x.completion.turns or [x.completion]) for x in samples]
        return total + torch.tensor([soft_overlong_punishment(length, limit, cache) for length in lengths])

    @torch.no_grad()
    def build_micro_batches(self, rollout: Rollout, parts: Sequence[Sequence[list[Sample]]]) -> list[list[GRPOBatch]]:
        """Compute advantages, and pack micro-batches.

        Args:
            parts: the groups for every optimizer step on the rollout.
        """
        options = self.options
        rewards = self.world.all_gather(rollout.rewards)  # (n, K) rewards on all ranks
        totals = self.world.all_gather(self.total_rewards(rollout.samples))  # (n,) weighted reward sums on all ranks
        rollout.metrics = group_metrics(totals, options.num_generations) | rollout.metrics
        rollout.metrics = self.rollout_metrics(rollout, rewards, totals)
        advantages = self.compute_advantages(rollout, totals, rewards)
        steps = [self.micro_batches(groups, advantages) for groups in parts]
        if self.kl_in_reward:
            # for RLOO, subtract the KL penalty from the rewards
            batches = list(chain(*steps))
            kl = []  # KL to the reference per sample (k1, in nats)
            for batch in batches:
                assert batch.old_per_token_logps is not None and batch.ref_per_token_logps is not None
                log_ratio = batch.old_per_token_logps - batch.ref_per_token_logps
                kl.append((log_ratio * batch.loss_mask).sum(1).cpu())
            index = torch.cat([batch.completion_index for batch in batches])
            # sort by sample, because max_tokens_per_micro_batch changes the order
            kl = self.world.all_gather(torch.cat(kl))[self.world.all_gather(index).argsort()]
            num_tokens = float(sum(step[0].normalizer.tokens for step in steps))
            rollout.metrics["kl"] = kl.double().sum().item() / num_tokens
            advantages = self.compute_advantages(rollout, totals - options.beta * kl, rewards)
            for batch in batches:
                batch.advantages = self.advantages_of(batch, advantages)
        for batches in steps:
            self.prepare(batches)
        return steps

    def prepare(self, batches: Sequence[GRPOBatch]):
        """Change an optimizer step's micro-batches before the first update, for example their advantages.

        Called once per optimizer step, without gradients. `batches` are only this rank's: use self.world for totals
        over all ranks.
        """

    @property
    def kl_in_reward(self) -> bool:
        """Whether the KL penalty is in the reward (RLOO), not in the loss."""
        return self.options.loss_type == "rloo" and self.options.beta > 0

    def compute_advantages(self, rollout: Rollout, totals: Tensor, rewards: Tensor) -> Tensor:
        """Compute advantages for all ranks' samples: (n,), or per token (n, T).

        Args:
            totals: (n,) weighted reward sums on all ranks.
            rewards: (n, K)
        """
        options = self.options
        lengths = torch.tensor([packed_length(sample.completion) for sample in rollout.samples])
        lengths = self.world.all_gather(lengths)

        def of_all_ranks(compute: Callable[[Sample], Any]) -> list:
            return list(chain(*self.world.gather_objects([compute(sample) for sample in rollout.samples])))

        advantages = find_advantages(options)(
            totals,
            num_generations=options.num_generations,
            scale_rewards=options.scale_rewards,
            rewards_per_func=rewards,
            reward_weights=self.reward_weights,
            completions=lambda: of_all_ranks(lambda x: self.processor.decode_assistant_turn(x.completion)),
            completion_lengths=lambda: lengths,
            rows=lambda: of_all_ranks(lambda sample: sample.row.columns),
            step=lambda: self.step,
        )
        shapes = [(len(totals),), (len(totals), int(lengths.max()))]
        is_float = isinstance(advantages, Tensor) and advantages.is_floating_point()
        if not is_float or advantages.shape not in shapes or not advantages.isfinite().all():
            raise UserError(
                f"{self.stage}.advantages {options.advantages_name} returned {truncate(advantages, 200)}, but it must "
                f"return a float tensor of shape {shapes[0]} with one finite advantage for each completion, or of "
                f"shape {shapes[1]} with one for each token, even if their rewards are equal"
            )
        return advantages

    def advantages_of(self, batch: SampledBatch, advantages: Tensor) -> Tensor:
        """Select a micro-batch's advantages from those of all samples: (R,), or per token (R, T)."""
        chosen = advantages[batch.completion_index].to(self.world.device)
        return chosen if chosen.dim() == 1 else chosen[:, : batch.loss_mask.shape[1]]

    def kept_samples(self, samples: list[Sample], advantages: Tensor) -> list[Sample]:
        """Drop samples with advantage 0, unless the loss needs them."""
        if self.needs_all_samples:
            return samples
        # keep at least one sample, with loss mask 0, because all ranks must run a sharded forward pass
        return [sample for sample in samples if advantages[sample.index].any()] or samples[:1]

    def micro_batches(self, groups: Sequence[list[Sample]], advantages: Tensor) -> list[GRPOBatch]:
        """Pack micro-batches with advantages and, if the loss needs them, log-probs from before the first update."""
        normalizer = self.count_tokens(groups)
        packed = [self.pack(self.kept_samples(part, advantages), normalizer) for part in self.split(groups)]
        batches = [self.with_advantages(batch, advantages) for batch in packed]
        selects_tokens = self.options.top_entropy_quantile < 1
        if selects_tokens or self.options.rollout_correction or self.policy_moves or self.kl_in_reward:
            entropies = [self.score_policy(batch) for batch in batches]
            if selects_tokens:
                self.set_entropy_threshold(batches, torch.cat(entropies))
        return batches

    def with_advantages(self, sampled: SampledBatch, advantages: Tensor) -> GRPOBatch:
        """Add advantages to a micro-batch, and mask out completions with advantage 0 unless the loss needs them."""
        batch = self.batch_type.extend(sampled, advantages=self.advantages_of(sampled, advantages))
        if not self.needs_all_samples:
            batch.loss_mask = batch.loss_mask * batch.advantages.view(len(sampled.samples), -1).any(1, keepdim=True)
        return batch

    def score_policy(self, batch: GRPOBatch) -> Tensor:
        """Store the policy's log-probabilities before the first update, and ratios for rollout_correction.

        Returns:
            entropies at tokens to train on (n,), on the CPU.
        """
        options = self.options
        logps, entropies = self.logps(batch.group)
        batch.old_per_token_logps = batch.group.pad(logps)
        if options.rollout_correction:
            clip_min, clip_max = options.rollout_correction_bounds
            batch.importance_sampling_ratio = rollout_importance_ratio(
                batch.old_per_token_logps,
                batch.sampler_logps,
                batch.loss_mask,
                options.rollout_correction,
                clip_max,
                clip_min,
            )
        return batch.group.pad(entropies)[batch.loss_mask.bool()].cpu()

    def set_entropy_threshold(self, batches: Sequence[GRPOBatch], entropies: Tensor):
        """Set the minimum entropy of tokens to train on, from token entropies (n,) on all ranks."""
        entropies = torch.cat(self.world.gather_objects(entropies))
        threshold = top_entropy_threshold(entropies, self.options.top_entropy_quantile)
        for batch in batches:
            batch.entropy_threshold = threshold.item()
            batch.num_entropy_tokens = (entropies >= threshold).sum().item()

    @cached_property
    def needs_all_samples(self) -> bool:
        """Whether samples with advantage 0 affect the gradient, for example through a KL penalty.

        True for every subclass, whose loss may have other terms; a subclass without such terms can set
        `needs_all_samples = False`.
        """
        options = self.options
        is_regularized = options.beta or options.entropy_coef or options.top_entropy_quantile < 1
        return bool(is_regularized or options.loss_type == "bnpo" or self.is_own)

    @property
    def policy_moves(self) -> bool:
        """Whether several optimizer steps train on the same rollout."""
        return self.options.num_iterations * self.options.steps_per_generation > 1

    def is_trained(self, sample: Sample) -> bool:
        return sample.completion.stopped or not self.options.mask_truncated_completions

    @cached_property
    def loss_function(self) -> Callable:
        return find_loss(self.options)

    @property
    def is_builtin(self) -> bool:
        """Whether the loss is grpo_loss, which supports token weights and an entropy bonus."""
        return ":" not in self.options.loss_type

    @property
    def is_own(self) -> bool:
        """Whether user code computes the loss: a subclass, or a function in loss_type."""
        return type(self) is not GRPOTrainer or not self.is_builtin

    def kept_tokens(self, batch: GRPOBatch, entropies: Tensor) -> Tensor:
        """Return (R, T), 1 for tokens to train on, or only those with high entropy."""
        return kept_tokens(entropies, batch.loss_mask, self.options.top_entropy_quantile, batch.entropy_threshold)

    def token_weights(self, batch: GRPOBatch, entropies: Tensor) -> Tensor:
        """Return factors (R, T) for the policy term of the loss, but not for the KL term.

        Multiply your own factors by those of super().token_weights(batch, entropies), which apply the options
        top_entropy_quantile and rollout_correction.

        Args:
            entropies: (R, T) policy entropies with gradient, in nats.
        """
        kept = self.kept_tokens(batch, entropies)
        ratio = batch.importance_sampling_ratio
        return kept if ratio is None or self.options.loss_type == "vespo" else kept * ratio

    def extra_loss(
        self, batch: GRPOBatch, logps: Tensor, entropies: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]] | Tensor | None:
        """Return a term to add to the loss, optionally with metrics; None adds nothing.

        Divide sums over tokens by batch.normalizer.tokens, because the losses of micro-batches are added up.

        Args:
            logps: (R, T) policy log-probabilities with gradient, in nats.
            entropies: (R, T) policy entropies with gradient, in nats.
        """
        return None

    def loss(self, batch: GRPOBatch) -> tuple[Tensor, dict[str, Tensor]]:
        options = self.options
        logps, entropies = self.logps(batch.group)
        padded_logps = batch.group.pad(logps)
        padded_entropies = batch.group.pad(entropies)
        if self.is_builtin:
            weights = self.token_weights(batch, padded_entropies)
            if weights.shape not in (batch.loss_mask.shape, (len(batch.loss_mask), 1)):  # others could broadcast
                shapes = f"{[*weights.shape]}, but it must have the shape {[*batch.loss_mask.shape]} of batch.loss_mask"
                raise UserError(f"{type(self).__name__}.token_weights has the shape {shapes}")
            arguments = {"token_weights": weights}
            if options.loss_type == "vespo" and batch.importance_sampling_ratio is not None:
                arguments["importance_sampling_ratio"] = batch.importance_sampling_ratio
        else:
            arguments = {
                "entropies": lambda: padded_entropies,
                "sampling_per_token_logps": lambda: batch.sampler_logps,
                "completion_ids": lambda: batch.group.pad(batch.group.completion_ids),
                "rows": lambda: [sample.row.columns for sample in batch.samples],
                "step": lambda: self.step,
            }
        returned = self.loss_function(
            padded_logps,
            batch.advantages,
            batch.loss_mask,
            loss_type=options.loss_type,
            importance_sampling_level=options.importance_sampling_level,
            epsilon_low=options.epsilon_low,
            epsilon_high=options.epsilon_high,
            beta=0.0 if self.kl_in_reward else options.beta,
            kl_estimator=options.kl_estimator,
            use_bias_correction_kl=options.use_bias_correction_kl,
            old_per_token_logps=batch.old_per_token_logps if self.policy_moves else None,
            ref_per_token_logps=batch.ref_per_token_logps,
            normalizer=batch.normalizer,
            **arguments,
        )
        loss, metrics = checked_loss(f"{self.stage}.loss_type {options.loss_type}", returned)
        if options.entropy_coef and self.is_builtin:
            num_tokens = batch.num_entropy_tokens or batch.normalizer.tokens
            kept = self.kept_tokens(batch, padded_entropies)
            loss = loss - options.entropy_coef * mean_entropy(padded_entropies, kept, batch.normalizer, num_tokens)
        extra = self.extra_loss(batch, padded_logps, padded_entropies)
        if extra is not None:
            term, extra_metrics = checked_loss(f"{type(self).__name__}.extra_loss", extra)
            loss = loss + term
            metrics = metrics | extra_metrics
        old_logps = padded_logps.detach() if batch.old_per_token_logps is None else batch.old_per_token_logps
        # As in TRL, clip ratios are means over the tokens of an optimizer step, or over completions with GSPO and RLOO.
        # They are multiplied by this micro-batch's share of the tokens or completions, and later summed over
        # micro-batches. Completions that kept_samples drops have advantage 0, and are never clipped.
        share = batch.loss_mask.sum().double() / batch.normalizer.tokens  # float64, for exact sums over micro-batches
        if options.importance_sampling_level == "sequence" or options.loss_type == "rloo":
            share = len(batch.loss_mask) / batch.normalizer.sequences
        metrics = {name: value * share if name in CLIP_RATIOS else value for name, value in metrics.items()}
        return loss, metrics | self.token_metrics(batch, old_logps, entropies)


def find_loss(options: GRPOOptions) -> Callable:
    """Return grpo_loss, or the user's loss function named in `loss_type`.

    A user's function may take only some of grpo_loss's arguments, or (batch, options); see config/loss_forms.py.
    """
    names = [*inspect.signature(grpo_loss).parameters]
    table = dict.fromkeys(AVERAGES, grpo_loss)
    on_request = "entropies", "sampling_per_token_logps", "completion_ids", "rows", "step"
    with error_context(f"grpo.loss_type {options.loss_type}"):
        function = like_grpo_loss(resolve_function("loss_type", options.loss_type, table))
        return with_arguments(function, names[:3], names[3:], vars(options), on_request)


def find_advantages(options: GRPOOptions) -> Callable[..., Tensor]:
    """Return the advantage function named in the option `advantages`."""
    arguments = "num_generations", "scale_rewards", "rewards_per_func", "reward_weights"
    on_request = "completions", "completion_lengths", "rows", "step"
    with error_context(f"grpo.advantages {options.advantages_name}"):
        function = resolve_function("advantages", options.advantages_name, ADVANTAGES)
        return with_arguments(function, ["rewards"], arguments, vars(options), on_request)


def soft_overlong_punishment(length: int, max_completion_len: int, soft_punish_cache: int) -> float:
    """Compute DAPO's penalty for overlong completions, from 0 to -1.

    The penalty falls linearly over the last soft_punish_cache tokens before max_completion_len.

    Example: with a maximum of 100 and a cache of 20, lengths 80, 90, 100 and 120 get 0, -0.5, -1 and -1.
    Source: DAPO (arXiv 2503.14476), equation 13; get_soft_overlong_punishment in TRL.
    """
    free = max_completion_len - soft_punish_cache
    if length <= free:
        return 0.0
    if length > max_completion_len:
        return -1.0
    return (free - length) / soft_punish_cache
