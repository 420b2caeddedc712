"""Ten functions of the book with a hole: write one as a file, and say which mistake is in what was filled in.

python -m exercises              # the list, in the root of a clone
python -m exercises 9            # writes exercise_9.py
python -m exercises 9 --check    # says pass, or which mistake; there are --hint and --solution too

An exercise is made of the book as it is now: holes.yaml names the function and the statements to cut. Beside
it each exercise has a file with its task, its hint, wrong answers and `tries`, what is asked of the function. A wrong
answer is an edit of the book's lines (or several, of which each is that mistake), and is recognised in a file that
answers all tries as the edited book does. Where a try answers several things, a mistake may explain only some of them.
"""

import argparse
import ast
import math
import runpy
import sys
import textwrap
import traceback
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path

import torch
import yaml

FOLDER = Path(__file__).resolve().parent
BOOK = FOLDER.parent / "minivlmrl"
DRAWS = "asked twice, it answers differently: all that is drawn is in the arguments, such as `uniform`; draw nothing"
LINES = 1_000_000  # that a filled-in file may run; the book's own need some hundreds


@dataclass
class Exercise:
    """A function of the book, the lines to cut, and what its own file says."""

    number: int
    path: Path  # the file of the book
    function: ast.FunctionDef
    imports: list[str]  # what the function needs of its file
    lines: tuple[int, int]  # first and last line to cut, from 1
    margin: str  # spaces before these
    own: dict  # TASK, HINT, WRONG, tries

    @property
    def solution(self) -> str:
        """The lines of the book that are cut."""
        return textwrap.dedent("\n".join(self.source(*self.lines)))

    def source(self, first: int, last: int) -> list[str]:
        """Lines of the book's file, both included."""
        return self.path.read_text(encoding="utf-8").splitlines()[first - 1 : last]

    def text(self, fill: str | None = None) -> str:
        """The file for a reader; with `fill` instead of the hole."""
        first, last = self.lines
        hole = f"# ---- your lines; the book has {last - first + 1} here\n"
        hole += f'raise NotImplementedError("exercise {self.number}: fill this in")\n# ---- end of your lines'
        hole = textwrap.indent(hole if fill is None else fill, self.margin)
        head = f'"""Exercise {self.number}: {self.function.name} of minivlmrl/{self.path.name}, with a hole.\n'
        head += f'{self.own["TASK"]}\npython -m exercises {self.number} --check    # or --hint\n"""\n'
        before, after = self.source(self.function.lineno, first - 1), self.source(last + 1, self.function.end_lineno)
        return "\n".join([head, *self.imports, "\n", *before, hole, *after, ""])

    def wrong_answers(self) -> list[tuple[str, str]]:
        """(what is wrong, a filling of the hole); an edit whose words the book no longer has is left out."""
        code, found = self.solution, []
        for says, edits in self.own["WRONG"].items():
            for right, wrong in edits if isinstance(edits, list) else [edits]:
                found += [(says, code.replace(right, wrong))] if code.count(right) == 1 else []
        return found

    @cached_property
    def right(self) -> dict[str, list]:
        """What the book answers."""
        return self.answers(self.text(self.solution), "the book")

    @cached_property
    def known(self) -> list[tuple[str, dict[str, list]]]:
        """(what is wrong, what the book with this mistake answers)."""
        return [(says, self.answers(self.text(fill), "a wrong answer")) for says, fill in self.wrong_answers()]

    def answers(self, text: str, where: str) -> dict[str, list]:
        """What the function of a file answers: for each thing it makes, (what was asked, answer) of each try."""
        names, found, before = {}, {}, sys.gettrace()
        sys.settrace(line_counter(where))
        try:
            exec(compile(text, where, "exec"), names)
            for asked, parts in self.own["tries"](never_none(names[self.function.name])):
                for kind, answer in (parts if isinstance(parts, dict) else {"": parts}).items():
                    found.setdefault(kind, []).append((asked, answer))
        finally:
            sys.settrace(before)
        return found


def line_counter(where: str):
    """Make a trace function that ends code of the file `where` after LINES lines."""
    lines = 0

    def count(frame, event, argument):
        nonlocal lines
        if frame.f_code.co_filename != where:
            return None  # nor its lines
        lines += 1
        if lines > LINES:
            raise RuntimeError(f"{LINES:,} lines were run and it goes on: which loop never ends?")
        return count

    return count


def never_none(function):
    """The function, which may not return None."""

    def asked(*arguments, **options):
        answer = function(*arguments, **options)
        if answer is None:
            raise ValueError(f"{function.__name__} returns nothing: end it with a return")
        return answer

    return asked


def load(number: int, book: Path = BOOK) -> Exercise:
    """Cut an exercise out of the book (ValueError: there is no such exercise, or the book has lost its function)."""
    holes = markers()
    if not 1 <= number <= len(holes):
        raise ValueError(f"there is no exercise {number}: they are 1 to {len(holes)}")
    hole, keys = holes[number - 1], (holes[number - 1]["function"], holes[number - 1]["does"])
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(book.glob("*.py"))}
    files = [(path, ast.parse(text)) for path, text in texts.items() if any(key in text for key in keys)]
    functions = [(path, tree, node) for path, tree in files for node in tree.body if isinstance(node, ast.FunctionDef)]
    found = [place for place in functions if place[2].name == hole["function"]]
    found = found or [place for place in functions if (ast.get_docstring(place[2]) or "").startswith(hole["does"])]
    if not found:
        known = f"is named {hole['function']} or has a docstring that begins with {hole['does']!r}"
        raise ValueError(f"exercises/holes.yaml: no function of the book {known}; say what exercise {number} is about")
    path, tree, function = found[0]
    first, last = (statements(function)[place - 1] for place in hole["cut"])
    own = runpy.run_path(str(FOLDER / f"{number:02}_{hole['name']}.py"))
    lines, margin = (first.lineno, last.end_lineno), " " * first.col_offset
    return Exercise(number, path, function, needed(tree, function, path.stem), lines, margin, own)


def markers() -> list[dict]:
    """The list of holes."""
    return yaml.safe_load((FOLDER / "holes.yaml").read_text(encoding="utf-8"))


def statements(function: ast.FunctionDef) -> list[ast.stmt]:
    """All statements of a function but its docstring, in the order of their lines, also those inside others."""
    found = [node for node in ast.walk(function) if isinstance(node, ast.stmt) and node is not function]
    return sorted(found, key=lambda node: (node.lineno, node.col_offset))[1 if ast.get_docstring(function) else 0 :]


def needed(tree: ast.Module, function: ast.FunctionDef, module: str) -> list[str]:
    """The imports of a function that is alone in a file: of what its module imports and defines, what it uses."""
    used = {"torch", *(node.id for node in ast.walk(function) if isinstance(node, ast.Name))} - {function.name}
    lines, own = [], set()
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            node.names = [name for name in node.names if (name.asname or name.name) in used]
            lines += [ast.unparse(node)] if node.names else []
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            own.add(node.name)
        elif isinstance(node, ast.Assign):
            own |= {name.id for target in node.targets for name in ast.walk(target) if isinstance(name, ast.Name)}
    if "Tensor" in used and "import torch" not in lines:
        lines.insert(0, "import torch")
    return lines + ([f"from minivlmrl.{module} import {', '.join(sorted(own & used))}"] if own & used else [])


def check(exercise: Exercise, text: str, where: str) -> tuple[bool, str]:
    """Whether a filled-in file is right, and what to say of it."""
    try:
        given, *others = (exercise.answers(text, where) for _ in range(4))
    except Exception as error:  # a reader's code may raise anything
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == where]
        line = getattr(error, "lineno", None) or (lines or [None])[-1]
        place = f"{where}, line {line}" if line else where
        return False, f"{place}: {type(error).__name__}: {getattr(error, 'msg', error)}"
    right = exercise.right
    if any(not same(given[kind], again[kind]) for again in others for kind in given):
        return False, f"not yet: {DRAWS}"
    left = {kind for kind in right if not same(given[kind], right[kind])}
    if not left:
        tries = max(map(len, right.values()))
        return True, f"pass: it answers all {tries} tries as minivlmrl/{exercise.path.name} does"
    explained = [  # a mistake that changes what is right here was not made
        (says, {kind for kind in left if same(given[kind], wrong[kind])})
        for says, wrong in exercise.known
        if all(same(wrong[kind], right[kind]) for kind in right.keys() - left)
    ]
    named = []
    while best := max(
        ((len(kinds & left), -i) for i, (_, kinds) in enumerate(explained) if kinds & left), default=None
    ):
        says, kinds = explained[-best[1]]
        named.append(says)
        left -= kinds
    if left:
        kind = next(kind for kind in right if kind in left)
        named.append(shown(exercise, given[kind], kind))
    return False, "not yet: " + "\nand: ".join(named)


def shown(exercise: Exercise, given: list, kind: str) -> str:
    """Say of what is no known mistake how it differs, and which mistakes would answer the first try so."""
    right = exercise.right[kind]
    first = next(place for place, answer in enumerate(right) if not same(given[place], answer))
    (asked, expected), (_, got) = right[first], given[first]
    wrong = [says for says, answers in exercise.known if same(given[first], answers[kind][first])]
    said = form(got, expected) or difference(got, expected)
    lines = [said, f"asked: {asked}", f"expected{kind and f' {kind}'}: {expected}", f"got: {got}"]
    return "\n".join([*filter(None, lines), *(f"perhaps: {says}" for says in dict.fromkeys(wrong))])


def difference(got, expected) -> str:
    """Say where two answers of one form differ, by how much, and what all differences have in common."""
    pairs = list(zip(leaves(got), leaves(expected), strict=True))
    off = [(place, a, b) for (place, a), (_, b) in pairs if not same(a, b)]
    place, a, b = max(off, key=lambda one: abs(one[1] - one[2]) if is_number(one[1]) and one[1] == one[1] else math.inf)
    by = f", by {abs(a - b):.3g}" if is_number(a) and is_number(b) and math.isfinite(a - b) else ""
    most = f", most at {place.removesuffix('[]')}" if place else ""
    a, b = (f"{x:.8g}" if isinstance(x, float) else repr(x) for x in (a, b))
    said = f"{len(off)} of {len(pairs)} values differ{most}: {a} where {b} is right{by}"
    return f"{said}{common([(a, b) for (_, a), (_, b) in pairs])}"


def common(pairs: list[tuple]) -> str:
    """Say whether all numbers are those that are right in another order, or times or plus one number."""
    if len(pairs) < 3 or not all(is_number(x) and math.isfinite(x) for pair in pairs for x in pair):
        return ""
    got, right = (torch.tensor(numbers, dtype=torch.float64) for numbers in zip(*pairs, strict=True))
    factor, more = (got @ right / (right @ right)).item() if right.any() else 0.0, (got - right).mean().item()
    if abs(factor - 1) > 1e-3 and len(set(right.tolist())) > 1 and same(got, factor * right):
        return f"; each is {factor:.4g} times what is right"
    if same(got.sort().values, right.sort().values):
        return "; the numbers are right, their order is not"
    return f"; each is {abs(more):.4g} too {'large' if more > 0 else 'small'}" if same(got, right + more) else ""


def leaves(value, place: str = "") -> list[tuple[str, object]]:
    """List the numbers and texts in an answer with their indices: [("[0, 2]", 0.5)]."""
    if isinstance(value, torch.Tensor):
        value = value.detach()
        return [(f"{place}{list(index)}", value[index].item()) for index in product(*map(range, value.shape))]
    if isinstance(value, list | tuple):
        return [leaf for index, inside in enumerate(value) for leaf in leaves(inside, f"{place}[{index}]")]
    return [(place, value)]


def is_number(value) -> bool:
    return isinstance(value, int | float)


def form(got, expected) -> str:
    """Say how shape, length or type of an answer differ, "" if they do not."""
    if type(got) is not type(expected):
        return f"it is of type {type(got).__name__}; {type(expected).__name__} is right"
    if isinstance(got, torch.Tensor) and got.shape != expected.shape:
        return f"its shape is {tuple(got.shape)}; {tuple(expected.shape)} is right"
    if isinstance(got, torch.Tensor) and got.is_floating_point() != expected.is_floating_point():
        return f"it is {got.dtype}; {expected.dtype} is right"
    if isinstance(got, list | tuple):
        if len(got) != len(expected):
            return f"its length is {len(got)}; {len(expected)} is right"
        return next(filter(None, map(form, got, expected)), "")
    return ""


def same(a, b) -> bool:
    """Whether two answers are equal, floats to about five digits."""
    if form(a, b):
        return False
    if isinstance(a, torch.Tensor):
        return torch.allclose(a.double(), b.double(), rtol=1e-5, atol=1e-7, equal_nan=True)
    return all(map(same, a, b)) if isinstance(a, list | tuple) else a == b


def main(arguments: list[str] | None = None) -> int:
    """Return the exit status: 1 if what was filled in is not right, 2 for a mistake in the command."""
    parser = argparse.ArgumentParser(prog="python -m exercises", description=__doc__.split("\n")[0])
    parser.add_argument("number", type=int, nargs="?", help="1 to 10, in the order of the book; none: the list")
    parser.add_argument("--check", metavar="FILE", nargs="?", const="", help="by default exercise_NUMBER.py")
    parser.add_argument("--hint", action="store_true", help="print a hint")
    parser.add_argument("--solution", action="store_true", help="print the lines of the book")
    options = parser.parse_args(arguments)
    try:
        return run(options)
    except ValueError as error:
        print(f"python -m exercises: {error}", file=sys.stderr)
        return 2


def run(options: argparse.Namespace) -> int:
    """Do what the command line asks for."""
    if options.number is None:
        for number in range(1, len(markers()) + 1):
            exercise = load(number)
            where, (first, last) = f"{exercise.function.name} in {exercise.path.name}", exercise.lines
            print(f"{number:3}  {where:40}{last - first + 1:3} lines, {len(exercise.own['WRONG'])} mistakes known")
        return 0
    exercise, file = load(options.number), Path(options.check or f"exercise_{options.number}.py")
    passed, says = True, (exercise.own["HINT"] if options.hint else exercise.solution).strip("\n")
    if options.check is not None:
        if not file.is_file():
            raise ValueError(f"{file}: no such file; `python -m exercises {options.number}` writes it")
        passed, says = check(exercise, file.read_text(encoding="utf-8"), str(file))
    elif not options.hint and not options.solution:
        if file.exists():
            raise ValueError(f"{file} is there already: check it with --check, or remove it to begin anew")
        file.write_text(exercise.text(), encoding="utf-8")
        says = f"{file} is {exercise.function.name} with a hole. Fill it in, then add --check to this command."
    print(says, file=sys.stdout if passed else sys.stderr)
    return int(not passed)


if __name__ == "__main__":
    sys.exit(main())
