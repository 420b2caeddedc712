"""Load a recipe, apply command-line overrides, and build its RunConfig."""

import dataclasses
import os
import re
import sys
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import field
from functools import cache
from pathlib import Path
from typing import Any, Literal

import yaml

from minivlmrl.config.import_utils import find_stage, recipes_folder, split_options
from minivlmrl.config.methods import method_options
from minivlmrl.config.options import RunConfig
from minivlmrl.config.parsing import TypeHint, build, options_of, parse_yaml, read_value, type_text
from minivlmrl.config.types import Code, FilePath, Plain, RecipePath, RewardName
from minivlmrl.config.yaml_errors import yaml_cure
from minivlmrl.errors import UserError, did_you_mean, error_context, require
from minivlmrl.json_files import json_text

# options saved in minivlmrl.yaml beside the weights
INFERENCE_OPTIONS = {
    "model": ["dtype", "compute_dtype"],
    "data": [
        "prompt_template",
        "system_prompt",
        "chat_template_kwargs",
        "min_pixels",
        "max_pixels",
        "image",
        "video",
        "box_space",
        "answer_format",
    ],
}


def load_config(recipe: str | Path, overrides: Sequence[str] = (), is_found: bool = False) -> RunConfig:
    """Load a recipe, a YAML file with the fields of RunConfig and with sections for user-defined stages.

    Args:
        recipe: path, or name in the folder `recipes`.
        overrides: options such as "--seed=1", or two strings "--seed" and "1"; values are YAML. "--method=gspo" stands
            for the options in METHODS["gspo"].
        is_found: whether the recipe was found automatically next to a model. If so, a recipe that names a Python file
            raises PermissionError before any code runs.
    """
    path = _find_recipe(recipe)
    values = _read_recipe(path)
    overrides = _expanded(overrides)
    resolver = Resolver(path, {override.removeprefix("--").partition("=")[0] for override in overrides}, is_found)
    recipe_stages = _stages(values, recipe)
    stages = recipe_stages
    for override in overrides:
        if override.startswith("--stages="):
            stages = _stages(_apply(override, {}, {}), "command line")
    files = [resolver(Code, stage, "stages") for stage in dict.fromkeys(stages) if ":" in stage]
    own_stages = tuple(map(find_stage, files))
    config_class = _with_sections(own_stages)
    unused_sections = []
    if any(":" in stage for stage in set(recipe_stages) - set(stages)):
        inherited = {name for stage in own_stages for name in inherited_sections(stage)}
        unused_sections = [name for name in values if name not in {*vars(config_class()), *inherited}]
        values = {name: value for name, value in values.items() if name not in unused_sections}
    hints = {option.path: option.hint for option in options_of(config_class)}
    if is_found:
        values = _without_removed(values, path, hints)
    try:
        overridden = values
        for override in overrides:
            overridden = _apply(override, overridden, hints)
        config = build(config_class, _inherit(overridden, own_stages), "command line", change_text=resolver)
    except ValueError:
        # check the recipe without overrides first, so its own errors name the recipe file
        build(config_class, _inherit(values, own_stages), str(recipe))
        raise
    config.recipe = str(recipe)
    config.unused_sections = unused_sections
    config.names_of_files = {file: find_stage(file).stage for file in files}
    return config


def _expanded(arguments: Sequence[str]) -> list[str]:
    """Join names and values, ["--seed", "1"] -> ["--seed=1"], and expand --method to its options."""
    joined = [""]
    for argument in arguments:
        if joined[-1].startswith("--") and "=" not in joined[-1] and not argument.startswith("--"):
            joined[-1] += f"={argument}"
        else:
            joined.append(argument)
    expanded = []
    for override in joined[1:]:
        name, _, value = override.partition("=")
        expanded += as_overrides(method_options(value)) if name == "--method" else [override]
    return expanded


def _without_removed(values: dict, path: Path, hints: Collection[str]) -> dict:
    """From a recipe saved by an earlier version, drop options that no longer exist."""
    kept = {}
    for name, value in values.items():
        if name in hints:
            kept[name] = value
        elif isinstance(value, dict) and any(option.startswith(f"{name}.") for option in hints):
            kept[name] = {key: item for key, item in value.items() if f"{name}.{key}" in hints}
    removed = ", ".join(name for name in flat(values) if name not in flat(kept))
    if removed:
        print(f"{path}: this version has no longer the options {removed}, and ignores them", file=sys.stderr)
    return kept


def _find_recipe(recipe: str | Path) -> Path:
    """Find a recipe file, possibly among the built-in recipes."""
    paths = [Path(recipe), recipes_folder() / str(recipe).removeprefix("recipes/")]
    for path in paths:
        if path.is_file():
            is_recipe = path.suffix not in (".json", ".jsonl", ".csv", ".tsv", ".parquet")
            expected = f"a recipe; write own_data.yaml --data.train_file={path}"
            require(is_recipe, "the recipe", str(path), expected)
            return path
    if Path(recipe, "config.json").is_file():
        raise UserError(f"{recipe} is the folder of a model, not a recipe; write own_data.yaml --model.path={recipe}")
    names = [file.stem for path in paths for file in path.parent.glob("*.yaml")]
    meant = did_you_mean(Path(recipe).stem, names, "{}.yaml".format)
    folders = " and ".join(dict.fromkeys(str(path.parent.absolute()) for path in paths))
    raise UserError(f"{recipe}: there is no such recipe in {folders}{meant}")


def _read_recipe(path: Path) -> dict[str, Plain]:
    """Read a recipe, and raise UserError unless it is a dict of options."""
    values = read_yaml(path)
    if isinstance(values, str):
        raise UserError(f"{path}: the recipe has no names and values; {yaml_cure(path.read_text('utf-8'))}")
    if values is None:
        raise UserError(f"{path}: the recipe is empty; copy one, such as {recipes_folder() / 'own_data.yaml'}")
    expected = "names and values, one `name: value` per line, such as seed: 7"
    require(isinstance(values, dict), f"{path}: the recipe", values, expected)
    return values


def _stages(values: dict, where: str | Path) -> list[str]:
    """Return the option `stages`, read first because user-defined stages add sections to the recipe."""
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
        # a stage cannot be named "eval", because the evaluation rows have this name
        if not str(name).isidentifier() or name in {"eval", *sections, *dir(RunConfig())}:
            raise UserError(
                f"stages: {algorithm.__name__}.stage is {name!r}, but it must be a new name such as my_stage"
            )
        sections[name] = name, algorithm.config_type, field(default_factory=algorithm.config_type)
    return dataclasses.make_dataclass("RunConfig", sections.values(), bases=(RunConfig,))


def inherited_sections(stage: type) -> list[str]:
    """Return the recipe sections of a trainer's base classes, closest last: ["grpo"] for a GRPOTrainer subclass."""
    names = [getattr(parent, "stage", stage.stage) for parent in reversed(stage.mro()[1:])]
    return [name for name in dict.fromkeys(names) if name != stage.stage]


def differing_options(config: RunConfig, stage: type) -> list[str]:
    """List options that differ from the base trainer's section: ["mine.beta=0.1 (grpo.beta=0.02)", "mine.keep=0.5"]."""
    texts = []
    for parent in [name for name in inherited_sections(stage) if hasattr(config, name)][-1:]:
        inherited = vars(getattr(config, parent))
        for name, value in vars(getattr(config, stage.stage)).items():
            if name not in inherited:
                texts.append(f"{stage.stage}.{name}={value}")
            elif value != inherited[name]:
                texts.append(f"{stage.stage}.{name}={value} ({parent}.{name}={inherited[name]})")
    return texts


def _inherit(values: dict[str, Plain], own_stages: Sequence[type]) -> dict[str, Plain]:
    """Fill the section of a user-defined stage with the recipe's options for its base trainer."""
    known = {option.name for option in dataclasses.fields(_with_sections(tuple(own_stages)))}
    filled = dict(values)
    for stage in own_stages:
        options = {option.name for option in dataclasses.fields(stage.config_type)}
        section = {}
        for parent in inherited_sections(stage):
            inherited = values.get(parent)
            if isinstance(inherited, dict):
                section |= {name: value for name, value in inherited.items() if name in options}
            if parent not in known:  # drop a section that exists only to be inherited
                filled.pop(parent, None)
        given = values.get(stage.stage)
        filled[stage.stage] = section | given if isinstance(given, dict) else given or section
    return filled


@dataclasses.dataclass
class Resolver:
    """Make the paths in a recipe absolute. Raise PermissionError if an automatically found recipe would run code."""

    recipe: Path
    typed: Collection[str]  # options or sections set on the command line, such as "grpo.beta" or "grpo"
    is_found: bool

    def __call__(self, hint: TypeHint, text: str, path: str) -> str:
        is_typed = any(f"{path}.".startswith(f"{option}.") for option in self.typed)
        if hint is RecipePath:
            return self._find(text, is_typed)
        if hint is FilePath and os.path.exists(text):  # if no such file exists, the text is a Hub repository id
            return str(Path(text).resolve())
        if hint not in (Code, RewardName):
            return text
        match = re.match(r"(.*?\.py)(:.*)", text, re.DOTALL)
        if match:
            file, name = match.groups()
            text = self._find(file, is_typed) + name
            # make the path of a reward relative, because metric names contain it
            if hint is RewardName and not os.path.isabs(file):
                for home in (os.getcwd(), recipes_folder().parent):
                    text = text.removeprefix(os.path.join(home, ""))
        name, options = split_options(text)
        # also reject quoted strings: in "name(url='...')", the string could be a URL, a file or a function
        if self.is_found and not is_typed and (":" in name or re.search("['\"]", options)):
            # not a UserError, which is a ValueError: config/parsing.py would catch it, and try the next type of a union
            raise PermissionError(
                f"{self.recipe} was found automatically and would run the code {text}; read the code, then pass "
                f"--recipe={self.recipe} to allow it"
            )
        return text

    def _find(self, file: str, is_typed: bool) -> str:
        folders = [self.recipe.parent, Path()]
        if is_typed:
            folders.reverse()
        # also search the recipes folder: a copied recipe may name files there, such as shapes_model.json
        paths = [folder / file for folder in (*folders, recipes_folder().parent, recipes_folder())]
        return os.path.abspath(next(filter(os.path.exists, paths), paths[0]))


def _apply(override: str, values: dict, hints: dict[str, TypeHint]) -> dict:
    """Apply an override such as "--grpo.beta=0.1" to a copy of the recipe's values."""
    path, separator, text = override.removeprefix("--").partition("=")
    hint = hints.get(path, Any)
    is_section = any(option.startswith(f"{path}.") for option in hints)
    if not separator and (hint is bool or not (path in hints or is_section)):
        # a flag such as --dpo.reference_free; flags of other projects, such as --bf16, fail later as unknown options
        separator = "="
        text = "true"
    if override.startswith("--") and not separator:
        raise UserError(f"{override} has no value; write {override}=VALUE")
    if not override.startswith("--"):
        meant = f"; write --{override}" if "=" in override else ""
        if override.endswith((".yaml", ".yml")):
            meant = ". The recipe is the first argument, before all overrides"
        raise UserError(f"{override!r}: an override must have the form --section.name=value{meant}")
    # for an option of type str, 007 stays a string
    is_text = type_text(hint).removesuffix(" or null") in ("str", "file.py:name")
    value = text
    with suppress(ValueError) if is_text else error_context(f"command line: quote the value of {path}"):
        value = parse_yaml(text)
        if is_text and not isinstance(value, str | None):
            value = text
    return _replace(values, path.split("."), value)


def to_yaml(config: RunConfig) -> str:
    """Return all options, with defaults, as a YAML recipe."""
    return yaml.safe_dump(dataclasses.asdict(config) | {"resume": None}, sort_keys=False)


def as_overrides(fields: dict[str, Plain]) -> list[str]:
    """Convert options to command-line arguments: {"grpo.beta": 0.1} -> ["--grpo.beta=0.1"]."""
    return [f"--{name}={json_text(value)}" for name, value in fields.items()]


def flat(values: dict, prefix: str = "") -> dict[str, Plain]:
    """Flatten nested options: {"grpo": {"beta": 0.1}} -> {"grpo.beta": 0.1}."""
    flat_values = {}
    for name, value in values.items():
        path = prefix + name
        flat_values |= flat(value, f"{path}.") if isinstance(value, dict) else {path: value}
    return flat_values


def inference_yaml(config: RunConfig) -> str:
    """Return the options for evaluations and chats, as YAML."""
    values = dataclasses.asdict(config)
    inference_options = {}
    for section, names in INFERENCE_OPTIONS.items():
        inference_options[section] = {name: values[section][name] for name in names}
    inference_options["sampling"] = values["sampling"]
    if config.adapter.quantize:
        inference_options["adapter"] = {"quantize": config.adapter.quantize}
    return yaml.safe_dump(inference_options, sort_keys=False)


def trained_quantization(recipe: Path | None) -> Literal["nf4"] | None:
    return read_section(recipe, "adapter").get("quantize")


def changed_prompts(trained: Path | None, config: RunConfig) -> list[str]:
    """List prompt options with other values than when the model was trained."""
    data = read_section(trained, "data")
    names = ["prompt_template", "system_prompt", "chat_template_kwargs", "answer_format", "box_space"]
    # if None, the value in the model folder applies
    sizes = ("min_pixels", "max_pixels")
    names += [name for name in sizes if None not in (data.get(name), getattr(config.data, name))]
    return [f"data.{name}" for name in names if name in data and data[name] != getattr(config.data, name)]


def read_yaml(path: Path) -> Plain:
    """Parse a YAML file; error messages name the file."""
    with error_context(str(path)):
        return parse_yaml(path.read_bytes())


def read_section(recipe: Path | None, name: str) -> dict:
    """Return a recipe section, {} without one."""
    values = read_yaml(recipe) if recipe is not None and recipe.is_file() else None
    section = values.get(name) if isinstance(values, dict) else None
    return section if isinstance(section, dict) else {}


def _replace(values, path: list[str], value):
    """Copy a nested dict, and set a new value at a path such as ["grpo", "beta"]."""
    name, *rest = path
    inside = values if isinstance(values, dict) else {}
    return {**inside, name: _replace(inside.get(name), rest, value) if rest else value}
