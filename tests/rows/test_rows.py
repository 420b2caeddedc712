"""Compare rows in users' formats with transformers: token ids, pictures and time marks from the same messages.

For each file of rows, cases.json has a public reference, and either the expected messages, written by hand, or words of
the error message. A turn in the table is a list of the role and then texts and parts, such as ["user", {"image":
"red.png"}, "What?"]. A part with another key than image or video, such as tool_calls, is a field of the message. The
script in `git show 9467b928:tests/record/record_rows.py` rendered these messages with the processor of transformers and
the tokenizer of each family. To record more rows, run the script in that commit with this table. Texts and pictures are
ours, and only the structure of a row comes from a user.
"""

import contextlib
import functools
import io
import json
import re
import shlex
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch

from minivlmrl.data.chat_template import ChatTemplate
from minivlmrl.data.file_dataset import FileDataset
from minivlmrl.data.processor import Processor, encode_answer
from minivlmrl.data.rows import Completion, Prompt, Row
from minivlmrl.errors import error_context
from minivlmrl.extras.convert.command import main
from minivlmrl.model.checkpoint import load_processor

ROWS = Path(__file__).parent
FILES, MODELS = ROWS / "files", ROWS / "models"
RECORDED = ROWS.parent / "recorded" / "rows_transformers_5.23.0.json"
# columns that a row must have in a stage
REQUIRED = {
    "sft": ("problem", "completion"),
    "dpo": ("problem", "chosen", "rejected"),
    "kto": ("problem", "completion", "label"),
    "grpo": ("problem",),
}
ANSWERS = ("completion", "chosen", "rejected")


@dataclass
class Case:
    """A file of rows, and either the messages of the rows or words of the error message."""

    file: str
    reference: str  # URL of the report or the page that shows such a row
    model: str = "qwen2_5_vl"  # folder in tests/rows/models
    template: str = ""  # file in tests/rows/files that replaces the model's chat template
    stage: str = "sft"
    options: dict = field(default_factory=dict)  # fields of RowOptions
    # for each row: its turns under "prompt" and ANSWERS, and its values in other columns
    rows: list[dict] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)  # words in the error message
    # whether the rows of the table are those that `convert` writes, although a run reads the file
    converted: bool = False
    skipped: list[int] = field(default_factory=list)  # rows that data.skip_unreadable skips
    typed: bool = False  # whether texts spell control tokens that must stay text


def unpack_ids(packed: list) -> list[int]:
    """Return the ids of a file that stores each run of more than 3 equal ids as [id, length]."""
    ids = []
    for item in packed:
        ids += [item[0]] * item[1] if isinstance(item, list) else [item]
    return ids


def mean_colors(patches, grids) -> list:
    """Return the mean colour of each quarter of each picture, which shows content, order and orientation.

    Args:
        patches: (patches in all pictures, channels * temporal * height * width), ordered as in Qwen's image processor.
        grids: (pictures, 3): patches in time, height and width.
    Returns:
        For each temporal patch, 2 x 2 x 3 numbers in the same units as the patches.
    """
    colors = []
    start = 0
    for t, h, w in [[int(side) for side in grid] for grid in grids]:
        end = start + t * h * w
        means = patches[start:end].float().reshape(t, h // 2, w // 2, 2, 2, 3, -1).mean(-1)
        image = means.permute(0, 1, 3, 2, 4, 5).reshape(t, 2, h // 2, 2, w // 2, 3).mean((2, 4))
        colors += [[[[round(float(x), 2) for x in c] for c in row] for row in frame] for frame in image]
        start = end
    assert start == len(patches)
    return colors


CASES = {name: Case(**case) for name, case in json.loads((ROWS / "cases.json").read_text(encoding="utf-8")).items()}
READ = [name for name, case in CASES.items() if not case.refused]
REFUSED = [name for name, case in CASES.items() if case.refused]
EXPECTED = json.loads(RECORDED.read_text())

load_processor = functools.cache(load_processor)


def find_processor(case: Case) -> Processor:
    processor = load_processor(MODELS / case.model)
    if not case.template:
        return processor
    path = FILES / case.template
    return replace(processor, template=ChatTemplate(path.read_text(), path, processor.tokenizer.special_tokens))


def open_case(case: Case, folder: Path) -> FileDataset:
    """Open the file of a case, or the file that the command in an error message writes to `folder`."""
    if case.file.endswith(".parquet"):
        pytest.importorskip("pyarrow", reason="extra missing: pip install pyarrow")
    if "video" in str(case.rows) and ".mp4" in str(case.rows):
        pytest.importorskip("av", reason="extra missing: pip install av")
    message, command = "", f"convert {FILES / case.file}"
    if not case.converted:
        try:
            return FileDataset(FILES / case.file, REQUIRED[case.stage], **case.options)
        except ValueError as error:
            message = str(error)
            found = re.search("`minivlmrl (convert .*)`", message)
            if not found:
                raise
            command = found[1]
    new = folder / f"{case.file}.jsonl"
    said = io.StringIO()
    kept = {theirs: ours for theirs, ours in case.options.get("columns", {}).items() if theirs == ours}
    options = {**case.options, "columns": kept} if "--columns=" in command else case.options
    try:
        with contextlib.redirect_stderr(said):
            code = main([*shlex.split(command)[1:], f"--out={new}"])
        if code:
            raise ValueError(said.getvalue())
        return FileDataset(new, REQUIRED[case.stage], image_root=FILES, **options)
    except ValueError as error:
        raise ValueError(f"{message}\n{error}") from error


def check_prompt(prompt: Prompt, expected: dict, processor: Processor):
    check_ids(prompt.input_ids, expected["ids"], processor)
    grids = []
    for t, h, w in expected.get("grids", []):  # newer families lay out each temporal patch as a picture
        is_cut = processor.image_processor.videos is not None
        grids += [[1, h, w]] * t if is_cut else [[t, h, w]]
    assert prompt.image_grid_thw.tolist() == grids
    colors = mean_colors(prompt.pixel_values, prompt.image_grid_thw)
    assert torch.allclose(torch.tensor(colors), torch.tensor(expected.get("colors", [])), atol=0.05)
    if "seconds" in expected:
        seconds = [s for s, (t, _, _) in zip(prompt.second_per_grid_ts.tolist(), grids, strict=True) if s]
        assert seconds == pytest.approx(expected["seconds"], rel=1e-6)


def check_ids(ids: torch.Tensor, packed: list, processor: Processor):
    expected = unpack_ids(packed)
    decode = processor.tokenizer.decode
    assert decode(ids.tolist()) == decode(expected)  # if the ids differ, the message of the failure shows the texts
    assert ids.tolist() == expected


def encode(row: Row, column: str, processor: Processor) -> Completion:
    with error_context(row.where):  # as in trainers/offline.py
        return encode_answer(processor, row, getattr(row, column))


def check_answer(completion: Completion, expected: list[dict], processor: Processor):
    """Compare the sequences of an answer: ids, trained ids, and the prompts of later sequences."""
    turns = completion.turns or [completion]
    assert len(turns) == len(expected)
    for turn, sequence in zip(turns, expected, strict=True):
        check_ids(turn.ids, sequence["ids"], processor)
        assert turn.policy_mask.int().tolist() == unpack_ids(sequence["trained"])
        if "prompt" in sequence:
            check_ids(turn.prompt.input_ids, sequence["prompt"], processor)


@pytest.mark.parametrize("name", READ)
def test_a_file_becomes_what_transformers_makes_of_its_messages(name, tmp_path):
    case = CASES[name]
    dataset, processor = open_case(case, tmp_path), find_processor(case)
    indices = [index for index in range(len(dataset)) if index not in case.skipped]
    assert len(indices) == len(case.rows) == len(EXPECTED[name])
    for index, told, expected in zip(indices, case.rows, EXPECTED[name], strict=True):
        row = dataset[index]
        check_prompt(row.prompt(processor), expected, processor)
        for column in ANSWERS if case.stage != "grpo" else ():
            assert (getattr(row, column) is not None) == (column in told)
            if column in told:
                check_answer(encode(row, column, processor), expected[column], processor)
        columns = {key: value for key, value in told.items() if key not in ("prompt", *ANSWERS)}
        assert {key: row.columns.get(key) for key in columns} == columns
    for index in case.skipped:
        with pytest.raises(ValueError, match=re.escape(f"{case.file}:{index + 1}")):
            dataset[index].prompt(processor)


@pytest.mark.parametrize("name", REFUSED)
def test_a_file_that_cannot_be_read_is_refused_with_the_reason(name, tmp_path):
    case = CASES[name]
    with pytest.raises(ValueError) as error:
        dataset, processor = open_case(case, tmp_path), find_processor(case)
        for row in dataset:
            row.prompt(processor)
            for column in ANSWERS:
                if getattr(row, column) is not None:
                    encode(row, column, processor)
    message = str(error.value)
    assert not [words for words in (case.file, *case.refused) if words not in message], message
