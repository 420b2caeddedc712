"""Test mixtures of row files: selected rows, weights, and the rewards of each file."""

import PIL.Image
import pytest

from minivlmrl.config.options import DataOptions, FileOptions, RunConfig
from minivlmrl.run.datasets import load_datasets, repeat
from tests.helpers.runs import write_lines


@pytest.mark.parametrize(("weight", "rows"), [(1, "abcd"), (2, "aabbccdd"), (0.5, "ac"), (1.5, "abcdac")])
def test_a_weight_is_the_number_of_times_that_a_pass_has_a_row(weight, rows):
    assert "".join(repeat("abcd", weight)) == rows


@pytest.fixture
def files(tmp_path):
    """Create a.jsonl with 4 rows, and b.jsonl with 2 rows whose images are in another folder."""
    (tmp_path / "elsewhere").mkdir()
    PIL.Image.new("RGB", (8, 8)).save(tmp_path / "elsewhere" / "b.png")
    a = [{"problem": f"a{i}", "solution": "1", "completion": "1"} for i in range(4)]
    b = [{"problem": f"b{i}", "image": "b.png", "completion": "1"} for i in range(2)]
    for name, rows in (("a", a), ("b", b)):
        write_lines(tmp_path / f"{name}.jsonl", rows)
    return tmp_path


def load(stages=None, stage_files=(), **data):
    own = {stage: str(file) for stage, file in dict(stage_files).items()}
    run = RunConfig(data=DataOptions(files=own, **data), rewards={"accuracy": 1.0, "format": 0.5})
    return load_datasets(run, stages or {"grpo": "prompts"}, ["solution"])


def problems(rows):
    return [row.columns["problem"] for row in rows]


def test_files_have_weights_image_roots_and_rewards(files):
    b = FileOptions(str(files / "b.jsonl"), 2.0, str(files / "elsewhere"), ["format"])
    rows = load(train=[FileOptions(str(files / "a.jsonl")), b])["grpo"]
    assert problems(rows) == ["a0", "a1", "a2", "a3", "b0", "b0", "b1", "b1"]
    assert [row.columns.get("row_rewards") for row in rows][3:5] == [None, ["format"]]
    assert rows[4].images[0].size == (8, 8)
    with pytest.raises(ValueError, match=r"b\.jsonl: unknown reward 'iou'; .* are: accuracy, format"):
        load(train=[FileOptions(str(files / "b.jsonl"), rewards=["iou"])])
    with pytest.raises(ValueError, match=r"b\.jsonl: 2 missing image or video files in .* set data.image_root"):
        load(train=[FileOptions(str(files / "b.jsonl"), rewards=["format"])])
    file = str(files / "a.jsonl")
    with pytest.raises(ValueError, match=r"a\.jsonl: weight 0\.1 takes none of its 4 rows"):
        load(train=[FileOptions(file), FileOptions(file, 0.1)])


def test_a_file_has_a_prompt_template_of_its_own(files):
    sections = [FileOptions(str(files / "a.jsonl"), prompt_template="{problem}?"), FileOptions(str(files / "a.jsonl"))]
    rows = load(train=sections, prompt_template="Say: {problem}")["grpo"]
    assert [rows[i].messages[-1]["content"][-1]["text"] for i in (0, 4)] == ["a0?", "Say: a0"]


def test_stages_may_have_files_of_their_own(files):
    stages, own = {"sft": "demonstrations", "grpo": "prompts"}, {"sft": files / "b.jsonl"}
    options = {"train_file": str(files / "a.jsonl"), "image_root": str(files / "elsewhere")}
    rows = load(stages, own, **options)
    assert (problems(rows["sft"]), problems(rows["grpo"])) == (["b0", "b1"], ["a0", "a1", "a2", "a3"])
    rows = load(stages, own | {"grpo": files / "a.jsonl"}, image_root=options["image_root"])
    assert problems(rows["grpo"]) == ["a0", "a1", "a2", "a3"]
    for wrong in ({"task": "shapes"}, {}):
        with pytest.raises(ValueError, match=r"data: set exactly one of data\.task"):
            load(stages, own, **wrong)
