"""Rows -> completions with rewards: what a policy says and what it gets for it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from minivlmrl.algorithms.value_model import ScalarModel, pack_to_end
from minivlmrl.data.boxes import extent
from minivlmrl.decoder import Qwen2_5_VL
from minivlmrl.generate import Completion, generate, uniforms
from minivlmrl.reward_functions import box_rewards
from minivlmrl.rewards import REWARDS, required_columns, score
from minivlmrl.rows import Dataset, Processor, Prompt, Row
from minivlmrl.run.config import SamplingConfig
from minivlmrl.scale.ranks import SPARE, World
from minivlmrl.scale.sharding import gathered, is_sharded, layer_by_layer

REWARDS.update({name: getattr(box_rewards, name) for name in ("iou", "acc_0_5", "giou", "box_format")})


@dataclass
class Rollout:
    """B prompts with G completions each; n = B * G, groups in a row."""

    prompts: list[Prompt]
    completions: list[list[Completion]]  # B lists of G
    texts: list[str]  # n
    rewards: Tensor  # (n, K) float32 on the CPU, NaN where a reward could not judge
    answer_extents: list = field(default_factory=list)  # n, see box_columns
    places: list[int] = field(default_factory=list)  # B, of each prompt among those of all ranks ...
    rows: list[int] = field(default_factory=list)  # ... and in the dataset

    def select(self, groups: Sequence[int]) -> "Rollout":
        """Only these groups."""
        size = len(self.texts) // max(1, len(self.prompts))
        rows = [i * size + j for i in groups for j in range(size)]
        return Rollout(
            [self.prompts[i] for i in groups],
            [self.completions[i] for i in groups],
            [self.texts[row] for row in rows],
            self.rewards[torch.tensor(rows, dtype=torch.long)],
            [self.answer_extents[row] for row in rows],
            [self.places[i] for i in groups],
            [self.rows[i] for i in groups],
        )

    def join(self, other: "Rollout") -> "Rollout":
        """This one's groups and then the other's."""
        return Rollout(
            self.prompts + other.prompts, self.completions + other.completions, self.texts + other.texts,
            torch.cat([self.rewards, other.rewards]), self.answer_extents + other.answer_extents,
            self.places + other.places, self.rows + other.rows,
        )  # fmt: skip


def rollout(
    model: Qwen2_5_VL,
    processor: Processor,
    rows: Sequence[Row],
    num_generations: int,
    sampling: SamplingConfig,
    reward_names: Sequence[str],
    keys: Sequence[str],
    reward_model: ScalarModel | None = None,
    pace: World | None = None,
) -> Rollout:
    """Sample completions for rows and let the rewards judge them.

    Args:
        rows: B of them.
        num_generations: completions for each row (G).
        reward_names: K registered rewards.
        keys: B texts that the draws depend on: the same key, the same completions, whatever else is in rows.
        reward_model: who answers for the reward of this name.
        pace: where weights are sharded: None gathers them all first; else the ranks, which gather them layer by layer
            and have to make their rollouts together.
    """
    if not rows:
        _keep_pace(model, processor, reward_model, pace)
        return Rollout([], [], [], torch.zeros(0, len(reward_names)))
    prompts = [row.prompt(processor) for row in rows]
    completions = complete(model, processor, prompts, num_generations, sampling, keys, pace)
    texts = [processor.decode(completion.ids) for group in completions for completion in group]
    names = sorted(set().union(*(row.columns for row in rows)))
    columns = {name: [row.columns.get(name) for row in rows for _ in range(num_generations)] for name in names}
    columns["prompts"] = [row.messages for row in rows for _ in range(num_generations)]
    columns |= box_columns(rows, prompts, processor, num_generations)
    columns["completion_ids"] = [completion.ids.tolist() for group in completions for completion in group]
    if reward_model is not None:
        columns["reward_model_scores"] = judge(reward_model, prompts, completions, pace=pace)
    rewards = score(list(reward_names), texts, columns)
    return Rollout(prompts, completions, texts, rewards, columns["answer_extents"])


def complete(
    model: Qwen2_5_VL,
    processor: Processor,
    prompts: Sequence[Prompt],
    num_generations: int,
    sampling: SamplingConfig,
    keys: Sequence[str],
    pace: World | None,
) -> list[list[Completion]]:
    """generate, with the draws of the keys and the weights that pace says."""
    draws = uniforms(keys, num_generations, sampling.max_new_tokens)
    # what FSDP allocates in inference mode could not be trained with later
    with layer_by_layer(model) if pace else gathered(model), torch.inference_mode(not is_sharded(model)):
        stop, tokenizer = processor.stop_token_ids, processor.tokenizer
        return generate(model, prompts, num_generations, sampling, stop, None, tokenizer, uniforms=draws, pace=pace)


def _keep_pace(model: Qwen2_5_VL, processor: Processor, reward_model: ScalarModel | None, pace: World | None):
    """What a rank without rows does while others generate and judge: the same, and forget it."""
    prompts = [processor(SPARE, [])]
    completions = complete(model, processor, prompts, 1, SamplingConfig(max_new_tokens=1), [""], pace)
    if reward_model is not None:
        judge(reward_model, prompts, completions, pace=pace)


def box_columns(rows: Sequence[Row], prompts: Sequence[Prompt], processor: Processor, G: int) -> dict[str, list]:
    """What rewards for boxes need to know of each completion's first image: its size, and in what its answer counts.

    image_sizes are (width, height) in original pixels. answer_extents are those of the whole image in the space that
    the answer is written in: the row's own answer_extent, or that of its box_space, by default the resized image.
    None for rows without images.
    """
    sizes, extents, patch = [], [], processor.image_processor.patch_size
    for row, prompt in zip(rows, prompts, strict=True):
        size = answer = None
        if row.images:
            is_image = prompt.second_per_grid_ts == 0
            _, height, width = prompt.image_grid_thw[is_image][0].tolist()
            size = row.images[0].size
            space = row.columns.get("box_space") or "resized"
            answer = row.columns.get("answer_extent") or extent(space, size, (width * patch, height * patch))
        sizes += [size] * G
        extents += [answer] * G
    return {"image_sizes": sizes, "answer_extents": extents}


@torch.no_grad()
def judge(
    model: ScalarModel,
    prompts: Sequence[Prompt],
    completions: Sequence[Sequence[Completion]],
    batch_size: int = 16,
    pace: World | None = None,
) -> list[float]:
    """Ask a reward model about every completion, batch_size prompts at a time: n numbers.

    Args:
        pace: see rollout.
    """
    numbers, device, rounds = [], model.score.weight.device, -(-len(prompts) // batch_size)
    idle = 0 if pace is None else pace.most(rounds) - rounds  # asked before any joint work, in which ranks may not ask
    with layer_by_layer(model) if pace else gathered(model):
        for start in range(0, len(prompts), batch_size):
            part = slice(start, start + batch_size)
            ids = [[completion.ids for completion in group] for group in completions[part]]
            numbers += model.at_end(pack_to_end(prompts[part], ids, model.backbone.config, device)).tolist()
        for _ in range(idle):
            model.at_end(pack_to_end(prompts[:1], [[completions[0][0].ids]], model.backbone.config, device))
    return numbers


@dataclass
class Answer:
    """What the model says to a held-out row."""

    text: str
    score: float  # of the first reward
    extent: tuple[float, float] | None  # see box_columns


@dataclass
class Evaluation:
    """Held-out results, each a mean over rows; NaN where no row could be judged."""

    sampled: float  # the first reward of one completion a row, drawn at temperature 1: accuracy, or IoU
    greedy: float  # the same of the likeliest completion
    format: float  # share of sampled completions in the asked form
    answers: list["Answer"]  # the likeliest ones, for the report, in the order of the rows
    more: dict[str, float] = field(default_factory=dict)  # further rewards, and the first over rows marked unseen
    pairs: float | None = None  # share of held-out pairs whose chosen answer wins, where a stage can tell


def evaluate(
    model: Qwen2_5_VL,
    processor: Processor,
    rows: Dataset,
    sampling: SamplingConfig,
    world: World,
    rewards: Sequence[str] = ("accuracy", "format"),
    gather_weights: bool = True,
    batch_size: int = 64,
) -> Evaluation:
    """Answer held-out rows, once sampled and once greedily.

    Args:
        rows: all of them are used, each rank taking every size-th.
        sampling: says where answers end. Temperature, filters and penalty are the evaluation's own: figures of runs
            that sample differently stay comparable.
        rewards: what counts, the form, and what else is to be reported.
        gather_weights: see RolloutSection.
        batch_size: rows generated together.
    """
    mine = range(world.rank, len(rows), world.size)
    judged_by = dict.fromkeys(required_columns(list(rewards)))  # a held-out row without one of these is not judged
    means, answers = {}, []
    for name, temperature in (("sampled", 1.0), ("greedy", 0.0)):
        drawn = replace(sampling, temperature=temperature, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0)
        values, unseen = torch.zeros(0, len(rewards)), []  # a rank may have no rows
        for start in range(0, world.most(len(mine)), batch_size):
            numbers = mine[start : start + batch_size]
            batch, keys = [rows[i] for i in numbers], [f"evaluation/{i}" for i in numbers]
            batch = [replace(row, columns=judged_by | row.columns) for row in batch]
            result = rollout(model, processor, batch, 1, drawn, rewards, keys, None, None if gather_weights else world)
            values = torch.cat([values, result.rewards])
            unseen += [bool(row.columns.get("unseen")) for row in batch]
            if temperature == 0:
                said = zip(result.texts, result.rewards[:, 0].tolist(), result.answer_extents, strict=True)
                answers += [Answer(*parts) for parts in said]
        means[name] = _means(values, world)
        means[f"unseen {name}"] = _means(values[torch.tensor(unseen, dtype=torch.bool)], world)
    everyones = world.gather_objects(answers)  # rank r has rows r, r + size, ...
    in_order = [everyones[i % world.size][i // world.size] for i in range(len(rows))]
    more = {f"{rewards[k]} {name}": means[name][k] for k in range(2, len(rewards)) for name in ("sampled", "greedy")}
    more |= {name: values[0] for name, values in means.items() if name.startswith("unseen")}
    more = {name: value for name, value in more.items() if not math.isnan(value)}
    return Evaluation(means["sampled"][0], means["greedy"][0], means["sampled"][1], in_order, more)


def _means(values: Tensor, world: World) -> list[float]:
    """(n, K) of this rank -> K means over all ranks' rows; NaN entries count for nothing, NaN where none is left."""
    K = values.shape[1]
    totals = world.sum(*values.nansum(0).tolist(), *(~values.isnan()).sum(0).tolist())
    return [totals[k] / totals[k + K] if totals[k + K] else float("nan") for k in range(K)]
