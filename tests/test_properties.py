"""Test what must hold for any input: hypothesis draws inputs, and shrinks one that fails to a small example."""

import pytest
import torch

import minimal
from minivlmrl.config.options import SamplingOptions
from minivlmrl.data.image import smart_resize
from minivlmrl.generation.filters import filter_logits
from minivlmrl.model.rope import get_rope_index
from minivlmrl.trainers.dealing import WORTH_MOVING, assign
from tests.generation.test_filters import theirs
from tests.helpers import tiny
from tests.helpers.tiny import pack

pytest.importorskip("hypothesis", reason="extra missing: pip install hypothesis")
from hypothesis import given, settings
from hypothesis import strategies as st

CONFIG = tiny.config()
any_input = settings(max_examples=100, deadline=None, derandomize=True)

pixels = st.integers(1, 5000)
sides = st.integers(2, 6).map(lambda side: 2 * side)
images = st.lists(st.tuples(st.just(1), sides, sides), max_size=3)  # (time, height, width) of their patches
lengths = st.integers(1, 5)


def try_resize(resize, *arguments):
    """Return the new size, or "refused"."""
    try:
        return tuple(resize(*arguments))
    except ValueError:
        return "refused"


@any_input
@given(pixels, pixels, st.sampled_from([28, 32]), st.integers(1024, 10**6), st.integers(1, 100))
def test_smart_resize_equals_transformers_and_minimal_py(transformers, height, width, factor, least, ratio):
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize as expected

    case = height, width, factor, least, least * ratio
    assert try_resize(smart_resize, *case) == try_resize(expected, *case)
    if max(height, width) <= 200 * min(height, width):
        assert try_resize(smart_resize, *case) == try_resize(minimal.smart_resize, *case)


# equal logits, which filters must treat alike, are likely in this set
logits = st.lists(st.sampled_from([-30.0, -2.0, -1.0, -0.5, 0.0, 0.25, 0.5, 1.0, 4.0]), min_size=2, max_size=40)
filters = st.fixed_dictionaries({
    "temperature": st.floats(0.05, 4), "top_k": st.integers(0, 50), "top_p": st.floats(0.01, 1),
    "min_p": st.floats(0, 1), "repetition_penalty": st.floats(0.25, 4),
})  # fmt: skip


@any_input
@given(logits, filters, st.lists(st.integers(0, 1000), min_size=1, max_size=9))
def test_filters_equal_transformers(transformers, logits, setting, prompt):
    scores = torch.tensor([logits])
    prompt = torch.tensor([prompt]) % len(logits)
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
    """Each prompt is packed once, and each completion as if it were alone with its prompt."""
    generator = torch.Generator().manual_seed(0)
    prompts = [tiny.prompt(generator, grids, text) for grids, text, _ in parts]
    groups = [[torch.randint(3, 280, (n,), generator=generator) for n in counts] for *_, counts in parts]
    batch = pack(prompts, groups, CONFIG)
    ids, positions, scored, patches = [], [], [], []
    for prompt, group in zip(prompts, groups, strict=True):
        P = len(prompt.input_ids)
        ids.append(prompt.input_ids)
        positions.append(get_rope_index(prompt.input_ids, prompt.image_grid_thw, CONFIG))
        patches.append(prompt.pixel_values)
        for completion in group:
            alone = torch.cat([prompt.input_ids, completion])[:-1]
            ids.append(alone[P:])
            positions.append(get_rope_index(alone, prompt.image_grid_thw, CONFIG)[:, P:])
            scored.append(completion)
    assert batch.input_ids.tolist() == torch.cat(ids).tolist()
    assert batch.position_ids.tolist() == torch.cat(positions, dim=1).tolist()
    assert batch.pixel_values.equal(torch.cat(patches))
    assert batch.completion_ids.tolist() == [token for completion in scored for token in completion.tolist()]
    assert batch.layout.row_lengths == [len(completion) for completion in scored]
    restored = [row[mask.bool()].tolist() for row, mask in zip(
        batch.pad(batch.completion_ids), batch.completion_mask, strict=True
    )]  # fmt: skip
    assert restored == [completion.tolist() for completion in scored]


@st.composite
def dealt(draw):
    """Draw the numbers of tokens in the groups of each rank; all ranks have the same number of groups."""
    ranks, groups = draw(st.integers(1, 8)), draw(st.integers(1, 6))
    tokens = st.lists(st.integers(1, 1000), min_size=groups, max_size=groups)
    return draw(st.lists(tokens, min_size=ranks, max_size=ranks))


@any_input
@given(dealt())
def test_groups_are_dealt_once_and_more_evenly(lengths):
    parts = assign(lengths)
    ranks, groups = len(lengths), len(lengths[0])
    assert [len(part) for part in parts] == [groups] * ranks
    assert sorted(place for part in parts for place in part) == [(r, i) for r in range(ranks) for i in range(groups)]
    tokens = [[lengths[rank][i] for rank, i in part] for part in parts]
    assert all(row == sorted(row, reverse=True) for row in tokens)
    average = sum(map(sum, lengths)) / ranks
    before, after = max(map(sum, lengths)), max(map(sum, tokens))
    assert after <= before + WORTH_MOVING * average
    if before <= (1 + WORTH_MOVING) * average:
        assert all(rank == source for rank, part in enumerate(parts) for source, _ in part)
