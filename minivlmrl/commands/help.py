"""What `train --help` prints: every option of a recipe with default, type and sentence.

python -m minivlmrl train --help          # all sections
python -m minivlmrl train --help grpo     # one section
python -m minivlmrl train shapes_kto.yaml --help kto  # of a stage in a file that a recipe names
"""

import dataclasses
import inspect
import sys
import textwrap
import typing

import yaml

from minivlmrl.config.loading import load_config
from minivlmrl.config.options import RunConfig
from minivlmrl.config.parsing import did_you_mean, help_of, type_text
from minivlmrl.run.loop import main
from minivlmrl.run.process import run_rank


def start(arguments: list[str]):
    """Be one rank of a training run to the end of its process, or with --help print its options."""
    if "--help" in arguments:
        return show(*(argument for argument in arguments if argument != "--help"))
    run_rank(main, arguments)


def show(*names: str):
    """Print the options of these sections, "run": those outside of sections, or of all.

    The first name may be a recipe: sections of its stages in a file are listed too.
    """
    config_class = RunConfig
    if names and names[0].endswith(".yaml"):
        recipe, *names = names
        config_class = type(load_config(recipe))
    all_sections = sections(config_class)
    for name in names:
        if name not in all_sections:
            raise ValueError(
                f"--help {name}: no such section; sections are {', '.join(all_sections)}"
                f"{did_you_mean(name, all_sections)}"
            )
    print("usage: python -m minivlmrl train [RECIPE] [--section.name=value ...]\n")
    print("Train by a recipe, by default shapes.yaml. Its options, defaults:")
    for name in names or all_sections:
        config = all_sections[name]
        print(f"\n{name}: {inspect.getdoc(config).splitlines()[0]}")
        print("\n".join(option_lines(config, "" if name == "run" else f"{name}.")))


def sections(config_class: type[RunConfig] = RunConfig) -> dict[str, typing.Any]:
    """Section -> its dataclass with all defaults; "run" is RunConfig itself."""
    fields = vars(config_class()).items()
    return {"run": RunConfig()} | {
        name: value for name, value in fields if dataclasses.is_dataclass(value)
    }


def option_lines(config, prefix: str) -> list[str]:
    """List the options of one section, without the sections inside it."""
    lines = []
    sentences = help_of(type(config))
    for name, hint in typing.get_type_hints(type(config), include_extras=True).items():
        value = getattr(config, name)
        if dataclasses.is_dataclass(value):
            continue
        default = yaml.safe_dump(value, default_flow_style=True, width=sys.maxsize)
        default = default.removesuffix("\n...\n").strip()
        lines.append(f"  --{prefix}{name}={default}")
        text = f"{type_text(hint)}; {sentences[name]}"
        lines += textwrap.wrap(text, 110, initial_indent=8 * " ", subsequent_indent=8 * " ")
    return lines
