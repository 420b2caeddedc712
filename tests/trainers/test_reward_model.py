"""Test reward model training on tiny models, and its reward in later stages."""

import math

import pytest
import torch

from minivlmrl.tasks.shapes import Shapes
from tests.helpers.stages import main
from tests.model.test_checkpoint import edit_json, edit_weights

JUDGED = "--rewards={letters: 0.5, reward_model: 1}"


def test_margins_of_rows_are_used(stage):
    """In the first step all scores are 0, so the loss is -log sigmoid(-margin), or log 2 for a row without a margin."""

    class Margins(Shapes):
        def __getitem__(self, index):
            row = super().__getitem__(index)
            row.columns |= {"margin": None if index % 2 else 1.0}
            return row

    run = stage("reward_model", rows=Margins(4, "rows"))
    [line] = run.go()
    assert line["loss"] == pytest.approx((math.log(1 + math.e) + math.log(2)) / 2, rel=1e-6)


@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_a_reward_model_is_used_in_the_same_run_or_by_its_path(folder, lively, tmp_path, name):
    """reward_model.path has precedence over the model that this run trains."""
    one = main(folder, tmp_path, "one", f"--stages=[reward_model, {name}]", JUDGED, f"--{name}.max_steps=2")[-2:]
    assert one[0]["rewards/reward_model/mean"] != 0
    path = f"--reward_model.path={tmp_path / 'one' / 'reward_model'}"
    again = f"--stages=[reward_model, {name}]", "--reward_model.max_steps=1", f"--{name}.max_steps=2"
    two = main(folder, tmp_path, "two", *again, JUDGED, path)[-2:]
    assert one == two


def test_an_embedding_with_more_rows_has_the_same_vocabulary(folder, tmp_path, stage, samples):
    """Models with equal tokenizers, for example a family's 3B and 7B, exchange token ids, and scores are the same."""
    main(folder, tmp_path, "judge", "--stages=reward_model", "--reward_model.max_steps=2")
    judge = tmp_path / "judge" / "reward_model"

    def add_a_token(weights):
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            weights[name] = torch.cat([weights[name], weights[name][:1]])
        edit_json(judge / "config.json", vocab_size=len(weights["lm_head.weight"]))

    stage("grpo", JUDGED, f"--reward_model.path={judge}").next()
    edit_weights(judge, add_a_token)
    run = stage("grpo", JUDGED, f"--reward_model.path={judge}")
    run.next()
    assert not run.trainer.reward_model.reads_texts
    assert torch.equal(samples[0].rewards, samples[1].rewards) and samples[0].rewards[:, 1].any()
