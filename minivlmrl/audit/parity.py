"""`python -m minivlmrl parity`: hold every loss and option of ours against the TRL that is installed.

Prints a row for each family of cells and exits with status 0 when every difference has a note that explains it, 1 when
one has none, 2 when there is no TRL to ask.
"""

import argparse
import json
import os
import sys
import time
import warnings
from collections import Counter
from dataclasses import asdict
from itertools import chain
from pathlib import Path

import torch

from minivlmrl.audit import policy_cells as policy
from minivlmrl.audit import preference_cells as preference
from minivlmrl.audit.compare import WORDS, Cell, NotInThisVersion, Row, ask, judge

CELLS = (policy.by_loss_type, policy.by_option, policy.by_parameter, policy.together)
CELLS += (policy.group_advantages, policy.rloo_advantages, policy.sampler_correction, policy.overlong)
CELLS += (preference.dpo_losses, preference.kto_losses, preference.sft_losses, preference.reward_losses)
INSTALL = "pip install trl==1.16.0 transformers==5.23.0"
QUIET = dict.fromkeys(("HF_HUB_OFFLINE", "HF_HUB_DISABLE_TELEMETRY", "TRL_EXPERIMENTAL_SILENCE"), "1")
QUIET |= {"TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_VERBOSITY": "error"}


def main(arguments: list[str] | None = None) -> int:
    """Print the table, and return the exit status."""
    p = argparse.ArgumentParser(prog="python -m minivlmrl parity", description="Hold our losses against TRL's.")
    p.add_argument("--filter", default="", metavar="TEXT", help="only families with TEXT in their name")
    p.add_argument("--json", metavar="FILE", help="write the table to FILE")
    p.add_argument("--record", metavar="FILE", help="write TRL's answers for a selection of cells to FILE")
    options = p.parse_args(arguments)
    os.environ.update(QUIET | dict(os.environ))
    warnings.filterwarnings("ignore")
    try:
        from minivlmrl.audit.trl_oracle import VERSION
    except (ImportError, RuntimeError) as error:
        reason = str(error).splitlines()[-1]
        print(f"TRL cannot be imported ({reason}), so there is nothing to compare with: {INSTALL}", file=sys.stderr)
        return 2
    chosen = {name: cells for name, cells in families().items() if options.filter in name}
    if not chosen:
        print(f"no family's name contains {options.filter!r}; without --filter all are listed", file=sys.stderr)
        return 2
    if options.record:
        Path(options.record).write_text(record(chosen, VERSION), encoding="utf-8")
    start = time.perf_counter()
    print(f"minivlmrl against TRL {VERSION}, torch {torch.__version__}: value and gradient\n")
    rows = [table_row(name, cells, VERSION) for name, cells in chosen.items()]
    print(f"\n{summary(rows)}, {time.perf_counter() - start:.0f} s")
    if options.json:
        report = {"trl": VERSION, "torch": torch.__version__, "rows": [asdict(row) for row in rows]}
        Path(options.json).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return status(rows)


def families() -> dict[str, list[Cell]]:
    """Every loss and option of ours that TRL has too: the cells by family, the rows of the table in order."""
    table: dict[str, list[Cell]] = {}
    for cell in chain(*(cells() for cells in CELLS)):
        table.setdefault(cell.family, []).append(cell)
    return table


def table_row(family: str, cells: list[Cell], version: str) -> Row:
    """Ask about a family and print its row."""
    row = judge(family, [ask(cell) for cell in cells], version)
    print(f"{row.family:40}{row.cells:5}  {row.verdict}", flush=True)
    for word, text in (("most in", row.example), ("known", row.note)):
        if text:
            print(f"{'':47}{word}: {text}", flush=True)
    return row


def summary(rows: list[Row]) -> str:
    """How many families ended how."""
    counts = Counter(row.kind for row in rows)
    ends = ", ".join(f"{counts[kind]} {word}" for kind, word in WORDS.items() if counts[kind])
    excused = sum(row.kind == "differs" and row.excused for row in rows)
    ends += f" ({excused} of them as known)" if excused else ""
    return f"{len(rows)} families, {sum(row.cells for row in rows)} cells: {ends}"


def status(rows: list[Row]) -> int:
    """1 for a difference without a note; 2 when TRL answered nothing; else 0."""
    if all(row.kind in ("absent", "failed") for row in rows):
        return 2
    return 0 if all(row.excused for row in rows) else 1


def record(chosen: dict[str, list[Cell]], version: str) -> str:
    """TRL's answers as JSON: of each family the last cell, of large ones the first too. Inputs come from seeds."""
    answers = {}
    for cell in [cell for cells in chosen.values() for cell in (*cells[: len(cells) >= 32], cells[-1])]:
        try:
            result = cell.theirs()
        except NotInThisVersion:
            continue
        values = {name: value.tolist() for name, value in result.items() if not name.startswith("metric ")}
        answers[f"{cell.family}: {cell.name}"] = values
    first = torch.randn(3, generator=torch.Generator().manual_seed(0), dtype=torch.float64).tolist()
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(answer)}" for name, answer in answers.items())
    head = f'"trl": "{version}", "torch": "{torch.__version__}", "first normal numbers of seed 0": {json.dumps(first)}'
    return f'{{{head}, "cells": {{\n{lines}\n}}}}\n'
