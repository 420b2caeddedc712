"""Held-out rows: what a policy answers, sampled at temperature 1 and greedily, and earns."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain, cycle, islice

import PIL.Image
import torch
from torch import Tensor

from minivlmrl.algorithms.answers import pieces
from minivlmrl.environments.tool_sampler import build_sampler
from minivlmrl.reward_functions.names import columns_of, recipe_columns
from minivlmrl.rewards import ask_rewards
from minivlmrl.rows import Row
from minivlmrl.run.metrics import progress_bar
from minivlmrl.sampling.sample import RunSampler
from minivlmrl.scale.ranks import World

BATCH_SIZE = 64  # rows that a rank generates together


def evaluate(model, processor, rows, config, world: World) -> dict[str, float]:
    """Answer held-out rows, once sampled and once greedily; returns means over those judged.

    These are sampled and greedy (the first of data.eval_rewards of a completion drawn at
    temperature 1, and of the likeliest), format (the second, of what was sampled, if it is one),
    both of each further reward, and the first over rows marked unseen. With data.eval_blind also
    grey and swapped, sampled with grey pictures and with those of the next row.
    """
    rewards, gather = config.held_out_rewards, config.rollout.gather_weights
    # of the recipe's only where answers end, so that runs stay comparable
    plain = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}

    def describe(row, completions: list, earned: list) -> tuple:
        return earned[0], bool(row.columns.get("unseen"))

    means = {}
    ways = {"sampled": (1.0, None), "greedy": (0.0, None)}
    ways |= {name: (1.0, see) for name, see in BLIND.items() if config.data.eval_blind}
    for name, (temperature, see) in ways.items():
        options = replace(config.sampling, **plain, temperature=temperature)
        sample = build_sampler(model, processor, options, world, gather)
        judged = list(chain(*answer_rows(sample, rows, 1, rewards, "evaluation", describe, see)))
        earned = torch.tensor([values for values, _ in judged], dtype=torch.float64)  # (rows, K)
        unseen = torch.tensor([unseen for _, unseen in judged])
        means[name] = earned.nanmean(0).tolist()
        means[f"unseen {name}"] = earned[unseen].nanmean(0).tolist()
    values = {name: means[name][0] for name in ways}
    for k, reward in enumerate(rewards[1:], 1):
        if k == 1 and reward.name.endswith("format"):
            values["format"] = means["sampled"][1]
        else:
            values |= {f"{reward.name} {name}": means[name][k] for name in ("sampled", "greedy")}
    values |= {name: mean[0] for name, mean in means.items() if name.startswith("unseen")}
    return {name: value for name, value in values.items() if not math.isnan(value)}


def following_pictures(row: Row, rows) -> list[PIL.Image.Image]:
    """Take as many pictures as a row has of the next row that has any."""
    others = (rows[(row.index + k) % len(rows)].images for k in range(1, len(rows) + 1))
    return list(islice(cycle(next(filter(len, others), ())), len(row.images)))


BLIND = {  # what is reported: (row, all rows) -> the pictures that it shows instead
    "grey": lambda row, _: [PIL.Image.new("RGB", one.size, "grey") for one in row.images],
    "swapped": following_pictures,
}


def answer_rows(
    sample: RunSampler, rows, count: int, rewards, key: str, describe: Callable, see=None
) -> Iterator[list]:
    """Answer each row `count` times; ranks share each batch, and each gets all of it in order.

    Args:
        key: what the draws depend on, beside the number of the row.
        describe: (row, completions, what each earns (count, K)) -> what is yielded of a row.
        see: one of BLIND.
    """
    world = sample.world
    bar = progress_bar("answers", len(rows), world.is_main, leave=False)
    # a row without one of these is not judged
    judged_by = dict.fromkeys(columns_of(rewards))
    for numbers in pieces(range(len(rows)), BATCH_SIZE * world.size):
        world.leave()
        share, _ = world.equal_share(numbers)
        batch = [replace(rows[i], key=f"{key}/{i}", index=i) for i in share]
        batch = [replace(row, columns=judged_by | row.columns) for row in batch]
        if see is not None:
            batch = [replace(row, images=see(row, rows)) for row in batch]
        earned, completions = draw(sample, batch, count, rewards)
        earned = earned.view(len(batch), count, len(rewards)).tolist()
        parts = world.gather_objects(list(map(describe, batch, completions, earned)))
        yield list(chain(*zip(*parts, strict=True)))[: len(numbers)]
        bar.update(len(numbers))
    bar.close()


def draw(sample: RunSampler, rows, count: int, rewards) -> tuple[Tensor, list]:
    """Draw `count` completions of each row; returns what they earn, (n, K), and the groups."""
    prompts = [row.prompt(sample.processor) for row in rows]
    completions = sample(prompts, count, [row.key for row in rows])
    columns = recipe_columns(rows, prompts, completions, sample.processor)
    rewards = [reward.on(sample.world) for reward in rewards]
    return ask_rewards(rewards, columns), completions
