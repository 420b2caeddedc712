"""Evaluate a policy: generate sampled and greedy answers to held-out rows, and score them."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, cycle, islice

import PIL.Image
import torch
from torch import Tensor

from minivlmrl.config.options import NO_TRUNCATION, RunConfig, SamplingOptions
from minivlmrl.data.processor import Processor
from minivlmrl.data.rows import Completion, Dataset, Row
from minivlmrl.distributed.process_group import World
from minivlmrl.errors import phase
from minivlmrl.generation.environments import make_sampler
from minivlmrl.generation.sampler import Sampler
from minivlmrl.model.decoder import VisionLanguageModel
from minivlmrl.rewards.columns import call_rewards, reward_columns
from minivlmrl.rewards.registry import Reward, held_out_rewards, required_columns
from minivlmrl.run.metrics import progress_bar
from minivlmrl.trainers.offline import split

BATCH_SIZE = 64  # largest number of rows that a rank answers at the same time
# largest number of prompt and completion tokens in a rank's batch, so that an evaluation needs no more memory than a
# rollout; sampling.max_batch_tokens can be lower
BATCH_TOKENS = 16384


def evaluate(
    model: VisionLanguageModel, processor: Processor, rows: Dataset, config: RunConfig, world: World
) -> dict[str, float]:
    """Answer the held-out rows and return the mean of each reward, by the name of the metric.

    A metric's name is eval/REWARD_WAY, for example eval/accuracy_greedy. WAY is `sampled` (temperature 1) or `greedy`.
    With data.eval_without_images, answers are also sampled with gray images (`gray_image`) and with the next row's
    images (`swapped_image`). Rows that a reward cannot score do not count for its mean, and a metric is missing if the
    reward cannot score any row.
    """
    rewards = held_out_rewards(config)
    # An evaluation uses only the stopping rules among the recipe's sampling options. Truncation and the repetition
    # penalty are switched off, so that the metrics of different runs are comparable.
    sampling = evaluation_sampling(config.sampling, repetition_penalty=1.0, **NO_TRUNCATION)
    ways = [("sampled", 1.0, None), ("greedy", 0.0, None)]
    if config.data.eval_without_images:
        ways += [(name, 1.0, images) for name, images in IMAGE_ABLATIONS.items()]
    means = {}
    for name, temperature, images in ways:
        options = replace(sampling, temperature=temperature)
        sample = make_sampler(model, processor, options, world, config.rollout.gather_weights)
        parts = generate_for_rows(
            sample, rows, 1, rewards, "evaluation", lambda _row, _completions, scores: scores[0], images
        )
        scores = torch.tensor(list(chain.from_iterable(parts)), dtype=torch.float64)  # (rows, K): each row's K rewards
        means[name] = scores.nanmean(0).tolist()
    values = metrics_by_name(rewards, means)
    return {name: value for name, value in values.items() if not math.isnan(value)}


def evaluation_sampling(sampling: SamplingOptions, **changes: float | None) -> SamplingOptions:
    """Return the sampling options of an evaluation: the native engine, bounded batches, and `changes`."""
    max_batch_tokens = min(sampling.max_batch_tokens or BATCH_TOKENS, BATCH_TOKENS)
    changed = {"engine": "native", "max_batch_tokens": max_batch_tokens, **changes}
    return replace(sampling, **changed)


def metric_name(reward: str, way: str) -> str:
    """Return the name of an evaluation metric, for example eval/accuracy_greedy."""
    return f"eval/{reward}_{way}"


def metrics_by_name(rewards: Sequence[Reward], means: dict[str, list]) -> dict[str, float]:
    """Select metrics from {way of answering: each reward's mean}.

    The first reward has a metric for each way of answering. All further rewards have the metrics `sampled` and
    `greedy`, except that a format reward in second place has only the metric `sampled`.
    """
    values = {metric_name(rewards[0].name, way): mean[0] for way, mean in means.items()}
    for k, reward in enumerate(rewards[1:], start=1):
        values[metric_name(reward.name, "sampled")] = means["sampled"][k]
        if not (k == 1 and reward.name.endswith("format")):
            values[metric_name(reward.name, "greedy")] = means["greedy"][k]
    return values


def check_best_metric(config: RunConfig):
    """Raise ValueError if best_metric is not the name of an evaluation metric."""
    rewards = config.eval_rewards
    ways = ["sampled", "greedy", *(IMAGE_ABLATIONS if config.data.eval_without_images else ())]
    names = [metric_name(rewards[0], way) for way in ways]
    names += [metric_name(name, way) for name in rewards[1:] for way in ways[:2]]
    names += ["eval/pair_accuracy", "eval/loss"]
    if config.best_metric is not None and config.best_metric not in names:
        raise ValueError(f"best_metric is {config.best_metric!r:.80}, but it must be one of {', '.join(names)}")


def gray_images(row: Row, _rows: Dataset) -> list[PIL.Image.Image]:
    """Return a plain gray image of the same size for each image in a row."""
    return [PIL.Image.new("RGB", image.size, "grey") for image in row.images]


def images_of_next_row(row: Row, rows: Dataset) -> list[PIL.Image.Image]:
    """Return as many images as a row has, taken from the next row that has images."""
    for distance in range(1, len(rows) + 1):
        images = rows[(row.index + distance) % len(rows)].images
        if len(images):
            return list(islice(cycle(images), len(row.images)))
    return []


# way of answering -> function (row, all rows) that returns images to use instead of the row's own
IMAGE_ABLATIONS = {"gray_image": gray_images, "swapped_image": images_of_next_row}


def generate_for_rows(
    sample: Sampler,
    rows: Dataset,
    count: int,
    rewards: Sequence[Reward],
    key: str,
    describe: Callable,
    images: Callable[[Row, Dataset], list[PIL.Image.Image]] | None = None,
) -> Iterator[list]:
    """Sample `count` completions for each row, and yield a list of results per batch of rows.

    A batch's rows are divided among the ranks. Every rank yields the results for the whole batch, in row order.

    Args:
        key: first part of each row's random key; the row's index is the second part.
        describe: function (row, completions, rewards) that returns a row's result. `rewards`
            has K rewards for each of the `count` completions.
        images: function from IMAGE_ABLATIONS that replaces each row's images, or None.
    """
    world = sample.world
    bar = progress_bar("answers", len(rows), world.is_main, leave=False)
    # Missing columns are None, because held-out rows may lack columns that a reward needs.
    no_columns = dict.fromkeys(required_columns(rewards))
    for numbers in split(range(len(rows)), BATCH_SIZE * world.size):
        world.stop_if_preempted()
        share, _ = world.shard_evenly(numbers)
        batch = []
        for index in share:
            row = rows[index]
            columns = no_columns | row.columns
            row = replace(row, key=f"{key}/{index}", index=index, columns=columns)
            if images is not None:
                row = replace(row, images=images(row, rows))
            batch.append(row)
        with phase("evaluation", batch):
            scores, completions = generate_and_score(sample, batch, count, rewards)
        rewards_of_rows = scores.view(len(batch), count, len(rewards)).tolist()
        described = [describe(*answer) for answer in zip(batch, completions, rewards_of_rows, strict=True)]
        all_ranks = world.gather_objects(described)
        # Results are interleaved, because rank i % world.size has answered row i of the batch.
        in_order = chain.from_iterable(zip(*all_ranks, strict=True))
        yield list(in_order)[: len(numbers)]
        bar.update(len(numbers))
    bar.close()


def generate_and_score(
    sample: Sampler, rows: Sequence[Row], count: int, rewards: Sequence[Reward]
) -> tuple[Tensor, list[list[Completion]]]:
    """Return the rewards (rows * count, K) of `count` sampled completions for each row, and each row's completions."""
    prompts = [row.prompt(sample.processor) for row in rows]
    sample.world.wait()  # for a rank that reads its images slowly
    completions = sample(prompts, count, [row.key for row in rows])
    columns = reward_columns(rows, prompts, completions, sample.processor)
    rewards = [reward.on(sample.world) for reward in rewards]
    return call_rewards(rewards, columns), completions
