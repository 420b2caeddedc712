"""Test GRPO options beyond the paper on a tiny model, which select and weight completions and tokens."""

import math
import re
from types import SimpleNamespace

import pytest
import torch

from minivlmrl.data.processor import Processor
from minivlmrl.data.rows import Completion
from minivlmrl.model.logprobs import per_token_logps
from minivlmrl.monitor.check.effects import options_without_effect
from minivlmrl.monitor.warnings import WarningRules
from minivlmrl.rewards import registry
from minivlmrl.trainers.dynamic_sampling import gather_groups
from minivlmrl.trainers.grpo import soft_overlong_punishment
from tests.helpers.stages import completions_of, letter_rewards, snapshot
from tests.trainers.test_grpo import FOURS, REWARDS

PAIRS = ["--grpo.num_generations=2", "--grpo.scale_rewards=none"]
LIVE = [1.0, 0.0]
DEAD = [0.5, 0.5]


def ids_of(batches):
    return torch.cat([batch.group.completion_ids for batch in batches])


def test_groups_with_equal_rewards_are_sampled_anew(stage, samples, script):
    left = script(DEAD + LIVE + DEAD + DEAD, LIVE + DEAD + LIVE + DEAD, LIVE * 4, [9.0] * 8)
    run = stage("grpo", *PAIRS, "--grpo.max_num_gen_batches=5")
    batches = run.next()
    assert len(samples) == 3 and left == [[9.0] * 8]
    kept = [(0, 1), (1, 0), (1, 2), (2, 0)]  # (rollout, group) in the order of sampling; surplus groups are dropped
    expected = torch.cat([sample.completion.ids for i, group in kept for sample in samples[i].groups[group]])
    assert torch.equal(ids_of(batches), expected)
    assert torch.cat([batch.advantages for batch in batches]).tolist() == [0.5, -0.5] * 4
    line = run.update()
    assert (line["num_gen_batches"], line["frac_reward_zero_std"], line["reward"]) == (3, 0, 0.5)
    assert line["rollout/logp_mismatch"] < 1e-5  # each completion still follows its own prompt


def test_sampling_anew_ends_and_keeps_the_size_of_the_batch(stage, samples, script):
    script(DEAD * 4, DEAD + LIVE + DEAD * 2, DEAD * 4, 9.0)
    run = stage("grpo", *PAIRS, "--grpo.max_num_gen_batches=3")
    batches = run.next()
    assert len(samples) == 3
    kept = [(1, 1), (0, 0), (0, 1), (0, 2)]  # the group whose rewards differ, and then groups in the order of sampling
    expected = [sample.completion for i, group in kept for sample in samples[i].groups[group]]
    assert completions_of(run.step.rollout) == expected
    assert [batch.completion_index.tolist() for batch in batches] == [[0, 1], [4]]
    line = run.update()
    assert (line["num_gen_batches"], line["frac_reward_zero_std"]) == (3, 0.75)


def test_the_extremes_of_rewards_include_the_penalty_of_long_completions(stage, script):
    script(0.0)
    run = stage("grpo", "--grpo.soft_punish_cache=4")
    rules = WarningRules(run.trainer, run.optimizer, {})
    rules.step(run.go()[0], run.step.rollout)
    assert rules.extremes == [-1, 0]


def test_rewards_that_cancel_have_a_signal_with_gdpo(stage, monkeypatch):
    """The sums of rewards are equal, but GDPO normalizes each reward, and ignores a constant reward."""
    values = {"letters": [1.0, 0.0], "format": [0.0, 1.0], "accuracy": [1.0, 1.0]}

    for name, pair in values.items():
        reward = lambda completions, pair=pair, **_: pair * (len(completions) // 2)  # noqa: E731
        monkeypatch.setitem(registry.REWARDS, name, reward)
    rewards = "--rewards={letters: 1, format: 1, accuracy: 1}"
    options = ["--grpo.num_generations=2", rewards, "--grpo.max_num_gen_batches=2"]
    for way, teaching in (("sum_then_normalize", 0), ("normalize_then_sum", 4)):
        run = stage("grpo", *options, f"--grpo.multi_objective_aggregation={way}")
        rollout = run.trainer.sample_and_score(next(run.batches))
        groups = gather_groups(run.trainer, rollout)
        assert sum(group.differs for group in groups) == teaching


def test_a_step_with_only_truncated_completions_changes_nothing(stage, monkeypatch):
    monkeypatch.setattr(Processor, "stop_token_ids", (300,))
    run = stage("grpo", "--grpo.mask_truncated_completions=true", "--grpo.top_entropy_quantile=0.5")
    before = snapshot(run.model)
    [line] = run.go()
    assert line["completions/clipped_ratio"] == 1 and line["completions/max_terminated_length"] == 0  # as in TRL
    assert line["grad_norm"] == line["rollout/logp_mismatch"] == 0
    assert math.isnan(line["entropy"]) and math.isnan(line["rollout/logp_mismatch_rms"])  # no token is trained
    torch.testing.assert_close(snapshot(run.model), before, rtol=0, atol=0)


def test_rloo_by_hand(stage, samples, loss_calls):
    """A reward is reduced by beta times the k1 KL of its completion, and then by the mean of the other completions."""
    # a bound on tokens sorts the groups of a micro-batch by length
    options = "--grpo.micro_batch_size=4", "--grpo.max_tokens_per_micro_batch=1000"
    run = stage("grpo", "--grpo.loss_type=rloo", "--grpo.beta=0.2", *options)
    run.go(2)
    [batch] = run.next()
    with torch.no_grad():
        models = (run.model, run.trainer.reference.model)
        lengths = batch.group.layout.row_lengths
        logps, ref = (per_token_logps(model, batch.group)[0].split(lengths) for model in models)
    kl = torch.stack([(a - b).sum() for a, b in zip(logps, ref, strict=True)])
    order = batch.completion_index
    kl = kl[order.argsort()]
    assert kl.abs().min() > 1e-3 and not torch.equal(order, order.argsort())
    plain = letter_rewards(run.trainer, samples[-1])
    rewards = (plain - 0.2 * kl).view(4, 3)
    others = (rewards.sum(1, keepdim=True) - rewards) / 2
    expected = (rewards - others).flatten().double()
    torch.testing.assert_close(batch.advantages.double(), expected[order], rtol=1e-6, atol=1e-6)
    line = run.update()
    assert loss_calls[-1].beta == 0
    assert line["kl"] == pytest.approx(kl.sum().item() / sum(lengths), rel=1e-6)  # a mean over tokens, as in TRL
    assert line["reward"] == pytest.approx(plain.mean().item())


def test_the_kl_of_rloo_is_a_mean_over_all_steps_of_a_rollout(stage):
    run = stage("grpo", "--grpo.loss_type=rloo", "--grpo.beta=0.2", "--grpo.steps_per_generation=2")
    run.go(2)
    batches, found = [], []
    for _ in range(2):
        batches += run.next()
        found.append(run.update()["kl"])
    kl = sum(((b.old_per_token_logps - b.ref_per_token_logps) * b.loss_mask).sum().item() for b in batches)
    assert found == pytest.approx([kl / sum(b.loss_mask.sum().item() for b in batches)] * 2, rel=1e-6)


@pytest.mark.parametrize("quantile", [1.0, 0.5])
def test_a_drifting_sampler_is_corrected_by_its_own_logps(stage, loss_calls, samples, monkeypatch, quantile):
    """The weight of a trained token is pi / pi_sampler, the ratio of trainer and sampler probabilities."""
    run = stage("grpo", "--grpo.rollout_correction=token_truncate", "--grpo.rollout_correction_bounds=[null, 1.5]",
                "--grpo.micro_batch_size=4", f"--grpo.top_entropy_quantile={quantile}",
                "--grpo.mask_truncated_completions=true", "--rollout.max_logp_mismatch=.inf")  # fmt: skip
    original = run.trainer.sample_and_score

    def drift(rows):
        rollout = original(rows)
        for c in completions_of(rollout):
            c.logps = c.logps + (c.ids % 5 - 2) / 2
        return rollout

    monkeypatch.setattr(run.trainer, "sample_and_score", drift)
    [batch] = run.next()
    with torch.no_grad():
        entropies = batch.group.pad(run.trainer.logps(batch.group)[1])
    kept = entropies >= (batch.entropy_threshold or 0)
    line = run.update()
    [given] = loss_calls
    drifted = torch.cat([c.logps for c in completions_of(samples[0]) if c.stopped])
    real = given.mask.bool()
    assert real.any(1).tolist() == [c.stopped for c in completions_of(samples[0])]
    assert (batch.normalizer.tokens, batch.normalizer.sequences) == (real.sum(), 12)
    ratio = given.token_weights
    difference = given.logps.detach()[real] - drifted
    assert line["rollout/logp_mismatch_rms"] == pytest.approx(difference.square().mean().sqrt().item())
    assert line["rollout/logp_mismatch"] >= difference.abs().max()
    expected = difference.exp().clamp(max=1.5) * kept[real]
    torch.testing.assert_close(ratio[real], expected, rtol=1e-9, atol=1e-9)
    assert (ratio[~real] == 0).all() and kept[real].all() == (quantile == 1)


def test_the_entropy_threshold_is_that_of_the_whole_step(stage):
    run = stage("grpo", "--grpo.top_entropy_quantile=0.3", "--grpo.steps_per_generation=2")
    thresholds = []
    for _ in range(2):
        batches = run.next()
        with torch.no_grad():
            entropies = torch.cat([run.trainer.logps(batch.group)[1] for batch in batches])
        threshold = torch.quantile(entropies, 0.7).item()
        for batch in batches:
            assert batch.entropy_threshold == pytest.approx(threshold, rel=1e-6)
            assert batch.num_entropy_tokens == (entropies > threshold - 1e-6).sum() < len(entropies) / 2
        thresholds.append(threshold)
    assert thresholds[0] != thresholds[1]


@pytest.mark.parametrize("quantile", [1.0, 0.5])
def test_the_entropy_bonus_is_a_mean_over_the_trained_tokens_of_the_step(stage, quantile):
    """Each of two micro-batches divides by the step's tokens, or by those with high entropy, as in TRL."""
    options = [f"--grpo.top_entropy_quantile={quantile}"]
    runs = [stage("grpo", *options, f"--grpo.entropy_coef={coefficient}") for coefficient in (0.5, 0.0)]
    batches = runs[0].next()
    with torch.no_grad():
        entropies = torch.cat([runs[0].trainer.logps(batch.group)[1] for batch in batches])
    kept = entropies[entropies >= (batches[0].entropy_threshold or 0)]
    assert len(batches) == 2 and (len(kept) < len(entropies)) == (quantile < 1)
    runs[1].next()
    with_bonus, without = (run.update()["loss"] for run in runs)
    assert without - with_bonus == pytest.approx(0.5 * kept.mean().item(), rel=1e-6)


@pytest.mark.parametrize("option", [
    "beta=0.1", "entropy_coef=0.01", "loss_type=bnpo", "top_entropy_quantile=0.5", "loss_type=rloo --grpo.beta=0.1",
])  # fmt: skip
def test_options_that_need_all_completions_keep_them(stage, script, option):
    script(REWARDS)
    [batch] = stage("grpo", *FOURS, *f"--grpo.{option}".split()).next()
    assert batch.completion_index.tolist() == [*range(16)]


def test_a_cache_longer_than_the_limit_punishes_from_the_first_token():
    assert [soft_overlong_punishment(n, 4, 8) for n in range(5)] == [-0.5, -0.625, -0.75, -0.875, -1]


def test_the_penalty_of_a_trajectory_is_that_of_its_longest_turn(stage):
    """sampling.max_new_tokens limits a turn, so three short turns are not too long."""
    run = stage("grpo", "--grpo.soft_punish_cache=4")
    limit = run.trainer.config.sampling.max_new_tokens
    short = Completion(torch.zeros(limit - 4, dtype=torch.long))
    long = Completion(torch.zeros(limit, dtype=torch.long))
    both = [Completion(torch.zeros(3 * limit, dtype=torch.long), turns=turns) for turns in ([short] * 3, [short, long])]
    rewards = torch.zeros(len(run.trainer.config.rewards))
    samples = [SimpleNamespace(completion=completion, rewards=rewards) for completion in both]
    assert run.trainer.total_rewards(samples).tolist() == [0, -1]


FUNCTIONS = """
import torch
from minivlmrl.losses.grpo import LossNormalizer, grpo_loss

def same(logps, advantages, mask, **options):
    loss, metrics = grpo_loss(logps, advantages, mask, **options | {"loss_type": "dapo"})
    return loss, metrics | {"seen": torch.ones(())}

def options(logps, advantages, mask, *, normalizer, num_generations, scale=1.0, learning_rate=5.0, **others):
    found = {"rows": len(mask), "scale": scale, "rate": learning_rate, "num_generations": num_generations}
    found |= {name: others[name] for name in ("epsilon_low", "epsilon_high", "beta", "use_bias_correction_kl")}
    metrics = {name: torch.tensor(float(value)) for name, value in found.items()}
    return sum(metrics.values()) * (logps * mask).sum() / normalizer.tokens, metrics

def for_parity(batch, options):
    normalizer = LossNormalizer(len(batch["mask"]), options["tokens"], options["max_completion_length"])
    names = {"epsilon_low", "epsilon_high", "beta", "use_bias_correction_kl", "importance_sampling_level"}
    chosen = {name: options[name] for name in names}
    return grpo_loss(**batch, **chosen, normalizer=normalizer, loss_type="dapo")[0]

def reads_reference(batch, options):
    return (batch["per_token_logps"] - batch["ref_per_token_logps"]).sum()

def labeled(logps, advantages, mask, labels, **others):
    return (logps * labels).sum(), {}

def clipped(logps, advantages, mask, epsilon_high, normalizer):
    return -(logps * mask).sum() / normalizer.tokens, {"high": torch.tensor(epsilon_high)}

def misspelt(logps, advantages, mask, *, old_logps=None, **others):
    return (logps if old_logps is None else logps - old_logps).sum(), {}

def swapped(logps, mask, advantages, **others):
    return (logps * mask).sum(), {}

def max_rl(rewards, num_generations, least=1e-6):
    groups = rewards.view(-1, num_generations)
    mean = groups.mean(1, keepdim=True)
    return ((groups - mean) / mean.clamp(min=least)).flatten()
"""
DICTIONARY = "but it must return the loss, or the loss and a dictionary of metrics, as in"
# option: {function: (returned expression, words of the error)}; advantages get the rewards 0, 1, 2, 3, 3, 3
RETURNED = {
    "loss_type": {
        "only_per_row": ("logps.sum(1)", rf"returned tensor\(\[ *-\d.* {DICTIONARY}"),
        "per_row": ("logps.sum(1), {}", rf"returned \(tensor\(\[ *-\d.* {DICTIONARY}"),
        "number_as_metric": ("logps.sum(), {'seen': 1.0}", "returned .*{'seen': 1.0}.*, but it must return"),
        "second_loss": ("logps.sum(), {'loss': mask.sum()}", "returned .* no metric may be named stage, step or loss"),
    },
    "advantages": {
        "one_per_group": ("logps.view(-1, 3).mean(1)", r"returned tensor\(\[1., 3.\]\), but it must return a float"),
        "a_list": ("logps.tolist()", r"returned \[0.0, 1.0, 2.0, 3.0, 3.0, 3.0\], but it must return"),
        "standardized": ("((r := logps.view(2, 3)) - r.mean(1, True)).div(r.std(1, keepdim=True)).view(6)",
                         r"tensor\(\[-1., +0., +1., nan, nan, nan\]\), but it must .* even if their rewards are equal"),
    },
}  # fmt: skip
SHAPES = [(option, name, expected) for option, x in RETURNED.items() for name, (_, expected) in x.items()]
WRONG = [
    ("loss_type", "labeled", "cannot be called: missing a required .*argument: 'labels'"),
    ("loss_type", "misspelt", "its parameter 'old_logps' would always be None; did you mean old_per_token_logps"),
    ("loss_type", "swapped", "cannot be called: its parameter 'mask' would be the argument advantages"),
    ("loss_type", "options(scle=1)", "there is no option 'scle'; the options are: scale"),
    ("advantages", "max_rl(lest=1)", "there is no option 'lest'; the options are: least"),
]


@pytest.fixture
def from_file(tmp_path):
    """Return a function that builds the option for a function in the user's file."""
    rest = {"loss_type": ", advantages, mask, **_", "advantages": ""}
    functions = [(name, rest[option], x) for option, of in RETURNED.items() for name, (x, _) in of.items()]
    texts = [f"def {name}(logps{more}):\n    return {x}\n" for name, more, x in functions]
    (tmp_path / "mine.py").write_text(FUNCTIONS + "\n\n".join(texts))
    return lambda option, name: f"--grpo.{option}={tmp_path / 'mine.py'}:{name}"


@pytest.mark.parametrize(("option", "name", "expected"), WRONG)
def test_invalid_functions_are_refused_before_a_model_is_loaded(stage, from_file, option, name, expected):
    with pytest.raises(ValueError, match=rf"(?s)grpo\.{option} .*mine\.py:{re.escape(name)}.*{expected}"):
        stage("grpo", from_file(option, name))


@pytest.mark.parametrize(("option", "name", "expected"), SHAPES)
def test_what_a_function_returns_is_checked_at_the_first_step(stage, from_file, script, option, name, expected):
    script([0, 1, 2, 3, 3, 3])
    run = stage("grpo", from_file(option, name), "--grpo.num_generations=3", "--grpo.prompts_per_step=2")
    with pytest.raises(ValueError, match=rf"(?s)grpo\.{option} .*mine\.py:{re.escape(name)}.*{expected}"):
        run.go(1)


def test_a_loss_may_have_fewer_parameters_than_grpo_loss(stage, from_file):
    [line] = stage("grpo", from_file("loss_type", "clipped"), "--grpo.epsilon_high=0.28", "--grpo.beta=0.1").go(1)
    assert line["high"] == pytest.approx(0.28)


def test_a_custom_loss_is_called_like_grpo_loss(stage, from_file):
    """grpo_loss from a file equals dapo bit by bit, also off-policy and with a KL, and logs a metric of its own.

    `for_parity` has the signature f(batch, options) and returns a bare scalar.
    """
    options = ["--grpo.beta=0.2", "--grpo.num_iterations=2", "--grpo.micro_batch_size=4"]
    functions = ["--grpo.loss_type=dapo", from_file("loss_type", "same"), from_file("loss_type", "for_parity")]
    expected, same, bare = (stage("grpo", function, *options).go(3) for function in functions)
    assert same == [line | {"seen": 1.0} for line in expected]
    assert [(line["loss"], line["grad_norm"]) for line in bare] == [(x["loss"], x["grad_norm"]) for x in expected]


def test_a_loss_for_parity_that_needs_a_reference_is_told_to_set_beta(stage, from_file):
    with pytest.raises(KeyError, match=r"a run has ref_per_token_logps only if grpo\.beta is above 0"):
        stage("grpo", from_file("loss_type", "reads_reference")).go(1)


def test_a_custom_loss_gets_all_rows_and_the_options_of_its_section(stage, from_file, script):
    script(0.5)
    options = {"epsilon_high": 0.3, "num_generations": 2, "epsilon_low": 0.1, "beta": 0.5, "learning_rate": 0.25}
    given = [f"--grpo.{name}={value}" for name, value in options.items()]
    given += ["--grpo.use_bias_correction_kl=false", "--grpo.micro_batch_size=4"]
    [line] = stage("grpo", from_file("loss_type", "options(scale=2.0)"), *given).go(1)
    expected = {"rows": 4 * 2, "scale": 2, "rate": options.pop("learning_rate"), "use_bias_correction_kl": 0} | options
    assert {name: line[name] for name in expected} == pytest.approx(expected)
    assert line["grad_norm"] > 0


@pytest.mark.parametrize(("option", "name", "given", "idle"), [
    ("loss_type", "clipped", "beta=0.04 epsilon_high=0.28", ["grpo.beta"]), ("loss_type", "same", "beta=0.04", []),
    ("advantages", "max_rl", "scale_rewards=none", ["grpo.scale_rewards"]),
])  # fmt: skip
def test_options_for_which_a_custom_function_has_no_parameter_are_noted(stage, from_file, option, name, given, idle):
    trainer = stage("grpo", from_file(option, name), *(f"--grpo.{text}" for text in given.split())).trainer
    message = f"the function grpo.{option} {getattr(trainer.options, option)} has no parameter of this name"
    found = [(names, reason) for names, reason in options_without_effect(trainer.config, {"grpo": type(trainer)})]
    assert [names for names, reason in found if reason == message] == [idle] * bool(idle)


def test_own_advantages_by_hand(stage, from_file, script):
    script([1.0, 2.0, 3.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 2.0, 2.0, 2.0])
    run = stage("grpo", from_file("advantages", "max_rl(least=0.5)"), "--grpo.micro_batch_size=4")
    [batch] = run.next()
    assert batch.completion_index.tolist() == [0, 2, 6, 7, 8]  # other completions have advantage 0
    torch.testing.assert_close(batch.advantages, torch.tensor([-0.5, 0.5, 4 / 3, -2 / 3, -2 / 3]))
    assert run.update()["grad_norm"] > 0


def test_advantages_of_a_later_rollout_are_checked(stage, from_file, script):
    """max_rl returns NaN only for rewards of None, which the check before the first rollout does not try."""
    script([1.0, None, 0.0] * 4)
    with pytest.raises(ValueError, match=r"mine\.py:max_rl returned tensor"):
        stage("grpo", from_file("advantages", "max_rl")).next()


def test_a_loss_without_a_gradient_ends_the_run(stage, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def detached(logps, advantages, mask, **others):\n    return logps.detach().sum(), {}\n")
    run = stage("grpo", f"--grpo.loss_type={file}:detached")
    with pytest.raises(ValueError, match="grpo step 0: the loss has no gradient, so nothing would be learned"):
        run.go()
