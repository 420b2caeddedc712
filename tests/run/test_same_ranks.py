"""Test that ranks whose hosts have other options or files are refused."""

import json

import PIL.Image
import pytest

from minivlmrl.config.loading import load_config
from minivlmrl.data.file_dataset import FileDataset
from minivlmrl.distributed.process_group import shutdown
from minivlmrl.run.recipe_changes import check_same, file_hashes, recipe_options
from tests.helpers.children import fork_ranks

CHANGED = {  # what differs on rank 1: (options, problem, color, message)
    "nothing": ([], "1", "red", None),
    "a row": (
        [],
        "2",
        "red",
        r"rows of data.train_file \(rows.jsonl\) is .* on rank 0, but .* on rank 1 \(.+\); start",
    ),
    "an image": ([], "1", "blue", r"an image or a video of the rows for grpo is .* on rank 0, but .* on rank 1 \("),
    "an option": (
        ["--grpo.learning_rate=0.5"],
        "1",
        "red",
        r"grpo.learning_rate is 0.001 on rank 0, but 0.5 on rank 1 \(",
    ),
}


def test_ranks_with_other_options_or_files_are_refused(tmp_path):
    """Hosts may have other folders."""
    (tmp_path / "recipe.yaml").write_text("{stages: [grpo], grpo: {learning_rate: 0.001}}")

    def begin(world):
        host = tmp_path / f"host{world.rank}"
        host.mkdir()
        for options, problem, color, message in CHANGED.values():
            PIL.Image.new("RGB", (28, 28), color if world.rank else "red").save(host / "a.png")
            row = {"problem": problem if world.rank else "1", "image": "a.png"}
            (host / "rows.jsonl").write_text(json.dumps(row))
            config = load_config(tmp_path / "recipe.yaml", options if world.rank else [])
            config.data.train_file = str(host / "rows.jsonl")
            datasets = {"grpo": FileDataset(config.data.train_file, checks_files=world.is_main)}
            values = recipe_options(config) | file_hashes(config, datasets)
            if message is None:
                check_same(values, world)
                continue
            with pytest.raises(ValueError, match=message):
                check_same(values, world)
        shutdown(world)

    assert fork_ranks(2, begin, 300) == [0, 0]
