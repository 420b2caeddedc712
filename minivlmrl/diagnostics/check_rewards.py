"""Rewards that are not for the answer: what they give to texts that no model has written."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from minivlmrl.config.options import RunConfig
from minivlmrl.data.boxes import parse_boxes, says_none
from minivlmrl.data.messages import as_turns, text_of
from minivlmrl.data.processor import Processor
from minivlmrl.data.rows import Completion, Dataset, Row
from minivlmrl.diagnostics.check_rows import spread
from minivlmrl.losses.advantages import combine
from minivlmrl.rewards.columns import ask_rewards
from minivlmrl.rewards.registry import Reward, columns_of, recipe_columns, training_rewards
from minivlmrl.rewards.text import find_answer

ROLLOUT = "<think>{}</think><answer>{}</answer>"
# texts that are no answers: a reward that likes one of them will be given it
HACKS = {
    "nothing": "",
    "empty tags": ROLLOUT.format("", ""),
    "tags alone": ROLLOUT.format("", "") * 3,
    "the question": "{question}",
    "a refusal": ROLLOUT.format("hm", "I cannot tell"),
    "the same word again": "answer " * 60,
}


@dataclass
class Trial:
    """Rewards, their weights (K,), and n rows that they are asked about."""

    rewards: list[Reward]
    weights: Tensor
    rows: Sequence[Row]
    processor: Processor

    def earned(self, texts: Iterable[str]) -> Tensor:
        """What a text for each row earns, (n, K)."""
        prompts = [row.prompt(self.processor) for row in self.rows]
        groups = []
        for text in texts:
            ids = [*self.processor.tokenizer.encode(text), self.processor.stop_token_ids[0]]
            groups.append([Completion(torch.tensor(ids), torch.zeros(len(ids)), True)])
        return ask_rewards(self.rewards, recipe_columns(self.rows, prompts, groups, self.processor))

    def answered(self, answers: Iterable[str]) -> Tensor:
        """What answers earn where the rewards look for them, (n, K)."""
        return self.earned(as_rollout(answer, self.processor) for answer in answers)


def trial_of(config: RunConfig, all_rows: Dataset, processor: Processor) -> Trial:
    """Ask the rewards that need no model of their own about some rows."""
    rewards = [reward for reward in training_rewards(config) if reward.name != "reward_model"]
    weights = [weight for name, weight in config.rewards.items() if name != "reward_model"]
    rows = [replace(row, key=f"check/{index}") for index, row in enumerate(spread(all_rows))]
    return Trial(rewards, torch.tensor(weights), rows, processor)


def check_demonstrations(trial: Trial) -> Iterator[str]:
    """Demonstrations must earn the rewards that a later stage gives."""
    processor = trial.processor
    texts = [text_of(as_turns(row.completion or "")[-1]) for row in trial.rows]
    has_tags = any("<answer>" in text for text in texts)
    for reward in trial.rewards:
        if not reward.columns <= trial.rows[0].columns.keys():
            continue
        mean = replace(trial, rewards=[reward]).earned(texts).nanmean().item()
        if mean < 0.2:
            advice = "are the labels shuffled, or does the reward ask for another form?"
            if reward.name != "format" and processor.answer == "tags" and not has_tags:
                advice = "set data.answer: whole, or write <answer>...</answer>"
            yield (
                f"demonstrations earn {mean:.2f} of reward {reward.name}: "
                f"sft would teach what is not rewarded; {advice}"
            )
    yield from unread_boxes(trial.rewards, texts, processor)


def unread_boxes(
    rewards: list[Reward], texts: Sequence[str], processor: Processor
) -> Iterator[str]:
    """Answers with boxes in a notation that no reward knows."""
    box_rewards = ("iou", "acc_0_5", "giou", "box_format")
    names = [reward.name for reward in rewards if reward.name in box_rewards]
    unread = []
    for text in texts:
        answer = find_answer(text, processor.answer)
        if answer and not parse_boxes(answer) and not says_none(answer):
            unread.append(answer)
    if names and len(unread) > 0.2 * len(texts):
        yield (
            f"{len(unread)} of {len(texts)} answers, such as {unread[0]!r:.80}, hold nothing that "
            f'{names[0]} reads; ask for {{"bbox_2d": [x1, y1, x2, y2]}}, '
            "or write a reward that reads them"
        )


def check_rewards(trial: Trial, solution_counts: Counter) -> Iterator[str]:
    """What the rewards give for texts that need no picture; solution_counts: of all rows."""
    rows = trial.rows
    right_values = trial.answered(solutions_of(rows))
    if any(row.columns.get("solution") is not None for row in rows):
        yield from check_empty(trial, solution_counts)
        yield from check_constant(trial, solution_counts, right_values)
    values = []  # of each text what it earns, (n, K); the right answers come last
    for text in HACKS.values():
        texts = [text.replace("{question}", text_of(row.messages[-1])) for row in rows]
        values.append(trial.earned(texts))
    values = torch.stack([*values, right_values])  # (texts, n, K)
    nothing_mean, *_, right_mean = [combine(x, trial.weights).nanmean() for x in values]
    if columns_of(trial.rewards) and right_mean <= nothing_mean:
        yield "a right answer earns no more than nothing: see rewards' weights and what they read"
    columns = values.nanmean(1).T.tolist()  # K of what each text earns
    for reward, weight, means in zip(trial.rewards, trial.weights, columns, strict=True):
        if not reward.columns:
            yield from check_same(reward, means)
        elif weight > 0:
            yield from check_hacks(reward, means)


def check_empty(trial: Trial, solution_counts: Counter) -> Iterator[str]:
    """Solutions that are empty, which a reward of boxes judges and others may not."""
    num_empty = sum(count for solution, count in solution_counts.items() if not solution.strip())
    if not num_empty:
        return
    columns = trial.rows[0].columns | {"solution": "", "row_rewards": None}
    values = replace(trial, rows=[replace(trial.rows[0], columns=columns)]).answered(["none"])[0]
    for reward, is_unjudged in zip(trial.rewards, values.isnan(), strict=True):
        if is_unjudged and "solution" in reward.columns:
            yield (
                f"{num_empty} of {solution_counts.total()} rows have an empty solution, which "
                f"reward {reward.name} does not judge: write one, or leave the rows out"
            )


def check_constant(trial: Trial, solution_counts: Counter, right_values: Tensor) -> Iterator[str]:
    """One right answer that earns nearly what all right answers do, (n, K), over all rows.

    Only rewards that read a column count. How often it is right is counted; the trial's rows say
    what it earns where it is, and where it is not.
    """
    reads_none = torch.tensor([not reward.columns for reward in trial.rewards])

    def totals(values: Tensor) -> Tensor:
        return combine(values.masked_fill(reads_none, torch.nan), trial.weights)

    [(solution, num_equal)] = solution_counts.most_common(1)
    right_mean = totals(right_values).nanmean().item()
    constant = totals(trial.answered([solution] * len(trial.rows)))  # (n,)
    is_equal = torch.tensor([truth == solution for truth in solutions_of(trial.rows)])
    equal_share = num_equal / solution_counts.total()
    constant_mean = equal_share * constant[is_equal].nanmean().nan_to_num(0.0).item()
    constant_mean += (1 - equal_share) * constant[~is_equal].nanmean().nan_to_num(0.0).item()
    # a constant that earns more: the rewards do not read right answers as they are written here
    if num_equal > 1 and 0.8 * right_mean < constant_mean <= 1.25 * right_mean:
        yield (
            f"always writing {as_rollout(solution, trial.processor)!r:.80} earns "
            f"{constant_mean / right_mean:.2f} of what right answers do: the rows hardly need "
            "their pictures; balance them"
        )


def check_same(reward: Reward, means: list[float]) -> Iterator[str]:
    """A reward that is told no truth and gives the same to all texts, of which one is empty."""
    if means[0] != 0 and len(set(means)) == 1:
        yield (
            f"reward {reward.name} says {means[0]:.3g} of every text that was tried, "
            "even of nothing: look at what it reads"
        )


def check_hacks(reward: Reward, means: list[float]) -> Iterator[str]:
    """A reward that is told the truth and likes what is no answer; means: of HACKS, then others."""
    for (name, text), mean in zip(HACKS.items(), means, strict=False):
        if mean > 0.3:
            yield (
                f"reward {reward.name} gives {mean:.2f} to {name} ({text!r:.40}): "
                "a policy finds this; make the reward ask for the answer itself"
            )


def as_rollout(answer: str, processor: Processor) -> str:
    """Write an answer, or what is in the tags of one, where the rewards look for it."""
    answer = find_answer(answer) or answer
    if processor.answer == "tags":
        return ROLLOUT.format("hm", answer)
    return answer if processor.answer == "whole" else f"hm\n{answer}"


def solutions_of(rows: Iterable[Row]) -> list[str]:
    return [str(row.columns.get("solution")) for row in rows]
