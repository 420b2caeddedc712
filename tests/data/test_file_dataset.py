"""Test rows from files: text columns become prompts and answers, and every error names the row's line."""

import re

import pytest

from minivlmrl.data.file_dataset import FileDataset
from minivlmrl.data.folder_template import DEFAULT_QWEN3, ChatTemplate
from minivlmrl.data.image import ImageProcessor
from minivlmrl.data.messages import text_of
from minivlmrl.data.processor import Processor, encode_completion, images_in
from minivlmrl.tasks import shapes
from tests.helpers.talk import CHATML, IMAGE_PART, assistant, system, text, user


def test_rows_need_not_have_the_same_columns(write_rows):
    rows = FileDataset(write_rows({"problem": "a", "level": 1}, {"problem": "b", "hint": "c"}))
    assert rows[0].columns == {"problem": "a", "level": 1, "hint": None}
    assert rows[1].columns == {"problem": "b", "level": None, "hint": "c"}


def test_a_lone_surrogate_is_named(tmp_path):
    """A JSON escape can be a lone surrogate. test_row_files.py tests other file errors."""
    (tmp_path / "rows.jsonl").write_text('{"problem": "a\\ud83d"}')
    with pytest.raises(ValueError, match=r"rows\.jsonl:1: the text is not valid JSON \(.*surrogates not allowed"):
        FileDataset(tmp_path / "rows.jsonl")


@pytest.mark.parametrize("row", [{"problem": "a"}, {"problem": "a", "solution": None}])
def test_a_missing_column_is_named_with_its_line(write_rows, row):
    message = r"rows\.jsonl:2: column 'solution' is missing; the row has \['problem'\]\. Rename a column with data\.col"
    with pytest.raises(ValueError, match=message):
        FileDataset(write_rows({"problem": "a", "solution": "b"}, row), ("problem", "solution"))


@pytest.mark.parametrize("name", ["completions", "image_sizes", "row_rewards"])
def test_a_column_with_the_name_of_a_reward_argument_raises_an_error(write_rows, name):
    with pytest.raises(
        ValueError,
        match=rf"rows\.jsonl:2: column '{name}' .* must be renamed with data.columns, because reward functions receive",
    ):
        FileDataset(write_rows({"problem": "a", name: None}, {"problem": "a", name: ["b"]}))


@pytest.mark.parametrize(("row", "says"), [
    ({"problem": " " * 10**7}, "column 'problem': message 0 has more than 1048576 characters of text; shorten"),
    ({"problem": "a", "image": {"image": "red.png", "min_pixels": 178_000_000}}, None),
], ids=lambda value: str(value)[:40])  # fmt: skip
def test_a_row_that_needs_too_much_time_or_memory_raises_an_error(write_rows, row, says):
    with pytest.raises(ValueError, match=rf"rows\.jsonl:1: {says or '.*min_pixels is 178000000, but it must be in '}"):
        FileDataset(write_rows(row))[0].prompt(Processor(shapes.tokenizer(), ImageProcessor(max_pixels=10**9)))


@pytest.mark.parametrize("label", ["yes", 1, 0.0])
def test_a_label_is_true_or_false(write_rows, label):
    """The column is validated only if a stage requires it. Otherwise it may have any value."""
    row = {"prompt": "a", "completion": "b", "label": label}
    required = ("problem", "completion", "label")
    with pytest.raises(ValueError, match=r"rows\.jsonl:1: column 'label' is .*, but it must be of type bool"):
        FileDataset(write_rows(row), required)
    assert FileDataset(write_rows(row))[0].columns["label"] == label
    assert FileDataset(write_rows(row | {"label": False}), required)[0].columns["label"] is False


def test_constants_are_columns_of_every_row(write_rows):
    file = write_rows({"problem": "a"}, {"problem": "b", "level": 1})
    rows = FileDataset(file, constants={"row_rewards": ["iou"]})
    assert [row.columns["row_rewards"] for row in rows] == [["iou"], ["iou"]]
    assert [row.columns["level"] for row in rows] == [None, 1]
    assert "row_rewards" not in FileDataset(file)[0].columns


def test_rows_of_file_and_label(write_rows):
    """data.columns renames both columns, and data.prompt_template is the question; a row may not have another one."""
    options = {"prompt_template": "What is it?", "columns": {"file": "image", "label": "solution"}}
    row = FileDataset(write_rows({"file": "red.png", "label": "cat"}), **options)[0]
    assert row.columns["solution"] == "cat" and text_of(row.messages[0]) == "What is it?" and len(row.images) == 1
    message = r"'What is it\?', but it must be a text that contains {problem}, because the row has \['problem'\]"
    with pytest.raises(ValueError, match=message):
        FileDataset(write_rows({"problem": "a", "file": "red.png"}), **options)


THERE = {"type": "image", "image": "blue.png", "max_pixels": 5000}
LATER = {
    "tags": {"images": ["red.png", "blue.png"], "messages": [
        user("<image>What?"), assistant("red"), user("And <image>?"), assistant("blue")]},
    "parts": {"messages": [user([{"type": "image", "image": "red.png"}, text("What?")]), assistant("red"),
                           user([text("And "), THERE, text("?")]), assistant("blue")]},
    "listed parts": {"images": ["red.png", "blue.png"], "messages": [
        user([IMAGE_PART, text("What?")]), assistant("red"),
        user([text("And "), IMAGE_PART, text("?")]), assistant("blue")]},
}  # fmt: skip


@pytest.mark.parametrize("form", LATER)
def test_images_of_later_turns_are_in_the_parts_of_the_answer(write_rows, form):
    row = FileDataset(write_rows(LATER[form]), ("problem", "completion"))[0]
    assert [image.getpixel((0, 0)) for image in row.images] == [(255, 0, 0)]
    assert [part["type"] for part in row.messages[0]["content"]].count("image") == 1
    said = encode_completion(Processor(shapes.tokenizer(), ImageProcessor()), row.messages, row.completion)
    [(image, patches, grid)] = said.pictures
    assert image.getpixel((0, 0)) == (0, 0, 255) and len(patches) == grid[1] * grid[2]


def test_each_answer_of_a_pair_has_its_own_images(write_rows):
    pair = {name: [assistant("a"), user([IMAGE_PART]), assistant(name)] for name in ("chosen", "rejected")}
    shown = {"prompt": [user([IMAGE_PART, text("?")])], "images": ["red.png", "blue.png"]}
    row = FileDataset(write_rows(pair | shown))[0]
    assert len(row.images) == 1
    for answer in (row.chosen, row.rejected):
        [image] = images_in(answer)
        assert image.getpixel((0, 0)) == (0, 0, 255)


def test_prompt_template_and_system_prompt(write_rows):
    file = write_rows(*({name: "What is {x}?", "image": "red.png"} for name in ("problem", "prompt")))
    for row in FileDataset(file, prompt_template="Look: <image> {problem} Think.", system_prompt="Be brief."):
        asked = user([text("Look: "), IMAGE_PART, text(" What is {x}? Think.")])
        assert row.messages == [system("Be brief."), asked]


def test_the_prompt_template_is_applied_to_the_last_user_turn(write_rows):
    turns = [system("Be brief."), user("one"), assistant("two"), user([IMAGE_PART, text("three")])]
    written = {"prompt": [*turns[:3], user("<image>three")], "image": "red.png"}
    file = write_rows({"prompt": turns, "image": "red.png"}, written)
    for row in FileDataset(file, prompt_template="Look: {problem} Think."):
        said = row.messages[3]["content"]
        assert as_parts(row.messages[:3]) == as_parts(turns[:3])
        assert "".join(part.get("text", "") for part in said) == "Look: three Think." and IMAGE_PART in said
    for turns in ([], [user([text("th"), text("ree")])]):
        file = write_rows({"messages": [*turns, assistant("four")]})
        message = r"rows\.jsonl:1: column 'messages': data\.prompt_template is inserted around one"
        with pytest.raises(ValueError, match=message):
            FileDataset(file, prompt_template="Look: {problem}")


def as_parts(turns):
    return [
        {**turn, "content": [text(turn["content"])] if isinstance(turn["content"], str) else turn["content"]}
        for turn in turns
    ]


def test_tool_calls_and_images_in_tool_results_are_read(write_rows):
    """The call has no text, as in OpenAI's and TRL's formats. The <image> in the result is the second image."""
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "look", "arguments": "{}"}}]}
    turns = [user("<image>?"), call, {"role": "tool", "content": "<image>"}, assistant("red")]
    [row] = FileDataset(write_rows({"messages": turns, "images": ["red.png", "green.png"]}))
    asked, answer, _ = row.completion
    assert asked["tool_calls"] == call["tool_calls"] and row.images[0].getpixel((0, 0)) == (255, 0, 0)
    assert [image.getpixel((0, 0)) for image in images_in([answer])] == [(0, 255, 0)]


@pytest.mark.parametrize("own", [[], [system([text("Own.")])]])
def test_the_system_prompt_is_added_to_turns_without_a_system_turn(write_rows, own):
    file = write_rows({"prompt": [*own, user("hi")]})
    messages = FileDataset(file, system_prompt="Be brief.")[0].messages
    assert messages == [*(own or [system("Be brief.")]), user([text("hi")])]
    assert [turn["role"] for turn in FileDataset(file)[0].messages] == ["system"] * len(own) + ["user"]


@pytest.mark.parametrize("answer", ["two", [assistant([text("two")]), user("?"), assistant("2")]])
def test_answers_are_text_or_turns(write_rows, answer):
    file = write_rows({"prompt": "?", "completion": answer, "chosen": answer, "rejected": "one"})
    row = FileDataset(file, ("problem", "completion", "chosen", "rejected"))[0]
    assert (row.completion, row.chosen, row.rejected) == (answer, answer, "one")


def test_a_conversation_is_split_at_its_first_assistant_turn(write_rows):
    turns = [system("Be brief."), user("one"), assistant("two"), user("three"), assistant("four")]
    options = {"prompt_template": "Look: {problem}", "system_prompt": "Unused."}
    row = FileDataset(write_rows({"messages": turns}), ("problem", "completion"), **options)[0]
    assert row.messages == as_parts([turns[0], user("Look: one")])
    assert (row.completion, row.columns) == (turns[2:], {"messages": turns})


DIALOGUE = [user("one"), assistant("two"), user("three"), assistant("four"), assistant("five")]


@pytest.mark.parametrize("row", [
    {"messages": DIALOGUE}, {"prompt": DIALOGUE[:1], "completion": DIALOGUE[1:]},
    {"prompt": "one", "completion": DIALOGUE[1:]}, {"prompt": DIALOGUE[:3], "completion": DIALOGUE[3:]},
    {"prompt": "one", "chosen": DIALOGUE[1:], "rejected": [*DIALOGUE[1:3], assistant("no")]},
    {"chosen": DIALOGUE, "rejected": [*DIALOGUE[:3], assistant("no")]},
])  # fmt: skip
def test_the_last_answer_follows_a_prompt_with_the_turns_before_it(write_rows, row):
    found = FileDataset(write_rows(row), train_answers="last")[0]
    assert found.messages == as_parts(DIALOGUE[:3])
    assert (found.chosen if "chosen" in row else found.completion) == DIALOGUE[3:]
    assert found.rejected == ([assistant("no")] if "chosen" in row else None)
    single = FileDataset(write_rows({"prompt": "one", "completion": "two"}), train_answers="last")[0]
    assert (single.messages, single.completion) == (as_parts(DIALOGUE[:1]), "two")


def test_images_before_the_last_answer_are_in_its_prompt(write_rows):
    turns = [user("<image>one"), assistant("No."), user("<image>two"), assistant("four")]
    found = FileDataset(write_rows({"messages": turns, "images": ["red.png", "blue.png"]}), train_answers="last")[0]
    assert [image.getpixel((0, 0)) for image in found.images] == [(255, 0, 0), (0, 0, 255)]
    assert [text_of(turn) for turn in found.messages] == ["one", "No.", "two"]


def test_pairs_that_differ_before_their_last_answers_have_no_common_prompt(write_rows):
    row = {"prompt": "one", "chosen": DIALOGUE[1:], "rejected": [assistant("a"), user("b"), assistant("no")]}
    with pytest.raises(ValueError, match="train_answers is last, but the columns chosen and rejected have diff"):
        FileDataset(write_rows(row), train_answers="last")


def test_the_implicit_prompt_equals_that_of_trl(write_rows):
    data_utils = pytest.importorskip("trl.data_utils", reason="oracle missing: pip install trl==1.16.0")
    shared = [system("Be brief."), user("one"), assistant("two"), user("three")]
    example = {"chosen": [*shared, assistant("four")], "rejected": [*shared, assistant("5"), user("?"), assistant("6")]}
    row = FileDataset(write_rows(example))[0]
    expected = data_utils.extract_prompt(example)
    assert (row.chosen, row.rejected) == (expected["chosen"], expected["rejected"])
    assert row.messages == as_parts(expected["prompt"])


@pytest.mark.parametrize("key", ["tool_calls", "reasoning_content"])
def test_a_pair_may_differ_in_a_call_or_a_thought_only(write_rows, key):
    says = {"tool_calls": lambda text: [{"function": {"name": text}}]}.get(key, str)
    pair = {name: [assistant("Wait.") | {key: says(name)}] for name in ("chosen", "rejected")}
    [row] = FileDataset(write_rows({"problem": "a"} | pair))
    assert (row.chosen, row.rejected) == (pair["chosen"], pair["rejected"])
    with pytest.raises(ValueError, match="are equal"):
        FileDataset(write_rows({"problem": "a"} | pair | {"rejected": pair["chosen"]}))


SHOWN = [user([text("Is "), IMAGE_PART]), assistant("Yes, <image>"), user([IMAGE_PART, text("<image>?")])]
PLACED = {
    "image parts": (SHOWN, SHOWN),
    "placeholders": (
        [system("s"), user("Is <image>"), assistant("Yes"), user([text("this"), text("<image>?")])],
        [system([text("s")]), user([text("Is "), IMAGE_PART, text("")]), assistant([text("Yes")]),
         user([text("this"), text(""), IMAGE_PART, text("?")])],
    ),
    "neither": (
        [system("s"), user("one"), assistant("two"), user([text("th"), text("ree")])],
        [system([text("s")]), user([IMAGE_PART, IMAGE_PART, text("one")]), assistant([text("two")]),
         user([text("th"), text("ree")])],
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", ["prompt", "messages", "chosen"])
@pytest.mark.parametrize("name", PLACED)
def test_images_in_a_conversation(write_rows, name, form):
    turns, placed = PLACED[name]
    if form == "messages":  # the first assistant turn ends its prompt
        turns, placed = ([turn for turn in of if turn["role"] != "assistant"] for of in (turns, placed))
    row = {form: turns if form == "prompt" else [*turns, assistant("a")]}
    row |= {"rejected": [*turns, assistant("b")]} if form == "chosen" else {}
    row = FileDataset(write_rows({**row, "images": ["blue.png", "green.png"]}))[0]
    assert row.messages == placed
    assert [image.getpixel((0, 0)) for image in row.images] == [(0, 0, 255), (0, 255, 0)]


HI = user("hi")
YES = assistant("yes")

MISTAKES = [
    ({"problem": 3}, "column 'problem': the value must be text, but it is 3"),
    ({"prompt": 3}, "column 'prompt': the value must be text or a list of turns, but it is 3"),
    ({"prompt": [{"role": "alien", "content": "hi"}]},
     "column 'prompt': there must be at least one turn, and the roles must be system, user"),
    ({"prompt": [user([{"type": "audio"}])]}, "column 'prompt': message 0 has a part that is neither text, image nor"),
    ({"prompt": [user([{"type": "video"}])]}, "column 'prompt': the prompt has 1 video placeholder(s), but 0 vid"),
    ({"prompt": [HI, YES]}, "column 'prompt': the prompt ends with an assistant turn; move this turn into the column"),
    ({"problem": "a", "prompt": "a"}, "the row has both columns 'problem' and 'prompt', but only one of them is"),
    ({"messages": [HI, assistant(" ")]}, "column 'messages': an answer is empty or blank"),
    ({"messages": [HI, YES, user([IMAGE_PART]), YES]}, "column 'messages': the prompt has 1 image placeholder(s), but"),
    ({"messages": [HI, YES, user("<video>?"), YES], "video": "a.mp4"},
     "column 'messages': a video after the first as"),
    ({"chosen": [HI, YES], "rejected": [user("ho"), YES]}, "column 'problem' is missing; the row has ['chosen', 'rej"),
    ({"chosen": [HI, YES], "rejected": [HI, YES, HI, YES]}, "column 'chosen': the turns of an answer must begin"),
    ({"prompt": "a", "chosen": [YES], "rejected": [assistant([text("y"), text("es")])]},
     "the columns 'chosen' and 'rejected' are equal; remove the row"),
    ({"prompt": [user([IMAGE_PART]), YES, HI], "images": ["red.png"] * 2},
     "column 'prompt': the prompt has 1 image placeholder(s), but 2 image(s) were given; the prompt"),
    ({"messages": [system("s"), YES], "image": "red.png"},
     "column 'messages': the prompt has 0 image placeholder(s), but 1 image(s) were given"),
    ({"problem": "a", "images": ["red.png", None]}, "column 'images': each image must be a path or data URI, but"),
    ({"problem": "a", "image": 3}, "column 'image': each image must be a path or data URI, but found 3"),
    ({"problem": "a", "video": [3]}, "column 'video': each video must be a path or data URI, or a list with a path"),
    ({"problem": "a", "image": "a", "images": ["a"]}, "the row has both columns 'image' and 'images'; use only one"),
    ({"problem": "a", "images": [{"image": "a", "fps": 1}]}, "column 'images': options of the image: unknown key fps"),
    ({"prompt": [user([{"type": "image", "image": 3}])]},
     "column 'prompt': message 0: each image must be a path or data URI"),
    ({"problem": "a", "margin": True}, "column 'margin' is True, but it must be of type float"),
]  # fmt: skip

BAD_ANSWERS = [
    (3, "the value must be text or a list of turns, but it is 3"),
    ("", "an answer is empty or blank; add its text or remove the row"),
    ([], "there must be at least one turn, and the roles must be system, user, assistant, tool, but the roles are []"),
    ([HI, YES], "the turns of an answer must begin and end with an assistant turn, but their roles are ['u"),
    ([YES, {"content": "hi"}, YES], "message 1 must have a role, and content that is a text or a list"),
    ([YES, user([IMAGE_PART]), YES], "the prompt has 1 image placeholder(s), but 0 image(s) were given"),
]

# keys and values of turns and parts that nothing would read
UNREAD = [
    (user("a") | {"name": "Bob"}, "message 0 of the role user has the key 'name' with 'Bob', which is not read; the"),
    (user("a") | {"reasoning_content": "b"}, "message 0 of the role user has the key 'reasoning_content'"),
    (user("a") | {"loss": True}, "message 0: {'loss': True} asks for a loss on this turn, but only assistant turns"),
    (user([text("a") | {"cache_control": {"type": "x"}}]), "a text of message 0 has the key 'cache_control'"),
    (user([text("a") | {"image": "red.png"}]), "message 0 has a part of two kinds"),
    (user([{"type": "video", "image": "red.png"}]), "message 0 has a part of two kinds"),
    (user([{"type": "image_url", "image_url": {"url": "red.png", "detail": "low"}}]), "the key 'detail' with 'low'"),
    (user([{"type": "image", "image": {"bytes": None, "path": "red.png", "crop": [1]}}]), "the key 'crop' with [1]"),
    (user([IMAGE_PART | {"image": f"{name}.png", "index": i} for i, name in ((1, "red"), (0, "blue"))]),
     "the parts show the images [1, 0], but each image must be shown once, in order"),
]  # fmt: skip
UNREAD_ANSWERS = [
    (YES | {"weight": 0.5}, "message 1: 'weight' is 0.5, but it must be true, 1, false or 0"),
    (YES | {"loss": "false"}, "message 1: 'loss' is 'false', but it must be true, 1, false or 0"),
    (YES | {"loss": True, "weight": 0}, "message 1: {'loss': True, 'weight': 0} contradict each other"),
    (YES | {"refusal": "no"}, "message 1 of the role assistant has the key 'refusal' with 'no'"),
    (YES | {"train": False}, "every assistant turn of the answer has loss or loss_mask or weight or train: false"),
    (
        YES | {"tool_calls": [{"function": {"name": "a", "output": "b"}}]},
        "the function of a tool call of message 1 has",
    ),
]
SYSTEM = [
    ({"system": 3, "problem": "a"}, "column 'system': the value must be text, but it is 3"),
    ({"system": "a", "prompt": [system("b"), HI]}, "column 'system': the turns begin with another system message"),
]
MISTAKES += [({"prompt": [turn]}, f".*{message}") for turn, message in UNREAD]
MISTAKES += [({"messages": [HI, turn]}, f".*{message}") for turn, message in UNREAD_ANSWERS]
MISTAKES += [*SYSTEM, ({"prompt": [HI, YES | {"loss": 1}, HI]}, "column 'prompt': message 1: {'loss': 1} asks for a")]
MISTAKES += [
    ({"problem": "a", column: answer}, f"column '{column}': {message}")
    for column in ("completion", "chosen", "rejected")
    for answer, message in BAD_ANSWERS
]


@pytest.mark.parametrize(("row", "message"), MISTAKES)
def test_a_mistake_is_named_when_the_file_is_read(write_rows, row, message):
    with pytest.raises(ValueError, match=r"rows\.jsonl:2: " + re.escape(message).replace(r"\.\*", ".*", 1)):
        FileDataset(write_rows({"problem": "a"}, row))


@pytest.mark.parametrize("key", ["loss", "loss_mask", "weight", "train"])
@pytest.mark.parametrize("family", ["none", "qwen3", "jinja", "rewritten"])
def test_a_turn_without_loss_is_context(write_rows, key, family):
    """Also in a template that drops earlier thoughts, with which each answer is a sequence of its own."""
    turns = [user("a"), assistant("<think>b</think>bad") | {key: False}, user("c"), assistant("good") | {key: True}]
    row = FileDataset(write_rows({"messages": turns}), ("problem", "completion"))[0]
    latest = "(message.content if loop.last else message.content.split('</think>')[-1]) | trim"
    rewriting = CHATML.replace("message.content | trim", latest)
    source = {"none": None, "qwen3": DEFAULT_QWEN3, "jinja": CHATML, "rewritten": rewriting}[family]
    template = source and ChatTemplate(source, "template")
    processor = Processor(shapes.tokenizer(), ImageProcessor(), template)
    said = encode_completion(processor, row.messages, row.completion)
    assert processor.decode(said.ids[said.policy_mask]) == "good"
    assert "bad" in processor.decode(said.ids)


@pytest.mark.parametrize("asked", [
    {"problem": "a"}, {"prompt": "a"}, {"prompt": [user("a")]}, {"messages": [user("a"), assistant("b")]},
    {"chosen": [user("a"), assistant("b")], "rejected": [user("a"), assistant("c")]},
    {"prompt": [system("Be brief."), user("a")]},
])  # fmt: skip
def test_the_column_system_is_the_system_message(write_rows, asked):
    for said in ("Be brief.", "", None):
        row = FileDataset(write_rows({"system": said, **asked}), system_prompt="Recipe.")[0]
        expected = said or ("Be brief." if "system" in str(asked) else "Recipe.")
        assert [(turn["role"], text_of(turn)) for turn in row.messages] == [("system", expected), ("user", "a")]


@pytest.mark.parametrize("columns", [{"a": "b", "b": "a"}, {"b": "a", "a": "b"}])
def test_columns_are_renamed_together(write_rows, columns):
    [row] = FileDataset(write_rows({"problem": "?", "a": 1, "b": 2}), columns=columns)
    assert (row.columns["a"], row.columns["b"]) == (2, 1)
    with pytest.raises(ValueError, match="renames 'b' to 'c', but the row already has both columns"):
        FileDataset(write_rows({"problem": "?", "a": 1, "b": 2}), columns={"a": "c", "b": "c"})


def test_unusual_rows_that_are_valid(write_rows):
    """A user turn may be empty, an answer may contain <image>, and a conversation may also have a pair."""
    for answer in ([assistant("a"), user(""), assistant("b")], "<image>"):
        assert FileDataset(write_rows({"problem": "?", "completion": answer}))[0].completion == answer
    row = FileDataset(write_rows({"messages": [user("1"), assistant("2")], "chosen": "2", "rejected": "3"}))[0]
    assert (row.completion, row.chosen, row.rejected) == ([assistant("2")], "2", "3")


FORMAT_FILE = """
def read(row, key="turns"):
    question, answer = row["example"][key]
    return {"image": row["example"]["picture"]["path"], "problem": question, "completion": answer, "solution": answer}


def nothing(row):
    print(row)
"""
NESTED = {"example": {"picture": {"path": "red.png"}, "turns": ["Which colour?", "red"]}}


@pytest.fixture
def own_format(tmp_path):
    (tmp_path / "my_format.py").write_text(FORMAT_FILE)
    return str(tmp_path / "my_format.py")


def test_a_nested_format_in_a_file(write_rows, own_format):
    required = ("problem", "solution", "completion")
    row = FileDataset(write_rows(NESTED), required, format=f"{own_format}:read")[0]
    assert text_of(row.messages[-1]) == "Which colour?" and row.images[0].size == (4, 4)
    assert row.columns["solution"] == row.completion == "red" and "example" not in row.columns


def test_a_format_may_have_options(write_rows, own_format):
    moved = {"example": {"picture": {"path": "red.png"}, "said": ["Which colour?", "red"]}}
    row = FileDataset(write_rows(moved), format=f"{own_format}:read(key='said')")[0]
    assert row.columns["solution"] == "red"


@pytest.mark.parametrize(("name", "error", "says"), [
    ("read(kee=1)", ValueError, r"^data\.format .*:read\(kee=1\): there is no option 'kee'; the options are: key"),
    ("nothing", AttributeError, r"'NoneType' .*\n(in .*\n)*in .*rows\.jsonl:1"),
    ("read(key='said')", KeyError, r"^'said'\n(in .*\n)*in .*rows\.jsonl:1"),
])  # fmt: skip
def test_an_error_of_a_format_has_a_note_with_the_row(write_rows, own_format, name, error, says):
    with pytest.raises(error, match=says):
        FileDataset(write_rows(NESTED), format=f"{own_format}:{name}")


def test_a_format_must_be_in_a_file(write_rows):
    with pytest.raises(ValueError, match=r"^data\.format vqa: unknown format 'vqa'; known names are: file\.py:name"):
        FileDataset(write_rows(NESTED), format="vqa")


PAIR = {"messages": [HI, YES]}
SHOWN = {"image": "red.png"}
DROPPED = [  # each row says something that a run of SFT would not follow: (row, its name in the error or in the note)
    *[(PAIR | {name: value}, name) for name, value in {
        "tools": [{"type": "function", "function": {"name": "zoom"}}], "functions": "[]x", "tool_choice": "auto",
        "chat_template_kwargs": {"enable_thinking": False}, "enable_thinking": True, "chat_template": "{{ x }}",
        "loss_mask": [0, 1], "loss": False, "train": False, "loss_weight": 0.5, "weight": 2, "sample_weight": 0,
        "completion_mask": [0, 1], "assistant_masks": [1], "labels": [-100, 3], "input_ids": [1, 2], "segments": [{}],
        "audios": ["a.wav"], "audio": "a.wav", "rejected_images": ["red.png"], "positive": "a", "documents": ["a"],
        "teacher_prompt": "a", "prefill": "Well, ", "rejected_response": "no", "kto_tag": False,
        "reward_model": {"ground_truth": "x"}, "options": ["a", "b"], "choices": ["a", "b"], "history": [["a", "b"]],
        "response": "c", "output": "c", "screenshot": "blue.png", "thumbnail": "https://a.b/c.png", "px": {"x": "a"},
        "solution": "x", "label": False, "chosen": "x", "hint": "look", "quality": 0.1, "answer_extent": [4, 4],
    }.items()],
    (PAIR | {"A": "one", "B": "two"}, "A"),
    (PAIR | SHOWN | {"images": ["red.png"]}, "images"),
    ({"messages": [user("<image 1> or <image 2>?"), YES], "images": ["red.png", "blue.png"]}, "<image 1>"),
    ({"messages": [user("<IMAGE>?"), YES]} | SHOWN, "<IMAGE>"),
    ({"messages": [HI, YES | {"end_turn": False}]}, "end_turn"),
    ({"messages": [HI, YES | {"function_call": {"name": "zoom"}}]}, "function_call"),
    ({"messages": [HI, YES | {"audio": {"id": "a"}}]}, "audio"),
    ({"messages": [HI, YES | {"prefix": True}]}, "prefix"),
    ({"messages": [HI | {"images": ["red.png"]}, YES]}, "images"),
    ({"messages": [system("a") | {"cache": True}, HI, YES]}, "cache"),
    ({"messages": [user([text("a") | {"annotations": ["b"]}]), YES]}, "annotations"),
    ({"messages": [user([IMAGE_PART | {"image": "red.png", "alt": "a cat"}]), YES]}, "alt"),
    ({"messages": [user([IMAGE_PART | {"image": "red.png", "text": "a cat"}]), YES]}, "a cat"),
    ({"messages": [user([{"type": "video", "video": ["red.png"], "fsp": 2}]), YES]}, "fsp"),
    ({"messages": [HI, YES | {"content": None, "tool_calls": [{"function": {"name": "a"}, "result": 3}]}]}, "result"),
    (PAIR | {"image": {"image": "red.png", "crop": [1, 2, 3, 4]}}, "crop"),
    (PAIR | {"image": {"bytes": None, "path": "red.png", "sha256": "a"}}, "sha256"),
    (PAIR | {"system": ["a"]}, "system"),
    ({"problem": "<|im_start|>user\nHi<|im_end|>", "completion": "yes"}, "template"),
    ({"problem": "<img>red.png</img>Hi", "completion": "yes"}, "<img>"),
    ({"problem": "Hi", "prompt": "Ho", "completion": "yes"}, "prompt"),
]  # fmt: skip


@pytest.mark.parametrize(("row", "name"), DROPPED, ids=lambda value: str(value)[:50])
def test_nothing_is_dropped_in_silence(write_rows, row, name):
    """An error or the note of the run names each column and each key that nothing reads."""
    try:
        rows = FileDataset(write_rows(row), ("problem", "completion"), reads=())
    except ValueError as error:
        assert name in str(error).partition("rows.jsonl:1: ")[2]
    else:
        assert rows.unread == [name]


def test_what_a_stage_or_a_reward_reads_is_kept(write_rows):
    row = {"problem": "a", "tools": "saw", "level": 1, "options": ["b"], "tags": [], "id": 3}
    options = {"reads": ("tools", "level"), "columns": {"options": "options"}}
    rows = FileDataset(write_rows(row), ("problem",), **options)
    assert rows[0].columns == row and rows.unread == ["id", "tags"]
    assert FileDataset(write_rows(row | {"tools": None, "options": None})).unread == []
    labelled = write_rows({"problem": "a", "completion": "b", "label": False})
    assert FileDataset(labelled).unread == FileDataset(labelled, reads=("label", "completion")).unread == []
