"""JSON lines: every mistake is named with its file and line."""

import PIL.Image
import pytest
from talk import IMAGE_PART, assistant, text, user

from minivlmrl.data.file_dataset import FileDataset
from minivlmrl.data.image import ImageProcessor
from minivlmrl.data.messages import text_of
from minivlmrl.data.processor import Processor, encode_completion
from minivlmrl.tasks import shapes


def test_rows_need_not_have_the_same_columns(write_rows):
    rows = FileDataset(write_rows({"problem": "a", "level": 1}, {"problem": "b", "hint": "c"}))
    assert rows[0].columns == {"problem": "a", "level": 1, "hint": None}
    assert rows[1].columns == {"problem": "b", "level": None, "hint": "c"}


def test_a_file_that_has_no_rows_is_named(tmp_path):
    """JSON may spell half a character; what else may be wrong with a file is in test_row_files.py."""
    with pytest.raises(ValueError, match=r"rows\.jsonl: no such file"):
        FileDataset(tmp_path / "rows.jsonl")
    (tmp_path / "rows.jsonl").write_text('{"problem": "a\\ud83d"}')
    with pytest.raises(ValueError, match=r"rows\.jsonl:1: not JSON \(.*surrogates not allowed"):
        FileDataset(tmp_path / "rows.jsonl")


@pytest.mark.parametrize("row", [{"problem": "a"}, {"problem": "a", "solution": None}])
def test_a_missing_column_is_named_with_its_line(write_rows, row):
    message = r"rows\.jsonl:2: column 'solution' is missing; the row has \['problem'\]; data\.col"
    with pytest.raises(ValueError, match=message):
        FileDataset(write_rows({"problem": "a", "solution": "b"}, row), ("problem", "solution"))


@pytest.mark.parametrize("name", ["completions", "image_sizes", "row_rewards"])
def test_a_column_that_rewards_are_given_anyway_is_named(write_rows, name):
    with pytest.raises(ValueError, match=rf"rows\.jsonl:2: column '{name}' .* rewards are given; rename it"):
        FileDataset(write_rows({"problem": "a", name: None}, {"problem": "a", name: ["b"]}))


@pytest.mark.parametrize(("row", "says"), [
    ('{"problem": "a", "x": ' + "[" * 10**4 + "]" * 10**4 + "}", "not JSON that can be read: it is nested too deep"),
    ({"problem": "a", "answer_extent": [0, 0]}, r"column 'answer_extent' is 0\.0, it must be over 0"),
    ({"problem": " " * 10**7}, "column 'problem': message 0 has over 1048576 characters; cut it"),
    ({"problem": "a", "images": ["red.png"] * 1001},
     "column 'problem': 1001 images and videos are over 1000; split the row"),
    ({"problem": "a", "image": {"image": "red.png", "min_pixels": 178_000_000}}, None),
], ids=lambda value: str(value)[:40])  # fmt: skip
def test_a_row_that_would_fill_time_or_memory_is_named(write_rows, row, says):
    with pytest.raises(ValueError, match=rf"rows\.jsonl:1: {says or '.*min_pixels is 178000000, it must be in '}"):
        FileDataset(write_rows(row))[0].prompt(Processor(shapes.tokenizer(), ImageProcessor(max_pixels=10**9)))


@pytest.mark.parametrize("value", [0.5, "-1", [-1.0]])
def test_sums_of_log_probabilities_are_not_positive(write_rows, value):
    row = {"prompt": "a", "chosen": "b", "rejected": "c", "ref_chosen_logps": value}
    with pytest.raises(ValueError, match=r"rows\.jsonl:1: column 'ref_chosen_logps' is .*, it must be "):
        FileDataset(write_rows(row))
    assert FileDataset(write_rows(row | {"ref_chosen_logps": -7}))[0].columns["ref_chosen_logps"] == -7


@pytest.mark.parametrize("label", ["yes", 1, 0.0])
def test_a_label_is_true_or_false(write_rows, label):
    """TRL's unpaired form; where no stage asks for it, a column of this name may hold anything."""
    row = {"prompt": "a", "completion": "b", "label": label}
    required = ("problem", "completion", "label")
    with pytest.raises(ValueError, match=r"rows\.jsonl:1: column 'label' is .*, it must be of type bool"):
        FileDataset(write_rows(row), required)
    assert FileDataset(write_rows(row))[0].columns["label"] == label
    assert FileDataset(write_rows(row | {"label": False}), required)[0].columns["label"] is False


def test_constants_are_columns_of_every_row(write_rows):
    file = write_rows({"problem": "a"}, {"problem": "b", "level": 1})
    rows = FileDataset(file, constants={"row_rewards": ["iou"]})
    assert [row.columns["row_rewards"] for row in rows] == [["iou"], ["iou"]]
    assert [row.columns["level"] for row in rows] == [None, 1]
    assert "row_rewards" not in FileDataset(file)[0].columns


def test_folders_of_classes_are_rows(tmp_path):
    """train/cat/1.png: the folder's name is the solution, and data.prompt_template the question of all."""
    for path in ("cat/1.png", "cat/2.JPG", "dog/1.png"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        PIL.Image.new("RGB", (8, 8)).save(tmp_path / path)
    (tmp_path / "notes.txt").write_text("no row")
    rows = FileDataset(tmp_path, ("problem", "solution"), prompt_template="What is it?")
    assert [row.columns["solution"] for row in rows] == ["cat", "cat", "dog"]
    assert text_of(rows[1].messages[0]) == "What is it?" and rows[1].images[0].size == (8, 8)
    assert rows[2].where == str(tmp_path / "dog" / "1.png")
    with pytest.raises(ValueError, match=r"1\.png: column 'problem' is missing.*data\.prompt_template: 'What is it\?'"):
        FileDataset(tmp_path)


def test_rows_of_file_and_label(write_rows):
    """Renamed, and asked the same question; a row with a question of its own is refused then."""
    options = {"prompt_template": "What is it?", "columns": {"file": "image", "label": "solution"}}
    row = FileDataset(write_rows({"file": "red.png", "label": "cat"}), **options)[0]
    assert row.columns["solution"] == "cat" and text_of(row.messages[0]) == "What is it?" and len(row.images) == 1
    message = r"'What is it\?', it must be a text with {problem} in it, as the row has \['problem'\]"
    with pytest.raises(ValueError, match=message):
        FileDataset(write_rows({"problem": "a", "file": "red.png"}), **options)


THERE = {"type": "image", "image": "blue.png", "max_pixels": 5000}
LATER = {
    "LLaVA": {"images": ["red.png", "blue.png"], "conversations": [
        {"from": "human", "value": "<image>What?"}, {"from": "gpt", "value": "red"},
        {"from": "human", "value": "And <image>?"}, {"from": "gpt", "value": "blue"}]},
    "parts": {"messages": [user([{"type": "image", "image": "red.png"}, text("What?")]), assistant("red"),
                           user([text("And "), THERE, text("?")]), assistant("blue")]},
    "listed parts": {"images": ["red.png", "blue.png"], "messages": [
        user([IMAGE_PART, text("What?")]), assistant("red"),
        user([text("And "), IMAGE_PART, text("?")]), assistant("blue")]},
}  # fmt: skip


@pytest.mark.parametrize("form", LATER)
def test_pictures_of_later_turns_are_in_the_answers_parts(write_rows, form):
    row = FileDataset(write_rows(LATER[form]), ("problem", "completion"))[0]
    assert [image.getpixel((0, 0)) for image in row.images] == [(255, 0, 0)]
    assert [part["type"] for part in row.messages[0]["content"]].count("image") == 1
    said = encode_completion(Processor(shapes.tokenizer(), ImageProcessor()), row.messages, row.completion)
    [(image, patches, grid)] = said.pictures
    assert image.getpixel((0, 0)) == (0, 0, 255) and len(patches) == grid[1] * grid[2]


def test_each_answer_of_a_pair_shows_its_own_pictures(write_rows):
    pair = {name: [assistant("a"), user([IMAGE_PART]), assistant(name)] for name in ("chosen", "rejected")}
    shown = {"prompt": [user([IMAGE_PART, text("?")])], "images": ["red.png", "blue.png"]}
    row = FileDataset(write_rows(pair | shown))[0]
    assert len(row.images) == 1
    for answer in (row.chosen, row.rejected):
        assert answer[1]["content"][0]["image"].getpixel((0, 0)) == (0, 0, 255)
