"""docs/first_hour.ipynb: its cells run in order, and end with a reward of the reader's own."""

import ast
import json
from pathlib import Path

from docs import first_hour
from minivlmrl.reward_functions.names import REWARDS

NOTEBOOK = Path(first_hour.__file__).with_suffix(".ipynb")
SMALL = {"ROWS": 16, "HELD_OUT": 4, "STEPS": 1}


def test_it_has_at_most_fifteen_cells():
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    assert len(cells) <= 15 and [cell["cell_type"] for cell in cells[:2]] == ["markdown", "code"]
    assert all(cell["source"] and len(line) <= 121 for cell in cells for line in cell["source"])


def test_its_cells_run(tmp_path, monkeypatch, capsys, plain):
    """Without Jupyter: with few rows, and few steps of each stage."""
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "__main__"}
    for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            code = small("".join(cell["source"]))
            exec(compile(code, str(NOTEBOOK), "exec"), names)
    printed = capsys.readouterr().out
    assert "loss" in names and "triangles answered: 0.00 0.00\nright answers:      0.00 0.00" in printed
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"sft", "first", "triangles"}
    assert names["triangles"](["<think>I see red</think><answer>red triangle</answer>", "red"]) == [1.0, 0.0]
    del REWARDS["triangles"]


def small(code: str) -> ast.Module:
    """The cell with few rows and steps."""
    module = ast.parse(code)
    for node in ast.walk(module):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == f"({', '.join(SMALL)})":
            node.value = ast.parse(str(tuple(SMALL.values())), mode="eval").body
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "train":
            more = {"sft": {"max_steps": 1, "prompts_per_step": 4}, "sampling": {"max_new_tokens": 4}}
            more = ", ".join(
                f"{name}={value}" for name, value in (more | {"num_threads": 1, "log_completions": 1}).items()
            )
            node.keywords += ast.parse(f"dict({more})", mode="eval").body.keywords
    return ast.fix_missing_locations(module)
