"""The GRPO trainer (DeepSeekMath, arXiv 2402.03300), written in the order of its computation:

    rows -> prompts -> G completions per prompt -> rewards (n, K) -> advantages (n,)
         -> micro-batches -> loss

In shapes, B is the number of prompts on this rank, n = B * G is the number of completions, which
are ordered by prompt, and K is the number of reward functions. A micro-batch has R completions of
at most T tokens each, and M completion tokens in total. The paper's outer loop, which replaces the
reference model every few hundred steps, is not implemented.

DAPO, Dr. GRPO, GSPO, RLOO, CISPO and other variants are selected by options of the section `grpo`.
They choose the ratio, the term and the average of the loss (losses/), the advantages
(losses/advantages.py), and dynamic sampling (dynamic_sampling.py).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from minivlmrl.config.import_utils import call_user_code, resolve_object, with_options
from minivlmrl.config.options import GRPOOptions, RunConfig
from minivlmrl.config.parsing import error_context
from minivlmrl.data.loader import Batches
from minivlmrl.data.processor import Processor
from minivlmrl.data.rows import Completion, Prompt, Row
from minivlmrl.distributed.micro_batching import split_into_micro_batches
from minivlmrl.distributed.process_group import World
from minivlmrl.generation.environments import (
    check_environment,
    pack_rollout,
    packed_length,
    samples_trajectories,
)
from minivlmrl.generation.sampler import find_engine, make_sampler
from minivlmrl.losses.advantages import combine, group_advantages, leave_one_out, normalize_then_sum
from minivlmrl.losses.grpo import AVERAGES, LossNormalizer, grpo_loss
from minivlmrl.losses.grpo_variants import (
    kept_tokens,
    mean_entropy,
    rollout_importance_ratio,
    top_entropy_threshold,
)
from minivlmrl.model.decoder import Qwen2_5_VL
from minivlmrl.model.families.registry import family_of
from minivlmrl.model.logprobs import per_token_logps
from minivlmrl.model.packing import GroupBatch
from minivlmrl.model.trainable import trained_parameters
from minivlmrl.rewards.columns import call_rewards
from minivlmrl.rewards.registry import RewardLog, recipe_columns, training_rewards
from minivlmrl.trainers.base import Rollout, SampledBatch, Step, Trainer, loss_arguments
from minivlmrl.trainers.rollout_metrics import (
    completion_metrics,
    group_metrics,
    logged_metrics,
    reward_metrics,
)

REWARD_MODEL = "reward_model"  # name of the reward that a trained reward model computes
Batch = TypeVar("Batch", bound=SampledBatch)


class GRPOTrainer(Trainer):
    """Trainer of GRPO and its variants; its subclass PPOTrainer takes advantages from a critic."""

    stage = "grpo"
    config_type = GRPOOptions
    config: GRPOOptions
    compares_groups = True  # True logs the standard deviation of the rewards within each group

    # -------------------------------------------------------------------------------- preparation

    @classmethod
    def check(cls, run: RunConfig):
        check_rollout_options(run, cls.stage)
        config = getattr(run, cls.stage)
        loss = find_loss(config)
        if loss is not grpo_loss:
            call_user_code(f"{cls.stage}.loss_type {config.loss_type}", try_loss, loss, config)

    @staticmethod
    def has_reference(config: GRPOOptions) -> bool:
        return bool(config.beta)

    def __init__(
        self,
        run: RunConfig,
        model: Qwen2_5_VL,
        processor: Processor,
        world: World,
        steps_done: int = 0,
    ):
        super().__init__(run, model, processor, world, steps_done)
        has_reward_model = REWARD_MODEL in run.rewards
        # The sampler may keep image embeddings for training only if all models share one frozen
        # vision tower. A reward model and a reference from a folder have their own vision towers.
        shares_tower = not trained_parameters(model.visual) and run.reference.path is None
        self.sample = make_sampler(
            model,
            processor,
            run.sampling,
            world,
            run.rollout.gather_weights,
            keeps_vision=shares_tower and not has_reward_model,
        )
        self.temperature = run.sampling.temperature
        self.reward_log = RewardLog(steps_done, self.config.max_steps)
        self.rewards = [reward.on(world, self.reward_log) for reward in training_rewards(run)]
        self.reward_weights = torch.tensor(list(run.rewards.values()))
        self.reward_model = None
        if has_reward_model:
            from minivlmrl.trainers.reward_model import RewardModelScores

            self.reward_model = RewardModelScores(run, model, processor, world)
        self.steps_per_rollout = self.config.steps_per_generation
        # number of batches of rows that were sampled for the current rollout
        self.num_gen_batches = 1

    # ------------------------------------------------------------------------ rollout and rewards

    def steps(self, batches: Batches) -> Iterator[Step]:
        """Sample a rollout for each batch of rows, and yield its optimizer steps.

        A rollout is trained on in num_iterations passes. Each pass has steps_per_generation
        optimizer steps, and each step trains on an equal part of the prompts.
        """
        self.batches = batches
        for rows in batches:
            rollout = self.roll_out(rows)
            size = len(rollout.rows) // self.config.steps_per_generation
            prompt_ranges = [range(i, i + size) for i in range(0, len(rollout.rows), size)]
            one_pass = list(zip(self.prepare(rollout, prompt_ranges), prompt_ranges, strict=True))
            all_passes = one_pass * self.config.num_iterations
            for number, (micro_batches, prompt_range) in enumerate(all_passes, start=1):
                ends_rollout = number == len(all_passes)
                yield Step(micro_batches, rollout.metrics, ends_rollout, rollout, prompt_range)
                self.reward_log.trainer_state.global_step += 1

    def roll_out(self, rows: Sequence[Row]) -> Rollout:
        """Sample completions for a batch of rows and compute their rewards.

        If dynamic sampling is enabled, completions of further batches of rows may be sampled.
        """
        if self.config.max_num_gen_batches == 1:
            return self.sample_rollout(rows)
        from minivlmrl.trainers.dynamic_sampling import sample_until_groups_differ

        return sample_until_groups_differ(self, rows)

    def sample_rollout(self, rows: Sequence[Row]) -> Rollout:
        """Sample G completions for each row and compute their rewards."""
        prompts = [row.prompt(self.processor) for row in rows]
        completions = self.sample(prompts, self.config.num_generations, [row.key for row in rows])
        rewards = call_rewards(self.rewards, self.reward_columns(rows, prompts, completions))
        rollout = Rollout(rows, prompts, completions, rewards)
        self.sample.verify_logps(rollout, self.run.rollout.max_logp_mismatch)
        return rollout

    def reward_columns(
        self,
        rows: Sequence[Row],
        prompts: Sequence[Prompt],
        completions: Sequence[Sequence[Completion]],
    ) -> dict[str, list]:
        """Collect the columns that are passed to reward functions as keyword arguments."""
        columns = recipe_columns(rows, prompts, completions, self.processor)
        if self.reward_model is not None:
            columns["reward_model_scores"] = self.reward_model(prompts, completions)
        return columns

    def total_rewards(self, rollout: Rollout) -> Tensor:
        """Compute the weighted sum of the rewards of each completion.

        If the option soft_punish_cache is set, a penalty for overlong completions is included.

        Returns:
            A tensor of shape (n,), with one value for each completion of this rank.
        """
        total = combine(rollout.rewards, self.reward_weights)
        cache = self.config.soft_punish_cache
        if cache:
            limit = self.run.sampling.max_new_tokens
            lengths = [len(completion.ids) for completion in chain(*rollout.completions)]
            penalties = [soft_overlong_punishment(length, limit, cache) for length in lengths]
            total = total + torch.tensor(penalties)
        return total

    def rollout_metrics(self, rollout: Rollout, rewards: Tensor, total: Tensor) -> dict[str, float]:
        """Compute the metrics of a rollout over the completions of all ranks.

        Args:
            rewards: rewards of all ranks, of shape (n * world.size, K).
            total: weighted sums of these rewards, of shape (n * world.size,).
        """
        metrics = reward_metrics(rewards, total, list(self.run.rewards))
        has_tools = bool(self.run.sampling.environment)
        metrics |= completion_metrics(rollout.completions, has_tools, self.world)
        if self.compares_groups:
            metrics |= group_metrics(total, self.config.num_generations)
        return metrics | logged_metrics(self.reward_log, metrics, self.world)

    # --------------------------------------------------------------- advantages and micro-batches

    def prepare(self, rollout: Rollout, prompt_ranges: list[range]) -> list[list[SampledBatch]]:
        """Compute advantages within groups, then pack the micro-batches of each optimizer step.

        Args:
            prompt_ranges: the range of prompts that each optimizer step trains on.
        Returns:
            The micro-batches of each optimizer step.
        """
        config = self.config
        rewards = self.world.all_gather(rollout.rewards)  # (n * world.size, K)
        total = self.world.all_gather(self.total_rewards(rollout))  # (n * world.size,)
        rollout.metrics = self.rollout_metrics(rollout, rewards, total)
        if config.max_num_gen_batches > 1:
            rollout.metrics["num_gen_batches"] = float(self.num_gen_batches)
        if config.loss_type == "rloo" and config.beta:
            return self.prepare_with_kl(rollout, prompt_ranges, total)
        if config.loss_type == "rloo":
            advantages = leave_one_out(total, config.num_generations)
        elif config.multi_objective_aggregation == "normalize_then_sum":
            advantages = normalize_then_sum(rewards, self.reward_weights, config.num_generations)
        else:
            advantages = group_advantages(total, config.num_generations, config.scale_rewards)
        local = self.world.local(advantages)  # (n,): advantages of this rank's completions
        return [self.micro_batches(rollout, prompt_range, local) for prompt_range in prompt_ranges]

    def prepare_with_kl(
        self, rollout: Rollout, prompt_ranges: list[range], rewards: Tensor
    ) -> list[list[SampledBatch]]:
        """Prepare the optimizer steps of RLOO if a KL penalty is subtracted from the rewards.

        The penalty of a completion is beta times its KL from the reference, estimated with k1. The
        advantages depend on the log-probabilities, so they are computed after the micro-batches
        have been packed.

        Args:
            rewards: weighted sums of the rewards of all ranks, of shape (n * world.size,).
        """
        steps = [self.micro_batches(rollout, prompt_range) for prompt_range in prompt_ranges]
        batches = list(chain(*steps))
        kl = []
        for batch in batches:
            assert batch.old_per_token_logps is not None and batch.ref_per_token_logps is not None
            log_ratio = batch.old_per_token_logps - batch.ref_per_token_logps
            kl.append((log_ratio * batch.loss_mask).sum(1).cpu())
        # restore the order of the rollout, because micro-batches may reorder its completions
        order = torch.cat([batch.completion_index for batch in batches]).argsort()
        rewards = rewards - self.config.beta * self.world.all_gather(torch.cat(kl)[order])
        local = self.world.local(leave_one_out(rewards, self.config.num_generations))
        for batch in batches:
            batch.advantages = local[batch.completion_index].to(self.world.device)
        return steps

    @torch.no_grad()
    def micro_batches(
        self, rollout: Rollout, prompt_range: range, advantages: Tensor | None = None
    ) -> list[SampledBatch]:
        """Pack the micro-batches of one optimizer step.

        The log-probabilities before the update, the masks, the importance ratios that correct for
        the sampler, and the entropy threshold are computed here once, because they stay fixed while
        the rollout is trained on.

        Args:
            prompt_range: range of the prompts that the step trains on.
            advantages: advantages of this rank's completions, of shape (n,); None if the caller
                computes them after packing.
        """
        config = self.config
        batches = self.pack_part(rollout, prompt_range, SampledBatch, advantages)
        for batch in batches:
            self.add_logps(batch)
        if config.mask_truncated_completions:
            stopped = [completion.stopped for completion in chain(*rollout.completions)]
            mask_completions(torch.tensor(stopped), rollout, prompt_range, batches, self.world)
        if config.rollout_correction:
            for batch in batches:
                mode, bounds = config.rollout_correction, config.rollout_correction_bounds
                batch.importance_sampling_ratio = correct_sampler(batch, mode, bounds)
        if config.top_entropy_quantile < 1:
            find_entropy_threshold(batches, config.top_entropy_quantile, self.world)
        return batches

    def pack_part(
        self,
        rollout: Rollout,
        prompt_range: range,
        batch_type: type[Batch],
        advantages: Tensor | None = None,
    ) -> list[Batch]:
        """Pack some prompts of a rollout into micro-batches, without computing log-probabilities.

        Args:
            prompt_range: range of the prompts that one optimizer step trains on.
            batch_type: class of the micro-batches.
            advantages: advantages of this rank's completions, of shape (n,). If they are given,
                completions that do not contribute to the gradient are dropped.
        """
        batches = []
        normalizer = self.count_tokens(rollout, prompt_range)
        for rows in self.split(rollout, prompt_range):
            if advantages is not None:
                rows = self.rows_with_signal(rows, advantages)
            batch = self.micro_batch(rollout, rows, batch_type)
            batch.normalizer = normalizer
            if advantages is not None:
                batch.advantages = advantages[rows].to(self.world.device)
            batches.append(batch)
        return batches

    def count_tokens(self, rollout: Rollout, prompt_range: range) -> LossNormalizer:
        """Count the completions and tokens of an optimizer step on all ranks.

        The loss is normalised by all generated tokens, including the tokens of completions that
        rows_with_signal drops.
        """
        masks = [
            c.policy_mask
            for c in chain(*rollout.completions[prompt_range.start : prompt_range.stop])
        ]
        sequences, tokens = self.world.sum(len(masks), int(torch.cat(masks).sum()))
        return LossNormalizer(sequences, tokens, self.run.sampling.max_new_tokens)

    def micro_batch(self, rollout: Rollout, rows: list[int], batch_type: type[Batch]) -> Batch:
        """Pack completions of a rollout, each after its prompt.

        Args:
            rows: indices of the completions to pack, from 0 to n - 1.
        """
        device = self.world.device
        groups = rollout.by_prompt(rows)
        prompts = [rollout.prompts[index] for index in groups]
        group = pack_rollout(prompts, list(groups.values()), self.policy.config, device)
        completions = list(chain(*groups.values()))
        logps = [completion.sampled_logps for completion in completions]
        batch = batch_type(
            group,
            group.completion_mask,
            completion_index=torch.tensor(rows),
            sampler_logps=pad_sequence(logps, batch_first=True).to(device),
        )
        routing = family_of(self.policy).routing
        if routing is not None:
            batch.sampler_routes = routing.join_routes(completions)
        return batch

    def split(self, rollout: Rollout, prompt_range: range) -> list[list[int]]:
        """Split a range of prompts into micro-batches, and return the completions of each.

        If max_tokens_per_micro_batch is set, it limits the number of tokens in a micro-batch.
        Otherwise, a micro-batch has micro_batch_size prompts.

        Returns:
            For each micro-batch, the indices of its completions, from 0 to n - 1.
        """
        config = self.config
        G = config.num_generations
        size = config.micro_batch_size
        max_tokens = config.max_tokens_per_micro_batch
        if max_tokens is None:
            starts = range(prompt_range.start, prompt_range.stop, size)
            return [list(range(i * G, min(i + size, prompt_range.stop) * G)) for i in starts]
        lengths = []
        for i in prompt_range:
            completion_lengths = [packed_length(c) for c in rollout.completions[i]]
            lengths.append((len(rollout.prompts[i].input_ids), completion_lengths))
        micro_batches = split_into_micro_batches(lengths, size, max_tokens, self.world)
        return [[prompt_range[i] * G + j for i, j in rows] for rows in micro_batches]

    def rows_with_signal(self, rows: list[int], advantages: Tensor) -> list[int]:
        """Drop completions whose advantage is 0, unless the loss needs them for another term.

        The KL, the entropy terms, bnpo's mean over a micro-batch and custom losses need all
        completions. At least one completion is kept, because every rank of a sharded model must run
        the forward pass.
        """
        config = self.config
        needs_all = (
            config.beta
            or config.entropy_coef
            or config.top_entropy_quantile < 1
            or config.loss_type == "bnpo"
            or self.loss_function is not grpo_loss
        )
        if needs_all:
            return rows
        return [row for row in rows if advantages[row] != 0] or rows[:1]

    def add_logps(self, batch: SampledBatch):
        """Add log-probabilities of the reference and of the policy before its update to a batch.

        The log-probabilities of the policy are computed only if they are needed: to train on a
        rollout in several steps, to correct for the sampler, to compute the KL in RLOO's reward, or
        to select tokens by their entropy.
        """
        config = self.config
        kl_in_reward = config.loss_type == "rloo" and config.beta
        if (
            self.policy_moves
            or config.rollout_correction
            or kl_in_reward
            or config.top_entropy_quantile < 1
        ):
            logps, entropies = self.logps(batch.group)
            batch.old_per_token_logps = batch.group.pad(logps)
            batch.old_entropies = batch.group.pad(entropies)
        if self.reference is not None:
            batch.ref_per_token_logps = self.reference.logps(batch.group, self.temperature)

    @property
    def policy_moves(self) -> bool:
        """Return True if each rollout is trained on in more than one optimizer step."""
        return self.config.num_iterations * self.config.steps_per_generation > 1

    # --------------------------------------------------------------------------------------- loss

    @cached_property
    def loss_function(self) -> Callable:
        """The loss function that the option loss_type selects."""
        return find_loss(self.config)

    def logps(self, group: GroupBatch) -> tuple[Tensor, Tensor]:
        """Compute the log-probability and the entropy of each completion token: two (M,) tensors.

        The policy's logits are divided by the sampling temperature.
        """
        return per_token_logps(self.policy, group, self.temperature)

    def loss(self, batch: SampledBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute the metrics of a micro-batch, and its loss divided by the totals of the step."""
        # a custom loss gets the options of grpo_loss, and those that it names itself
        options = loss_arguments(self.config, grpo_loss, self.loss_function)
        if self.config.loss_type == "rloo":
            options["beta"] = 0.0  # the KL of RLOO is in the reward
        logps, entropies = self.logps(batch.group)
        padded_entropies = batch.group.pad(entropies)
        # a custom loss function is called without token weights and without an entropy bonus
        is_builtin = self.loss_function is grpo_loss
        loss, metrics = self.loss_function(
            batch.group.pad(logps),
            batch.advantages,
            batch.loss_mask,
            **options,
            old_per_token_logps=batch.old_per_token_logps if self.policy_moves else None,
            ref_per_token_logps=batch.ref_per_token_logps,
            normalizer=batch.normalizer,
            **(self.weights(batch, padded_entropies) if is_builtin else {}),
        )
        if self.config.entropy_coef and is_builtin:
            num_tokens = batch.num_entropy_tokens or batch.normalizer.tokens
            token_mask = self.kept_tokens(batch, padded_entropies)
            bonus = mean_entropy(padded_entropies, token_mask, batch.normalizer, num_tokens)
            loss = loss - self.config.entropy_coef * bonus
        return loss, metrics | self.token_metrics(batch, logps, entropies)

    def kept_tokens(self, batch: SampledBatch, entropies: Tensor) -> Tensor:
        """Return a mask (R, T) of the tokens to train on: all, or only tokens with high entropy."""
        quantile = self.config.top_entropy_quantile
        return kept_tokens(entropies, batch.loss_mask, quantile, batch.entropy_threshold)

    def weights(self, batch: SampledBatch, entropies: Tensor) -> dict[str, Tensor]:
        """Return the weights of the tokens in the loss, as keyword arguments for grpo_loss."""
        ratio = batch.importance_sampling_ratio
        weights = {}
        if self.config.top_entropy_quantile < 1:
            weights["token_weights"] = self.kept_tokens(batch, entropies)
        if ratio is not None and self.config.loss_type == "vespo":
            weights["importance_sampling_ratio"] = ratio
        elif ratio is not None:
            weights["token_weights"] = weights.get("token_weights", 1) * ratio
        return weights

    def token_metrics(
        self, batch: SampledBatch, logps: Tensor, entropies: Tensor
    ) -> dict[str, Tensor]:
        """Compute the mean entropy, and how much trainer and sampler differ.

        The difference of their log-probabilities is reported as the largest absolute difference of
        a token, and as the root mean square over all tokens, both in nats.

        Args:
            logps, entropies: log-probability and entropy of each token under the current policy, of
                shape (M,).
        """
        old_logps = batch.old_per_token_logps
        if old_logps is None:
            old_logps = batch.group.pad(logps.detach())
        mask = batch.loss_mask
        mismatch = ((old_logps - batch.sampler_logps) * batch.group.completion_mask).abs()
        mean_square = (mismatch.square() * mask).sum() / mask.sum().clamp(min=1)
        return {
            "entropy": batch.mean(entropies),
            "rollout/logp_mismatch": mismatch.max(),
            "rollout/logp_mismatch_rms": mean_square.sqrt(),
        }


def check_rollout_options(run: RunConfig, stage: str):
    """Raise ValueError if the stage cannot use the sampling options or rewards of the recipe."""
    if run.sampling.temperature == 0:
        raise ValueError(
            "sampling.temperature is 0, so all completions of a group would be equal; "
            "set it to a value greater than 0"
        )
    if not run.rewards:
        raise ValueError(
            f"the section rewards is empty, but the stage {stage} needs at least one reward; "
            "add one, for example rewards: {accuracy: 1.0}"
        )
    if run.rollout.batch_invariant:
        others = {
            "adapter.dropout": run.adapter.dropout,
            "sampling.environment": run.sampling.environment,
            "sampling.engine": run.sampling.engine != "native",
        }
        for option in [name for name, value in others.items() if value]:
            raise ValueError(
                "rollout.batch_invariant needs the native sampler without tools and without dropout; "
                f"remove {option}, or set rollout.batch_invariant to false"
            )
    check_environment(run)
    find_engine(run.sampling).check(run)
    if REWARD_MODEL in run.rewards:
        from minivlmrl.trainers.reward_model import check_stage_order

        check_stage_order(run, stage)
        if samples_trajectories(run.sampling):
            raise ValueError(
                "the reward reward_model cannot score trajectories, because each turn of a "
                "trajectory has its own context window; remove reward_model from rewards"
            )


# ------------------------------------------------------------- functions that options select


def find_loss(config: GRPOOptions) -> Callable:
    """Return the loss function that loss_type names: grpo_loss or a custom function.

    Raises:
        ValueError: loss_type is not a known loss, the custom function cannot be loaded, or the text
            in brackets sets an option of the section.
    """
    with error_context(f"grpo.loss_type {config.loss_type}"):
        names = dict.fromkeys(AVERAGES, grpo_loss)
        loss, bound = resolve_object("loss", config.loss_type, names)
        for name in bound.keys() & vars(config).keys():
            raise ValueError(f"{name} is an option of the section grpo; set grpo.{name} instead")
        return with_options(loss, bound)


def try_loss(loss: Callable, config: GRPOOptions):
    """Call a custom loss function on a completion of two tokens, to find its errors early.

    Raises:
        ValueError: the loss does not depend on the log-probabilities.
        Exception: any exception that the loss function raises.
    """
    logps = torch.zeros(1, 2, requires_grad=True)
    value, metrics = loss(
        logps,
        torch.ones(1),
        torch.ones(1, 2),
        **loss_arguments(config, grpo_loss, loss),
        old_per_token_logps=None,
        ref_per_token_logps=torch.zeros(1, 2),
        normalizer=LossNormalizer(1, 2, 2),
    )
    value.backward()
    for metric in metrics.values():
        metric.item()
    if logps.grad is None:
        raise ValueError(
            "the loss does not depend on its first argument, the log-probabilities, so it has no "
            "gradient; compute the loss from them without detach()"
        )


def correct_sampler(
    batch: SampledBatch, mode: str, bounds: tuple[float | None, float | None]
) -> Tensor:
    """Compute the ratio of the trainer's to the sampler's probabilities: (R, T) or (R, 1).

    Args:
        mode: value of grpo.rollout_correction; rollout_importance_ratio explains the values.
        bounds: lower and upper bound of the ratio; None disables a bound.
    """
    assert batch.old_per_token_logps is not None, "add_logps must be called before correct_sampler"
    low, high = bounds
    return rollout_importance_ratio(
        batch.old_per_token_logps,
        batch.sampler_logps,
        batch.loss_mask,
        mode=mode,
        clip_max=high,
        clip_min=low,
    )


def find_entropy_threshold(batches: list[SampledBatch], quantile: float, world: World):
    """Compute the entropy from which on tokens are trained on, and store it in the micro-batches.

    Args:
        batches: micro-batches of one optimizer step on this rank.
        quantile: fraction of the step's tokens on all ranks to train on; these are the tokens with
            the highest entropies.
    """
    local = []
    for batch in batches:
        assert batch.old_entropies is not None, "add_logps must be called before this function"
        local.append(batch.old_entropies[batch.loss_mask.bool()].cpu())
    entropies = torch.cat(world.gather_objects(torch.cat(local)))
    threshold = top_entropy_threshold(entropies, quantile)
    for batch in batches:
        batch.entropy_threshold = threshold.item()
        batch.num_entropy_tokens = (entropies >= threshold).sum().item()


def mask_completions(
    is_trained: Tensor,
    rollout: Rollout,
    prompt_range: range,
    batches: Sequence[SampledBatch],
    world: World,
):
    """Exclude completions from the loss of an optimizer step.

    Excluded completions still count as sequences in the normalizer, but contribute no tokens. The
    function changes the attributes loss_mask and normalizer of the micro-batches.

    Args:
        is_trained: boolean tensor of shape (n,), False for the completions to exclude.
        prompt_range: range of the prompts that the step trains on.
        batches: micro-batches of the step.
    """
    lengths = torch.tensor(
        [[int(c.policy_mask.sum()) for c in group] for group in rollout.completions]
    )
    tokens = (
        (lengths * is_trained.view_as(lengths))[prompt_range.start : prompt_range.stop].sum().item()
    )
    normalizer = replace(batches[0].normalizer, tokens=max(world.sum(tokens)[0], 1))
    for batch in batches:
        row_mask = is_trained[batch.completion_index].to(batch.loss_mask.device)
        batch.loss_mask = batch.loss_mask * row_mask[:, None]
        batch.normalizer = normalizer


def soft_overlong_punishment(length: int, max_completion_len: int, soft_punish_cache: int) -> float:
    """Compute DAPO's penalty for an overlong completion, from 0 to -1.

    The penalty is 0 up to max_completion_len - soft_punish_cache tokens. It then falls linearly, to
    -1 at max_completion_len.

    Example: with a maximum of 100 and a cache of 20, lengths 80, 90, 100 and 120 give 0, -0.5, -1
    and -1.
    Source: DAPO eq. 13 (arXiv 2503.14476); TRL's get_soft_overlong_punishment.
    """
    free = max_completion_len - soft_punish_cache
    if length <= free:
        return 0.0
    if length > max_completion_len:
        return -1.0
    return (free - length) / soft_punish_cache
