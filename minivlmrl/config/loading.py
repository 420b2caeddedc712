"""Load a recipe, apply command-line overrides, and build its RunConfig."""

import dataclasses
import os
import re
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import field
from functools import cache
from pathlib import Path
from typing import Literal

import yaml

from minivlmrl.config.import_utils import find_stage, recipes_folder, split_options
from minivlmrl.config.options import RunConfig
from minivlmrl.config.parsing import TypeHint, build, options_of, parse_yaml, read_value
from minivlmrl.config.types import Code, FilePath, Plain, RecipePath, RewardName
from minivlmrl.errors import UserError, did_you_mean, error_context, require
from minivlmrl.json_files import json_text

# options that affect generation, saved in minivlmrl.yaml beside the weights
INFERENCE_OPTIONS = {
    "model": ["dtype", "compute_dtype"],
    "data": [
        "prompt_template",
        "system_prompt",
        "chat_template_kwargs",
        "resize_backend",
        "min_pixels",
        "max_pixels",
        "image",
        "video",
        "box_space",
        "answer_format",
    ],
}

TEXTS = {str, FilePath, RecipePath, Code}


def load_config(recipe: str | Path, overrides: Sequence[str] = (), is_found: bool = False) -> RunConfig:
    """Load a recipe: a YAML file with the fields of RunConfig, and sections for the user's own stages.

    Args:
        recipe: path, or name in the folder `recipes`.
        overrides: options such as "--seed=1", or two strings "--seed" and "1"; values are YAML.
        is_found: True if the recipe was found next to a model, not named by the user. A Python file named in such a
            recipe raises UserError before any code runs.
    """
    overrides = _join_values(overrides)
    path = _find_recipe(recipe)
    with error_context(recipe):
        values = parse_yaml(path.read_bytes()) or {}
    resolver = Resolver(path, {override.removeprefix("--").partition("=")[0] for override in overrides}, is_found)
    recipe_stages = _stages(values, recipe) if isinstance(values, dict) else []
    stages = recipe_stages
    for override in overrides:
        if override.startswith("--stages="):
            value = _override_value(override.removeprefix("--stages="), "stages", list[Code])
            stages = _stages({"stages": value}, "command line")
    files = [resolver(Code, stage, "stages") for stage in dict.fromkeys(stages) if ":" in stage]
    resolver.check()
    config_class = _with_sections(tuple(find_stage(file) for file in files))
    unused_sections = []
    if any(":" in stage for stage in set(recipe_stages) - set(stages)):
        unused_sections = [name for name in values if name not in vars(config_class())]
        values = {name: value for name, value in values.items() if name not in unused_sections}
    hints = {option.path: option.hint for option in options_of(config_class)}
    try:
        overridden = values
        for override in overrides:
            overridden = _apply(override, overridden, hints)
        config = build(config_class, overridden, "command line", change_text=resolver)
    except ValueError:
        # report the recipe, not the command line, if it is invalid without overrides
        build(config_class, values, str(recipe))
        raise
    resolver.check()
    config.recipe = str(recipe)
    config.unused_sections = unused_sections
    config.names_of_files = {file: find_stage(file).stage for file in files}
    return config


def _find_recipe(recipe: str | Path) -> Path:
    paths = [Path(recipe), recipes_folder() / str(recipe).removeprefix("recipes/")]
    for path in paths:
        if path.is_file():
            is_recipe = path.suffix not in (".json", ".jsonl", ".csv", ".tsv", ".parquet")
            expected = f"a recipe; write own_data.yaml --data.train_file={path}"
            require(is_recipe, "the recipe", str(path), expected)
            return path
    names = [file.stem for path in paths for file in path.parent.glob("*.yaml")]
    meant = did_you_mean(Path(recipe).stem, names, "{}.yaml".format)
    folders = " and ".join(dict.fromkeys(str(path.parent.absolute()) for path in paths))
    raise UserError(f"{recipe}: there is no such recipe in {folders}{meant}")


def _stages(values: dict, where: str | Path) -> list[str]:
    """Read option `stages` before all others, because user-defined stages add sections to the recipe."""
    with error_context(where):
        return read_value(list[Code], values.get("stages", []), "stages", json=False)


@cache
def _with_sections(algorithms: tuple[type, ...]) -> type[RunConfig]:
    """Return a RunConfig subclass with sections for user-defined stages."""
    if not algorithms:
        return RunConfig
    sections = {}
    for algorithm in algorithms:
        name = algorithm.stage
        if not (
            isinstance(name, str) and name.isidentifier() and name != "eval"
        ):  # "eval" is reserved for held-out rows
            raise UserError(f"stages: {algorithm.__name__}.stage is {name!r}, but it must be a name such as my_stage")
        if name in sections or name in dir(RunConfig()):
            raise UserError(
                f"stages: {algorithm.__name__}.stage is {name!r}, but a section with this name "
                "already exists; choose a different name"
            )
        sections[name] = algorithm.config_type
    fields = [(name, cls, field(default_factory=cls)) for name, cls in sections.items()]
    return dataclasses.make_dataclass("RunConfig", fields, bases=(RunConfig,))


class Resolver:
    """Make the paths in a recipe absolute, and list its Python files.

    `typed` contains command-line options, such as "grpo.beta" or "grpo".
    """

    def __init__(self, recipe: Path, typed: Collection[str], is_found: bool):
        self.recipe = recipe
        self.typed = typed
        self.is_found = is_found
        self.unknown: list[str] = []  # Python code that a recipe found next to a model would run

    def check(self):
        """Raise UserError if a recipe found next to a model would run a Python file."""
        if self.unknown:
            raise UserError(
                f"{self.recipe} was found automatically and would run the code {self.unknown[0]}; read the code, "
                f"then pass --recipe={self.recipe} to allow it"
            )

    def __call__(self, hint: TypeHint, text: str, path: str) -> str:
        is_typed = any(path == option or path.startswith(f"{option}.") for option in self.typed)
        if hint in (Code, RewardName):
            located = self._code(text, hint is RewardName, is_typed)
            name, options = split_options(located)
            # reject quoted strings in a recipe found next to a model: in "name(url='...')", the string could be a URL,
            # a file or a function
            if self.is_found and not is_typed and (":" in name or re.search("['\"]", options)):
                self.unknown.append(located)
            return located
        if hint is RecipePath:
            return self._find(text, is_typed)
        if hint is FilePath and os.path.exists(text):  # missing paths are Hub repository ids
            return str(Path(text).resolve())
        return text

    def _code(self, text: str, short: bool, is_typed: bool) -> str:
        """Make the path in "file.py:name" absolute."""
        match = re.match(r"(.*?\.py)(:.*)", text, re.DOTALL)
        if not match:
            return text
        file, name = match.groups()
        path = self._find(file, is_typed)
        # shorten reward paths, because metric names contain them
        if short and not os.path.isabs(file):
            for home in (os.getcwd(), recipes_folder().parent):
                path = path.removeprefix(os.path.join(home, ""))
        return path + name

    def _find(self, file: str, is_typed: bool) -> str:
        beside = self.recipe.parent
        folders = [Path(), beside] if is_typed else [beside, Path()]
        # a copy of a built-in recipe may name files in the recipes folder, such as shapes_model.json
        ours = [recipes_folder().parent, recipes_folder()]
        existing = [folder for folder in folders + ours if os.path.exists(folder / file)]
        return os.path.abspath((existing or folders)[0] / file)


def _join_values(arguments: Sequence[str]) -> list[str]:
    """Join options and values: ["--seed", "1", "--x=2"] -> ["--seed=1", "--x=2"]."""
    joined = []
    takes_value = False
    for argument in arguments:
        is_option = argument.startswith("--")
        if takes_value and not is_option:
            joined[-1] += f"={argument}"
        else:
            joined.append(argument)
        takes_value = is_option and "=" not in argument
    return joined


def _apply(override: str, values: dict, hints: dict[str, TypeHint]) -> dict:
    """Apply an override such as "--grpo.beta=0.1" to a copy of recipe values."""
    path, separator, text = override.removeprefix("--").partition("=")
    hint = hints.get(path)
    if not separator and hint is bool:  # a flag such as --dpo.use_weighting
        separator = "="
        text = "true"
    if not override.startswith("--") or not separator:
        raise UserError(f"{override!r}: an override must have the form --section.name=value")
    return _replace(values, path.split("."), _override_value(text, path, hint))


def _override_value(text: str, path: str, hint: TypeHint) -> Plain:
    """Parse an override's value as YAML; string options keep values such as 007 as strings."""
    is_text = any(hint in (text_type, text_type | None) for text_type in TEXTS)
    where = f"command line: quote the value of {path}"
    with suppress(ValueError) if is_text else error_context(where):
        value = parse_yaml(text)
        if not is_text or isinstance(value, str | None):
            return value
    return text


def to_yaml(config: RunConfig) -> str:
    """Return all run options, with defaults, as a YAML recipe."""
    return yaml.safe_dump(dataclasses.asdict(config) | {"resume": None}, sort_keys=False)


def as_overrides(fields: dict[str, Plain]) -> list[str]:
    """Convert options to command-line arguments: {"grpo.beta": 0.1} -> ["--grpo.beta=0.1"]."""
    return [f"--{name}={json_text(value)}" for name, value in fields.items()]


def flat(values: dict, prefix: str = "") -> dict[str, Plain]:
    """Flatten nested options: {"grpo": {"beta": 0.1}} -> {"grpo.beta": 0.1}."""
    flat_values = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat_values |= flat(value, f"{prefix}{name}.")
        else:
            flat_values[prefix + name] = value
    return flat_values


def inference_yaml(config: RunConfig) -> str:
    """Return the options that affect generation, as saved in minivlmrl.yaml."""
    values = dataclasses.asdict(config)
    inference_options = {}
    for section, names in INFERENCE_OPTIONS.items():
        inference_options[section] = {name: values[section][name] for name in names}
    inference_options["sampling"] = values["sampling"]
    if config.adapter.quantize:
        inference_options["adapter"] = {"quantize": config.adapter.quantize}
    return yaml.safe_dump(inference_options, sort_keys=False)


def trained_quantization(recipe: Path | None) -> Literal["nf4"] | None:
    """Return adapter.quantize from an adapter's recipe or minivlmrl.yaml."""
    return "nf4" if read_section(recipe, "adapter").get("quantize") == "nf4" else None


def changed_prompts(trained: Path | None, config: RunConfig) -> list[str]:
    """Return the prompt options that differ from a trained model's recipe or minivlmrl.yaml."""
    data = read_section(trained, "data")
    names = ["prompt_template", "system_prompt", "chat_template_kwargs", "answer_format", "box_space"]
    # None uses min_pixels or max_pixels from the model folder
    sizes = ("min_pixels", "max_pixels")
    names += [name for name in sizes if None not in (data.get(name), getattr(config.data, name))]
    return [f"data.{name}" for name in names if name in data and data[name] != getattr(config.data, name)]


def read_yaml(path: Path) -> Plain:
    """Parse a YAML file; errors name the file."""
    with error_context(str(path)):
        return parse_yaml(path.read_bytes())


def read_section(recipe: Path | None, name: str) -> dict:
    values = read_yaml(recipe) if recipe is not None and recipe.is_file() else None
    section = values.get(name) if isinstance(values, dict) else None
    return section if isinstance(section, dict) else {}


def _replace(values, path: list[str], value):
    """Copy a nested dict, with a new value at a path such as ["grpo", "beta"]."""
    name, *rest = path
    inside = values if isinstance(values, dict) else {}
    return {**inside, name: _replace(inside.get(name), rest, value) if rest else value}
