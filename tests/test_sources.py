"""JSON lines: what a row becomes, and that every mistake is named with its file and line."""

import itertools
import json
import signal

import PIL.Image
import pytest

from minivlmrl.config import DataSection
from minivlmrl.data.datasets import chance, load_datasets
from minivlmrl.data.sources import JsonLines, place_images, shuffled

IMAGE_PART = {"type": "image"}


def text(words):
    return {"type": "text", "text": words}


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
    rows = JsonLines(write({"problem": problem, "images": images}))
    with pytest.raises(ValueError, match=r"rows\.jsonl:1: the problem has \d <image> placeholder\(s\) but the row has"):
        rows[0]


def test_place_images_keeps_the_text_around():
    assert place_images("a<image>", 1) == [text("a"), IMAGE_PART, text("")]
    assert place_images("", 0) == [text("")]


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
    assert set(load_datasets(DataSection(train_file=file), ["grpo"], 0, ["solution"])) == {"grpo"}
    with pytest.raises(ValueError, match=r"rows\.jsonl:1: column 'completion' is missing"):
        load_datasets(DataSection(train_file=file), ["sft"], 0)
    with pytest.raises(ValueError, match=r"rows\.jsonl:1: column 'hint' is missing"):
        load_datasets(DataSection(train_file=file), ["grpo"], 0, ["hint"])


def test_an_eval_file_needs_solutions(write):
    file = str(write({"problem": "a", "completion": "b"}))
    with pytest.raises(ValueError, match=r"rows\.jsonl:1: column 'solution' is missing"):
        load_datasets(DataSection(train_file=file, eval_file=file), ["sft"], 0)


def test_eval_rows_bounds_an_eval_file(write):
    file = str(write({"problem": "a", "solution": "b"}, {"problem": "c", "solution": "d"}))
    datasets = load_datasets(DataSection(train_file=file, eval_file=file, eval_rows=1), ["grpo"], 0, ["solution"])
    assert (len(datasets["grpo"]), len(datasets["eval"])) == (2, 1)


@pytest.mark.parametrize("data", [DataSection(), DataSection(task="shapes", train_file="rows.jsonl")])
def test_either_a_task_or_a_file(data):
    with pytest.raises(ValueError, match=r"set either data\.task .* or data\.train_file"):
        load_datasets(data, ["grpo"], 0)


def test_an_unknown_task_is_named():
    with pytest.raises(ValueError, match=r"data\.task is 'counting'; the embedded task is 'shapes'"):
        load_datasets(DataSection(task="counting"), ["grpo"], 0)


def test_chance_is_known_for_the_embedded_task_only():
    assert chance(DataSection(task="shapes")) == 1 / 12
    assert chance(DataSection(train_file="rows.jsonl")) is None
