"""Write functions of minimal.py yourself, and compare their results with the original.

python -m docs.exercises             # list the exercises; run this in the root of a clone
python -m docs.exercises 10          # write exercise_10.py, where the body of group_advantages is missing
python -m docs.exercises 10 --check  # print "pass" or the first difference; --hint and --solution also exist
"""

import argparse
import ast
import functools
import math
import sys
import textwrap
import traceback
from pathlib import Path

import torch

import minimal
from docs.exercises.cases import EXERCISES, Exercise

SOURCE = Path(minimal.__file__).read_text(encoding="utf-8")


@functools.cache
def find(name: str) -> tuple[int, int, int]:
    """Find a function in minimal.py: (first line, also of its class, first line of the body, last line)."""
    path = [ast.parse(SOURCE)]
    for part in name.split("."):
        path.append(next(node for node in path[-1].body if getattr(node, "name", None) == part))
    start = min(node.lineno for node in [path[1], *path[1].decorator_list])
    body = path[-1].body[1:] if ast.get_docstring(path[-1]) else path[-1].body
    return start, body[0].lineno, body[-1].end_lineno


def solution(exercise: Exercise) -> str:
    """Return the body in minimal.py."""
    _, first, last = find(exercise.name)
    return "\n".join(SOURCE.splitlines()[first - 1 : last])


def file_text(exercise: Exercise, body: str) -> str:
    """Build the exercise file with this function body."""
    start, first, _ = find(exercise.name)
    title = f"Exercise {exercise.number}: write the body of {exercise.name} of minimal.py."
    command = f"python -m docs.exercises {exercise.number} --check    # or --hint, --solution"
    docstring = f'"""{title}\n\n{exercise.task}\n\n{command}\n"""\n'
    lines = SOURCE.splitlines()[start - 1 : first - 1]
    return "\n".join([docstring, "from minimal import *\n\n", *lines, body, ""])


def empty_body(exercise: Exercise) -> str:
    margin = " " * (4 + 4 * exercise.name.count("."))
    return f'{margin}raise NotImplementedError("write the body of {exercise.name}")'


@functools.cache
def results(exercise: Exercise, text: str, file: str) -> list[tuple[str, object]]:
    """Run an exercise file; return (description, result) per call of its function."""
    names = {"__name__": "exercise"}
    exec(compile(text, file, "exec"), names)
    function = names[exercise.name.split(".")[0]]
    if function.__module__ != "exercise":  # imported from minimal.py
        raise NameError(f"there is no {exercise.name}; did you give it another name?")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return list(exercise.calls(function))


def check(exercise: Exercise, text: str, file: str) -> str:
    """Compare an exercise file with minimal.py; return the text to print, "pass..." if all results are equal."""
    try:
        given = results(exercise, text, file)
    except Exception as error:  # a reader's code may raise anything
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
        line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else None
        return f"{file}{f', line {line}' * bool(line)}: {type(error).__name__}: {getattr(error, 'msg', error)}"
    body = solution(exercise)
    right = results(exercise, file_text(exercise, body), "minimal.py")
    for i, (description, expected) in enumerate(right):
        found = difference(given[i][1], expected)
        if found:
            same = [mistake for mistake in exercise.mistakes if is_explained(exercise, mistake, given)]
            return "\n    perhaps ".join([f"not yet: {description}:\n    {found}", *same])
    return f"pass: {len(right)} results equal those of minimal.py"


def is_explained(exercise: Exercise, mistake: str, given: list[tuple[str, object]]) -> bool:
    """Return whether minimal.py with a mistake gives the same results."""
    text = file_text(exercise, solution(exercise).replace(*exercise.mistakes[mistake]))
    answers = results(exercise, text, "a mistake")
    return not any(difference(got, wrong) for (_, got), (_, wrong) in zip(given, answers, strict=True))


def difference(got, right, place="the result") -> str:
    """Describe the first difference, "" if the results are equal up to rounding."""
    if got is None and right is not None and place.startswith("the gradient to"):
        return f"{place} is missing: a tensor between it and the result is detached, or computed under no_grad"
    if type(got) is not type(right):
        return f"{place} is {'None' if got is None else type(got).__name__}, but {type(right).__name__} is right"
    if isinstance(right, torch.Tensor):
        return tensor_difference(got, right, place)
    if isinstance(right, dict):
        pairs = [(got[name], right[name], name) for name in right]
    elif isinstance(right, list | tuple):
        pairs = [(ours, theirs, f"{place}[{i}]") for i, (ours, theirs) in enumerate(zip(got, right, strict=False))]
    else:
        return "" if got == right else f"{place} is {got!r}, but {right!r} is right"
    found = next(filter(None, (difference(*pair) for pair in pairs)), "")
    if not found and len(got) != len(right):
        return f"the length of {place} is {len(got)}, but {len(right)} is right"
    return found


def tensor_difference(got: torch.Tensor, right: torch.Tensor, place: str) -> str:
    """Describe a wrong shape or dtype, or the largest error and its pattern."""
    if got.shape != right.shape:
        return f"the shape of {place} is {tuple(got.shape)}, but {tuple(right.shape)} is right"
    if got.dtype != right.dtype:
        return f"the dtype of {place} is {got.dtype}, but {right.dtype} is right"
    scale = max(1.0, right.abs().max().item()) if place.startswith("the gradient to") else 1.0
    tolerance = {"rtol": 1e-4, "atol": 0.03 if right.dtype == torch.bfloat16 else 1e-5 * scale, "equal_nan": True}
    close = functools.partial(torch.allclose, **tolerance)
    got, right = got.double(), right.double()
    if close(got, right):
        return ""
    worst = torch.unravel_index((got - right).abs().nan_to_num(math.inf).argmax(), got.shape)
    values = f"{got[worst].item():.6g}, but {right[worst].item():.6g} is right"
    if got.numel() == 1:
        return f"{place} is {values}"
    count = int((~torch.isclose(got, right, **tolerance)).sum())
    index = [int(i) for i in worst]
    text = f"{count} of {got.numel()} values of {place} differ, most at {index}: yours is {values}"
    factor = ((got * right).sum() / right.square().sum()).item()
    if abs(factor - 1) > 1e-3 and close(got, factor * right):
        text += f"; each value is {factor:.4g} times the right one"
    elif close(got.flatten().sort().values, right.flatten().sort().values):
        text += "; the values are right, but in another order"
    return text


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return exit status 1 for a wrong function."""
    parser = argparse.ArgumentParser(prog="python -m docs.exercises", description=__doc__.split("\n")[0])
    parser.add_argument("number", type=int, nargs="?", help="number of the exercise; without it, all are listed")
    for mode in ("--check", "--hint", "--solution"):
        parser.add_argument(mode, dest="mode", action="store_const", const=mode)
    options = parser.parse_args(arguments)
    if options.number is None:
        for exercise in EXERCISES:
            print(f"{exercise.number:3}  {exercise.name:18}{len(solution(exercise).splitlines()):3} lines")
        return 0
    if not 1 <= options.number <= len(EXERCISES):
        parser.error(f"exercise {options.number} does not exist; choose a number from 1 to {len(EXERCISES)}")
    try:
        text = run(EXERCISES[options.number - 1], options.mode)
    except (FileExistsError, FileNotFoundError) as error:
        parser.error(f"{error.strerror}: {error.filename}")
    print(text)
    return 1 if options.mode == "--check" and not text.startswith("pass") else 0


def run(exercise: Exercise, mode: str | None) -> str:
    """Write or check the exercise file, or look up hint or solution; return the text to print."""
    file = Path(f"exercise_{exercise.number}.py")
    if mode == "--hint":
        return exercise.hint
    if mode == "--solution":
        return textwrap.dedent(solution(exercise))
    if mode == "--check":
        return check(exercise, file.read_text(encoding="utf-8"), str(file))
    with file.open("x", encoding="utf-8") as opened:  # "x": never overwrite
        opened.write(file_text(exercise, empty_body(exercise)))
    return f"{file} has {exercise.name} without its body. Write the body, and then add --check to this command."


if __name__ == "__main__":
    sys.exit(main())
