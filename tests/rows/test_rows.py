"""Compare rows in users' formats with transformers: token ids, pictures and time marks from the same messages.

For each file, cases.json has its public reference, and either the expected messages, written by hand, or words from the
error message. tests/record/record_rows.py rendered these messages with transformers' processor and each family's
tokenizer. Texts and pictures are ours; only a row's structure comes from the user.
"""

import functools
import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from minivlmrl.config.options import DataOptions
from minivlmrl.data.file_dataset import FileDataset
from minivlmrl.data.folder_template import ChatTemplate
from minivlmrl.data.loader import Batches
from minivlmrl.data.processor import Processor, encode_answer
from minivlmrl.data.rows import Completion, Prompt, Row
from minivlmrl.distributed.process_group import World
from minivlmrl.errors import error_context
from minivlmrl.extras.convert.command import main
from minivlmrl.model.checkpoint import load_processor
from tests.helpers.user_rows import (
    ANSWERS,
    FILES,
    MODELS,
    RECORDED,
    REQUIRED,
    Case,
    mean_colors,
    read_cases,
    unpack_ids,
)

CASES = read_cases()
READ = [name for name, case in CASES.items() if not case.refused]
REFUSED = [name for name, case in CASES.items() if case.refused]
EXPECTED = json.loads(RECORDED.read_text())

load_processor = functools.cache(load_processor)


def find_processor(case: Case) -> Processor:
    """Return the processor for the case's model, with the case's chat template."""
    processor = load_processor(MODELS / case.model)
    if not case.template:
        return processor
    path = FILES / case.template
    return replace(processor, template=ChatTemplate(path.read_text(), path, processor.tokenizer.special_tokens))


def open_case(case: Case, folder: Path) -> FileDataset:
    """Open the case's file, or what the command that an error names writes to `folder`."""
    if case.file.endswith(".parquet"):
        pytest.importorskip("pyarrow", reason="extra missing: pip install pyarrow")
    if "video" in str(case.rows) and ".mp4" in str(case.rows):
        pytest.importorskip("av", reason="extra missing: pip install av")
    try:
        return FileDataset(FILES / case.file, REQUIRED[case.stage], **case.options)
    except ValueError as error:
        command = re.search("`python -m minivlmrl (convert .*)`", str(error))
        if not command:
            raise
    new = folder / f"{case.file}{'.parquet' if case.file.endswith('.parquet') else '.jsonl'}"
    assert main([*shlex.split(command[1])[1:], f"--out={new}"]) == 0
    kept = {theirs: ours for theirs, ours in case.options.get("columns", {}).items() if theirs == ours}
    options = {**case.options, "columns": kept} if "--columns=" in command[1] else case.options
    return FileDataset(new, REQUIRED[case.stage], image_root=FILES, **options)


def check_prompt(prompt: Prompt, expected: dict, processor: Processor):
    """Compare a prompt's ids, grids, colours and seconds."""
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
    assert decode(ids.tolist()) == decode(expected)  # a failure's message then shows the texts
    assert ids.tolist() == expected


def encode(row: Row, column: str, processor: Processor) -> Completion:
    with error_context(row.where):  # as in trainers/offline.py
        return encode_answer(processor, row, getattr(row, column))


def check_answer(completion: Completion, expected: list[dict], processor: Processor):
    """Compare an answer's sequences: ids, trained ids, and later sequences' prompts."""
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
        check_skipped(case, dataset, processor, index)


def check_skipped(case: Case, dataset: FileDataset, processor: Processor, index: int):
    """Check that a damaged row ends a run without data.skip_unreadable, and is skipped and named with it."""
    where = re.escape(f"{case.file}:{index + 1}")
    with pytest.raises(ValueError, match=where):
        dataset[index].prompt(processor)
    options = SimpleNamespace(seed=0, data=DataOptions(skip_unreadable=True, image_workers=0))
    stage = SimpleNamespace(prompts_per_step=1)
    trainer = SimpleNamespace(
        run=options, config=stage, stage="sft", steps_per_rollout=1, world=World(), processor=processor, answers=()
    )
    with pytest.warns(UserWarning, match=where + ".*this row is skipped; 1 so far"):
        row = Batches(dataset, trainer).row(index)
    assert row.index == (index + 1) % len(dataset)


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
    missing = [words for words in (case.file, *case.refused) if words not in message]
    assert not missing, message


def test_the_table():
    """Every file belongs to a case, every case has a public reference, and all families' models are used."""
    assert EXPECTED.keys() == {*READ}
    assert len({case.file for case in CASES.values()}) >= 100
    assert all(re.match(r"https://(github\.com|huggingface\.co|\w[\w.-]*)/\S+$", c.reference) for c in CASES.values())
    assert {case.model for case in CASES.values()} == {folder.name for folder in MODELS.iterdir()}
    texts = [json.dumps([case.file, case.template, case.rows]) for case in CASES.values()]
    texts += [
        path.read_text(errors="replace")
        for path in FILES.iterdir()
        if path.suffix in (".jsonl", ".json", ".csv", ".tsv")
    ]
    assert [path.name for path in FILES.iterdir() if not any(path.name in text for text in texts)] == []
