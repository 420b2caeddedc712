"""Run the notebooks in docs/, and store their cell outputs: python -m docs.scripts.notebooks [docs/NAME.ipynb]

A notebook also stores a hash of the code in minimal.py that made its outputs, and test_docs.py fails if the code is
another one. Slow tests there compare all outputs, which have no times.
"""

import ast
import base64
import contextlib
import hashlib
import io
import json
import pprint
import re
import sys
import tempfile
from pathlib import Path
from types import ModuleType

import PIL.Image

import minimal

# not stored: lines of times, and the rest of a line from a time on
TIMES = re.compile(r"^(?:speed,|training:).*\n| \(?\d+\.\d+ s\b.*", re.MULTILINE)
NOTEBOOKS = sorted(Path(__file__).parents[1].glob("*.ipynb"))


def main():
    """Run all cells in the given notebooks, all by default, which takes some minutes."""
    for path in map(Path, sys.argv[1:] or NOTEBOOKS):
        path.write_text(with_outputs(path.read_text(encoding="utf-8")), encoding="utf-8")


def with_outputs(text: str) -> str:
    """Run a notebook's code cells in an empty folder, and return the notebook with their outputs."""
    content = json.loads(text)
    cells = [cell for cell in content["cells"] if cell["cell_type"] == "code"]
    for number, (cell, outputs) in enumerate(zip(cells, run_cells(cells), strict=True), start=1):
        for output in outputs:
            if output["output_type"] == "execute_result":
                output["execution_count"] = number
        cell |= {"execution_count": number, "outputs": outputs}
    content["metadata"]["minimal.py"] = code_hash()
    return json.dumps(content, indent=1) + "\n"


def code_hash() -> str:
    """Hash the code of minimal.py, without comments and formatting."""
    code = ast.parse(Path(minimal.__file__).read_text(encoding="utf-8"))
    return hashlib.sha256(ast.dump(code).encode()).hexdigest()[:16]


def run_cells(cells: list[dict]) -> list[list[dict]]:
    """Run code cells in an empty folder, and return outputs per cell, in the notebook format."""
    space = {"__name__": "__main__"}
    # with ipykernel loaded, training prints only every tenth step
    sys.modules["ipykernel"] = ModuleType("ipykernel")
    try:
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            return [run_cell("".join(cell["source"]), space) for cell in cells]
    finally:
        del sys.modules["ipykernel"]


def run_cell(source: str, space: dict) -> list[dict]:
    """Run a code cell in a namespace; return its printed text and the value of its last expression."""
    statements = ast.parse(source).body
    last = statements.pop() if isinstance(statements[-1], ast.Expr) else None
    printed, value = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        exec(compile(ast.Module(statements, []), "cell", "exec"), space)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), "cell", "eval"), space)
    outputs = []
    if printed.getvalue():
        text = re.sub(r"[^\n]*\r", "", printed.getvalue())  # as a terminal shows it
        text = TIMES.sub("", text.replace(f"{Path.cwd()}/", ""))  # paths without the temporary folder
        outputs.append({"name": "stdout", "output_type": "stream", "text": text.splitlines(keepends=True)})
    if value is not None:
        data = {"text/plain": pprint.pformat(value, width=100, sort_dicts=False).splitlines(keepends=True)}
        if isinstance(value, PIL.Image.Image):
            file = io.BytesIO()
            value.save(file, "PNG", optimize=True)
            size = f"<PIL image, {value.width} x {value.height}>"  # repr() has a memory address
            data = {"image/png": base64.b64encode(file.getvalue()).decode(), "text/plain": [size]}
        outputs.append({"data": data, "execution_count": None, "metadata": {}, "output_type": "execute_result"})
    return outputs


if __name__ == "__main__":
    main()
