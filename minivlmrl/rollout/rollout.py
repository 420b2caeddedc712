"""Rows -> completions with rewards: what a policy says and what it gets for it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minivlmrl.config import SamplingConfig
from minivlmrl.data.processor import Processor, Prompt
from minivlmrl.data.sources import Dataset, Row
from minivlmrl.model.qwen2_5_vl import Qwen2_5_VL
from minivlmrl.model.scalar import ScalarModel, pack_to_end
from minivlmrl.rollout.generate import Completion, generate
from minivlmrl.rollout.rewards import score
from minivlmrl.training.distributed import World


@dataclass
class Rollout:
    """B prompts with G completions each; n = B * G, groups in a row."""

    prompts: list[Prompt]
    completions: list[list[Completion]]  # B lists of G
    texts: list[str]  # n
    rewards: Tensor  # (n, K) float32 on the CPU, NaN where a reward could not judge

    def select(self, groups: Sequence[int]) -> "Rollout":
        """Only these groups."""
        size = len(self.texts) // len(self.prompts)
        return Rollout(
            [self.prompts[i] for i in groups],
            [self.completions[i] for i in groups],
            [text for i in groups for text in self.texts[i * size : (i + 1) * size]],
            self.rewards.unflatten(0, (-1, size))[list(groups)].flatten(0, 1),
        )

    def join(self, other: "Rollout") -> "Rollout":
        """This one's groups and then the other's."""
        return Rollout(
            self.prompts + other.prompts, self.completions + other.completions, self.texts + other.texts,
            torch.cat([self.rewards, other.rewards]),
        )  # fmt: skip


def rollout(
    model: Qwen2_5_VL,
    processor: Processor,
    rows: Sequence[Row],
    num_generations: int,
    sampling: SamplingConfig,
    reward_names: Sequence[str],
    generator: torch.Generator | None,
    reward_model: ScalarModel | None = None,
) -> Rollout:
    """Sample completions for rows and let the rewards judge them.

    Args:
        rows: B of them.
        num_generations: completions for each row (G).
        reward_names: K registered rewards.
        generator: see generate.
        reward_model: who answers for the reward of this name.
    """
    prompts = [processor(row.messages, row.images) for row in rows]
    completions = generate(model, prompts, num_generations, sampling, processor.stop_token_ids, generator)
    texts = [processor.decode(completion.ids) for group in completions for completion in group]
    names = sorted(set().union(*(row.columns for row in rows)))
    columns = {name: [row.columns.get(name) for row in rows for _ in range(num_generations)] for name in names}
    columns["prompts"] = [row.messages for row in rows for _ in range(num_generations)]
    columns["completion_ids"] = [completion.ids.tolist() for group in completions for completion in group]
    if reward_model is not None:
        columns["reward_model_scores"] = judge(reward_model, prompts, completions)
    return Rollout(prompts, completions, texts, score(list(reward_names), texts, columns))


@torch.no_grad()
def judge(
    model: ScalarModel, prompts: Sequence[Prompt], completions: Sequence[Sequence[Completion]], batch_size: int = 16
) -> list[float]:
    """Ask a reward model about every completion, batch_size prompts at a time: n numbers."""
    numbers = []
    for start in range(0, len(prompts), batch_size):
        part = slice(start, start + batch_size)
        ids = [[completion.ids for completion in group] for group in completions[part]]
        batch = pack_to_end(prompts[part], ids, model.backbone.config, model.score.weight.device)
        numbers += model.at_end(batch).tolist()
    return numbers


@dataclass
class Evaluation:
    """Held-out results, each a mean over rows; NaN where no row could be judged."""

    sampled: float  # accuracy of one completion a row, drawn at temperature 1
    greedy: float  # accuracy of the likeliest completion
    format: float  # share of sampled completions in the asked form
    greedy_texts: list[str]  # for the report, in the order of the rows
    pairs: float | None = None  # share of held-out pairs whose chosen answer wins, where a stage can tell


def evaluate(
    model: Qwen2_5_VL, processor: Processor, rows: Dataset, max_new_tokens: int, world: World, batch_size: int = 64
) -> Evaluation:
    """Answer held-out rows, once sampled and once greedily.

    Args:
        rows: all of them are used, each rank taking every size-th.
        batch_size: rows generated together.
    """
    generator = torch.Generator(world.device).manual_seed(world.rank)  # its own: training's draws stay untouched
    mine = range(world.rank, len(rows), world.size)
    totals, texts = {}, []
    for temperature in (1.0, 0.0):
        sampling = SamplingConfig(temperature=temperature, max_new_tokens=max_new_tokens)
        rewards = []
        for start in range(0, len(mine), batch_size):
            batch = [rows[i] for i in mine[start : start + batch_size]]
            result = rollout(model, processor, batch, 1, sampling, ("accuracy", "format"), generator)
            rewards.append(result.rewards)
            texts += result.texts if temperature == 0 else []
        values = torch.cat([torch.zeros(0, 2), *rewards])  # a rank may have no rows
        totals[temperature] = world.sum(*values.nansum(0).tolist(), *(~values.isnan()).sum(0).tolist())

    def mean(temperature: float, column: int) -> float:
        total, count = totals[temperature][column], totals[temperature][column + 2]
        return total / count if count else float("nan")

    everyones = world.gather_objects(texts)  # rank r has rows r, r + size, ...
    in_order = [everyones[i % world.size][i // world.size] for i in range(len(rows))]
    return Evaluation(mean(1.0, 0), mean(0.0, 0), mean(1.0, 1), in_order)
