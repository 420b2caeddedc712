"""Held-out rows: what a policy answers and what that earns, sampled at temperature 1 and
greedily."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import Tensor

from minivlmrl.algorithms.answers import equal_share, pieces
from minivlmrl.reward_functions.calls import ask_by_name, recipe_columns
from minivlmrl.reward_functions.names import required_columns
from minivlmrl.run.metrics import progress_bar
from minivlmrl.sampling.sample import RunSampler
from minivlmrl.scale.ranks import World

BATCH_SIZE = 64  # rows that a rank generates together


@dataclass
class Answer:
    """What the model answers to a held-out row."""

    text: str
    score: float  # of the first reward
    extent: tuple[float, float] | None  # see box_rewards.box_columns


@dataclass
class Evaluation:
    """Held-out results: means over the rows that could be judged, and the greedy answers for the
    report, row by row.

    `values` has sampled and greedy (the first reward of a completion drawn at temperature 1, and of
    the likeliest), format (the second, of what was sampled, if it is one), both of each further
    reward, and the first over rows marked unseen. A stage adds what it can tell, such as pairs.
    """

    values: dict[str, float]
    answers: list[Answer]


def evaluate(
    model, processor, rows, sampling, world: World, rewards=("accuracy", "format"), gather=True
) -> Evaluation:
    """Answer held-out rows, once sampled and once greedily.

    Args:
        sampling: says where answers end; the rest is the evaluation's own, so that runs stay
            comparable.
        rewards: what counts, the form, and what else is to be reported.
        gather: see scale/sharding.rollout_weights.
    """
    plain = replace(sampling, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0)

    def describe(row, completions: list, earned: list, extent) -> tuple:
        [completion], [values] = completions, earned
        return (
            values,
            bool(row.columns.get("unseen")),
            Answer(processor.decode(completion.ids), values[0], extent),
        )

    means = {}
    for name, temperature in (("sampled", 1.0), ("greedy", 0.0)):
        sample = RunSampler(
            model, processor, replace(plain, temperature=temperature), world, gather
        )
        said = list(chain(*answer_rows(sample, rows, 1, rewards, "evaluation", describe)))
        earned = torch.tensor([values for values, _, _ in said], dtype=torch.float64)  # (rows, K)
        unseen = torch.tensor([unseen for _, unseen, _ in said])
        means[name], means[f"unseen {name}"] = (
            x.nanmean(0).tolist() for x in (earned, earned[unseen])
        )
    named = rewards[1].endswith("format")  # else the second is one of the further rewards
    values = {name: means[name][0] for name in ("sampled", "greedy")}
    values |= {"format": means["sampled"][1]} if named else {}
    further = range(1 + named, len(rewards))
    values |= {
        f"{rewards[k]} {name}": means[name][k] for k in further for name in ("sampled", "greedy")
    }
    values |= {name: mean[0] for name, mean in means.items() if name.startswith("unseen")}
    values = {name: value for name, value in values.items() if not math.isnan(value)}
    return Evaluation(values, [answer for _, _, answer in said])


def answer_rows(
    sample: RunSampler, rows, count: int, rewards, key: str, describe: Callable
) -> Iterator[list]:
    """Answer each row `count` times; the ranks share each batch, and each rank gets all of it, in
    the order of rows.

    Args:
        key: what the draws depend on, beside the number of the row.
        describe: (row, completions, what each earns (count, K), extent of the image) -> what is
            yielded of a row.
    """
    world, bar = sample.world, progress_bar("answers", len(rows), sample.world.is_main, leave=False)
    # a row without one of these is not judged
    judged_by = dict.fromkeys(required_columns(list(rewards)))
    for numbers in pieces(range(len(rows)), BATCH_SIZE * world.size):
        world.leave()
        batch = [replace(rows[i], key=f"{key}/{i}", index=i) for i in equal_share(numbers, world)]
        batch = [replace(row, columns=judged_by | row.columns) for row in batch]
        earned, completions, columns = draw(sample, batch, count, rewards)
        earned, extents = (
            earned.view(len(batch), count, len(rewards)).tolist(),
            columns["answer_extents"][::count],
        )
        found = world.gather_objects(list(map(describe, batch, completions, earned, extents)))
        yield list(chain(*zip(*found, strict=True)))[: len(numbers)]
        bar.update(len(numbers))
    bar.close()


def draw(sample: RunSampler, rows, count: int, rewards) -> tuple[Tensor, list, dict]:
    """Draw `count` completions of each row; returns what they earn, (n, K), the groups, and the
    rewards' columns."""
    prompts = [row.prompt(sample.processor) for row in rows]
    completions = sample(prompts, count, [row.key for row in rows])
    columns = recipe_columns(rows, prompts, completions, sample.processor)
    return ask_by_name(rewards, columns), completions, columns
