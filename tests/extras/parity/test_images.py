"""Test that check_images finds images that a trainer does not see, or sees in another row."""

import pytest
import torch

from minivlmrl.data.rows import Prompt
from minivlmrl.extras.parity.images import check_images
from tests.helpers import tiny


def logps_of(logits, ids):
    """Compute the log-probability of each next token: (B, L, V), (B, L) -> (B, L - 1)."""
    return logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]


def trainer(model, change=lambda pictures, rows: pictures, grids_of=lambda grids, rows: grids, with_pictures=True):
    """Return a function `my_logps` with a model of transformers; `change` replaces the list of images."""

    def my_logps(ids, pixels, grids):
        inputs = {}
        if with_pictures:
            pictures = list(pixels.split(grids.prod(1).tolist()))
            inputs["pixel_values"] = torch.cat(change(pictures, len(ids)))
            inputs["image_grid_thw"] = grids_of(grids, len(ids))
        kinds = (ids == tiny.IMAGE).long()
        return logps_of(model(input_ids=ids, mm_token_type_ids=kinds, **inputs).logits, ids)

    return my_logps


def by_row(change):
    """Apply `change` to the images of each row."""
    return lambda x, rows: [y for r in range(rows) for y in change(x[r * len(x) // rows :][: len(x) // rows])]


ORDER, OTHER = "images are used in a wrong order", "rows use the images of other rows"
FAULTS = {  # {fault: (arguments of `trainer`, beginning of the message)}
    "pixel_values are not passed on": ({"with_pictures": False}, "image 0 has no effect"),
    "placeholders keep their embeddings": ({}, "image 0 has no effect"),
    "all pixels are 0": ({"change": lambda x, rows: [0 * picture for picture in x]}, "image 0 has no effect"),
    "the last picture is the one before it again": ({"change": by_row(lambda x: [*x[:-1], x[-2]])}, "image 2 has no"),
    "each row has its pictures in turned order": ({"change": by_row(lambda x: x[::-1])}, ORDER),
    "grids are in turned order": ({"grids_of": lambda x, rows: x.view(rows, -1, 3).flip(1).flatten(0, 1)}, ORDER),
    "the batch's pictures are shifted by one": ({"change": lambda x, rows: x[1:] + x[:1]}, ORDER),
    "rows have those of the row after": ({"change": lambda x, rows: x[len(x) // rows :] + x[: len(x) // rows]}, OTHER),
    "all rows have the first row's": ({"change": lambda x, rows: x[: len(x) // rows] * rows}, OTHER),
    "height and width of grids are exchanged": ({"grids_of": lambda x, rows: x[:, [0, 2, 1]]}, ""),
}


@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "qwen2_vl", "qwen3_vl", "qwen3_5"])
def test_check_images_finds_planted_faults(model_type, tmp_path, monkeypatch, oracle):
    theirs, ours = oracle.saved_pair(tmp_path, model_type)

    def our_logps(ids, pixels, grids):
        parts = zip(ids, pixels.chunk(len(ids)), grids.chunk(len(ids)), strict=True)
        rows = [Prompt(*part, torch.ones(len(part[2]))) for part in parts]
        return logps_of(torch.stack(oracle.our_logits(ours, rows)), ids)

    for grids in ([(1, 4, 6)], [(1, 4, 6), (1, 8, 4), (1, 8, 4)]):
        prompt = tiny.prompt(torch.Generator().manual_seed(0), grids)
        row = prompt.input_ids, prompt.pixel_values, prompt.image_grid_thw, tiny.IMAGE
        assert check_images(our_logps, *row) == check_images(trainer(theirs), *row) == ""
    for fault, (options, verdict) in FAULTS.items():
        with monkeypatch.context() as patch:
            if "embeddings" in fault:
                patch.setattr(torch.Tensor, "masked_scatter", lambda embeddings, *_: embeddings)
                verdict = "" if model_type == "qwen3_vl" else verdict  # deeper layers see images, too
            sentence = check_images(trainer(theirs, **options), *row)
            assert sentence.startswith(verdict) and bool(sentence) == bool(verdict), (fault, sentence)


@pytest.mark.parametrize(("changed", "says"), [
    ({"input_ids": torch.tensor([[5, 9, 6]])}, r"input_ids is of shape \(1, 3\), but it must be .* shape \(L,\)"),
    ({"image_grid_thw": torch.tensor([1, 2, 4])}, r"image_grid_thw is of shape \(3,\), .* shape \(N, 3\)"),
    ({"pixel_values": torch.ones(1, 8, 2)}, r"pixel_values is of shape \(1, 8, 2\), .* shape \(P, D\)"),
    ({"image_token_id": 7}, "input_ids contain 0 images, but image_grid_thw has 1"),
    ({"image_token_id": 7, "image_grid_thw": torch.ones(0, 3), "pixel_values": torch.ones(0, 2)},
     "input_ids contain 0 images, but image_grid_thw has 0"),
    ({"image_grid_thw": torch.tensor([[1, 2, 2], [1, 2, 2]])}, "input_ids contain 1 image, but image_grid_thw has 2"),
])  # fmt: skip
def test_check_images_refuses_other_inputs(changed, says):
    row = {"input_ids": torch.tensor([5, 9, 6]), "pixel_values": torch.ones(8, 2), "image_token_id": 9}
    row |= {"image_grid_thw": torch.tensor([[1, 2, 4]])}
    with pytest.raises(ValueError, match=says):
        check_images(None, **row | changed)
