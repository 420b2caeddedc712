"""Test the rewards for choices, yes and no, and classes with reward_table.yaml, and with invalid solutions."""

import pytest

from minivlmrl.rewards.boxes import NO_BOX
from minivlmrl.rewards.registry import get_reward
from minivlmrl.rewards.text import NO_ANSWER, NO_SOLUTION
from recipes.answers import class_name, judge_rows
from tests.helpers.links import ROOT
from tests.helpers.reward_table import CHOICE, CLASS, MATH, NUMBER, ROWS, YES_NO
from tests.helpers.score_texts import score_texts


@pytest.mark.parametrize("reward", dict.fromkeys(row[0] for row in ROWS))
def test_right_answers_earn_and_hacks_do_not(reward):
    """Very long texts and texts that are slow to parse must not hang a reward."""
    if reward == MATH:
        pytest.importorskip("math_verify", reason="extra missing: pip install math-verify")
    wrong = []
    for _, solution, answer, earned in (row for row in ROWS if row[0] == reward):
        found = score_texts([reward], [answer], {"solution": [solution]}, "whole").item() if answer.strip() else earned
        if found != earned:
            wrong.append((solution, answer[:80], found))
    assert wrong == []


QUOTES = ['"{}"', "'{}'", "“{}”"]
FORMS = [  # markup and words around an answer that every reward but accuracy ignores
    "{}.", "**{}**", "__{}__", "*{}*", "`{}`", *QUOTES, "「{}」", "${}$", "$${}$$", r"\({}\)", r"\[{}\]",
    r"\boxed{{{}}}", r"$\boxed{{{}}}$.", r"\fbox{{{}}}", r"\textbf{{{}}}", "```\n{}\n```", "```JSON\n{}\n```",
    "Answer: {}", "**Answer:** {}", "**Answer: {}**", "Answer: **{}**", "The final answer is: {}.",
    r"The answer is $\boxed{{{}}}$",
    "答案：{}", "<answer>{}</answer>",
]  # fmt: skip
CAT = '[{"bbox_2d": [0, 0, 2, 2], "label": "cat"}]'
RIGHT = [
    (NUMBER, "3"), (CHOICE, "B"), (YES_NO, "yes"), (CLASS, "frilly"), (f"{CLASS}(classes=['frilly'])", "frilly"),
    (MATH, r"\frac{1}{2}"), ("iou", "[0, 0, 2, 2]"), ("iou", CAT), ("iou", "None"),
    *[(f"{ROOT}/recipes/vlm_r1.py:{name}", CAT) for name in ("detection", "ap_50", "weighted_sum")],
    (f"{ROOT}/recipes/vlm_r1.py:detection", CAT.replace('"', "'")), ("accuracy", '{"b": [1, "x"], "a": 2}'),
]  # fmt: skip


@pytest.mark.parametrize(("reward", "right"), RIGHT)
def test_every_reward_reads_the_same_forms(reward, right):
    if reward == MATH:
        pytest.importorskip("math_verify", reason="extra missing: pip install math-verify")
    has_quotes = '"' in right or "'" in right
    texts = [form.format(right) for form in FORMS if not has_quotes or form not in QUOTES]
    columns = {"image_sizes": [(9, 9)], "answer_extents": [(9, 9)], "solution": [right]}
    columns = {name: values * len(texts) for name, values in columns.items()}
    earned = score_texts([reward], texts, columns, "whole")[:, 0].tolist()
    assert [text for text, value in zip(texts, earned, strict=True) if value < 1] == []


def test_a_solution_that_is_no_class_is_named():
    error = r"^reward class_name: .* the name of one of the 2 classes, but it is 'spiky'; correct the row$"
    with pytest.raises(ValueError, match=error):
        class_name(["x"], ["spiky"], classes=["frilly", "dotted"])


def test_classes_from_a_file_or_none_at_all(tmp_path):
    (tmp_path / "classes.txt").write_text("frilly\n\ndotted\n")
    answers = ["It is frilly.", "frilly"]
    assert class_name(answers, ["frilly"] * 2, classes=str(tmp_path / "classes.txt")) == [1.0, 1.0]
    assert class_name(answers, ["frilly"] * 2) == [0.0, 1.0]


def test_an_answer_that_is_too_long_earns_nothing():
    assert judge_rows("x", "x", str, ["a" * 2001, "a" * 2000], ["a" * 2001, "a" * 2000]) == [0.0, 1.0]


FILES_TO_COPY = [f"recipes/vlm_r1.py:{name}" for name in ("detection", "ap_50", "weighted_sum")]
BOXES = {"image_sizes": [(9, 9)], "answer_extents": [(9, 9)]}
REASONS = [  # reward, solution, answer, reason
    *((name, solution, "", NO_ANSWER) for name, solution in ((NUMBER, "3"), (CHOICE, "B"), (YES_NO, "yes"))),
    *((name, None, "x", NO_SOLUTION) for name in (NUMBER, CHOICE, YES_NO, CLASS)),
    (NUMBER, "  ", "x", NO_SOLUTION),
    (NUMBER, "<answer>3</answer>", "3.0", None),
    (NUMBER, 3.5, "3.5", None),
    (NUMBER, "3", "many", "the answer 'many' is not a number"),
    (CHOICE, "B", "C", "the answer is 'C', not 'B'"),
    (YES_NO, True, "no", "the answer is 'no', not 'True'"),
    (CLASS, "frilly", "dotted", "the answer is 'dotted', not 'frilly'"),
    *((f"{ROOT}/{name}", '[{"bbox_2d": [0, 0, 2, 2], "label": "a"}]', "x", NO_BOX) for name in FILES_TO_COPY),
]


@pytest.mark.parametrize(("reward", "solution", "answer", "reason"), REASONS)
def test_a_reward_below_1_has_a_reason(reward, solution, answer, reason):
    extras = [{}]
    score_texts([reward], [answer], BOXES | {"solution": [solution], "extras": extras}, "whole")
    assert extras[0].get("why", {}).get(reward) == reason


@pytest.mark.parametrize(
    "accepted", [["red", "crimson"], [{"answer": "red"}, {"answer": "crimson"}], "['red', 'crimson']"]
)
def test_one_of_several_accepted_answers_is_enough(accepted):
    reward = get_reward("recipes/answers.py:one_of").function
    answers = ["Crimson.", "red", "blue", None]
    assert reward(answer_texts=answers, solution=[accepted] * 4) == [1, 1, 0, 0]
    assert reward(answer_texts=["red", "red"], solution=["red", []]) == [1, None]
