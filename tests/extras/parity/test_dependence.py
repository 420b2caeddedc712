"""Test that `depends` finds tokens and images that move other log-probabilities than they should."""

import pytest
import torch
from torch.nn.functional import pad

from minivlmrl.data.rows import Prompt
from minivlmrl.extras.parity.dependence import depends
from tests.helpers import tiny


def logps_of(logits, ids):
    """Compute the log-probability of each next token: (B, L, V), (B, L) -> (B, L - 1)."""
    return logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]


def trainer(model, change=lambda pictures, rows: pictures, grids_of=lambda grids, rows: grids, with_pictures=True):
    """Return a function `my_logps` with a model of transformers; `change` replaces the list of images."""

    def my_logps(ids, pixels, grids):
        inputs = {}
        if with_pictures:
            inputs["pixel_values"] = torch.cat(change(list(pixels.split(grids.prod(1).tolist())), len(ids)))
            inputs["image_grid_thw"] = grids_of(grids, len(ids))
        return logps_of(model(input_ids=ids, mm_token_type_ids=(ids == tiny.IMAGE).long(), **inputs).logits, ids)

    return my_logps


def by_row(change):
    return lambda x, rows: [y for r in range(rows) for y in change(x[r * len(x) // rows :][: len(x) // rows])]


VOCABULARY = 23
# two texts in each row; the second row ends with padding
PACKED = torch.tensor([[1] * 5 + [2] * 4, [1] * 3 + [2] * 4 + [0] * 2])
PADDED_LEFT = torch.tensor([[1] * 7, [0] * 2 + [1] * 5])


def text_model():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, tie_word_embeddings=False, initializer_range=0.3,
    )  # fmt: skip
    return transformers.Qwen2ForCausalLM(config).double().eval()


def ids_like(document):
    return torch.randint(0, VOCABULARY, document.shape, generator=torch.Generator().manual_seed(1))


def block_mask(document, causal=True):
    """Return a mask (B, 1, T, T) that is large and negative where a token must not see another one."""
    sees = document[:, None, :, None] == document[:, None, None, :]
    if causal:
        sees = sees & torch.ones(document.shape[1], document.shape[1]).tril().bool()
    return torch.zeros(sees.shape, dtype=torch.float64).masked_fill(~sees, -1e30)


def positions_in(document):
    starts = pad(document[:, 1:] != document[:, :-1], (1, 0), value=True)
    index = torch.arange(document.shape[1]).expand_as(document)
    return index - index.where(starts, 0).cummax(1).values


def score(model, ids, **inputs):
    return logps_of(model(input_ids=ids, use_cache=False, **inputs).logits, ids)


def packed(model, document=PACKED, **changes):
    inputs = {"attention_mask": block_mask(document), "position_ids": positions_in(document)} | changes
    return lambda ids: score(model, ids, **inputs)


def padded(model, document):
    mask = (document > 0).long()
    return lambda ids: score(model, ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0))


@pytest.mark.parametrize(("document", "forward"), [
    (PACKED, packed), (PADDED_LEFT, lambda model: padded(model, PADDED_LEFT)),
    # transformers finds packed texts by their positions
    (PACKED[:1], lambda model: lambda ids: score(model, ids, position_ids=positions_in(PACKED[:1]))),
])  # fmt: skip
def test_healthy_forwards_have_no_fault(document, forward):
    assert depends(forward(text_model()), ids_like(document), document, vocabulary=VOCABULARY) == []


def test_log_probabilities_that_are_not_finite_are_named():
    [expected] = depends(lambda ids: torch.full((2, 6), torch.nan), ids_like(PADDED_LEFT), PADDED_LEFT)
    assert expected == "a log-probability is not finite (10 times; first: token 1 of row 0)"


# (document, forward of a model, beginning of a sentence)
FAULTS = [
    (PACKED[:1], lambda model: packed(model, PACKED[:1], attention_mask=PACKED[:1]),  # as in LLaMA-Factory
     "document 2 depends on document 1"),
    (PADDED_LEFT, lambda model: lambda ids: score(model, ids), "padding moves a log-probability"),
    (PACKED, lambda model: packed(model, attention_mask=block_mask(PACKED, causal=False)),
     "a token depends on a later token"),
    (PACKED.sign(), lambda model: lambda ids: padded(model, PACKED)(ids).roll(1, 0),
     "a row depends on another row"),
    (PACKED[:1].sign(), lambda model: lambda ids: logps_of(model(input_ids=ids).logits.roll(-1, 1), ids),  # no shift
     "the probabilities of all values of a token do not add up to 1"),
    (PACKED[:1].sign(), lambda model: lambda ids: score(model, ids) / 3,
     "the probabilities of all values of a token do not add up to 1"),
    (PACKED[:1].sign(), lambda model: lambda ids: logps_of(model(input_ids=ids).logits.roll(1, 1), ids),  # two shifts
     "a token does not move the log-probability of the next token"),
]  # fmt: skip


@pytest.mark.parametrize(("document", "forward", "expected"), FAULTS)
def test_planted_faults_are_named(document, forward, expected):
    sentences = depends(forward(text_model()), ids_like(document), document, vocabulary=VOCABULARY)
    assert any(sentence.startswith(expected) for sentence in sentences), sentences


UNUSED = "an image moves no later token of its document"
EARLIER = "a token depends on a later token"
OTHER_ROW = "a row depends on another row"
IMAGE_FAULTS = {  # {fault: (arguments of `trainer`, beginning of a sentence)
    "pixel_values are not passed on": ({"with_pictures": False}, UNUSED),
    "placeholders keep their embeddings": ({}, UNUSED),
    "all pixels are 0": ({"change": lambda x, rows: [0 * picture for picture in x]}, UNUSED),
    "the last picture is the one before it again": ({"change": by_row(lambda x: [*x[:-1], x[-2]])}, UNUSED),
    "each row has its pictures in turned order": ({"change": by_row(lambda x: x[::-1])}, EARLIER),
    "grids are in turned order": ({"grids_of": lambda x, rows: x.view(rows, -1, 3).flip(1).flatten(0, 1)}, EARLIER),
    "the batch's pictures are shifted by one": ({"change": lambda x, rows: x[1:] + x[:1]}, EARLIER),
    "rows have those of the row after": (
        {"change": lambda x, rows: x[len(x) // rows :] + x[: len(x) // rows]}, OTHER_ROW),
    "all rows have the first row's": ({"change": lambda x, rows: x[: len(x) // rows] * rows}, OTHER_ROW),
    "height and width of grids are exchanged": ({"grids_of": lambda x, rows: x[:, [0, 2, 1]]}, ""),
}  # fmt: skip


@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "qwen2_vl", "qwen3_vl", "qwen3_5"])
def test_planted_faults_of_images_are_named(model_type, tmp_path, monkeypatch, oracle):
    theirs, ours = oracle.saved_pair(tmp_path, model_type)

    def our_logps(ids, pixels, grids):
        parts = zip(ids, pixels.chunk(len(ids)), grids.chunk(len(ids)), strict=True)
        rows = [Prompt(*part, torch.ones(len(part[2]))) for part in parts]
        return logps_of(torch.stack(oracle.our_logits(ours, rows)), ids)

    def sentences(logps, **options):
        prompts = [tiny.prompt(torch.Generator().manual_seed(seed), grids) for seed in (0, 1)]
        ids = torch.stack([prompt.input_ids for prompt in prompts])
        pictures = [torch.cat([getattr(x, name) for x in prompts]) for name in ("pixel_values", "image_grid_thw")]
        options |= {"vocabulary": int(ids.max()) + 1, "tolerance": 1e-4}
        return depends(logps, ids, torch.ones_like(ids), *pictures, tiny.IMAGE, **options)

    grids = [(1, 4, 6)]
    if model_type == "qwen2_5_vl":  # tokens, too
        assert sentences(our_logps) == sentences(trainer(theirs)) == []
    grids = [(1, 4, 6), (1, 8, 4), (1, 8, 4)]
    assert sentences(our_logps, only_images=True) == sentences(trainer(theirs), only_images=True) == []
    for fault, (options, verdict) in IMAGE_FAULTS.items():
        with monkeypatch.context() as patch:
            if "embeddings" in fault:
                patch.setattr(torch.Tensor, "masked_scatter", lambda embeddings, *_: embeddings)
                verdict = "" if model_type == "qwen3_vl" else verdict  # deeper layers also see images
            found = sentences(trainer(theirs, **options), only_images=True)
            assert any(expected.startswith(verdict) for expected in found) if verdict else not found, (fault, found)


def test_depends_refuses_wrong_shapes():
    ids, grids = torch.tensor([[5, 9, 6]]), torch.tensor([[1, 2, 4], [1, 2, 2]])
    pictures = torch.ones(12, 2), grids
    with pytest.raises(ValueError, match="ids have placeholders for 1 image, but image_grid_thw has 2 rows"):
        depends(lambda ids, *_: torch.ones(ids.shape), ids, torch.ones_like(ids), *pictures, image_token_id=9)
    with pytest.raises(ValueError, match="ids have placeholders for 0 images, but image_grid_thw has 0 rows"):
        depends(lambda ids: torch.ones(ids.shape), ids, torch.ones_like(ids), only_images=True)
    with pytest.raises(ValueError, match=r"logps returned the shape \(2, 9\) for ids of shape \(2, 3\)"):
        depends(lambda ids: torch.ones(2, 9), torch.ones(2, 3).long(), torch.ones(2, 3))
