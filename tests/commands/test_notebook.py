"""Test training from Python with custom rows and rewards.

test_docs.py runs README's lines.
"""

from functools import partial

import PIL.Image
import pytest

from minivlmrl.commands.notebook import train, write_rows
from minivlmrl.rewards.registry import REWARDS
from tests.helpers.runs import metrics, read_lines

SMALL = {"num_threads": 1, "stages": ["grpo"], "sampling": {"max_new_tokens": 4}}


def length(completions, **columns):
    return [float(len(text)) for text in completions]


@pytest.fixture
def own(home, checkpoint, tmp_path, monkeypatch, plain):
    """Return a function that trains the tiny checkpoint. Reset the reward registry afterwards."""
    before = dict(REWARDS)
    monkeypatch.chdir(tmp_path)
    step = {"max_steps": 1, "prompts_per_step": 2, "micro_batch_size": 2}
    model = {"path": str(checkpoint), "config": None}
    yield partial(train, home / "recipe.yaml", output_dir="run", model=model, grpo=step, **SMALL)
    REWARDS.clear()
    REWARDS.update(before)


COLORS = "red", "blue"
ROWS = [{"image": PIL.Image.new("RGB", (30, 40), color), "problem": "?", "solution": color} for color in COLORS]


def test_rows_and_rewards_from_python_objects(own, tmp_path):
    summary = own(ROWS, ROWS[:1], rewards={"accuracy": 1.0, length: 0.5})
    assert {"start", "after_grpo"} <= set(summary)
    [line] = metrics(tmp_path / "run")
    assert line["reward"] == pytest.approx(line["rewards/accuracy/mean"] + 0.5 * line["rewards/length/mean"])


def test_row_files_are_named_by_their_content(tmp_path, monkeypatch):
    """The file name is a hash, so runs with other rows do not overwrite the file."""
    monkeypatch.chdir(tmp_path)
    PIL.Image.new("L", (4, 4)).save("a.png")

    def forms(name):
        turn = {"role": "user", "content": [{"type": "image", "image": name}]}
        shown = [{"image": name}, {"images": [name]}, {"image": {"image": name, "max_pixels": 3136}}]
        return [*shown, {"prompt": [turn]}, {"image": "data:image/png"}]

    path = write_rows(forms("a.png"), tmp_path / "rows")
    assert read_lines(path) == forms(str(tmp_path / "a.png"))
    assert write_rows(forms("a.png"), tmp_path / "rows") == path
    assert write_rows(forms("a.png")[:1], tmp_path / "rows") != path


def test_a_reward_with_a_built_in_name_is_refused(own):
    def accuracy(completions, **columns):
        return [0.0] * len(completions)

    with pytest.raises(ValueError, match=r"^reward accuracy: a built-in reward already has this name; rename"):
        own(ROWS, rewards={accuracy: 1.0})
