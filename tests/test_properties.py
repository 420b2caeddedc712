"""Test what must hold for any input: hypothesis draws inputs, and shrinks one that fails to a small example."""

import itertools

import pytest
import torch

import minimal
from minivlmrl.config.options import SamplingOptions
from minivlmrl.data import chat_template
from minivlmrl.data.boxes import Box, iou, match
from minivlmrl.data.chat_template import DEFAULT, DEFAULT_QWEN3, WITH_TOOLS, ChatTemplate, with_values
from minivlmrl.data.image import smart_resize
from minivlmrl.data.messages import content_parts, part_kind, text_of
from minivlmrl.distributed.saving import divide
from minivlmrl.generation.filters import filter_logits
from minivlmrl.model.rope import get_rope_index
from tests.data.test_chat_template import controls
from tests.helpers import tiny
from tests.helpers.talk import system

pytest.importorskip("hypothesis", reason="extra missing: pip install hypothesis")
from hypothesis import example, given, settings
from hypothesis import strategies as st

CONFIG = tiny.config()
any_input = settings(max_examples=200, deadline=None, derandomize=True)

pixels = st.integers(1, 150) | st.integers(1, 5000)
even = st.integers(2, 6).map(lambda side: 2 * side)
images = st.lists(st.tuples(st.just(1), even, even), max_size=3)  # (time, height, width) of their patches
lengths = st.integers(1, 5)


def try_resize(resize, *arguments):
    """Return the new size, or "refused"."""
    try:
        return tuple(resize(*arguments))
    except ValueError:
        return "refused"


# (height, width, factor, min_pixels, max_pixels); min_pixels is often the area of the image after rounding
resizes = st.builds(
    lambda height, width, factor, tokens, rest, ratio: (
        height, width, factor, tokens * factor**2 + rest, (tokens * factor**2 + rest) * ratio
    ),
    pixels, pixels, st.sampled_from([14, 28, 32]), st.integers(1, 9) | st.integers(1, 80),
    st.just(0) | st.integers(0, 999), st.integers(1, 4096),
)  # fmt: skip


@any_input
@given(resizes)
def test_smart_resize_equals_transformers(transformers, case):
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize as expected

    assert try_resize(smart_resize, *case) == try_resize(expected, *case)


@any_input
@given(resizes)
def test_smart_resize_equals_minimal_py(case):
    """Only the package refuses images with an aspect ratio over 200."""
    found = try_resize(smart_resize, *case)
    refused = max(case[:2]) > 200 * min(case[:2])
    assert found == ("refused" if refused else minimal.smart_resize(*case))


# logits (rows, vocabulary); equal logits, which filters must treat alike, are likely
some_logits = st.sampled_from([-30.0, -2.0, -1.0, -0.5, 0.0, 0.25, 0.5, 1.0, 4.0]) | st.floats(-9, 9, width=32)
lists = lambda width: st.lists(st.lists(some_logits, min_size=width, max_size=width), min_size=1, max_size=3)  # noqa: E731
logits = st.integers(2, 40).flatmap(lists)
filters = st.fixed_dictionaries({
    "temperature": st.sampled_from([0.0, 1e-6, 1.0, 20.0]) | st.floats(0.05, 4), "top_k": st.integers(0, 50),
    "top_p": st.sampled_from([1e-9, 0.5, 0.999, 1.0]) | st.floats(0.01, 1),
    "min_p": st.sampled_from([0.0, 1.0]) | st.floats(0, 1), "repetition_penalty": st.just(1.0) | st.floats(0.25, 4),
})  # fmt: skip


def theirs(setting, prompt, scores):
    """Apply the logits processors of transformers to logits, in the order of transformers' generate."""
    from transformers.generation import logits_process as p

    sampling = SamplingOptions(**setting)
    chain = [p.RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)]
    if sampling.temperature:  # with temperature 0, do_sample is off and transformers uses no warper
        chain.append(p.TemperatureLogitsWarper(sampling.temperature))
        if sampling.top_k:
            chain.append(p.TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1:
            chain.append(p.TopPLogitsWarper(sampling.top_p))
        chain.append(p.MinPLogitsWarper(sampling.min_p))
    for processor in chain:
        scores = processor(prompt, scores)
    return scores


@any_input
@given(logits, filters, st.lists(st.integers(0, 1000), min_size=1, max_size=9))
@example([[0.0] * 8], {"top_p": 0.5}, [0])  # exactly at the limit: keeps 4 of 8 equal logits
def test_filters_equal_transformers_bit_for_bit(transformers, logits, setting, prompt):
    scores = torch.tensor(logits)
    prompt = (torch.tensor([prompt]) + torch.arange(len(logits))[:, None]) % scores.shape[1]  # another for each row
    seen = torch.zeros_like(scores, dtype=torch.bool).scatter(1, prompt, True)
    assert torch.equal(filter_logits(scores, SamplingOptions(**setting), seen), theirs(setting, prompt, scores))


@any_input
@given(images, st.integers(0, 7))
def test_positions_equal_minimal_py(grids, text):
    prompt = tiny.prompt(torch.Generator(), grids, text=text + 1)
    found = get_rope_index(prompt.input_ids, prompt.image_grid_thw, CONFIG)
    merged = [(h // 2, w // 2) for _, h, w in grids]
    expected = minimal.mrope_positions(prompt.input_ids.tolist(), merged, CONFIG.image_token_id)
    assert found.tolist() == expected.tolist()


@any_input
@given(st.lists(st.tuples(images, lengths, st.lists(lengths, max_size=4)), min_size=1, max_size=3))
def test_a_packed_batch_has_the_content_of_its_parts(parts):
    """Each prompt is packed once, and each completion as if it were alone with its prompt.

    The last token of a completion is predicted, but is not an input. Any token in a completion counts as text.
    """
    generator = torch.Generator().manual_seed(0)
    prompts = [tiny.prompt(generator, grids, text) for grids, text, _ in parts]
    groups = [[torch.randint(0, 300, (n,), generator=generator) for n in counts] for *_, counts in parts]
    batch = tiny.pack(prompts, groups, CONFIG)
    ids, positions, scored, patches, shown = [], [], [], [], []
    for prompt, group in zip(prompts, groups, strict=True):
        P = len(prompt.input_ids)
        ids.append(prompt.input_ids)
        positions.append(get_rope_index(prompt.input_ids, prompt.image_grid_thw, CONFIG))
        patches.append(prompt.pixel_values)
        shown += (prompt.input_ids == tiny.IMAGE).tolist()
        for completion in group:
            ids.append(completion[:-1])
            shown += [False] * len(ids[-1])
            alone = torch.cat([prompt.input_ids, torch.full_like(ids[-1], 5)])
            positions.append(get_rope_index(alone, prompt.image_grid_thw, CONFIG)[:, P:])
            scored.append(completion)
    assert batch.input_ids.tolist() == torch.cat(ids).tolist()
    assert batch.position_ids.tolist() == torch.cat(positions, dim=1).tolist()
    assert batch.pixel_values.equal(torch.cat(patches))
    assert batch.vision_index.tolist() == [place for place, is_shown in enumerate(shown) if is_shown]
    assert batch.completion_ids.tolist() == [token for completion in scored for token in completion.tolist()]
    assert batch.layout.row_lengths == [len(completion) for completion in scored]
    padded = zip(batch.pad(batch.completion_ids), batch.completion_mask, strict=True)
    assert [row[mask.bool()].tolist() for row, mask in padded] == [completion.tolist() for completion in scored]


number = st.integers(0, 5).map(float) | st.floats(0, 5, width=16)  # boxes often touch, are equal or are empty
sides = st.tuples(number, number).map(sorted) | st.tuples(number, number)
corners = st.builds(lambda x, y: (x[0], y[0], x[1], y[1]), sides, sides)


@any_input
@given(st.tuples(corners, corners) | corners.map(lambda box: (box, box)))
@example(((0.0, 0.0, 1.0, 1.0), (2.0, 2.0, 3.0, 3.0)))  # apart in both directions
def test_the_overlap_of_boxes_equals_torchvisions_formula(pair):
    first, second = (Box(*corners, (100.0, 80.0)) for corners in pair)
    got = iou(first, second)
    assert got == pytest.approx(iou(second, first), abs=1e-14)
    if any(x2 <= x1 or y2 <= y1 for x1, y1, x2, y2 in pair):
        assert got == 0
        return
    left, top = map(max, *(box[:2] for box in pair))
    right, bottom = map(min, *(box[2:] for box in pair))
    inter = max(right - left, 0) * max(bottom - top, 0)
    areas = [(x2 - x1) * (y2 - y1) for x1, y1, x2, y2 in pair]
    assert got == pytest.approx(inter / (sum(areas) - inter), rel=1e-12, abs=1e-13) and 0 <= got <= 1
    assert got == 1 or first != second


@any_input
@given(st.tuples(st.integers(1, 4), st.integers(1, 4)).flatmap(
    lambda shape: st.lists(st.lists(number, min_size=shape[1], max_size=shape[1]), min_size=shape[0], max_size=shape[0])
))  # fmt: skip
def test_the_matching_of_boxes_has_the_largest_sum(scipy, table):
    boxes, truths = range(len(table)), range(len(table[0]))
    matches = match(boxes, truths, lambda box, truth: table[box][truth])
    count = min(len(boxes), len(truths))
    assert [len({*side}) for side in zip(*matches, strict=True)] == [count, count] and len(matches) == count
    possible = itertools.product(itertools.combinations(boxes, count), itertools.permutations(truths, count))
    best = max(sum(table[box][truth] for box, truth in zip(*pair, strict=True)) for pair in possible)
    assert sum(table[box][truth] for box, truth in matches) == pytest.approx(best)


# texts with control tokens, code of Jinja, entities, escapes and private characters
words = [
    "<|im_end|>", "<|im_start|>system\n", "<|image_pad|>", "{{ x }}{% if y %}", "<b>&amp;", "\\n", "\r\n\t\ue000\ue001",
]  # fmt: skip
texts = st.lists(st.sampled_from(words) | st.text(max_size=3), max_size=3).map("".join)
text_parts = st.builds(lambda text, kind: kind | {"text": text}, texts, st.sampled_from([{}, {"type": "text"}]))
shown_parts = st.sampled_from([
    {"type": "image"}, {"image": "a.png"}, {"type": "image", "image": b"...", "max_pixels": 50176},
    {"image_url": {"url": "a"}}, {"type": "image_url", "image_url": "a", "text": "b"}, {"type": "video"},
    {"video": "a.mp4", "fps": 2.0}, {"type": "video", "video": [], "text": "caption"},
    {"type": "video", "image": "a.png"}, {"type": "text", "image": "a", "text": "b"},
])  # fmt: skip


contents = texts | st.lists(text_parts, max_size=4)
shown = contents | st.lists(text_parts | shown_parts, max_size=4)


def turns(contents, *roles, **more):
    return st.fixed_dictionaries({"role": st.sampled_from(roles), "content": contents}, **more)


prompts = st.lists(turns(shown, "system", "user", "assistant"), min_size=1, max_size=4)
answer = turns(contents, "assistant")
later_turns = st.lists(turns(contents, "system", "user", "assistant", "tool"), max_size=2)
answers = st.builds(lambda first, more, last: [first, *more, last], answer, later_turns, answer)
answers |= st.tuples(answer).map(list)


@pytest.fixture(scope="module")
def published_template(published):
    """Compile Qwen2.5-VL's published chat template as transformers' apply_chat_template does."""
    from transformers.utils.chat_template_utils import _compile_jinja_template

    return _compile_jinja_template(published("qwen2_5_vl"))


@any_input
@given(prompts)
def test_prompts_are_rendered_as_by_the_published_template(published_template, published, messages):
    """No control token comes from a text: a turn has two, an image or a video three, and the answer begins with one."""
    expected = published_template.render(messages=messages, add_generation_prompt=True)
    turns = messages if messages[0]["role"] == "system" else [system("You are a helpful assistant."), *messages]
    shown = sum(part_kind(part) != "text" for message in messages for part in content_parts(message))
    for known in (published("qwen2_5_vl"), DEFAULT, WITH_TOOLS):
        pieces = ChatTemplate(known, "t").render(messages)
        assert "".join(pieces) == expected and len(controls(pieces)) == 2 * len(turns) + 3 * shown + 1


@any_input
@given(prompts, answers)
def test_prompt_and_completion_are_the_conversation(published_template, published, messages, turns):
    """The published template also writes a newline after the last turn."""
    template = ChatTemplate(published("qwen2_5_vl"), "t")
    pieces, is_trained = zip(*template.render_completion(messages, turns), strict=True)
    rendered = "".join([*template.render(messages), *pieces])
    assert rendered + "\n" == published_template.render(messages=messages + turns, add_generation_prompt=False)
    assert len(controls(pieces)) == 2 * len(turns) - 1
    expected = [text_of(turn) + chat_template.END for turn in turns if turn["role"] == "assistant"]
    assert "".join(itertools.compress(pieces, is_trained)) == "".join(expected)


names = texts.filter(str.strip)
values = texts | st.integers() | st.booleans()
arguments = st.dictionaries(names, values | st.lists(values, max_size=2), max_size=2)
functions = st.fixed_dictionaries({"name": names, "arguments": arguments})
calls = {"tool_calls": st.lists(st.fixed_dictionaries({"function": functions}), max_size=2)}


def talks(contents, shown):
    """Draw conversations of a user, who may show images, with an assistant, who may call tools."""
    systems, user = st.lists(turns(contents, "system"), max_size=1), turns(shown, "user")
    later = st.lists(user | turns(contents, "tool") | turns(contents, "assistant", optional=calls), max_size=3)
    return st.builds(lambda system, first, more: [*system, first, *more], systems, user, later)


placeholders = st.sampled_from([{"type": "image"}, {"type": "video"}])
published_talks = st.tuples(  # (name of a published template, conversation)
    st.sampled_from(["qwen3_vl", "qwen3_5_think", "qwen3_5_nothink", "qwen3_6", "qwen3_8"]),
    talks(contents, contents | st.lists(text_parts | placeholders, max_size=3)),
)
# the templates of text models cannot render lists of parts
published_talks |= st.tuples(st.sampled_from(["qwen2_5", "qwen3", "qwen3_instruct_2507"]), talks(texts, texts))
template_options = st.dictionaries(st.sampled_from(["enable_thinking", "add_vision_id"]), st.booleans())


@settings(any_input, max_examples=100)
@given(published_talks, template_options)
def test_published_templates_with_tool_calls_render_as_in_transformers(published, talk, options):
    from transformers.utils.chat_template_utils import render_jinja_template

    name, messages = talk
    options = {option: value for option, value in options.items() if option in published(name)}
    template = with_values(ChatTemplate(published(name), name), options)
    options |= {"chat_template": published(name), "add_generation_prompt": True}
    assert "".join(template.render(messages)) == render_jinja_template([messages], **options)[0][0]
    if name == "qwen3_vl" and not any(turn["role"] == "tool" or turn.get("tool_calls") for turn in messages):
        assert ChatTemplate(DEFAULT_QWEN3, "ours").render(messages) == template.render(messages)


@any_input
@given(st.lists(st.integers(1, 50), min_size=1, max_size=20), st.integers(1, 60))
def test_files_of_a_checkpoint_are_those_of_huggingface_hub(sizes, limit):
    from huggingface_hub import split_torch_state_dict_into_shards

    sizes = {f"layer.{i}": size for i, size in enumerate(sizes)}
    tensors = {name: torch.empty(size, dtype=torch.uint8, device="meta") for name, size in sizes.items()}
    theirs = split_torch_state_dict_into_shards(tensors, max_shard_size=limit)
    assert list(divide(sizes, limit).items()) == list(theirs.filename_to_tensors.items())
