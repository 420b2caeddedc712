"""Find code by a name in a recipe: "name", "file.py:name" or "package.module:name".

Options may follow: "name(option=1)" is the object `name`, with that option bound. `call_user_code` calls
what was found, and says at which line it fails.
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
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

from minivlmrl.config.parsing import check_field, did_you_mean, error_context, read_value


@functools.cache
def load_name(target: str) -> Any:
    """Import "package.module:name", or run "file.py:name" once and take the name from it.

    Raises:
        ValueError: it cannot be loaded, for whatever reason: a user's file may raise anything.
    """
    file, _, name = target.rpartition(":")
    names = ()
    try:
        module = _load_module(file)
        names = vars(module)
        return getattr(module, name)
    except (Exception, SystemExit) as error:
        raise ValueError(
            f"{target}: it cannot be loaded ({type(error).__name__}: {error})"
            f"{did_you_mean(name, names)}"
        ) from error


def _load_module(file: str) -> ModuleType:
    if file.endswith(".py"):
        return run_file(_source_file(file))
    return importlib.import_module(file)


def _source_file(path: str) -> str:
    """Find a file from here, or among the files that come with us: recipes/answers.py."""
    for folder in (Path(), recipes_folder().parent):
        if (folder / path).is_file():
            return os.path.abspath(folder / path)
    return path


def recipes_folder() -> Path:
    """Find the recipes: beside the package in a clone, inside it in a wheel."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "recipes"
    return inside if (inside / "shapes.yaml").is_file() else package.parent / "recipes"


@functools.cache
def run_file(path: str) -> ModuleType:
    """Run a file once, as a module that pickle and inspect find by its name on every rank."""
    module = ModuleType(path.removesuffix(".py").replace(".", "%2e"))  # a dot is of a package
    module.__file__ = path
    sys.modules[module.__name__] = module
    exec(compile(Path(path).read_bytes(), path, "exec"), vars(module))
    return module


def split_options(text: str) -> tuple[str, str]:
    """Split "name(option=value)" into its name and its options: ("name", "option=value")."""
    name_and_options = re.fullmatch(r"((?:.*?:)?\w+)\((.*)\)", text, re.DOTALL)
    return (name_and_options[1], name_and_options[2]) if name_and_options else (text, "")


def resolve_object(kind: str, text: str, table: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Find what "name(option=value)" says, in a table or a file; and its options, literals.

    Only a name with a colon loads code that is not of the table: config/loading.py refuses those of
    recipes that somebody sent.

    Args:
        kind: what is named, for errors: "reward near(0.5): its options must have the form ...".
        table: name -> object, or the "package.module:name" of one.
    """
    name, options = split_options(text)
    target = table.get(name, name)
    if isinstance(target, str):
        if ":" not in target:
            names = ", ".join([*sorted(table), "file.py:name"])
            raise ValueError(
                f"unknown {kind} {name!r}; there are: {names}{did_you_mean(name, table)}"
            )
        with error_context(kind):
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
            f"{kind} {text}: its options must have the form name=value, name=value"
        ) from error


def find_stage(stage: str, table: dict[str, str] | None = None) -> type:
    """Find the class that an item of `stages` names: by its name in the table, or "file.py:Class".

    The class is only checked for its name and the dataclass of its options, because the base class
    of all trainers is in a layer above: see trainers/registry.py.

    Raises:
        ValueError: there is no such class, or it has no name or no options.
    """
    cls, options = resolve_object("stage", stage, table or {})
    with error_context(f"stages: {stage}"):
        has_options = dataclasses.is_dataclass(getattr(cls, "config_type", None))
        check_field(has_options, "it", cls, "a Trainer of minivlmrl.trainers.base")
        name = getattr(cls, "stage", None)
        check_field(str(name).isidentifier(), "stage", name, "a name, that of its section")
        check_field(not options, "what is in brackets", options, "in its section of the recipe")
    return cls


def with_options(function: Callable, options: dict[str, Any]) -> Callable:
    """Bind some of the parameters that have a default; bounds of Annotated ones are checked.

    Raises:
        ValueError: it is no function, has no such parameter, or the value is not valid.
    """
    if not callable(function):
        raise ValueError(f"it is {function!r:.60}, no function or class")
    parameters = inspect.signature(function).parameters.values()
    hints = {p.name: p.annotation for p in parameters if p.default is not p.empty}
    values = {}
    for name, value in options.items():
        if name not in hints:
            names = ", ".join(hints) or "none"
            raise ValueError(
                f"there is no option {name!r}; there are: {names}{did_you_mean(name, hints)}"
            )
        if typing.get_origin(hints[name]) is Annotated:
            value = read_value(hints[name], value, name, json=False)
        values[name] = value
    return functools.partial(function, **values) if values else function


def raised(function: Callable, error: BaseException, names: Iterable[str]) -> str:
    """Say what a function or class has raised, at which line of its file: "raised KeyError: ...".

    names: of its arguments, one of which a KeyError may mean.
    """
    file = None
    with suppress(TypeError, OSError):  # what is not written in Python has no file
        file = inspect.getfile(inspect.unwrap(getattr(function, "func", function)))
    text = f"raised {type(error).__name__}: {error}"
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == file]
    if lines:
        text += f" in {file}:{lines[-1]}"
    if isinstance(error, KeyError):
        text += did_you_mean(str(error).strip("'"), names)
    return text


def call_user_code(name: str, function: Callable, /, *arguments, **options):
    """Call a user's function or class (ValueError: it has raised anything, with its line)."""
    try:
        return function(*arguments, **options)
    except (Exception, SystemExit) as error:
        raise ValueError(f"{name} {raised(function, error, options)}") from error
