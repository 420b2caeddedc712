"""Evaluate a policy: answer the held-out rows, sampled and greedily, and compute their rewards."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, cycle, islice

import PIL.Image
import torch
from torch import Tensor

from minivlmrl.config.options import NO_TRUNCATION, RunConfig
from minivlmrl.data.processor import Processor
from minivlmrl.data.rows import Completion, Dataset, Row
from minivlmrl.distributed.process_group import World
from minivlmrl.generation.sampler import Sampler, make_sampler
from minivlmrl.model.decoder import Qwen2_5_VL
from minivlmrl.rewards.columns import call_rewards
from minivlmrl.rewards.registry import Reward, held_out_rewards, recipe_columns, required_columns
from minivlmrl.run.metrics import progress_bar
from minivlmrl.trainers.offline import split

BATCH_SIZE = 64  # rows that a rank generates together


def evaluate(
    model: Qwen2_5_VL, processor: Processor, rows: Dataset, config: RunConfig, world: World
) -> dict[str, float]:
    """Answer the held-out rows and return the mean of each reward, by metric name.

    A metric is named eval/REWARD_WAY. The ways are `sampled` (temperature 1) and `greedy` and, with
    data.eval_without_images, `gray_image` and `swapped_image` (both sampled; gray images, or the
    images of the next row). eval/unseen/... are means over the rows whose column `unseen` is true. A
    mean leaves out rows that a reward cannot score, and a metric without any such row is missing.
    """
    rewards = held_out_rewards(config)
    # Only stopping rules come from the recipe; filters are reset, so that runs stay comparable.
    sampling = replace(config.sampling, engine="native", repetition_penalty=1.0, **NO_TRUNCATION)
    ways = [("sampled", 1.0, None), ("greedy", 0.0, None)]
    if config.data.eval_without_images:
        ways += [(name, 1.0, images) for name, images in IMAGE_ABLATIONS.items()]
    means = {}
    unseen_means = {}
    for name, temperature, images in ways:
        options = replace(sampling, temperature=temperature)
        sample = make_sampler(model, processor, options, world, config.rollout.gather_weights)
        parts = generate_for_rows(sample, rows, 1, rewards, "evaluation", scores_and_unseen, images)
        answers = list(chain.from_iterable(parts))
        scores = torch.tensor([values for values, _ in answers], dtype=torch.float64)  # (rows, K)
        is_unseen = torch.tensor([unseen for _, unseen in answers])
        means[name] = scores.nanmean(0).tolist()
        unseen_means[name] = scores[is_unseen].nanmean(0).tolist()
    values = metrics_by_name(rewards, means, unseen_means)
    return {name: value for name, value in values.items() if not math.isnan(value)}


def metric_name(reward: str, way: str) -> str:
    """Return the name of the metric of a reward: eval/accuracy_greedy."""
    return f"eval/{reward}_{way}"


def metrics_by_name(
    rewards: Sequence[Reward], means: dict[str, list], unseen_means: dict[str, list]
) -> dict[str, float]:
    """Select and name the metrics of an evaluation.

    The first reward has a metric for each way of answering, also over unseen rows. Further rewards
    have `sampled` and `greedy`; a format reward in the second place has only `sampled`.

    Args:
        means, unseen_means: way of answering -> means of the K rewards over all, or unseen, rows.
    """
    first = rewards[0].name
    values = {metric_name(first, way): mean[0] for way, mean in means.items()}
    for k, reward in enumerate(rewards[1:], start=1):
        values[metric_name(reward.name, "sampled")] = means["sampled"][k]
        if not (k == 1 and reward.name.endswith("format")):
            values[metric_name(reward.name, "greedy")] = means["greedy"][k]
    for way, mean in unseen_means.items():
        values[metric_name(f"unseen/{first}", way)] = mean[0]
    return values


def check_best_metric(config: RunConfig):
    """Raise ValueError if best_metric is not the name of an evaluation metric."""
    rewards = config.data.eval_rewards
    ways = ["sampled", "greedy", *(IMAGE_ABLATIONS if config.data.eval_without_images else ())]
    names = [metric_name(rewards[0], way) for way in ways]
    names += [metric_name(name, way) for name in rewards[1:] for way in ways[:2]]
    names += [metric_name(f"unseen/{rewards[0]}", way) for way in ways]
    names += ["eval/pair_accuracy", "eval/loss"]
    if config.best_metric is not None and config.best_metric not in names:
        raise ValueError(
            f"best_metric is {config.best_metric!r:.80}, it must be one of {', '.join(names)}"
        )


def scores_and_unseen(row: Row, _completions: list, scores: list) -> tuple[list[float], bool]:
    """Return the rewards (K,) of the only completion of a row, and whether the row is unseen."""
    return scores[0], bool(row.columns.get("unseen"))


def gray_images(row: Row, _rows: Dataset) -> list[PIL.Image.Image]:
    """Return a gray image of the same size for each image of a row."""
    return [PIL.Image.new("RGB", image.size, "grey") for image in row.images]


def images_of_next_row(row: Row, rows: Dataset) -> list[PIL.Image.Image]:
    """Return as many images as a row has, taken from the next row that has images."""
    for distance in range(1, len(rows) + 1):
        images = rows[(row.index + distance) % len(rows)].images
        if len(images):
            return list(islice(cycle(images), len(row.images)))
    return []


# metric -> function of a row and all rows, which returns the images to show in place of its own
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

    The ranks share the rows of a batch, and every rank yields the results of all of them in order.

    Args:
        key: random key of the samples, to which the index of the row is added.
        describe: function of a row, its completions and their rewards (count, K), which returns the
            result of the row.
        images: function of IMAGE_ABLATIONS that replaces the images of a row.
    """
    world = sample.world
    bar = progress_bar("answers", len(rows), world.is_main, leave=False)
    no_columns = dict.fromkeys(required_columns(rewards))  # rewards skip rows without a column
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
        scores, completions = generate_and_score(sample, batch, count, rewards)  # (n, K), groups
        rewards_of_rows = scores.view(len(batch), count, len(rewards)).tolist()
        described = [
            describe(*answer) for answer in zip(batch, completions, rewards_of_rows, strict=True)
        ]
        all_ranks = world.gather_objects(described)
        in_order = chain.from_iterable(zip(*all_ranks, strict=True))  # row i is on rank i % size
        yield list(in_order)[: len(numbers)]
        bar.update(len(numbers))
    bar.close()


def generate_and_score(
    sample: Sampler, rows: Sequence[Row], count: int, rewards: Sequence[Reward]
) -> tuple[Tensor, list[list[Completion]]]:
    """Sample `count` completions per row; return their rewards (n, K) and one group per row."""
    prompts = [row.prompt(sample.processor) for row in rows]
    completions = sample(prompts, count, [row.key for row in rows])
    columns = recipe_columns(rows, prompts, completions, sample.processor)
    rewards = [reward.on(sample.world) for reward in rewards]
    return call_rewards(rewards, columns), completions
