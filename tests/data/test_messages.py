"""Test that messages which no chat template can render are refused."""

import pytest

from minivlmrl.data.messages import check_messages

WRONG = "message 1 must have a role, and content that"
PART = "has a part that is neither text"


@pytest.mark.parametrize(("message", "says"), [
    *((message, WRONG) for message in ({"role": "user"}, {"content": "hi"}, {"role": 3, "content": "a"}, "hi", ["a"])),
    *(({"role": "assistant", "tool_calls": calls}, WRONG) for calls in ("a", 3, ["a"], [{"function": "a"}])),
    *(({"role": "user", "content": [part]}, PART) for part in (
        {"type": "audio", "text": "hi"}, {"type": "text"}, {"type": "text", "text": 3}, {"image": None}, {}, "hi", None,
    )),
], ids=str)  # fmt: skip
def test_messages_that_are_refused(message, says):
    with pytest.raises(ValueError, match=says):
        check_messages([{"role": "system", "content": "x"}, message])
