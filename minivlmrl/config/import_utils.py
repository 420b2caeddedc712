"""Load functions and classes named in recipes: "name", "file.py:name" or "package.module:name".

"name(option=1)" passes option=1 to the function.
"""

import ast
import functools
import importlib
import inspect
import os
import re
import sys
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

from minivlmrl.config.parsing import read_value
from minivlmrl.errors import PACKAGE, USER_FILES, UserError, did_you_mean, truncate
from minivlmrl.load_extra import load_extra


def load_name(target: str) -> Any:
    """Load an object named "package.module:name" or "file.py:name"."""
    file, _, name = target.rpartition(":")
    if file.endswith(".py"):
        paths = [Path(file), recipes_folder().parent / file]
        found = next(filter(Path.is_file, paths), None)
        if found is None:
            raise UserError(
                f"there is no file {file}; code is searched beside the recipe, in the working folder {os.getcwd()} and "
                f"in {recipes_folder()}"
            )
        path = os.path.abspath(found)
        USER_FILES.add(path)  # before the file runs, so an error in it is shown as an error in user code
        module = run_file(path)
    else:
        try:
            module = importlib.import_module(file)
        except ModuleNotFoundError as error:
            if not f"{file}.".startswith(f"{error.name}."):  # the module was found, but an import inside it failed
                raise
            raise UserError(f"there is no module {error.name}; install its package, or write file.py:name") from None
        path = getattr(module, "__file__", None)
        if path and not Path(path).resolve().is_relative_to(PACKAGE):
            USER_FILES.add(path)
    if not hasattr(module, name):
        raise UserError(f"{file} defines no {name!r}{did_you_mean(name, vars(module))}")
    return getattr(module, name)


def recipes_folder() -> Path:
    """Return the folder of built-in recipes: beside the package in a clone, inside it in a wheel."""
    inside = PACKAGE / "recipes"
    return inside if (inside / "shapes.yaml").is_file() else PACKAGE.parent / "recipes"


def run_file(path: str) -> ModuleType:
    """Execute a Python file once, as a module, and return the module."""
    # name the module by its path, so pickle finds it on all ranks; escape dots, which would mean submodules
    name = path.removesuffix(".py").replace(".", "%2e")
    if name in sys.modules:
        return sys.modules[name]
    module = ModuleType(name)
    module.__file__ = path
    sys.modules[name] = module
    folder = os.path.dirname(path)
    if folder not in sys.path:
        sys.path.append(folder)  # user files may import from their own folder
    try:
        exec(compile(Path(path).read_bytes(), path, "exec"), vars(module))
    except BaseException:
        del sys.modules[name]
        raise
    return module


def split_options(text: str) -> tuple[str, str]:
    """Split "name(option=value)" into ("name", "option=value")."""
    name_and_options = re.fullmatch(r"((?:.*?:)?\w+)\((.*)\)", text, re.DOTALL)
    return (name_and_options[1], name_and_options[2]) if name_and_options else (text, "")


def resolve_object(kind: str, text: str, table: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Parse "name(option=value)"; return the named object, and the options as a dict.

    Option values are Python literals. Only names with a colon, such as file.py:name, load code from outside
    minivlmrl, so recipes found automatically next to a model must not use such names.

    Args:
        kind: for error messages, such as "reward".
        table: {name: object or "package.module:name"}.
    """
    name, options = split_options(text)
    target = table.get(name, name)
    if isinstance(target, str):
        if ":" not in target:
            names = ", ".join([*sorted(table), "file.py:name"])
            parts = re.findall(r"[^\s,]+", name)
            meant = f"; write [{', '.join(parts)}]" if len(parts) > 1 else did_you_mean(name, table)
            meant = f"; write {name}:FUNCTION" if name.endswith(".py") else meant
            raise UserError(f"unknown {kind} {name!r}; known names are: {names}{meant}")
        target = load_extra(target, name) if target.startswith("minivlmrl.") else load_name(target)
    try:
        call = ast.parse(f"f({options})", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            raise SyntaxError
        return target, {str(option.arg): ast.literal_eval(option.value) for option in call.keywords}
    except (SyntaxError, ValueError) as error:
        raise UserError(f"{kind} {text}: the options must have the form name=value, name=value") from error


def resolve_function(kind: str, text: str, table: dict[str, Any]) -> Callable:
    """Load a function by name and bind its options; see resolve_object."""
    function, options = resolve_object(kind, text, table)
    if isinstance(function, type) or not callable(function):
        raise UserError(
            f"{kind} {text} is {truncate(function, 80)}, but it must be a function, or an object with __call__, such "
            "as an instance of a class"
        )
    return with_options(function, options)


def find_stage(stage: str, table: dict[str, str] | None = None) -> type:
    """Return the trainer class for a stage, given as "file.py:Class" or as a key of `table`."""
    cls, options = resolve_object("stage", stage, table or {})
    if options:
        raise UserError(f"stages: {stage}: write the options {options} in the section of the stage")
    if not isinstance(cls, type) or not hasattr(cls, "stage"):
        raise UserError(
            f"stages: {stage} is {truncate(cls, 80)}, but it must be a subclass of a trainer, such as GRPOTrainer"
        )
    return cls


def with_arguments(
    function: Callable,
    positional: Sequence[str],
    names: Collection[str],
    options: dict[str, Any],
    on_request: Collection[str] = (),
) -> Callable:
    """Wrap `function`: accept all arguments from callers, but pass on only those in its signature.

    Args:
        positional: names of arguments that callers pass by position; `function` may use other names.
        names: names of arguments that callers pass by keyword.
        options: {name: value} for parameters that callers do not pass.
        on_request: names of expensive arguments, passed to `function` only if it has a parameter of this name, not in
            **others. Callers pass functions that compute their values.
    Raises:
        UserError: a parameter gets no value, or arguments would be swapped, as for f(mask, advantages) if callers
            pass (advantages, mask).
    """
    parameters = parameters_of(function)
    by_position = [p.name for p in parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    named = parameters.keys() - by_position[: len(positional)]
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    # exclude keywords already bound by the user with functools.partial
    taken = ({*names} if takes_all else {*names} & named) - getattr(function, "keywords", {}).keys()
    requested = {*on_request} & named
    further = {name: options[name] for name in options.keys() & named - taken - requested}
    try:
        for name, argument in zip(by_position, positional, strict=False):
            if name in {*positional, *names} - {argument}:
                raise TypeError(f"its parameter {name!r} would be the argument {argument}")
        values = dict.fromkeys(taken | requested) | further
        inspect.Signature([*parameters.values()]).bind(*positional, **values)
        for name in named - taken - requested - further.keys():
            if parameters[name].default is None:
                known = [*names, *on_request]
                raise TypeError(f"its parameter {name!r} would always be None{did_you_mean(name, known)}")
    except TypeError as error:
        raise UserError(
            f"the function cannot be called: {error}. docs/developer_guide.md#a-file-of-your-own has examples"
        ) from error

    def call(*values, **others):
        arguments = {name: value for name, value in others.items() if name in taken}
        arguments |= {name: others[name]() for name in requested}
        return function(*values, **arguments, **further)

    return call


def parameters_of(function: Callable) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a function, or of a module's forward method."""
    return inspect.signature(getattr(function, "forward", function)).parameters


def with_options(function: Callable, options: dict[str, Any]) -> Callable:
    """Bind options as keyword arguments; raise UserError for unknown or out-of-bounds options."""
    parameters = parameters_of(function).values()
    hints = {p.name: p.annotation for p in parameters if p.default is not p.empty and p.kind is not p.POSITIONAL_ONLY}
    for name, value in options.items():
        if name not in hints:  # misspelled option: a function with **columns would ignore it
            names = ", ".join(hints) or "none"
            raise UserError(f"there is no option {name!r}; the options are: {names}{did_you_mean(name, hints)}")
        if typing.get_origin(hints[name]) is Annotated:
            options[name] = read_value(hints[name], value, name, json=False)
    return functools.partial(function, **options) if options else function
