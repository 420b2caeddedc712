"""Write ten functions of minivlmrl yourself: each exercise is a function with a hole, and a check names your mistake.

python -m docs.exercises              # list the exercises; run this in the root of a clone
python -m docs.exercises 9            # write exercise_9.py
python -m docs.exercises 9 --check    # print "pass" or the mistake; --hint and --solution also exist

The exercises are made from the current code: holes.yaml names the function and the statements to remove. Each exercise
has a file with its task, its hint, wrong answers and `tries`, the calls that test the function. A wrong answer is an
edit of the original lines, or several edits that make the same mistake. A reader's file has this mistake if all its
results equal those of the edited function. If a call has several results, a mistake may explain only some of them.
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
PACKAGE = FOLDER.parents[1] / "minivlmrl"
DRAWS = (
    "two calls with the same arguments return different results; do not generate random numbers, because all random "
    "numbers are arguments, such as `uniform`"
)
LINES = 1_000_000  # limit of executed lines in a reader's file; the original functions execute some hundreds


@dataclass
class Exercise:
    """A function of the package, the lines to remove, and the contents of the exercise's file."""

    number: int
    path: Path  # file that contains the function
    name: str  # name of this file in the package, such as losses/grpo.py
    function: ast.FunctionDef
    imports: list[str]  # import statements that the function needs
    lines: tuple[int, int]  # first and last line to remove, counted from 1
    margin: str  # spaces before these lines
    own: dict  # TASK, HINT, WRONG and tries of the exercise's file

    @property
    def solution(self) -> str:
        """The removed lines."""
        return textwrap.dedent("\n".join(self.source(*self.lines)))

    def source(self, first: int, last: int) -> list[str]:
        """Return the lines `first` to `last` of the function's file."""
        return self.path.read_text(encoding="utf-8").splitlines()[first - 1 : last]

    def text(self, fill: str | None = None) -> str:
        """Return the file that the reader gets, or the file with `fill` in place of the hole."""
        first, last = self.lines
        if fill is None:
            fill = (
                f"# ---- your lines; minivlmrl has {last - first + 1} lines here\n"
                f'raise NotImplementedError("exercise {self.number}: fill this in")\n'
                "# ---- end of your lines"
            )
        docstring = (
            f'"""Exercise {self.number}: {self.function.name} of minivlmrl/{self.name}, with a hole.\n'
            f"{self.own['TASK']}\n"
            f"python -m docs.exercises {self.number} --check    # or --hint\n"
            '"""\n'
        )
        before = self.source(self.function.lineno, first - 1)
        after = self.source(last + 1, self.function.end_lineno)
        filled = textwrap.indent(fill, self.margin)
        return "\n".join([docstring, *self.imports, "\n", *before, filled, *after, ""])

    def wrong_answers(self) -> list[tuple[str, str]]:
        """Return (mistake, lines with this mistake); an edit is skipped if its text is no longer in the function."""
        answers = []
        for mistake, edits in self.own["WRONG"].items():
            for right, wrong in edits if isinstance(edits, list) else [edits]:
                if self.solution.count(right) == 1:
                    answers.append((mistake, self.solution.replace(right, wrong)))
        return answers

    @cached_property
    def right(self) -> dict[str, list]:
        """The results of the original function."""
        return self.answers(self.text(self.solution), "the package")

    @cached_property
    def known(self) -> list[tuple[str, dict[str, list]]]:
        """(mistake, results of the function with this mistake), for all known mistakes."""
        return [(mistake, self.answers(self.text(fill), "a wrong answer")) for mistake, fill in self.wrong_answers()]

    def answers(self, text: str, where: str) -> dict[str, list]:
        """Run all tries with the function in `text`.

        Returns:
            {name of a result: (description of the call, result) of each try}.
        """
        names = {}
        answers = {}
        tracer = sys.gettrace()
        sys.settrace(line_counter(where))
        try:
            exec(compile(text, where, "exec"), names)
            for asked, parts in self.own["tries"](never_none(names[self.function.name])):
                if not isinstance(parts, dict):
                    parts = {"": parts}
                for kind, answer in parts.items():
                    answers.setdefault(kind, []).append((asked, answer))
        finally:
            sys.settrace(tracer)
        return answers


def line_counter(where: str):
    """Return a trace function that stops code of the file `where` after LINES lines."""
    lines = 0

    def count(frame, event, argument):
        nonlocal lines
        if frame.f_code.co_filename != where:
            return None  # do not trace the lines of this call
        lines += 1
        if lines > LINES:
            raise RuntimeError(f"the function has not returned after {LINES:,} lines; look for a loop that never ends")
        return count

    return count


def never_none(function):
    """Wrap a function so that it raises ValueError if it returns None."""

    def asked(*arguments, **options):
        answer = function(*arguments, **options)
        if answer is None:
            raise ValueError(f"{function.__name__} returns None; end the function with a return statement")
        return answer

    return asked


def load(number: int, package: Path = PACKAGE) -> Exercise:
    """Build an exercise from the current code of the package.

    Raises:
        ValueError: the exercise or its function does not exist.
    """
    holes = markers()
    if not 1 <= number <= len(holes):
        raise ValueError(f"exercise {number} does not exist; choose a number from 1 to {len(holes)}")
    hole = holes[number - 1]
    path, tree, function = find_function(hole, number, package)
    first_number, last_number = hole["cut"]
    first = statements(function)[first_number - 1]
    last = statements(function)[last_number - 1]
    name = path.relative_to(package).as_posix()
    return Exercise(
        number=number,
        path=path,
        name=name,
        function=function,
        imports=needed(tree, function, name.removesuffix(".py").replace("/", ".")),
        lines=(first.lineno, last.end_lineno),
        margin=" " * first.col_offset,
        own=runpy.run_path(str(FOLDER / f"{number:02}_{hole['name']}.py")),
    )


def find_function(hole: dict, number: int, package: Path) -> tuple[Path, ast.Module, ast.FunctionDef]:
    """Find the function of a hole by its name.

    Returns:
        The file, its syntax tree and the function.
    """
    for path in sorted(package.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if hole["function"] not in text:
            continue
        tree = ast.parse(text)
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and node.name == hole["function"]:
                return path, tree, node
    raise ValueError(
        f"docs/exercises/holes.yaml: no function of minivlmrl is named {hole['function']}; correct the entry of "
        f"exercise {number}"
    )


def markers() -> list[dict]:
    """Return the entries of holes.yaml."""
    return yaml.safe_load((FOLDER / "holes.yaml").read_text(encoding="utf-8"))


def statements(function: ast.FunctionDef) -> list[ast.stmt]:
    """Return all statements of a function in the order of lines, including nested ones, without the docstring."""
    nodes = [node for node in ast.walk(function) if isinstance(node, ast.stmt) and node is not function]
    nodes.sort(key=lambda node: (node.lineno, node.col_offset))
    return nodes[1:] if ast.get_docstring(function) else nodes


def needed(tree: ast.Module, function: ast.FunctionDef, module: str) -> list[str]:
    """Return the import statements that a function needs in a file of its own.

    They import the names that the function uses and that its module imports or defines.
    """
    used = {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
    used.add("torch")
    used.discard(function.name)
    lines = []
    defined = set()
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            node.names = [name for name in node.names if (name.asname or name.name) in used]
            if node.names:
                lines.append(ast.unparse(node))
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            defined.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            assigned = node.targets if isinstance(node, ast.Assign) else [node.target]
            targets = [name for target in assigned for name in ast.walk(target)]
            defined |= {name.id for name in targets if isinstance(name, ast.Name)}
    if "Tensor" in used and "import torch" not in lines:
        lines.insert(0, "import torch")
    if defined & used:
        lines.append(f"from minivlmrl.{module} import {', '.join(sorted(defined & used))}")
    return lines


def check(exercise: Exercise, text: str, where: str) -> tuple[bool, str]:
    """Check a reader's file. Return whether it is right, and the text to print."""
    try:
        given, *others = [exercise.answers(text, where) for _ in range(4)]
    except Exception as error:  # a reader's code may raise anything
        return False, describe_error(error, where)
    right = exercise.right
    if any(not same(given[kind], again[kind]) for again in others for kind in given):
        return False, f"not yet: {DRAWS}"
    wrong_kinds = [kind for kind in right if not same(given[kind], right[kind])]
    if not wrong_kinds:
        num_tries = max(map(len, right.values()))
        return True, f"pass: in all {num_tries} tries, the results equal those of minivlmrl/{exercise.name}"
    mistakes, unexplained = find_mistakes(exercise, given, wrong_kinds)
    if unexplained:
        mistakes.append(describe_difference(exercise, given[unexplained[0]], unexplained[0]))
    return False, "not yet: " + "\nand: ".join(mistakes)


def describe_error(error: Exception, where: str) -> str:
    """Describe an exception that a reader's file raised, with its line."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == where]
    line = getattr(error, "lineno", None) or (lines[-1] if lines else None)
    place = f"{where}, line {line}" if line else where
    return f"{place}: {type(error).__name__}: {getattr(error, 'msg', error)}"


def find_mistakes(exercise: Exercise, given: dict, wrong_kinds: list[str]) -> tuple[list[str], list[str]]:
    """Find the known mistakes that explain the wrong results.

    Returns:
        The mistakes, and the names of the wrong results that no mistake explains.
    """
    right = exercise.right
    right_kinds = right.keys() - wrong_kinds
    explained = []  # (mistake, names of the results that it explains)
    for mistake, answers in exercise.known:
        # the reader did not make a mistake that would change a result that is right
        if all(same(answers[kind], right[kind]) for kind in right_kinds):
            explained.append((mistake, {kind for kind in wrong_kinds if same(given[kind], answers[kind])}))
    mistakes = []
    unexplained = list(wrong_kinds)
    while explained:
        mistake, kinds = max(explained, key=lambda pair: len(pair[1].intersection(unexplained)))
        if kinds.isdisjoint(unexplained):
            break
        mistakes.append(mistake)
        unexplained = [kind for kind in unexplained if kind not in kinds]
    return mistakes, unexplained


def describe_difference(exercise: Exercise, given: list, kind: str) -> str:
    """Describe the first wrong result of an unknown mistake, and name known mistakes with the same first result."""
    right = exercise.right[kind]
    first = 0  # index of the first try with a wrong result
    while same(given[first], right[first]):
        first += 1
    asked, expected = right[first]
    _, got = given[first]
    label = f"expected {kind}" if kind else "expected"
    lines = [f"input: {asked}", f"{label}: {expected}", f"got: {got}"]
    difference = form(got, expected) or compare(got, expected)
    if difference:
        lines.insert(0, difference)
    for mistake, answers in exercise.known:
        line = f"perhaps: {mistake}"
        if same(given[first], answers[kind][first]) and line not in lines:
            lines.append(line)
    return "\n".join(lines)


def compare(got, expected) -> str:
    """Describe where and by how much two results of the same form differ, and a pattern of all differences."""
    places = [place for place, _ in leaves(got)]
    pairs = list(zip([value for _, value in leaves(got)], [value for _, value in leaves(expected)], strict=True))
    wrong = [index for index, pair in enumerate(pairs) if not same(*pair)]

    def distance(index: int) -> float:
        ours, theirs = pairs[index]
        if not is_number(ours) or math.isnan(ours):
            return math.inf
        return abs(ours - theirs)

    largest = max(wrong, key=distance)
    ours, theirs = pairs[largest]
    place = places[largest].removesuffix("[]")
    text = f"{len(wrong)} of {len(pairs)} values differ"
    if place:
        text += f", most at {place}"
    text += f": your value is {shown(ours)}, the right one is {shown(theirs)}"
    if is_number(ours) and is_number(theirs) and math.isfinite(ours - theirs):
        text += f" (difference {abs(ours - theirs):.3g})"
    return text + common(pairs)


def shown(value) -> str:
    return f"{value:.8g}" if isinstance(value, float) else repr(value)


def common(pairs: list[tuple]) -> str:
    """Describe numbers that are the right ones in another order, or times a factor, or plus a constant."""
    numbers = [x for pair in pairs for x in pair]
    if len(pairs) < 3 or not all(is_number(x) and math.isfinite(x) for x in numbers):
        return ""
    got, right = torch.tensor(pairs, dtype=torch.float64).unbind(1)
    factor = (got @ right / (right @ right)).item() if right.any() else 0.0
    offset = (got - right).mean().item()
    if abs(factor - 1) > 1e-3 and len(set(right.tolist())) > 1 and same(got, factor * right):
        return f"; each value is {factor:.4g} times the right one"
    if same(got.sort().values, right.sort().values):
        return "; the values are right, but their order is wrong"
    if same(got, right + offset):
        return f"; each value is {abs(offset):.4g} too {'large' if offset > 0 else 'small'}"
    return ""


def leaves(value, place: str = "") -> list[tuple[str, object]]:
    """List the numbers and strings in a result with their indices, such as [("[0, 2]", 0.5)]."""
    if isinstance(value, torch.Tensor):
        indices = product(*map(range, value.shape))
        return [(f"{place}{list(index)}", value[index].item()) for index in indices]
    if isinstance(value, list | tuple):
        inside = []
        for index, part in enumerate(value):
            inside += leaves(part, f"{place}[{index}]")
        return inside
    return [(place, value)]


def is_number(value) -> bool:
    return isinstance(value, int | float)


def form(got, expected) -> str:
    """Describe how the type, shape or length of a result is wrong; return "" if they are right."""
    if type(got) is not type(expected):
        return f"your result has the type {type(got).__name__}; {type(expected).__name__} is right"
    if isinstance(got, torch.Tensor) and got.shape != expected.shape:
        return f"your result has the shape {tuple(got.shape)}; {tuple(expected.shape)} is right"
    if isinstance(got, torch.Tensor) and got.is_floating_point() != expected.is_floating_point():
        return f"your result has the dtype {got.dtype}; {expected.dtype} is right"
    if isinstance(got, list | tuple):
        if len(got) != len(expected):
            return f"your result has the length {len(got)}; {len(expected)} is right"
        for ours, theirs in zip(got, expected, strict=True):
            if form(ours, theirs):
                return form(ours, theirs)
    return ""


def same(a, b) -> bool:
    """Return whether two results are equal; floats are compared to about five digits."""
    if form(a, b):
        return False
    if isinstance(a, torch.Tensor):
        return torch.allclose(a.double(), b.double(), rtol=1e-5, atol=1e-7, equal_nan=True)
    if isinstance(a, list | tuple):
        return all(map(same, a, b))
    return a == b


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit status: 1 if the reader's lines are wrong, 2 if the command is wrong."""
    parser = argparse.ArgumentParser(prog="python -m docs.exercises", description=__doc__.split("\n")[0])
    parser.add_argument("number", type=int, nargs="?", help="number of the exercise; without it, all are listed")
    parser.add_argument(
        "--check", metavar="FILE", nargs="?", const="", help="check FILE, by default exercise_NUMBER.py"
    )
    parser.add_argument("--hint", action="store_true", help="print a hint")
    parser.add_argument("--solution", action="store_true", help="print the lines of minivlmrl")
    options = parser.parse_args(arguments)
    try:
        return run(options)
    except ValueError as error:
        print(f"python -m docs.exercises: {error}", file=sys.stderr)
        return 2


def run(options: argparse.Namespace) -> int:
    """Execute the command: list, write, check, or print a hint or a solution."""
    if options.number is None:
        for number in range(1, len(markers()) + 1):
            print(describe(load(number)))
        return 0
    exercise = load(options.number)
    file = Path(options.check or f"exercise_{options.number}.py")
    if options.check is not None:
        if not file.is_file():
            raise ValueError(f"{file} does not exist; `python -m docs.exercises {options.number}` writes it")
        passed, text = check(exercise, file.read_text(encoding="utf-8"), str(file))
        print(text, file=sys.stdout if passed else sys.stderr)
        return 0 if passed else 1
    if options.hint:
        print(exercise.own["HINT"].strip("\n"))
    elif options.solution:
        print(exercise.solution)
    elif file.exists():
        raise ValueError(f"{file} already exists; check it with --check, or delete it to start again")
    else:
        file.write_text(exercise.text(), encoding="utf-8")
        print(
            f"{file} contains {exercise.function.name} with a hole. Fill in the hole, then add --check to this command."
        )
    return 0


def describe(exercise: Exercise) -> str:
    """Return the line of an exercise in the list."""
    first, last = exercise.lines
    place = f"{exercise.function.name} in {exercise.name}"
    num_mistakes = len(exercise.own["WRONG"])
    return f"{exercise.number:3}  {place:44}{last - first + 1:3} lines, {num_mistakes} known mistakes"


if __name__ == "__main__":
    sys.exit(main())
