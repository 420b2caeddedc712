"""Test on-policy distillation: a step's divergence against its definition, and teachers with their own prompts."""

import copy
import json
from dataclasses import replace

import pytest
import torch
from runs import STAGE, metrics
from safetensors.torch import load_file, save_file
from teachers import hint

from minivlmrl.commands.train import train_recipe
from minivlmrl.data.rows import Row
from minivlmrl.model import checkpoint
from minivlmrl.model.build import random_model
from minivlmrl.model.checkpoint import save_model
from minivlmrl.model.logprobs import completion_states
from minivlmrl.model.packing import pack
from minivlmrl.tasks import shapes
from recipes.distill import divergence

import tiny
from tiny import of_file

HINT = ["--distill.teacher_prompt=teachers:hint"]


def log_probs(model, prompt, completion, temperature):
    """Compute one completion's log-probabilities (T, V) in a separate batch."""
    group = pack([prompt], [[completion]], model.config)
    words = len(shapes.tokenizer())
    return (model.lm_head(completion_states(model, group))[:, :words] / temperature).log_softmax(-1)


def by_hand(run, teacher, shown, rollout):
    """Compute a rollout's loss from all logits, one completion after the other."""
    student = run.trainer.policy
    processor = run.trainer.processor
    total = 0.0
    tokens = 0
    temperature, beta = run.trainer.run.sampling.temperature, run.trainer.config.teacher_beta
    for sample in rollout.samples:
        own = Row.prompt(shown(sample.row), processor)
        assert not torch.equal(own.input_ids, sample.prompt.input_ids)
        sides = (student, sample.prompt), (teacher, own)
        p, q = (log_probs(*given, sample.completion, temperature) for given in sides)
        total, tokens = total + divergence(p, q.detach(), beta)[0].sum(), tokens + len(p)
    return total / tokens


@pytest.mark.parametrize("option", ["--distill.micro_batch_size=2", "--adapter.r=2", "--sampling.temperature=0.7"])
def test_a_step_is_the_divergence_from_the_teacher(stage, samples, option):
    run = stage("distill", *HINT, option)
    start = copy.deepcopy(run.trainer.policy)
    run.go(2)
    batches = run.next()
    wanted = by_hand(run, start, hint, samples[-1])
    assert sum(run.trainer.loss(batch)[0] for batch in batches).item() == pytest.approx(wanted.item(), rel=1e-12)
    [*_, head] = [p for p in run.trainer.trained.parameters() if p.requires_grad]
    loss = sum(run.trainer.loss(batch)[0] for batch in batches)
    own, other = (torch.autograd.grad(x, head)[0] for x in (loss, wanted))
    torch.testing.assert_close(own, other, rtol=1e-9, atol=1e-14)
    assert run.update()["divergence"] == pytest.approx(wanted.item(), rel=1e-6)


def test_a_teacher_in_a_folder_with_a_larger_picture(run, plain, lively, checkpoint):
    """The run finishes, a resumed run is equal, and the student approaches the teacher."""
    options = of_file("distill", STAGE | {"max_steps": 8, "learning_rate": 1e-2, "num_generations": 3})
    options += ["--data.min_pixels=784", "--data.max_pixels=784", "--seed=3", "--checkpoint_steps=4"]
    options += [f"--distill.teacher={checkpoint}", "--distill.teacher_prompt=teachers:larger"]
    folder = run(*options, "--rewards={letters: 1}")
    lines = metrics(folder)
    assert [line["stage"] for line in lines] == ["distill"] * 8
    assert lines[-1]["divergence"] < 0.9 * lines[0]["divergence"]
    resumed = f"--resume={folder / 'states' / '000004'}"
    again = run(*options, "--rewards={letters: 1}", resumed, name="again")
    assert metrics(again) == lines


@pytest.mark.parametrize(("name", "error"), [
    ("breaks", r"teacher_prompt raised KeyError: 'gone' in .*teachers.py:\d+$"),
    ("answers", "what teacher_prompt returns is 'a hint', but it must be a Row"),
])  # fmt: skip
def test_a_teacher_prompt_that_fails_ends_the_run_with_one_line(stage, name, error):
    run = stage("distill", f"--distill.teacher_prompt=teachers:{name}")
    with pytest.raises(ValueError, match=error):
        run.go(1)


@pytest.fixture
def teacher(folder, tmp_path):
    """Return a function (config changes) -> (a model with another seed, the option that names its folder)."""

    def teacher(**changes):
        (tmp_path / "model.json").write_text(json.dumps(tiny.RUN_MODEL))
        model, processor = random_model(tmp_path / "model.json", shapes.tokenizer(), 1)
        model = tiny.model_of(replace(model.config, **changes))
        save_model(tmp_path / "teacher", model, processor)
        return model.double(), f"--distill.teacher={tmp_path / 'teacher'}"

    return teacher


def test_a_teacher_may_have_more_rows_than_the_student(stage, samples, teacher):
    """Qwen2.5-VL-7B's head has more rows than the 3B student's head; the additional rows do not belong to a token."""
    model, option = teacher(vocab_size=368)
    run = stage("distill", *HINT, option)
    loss = sum(run.trainer.loss(batch)[0] for batch in run.next())
    assert loss.item() == pytest.approx(by_hand(run, model, hint, samples[-1]).item(), rel=1e-9)
    with pytest.raises(ValueError, match="vocab_size is 359, but it must be the student's 360 or more"):
        stage("distill", *HINT, teacher(vocab_size=359)[1])


def test_a_teacher_whose_tokens_mean_something_else_is_refused(stage, teacher, tmp_path):
    _, option = teacher()
    file = tmp_path / "teacher" / "tokenizer.json"
    content = json.loads(file.read_text())
    words = content["model"]["vocab"]
    words["a"], words["b"] = words["b"], words["a"]
    file.write_text(json.dumps(content))
    with pytest.raises(
        ValueError, match=r"2 tokens of the policy have other ids .*, for example '[ab]'; use a model with"
    ):
        stage("distill", option)


@pytest.mark.parametrize("name", ["model.norm.weight", "lm_head.weight"])
def test_a_teacher_that_is_not_finite_is_named(stage, teacher, tmp_path, name, monkeypatch):
    """The error names the teacher, not a learning rate. Loading also refuses weights that are not finite."""
    monkeypatch.setattr(checkpoint, "check_loaded", lambda *_: None)
    file = tmp_path / "teacher" / "model.safetensors"
    _, option = teacher()
    weights = load_file(file)
    weights[name].view(-1)[-1] = float("nan")
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"distill\.teacher: .*/teacher computes NaN or inf"):
        stage("distill", option).next()


def test_what_makes_no_sense_is_refused(home):
    with pytest.raises(ValueError, match=r"distill needs distill\.teacher or distill\.teacher_prompt"):
        train_recipe([str(home / "recipe.yaml"), "--stages=recipes/distill.py:Distill"])
    with pytest.raises(ValueError, match=r"^gone: this folder does not exist\. A model must be"):
        train_recipe(
            [str(home / "recipe.yaml"), "--stages=[sft, recipes/distill.py:Distill]", "--distill.teacher=gone"]
        )
