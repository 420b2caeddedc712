"""Test how a reward model is trained, its scores, and its reward in later stages."""

import math
import shutil
from types import SimpleNamespace

import pytest
import torch

from minivlmrl.data.tokenizer import train_tokenizer
from minivlmrl.distributed.value_models import save_value_model
from minivlmrl.extras import reward_model as file
from minivlmrl.model.build import random_model
from minivlmrl.model.value_head import ValueModel, load_value_model
from minivlmrl.tasks import shapes
from tests.helpers.stages import ONE, main
from tests.model.test_checkpoint import edit_json, edit_weights

JUDGED = "--rewards={letters: 0.5, reward_model: 1}"


@pytest.fixture(scope="module")
def judge(folder, tmp_path_factory):
    tmp_path = tmp_path_factory.mktemp("judge")
    main(folder, tmp_path, "run", "--stages=reward_model", "--data.eval_rows=1", "--rewards={format: 1}")
    return tmp_path / "run" / "reward_model"


def test_margins_of_rows_are_used(stage):
    """In the first step all scores are 0, so the loss is -log sigmoid(-margin), or log 2 without a margin."""

    class Margins(shapes.Shapes):
        def __getitem__(self, index):
            row = super().__getitem__(index)
            row.columns |= {"margin": None if index % 2 else 1.0}
            return row

    [line] = stage("reward_model", rows=Margins(4, "rows")).go()
    assert line["loss"] == pytest.approx((math.log(1 + math.e) + math.log(2)) / 2, rel=1e-6)


def test_a_reward_model_is_used_in_the_same_run_or_by_its_path(folder, varied_rollouts, tmp_path):
    """A stage of one's own may train it; reward_model.path has precedence over a reward model of the run itself."""
    code = "from minivlmrl.extras.reward_model import RewardTrainer\nclass Mine(RewardTrainer):\n    stage = 'mine'\n"
    (tmp_path / "mine.py").write_text(code)
    stages = f"--stages=[{tmp_path / 'mine.py'}:Mine, grpo]", "--mine.max_steps=2", "--mine.prompts_per_step=2"
    one = main(folder, tmp_path, "one", *stages, JUDGED, "--grpo.max_steps=2")[-2:]
    assert one[0]["rewards/reward_model/mean"] != 0
    path = f"--reward_model.path={tmp_path / 'one' / 'reward_model'}"
    again = "--stages=[reward_model, grpo]", "--reward_model.max_steps=1", "--grpo.max_steps=2"
    assert one == main(folder, tmp_path, "two", *again, JUDGED, path)[-2:]
    with pytest.raises(ValueError, match=r"one/reward_model is a reward model or critic \(it contains"):
        main(folder, tmp_path, "three", f"--model.path={tmp_path / 'one' / 'reward_model'}", "--model.config=null")


def test_an_embedding_with_more_rows_has_the_same_vocabulary(judge, tmp_path, stage, samples):
    """The 3B and 7B of a family have equal tokenizers, but embeddings with different numbers of rows."""
    judge = shutil.copytree(judge, tmp_path / "judge")

    def add_a_token(weights):
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            weights[name] = torch.cat([weights[name], weights[name][:1]])
        edit_json(judge / "config.json", vocab_size=len(weights["lm_head.weight"]))

    stage("grpo", JUDGED, f"--reward_model.path={judge}").next()
    edit_weights(judge, add_a_token)
    stage("grpo", JUDGED, f"--reward_model.path={judge}").next()
    assert torch.equal(samples[0].rewards, samples[1].rewards) and samples[0].rewards[:, 1].any()


@pytest.mark.parametrize("name", ["grpo", "ppo"])
@pytest.mark.parametrize("batch_size", [16, 3])
def test_each_completion_is_scored_at_its_last_token(stage, samples, judge, monkeypatch, name, batch_size):
    monkeypatch.setattr(file, "BATCH_SIZE", batch_size)
    stage(name, JUDGED, f"--reward_model.path={judge}", dtype=torch.float32).next()
    [rollout], model = samples, load_value_model(judge)
    with torch.no_grad():
        config, pairs = model.backbone.config, [([s.prompt], [[s.completion]]) for s in rollout.samples]
        numbers = [file.last_token_scores(model, file.pack_with_last_token(*pair, config, "cpu")) for pair in pairs]
    assert torch.cat(numbers).std() > 0
    torch.testing.assert_close(rollout.rewards[:, 1], torch.cat(numbers), rtol=1e-4, atol=1e-5)


def test_a_reward_model_uses_its_own_vision_tower(stage, judge, samples):
    """The reward model cannot use image embeddings of the policy, so prompts do not store embeddings."""
    stage("grpo", JUDGED, f"--reward_model.path={judge}", "--model.freeze=[vision, merger]").next()
    assert all(sample.prompt.vision_embeds is None for sample in samples[0].samples)


def test_the_reward_model_must_exist_before_its_stage(judge, tmp_path):
    def run(stages, path=None):
        sampling = SimpleNamespace(environment=None)
        names = ["my_rm" if ":" in stage else stage for stage in stages]
        model = SimpleNamespace(path=path)
        return SimpleNamespace(stages=stages, stage_names=names, reward_model=model, sampling=sampling)

    file.check_stage_order(run(["grpo"], judge), "grpo")
    file.check_stage_order(run(["reward_model", "sft", "grpo"]), "grpo")
    own = tmp_path / "own_rm.py"
    code = "from minivlmrl.extras.reward_model import RewardTrainer\nclass Own(RewardTrainer):\n    stage = 'my_rm'\n"
    own.write_text(code)
    file.check_stage_order(run([f"{own}:Own", "grpo"]), "grpo")
    no_model = "the stage grpo uses the reward reward_model, but there is no reward model yet; set"
    for stages, path, sentence in (
        (["grpo"], None, no_model), (["grpo", "reward_model"], None, no_model),
        (["grpo"], "/gone", "/gone does not contain score"),
        (["grpo"], judge.parent / "checkpoint", r"contain score.*use the folder RUN/reward_model of that run$"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=sentence):
            file.check_stage_order(run(stages, path), "grpo")


@pytest.mark.parametrize(("model", "message"), [
    ("model", "judge: the tokenizer of this model does not match the policy's"),
    ("qwen3_vl", r"judge/config\.json: model_type is 'qwen3_vl', but it must be 'qwen2_5_vl', as in the policy"),
], ids=["another tokenizer", "another family"])  # fmt: skip
def test_a_model_that_cannot_read_the_ids_of_the_policy_is_refused(folder, tmp_path, model, message):
    tokenizer = train_tokenizer(["bel bil"], len(shapes.tokenizer())) if model == "model" else shapes.tokenizer()
    backbone, processor = random_model(folder / f"{model}.json", tokenizer, 1)
    save_value_model(tmp_path / "judge", ValueModel(backbone), processor, ONE)
    policy, own = random_model(folder / "model.json", shapes.tokenizer(), 0)
    run = SimpleNamespace(reward_model=SimpleNamespace(path=tmp_path / "judge"), output_dir="/gone")
    with pytest.raises(ValueError, match=message):
        file.RewardModelScores(run, policy, own, ONE)
