"""Rewards: what earns, what does not, and what a policy that looks for loopholes gets."""

import time

import pytest
import torch

from minivlmrl.rewards import (
    REWARDS,
    accuracy,
    format,
    get,
    normalize,
    required_columns,
    reward,
    score,
    soft_overlong_punishment,
)

GOOD = "<think>I see green</think><answer>green square</answer>"


@pytest.fixture
def registry(monkeypatch):
    """Whatever a test registers is gone after it."""
    monkeypatch.setattr("minivlmrl.rewards.REWARDS", dict(REWARDS))


@pytest.mark.parametrize(
    "completion",
    [
        GOOD,
        "<think>a\nb\n</think>\n\n<answer>\nc\n</answer>",
        "<think>a</think> \t <answer>b</answer>",
        f"\n {GOOD} \n",  # white space around is not text
        "<think>1 < 2 > 0 <b></think><answer><i></answer>",
        "<think>日本</think><answer>é</answer>",
    ],
)
def test_format_is_earned(completion):
    assert format([completion]) == [1.0]


@pytest.mark.parametrize(
    "completion",
    [
        "",
        "green square",
        "<think>a</think>",
        "<answer>a</answer>",
        "<answer>b</answer><think>a</think>",
        "<think>a<answer>b</answer></think>",
        "<think>a</think><answer>b",
        "<think>a<answer>b</answer>",
        "a</think><answer>b</answer>",
        "<think>a</think>b</answer>",
        f"Sure! {GOOD}",
        f"{GOOD} Done.",
        f"{GOOD}<|im_end|>",
        f"{GOOD}\x00",
        "<think>a</think>so<answer>b</answer>",
        "<think>a</think><think>b</think><answer>c</answer>",
        "<think>a</think><answer>b</answer><answer>c</answer>",
        f"{GOOD}{GOOD}",
        "<think><think>a</think></think><answer>b</answer>",
        "<think>a<think>b</think><answer>c</answer>",
        "<think>a</think><answer><answer>b</answer></answer>",
        "<think>a</think><answer>b</answer></answer>",
        "<think>a</think><answer>b</think></answer>",
        "<think></think><answer>b</answer>",
        "<think>a</think><answer></answer>",
        "<think> \n</think><answer>b</answer>",
        "<think>a</think><answer>\t</answer>",
        "<THINK>a</THINK><ANSWER>b</ANSWER>",
        "<think >a</think><answer>b</answer>",
        "<think>a</think><answer/>",
        "&lt;think&gt;a&lt;/think&gt;&lt;answer&gt;b&lt;/answer&gt;",
    ],
)
def test_format_is_not_earned(completion):
    assert format([completion]) == [0.0]


@pytest.mark.parametrize(
    ("completion", "solution"),
    [
        (GOOD, "green square"),
        ("<answer>green square</answer>", "green square"),
        ("<answer> Green \n SQUARE. </answer>", "green square"),
        ("<answer>green square</answer>", " Green  Square."),
        ("<answer>green square</answer>", "<think>x</think><answer>green square</answer>"),
        ("<answer>STRASSE</answer>", "straße"),
        ("<answer>red</answer> no: <answer>green square</answer> yes", "green square"),
        ("<answer>3.</answer>", "3"),
        ("<answer>3.5</answer>", "3.5"),
    ],
)
def test_accuracy_is_earned(completion, solution):
    assert accuracy([completion], [solution]) == [1.0]


@pytest.mark.parametrize("solution", [None, "", "  ", ".", "<answer></answer>"])
def test_accuracy_cannot_judge_without_a_solution(solution):
    assert accuracy([GOOD], [solution]) == [None]


# what a policy might try instead of looking at the picture, for the solution "green square": (format, accuracy)
HACKS = {
    "": (0.0, 0.0),
    "green square": (0.0, 0.0),
    "<think>a</think><answer>square</answer>": (1.0, 0.0),
    "<think>a</think><answer>green</answer>": (1.0, 0.0),
    "<think>a</think><answer>green square or red square</answer>": (1.0, 0.0),
    "<think>a</think><answer>red square, green square</answer>": (1.0, 0.0),
    "<think>a</think><answer>greensquare</answer>": (1.0, 0.0),
    "<think>a</think><answer>not green square</answer>": (1.0, 0.0),
    "<think>a</think><answer>green square!</answer>": (1.0, 0.0),
    "<think>a</think><answer>.*</answer>": (1.0, 0.0),
    "<think>a</think><answer>{solution}</answer>": (1.0, 0.0),
    "<think>a</think><answer>accuracy: 1.0</answer>": (1.0, 0.0),
    "<think>a</think><answer>None</answer>": (1.0, 0.0),
    "<think>a</think><answer>.</answer>": (1.0, 0.0),
    "<think>a</think><answer>ɡreen square</answer>": (1.0, 0.0),  # another letter that looks like g
    "<think>a</think><answer>green\u200b square</answer>": (1.0, 0.0),  # a space of no width
    "<think>green square</think><answer>red square</answer>": (1.0, 0.0),
    "<think>green square</think>": (0.0, 0.0),
    "<think>a</think><answer>green square": (0.0, 0.0),
    "green square</answer>": (0.0, 0.0),
    "<answer>green square<answer>": (0.0, 0.0),
    "<answer>red<answer>green square</answer>": (0.0, 0.0),
    "<answer><answer>green square</answer></answer>": (0.0, 0.0),
    "<ANSWER>green square</ANSWER>": (0.0, 0.0),
    "<answer>green square</answer><answer>red square</answer>": (0.0, 0.0),  # the last answer counts, ...
    "<answer>red square</answer><answer>green square</answer>": (0.0, 1.0),  # ... so this is one guess too
    "<answer>red square</answer>" * 11 + "<answer>green square</answer>": (0.0, 1.0),
    "<answer>green square</answer>": (0.0, 1.0),
    GOOD: (1.0, 1.0),
}


@pytest.mark.parametrize("completion", HACKS)
def test_red_team(completion):
    columns = {"solution": ["green square"]}
    assert tuple(score(["format", "accuracy"], [completion], columns)[0].tolist()) == HACKS[completion]


@pytest.mark.parametrize(
    "unit", ["<answer>", "</answer>", "<think>", "</think><answer>", "</think><answer></answer>", "</think> ", " "]
)
def test_endless_repetition_is_judged_quickly(unit):
    """A policy that has gone astray repeats itself: 8 thousand characters must not stall the run."""
    completion = "<think>" + unit * (8000 // len(unit))
    begin = time.process_time()
    assert score(["format", "accuracy"], [completion], {"solution": ["x"]}).tolist() == [[0.0, 0.0]]
    assert time.process_time() - begin < 1


def test_normalize_docstring_example():
    assert normalize("<answer> Green  square.</answer>") == "green square"


def test_a_full_stop_may_stand_alone():
    assert normalize("green square .") == "green square"


def test_rewards_judge_each_completion_by_its_own_row():
    columns = {"solution": ["green square", "red square", None]}
    rewards = score(["accuracy", "format"], [GOOD, GOOD, "nothing"], columns)
    assert rewards.dtype == torch.float32
    assert rewards[:2].tolist() == [[1.0, 1.0], [0.0, 1.0]]
    assert rewards[2, 0].isnan()
    assert rewards[2, 1] == 0


def test_an_unknown_reward_is_named_with_the_known_ones():
    for ask in (lambda: get("acuracy"), lambda: score(["acuracy"], [GOOD], {}), lambda: required_columns(["acuracy"])):
        with pytest.raises(ValueError, match=r"unknown reward 'acuracy'; registered are: .*accuracy, .*format"):
            ask()


def test_a_missing_column_is_named():
    with pytest.raises(
        ValueError, match=r"reward accuracy needs column 'solution'; the rows have \['level', 'problem'"
    ):
        score(["accuracy"], [GOOD], {"problem": ["?"], "level": [1]})


@pytest.mark.parametrize("values", [[], [1.0], [1.0, 0.0, 1.0]])
def test_another_number_of_values_is_refused(registry, values):
    @reward
    def counted(completions, **columns):
        return values

    with pytest.raises(ValueError, match=f"reward counted returned {len(values)} values for 2 completions"):
        score(["counted"], ["a", "b"], {})


def test_a_reward_written_for_trl_works(registry):
    """From TRL's documentation, but for the plain text of the completions."""

    @reward
    def reward_num_unique_chars(completions, **kwargs):
        return [len(set(completion)) for completion in completions]

    assert score(["reward_num_unique_chars"], ["aab", "xyz"], {"solution": ["", ""]}).tolist() == [[2.0], [3.0]]
    assert required_columns(["reward_num_unique_chars"]) == []


def test_a_trl_reward_with_a_column_asks_for_it(registry):
    @reward
    def right_level(completions, ground_truth, tolerance=0, **kwargs):
        return [1.0 if len(c) - t <= tolerance else None for c, t in zip(completions, ground_truth, strict=True)]

    assert required_columns(["right_level", "accuracy", "format"]) == ["ground_truth", "solution"]
    rewards = score(["right_level"], ["ab", "abcd"], {"ground_truth": [2, 2]})
    assert rewards[0].item() == 1
    assert rewards[1].isnan().item()


def test_a_keyword_only_column_is_asked_for(registry):
    @reward
    def strict(completions, *, ground_truth, **kwargs):
        return [0.0 for _ in completions]

    assert required_columns(["strict"]) == ["ground_truth"]


# the docstring says that a reward written for TRL works
def test_a_trl_reward_that_names_prompts_works(registry):
    @reward
    def longer_than_prompt(prompts, completions, **kwargs):
        return [float(len(c) > len(p)) for p, c in zip(prompts, completions, strict=True)]

    assert required_columns(["longer_than_prompt"]) == []


# the reward model's numbers come with the completions; nothing is asked of the rows
def test_the_reward_model_says_what_it_was_given():
    assert required_columns(["reward_model"]) == []
    columns = {"reward_model_scores": [0.5, -30.0]}
    assert score(["reward_model", "format"], [GOOD, ""], columns).tolist() == [[0.5, 1.0], [-30.0, 0.0]]


def test_any_reward_may_read_the_given_columns(registry):
    @reward
    def brevity(prompts, completions, completion_ids, reward_model_scores, **columns):
        return [s / len(ids) for s, ids in zip(reward_model_scores, completion_ids, strict=True)]

    assert required_columns(["brevity"]) == []
    columns = {"prompts": [[]], "completion_ids": [[1, 2]], "reward_model_scores": [3.0]}
    assert score(["brevity"], ["a"], columns).tolist() == [[1.5]]


@pytest.mark.parametrize(
    ("length", "expected"), [(0, 0), (79, 0), (80, 0), (81, -0.05), (90, -0.5), (99, -0.95), (100, -1), (120, -1)]
)
def test_overlong_punishment_docstring_example(length, expected):
    assert soft_overlong_punishment(length, 100, 20) == pytest.approx(expected)


def test_a_cache_longer_than_the_limit_punishes_from_the_first_token():
    assert [soft_overlong_punishment(n, 4, 8) for n in range(5)] == [-0.5, -0.625, -0.75, -0.875, -1]
