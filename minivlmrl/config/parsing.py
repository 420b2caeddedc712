"""Check and convert values in recipes and config files by dataclass type hints."""

import dataclasses
import inspect
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Protocol, TypeVar

import yaml
from yaml.composer import ComposerError
from yaml.constructor import ConstructorError

from minivlmrl.config.options import RunConfig
from minivlmrl.config.types import Code, Finite, Plain
from minivlmrl.config.yaml_errors import yaml_cure
from minivlmrl.errors import UserError, did_you_mean, error_context, invalid_value, require, truncate
from minivlmrl.load_extra import has_folder, load_extra


class Dataclass(Protocol):
    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field]]


T = TypeVar("T", bound=Dataclass)
MAIN_OPTIONS = {  # {section: option to suggest if the user gives the section a text, as in --model=Qwen/...}
    "model": "model.path",
    "adapter": "adapter.path",
    "reference": "reference.path",
    "data": "data.train_file",
    "data.train": "data.train_file",
    "optimizer": "optimizer.name",
    "sharding": "sharding.enabled",
}
TypeHint = Any


class Loader(yaml.SafeLoader):
    """YAML loader that rejects duplicate keys, aliases, and numbers such as 010 (8) and 1:30 (90).

    With aliases, a short file could fill the memory.
    """

    def compose_node(self, parent, index):
        if self.check_event(yaml.AliasEvent):
            problem = f"the alias *{self.peek_event().anchor} is not supported; write its value instead"
            raise ComposerError(None, None, problem, self.peek_event().start_mark)
        node = super().compose_node(parent, index)
        keys = set()
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if str(key.value) in keys:
                problem = f"the key {key.value!r} occurs twice; remove one of them"
                raise ComposerError(None, None, problem, key.start_mark)
            keys.add(str(key.value))
        return node

    def construct_number(self, node):
        is_int = node.tag.endswith("int")
        number = self.construct_yaml_int(node) if is_int else self.construct_yaml_float(node)
        if re.fullmatch(r"[-+]?0[0-7_]+|.*:.*", node.value):
            plain = "it in quotes" if ":" in node.value else f"{int(node.value)}, or '{node.value}' for a text"
            raise ConstructorError(None, None, f"YAML reads {node.value} as {number}; write {plain}", node.start_mark)
        return number


Loader.add_constructor("tag:yaml.org,2002:int", Loader.construct_number)
Loader.add_constructor("tag:yaml.org,2002:float", Loader.construct_number)


def parse_yaml(text: str | bytes) -> Any:
    """Parse YAML; errors name the line and what to write instead."""
    try:
        return yaml.load(text, Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        text = text.decode(errors="replace") if isinstance(text, bytes) else text
        raise UserError(f"the text is not valid YAML ({yaml_cure(text, error)})") from error


def build(
    cls: type[T],
    values: Plain,
    where: str,
    prefix: str = "",
    json: bool = False,
    change_text: Callable[[TypeHint, str, str], str] | None = None,
) -> T:
    """Build a dataclass from the values in a file, and check keys, types and bounds.

    Args:
        where, prefix: for error messages: file name or "command line", and section path such as "grpo.".
    """
    with error_context(where):
        reader = Reader(json, change_text, cls, "--" if where == "command line" else "")
        return reader.read_section(cls, values, prefix.rstrip("."))


def check_values(cls: type[Dataclass], values: Mapping[str, Plain], where: str) -> dict[str, Plain]:
    """Check the keys and types in a dict against a dataclass; return the values that are not None."""
    if not values:
        return {}
    return given_values(build(cls, values, where))


def given_values(section: Dataclass) -> dict[str, Plain]:
    return {name: value for name, value in vars(section).items() if value is not None}


def read_value(hint: TypeHint, value: Plain, name: str, json: bool) -> Any:
    """Check and convert a value by its type hint; errors contain `name`, such as "grpo.beta"."""
    return Reader(json).read(hint, value, name)


@dataclasses.dataclass
class Reader:
    """Check and convert nested values by type hints.

    Supported type hints: int, float, str, bool, dict, X | None, list[X], dict[str, X], tuples, dataclasses, Literal,
    string types in config/types.py, and numbers with bounds such as Annotated[float, "(0, 1]"].
    """

    # True for JSON files: ignore unknown keys, and convert no strings. False for recipes: reject unknown keys, convert
    # "a" to ["a"] if a list is expected, and convert "1e-4" to a float, because YAML reads 1e-4 as a string
    json: bool
    # function (type, string, option path such as "grpo.beta") -> new string; a dot in a key becomes a slash
    change_text: Callable[[TypeHint, str, str], str] | None = None
    root: type | None = None  # dataclass for the whole file, for suggestions if a key is unknown
    dashes: str = ""  # prefix of suggested option names: "--" for the command line

    def read(self, hint: TypeHint, value: Plain, name: str) -> Any:
        """Check and convert a value; errors contain `name`."""
        if hint is float:  # reject infinity unless bounds such as "(0, inf]" allow it
            hint = Finite
        origin = typing.get_origin(hint)
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            return value if isinstance(value, hint) else self.read_section(hint, value, name)
        if origin in (typing.Union, types.UnionType):
            return self._read_union(hint, value, name)
        if origin is Annotated:
            number_type, bounds = typing.get_args(hint)
            if isinstance(bounds, type):  # Annotated[dict, ImageOptions] is a dict with the options in ImageOptions
                return given_values(self.read_section(bounds, value, name))
            number = self._read_plain(number_type, value, name)
            interval = bounds.partition("; ")[0]
            if interval[0] == ">":
                is_inside = number >= float(interval.removeprefix(">= "))
            else:
                low, high = map(float, interval[1:-1].split(","))
                is_open = (number == low and interval[0] == "(") or (number == high and interval[-1] == ")")
                is_inside = low <= number <= high and not is_open
            require(is_inside, name, number, bounds_text(bounds))
            return number
        if origin is Literal:
            # compare types as well, because Literal[1] must reject True == 1
            if (type(value), value) not in [(type(choice), choice) for choice in typing.get_args(hint)]:
                raise self._wrong_choice(hint, value, name, type_text(hint))
            return value
        if origin is dict:
            return self._read_dict(hint, value, name)
        if origin in (list, tuple):
            return self._read_sequence(hint, value, name)
        return self._read_plain(hint, value, name)

    def _read_plain(self, hint: TypeHint, value: Plain, name: str) -> Any:
        plain = getattr(hint, "__supertype__", hint)  # base type: str for NewType("Code", str)
        if hint is float and (type(value) is int or (isinstance(value, str) and not self.json)):
            with suppress(ValueError, OverflowError):
                value = float(value)
        require(hint is Any or type(value) is plain, name, value, f"of type {type_text(plain)}")
        return self.change_text(hint, value, name) if self.change_text and isinstance(value, str) else value

    def read_section(self, cls: type[T], values: Plain, name: str) -> T:
        """Build a dataclass from a section; `name` is its path, "" for the whole file."""
        expected = f"an object with names and values{self._main_option(name, values)}"
        require(isinstance(values, dict), name or "the file", values, expected)
        prefix = f"{name}." if name else ""
        hints = typing.get_type_hints(cls, include_extras=True)
        fields = {field.name: field for field in dataclasses.fields(cls)}
        for key in values:
            if key not in fields and not self.json:
                raise UserError(self._unknown_key(cls, prefix, str(key), values[key]))
        read = {}
        for key, field in fields.items():
            if key in values:
                read[key] = self.read(hints[key], values[key], f"{prefix}{key}")
            elif field.default is field.default_factory is dataclasses.MISSING:
                raise UserError(f"{prefix}{key} is missing")
        try:
            return cls(**read)
        except ValueError as error:  # __post_init__ raises ValueError for invalid values
            raise UserError(f"{prefix}{error}") from None

    def _main_option(self, section: str, value: Plain) -> str:
        """For a text given as the value of a section, suggest an option: "; write --model.path=Qwen/..."."""
        if section not in MAIN_OPTIONS or not isinstance(value, str | bool):
            return ""
        parent, _, name = MAIN_OPTIONS[section].partition(".")
        text = str(value).lower() if isinstance(value, bool) else value
        return f"; write --{parent}.{name}={text}" if self.dashes else f"; write {parent}: {{{name}: {text}}}"

    def _read_union(self, hint: TypeHint, value: Plain, name: str) -> Any:
        """Keep a value whose type is in the union, else convert it to the first type that fits."""
        choices = [choice for choice in typing.get_args(hint) if choice is not types.NoneType]
        if type(value) in typing.get_args(hint):  # with the type float | str, "7" stays a string
            return value
        if len(choices) == 1:  # read int | None as int, whose error message is more specific
            return self.read(choices[0], value, name)
        for choice in choices:
            if choice is Code and ":" not in str(value):
                continue
            with suppress(ValueError):
                return self.read(choice, value, name)
        raise self._wrong_choice(hint, value, name, f"of type {type_text(hint)}")

    def _wrong_choice(self, hint: TypeHint, value: Plain, name: str, expected: str) -> UserError:
        """Return an error for an invalid choice. For values known from TRL or other libraries, say what to write."""
        error = str(invalid_value(name, value, expected))
        if isinstance(value, str) and self.root is not None:
            advice = self._foreign_name(self.root, "", value)
            choices = re.findall("'(.*?)'", type_text(hint))
            meant = [word for word in re.findall(r"`([^`]+)`", advice) if word in choices]  # names in backticks
            if meant:
                error += f"; write {meant[0]}"
            else:
                error += f"; {advice}" if advice else did_you_mean(value, choices)
        return UserError(error)

    def _read_dict(self, hint: TypeHint, value: Plain, name: str) -> dict:
        key_hint, item_hint = typing.get_args(hint)
        expected = f"of type {type_text(hint)}"
        texts: Plain = value.split(",") if type(value) is str else value
        if item_hint is Finite and type(texts) is list:  # reward names, without weights or as in accuracy:1.0
            weights = ", ".join(f"{reward}: {weight}" for reward, weight in map(_name_and_weight, texts))
            given = f'"--{name}={{{weights}}}"' if self.dashes else f"{name}: {{{weights}}}"
            expected += f"; write {given}"
        require(isinstance(value, dict), name, value, expected)
        read = {}
        for key, item in typing.cast(dict, value).items():
            if item is None and ":" in str(key) and not self.json:
                raise UserError(f"{name}: {key} has no value; write a space after the colon, as in {{accuracy: 1.0}}")
            key = self._read_plain(key_hint, key, f"{name}.{str(key).replace('.', '/')}")
            read[key] = self.read(item_hint, item, f"{name}.{key}")
        return read

    def _read_sequence(self, hint: TypeHint, value: Plain, name: str) -> list | tuple:
        origin = typing.get_origin(hint)
        inside = typing.get_args(hint)
        if origin is list and isinstance(value, str) and not self.json:
            value = [value]  # a string stands for a list with one item, as in --dpo.loss_type=ipo
        # JSON and YAML have no tuples, so accept lists
        require(isinstance(value, list | tuple), name, value, f"of type {type_text(hint)}")
        hints = [inside[0]] * len(value) if origin is list or ... in inside else inside
        require(len(value) == len(hints), name, value, f"a list of {len(hints)} values")
        return origin(self.read(item_hint, item, name) for item_hint, item in zip(hints, value, strict=True))

    def _unknown_key(self, section: type, prefix: str, key: str, value: Plain) -> str:
        """Describe an unknown key, with advice if it is a TRL option or an option in another section."""
        root = self.root or section
        paths = [option.path for option in options_of(root)]
        if "." in key and key in paths:
            parent, _, name = key.rpartition(".")
            return f"unknown key {key}; write {name} in the section {parent}"
        names = {field.name: f"{prefix}{field.name}" for field in dataclasses.fields(section)}
        known = f"; known keys are {', '.join(names)}"
        inner = prefix
        nested = {key: value}
        answer = ""
        while isinstance(nested, dict) and nested:  # follow nested keys, such as verl's actor_rollout_ref.rollout.n
            name, nested = next(iter(nested.items()))
            advice = self._foreign_name(root, inner, str(name))
            if advice:  # the innermost name is the option, so its advice applies
                answer = f"unknown key {inner}{name}; {advice}"
            if "was removed" in advice:
                break
            inner += f"{name}."
        if answer:
            return answer
        for path in sorted(paths, key=lambda path: not path.startswith("grpo.")) if not prefix else ():
            names.setdefault(path.rpartition(".")[2], path)  # for the key beta, suggest grpo.beta
        meant = did_you_mean(key, names, lambda name: self.dashes + names[name])
        return f"unknown key {prefix}{key}{meant or truncate(known, 400, str)}"

    def _foreign_name(self, root: type, section: str, name: str) -> str:
        """Return advice from extras/names.csv about a name from a library such as TRL, or ""."""
        if not issubclass(root, RunConfig) or not has_folder("extras"):
            return ""
        answer = load_extra("minivlmrl.extras.names:answer", "an unknown option")
        return answer(section, name, self.dashes, [option.path for option in options_of(root)])


def _name_and_weight(text: Plain) -> tuple[str, str]:
    """Split "accuracy:1.0" or "accuracy=1.0" into name and weight, by default 1.0."""
    name, weight, *_ = *re.split(r"\s*[:=]\s*(?=-?[\d.]+$)", str(text).strip()), "1.0"
    return (f"{name}:FUNCTION" if name.endswith(".py") else name), weight


class Option(NamedTuple):
    """A recipe option, such as grpo.beta."""

    path: str  # command-line name, such as "seed" or "grpo.beta"
    name: str
    hint: TypeHint
    default: Plain
    declared_in: type  # dataclass that declares the field, possibly a base class


def options_of(cls: type, prefix: str = "") -> Iterator[Option]:
    """Yield all options in a dataclass and in its nested dataclasses (recipe sections)."""
    hints = typing.get_type_hints(cls, include_extras=True)
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            yield from options_of(hint, f"{prefix}{field.name}.")
        else:
            declared_in = next(part for part in cls.__mro__ if field.name in inspect.get_annotations(part))
            default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
            yield Option(prefix + field.name, field.name, hint, default, declared_in)


def type_text(hint: TypeHint) -> str:
    """Describe a type hint, such as "int, >= 1" or "'k1' or 'k3'"."""
    if hint is Code:
        return "file.py:name"
    hint = getattr(hint, "__supertype__", hint)
    origin = typing.get_origin(hint)
    inside = typing.get_args(hint)
    if origin is Annotated:
        bounds = "" if isinstance(inside[1], type) else f", {bounds_text(inside[1])}"
        return type_text(inside[0]) + bounds
    if origin is Literal:
        *first, last = map(repr, inside)
        return f"{', '.join(first)} or {last}" if first else last
    if origin in (typing.Union, types.UnionType):
        return " or ".join(map(type_text, inside))
    if dataclasses.is_dataclass(hint):
        return "object"
    if origin is not None:
        parts = ["..." if part is ... else type_text(part) for part in inside]
        return f"{origin.__name__}[{', '.join(parts)}]"
    return "null" if hint is types.NoneType else hint.__name__


def bounds_text(bounds: str) -> str:
    """Describe bounds, such as "in (0, 1]" or "finite"."""
    interval, _, advice = bounds.partition("; ")
    words = interval if interval[0] == ">" else f"in {interval}"
    words = "finite" if interval == "(-inf, inf)" else words
    return f"{words} ({advice})" if advice else words
