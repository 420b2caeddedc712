"""Check which rewards a recipe gives to right answers, demonstrations, empty texts and exploits."""

import re
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from minivlmrl.config.options import RunConfig, TrainingOptions
from minivlmrl.data.boxes import parse_boxes, says_none
from minivlmrl.data.messages import as_turns, text_of
from minivlmrl.data.processor import Processor
from minivlmrl.data.rows import Completion, Dataset, Row
from minivlmrl.diagnostics.check_rows import sample_rows
from minivlmrl.losses.advantages import combine
from minivlmrl.rewards.columns import call_rewards
from minivlmrl.rewards.registry import Reward, recipe_columns, required_columns, training_rewards
from minivlmrl.rewards.text import find_answer, normalize

ROLLOUT = "<think>{}</think><answer>{}</answer>"
# {description: text that is not an answer}. If a reward scores such a text highly, the policy would
# learn to write this text instead of right answers.
REWARD_HACK_PROBES = {
    "an empty text": "",
    "empty tags": ROLLOUT.format("", ""),
    "empty tags, three times": ROLLOUT.format("", "") * 3,
    "the question": "{question}",
    "a refusal": ROLLOUT.format("hm", "I cannot tell"),
    "the same word, 60 times": "answer " * 60,
}


SLOW_SECONDS = 10  # time of one reward for all completions of a step that is reported


@dataclass
class Trial:
    """K rewards with their weights (K,), and the n rows on which the rewards are tested."""

    rewards: list[Reward]
    weights: Tensor
    rows: Sequence[Row]
    processor: Processor

    def reward_arguments(self, texts: Iterable[str]) -> dict[str, list]:
        """Collect the arguments of the rewards for one text per row, as if the model wrote it."""
        prompts = [row.prompt(self.processor) for row in self.rows]
        groups = []
        for text in texts:
            ids = [*self.processor.tokenizer.encode(text), self.processor.stop_token_ids[0]]
            groups.append([Completion(torch.tensor(ids), torch.zeros(len(ids)), True)])
        return recipe_columns(self.rows, prompts, groups, self.processor)

    def score_texts(self, texts: Iterable[str]) -> Tensor:
        """Compute the rewards (n, K) of one text per row, as if the model had generated it."""
        return call_rewards(self.rewards, self.reward_arguments(texts))

    def score_answers(self, answers: Iterable[str]) -> Tensor:
        """Compute the rewards (n, K) of one answer per row, in the format of data.answer_format."""
        return self.score_texts(format_completion(answer, self.processor) for answer in answers)


def make_trial(config: RunConfig, all_rows: Dataset, processor: Processor) -> Trial:
    """Return a Trial of at most 16 rows and all rewards of a recipe except the reward model."""
    rewards = [reward for reward in training_rewards(config) if reward.name != "reward_model"]
    weights = [weight for name, weight in config.rewards.items() if name != "reward_model"]
    rows = [replace(row, key=f"check/{index}") for index, row in enumerate(sample_rows(all_rows))]
    return Trial(rewards, torch.tensor(weights), rows, processor)


def check_demonstrations(trial: Trial) -> Iterator[str]:
    """Check that the rewards of a later stage are high for the demonstrations of SFT."""
    processor = trial.processor
    texts = [text_of(as_turns(row.completion or "")[-1]) for row in trial.rows]
    has_tags = any("<answer>" in text for text in texts)
    for reward in trial.rewards:
        if not reward.columns <= trial.rows[0].columns.keys():
            continue
        mean = replace(trial, rewards=[reward]).score_texts(texts).nanmean().item()
        if mean < 0.2:
            advice = "Check whether the labels are shuffled, or the reward expects another format."
            if reward.name != "format" and processor.answer_format == "tags" and not has_tags:
                advice = (
                    "Set data.answer_format: whole, or write the answers as <answer>...</answer>."
                )
            yield (
                f"The mean of reward {reward.name} is only {mean:.2f} for the demonstrations, so "
                f"the stage sft would teach answers that are not rewarded later. {advice}"
            )
    yield from unparsed_boxes(trial.rewards, texts, processor)


def unparsed_boxes(
    rewards: list[Reward], texts: Sequence[str], processor: Processor
) -> Iterator[str]:
    """Check that the box rewards can parse the boxes in the answers.

    Args:
        texts: decoded completions or demonstrations.
    """
    box_rewards = ("iou", "acc_0_5", "giou", "box_format")
    names = [reward.name for reward in rewards if reward.name in box_rewards]
    unparsed = []
    for text in texts:
        answer = find_answer(text, processor.answer_format)
        if answer and not parse_boxes(answer) and not says_none(answer):
            unparsed.append(answer)
    if names and len(unparsed) > 0.2 * len(texts):
        yield (
            f"{len(unparsed)} of {len(texts)} answers, for example {unparsed[0]!r:.80}, contain no "
            f"box that reward {names[0]} can parse. Ask for boxes in the format "
            '{"bbox_2d": [x1, y1, x2, y2]}, or write a reward that parses these answers.'
        )


def check_rewards(trial: Trial, solution_counts: Counter) -> Iterator[str]:
    """Check that right answers score higher than texts that do not depend on the image.

    Args:
        trial: rewards and rows to test.
        solution_counts: {solution: number of rows of the whole dataset that have it}.
    """
    rows = trial.rows
    right_values = trial.score_answers(solutions_of(rows))
    if any(row.columns.get("solution") is not None for row in rows):
        yield from check_empty(trial, solution_counts)
        yield from check_constant(trial, solution_counts, right_values)
    values = []  # rewards (n, K) of each text; those of the right answers are appended last
    for text in REWARD_HACK_PROBES.values():
        texts = [text.replace("{question}", text_of(row.messages[-1])) for row in rows]
        values.append(trial.score_texts(texts))
    values = torch.stack([*values, right_values])  # (number of texts, n rows, K rewards)
    nothing_mean, *_, right_mean = [combine(x, trial.weights).nanmean() for x in values]
    if required_columns(trial.rewards) and right_mean <= nothing_mean:
        yield (
            "Right answers do not score higher than empty texts. Check the weights of the rewards, "
            "and the columns that the rewards read."
        )
    reward_means = values.nanmean(1).T.tolist()  # for each of the K rewards, its mean for each text
    for reward, weight, means in zip(trial.rewards, trial.weights, reward_means, strict=True):
        if not reward.columns:
            yield from check_same(reward, means)
        elif weight > 0:
            yield from check_hacks(reward, means)


def check_empty(trial: Trial, solution_counts: Counter, rows_name: str = "rows") -> Iterator[str]:
    """Check for rows with an empty solution for which a reward returns NaN or 0.

    Box rewards do score an empty solution, because an image may contain no object.

    Args:
        rows_name: name of the rows for the message.
    """
    num_empty = sum(count for solution, count in solution_counts.items() if not solution.strip())
    if not num_empty:
        return
    empty = trial.rows[0].columns | {"solution": "", "row_rewards": None}
    values = replace(trial, rows=[replace(trial.rows[0], columns=empty)]).score_answers(["none"])[0]
    for reward, value in zip(trial.rewards, values.tolist(), strict=True):
        if not value > 0 and "solution" in reward.columns:  # 0 or NaN
            yield (
                f"{num_empty} of {solution_counts.total()} {rows_name} have an empty solution, "
                f"which reward {reward.name} does not score. Write a solution for these rows, or "
                "remove the rows."
            )


def check_label_names(trial: Trial, solution_counts: Counter) -> Iterator[str]:
    """Check for two names of one label, such as "ice cream" and "Ice-Cream".

    Two names are reported only if a reward gives less for one name where the other is the solution.
    Names with digits are skipped, because 1-5 and 15 are different answers.
    """
    names = defaultdict(list)  # letters of a label -> solutions with these letters, frequent first
    for solution, _ in solution_counts.most_common():
        letters = re.sub(r"[\W_]", "", normalize(solution))
        if letters.isalpha():
            names[letters].append(solution)
    for first, *others in names.values():
        for other in others:
            row = trial.rows[0]
            row = replace(row, columns=row.columns | {"solution": first, "row_rewards": None})
            pair = replace(trial, rows=[row, row])
            right, wrong = pair.score_answers([first, other])
            if (wrong < right).any():
                yield (
                    f"The solutions {first!r:.60} ({solution_counts[first]} rows) and "
                    f"{other!r:.60} ({solution_counts[other]} rows) seem to be two names of one "
                    "label, but an answer with one name is wrong where the other one is the "
                    "solution. Use one name for each label."
                )
                return


def check_speed(trial: Trial, stage: str, options: TrainingOptions) -> Iterator[str]:
    """Check that each reward takes less than SLOW_SECONDS for the completions of a step.

    The time of one call is measured, after the calls of the other checks have loaded what the
    function needs. A reward that works in parallel may be faster than the estimate.

    Args:
        stage, options: name and options of the stage that samples.
    """
    num_completions = options.prompts_per_step * getattr(options, "num_generations", 1)
    texts = [format_completion(answer, trial.processor) for answer in solutions_of(trial.rows)]
    columns = trial.reward_arguments(texts)
    for reward in trial.rewards:
        begin = time.perf_counter()
        reward(**columns)
        seconds = (time.perf_counter() - begin) / len(texts)  # per completion
        if seconds * num_completions > SLOW_SECONDS:
            yield (
                f"Reward {reward.name} takes {seconds:.2g} s per completion, so it may take "
                f"{seconds * num_completions:.0f} s for the {num_completions} completions of a "
                f"step of {stage}. Make the function faster, for example by scoring all "
                "completions of a call in parallel."
            )


def check_constant(trial: Trial, solution_counts: Counter, right_values: Tensor) -> Iterator[str]:
    """Check whether the most frequent solution, given for every row, scores like right answers.

    Only rewards that read a column of the dataset are considered. The expected reward of the
    constant answer is the average of its mean rewards on those rows of the trial where it is right
    and where it is wrong, weighted by the frequency of this solution in the whole dataset.

    Args:
        solution_counts: {solution: number of rows of the whole dataset that have it}.
        right_values: (n, K) rewards of the right answers.
    """
    reads_none = torch.tensor([not reward.columns for reward in trial.rewards])

    def totals(values: Tensor) -> Tensor:
        return combine(values.masked_fill(reads_none, torch.nan), trial.weights)

    [(solution, num_equal)] = solution_counts.most_common(1)
    right_mean = totals(right_values).nanmean().item()
    # (n,): total reward of the constant answer on each row of the trial
    constant = totals(trial.score_answers([solution] * len(trial.rows)))
    is_equal = torch.tensor([truth == solution for truth in solutions_of(trial.rows)])
    frequency = num_equal / solution_counts.total()
    constant_mean = frequency * constant[is_equal].nanmean().nan_to_num(0.0).item()
    constant_mean += (1 - frequency) * constant[~is_equal].nanmean().nan_to_num(0.0).item()
    # If the constant answer scores much higher than right answers, the rewards cannot parse the
    # right answers, which is another problem than unbalanced rows.
    if num_equal > 1 and 0.8 * right_mean < constant_mean <= 1.25 * right_mean:
        yield (
            f"Always answering {format_completion(solution, trial.processor)!r:.80} scores "
            f"{constant_mean / right_mean:.2f} times as much as right answers, so the policy "
            "hardly needs the images. Balance the solutions of the rows."
        )


def check_same(reward: Reward, means: list[float]) -> Iterator[str]:
    """Check whether a reward that reads no column gives every text the same score other than 0.

    Args:
        means: mean reward of each text of REWARD_HACK_PROBES, followed by that of right answers.
    """
    if means[0] != 0 and len(set(means)) == 1:
        yield (
            f"Reward {reward.name} is {means[0]:.3g} for every text that was tried, even for an "
            "empty text. Check that the reward function reads the completions."
        )


def check_hacks(reward: Reward, means: list[float]) -> Iterator[str]:
    """Check whether a reward that reads a column scores a text without an answer highly.

    Args:
        means: mean reward of each text of REWARD_HACK_PROBES, followed by that of right answers.
    """
    for (name, text), mean in zip(REWARD_HACK_PROBES.items(), means, strict=False):
        if mean > 0.3:
            yield (
                f"Reward {reward.name} is {mean:.2f} for {name} ({text!r:.40}), so the policy "
                "would learn to write this text. Change the reward so that it depends on the "
                "answer."
            )


def format_completion(answer: str, processor: Processor) -> str:
    """Return a completion with the answer in the format of data.answer_format, such as tags."""
    answer = find_answer(answer) or answer
    if processor.answer_format == "tags":
        return ROLLOUT.format("hm", answer)
    return answer if processor.answer_format == "whole" else f"hm\n{answer}"


def solutions_of(rows: Iterable[Row]) -> list[str]:
    return [str(row.columns.get("solution")) for row in rows]
