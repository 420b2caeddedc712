"""docs/claims.md: the page is what claims.json says, and its arms do what they are called."""

import json
import re
from types import SimpleNamespace

import pytest
import torch

from benchmarks import claims, claims_parts
from docs import claims as pages
from minivlmrl.config.loading import load_config
from minivlmrl.tasks.registry import get_task

FOUND = json.loads(claims.FILE.read_text())


def test_exact_claims_are_computed_again():
    for name, values in claims.exact().items():
        torch.testing.assert_close(torch.tensor(values), torch.tensor(FOUND["exact"][name]), atol=1e-9, rtol=1e-9)


def figure_of(values, than=0.0, **options):
    """A figure whose arms are not runs, and what was found."""
    found = {"exact": {"arm": values, "other": [than] * len(values)}, "runs": {}}
    return pages.Figure("drawn", "arm", "other", **options), found


@pytest.mark.parametrize(
    ("values", "verdict"), [([0.2, 0.21, 0.19], True), ([0.0, 0.01, -0.01], False), ([0.0, 0.1, 0.2], None)]
)
def test_a_bar_inside_the_interval_is_undecided(values, verdict):
    figure, found = figure_of(values, bar=0.1)
    assert figure.above(found) is verdict
    assert (figure.chance(found) < 0.05) is (verdict is not None)


@pytest.mark.parametrize(
    ("values", "than", "bar", "words"),
    [
        ([0.5, 0.5, 0.51], 0.1, 0.1, "holds here"),
        ([0.1, 0.1, 0.11], 0.5, 0.1, "does not hold here"),
        ([0.01, 0.02, 0.01], 0.0, 0.1, "cannot tell here"),  # no run reaches the bar
        ([0.46, 0.47, 0.465], 0.5, -0.1, "within .1, and less"),
        ([0.3], 0.0, 0.1, "by arithmetic"),
    ],
)
def test_a_verdict_says_no_more_than_was_seen(values, than, bar, words):
    figure, found = figure_of(values, than, bar=bar)
    assert pages.Claim("", "", "", figure, figure).verdict(found) == words


@pytest.mark.parametrize("count", claims.T)
def test_the_table_of_students_t_has_a_chance_of_5_percent(count):
    assert pages.two_sided(claims.T[count], count - 1) == pytest.approx(0.05, abs=4e-4)


def test_holms_correction_of_four_by_hand():
    """0.05 / 4, then / 3, then / 2: the third is over it, so the fourth is not asked."""
    assert pages.stay({"a": 0.04, "b": 0.012, "c": 0.016, "d": 0.03}) == {"b", "c"}


def test_five_more_seeds_for_what_is_undecided_raise_an_error():
    """The page says to what, and which claims got them."""
    drawn = torch.randn(200_000, 10, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def decided(seeds):
        error = seeds.std(1) / seeds.shape[1] ** 0.5
        return seeds.mean(1).abs() > claims.T[seeds.shape[1]] * error

    page = (claims.ROOT / "docs" / "claims.md").read_text()
    share = (decided(drawn[:, :5]) | decided(drawn)).double().mean().item()
    [told] = re.findall(r"raises an error of 5 % to (\S+) %", page)
    assert 100 * share == pytest.approx(float(told), abs=0.2)
    longer = {}
    for kind in ("figure", "control"):
        counts = [len(getattr(claim, kind).values(FOUND)) for claim in pages.CLAIMS]
        longer[kind] = [number for number, count in enumerate(counts, start=1) if count == 10]
    names = [", ".join(map(str, longer[kind])) for kind in ("figure", "control")]
    assert f"those of {names[0]} and controls of {names[1]}" in " ".join(page.split())


def test_a_run_made_again_says_how_near_it_came(monkeypatch, capsys):
    kept = FOUND["runs"]["late 8"]["3"]
    other = kept | {"right": [kept["right"][0] + 1, *kept["right"][1:]]}
    for made, status, words in ((kept, 0, "the same result"), (other, 1, "1 of 128 pictures")):
        monkeypatch.setattr(claims, "run", lambda *_, made=made, **__: (made | {"cpu_seconds": 7}, None))
        assert claims.again("late 8", "3", FOUND) == status
        assert words in capsys.readouterr().out


def test_any_fifth_is_divided_by_all_tokens():
    """What is not kept has no advantage; the mask, which the loss divides by, stays."""
    batch = SimpleNamespace(advantages=torch.tensor([2.0, -1.0]), loss_mask=torch.ones(2, 500))
    claims_parts.some_tokens(0.2)(None, SimpleNamespace(micro_batches=[batch]), 0)
    assert batch.loss_mask.sum() == 1000 and batch.advantages.shape == (2, 500)
    assert (batch.advantages != 0).double().mean().item() == pytest.approx(0.2, abs=0.05)
    assert set(batch.advantages[0].tolist()) == {0.0, 2.0}


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
