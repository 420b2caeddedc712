"""Evaluate a model on held-out rows: mean rewards for sampled and greedy answers."""

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
from minivlmrl.errors import error_phase
from minivlmrl.generation.environments import make_sampler
from minivlmrl.generation.sampler import Sampler
from minivlmrl.model.decoder import VisionLanguageModel
from minivlmrl.rewards.columns import call_rewards, reward_columns
from minivlmrl.rewards.registry import Reward, RewardLog, held_out_rewards, required_columns
from minivlmrl.run.progress_bar import ProgressBar
from minivlmrl.trainers.offline import split

BATCH_SIZE = 64  # maximum rows per rank and batch
BATCH_TOKENS = 16384  # upper limit on sampling.max_batch_tokens in evaluations
UNFILTERED = {**NO_TRUNCATION, "repetition_penalty": 1.0}  # options to sample from the model's full distribution
# {kind of training rows: evaluation metric without sampling}
ANSWER_METRICS = {"demonstrations": "eval/loss", "pairs": "eval/pair_accuracy"}


def evaluate(
    model: VisionLanguageModel, processor: Processor, rows: Dataset, config: RunConfig, world: World,
    steps: tuple[int, int] = (1, 1),
) -> dict[str, float]:  # fmt: skip
    """Sample answers to held-out rows; return mean rewards, such as {"eval/accuracy_greedy": 0.9}.

    eval/accuracy_sampled: mean `accuracy` reward at temperature 1; eval/accuracy_greedy: at temperature 0.
    data.eval_without_images adds eval/accuracy_gray_image (gray images) and eval/accuracy_swapped_image (another row's
    images). If a reward is None for a completion, the mean leaves it out.

    Args:
        steps: global_step and max_steps for reward functions.
    """
    rewards = [replace(reward, log=RewardLog(*steps)) for reward in held_out_rewards(config)]
    # no top_p or repetition_penalty, to make accuracies comparable between runs
    sampling = replace(evaluation_sampling(config.sampling), **UNFILTERED)
    ways = {"sampled": None, "greedy": None}
    if config.data.eval_without_images:
        ways |= IMAGE_ABLATIONS
    means = {}
    for name, images in ways.items():
        options = replace(sampling, temperature=0.0 if name == "greedy" else 1.0)
        sample = make_sampler(model, processor, options, world, config.rollout.gather_weights)
        parts = generate_for_rows(
            sample, rows, 1, rewards, "evaluation", lambda _row, _completions, scores: scores[0], images
        )
        scores = torch.tensor(list(chain.from_iterable(parts)), dtype=torch.float64)  # shape (rows, reward functions)
        means[name] = scores.nanmean(0).tolist()
    values = metrics_by_name([reward.name for reward in rewards], means).items()
    return {name: value for name, value in values if not math.isnan(value)}


def evaluation_sampling(sampling: SamplingOptions) -> SamplingOptions:
    """Return sampling options for evaluations: built-in sampler, at most 16,384 tokens per batch."""
    return replace(
        sampling, engine="native", max_batch_tokens=min(sampling.max_batch_tokens or BATCH_TOKENS, BATCH_TOKENS)
    )


def metrics_by_name(rewards: Sequence[str], means: dict[str, list]) -> dict[str, float]:
    """Convert mean rewards {"greedy": [...], "sampled": [...]} to metrics such as "eval/accuracy_greedy"."""
    values = {f"eval/{rewards[0]}_{way}": mean[0] for way, mean in means.items()}
    for k, reward in enumerate(rewards[1:], start=1):
        values[f"eval/{reward}_sampled"] = means["sampled"][k]
        if not (k == 1 and reward.endswith("format")):
            values[f"eval/{reward}_greedy"] = means["greedy"][k]
    return values


def noise(before: float, after: float, num_rows: int) -> float:
    """Return twice the standard error of the difference between two means of values in [0, 1].

    Args:
        before, after: the means, each over num_rows values.
    """
    # Estimate variances as mean * (1 - mean), the maximum for values in [0, 1]. With one more correct and one more
    # wrong answer, the standard error stays above 0 even if all answers are wrong.
    means = [(value * num_rows + 1) / (num_rows + 2) for value in (before, after)]
    return 2 * math.sqrt(sum(mean * (1 - mean) for mean in means) / num_rows)


def lowered_metrics(config: RunConfig) -> set[str]:
    """Return the metrics that training should lower: the loss, and rewards with a negative weight."""
    lowered = [name for name, weight in config.rewards.items() if weight < 0]
    return {"eval/loss", *(f"eval/{name}_{way}" for name in lowered for way in ("sampled", "greedy", *IMAGE_ABLATIONS))}


def gray_images(row: Row, _rows: Dataset) -> dict[str, list]:
    return {
        "images": [PIL.Image.new("RGB", image.size, "gray") for image in row.images],
        "videos": [video.gray() for video in row.videos],
    }


def images_of_next_row(row: Row, rows: Dataset) -> dict[str, list]:
    """Return the images and videos of the next row that has any, for the metric eval/accuracy_swapped_image.

    The returned images get the sizes of the row's own images, so that box coordinates have the same range.
    """
    others = {}
    for name in ("images", "videos"):
        number = len(getattr(row, name))
        near = (getattr(rows[(row.index + distance) % len(rows)], name) for distance in range(1, len(rows) + 1))
        others[name] = list(islice(cycle(next(filter(len, near))), number)) if number else []
    others["images"] = [image.resize(own.size) for image, own in zip(others["images"], row.images, strict=True)]
    return others


# {end of a metric name, as in eval/accuracy_gray_image: function (row, all rows) -> changed images and videos}
IMAGE_ABLATIONS = {"gray_image": gray_images, "swapped_image": images_of_next_row}


def generate_for_rows(
    sample: Sampler,
    rows: Dataset,
    count: int,
    rewards: Sequence[Reward],
    key: str,
    describe: Callable,
    images: Callable[[Row, Dataset], dict[str, list]] | None = None,
) -> Iterator[list]:
    """Sample completions for all rows, and yield a list of results per batch.

    A rank samples completions for its share of the rows, but yields results for all rows.

    Args:
        key: sampling seed, combined with the row index.
        describe: function (row, completions, rewards) -> result; `rewards` has a list of numbers per completion.
        images: function in IMAGE_ABLATIONS, None = keep the images.
    """
    world = sample.world
    bar = ProgressBar("answers", len(rows), world.is_main, leave=False)
    # for columns missing from held-out rows, rewards get None
    no_columns = dict.fromkeys(required_columns(rewards))
    for numbers in split(range(len(rows)), BATCH_SIZE * world.size):
        world.stop_if_preempted()
        batch = []
        for index in world.shard_evenly(numbers)[0]:
            row = rows[index]
            row = replace(row, key=f"{key}/{index}", index=index, columns=no_columns | row.columns)
            if images is not None:
                row = replace(row, **images(row, rows))
            batch.append(row)
        with error_phase("evaluation", batch):
            scores, completions = generate_and_score(sample, batch, count, rewards)
        scores = scores.view(len(batch), count, len(rewards)).tolist()
        described = [describe(*answer) for answer in zip(batch, completions, scores, strict=True)]
        # restore the row order: with two ranks, rank 0 has rows 0, 2, 4, ...
        in_order = chain.from_iterable(zip(*world.gather_objects(described), strict=True))
        yield list(in_order)[: len(numbers)]
        bar.update(len(numbers))
    bar.close()


def generate_and_score(
    sample: Sampler, rows: Sequence[Row], count: int, rewards: Sequence[Reward]
) -> tuple[Tensor, list[list[Completion]]]:
    """Sample `count` completions per row; return rewards (rows * count, functions), and completions."""
    prompts = [row.prompt(sample.processor) for row in rows]
    sample.world.barrier()
    completions = sample(prompts, count, [row.key for row in rows])
    columns = reward_columns(rows, prompts, completions, sample.processor)
    rewards = [replace(reward, world=sample.world) for reward in rewards]
    return call_rewards(rewards, columns), completions
