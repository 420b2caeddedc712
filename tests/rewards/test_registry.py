"""Test rewards by name: options, arguments, compatibility with TRL, checks of returned values, and errors."""

import asyncio
import json
import math
import os
import signal
import time
import traceback

import numpy as np
import PIL.Image
import pytest
import torch

from minivlmrl.data.file_dataset import FileDataset
from minivlmrl.distributed.process_group import World
from minivlmrl.rewards import registry as file
from minivlmrl.rewards.columns import call_rewards
from minivlmrl.run.signals import StopSignals
from tests.helpers.links import ROOT
from tests.helpers.runs import metrics, write_lines
from tests.helpers.score_texts import score_texts

GOOD = "<think>a</think><answer>b</answer>"
CHAT = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "How many?"}]}]


def ask(monkeypatch, function, completions, **columns):
    if file.REWARDS.get("own") is not function:
        monkeypatch.setitem(file.REWARDS, "own", function)
        monkeypatch.setattr(file, "READS_MESSAGES", {})  # the new function decides for itself
    return file.get_reward("own")(completions, **columns)


def turns(*texts):
    return [{"role": "assistant" if i % 2 else "user", "content": text} for i, text in enumerate(texts)]


FORMS = {  # row formats in docs/data.md, with the same question and solution
    "plain": {"problem": "How many?", "solution": "2"},
    "text": {"prompt": "How many?", "solution": "2", "image": "red.png"},
    "turns": {"prompt": turns("How many?"), "solution": "2"},
    "parts": {"prompt": CHAT, "image": "red.png", "solution": "2"},
    "messages": {"messages": turns("How many?", "It is 2."), "solution": "2"},
    "ms-swift": {"messages": turns("<image>How many?"), "images": ["red.png"], "solution": "2"},
}  # fmt: skip
TEXTS = [r"<think>\na\n</think>\nIt is $\boxed{2}$.", r"$\boxed{3}$" + " so" * 99, "", r"$\boxed{2}$"]


@pytest.mark.parametrize("form", FORMS)
def test_rewards_give_the_same_values_for_every_row_format(form, trl, write_rows, monkeypatch):
    from trl import rewards as theirs

    def brevity(completions, **columns):
        return [1.0 if len(completion) < 100 else 0.0 for completion in completions]

    def requested(prompts, completions, **columns):
        both = zip(prompts, completions, strict=True)
        return [len(p[-1]["content"]) + (c[-1]["role"] == "assistant") for p, c in both]

    published = theirs.accuracy_reward, theirs.reasoning_accuracy_reward, theirs.think_format_reward
    published += theirs.get_cosine_scaled_reward(9), theirs.get_soft_overlong_punishment(9, 4)
    published += theirs.get_repetition_penalty_reward(2, -1.0), requested
    row, ids = FileDataset(write_rows(FORMS[form]))[0], [[1] * n for n in (3, 9, 1, 7)]
    columns = {"solution": ["2"] * 4, "completion_ids": ids, "prompts": [turns("How many?")] * 4}
    expected = [one(completions=[turns("", text)[1:] for text in TEXTS], **columns) for one in published]
    columns |= {name: [value] * 4 for name, value in row.columns.items()} | {"prompts": [row.messages] * 4}
    found = [ask(monkeypatch, one, TEXTS, **columns) for one in (*published, brevity)]
    assert found == [*expected, [1.0, 0.0, 1.0, 1.0]]


@pytest.mark.parametrize(("function", "expected"), [
    (lambda completions, **_: [c[0].get("content", "").count("a") for c in completions], [0, 1]),
    (lambda completions, **_: [len(c[-1]["content"]) + (c[0]["role"] == "assistant") for c in completions], [1, 3]),
    (lambda prompts, completions, **_: [(prompts[0] + c).count("a") for c in completions], [1, 2]),
    (lambda completions, **_: [len(c) for c in completions], [0, 2]),
    (lambda completions, **_: (len(c[-1]["content"]) for c in completions), [0, 2]),
    (lambda completions, **_: map(lambda c: len({**c[0]}["content"]), completions), [0, 2]),
    (lambda completions, **_: [len(c[0].keys()) for c in completions], [2, 2]),
])  # fmt: skip
def test_a_function_gets_what_it_reads_texts_or_messages(monkeypatch, function, expected):
    """The first completion is empty, so completion[0] of a text fails before the key."""
    assert ask(monkeypatch, function, ["", "ab"], prompts=[turns("a")] * 2) == expected


def json_answer(completions, solution, **columns):
    return [float(json.loads(text).get("answer") == truth) for text, truth in zip(completions, solution, strict=True)]


def test_the_form_of_a_call_is_decided_once(monkeypatch):
    """The completion '"cat"' fails like a function that reads messages, but the first call has chosen texts."""
    right = '{"answer": "cat"}'
    assert ask(monkeypatch, json_answer, [right], solution=["cat"]) == [1]
    with pytest.raises(file.RewardFailed, match="for the completion '\"cat\"': AttributeError"):
        ask(monkeypatch, json_answer, [right, '"cat"'], solution=["cat"] * 2)
    assert ask(monkeypatch, json_answer, [right], solution=["cat"]) == [1]


def test_an_error_hides_no_error_of_another_reward(monkeypatch):
    def fails(completions, **columns):
        return [1 / len(text[:0]) for text in completions]

    def right(completions, **columns):
        return [1.0] * len(completions)

    rewards = []
    for name, function in (("first", fails), ("right", right), ("second", fails)):
        monkeypatch.delitem(file.READS_MESSAGES, name, raising=False)
        rewards.append(file.Reward(name, function))
    assert call_rewards(rewards[1:2], {"completions": ["a", "b"]}).tolist() == [[1], [1]]
    with pytest.raises(file.RewardFailed, match=r"^reward first, .*: ZeroDivisionError: division by zero") as caught:
        call_rewards(rewards, {"completions": ["a", "b"]})
    assert [note.partition(",")[0] for note in caught.value.__notes__] == ["reward second"]


def test_a_function_that_fails_in_both_forms_names_both_errors(monkeypatch):
    calls = []

    def judge(completions, **columns):
        calls.append(completions)
        return [completions[0] + 1]

    message = "for the completion 'a': TypeError: can only concatenate str .* messages: TypeError: can only concat"
    with pytest.raises(file.RewardFailed, match=message):
        ask(monkeypatch, judge, ["a", "b"])
    assert len(calls) == 2


def test_each_call_and_completion_has_its_own_columns(monkeypatch):
    def matched(completions, boxes, **columns):
        return [sum(truth.pop() for _ in range(2)) for truth in boxes]

    truth = [1, 2, 3]
    for _ in range(2):
        assert ask(monkeypatch, matched, ["a", "b"], boxes=[truth, truth]) == [5, 5]


def test_an_async_function_is_awaited_in_one_event_loop(monkeypatch):
    one_at_a_time = asyncio.Semaphore(1)  # belongs to the event loop of the first wait

    async def judge(text):
        async with one_at_a_time:
            await asyncio.sleep(0)
        return len(text)

    async def later(completions, **columns):
        return await asyncio.gather(*map(judge, completions))

    for _ in range(2):
        assert ask(monkeypatch, later, ["a", "bb"]) == [1, 2]


def strict(completions, **columns):
    return [{"two": 2}[text] for text in completions]


def logging(completions, log_extra, **columns):
    log_extra("length", [len(text) for text in completions])
    return strict(completions)


def fickle(completions, **columns):
    if len(completions) > 1:
        raise OSError("too many")
    return [0.0]


FIVE = "rows.jsonl:2: reward own, for the completion 'five': KeyError: 'five'"


@pytest.mark.parametrize(("function", "sentence"), [
    (lambda completions, **_: (strict([text])[0] for text in completions), FIVE),
    (strict, FIVE), (logging, FIVE), (fickle, "reward own, for 3 completions together: OSError: too many"),
])  # fmt: skip
def test_an_error_names_row_reward_and_text(monkeypatch, function, sentence):
    with pytest.raises(file.RewardFailed) as caught:
        ask(monkeypatch, function, ["two", "five", "six"], row_names=["rows.jsonl:1", "rows.jsonl:2", "rows.jsonl:3"])
    assert str(caught.value) == sentence
    [*_, last] = traceback.extract_tb(caught.value.__cause__.__traceback__)
    assert last.filename == __file__


@pytest.mark.usefixtures("default_signals")
def test_ctrl_c_during_a_reward(monkeypatch):
    """Ctrl-C stops a command at once, but a run only after its step."""

    def pressed(completions, **columns):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.1)
        return [0.0] * len(completions)

    with pytest.raises(KeyboardInterrupt):
        ask(monkeypatch, pressed, ["two"])
    with StopSignals(World()) as stop:
        assert ask(monkeypatch, pressed, ["two"]) == [0.0] and stop.first is not None


def test_columns_prompts_and_images_reach_a_reward(run, user_data, home, monkeypatch):
    row = {"prompt": [{"role": "user", "content": "Name it."}], "image": "0.png", "tag": "x"}
    write_lines(home / "chat.jsonl", [row])
    seen = {}

    def look(completions, prompts, images, tag, completion_ids, **columns):
        seen.update(locals())
        return [float(i) for i in range(len(completions))]

    monkeypatch.setitem(file.REWARDS, "look", look)
    rows = f"--data.train_file={home / 'chat.jsonl'}"
    run(*user_data, rows, "--stages=[grpo]", "--grpo.max_steps=1", "--rewards={look: 1}")
    n = len(seen["completions"])
    assert seen["tag"] == ["x"] * n and seen["columns"]["row_names"] == [f"{home / 'chat.jsonl'}:1"] * n
    assert {type(text) for text in seen["completions"]} == {str} and seen["prompts"] == ["Name it."] * n
    assert all(isinstance(image, PIL.Image.Image) for [image] in seen["images"])


@pytest.mark.usefixtures("quick")
def test_rewards_get_trls_trainer_state_and_can_log(run, monkeypatch):
    """A reward that another reward calls also gets the state, and a resumed run counts the steps of its stage."""
    fails_at = [2]
    progress = []

    def told(completions, trainer_state, log_metric, log_extra, **columns):
        assert trainer_state.global_step not in fails_at
        progress.append(trainer_state.global_step / trainer_state.max_steps)
        log_metric("steps_left", torch.tensor(trainer_state.max_steps - trainer_state.global_step))
        log_extra("characters", [torch.tensor(len(text)) for text in completions])
        log_extra("why", [""] * len(completions))
        log_extra("parts", [{1, 2}] * len(completions))
        return [0.0] * len(completions)

    monkeypatch.setitem(file.REWARDS, "told", told)
    monkeypatch.chdir(ROOT)
    options = [
        "--stages=[sft, grpo]",
        "--sft.max_steps=1",
        "--rewards={'recipes/shuffled.py:shuffled(reward=\"told\")': 1}",
    ]
    options += ["--log_completions=1", "--data.eval_rewards=[told]", "--grpo.max_steps=3"]
    with pytest.raises(ValueError, match="states/000003: continue with --resume=auto"):
        run(*options)
    fails_at.clear()
    folder = run(*options, "--resume=auto")
    assert [line.get("steps_left") for line in metrics(folder)] == [None, 3.0, 2.0, 1.0]
    assert progress[-2:] == [1, 1]  # sampled and greedy answers after the last step
    logged = [one for line in metrics(folder, "completions.jsonl") for one in line["completions"]]
    expected = [{"characters": len(one["text"]), "parts": "{1, 2}"} for one in logged]
    assert logged and [one["extra"] for one in logged] == expected and not any(one.get("why") for one in logged)


@pytest.mark.parametrize(("log", "expected"), [
    (lambda log_metric, **_: log_metric("a", "x"), "could not convert string to float: 'x'"),
    (lambda log_extra, **_: log_extra("a", [1, 2]), "a. has 2 values for 1 completion; give one value"),
])  # fmt: skip
def test_invalid_logged_values_are_refused(monkeypatch, log, expected):
    with pytest.raises(ValueError, match=f"reward own, .*{expected}"):
        ask(monkeypatch, lambda completions, **columns: log(**columns), ["a"])


def test_a_reward_judges_only_rows_of_files_that_name_it():
    """data.train may list the rewards of a file; all other rewards give its rows neither values nor reasons."""
    extras = [{}, {}, {}]
    rows = {"solution": ["a", None, "c"], "row_rewards": [["format"], None, ["accuracy", "format"]], "extras": extras}
    values = score_texts(["accuracy", "format"], ["<answer>c</answer>"] * 3, rows)
    assert values.isnan().tolist() == [[True, False], [True, False], [False, False]]
    assert values[2].tolist() == [1.0, 0.0] and values.dtype == torch.float32
    assert score_texts(["accuracy"], [], {"solution": []}).shape == (0, 1)
    assert [sorted(extra["why"]) for extra in extras] == [["format"], ["accuracy", "format"], ["format"]]


NO_NUMBER = "but it must return a finite number, or None if it cannot score the completion"


@pytest.mark.parametrize(("values", "sentence"), [
    *[([0.0, value], NO_NUMBER)
      for value in (math.nan, -math.inf, 10**400, "1.0", [1.0], np.float32("nan"), torch.ones(1))],
    *[(values, "but it must return a list with one number per completion, here 2")
      for values in (None, [1.0], iter([1.0, 0.0, 1.0]), {0: 1.0, 1: 0.0}, {0.0, 1.0}, "12", torch.tensor(1.0))],
], ids=lambda value: type(value).__name__)  # fmt: skip
def test_other_values_than_one_number_per_completion_are_refused(monkeypatch, values, sentence):
    """A dict, a set or a text with two elements has the right length, but no number per completion."""
    row = "a:7: " if sentence == NO_NUMBER else ""
    with pytest.raises(file.RewardFailed, match=f"^{row}reward own returned .*{sentence}$"):
        ask(monkeypatch, lambda completions, **columns: values, ["a", "what?"], row_names=["a:1", "a:7"])


OWN = """
import functools

from minivlmrl.rewards.text import accuracy

class Scorer:
    def __call__(self, completions, solution, **columns):
        return [1.0] * len(completions)

def unused(completions, solution, **columns):
    return [1.0] * len(completions)

def named(completions, solution, hint=None, *, scale=1.0):
    return [scale] * len(completions)

@functools.wraps(accuracy)
def around(*args, **columns):
    return accuracy(*args, **columns)

def star(*args, **columns):
    return [1.0] * len(columns["completions"])

one_scorer = Scorer()
NUMBER = 3
"""


def test_a_reward_with_columns_receives_every_column(tmp_path):
    (tmp_path / "mine.py").write_text(OWN)
    received = {"unused": True, "one_scorer": True, "named": False, "named(scale=2.0)": False}
    received |= {"around": True, "star": True}
    for name, expected in received.items():
        reward = file.get_reward(f"{tmp_path}/mine.py:{name}")
        assert reward.receives_all == expected
        assert reward.columns == (set() if name == "star" else {"solution"})
    assert file.required_columns([reward, file.get_reward(f"{tmp_path}/mine.py:named")]) == ["solution"]
    assert not any(file.get_reward(name).receives_all for name in file.REWARDS)


@pytest.mark.parametrize(("name", "message"), [
    ("Scorer", r"mine\.py:Scorer is <class .*, but it must be a function, .* such as an instance of a class$"),
    ("NUMBER", r"^reward .*mine\.py:NUMBER is 3, but it must be a function, or an object with __call__, such as an "),
])  # fmt: skip
def test_what_is_no_function_is_refused(tmp_path, name, message):
    (tmp_path / "mine.py").write_text(OWN)
    with pytest.raises(ValueError, match=message):
        file.get_reward(f"{tmp_path / 'mine.py'}:{name}")
