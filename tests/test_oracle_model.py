"""The model against transformers 5.23: logits, gradients, positions and windows, and mutations that must show."""

import random

import pytest
import torch

from minivlmrl import decoder as text
from minivlmrl import rope, vision
from minivlmrl.batch import pack
from minivlmrl.hub.checkpoint import load_model

import tiny

transformers = pytest.importorskip("transformers", reason="oracle missing: pip install transformers==5.23.0")

# ragged windows, several images in a row of text, a text-only row
ROWS = [[(1, 6, 10)], [(1, 18, 4), (1, 6, 10)], [], [(1, 4, 4), (1, 20, 18)]]
# videos of several time steps, alone and beside images
VIDEO_ROWS = [[(3, 6, 10)], [(1, 4, 6), (5, 4, 4), (1, 6, 10)], [(2, 18, 4), (4, 6, 6)]]
CLASSES = {
    "qwen2_5_vl": transformers.Qwen2_5_VLForConditionalGeneration,
    "qwen2_vl": transformers.Qwen2VLForConditionalGeneration,
}


@pytest.fixture(
    scope="module",
    params=[("qwen2_5_vl", False), ("qwen2_5_vl", True), ("qwen2_vl", False)],
    ids=["Qwen2.5-VL untied", "Qwen2.5-VL tied", "Qwen2-VL"],
)
def pair(request, tmp_path_factory):
    """transformers' model with telling weights, and ours read from the folder that transformers wrote."""
    model_type, tied = request.param
    config = transformers.AutoConfig.for_model(**tiny.config(tied, model_type=model_type).to_dict())
    theirs = CLASSES[model_type]._from_config(config, attn_implementation="eager")
    tiny.telling_weights(theirs)
    theirs.tie_weights()
    folder = tmp_path_factory.mktemp("checkpoint")
    theirs.save_pretrained(folder)
    return theirs.eval(), load_model(folder)


def prompts(seed=0, rows=ROWS):
    generator = torch.Generator().manual_seed(seed)
    return [tiny.prompt(generator, grids) for grids in rows]


def their_inputs(prompt):
    ids = prompt.input_ids[None]
    # without it they use 1-D positions
    inputs = {"input_ids": ids, "mm_token_type_ids": (ids == tiny.IMAGE).long() + 2 * (ids == tiny.VIDEO).long()}
    is_video = prompt.image_grid_thw[:, 0] > 1
    patches = is_video.repeat_interleave(prompt.image_grid_thw.prod(1))
    for kind, rows, key in ((~is_video, ~patches, ""), (is_video, patches, "_videos")):
        if kind.any():
            inputs[f"pixel_values{key}"] = prompt.pixel_values[rows]
            inputs["video_grid_thw" if key else "image_grid_thw"] = prompt.image_grid_thw[kind]
    return inputs


def our_logits(model, rows):
    """One packed batch of all rows, cut into rows again."""
    batch = pack(rows, [[] for _ in rows], model.config)
    return model.lm_head(model(batch)).split(batch.layout.prompt_lengths)


def worst_difference(theirs, ours, rows):
    """Over rows: the largest difference of a logit, as a share of the largest logit."""
    with torch.no_grad():
        expected = [theirs(**their_inputs(row)).logits[0] for row in rows]
        return max(
            ((a - b).abs().max() / b.abs().max()).item() for a, b in zip(our_logits(ours, rows), expected, strict=True)
        )


def test_logits_equal_transformers(pair):
    assert worst_difference(*pair, prompts()) <= 1e-5


def test_logits_of_videos_equal_transformers_when_it_is_given_the_positions(pair):
    """Its own positions of videos are wrong in 5.23, see rope.get_rope_index; ours stand in test_positions.py."""
    theirs, ours = pair
    for row in prompts(3, VIDEO_ROWS):
        positions = rope.get_rope_index(row.input_ids, row.image_grid_thw, ours.config, row.second_per_grid_ts)
        with torch.no_grad():
            expected = theirs(**their_inputs(row), position_ids=positions[:, None]).logits[0]
            assert (our_logits(ours, [row])[0] - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_gradients_equal_transformers(pair):
    theirs, ours = pair
    rows = prompts(1)
    labels = [row.input_ids.roll(-1) for row in rows]
    for model, all_logits in (
        (theirs, [theirs(**their_inputs(row)).logits[0] for row in rows]),
        (ours, our_logits(ours, rows)),
    ):
        model.zero_grad()
        sum(torch.nn.functional.cross_entropy(x, y) for x, y in zip(all_logits, labels, strict=True)).backward()
    expected = {
        name.replace("model.visual.", "visual.").replace("model.language_model.", "model."): p.grad
        for name, p in theirs.named_parameters()
    }
    for name, p in ours.named_parameters():
        difference = (p.grad - expected.pop(name)).abs().max() / p.grad.abs().max()
        assert difference <= 5e-5, f"{name}: {difference:.1e}"
    assert not expected  # every parameter of theirs was compared


def test_positions_equal_transformers(pair):
    theirs, ours = pair
    for row in prompts(2):
        inputs = their_inputs(row)
        expected, _ = theirs.model.get_rope_index(
            inputs["input_ids"], inputs["mm_token_type_ids"], image_grid_thw=inputs.get("image_grid_thw")
        )
        assert torch.equal(rope.get_rope_index(row.input_ids, row.image_grid_thw, ours.config), expected[:, 0])


@pytest.mark.parametrize("grid", [(1, 6, 10), (1, 8, 8), (2, 10, 14), (1, 18, 4), (1, 58, 84), (1, 2, 2)])
def test_windows_equal_transformers(grid):
    from transformers.vision_utils import get_vision_window_index

    config = tiny.config().vision_config
    grids = torch.tensor([grid, (1, 4, 6)])
    index, cu_seqlens = get_vision_window_index(grids, config.spatial_merge_size, config.window_size, config.patch_size)
    order, window_lengths, frame_lengths = vision.window_order(grids, config)
    assert order.tolist() == torch.as_tensor(index).tolist()
    assert torch.tensor([0, *window_lengths]).cumsum(0).tolist() == torch.unique_consecutive(cu_seqlens).tolist()
    assert frame_lengths == [grid[1] * grid[2]] * grid[0] + [24]


@pytest.mark.parametrize("model_type", CLASSES)
def test_norms_of_the_vision_tower_add_a_millionth(model_type):
    """Telling on inputs of that size alone, which no picture makes."""
    visual = tiny.model(model_type=model_type, dtype=torch.float64).visual
    x = 1e-3 * torch.randn(5, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for norm in (visual.blocks[1].norm1, visual.blocks[1].norm2, visual.merger.ln_q):
        layer_norm = model_type == "qwen2_vl"
        centred = x - x.mean(-1, keepdim=True) if layer_norm else x
        expected = norm.weight * centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
        assert torch.allclose(norm(x), expected + norm.bias if layer_norm else expected, rtol=1e-12, atol=1e-14)


def test_windows_of_2000_random_grids_equal_transformers():
    from transformers.vision_utils import get_vision_window_index

    config, rng = tiny.config().vision_config, random.Random(0)
    for _ in range(2000):
        grids = torch.tensor([
            (rng.choice([1, 1, 2, 3]), 2 * rng.randint(1, 20), 2 * rng.randint(1, 20))
            for _ in range(rng.randint(1, 3))
        ])  # fmt: skip
        index, cu_seqlens = get_vision_window_index(
            grids, config.spatial_merge_size, config.window_size, config.patch_size
        )
        order, window_lengths, _ = vision.window_order(grids, config)
        assert order.tolist() == torch.as_tensor(index).tolist(), grids
        assert torch.tensor([0, *window_lengths]).cumsum(0).tolist() == torch.unique_consecutive(cu_seqlens).tolist()


def test_windows_of_the_docstring_example():
    order, lengths, _ = vision.window_order(torch.tensor([[1, 6, 10]]), tiny.config().vision_config)
    assert order.tolist() == [0, 1, 2, 3, 5, 6, 7, 8, 10, 11, 12, 13, 4, 9, 14]
    assert lengths == [48, 12]


# Each of these is a bug that other ports have had. If the comparison above could not see it, it would prove nothing.


def swap_rows_and_columns(monkeypatch):
    original = vision.vision_rotary

    def swapped(*arguments):
        def swap(angles):  # the first half of each rotated half turns by row, the second by column
            row, column = angles.chunk(2, dim=-1)[0].chunk(2, dim=-1)
            return torch.cat([column, row, column, row], dim=-1)

        return tuple(map(swap, original(*arguments)))

    monkeypatch.setattr(vision, "vision_rotary", swapped)


def drop_windows(monkeypatch):
    original = vision.window_order

    def one_window_a_frame(grids, config):
        order, _, frames = original(grids, config)
        return order, frames, frames

    monkeypatch.setattr(vision, "window_order", one_window_a_frame)


def wrong_mrope_order(monkeypatch):
    original = text.text_rotary
    monkeypatch.setattr(text, "text_rotary", lambda ids, *rest: original(ids[[0, 2, 1]], *rest))


def positions_without_images(monkeypatch):
    monkeypatch.setattr("minivlmrl.batch.get_rope_index", lambda ids, *rest: torch.arange(len(ids)).expand(3, -1))


@pytest.mark.parametrize(
    "mutate",
    [swap_rows_and_columns, drop_windows, wrong_mrope_order, positions_without_images],
    ids=lambda f: f.__name__,
)
def test_the_comparison_sees_a_mutation(pair, monkeypatch, mutate):
    mutate(monkeypatch)
    if mutate is drop_windows and pair[1].config.model_type == "qwen2_vl":  # it has no windows
        assert worst_difference(*pair, prompts()) <= 1e-5
    else:
        assert worst_difference(*pair, prompts()) > 1e-3
