"""Test the search for the causes of a difference, on small recorded steps without a model."""

import json
import re

import pytest
import torch
from safetensors.torch import save_file

from minivlmrl.extras.parity import assertions, command, loss_search, scales
from minivlmrl.extras.parity import loss as parity
from minivlmrl.extras.parity import names as table
from minivlmrl.extras.parity import search as module
from minivlmrl.extras.parity.audit import audit, report
from minivlmrl.extras.parity.search import TOLERANCE, computed, error, find_bugs
from minivlmrl.extras.parity.step import Dump, read, write
from tests.extras.parity import bugs
from tests.helpers.links import ROOT

PAGE = (ROOT / "docs" / "numerical_parity.md").read_text()

# the rows were shuffled before they were split into micro-batches
GROUP, ROW = torch.tensor([0, 0, 0, 1, 1, 1]), torch.tensor([3, 0, 4, 1, 5, 2])


def step(lengths=(5, 3, 4, 2, 5, 1), changes=None, gradient=lambda x: x, factor=1.0):
    """Return a GRPO step: six completions in two groups and two micro-batches.

    For each name in `changes`, the loss uses changes[name](tensor), but the recorded tensor stays. `gradient` changes
    the recorded gradient, and `factor` multiplies the recorded loss and gradient.
    """
    g = torch.Generator().manual_seed(0)
    old = -torch.rand(6, 5, generator=g, dtype=torch.float64)
    mask = (torch.arange(5) < torch.tensor(lengths)[:, None]).double()
    logps = (old + 0.3 * torch.randn(6, 5, generator=g, dtype=torch.float64)).requires_grad_()
    advantages = torch.randn(6, generator=g, dtype=torch.float64)
    used = {"advantages": advantages, "old": old, "mask": mask, "logps": logps}
    used |= {name: change(used[name]) for name, change in (changes or {}).items()}
    a, ratio = used["advantages"][:, None], (used["logps"] - used["old"]).exp()
    terms = -torch.min(ratio * a, ratio.clamp(0.8, 1.2) * a) * used["mask"]
    loss = factor * terms.view(2, 3, 5).sum((1, 2)) / used["mask"].sum()
    slope = gradient(torch.autograd.grad(loss.sum(), logps)[0])
    tensors = {"per_token_logps": logps.detach(), "old_per_token_logps": old, "completion_mask": mask}
    tensors |= {"prompt_mask": torch.zeros(6, 5), "input_ids": torch.ones(6, 5).long()}
    tensors["advantages"] = advantages
    tensors |= {"loss": loss.detach(), "logps_gradient": slope, "micro_batch": torch.arange(6) // 3}
    # None, because the model reads only text
    about = {"kind": "grpo", "loss": {"loss_type": "dapo"}, "image_token_id": None}
    return Dump(about, tensors | {"group": GROUP, "row": ROW})


def explained(name, d):
    return find_bugs(name, d).explained


@pytest.mark.parametrize("options, expected", [
    ({"top_k": 5, "top_p": 1.0, "min_p": None}, "top_k = 5, but"),
    ({"top_p": 0.9, "min_p": 0.1}, "top_p = 0.9 and min_p = 0.1, but"),
    ({"top_k": 0, "top_p": 1, "min_p": 0}, ""), ({"top_k": -1, "top_p": None}, ""), ({}, ""),
])  # fmt: skip
def test_a_step_with_filters_does_not_agree_without_a_note(options, expected, tmp_path, capsys):
    d = step()
    write(tmp_path, d.about | options, dict(d))
    assert command.main([str(tmp_path)]) == 0
    assert (f"note: tokens were sampled with {expected}" if expected else "loss") in (out := capsys.readouterr().out)
    assert ("note: " in out) == bool(expected)
    assert command.main([str(tmp_path), "--json"]) == 0
    assert [expected in note for note in json.loads(capsys.readouterr().out)["notes"]] == [True] * bool(expected)


@pytest.mark.parametrize("name, change, expected", [
    # in rollout order, the two groups are rows 1, 3, 5 and rows 0, 2, 4
    ("advantages", lambda x: x[[2, 3, 4, 5, 0, 1]], "a row has the advantage of the next row in its group"),
    ("advantages", lambda x: x[[3, 4, 5, 0, 1, 2]], "a row has the advantage of the next micro-batch"),
    ("advantages", lambda x: x[ROW.argsort()], "a row has the advantage of the completion that had its place before"),
    ("old", lambda x: x[[2, 0, 1, 5, 3, 4]],
     "an old log-probability is taken from the previous row in its micro-batch"),
    ("logps", lambda x: x.roll(1, 1), "a log-probability is taken from the previous token in its row"),
])  # fmt: skip
def test_a_value_from_another_row_or_token_is_named(name, change, expected):
    [found, *_] = explained("loss", step(changes={name: change}))
    assert found.says.startswith(expected) and found.error < 1e-12


def test_one_trained_padding_token_has_a_name():
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 0]])
    tensors = {"input_ids": mask, "attention_mask": mask, "prompt_mask": mask * torch.tensor([1, 0, 0, 0])}
    counted = torch.tensor([[0, 1, 1, 0], [0, 1, 1, 0]])
    d = Dump({"kind": "sft"}, tensors | {"completion_mask": counted, "per_token_logps": -mask.double()})
    [found] = [finding for finding in audit(d) if not finding.ok]
    assert found.stage == "mask" and found.explained[0].says == "some padding tokens are counted"


def test_the_report_says_when_too_few_numbers_differ():
    for rows, is_said in (([1.0, 1.0, 0.3, 1.0, 1.0, 1.0], True), ([1.0, 1.0, 0.3, 1.0, 0.7, 1.0], False)):
        d = step(gradient=lambda x, rows=rows: x * torch.tensor(rows)[:, None])
        text = "only one row differs, too few to tell causes apart; record a larger step"
        shown = report(audit(d, seconds=0), d)
        assert (text in shown) == is_said and "not in this step: advantages, rows, tokens, " in shown


def test_a_search_ends_with_the_causes_that_it_has_found(monkeypatch):
    """The clock advances by one second with each reading, so the speed of the machine does not matter."""
    clock = iter(range(10**9))
    monkeypatch.setattr("time.thread_time", lambda: next(clock))
    early, later = (audit(step(factor=0.5), seconds)[0] for seconds in (0, 200))
    name = "all values are divided by the number of micro-batches"
    assert not early.explained and [cause.says for cause in later.explained] == [name]
    doubts = ["the CPU seconds were used before all causes were tried; a larger --seconds tries more"]
    assert early.doubts() == later.doubts() == doubts


def test_it_is_said_if_many_causes_give_the_same_numbers(monkeypatch):
    d = rollout(lambda r: standard(r).abs())
    causes = [module.Bug("c", {"advantages": d["advantages"]}, module.RATE)] * 5
    monkeypatch.setattr(module, "possible_bugs", lambda *_: causes)
    assert audit(d)[0].doubts() == ["5 causes give the same numbers, so this step cannot tell them apart"]


def test_a_gradient_that_is_nan_is_located():
    d = step(gradient=lambda x: x.where(x != x[2, 1], torch.nan))
    shown = report(audit(d, seconds=0), d)
    assert "logps_gradient: 1 of 30" in shown
    assert "logps_gradient at [2, 1]: nan instead of" in shown


def test_sources_of_causes_exist_and_the_page_counts_the_causes():
    assert f" {sum(map(len, table.BUGS.values()))} causes" in PAGE
    assert f"All {len(bugs.TRL_BUGS | bugs.UNSEEN_BUGS)} bugs" in PAGE
    sources = " ".join(target.source for target in table.TARGETS.values())
    found = set(re.findall(r"(?<!docs/)\b([\w/]+\.py)(?:: (\w+))?", sources))
    assert len(found) > 8
    assert all(name in (ROOT / "minivlmrl" / file).read_text() for file, name in found)


@pytest.mark.parametrize("seed", range(4))
def test_a_mask_is_not_explained_by_itself(seed):
    d = step()
    d.about["stop_token_ids"] = [7]
    own = torch.rand(6, 5, generator=torch.Generator().manual_seed(seed)) < 0.5
    own[:, :2] = True
    d["input_ids"] = torch.arange(5).expand(6, 5) + 6  # the second token is the stop token
    d |= {"completion_mask": own.double(), "attention_mask": torch.ones(6, 5).long()}
    assert not [cause.says for cause in explained("mask", d)]


def test_padding_after_a_truncated_completion_is_no_end_token():
    """Rows are padded with the id of a stop token, and the second row was truncated after 3 tokens."""
    mask = torch.tensor([[1, 1, 0, 0, 0], [1, 1, 1, 0, 0]])
    ids = torch.tensor([[5, 7, 7, 7, 7], [5, 6, 5, 7, 7]])
    tensors = {"input_ids": ids, "attention_mask": mask, "prompt_mask": 0 * mask, "per_token_logps": -mask.double()}
    about = {"kind": "grpo", "stop_token_ids": [7], "pad_token_id": 7, "max_completion_length": 3}
    for is_masked in (False, True):
        counted = mask * torch.tensor([[1], [0]]) if is_masked else mask
        d = Dump(about | {"mask_truncated_completions": is_masked}, tensors | {"completion_mask": counted})
        assert d["ended"].tolist() == [True, False]
        assert [finding.ok for finding in audit(d) if finding.stage == "mask"] == [True]


@pytest.mark.parametrize("tensors, why", [
    ({}, "each stage lacks a tensor or a field"),
    ({"completion_mask": torch.zeros(1, 1), "logps_gradient": torch.zeros(1, 1)}, "no token is in the loss"),
])  # fmt: skip
def test_a_step_without_any_comparison_is_an_error(tensors, why, tmp_path):
    write(tmp_path, {"kind": "sft"}, ONE_ROW | tensors)
    for call in (lambda: command.main([str(tmp_path)]), lambda: assertions.assert_step(tmp_path)):
        with pytest.raises(ValueError, match=f"nothing was compared, because {why}"):
            call()


@pytest.mark.parametrize("right", [True, False])
def test_json_output_and_assert_step(right, tmp_path, capsys, monkeypatch):
    d = step(gradient=lambda x: x if right else x.sin())
    write(tmp_path, d.about, dict(d))
    assert command.main([str(tmp_path), "--json", "--seconds=0"]) == int(not right)
    shown = json.loads(capsys.readouterr().out)
    [loss] = shown["stages"]
    assert (shown["schema"], shown["agrees"]) == (1, right)
    assert (loss["stage"], loss["agrees"]) == ("loss", right)
    assert {"mask", "update"} < {*shown["not_in_this_step"]}
    assert (loss["error"] < TOLERANCE) == right
    report = (ROOT / "docs" / "library.md").read_text()
    assert all(f"`{field}`" in report for field in (*shown, *loss))
    if right:
        return assertions.assert_step(tmp_path)
    monkeypatch.setattr("minivlmrl.extras.parity.assertions.SECONDS", 0)
    assert not loss["explained"] and loss["where"][0].startswith("logps_gradient")
    with pytest.raises(AssertionError, match=f"(?s)^{tmp_path}\nloss +DIFFERS .*logps_gradient at"):
        assertions.assert_step(tmp_path)


ONE = torch.ones(1, 1)
ONE_ROW = {"input_ids": ONE.long(), "completion_mask": ONE, "per_token_logps": -ONE}


@pytest.mark.parametrize("tensors, about, expected", [
    ({"completion_mask": None}, {}, "completion_mask is missing. A step needs the tensors input_ids, "),
    ({}, {"kind": "kto"}, "kind is 'kto'. A step .* grpo, dpo or sft. Steps of KTO, .* not supported"),
    ({"advantages": torch.ones(2)}, {}, r"advantages has shape \(2,\), which does not match that of input_ids"),
    (None, {}, "No such file"),
    ({}, {"temperature": 0}, "step.json: temperature is 0.0, but it must be in \\(0, inf\\)"),
    ({}, {"loss": {"beta": 1.0}}, "step.json: a name in loss is 'beta', but it must be one of loss_type"),
    ({}, {"optimizer": [1]}, r"step.json: optimizer is \[1\], but it must be an object"),
    ({"row": -torch.ones(1).long(), "group": torch.zeros(1).long()}, {}, "the tensor row has a negative number"),
    ({}, {"model": "../.."}, "step.json: model is '../..', but it must be a folder inside the step, such as model, or"),
    ({}, {"ref_model": "/x"}, "step.json: ref_model is '/x', but it must be a folder inside the step"),
])  # fmt: skip
def test_an_invalid_step_is_an_error(tensors, about, expected, tmp_path):
    write(tmp_path, {"kind": "sft"}, ONE_ROW)
    if tensors is None:
        (tmp_path / "step.safetensors").unlink()
    else:
        kept = {name: x for name, x in (ONE_ROW | tensors).items() if x is not None}
        save_file(kept, tmp_path / "step.safetensors")
        (tmp_path / "step.json").write_text(json.dumps({"kind": "sft"} | about))
    with pytest.raises(ValueError, match=f"{tmp_path} is not a valid step, .*: .*{expected}"):
        read(tmp_path)


@pytest.mark.parametrize("tensors, about, expected", [
    ({}, {"schedule": {"step": 1}, "optimizer": {"learning_rate": 1.0}}, r"'schedule' .* \(KeyError: 'type'\)"),
    ({"row": torch.ones(1).long(), "rollout_advantages": torch.ones(1), "advantages": torch.ones(1)}, {},
     r"'rows' .* \(IndexError: index 1 is out of bounds"),
])  # fmt: skip
def test_a_field_or_tensor_with_a_wrong_type_is_an_error(tensors, about, expected, tmp_path):
    write(tmp_path, {"kind": "sft"} | about, ONE_ROW | tensors)
    with pytest.raises(ValueError, match=f"the stage {expected}.* with docs/library.md"):
        command.main([str(tmp_path)])


def with_schedule(rate, rates=(), **schedule):
    schedule = {"learning_rate": 1.0, "rates": [*rates], **schedule}
    return Dump({"kind": "sft", "schedule": schedule, "optimizer": {"learning_rate": rate}}, ONE_ROW)


@pytest.mark.parametrize("kind, step, warmup, rate", [
    ("linear", 0, 2, 0.0), ("linear", 1, 2, 0.5), ("linear", 4, 2, 0.75), ("cosine", 6, 2, 0.5),
    ("constant", 9, 2, 1.0), ("linear", 1, 0, 0.9),
])  # fmt: skip
def test_learning_rates_of_a_schedule(kind, step, warmup, rate):
    schedule = {"type": kind, "step": step, "warmup_steps": warmup, "max_steps": 10}
    assert audit(with_schedule(rate, **schedule))[0].ok
    assert not audit(with_schedule(rate + 1e-4, **schedule))[0].ok


@pytest.mark.parametrize("rates, rate, name", [
    ([], 0.5, None), ([1.0, 0.75, 0.5], 0.5, None), ([1.0, 1.0, 0.75], 0.5, "the learning rate is one step behind"),
])  # fmt: skip
def test_a_cause_of_a_learning_rate_must_fit_all_steps(rates, rate, name):
    d = with_schedule(rate, rates, type="linear", max_steps=4, step=3)
    assert [cause.says for cause in explained("schedule", d)] == [name] * bool(name)


def standard(r):
    return (r - r.mean(1, keepdim=True)) / (r.std(1, keepdim=True) + 1e-4)


def rollout(advantages, **about):
    """Return a rollout of two groups of four completions; `advantages` is a function of rewards (2, 4)."""
    rewards = torch.rand(2, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    both = torch.stack([rewards.flatten(), 0 * rewards.flatten()], 1)
    tensors = {name: x.expand(8, 1) for name, x in ONE_ROW.items()} | {"rewards": both}
    tensors |= {"group": torch.arange(8) // 4, "advantages": advantages(rewards).flatten()}
    return Dump({"kind": "grpo", **about}, tensors)


def test_a_mistake_is_searched_only_in_its_own_stage():
    """A wrong baseline is named for the advantages and not for the loss, although both use a mean."""
    d = step(factor=0.5)
    rewards = torch.tensor([[0.1, 0.9, 0.2], [0.7, 0.3, 0.4]]).double()
    above = rewards - rewards[:, :1]
    d["rewards"] = rewards.flatten()
    d["rollout_advantages"] = (above / (rewards.std(1, keepdim=True) + 1e-4)).flatten()
    explained = {finding.stage: finding.explained for finding in audit(d)}
    assert explained["advantages"][0].says == "the baseline is the mean of the group's first half"
    assert explained["loss"] and "the baseline" not in str(explained["loss"])


def with_one_bounded_reward():
    """Return a rollout in which one reward is lower, as if rewards had a bound."""
    rewards, d = torch.tensor([[0.1, 0.9, 0.2, 0.3], [0.05, 0.4, 0.15, 0.35]]).double(), rollout(standard)
    return d | {"rewards": rewards.flatten(), "advantages": standard(rewards.clamp(max=0.55)).flatten()}


def with_one_smaller_row():
    """Return a step in which the gradient of one row is smaller, as if something had a bound."""
    rows = torch.tensor([1.0, 1.0, 0.37, 1.0, 1.0, 1.0])[:, None]
    return {name: x for name, x in step(gradient=lambda x: x * rows).items() if name != "loss"}


@pytest.mark.parametrize("d", [
    rollout(lambda r: r.argsort(1).argsort(1) / 1.5 - 1),
    rollout(lambda r: (r - (r.mean(1, keepdim=True) + r.mean()) / 2) / r.std(1, keepdim=True)),
    Dump(rollout(standard).about, with_one_bounded_reward()), Dump(step().about, with_one_smaller_row()),
], ids=["ranks", "half of another baseline", "a bound in one group", "a bound in one row"])  # fmt: skip
@pytest.mark.slow
def test_numbers_that_no_cause_computes_are_not_explained(d):
    """Fitted factors, divisions by zero, and bounds that one row shows must not explain arbitrary numbers."""
    finding = audit(d)[0]
    assert not finding.ok and not finding.explained


@pytest.mark.parametrize("factor, expected", [
    (0.5, "all values are divided by the number of micro-batches"),
    (0.7, "all values are 0.7 times as large"),  # a learning rate or a temperature cannot multiply a loss
])  # fmt: skip
def test_a_factor_is_named_by_a_count_that_can_act(factor, expected):
    d = step(factor=factor)
    d.about |= {"num_generations": 9, "temperature": 0.7, "optimizer": {"learning_rate": 1.0}}
    d.about["schedule"] = {"learning_rate": 0.7, "rates": [0.7]}
    assert explained("loss", d)[-1].says == expected
    rates = ["the learning rate of the previous step", "the largest learning rate"]
    found = [name for name, number in scales.known_numbers(d, "update").items() if number == 0.7]
    assert found == [f"{rate} over the current one" for rate in rates]
    assert scales.known_numbers(d, "logps")["the temperature"] == 0.7


@pytest.mark.parametrize("kind", ["grpo", "dpo", "sft"])
def test_recorded_losses_of_trl_agree(kind):
    for _, options, batch, value, gradient in parity.cases(kind=kind):
        assert error(computed("loss", loss_search.as_step(batch, options, value, gradient), {})) < TOLERANCE, options
