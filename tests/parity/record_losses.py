"""Write TRL's answers for a selection of cells, recorded/trl_VERSION.json: python -m parity.record_losses in tests/"""

import json
from pathlib import Path

import torch
from parity.compare import Cell
from parity.families import families


def record(chosen: dict[str, list[Cell]], version: str) -> str:
    """TRL's answers as JSON: of each family the last cell, of large ones the first too. Inputs come from seeds."""
    answers = {}
    for cell in [cell for cells in chosen.values() for cell in (*cells[: len(cells) >= 32], cells[-1])]:
        values = {name: value.tolist() for name, value in cell.theirs().items() if not name.startswith("metric ")}
        answers[f"{cell.family}: {cell.name}"] = values
    first = torch.randn(3, generator=torch.Generator().manual_seed(0), dtype=torch.float64).tolist()
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(answer)}" for name, answer in answers.items())
    head = f'"trl": "{version}", "torch": "{torch.__version__}", "first normal numbers of seed 0": {json.dumps(first)}'
    return f'{{{head}, "cells": {{\n{lines}\n}}}}\n'


if __name__ == "__main__":
    from parity.trl_oracle import VERSION

    file = Path(__file__).parents[1] / "recorded" / f"trl_{VERSION}.json"
    file.write_text(record(families(), VERSION), encoding="utf-8")
