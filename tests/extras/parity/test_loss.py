"""parity, for other people's tests: TRL's recorded numbers find a wrong loss, negatives a picture that is not seen."""

import itertools
import math
import re
import sys
from functools import partial

import pytest
import torch

from minivlmrl.extras.parity.command import main
from minivlmrl.extras.parity.loss import cases, check, compare, distance, judge
from minivlmrl.losses import preference, sft
from minivlmrl.losses.grpo import LossNormalizer, grpo_loss
from tests.helpers.links import ROOT


def chosen(loss, options):
    """Return the options that the loss has as keyword arguments."""
    return {name: options[name] for name in loss.__kwdefaults__.keys() & options.keys()}


def my_loss(batch, options):
    """Compute our loss as a user would write the comparison."""
    if options["kind"] == "sft":
        return sft.sft_loss(**batch, loss_type=options["loss_type"])
    if options["kind"] == "dpo":
        return preference.dpo_loss(**batch, **chosen(preference.dpo_loss, options))[0]
    normalizer = LossNormalizer(len(batch["mask"]), options["tokens"], options["max_completion_length"])
    dual_clip = {"delta": options["delta"]} if "delta" in options else {}
    return grpo_loss(**batch, **chosen(grpo_loss, options), **dual_clip, normalizer=normalizer)[0]


def token_mean(x, mask):
    return x.sum() / mask.sum()


DIVISORS = {
    "dapo": token_mean,
    "grpo": lambda x, mask: (x.sum(1) / mask.sum(1).clamp(min=1)).mean(),
    "dr_grpo": lambda x, mask: (x.sum(1) / 9).mean(),
}


def k3(d):
    return d.exp() - d - 1


def same(x):
    return x


def usual(
    batch, options, average=None, kl=k3, weight=True, change_log=same, change_ratio=same, change_term=same, c=None
):
    """Compute GRPO, DAPO, Dr. GRPO or GSPO for a whole step, as most people write it; `c` is a dual clip."""
    logps, mask, advantages = batch["per_token_logps"], batch["mask"], batch["advantages"][:, None]
    log_ratio = logps - batch["old_per_token_logps"]
    if options["importance_sampling_level"] == "sequence":
        log_ratio = (log_ratio * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
    ratio = change_ratio(change_log(log_ratio).exp())
    clipped = ratio.clamp(1 - options["epsilon_low"], 1 + options["epsilon_high"])
    loss = change_term(-torch.min(ratio * advantages, clipped * advantages))
    if c is not None:
        loss = loss.where(advantages >= 0, loss.minimum(-c * advantages))
    penalty = kl(batch["ref_per_token_logps"] - logps) * (ratio if weight and options["use_bias_correction_kl"] else 1)
    average = average or DIVISORS[options["loss_type"]]
    return average((loss + options["beta"] * penalty) * mask, mask)


DAPO = {"loss_type": "dapo", "importance_sampling_level": "token"}


def test_a_loss_of_ones_own_is_checked_against_recorded_numbers(monkeypatch):
    monkeypatch.setitem(sys.modules, "trl", None)
    assert (
        check(my_loss) == 259
        and check(my_loss, delta=3.0) == 8
        and check(my_loss, kind="dpo") == 35
        and check(my_loss, kind="sft") == 4
    )
    assert check(my_loss, loss_type="dapo") == 50 and check(my_loss, kind="dpo", loss_type="sigmoid") == 5
    assert check(usual, whole_step=True, **DAPO) == 23


@pytest.mark.parametrize("only, says", [
    ({"kind": "ppo"}, r"No recorded case has .*; choose from .*'kind': \['grpo', 'dpo', 'sft'\]"),
    ({"loss_type": "gspo"}, r"No recorded case has .*; choose from .*'loss_type': \['grpo', 'bnpo', 'dr_grpo', "),
    ({"beta": 3}, r"No recorded case has .*; choose from .*'beta': \['0.0', '0.1'\]"),
    ({"colour": 1}, "no recorded case has the option 'colour'; the options are beta, .*whole_step$"),
    ({"epsilon": 1}, "option 'epsilon'; the options are beta, .*; TRL's epsilon is epsilon_low and epsilon_high$"),
])  # fmt: skip
def test_a_check_of_no_case_lists_what_there_is(only, says):
    with pytest.raises(ValueError, match=says):
        check(my_loss, **only)


def test_the_report_of_a_wrong_loss():
    with pytest.raises(AssertionError) as error:
        check(lambda batch, options: 2 * my_loss(batch, options), kind="sft")
    head, *lines, name, effect = str(error.value).splitlines()
    assert (head, len(lines)) == ("4 of 4 cases differ from TRL", 4)
    assert all(re.match(r"sft\d+ \(.*\): value differs by .*, gradient by \d", line) for line in lines)
    assert name == "mistake: all values are 2 times as large" and effect.startswith("  effect: ")


WRONG = {
    "mask of the row before": lambda batch, options: usual(batch | {"mask": batch["mask"].roll(1, 0)}, options),
    "mask of the token before": lambda batch, options: usual(batch | {"mask": batch["mask"].roll(1, 1)}, options),
    "advantage of the next row": lambda batch, options: usual(
        batch | {"advantages": batch["advantages"].roll(1)}, options
    ),
    "mean over padding": partial(usual, average=lambda x, mask: x.mean()),
    "mean of rows": partial(usual, average=lambda x, mask: (x.sum(1) / mask.sum(1)).mean()),
    "longest row as divisor": partial(usual, average=lambda x, mask: x.sum() / mask.sum(1).max() / len(x)),
    "same bound on both sides": lambda batch, options: usual(batch, options | {"epsilon_high": 0.2}),
    "KL without the ratio": partial(usual, weight=False),
    "no KL": lambda batch, options: usual(batch, options | {"beta": 0.0}),
    "no ratio": lambda batch, options: usual(
        batch | {"old_per_token_logps": batch["per_token_logps"].detach()}, options
    ),
}


def test_common_mistakes_differ_in_the_recorded_steps():
    """Each mistake fails, and no two mistakes have the same gradients in all cases."""
    losses, gradients = {"none": usual} | WRONG, {}
    for _, options, batch, *expected in cases(kind="grpo", whole_step=True, tokens=27, **DAPO):
        for name, loss in losses.items():
            gradients.setdefault(name, []).append(compare(loss, options, batch, *expected).gradient)
    for one, other in itertools.combinations(losses, 2):
        assert distance(torch.stack(gradients[one]), torch.stack(gradients[other])) > 1e-4, (one, other)


STABLE = {  # mistakes made for stability, which a batch shows only if the policy is far from the old policy
    "log-ratio clamped to 2": {"change_log": lambda x: x.clamp(-2, 2)},
    "log-ratio of at most 2": {"change_log": lambda x: x.clamp(max=2)},
    "log-ratio of at least -2": {"change_log": lambda x: x.clamp(min=-2)},
    "log-ratio clamped to 10": {"change_log": lambda x: x.clamp(-10, 10)},
    "log-ratio of at most 10": {"change_log": lambda x: x.clamp(max=10)},
    "log-ratio of at least -10": {"change_log": lambda x: x.clamp(min=-10)},
    "log-ratio of at most 20": {"change_log": lambda x: x.clamp(max=20)},
    "ratio of at most 10": {"change_ratio": lambda x: x.clamp(max=10)},
    "ratio of at least 0.1": {"change_ratio": lambda x: x.clamp(min=0.1)},
}


@pytest.mark.parametrize("loss_type", DIVISORS)
@pytest.mark.parametrize("name", STABLE)
def test_clamped_ratios_differ_in_recorded_cases_of_every_loss(name, loss_type):
    only = {"loss_type": loss_type, "importance_sampling_level": "token", "whole_step": True}
    assert check(usual, **only) > 6
    assert judge(partial(usual, **STABLE[name]), seconds=0, **only).differences


@pytest.mark.parametrize("loss_type", preference.DPO_LOSSES)
def test_a_clamped_log_ratio_differs_in_a_recorded_case_of_dpo(loss_type):
    """Only the loss sft has no log-ratio."""

    def clamped(batch, options):
        drift = batch["per_token_logps"] - batch["ref_per_token_logps"]
        return my_loss(batch | {"ref_per_token_logps": batch["per_token_logps"] - drift.clamp(-2, 2)}, options)

    verdict = judge(clamped, kind="dpo", loss_type=loss_type, seconds=0)
    assert len(verdict.differences) == (loss_type != "sft")


def cispo(batch, options):
    """Compute CISPO with two bounds, as in verl."""
    logps, mask, advantages = batch["per_token_logps"], batch["mask"], batch["advantages"][:, None]
    ratio = (logps - batch["old_per_token_logps"]).exp().detach()
    ratio = ratio.clamp(1 - options["epsilon_low"], 1 + options["epsilon_high"])
    return token_mean(-ratio * advantages * logps * mask, mask)


def ipo_of_sums(batch, options):
    margin = ((batch["per_token_logps"] - batch["ref_per_token_logps"]) * batch["mask"]).sum(-1)
    return (margin[:, 0] - margin[:, 1] - 0.5 / options["beta"]).square().mean()


def low_var_kl(d):
    """Compute k3 as verl and EasyR1 do."""
    return k3(d.clamp(-20, 20)).clamp(-10, 10)


def squared_ratio(batch, options):
    """Multiply the policy term by the ratio again."""
    ratio = (batch["per_token_logps"] - batch["old_per_token_logps"]).exp()
    return usual(batch, options, change_term=lambda x: x * ratio)


def only_gradients(batch, options):
    """Return 0 with the right gradient."""
    loss = usual(batch, options)
    return loss - loss.detach()


WHOLE = {"whole_step": True, **DAPO}
GRPO = WHOLE | {"loss_type": "grpo"}
PLAIN = GRPO | {"use_bias_correction_kl": False}
GSPO = GRPO | {"importance_sampling_level": "sequence", "beta": 0.0}
# a loss, the options of its cases, and the findings: their kinds, and what is said of them
NAMED = {
    "dual clip": (
        partial(usual, c=3.0), GRPO, "design: dual clip: with a negative advantage, a ratio counts at most 3"),
    "dual clip of sequences": (partial(usual, c=2.0), GSPO, "design: dual clip: with a negative .* at most 2"),
    "clamped log-ratio": (
        partial(usual, change_log=lambda x: x.clamp(-20, 20)), GRPO | {"beta": 0.0},
        "design: the log of the ratio is clamped to -20 and 20"),
    "clamped KL": (partial(usual, kl=low_var_kl), PLAIN, "design: the KL is clamped to -10 and 10"),
    "clamped log-ratio of the KL": (
        partial(usual, kl=lambda d: k3(d.clamp(-5, 5))), PLAIN,
        "design: the log-ratio in the KL is clamped to -5 and 5"),
    "verl": (partial(usual, kl=low_var_kl, c=3.0), GRPO, "design: dual clip; design: the KL is clamped"),
    "plain KL": (partial(usual, weight=False), GRPO, "design: the KL is not weighted with the ratio"),
    "sum over tokens": (partial(usual, average=lambda x, _: x.sum()), GRPO, "design: .* the sum over all tokens"),
    "fixed length": (
        partial(usual, average=DIVISORS["dr_grpo"]), GRPO, "design: .*(fixed length of 9 for|averaged as in dr_grpo)"),
    "rows": (partial(usual, average=DIVISORS["grpo"]), WHOLE, "design: the loss is averaged as in grpo"),
    "all columns": (WRONG["mean over padding"], WHOLE, "design: the loss is divided by all columns, padding included"),
    "rows without tokens": (WRONG["mean of rows"], WHOLE, "mistake: .* a row without tokens gives NaN"),
    "only rows with tokens": (
        partial(usual, average=lambda x, mask: DIVISORS["grpo"](x, mask) * len(x) / mask.any(1).sum()), GRPO,
        "mistake: the mean of the rows is only over rows with a token"),
    "CISPO with two bounds": (
        cispo, WHOLE | {"loss_type": "cispo", "beta": 0.0},
        r"design: cispo's ratio is clamped to 1 - epsilon_low and 1 \+ epsilon_high"),
    "IPO of sums": (ipo_of_sums, {"kind": "dpo", "loss_type": "ipo"}, "design: .* the sum over its tokens"),
    "constant": (lambda *given: usual(*given) + 0.5, WHOLE, "design: the value has a constant of 0.5 without gradient"),
    "no value": (only_gradients, WHOLE, "design: the values differ, but the gradients are equal in all cases$"),
    "mask": (WRONG["mask of the token before"], WHOLE, "mistake: a mask value .* the previous token in its row$"),
    "half": (lambda *given: my_loss(*given) / 2, {}, "mistake: all values are 0.5 times as large$"),
    "zero": (lambda *given: my_loss(*given) * 0, {}, "mistake: no token is in the loss$"),
    "times rows": (lambda b, o: my_loss(b, o) * len(b["mask"]), {}, "mistake: .* multiplied by the number of rows"),
    "ratio twice": (squared_ratio, GRPO | {"beta": 0.0}, "mistake: the policy .* by the ratio a second time"),
    "k3 swapped": (partial(usual, kl=lambda d: k3(-d)), PLAIN, "mistake: policy and reference are swapped in the KL"),
    "k1 with a wrong sign": (
        partial(usual, kl=same), PLAIN | {"beta": 0.1}, "mistake: the KL estimator is k1 with the wrong sign"),
    "unknown": (partial(usual, average=lambda x, _: x.sin().sum()), WHOLE | {"beta": 0.0}, ""),
}  # fmt: skip


QUICK = ("dual clip", "clamped KL", "plain KL", "constant", "half", "zero", "mask")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.slow) for n in NAMED])
def test_a_finding_is_a_mistake_or_a_design(name):
    loss, only, says = NAMED[name]
    verdict = judge(loss, seconds=math.inf, **only)
    found = sorted(line for line in verdict.names if line.startswith(("mistake", "design")))
    expected = sorted(filter(None, says.split("; ")))
    assert len(found) == len(expected) == len(verdict.kinds), str(verdict)
    assert all(re.search(text, line) for text, line in zip(expected, found, strict=True)), str(verdict)


def test_the_page_shows_what_the_command_prints(tmp_path, monkeypatch, capsys):
    page = (ROOT / "docs" / "numerical_parity.md").read_text()
    code, commands, printed = re.findall(r"```(?:python|bash|text)\n([^`]*)```", page)[:3]
    (tmp_path / "my_loss.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    words = commands.splitlines()[-1].removeprefix("python -m minivlmrl parity ").split()
    assert main([*words, "--seconds=inf"]) == 1
    assert capsys.readouterr().out == printed
    estimates = [f"{math.exp(-d) + d - 1:.3g}" for d in (1, 2, 3)] + [f"{math.exp(d) - d - 1:.3g}" for d in (1, 2, 3)]
    assert estimates == ["0.368", "1.14", "2.05", "0.718", "4.39", "16.1"]


def test_the_recorded_micro_batches_are_parts_of_a_step():
    """The two micro-batches' losses sum to the step's loss, because both use the step's divisor."""
    recorded = [(batch, value) for _, _, batch, value, _ in cases(kind="grpo", tokens=27, **DAPO)]
    recorded = recorded[:18]
    for (step, total), (first, one), (second, other) in zip(recorded[::3], recorded[1::3], recorded[2::3], strict=True):
        assert distance(one + other, total) < 1e-12
        assert torch.equal(torch.cat([first["mask"], second["mask"]]), step["mask"]) and step["mask"].sum() == 27
        lengths = step["mask"].sum(1).tolist()
        assert len({*lengths}) == len(lengths) and max(lengths) < step["mask"].shape[1] and step["advantages"].all()


def test_what_trl_says_of_ones_own_tensors(trl):
    """The installed TRL returns the recorded values and gradients."""
    from tests.parity.trl_oracle import what_trl_says

    for only in ({"kind": "grpo", "loss_type": "cispo", "beta": 0.1}, {"kind": "dpo", "beta": 0.3}, {"kind": "sft"}):
        *_, (_, options, batch, value, gradient) = cases(**only)
        says = what_trl_says(batch, options)
        assert distance(says["loss"], value) < 1e-12 and distance(says["gradient"], gradient) < 1e-12
