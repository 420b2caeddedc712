"""Load code that a recipe names as "name", "file.py:name" or "package.module:name".

Options may follow a name: "name(option=1)" is the object `name` with this option bound.
`call_user_code` calls the loaded function and reports the line at which the function fails.
`describe_user_error` does the same for an error that has left a user's code already.
`unchanged_process` checks that a user's code does not change the process.
"""

import ast
import dataclasses
import functools
import importlib
import inspect
import os
import re
import sys
import traceback
import typing
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import torch

from minivlmrl.config.parsing import read_value
from minivlmrl.config.time_limit import is_interrupt
from minivlmrl.errors import check_extras, check_field, did_you_mean, error_context

PACKAGE = Path(__file__).resolve().parents[1]
# files of code that options name, except those of this package; see user_line
_user_files: set[str] = set()


@functools.cache
def load_name(target: str) -> Any:
    """Load the object that a text such as "package.module:name" or "file.py:name" names.

    Raises:
        ValueError: loading failed. Every error is converted, because a user's file may raise any
            error.
    """
    file, _, name = target.rpartition(":")
    names = ()
    try:
        module = _load_module(file)
        names = vars(module)
        return getattr(module, name)
    except (Exception, SystemExit) as error:
        line = user_line(error)
        raise ValueError(
            f"{target} cannot be loaded ({type(error).__name__}: {error}"
            f"{f' in {line}' if line else ''}){did_you_mean(name, names)}"
        ) from error


def _load_module(file: str) -> ModuleType:
    if file.endswith(".py"):
        path = _source_file(file)
        _user_files.add(path)  # before the call, because the file itself may fail
        return run_file(path)
    module = importlib.import_module(file)
    path = getattr(module, "__file__", None)
    if path and not Path(path).resolve().is_relative_to(PACKAGE):
        _user_files.add(path)
    return module


def _source_file(path: str) -> str:
    """Find a file in the working directory, or else in the folder that contains `recipes`.

    For example, recipes/answers.py is found from every working directory. A path that is found
    nowhere is returned unchanged.
    """
    for folder in (Path(), recipes_folder().parent):
        if (folder / path).is_file():
            return os.path.abspath(folder / path)
    return path


def recipes_folder() -> Path:
    """Return the folder `recipes`: beside the package in a clone, inside the package in a wheel."""
    inside = PACKAGE / "recipes"
    return inside if (inside / "shapes.yaml").is_file() else PACKAGE.parent / "recipes"


@functools.cache
def run_file(path: str) -> ModuleType:
    """Run a file once as a module, and return the module.

    The module's name is derived from the path, so that pickle and inspect find the module by
    the same name on every rank.
    """
    # without dots, because a dot in a module name separates packages
    module = ModuleType(path.removesuffix(".py").replace(".", "%2e"))
    module.__file__ = path
    sys.modules[module.__name__] = module
    exec(compile(Path(path).read_bytes(), path, "exec"), vars(module))
    return module


def split_options(text: str) -> tuple[str, str]:
    """Split "name(option=value)" into the name and the options, ("name", "option=value")."""
    name_and_options = re.fullmatch(r"((?:.*?:)?\w+)\((.*)\)", text, re.DOTALL)
    return (name_and_options[1], name_and_options[2]) if name_and_options else (text, "")


def resolve_object(kind: str, text: str, table: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the object that "name(option=value)" names, and its options.

    Option values are Python literals. Only a name with a colon loads code from outside the
    table, and config/loading.py rejects such names in recipes of unknown origin.

    Args:
        kind: the object's kind for error messages, such as "reward".
        text: object name, with or without options.
        table: {name: object, or an object's "package.module:name"}.
    Raises:
        ValueError: no object has this name, or the options are not written as name=value.
    """
    name, options = split_options(text)
    target = table.get(name, name)
    if isinstance(target, str):
        if ":" not in target:
            names = ", ".join([*sorted(table), "file.py:name"])
            raise ValueError(
                f"unknown {kind} {name!r}; known names are: {names}{did_you_mean(name, table)}"
            )
        with error_context(kind):
            check_extras(target, name)
            target = load_name(target)
    try:
        call = ast.parse(f"f({options})", mode="eval").body
        if not isinstance(call, ast.Call) or call.args or not isinstance(call.func, ast.Name):
            raise SyntaxError
        bound_options = {}
        for option in call.keywords:
            if option.arg is None:  # **
                raise SyntaxError
            bound_options[option.arg] = ast.literal_eval(option.value)
        return target, bound_options
    except (SyntaxError, ValueError) as error:
        raise ValueError(
            f"{kind} {text}: the options must have the form name=value, name=value"
        ) from error


def find_stage(stage: str, table: dict[str, str] | None = None) -> type:
    """Return the trainer class that an item in `stages` names.

    Only the stage's name and its options dataclass are checked. The base class is not
    checked, because it is in a higher layer, see trainers/registry.py.

    Args:
        stage: a name in the table, or "file.py:Class".
        table: {name: "package.module:Class"}.

    Raises:
        ValueError: there is no such class, or the class has no stage name or no options.
    """
    cls, options = resolve_object("stage", stage, table or {})
    with error_context(f"stages: {stage}"):
        # defined_in is only called for errors, because it reads and parses the file
        if not dataclasses.is_dataclass(getattr(cls, "config_type", None)):
            expected = "a Trainer of minivlmrl.trainers.base, with a dataclass of options as its config_type"
            check_field(False, f"the object{defined_in(cls)}", cls, expected)
        name = getattr(cls, "stage", None)
        if not (isinstance(name, str) and name.isidentifier()):
            expected = "the name of its section in the recipe"
            check_field(False, f"the attribute stage of the class{defined_in(cls)}", name, expected)
        check_field(not options, "the text in brackets", options, "in the section of the stage")
    return cls


def with_options(function: Callable, options: dict[str, Any]) -> Callable:
    """Bind values to parameters that have a default, and check Annotated parameters' bounds.

    Raises:
        ValueError: `function` is not callable, has no parameter with a default of this name, or the
            value is not within the bounds.
    """
    if not callable(function):
        raise ValueError(f"expected a function or a class, but found {function!r:.60}")
    parameters = inspect.signature(function).parameters.values()
    hints = {p.name: p.annotation for p in parameters if p.default is not p.empty}
    values = {}
    for name, value in options.items():
        if name not in hints:
            names = ", ".join(hints) or "none"
            raise ValueError(
                f"there is no option {name!r}; the options are: {names}{did_you_mean(name, hints)}"
            )
        if typing.get_origin(hints[name]) is Annotated:
            value = read_value(hints[name], value, name, json=False)
        values[name] = value
    return functools.partial(function, **values) if values else function


def raised(function: Callable, error: BaseException, names: Iterable[str]) -> str:
    """Describe an error that a function raised, such as "raised KeyError: 'x' in file.py:12".

    Args:
        function: function that raised the error.
        error: the error, with its traceback.
        names: argument names, from which a similar name is suggested for a KeyError.
    """
    text = f"raised {shown_error(error)}{place(function, error)}"
    if isinstance(error, KeyError):
        text += did_you_mean(str(error).strip("'"), names)
    return text


def shown_error(error: BaseException) -> str:
    """Return an exception's type and its message, if it has one."""
    return ": ".join(filter(None, (type(error).__name__, str(error))))


def place(function: Callable, error: BaseException) -> str:
    """Return the user's line at which an error was raised, such as " in file.py:12".

    If no line in a user's file was called, the result is where the function is defined.
    """
    file = None
    with suppress(TypeError, OSError):  # an object that is not written in Python has no file
        file = inspect.getfile(_unwrapped(function))
    frames = traceback.extract_tb(error.__traceback__)
    lines = [f"{file}:{frame.lineno}" for frame in frames if frame.filename == file]
    line = user_line(error) or (lines[-1] if lines else None)
    return f" in {line}" if line else defined_in(function)


def _unwrapped(function: Callable) -> Callable:
    """Return the function inside decorators and functools.partial."""
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.unwrap(function)


def defined_in(function: Any) -> str:
    """Return " (defined in file.py:12)" for a function, method or class; "" if no file has it."""
    with suppress(TypeError, OSError):
        function = _unwrapped(function)
        _, line = inspect.getsourcelines(function)
        return f" (defined in {inspect.getfile(function)}:{line})"
    return ""


def user_line(error: BaseException) -> str | None:
    """Return "file.py:12", the innermost line of an error's traceback that is in a user's file.

    The result is None if no line is in a user's file, or if code in this package that the file
    calls raised the error.
    """
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if frame.filename in _user_files:
            return f"{frame.filename}:{frame.lineno}"
        if Path(frame.filename).is_relative_to(PACKAGE):
            return None
    return None


def describe_user_error(error: BaseException) -> str | None:
    """Describe an error that a user's code raised; None if a user's code did not."""
    line = user_line(error)
    if line is None:
        return None
    return f"{line}: the code of this file raised {shown_error(error)}"


def call_user_code(name: str, function: Callable, /, *arguments, **options):
    """Call a user's function or class, and return the result.

    Raises:
        ValueError: the call raised any error. The message begins with `name` and contains the line.
    """
    with unchanged_process(name):
        try:
            return function(*arguments, **options)
        except BaseException as error:
            if is_interrupt(error):
                raise
            if isinstance(error, TypeError) and user_line(error) is None:
                check_call(name, function, *arguments, **options)
            raise ValueError(f"{name} {raised(function, error, options)}") from error


def check_call(name: str, function: Callable, /, *arguments, **options):
    """Raise ValueError if a function or class does not accept these arguments."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a function that is not written in Python has no signature
        return
    try:
        signature.bind(*arguments, **options)
    except TypeError as error:
        given = f"{len(arguments)} positional arguments"
        if options:
            given += f" and the keywords {', '.join(options)}"
        raise ValueError(
            f"{name}{defined_in(function)} cannot be called, because it is called with {given} "
            f"({error}); change its parameters, which may end with **options to accept all keywords"
        ) from error


# Settings of the process that change a run's results without an error, and functions that read
# them. Random seeds are not in the table, because a run computes its random numbers from keys.
PROCESS_SETTINGS: dict[str, Callable[[], Any]] = {
    "the number of threads": torch.get_num_threads,
    "the default dtype": torch.get_default_dtype,
    "the default device": torch.get_default_device,
    "the grad mode": torch.is_grad_enabled,
    "autocast on the CPU": lambda: torch.is_autocast_enabled("cpu"),
    "autocast on the GPU": lambda: torch.is_autocast_enabled("cuda"),
    # these also change with torch.set_float32_matmul_precision and allow_tf32
    "the precision of products on the CPU": functools.partial(
        attrgetter("mkldnn.matmul.fp32_precision"), torch.backends
    ),
    "the precision of products on the GPU": lambda: torch.backends.cuda.matmul.fp32_precision,
    "the deterministic mode": torch.get_deterministic_debug_mode,
    "the working directory": os.getcwd,
}


@contextmanager
def unchanged_process(name: str) -> Iterator[None]:
    """Raise ValueError if the code in a `with` block has changed one of the PROCESS_SETTINGS."""
    before = {setting: read() for setting, read in PROCESS_SETTINGS.items()}
    yield
    changes = []
    for setting, read in PROCESS_SETTINGS.items():
        value = read()
        if value != before[setting]:
            changes.append(f"{setting} from {before[setting]} to {value}")
    if changes:
        os.chdir(before["the working directory"])  # because output_dir may be a relative path
        raise ValueError(
            f"{name} changed {' and '.join(changes)}, which affects the rest of the run; restore "
            "this before the code returns"
        )
