"""Test recipes/rescale_boxes.py, which converts boxes from pixels of a file to the coordinates of a model's answers."""

import json

import PIL.Image
import pytest

from recipes.rescale_boxes import main, rescale
from tests.helpers.talk import assistant, user

WRITTEN = {
    "<answer>[10, 10, 20, 20]</answer> of 4": "<answer>[100, 200, 200, 400]</answer> of 4",
    'a <p data-bbox="10 10 20 20">b</p>': 'a <p data-bbox="100 200 200 400">b</p>',
    "<|box_start|>(10,10),(20,20)<|box_end|>": "<|box_start|>(100,200),(200,400)<|box_end|>",
    '[{"bbox_2d": [10, 10, 20.5, 20]}, [0,0,1,1]]': '[{"bbox_2d": [100, 200, 205, 400]}, [0,0,10,20]]',
    '[{"point_2d": [10, 20], "label": "[1, 2]"}]': '[{"point_2d": [100, 400], "label": "[1, 2]"}]',
    "[1, 2, 3] and [1, 2, 3, 4, 5]": "[1, 2, 3] and [1, 2, 3, 4, 5]",
    "<p data-bbox='10 10 20 20'>b</p>": "<p data-bbox='100 200 200 400'>b</p>",
    "<P Data-BBox = ' 10, 10,20 ,20 '>b": "<P Data-BBox = ' 100, 200,200 ,400 '>b",
    r"<p data-bbox=\"10 10 20 20\">": r"<p data-bbox=\"100 200 200 400\">",
    "<p data-bbox=&quot;10 10 20 20&quot;>": "<p data-bbox=&quot;100 200 200 400&quot;>",
    "{'point_2d': [10, 20], 'label': 'a'}": "{'point_2d': [100, 400], 'label': 'a'}",
    "(10, 10), ( 20,20 )": "(100, 200), ( 200,400 )",
    '["10", "10", "20", "20"]': '["100", "200", "200", "400"]',
    "data-bbox='1 2 3 4 5' (1, 2)": "data-bbox='1 2 3 4 5' (1, 2)",
}


def test_boxes_of_a_text_are_rewritten():
    assert {text: rescale(text, (100, 50), (1000.0, 1000.0)) for text in WRITTEN} == WRITTEN


@pytest.mark.parametrize(("space", "box"), [
    ("resized", [42, 28, 84, 56]), ("unit", [0.5, 0.5, 1.0, 1.0]), ("thousandths", [500, 500, 1000, 1000]),
])  # fmt: skip
def test_answers_of_a_file_are_in_the_space(write_rows, tmp_path, capsys, space, box):
    """Only boxes in the assistant's texts are converted, and not those in questions or solutions."""
    PIL.Image.new("RGB", (90, 50)).save(tmp_path / "box.png")  # a model with 28-pixel tokens sees 84 x 56
    turns = [user("a [1, 2, 3, 4]"), assistant("[45, 25, 90, 50]"), user("[1, 2, 3, 4]"), assistant("[0, 0, 0, 0]")]
    calls = [{"function": {"name": "zoom", "arguments": arguments}} for arguments in (
        {"bbox_2d": [45, 25, 90, 50]}, json.dumps({"bbox_2d": [45, 25, 90, 50]})
    )]  # fmt: skip
    called = {"role": "assistant", "tool_calls": calls, "reasoning_content": "[45, 25, 90, 50]?"}
    rows = [
        {"image": "box.png", "problem": "b", "completion": "[45, 25, 90, 50]", "solution": "[45, 25, 90, 50]"},
        {"images": ["box.png"], "messages": turns},
        {"problem": "c", "completion": "[45, 25, 90, 50]"},
        {"image": "box.png", "problem": "d", "completion": "[45 25"},
        {"image": "box.png", "problem": "e", "completion": [called]},
    ]
    main([str(write_rows(*rows)), space])
    out, err = capsys.readouterr()
    assert err.endswith("rows.jsonl: 2 of 5 rows had no box to convert, the first in line 3\n")
    first, second, third, _, fifth = map(json.loads, out.splitlines())
    assert json.loads(json.dumps(fifth).replace(str(box), "[45, 25, 90, 50]")) == rows[4]
    assert first == rows[0] | {"completion": str(box)}
    assert [turn["content"] for turn in second["messages"]][:3] == ["a [1, 2, 3, 4]", str(box), "[1, 2, 3, 4]"]
    assert third == rows[2]


def test_a_row_of_several_images_is_refused(write_rows):
    two = {"images": ["red.png", "blue.png"], "problem": "c", "completion": "[1, 2, 3, 4]"}
    with pytest.raises(SystemExit, match=r"rows\.jsonl:2: the row has 2 images, so it is unclear"):
        main([str(write_rows({"problem": "b"}, two)), "unit"])


def test_boxes_in_questions_are_converted_if_the_option_asks(write_rows, tmp_path, capsys):
    PIL.Image.new("RGB", (28, 28)).save(tmp_path / "box.png")
    turns = [user("Who is at [7, 7, 14, 14]?"), assistant("[7, 7, 14, 14]")]
    rows = [{"image": "box.png", "messages": turns}, {"image": "box.png", "problem": "[7, 7, 14, 14]?"}]
    main([str(write_rows(*rows)), "unit", "--questions"])
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    box = "[0.25, 0.25, 0.5, 0.5]"
    assert [turn["content"] for turn in first["messages"]] == [f"Who is at {box}?", box]
    assert second["problem"] == f"{box}?"


def test_a_file_with_other_line_separators_is_read(tmp_path, capsys):
    PIL.Image.new("RGB", (100, 50)).save(tmp_path / "box.png")
    row = '{"image": "box.png", "problem": "a\u2028b", "completion": "[10, 10, 20, 20]"}'
    (tmp_path / "rows.jsonl").write_text(f"\ufeff{row}\n\n{row}\n", encoding="utf-8")
    main([str(tmp_path / "rows.jsonl"), "thousandths"])
    printed = [json.loads(line)["completion"] for line in capsys.readouterr().out.split("\n")[:-1]]
    assert printed == ["[100, 200, 200, 400]"] * 2
