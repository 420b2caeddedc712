"""JSON lines: what a row becomes, and that every mistake is named with its file and line."""

import itertools
import json
import re
import signal

import PIL.Image
import pytest

from minivlmrl.data.boxes import SPACES
from minivlmrl.data.conversations import split_at_media
from minivlmrl.rows import JsonLines
from minivlmrl.run import config as config_file
from minivlmrl.run.batches import TASKS, TOKENIZERS, chance, load_datasets, shuffled
from minivlmrl.run.config import DataSection
from minivlmrl.tasks import localisation

IMAGE_PART = {"type": "image"}


def text(words):
    return {"type": "text", "text": words}


def user(content):
    return {"role": "user", "content": content}


def assistant(content):
    return {"role": "assistant", "content": content}


def system(content):
    return {"role": "system", "content": content}


@pytest.fixture
def write(tmp_path):
    """Write rows (objects, or lines as they are) beside three one-colour images; returns the file."""
    for name, color in (("red", (255, 0, 0)), ("green", (0, 255, 0)), ("blue", (0, 0, 255))):
        PIL.Image.new("RGB", (4, 4), color).save(tmp_path / f"{name}.png")

    def write(*rows):
        lines = [row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows]
        (tmp_path / "rows.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        return tmp_path / "rows.jsonl"

    return write


def test_a_row_becomes_messages_images_and_columns(write):
    row = JsonLines(write({"problem": "What?", "image": "red.png", "solution": "a square", "level": 3}))[0]
    assert row.messages == [{"role": "user", "content": [IMAGE_PART, text("What?")]}]
    assert [image.getpixel((0, 0)) for image in row.images] == [(255, 0, 0)]
    assert row.columns == {"problem": "What?", "image": "red.png", "solution": "a square", "level": 3}
    assert row.completion is None


def test_images_stand_where_the_problem_says(write):
    rows = JsonLines(write({"problem": "Is <image> in <image>?", "images": ["blue.png", "green.png"]}))
    content = [text("Is "), IMAGE_PART, text(" in "), IMAGE_PART, text("?")]
    assert rows[0].messages == [{"role": "user", "content": content}]
    assert [image.getpixel((0, 0)) for image in rows[0].images] == [(0, 0, 255), (0, 255, 0)]


def test_images_without_placeholders_come_first(write):
    rows = JsonLines(write({"problem": "Which?", "images": ["blue.png", "green.png"]}))
    assert rows[0].messages[0]["content"] == [IMAGE_PART, IMAGE_PART, text("Which?")]


def test_a_text_only_row(write):
    row = JsonLines(write({"problem": "1 + 1?"}))[0]
    assert row.messages == [{"role": "user", "content": [text("1 + 1?")]}]
    assert row.images == []


def test_a_demonstration_has_its_completion(write):
    assert JsonLines(write({"problem": "?", "completion": "two"}), ("problem", "completion"))[0].completion == "two"


def test_prompt_template_and_system_prompt(write):
    file = write({"problem": "What is {x}?", "image": "red.png"})
    row = JsonLines(file, prompt_template="Look: <image> {problem} Think.", system_prompt="Be brief.")[0]
    assert row.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [text("Look: "), IMAGE_PART, text(" What is {x}? Think.")]},
    ]


def test_rows_need_not_have_the_same_columns(write):
    rows = JsonLines(write({"problem": "a", "level": 1}, {"problem": "b", "hint": "c"}))
    assert rows[0].columns == {"problem": "a", "level": 1, "hint": None}
    assert rows[1].columns == {"problem": "b", "level": None, "hint": "c"}


def test_blank_lines_are_skipped_but_counted(write):
    file = write({"problem": "a"}, "", "   ", {"problem": "b"}, "oops")
    with pytest.raises(ValueError, match=r"rows\.jsonl:5: not JSON"):
        JsonLines(file)
    assert len(JsonLines(write({"problem": "a"}, "", {"problem": "b"}))) == 2


def test_half_a_surrogate_pair_is_no_text(write):
    """JSON may spell it, but no tokenizer takes it."""
    with pytest.raises(ValueError, match=r"rows\.jsonl:1: not JSON \(.*surrogates not allowed"):
        JsonLines(write('{"problem": "a\\ud83d"}'))
    assert JsonLines(write('{"problem": "\\ud83d\\ude00"}'))[0].columns["problem"] == "😀"


@pytest.mark.parametrize("character", ["\u2028", "\u0085", "\u2029"])
def test_a_unicode_line_separator_inside_a_string_ends_no_row(write, character):
    assert JsonLines(write({"problem": f"a{character}b"}))[0].columns["problem"] == f"a{character}b"


def test_windows_line_ends(tmp_path):
    (tmp_path / "rows.jsonl").write_bytes(b'{"problem": "a"}\r\n{"problem": "b"}\r\n')
    assert [JsonLines(tmp_path / "rows.jsonl")[i].columns["problem"] for i in (0, 1)] == ["a", "b"]


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"rows\.jsonl: no such file"):
        JsonLines(tmp_path / "rows.jsonl")


@pytest.mark.parametrize("lines", [[], [""], ["", "  "]])
def test_an_empty_file_is_named(write, lines):
    with pytest.raises(ValueError, match=r"rows\.jsonl: has no rows"):
        JsonLines(write(*lines))


def test_a_file_that_is_not_utf8_is_named(tmp_path):
    (tmp_path / "rows.jsonl").write_bytes(b'{"problem": "caf\xe9"}\n')
    with pytest.raises(ValueError, match=r"rows\.jsonl"):
        JsonLines(tmp_path / "rows.jsonl")


def test_a_line_that_is_no_json_is_named(write):
    with pytest.raises(ValueError, match=r"rows\.jsonl:2: not JSON"):
        JsonLines(write({"problem": "a"}, "{'problem': 'b'}"))


@pytest.mark.parametrize("line", ["[1, 2]", '"text"', "3", "null"])
def test_a_line_that_is_no_object_is_named(write, line):
    with pytest.raises(ValueError, match=r"rows\.jsonl:1: a row must be an object"):
        JsonLines(write(line))


@pytest.mark.parametrize("row", [{"problem": "a"}, {"problem": "a", "solution": None}])
def test_a_missing_column_is_named_with_its_line(write, row):
    file = write({"problem": "a", "solution": "b"}, row)
    with pytest.raises(ValueError, match=r"rows\.jsonl:2: column 'solution' is missing; the row has \['problem'"):
        JsonLines(file, ("problem", "solution"))


@pytest.mark.parametrize("row", [{"problem": 3}, {"problem": ["a"]}, {"problem": "a", "image": 3}])
def test_a_column_of_the_wrong_type_is_named_with_its_line(write, row):
    with pytest.raises(ValueError, match=r"rows\.jsonl:1"):
        JsonLines(write(row))[0]


def test_images_null_does_not_hide_image(write):
    assert len(JsonLines(write({"problem": "a", "images": None, "image": "red.png"}))[0].images) == 1


def test_a_missing_image_is_named_with_its_row(write):
    rows = JsonLines(write({"problem": "a"}, {"problem": "b", "image": "gone.png"}))
    with pytest.raises(ValueError, match=r"rows\.jsonl:2: .*gone\.png: cannot be read as an image"):
        rows[1]


def test_a_broken_image_is_named_with_its_row(write, tmp_path):
    (tmp_path / "cut.png").write_bytes((tmp_path / "red.png").read_bytes()[:40])
    with pytest.raises(ValueError, match=r"rows\.jsonl:1: .*cut\.png: cannot be read as an image"):
        JsonLines(write({"problem": "a", "image": "cut.png"}))[0]


@pytest.mark.parametrize(
    ("problem", "images"), [("<image>", []), ("<image> <image>", ["red.png"]), ("<image>?", ["red.png"] * 2)]
)
def test_other_placeholders_than_images_are_named_with_their_row(write, problem, images):
    """When the file is read, long before the row's turn in training comes."""
    message = r"rows\.jsonl:1: column 'problem': the prompt has \d <image> placeholder\(s\) but \d image"
    with pytest.raises(ValueError, match=message):
        JsonLines(write({"problem": problem, "images": images}))


def test_a_prompt_of_text_is_a_problem(write):
    options = {"prompt_template": "Look: <image> {problem}", "system_prompt": "Be brief."}
    file = write({"prompt": "What?", "image": "red.png"}, {"problem": "What?", "image": "red.png"})
    rows = JsonLines(file, **options)
    assert rows[0].messages == rows[1].messages
    assert rows[0].messages[1] == user([text("Look: "), IMAGE_PART, text(" What?")])


def test_a_prompt_of_turns_is_taken_as_it_is(write):
    turns = [user("one"), assistant("two"), user([text("th"), text("ree")]), {"role": "tool", "content": "4"}]
    row = JsonLines(write({"prompt": turns, "level": 1}), prompt_template="Look: {problem}")[0]
    assert as_parts(row.messages) == as_parts(turns)
    assert row.columns == {"prompt": turns, "level": 1}
    assert (row.completion, row.chosen, row.rejected) == (None, None, None)


def as_parts(turns):
    return [
        {**turn, "content": [text(turn["content"])] if isinstance(turn["content"], str) else turn["content"]}
        for turn in turns
    ]


@pytest.mark.parametrize(
    ("prompt", "first"),
    [([user("hi")], system("Be brief.")), ([system([text("Own.")]), user("hi")], system([text("Own.")]))],
)
def test_a_system_prompt_stands_before_turns_without_one(write, prompt, first):
    messages = JsonLines(write({"prompt": prompt}), system_prompt="Be brief.")[0].messages
    assert messages == [first, user([text("hi")])]
    kept = JsonLines(write({"prompt": prompt}))[0].messages
    assert [turn["role"] for turn in kept] == [turn["role"] for turn in prompt]


@pytest.mark.parametrize("answer", ["two", [assistant("two")], [assistant([text("two")]), user("?"), assistant("2")]])
def test_answers_are_text_or_turns(write, answer):
    file = write({"prompt": "?", "completion": answer, "chosen": answer, "rejected": "one"})
    row = JsonLines(file, ("problem", "completion", "chosen", "rejected"))[0]
    assert (row.completion, row.chosen, row.rejected) == (answer, answer, "one")


def test_a_conversation_is_cut_at_its_first_assistant_turn(write):
    turns = [system("Be brief."), user("one"), assistant("two"), user("three"), assistant("four")]
    row = JsonLines(
        write({"messages": turns}),
        ("problem", "completion"),
        prompt_template="Look: {problem}",
        system_prompt="Unused.",
    )[0]
    assert row.messages == as_parts(turns[:2])
    assert row.completion == turns[2:]
    assert row.columns == {"messages": turns}


def test_a_conversation_that_the_assistant_begins(write):
    row = JsonLines(write({"messages": [assistant("Hello")]}))[0]
    assert (row.messages, row.completion) == ([], [assistant("Hello")])


def test_a_conversation_may_have_preferences_for_its_first_answer(write):
    row = JsonLines(write({"messages": [user("1"), assistant("2")], "chosen": "2", "rejected": "3"}))[0]
    assert (row.completion, row.chosen, row.rejected) == ([assistant("2")], "2", "3")


def test_the_turns_that_chosen_and_rejected_share_are_the_prompt(write):
    shared = [user("one"), assistant("two"), user("three")]
    chosen, rejected = [assistant("four")], [assistant("5"), user("?"), assistant("6")]
    row = JsonLines(write({"chosen": shared + chosen, "rejected": shared + rejected}), ("problem", "chosen"))[0]
    assert row.messages == as_parts(shared)
    assert (row.completion, row.chosen, row.rejected) == (None, chosen, rejected)


def test_the_implicit_prompt_is_trls(write):
    data_utils = pytest.importorskip("trl.data_utils", reason="oracle missing: pip install trl==1.16.0")
    shared = [system("Be brief."), user("one"), assistant("two"), user("three")]
    example = {"chosen": [*shared, assistant("four")], "rejected": [*shared, assistant("5"), user("?"), assistant("6")]}
    row = JsonLines(write(example))[0]
    expected = data_utils.extract_prompt(example)
    assert (row.chosen, row.rejected) == (expected["chosen"], expected["rejected"])
    assert row.messages == as_parts(expected["prompt"])


def test_null_is_a_missing_column(write):
    row = JsonLines(write({"problem": None, "prompt": "a", "messages": None, "completion": None}))[0]
    assert (row.messages, row.completion) == ([user([text("a")])], None)


PLACED = {
    "image parts": (
        [user([text("Is "), IMAGE_PART]), assistant("Yes, <image>"), user([IMAGE_PART, text("<image>?")])],
        [user([text("Is "), IMAGE_PART]), assistant("Yes, <image>"), user([IMAGE_PART, text("<image>?")])],
    ),
    "placeholders": (
        [system("s"), user("Is <image>"), assistant("Yes"), user([text("this"), text("<image>?")])],
        [
            system([text("s")]),
            user([text("Is "), IMAGE_PART, text("")]),
            assistant([text("Yes")]),
            user([text("this"), text(""), IMAGE_PART, text("?")]),
        ],
    ),
    "neither": (
        [system("s"), user("one"), assistant("two"), user("three")],
        [
            system([text("s")]),
            user([IMAGE_PART, IMAGE_PART, text("one")]),
            assistant([text("two")]),
            user([text("three")]),
        ],
    ),
    "neither, in parts": (
        [user([text("one"), text("two")])],
        [user([IMAGE_PART, IMAGE_PART, text("one"), text("two")])],
    ),
}


@pytest.mark.parametrize("form", ["prompt", "messages", "chosen"])
@pytest.mark.parametrize("name", PLACED)
def test_images_in_a_conversation(write, name, form):
    turns, placed = PLACED[name]
    if form == "messages":  # the first assistant turn ends its prompt
        turns, placed = (
            [turn for turn in turns if turn["role"] != "assistant"],
            [turn for turn in placed if turn["role"] != "assistant"],
        )
    row = {
        "prompt": {"prompt": turns},
        "messages": {"messages": [*turns, assistant("a")]},
        "chosen": {"chosen": [*turns, assistant("a")], "rejected": [*turns, assistant("b")]},
    }[form]
    row = JsonLines(write({**row, "images": ["blue.png", "green.png"]}))[0]
    assert row.messages == placed
    assert [image.getpixel((0, 0)) for image in row.images] == [(0, 0, 255), (0, 255, 0)]


def test_images_without_a_place_stand_where_trl_puts_them(write):
    data_utils = pytest.importorskip("trl.data_utils", reason="oracle missing: pip install trl==1.16.0")
    turns, _ = PLACED["neither"]
    expected = data_utils.prepare_multimodal_messages(turns, images=["blue.png", "green.png"])
    for turn in expected:
        turn["content"] = [IMAGE_PART if part["type"] == "image" else part for part in turn["content"]]
    assert JsonLines(write({"prompt": turns, "images": ["blue.png", "green.png"]}))[0].messages == expected


HI, YES = user("hi"), assistant("yes")
COUNT = "but {} image(s) came with it; put one where each image belongs and name as many images"
MISTAKES = [
    ({"problem": 3}, "column 'problem': must be text, it is 3"),
    ({"problem": [HI]}, "column 'problem': must be text, it is [{'role'"),
    ({"prompt": 3}, "column 'prompt': must be text or a list of turns, it is 3"),
    ({"messages": "hi"}, "column 'messages': must be a list of turns, it is 'hi'"),
    ({"prompt": []}, "column 'prompt': needs turns with the roles system, user, assistant, tool; it has []"),
    ({"messages": []}, "column 'messages': needs turns with the roles system, user, assistant, tool; it has []"),
    ({"prompt": [{"role": "human", "content": "hi"}]}, "column 'prompt': needs turns with the roles system, user, as"),
    ({"prompt": ["hi"]}, "column 'prompt': message 0 needs a role, and content that is text or a list of parts: 'hi'"),
    ({"prompt": [HI, {"role": "user"}]}, "column 'prompt': message 1 needs a role, and content that is text or a li"),
    ({"prompt": [{"content": "hi"}]}, "column 'prompt': message 0 needs a role, and content that is text or a list"),
    ({"prompt": [user(3)]}, "column 'prompt': message 0 needs a role, and content that is text or a list of parts"),
    ({"prompt": [user([{"type": "audio"}])]}, "column 'prompt': message 0 has a part of type 'audio'; text, image"),
    ({"prompt": [user([{"type": "video"}])]}, "column 'prompt': the prompt has 1 video part(s) but 0 video(s) came"),
    ({"messages": [HI, {"role": "assistant"}]}, "column 'messages': message 1 needs a role, and content that is"),
    ({"prompt": [HI, YES]}, "column 'prompt': the prompt ends with an assistant turn; move that turn into the answers"),
    ({"problem": "a", "prompt": "a"}, "columns 'problem' and 'prompt' say the same thing twice; keep one of them"),
    ({"problem": "a", "messages": [HI, YES]}, "columns 'problem' and 'messages' say the same thing twice; keep one"),
    ({"prompt": "a", "messages": [HI, YES]}, "columns 'prompt' and 'messages' say the same thing twice; keep one"),
    ({"messages": [HI, YES], "completion": "a"}, "columns 'messages' and 'completion' say the same thing twice; keep"),
    ({"messages": [HI]}, "column 'messages' must end with an assistant turn; cut it there, or call the column prompt"),
    ({"messages": [HI, YES, HI]}, "column 'messages' must end with an assistant turn; cut it there, or call the col"),
    ({"messages": [HI, assistant(" ")]}, "column 'messages': an answer is empty or blank"),
    ({"messages": [HI, YES, user([IMAGE_PART]), YES]}, "column 'messages': there is an image in or after the assista"),
    ({"messages": [HI, YES, user("<image>?"), YES]}, "column 'messages': there is <image> after the assistant's firs"),
    ({"solution": "a"}, "column 'problem' is missing; the row has ['solution']: give it a problem, a prompt or messag"),
    ({"chosen": "a", "rejected": "b"}, "column 'problem' is missing; the row has ['chosen', 'rejected']: give it a"),
    ({"chosen": [YES], "rejected": [assistant("no")]}, "column 'problem' is missing; the row has ['chosen', 'rejecte"),
    ({"chosen": [HI, YES]}, "column 'problem' is missing; the row has ['chosen']"),
    ({"chosen": [HI, YES], "rejected": [user("ho"), YES]}, "column 'problem' is missing; the row has ['chosen', 'rej"),
    ({"chosen": [HI, YES], "rejected": [HI, HI, YES]}, "column 'rejected' must go on with an assistant turn after t"),
    ({"chosen": [HI, YES], "rejected": [HI, YES, HI, YES]}, "column 'chosen' must go on with an assistant turn after"),
    ({"chosen": [HI, YES, YES], "rejected": [HI, YES, assistant("no")]}, "column 'chosen': the prompt ends with an as"),
    ({"chosen": [HI, YES], "rejected": [HI, YES]}, "column 'rejected' equals column 'chosen': there is no preference"),
    ({"prompt": "a", "chosen": "b", "rejected": "b"}, "column 'rejected' equals column 'chosen': there is no prefer"),
    ({"prompt": "a", "chosen": "yes", "rejected": [YES]}, "column 'rejected' equals column 'chosen': there is no pre"),
    (
        {"prompt": "a", "chosen": [YES], "rejected": [assistant([text("y"), text("es")])]},
        "column 'rejected' equals column 'chosen': there is no preference to learn; drop the row",
    ),
    ({"prompt": [user([IMAGE_PART])]}, "column 'prompt': the prompt has 1 image part(s) " + COUNT.format(0)),
    (
        {"prompt": [user([IMAGE_PART]), YES, HI], "images": ["red.png"] * 2},
        "column 'prompt': the prompt has 1 image part(s) " + COUNT.format(2),
    ),
    (
        {"messages": [user("<image><image>"), YES], "image": "red.png"},
        "column 'messages': the prompt has 2 <image> placeholder(s) " + COUNT.format(1),
    ),
    ({"prompt": [user("<image>")]}, "column 'prompt': the prompt has 1 <image> placeholder(s) " + COUNT.format(0)),
    (
        {"messages": [system("s"), YES], "image": "red.png"},
        "column 'messages': the prompt has no user turn that could show the row's 1 image(s); add one",
    ),
    ({"problem": "a", "image": 3}, "column 'image': each image must be a path, URL or data URI; one is 3"),
    ({"problem": "a", "images": ["a", {"max_pixels": 9}]}, "column 'images': each image must be a path, URL or data"),
    ({"problem": "a", "video": []}, "column 'video': each video must be a path, URL or data URI, or a list of those"),
    ({"problem": "a", "image": "a", "images": ["a"]}, "give column 'image' or 'images', not both"),
    (
        {"problem": "a", "images": [{"image": "a", "fps": 1}]},
        "column 'images': 'fps' is not an option of images; known",
    ),
    ({"problem": "a", "image": {"image": "a", "max_pixels": "9"}}, "column 'image': max_pixels is '9', it must be a n"),
    ({"problem": "a", "image": {"image": "a", "resized_width": 9}}, "column 'image': resized_height and resized_width"),
    ({"problem": "<video> <image>", "image": "a"}, "column 'problem': the prompt has 1 <video> placeholder(s) but 0 v"),
    ({"prompt": [user([{"type": "image", "image": 3}])]}, "message 0: each image must be a path, URL or data URI; one"),
]
BAD_ANSWERS = [
    (3, "must be text or a list of turns, it is 3"),
    ({"role": "assistant"}, "must be text or a list of turns, it is {'role'"),
    ("", "an answer is empty or blank, and would teach to say nothing; write it or drop the row"),
    (" \n\t", "an answer is empty or blank"),
    ([assistant("")], "an answer is empty or blank"),
    ([assistant([])], "an answer is empty or blank"),
    ([assistant([text(" "), text("\n")])], "an answer is empty or blank"),
    ([YES, HI, assistant(" ")], "an answer is empty or blank"),
    ([], "needs turns with the roles system, user, assistant, tool; it has []"),
    ([HI, YES], "turns must begin and end with an assistant turn; their roles are ['user', 'assistant']"),
    ([YES, HI], "turns must begin and end with an assistant turn; their roles are ['assistant', 'user']"),
    ([{"role": "assistant"}], "message 0 needs a role, and content that is text or a list of parts"),
    ([YES, {"content": "hi"}, YES], "message 1 needs a role, and content that is text or a list of parts"),
    ([YES, {"role": "human", "content": "hi"}, YES], "needs turns with the roles system, user, assistant, tool; it"),
    ([assistant([IMAGE_PART])], "there is an image in or after the assistant's first turn; images belong into the p"),
    ([YES, user([IMAGE_PART]), YES], "there is an image in or after the assistant's first turn; images belong"),
    ([YES, user("<image>"), YES], "there is <image> after the assistant's first turn; images belong into the prompt"),
]
MISTAKES += [
    ({"problem": "a", column: answer}, f"column '{column}': {message}")
    for column in ("completion", "chosen", "rejected")
    for answer, message in BAD_ANSWERS
]


MISTAKES += [
    ({"problem": "a", "margin": margin}, "column 'margin' must be a number, by how much chosen is better; it is")
    for margin in ("1", True, [1])
]


@pytest.mark.parametrize("label", ["yes", 1, 0.0, [True]])
def test_a_label_is_true_or_false(write, label):
    """TRL's unpaired form; where no stage asks for it, a column of this name may hold anything."""
    row = {"prompt": "a", "completion": "b", "label": label}
    with pytest.raises(ValueError, match=r"rows\.jsonl:1: column 'label' must be true or false, .* it is "):
        JsonLines(write(row), ("problem", "completion", "label"))
    assert JsonLines(write(row))[0].columns["label"] == label
    for label in (True, False):
        rows = JsonLines(write(row | {"label": label}), ("problem", "completion", "label"))
        assert rows[0].columns["label"] is label
    with pytest.raises(ValueError, match=r"rows\.jsonl:1: column 'label' is missing"):
        JsonLines(write(row | {"label": None}), ("problem", "completion", "label"))


@pytest.mark.parametrize(("row", "message"), MISTAKES)
def test_a_mistake_is_named_when_the_file_is_read(write, row, message):
    with pytest.raises(ValueError, match=r"rows\.jsonl:2: " + re.escape(message)):
        JsonLines(write({"problem": "a"}, row))


def test_a_user_of_a_completion_may_be_silent(write):
    turns = [assistant("a"), user(""), assistant("b")]
    assert JsonLines(write({"problem": "?", "completion": turns}))[0].completion == turns


def test_an_answer_may_speak_of_images(write):
    assert JsonLines(write({"problem": "Tag?", "completion": "<image>"}))[0].completion == "<image>"


FORMS = {
    "problem": {"problem": "a"},
    "prompt": {"prompt": [HI]},
    "messages": {"messages": [HI, YES]},
    "implicit": {"chosen": [HI, YES], "rejected": [HI, assistant("no")]},
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_prompt_is_a_problem(write, form):
    assert len(JsonLines(write(FORMS[form]), ("problem",))) == 1


@pytest.mark.parametrize("form", ["problem", "prompt", "implicit"])
def test_a_prompt_is_no_completion(write, form):
    with pytest.raises(ValueError, match=r"rows\.jsonl:1: column 'completion' is missing; the row has \['"):
        JsonLines(write(FORMS[form]), ("problem", "completion"))
    assert len(JsonLines(write(FORMS["messages"]), ("problem", "completion"))) == 1


@pytest.mark.parametrize("column", ["chosen", "rejected"])
def test_preferences_can_be_required(write, column):
    row = {"prompt": "a", "chosen": "b", "rejected": "c"}
    assert len(JsonLines(write(row), ("problem", "chosen", "rejected"))) == 1
    with pytest.raises(ValueError, match=rf"rows\.jsonl:1: column '{column}' is missing; the row has \['"):
        JsonLines(write({**row, column: None}), ("problem", "chosen", "rejected"))


def test_a_row_needs_a_prompt_whatever_is_required(write):
    with pytest.raises(ValueError, match=r"rows\.jsonl:1: column 'problem' is missing"):
        JsonLines(write({"solution": "a"}), ())


def test_splitting_at_images_keeps_the_text_around():
    assert split_at_media("a<image>", {"image": 1}) == [text("a"), IMAGE_PART, text("")]
    assert split_at_media("", {}) == [text("")]


@pytest.mark.parametrize(("size", "per_step"), [(10, 5), (10, 3), (3, 7), (1, 4)])
def test_every_pass_visits_every_row_once(size, per_step):
    numbers = list(itertools.chain(*itertools.islice(shuffled(size, per_step, seed=0), 4 * size)))
    assert len(numbers) == 4 * size * per_step
    for start in range(0, len(numbers), size):
        assert sorted(numbers[start : start + size]) == list(range(size))


def test_passes_differ_in_order():
    first, second = itertools.islice(shuffled(50, 50, seed=0), 2)
    assert first != second


def test_shuffled_is_seeded():
    def first(seed):
        return list(itertools.islice(shuffled(50, 7, seed), 20))

    assert first(0) == first(0)
    assert first(0) != first(1)


def test_shuffling_no_rows_is_refused():
    def stop(*_):
        raise TimeoutError("still searching")

    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        with pytest.raises(ValueError):
            next(shuffled(0, 1, seed=0))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def test_each_stage_asks_for_its_columns(write):
    file = str(write({"problem": "a", "solution": "b"}))
    assert set(load_datasets(DataSection(train_file=file), {"grpo": "prompts"}, 0, ["solution"])) == {"grpo"}
    with pytest.raises(ValueError, match=r"rows\.jsonl:1: column 'completion' is missing"):
        load_datasets(DataSection(train_file=file), {"sft": "demonstrations"}, 0)
    with pytest.raises(ValueError, match=r"rows\.jsonl:1: column 'hint' is missing"):
        load_datasets(DataSection(train_file=file), {"grpo": "prompts"}, 0, ["hint"])


def test_an_eval_file_needs_solutions(write):
    file = str(write({"problem": "a", "completion": "b"}))
    with pytest.raises(ValueError, match=r"rows\.jsonl:1: column 'solution' is missing"):
        load_datasets(DataSection(train_file=file, eval_file=file), {"sft": "demonstrations"}, 0)


def test_urls_of_a_file_are_fetched_when_the_run_allows_it(write):
    file = str(write({"problem": "a", "solution": "b", "image": "http://localhost:9/a.png"}))
    for allow_urls, says in ((False, "data.allow_urls"), (True, "cannot be downloaded")):
        data = DataSection(train_file=file, eval_file=file, allow_urls=allow_urls)
        for rows in load_datasets(data, {"grpo": "prompts"}, 0).values():
            with pytest.raises(ValueError, match=rf"rows\.jsonl:1: http://localhost:9/a\.png: .*{says}"):
                rows[0]


def test_eval_rows_bounds_an_eval_file(write):
    file = str(write({"problem": "a", "solution": "b"}, {"problem": "c", "solution": "d"}))
    datasets = load_datasets(
        DataSection(train_file=file, eval_file=file, eval_rows=1), {"grpo": "prompts"}, 0, ["solution"]
    )
    assert (len(datasets["grpo"]), len(datasets["eval"])) == (2, 1)


@pytest.mark.parametrize("data", [DataSection(), DataSection(task="shapes", train_file="rows.jsonl")])
def test_either_a_task_or_a_file(data):
    with pytest.raises(ValueError, match=r"set either data\.task .* or data\.train_file"):
        load_datasets(data, {"grpo": "prompts"}, 0)


def test_an_unknown_task_is_named():
    with pytest.raises(ValueError, match=r"data\.task is 'counting'; embedded tasks are shapes, localisation"):
        load_datasets(DataSection(task="counting"), {"grpo": "prompts"}, 0)


@pytest.mark.parametrize(("stage", "needs"), [("dpo", "pairs"), ("reward_model", "pairs")])
def test_a_stage_that_the_task_has_no_rows_for_is_refused(stage, needs):
    with pytest.raises(
        ValueError, match=rf"stages: {stage} needs {needs}, which data\.task localisation does not have"
    ):
        load_datasets(DataSection(task="localisation"), {"sft": "demonstrations", stage: needs}, 0)


def test_rows_of_the_localisation_task():
    """Only demonstrations are noisy; stages do not share pictures; what is held out does not depend on the seed."""
    config = DataSection(task="localisation", demonstrations=5, eval_rows=7, jitter=7, wrong_demonstrations=1.0)
    stages = {"sft": "demonstrations", "grpo": "prompts"}
    one, two = (load_datasets(config, stages, seed) for seed in (0, 1))
    assert {name: len(rows) for name, rows in one.items()} == {"sft": 5, "grpo": 1_000_000, "eval": 7}
    demonstrated, wanted = ([one[name][i] for i in range(5)] for name in ("sft", "grpo"))
    assert all(row.completion != localisation.answer(*truth(row)) for row in demonstrated)
    assert all(row.completion == localisation.answer(*truth(row)) for row in wanted)
    pictures = {name: [rows[i].images[0].tobytes() for i in range(5)] for name, rows in one.items()}
    assert not set(pictures["sft"]) & set(pictures["grpo"])
    assert [two["eval"][i].images[0].tobytes() for i in range(5)] == pictures["eval"]
    assert two["sft"][0].images[0].tobytes() not in pictures["sft"]


def truth(row):
    """Name and box, in units, of a localisation row."""
    return row.columns["problem"].removeprefix("box the "), [v // localisation.UNIT for v in row.columns["solution"]]


def test_each_embedded_task_has_a_tokenizer():
    assert set(TASKS) == set(TOKENIZERS)


def test_chance_is_that_of_an_embedded_task():
    """A random label's accuracy, or the best constant box's mean IoU over the held-out rows."""
    assert chance(DataSection(task="shapes"), None) == 1 / 12
    assert chance(DataSection(train_file="rows.jsonl"), None) is None
    few, more = (localisation.Localisation(size, "test") for size in (1, 30))
    assert chance(DataSection(task="localisation"), few) == 1.0  # the box itself
    assert chance(DataSection(task="localisation"), more) == localisation.constant_box(more)[1]


# columns that every row gets


def test_constants_fill_in_what_a_row_does_not_have(write):
    file = write({"problem": "a", "box_space": "unit"}, {"problem": "b"})
    rows = JsonLines(file, constants={"box_space": "thousandths", "level": 3})
    assert [(rows[i].columns["box_space"], rows[i].columns["level"]) for i in (0, 1)] == [
        ("unit", 3),
        ("thousandths", 3),
    ]
    assert "level" not in JsonLines(file)[0].columns


def test_constants_fill_in_for_null(write):
    """Tables written as JSON lines have every column in every row."""
    rows = JsonLines(write({"problem": "a", "box_space": None}), constants={"box_space": "thousandths"})
    assert rows[0].columns["box_space"] == "thousandths"


def test_constants_do_not_stand_for_a_missing_column(write):
    with pytest.raises(ValueError, match=r"rows\.jsonl:1: column 'solution' is missing"):
        JsonLines(write({"problem": "a"}), ("problem", "solution"), constants={"solution": "b"})


@pytest.mark.parametrize("space", SPACES)
def test_rows_of_a_file_say_what_space_their_boxes_are_in(write, space):
    file = str(write({"problem": "a", "solution": [1, 2, 3, 4]}))
    config = DataSection(train_file=file, eval_file=file, box_space=space)
    datasets = load_datasets(config, {"grpo": "prompts"}, 0, ["solution"])
    assert [datasets[name][0].columns["box_space"] for name in ("grpo", "eval")] == [space, space]


def test_the_config_knows_all_spaces():
    assert config_file.SPACES == SPACES
