"""Train from Python, for example in a notebook, with rows and reward functions as arguments."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import PIL.Image

from minivlmrl.config.loading import as_overrides, load_config
from minivlmrl.config.types import Plain
from minivlmrl.data.image import load_image
from minivlmrl.files import digest
from minivlmrl.json_files import json_text, read_json
from minivlmrl.rewards.registry import REWARDS
from minivlmrl.run.loop import run_training

# Relative paths under these keys are made absolute.
MEDIA = ("image", "images", "video", "videos", "image_url", "video_url", "url")
Rows = Sequence[dict]
Rewards = dict[str | Callable, float]


def train(
    recipe: str | Path, rows: Rows, eval_rows: Rows | None = None, rewards: Rewards | None = None, **options
) -> dict:
    """Train a recipe, and return the run's summary, or {} if a signal ended the run.

    Args:
        recipe: a recipe's path, or a file name in recipes/.
        rows: training rows with the columns in docs/data.md. An image is a path or a PIL image.
            The rows are saved in the run's folder rows/.
        eval_rows: held-out rows in the same form, or None for a run without evaluations.
        rewards: name of a reward or reward function -> weight. None uses the recipe's rewards.
        options: options or recipe sections, for example output_dir="runs/cats" or grpo={"max_steps": 9}.
    """
    fields: dict[str, Plain] = {"data.task": None}
    for name, value in options.items():
        if isinstance(value, dict) and value:
            fields.update({f"{name}.{key}": field for key, field in value.items()})
        else:
            fields[name] = value
    if rewards is not None:
        fields["rewards"] = {register_reward(reward): weight for reward, weight in rewards.items()}
    folder = Path(load_config(recipe, as_overrides(fields)).output_dir)
    for name, given_rows in (("data.train_file", rows), ("data.eval_file", eval_rows)):
        written = None if given_rows is None else str(write_rows(given_rows, folder / "rows"))
        fields[name] = written
    code = run_training(load_config(recipe, as_overrides(fields)))
    return {} if code else read_json(folder / "summary.json")


def write_rows(rows: Rows, folder: Path) -> Path:
    """Write rows to a JSON-lines file and PIL images to PNG files, named by content hashes."""
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(json_text(as_json(row, folder)) + "\n" for row in rows)
    path = folder / f"{digest([text])[:32]}.jsonl"
    # Each rank writes its own draft, because another rank may already be reading the final file.
    draft = path.with_suffix(f".{os.getpid()}")
    draft.write_bytes(text.encode())
    return draft.replace(path)


def register_reward(reward: str | Callable) -> str:
    """Add a reward function to the registry, and return its name; a str is already a name."""
    if isinstance(reward, str):
        return reward
    if isinstance(REWARDS.get(reward.__name__), str):
        raise ValueError(f"reward {reward.__name__}: a built-in reward already has this name; rename yours")
    REWARDS[reward.__name__] = reward
    return reward.__name__


def as_json(value, folder: Path, is_path: bool = False):
    """Convert a row or a column of a row to JSON.

    Images are saved in `folder` and replaced by their paths. Relative paths become absolute.
    """
    if isinstance(value, dict):
        return {name: as_json(field, folder, name in MEDIA) for name, field in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(item, folder, is_path) for item in value]
    if isinstance(value, PIL.Image.Image):
        image = load_image(value)  # upright and in RGB, as images from files are loaded
        path = folder / f"{digest([str(image.size), image.tobytes()])[:32]}.png"
        image.save(path)
        return str(path.resolve())
    is_url = str(value).startswith(("data:", "http:", "https:", "file:"))
    if is_path and isinstance(value, str | Path) and not is_url:
        return str(Path(value).resolve())
    return value
