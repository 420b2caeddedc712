"""Messages and turns that no chat template can lay out."""

import PIL.Image
import pytest
from talk import assistant

from minivlmrl.data.folder_template import ChatTemplate
from minivlmrl.data.image import ImageProcessor
from minivlmrl.data.rows import Processor
from minivlmrl.data.tokenize_completions import check_messages, encode_completion
from minivlmrl.tasks import shapes

IMAGE_PART, VIDEO_PART = {"type": "image"}, {"type": "video"}


@pytest.mark.parametrize(
    "message",
    [{"role": "user"}, {"content": "hi"}, {"role": "user", "content": None}, {"role": 3, "content": "a"}, "hi", ["a"]]
    + [{"role": "assistant", "tool_calls": calls} for calls in ("a", 3, ["a"], [{"function": "a"}])],
)
def test_a_message_needs_role_and_content(message):
    with pytest.raises(ValueError, match="message 1 needs a role, and content that"):
        check_messages([{"role": "system", "content": "x"}, message])


@pytest.mark.parametrize(
    "part",
    [{"type": "audio", "text": "hi"}, {"type": "text"}, {"type": "text", "text": 3}, {"image": None}, {}, "hi", None],
)
def test_a_part_that_is_neither_text_nor_image_nor_video_is_refused(part):
    with pytest.raises(ValueError, match="has a part that is not text"):
        check_messages([{"role": "user", "content": [part]}])


@pytest.mark.parametrize("turns", [
    [],
    [{"role": "user", "content": "hi"}],
    [{"role": "user", "content": "hi"}, assistant("ho")],
    [assistant("ho"), {"role": "user", "content": "hi"}],
])  # fmt: skip
def test_a_completion_begins_and_ends_with_the_assistant(turns):
    with pytest.raises(ValueError, match="turns must begin and end with an assistant turn; their roles"):
        encode_completion(None, [], turns)


@pytest.mark.parametrize("part", [IMAGE_PART, {"image": "a"}, VIDEO_PART])
def test_an_image_that_did_not_come_or_a_video_in_a_completion_is_refused(part):
    processor = Processor(shapes.tokenizer(), ImageProcessor())
    for turns in ([assistant([part])], [assistant("a"), {"role": "user", "content": [part]}, assistant("b")]):
        with pytest.raises(ValueError, match=r"the prompt has 1 .* placeholder.s. but 0 .* came with it"):
            encode_completion(processor, [], turns)


def test_a_picture_of_an_answer_that_the_template_drops_is_refused(published):
    """Qwen3-VL's shows none of the assistant's."""
    processor = Processor(shapes.tokenizer(), ImageProcessor(), ChatTemplate(published("qwen3_vl"), "t"))
    shown = assistant([IMAGE_PART | {"image": PIL.Image.new("RGB", (56, 56))}])
    turns = [shown, {"role": "tool", "content": "4"}, assistant("four")]
    with pytest.raises(ValueError, match="the chat template has no place for a picture of the answer"):
        encode_completion(processor, [{"role": "user", "content": "?"}], turns)
