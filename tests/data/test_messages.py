"""Test that messages which no chat template can render are refused."""

import pytest

from minivlmrl.data.messages import check_messages


@pytest.mark.parametrize(
    "message",
    [{"role": "user"}, {"content": "hi"}, {"role": "user", "content": None}, {"role": 3, "content": "a"}, "hi", ["a"]]
    + [{"role": "assistant", "tool_calls": calls} for calls in ("a", 3, ["a"], [{"function": "a"}])],
)
def test_a_message_needs_role_and_content(message):
    with pytest.raises(ValueError, match="message 1 must have a role, and content that"):
        check_messages([{"role": "system", "content": "x"}, message])


@pytest.mark.parametrize(
    "part",
    [{"type": "audio", "text": "hi"}, {"type": "text"}, {"type": "text", "text": 3}, {"image": None}, {}, "hi", None],
)
def test_a_part_that_is_neither_text_nor_image_nor_video_is_refused(part):
    with pytest.raises(ValueError, match="has a part that is neither text"):
        check_messages([{"role": "user", "content": [part]}])
