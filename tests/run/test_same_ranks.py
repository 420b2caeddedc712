"""Test that a run notices ranks whose hosts have other options, rows, images, weights or code."""

import json
import os
import shutil
from pathlib import Path

import pytest

from minivlmrl.config.loading import load_config
from minivlmrl.distributed.process_group import shutdown
from minivlmrl.rewards.registry import training_rewards
from minivlmrl.run.datasets import load_datasets
from minivlmrl.run.same_ranks import check_same_files, check_same_options
from tests.helpers.children import fork_ranks

REWARD = "def mine(completions, **columns):\n    return [0.0 for _ in completions]\n"
CHANGED = {  # what differs on rank 1: (change of its copies, options of the command, message)
    "nothing": (lambda: None, [], None),
    "a row": (lambda: edit("rows.jsonl", '"b"', '"c"'), [], "data.train_file (rows.jsonl) differs on rank 1 ("),
    "fewer rows": (lambda: edit("rows.jsonl", "\n", "\n", 1), [], "data.train_file (rows.jsonl) differs on rank 1 ("),
    "an image": (lambda: shutil.copy("other.png", "0.png"), [], "an image or a video of the rows for grpo differs on"),
    "weights": (lambda: edit("model/model.safetensors", -9), [], "model.path (model) differs on rank 1 ("),
    "a tokenizer": (lambda: edit("model/tokenizer.json", -9), [], "model.path (model) differs on rank 1 ("),
    "code": (lambda: edit("mine.py", "0.0", "1.0"), [], "the code mine.py differs on rank 1 ("),
    "an option": (lambda: None, ["--grpo.learning_rate=0.5"], "grpo.learning_rate is 0.001 on rank 0, but 0.5 on rank"),
}  # fmt: skip


def edit(name, old, new="", count=-1):
    """Replace a text, or flip the byte at a position, or keep only the first lines."""
    file = Path(name)
    content = bytearray(file.read_bytes())
    if isinstance(old, int):
        content[old] ^= 1
    elif old == "\n":
        content = b"".join(content.splitlines(True)[:count])
    else:
        content = content.replace(old.encode(), new.encode())
    file.write_bytes(content)


def copy_files(host, checkpoint, pictures):
    shutil.rmtree(host, ignore_errors=True)
    shutil.copytree(checkpoint, host / "model")
    for number, name in enumerate(("0.png", "1.png", "other.png")):
        shutil.copyfile(pictures / f"{number}.png", host / name)
    lines = [{"problem": "q", "image": f"{i}.png", "solution": "ab"[i]} for i in range(2)]
    (host / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (host / "sub").mkdir()
    for file in ("mine.py", "sub/mine.py"):  # two files with one name
        (host / file).write_text(REWARD)
    (host / "recipe.yaml").write_text("{stages: [grpo], grpo: {learning_rate: 0.001}, model: {config: null}}")


def test_ranks_with_other_files_are_refused(checkpoint, rows, tmp_path):
    """Each rank has its own working directory with copies of all files, as on two hosts."""
    rewards = "--rewards={mine.py:mine: 1, sub/mine.py:mine: 1}"
    files = ["--data.task=null", "--data.train_file=rows.jsonl", "--data.eval_rows=0", rewards]

    def check(world, options):
        config = load_config("recipe.yaml", [*files, "--model.path=model", *(options if world.rank else [])])
        training_rewards(config)
        check_same_options(config, world)
        check_same_files(config, load_datasets(config, {"grpo": "prompts"}, world=world), world)

    def begin(world):
        host = tmp_path / f"host{world.rank}"
        for name, (change, options, message) in CHANGED.items():
            copy_files(host, checkpoint, rows.parent)
            os.chdir(host)
            if world.rank == 1:
                change()
            if message is None:
                check(world, options)
                continue
            with pytest.raises(ValueError) as caught:
                check(world, options)
            assert message in str(caught.value), name
        shutdown(world)

    assert fork_ranks(2, begin, 300) == [0, 0]
