"""Check the rewards with texts that no model wrote: right answers, empty texts and simple exploits."""

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
from minivlmrl.rewards.columns import call_rewards
from minivlmrl.rewards.registry import Reward, recipe_columns, required_columns, training_rewards
from minivlmrl.rewards.text import find_answer

ROLLOUT = "<think>{}</think><answer>{}</answer>"
# Texts that are not answers. A policy would learn to write a text that a reward scores highly.
REWARD_HACK_PROBES = {
    "nothing": "",
    "empty tags": ROLLOUT.format("", ""),
    "tags alone": ROLLOUT.format("", "") * 3,
    "the question": "{question}",
    "a refusal": ROLLOUT.format("hm", "I cannot tell"),
    "the same word again": "answer " * 60,
}


@dataclass
class Trial:
    """K rewards, their weights (K,), and n rows on which the rewards are tested."""

    rewards: list[Reward]
    weights: Tensor
    rows: Sequence[Row]
    processor: Processor

    def earned(self, texts: Iterable[str]) -> Tensor:
        """Compute the rewards (n, K) of one text per row, as if the text were its completion."""
        prompts = [row.prompt(self.processor) for row in self.rows]
        groups = []
        for text in texts:
            ids = [*self.processor.tokenizer.encode(text), self.processor.stop_token_ids[0]]
            groups.append([Completion(torch.tensor(ids), torch.zeros(len(ids)), True)])
        return call_rewards(
            self.rewards, recipe_columns(self.rows, prompts, groups, self.processor)
        )

    def answered(self, answers: Iterable[str]) -> Tensor:
        """Compute the rewards (n, K) of one answer per row, written in the format of data.answer_format."""
        return self.earned(as_rollout(answer, self.processor) for answer in answers)


def trial_of(config: RunConfig, all_rows: Dataset, processor: Processor) -> Trial:
    """Return a Trial with at most 16 rows and all rewards of a recipe except the reward model."""
    rewards = [reward for reward in training_rewards(config) if reward.name != "reward_model"]
    weights = [weight for name, weight in config.rewards.items() if name != "reward_model"]
    rows = [replace(row, key=f"check/{index}") for index, row in enumerate(spread(all_rows))]
    return Trial(rewards, torch.tensor(weights), rows, processor)


def check_demonstrations(trial: Trial) -> Iterator[str]:
    """Check that the demonstrations of SFT score well in the rewards of the later stage."""
    processor = trial.processor
    texts = [text_of(as_turns(row.completion or "")[-1]) for row in trial.rows]
    has_tags = any("<answer>" in text for text in texts)
    for reward in trial.rewards:
        if not reward.columns <= trial.rows[0].columns.keys():
            continue
        mean = replace(trial, rewards=[reward]).earned(texts).nanmean().item()
        if mean < 0.2:
            advice = "are the labels shuffled, or does the reward ask for another form?"
            if reward.name != "format" and processor.answer_format == "tags" and not has_tags:
                advice = "set data.answer_format: whole, or write <answer>...</answer>"
            yield (
                f"demonstrations earn {mean:.2f} of reward {reward.name}: "
                f"sft would teach what is not rewarded; {advice}"
            )
    yield from unread_boxes(trial.rewards, texts, processor)


def unread_boxes(
    rewards: list[Reward], texts: Sequence[str], processor: Processor
) -> Iterator[str]:
    """Check that the box rewards can parse the boxes in the answers.

    Args:
        texts: decoded completions or demonstrations.
    """
    box_rewards = ("iou", "acc_0_5", "giou", "box_format")
    names = [reward.name for reward in rewards if reward.name in box_rewards]
    unread = []
    for text in texts:
        answer = find_answer(text, processor.answer_format)
        if answer and not parse_boxes(answer) and not says_none(answer):
            unread.append(answer)
    if names and len(unread) > 0.2 * len(texts):
        yield (
            f"{len(unread)} of {len(texts)} answers, such as {unread[0]!r:.80}, hold nothing that "
            f'{names[0]} reads; ask for {{"bbox_2d": [x1, y1, x2, y2]}}, '
            "or write a reward that reads them"
        )


def check_rewards(trial: Trial, solution_counts: Counter) -> Iterator[str]:
    """Check that right answers score higher than texts that can be written without the image.

    Args:
        trial: rewards and rows to test.
        solution_counts: number of rows with each solution, over the whole dataset.
    """
    rows = trial.rows
    right_values = trial.answered(solutions_of(rows))
    if any(row.columns.get("solution") is not None for row in rows):
        yield from check_empty(trial, solution_counts)
        yield from check_constant(trial, solution_counts, right_values)
    values = []  # rewards (n, K) of each text; the right answers are appended last
    for text in REWARD_HACK_PROBES.values():
        texts = [text.replace("{question}", text_of(row.messages[-1])) for row in rows]
        values.append(trial.earned(texts))
    values = torch.stack([*values, right_values])  # (texts, n, K)
    nothing_mean, *_, right_mean = [combine(x, trial.weights).nanmean() for x in values]
    if required_columns(trial.rewards) and right_mean <= nothing_mean:
        yield "a right answer earns no more than nothing: see rewards' weights and what they read"
    columns = values.nanmean(1).T.tolist()  # for each of K rewards, the mean of each text
    for reward, weight, means in zip(trial.rewards, trial.weights, columns, strict=True):
        if not reward.columns:
            yield from check_same(reward, means)
        elif weight > 0:
            yield from check_hacks(reward, means)


def check_empty(trial: Trial, solution_counts: Counter) -> Iterator[str]:
    """Check for rows with an empty solution that a reward does not score.

    Box rewards score an empty solution, because an image may contain no object. Other rewards may
    return NaN.
    """
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
    """Check whether always giving the most frequent solution scores nearly as well as right answers.

    Only rewards that read a column of the dataset are considered. The expected reward of the
    constant answer combines its mean reward on rows of the trial where it is right, and where it is
    wrong, with the frequency of this solution in the whole dataset.

    Args:
        solution_counts: number of rows with each solution, over the whole dataset.
        right_values: (n, K) rewards of the right answers.
    """
    reads_none = torch.tensor([not reward.columns for reward in trial.rewards])

    def totals(values: Tensor) -> Tensor:
        return combine(values.masked_fill(reads_none, torch.nan), trial.weights)

    [(solution, num_equal)] = solution_counts.most_common(1)
    right_mean = totals(right_values).nanmean().item()
    constant = totals(trial.answered([solution] * len(trial.rows)))  # (n,)
    is_equal = torch.tensor([truth == solution for truth in solutions_of(trial.rows)])
    shard_evenly = num_equal / solution_counts.total()
    constant_mean = shard_evenly * constant[is_equal].nanmean().nan_to_num(0.0).item()
    constant_mean += (1 - shard_evenly) * constant[~is_equal].nanmean().nan_to_num(0.0).item()
    # If the constant scores much higher, the rewards could not parse the right answers.
    if num_equal > 1 and 0.8 * right_mean < constant_mean <= 1.25 * right_mean:
        yield (
            f"always writing {as_rollout(solution, trial.processor)!r:.80} earns "
            f"{constant_mean / right_mean:.2f} of what right answers do: the rows hardly need "
            "their pictures; balance them"
        )


def check_same(reward: Reward, means: list[float]) -> Iterator[str]:
    """Check whether a reward that reads no column gives every text, even "", the same nonzero score.

    Args:
        means: mean reward of each text in HACKS, and of the right answers.
    """
    if means[0] != 0 and len(set(means)) == 1:
        yield (
            f"reward {reward.name} says {means[0]:.3g} of every text that was tried, "
            "even of nothing: look at what it reads"
        )


def check_hacks(reward: Reward, means: list[float]) -> Iterator[str]:
    """Check whether a reward that reads a column gives a high score to a text that is not an answer.

    Args:
        means: mean reward of each text in HACKS, and of the right answers.
    """
    for (name, text), mean in zip(REWARD_HACK_PROBES.items(), means, strict=False):
        if mean > 0.3:
            yield (
                f"reward {reward.name} gives {mean:.2f} to {name} ({text!r:.40}): "
                "a policy finds this; make the reward ask for the answer itself"
            )


def as_rollout(answer: str, processor: Processor) -> str:
    """Format an answer as a completion in the format of data.answer_format: tags, whole or last_line."""
    answer = find_answer(answer) or answer
    if processor.answer_format == "tags":
        return ROLLOUT.format("hm", answer)
    return answer if processor.answer_format == "whole" else f"hm\n{answer}"


def solutions_of(rows: Iterable[Row]) -> list[str]:
    return [str(row.columns.get("solution")) for row in rows]
