"""`python -m minivlmrl parity`: hold every loss and option of ours against the TRL that is installed.

Prints a row for each family of cells and exits with status 0 when every difference has a note that explains it, 1 when
one has none, 2 when there is no TRL to ask. As a function for other people's tests: check(my_loss), without TRL.
"""

import argparse
import json
import os
import sys
import time
import warnings
from collections import Counter
from pathlib import Path

import torch
from safetensors import safe_open

from minivlmrl.audit import policy_cells as policy
from minivlmrl.audit import preference_cells as preference
from minivlmrl.audit.compare import WORDS, Cell, Row, ask, distance, judge, questions

CELLS = {  # a section of families.yaml: what makes a cell of it
    "policy": policy.grpo_cell, "together": policy.together_cell, "advantages": policy.advantages_cell,
    "rloo": policy.rloo_advantages_cell, "correction": policy.correction_cell, "overlong": policy.overlong_cell,
    "dpo": preference.dpo_cell, "kto": preference.kto_cell, "sft": preference.sft_cell,
    "reward": preference.reward_cell,
}  # fmt: skip
INSTALL = "pip install trl==1.16.0 transformers==5.23.0"
QUIET = dict.fromkeys(("HF_HUB_OFFLINE", "HF_HUB_DISABLE_TELEMETRY", "TRL_EXPERIMENTAL_SILENCE"), "1")
QUIET |= {"TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_VERBOSITY": "error"}


def main(arguments: list[str] | None = None) -> int:
    """Print the table, and return the exit status."""
    p = argparse.ArgumentParser(prog="python -m minivlmrl parity", description="Hold our losses against TRL's.")
    p.add_argument("--filter", default="", metavar="TEXT", help="only families with TEXT in their name")
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
    start = time.perf_counter()
    print(f"minivlmrl against TRL {VERSION}, torch {torch.__version__}: value and gradient\n")
    rows = [table_row(name, cells, VERSION) for name, cells in chosen.items()]
    print(f"\n{summary(rows)}, {time.perf_counter() - start:.0f} s")
    return status(rows)


def families() -> dict[str, list[Cell]]:
    """Every loss and option of ours that TRL has too: the cells by family, the rows of the table in order."""
    table: dict[str, list[Cell]] = {}
    for kind, cell in CELLS.items():
        for question in questions(kind):
            table.setdefault(question.family, []).append(cell(question))
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
    return 2 if all(row.kind == "absent" for row in rows) else int(not all(row.excused for row in rows))


def check(my_loss, tolerance: float = 1e-6, **only) -> int:
    """Hold a loss against TRL's recorded values and gradients (AssertionError: where it differs); returns how many.

    my_loss: (batch, options) -> scalar; float64 tensors (B, T), of dpo (B, 2, T), as in fixtures/losses.safetensors.
    only: options that a case must have, such as kind="grpo", loss_type="dapo".
    """
    wrong, count = [], 0
    with safe_open(Path(__file__).parent / "fixtures" / "losses.safetensors", framework="pt") as file:
        for name, options in json.loads(file.metadata()["cases"]).items():
            if any(options.get(key) != value for key, value in only.items()):
                continue
            batch = {key.partition("/")[2]: file.get_tensor(key) for key in file.keys() if key.startswith(f"{name}/")}  # noqa: SIM118
            value, slope, logps = batch.pop("loss"), batch.pop("gradient"), batch["per_token_logps"].requires_grad_()
            loss = my_loss(batch, options)
            [gradient] = torch.autograd.grad(loss, logps, allow_unused=True, materialize_grads=True)
            errors, count = (distance(loss.detach(), value), distance(gradient, slope)), count + 1
            if max(errors) > tolerance:
                wrong.append(f"{name} {options}: value differs by {errors[0]:.1e}, gradient by {errors[1]:.1e}")
    assert not wrong, "\n".join([f"{len(wrong)} of {count} cases differ from TRL", *wrong])
    return count
