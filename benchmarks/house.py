"""Print the house: the files of the book and the shelves with their lines, beside their budgets.

python benchmarks/house.py           # a table; exit status 1 if anything exceeds its budget
"""

import dataclasses
import sys
import typing
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "minivlmrl"
# in reading order; a file imports those before it, train.py comes last
READING_ORDER = (
    *("image", "chat", "rows", "rope", "vision", "attention", "batch", "decoder", "logprobs"),
    *("generate", "rewards", "advantages", "losses", "grpo", "train"),
)
FIELDS = 200  # of a recipe
# lines of at most 100 columns; these numbers only fall, but for what is new: families (Qwen3-VL, Qwen3.5), environments
BOOK_LINES, FILE_LINES, TOTAL_LINES = 2000, 200, 18871
SHELF_LINES = {
    "kernels": 1741,
    "hub": 1431,
    "data": 2434,
    "adapters": 669,
    "scale": 799,
    "sampling": 578,
    "reward_functions": 869,
    "environments": 309,
    "algorithms": 2268,
    "tasks": 177,
    "run": 2761,
    "tools": 876,
    "audit": 1870,
}


def book() -> dict[str, int]:
    """Lines of each file of the book, in reading order: {"image": 150, ...}."""
    return {name: lines(PACKAGE / f"{name}.py") for name in READING_ORDER}


def shelves() -> dict[str, int]:
    """Lines of each shelf: {"algorithms": 2268, ..., "kernels": 1180}."""
    folders = {path.name: [path] for path in sorted(PACKAGE.iterdir()) if any(path.glob("*.py"))}
    folders["kernels"].append(ROOT / "kernels")
    return {name: sum(map(lines, source_files(*paths))) for name, paths in folders.items()}


def total() -> int:
    """Lines of the whole package, kernels included."""
    return sum(map(lines, source_files(PACKAGE, ROOT / "kernels")))


def fields(options=None, prefix: str = "") -> list[str]:
    """Name what a recipe can set, "grpo.beta"; a list or an object with names of its own counts once."""
    if options is None:
        from minivlmrl.run.config import RunConfig as options  # torch takes seconds
    found = []
    for name, hint in typing.get_type_hints(options).items():
        inner = dataclasses.is_dataclass(hint)
        found += fields(hint, f"{prefix}{name}.") if inner else [prefix + name]
    return found


def source_files(*folders: Path) -> list[Path]:
    """The Python files in these folders and their subfolders."""
    return [path for folder in folders for path in sorted(folder.rglob("*.py"))]


def lines(path: Path) -> int:
    """Lines of a file, docstrings and empty lines included."""
    return len(path.read_text().splitlines())


def main(arguments: list[str]) -> int:
    """Returns the exit status."""
    chapters = book()
    rows = [(f"{name}.py", count, FILE_LINES) for name, count in chapters.items()]
    rows.append(("the book", sum(chapters.values()), BOOK_LINES))
    rows += [(f"{name}/", count, SHELF_LINES.get(name)) for name, count in shelves().items()]
    rows.append(("package and kernels", total(), TOTAL_LINES))
    rows.append(("fields of a recipe", len(fields()), FIELDS))
    print(f"{'':20} {'lines':>6} {'budget':>7}")
    for name, count, budget in rows:
        over = "   over its budget" if budget and count > budget else ""
        print(f"{name:20} {count:6} {budget or '':>7}{over}")
    return int(any(budget and count > budget for _, count, budget in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
