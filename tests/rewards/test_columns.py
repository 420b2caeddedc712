"""Test the arguments of reward functions, and the tensor with their values."""

from types import SimpleNamespace

import torch

from minivlmrl.data.rows import Completion, Row, ToolUse
from minivlmrl.rewards.columns import REWARD_ARGUMENTS, call_rewards, reward_columns
from minivlmrl.rewards.registry import Reward


def test_values_of_a_row_are_repeated_for_each_completion():
    """A column that only one of two rows has is None for the completions of the other row."""
    rows = [Row(messages=["a"], images=[], columns={"solution": "x"}), Row(messages=["b"], images=[], columns={"n": 1})]
    completions = [[Completion(torch.tensor([i, j]), torch.zeros(2), True) for j in (7, 8)] for i in (3, 4)]
    decode = lambda completion: f"{completion.ids.tolist()}"  # noqa: E731
    processor = SimpleNamespace(decode_assistant_turn=decode, answer_format="whole")
    columns = reward_columns(rows, [None] * 2, completions, processor)
    assert columns["completions"] == columns["answer_texts"] == ["[3, 7]", "[3, 8]", "[4, 7]", "[4, 8]"]
    assert columns["solution"] == ["x", "x", None, None] and columns["n"] == [None, None, 1, 1]
    assert columns["prompts"] == [["a"], ["a"], ["b"], ["b"]]
    assert columns["completion_ids"] == [[3, 7], [3, 8], [4, 7], [4, 8]]


def test_a_reward_receives_every_argument_and_no_column_of_the_same_name():
    """The columns of a row that have the name of an argument are hidden, except row_rewards, which a run writes."""
    row = Row([{"role": "user", "content": "?"}], [], dict.fromkeys(REWARD_ARGUMENTS, "other") | {"n": 1})
    row.columns["row_rewards"] = ["own", "another"]
    completion = Completion(torch.tensor([7]), tool_use=ToolUse("e"))
    processor = SimpleNamespace(decode_assistant_turn=lambda completion: "a", answer_format="whole")
    received = {}

    def own(**arguments):
        received.update(arguments)
        return [1.0]

    columns = reward_columns([row], [None], [[completion]], processor, reward_model_scores=[0.5])
    assert Reward("own", own)(**columns) == [1.0]
    assert received.keys() == REWARD_ARGUMENTS - {"row_rewards", "extras"} | {"n"}
    assert not any(value == ["other"] for value in received.values())
    assert received["reward_model_scores"] == [0.5] and received["environments"] == ["e"] and received["n"] == [1]
    assert torch.tensor(Reward("unnamed", own)(**columns)).isnan().all()


def test_rewards_are_a_tensor_with_nan_where_a_reward_gives_none():
    def length(completions, **columns):
        return [float(len(completion)) for completion in completions]

    def judged(completions, solution, **columns):
        return [None if answer is None else 1.0 for answer in solution]

    columns = {"completions": ["a", "bcd", ""], "solution": ["x", None, "y"]}
    rewards = call_rewards([Reward("length", length), Reward("judged", judged)], columns)
    expected = torch.tensor([[1.0, 1.0], [3.0, torch.nan], [0.0, 1.0]])
    torch.testing.assert_close(rewards, expected, rtol=0, atol=0, equal_nan=True)
    assert rewards.dtype == torch.float32 and call_rewards([length], {"completions": []}).shape == (0, 1)
