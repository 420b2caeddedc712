"""Boxes of demonstrations, from pixels of the file to the space that answers are asked for."""

import PIL.Image
import pytest
from talk import assistant, user

from minivlmrl.data.file_dataset import FileDataset
from minivlmrl.data.rescaled import Rescaled, rescale
from minivlmrl.data.row_summary import seen_sizes, summary
from minivlmrl.image import ImageProcessor
from minivlmrl.rows import Processor
from minivlmrl.tasks import shapes

PROCESSOR = Processor(shapes.tokenizer(), ImageProcessor(7, 2, 2, min_pixels=784))
WRITTEN = {
    "<answer>[10, 10, 20, 20]</answer> of 4": "<answer>[100, 200, 200, 400]</answer> of 4",
    'a <p data-bbox="10 10 20 20">b</p>': 'a <p data-bbox="100 200 200 400">b</p>',
    "<|box_start|>(10,10),(20,20)<|box_end|>": "<|box_start|>(100,200),(200,400)<|box_end|>",
    '[{"bbox_2d": [10, 10, 20.5, 20]}, [0,0,1,1]]': '[{"bbox_2d": [100, 200, 205, 400]}, [0,0,10,20]]',
    '[{"point_2d": [10, 20], "label": "[1, 2]"}]': '[{"point_2d": [100, 400], "label": "[1, 2]"}]',
    "[1, 2, 3] and [1, 2, 3, 4, 5]": "[1, 2, 3] and [1, 2, 3, 4, 5]",
}


def test_boxes_of_a_text_are_rewritten():
    assert {text: rescale(text, (100, 50), (1000.0, 1000.0)) for text in WRITTEN} == WRITTEN


@pytest.mark.parametrize(
    ("space", "box"),
    [("resized", [42, 28, 84, 56]), ("unit", [0.5, 0.5, 1.0, 1.0]), ("thousandths", [500, 500, 1000, 1000])],
)
def test_answers_are_in_the_space_of_the_row(write_rows, tmp_path, space, box):
    PIL.Image.new("RGB", (90, 50)).save(tmp_path / "box.png")  # the model sees 84 x 56
    turns = [user("a [1, 2, 3, 4]"), assistant("[45, 25, 90, 50]"), user("[1, 2, 3, 4]"), assistant("[0, 0, 0, 0]")]
    file = write_rows(
        {"image": "box.png", "problem": "b", "completion": "[45, 25, 90, 50]"},
        {"image": "box.png", "messages": turns},
        {"problem": "c", "completion": "[45, 25, 90, 50]"},
        {"images": ["box.png", "red.png"], "problem": "c", "completion": "[45, 25, 90, 50]"},
    )
    rows = Rescaled(FileDataset(file), lambda row: seen_sizes(row, PROCESSOR), space)
    assert rows[0].completion == str(box)
    assert rows[1].completion[0]["content"] == str(box) and rows[1].completion[1] == turns[2]
    assert rows[2].completion == "[45, 25, 90, 50]" and "4 (2 with 1 image, " in summary(rows, PROCESSOR)
    with pytest.raises(ValueError, match=r"rows\.jsonl:4: data\.rescale_boxes: the row has several images"):
        rows[3]
