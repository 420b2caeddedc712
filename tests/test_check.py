"""`check`: recipes that learn have no fault; tests/test_planted_faults.py plants them."""

from pathlib import Path
from types import SimpleNamespace

import faults
import PIL.Image
import pytest
from links import ROOT
from runs import write_lines

from minivlmrl.data.file_dataset import FileDataset
from minivlmrl.data.mix import FileSection, mix
from minivlmrl.run.config import load_config
from minivlmrl.tools import check

RECIPES = ROOT / "recipes"
EMBEDDED = [path.stem for path in sorted(RECIPES.glob("*.yaml")) if "task: " in path.read_text()]


@pytest.mark.parametrize("recipe", EMBEDDED)
def test_recipes_that_learn_have_no_fault(recipe, capsys):
    overrides = ["--num_threads=1", "--reward_model.path=null"]
    if recipe == "shapes_distill":
        overrides.append("--distill.teacher=null")  # of a run before it
    assert check.main([str(RECIPES / f"{recipe}.yaml"), *overrides]) == 0, capsys.readouterr().out
    out = capsys.readouterr().out
    assert "nothing found" in out and "output:" not in out
    asked = {"grpo", "ppo", "distill"} & set(load_config(RECIPES / f"{recipe}.yaml").stage_names)
    assert ("no completions were drawn" in out) == bool(asked)


def test_copies_in_blocks_are_counted_whatever_their_names(tmp_path):
    """20 pictures, each in two rows: 16 of the 40 would hardly show it. Two answers to one picture are no copies."""
    lines = []
    for number in range(40):
        PIL.Image.new("RGB", (30, 30), (number // 2 * 10, 0, 0)).save(tmp_path / f"{number}.png")
        lines.append({"problem": "?", "image": f"{number}.png", "completion": str(number)})
    write_lines(tmp_path / "rows.jsonl", lines)
    rows = FileDataset(tmp_path / "rows.jsonl")
    assert list(check.check_files(rows, [])) == ["20 of 40 rows differ in picture or question: drop copies"]
    assert list(check.check_files(rows, ["completion"])) == []
    often = FileDataset(tmp_path / "rows.jsonl", limit=1)
    assert list(check.check_files(mix([often], [FileSection("rows.jsonl", weight=9)]), [])) == []


@pytest.mark.parametrize(("box", "said"), [([1, 2, 45, 45], True), ([1, 2, 80, 45], True), ([1, 2, 45, 80], False)])
def test_turned_photographs_are_fine_if_a_box_fits_no_other_way(tmp_path, monkeypatch, box, said):
    """The last box is inside of 50 x 90 pixels, as it is shown, and not of 90 x 50, as the file has it."""
    monkeypatch.chdir(tmp_path)
    PIL.Image.new("RGB", (9, 9)).save("0.png")
    rows = [{"problem": "?", **faults.turned(number, {"image": "0.png"})} for number in range(2)]
    write_lines(Path("rows.jsonl"), [rows[0], rows[1] | {"solution": box}])
    assert bool(list(check.check_files(FileDataset("rows.jsonl"), []))) == said


def test_boxes_in_a_notation_that_no_reward_reads_are_named():
    rewards = [SimpleNamespace(name=name) for name in ("format", "box_format", "iou")]
    processor = SimpleNamespace(answer="tags")
    texts = [f"<answer>{said}</answer>" for said in ("1 2 3 4", "[]", '{"point_2d": [1, 2]}', "{'bbox': [1, 2, 3, 4]}")]
    [sentence] = check.unread_boxes(rewards, texts, processor)
    assert sentence.startswith(
        "1 of 4 answers, such as '{\"point_2d\": [1, 2]}', hold nothing that box_format reads; ask"
    )
    assert not list(check.unread_boxes(rewards, [*texts, "1 2 3 4", "no answer"], processor))
    assert not list(check.unread_boxes([SimpleNamespace(name="accuracy")], texts, processor))
