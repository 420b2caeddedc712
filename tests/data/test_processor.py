"""Compare images in later turns of a conversation with the processor of transformers."""

import PIL.Image
import pytest
import torch

from minivlmrl.data.chat_template import ChatTemplate
from minivlmrl.data.image import ImageProcessor
from minivlmrl.data.processor import Processor, encode_completion
from minivlmrl.data.tokenizer import train_tokenizer
from minivlmrl.model.packing import pack
from minivlmrl.model.rope import get_rope_index
from minivlmrl.tasks import shapes
from tests.helpers import tiny
from tests.helpers.talk import IMAGE_PART, assistant, text, user
from tests.record.record_vision import noise

PROCESSOR = Processor(shapes.tokenizer(), ImageProcessor())


def test_pictures_in_later_turns_equal_transformers_whole_conversation(tmp_path, oracle, published):
    from transformers.models.qwen2_5_vl import Qwen2_5_VLProcessor
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    pixels = Qwen2VLImageProcessorPil(min_pixels=56 * 56, max_pixels=28 * 28 * 16384)
    template = published("qwen2_5_vl")
    theirs = oracle.their_processor(Qwen2_5_VLProcessor, tmp_path, PROCESSOR.tokenizer, template, pixels)
    first, second, third = (noise("RGB", size, seed) for seed, size in enumerate([(60, 90), (90, 56), (200, 120)]))
    turns = [assistant("red"), user([text("and"), {"type": "image", "image": second}, text("it?")]), assistant([
        text("look"), {"type": "image", "image": third, "max_pixels": 6000}, text("blue")])]  # fmt: skip
    messages = [user([IMAGE_PART, text("What?")])]
    prompt, completion = PROCESSOR(messages, [first]), encode_completion(PROCESSOR, messages, turns)
    sizes = [tuple(28 * side // 2 for side in grid[:0:-1]) for *_, grid in completion.pictures[1:]]
    images = [first, second, third.resize(sizes[0], PIL.Image.Resampling.BICUBIC)]
    rendered = theirs.apply_chat_template(messages + turns, tokenize=False)
    expected = theirs(text=[rendered], images=images, return_tensors="pt")
    ids = torch.cat([prompt.input_ids, completion.ids])
    assert ids.tolist() + PROCESSOR.tokenizer.encode("\n") == expected["input_ids"][0].tolist()
    grids = torch.cat([prompt.image_grid_thw, torch.tensor([grid for *_, grid in completion.pictures])])
    assert grids.tolist() == expected["image_grid_thw"].tolist()
    pixels = torch.cat([prompt.pixel_values, *(x for _, x, _ in completion.pictures)])
    assert torch.equal(pixels, expected["pixel_values"])
    written = PROCESSOR.tokenizer.decode(completion.ids[completion.policy_mask].tolist())
    assert written == "red<|im_end|>lookblue<|im_end|>"
    config = tiny.config()
    special = PROCESSOR.tokenizer.special_tokens
    config.image_token_id, config.video_token_id = special["<|image_pad|>"], special["<|video_pad|>"]
    batch = pack([prompt], [[completion]], config)
    assert torch.equal(batch.position_ids, get_rope_index(ids, grids, config)[:, :-1])
    assert torch.equal(batch.vision_index, (ids == config.image_token_id).nonzero()[:, 0])


def test_an_answer_that_begins_with_a_newline():
    """A newline that begins an answer is a token of its own, because no sampled token begins in the prompt."""
    tokenizer = train_tokenizer(["assistant\n\n"] * 3, vocab_size=280)
    assert len(tokenizer.encode("\n\n")) == 1
    last = [*tokenizer.encode("\nred"), tokenizer.special_tokens["<|im_end|>"]]
    for turns in ([assistant("\nred")], [assistant("blue"), assistant("\nred")]):
        completion = encode_completion(Processor(tokenizer, ImageProcessor()), [user("?")], turns)
        assert completion.ids.tolist()[-len(last) :] == last
        assert completion.policy_mask[-len(last) :].all() and not completion.policy_mask[: -len(last)][-1:].any()


@pytest.mark.parametrize("stop", ["<|im_end|>", "<|endoftext|>"])
def test_decode_drops_one_stop_token_at_the_end_and_no_other(stop):
    ids = [*PROCESSOR.tokenizer.encode("red"), PROCESSOR.tokenizer.special_tokens[stop]]
    assert PROCESSOR.decode(torch.tensor(ids)) == "red"
    assert PROCESSOR.decode(torch.tensor([*ids, ids[-1]])) == "red" + stop
    assert PROCESSOR.decode(torch.tensor(ids[-1:])) == ""
    # rewards must see control tokens in front of an answer
    ids = [PROCESSOR.tokenizer.special_tokens["<|im_start|>"], *PROCESSOR.tokenizer.encode("red")]
    assert PROCESSOR.decode(torch.tensor(ids)) == "<|im_start|>red"


@pytest.mark.parametrize("part", [IMAGE_PART, {"image": "a"}, {"type": "video"}])
def test_missing_images_and_videos_in_a_completion_are_refused(part):
    processor = Processor(shapes.tokenizer(), ImageProcessor())
    for turns in ([assistant([part])], [assistant("a"), {"role": "user", "content": [part]}, assistant("b")]):
        with pytest.raises(ValueError, match=r"1 placeholder for an? .*, but 0 images and 0 videos were given"):
            encode_completion(processor, [user("?")], turns)


def test_a_picture_of_an_answer_that_the_template_drops_is_refused(published):
    processor = Processor(shapes.tokenizer(), ImageProcessor(), ChatTemplate(published("qwen3_vl"), "t"))
    shown = assistant([IMAGE_PART | {"image": PIL.Image.new("RGB", (56, 56))}])
    turns = [shown, {"role": "tool", "content": "4"}, assistant("four")]
    with pytest.raises(ValueError, match="the chat template cannot render an image in the answer"):
        encode_completion(processor, [{"role": "user", "content": "?"}], turns)
