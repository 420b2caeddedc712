"""The model against transformers 5.23: logits, gradients, positions, windows, checkpoints both ways, greedy decoding."""

import pytest
import tiny
import torch

from minivlmrl.model.batch import pack
from minivlmrl.model.checkpoint import load_model

transformers = pytest.importorskip(
    "transformers", reason="oracle transformers==5.23.0 is not installed (pip install .[test])"
)

# ragged windows, several images in a row, a text-only row
ROWS = [[(1, 6, 10)], [(1, 18, 4), (1, 6, 10)], [], [(1, 4, 4), (1, 20, 18)]]


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def pair(request, tmp_path_factory):
    """transformers' model with telling weights, and ours read from the folder that transformers wrote."""
    theirs = transformers.Qwen2_5_VLForConditionalGeneration._from_config(
        transformers.AutoConfig.for_model(**tiny.config(request.param).to_dict()), attn_implementation="eager"
    )
    tiny.telling_weights(theirs)
    theirs.tie_weights()
    folder = tmp_path_factory.mktemp("checkpoint")
    theirs.save_pretrained(folder)
    return theirs.eval(), load_model(folder)


def their_inputs(prompt):
    mm = prompt.input_ids[None] == tiny.IMAGE
    inputs = {"input_ids": prompt.input_ids[None], "mm_token_type_ids": mm.long()}
    if len(prompt.image_grid_thw):
        inputs |= {"pixel_values": prompt.pixel_values, "image_grid_thw": prompt.image_grid_thw}
    return inputs


def prompts(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [tiny.prompt(generator, grids) for grids in ROWS]


def our_logits(model, rows):
    """One packed batch of all rows, cut into rows again."""
    batch = pack(rows, [[] for _ in rows], model.config)
    return model.lm_head(model(batch)).split(batch.layout.prompt_lengths)


def test_logits_equal_transformers(pair):
    theirs, ours = pair
    rows = prompts()
    for row, logits in zip(rows, our_logits(ours, rows), strict=True):
        expected = theirs(**their_inputs(row)).logits[0]
        assert (logits - expected).abs().max() <= 1e-5 * expected.abs().max()


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
    assert not expected
