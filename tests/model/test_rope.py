"""Compare M-RoPE positions for text, images and videos with transformers 4.51.3."""

import json
from pathlib import Path

import pytest
import torch

from minivlmrl.model import rope
from tests.helpers import tiny
from tests.record.record_positions import cases, digest

RECORDED = json.loads((Path(__file__).parents[1] / "recorded" / "positions_transformers_4.51.3.json").read_text())


@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "qwen2_vl"])
def test_positions_equal_those_of_transformers_4_51(model_type):
    config = tiny.config(model_type=model_type)
    assert len(RECORDED[model_type]) == 300
    for (ids, _, grids, seconds), expected in zip(cases(), RECORDED[model_type], strict=True):
        found = rope.get_rope_index(torch.tensor(ids), torch.tensor(grids).view(-1, 3), config, torch.tensor(seconds))
        assert digest(found) == expected, (grids, seconds)


@pytest.mark.parametrize("ids, grids", [([5, *[tiny.IMAGE] * 5], [(1, 4, 6)]), ([*[tiny.IMAGE] * 7], [(1, 4, 6)]),
                                        ([5, 6], [(1, 4, 6)]), ([tiny.IMAGE], []), ([tiny.VIDEO], []),
                                        ([tiny.IMAGE, 5, tiny.IMAGE], [(1, 2, 4)]),
                                        ([tiny.IMAGE, 5, *[tiny.IMAGE] * 2], [(1, 2, 4), (1, 2, 2)])])  # fmt: skip
def test_image_and_video_tokens_that_do_not_fit_the_grids_are_refused(ids, grids):
    with pytest.raises(ValueError, match=r"image|video|input_ids lack"):
        rope.get_rope_index(torch.tensor(ids), torch.tensor(grids).view(-1, 3), tiny.config())


def test_without_seconds_a_video_has_one_second_per_step():
    ids, grids = torch.tensor([tiny.VIDEO] * 4), torch.tensor([[2, 2, 4]])
    assert rope.get_rope_index(ids, grids, tiny.config())[0].tolist() == [0, 0, 2, 2]
