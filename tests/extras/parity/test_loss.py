"""Test that recorded numbers of TRL reveal a wrong loss, and that the search names the mistake."""

import math
import re
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import pad, softplus

from minivlmrl.extras.parity.calling import like_grpo_loss
from minivlmrl.extras.parity.command import main
from minivlmrl.extras.parity.laws import LAWS, examine
from minivlmrl.extras.parity.loss import cases, check, judge
from minivlmrl.extras.parity.vectors import read_cases
from minivlmrl.losses import preference, sft
from minivlmrl.losses.grpo import grpo_loss
from tests.helpers.links import ROOT


def chosen(loss, options):
    return {name: options[name] for name in loss.__kwdefaults__.keys() & options.keys()}


def my_loss(batch, options):
    """Compute one of our losses, in the form that `parity` expects of users."""
    if options["kind"] == "sft":
        return sft.sft_loss(**batch, loss_type=options["loss_type"])
    if options["kind"] == "dpo":
        return preference.dpo_loss(**batch, **chosen(preference.dpo_loss, options))[0]
    return like_grpo_loss(grpo_loss, batch, options)[0]


def token_mean(x, mask):
    return (x * mask).sum() / mask.sum()


def row_means(x, mask):
    return (x * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)


def row_mean(x, mask):
    return row_means(x, mask).mean()


DIVISORS = {"dapo": token_mean, "grpo": row_mean, "dr_grpo": lambda x, mask: ((x * mask).sum(1) / 9).mean()}


def surrogate(q, ratio):
    return -torch.min(ratio * q.advantages, ratio.clamp(1 - q.low, 1 + q.high) * q.advantages)


def k3(d):
    return d.exp() - d - 1


def usual(batch, options, **changes):
    """Compute GRPO, DAPO, Dr. GRPO or GSPO for a whole step, as most people write the loss.

    `changes` maps the name of a quantity to a function of all earlier quantities, which replaces the quantity.
    """
    q = SimpleNamespace(batch=batch, options=options)

    def put(name, value):
        setattr(q, name, value)
        if name in changes:
            setattr(q, name, changes[name](q))

    put("logps", batch["per_token_logps"])
    put("old", batch["old_per_token_logps"])
    put("ref", batch["ref_per_token_logps"])
    put("mask", batch["mask"])
    put("advantages", batch["advantages"][:, None])
    put("low", options["epsilon_low"])
    put("high", options["epsilon_high"])
    put("beta", options["beta"])
    log_ratio = q.logps - q.old
    if options["importance_sampling_level"] == "sequence":
        log_ratio = row_means(log_ratio, q.mask)
    put("log_ratio", log_ratio)
    put("ratio", q.log_ratio.exp())
    put("term", surrogate(q, q.ratio))
    put("kl", k3(q.ref - q.logps))
    put("weight", q.ratio if options["use_bias_correction_kl"] else 1)
    put("terms", q.term + q.beta * q.kl * q.weight if q.beta else q.term)
    put("loss", DIVISORS.get(options["loss_type"], token_mean)(q.terms, q.mask))
    return q.loss


def changed(**changes):
    return partial(usual, **changes)


def dual_clip(c):
    return lambda q: q.term.where(q.advantages >= 0, q.term.minimum(-c * q.advantages))


def dpo_sums(batch):
    """Return the log-ratios of policy and reference, summed over tokens, (B, 2)."""
    return ((batch["per_token_logps"] - batch["ref_per_token_logps"]) * batch["mask"]).sum(-1)


def margins(batch):
    """Return how much larger the log-ratios of the chosen answers are, (B,)."""
    return dpo_sums(batch)[:, 0] - dpo_sums(batch)[:, 1]


DAPO = {"loss_type": "dapo", "importance_sampling_level": "token"}
WHOLE = {"whole_step": True, **DAPO}
GRPO = WHOLE | {"loss_type": "grpo"}
PLAIN = GRPO | {"use_bias_correction_kl": False}
KL = PLAIN | {"beta": 0.1}
NO_KL = GRPO | {"beta": 0.0}
SWAPPED = "policy and reference are swapped in the KL"
DPO = {"kind": "dpo", "loss_type": "sigmoid"}
GSPO = NO_KL | {"importance_sampling_level": "sequence"}


def test_a_loss_of_ones_own_is_checked_against_recorded_numbers(monkeypatch):
    monkeypatch.setitem(sys.modules, "trl", None)
    numbers = {"grpo": 267, "dpo": 35, "sft": 6}
    assert all(check(my_loss, kind=kind) >= number for kind, number in numbers.items())
    assert check(my_loss, delta=3.0) >= 8 and check(grpo_loss) >= 267  # a loss of a recipe needs no wrapper
    for loss in (
        lambda logps, *rest, **named: grpo_loss(logps, *rest, **named)[0],
        lambda *given: (my_loss(*given), {"metric": 1}),
    ):
        assert check(loss, loss_type="dr_grpo") >= 33
    assert check(my_loss, kind="dpo", loss_type="sigmoid") >= 5 and check(usual, whole_step=True, **DAPO) >= 23


@pytest.mark.parametrize("only, phrase", [
    ({"loss_type": "gspo"}, r"'bnpo', 'cispo', 'dapo', 'dft', 'dr_grpo', .*; options: .*importance_sampling_level"),
    ({"beta": 3}, r"'beta': \['0.0', '0.05', '0.1', "),
    ({"epsilon": 1}, r"'epsilon': \['None'\]}; options: beta, .*epsilon_high, epsilon_low, .*whole_step$"),
])  # fmt: skip
def test_a_check_of_no_case_lists_what_there_is(only, phrase):
    with pytest.raises(ValueError, match=phrase):
        check(my_loss, **only)


def ipo_of_sums(batch, options):
    return (margins(batch) - 0.5 / options["beta"]).square().mean()


def low_var_kl(q):
    """Compute k3 as verl and EasyR1 do."""
    return k3((q.ref - q.logps).clamp(-20, 20)).clamp(-10, 10)


# (loss, options of its cases, kinds and texts of the findings)
NAMED = [
    (changed(term=dual_clip(3.0)), GRPO, "design: dual clip: with a negative advantage, a ratio counts at most 3"),
    (changed(log_ratio=lambda q: q.log_ratio.clamp(-20, 20)), NO_KL,
     "design: the log of the ratio is clamped to -20 and 20"),
    (changed(kl=lambda q: k3((q.ref - q.logps).clamp(-5, 5))), PLAIN, "design: the log-ratio in the KL is clamped to"),
    (changed(weight=lambda q: 1), GRPO | {"use_bias_correction_kl": True}, "design: the KL is not weighted"),
    (changed(loss=lambda q: (q.terms * q.mask).sum()), GRPO, "mistake: .* the sum over all tokens"),
    (changed(loss=lambda q: DIVISORS["dr_grpo"](q.terms, q.mask)), GRPO,
     "design: .*(fixed length of 9 for|averaged as in dr_grpo)"),
    (changed(loss=lambda q: (q.terms * q.mask).mean()), WHOLE, "mistake: the loss is divided by all columns, padding"),
    (changed(kl=low_var_kl, term=dual_clip(3.0), loss=lambda q: ((q.terms * q.mask).sum(1) / q.mask.sum(1)).mean()),
     GRPO, "design: dual clip; design: the KL is clamped; mistake: a row without tokens is divided by 0"),
    (changed(kl=lambda q: low_var_kl(q) + low_var_kl(q).detach()), KL,
     "design: the KL is clamped; design: the remaining differences are in the value"),
    (changed(weight=lambda q: q.ratio.detach()), GRPO | {"use_bias_correction_kl": True},
     "mistake: the KL is weighted with the ratio, which is detached"),
    (changed(log_ratio=lambda q: q.log_ratio.clamp(-0.1, 0.1)), NO_KL,
     "mistake: the log of the ratio is clamped to -0.1 and 0.1"),
    (changed(term=lambda q: -q.ratio * q.advantages * (q.ratio >= 1 - q.low) * (q.ratio <= 1 + q.high)), NO_KL,
     "design: no token outside of 1 - epsilon_low"),
    (changed(loss=lambda q: (q.terms * q.mask).sum() / (q.mask * (q.advantages > 0)).sum().clamp(min=1)), NO_KL | DAPO,
     "mistake: the mean divides only by tokens of rows with a positive advantage"),
    (changed(weight=lambda q: (q.logps - q.ref).exp()), KL, "mistake: the KL is weighted with pi / pi_ref"),
    (lambda b, o: my_loss(b, o | {"beta": o["beta"] / 2}), {"kind": "dpo", "loss_type": "ipo"},
     "mistake: beta is halved"),
    (lambda b, o: dpo_of()(b | {"mask": b["mask"] * (b["mask"].cumsum(-1) > 1)}, o), DPO,
     "mistake: the first token of each answer is left out"),
    (lambda b, o: dpo_of()(b | {"mask": b["mask"] * pad(b["mask"], (0, 1))[..., 1:]}, o), DPO,
     "mistake: the last token of each answer is left out$"),
    (changed(loss=lambda q: row_mean(q.terms, q.mask) * len(q.mask) / q.mask.any(1).sum()), GRPO,
     "mistake: the mean of the rows is only over rows with a token"),
    (changed(term=lambda q: -q.ratio.detach().clamp(1 - q.low, 1 + q.high) * q.advantages * q.logps),
     WHOLE | {"loss_type": "cispo", "beta": 0.0}, r"design: cispo's ratio is clamped to 1 - epsilon_low and 1 \+ eps"),
    (ipo_of_sums, {"kind": "dpo", "loss_type": "ipo"}, "design: .* the sum over its tokens"),
    (changed(loss=lambda q: q.loss + 0.5), WHOLE, "design: the values differ, but the gradients are equal in all"),
    (changed(loss=lambda q: q.loss - q.loss.detach()), WHOLE,
     "design: the values differ, but the gradients are equal in all cases$"),
    (changed(mask=lambda q: q.mask.roll(1, 1)), WHOLE, "mistake: a mask value .* the previous token in its row$"),
    (lambda *given: my_loss(*given) / 2, {}, "mistake: all values are 0.5 times as large$"),
    (lambda *given: my_loss(*given).detach(), PLAIN, "mistake: no gradient reaches the policy$"),
    (lambda b, o: my_loss(b, o) * len(b["mask"]), {}, "mistake: .* multiplied by the number of rows"),
    (lambda b, o: my_loss(b, o) / o["beta"], KL, "mistake: all values are divided by beta$"),
    (lambda b, o: my_loss(b, o) / o["max_completion_length"], PLAIN,
     "mistake: .* divided by the number of tokens of max_completion_length$"),
    (changed(term=lambda q: q.term * q.ratio), NO_KL, "mistake: the policy .* by the ratio a second time"),
    (changed(kl=lambda q: q.ref - q.logps), KL, "mistake: the KL estimator is k1 with the wrong sign"),
    (changed(term=lambda q: -q.term), KL, "mistake: the policy term, without the KL, has the wrong sign"),
    (changed(loss=lambda q: (q.terms * q.mask).sin().sum()), WHOLE | {"beta": 0.0}, ""),
]  # fmt: skip


def dpo_of(change=lambda z, _: z):
    def loss(batch, options):
        return softplus(-change(options["beta"] * margins(batch), options["beta"])).mean()

    return loss


def chosen_reference_negated(batch, options):
    signs = torch.tensor([[-1.0], [1.0]])
    return dpo_of()(batch | {"ref_per_token_logps": signs * batch["ref_per_token_logps"]}, options)


def aot_in_order(batch, options):
    z, smoothing = options["beta"] * margins(batch), options["label_smoothing"]
    return ((1 - smoothing) * softplus(-z) + smoothing * softplus(z)).mean()


def one_bound_maximum(batch, options):
    """Compute the GRPO of reasoning-from-scratch, which reads one epsilon, so that the two cannot be swapped."""
    advantages, epsilon = batch["advantages"][:, None], options["epsilon_low"]
    ratio = (batch["per_token_logps"] - batch["old_per_token_logps"]).exp()
    both = ratio * advantages, ratio.clamp(1 - epsilon, 1 + epsilon) * advantages
    return -row_mean(torch.where(advantages >= 0, torch.min(*both), torch.max(*both)), batch["mask"])


# mistakes that were written without looking at the names of known mistakes; some names were added afterwards
UNSEEN = [
    (aot_in_order, {"kind": "dpo", "loss_type": "aot"}, "the loss is sigmoid"),
    (changed(old=lambda q: 2 * q.logps - q.old), NO_KL, "has the wrong sign"),
    (changed(advantages=lambda q: q.advantages.abs()), NO_KL, "absolute value"),
    (changed(advantages=lambda q: q.advantages.flip(0)), NO_KL, "mirrored position"),
    (changed(beta=lambda q: q.beta**2), KL, "multiplied by beta twice|KL is 0.1 times as large"),
    (changed(beta=lambda q: -q.beta), KL, "the KL has the wrong sign"),
    (changed(kl=lambda q: (q.ref - q.logps).square() / 2), KL, "estimator is k2"),
    (changed(kl=lambda q: (q.ref - q.logps).abs()), KL, "estimator is k1; the KL is replaced by its absolute"),
    (changed(kl=lambda q: q.kl.detach()), KL, "the KL is detached"),
    (changed(ref=lambda q: q.old), KL, "the reference is the old policy"),
    (changed(high=lambda q: math.inf, low=lambda q: math.inf), NO_KL, "ratios are not clipped"),
    (changed(mask=lambda q: q.mask * (q.mask.cumsum(1) > 1)), NO_KL, "first token"),
    (changed(loss=lambda q: ((q.term * q.mask * pad(q.mask, (-1, 1))).sum(1) / q.mask.sum(1).clamp(min=1)).mean()),
     NO_KL, "no gradient of the last counted tokens"),
    (changed(log_ratio=lambda q: ((q.logps - q.old) * q.mask).sum(1, keepdim=True)), GSPO,
     "the product of its tokens' ratios"),
    (changed(log_ratio=lambda q: ((q.logps - q.old) * q.mask).mean(1, keepdim=True)), GSPO, "divided by all columns,"),
    (changed(term=lambda q: -torch.min(q.ratio * q.advantages, q.log_ratio.clamp(-q.low, q.high).exp() * q.advantages)),
     NO_KL, "ratios are clipped to exp"),
    (changed(loss=lambda q: row_mean(q.term, q.mask) + q.beta * token_mean(q.kl, q.mask)), KL,
     "averaged as in|all tokens"),
    (changed(term=lambda q: -q.ratio.clamp(max=q.high) * q.advantages * q.logps),
     WHOLE | {"loss_type": "cispo", "beta": 0.0}, "cispo's ratio is not detached"),
    (changed(kl=lambda q: k3(((q.ref - q.logps) * q.mask).sum(1, keepdim=True))), KL, "from the sum of a row's"),
    (dpo_of(lambda z, beta: beta * z), DPO, "beta is applied twice"),
    (dpo_of(lambda z, _: z.mean()), DPO, "averaged over the pairs"),
    (changed(term=lambda q: -q.advantages * q.logps, kl=lambda q: k3(q.logps - q.ref)), KL | {"loss_type": "dapo"},
     "REINFORCE; policy and reference are swapped in the KL"),
    (lambda batch, options: dpo_of()(batch | {"mask": batch["mask"][:, :1]}, options), DPO, "both answers have the"),
    (lambda batch, options: dpo_of(lambda z, _: z / batch["mask"].shape[2])(batch, options), DPO,
     "averaged over all columns, padding included"),
    (lambda batch, options: my_loss(batch, options | {"beta": 1 / options["beta"]}),
     {"kind": "dpo", "loss_type": "ipo"}, "one over beta"),
    (one_bound_maximum, NO_KL, "for negative advantages; design: ratios are clipped with epsilon_low on both sides"),
    (changed(loss=lambda q: ((q.terms * q.mask).sum(1) / q.mask.sum(1, keepdim=True).clamp(min=1)).mean()), NO_KL,
     "divided by the lengths of all rows"),
    (changed(log_ratio=lambda q: q.logps.bfloat16().double() - q.old.bfloat16().double()), NO_KL,
     "log-probabilities are in bfloat16"),
    (changed(beta=lambda q: 1.0), KL, "not multiplied by beta"),
    (changed(kl=lambda q: (q.logps - q.ref).detach() + (d := (q.logps - q.ref) ** 2 / 2) - d.detach()), KL,
     "design: the KL has the value of k1 and the gradient of k2"),
    (
        lambda b, o: softplus(
            ((o["beta"] * b["per_token_logps"] - b["ref_per_token_logps"]) * b["mask"]).sum(-1).diff(dim=1)).mean(),
        DPO, "beta multiplies only the policy's"),
    (lambda b, o: -(b["per_token_logps"] * b["mask"]).sum(-1).mean(), {"kind": "sft", "loss_type": "nll"},
     "the tokens of each row are added up"),
    (changed(kl=lambda q: k3(q.logps - q.ref), loss=lambda q: row_mean(q.terms, q.mask)), KL | {"loss_type": "dapo"},
     "averaged as in grpo; swapped in the KL"),
    (changed(kl=lambda q: 0 * q.kl, advantages=lambda q: q.advantages.sign()), KL,
     "an advantage is replaced by its sign; the KL is left out"),
    (
        changed(loss=lambda q: (q.terms * q.mask).sum(), old=lambda q: q.batch["ref_per_token_logps"],
                kl=lambda q: q.kl / 2), KL,
        "the loss is the sum; the old policy is the reference; the KL is 0.5 times as large"),
    (
        changed(loss=lambda q: (q.terms * q.mask).sum() / 64 / len(q.mask), term=lambda q: torch.max(
            q.ratio * q.advantages, q.ratio.clamp(1 - q.low, 1 + q.high) * q.advantages).neg()), KL,
        "divided by a fixed length of 64; the maximum of the clipped and the unclipped objective is used instead"),
    (
        lambda b, o: -(preference.answer_logps(b["per_token_logps"] - b["ref_per_token_logps"], b["mask"], None)
                       / b["mask"].sum(-1)).diff(dim=1).neg().sigmoid().log().mean(), DPO,
        "beta is ignored; log-probabilities are averaged over tokens"),
    (changed(ratio=lambda q: (q.log_ratio * q.mask).sum().exp() + 0 * q.mask), NO_KL, "all rows of the batch have one"),
    (changed(loss=lambda q: (q.terms * q.mask.sum(1, keepdim=True)).mean()), GSPO | {"loss_type": "luspo", "beta": 0.1},
     "luspo's loss is not masked"),
    (changed(kl=lambda q: q.ratio * (q.logps - q.ref).exp() - (q.logps - q.ref) - 1), KL, "which is not least at the"),
    (changed(loss=lambda q: token_mean(q.terms, q.mask) if q.options["whole_step"] else row_mean(q.terms, q.mask)),
     DAPO | {"beta": 0.0}, "only in whole steps"),
    (dpo_of(lambda z, beta: -0.1 * z / beta), DPO, "the rejected answer is preferred; beta is 0.1"),
    (lambda b, o: dpo_of(lambda z, _: -z)(b, o) * len(b["mask"]), DPO,
     "the rejected answer is preferred; all values are multiplied by the number of pairs"),
    (changed(kl=lambda q: k3(q.logps - q.ref), loss=lambda q: q.loss / 2), PLAIN,
     "swapped in the KL; all values are 0.5 times as large"),
    (changed(loss=lambda q: token_mean(q.terms[:, :-1], q.mask[:, :-1])), WHOLE | {"beta": 0.1},
     "the last column of the batch"),
    (changed(ratio=lambda q: q.log_ratio), NO_KL, "exp is missing"),
    (changed(ratio=lambda q: row_means((q.logps - q.old).exp(), q.mask)), GSPO,
     "the ratio is the arithmetic instead of the geometric mean of the ratios in its row"),
    (lambda b, o: -(b["per_token_logps"] * b["mask"])[:, 1:].sum() / b["mask"].sum(),
     {"kind": "sft", "loss_type": "nll"}, "no gradient of the first tokens"),
    (lambda b, o: sft.sft_loss(b["per_token_logps"], pad(b["mask"], (0, 1))[:, 1:], loss_type=o["loss_type"]),
     {"kind": "sft"}, "mistake: a mask value is taken from the next token in its row and 0 for the last$"),
    (changed(term=lambda q: -q.ratio.detach() * q.advantages * q.logps), NO_KL, "cispo's ratio has no bound"),
    (changed(advantages=lambda q: q.advantages / q.mask.sum(1, keepdim=True).clamp(min=1)), NO_KL,
     "a row is divided by its token count"),
    (changed(kl=lambda q: q.ref.exp() * (q.ref - q.logps)), KL, "torch's kl_div"),
    (changed(kl=lambda q: (q.ref - q.logps).exp() + q.ref - q.logps - 1), KL, "wrong sign of its log-ratio"),
    (changed(kl=lambda q: (q.ref - q.logps).expm1()), KL, "k3 lacks its log-ratio"),
    (lambda b, o: -(o["beta"] * margins(b)).sigmoid().mean(), DPO, "the log is missing"),
    (lambda b, o: softplus(-o["beta"] * dpo_sums(b)[:, 0]).mean(), DPO, "left out for the rejected answer"),
    (lambda b, o: softplus(-o["beta"] * dpo_sums(b).sum(1)).mean(), DPO, "wrong sign for the rejected answer"),
    (dpo_of(lambda z, _: z - 0.5), DPO, "0.5 is subtracted from beta times the margin"),
    (lambda b, o: dpo_of()(b, o) - 0.1 * token_mean(b["per_token_logps"][:, 0], b["mask"][:, 0]), DPO,
     "SFT loss with the weight 0.1 is added"),
    (lambda b, o: usual(b, o, mask=lambda q: b["mask"].fill_(1)), PLAIN, "padding is counted"),
    (chosen_reference_negated, DPO, "the reference's log-probability has the wrong sign for the chosen answer"),
]  # fmt: skip
QUICK = "clip: with", "KL is not weighted", "equal in all", "0.5 times as large", "previous token", "reaches"


@pytest.mark.parametrize("loss, only, phrase", [
    pytest.param(*case, id=case[2], marks=[] if any(text in case[2] for text in QUICK) else pytest.mark.slow)
    for case in NAMED + UNSEEN
])  # fmt: skip
def test_a_mistake_or_a_design_is_named(loss, only, phrase):
    verdict = judge(loss, **only)
    found = [line for line in verdict.names if line.startswith(("mistake", "design", "  or"))]
    expected = [text for text in re.split("; (?!and )", phrase) if text]
    assert verdict.differences and len(verdict.kinds) == len(expected), str(verdict)
    assert all(any(re.search(text, line) for line in found) for text in expected), str(verdict)


def normalized(correction, epsilon):
    """Normalize advantages within a batch: for all-equal ones, gradients and token weights are 0."""
    return lambda q: (q.advantages - q.advantages.mean()) / (q.advantages.std(correction=correction) + epsilon)


@pytest.mark.parametrize(("correction", "epsilon"), [(0, 1e-4), (0, 1e-8), (1, 1e-4), (1, 1e-8)])
def test_advantages_that_are_normalized_again_are_named(correction, epsilon):
    loss = changed(advantages=normalized(correction, epsilon))
    assert judge(loss, **KL).names == ["mistake: advantages are normalized again within each micro-batch"]
    assert "the_kl_is_that_of_policy_and_reference" not in examine(loss).broken


@pytest.mark.parametrize("option", ["--tolerance=1e-6", "--laws"])
def test_the_exit_status_of_a_loss_that_fails_is_2(tmp_path, option, capsys):
    (tmp_path / "my_loss.py").write_text("def loss(batch, options):\n    return batch['nothing']\n")
    assert main([f"{tmp_path}/my_loss.py:loss", option]) == 2
    assert "Traceback" in capsys.readouterr().err
    with pytest.raises(ValueError, match="defines no 'missing'"):
        main([f"{tmp_path}/my_loss.py:missing", option])


def test_a_completion_without_tokens_does_not_hide_a_mistake():
    """Dividing by 0 tokens makes the loss NaN in one case, in which no other mistake can be seen."""

    def loss(q):
        return ((q.terms * q.mask).sum(1) / q.mask.sum(1)).mean()

    verdict = judge(changed(kl=lambda q: k3(q.logps - q.ref), loss=loss), **KL)
    nan = "mistake: a row without tokens is divided by 0 in the mean over each row"
    assert [line for line in verdict.names if line.startswith("mistake")] == [f"mistake: {SWAPPED}", nan]
    assert [line for line in judge(changed(loss=loss), **PLAIN).names if line.startswith("mistake")] == [nan]


def test_the_length_of_dr_grpo_may_be_a_constant():
    own = changed(loss=lambda q: q.loss / 2)
    only = PLAIN | {"loss_type": "dr_grpo"}
    assert judge(own, **only).passes
    assert not judge(lambda b, o: own(b, o | {"beta": o["max_completion_length"] / 90}), **only).passes


def test_the_page_shows_what_its_commands_print(tmp_path, monkeypatch, capsys):
    page = (ROOT / "docs" / "numerical_parity.md").read_text()
    [code, *_] = re.findall(r"```python\n([^`]*)```", page)
    (tmp_path / "my_loss.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    shown = re.findall(r"```bash\nminivlmrl parity ([^`]*)\n```\n```text\n([^`]*)```", page)
    assert len(shown) == 2
    for command, printed in shown:
        assert main(command.split()) == 1 and capsys.readouterr().out == printed


def test_what_trl_says_of_ones_own_tensors(trl):
    """The installed TRL returns the recorded values and gradients."""
    from tests.parity.compare import distance
    from tests.parity.trl_oracle import what_trl_says

    for only in ({"kind": "grpo", "loss_type": "cispo", "beta": 0.1}, {"kind": "dpo", "beta": 0.3}, {"kind": "sft"}):
        *_, (_, options, batch, value, gradient) = cases(**only)
        phrase = what_trl_says(batch, options)
        assert distance(phrase["loss"], value) < 1e-12 and distance(phrase["gradient"], gradient) < 1e-12


def test_the_numbers_on_the_page_are_those_of_the_code():
    page = " ".join((ROOT / "docs" / "numerical_parity.md").read_text().split())
    grpo, dpo = (len(read_cases(kind=kind)) for kind in ("grpo", "dpo"))  # without those with a dual clip
    assert (
        f"TRL gave {grpo} GRPO cases, {len(read_cases(delta=3.0))} more with a dual clip (`--only delta=3.0`), "
        f"{dpo} DPO losses and six SFT losses"
        in page
        and len(read_cases(kind="sft")) == 6
    )
    of_policy, of_dpo, of_sft = (len(set().union(*LAWS[kind])) for kind in ("grpo", "dpo", "sft"))
    assert f"`--laws` checks {of_policy} laws" in page
    assert f"A DPO loss has {of_dpo} laws, and an SFT loss {of_sft}." in page
    museum = " ".join((ROOT / "docs" / "museum.md").read_text().split())
    assert f"a margin of -4 gets {int(1 / torch.tensor(-4.0).sigmoid())} times the gradient" in museum


def test_a_loss_for_a_recipe_may_have_few_parameters():
    """It then reads only what it has parameters for."""

    def one_epsilon(logps, advantages, mask, *, old_per_token_logps, epsilon_low):
        given = {"per_token_logps": logps, "advantages": advantages, "mask": mask, "beta": 0.0, "loss_type": "grpo"}
        given |= {"old_per_token_logps": old_per_token_logps, "ref_per_token_logps": logps}
        given |= {"epsilon_low": epsilon_low, "epsilon_high": epsilon_low, "importance_sampling_level": "token"}
        return usual(given, given | {"use_bias_correction_kl": False}), {}

    assert judge(one_epsilon, **NO_KL).names[0] == "design: ratios are clipped with epsilon_low on both sides"
