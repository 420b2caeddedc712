"""Write a model card, the README.md beside saved weights."""

import re
from dataclasses import asdict, is_dataclass
from pathlib import Path

import yaml

from minivlmrl.config.options import RunConfig
from minivlmrl.files import CARD_MARK

FOLDERS = re.compile(r"(?<![\w.:/<])/(?:[^/\s'\",:]+/)+")  # absolute folders, such as /home/ann/ in /home/ann/cat.jpg


def model_card(config: RunConfig, results: dict[str, dict[str, float]]) -> bytes:
    """Write a model card with base model, evaluations and recipe, but without names of folders.

    The license is left to the user.

    Args:
        results: {evaluation: {metric: value}}.
    """
    base = config.model.path
    values = asdict(config)
    defaults = asdict(type(config)())
    values["resume"] = None
    recipe = {}  # options that differ from their defaults
    for name, value in values.items():
        if is_dataclass(getattr(config, name)):
            value = {key: part for key, part in value.items() if part != defaults[name][key]}
        if value not in (defaults[name], {}):
            recipe[name] = value
    lines = ["---", "pipeline_tag: image-text-to-text", "# license: fill it in; that of the base holds as well", "---"]
    if base and not Path(base).exists():
        lines.insert(1, f"base_model: {base}")
    lines += [CARD_MARK, f"# {Path(config.output_dir).name}", f"{base or 'Random weights'}, trained with minivlmrl."]
    lines += ["Held-out rows:"] * bool(results)
    for name, metrics in results.items():
        lines.append(f"- {name}: " + ", ".join(f"{metric} {value:.3f}" for metric, value in metrics.items()))
    lines.append("\nRecipe (other options have their defaults):\n\n```yaml")
    text = "\n".join([*lines, f"{yaml.safe_dump(recipe, sort_keys=False)}```\n"])
    return FOLDERS.sub("", text).encode()
