"""Check page links to code, such as [`name`](../file.py) or [`name`][label]: the file must define the name."""

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"\[`([^`]+)`\](?:\(([^)]+)\)|\[(\w+)\])")
LABEL = re.compile(r"^\[(\w+)\]: (\S+)$", re.MULTILINE)


def links(page: Path) -> list[tuple[str, Path]]:
    """Return (name, file) for links whose text is code."""
    text = page.read_text()
    labels = dict(LABEL.findall(text))
    return [
        (name, (page.parent / (target or labels[label]).partition("#")[0]).resolve())
        for name, target, label in LINK.findall(text)
    ]


@cache
def names(path: Path) -> set[str]:
    """Return names that a Python file defines: functions, classes, constants, and members as `Class.name`."""

    def of(body, prefix=""):
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield prefix + node.name
                if isinstance(node, ast.ClassDef):
                    yield from of(node.body, f"{node.name}.")
            for target in getattr(node, "targets", [getattr(node, "target", None)]):
                if isinstance(target, ast.Name):
                    yield prefix + target.id

    return set(of(ast.parse(path.read_text()).body))


def missing(page: Path) -> list[str]:
    """Return links whose file does not exist or does not define the name."""
    return [
        f"{path.relative_to(ROOT)}: no {name}"
        for name, path in links(page)
        if not path.is_file() or (path.suffix == ".py" and name not in names(path))
    ]


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def rows_of(text: str, title: str) -> list[list[str]]:
    """Return the cells in the first table below a title, without header."""
    section = re.split(r"\n##+ ", text.split(f"## {title}\n")[1])[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" |")] for line in lines[2:]]
