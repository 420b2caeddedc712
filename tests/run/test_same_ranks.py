"""Test that ranks whose hosts have other options or files are refused."""

import pytest

from minivlmrl.config.loading import load_config
from minivlmrl.distributed.process_group import shutdown
from minivlmrl.run.recipe_changes import check_same, file_hashes, recipe_options
from tests.helpers.children import fork_ranks

CHANGED = {  # what differs on rank 1: (options, rows, message)
    "nothing": ([], "1", None),
    "a row": ([], "2", "rows of data.train_file is '.* on rank 0, but '.* on rank 1; start all ranks with the same"),
    "an option": (["--grpo.learning_rate=0.5"], "1", "grpo.learning_rate is 0.001 on rank 0, but 0.5 on rank 1; start"),
}


def test_ranks_with_other_options_or_files_are_refused(tmp_path):
    (tmp_path / "recipe.yaml").write_text("{stages: [grpo], grpo: {learning_rate: 0.001}}")

    def begin(world):
        for options, rows, message in CHANGED.values():
            file = tmp_path / f"rows{world.rank}.jsonl"
            file.write_text(rows if world.rank else "1")
            config = load_config(tmp_path / "recipe.yaml", options if world.rank else [])
            values = recipe_options(config)
            config.data.train_file = str(file)
            values |= file_hashes(config)
            if message is None:
                check_same(values, world)
                continue
            with pytest.raises(ValueError, match=message):
                check_same(values, world)
        shutdown(world)

    assert fork_ranks(2, begin, 300) == [0, 0]
