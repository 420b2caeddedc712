"""Rewards for text answers: format and correctness.

A reward is a function with TRL's signature, and returns one number per completion:

    def brevity(completions, **columns):    # all completions, and their row columns
        return [1.0 if len(c) < 100 else 0.0 for c in completions]

None means not scored: a completion with None from all rewards has advantage 0, and does not count in the group mean.

log_extra("why", reasons) adds one reason per completion, a string or None, to the completion log.
"""

import json
import re
import unicodedata
from collections.abc import Callable
from decimal import Decimal
from typing import Any

from minivlmrl.data.markup import PLAIN_SIGNS, read_json
from minivlmrl.errors import UserError, truncate

LogExtra = Callable[[str, list], None]  # type of log_extra(column, values), which adds a column to the completion log

TAGS = ("<think>", "</think>", "<answer>", "</answer>")
ANY_TAG = re.compile("|".join(TAGS))
NO_ANSWER = "no answer, see data.answer_format"
NO_SOLUTION = "the row has no solution"


def tag_format(completions: list[str], log_extra: LogExtra | None = None, **columns) -> list[float]:
    """Return 1.0 for completions <think>...</think><answer>...</answer>, else 0.0.

    Each tag must occur exactly once, with text inside.
    """
    reasons = [format_error(completion) for completion in completions]
    if log_extra is not None:
        log_extra("why", reasons)
    return [float(reason is None) for reason in reasons]


def format_error(completion: str) -> str | None:
    """Return an error message if a completion is not <think>...</think><answer>...</answer>, else None."""
    for tag in TAGS:
        count = completion.count(tag)
        if count != 1:
            return f"{tag} occurs {count} times" if count else f"no {tag}"
    if ANY_TAG.findall(completion) != list(TAGS):
        return f"the tags are not in the order {' '.join(TAGS)}"
    before, thought, between, answer, after = ANY_TAG.split(completion)
    outside = (before + between + after).strip()
    if outside:
        return f"text outside of the tags: {truncate(outside, 80)}"
    if not thought.strip():
        return "no text between <think> and </think>"
    return None if answer.strip() else "no text between <answer> and </answer>"


def accuracy(
    answer_texts: list[str | None], solution: list, log_extra: LogExtra | None = None, **columns
) -> list[float | None]:
    """Return 1.0 for answers that equal the solution, else 0.0.

    Case, repeated whitespace and final periods are ignored; JSON objects and lists are compared by value. Rows without
    a solution get None.

    Raises:
        UserError: the solution is an object, or a list that contains more than numbers.
    """
    rewards = []
    reasons = []
    for answer, truth in zip(answer_texts, solution, strict=True):
        expected = normalize(solution_text(truth))
        found = None if answer is None else normalize(answer)
        is_right = found == expected or (found is not None and same_json(found, expected))
        rewards.append(float(is_right) if expected else None)
        reason = None
        if not expected:
            reason = NO_SOLUTION
        elif found is None:
            reason = NO_ANSWER
        elif not is_right:
            reason = f"the answer is {truncate(found, 200)}, not {truncate(expected, 200)}"
        reasons.append(reason)
    if log_extra is not None:
        log_extra("why", reasons)
    return rewards


def same_json(answer: str, expected: str) -> bool:
    """Return True if both texts are the same JSON object or list. Object keys may have any order."""
    try:
        value = read_json(expected)
        return isinstance(value, dict | list) and same_value(read_json(answer), value)
    except ValueError:
        return False


def same_value(one: Any, other: Any) -> bool:
    """Compare two JSON values; unlike in Python, true is not 1."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same_value(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same_value, one, other))
    return one == other and isinstance(one, bool) == isinstance(other, bool)


def solution_text(solution: Any) -> str:
    """Convert a solution to text: 2.0 -> "2", 1e-5 -> "0.00001", [[1, 2]] -> "[1, 2]", None -> "".

    Raises:
        UserError: the solution is a dict, a list that contains anything but numbers, or a list of one number.
    """
    while isinstance(solution, list | tuple) and len(solution) == 1 and isinstance(solution[0], list | tuple):
        solution = solution[0]

    def has_only_numbers(value: Any) -> bool:
        return all(map(has_only_numbers, value)) if isinstance(value, list | tuple) else isinstance(value, int | float)

    is_list = isinstance(solution, list | tuple) and len(solution) != 1 and has_only_numbers(solution)
    if not is_list and not isinstance(solution, str | int | float | None):
        raise UserError(
            f"solution {truncate(solution, 80)} is an object or a list, which no answer can equal; write one text or "
            "number as the solution, or use a reward that reads such solutions: recipes/answers.py:one_of reads a list "
            "of accepted answers"
        )
    if is_list:
        return json.dumps(solution)
    if isinstance(solution, float):
        solution = int(solution) if solution.is_integer() else f"{Decimal(str(solution)):f}"
    return "" if solution is None else str(solution)


def find_answer(completion: str, where: str = "tags") -> str | None:
    """Extract the answer from a completion, or None.

    Args:
        where: "tags" for text in the last <answer>...</answer>, "whole" for text after the last </think>, "last_line"
            for its last line.
    """
    if where == "tags":
        # a regular expression would take quadratic time for many <answer> tags
        for closed in reversed(completion.split("</answer>")[:-1]):
            _, tag, answer = closed.partition("<answer>")
            if tag:
                return answer
        return None
    text = completion.rpartition("</think>")[2].strip()
    if not text or "<think>" in text:
        return None
    return text.splitlines()[-1] if where == "last_line" else text


def normalize(text: str) -> str:
    """Normalize an answer: '<answer> Green  square.</answer>' -> 'green square'.

    Text is normalized to NFC, as in Qwen tokenizers; full-width and typographic characters become ASCII.
    """
    answer = find_answer(text)
    words = (text if answer is None else answer).translate(PLAIN_SIGNS).split()
    return unicodedata.normalize("NFC", " ".join(words).rstrip(". ").casefold())
