"""Test config/renames.py.

Option names of version 0.3 are read from files that 0.3 wrote, and rejected when a user types them.
"""

import json

import pytest
import yaml

from minivlmrl.config.loading import flat, load_config, nested, to_yaml
from minivlmrl.config.options import RunConfig
from minivlmrl.config.parsing import options_of
from minivlmrl.config.renames import RENAMED_OPTIONS, rename_metric
from minivlmrl.run.trainer_state import TrainerState, read_trainer_state

# the same recipe with the option names of 0.3 and of 0.4
OLD = {
    "state_minutes": 3.0,
    "keep_best": "unseen greedy",
    "data": {
        "answer": "whole",
        "template": {"enable_thinking": False},
        "resize": [50, 86],
        "eval_blind": True,
        "eval_rewards": ["iou", "box_format"],
    },
    "sampling": {"engine": "own", "graph": "never", "max_tokens_at_once": 64},
}
NEW = {
    "checkpoint_minutes": 3.0,
    "best_metric": "eval/unseen/iou_greedy",
    "data": {
        "answer_format": "whole",
        "chat_template_kwargs": {"enable_thinking": False},
        "image": {"resized_height": 50, "resized_width": 86},
        "eval_without_images": True,
        "eval_rewards": ["iou", "box_format"],
    },
    "sampling": {"engine": "native", "cuda_graph": "never", "max_batch_tokens": 64},
}


def test_the_new_names_are_options():
    paths = {option.path for option in options_of(RunConfig)}
    assert set(RENAMED_OPTIONS.values()) <= paths
    assert not paths & RENAMED_OPTIONS.keys()


@pytest.mark.parametrize("name", ["config.yaml", "minivlmrl.yaml"])
def test_files_of_0_3_are_read_with_one_note(tmp_path, capsys, name):
    (tmp_path / name).write_text(yaml.safe_dump(OLD))
    (tmp_path / "new.yaml").write_text(yaml.safe_dump(NEW))
    found = load_config(tmp_path / name)
    assert capsys.readouterr().err == (
        f"note: {tmp_path / name} is from minivlmrl 0.3; its options are read as in 0.4\n"
    )
    assert to_yaml(found) == to_yaml(load_config(tmp_path / "new.yaml"))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("old", "new"), RENAMED_OPTIONS.items())
def test_a_typed_old_name_is_rejected_with_the_new_one(tmp_path, old, new):
    message = rf"unknown key {old}; since 0\.4\.0 this option is called {new}"
    with pytest.raises(ValueError, match=message):
        load_config("shapes.yaml", [f"--{old}=1"])
    file = tmp_path / "mine.yaml"
    file.write_text(json.dumps(nested({old: 1})))
    with pytest.raises(ValueError, match=message):
        load_config(file)


@pytest.mark.parametrize(("old", "new"), [
    ("sampled", "eval/iou_sampled"),
    ("greedy", "eval/iou_greedy"),
    ("grey", "eval/iou_gray_image"),
    ("swapped", "eval/iou_swapped_image"),
    ("format", "eval/box_format_sampled"),
    ("acc_0_5 greedy", "eval/acc_0_5_greedy"),
    ("unseen sampled", "eval/unseen/iou_sampled"),
    ("pairs", "eval/pair_accuracy"),
    ("loss", "eval/loss"),
    ("eval/iou_greedy", "eval/iou_greedy"),
])  # fmt: skip
def test_metrics_are_named_by_reward_and_way(old, new):
    assert rename_metric(old, ["iou", "box_format", "acc_0_5"]) == new


def test_a_checkpoint_of_0_3_is_read_with_new_names(tmp_path, capsys):
    recipe = flat(OLD) | {"weights below the adapter": "a1", "rewards.mine.py:f": 1.0}
    state = TrainerState(0, ["sft"], results={"start": {"sampled": 0.5, "format": 1.0}}, recipe=recipe)
    (tmp_path / "run.json").write_text(json.dumps(vars(state)))
    found = read_trainer_state(tmp_path)
    assert found.recipe == flat(NEW) | {"weights below the adapter": "a1", "rewards.mine.py:f": 1.0}
    assert found.results == {"start": {"eval/iou_sampled": 0.5, "eval/box_format_sampled": 1.0}}
    assert "note: " in capsys.readouterr().err
    (tmp_path / "run.json").write_text(json.dumps(vars(found)))
    assert read_trainer_state(tmp_path) == found
    assert capsys.readouterr().err == ""
