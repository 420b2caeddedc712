"""Names of options and evaluation metrics that version 0.4.0 changed.

An old name in a recipe or on the command line is an error, whose message contains the new name.
Files that minivlmrl 0.3 wrote (config.yaml of a run, minivlmrl.yaml beside weights, the state of a
run) can still be read. Old names in these files are translated, and a note is printed to stderr.
"""

import re
import sys
from pathlib import Path

from minivlmrl.config.types import Plain

# {old option: new option}, both with their sections
RENAMED_OPTIONS = {
    "state_minutes": "checkpoint_minutes",
    "state_steps": "checkpoint_steps",
    "page_minutes": "report_minutes",
    "keep_best": "best_metric",
    "data.answer": "data.answer_format",
    "data.template": "data.chat_template_kwargs",
    "data.resize": "data.resize_backend",
    "data.eval_blind": "data.eval_without_images",
    "sampling.graph": "sampling.cuda_graph",
    "sampling.max_tokens_at_once": "sampling.max_batch_tokens",
}


def is_from_0_3(options: dict[str, Plain]) -> bool:
    """Return True if nested options have a name or a value that only minivlmrl 0.3 used."""
    sampling = options.get("sampling")
    has_old_engine = isinstance(sampling, dict) and sampling.get("engine") == "own"
    for path in RENAMED_OPTIONS:
        section, _, name = path.rpartition(".")
        values = options.get(section) if section else options
        if isinstance(values, dict) and name in values:
            return True
    return has_old_engine


def translate_options(options: dict[str, Plain], file: Path) -> dict[str, Plain]:
    """Translate the options in a file of minivlmrl 0.3 to their new names.

    Args:
        options: nested options of the file, such as {"data": {"answer": "tags"}}. Options of 0.4
            are returned unchanged.
        file: path of the file, for the note on stderr.
    """
    if not is_from_0_3(options):
        return options
    print(f"note: {file} is from minivlmrl 0.3; its options are read as in 0.4", file=sys.stderr)
    return rename_options(options)


def rename_options(options: dict[str, Plain]) -> dict[str, Plain]:
    """Return nested options of 0.3 with the names and values of 0.4."""
    renamed = {}
    for name, value in options.items():
        if isinstance(value, dict):
            value = _rename_section(f"{name}.", value)
        renamed[RENAMED_OPTIONS.get(name, name)] = value
    best_metric = renamed.get("best_metric")
    if isinstance(best_metric, str):
        renamed["best_metric"] = rename_metric(best_metric, eval_rewards(renamed))
    return renamed


def _rename_section(prefix: str, section: dict[str, Plain]) -> dict[str, Plain]:
    """Rename the options of one section, whose path is `prefix` without its last dot."""
    renamed = {}
    for name, value in section.items():
        path = prefix + name
        if path == "data.resize" and isinstance(value, list):  # a fixed size, [height, width]
            renamed["image"] = dict(zip(("resized_height", "resized_width"), value, strict=True))
            continue
        if path == "sampling.engine" and value == "own":
            value = "native"
        renamed[RENAMED_OPTIONS.get(path, path).removeprefix(prefix)] = value
    return renamed


def eval_rewards(options: dict[str, Plain]) -> list[str]:
    """Return the names of data.eval_rewards in nested options, by default accuracy and format."""
    data = options.get("data")
    names = data.get("eval_rewards") if isinstance(data, dict) else None
    return [str(name) for name in names] if isinstance(names, list) else ["accuracy", "format"]


def rename_metric(name: str, rewards: list[str]) -> str:
    """Translate the name of an evaluation metric of 0.3; other names are returned unchanged.

    Args:
        name: name of the metric, such as "sampled".
        rewards: names in data.eval_rewards.
    """
    first = rewards[0]
    renamed = {
        "sampled": f"eval/{first}_sampled",
        "greedy": f"eval/{first}_greedy",
        "grey": f"eval/{first}_gray_image",
        "swapped": f"eval/{first}_swapped_image",
        "format": f"eval/{rewards[-1] if len(rewards) < 2 else rewards[1]}_sampled",
        "pairs": "eval/pair_accuracy",
        "loss": "eval/loss",
    }
    if name.startswith("unseen "):
        metric = rename_metric(name.removeprefix("unseen "), rewards)
        return metric.replace("eval/", "eval/unseen/", 1)
    further = re.fullmatch(r"(.+) (sampled|greedy)", name)
    if further:
        return f"eval/{further[1]}_{further[2]}"
    return renamed.get(name, name)
