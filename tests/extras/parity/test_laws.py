"""Test that each law of a loss finds a loss that breaks only this law, and that right losses obey all laws."""

from functools import partial

import pytest
import torch
from torch.nn.functional import logsigmoid

from minivlmrl.extras.parity import command
from minivlmrl.extras.parity.laws import LAWS, examine, laws
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
    "masked_tokens_are_inert": (
        changed(loss=lambda q: q.loss + ((1 - q.mask) * (q.logps - q.logps.detach())).sum()),
        {},
    ),
    "padding_changes_nothing": (changed(loss=lambda q: (q.terms * q.mask).mean(1).mean()), {}),
    "rows_have_no_order": (changed(loss=lambda q: q.loss + (q.logps * q.mask)[0].detach().sum()), {}),
    "micro_batches_add_up": (changed(loss=lambda q: token_mean(q.terms, q.mask)), {"loss_type": "dapo"}),
    "one_token_has_the_gradient_of_its_advantage": (changed(loss=lambda q: q.loss / 2), {}),
    "gradients_are_proportional_to_advantages": (
        changed(advantages=lambda q: q.advantages * (1 + 0.1 * (q.advantages.abs().max() - q.advantages.abs()))),
        {},
    ),
    "ratios_act_as_in_a_known_loss": (changed(term=maximum), {}),
    "the_average_is_that_of_the_loss_type": (changed(loss=lambda q: row_mean(q.terms, q.mask)), {"loss_type": "dapo"}),
    "the_reference_acts_through_beta": (changed(beta=lambda q: q.beta**2), {}),
    "the_kl_acts_apart_from_the_advantage": (changed(terms=kl_in_the_minimum), {}),
    "the_kl_is_that_of_policy_and_reference": (changed(kl=lambda q: k3(q.logps - q.ref)), {}),
    "answers_act_in_their_directions": (partial(dpo, margin=lambda s: s[:, 1] - s[:, 0]), {"kind": "dpo"}),
    "equal_margins_have_equal_losses": (partial(dpo, ref=lambda x: 0 * x), {"kind": "dpo"}),
    "ipo_pulls_to_its_margin": (
        partial(dpo, total=mean_of_tokens, loss=lambda z, e, beta: (z - 1 / beta) ** 2),
        {"kind": "dpo", "loss_type": "ipo"},
    ),
    "tokens_are_averaged": (lambda batch, _: -row_mean(batch["per_token_logps"], batch["mask"]), {"kind": "sft"}),
}


def notes(loss, **options):
    report = examine(loss, **options)
    assert not report.broken_laws(), report
    return " ".join(report.sentences("note"))


@pytest.mark.parametrize("law", WRONG)
def test_a_loss_that_breaks_one_law_is_told_this_law(law):
    loss, options = WRONG[law]
    report = examine(loss, **options)
    assert report.broken_laws() == [law], report


def test_each_law_has_a_loss_that_breaks_it():
    assert {law.__name__ for groups in LAWS.values() for group in groups for law in group} == {*WRONG}


# Mistakes that need no name in mistakes.py, because a law says them: (loss, options, beginnings of the sentences)
SAID = {
    "arithmetic mean of ratios": (changed(ratio=lambda q: row_means((q.logps - q.old).exp(), q.mask)),
        {"importance_sampling_level": "sequence"}, ["the ratio does not act as in PPO's gradient; the tokens of a"]),
    "no gradient for bad completions": (changed(advantages=lambda q: q.advantages.relu()), {},
        ["the gradient of a token is not proportional to its advantage. Smallest batch: mask [[1, 1], [1, 0]]"]),
    "rounded ratio": (changed(ratio=lambda q: q.log_ratio.bfloat16().exp().double()), {},
        ["the ratio does not act as in "]),
    "CISPO without a gradient outside of its bounds": (
        changed(term=lambda q: -q.ratio.clamp(1 - q.low, 1 + q.high) * q.advantages), {"loss_type": "cispo"},
        ["the ratio does not act as in "]),
    "two at once with DAPO's average": (
        changed(terms=lambda q: maximum(q) + q.beta * k3(q.ref - q.logps).detach()), {"loss_type": "dapo"},
        ["the ratio does not act as in PPO's gradient. Smallest batch: advantage 1.0, ratios [0.001]",
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
    found = examine(loss, **options).sentences("broken")
    assert all(any(text.startswith(begin) for text in found) for begin in beginnings), found


def test_a_constant_of_ones_own_is_no_mistake_of_dr_grpo():
    assert laws(changed(loss=lambda q: ((q.terms * q.mask).sum(1) / 1000).mean()), loss_type="dr_grpo") == 12


@pytest.mark.parametrize("corrected", (False, True))
@pytest.mark.parametrize("loss_type", AVERAGES)
def test_our_policy_losses_obey_all_laws(loss_type, corrected):
    assert laws(grpo_loss, loss_type=loss_type, use_bias_correction_kl=corrected) == 12


@pytest.mark.parametrize("level", ("sequence", "sequence_token"))
def test_our_gspo_obeys_all_laws(level):
    loss = lambda b, o: my_loss(b, o | {"importance_sampling_level": level})  # noqa: E731
    assert laws(loss, importance_sampling_level="sequence") == 12


@pytest.mark.parametrize(("kind", "loss_type"), [
    *(("dpo", name) for name in preference.DPO_LOSSES), ("sft", "nll"), ("sft", "dft")
])  # fmt: skip
def test_our_preference_and_sft_losses_obey_all_laws(kind, loss_type):
    assert laws(my_loss, kind=kind, loss_type=loss_type) > 5


def losses_with_notes():
    yield changed(ratio=lambda q: (q.logps - q.logps.detach()).exp()), "no ratio, which is right for one update"
    yield changed(high=lambda q: q.low), "only one bound: the ratio is clipped at 1.2, because"
    dual = "a dual clip: a token with a negative advantage has no gradient at ratios above 1.5"
    yield changed(term=dual_clip(1.5)), dual
    yield changed(term=dual_clip(3.0), high=lambda q: q.low), "ratios above 3, and only one bound"
    mask = "a mask: only tokens with a ratio from about 0.505 to 1.97 have a gradient"
    yield changed(term=lambda q: -q.ratio * q.advantages * (q.ratio > 0.5) * (q.ratio < 2)), mask
    clipped = changed(term=lambda q: -q.ratio.clamp(max=q.high).detach() * q.advantages * q.logps)
    yield clipped, "CISPO's gradient, with weights between 0.001 and 5"
    yield changed(loss=lambda q: token_mean(q.terms, q.mask)), "Each micro-batch is averaged by itself, as in BNPO"
    mean_length = changed(loss=lambda q: (q.terms * q.mask).sum() / q.mask.sum(1).mean())
    yield mean_length, "the tokens have the weights [[0.4, 0.4, 0.4, 0.4, 0.0], [0.4, 0.0, 0.0, 0.0, 0.0]]"


@pytest.mark.parametrize(("loss", "expected"), losses_with_notes())
def test_designs_of_projects_are_notes(loss, expected):
    assert expected in notes(loss)


def test_a_named_loss_type_is_a_law():
    cispo = changed(term=lambda q: -q.ratio.detach() * q.advantages * q.logps)
    assert examine(cispo, loss_type="grpo").broken_laws() == ["ratios_act_as_in_a_known_loss"]
    gspo_loss = changed(log_ratio=lambda q: row_means(q.log_ratio, q.mask))
    assert "one ratio, the geometric mean" in notes(gspo_loss)
    assert examine(gspo_loss, importance_sampling_level="token").broken_laws() == ["ratios_act_as_in_a_known_loss"]


def test_projects_average_gspo_differently():
    mean, average = lambda q: row_means(q.log_ratio, q.mask), lambda q: token_mean(q.terms + 0 * q.mask, q.mask)
    loss = changed(log_ratio=mean, loss=average, kl=lambda q: 0 * q.kl)
    assert examine(loss, loss_type="grpo", importance_sampling_level="sequence").passes
    assert examine(loss, loss_type="grpo").broken_laws()


def test_an_ipo_loss_is_recognized():
    assert examine(losses.ipo_of_sums, kind="dpo").passes
    assert examine(losses.ipo_of_sums, kind="dpo", loss_type="sigmoid").broken_laws() == [
        "equal_margins_have_equal_losses"
    ]


def test_a_loss_with_one_bound_is_compared_with_one_bound():
    """The maximum is wrong for negative advantages; the missing second bound is a design."""
    [expected] = examine(losses.one_bound_maximum).sentences("broken")
    assert "advantage -" in expected and "only one bound: the ratio is clipped at 1.2" in expected


def test_a_report_counts_the_tested_laws():
    expected = str(examine(changed(term=maximum, beta=lambda q: 0)))
    assert expected.startswith("the loss breaks 1 of 9 laws\n") and "not tested: the KL" in expected


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
    assert (
        "broken: masked tokens change the loss, or are trained. Smallest batch: mask [[1, 0]]"
        in capsys.readouterr().out
    )


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
    assert report.broken_laws() == ["masked_tokens_are_inert", "tokens_are_averaged"]
