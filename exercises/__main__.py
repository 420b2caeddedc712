"""Ten functions of the book with a hole: write one as a file, and say which mistake is in what was filled in.

python -m exercises              # the list, in the root of a clone
python -m exercises 9            # writes exercise_9.py
python -m exercises 9 --check    # says pass, or which mistake; there are --hint and --solution too

An exercise is made of the book as it is now: holes.yaml names the function and the statements to cut. Beside
it each exercise has a file with its task, its hint, wrong answers and `tries`, what is asked of the function. A wrong
answer is an edit of the book's lines, and is recognised in a file that answers all tries as the edited book does.
"""

import argparse
import ast
import runpy
import sys
import textwrap
import traceback
from dataclasses import dataclass
from pathlib import Path

import torch
import yaml

FOLDER = Path(__file__).resolve().parent
BOOK = FOLDER.parent / "minivlmrl"


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

    def wrong_answers(self) -> dict[str, str]:
        """What is wrong -> a filling of the hole; an edit whose words the book no longer has is left out."""
        code = self.solution
        edits = ((says, *edit) for says, edit in self.own["WRONG"].items())
        return {says: code.replace(right, wrong) for says, right, wrong in edits if code.count(right) == 1}

    def answers(self, text: str, where: str) -> list:
        """What the function of a file answers to each try: (what was asked, answer)."""
        names: dict = {}
        exec(compile(text, where, "exec"), names)
        return list(self.own["tries"](names[self.function.name]))


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
    return lines + ([f"from minivlmrl.{module} import {', '.join(sorted(own & used))}"] if own & used else [])


def check(exercise: Exercise, text: str, where: str) -> tuple[bool, str]:
    """Whether a filled-in file is right, and what to say of it."""
    try:
        given = exercise.answers(text, where)
    except Exception as error:  # a reader's code may raise anything
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == where]
        line = getattr(error, "lineno", None) or (lines or [1])[-1]
        return False, f"{where}, line {line}: {type(error).__name__}: {getattr(error, 'msg', error)}"
    right = exercise.answers(exercise.text(exercise.solution), "the book")
    if same(given, right):
        return True, f"pass: it answers all {len(right)} tries as minivlmrl/{exercise.path.name} does"
    first = next(place for place, answer in enumerate(right) if not same(given[place], answer))  # that differs
    perhaps = []  # mistakes that answer the first try so: there may be two at once
    for says, fill in exercise.wrong_answers().items():
        wrong = exercise.answers(exercise.text(fill), "a wrong answer")
        if same(given, wrong):
            return False, f"not yet: {says}"
        if same(given[first], wrong[first]):
            perhaps.append(f"perhaps: {says}")
    (asked, expected), (_, got) = right[first], given[first]
    return False, "\n".join([f"not yet\nasked: {asked}\nexpected: {expected}\ngot: {got}", *perhaps])


def same(a, b) -> bool:
    """Whether two answers are equal, floats to about five digits."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.shape == b.shape and torch.allclose(a.double(), b.double(), rtol=1e-5, atol=1e-7, equal_nan=True)
    if isinstance(a, list | tuple) and type(a) is type(b):
        return len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


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
