"""Test the arguments of reward functions."""

from dataclasses import replace
from types import SimpleNamespace

import torch

from minivlmrl.data.rows import Completion, Row, ToolUse
from minivlmrl.rewards.columns import REWARD_ARGUMENTS, reward_columns
from minivlmrl.rewards.registry import Reward


def test_a_reward_receives_every_argument_and_no_column_of_the_same_name():
    """The columns of a row that have the name of an argument are hidden, except row_rewards, which a run writes."""
    row = Row([{"role": "user", "content": "?"}], [], dict.fromkeys(REWARD_ARGUMENTS, "other") | {"n": 1})
    row.columns["row_rewards"] = ["own", "another"]
    completion = Completion(torch.tensor([7]), tool_use=ToolUse("e"))
    processor = SimpleNamespace(decode_assistant_turn=lambda completion: "a", answer_format="whole")
    received = {}

    def own(**arguments):
        received.update(arguments)
        return [1.0, 1.0]

    rows, groups = [row, replace(row, columns={"row_rewards": ["own"]})], [[completion], [completion]]
    columns = reward_columns(rows, [None] * 2, groups, processor, reward_model_scores=[0.5, 0.5])
    assert Reward("own", own)(**columns) == [1.0, 1.0]
    assert received.keys() == REWARD_ARGUMENTS - {"row_rewards", "extras"} | {"n"}
    assert not any("other" in value for value in received.values() if isinstance(value, list))
    assert received["reward_model_scores"] == [0.5, 0.5] and received["environments"] == ["e", "e"]
    assert received["n"] == [1, None] and received["completion_ids"] == [[7], [7]]
    assert torch.tensor(Reward("unnamed", own)(**columns)).isnan().all()
