"""Test what the built-in chat template refuses; test_properties.py compares it with Qwen2.5-VL's published template."""

import pytest

from minivlmrl.data.chat_template import render
from minivlmrl.data.messages import part_kind
from tests.helpers.talk import user


@pytest.mark.parametrize("part", [{"type": "audio", "text": "a"}, {"type": "text", "text": 3}, {}, "a"])
def test_unknown_parts_are_refused(part):
    assert part_kind(part) is None
    with pytest.raises(ValueError, match="a part of a message must be text, an image or a video, but it is"):
        render([user([part])])
