"""docs/claims.md: the page is what claims.json says, and its arms do what they are called."""

import json
from types import SimpleNamespace

import pytest
import torch

from benchmarks import claims, claims_parts
from docs import claims as pages
from minivlmrl.run.config import load_config
from minivlmrl.tasks.task import get_task

FOUND = json.loads(claims.FILE.read_text())


def test_exact_claims_are_computed_again():
    for name, values in claims.exact().items():
        torch.testing.assert_close(torch.tensor(values), torch.tensor(FOUND["exact"][name]), atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize(
    ("values", "verdict"), [([0.2, 0.21, 0.19], True), ([0.0, 0.01, -0.01], False), ([0.0, 0.1, 0.2], None)]
)
def test_a_bar_inside_the_interval_is_undecided(values, verdict):
    figure = pages.Figure("", "drawn", bar=0.1)
    assert figure.above({"exact": {"drawn": values}}) is verdict


@pytest.mark.parametrize("name", claims.ARMS)
def test_an_arm_is_a_recipe(name):
    options = [text for text in claims.ARMS[name].options if not text.startswith("--stages")]
    config = load_config("recipes/shapes.yaml", options)
    assert config.data.task and name in {arm for claim in pages.CLAIMS for arm in claim.arms} | {
        arm.start for arm in claims.ARMS.values()
    }


def step_of(number: int):
    """A step whose one micro-batch has the number as its advantages."""
    batch = SimpleNamespace(advantages=torch.full((2,), number + 1.0), sampler_logps=number, old_per_token_logps=None)
    return SimpleNamespace(micro_batches=[batch])


@pytest.mark.parametrize("corrected", [False, True])
def test_late_trains_on_the_rollout_of_so_many_steps_before(corrected):
    change = claims_parts.late(2, corrected)
    trained = []
    for number in range(5):
        change(None, step := step_of(number), number)
        trained += step.micro_batches
    assert [batch.advantages[0].item() for batch in trained] == [0, 0, 1, 2, 3]
    assert [batch.old_per_token_logps for batch in trained] == [None, None, *([0, 1, 2] if corrected else [None] * 3)]


def test_sign_keeps_one_side():
    step = SimpleNamespace(micro_batches=[SimpleNamespace(advantages=torch.tensor([-2.0, 0.0, 3.0]))])
    claims_parts.sign(-1)(None, step, 0)
    assert step.micro_batches[0].advantages.tolist() == [-2, 0, 0]


def test_rounded_weights_have_so_many_levels_and_come_back():
    model = torch.nn.Linear(64, 3)
    before = model.weight.detach().clone()
    drawn = []
    sampler = claims_parts.Rounded(SimpleNamespace(model=model), 3)
    sampler.sample = type("Sample", (), {"model": model, "__call__": lambda self: drawn.append(model.weight.clone())})()
    sampler()
    assert len(drawn[0].unique()) <= 7 and not torch.equal(drawn[0], before)
    assert torch.equal(model.weight, before)
    assert torch.equal(claims_parts.rounded(before, 16), before.bfloat16().float())


def test_a_vote_pays_the_most_frequent_answer_of_each_group():
    said = ["red", "Red.", "blue", None, "green", None]
    assert claims_parts.vote(said, ["row 7"] * 3 + ["row 2"] * 3, [[1]] * 6) == [1, 1, 0, 0, 1, 0]


def test_tasks_hold_back_what_they_say():
    data = load_config("recipes/shapes.yaml", ["--data.eval_rows=64"]).data
    training, held_out = get_task("benchmarks/claims_parts.py:COMBINATIONS(demonstrations=96)").datasets(data, 0)
    for rows in training.values():
        assert not any(claims_parts.is_unseen(rows[i]) for i in range(96))
    assert {row.columns["unseen"] for row in held_out} == {True, False}
    training, _ = get_task("benchmarks/claims_parts.py:FEW(prompts=2)").datasets(data, 0)
    assert len(training["prompts"]) == 2
