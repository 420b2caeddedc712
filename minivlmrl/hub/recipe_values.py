"""What recipes and config files say, checked against a dataclass that says what is valid."""

import dataclasses
import difflib
import inspect
import re
import reprlib
import types
import typing
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Annotated, Any, Literal, NewType

import yaml

# texts of a recipe that name a file or code; what is not said otherwise is found from where the
# command runs
FilePath = NewType("FilePath", str)
RecipePath = NewType("RecipePath", str)  # beside the recipe
Code = NewType("Code", str)  # a name, or "file.py:name", which is beside the recipe
RewardName = NewType("RewardName", str)  # see reward_functions/names.py
# what other trainers call an option that has another name here
THEIRS = {
    "lr": "STAGE.learning_rate",
    "num_train_epochs": "max_epochs",
    "overwrite_output_dir": "resume=never",
    "max_completion_length": "sampling.max_new_tokens",
    "max_prompt_length": "data.max_prompt_tokens",
    "reward_funcs": "rewards",
    "chat_template_kwargs": "data.template",
    "model_name_or_path": "model.path",
    "lora_r": "adapter.r",
    "gradient_checkpointing": "model.activation_checkpointing",
    "deepspeed": "sharding.enabled",
    "epsilon": "grpo.epsilon_low",
    "per_device_train_batch_size": "STAGE.micro_batch_size, of prompts",
    "gradient_accumulation_steps": "STAGE.prompts_per_step, of an update on all ranks",
    "bf16": "model.compute_dtype=bfloat16",
    "use_vllm": "sampling.engine=vllm",
}
# what is quoted, without the apostrophes of words, or a word that is no path
LONG = re.compile(r"""(?<!\w)'[^']{80,}'(?!\w)|"[^"]{80,}"|[^\s'"]{500,}""")


class Loader(yaml.SafeLoader):
    """Reads YAML as safe_load does, but refuses two equal keys of a section."""

    def construct_mapping(self, node, deep=False):
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for key in filter(lambda key: keys.count(key) > 1, keys):
            problem = f"{key!r} is there twice"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        return super().construct_mapping(node, deep)


def parse_yaml(text: str | bytes) -> Any:
    """Read YAML (ValueError: it is none, says a key twice, or is nested too deep)."""
    try:
        return yaml.load(text, Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ValueError(f"not YAML ({error})") from error


def shortened(error: object) -> str:
    """Cut what an error quotes at 80 characters: it may be a picture in base64."""
    return LONG.sub(lambda match: f"{match[0][:80]}...{match[0][-1]}", str(error))


def require(valid: bool, name: str, value: Any, expected: str):
    """Refuse a value; a dataclass does so in `__post_init__` for what depends on several fields."""
    if not valid:
        # aliases of YAML would explode
        shown = reprlib.repr(value) if isinstance(value, list | dict) else repr(value)
        raise ValueError(f"{name} is {shown:.80}, it must be {expected}")


class naming(AbstractContextManager):
    """Begin the errors of a block with the file, row or field that they are about."""

    def __init__(self, where: object):  # no generator: several enter for each of 200,000 rows
        self.where = where

    def __exit__(self, kind, error, traceback):
        if isinstance(error, ValueError):
            raise ValueError(f"{self.where}: {shortened(error)}") from error


@contextmanager
def extra(name: str, needed: str) -> Iterator[None]:
    """Say what to install where a block cannot import."""
    try:
        yield
    except ImportError as error:
        raise ValueError(f"{needed}: pip install 'minivlmrl[{name}]'") from error


def build(cls, values: Any, where: str, prefix: str = "", json: bool = False):
    """Make a dataclass of what a file says; every key, type and bound is checked.

    Field annotations: int, float, str, bool, dict, X | None, list[X], dict[str, X], tuple[X, ...],
    tuple[X, X, X], dataclasses, Literal["a", "b"], and bounds: Annotated[int, ">= 1"],
    Annotated[float, "(0, 1]"].

    Args:
        where, prefix: the file and the section in it: "recipe.yaml: grpo.beta is -1.0, it must be 0
            or more".
        json: a program wrote the file: unknown keys are ignored and text is only text. A recipe may
            say "1e-4" (which YAML reads as text) for a float and a single text for a list of texts.
    """
    with naming(where):
        try:
            return _build(cls, values, prefix, json)
        except UnknownKey as error:
            _, prefix, key = error.args
            raise ValueError(f"unknown key {prefix}{key}; {_meant(cls, *error.args)}") from None


class UnknownKey(ValueError):
    """A section has no such field: its dataclass, its name in the file with a dot, and the key."""


def _meant(root, section, prefix: str, key: str) -> str:
    """Say what an unknown key may be: another trainer's, a field elsewhere, or one of the nearest."""
    if theirs := THEIRS.get("use_vllm" if "vllm" in key else key):
        return f"here it is {theirs}"
    names = {
        path: {path, path.replace(".", "_"), path.split(".")[-1]} for path in option_paths(root)
    }
    if same := [path.replace(".", ": ") for path in names if key in names[path]]:
        return f"here it is {' or '.join(same)}"
    fields = [field.name for field in dataclasses.fields(section)]
    near = difflib.get_close_matches(key, fields, 3, 0.0)
    return f"did you mean {' or '.join(prefix + name for name in near)}?"


def option_paths(cls, prefix: str = "") -> Iterator[str]:
    """Yield what a file can set: "seed", "grpo.beta"."""
    for name, hint in typing.get_type_hints(cls).items():
        inside = dataclasses.is_dataclass(hint)
        yield from option_paths(hint, f"{prefix}{name}.") if inside else [prefix + name]


def _build(cls, values: Any, prefix: str, json: bool):
    where = prefix.rstrip(".") or "the file"
    require(isinstance(values, dict), where, values, "an object with names and values")
    hints = typing.get_type_hints(cls, include_extras=True)
    checked = {}
    fields = {field.name: field for field in dataclasses.fields(cls)}
    if not json and (unknown := [name for name in values if name not in fields]):
        raise UnknownKey(cls, prefix, str(unknown[0]))
    for name, field in fields.items():
        if name in values:
            checked[name] = read_value(hints[name], values[name], f"{prefix}{name}", json)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ValueError(f"{prefix}{name} is missing")
    try:
        return cls(**checked)
    except ValueError as error:  # what a __post_init__ refuses
        raise ValueError(f"{prefix}{error}") from None


def help_of(cls) -> dict[str, str]:
    """Read the comment before or after each field in the source of a dataclass; "" if none is."""
    comments = {}
    for part in filter(dataclasses.is_dataclass, reversed(cls.__mro__)):
        above = []
        for line in inspect.getsource(part).partition("\n    def ")[0].splitlines():
            if line.strip().startswith("# "):
                above.append(line.strip().removeprefix("# "))
            elif field := re.match(r"    (\w+): ", line):
                name = field[1]
                comments[name], above = " ".join([*above, line.partition("  # ")[2]]).strip(), []
            elif comments and "  # " in line:  # of a default that takes several lines
                comments[name] = f"{comments[name]} {line.partition('  # ')[2]}".strip()
    return {field.name: comments.get(field.name, "") for field in dataclasses.fields(cls)}


def type_text(hint) -> str:
    """Say an annotation as a person reads it: "int, 1 or more", "'k1' or 'k3'", "float or null"."""
    hint = getattr(hint, "__supertype__", hint)  # of a NewType
    origin = typing.get_origin(hint)
    inside = typing.get_args(hint)
    if origin is Annotated:
        return f"{type_text(inside[0])}, {_bound(inside[1])[1]}"
    if origin is Literal:
        return " or ".join(", ".join(map(repr, inside)).rsplit(", ", 1))
    if origin in (typing.Union, types.UnionType):
        return " or ".join(map(type_text, inside))
    if origin is not None:
        parts = ("..." if part is ... else type_text(part) for part in inside)
        return f"{origin.__name__}[{', '.join(parts)}]"
    return "null" if hint is types.NoneType else hint.__name__


def read_value(hint, value, name: str, json: bool):
    """Check a value against an annotation, and return it as the field holds it."""
    hint = getattr(hint, "__supertype__", hint)  # of a NewType
    origin = typing.get_origin(hint)
    inside = typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        return _build(hint, value, f"{name}.", json)
    if origin in (typing.Union, types.UnionType):
        if value is None and types.NoneType in inside:
            return None
        choices = [choice for choice in inside if choice is not types.NoneType]
        if len(choices) == 1:  # its error says more than that of the union
            return read_value(choices[0], value, name, json)
        for choice in choices:
            with suppress(ValueError):
                return read_value(choice, value, name, json)
    if origin is Annotated:
        value, (valid, words) = read_value(inside[0], value, name, json), _bound(inside[1])
        require(valid(value), name, value, words)
        return value
    if origin is Literal:
        known = any(type(value) is type(choice) and value == choice for choice in inside)
        require(known, name, value, type_text(hint))
        return value
    if origin is list and isinstance(value, str) and not json:
        value = [value]  # --dpo.loss_type=ipo
    if origin is list and isinstance(value, list):
        return [read_value(inside[0], item, name, json) for item in value]
    if origin is tuple and isinstance(value, list | tuple):
        items = inside[:1] * len(value) if ... in inside else inside
        require(len(items) == len(value), name, value, f"a list of {len(items)} values")
        return tuple(
            read_value(item, part, name, json) for item, part in zip(items, value, strict=True)
        )
    if origin is dict and isinstance(value, dict):
        return {
            key: read_value(inside[1], item, f"{name}.{key}", json) for key, item in value.items()
        }
    if hint is float and (type(value) is int or (isinstance(value, str) and not json)):
        with suppress(ValueError, OverflowError):
            value = float(value)
    fits = origin is None and (hint is Any or type(value) is hint)
    require(fits, name, value, f"of type {type_text(hint)}")
    return value


def _bound(text: str):
    """Turn ">= 1" or "(0, 1]" into a test of a number and its words; "; cure" may follow."""
    text, _, cure = text.partition("; ")
    words = {"(-inf, inf)": "finite", "(0, inf)": "over 0 and finite"}.get(text, f"in {text}")
    if text[0] == ">":
        number = text.strip(">= ")
        words = f"{number} or more" if "=" in text else f"over {number}"
        text = f"{'[' if '=' in text else '('}{number}, inf]"
    low, high = map(float, text[1:-1].split(","))
    ends = {low: "[", high: "]"}  # the bracket that lets each in
    valid = lambda value: low < value < high or ends.get(value, "neither") in text  # noqa: E731
    return valid, words + (cure and f" ({cure})")
