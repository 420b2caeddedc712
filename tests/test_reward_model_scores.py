"""The reward of a reward model: its numbers, and what it is asked for. In whole runs: test_reward_model.py."""

from types import SimpleNamespace

import pytest
import torch

from minivlmrl.algorithms import reward_model as file
from minivlmrl.algorithms.reward_model import check_reward_model
from minivlmrl.algorithms.value_model import load_value_model, pack_to_end

from stages import main

JUDGED = "--rewards={letters: 0.5, reward_model: 1}"


@pytest.fixture(scope="module")
def judge(folder, tmp_path_factory):
    """The folder of a reward model that was trained for three steps."""
    tmp_path = tmp_path_factory.mktemp("judge")
    main(folder, tmp_path, "run", "--stages=reward_model", "--data.eval_rows=1", "--rewards={format: 1}")
    return tmp_path / "run" / "reward_model"


@pytest.mark.parametrize("name", ["grpo", "ppo"])
@pytest.mark.parametrize("batch_size", [16, 3])
def test_each_completion_gets_the_number_after_its_last_token(stage, samples, judge, monkeypatch, name, batch_size):
    monkeypatch.setattr(file, "BATCH_SIZE", batch_size)
    run = stage(name, JUDGED, f"--reward_model.path={judge}", dtype=torch.float32)
    run.next()
    [rollout], model = samples, load_value_model(judge)
    with torch.no_grad():
        numbers = [
            model.at_end(pack_to_end([prompt], [[c]], model.backbone.config, "cpu")).item()
            for prompt, group in zip(rollout.prompts, rollout.completions, strict=True)
            for c in group
        ]
    assert torch.tensor(numbers).std() > 0
    torch.testing.assert_close(rollout.rewards[:, 1], torch.tensor(numbers), rtol=1e-4, atol=1e-5)


def test_it_sees_with_a_tower_of_its_own(stage, judge, samples):
    """What the policy's frozen tower made of an image would be wrong for it."""
    stage("grpo", JUDGED, f"--reward_model.path={judge}", "--model.freeze=[vision, merger]").next()
    assert all(prompt.vision_embeds is None for prompt in samples[0].prompts)


def test_it_must_be_there_before_its_stage_begins(judge):
    def run(stages, path=None):
        return SimpleNamespace(stages=stages, reward_model=SimpleNamespace(path=path))

    check_reward_model(run(["grpo"], judge), "grpo")
    check_reward_model(run(["reward_model", "sft", "grpo"]), "grpo")
    for stages in (["grpo"], ["grpo", "reward_model"]):
        with pytest.raises(ValueError, match=r"rewards\.reward_model: there is no reward model for grpo; set reward_"):
            check_reward_model(run(stages), "grpo")
    with pytest.raises(ValueError, match="/gone: there is no score"):
        check_reward_model(run(["grpo"], "/gone"), "grpo")
    with pytest.raises(ValueError, match=r"checkpoint: there is no score\.safetensors"):
        check_reward_model(run(["grpo"], judge.parent / "checkpoint"), "grpo")
