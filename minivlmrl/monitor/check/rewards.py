"""Check reward functions on correct answers, demonstrations and reward hacks."""

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import Tensor

from minivlmrl.config.options import RunConfig
from minivlmrl.data.boxes import Box, parse_boxes
from minivlmrl.data.file_dataset import FileDataset
from minivlmrl.data.markup import parse_literal
from minivlmrl.data.messages import as_turns, text_of
from minivlmrl.data.processor import Processor
from minivlmrl.data.rows import Completion, Dataset, Row
from minivlmrl.errors import truncate
from minivlmrl.losses.advantages import combine
from minivlmrl.monitor.check.rows import sample_rows, solutions_of
from minivlmrl.rewards.columns import call_rewards, image_and_box_sizes, reward_columns
from minivlmrl.rewards.registry import Reward, required_columns, training_rewards
from minivlmrl.rewards.text import find_answer, normalize

ROLLOUT = "<think>{}</think><answer>{}</answer>"
# completions without an answer, which should get no reward
REWARD_HACK_PROBES = {
    "an empty text": "",
    "empty tags": ROLLOUT.format("", ""),
    "empty tags, three times": ROLLOUT.format("", "") * 3,
    "the question": "{question}",
    "a refusal": ROLLOUT.format("hm", "I cannot tell"),
    "the same word, 60 times": "answer " * 60,
}


NOISE = 1e-6  # tolerance if the same completion is scored twice
NUM_ANSWERS = 64  # maximum rows whose training answers are compared with their solutions
MARKED = re.compile(r"\(([A-Za-z])\)|\\boxed\{(.+)\}|(\d{1,3}(?:,\d{3})+)")  # answers such as (B), \boxed{cat} or 1,200
CHOICE = re.compile(r"^\s*\(?([A-Z])[.:)]\s*(\S.*?)\s*$", re.MULTILINE)  # choices such as "B. horse"
MAX_FORMS = 8  # maximum answers to try if a solution lists several


@dataclass
class Trial:
    """Reward functions to test, with their weights, and the rows to test them on."""

    rewards: list[Reward]
    weights: Tensor  # (K,), one weight per reward function
    rows: Sequence[Row]
    processor: Processor
    max_new_tokens: int = 64  # length in tokens for the longest text to score

    def score_texts(self, texts: Iterable[str]) -> Tensor:
        """Score one completion text per row; return rewards (rows, K)."""
        prompts = [row.prompt(self.processor) for row in self.rows]
        groups = []
        for text in texts:
            ids = [*self.processor.tokenizer.encode(text), self.processor.stop_token_ids[0]]
            completion = Completion(torch.tensor(ids), torch.zeros(len(ids)), True)
            groups.append([completion])
        columns = reward_columns(self.rows, prompts, groups, self.processor)
        return call_rewards(self.rewards, columns)

    def score_answers(self, answers: Iterable[str]) -> Tensor:
        """Format one answer per row as data.answer_format says, and score it; return rewards (rows, K)."""
        return self.score_texts(format_completion(answer, self.processor) for answer in answers)

    def right_answers(self) -> list[str]:
        """Return the spelling, such as "3" or "3.0", with the highest reward for each solution."""
        forms, values_of_rows = self.forms()
        best = []
        for texts, values in zip(forms, values_of_rows, strict=True):
            totals = combine(values, self.weights).nan_to_num(-math.inf)
            best.append(texts[int(totals.argmax())])
        return best

    def forms(self) -> tuple[list[list[str]], tuple[Tensor, ...]]:
        """Return all correct spellings and their rewards, one tensor (spellings, K) per row."""
        forms = [answer_forms(row, self.processor) for row in self.rows]
        rows = [row for row, texts in zip(self.rows, forms, strict=True) for _ in texts]
        values = replace(self, rows=rows).score_answers(chain.from_iterable(forms))
        return forms, values.split([len(texts) for texts in forms])


def make_trial(config: RunConfig, all_rows: Dataset, processor: Processor) -> Trial:
    """Choose 16 rows on which to test the training rewards. Reward models are not tested."""
    rewards = [reward for reward in training_rewards(config) if reward.name != "reward_model"]
    weights = [weight for name, weight in config.rewards.items() if name != "reward_model"]
    rows = [replace(row, key=f"check/{index}") for index, row in enumerate(sample_rows(all_rows))]
    return Trial(rewards, torch.tensor(weights), rows, processor, config.sampling.max_new_tokens)


def check_demonstrations(trial: Trial) -> Iterator[str]:
    """Check that SFT demonstrations get high rewards from the reward functions used later."""
    processor = trial.processor
    texts = [answer_text(row, "completion") for row in trial.rows]
    for reward in trial.rewards:
        if not reward.columns <= trial.rows[0].columns.keys():
            continue
        alone = replace(trial, rewards=[reward], weights=torch.ones(1))
        values = alone.score_texts(texts)
        mean = values.nanmean().item()
        right_values = alone.score_answers(alone.right_answers())
        highest = max(values.nan_to_num(0.0).max().item(), right_values.nanmean().item())
        if mean < 0.2 * highest:  # relative limit, because reward scales vary
            advice = "Check whether the labels are shuffled, or whether the reward expects a different format."
            needs_tags = reward.name != "format" and processor.answer_format == "tags"
            if needs_tags and "<answer>" not in "".join(texts):
                advice = "Set data.answer_format: whole, or write the answers as <answer>...</answer>."
            yield (
                f"The mean of reward {reward.name} is only {mean:.2f} for the demonstrations, so "
                f"the stage sft would teach answers that are not rewarded later. {advice}"
            )


def check_contradictions(
    rewards: Sequence[Reward], all_rows: Dataset, trainer: type, processor: Processor
) -> Iterator[str]:
    """Check whether the answers to train on contradict the column `solution`, according to the rewards.

    Contradictions: a good answer gets at most half the highest reward, a bad answer gets more than half, or a rejected
    answer scores higher than the chosen one.
    """
    names = trainer.answers
    # data.task may generate demonstrations with random labels on purpose, to teach only the answer format
    if not names or not isinstance(all_rows, FileDataset):
        return
    rows = sample_rows(all_rows, NUM_ANSWERS)
    for reward in rewards:
        if "solution" not in reward.columns or not reward.columns <= rows[0].columns.keys():
            continue
        trial = Trial([reward], torch.ones(1), rows, processor)
        scores = []
        for name in names:
            values = trial.score_texts(answer_text(row, name) for row in rows)
            scores.append(values[:, 0])
        scores = torch.stack(scores)  # (answer columns, rows)
        highest = scores.nan_to_num(0.0).max()
        is_good = [trainer.needs != "labels" or bool(row.columns["label"]) for row in rows]
        is_wrong = (scores[0] > highest / 2) != torch.tensor(is_good)
        is_wrong |= scores[0] < scores[-1]
        is_wrong &= ~scores.isnan().any(0)
        num_wrong = int(is_wrong.sum())
        if highest > 0 and num_wrong > max(1, 0.05 * len(rows)):
            row = rows[int(is_wrong.int().argmax())]
            yield (
                f"{num_wrong} of {len(rows)} answers in the column {names[0]} contradict the column solution, "
                f"according to reward {reward.name}. For example, {row.where} has the solution "
                f"{truncate(row.columns['solution'], 60)} and the answer {truncate(answer_text(row, names[0]), 80)}. "
                "Compare solution, answer and image of these rows: one of the columns may be shuffled."
            )


def answer_text(row: Row, name: str) -> str:
    """Return the text to train on in an answer; only the last turn if there are several."""
    return text_of(as_turns(getattr(row, name) or "")[-1])


def check_rewards(trial: Trial, solutions: Sequence[Sequence[str]]) -> Iterator[str]:
    """Check that correct answers get higher rewards than empty texts, refusals and other reward hacks."""
    rows = trial.rows
    has_solutions = any(row.columns.get("solution") is not None for row in rows)
    right_answers = trial.right_answers()
    right_values = trial.score_answers(right_answers)
    if has_solutions:
        yield from check_constant(trial, solutions, right_values)
        yield from check_forms(trial)
    tokenizer = trial.processor.tokenizer
    ids = tokenizer.encode("answer " * trial.max_new_tokens)[: trial.max_new_tokens]
    probes = REWARD_HACK_PROBES | {"a word that is repeated": tokenizer.decode(ids)}
    questions = [text_of(row.messages[-1]) for row in rows]
    # one list per probe, with a completion per row; the last list has the correct answers
    text_lists = [[text.replace("{question}", question) for question in questions] for text in probes.values()]
    text_lists.append([format_completion(answer, trial.processor) for answer in right_answers])
    # rewards, shape (number of text lists, rows, reward functions)
    values = torch.stack([*map(trial.score_texts, text_lists[:-1]), right_values])
    totals = [combine(x, trial.weights).nanmean().item() for x in values]
    *others, right_mean = totals
    highest, name = max(zip(others, probes, strict=True))
    if required_columns(trial.rewards) and right_mean <= others[0]:
        yield (
            "Correct answers do not score higher than empty texts. Check the weights of the rewards, the columns that "
            "the rewards read, and data.answer_format, which says how correct answers are written."
        )
    elif required_columns(trial.rewards) and has_solutions and highest > right_mean:
        yield (
            f"Correct answers score less than {name}: {right_mean:.2f} against {highest:.2f} in total, so the policy "
            "would learn to write that text. Check the weights of the rewards, for example of a reward that grows "
            "with the number of tokens."
        )
    yield from check_random(trial, text_lists, values)
    reward_means = values.nanmean(1).T.tolist()  # per reward function: mean reward for every text list
    for reward, weight, means in zip(trial.rewards, trial.weights, reward_means, strict=True):
        if not reward.columns:
            if means[0] != 0 and len(set(means)) == 1:
                yield (
                    f"Reward {reward.name} is {means[0]:.3g} for every text that was tried, even for an empty text. "
                    "Check that the reward function reads the completions."
                )
        elif weight > 0:
            for (name, text), mean in zip(REWARD_HACK_PROBES.items(), means, strict=False):
                if mean > 0.3:
                    yield (
                        f"Reward {reward.name} is {mean:.2f} for {name} ({truncate(text, 40)}), so the policy would "
                        "learn to write this text. Change the reward so that it depends on the answer."
                    )


def check_random(trial: Trial, text_lists: Sequence[list[str]], values: Tensor) -> Iterator[str]:
    """Check that reward functions are deterministic, by scoring all texts again."""
    again = torch.stack([trial.score_texts(texts) for texts in text_lists])
    differs = ~torch.isclose(values, again, rtol=NOISE, atol=NOISE, equal_nan=True)
    for k, reward in enumerate(trial.rewards):
        for text, row in differs[..., k].nonzero().tolist()[:1]:
            yield (
                f"Reward {reward.name} gave different values for the same completions when it was called twice, for "
                f"example {values[text, row, k]:.4g} and {again[text, row, k]:.4g} for "
                f"{truncate(text_lists[text][row], 60)}. In a group with equal rewards, even small noise becomes large "
                "advantages. Remove the random numbers from the reward."
            )


def check_forms(trial: Trial) -> Iterator[str]:
    """Check whether a reward expects str(solution), such as "['cat', 'kitten']", instead of a plain answer.

    Plain answers are "cat" for ["cat", "kitten"], a choice's letter, or a box in the model's coordinate unit.
    """
    forms, values_of_rows = trial.forms()
    for k, reward in enumerate(trial.rewards):
        faults = []
        for row, texts, values in zip(trial.rows, forms, values_of_rows, strict=True):
            *others, as_python = values[:, k].nan_to_num(-math.inf).tolist()
            if others and as_python > max(others):
                faults.append((row.columns["solution"], texts[0], others[0]))
        if faults and "solution" in reward.columns:
            solution, text, value = faults[0]
            yield (
                f"{len(faults)} of {len(trial.rows)} solutions that were checked are lists, objects, numbers, boxes or "
                f"choices, which reward {reward.name} compares as text. For example, the answer {truncate(text, 40)} "
                f"gets {value:.2f} for the solution {truncate(solution, 60)}. Write one text as the solution, or use a "
                "reward that reads these solutions, such as choice, number or one_of in recipes/answers.py."
            )


def check_constant(
    trial: Trial, solutions: Sequence[Sequence[str]], right_values: Tensor, of_rows: str = ""
) -> Iterator[str]:
    """Check whether always answering the most frequent solution scores as high as correct answers.

    Example: if 70 % of the solutions are "no", always answering "no" scores 0.7.
    """
    [(solution, num_equal)] = count_answers(solutions).most_common(1)
    constant_values = trial.score_answers([solution] * len(trial.rows))
    values = torch.stack([right_values, constant_values])
    reads_no_column = torch.tensor([not reward.columns for reward in trial.rewards])
    values[..., reads_no_column] = torch.nan
    right, constant = (combine(x, trial.weights) for x in values)
    right_mean = right.nanmean().item()
    is_equal = torch.tensor([solution in truths for truths in solutions_of(trial.rows)])
    frequency = num_equal / len(solutions)
    means = [constant[mask].nanmean().nan_to_num(0.0).item() for mask in (is_equal, ~is_equal)]
    constant_mean = frequency * means[0] + (1 - frequency) * means[1]
    # a ratio above 1.25 means that rewards misread correct answers; other checks report this
    if num_equal > 1 and 0.8 * right_mean < constant_mean <= 1.25 * right_mean:
        yield (
            f"Always answering {truncate(format_completion(solution, trial.processor), 80)} scores "
            f"{constant_mean / right_mean:.2f} times as much as correct answers{of_rows}, so the "
            f"policy hardly needs the images. Balance the solutions{of_rows or ' of the rows'}."
        )


def format_completion(answer: str, processor: Processor) -> str:
    """Write an answer as a completion in data.answer_format, such as in <answer> tags."""
    form = {"tags": ROLLOUT, "whole": "{1}"}.get(processor.answer_format, "{}\n{}")
    return form.format("hm", find_answer(answer) or answer)


def count_answers(solutions: Iterable[Sequence[str]]) -> Counter[str]:
    """Count how many rows accept each correct answer."""
    return Counter(chain.from_iterable(map(dict.fromkeys, solutions)))


def answer_forms(row: Row, processor: Processor) -> list[str]:
    """Return all spellings for a row's correct answer, with `str(solution)` last.

    Examples: ["cat", "dog"] gives the spellings `cat`, `dog`, `cat, dog`, `["cat", "dog"]` and `['cat', 'dog']`. If the
    prompt lists "B. horse", "horse" gives `B` and `horse`, and the zero-based index "1" gives `B` and `1`. "1,200"
    gives `1200` and `1,200`. Boxes are converted to the model's coordinate unit.
    """
    solution = row.columns.get("solution")
    elements = parse_literal(solution) if isinstance(solution, str) and solution.startswith("[") else solution
    forms = []
    boxes = parse_boxes(str(solution))
    if boxes:
        # convert boxes from pixels to the model's coordinate unit
        size, extent = image_and_box_sizes(row, row.prompt(processor), processor)
        if size and extent and size != extent:
            converted = []
            for box in boxes:
                numbers = Box(*box, size).to(extent).numbers
                converted.append([round(number, 4) for number in numbers])
            forms = [json.dumps(converted[0] if len(converted) == 1 else converted)]
    elif isinstance(elements, (list, dict)):
        elements = [*elements.values()] if isinstance(elements, dict) else elements
        if len(elements) == 1 or any(isinstance(element, str) for element in elements):
            texts = [str(element) for element in elements[:MAX_FORMS]]
            forms = [*texts, ", ".join(texts), json.dumps(solution, ensure_ascii=False)]
    elif isinstance(solution, float) and solution.is_integer():
        forms = [str(int(solution))]
    elif isinstance(solution, str | int):
        number = str(solution)
        choices = CHOICE.findall(text_of(row.messages[-1]))
        forms = [letter for letter, text in choices if normalize(text) == normalize(number)]
        is_index = number.isdecimal() and int(number) < len(choices)  # zero-based index, as in AI2D
        if not forms and is_index:
            forms = [choices[int(number)][0]]
        marked = MARKED.fullmatch(number)
        if marked:
            forms.append(marked[marked.lastindex or 0].replace(",", ""))
    return [*forms, str(solution)]
