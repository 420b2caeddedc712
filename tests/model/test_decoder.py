"""Compare the gradients of models with transformers 5.23; test_checkpoint_table.py compares logits."""

from dataclasses import replace

import pytest
import torch

from minivlmrl.model import attention, rope
from minivlmrl.model.families.registry import hub_name
from minivlmrl.model.logprobs import per_token_logps
from tests.helpers import tiny
from tests.helpers.oracle import in_float64, saved_pair, their_inputs

# image sizes that do not fill whole windows, several images in one row, and a row without images
ROWS = [[(1, 6, 10)], [(1, 18, 4), (1, 6, 10)], [], [(1, 4, 4), (1, 20, 18)]]
# videos with several time steps, alone and next to images, and two rows without images, which have equal lengths
VIDEO_ROWS = [[(3, 6, 10)], [(1, 4, 6), (5, 4, 4), (1, 6, 10)], [(2, 18, 4), (4, 6, 6)], [], []]


@pytest.fixture(
    scope="module",
    params=[
        *(("qwen2_5_vl", False), ("qwen2_5_vl", True), ("qwen2_vl", False)),
        *(("qwen3_vl", False), ("qwen3_vl", True), ("qwen3_5", False)),
    ],
    ids=["Qwen2.5-VL untied", "Qwen2.5-VL tied", "Qwen2-VL", "Qwen3-VL untied", "Qwen3-VL tied", "Qwen3.5"],
)
def pair(request, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        in_float64(patch, request.param[0])
        yield saved_pair(tmp_path_factory.mktemp("checkpoint"), *request.param, torch.float64)


def prompts(seed=0, rows=ROWS):
    generator = torch.Generator().manual_seed(seed)
    return [tiny.prompt(generator, grids, dtype=torch.float64) for grids in rows]


@pytest.mark.parametrize("padding", [attention.MAX_PADDING, 0])
def test_a_packed_group_of_videos_has_the_gradients_of_single_rows(pair, monkeypatch, padding):
    """transformers gets our positions, because version 5.23 computes wrong positions for videos (test_rope.py)."""
    monkeypatch.setattr(attention, "MAX_PADDING", padding)  # with 0, completions are split by length
    theirs, ours = pair
    rows = prompts(4, VIDEO_ROWS)
    generator = torch.Generator().manual_seed(4)
    lengths = (5, 2), (3, 7, 1), (4,), (1, 6), (3,)
    groups = [[tiny.completion(generator, n) for n in group] for group in lengths]
    theirs.zero_grad(), ours.zero_grad()
    logps, _ = per_token_logps(ours, tiny.pack(rows, groups, ours.config), temperature=0.7)
    expected = []
    for row, ids in ((row, ids) for row, group in zip(rows, groups, strict=True) for ids in group):
        whole = replace(row, input_ids=torch.cat([row.input_ids, ids]))
        positions = rope.get_rope_index(whole.input_ids, row.image_grid_thw, ours.config, row.second_per_grid_ts)
        logits = theirs(**their_inputs(whole), position_ids=positions[:, None]).logits[0, -len(ids) - 1 : -1]
        expected.append((logits / 0.7).log_softmax(-1).gather(1, ids[:, None])[:, 0])
    expected = torch.cat(expected)
    assert (logps - expected).abs().max() <= 1e-13 * expected.abs().max()
    weights = torch.rand(len(logps), generator=generator).double()
    (logps * weights).sum().backward(), (expected * weights).sum().backward()
    expected = {hub_name(name): p.grad for name, p in theirs.named_parameters()}
    for name, p in ours.named_parameters():
        difference = (p.grad - expected.pop(name)).abs().max() / p.grad.abs().max()
        assert difference <= 1e-12, f"{name}: {difference:.1e}"
    assert not expected  # every parameter of the transformers model was compared


def test_selected_tokens_and_cached_image_embeddings_give_equal_states():
    ours = tiny.model(dtype=torch.float64)
    batch = tiny.pack(prompts(), [[] for _ in ROWS], ours.config)
    expected = ours(batch)
    select = torch.tensor([7, 2, 40, 2])
    assert torch.allclose(ours(batch, select=select), expected[select], rtol=1e-12, atol=1e-12)
    known = replace(batch, vision_embeds=ours.visual(batch.pixel_values, batch.image_grid_thw), pixel_values=None)
    assert torch.allclose(ours(known), expected, rtol=1e-12, atol=1e-12)
