"""Held-out rows: what a policy answers and what that earns, sampled at temperature 1 and greedily."""

import math
from dataclasses import dataclass, field, replace

import torch

from minivlmrl.generate import sample_completions
from minivlmrl.reward_functions.names import required_columns
from minivlmrl.rewards import reward_columns, score
from minivlmrl.rows import Row
from minivlmrl.run.metrics import progress_bar
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
    """Held-out results, each a mean over rows; NaN where no row could be judged."""

    sampled: float  # the first reward of one completion a row, sampled at temperature 1: accuracy, or IoU
    greedy: float  # the same of the likeliest completion
    format: float  # share of sampled completions in the asked form; NaN if the second reward is no ...format
    answers: list[Answer]  # the greedy ones, for the report, in the order of the rows
    more: dict[str, float] = field(default_factory=dict)  # further rewards, and the first over rows marked unseen
    pairs: float | None = None  # share of held-out pairs with the chosen answer ahead, where a stage can tell
    loss: float | None = None  # of the rows' completions, nats per token, after sft


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
            results += answer(model, processor, batch, drawn, world, rewards, gather)
            bar.update(len(batch) * world.size)
        everything = world.gather_objects(results)  # ranks have equally many; the last rows may be there twice
        in_order = [everything[i % world.size][i // world.size] for i in range(len(rows))]
        values = torch.stack([value for value, _, _ in in_order])  # (rows, K)
        unseen = torch.tensor([unseen for _, unseen, _ in in_order])
        means[name], means[f"unseen {name}"] = (v.double().nanmean(0).tolist() for v in (values, values[unseen]))
        answers = [said for _, _, said in in_order]
    bar.close()
    named = rewards[1].endswith("format")  # else the second is one of the further rewards
    further = range(1 + named, len(rewards))
    more = {f"{rewards[k]} {name}": means[name][k] for k in further for name in ("sampled", "greedy")}
    more |= {name: values[0] for name, values in means.items() if name.startswith("unseen")}
    more = {name: value for name, value in more.items() if not math.isnan(value)}
    form = means["sampled"][1] if named else math.nan
    return Evaluation(means["sampled"][0], means["greedy"][0], form, answers, more)


def equal_batches(count: int, world: World, size: int = BATCH_SIZE) -> list[list[int]]:
    """Row numbers of this rank in batches: every rank has equally many, so the first rows may fill up the last ones.

    Example: 5 rows, 2 ranks, size 2: rank 0 has [0, 2], [4]; rank 1 [1, 3], [0].
    """
    each = -(-count // world.size)
    numbers = [(i * world.size + world.rank) % count for i in range(each)]
    return [numbers[start : start + size] for start in range(0, each, size)]


def answer(model, processor, rows: list[Row], sampling, world, rewards, gather) -> list[tuple]:
    """Rewards (K,), whether it is marked unseen, and the Answer of each row."""
    prompts, keys = [row.prompt(processor) for row in rows], [row.key for row in rows]
    completions = sample_completions(model, processor, prompts, 1, sampling, keys, world, gather)
    texts = [processor.decode(completion.ids) for [completion] in completions]
    columns = reward_columns(rows, prompts, completions, processor)
    values = score(list(rewards), texts, columns, processor.answer)  # (rows, K)
    unseen = [bool(row.columns.get("unseen")) for row in rows]
    said = map(Answer, texts, values[:, 0].tolist(), columns["answer_extents"])
    return list(zip(values, unseen, said, strict=True))
