"""Test a row in each format in docs/rows.md, and the error message for each kind of invalid row."""

import base64
import io
import json
import re

import PIL.Image
import pytest

from minivlmrl.data.file_dataset import FileDataset
from minivlmrl.data.messages import content_parts, part_kind
from minivlmrl.data.processor import images_in
from tests.helpers.links import ROOT
from tests.helpers.talk import assistant, system, user

PAGE = (ROOT / "docs" / "rows.md").read_text()
SHOWN = json.loads((ROOT / "tests" / "recorded" / "forms.json").read_text())
HOW_MANY = [user("How many?")]
ONE_SOLUTION = {"solution": "2"}
ANSWERED = {"solution": "2", "completion": "2"}
PAIR = {"chosen": "2", "rejected": "3"}
# {format: its row's expected columns, and under "turns" the prompt, if it is not HOW_MANY}
EXPECTED = dict.fromkeys(SHOWN, ANSWERED) | {
    "LLaVA": {"turns": [user("\nHow many?")], "solution": "2", "completion": "2\nSure?\nYes."},
    "LLaMA-Factory, sharegpt": ANSWERED | {"turns": [system("Be brief."), *HOW_MANY]},
    "LLaMA-Factory, kto": {"completion": "2", "label": True},
    "Alpaca": ANSWERED | {"turns": [user("Hi"), assistant("Hello"), *HOW_MANY]},
    "ms-swift, without answer": {"solution": "2", "completion": None},
    "RLAIF-V": PAIR | {"solution": None, "completion": None},
    "R1-V": {"solution": "<answer> 2 </answer>"},
    "TRL, text": {"completion": "2"},
    **dict.fromkeys(("LLaMA-Factory, pairs", "ms-swift, pairs", "TRL, pairs"), PAIR),
    **dict.fromkeys(("EasyR1", "verl", "TRL"), ONE_SOLUTION),
}


@pytest.fixture
def read(tmp_path):
    for name, color in (("cat.jpg", "red"), ("dog.jpg", "blue")):
        PIL.Image.new("RGB", (60, 40), color).save(tmp_path / name)

    def read(row, required=("problem",), **options):
        (tmp_path / "rows.jsonl").write_text(row if isinstance(row, str) else json.dumps(row))
        return FileDataset(tmp_path / "rows.jsonl", required, **options)[0]

    return read


def words(turns):
    turns = [assistant(turns)] if isinstance(turns, str) else turns
    return turns and "\n".join("".join(part.get("text", "") for part in content_parts(turn)) for turn in turns)


def test_the_page_names_the_columns_of_every_form():
    named = re.findall(r"`(\w+)`", PAGE.split("## Columns of other projects")[1].split("\n## ")[0])
    assert SHOWN.keys() == EXPECTED.keys() and len(SHOWN) == 21
    assert {name for row in SHOWN.values() for name in row} - {*named} == {"id", "data_source"}  # row ids


@pytest.mark.parametrize("form", EXPECTED)
def test_every_format_is_read(read, form):
    row = read(SHOWN[form])
    expected = EXPECTED[form]
    assert words(row.messages) == words(expected.get("turns", HOW_MANY))
    count = str(SHOWN[form]).count(".jpg")
    assert len(row.images) == count and row.images[0].getpixel((0, 0))[0] > 250
    first = next(turn for turn in row.messages if turn["role"] == "user")
    parts = [part for part in first["content"] if part.get("text") != ""]
    # images come before the question
    assert [part_kind(part) for part in parts][:count] == ["image"] * count
    for name in ("completion", "chosen", "rejected"):
        if name in expected:
            assert words(getattr(row, name)) == expected[name]
    for name in ("solution", "label"):
        if name in expected:
            assert row.columns.get(name) == expected[name]


def test_bytes_of_an_image_are_read(read):
    entry = {"bytes": encoded_picture("PNG"), "path": None}
    for columns in ({"image": entry}, {"images": [entry]}):
        assert read({"problem": "a", **columns}).images[0].size == (60, 40)


def test_a_row_with_a_blank_answer_has_no_completion(read):
    turns = [{"from": "human", "value": "Where is the dog?"}, {"from": "gpt", "value": ""}]
    for row in ({"conversations": turns}, {"prefix": "Where is the dog?", "suffix": ""}):
        found = read({**row, "image": "cat.jpg"})
        assert (words(found.messages), found.columns["solution"], found.completion) == ("Where is the dog?", "", None)
    assert read({"problem": "a", "solution": []}).columns["solution"] == []


@pytest.mark.parametrize("answer", ["Let me think. Two.", ""])
def test_an_existing_solution_is_kept(read, answer):
    turns = [{"from": "human", "value": "How many?"}, {"from": "gpt", "value": answer}]
    assert read({"conversations": turns, "solution": "2"}).columns["solution"] == "2"


def test_a_column_may_not_get_the_name_of_an_existing_column(read):
    with pytest.raises(
        ValueError, match=r"rows\.jsonl:1: data\.columns renames 'gold' to 'solution', but the row already has both"
    ):
        read({"problem": "a", "gold": 3, "solution": 4}, columns={"gold": "solution"})


def encoded_picture(kind="JPEG"):
    stored = io.BytesIO()
    PIL.Image.new("RGB", (60, 40), "red").save(stored, kind)
    return base64.b64encode(stored.getvalue()).decode()


CHOICES = "How many?\nA. one\nB. two"


@pytest.mark.parametrize(("row", "prompt"), [
    ({"question": "How many?", "A": "one", "B": "two", "C": None, "hint": "Look.", "answer": "B"}, f"Look.\n{CHOICES}"),
    ({"problem": "How many?", "options": ["A. one", "B. two"], "solution": "B"}, CHOICES),
    ({"question": "How many? Options: A: one, B: two", "options": ["one", "two"]}, "How many? Options: A: one, B: two"),
    ({"prompt": HOW_MANY, "options": ["one", "two"]}, "How many?"),
])  # fmt: skip
def test_choices_are_in_the_prompt(read, row, prompt):
    assert words(read({**row, "image": "cat.jpg"}).messages) == prompt


def test_a_row_of_mmbench(read, tmp_path):
    """A line in MMBench's TSV file has columns A to D, and the image as base64 without a data URI header."""
    cells = {"index": "7", "question": "How many?", "hint": "", "A": "one", "B": "two", "C": "", "D": "",
             "answer": "B", "image": encoded_picture()}  # fmt: skip
    lines = ["\t".join(cells), "\t".join(cells.values())]
    (tmp_path / "rows.tsv").write_text("\n".join(lines))
    row = FileDataset(tmp_path / "rows.tsv", ("problem", "solution"))[0]
    assert words(row.messages) == CHOICES and row.columns["solution"] == "B" and row.images[0].size == (60, 40)
    with pytest.raises(ValueError, match="column 'shown' seems to contain an image that the model would not see"):
        read({"problem": "How many?", "shown": encoded_picture()})


@pytest.mark.parametrize(("name", "calls", "answers"), [
    ("conversations", "function_call", "observation"), ("messages", "tool_call", "tool_response"),
    ("messages", "tool_call", "tool"),
])  # fmt: skip
def test_tool_calls_and_tool_results_are_read(read, name, calls, answers):
    """The formats come from LLaMA-Factory and ms-swift, and a tool result may contain an image."""
    keys = ("from", "value") if name == "conversations" else ("role", "content")
    asked = '{"name": "zoom"}'
    said = [("user", "<image>Where?"), (calls, asked), (answers, "<image>"), ("assistant", "There.")]
    row = read({name: [dict(zip(keys, turn, strict=True)) for turn in said], "images": ["cat.jpg", "dog.jpg"]})
    assert words(row.messages) == "Where?" and [image.size for image in row.images] == [(60, 40)]
    call, answer, last = row.completion
    assert [call["role"], answer["role"], words([last])] == ["assistant", "tool", "There."]
    assert words([call]) == f"<tool_call>\n{asked}\n</tool_call>"
    [image] = images_in([answer])
    assert image.getpixel((0, 0))[2] > 250


TURN = {"from": "human", "value": "a"}
WRONG = [  # (row, text that the error message contains after the file and the line)
    ({"quastion": "a"}, "column 'problem' is missing; the row has ['quastion']. Rename the column of the question"),
    ({"conversations": "a"}, "format 'conversations': column 'conversations' is 'a', but it must be a list of turns"),
    ({"conversations": [{"from": "alien"}]}, "turn 0 is {'from': 'alien'}, but its 'from' or 'role' must be one of"),
    ({"conversations": [{"from": "human", "value": "<image>"}]}, "column 'prompt': the prompt has 1 image placehol"),
    ({"instruction": "a", "history": [["b"]]}, "column 'history' is [['b']], but it must be a list of [question, a"),
    (
        {"conversations": [TURN, {"from": "function_call", "value": "look(1)"}]},
        "turn 1: tool call: the text is not valid JSON",
    ),
    ({"conversations": [TURN, {"from": "function_call", "value": "[1]"}]}, "turn 1: tool call: the call is '[1]'"),
    ({"prompt": "<bbox>", "objects": {"bbox": []}}, "the texts contain <bbox>, which ms-swift replaces by `objects`"),
    ({"prompt": "<img>a.jpg</img>?"}, "the texts contain <img>, with which Qwen-VL names its images; convert the file"),
    ({"problem": "a", "image": {"bytes": "?", "path": None}}, "data:;base64,?: the data is not valid base64"),
    (
        {"problem": "a", "options": "one"},
        "format 'options': the list of choices is 'one', but it must be a list of at most",
    ),
    (
        {"question": "a", "choices": ["b", "c"], "answer": 1},
        "the answer is 1, but it must be a letter or one of the choi",
    ),
    ({"problem": "a", "photo": "cat.jpg"}, "Rename it with data.columns: {photo: image}"),
]


@pytest.mark.parametrize(("row", "message"), WRONG, ids=str)
def test_invalid_rows_are_reported(read, row, message):
    with pytest.raises(ValueError, match=r"rows\.jsonl:1: .*" + re.escape(message)):
        read(row).prompt(lambda messages, images, videos: images[0])
