"""Change a chapter of the book in small ways and count the changes that its own tests notice.

python benchmarks/mutate.py rope                          # 20 mutants of minivlmrl/rope.py, tests/test_rope.py on each
python benchmarks/mutate.py scale/checkpoint --most 999   # every mutant of a file on a shelf

A mutant is the file with one change: - for +, <= for <, 3 for 2, True for False, a statement left out. Where tests pass
all the same they have a hole, or the change means nothing (a larger cache). Files are changed in a copy of the tree.
"""

import argparse
import ast
import contextlib
import importlib
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[1]
SWAPPED = {ast.Add: ast.Sub, ast.Mult: ast.Div, ast.Lt: ast.LtE, ast.Gt: ast.GtE, ast.Eq: ast.NotEq, ast.And: ast.Or}
SWAPPED |= {ast.Is: ast.IsNot, ast.In: ast.NotIn}
SWAPPED |= {other: one for one, other in SWAPPED.items()} | {ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult}


def changed(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what a node is in each of its mutants."""
    match node:
        case ast.BinOp(op=op) | ast.BoolOp(op=op) if type(op) in SWAPPED:
            yield type(node)(**vars(node) | {"op": SWAPPED[type(op)]()})
        case ast.Compare(ops=[op]) if type(op) in SWAPPED:
            yield ast.Compare(node.left, [SWAPPED[type(op)]()], node.comparators)
        case ast.UnaryOp(op=ast.Not() | ast.USub()):
            yield node.operand
        case ast.Constant(value=bool()):
            yield ast.Constant(not node.value)
        case ast.Constant(value=int() | float()):
            yield ast.Constant(node.value + 1)
        case ast.Name("min" | "max"):
            yield ast.Name({"min": "max", "max": "min"}[node.id])
        case ast.Assign() | ast.AugAssign() | ast.Expr() | ast.If() | ast.Raise() | ast.Return():
            yield ast.Pass()


class Mutate(ast.NodeTransformer):
    """Make the change of this number in a tree; `change` says which node became what, None after the last."""

    def __init__(self, tree: ast.AST, number: int):
        self.left, self.change = number, None
        self.kept = {id(getattr(node, field, None)) for node in ast.walk(tree) for field in ("annotation", "returns")}
        self.visit(tree)

    def visit(self, node: ast.AST) -> ast.AST:
        docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if docstring or id(node) in self.kept:
            return node
        for other in changed(node) if self.change is None else ():
            if self.left == 0:
                self.change = node, other
                return other
            self.left -= 1
        return self.generic_visit(node)


def mutants(source: str) -> list[tuple[int, str, str]]:
    """List the mutants of a file: (line, the change, the new source)."""
    found, lines = [], source.splitlines()
    while (one := Mutate(tree := ast.parse(source), len(found))).change:
        was, becomes = (ast.unparse(node).splitlines()[0] for node in one.change)
        line = one.change[0].lineno
        found.append((line, f"{was} -> {becomes}    in: {lines[line - 1].strip()}", ast.unparse(tree)))
    return found


def run_tests(folder: Path, tests: str, seen: Path):
    """Exit with pytest's status, in a process of its own; write which modules were imported to `seen`."""
    os.setpgrp()  # so that a mutant that hangs is ended with the processes of its tests
    os.chdir(folder)
    os.environ["PYTHONPATH"] = str(folder)
    sys.path.insert(0, str(folder))  # before an installed minivlmrl
    with open(os.devnull, "w") as null, contextlib.redirect_stdout(null), contextlib.redirect_stderr(null):
        import pytest

        status = pytest.main([tests, "-x", "-n", "0", "-m", "", "-p", "no:cacheprovider"])
    own = (str(folder), str(ROOT / "benchmarks"))
    seen.write_text("\n".join(x for x, m in sys.modules.items() if not str(getattr(m, "__file__", "")).startswith(own)))
    os._exit(status)


def passes(limit: float | None, *arguments) -> bool:
    """Tell whether run_tests ends within `limit` seconds and all tests pass."""
    process = multiprocessing.get_context("fork").Process(target=run_tests, args=arguments)
    process.start()
    process.join(limit)
    if process.is_alive():
        os.killpg(process.pid, signal.SIGKILL)
    process.join()
    return process.exitcode == 0


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("chapter", help="a file of minivlmrl/ without .py, such as rope")
    parser.add_argument("--most", type=int, default=20, help="mutants, drawn at random (20)")
    parser.add_argument("--seed", type=int, default=0, help="of the draw (0)")
    options = parser.parse_args()
    chapter = Path("minivlmrl", f"{options.chapter}.py")
    tests = f"tests/test_{chapter.stem.strip('_')}.py"
    os.environ["OMP_NUM_THREADS"] = "1"  # a process with threads cannot be forked safely
    tqdm.monitor_interval = 0  # nor with tqdm's
    found = mutants((ROOT / chapter).read_text())
    drawn = sorted(random.Random(options.seed).sample(found, min(options.most, len(found))))
    with tempfile.TemporaryDirectory() as scratch:
        folder, seen = Path(scratch, "tree").resolve(), Path(scratch, "seen")
        shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(".*", "__pycache__", "runs", "shared"))
        begin = time.monotonic()
        if not passes(None, folder, tests, seen):
            sys.exit(f"{tests} fails without a change, see: pytest {tests}")
        limit = 2 * (time.monotonic() - begin)
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"  # that of a mutant could be taken for the next one's
        sys.dont_write_bytecode = True
        for name in seen.read_text().splitlines():  # torch, transformers, ...: once for all mutants
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
        survivors = 0
        for line, change, source in tqdm(drawn, desc=options.chapter, unit="mutant"):
            (folder / chapter).write_text(source)
            if passes(limit, folder, tests, seen):
                survivors += 1
                tqdm.write(f"survives: {chapter}:{line}  {change}", file=sys.stdout)
    print(f"killed {len(drawn) - survivors} of {len(drawn)} mutants of {chapter} with {tests}")


if __name__ == "__main__":
    main()
