"""Test that each law of a loss finds a loss that breaks only this law, and that right losses obey all laws."""

from functools import partial

import pytest
import torch
from torch.nn.functional import dropout, logsigmoid

from minivlmrl.extras.parity import command
from minivlmrl.extras.parity.laws import LAWS, examine, laws
from minivlmrl.extras.parity.loss import judge
from minivlmrl.losses import grpo_variants, preference  # noqa: F401  grpo_variants adds losses to grpo.py
from minivlmrl.losses.grpo import AVERAGES, grpo_loss
from tests.extras.parity import test_loss as losses
from tests.extras.parity.test_loss import changed, dual_clip, k3, my_loss, row_mean, row_means, token_mean


def dpo(batch, options, **changes):
    """Compute DPO's loss; `changes` replaces the tokens' sum, the margin or the pairs' mean."""
    put = {"total": lambda x, mask: (x * mask).sum(-1)}
    put |= {"loss": lambda z, e, beta: -(1 - e) * logsigmoid(beta * z) - e * logsigmoid(-beta * z)}
    put |= {"margin": lambda s: s[:, 0] - s[:, 1], "mean": torch.mean, "ref": lambda x: x} | changes
    log_ratio = batch["per_token_logps"] - put["ref"](batch["ref_per_token_logps"])
    z = put["margin"](put["total"](log_ratio, batch["mask"]))
    return put["mean"](put["loss"](z, options["label_smoothing"], options["beta"]))


def mean_of_tokens(x, mask):
    return (x * mask).sum(-1) / mask.sum(-1)


def kl_in_the_minimum(q):
    clipped = q.ratio.clamp(1 - q.low, 1 + q.high) * q.advantages
    return -torch.min(q.ratio * q.advantages - q.beta * q.kl, clipped)


def maximum(q):
    return -torch.max(q.ratio * q.advantages, q.ratio.clamp(1 - q.low, 1 + q.high) * q.advantages)


# For each law, a loss that breaks only this law
WRONG = {
    "numbers_are_finite": (changed(loss=lambda q: q.loss + q.logps.sum() * 0 / (len(q.mask) - 4)), {}),
    "inputs_stay_unchanged": (changed(loss=lambda q: q.loss + 0 * q.old.add_(0.1).sum()), {}),
    "masked_tokens_are_inert": (
        changed(loss=lambda q: q.loss + ((1 - q.mask) * (q.logps - q.logps.detach())).sum()),
        {},
    ),
    "padding_changes_nothing": (changed(loss=lambda q: (q.terms * q.mask).mean(1).mean()), {}),
    "rows_have_no_order": (changed(loss=lambda q: q.loss + (q.logps * q.mask)[0].detach().sum()), {}),
    "one_token_has_the_gradient_of_its_advantage": (changed(loss=lambda q: q.loss / 2), {}),
    "gradients_are_proportional_to_advantages": (
        changed(advantages=lambda q: q.advantages * (1 + 0.1 * (q.advantages.abs().max() - q.advantages.abs()))),
        {},
    ),
    "ratios_keep_direction_and_bound": (changed(term=maximum), {}),
    "the_reference_acts_through_beta": (changed(beta=lambda q: q.beta**2), {}),
    "the_kl_acts_apart_from_the_advantage": (changed(terms=kl_in_the_minimum), {}),
    "the_kl_is_that_of_policy_and_reference": (changed(kl=lambda q: k3(q.logps - q.ref)), {}),
    "answers_act_in_their_directions": (partial(dpo, margin=lambda s: s[:, 1] - s[:, 0]), {"kind": "dpo"}),
    "equal_margins_have_equal_losses": (partial(dpo, ref=lambda x: 0 * x), {"kind": "dpo"}),
    "tokens_are_averaged": (lambda batch, _: -row_mean(batch["per_token_logps"], batch["mask"]), {"kind": "sft"}),
}


@pytest.mark.parametrize("law", WRONG)
def test_a_loss_that_breaks_one_law_is_told_this_law(law):
    loss, options = WRONG[law]
    report = examine(loss, **options)
    assert [*report.broken] == [law], report


def test_each_law_has_a_loss_that_breaks_it():
    assert {law.__name__ for groups in LAWS.values() for group in groups for law in group} == {*WRONG}


# Mistakes that need no name in mistakes.py, because a law says them: (loss, options, beginnings of the sentences)
SAID = {
    "no gradient for bad completions": (changed(advantages=lambda q: q.advantages.relu()), {},
        ["the gradient of a token is not proportional to its advantage. Smallest batch: mask [[1, 1], [1, 0]]"]),
    "a token against its advantage": (changed(term=lambda q: -(1.5 * q.ratio - q.ratio**2 / 4) * q.advantages), {},
        ["a token is pushed against its advantage. Smallest batch: one token, advantage 1, ratio 50"]),
    "two at once": (
        changed(terms=lambda q: maximum(q) + q.beta * k3(q.ref - q.logps).detach()), {},
        ["a token that became likelier is pushed up more, without a bound. Smallest batch: one token, advantage 1",
         "the KL has no gradient, but only a value"]),
    **{
        says: (partial(dpo, **change), {"kind": "dpo"}, [says])
        for says, change in {
            "the answers do not have opposite gradients": {"margin": lambda s: s[:, 0] - s[:, 1] / 2},
            "beta does not multiply the margin": {"loss": lambda z, e, beta: -beta * logsigmoid(z)},
            "the log-ratios of an answer's tokens are added or averaged wrongly": {"total": mean_of_tokens},
            "pairs are not averaged": {"mean": torch.sum},
        }.items()
    },
}  # fmt: skip


@pytest.mark.parametrize("name", SAID)
def test_laws_say_what_has_no_name(name):
    loss, options, beginnings = SAID[name]
    found = examine(loss, **options).broken.values()
    assert all(any(text.startswith(begin) for text in found) for begin in beginnings), found


@pytest.mark.parametrize("corrected", (False, True))
@pytest.mark.parametrize("loss_type", AVERAGES)
def test_our_policy_losses_obey_all_laws(loss_type, corrected):
    assert laws(grpo_loss, loss_type=loss_type, use_bias_correction_kl=corrected) == 11


@pytest.mark.parametrize("level", ("sequence", "sequence_token"))
def test_our_gspo_obeys_all_laws(level):
    loss = lambda b, o: my_loss(b, o | {"importance_sampling_level": level})  # noqa: E731
    assert laws(loss, importance_sampling_level="sequence") == 11


@pytest.mark.parametrize(("kind", "loss_type"), [
    *(("dpo", name) for name in preference.DPO_LOSSES), ("sft", "nll"), ("sft", "dft")
])  # fmt: skip
def test_our_preference_and_sft_losses_obey_all_laws(kind, loss_type):
    assert laws(my_loss, kind=kind, loss_type=loss_type) == (7 if kind == "dpo" else 6)


BY_ROW = "with the mask [[1, 1], [1, 0]], the tokens have the weights [[0.25, 0.25], [0.5, 0.0]]"
# {design of a project, which obeys the laws: (loss, note)}
WITH_NOTES = {
    "no ratio": (changed(ratio=lambda q: (q.logps - q.logps.detach()).exp()), BY_ROW),
    "dual clip and one bound": (changed(term=dual_clip(1.5), high=lambda q: q.low), BY_ROW),
    "IcePop": (changed(term=lambda q: -q.ratio * q.advantages * (q.ratio > 0.5) * (q.ratio < 2)), BY_ROW),
    "CISPO": (changed(term=lambda q: -q.ratio.clamp(max=q.high).detach() * q.advantages * q.logps), BY_ROW),
    "GSPO": (changed(log_ratio=lambda q: row_means(q.log_ratio, q.mask)), BY_ROW),
    "no KL": (changed(beta=lambda q: 0), "no KL: beta changes nothing"),
    "BNPO": (
        changed(loss=lambda q: token_mean(q.terms, q.mask)),
        "[0.333333, 0.0]] micro-batches change the gradient; each is averaged by itself, as in BNPO",
    ),
    "mean length": (changed(loss=lambda q: (q.terms * q.mask).sum() / q.mask.sum(1).mean()), "[[0.666667, 0.666667], "),
}


@pytest.mark.parametrize("name", WITH_NOTES)
def test_designs_of_projects_obey_the_laws(name):
    loss, note = WITH_NOTES[name]
    report = examine(loss)
    assert report.passes and note in " ".join(report.notes), report


def test_a_named_preference_loss_has_its_own_laws():
    assert examine(losses.ipo_of_sums, kind="dpo", loss_type="ipo").passes
    assert [*examine(losses.ipo_of_sums, kind="dpo").broken] == ["equal_margins_have_equal_losses"]


def test_the_command_prints_the_smallest_batch(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "def right(batch, options):\n"
        "    return -(batch['per_token_logps'] * batch['mask']).sum() / batch['mask'].sum()\n"
        "def wrong(batch, options):\n"
        "    return -batch['per_token_logps'].mean()\n"
    )
    assert command.main(["--laws", "mine.py:right", "--only", "kind=sft"]) == 0
    assert "the loss obeys all 6 laws" in capsys.readouterr().out
    assert command.main(["--laws", "mine.py:wrong", "--only", "kind=sft"]) == 1
    broken = "broken law: masked tokens change the loss, or are trained. Smallest batch: mask [[1, 0]]"
    assert broken in capsys.readouterr().out


def test_laws_find_out_the_kind():
    report = examine(dpo)
    assert report.passes and report.count == 7


@pytest.mark.parametrize("loss", [changed(term=lambda q: dropout(q.term)), partial(dpo, ref=lambda x: dropout(x))])
@pytest.mark.parametrize("check", [examine, judge])
def test_a_random_loss_is_refused(check, loss):
    with pytest.raises(ValueError, match="my_loss is random: two calls with the same batch differ"):
        check(loss)


def test_laws_refuse_what_they_do_not_know():
    with pytest.raises(ValueError, match="kind is 'ppo', but it must be one of grpo, dpo, sft"):
        laws(changed(), kind="ppo")
    with pytest.raises(ValueError, match="'epsilon' is not an option of the kind grpo; the options are loss_type, "):
        laws(changed(), epsilon=0.2)
    with pytest.raises(ValueError, match=r"my_loss returned 0.0, but it must return a tensor of shape \(\)"):
        laws(lambda batch, options: 0.0)


@pytest.mark.parametrize("framework", ("jax", "mlx"))
def test_a_loss_of_another_framework_has_laws(framework):
    np = pytest.importorskip({"jax": "jax.numpy", "mlx": "mlx.core"}[framework])
    report = examine(lambda b, o: -np.mean(b["per_token_logps"]), kind="sft", tolerance=1e-5, framework=framework)
    assert [*report.broken] == ["masked_tokens_are_inert", "tokens_are_averaged"]
