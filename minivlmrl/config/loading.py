"""A whole recipe as one dataclass, composed of options that are declared where they are read."""

import dataclasses
import os
import re
import types
import typing
from collections.abc import Callable
from contextlib import suppress
from dataclasses import field
from functools import cache
from pathlib import Path

import yaml

from minivlmrl.config.import_utils import find_stage, recipes_folder, split_options
from minivlmrl.config.options import RunConfig
from minivlmrl.config.parsing import build, did_you_mean, naming, parse_yaml, read_value
from minivlmrl.config.types import Code, FilePath, RecipePath, RewardName
from minivlmrl.data.media_options import check_options
from minivlmrl.files import json_text
from minivlmrl.losses.preference import check_dpo_options

# fields that an answer depends on besides weights, and that no file of a Hugging Face folder has
KEPT = {
    "model": ["dtype", "compute_dtype"],
    "data": [
        "prompt_template",
        "system_prompt",
        "template",
        "resize",
        "video",
        "box_space",
        "answer",
    ],
}

TEXTS = {str, FilePath, RecipePath, Code}  # types of fields that are texts


def load_config(
    recipe: str | Path, overrides: list[str] = (), asked_for: list[str] | None = None
) -> RunConfig:
    """Read a recipe, a YAML file with the fields of RunConfig and sections of stages in a file.

    Args:
        overrides: such as "--seed=1" or "--grpo.learning_rate=1e-4"; the value is read as YAML.
        asked_for: for a recipe that somebody sent: code runs only if one of these overrides, which
            the user wrote, names it; None: the user named the recipe, all of its code may run.
    Raises:
        ValueError: it is not valid, or names code that may not run; none of it has run then.
    """
    path = _find_recipe(recipe)
    with naming(recipe):
        values = parse_yaml(path.read_bytes()) or {}
    recipe_stages = _stages(values, recipe) if isinstance(values, dict) else []
    stages = recipe_stages
    for override in overrides:
        if override.startswith("--stages="):
            value = _value(RunConfig, "stages", override.removeprefix("--stages="))
            stages = _stages({"stages": value}, "command line")

    def locate(hint, text: str) -> str:
        located = _located(hint, text, path.parent, overrides)
        if asked_for is not None and hint in (Code, RewardName):
            check_found(recipe, located, asked_for)
        return located

    files = [locate(Code, stage) for stage in dict.fromkeys(stages) if ":" in stage]
    config_class = _with_sections(tuple(find_stage(file) for file in files))
    unused_sections = []
    if any(":" in stage for stage in set(recipe_stages) - set(stages)):
        unused_sections = [name for name in values if name not in vars(config_class())]
        values = {name: value for name, value in values.items() if name not in unused_sections}
    if asked_for is None:
        _build_run(config_class, values, recipe)  # names the recipe if that is what is wrong
    for override in overrides:
        key, separator, text = override.removeprefix("--").partition("=")
        if not separator and _hint(config_class, key) is bool:  # --dpo.use_weighting
            separator = "="
            text = "true"
        if not override.startswith("--") or not separator:
            raise ValueError(f"{override!r}: an override has the form --section.name=value")
        values = _replace(values, key.split("."), _value(config_class, key, text))
    config = _build_run(config_class, _map_texts(config_class, values, locate), "command line")
    config.recipe = str(recipe)
    config.unused_sections = unused_sections
    config.names_of_files = {file: find_stage(file).stage for file in files}
    return config


def _build_run(config_class: type[RunConfig], values: dict, where: str | Path) -> RunConfig:
    """Build a config and check what its classes cannot: they import nothing (ValueError)."""
    config = build(config_class, values, str(where))
    with naming(where):
        with naming("data.video"):
            config.data.video = check_options("video", config.data.video)
        check_dpo_options(config.dpo, "dpo.")
    return config


def _find_recipe(recipe: str | Path) -> Path:
    """Find a file, or a recipe of ours by its name, outside of a clone too (ValueError: neither)."""
    for path in (Path(recipe), recipes_folder() / recipe):
        if path.is_file():
            return path
    names = [file.name for file in path.parent.glob("*.yaml")]
    raise ValueError(f"{recipe}: no such recipe{did_you_mean(path.name, names)}")


def _stages(values: dict, where: str | Path) -> list[str]:
    """Read the field `stages`, which says what other fields there are."""
    with naming(where):
        return read_value(list[Code], values.get("stages", []), "stages", json=False)


@cache
def _with_sections(algorithms: tuple[type, ...]) -> type[RunConfig]:
    """Add a section for each stage of a file (ValueError: there is one of its name)."""
    if not algorithms:
        return RunConfig
    sections = {}
    for algorithm in algorithms:
        name = algorithm.stage
        if name in sections or name in dir(RunConfig()):
            raise ValueError(
                f"stages: {algorithm.__name__}.stage is {name!r}, of which there is a section; "
                "give it another name"
            )
        sections[name] = algorithm.config_type
    fields = [(name, cls, field(default_factory=cls)) for name, cls in sections.items()]
    return dataclasses.make_dataclass("RunConfig", fields, bases=(RunConfig,))


def check_found(recipe: str | Path, text: str, overrides: list[str]):
    """Refuse code (ValueError) that a recipe names which the user did not name: somebody sent it.

    Args:
        text: a value of the recipe, a name of code.
        overrides: of the command line; code that one of them says too may run.
    """
    name, options = split_options(text)
    # Names without a colon are of tables. A text among options could be a URL, a file or a name.
    is_harmless = ":" not in name and not re.search("['\"]", options)
    spellings = {text, text.removeprefix(os.path.join(os.getcwd(), ""))}
    if not is_harmless and not any(_is_in(overrides, spelling) for spelling in spellings):
        raise ValueError(
            f"{recipe}: it was found, not asked for, and names code, {text}; read it; "
            f"--recipe={recipe} says that it may run"
        )


def _is_in(overrides: list[str], text: str) -> bool:
    """Say whether the command line names a file or code, and not one whose name ends alike."""
    pattern = rf"(?<![\w./-]){re.escape(text)}(?!\w)"
    return any(re.search(pattern, override) for override in overrides)


def _map_texts(hint, value, change: Callable[[object, str], str]):
    """Change the texts in a value by their types; one of another type than `hint` stays."""
    inside = typing.get_args(hint)
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        for choice in inside:
            value = _map_texts(choice, value, change)
        return value
    if dataclasses.is_dataclass(hint) and isinstance(value, dict):
        hints = typing.get_type_hints(hint)
        return {key: _map_texts(hints.get(key), item, change) for key, item in value.items()}
    if origin is dict and isinstance(value, dict):
        changed = {}
        for key, item in value.items():
            changed[_map_texts(inside[0], key, change)] = _map_texts(inside[1], item, change)
        return changed
    if origin in (list, tuple) and isinstance(value, list):
        return [_map_texts(inside[0], item, change) for item in value]
    if isinstance(value, str):
        return change(inside[0] if origin is list else hint, value)
    return value


def _located(hint, text: str, beside: Path, overrides: list[str]) -> str:
    """Make a path in a text absolute; a repository's id, and what is not there, stay."""
    file, suffix, name = re.fullmatch(r"(.*?)(?:(\.py)(:.*))?", text, re.DOTALL).groups("")
    if hint is RecipePath or (suffix and hint in (Code, RewardName)):
        path = _located_file(file + suffix, beside, overrides)
        if hint is RewardName and not os.path.isabs(file):  # metrics have its name: a short one
            for home in (os.getcwd(), recipes_folder().parent):
                path = path.removeprefix(os.path.join(home, ""))
        return path + name
    if hint is FilePath and os.path.exists(text):
        return str(Path(text).resolve())
    return text


def _located_file(file: str, beside: Path, overrides: list[str]) -> str:
    """Find a file of code, or a RecipePath, beside the recipe or else where the command runs.

    One that the command line names the other way round.
    """
    folders = [beside, Path()]
    if _is_in(overrides, file):
        folders = [Path(), beside]
    shipped = recipes_folder().parent  # of a wheel: recipes/answers.py
    existing = [folder for folder in (*folders, shipped) if os.path.exists(folder / file)]
    return os.path.abspath((existing or folders)[0] / file)


def _hint(config_class: type[RunConfig], key: str):
    """Find the type of a field, "section.name"; None: there is no such field."""
    hint = config_class
    for name in key.split("."):
        hint = typing.get_type_hints(hint).get(name) if dataclasses.is_dataclass(hint) else None
    return hint


def _value(config_class: type[RunConfig], key: str, text: str):
    """Read a field's value on the command line: YAML, or text as it is where the field is one."""
    hint = _hint(config_class, key)
    is_text = any(hint in (text, text | None) for text in TEXTS)
    with suppress(ValueError) if is_text else naming(f"command line: quote the value of {key}"):
        value = parse_yaml(text)
        if not is_text or isinstance(value, str | None):
            return value
    return text


def to_yaml(config: RunConfig) -> str:
    """Write the resolved config as a recipe that repeats the run in a folder that is free."""
    return yaml.safe_dump(dataclasses.asdict(config) | {"resume": None}, sort_keys=False)


def as_overrides(fields: dict[str, object]) -> list[str]:
    """Write values as overrides: {"grpo.beta": 0.1} -> ["--grpo.beta=0.1"]."""
    return [f"--{name}={json_text(value)}" for name, value in fields.items()]


def flat(values: dict, prefix: str = "") -> dict[str, object]:
    """Name what a recipe says: {"grpo": {"beta": 0.1}} -> {"grpo.beta": 0.1}."""
    flat_values = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat_values |= flat(value, f"{prefix}{name}.")
        else:
            flat_values[prefix + name] = value
    return flat_values


def asked_yaml(config: RunConfig) -> str:
    """Write the part of a recipe that lies beside weights: how these are to be asked."""
    values = dataclasses.asdict(config)
    kept = {}
    for section, names in KEPT.items():
        kept[section] = {name: values[section][name] for name in names}
    kept["sampling"] = values["sampling"]
    return yaml.safe_dump(kept, sort_keys=False)


def _replace(values, path: list[str], value):
    """Return `values` with another value at `path`; missing sections on the way are made."""
    name, *rest = path
    inside = values if isinstance(values, dict) else {}
    return {**inside, name: _replace(inside.get(name), rest, value) if rest else value}
