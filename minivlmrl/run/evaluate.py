"""Evaluate a model: sample answers to held-out rows at temperature 1 and greedily, and compute their rewards."""

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
# largest number of prompt and completion tokens that a rank samples at once in an evaluation; if
# sampling.max_batch_tokens is lower, that option is the limit
BATCH_TOKENS = 16384


def evaluate(
    model: VisionLanguageModel, processor: Processor, rows: Dataset, config: RunConfig, world: World
) -> dict[str, float]:
    """Sample answers to the held-out rows, and return {metric, such as eval/accuracy_greedy: mean reward}.

    A metric is called eval/REWARD_WAY, where WAY says how the answers were sampled. WAY is `sampled` for temperature 1,
    or `greedy` for the most likely tokens. With data.eval_without_images, two more values of WAY show how much answers
    depend on images: `gray_image` for gray images, and `swapped_image` for the images of the next row. The mean leaves
    out rows that a reward cannot score; if a reward cannot score any row, its metric is missing.
    """
    rewards = held_out_rewards(config)
    # An evaluation switches off filters such as top_p and the repetition penalty, so that the metrics of different runs
    # are comparable. It keeps the options that end completions.
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
    """Return the sampling options for an evaluation, with `changes` applied: the native engine, and batches of bounded
    size."""
    max_batch_tokens = min(sampling.max_batch_tokens or BATCH_TOKENS, BATCH_TOKENS)
    changed = {"engine": "native", "max_batch_tokens": max_batch_tokens, **changes}
    return replace(sampling, **changed)


def metric_name(reward: str, way: str) -> str:
    """Return the name of an evaluation metric, for example eval/accuracy_greedy."""
    return f"eval/{reward}_{way}"


def metrics_by_name(rewards: Sequence[Reward], means: dict[str, list]) -> dict[str, float]:
    """Select the metrics to report from {way of sampling: mean of each reward}.

    The first reward is reported for each way of sampling. Further rewards are reported for `sampled` and `greedy`
    answers; a format reward in second place only for `sampled`.
    """
    values = {metric_name(rewards[0].name, way): mean[0] for way, mean in means.items()}
    for k, reward in enumerate(rewards[1:], start=1):
        values[metric_name(reward.name, "sampled")] = means["sampled"][k]
        if not (k == 1 and reward.name.endswith("format")):
            values[metric_name(reward.name, "greedy")] = means["greedy"][k]
    return values


def check_best_metric(config: RunConfig):
    """Raise ValueError if the option best_metric does not name an evaluation metric."""
    rewards = config.eval_rewards
    ways = ["sampled", "greedy", *(IMAGE_ABLATIONS if config.data.eval_without_images else ())]
    names = [metric_name(rewards[0], way) for way in ways]
    names += [metric_name(name, way) for name in rewards[1:] for way in ways[:2]]
    names += ["eval/pair_accuracy", "eval/loss"]
    if config.best_metric is not None and config.best_metric not in names:
        raise ValueError(f"best_metric is {config.best_metric!r:.80}, but it must be one of {', '.join(names)}")


def gray_images(row: Row, _rows: Dataset) -> list[PIL.Image.Image]:
    """Replace each image of a row by a gray image of the same size."""
    return [PIL.Image.new("RGB", image.size, "grey") for image in row.images]


def images_of_next_row(row: Row, rows: Dataset) -> list[PIL.Image.Image]:
    """Replace the images of a row by images of the next row that has images."""
    for distance in range(1, len(rows) + 1):
        images = rows[(row.index + distance) % len(rows)].images
        if len(images):
            return list(islice(cycle(images), len(row.images)))
    return []


# {way of sampling: function (row, all rows) that returns the images to show in place of the row's images}
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
    """Sample `count` completions for each row, and yield the results of one batch of rows after the other.

    Each rank samples answers for its share of the rows in a batch. All ranks yield the results of the whole batch, in
    the order of the rows.

    Args:
        key: first part of each row's random key; the row's index is the second part.
        describe: function (row, completions, rewards) that returns a row's result. `rewards`
            has K rewards for each of the `count` completions.
        images: function from IMAGE_ABLATIONS that replaces each row's images, or None.
    """
    world = sample.world
    bar = progress_bar("answers", len(rows), world.is_main, leave=False)
    # A missing column has the value None, because held-out rows may lack columns that a reward reads.
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
        # Results of the ranks are interleaved, because rank i % world.size has answered row i of the batch.
        in_order = chain.from_iterable(zip(*all_ranks, strict=True))
        yield list(in_order)[: len(numbers)]
        bar.update(len(numbers))
    bar.close()


def generate_and_score(
    sample: Sampler, rows: Sequence[Row], count: int, rewards: Sequence[Reward]
) -> tuple[Tensor, list[list[Completion]]]:
    """Return the rewards (rows * count, K) of K reward functions, and for each row its `count` sampled completions."""
    prompts = [row.prompt(sample.processor) for row in rows]
    sample.world.wait()  # for a rank that reads its images slowly
    completions = sample(prompts, count, [row.key for row in rows])
    columns = reward_columns(rows, prompts, completions, sample.processor)
    rewards = [reward.on(sample.world) for reward in rewards]
    return call_rewards(rewards, columns), completions
