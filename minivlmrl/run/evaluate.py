"""Held-out rows: what a policy answers and what that earns, sampled at temperature 1 and greedily."""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from minivlmrl.reward_functions.columns import ask_by_name, recipe_columns
from minivlmrl.reward_functions.names import required_columns
from minivlmrl.run.metrics import progress_bar
from minivlmrl.sampling.sample import RunSampler
from minivlmrl.scale.ranks import World

BATCH_SIZE = 64  # rows generated together


@dataclass
class Answer:
    """What the model answers to a held-out row."""

    text: str
    score: float  # of the first reward
    extent: tuple[float, float] | None  # see box_rewards.box_columns


@dataclass
class Evaluation:
    """Held-out results: means over the rows that could be judged, and the greedy answers for the report, row by row.

    `values` has sampled and greedy (the first reward of a completion drawn at temperature 1, and of the likeliest),
    format (the second, of what was sampled, if it is one), both of each further reward, and the first over rows marked
    unseen. A stage adds what it can tell, such as pairs.
    """

    values: dict[str, float]
    answers: list[Answer]


def evaluate(model, processor, rows, sampling, world: World, rewards=("accuracy", "format"), gather=True) -> Evaluation:
    """Answer held-out rows, once sampled and once greedily; rank r answers rows r, r + size, ...

    Args:
        sampling: says where answers end; the rest is the evaluation's own, so that runs stay comparable.
        rewards: what counts, the form, and what else is to be reported.
        gather: see scale/sharding.rollout_weights.
    """
    judged_by = dict.fromkeys(required_columns(list(rewards)))  # a held-out row without one of these is not judged
    means, answers = {}, []
    bar = progress_bar("evaluation", 2 * len(rows), world.is_main, leave=False)
    for name, temperature in (("sampled", 1.0), ("greedy", 0.0)):
        drawn = replace(sampling, temperature=temperature)
        if sampling.filtered:
            drawn = replace(drawn, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0)
        results = []  # (rewards (K,), unseen, Answer) of each of this rank's rows
        for numbers in equal_batches(len(rows), world):
            world.leave()
            batch = [replace(rows[i], key=f"evaluation/{i}") for i in numbers]
            batch = [replace(row, columns=judged_by | row.columns) for row in batch]
            values, _, columns = draw(model, processor, batch, 1, drawn, rewards, world, gather)
            unseen = [bool(row.columns.get("unseen")) for row in batch]
            said = map(Answer, columns["completions"], values[:, 0].tolist(), columns["answer_extents"])
            results += zip(values, unseen, said, strict=True)
            bar.update(len(batch) * world.size)
        everything = world.gather_objects(results)  # ranks have equally many; the last rows may be there twice
        in_order = [everything[i % world.size][i // world.size] for i in range(len(rows))]
        earned = torch.stack([value for value, _, _ in in_order])  # (rows, K)
        unseen = torch.tensor([unseen for _, unseen, _ in in_order])
        means[name], means[f"unseen {name}"] = (v.double().nanmean(0).tolist() for v in (earned, earned[unseen]))
        answers = [said for _, _, said in in_order]
    bar.close()
    named = rewards[1].endswith("format")  # else the second is one of the further rewards
    values = {name: means[name][0] for name in ("sampled", "greedy")}
    values |= {"format": means["sampled"][1]} if named else {}
    further = range(1 + named, len(rewards))
    values |= {f"{rewards[k]} {name}": means[name][k] for k in further for name in ("sampled", "greedy")}
    values |= {name: mean[0] for name, mean in means.items() if name.startswith("unseen")}
    return Evaluation({name: value for name, value in values.items() if not math.isnan(value)}, answers)


def equal_batches(count: int, world: World, size: int = BATCH_SIZE) -> list[list[int]]:
    """Row numbers of this rank in batches: every rank has equally many, so the first rows may fill up the last ones.

    Example: 5 rows, 2 ranks, size 2: rank 0 has [0, 2], [4]; rank 1 [1, 3], [0].
    """
    each = -(-count // world.size)
    numbers = [(i * world.size + world.rank) % count for i in range(each)]
    return [numbers[start : start + size] for start in range(0, each, size)]


def draw(model, processor, rows, count: int, sampling, rewards, world, gather=True) -> tuple[Tensor, list, dict]:
    """Draw `count` completions of each row; returns what they earn, (n, K), the groups, and the rewards' columns."""
    prompts, keys = [row.prompt(processor) for row in rows], [row.key for row in rows]
    sample = RunSampler(model, processor, sampling, world, gather)
    completions = sample(prompts, count, keys)
    columns = recipe_columns(rows, prompts, completions, processor)
    return ask_by_name(rewards, columns), completions, columns
