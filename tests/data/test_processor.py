"""Compare rows' prompts and completions with transformers' processor."""

import unicodedata

import numpy as np
import PIL.Image
import pytest
import torch

from minivlmrl.data.folder_template import ChatTemplate
from minivlmrl.data.image import ImageProcessor
from minivlmrl.data.processor import Processor, encode_completion
from minivlmrl.data.tokenizer import train_tokenizer
from minivlmrl.model.packing import pack
from minivlmrl.model.rope import get_rope_index
from minivlmrl.tasks import shapes
from tests.helpers import tiny
from tests.helpers.talk import IMAGE_PART, assistant, system, text, user

PROCESSOR = Processor(shapes.tokenizer(), ImageProcessor())


def asked(*parts):
    return [user(list(parts))]


def picture(size, seed=0):
    width, height = size
    return PIL.Image.fromarray(np.random.RandomState(seed).randint(0, 256, (height, width, 3), dtype=np.uint8))


VIDEO_PART = {"type": "video"}

CONVERSATIONS = {
    "text": (asked(text("What is it?")), []),
    "an image": (asked(IMAGE_PART, text("What is it?")), [(56, 84)]),
    "images between text": (asked(text("Is "), IMAGE_PART, text(" in\n"), IMAGE_PART), [(60, 60), (140, 90)]),
    "several turns": (
        [system("It's 7 o'clock."), user([IMAGE_PART, text("  first ")]), assistant("green square\n"),
         user([IMAGE_PART, IMAGE_PART, text("café e\u0301")])],
        [(56, 56), (84, 56), (112, 28)],
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def theirs(processor_of):
    return processor_of("qwen2_5_vl")


@pytest.fixture(scope="module")
def processor_of(tmp_path_factory, oracle, published):
    """Return a function that creates a function (messages, images), which calls transformers' processor.

    The argument is the name of a chat template that TRL contains.
    """
    from transformers.models.qwen2_5_vl import Qwen2_5_VLProcessor
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    pixels = Qwen2VLImageProcessorPil(min_pixels=56 * 56, max_pixels=28 * 28 * 16384)
    folder = tmp_path_factory.mktemp("tokenizer")

    def processor_of(name):
        template = published(name)
        processor = oracle.their_processor(Qwen2_5_VLProcessor, folder, PROCESSOR.tokenizer, template, pixels)

        def theirs(messages, images, **options):
            rendered = processor.apply_chat_template(messages, tokenize=False, **options)
            return processor(text=[rendered], images=images or None, return_tensors="pt")

        return theirs

    return processor_of


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_prompt_equals_transformers(theirs, name):
    messages, sizes = CONVERSATIONS[name]
    images = [picture(size, seed) for seed, size in enumerate(sizes)]
    prompt, expected = PROCESSOR(messages, images), theirs(messages, images, add_generation_prompt=True)
    assert torch.equal(prompt.input_ids, expected["input_ids"][0])
    if images:
        assert torch.equal(prompt.pixel_values, expected["pixel_values"])
        assert torch.equal(prompt.image_grid_thw, expected["image_grid_thw"])


def test_pictures_in_later_turns_equal_transformers_whole_conversation(theirs):
    """Compare ids, policy mask, patches and positions for images in later turns."""
    first, second, third = (picture(size, seed) for seed, size in enumerate([(60, 90), (90, 56), (200, 120)]))
    turns = [assistant("red"), *asked(text("and"), {"type": "image", "image": second}, text("it?")), assistant([
        text("look"), {"type": "image", "image": third, "max_pixels": 6000}, text("blue")])]  # fmt: skip
    messages = asked(IMAGE_PART, text("What?"))
    prompt, said = PROCESSOR(messages, [first]), encode_completion(PROCESSOR, [], turns)
    sizes = [tuple(28 * side // 2 for side in grid[:0:-1]) for *_, grid in said.pictures[1:]]
    shown = [first, second, third.resize(sizes[0], PIL.Image.Resampling.BICUBIC)]
    expected = theirs(messages + turns, shown)
    ids = torch.cat([prompt.input_ids, said.ids])
    assert ids.tolist() + PROCESSOR.tokenizer.encode("\n") == expected["input_ids"][0].tolist()
    grids = torch.cat([prompt.image_grid_thw, torch.tensor([grid for *_, grid in said.pictures])])
    assert grids.tolist() == expected["image_grid_thw"].tolist()
    assert torch.equal(torch.cat([prompt.pixel_values, *(x for _, x, _ in said.pictures)]), expected["pixel_values"])
    written = PROCESSOR.tokenizer.decode(said.ids[said.policy_mask].tolist())
    assert written == "red<|im_end|>lookblue<|im_end|>"
    config = tiny.config()
    special = PROCESSOR.tokenizer.special_tokens
    config.image_token_id, config.video_token_id = special["<|image_pad|>"], special["<|video_pad|>"]
    batch = pack([prompt], [[said]], config)
    assert torch.equal(batch.position_ids, get_rope_index(ids, grids, config)[:, :-1])
    assert torch.equal(batch.vision_index, (ids == config.image_token_id).nonzero()[:, 0])


@pytest.mark.parametrize("name", CONVERSATIONS)
@pytest.mark.parametrize("answer", ["", " red\n\n", "7 e\u0301"])
def test_prompt_and_completion_equal_transformers_whole_conversation(theirs, name, answer):
    """The split between prompt and completion is a token boundary in the whole conversation."""
    messages, sizes = CONVERSATIONS[name]
    turns = [assistant(answer), *asked(text("Sure?\n")), assistant("'s fine")]
    images = [picture(size) for size in sizes]
    prompt, said = PROCESSOR(messages, images), encode_completion(PROCESSOR, [], turns)
    expected = theirs(messages + turns, images)["input_ids"][0].tolist()
    assert [*prompt.input_ids.tolist(), *said.ids.tolist(), *PROCESSOR.tokenizer.encode("\n")] == expected
    written = f"{answer}<|im_end|>'s fine<|im_end|>"
    assert PROCESSOR.tokenizer.decode(said.ids[said.policy_mask].tolist()) == unicodedata.normalize("NFC", written)


@pytest.mark.parametrize("name", ["qwen3_5_think", "qwen3_5_nothink", "qwen3_6"])
def test_each_answer_follows_its_own_prompt_if_the_template_drops_thoughts(processor_of, published, name):
    """The prompts are those from which transformers would generate, with all images so far."""
    first, second = picture((56, 84)), picture((84, 56), 1)
    thoughts = (
        [{}, {}] if name == "qwen3_5_nothink" else [{"reasoning_content": "easy"}, {"reasoning_content": "also\neasy"}]
    )
    shown = {"type": "image", "image": second}
    turns = [assistant("four") | thoughts[0], *asked(text("and"), shown), assistant("six") | thoughts[1]]
    messages = asked(IMAGE_PART, text("2+2?"))
    processor = Processor(PROCESSOR.tokenizer, ImageProcessor(), ChatTemplate(published(name), name))
    said = encode_completion(processor, messages, turns, [first])
    theirs = processor_of(name)
    assert said.turns[0].prompt is None
    prompts = [processor(messages, [first]), said.turns[1].prompt]
    for prompt, turn, end, images in zip(prompts, said.turns, (0, 2), ([first], [first, second]), strict=True):
        expected = theirs(messages + turns[:end], images, add_generation_prompt=True)
        assert torch.equal(prompt.input_ids, expected["input_ids"][0])
        assert torch.equal(prompt.pixel_values, expected["pixel_values"])
        whole = theirs(messages + turns[: end + 1], images)["input_ids"][0].tolist()
        assert [*prompt.input_ids.tolist(), *turn.ids.tolist(), *processor.tokenizer.encode("\n")] == whole
        assert turn.policy_mask.all()
    assert torch.equal(said.ids, torch.cat([turn.ids for turn in said.turns])) and said.policy_mask.all()


def test_an_answer_that_begins_with_a_newline():
    """The answer's newline is a separate token.

    In one string, the newlines of prompt and answer would be one token, which a policy cannot
    generate, because no prompt ends inside it.
    """
    tokenizer = train_tokenizer(["assistant\n\n"] * 3, vocab_size=280)
    assert len(tokenizer.encode("\n\n")) == 1
    last = [*tokenizer.encode("\nred"), tokenizer.special_tokens["<|im_end|>"]]
    for turns in ([assistant("\nred")], [assistant("blue"), assistant("\nred")]):
        said = encode_completion(Processor(tokenizer, ImageProcessor()), [], turns)
        assert said.ids.tolist()[-len(last) :] == last
        assert said.policy_mask[-len(last) :].all() and not said.policy_mask[: -len(last)][-1:].any()


@pytest.mark.parametrize("stop", ["<|im_end|>", "<|endoftext|>"])
def test_decode_drops_one_stop_token_at_the_end_and_no_other(stop):
    ids = [*PROCESSOR.tokenizer.encode("red"), PROCESSOR.tokenizer.special_tokens[stop]]
    assert PROCESSOR.decode(torch.tensor(ids)) == "red"
    assert PROCESSOR.decode(torch.tensor([*ids, ids[-1]])) == "red" + stop
    assert PROCESSOR.decode(torch.tensor(ids[-1:])) == ""
    # tokens in front of the answer must not be hidden from the rewards
    ids = [PROCESSOR.tokenizer.special_tokens["<|im_start|>"], *PROCESSOR.tokenizer.encode("red")]
    assert PROCESSOR.decode(torch.tensor(ids)) == "<|im_start|>red"


@pytest.mark.parametrize("part", [IMAGE_PART, {"image": "a"}, VIDEO_PART])
def test_missing_images_and_videos_in_a_completion_are_refused(part):
    processor = Processor(shapes.tokenizer(), ImageProcessor())
    for turns in ([assistant([part])], [assistant("a"), {"role": "user", "content": [part]}, assistant("b")]):
        with pytest.raises(ValueError, match=r"the prompt has 1 .* placeholder.s., but 0 .* were given"):
            encode_completion(processor, [], turns)


def test_a_picture_of_an_answer_that_the_template_drops_is_refused(published):
    """Qwen3-VL's template drops images in assistant turns."""
    processor = Processor(shapes.tokenizer(), ImageProcessor(), ChatTemplate(published("qwen3_vl"), "t"))
    shown = assistant([IMAGE_PART | {"image": PIL.Image.new("RGB", (56, 56))}])
    turns = [shown, {"role": "tool", "content": "4"}, assistant("four")]
    with pytest.raises(ValueError, match="the chat template cannot render an image in the answer"):
        encode_completion(processor, [{"role": "user", "content": "?"}], turns)
