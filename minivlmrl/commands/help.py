"""Print a recipe's options with their defaults, types and comments, for `train --help`.

python -m minivlmrl train --help                          # all sections
python -m minivlmrl train --help grpo                     # one section
python -m minivlmrl train my_recipe.yaml --help my_stage  # section of a recipe's own stage
"""

import inspect
import sys
import textwrap

import yaml

from minivlmrl.config.loading import load_config
from minivlmrl.config.options import RunConfig
from minivlmrl.config.parsing import Option, options_of, type_text
from minivlmrl.errors import did_you_mean


def print_options(*names: str):
    """Print the options of the named sections; without names, print the options of all sections."""
    config_class = RunConfig
    if names and names[0].endswith(".yaml"):
        config_class = type(load_config(names[0]))
        names = names[1:]
    sections = options_by_section(config_class)
    for name in names:
        if name not in sections:
            raise ValueError(
                f"--help {name}: unknown section {name!r}; the sections are {', '.join(sections)}"
                f"{did_you_mean(name, sections)}"
            )
    print("usage: python -m minivlmrl train [RECIPE] [--section.name=value ...]\n")
    print("Train a recipe, by default shapes.yaml. Options and their defaults:")
    for name in names or sections:
        section = RunConfig if name == "run" else type(getattr(config_class(), name))
        title = inspect.getdoc(section) or ""
        print(f"\n{name}: {title.partition(chr(10))[0]}")
        for option in sections[name]:
            print(format_option(option))


def options_by_section(config_class: type[RunConfig] = RunConfig) -> dict[str, list[Option]]:
    """Return {section: its options}; options outside all sections, such as seed, are in the section "run"."""
    sections = {}
    for option in options_of(config_class):
        section = option.path.removesuffix(option.name).rstrip(".") or "run"
        sections.setdefault(section, []).append(option)
    return sections


def format_option(option: Option) -> str:
    default = yaml.safe_dump(option.default, default_flow_style=True, width=sys.maxsize)
    default = default.removesuffix("\n...\n").strip()
    text = f"{type_text(option.hint)}; {option.comment}"
    lines = textwrap.wrap(text, 110, initial_indent=8 * " ", subsequent_indent=8 * " ")
    return "\n".join([f"  --{option.path}={default}", *lines])
