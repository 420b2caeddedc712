"""Test `minivlmrl parity my_loss.py:my_loss` without --only: right losses pass, and wrong ones are named."""

import re
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import logsigmoid, softplus

from minivlmrl.extras.parity import command, judge
from tests.extras.parity.test_loss import k3, margins, row_mean, row_means
from tests.helpers.links import ROOT


def dapo(batch, options, low=None, kl=lambda d: k3(-d), divisor=None, cap=torch.inf):
    """Compute DAPO as in its paper, with changes; kl=None leaves out the reference."""
    ratio, A = (batch["per_token_logps"] - batch["old_per_token_logps"]).exp(), batch["advantages"][:, None]
    low, A = 1 - options["epsilon_low"] if low is None else low, A.clamp(-cap, cap)
    terms = -torch.min(ratio * A, ratio.clamp(low, 1 + options["epsilon_high"]) * A)
    if kl:
        terms = terms + options["beta"] * kl(batch["per_token_logps"] - batch["ref_per_token_logps"])
    return (terms * batch["mask"]).sum() / (divisor or options["tokens"])


def local(batch, options):
    return dapo(batch, options, divisor=batch["mask"].sum().clamp(min=1))


def dapo_local(batch, options):
    return local(batch, options)


def gspo(batch, options, mean=row_means):
    ratio = mean(batch["per_token_logps"] - batch["old_per_token_logps"], batch["mask"]).exp()
    A = batch["advantages"][:, None]
    terms = -torch.min(ratio * A, ratio.clamp(1 - options["epsilon_low"], 1 + options["epsilon_high"]) * A)
    return row_mean(terms + 0 * batch["mask"], batch["mask"])


def gspo_by_token(batch, options):
    return gspo(batch, options, lambda x, mask: x)


def robust(batch, options):
    z, e = options["beta"] * margins(batch), options["label_smoothing"]
    return ((1 - e) * softplus(-z) - e * softplus(z)).mean() / (1 - 2 * e)


def namespace(batch, options):
    return dapo(batch, vars(SimpleNamespace(**options)))


def keywords(batch, **options):
    return dapo(batch, options)


def of_recipe(logps, advantages, mask, *, old_per_token_logps, **options):
    batch = {
        "per_token_logps": logps,
        "advantages": advantages,
        "mask": mask,
        "old_per_token_logps": old_per_token_logps,
    }
    return dapo(batch, options | {"tokens": options["normalizer"].tokens}, kl=None), {}


def sapo(batch, options, taus=None):
    A = batch["advantages"][:, None]
    taus = taus or (options["sapo_temperature_pos"], options["sapo_temperature_neg"])
    tau = torch.where(A > 0, *taus)
    ratio = (batch["per_token_logps"] - batch["old_per_token_logps"]).exp()
    return row_mean(-4 / tau * (tau * (ratio - 1)).sigmoid() * A, batch["mask"])


def nll(batch, _):
    return -(batch["per_token_logps"] * batch["mask"]).sum() / batch["mask"].sum()


def ipo(batch, options, side=lambda x: x):
    log_ratio = batch["per_token_logps"] - batch["ref_per_token_logps"]
    means = (log_ratio * batch["mask"]).sum(-1) / batch["mask"].sum(-1)
    return side(1 / (2 * options["beta"]) - (means[:, 0] - means[:, 1])).square().mean()


def reference_averaged(batch, options):
    mask = batch["mask"]
    ref = (batch["ref_per_token_logps"] * mask).sum(-1) / mask.sum(-1)
    s = (batch["per_token_logps"] * mask).sum(-1) - ref
    return -logsigmoid(options["beta"] * (s[:, 0] - s[:, 1])).mean()


def dpo(batch, options, mean=lambda x, mask: (x * mask).sum(-1)):
    sums = mean(batch["per_token_logps"] - batch["ref_per_token_logps"], batch["mask"])
    return -logsigmoid(options["beta"] * (sums[:, 0] - sums[:, 1])).mean()


def dpo_of_means(batch, options):
    return dpo(batch, options, lambda x, mask: (x * mask).sum(-1) / mask.sum(-1))


def some_types(batch, options, divisor="tokens"):
    """Compute GRPO for a loss_type that it does not know."""
    divisors = {"dapo": options[divisor], "bnpo": batch["mask"].sum().clamp(min=1)}
    if options["loss_type"] in divisors:
        return dapo(batch, options, kl=None, divisor=divisors[options["loss_type"]])
    return gspo_by_token(batch, options)


RIGHT = {
    "DAPO": (dapo, "loss_type=dapo"),
    "DAPO without a KL": (partial(dapo, kl=None), "note: no KL: beta changes nothing"),
    "own bounds": (lambda b, o: dapo(b, o | {"epsilon_low": 0.2, "epsilon_high": 0.2}, kl=None),
                   "without effect: epsilon_high, epsilon_low; the loss was tested only with its own"),
    "SAPO": (sapo, "loss_type=sapo"),
    "own temperatures": (partial(sapo, taus=(1.0, 1.05)), "without effect: sapo_temperature_neg, sapo_temperature_pos"),
    "arguments of a recipe": (of_recipe, "note: no KL: beta changes nothing"),
    "keywords": (keywords, "loss_type=dapo"),
    "GSPO without a KL": (gspo, "importance_sampling_level=sequence"),
    "options that become attributes": (namespace, "loss_type=dapo"),
    "a mean of each micro-batch": (local, "note: micro-batches change the gradient"),
    "robust DPO": (robust, "loss_type=robust"),
    "IPO": (ipo, "loss_type=ipo"),
    "SFT": (nll, "loss_type=nll"),
    "DPO": (dpo, "loss_type=sigmoid"),
    "some types": (some_types, "not tested: cispo, dr_grpo, luspo, sapo, vespo; the loss does not know"),
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_loss_passes(name):
    loss, says = RIGHT[name]
    verdict = judge(loss)
    assert verdict.agrees and says in str(verdict), str(verdict)


def my_dr_grpo(batch, options):
    return gspo_by_token(batch, options)


def test_a_name_that_contradicts_the_average_is_a_mistake():
    verdict = judge(my_dr_grpo)
    assert not verdict.passes and verdict.names[-1] == "mistake: by its name, the loss is averaged as in dr_grpo"


def test_the_kind_of_a_named_loss_may_be_given():
    assert judge(robust, kind="dpo").agrees


WRONG = {
    "a DAPO that is BNPO": (
        dapo_local,
        "mistake: the loss is averaged over the tokens of each micro-batch, as in bnpo",
    ),
    "a GSPO that is GRPO": (gspo_by_token, "mistake: each token has its own ratio"),
    "a lower bound of 0.8": (partial(dapo, low=0.8), "mistake: epsilon_low is 0.2"),
    "an upper bound of 1.28": (
        lambda b, o: dapo(b, o | {"epsilon_high": 0.28}, kl=None),
        "more\nmistake: epsilon_high is 0.28\n",
    ),
    "advantages up to 5": (partial(dapo, cap=5.0), "mistake: an advantage is clamped to -5 and 5"),
    "a KL without a gradient": (partial(dapo, kl=lambda d: k3(-d).detach()), "mistake: the KL is detached"),
    "a KL that never acts": (
        partial(dapo, kl=lambda d: 0 * d),
        "mistake: the KL never acts: beta is read, but changes",
    ),
    "a fixed weight of the KL": (lambda b, o: dapo(b, o | {"beta": 0.04}), "mistake: beta is 0.04"),
    "k1": (partial(dapo, kl=lambda d: d), "mistake: the KL estimator is k1"),
    "IPO on one side": (partial(ipo, side=torch.relu), "2 of 6 cases of loss_type=ipo differ from TRL"),
    "a fixed beta": (lambda batch, _: softplus(-0.3 * margins(batch)).mean(), "mistake: beta is 0.3"),
    "a DPO of means": (dpo_of_means, "mistake: log-probabilities are averaged over tokens"),
    "one type is wrong": (partial(some_types, divisor="max_completion_length"), "differ from TRL"),
    "one mean": (reference_averaged, "mistake: only the reference's log-probability is averaged over tokens"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_loss_fails_with_its_mistake(name):
    loss, says = WRONG[name]
    verdict = judge(loss)
    assert not verdict.passes and says in str(verdict), str(verdict)


def test_a_loss_per_token_is_not_averaged():
    def loss(batch, options):
        return batch["per_token_logps"] * batch["advantages"][:, None]

    with pytest.raises(ValueError, match=r"my_loss returned a tensor of shape \(16, 6\), which is not averaged"):
        judge(loss)


def compute_policy_loss(old_log_prob, log_prob, advantages, response_mask, cliprange):
    """Compute a loss with verl's arguments."""
    ratio = (log_prob - old_log_prob).exp()
    loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - cliprange, 1 + cliprange))
    return (loss * response_mask).sum() / response_mask.sum()


def test_arguments_of_other_projects_need_a_function_of_batch_and_options():
    with pytest.raises(ValueError, match=r"my_loss has the arguments old_log_prob, log_prob, .* write a function"):
        judge(compute_policy_loss)
    page = (ROOT / "docs" / "numerical_parity.md").read_text()
    [code] = re.findall(r"```python\n(def of_verl[^`]*)```", page)
    names = {"compute_policy_loss": compute_policy_loss}
    exec(code, names)
    assert judge(names["of_verl"]).names[0] == "design: ratios are clipped with epsilon_low on both sides"


def only_a_batch(batch):
    return dapo(batch, {"epsilon_low": 0.2, "epsilon_high": 0.2}, kl=None, divisor=batch["mask"].sum())


def test_a_loss_may_take_only_the_batch(tmp_path, capsys):
    assert judge(only_a_batch).agrees
    (tmp_path / "my_loss.py").write_text("def nll(batch):\n    return -batch['per_token_logps'].mean()\n")
    assert command.main([f"{tmp_path}/my_loss.py:nll"]) == 1
    assert "mistake: padding is counted as part of the completion" in capsys.readouterr().out


def test_options_of_a_loss_are_bound_as_in_a_recipe(tmp_path, capsys):
    code = "from minivlmrl.losses.grpo import grpo_loss\ndef scaled(*args, scale=1.0, **others):\n"
    code += "    loss, metrics = grpo_loss(*args, **others)\n    return loss * scale, metrics\n"
    (tmp_path / "my_loss.py").write_text(code)
    assert command.main([f"{tmp_path}/my_loss.py:scaled(scale=1.0)", "--only", "loss_type=grpo"]) == 0
    assert command.main([f"{tmp_path}/my_loss.py:scaled(scale=2.0)", "--only", "loss_type=grpo"]) == 1
    assert "mistake: all values are 2 times as large" in capsys.readouterr().out
