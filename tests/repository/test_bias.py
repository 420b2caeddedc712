"""Check docs/notes/bias.md: the page shows rows from the computed tables, and the expected gradients are correct."""

import types

import pytest
import torch
from links import ROOT

from docs.scripts import bias
from minivlmrl.data.rows import Completion
from minivlmrl.generation.sampler import Sampler
from minivlmrl.model.logprobs import per_token_logps
from minivlmrl.rewards import registry
from minivlmrl.tasks.shapes import Shapes

from tiny import pack, telling_weights

DOCS = ROOT / "docs"
TABLES = ["policy_table", "noise_table", "kl_table", "ppo_table", "preference_table"]


@pytest.fixture(scope="module")
def tables():
    return {name: getattr(bias, name)() for name in TABLES}


def close(found, target, tolerance=1e-15):
    assert target.norm() > 0.01
    assert (found - target).abs().max() < tolerance


@pytest.mark.slow
@pytest.mark.parametrize("name", TABLES)
def test_the_page_has_rows_of_the_table(tables, name):
    """The rows are in the same order as in the table. The page leaves out rows that its text does not use."""
    page = (DOCS / "notes" / "bias.md").read_text().splitlines()
    header, *rows = [f"| {' | '.join(row)} |" for row in tables[name]]
    start = page.index(header) + 2
    shown = page[start : page.index("", start)]
    assert len(shown) >= 4 and shown == [row for row in rows if row in shown]


@pytest.mark.slow
def test_what_is_exact_is_so_for_another_policy(tables):
    """With another policy, reference and rewards, the same cells are 1 or 0, and no other cells."""
    source = (DOCS / "scripts/bias.py").read_text()
    other = types.ModuleType("other")
    exec(source.replace("manual_seed(1)", "manual_seed(5)"), other.__dict__)
    assert other.BINARY.unique().tolist() == [0, 1] and not torch.equal(other.POLICY, bias.POLICY)

    def exactness(table):
        return [[tuple(x in ("0", "1") for x in cell.split(", ")) for cell in row] for row in table]

    for name in ("policy_table", "kl_table", "ppo_table"):
        assert exactness(getattr(other, name)()) == exactness(tables[name]), name


@pytest.mark.parametrize(("options", "G", "length"), [
    ({"loss_type": "rloo"}, 2, 1),
    ({"loss_type": "rloo"}, 4, 1),
    ({"loss_type": "dr_grpo"}, 2, 1 / 2 / 3),
    ({"loss_type": "dr_grpo"}, 4, 3 / 4 / 3),
    ({"loss_type": "luspo", "importance_sampling_level": "sequence"}, 3, 2 / 3),
])  # fmt: skip
def test_the_gradient_of_the_expected_reward_times_a_constant(options, G, length):
    found = bias.gradient(bias.expected_policy_loss, bias.POLICY, bias.GRADED, options, "none", G, True)
    close(-found, length * bias.reward_gradient(bias.POLICY, bias.GRADED))


def test_dpo_has_the_gradient_of_its_paper():
    """A pair's gradient is -beta s(-z) (grad log pi(y_c) - grad log pi(y_r)), after eq. 7 in arXiv 2305.18290."""
    beta, rewards = bias.BETA, bias.GRADED
    logits = bias.POLICY.clone().requires_grad_()
    logps = bias.logps_of(logits).sum(1)
    scores = [torch.autograd.grad(x, logits, retain_graph=True)[0].flatten() for x in logps]
    u = (logps - bias.REF.sum(1)).tolist()
    chance = bias.REF.sum(1).exp().tolist()
    target = torch.zeros(21, dtype=torch.float64)
    for c in range(15):
        for r in range(15):  # sampled in this order or in the reverse order
            wins = torch.sigmoid(rewards[c] - rewards[r])
            weight = torch.sigmoid(torch.tensor(beta * (u[r] - u[c]), dtype=torch.float64))
            target -= 2 * chance[c] * chance[r] * wins * beta * weight * (scores[c] - scores[r])
    close(bias.gradient(bias.expected_dpo_loss, bias.POLICY, {"loss_type": "sigmoid", "beta": beta}), target)


# the same with an image: a tiny Qwen2.5-VL with three tokens in its vocabulary, and its vision tower's gradient
def graded(completion_ids, **columns):
    return [bias.GRADED[bias.COMPLETIONS.index(tuple(ids))].item() for ids in completion_ids]


class OnePicture(list):
    """A dataset with the same row at every index."""

    def __init__(self):
        super().__init__([Shapes(8, "rows")[0]] * 8)


def flat(gradients):
    return torch.cat([x.flatten() for x in gradients])


@pytest.fixture
def pictures(stage, monkeypatch):
    """A function that runs GRPO with its default options, G = 2 and the given number of groups per rollout.

    Each step trains on one group. The function returns each step's gradients, the expected gradient, and the
    completion probabilities.
    """

    def pictures(groups):
        monkeypatch.setitem(registry.REWARDS, "letters", "tests.repository.test_bias:graded")
        options = f"--grpo.steps_per_generation={groups}", "--grpo.prompts_per_step=1", "--grpo.micro_batch_size=1"
        options += "--grpo.num_generations=2", "--sampling.max_new_tokens=3", f"--sampling.stop_token_ids=[{bias.END}]"
        run = stage("grpo", *options, rows=OnePicture())
        telling_weights(run.model).lm_head = torch.nn.Linear(32, 3, bias=False).double()
        with torch.no_grad():
            run.model.lm_head.weight.copy_(0.12 * torch.randn(3, 32, generator=torch.Generator().manual_seed(0)))
        weights = [*run.model.visual.parameters()]
        prompt = OnePicture()[0].prompt(run.trainer.processor)
        batch = pack([prompt], [[torch.tensor(c) for c in bias.COMPLETIONS]], run.model.config)
        logps = batch.pad(per_token_logps(run.model, batch)[0])
        loss = bias.expected_policy_loss(logps, bias.GRADED, {}, "group", one_group=True)
        expected = flat(torch.autograd.grad(loss, weights))
        drawn = (flat(torch.autograd.grad(run.trainer.loss(batch)[0], weights)) for [batch] in iter(run.next, None))
        return drawn, expected, bias.chances(logps.detach())

    return pictures


@pytest.mark.slow
def test_the_trainers_gradients_of_all_groups_add_up_to_the_expected_one(pictures, monkeypatch):
    groups = torch.cartesian_prod(bias.ALL, bias.ALL)

    def every_group(*_):
        completions = [Completion(torch.tensor(c), torch.zeros(len(c)), c[-1] == bias.END) for c in bias.COMPLETIONS]
        return [[completions[i] for i in group] for group in groups]

    monkeypatch.setattr(Sampler, "__call__", every_group)
    drawn, expected, chance = pictures(len(groups))
    total = sum(p * gradient for p, gradient in zip(chance[groups].prod(1), drawn, strict=False))
    close(total, expected, 1e-6 * expected.abs().max())  # advantages are float32
