"""Print recipe options with defaults, types and comments, for `train --help`.

minivlmrl train --help                          # all sections
minivlmrl train --help grpo                     # one section
minivlmrl train my_recipe.yaml --help my_stage  # your own stage
"""

import inspect
import re
import sys
import textwrap
from functools import cache

import yaml

from minivlmrl.config.loading import load_config
from minivlmrl.config.methods import METHODS
from minivlmrl.config.options import RunConfig
from minivlmrl.config.parsing import options_of, type_text
from minivlmrl.errors import UserError, did_you_mean


def print_options(*names: str):
    """Print the options in the named sections, by default all."""
    config_class = RunConfig
    if names and names[0].endswith(".yaml"):
        config_class = type(load_config(names[0]))
        names = names[1:]
    sections = {}  # {section: options}; top-level options such as seed are in "run"
    for option in options_of(config_class):
        section = option.path.removesuffix(option.name).rstrip(".") or "run"
        sections.setdefault(section, []).append(option)
    for name in names:
        if name not in sections:
            raise UserError(
                f"--help {name}: unknown section {name!r}; the sections are {', '.join(sections)}"
                f"{did_you_mean(name, sections)}"
            )
    print("usage: minivlmrl train [RECIPE] [--section.name=value ...]\n")
    print("Train a recipe, by default shapes.yaml. Options and their defaults:")
    if "grpo" in (names or sections):
        print("\nmethod: options of a paper, such as --method=gspo")
        for name, method in METHODS.items():
            options = ", ".join(f"{option}: {value}" for option, value in method.options.items())
            text = f"{name}: {method.title}, arXiv {method.paper}; {options}"
            print(textwrap.indent(textwrap.fill(text, 102), 8 * " "))
    for name in names or sections:
        section = RunConfig if name == "run" else type(getattr(config_class(), name))
        title = inspect.getdoc(section) or ""
        print(f"\n{name}: {title.partition(chr(10))[0]}")
        for option in sections[name]:
            default = yaml.safe_dump(option.default, default_flow_style=True, width=sys.maxsize)
            default = default.removesuffix("\n...\n").strip()
            print(f"  --{option.path}={default}")
            text = f"{type_text(option.hint)}; {comments_of(option.declared_in).get(option.name, '')}"
            print(textwrap.indent(textwrap.fill(text, 102), 8 * " "))


@cache
def comments_of(section: type) -> dict[str, str]:
    """Return {field: the comment above and beside it} for a dataclass, as help text."""
    comments = {}
    above = []  # comment lines directly above a field
    for line in inspect.getsource(section).splitlines():
        code, _, comment = line.partition("# ")
        if field := re.match(r"\s+(\w+): ", code):
            comments[field[1]] = " ".join([*above, comment]).strip()
        above = [] if code.strip() else [*above, comment]
    return comments
