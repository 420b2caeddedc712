"""Test that rows are counted, and prompts measured, without decoding images."""

import PIL.Image
import pytest

from minivlmrl.config.options import RunConfig
from minivlmrl.data.file_dataset import FileDataset, without_rows
from minivlmrl.data.image import ImageProcessor
from minivlmrl.data.processor import Processor, encode_answer
from minivlmrl.data.row_sizes import long_rows
from minivlmrl.monitor.check.row_notes import describe_rows, summary
from minivlmrl.tasks import shapes
from tests.helpers.runs import write_lines
from tests.helpers.talk import assistant, user

PROCESSOR = Processor(shapes.tokenizer(), ImageProcessor(7, 2, 2, min_pixels=14 * 14))


@pytest.fixture
def rows(tmp_path):
    def rows(*sizes):
        made = []
        for number, shown in enumerate(sizes):
            made.append({"problem": "What?", "images": [f"{number}_{i}.png" for i in range(len(shown))]})
            for name, size in zip(made[-1]["images"], shown, strict=True):
                PIL.Image.new("RGB", size).save(tmp_path / name)
        write_lines(tmp_path / "rows.jsonl", made)
        return FileDataset(tmp_path / "rows.jsonl")

    return rows


def test_rows_are_counted_and_measured_without_their_pixels(rows, monkeypatch):
    made = rows(*[[(28, 28)]] * 3, [(14, 14), (70, 28)], [], [])
    lengths = [len(made[i].prompt(PROCESSOR).input_ids) for i in range(6)]
    monkeypatch.setattr(PIL.Image.Image, "resize", None)  # a call of None would fail
    monkeypatch.setattr("PIL.PngImagePlugin.PngImageFile.load_prepare", None)
    counted = "6 (3 with 1 image, 1 with 2 images, 2 with no image)"
    assert summary(made, PROCESSOR) == f"{counted}; prompts of {min(lengths)} to {max(lengths)} tokens"
    assert max(lengths) - min(lengths) == 1 + 10 + 4  # the image tokens, and two tokens around each image


def test_only_some_of_many_rows_are_measured(rows):
    length = len(shapes.Shapes(1, "x")[0].prompt(PROCESSOR).input_ids)
    task = f"1000 generated with 1 image; prompts of {length} tokens (16 of 1000 rows were measured)"
    assert summary(shapes.Shapes(1000, "x"), PROCESSOR) == task
    assert summary(without_rows(rows([], [], []), {1}), PROCESSOR).startswith("2 selected out of 3 in 1 file; ")


def test_the_shortest_the_longest_and_all_unreadable_rows_are_measured(rows, tmp_path):
    sizes = [[(28, 28 + 14 * (i % 7))] for i in range(80)]
    sizes[33], sizes[60] = [], [(140, 140)]
    made = rows(*sizes)
    least, most = (len(made[i].prompt(PROCESSOR).input_ids) for i in (33, 60))
    expected = "80 (79 with 1 image, 1 with no image); "
    expected += f"prompts of {least} to {most} tokens (16 of 80 rows were measured)"
    assert summary(made, PROCESSOR) == expected
    for number in (21, 77):
        (tmp_path / f"{number}_0.png").write_bytes(b"no image")
    made = FileDataset(tmp_path / "rows.jsonl")
    with pytest.raises(ValueError, match=r"rows\.jsonl:22: .*21_0\.png: the image cannot be read"):
        summary(made, PROCESSOR)
    found = summary(made, PROCESSOR, skip_unreadable=True)
    assert found.startswith(f"{expected}; 2 unreadable rows will be skipped")


def test_the_longest_prompt_is_measured_whether_it_is_text_or_image(rows, tmp_path):
    """The image tokens of a row count once, as its text does."""
    rows(*[[(140, 140)]] * 41)
    lines = [{"problem": "a"}] * 40 + [{"problem": "a", "image": f"{i}_0.png"} for i in range(40)]
    lines.append({"problem": "b" * 450})
    write_lines(tmp_path / "rows.jsonl", lines)
    made = FileDataset(tmp_path / "rows.jsonl")
    lengths = [len(made[i].prompt(PROCESSOR).input_ids) for i in (0, 40, 80)]
    assert lengths == sorted(lengths)
    assert f"prompts of {lengths[0]} to {lengths[2]} tokens (16 of 81 rows were measured)" in summary(made, PROCESSOR)


def test_a_row_is_long_with_its_answer_for_one_processor(tmp_path):
    PIL.Image.new("RGB", (280, 280)).save(tmp_path / "a.png")
    write_lines(tmp_path / "rows.jsonl", [{"problem": "a", "image": "a.png", "completion": "b" * 3000}])
    made = FileDataset(tmp_path / "rows.jsonl")
    prompt = len(made[0].prompt(PROCESSOR).input_ids)
    [size] = long_rows(made, PROCESSOR, 2000, answers=("completion",))
    assert size.longest == prompt + len(encode_answer(PROCESSOR, made[0], made[0].completion).ids) > 3000
    assert not list(long_rows(made, PROCESSOR, prompt))
    small = Processor(shapes.tokenizer(), ImageProcessor(7, 2, 2, min_pixels=14 * 14, max_pixels=14 * 14))
    [size] = long_rows(made, small, 10)
    assert size.longest == len(made[0].prompt(small).input_ids) < prompt


def test_an_unreadable_held_out_row_is_never_skipped(rows, tmp_path):
    rows([(28, 28)])
    (tmp_path / "0_0.png").write_bytes(b"no image")
    config = RunConfig(stages=["sft"])
    config.data.skip_unreadable = True
    made = FileDataset(tmp_path / "rows.jsonl")
    [described] = describe_rows(config, {"sft": made}, PROCESSOR)
    assert "1 unreadable row will be skipped" in described
    with pytest.raises(ValueError, match=r"rows\.jsonl:1: .*the image cannot be read"):
        list(describe_rows(config, {"eval": made}, PROCESSOR))


def test_videos_are_counted_and_not_opened(tmp_path):
    lines = [{"problem": "a", "video": ["data:,1"]}, {"problem": "a", "video": ["data:,2"]}]
    write_lines(tmp_path / "rows.jsonl", lines)
    assert summary(FileDataset(tmp_path / "rows.jsonl"), PROCESSOR) == "2 with 1 video"


def test_long_rows_include_videos_and_images_with_their_own_size(tmp_path):
    PIL.Image.new("RGB", (700, 700)).save(tmp_path / "a.png")
    large = {"image": "a.png", "max_pixels": 700 * 700}
    shown = [assistant("a"), user([{"type": "image", **large}]), assistant("b")]
    lines = [{"video": ["a.png"] * 4}, {"image": large}, {"image": "a.png"}, {"completion": shown}]
    write_lines(tmp_path / "rows.jsonl", [{"problem": "What?"} | line for line in lines])
    rows = FileDataset(tmp_path / "rows.jsonl")
    small = Processor(shapes.tokenizer(), ImageProcessor(7, 2, 2, min_pixels=14 * 14, max_pixels=14 * 14))
    lengths = [len(row.prompt(small).input_ids) for row in rows]
    lengths[3] += len(encode_answer(small, rows[3], rows[3].completion).ids)
    assert lengths[2] < 100 and min(lengths[0], lengths[1], lengths[3]) > 1400
    found = {size.index: size.longest for size in long_rows(rows, small, 1400, answers=("completion",))}
    assert found == {index: lengths[index] for index in (0, 1, 3)}
    assert summary(rows, small).startswith("4 (2 with 1 image, 1 with 1 video, 1 with no image); ")


@pytest.mark.parametrize("damage", ["page", "empty", "strip"])
def test_unreadable_rows_are_skipped_where_the_option_says_so(rows, tmp_path, damage):
    made = rows([(28, 28)], [(28, 28)], [(28, 28)])
    if damage == "strip":  # Qwen's processor refuses an aspect ratio above 200
        PIL.Image.new("RGB", (2275, 10)).save(tmp_path / "0_0.png")
    else:
        (tmp_path / "0_0.png").write_bytes(b"<html>404</html>" if damage == "page" else b"")
    for measure in (
        lambda **options: summary(made, PROCESSOR, **options),
        lambda **options: list(long_rows(made, PROCESSOR, 1, **options)),
        lambda **options: list(long_rows(made, PROCESSOR, 900, **options)),
    ):
        with pytest.raises(ValueError, match=r"rows\.jsonl:1: .*(remove the image|data\.skip_unreadable=true)$"):
            measure()
    found = summary(made, PROCESSOR, skip_unreadable=True)
    assert "; 1 unreadable row will be skipped (data.skip_unreadable), for example " in found
    assert found.count("rows.jsonl:1: ") == 1
    found = list(long_rows(made, PROCESSOR, 1, skip_unreadable=True))
    assert len(without_rows(made, {size.index for size in found})) == 1
    lengths = [len(made[i].prompt(PROCESSOR).input_ids) for i in (1, 2)]
    assert [(size.index, size.longest) for size in found] == [*enumerate(lengths, start=1)]
    assert not list(long_rows(made, PROCESSOR, 900, skip_unreadable=True))


def test_held_out_rows_that_are_left_out_are_counted(write_rows):
    made = FileDataset(write_rows(*[{"problem": "?"}] * 5), limit=2)
    notes = list(describe_rows(RunConfig(), {"eval": made}, PROCESSOR))
    assert notes[1:] == ["rows of eval: data.eval_rows leaves out the last 3 rows of the file"]
