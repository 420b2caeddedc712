"""Held-out rows: what a policy answers, sampled at temperature 1 and greedily, and earns."""

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
from minivlmrl.rewards.registry import Reward, columns_of, held_out_rewards, recipe_columns
from minivlmrl.run.metrics import progress_bar
from minivlmrl.trainers.offline import split

BATCH_SIZE = 64  # rows that a rank generates together


def evaluate(
    model: Qwen2_5_VL, processor: Processor, rows: Dataset, config: RunConfig, world: World
) -> dict[str, float]:
    """Answer held-out rows, once sampled and once greedily; returns means over those judged.

    These are sampled and greedy (the first of data.eval_rewards of a completion drawn at
    temperature 1, and of the likeliest), format (the second, of what was sampled, if it is one),
    both of each further reward, and the first over rows marked unseen. With data.eval_without_images also
    grey and swapped, sampled with grey pictures and with those of the next row.
    """
    rewards = held_out_rewards(config)
    # of the recipe's options only where answers end, so that runs stay comparable
    sampling = replace(config.sampling, engine="own", repetition_penalty=1.0, **NO_TRUNCATION)
    ways = [("sampled", 1.0, None), ("greedy", 0.0, None)]
    if config.data.eval_without_images:
        ways += [(name, 1.0, pictures) for name, pictures in BLIND.items()]
    means = {}
    unseen_means = {}
    for name, temperature, pictures in ways:
        options = replace(sampling, temperature=temperature)
        sample = make_sampler(model, processor, options, world, config.rollout.gather_weights)
        parts = generate_for_rows(
            sample, rows, 1, rewards, "evaluation", earned_and_unseen, pictures
        )
        answers = list(chain.from_iterable(parts))
        earned = torch.tensor([values for values, _ in answers], dtype=torch.float64)  # (rows, K)
        is_unseen = torch.tensor([unseen for _, unseen in answers])
        means[name] = earned.nanmean(0).tolist()
        unseen_means[name] = earned[is_unseen].nanmean(0).tolist()
    values = reported(rewards, means, unseen_means)
    return {name: value for name, value in values.items() if not math.isnan(value)}


def reported(
    rewards: Sequence[Reward], means: dict[str, list], unseen_means: dict[str, list]
) -> dict[str, float]:
    """Name means of K rewards by way of answering, over all rows and over unseen ones."""
    values = {name: mean[0] for name, mean in means.items()}
    for k, reward in enumerate(rewards[1:], start=1):
        if k == 1 and reward.name.endswith("format"):
            values["format"] = means["sampled"][k]
        else:
            values[f"{reward.name} sampled"] = means["sampled"][k]
            values[f"{reward.name} greedy"] = means["greedy"][k]
    for name, mean in unseen_means.items():
        values[f"unseen {name}"] = mean[0]
    return values


def earned_and_unseen(row: Row, _completions: list, earned: list) -> tuple[list[float], bool]:
    """What the one completion of a row earns of each reward, and whether the row is marked."""
    return earned[0], bool(row.columns.get("unseen"))


def grey_pictures(row: Row, _rows: Dataset) -> list[PIL.Image.Image]:
    """Make grey pictures of the sizes of a row's own."""
    return [PIL.Image.new("RGB", image.size, "grey") for image in row.images]


def following_pictures(row: Row, rows: Dataset) -> list[PIL.Image.Image]:
    """Take as many pictures as a row has of the next row that has any."""
    for distance in range(1, len(rows) + 1):
        images = rows[(row.index + distance) % len(rows)].images
        if len(images):
            return list(islice(cycle(images), len(row.images)))
    return []


# what is reported: (row, all rows) -> the pictures that it shows instead
BLIND = {"grey": grey_pictures, "swapped": following_pictures}


def generate_for_rows(
    sample: Sampler,
    rows: Dataset,
    count: int,
    rewards: Sequence[Reward],
    key: str,
    describe: Callable,
    pictures: Callable[[Row, Dataset], list[PIL.Image.Image]] | None = None,
) -> Iterator[list]:
    """Answer each row `count` times; ranks share each batch, and each gets all of it in order.

    Args:
        key: what the draws depend on, beside the number of the row.
        describe: (row, completions, what each earns (count, K)) -> what is yielded of a row.
        pictures: one of BLIND.
    """
    world = sample.world
    bar = progress_bar("answers", len(rows), world.is_main, leave=False)
    no_columns = dict.fromkeys(columns_of(rewards))  # a row without one of these is not judged
    for numbers in split(range(len(rows)), BATCH_SIZE * world.size):
        world.stop_if_preempted()
        share, _ = world.shard_evenly(numbers)
        batch = []
        for index in share:
            row = rows[index]
            columns = no_columns | row.columns
            row = replace(row, key=f"{key}/{index}", index=index, columns=columns)
            if pictures is not None:
                row = replace(row, images=pictures(row, rows))
            batch.append(row)
        scores, completions = generate_and_score(sample, batch, count, rewards)  # (n, K), groups
        earned = scores.view(len(batch), count, len(rewards)).tolist()
        described = [describe(*answer) for answer in zip(batch, completions, earned, strict=True)]
        all_ranks = world.gather_objects(described)
        in_order = chain.from_iterable(zip(*all_ranks, strict=True))  # a rank has every size-th row
        yield list(in_order)[: len(numbers)]
        bar.update(len(numbers))
    bar.close()


def generate_and_score(
    sample: Sampler, rows: Sequence[Row], count: int, rewards: Sequence[Reward]
) -> tuple[Tensor, list[list[Completion]]]:
    """Sample `count` completions of each row; return their rewards, (n, K), and the groups."""
    prompts = [row.prompt(sample.processor) for row in rows]
    completions = sample(prompts, count, [row.key for row in rows])
    columns = recipe_columns(rows, prompts, completions, sample.processor)
    rewards = [reward.on(sample.world) for reward in rewards]
    return call_rewards(rewards, columns), completions
