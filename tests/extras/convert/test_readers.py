"""Test a row in each layout of docs/data.md, and the error message for each kind of invalid row."""

import json
import re

import PIL.Image
import pytest

from minivlmrl.data.file_dataset import FileDataset
from minivlmrl.data.messages import content_parts, part_kind
from minivlmrl.extras.convert.command import main
from tests.helpers.links import ROOT
from tests.helpers.talk import assistant, system, text, user

PAGE = (ROOT / "docs" / "data.md").read_text()
SHOWN = json.loads((ROOT / "tests" / "recorded" / "forms.json").read_text())
HOW_MANY = [user("How many?")]
ANSWERED = {"solution": "2", "completion": "2"}
PAIR = {"chosen": "2", "rejected": "3"}
# {layout: expected columns of the row; "turns" is the prompt, which is HOW_MANY by default}
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
    **{name: {"solution": "2"} for name in ("EasyR1", "verl", "TRL")},
}


@pytest.fixture
def read(tmp_path):
    for name, color in (("cat.jpg", "red"), ("dog.jpg", "blue")):
        PIL.Image.new("RGB", (60, 40), color).save(tmp_path / name)

    def read(row, required=("problem",), to=None, **options):
        """Convert a row and read the new file as a run does, or convert the row for another project."""
        (tmp_path / "rows.jsonl").write_text(row if isinstance(row, str) else json.dumps(row))
        new = tmp_path / "new.jsonl"
        assert main([str(tmp_path / "rows.jsonl"), f"--out={new}", *([f"--to={to}"] if to else [])]) == 0
        return json.loads(new.read_text()) if to else FileDataset(new, required, **options)[0]

    return read


def words(turns):
    turns = [assistant(turns)] if isinstance(turns, str) else turns
    return turns and "\n".join("".join(part.get("text", "") for part in content_parts(turn)) for turn in turns)


def test_the_page_names_the_project_of_every_form():
    section = PAGE.split("## Rows of other projects")[1].split("\n## ")[0]
    assert SHOWN.keys() == EXPECTED.keys() and len(SHOWN) == 21
    assert [name for name in SHOWN if name.partition(",")[0] not in section] == []


@pytest.mark.parametrize("form", EXPECTED)
def test_every_format_is_read(read, form):
    row = read(SHOWN[form])
    expected = EXPECTED[form]
    assert words(row.messages) == words(expected.get("turns", HOW_MANY))
    count = str(SHOWN[form]).count(".jpg")
    assert len(row.images) == count and row.images[0].getpixel((0, 0))[0] > 250
    first = next(turn for turn in row.messages if turn["role"] == "user")
    parts = [part for part in first["content"] if part.get("text") != ""]
    assert [part_kind(part) for part in parts][:count] == ["image"] * count
    for name in ("completion", "chosen", "rejected"):
        if name in expected:
            assert words(getattr(row, name)) == expected[name]
    for name in ("solution", "label"):
        if name in expected:
            assert row.columns.get(name) == expected[name]


def test_an_empty_answer_is_no_completion_and_a_solution_is_kept(read):
    turns = [{"from": "human", "value": "Where?"}, {"from": "gpt", "value": ""}]
    for row in ({"conversations": turns}, {"prefix": "Where?", "suffix": ""}):
        found = read({**row, "image": "cat.jpg"})
        assert (words(found.messages), found.columns["solution"], found.completion) == ("Where?", "", None)
    assert read({"problem": "a", "solution": []}).columns["solution"] == []
    assert read({"conversations": turns, "solution": "2"}).columns["solution"] == "2"
    turns[1]["value"] = "Let me think. Two."
    assert read({"conversations": turns, "solution": "2"}).columns["solution"] == "2"


@pytest.mark.parametrize(("tag", "label"), [("False", False), ("true", True), (False, False)])
def test_a_label_that_is_a_text_is_read(read, tag, label):
    row = read(SHOWN["LLaMA-Factory, kto"] | {"kto_tag": tag}, required=("problem", "label"))
    assert row.columns["label"] is label


CHOICES = "How many?\nA. one\nB. two"


@pytest.mark.parametrize(("row", "prompt"), [
    ({"question": "How many?", "A": "one", "B": "two", "C": None, "hint": "Look.", "answer": "B"}, f"Look.\n{CHOICES}"),
    ({"problem": "How many?", "options": ["A. one", "B. two"], "solution": "B"}, CHOICES),
    ({"question": "How many? Options: A: one, B: two", "options": ["one", "two"]}, "How many? Options: A: one, B: two"),
    ({"prompt": HOW_MANY, "options": ["one", "two"]}, "How many?"),
])  # fmt: skip
def test_choices_are_in_the_prompt(read, row, prompt):
    assert words(read({**row, "image": "cat.jpg"}).messages) == prompt


TURN = {"from": "human", "value": "a"}
ASKS = "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>How many?"
RENDERED = "<|im_start|>system\nBe brief.<|im_end|>\n" + ASKS
MORE = {  # {layout without an example in docs/data.md: (row, text of the prompt, answer)}
    "prompt, response": ({"prompt": "How many?", "response": "2"}, "How many?", "2"),
    "instruction, response": ({"instruction": "How many?", "response": "2"}, "How many?", "2"),
    "rejected_messages": (
        {"messages": [user("a"), assistant("2")], "rejected_messages": [user("a"), assistant("3")]}, "a", "2"),
    "rejected_conversations": (
        {"conversations": [TURN, {"from": "gpt", "value": "2"}],
         "rejected_conversations": [TURN, {"from": "gpt", "value": "3"}]}, "a", "2"),
    "rendered prompt": (
        {"image": "cat.jpg", "prompt": RENDERED + "<|im_end|>\n<|im_start|>assistant\n", "solution": "2"},
        "Be brief.\nHow many?", None),
    "rendered text": (
        {"image": "cat.jpg", "text": RENDERED + "<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n"},
        "Be brief.\nHow many?", "2"),
    "numbered images": (
        {"images": ["cat.jpg", "dog.jpg"], "question": "<image 1> or <image 2>?", "answer": "2"}, " or ?", "2"),
    "weights of turns": (
        {"conversations": [TURN, {"from": "gpt", "value": "bad", "weight": 0}, TURN, {"from": "gpt", "value": "2"}]},
        "a", "bad\na\n2"),
}  # fmt: skip


def talk(word, write=list):
    return write([user("How many?"), assistant(word)])


LISTS = {  # {what is written as a list or a text: (row, text of the prompt, answer)}
    "a box as the answer": ({"conversations": [TURN, {"from": "gpt", "value": [1, 2.5, 5, 6]}]}, "a", "[1, 2.5, 5, 6]"),
    "prompt, JSON": ({"prompt": json.dumps(HOW_MANY), "completion": "2"}, "How many?", "2"),
    "completion, JSON": ({"problem": "a", "completion": json.dumps([assistant("2")])}, "a", "2"),
    "messages, JSON": ({"messages": talk("2", json.dumps)}, "How many?", "2"),
    "conversations, Python": ({"conversations": str([TURN, {"from": "gpt", "value": "2"}])}, "a", "2"),
    "images, Python": ({"images": "['cat.jpg']", "query": "a", "response": "2"}, "a", "2"),
    "images, nested": ({"images": [["cat.jpg"], ["dog.jpg"]], "query": "a", "response": "2"}, "a", "2"),
    "a list with one question": ({"problem": "['How many?']", "completion": "2"}, "How many?", "2"),
    "an answer that is a list": ({"problem": "a", "completion": "['2']", "query": "b"}, "a", "['2']"),
    "prompt beside conversations": (
        {"prompt": "How many?", "chosen": talk("2"), "rejected": talk("3")}, "How many?", "2"),
    "messages beside conversations": (
        {"messages": talk("2"), "prompt": "How many?", "chosen": talk("2"), "rejected": talk("3")}, "How many?", "2"),
}  # fmt: skip


@pytest.mark.parametrize("name", MORE | LISTS)
def test_further_layouts_are_read(read, name):
    row, prompt, answer = (MORE | LISTS)[name]
    found = read(row)
    assert words(found.messages) == prompt and words(found.completion or found.chosen) == answer
    assert len(found.images) == str(row).count(".jpg")
    assert "rejected" not in name or words(found.rejected) == "3"


NO_FORM = "a value has a form that fits no layout"
WRONG = [  # (row, part of the error message after the file and the line)
    ({"quastion": "a"}, "no layout has the columns quastion; rename them to those of docs/data.md with --columns="),
    ({"conversations": "a"}, "column 'conversations' is 'a', but it must be a list of turns"),
    ({"conversations": [{"from": "alien"}]}, "turn 0 is {'from': 'alien'}, but its 'from' or 'role' must be one of"),
    ({"instruction": "a", "history": [["b"]]}, "column 'history' is [['b']], but it must be a list of [question, a"),
    ({"conversations": [TURN, {"from": "tool_call", "value": "look(1)"}]}, "turn 1: tool call: the text is not valid"),
    ({"conversations": [TURN, {"from": "function_call", "value": "[1]"}]}, "turn 1: tool call: the call is '[1]'"),
    ({"problem": "a", "options": "one"}, "the list of choices is 'one', but it must be a list of at most"),
    ({"problem": "a", "options": ["cat.jpg"]}, "the choices ['cat.jpg'] seem to be images, which the prompt must show"),
    ({"question": "a", "choices": ["b", "c"], "answer": 1}, "the answer is '1', but it must be a letter or one of"),
    ({"problem": "<image_2> or <image_1>?", "images": ["cat.jpg"]}, "the tags of images have the numbers [2, "),
    ({"messages": [{"role": "user", "text": "a"}]}, "turn 0 of 'messages' has no text in 'value' or 'content', only"),
    ({"prompt": "<|im_start|>user Hi"}, "is not a whole conversation of"),
    ({"conversations": [TURN, {"from": "gpt", "value": None}]}, "turn 1 of 'conversations' has no text in 'value'"),
    ({"conversations": []}, "column 'conversations' is [], but it must be a list of turns"),
    ({"prompt": "b", "chosen": talk("2"), "rejected": talk("3")}, "the prompt 'b' is not a turn of the conversation"),
    ({"messages": [user("a"), assistant(" ")]}, "an answer is empty or blank; add its text"),
    ({"query": "<image>a", "images": ["cat.jpg", "dog.jpg"]}, "the prompt has 1 placeholder for an image and 0"),
    ({"problem": "a", "box_space": "inches"}, "column 'box_space' is 'inches', but it must be 'original', 'resized'"),
    ({"prompt": "<bbox>", "objects": [3]}, NO_FORM), ({"problem": "a", "reward_model": "2"}, NO_FORM),
    ({"query": 3}, "must have a role, and content that is a string or a list of parts"),
    ({"messages": [user("a"), assistant("b")], "rejected_messages": [3]}, "turn 0 is 3, but its 'from' or 'role'"),
    ("[3]", "the row is 3, but it must be a JSON object that maps columns to values"),
    ({"prompt": "<bbox>", "objects": {"bbox": [[1]], "bbox_type": "norm1"}}, "bbox_type is 'norm1', but it must be re"),
]  # fmt: skip


@pytest.mark.parametrize(("row", "message"), WRONG, ids=str)
def test_invalid_rows_are_reported(read, row, message):
    with pytest.raises(ValueError, match=r"rows\.jsonl:1: .*" + re.escape(message)):
        read(row).prompt(lambda messages, images, videos: images[0])


IMAGE = {"type": "image"}
ASKED = user([IMAGE, {"type": "text", "text": "How many?"}])
TAGGED = user("<image>How many?")
THEIRS = {  # {(layout in docs/data.md, project): columns of the new row, with 1 for the images}
    ("TRL", "trl"): {"prompt": [ASKED], "images": 1, "solution": "2"},
    ("LLaMA-Factory, sharegpt", "trl"): {
        "prompt": [system([text("Be brief.")]), ASKED], "completion": [assistant([text("2")])], "images": 1,
        "solution": "2"},
    ("LLaVA", "trl"): {
        "id": "1", "images": 1, "solution": "2", "messages": [
            user([IMAGE, text("\nHow many?")]), assistant([text("2")]),
            user([text("Sure?")]), assistant([text("Yes.")])]},
    ("TRL, pairs", "ms-swift"): {"messages": [TAGGED, assistant("2")], "rejected_response": "3", "images": 1},
    ("LLaMA-Factory, kto", "ms-swift"): {"messages": [TAGGED, assistant("2")], "label": True, "images": 1},
    ("EasyR1", "verl"): {
        "data_source": "minivlmrl", "prompt": [TAGGED], "images": 1,
        "reward_model": {"style": "rule", "ground_truth": "2"}},
    ("TRL, text", "verl"): {"messages": [TAGGED, assistant("2")], "images": 1},
}  # fmt: skip


@pytest.mark.parametrize(("form", "project"), THEIRS)
def test_rows_are_written_for_other_projects(read, tmp_path, form, project):
    row = read(SHOWN[form], to=project)
    path = str(tmp_path / "cat.jpg")
    assert row.pop("images") == ([{"image": path}] if project == "verl" else [path])
    assert row | {"images": 1} == THEIRS[form, project]


def test_answers_that_are_not_trained_stay_so_or_are_named(read, capsys):
    turns = [user("a"), assistant("1"), user("b")]
    answer = [assistant("2") | {"weight": 0}, user("c"), assistant("3")]
    untrained = [answer[0] | {"loss": False}, *answer[1:]]
    row = {"prompt": turns, "completion": answer}
    assert read(row, to="ms-swift")["messages"] == [turns[0], turns[1] | {"loss": False}, turns[2], *untrained]
    for project in ("trl", "verl"):
        assert [turn.keys() for turn in read(row, to=project)["messages"]] == [{"role", "content"}] * 6
        assert "dropped: the mark that excludes an answer from training (2 times)" in capsys.readouterr().err
    for column in ("completion", "chosen"):
        answers = {"completion": "x"} if column == "completion" else {"chosen": "x", "rejected": "y"}
        assert "loss" not in json.dumps(read({"prompt": turns} | answers, to="trl"))
        assert "dropped" not in capsys.readouterr().err


def test_the_images_of_an_answer_that_is_dropped_are_dropped_too(read, tmp_path):
    answer = [assistant("look"), user([{"type": "image", "image": "dog.jpg"}]), assistant("2")]
    row = {"prompt": [user([{"type": "image", "image": "cat.jpg"}])], "solution": "2", "completion": answer}
    assert read(row, to="verl")["images"] == [{"image": str(tmp_path / "cat.jpg")}]


@pytest.mark.parametrize(("row", "project", "expected"), [
    ({"problem": "a", "video": ["cat.jpg", "cat.jpg"]}, "trl", "TRL reads no videos"),
    ({"problem": "a", "completion": "an <image> tag"}, "ms-swift", "the tag in the text 'an <image> tag' would become"),
    ({"problem": "a", "chosen": "b", "rejected": "c"}, "verl", "verl needs a solution or a completion"),
    ({"problem": "a", "completion": "b", "label": False}, "verl", "verl's trainers read no pairs and no labels"),
])  # fmt: skip
def test_rows_that_another_project_cannot_read_are_refused(read, row, project, expected):
    with pytest.raises(ValueError, match=rf"rows\.jsonl:1: .*{expected}"):
        read(row, to=project)


@pytest.mark.parametrize(("name", "role", "content"), [
    ("messages", "role", "content"), ("conversations", "from", "value"),
])  # fmt: skip
@pytest.mark.parametrize("empty", ["", " ", None])
def test_a_tool_call_without_text_is_no_solution(read, name, role, content, empty):
    turns = [("user", "How many?"), ("assistant", empty), ("tool", "5"), ("assistant", "2")]
    turns = [{role: speaker, content: text} for speaker, text in turns]
    turns[1]["tool_calls"] = [{"type": "function", "function": {"name": "zoom", "arguments": {}}}]
    assert read({name: turns}).columns.get("solution") is None
