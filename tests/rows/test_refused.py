"""Test that the rows of refused.yaml are refused with the reason.

rows      A file has the row {problem: a} and this row; opening the file raises the error, which names line 2.
files     Opening a file of these rows with these options raises the error, which names the last row.
prompts   Building the prompt of this row raises the error.

In a message, .* is any text, and $ the end. A turn {user: hi, loss: 1} is {role: user, content: hi, loss: 1}.
"""

import re
from pathlib import Path

import PIL.Image
import pytest
import yaml

from minivlmrl.data import file_dataset, image, processor
from minivlmrl.tasks import shapes

TABLE = yaml.safe_load(Path(__file__).with_name("refused.yaml").read_text(encoding="utf-8"))
CASES = []
for section, entries in TABLE.items():
    for [(message, given)] in map(dict.items, entries):
        CASES += [(section, message, one) for one in (given if isinstance(given, list) else [given])]
TURNS = ("prompt", "messages", "completion", "chosen", "rejected")
PROCESSOR = processor.Processor(shapes.tokenizer(), image.ImageProcessor(7, 2, 2, min_pixels=28 * 28))


def spell_out(turn):
    """Write {user: hi} as {role: user, content: hi}."""
    role = next((name for name in ("system", "user", "assistant") if isinstance(turn, dict) and name in turn), None)
    return {"role": role, "content": turn[role], **without(turn, role)} if role else turn


def without(values, name):
    return {key: value for key, value in values.items() if key != name}


@pytest.mark.parametrize(("section", "message", "given"), CASES, ids=lambda value: str(value)[:80])
def test_a_row_is_refused(write_rows, section, message, given):
    rows = given["rows"] if section == "files" else [{"problem": "a"}] * (section == "rows") + [given]
    spelled = lambda row, name: [*map(spell_out, row[name])]  # noqa: E731
    rows = [row | {name: spelled(row, name) for name in TURNS if isinstance(row.get(name), list)} for row in rows]
    file = write_rows(*rows)
    PIL.Image.new("RGB", (3000, 10)).save(file.with_name("long.png"))
    sentence = re.escape(message).replace(r"\.\*", ".*").replace(r"\$", "$")
    with pytest.raises(ValueError, match=rf"rows\.jsonl:{len(rows)}: {sentence}"):
        dataset = file_dataset.FileDataset(file, **without(given if section == "files" else {}, "rows"))
        if section == "prompts":
            dataset[0].prompt(PROCESSOR)
