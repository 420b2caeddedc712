"""The house: a book in reading order, shelves around it, budgets that hold. benchmarks/house.py counts."""

import ast
import itertools
import re
import sys
import tomllib
from functools import cache

import pytest

from benchmarks import house, plain

ROOT = house.ROOT
FILES = {  # minivlmrl.scale.checkpoint: its path
    ".".join(path.relative_to(house.PACKAGE.parent).with_suffix("").parts): path
    for path in house.source_files(house.PACKAGE)
    if path.name != "__init__.py"
} | {f"minivlmrl.kernels.{path.stem}": path for path in house.source_files(ROOT / "kernels")}
PROSE = [*FILES.values(), ROOT / "train.py", ROOT / "README.md"]
PATTERNS = "docs/*.md", "recipes/*.yaml", "benchmarks/*.py", "audit/*.md", "audit/minivlmrl_audit/*.*"
PROSE += [path for pattern in PATTERNS for path in ROOT.glob(pattern)]
BOOK = [f"minivlmrl.{name}" for name in house.READING_ORDER]
# every folder imports those before it; "book" are its chapters 1 to 14, "train" is minivlmrl/train.py
ORDER = [
    *("kernels", "book", "hub", "data", "adapters", "scale", "objectives", "sampling", "reward_functions"),
    *("environments", "algorithms", "tasks", "run", "train", "tools"),
]
LIBRARIES = {"torch", "numpy", "PIL", "tokenizers", "minivlmrl"}  # of the book, besides the standard library
BANNED = "everyones|everyone's|places|pace|spare|figures|learnt|behind|stand|stands|aside"


@cache
def tree(name: str) -> ast.Module:
    return ast.parse(FILES[name].read_text())


def imports(name: str) -> set[str]:
    """Modules that a file imports, inside functions too, a.b for `from a import b` as well."""
    found = set()
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: write the full name instead of a relative import"
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def ours(name: str) -> set[str]:
    return imports(name) & set(FILES)


def folder(name: str) -> str:
    """minivlmrl.scale.checkpoint -> scale, minivlmrl.grpo -> book, minivlmrl.train -> train."""
    parts = name.split(".")
    return parts[1] if len(parts) > 2 or name == "minivlmrl.train" else "book"


def functions(name: str):
    return [node for node in ast.walk(tree(name)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


@cache
def densities() -> dict[str, house.Density]:
    return {name: house.density(paths) for name, paths in house.parts().items()}


def test_no_count_is_over_its_budget():
    """Of the last version and what issues granted; the files of the book are all those beside the folders."""
    assert set(BOOK) | {"minivlmrl.__main__"} == {name for name in FILES if name.count(".") == 1}
    counts = house.counts(densities())
    over = {name: (counts[name], limit) for name, limit in house.budgets().items() if counts[name] > limit}
    assert over == {}


def test_the_readme_says_how_long_the_book_is():
    readme = (ROOT / "README.md").read_text()
    lines = sum(map(house.lines, house.book()))
    assert readme.count(f"{round(lines, -2):,} lines") == 2
    assert "none over 260 lines" in readme
    assert f"{round(densities()['book'].code_lines, -2):,} of them code" in readme


@pytest.mark.parametrize("part", ["core", "audit", "recipes"])
def test_lines_that_pack_only_get_fewer(part):
    """A file has as many as house.PACKED_LINES says: who unpacks one takes it off the list."""
    files = {path.relative_to(ROOT).as_posix() for path in house.parts()[part]}
    listed = {path: count for path, count in house.PACKED_LINES.items() if path in files}
    assert {path: len(packed) for path, packed in densities()[part].packed.items()} == listed


@pytest.mark.parametrize("part", ["core", "audit", "recipes"])
def test_long_functions_only_get_fewer(part):
    """Who takes one of house.LONG_FUNCTIONS apart takes it off the list."""
    files = {path.relative_to(ROOT).as_posix() for path in house.parts()[part]}
    listed = {name for name in house.LONG_FUNCTIONS if name.partition(":")[0] in files}
    assert set(densities()[part].long_functions) == listed


NO_NAMES = {"of", "one", "own", "some", "at", "known", "found", "said", "told", "heat", "cure", "what"}


@pytest.mark.parametrize("part", ["core", "audit", "recipes"])
def test_a_variable_says_what_it_holds(part):
    """A preposition, a pronoun or a participle alone is no name."""
    names = {path.relative_to(ROOT): set(plain.variable_names(path.read_text())) for path in house.parts()[part]}
    assert {path: found & NO_NAMES for path, found in names.items() if found & NO_NAMES} == {}


SOURCE = '''
"""A docstring."""
import os

def add(x: int, y: int = 1) -> int:
    """Another."""
    # a comment
    total = x + y
    return f"{total} is {total + 1}", "a b".split(), [
        1,
    ]
'''


def test_tokens_are_counted_as_by_hand():
    """Annotations, docstrings, the colon before one, the comment and the last comma are free."""
    signature = ["def", "add", "(", "x", ",", "y", "=", "1", ")"]
    text = ['f"{total} is {total + 1}"', "total", "total", "+", "1"]
    words = ['"a b"', ".", "split", "(", ")", "b"]
    expected = [*signature, "total", "=", "x", "+", "y", "return", *text, ",", *words, ",", "[", "1", "]"]
    assert sorted(token for _, token in plain.code_tokens(SOURCE)) == sorted(expected)
    assert plain.function_tokens(SOURCE) == {"add": len(expected) - len(signature)}


@pytest.mark.parametrize(("line", "packs"), [
    ("a, b = f(), g()", True), ("a, b = b, a", False), ("a, b = pair", False), ("a, b = x, 1", False),
    ("a, b, c, d = 1, 2, 3, 4", True), ("a |= {1: 2}", True), ("a |= b", False), ("a = 'x' * (b == c)", True),
    ("a = 2 * (b == c)", False), ("f(*(a, b), c=d)", True), ("f(*a)", False), ("[y for x in z if (y := x)]", True),
])  # fmt: skip
def test_what_packs_a_line(line, packs):
    assert bool(plain.packings(line)) == packs


def test_budgets_only_fall():
    """From version to version, but for what an issue granted to the one before."""
    assert list(house.BUDGETS) == list(house.GRANTED)
    assert set(house.counts(densities())) == set(house.budgets())
    versions = list(house.BUDGETS)
    for before, after in itertools.pairwise(versions):
        now = house.BUDGETS[after]
        risen = {
            name: (number, now[name])
            for name, number in house.BUDGETS[before].items()
            if now[name] > number + house.granted(before, name)
        }
        assert risen == {}, after
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"] == versions[-1]


@pytest.mark.parametrize("name", BOOK)
def test_a_file_of_the_book_is_easy_to_read(name):
    text = FILES[name].read_text()
    assert [line for line in text.splitlines() if len(line) > 100 or "# noqa" in line] == []
    for function in functions(name):
        lines = function.end_lineno - function.lineno + 1
        arguments = function.args
        parameters = len(arguments.posonlyargs + arguments.args + arguments.kwonlyargs)
        assert lines <= 60 and parameters <= 8, f"{function.name}: {lines} lines, {parameters} parameters"
    for node in tree(name).body:
        public = isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
        is_module = isinstance(node, ast.ClassDef) and "nn.Module" in map(ast.unparse, node.bases)
        assert not public or is_module or ast.get_docstring(node), f"{node.name} has no docstring"


@pytest.mark.parametrize("name", BOOK[:-1])
def test_a_chapter_imports_earlier_ones(name):
    """And kernels, and no shelf, nowhere: what varies is an argument."""
    others = {other for other in ours(name) if folder(other) != "kernels"}
    assert others <= set(BOOK[: BOOK.index(name)])
    assert {other.partition(".")[0] for other in imports(name)} <= LIBRARIES | set(sys.stdlib_module_names)


ALONE = ["minivlmrl.losses", "minivlmrl.advantages"]  # chapters of pure functions
OBJECTIVES = [name for name in FILES if folder(name) == "objectives" and not name.endswith(".parity")]


@pytest.mark.parametrize("name", [*ALONE, *OBJECTIVES])
def test_losses_can_be_copied_out(name):
    """They import torch and the standard library; those of objectives/ also the book's two files of pure functions."""
    allowed = {"torch", "math", "dataclasses", "collections", "typing", "minivlmrl"}
    assert {other.partition(".")[0] for other in imports(name)} <= allowed
    assert ours(name) <= (set() if name in ALONE else set(ALONE))


def test_folders_are_an_order():
    assert {folder(name) for name in FILES} == set(ORDER)
    upwards = {
        name: sorted(other for other in ours(name) if ORDER.index(folder(other)) > ORDER.index(folder(name)))
        for name in FILES
        if name != "minivlmrl.__main__"
    }
    assert {name: others for name, others in upwards.items() if others} == {}


def test_the_library_does_not_know_the_audit():
    """A distribution of its own, which imports the library; two files ask whether it is installed."""
    asks = {name for name, path in FILES.items() if "minivlmrl_audit" in path.read_text()}
    assert asks == {"minivlmrl.__main__", "minivlmrl.objectives.parity"}
    assert [name for name in FILES if any(other.startswith("minivlmrl_audit") for other in imports(name))] == []


def test_every_module_of_the_audit_has_a_test():
    tests = "".join(f"{path.name} {path.read_text()}" for path in (ROOT / "audit" / "tests").glob("*.py"))
    modules = [path.stem for path in (ROOT / "audit" / "minivlmrl_audit").glob("[a-z]*.py")]
    tested = [name for name in modules if f"test_{name}.py" in tests or f"minivlmrl_audit.{name} import" in tests]
    assert modules and tested == modules


def test_files_import_each_other_in_no_circle():
    graph = {name: ours(name) - {name} for name in FILES}
    while free := [name for name, others in graph.items() if not others & set(graph)]:
        graph = {name: others for name, others in graph.items() if name not in free}
    assert {name: sorted(others & set(graph)) for name, others in graph.items()} == {}


def test_ours_is_imported_at_the_top():
    """Inside a function only a library that may be missing, or takes long, is imported."""
    for name in FILES:
        if name == "minivlmrl.__main__":
            continue
        for function in functions(name):
            for node in ast.walk(function):
                if isinstance(node, ast.ImportFrom):
                    assert not node.module.startswith("minivlmrl"), f"{name}: {function.name}"


def test_nothing_asks_for_a_stage_by_its_name():
    """An attribute of the algorithm says what a stage has."""
    asks = re.compile(r"\.stage (==|!=|in) ")
    assert [name for name, path in FILES.items() if asks.search(path.read_text())] == []


def test_every_module_has_a_test():
    """tests/test_<module>.py"""
    own = {path.stem.removeprefix("test_") for path in (ROOT / "tests").glob("test_*.py")}
    assert [n for n, path in FILES.items() if path.stem.strip("_") not in own] == []
    stems = [path.stem for path in FILES.values()]
    assert sorted(stems) == sorted(set(stems)), "two modules of one name would share a test file"


@pytest.mark.parametrize("path", PROSE, ids=lambda path: str(path.relative_to(ROOT)))
def test_plain_words(path):
    """In names, comments, errors and prose; the table of house words is in docs/README.md."""
    word = re.compile(rf"(?<![a-zA-Z])({BANNED})(?![a-zA-Z])", re.IGNORECASE)
    lines = enumerate(path.read_text().splitlines(), start=1)
    assert [f"{number}: {line.strip()}" for number, line in lines if word.search(line)] == []


def test_every_folder_is_installed():
    """The wheel has what pyproject.toml lists. A top-level package `kernels` would shadow Hugging Face's."""
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    folders = {".".join(path.parent.relative_to(ROOT).parts) for path in house.source_files(house.PACKAGE)}
    assert listed == folders | {"minivlmrl.recipes"}
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert not [path for path in (ROOT / "tests").rglob("__init__.py")]


def test_only_the_file_of_the_option_spells_the_engines_name():
    """In code: what only vLLM needs is in recipes/vllm_sampler.py; docstrings may say which program reads a file."""
    naming = []
    for name, path in FILES.items():
        if any("vllm" in text.lower() for _, text in plain.code_tokens(path.read_text())):
            naming.append(name)
    assert naming == ["minivlmrl.sampling.filters"]
