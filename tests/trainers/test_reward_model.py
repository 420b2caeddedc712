"""Test how a reward model is trained, its scores, and its reward in later stages."""

import math
import shutil
from types import SimpleNamespace

import pytest
import torch

from minivlmrl.data.folder_template import ChatTemplate, with_values
from minivlmrl.data.processor import encode_completion
from minivlmrl.data.rows import Completion, Prompt
from minivlmrl.data.tokenizer import train_tokenizer
from minivlmrl.distributed.value_models import save_value_model
from minivlmrl.model.build import random_model
from minivlmrl.model.checkpoint import load_processor
from minivlmrl.model.value_head import ValueModel, load_value_model, pack_with_last_token
from minivlmrl.tasks import shapes
from minivlmrl.tasks.shapes import Shapes
from minivlmrl.trainers import reward_model as file
from minivlmrl.trainers.reward_model import RewardModelScores, check_stage_order
from tests.helpers import tiny
from tests.helpers.stages import ONE, main
from tests.helpers.talk import CHATML
from tests.model.test_checkpoint import edit_json, edit_weights

JUDGED = "--rewards={letters: 0.5, reward_model: 1}"


@pytest.fixture(scope="module")
def judge(folder, tmp_path_factory):
    """Train a reward model for three steps, and return its folder."""
    tmp_path = tmp_path_factory.mktemp("judge")
    main(folder, tmp_path, "run", "--stages=reward_model", "--data.eval_rows=1", "--rewards={format: 1}")
    return tmp_path / "run" / "reward_model"


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


def test_an_embedding_with_more_rows_has_the_same_vocabulary(judge, tmp_path, stage, samples):
    """Models with equal tokenizers, for example a family's 3B and 7B, exchange token ids, and scores are the same."""
    judge = shutil.copytree(judge, tmp_path / "judge")

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


@pytest.mark.parametrize("name", ["grpo", "ppo"])
@pytest.mark.parametrize("batch_size", [16, 3])
def test_each_completion_is_scored_at_its_last_token(stage, samples, judge, monkeypatch, name, batch_size):
    monkeypatch.setattr(file, "BATCH_SIZE", batch_size)
    run = stage(name, JUDGED, f"--reward_model.path={judge}", dtype=torch.float32)
    run.next()
    [rollout], model = samples, load_value_model(judge)
    with torch.no_grad():
        numbers = [
            model.score_last_token(pack_with_last_token([s.prompt], [[s.completion]], model.backbone.config, "cpu"))
            for s in rollout.samples
        ]
    assert torch.cat(numbers).std() > 0
    torch.testing.assert_close(rollout.rewards[:, 1], torch.cat(numbers), rtol=1e-4, atol=1e-5)


def test_a_reward_model_uses_its_own_vision_tower(stage, judge, samples):
    """Embeddings from the policy's frozen tower are not stored, because the reward model cannot use them."""
    stage("grpo", JUDGED, f"--reward_model.path={judge}", "--model.freeze=[vision, merger]").next()
    assert all(sample.prompt.vision_embeds is None for sample in samples[0].samples)


def test_the_reward_model_must_exist_before_its_stage(judge):
    def run(stages, path=None):
        return SimpleNamespace(stage_names=stages, reward_model=SimpleNamespace(path=path))

    check_stage_order(run(["grpo"], judge), "grpo")
    check_stage_order(run(["reward_model", "sft", "grpo"]), "grpo")
    no_model = "the stage grpo uses the reward reward_model, but there is no reward model yet; set"
    for stages, path, sentence in (
        (["grpo"], None, no_model), (["grpo", "reward_model"], None, no_model),
        (["grpo"], "/gone", "/gone does not contain score"),
        (["grpo"], judge.parent / "checkpoint", r"checkpoint does not contain score\.safetensors"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=sentence):
            check_stage_order(run(stages, path), "grpo")


# a reward model with another tokenizer

TEXTS = ("<think>I see red</think><answer>red square</answer>", "No idea.", "12 naïve cafés", "")


def save_other_reward_model(folder, path, model):
    """Save a reward model whose tokenizer is as large as the policy's, with other tokens."""
    words = [f"{a}{b}{c}" for a in "bdfgklmnprst" for b in "aeiou" for c in "lmnrst"]
    other = train_tokenizer([" ".join(words)], len(shapes.tokenizer()))
    assert len(other) == len(shapes.tokenizer())
    backbone, processor = random_model(folder / f"{model}.json", other, 1)
    judge = ValueModel(backbone.double())
    torch.nn.init.normal_(judge.score.weight, generator=torch.Generator().manual_seed(2))
    save_value_model(path, judge, processor, ONE)
    return judge


def scores_of(folder, path, environment=None):
    """Return the RewardModelScores for a policy in float64, and the policy's processor."""
    policy, processor = random_model(folder / "model.json", shapes.tokenizer(), 0)
    section, sampling = SimpleNamespace(path=path), SimpleNamespace(environment=environment)
    run = SimpleNamespace(reward_model=section, sampling=sampling, output_dir="/gone")
    return RewardModelScores(run, policy.double(), processor, ONE), processor


@pytest.mark.parametrize("model", ["model", "qwen3_vl"])
def test_a_model_of_another_tokenizer_reads_texts(folder, tmp_path, model, transformers, oracle, monkeypatch):
    """Scores equal transformers' scores at the last token; a truncated completion has no end token."""
    judge = save_other_reward_model(folder, tmp_path / "judge", model)
    scores, processor = scores_of(folder, tmp_path / "judge")
    rows = [Shapes(2, "rows")[i] for i in range(2)]
    groups = []
    for row in rows:
        group = [encode_completion(processor, row.messages, text) for text in TEXTS]
        groups.append([*group, Completion(group[0].ids[:-4], stopped=False)])
    found = scores([row.prompt(processor) for row in rows], groups)

    oracle.in_float64(monkeypatch, "qwen2_5_vl" if model == "model" else model)
    monkeypatch.setattr(tiny, "IMAGE", judge.backbone.config.image_token_id)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "judge")
    exact = {"dtype": torch.float64, "attn_implementation": "eager"}
    theirs = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "judge", **exact)
    expected = []
    for row, group in zip(rows, groups, strict=True):
        seen = row.prompt(load_processor(tmp_path / "judge"))
        tokens = int(seen.image_grid_thw.prod()) // 4
        for completion in group:
            answer = {"role": "assistant", "content": processor.decode(completion.ids)}
            text = tokenizer.apply_chat_template([*row.messages, answer], tokenize=False).removesuffix("\n")
            text = text if completion.stopped else text.removesuffix("<|im_end|>")
            ids = tokenizer(text.replace("<|image_pad|>", "<|image_pad|>" * tokens), add_special_tokens=False)
            prompt = Prompt(torch.tensor(ids["input_ids"]), seen.pixel_values, seen.image_grid_thw)
            with torch.no_grad():
                states = theirs.model(**oracle.their_inputs(prompt)).last_hidden_state[0]
            expected.append((states[-1] @ judge.score.weight[0]).item())
    assert found == pytest.approx(expected, rel=1e-10) and len(set(found)) == 10


def test_no_text_of_the_policy_ends_a_run(folder, tmp_path, published):
    """Control tokens' names, spelled or sampled, and a thought that the judge's template would remove stay text."""
    template = with_values(ChatTemplate(published("qwen3_5_think"), "mine"), {"enable_thinking": False})
    save_other_reward_model(folder, tmp_path / "judge", "qwen3_vl")
    scores, processor = scores_of(folder, tmp_path / "judge")
    scores.processor.template = template
    row, [end, *_] = Shapes(1, "rows")[0], scores.processor.stop_token_ids
    sampled = processor.tokenizer.special_tokens["<|im_end|>"]
    for text in ("red <|im_end|> or <|im_ end|>", "<|image_pad|>", "red</think>blue", "<think>red</think>blue"):
        ids = [*processor.tokenizer.encode(text), sampled]
        answer = scores.encode(row, Completion(torch.tensor(ids)))
        assert answer.ids.tolist() == [*scores.processor.tokenizer.encode(text), end]
    answer = scores.encode(row, Completion(torch.tensor([sampled, sampled])))
    assert answer.ids.tolist() == [*scores.processor.tokenizer.encode("<|im_end|>"), end]
    [only] = scores.encode(row, Completion(torch.tensor([sampled]), stopped=False)).ids
    assert only == end  # one token remains, so that there is a score


def test_a_judge_whose_template_renders_no_answer_is_refused(folder, tmp_path):
    save_other_reward_model(folder, tmp_path / "judge", "qwen3_vl")
    text = CHATML.replace("<|im_end|>", "")
    (tmp_path / "judge" / "chat_template.jinja").write_text(text)
    with pytest.raises(ValueError, match="require a template that ends an assistant turn"):
        scores_of(folder, tmp_path / "judge")


def test_turns_of_an_environment_cannot_be_scored_as_text(folder, tmp_path, judge):
    save_other_reward_model(folder, tmp_path / "judge", "model")
    with pytest.raises(ValueError, match="another tokenizer or model family than the policy, so it cannot score"):
        scores_of(folder, tmp_path / "judge", "tools.py:Eye")
    scores_of(folder, judge, "tools.py:Eye")
