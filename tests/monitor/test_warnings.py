"""Test each rule for training warnings on metrics that are written by hand."""

import math
import re
from collections import deque
from functools import partial
from itertools import chain
from types import SimpleNamespace

import pytest
import torch

from minivlmrl.config.options import LoRAOptions, RolloutOptions, RunConfig, SamplingOptions
from minivlmrl.losses.advantages import combine
from minivlmrl.monitor.warnings import WINDOW, WarningRules
from minivlmrl.run import metrics as metrics_module
from minivlmrl.run.metrics import check_mismatch

HEALTHY = {
    "reward": 0.7, "rewards/format/mean": 0.9, "rewards/format/std": 0.1, "rewards/accuracy/mean": 0.5,
    "rewards/accuracy/std": 0.4, "frac_reward_zero_std": 0.8, "completions/clipped_ratio": 0.1, "entropy": 0.5,
    "grad_norm": 1.0,
}  # fmt: skip
SAME = {"rewards/format/std": 0.0, "rewards/accuracy/std": 0.0, "frac_reward_zero_std": 1.0}
# (metrics that differ from a healthy step, temperature, text of the warning)
CASES = [
    ({"frac_reward_zero_std": 1.0}, 1.0, "prompts are too easy or too hard"),
    ({"frac_reward_zero_std": 1.0}, 0.01, r"sampling\.temperature \(0\.01\) is low .* the same text is sampled repeat"),
    (SAME, 1.0, r"equal for all completions: format is 0\.9 and accuracy is 0\.5"),
    ({"completions/clipped_ratio": 0.95}, 1.0, r"sampling\.max_new_tokens \(9\)"),
    ({"rewards/format/mean": 0.0}, 1.0, "Reward format is 0 for all completions"),
    ({"rewards/accuracy/mean": 0.0, "frac_reward_zero_std": 0.9}, 1.0, "Reward accuracy is 0 for all completions"),
    ({"grad_norm": 0.0}, 1.0, "All gradients are zero"),
]


def groups_of(*solutions):
    return [[SimpleNamespace(row=SimpleNamespace(columns={"solution": solution}))] for solution in solutions]


def make_rules(temperature=1.0, model=None, state=(), stage="grpo", stages=("grpo",), evaluated=(), accuracy=1.0):
    sampling = SamplingOptions(temperature=temperature, max_new_tokens=9)
    config = RunConfig(sampling=sampling, rewards={"format": 0.5, "accuracy": accuracy}, stages=[*stages])
    policy = SimpleNamespace(config=SimpleNamespace(vocab_size=512))
    trainer = SimpleNamespace(stage=stage, config=config, policy=policy, trained=model or torch.nn.Module())
    trainer.total_rewards = partial(combine, weights=torch.tensor([0.5, 1.0]))  # a sample consists of its rewards only
    return WarningRules(trainer, SimpleNamespace(state=state), dict(evaluated))


def test_a_reward_that_falls_is_reported_once():
    rules = make_rules()
    rules.extremes = [0.0, 1.5]
    good, worse, bad = ([HEALTHY | {"reward": value}] * WINDOW for value in (1.2, 1.0, 0.8))
    assert [rules.step(values) for values in good + worse] == [[]] * 2 * WINDOW  # 0.2 is less than a fifth of the range
    resumed = make_rules()
    resumed.restore(rules.state())
    for some in (rules, resumed):
        message = [text for values in bad + bad for text in some.step(values)]
        assert len(message) == 1 and re.match(r"The mean reward has fallen from 1\.2 to 0\.\d+\. Lower", message[0])


@pytest.mark.parametrize(("change", "temperature", "sentence"), CASES, ids=[case[2][:30] for case in CASES])
def test_a_lasting_problem_is_reported_once(change, temperature, sentence):
    rules = make_rules(temperature)
    assert [rules.step(HEALTHY) for _ in range(WINDOW)] == [[]] * WINDOW
    assert [rules.step(HEALTHY | change) for _ in range(WINDOW - 1)] == [[]] * (WINDOW - 1)
    [message] = rules.step(HEALTHY | change)
    assert re.search(sentence, message)
    assert rules.step(HEALTHY | change) == []
    rules.step(HEALTHY)
    rules.recent = deque([HEALTHY | change] * WINDOW, WINDOW)
    # the warning is repeated after the problem was gone for a while
    assert len(rules.step(HEALTHY | change)) == 1


def test_equal_rewards_are_reported_after_the_first_step():
    equal = HEALTHY | {"rewards/format/std": 0.0, "rewards/accuracy/std": 0.0}
    rules = make_rules()
    [message] = rules.step(equal)
    assert message.startswith("The rewards are equal for all completions: format is 0.9 and accuracy is 0.5. Compare")
    assert [rules.step(equal) for _ in range(2 * WINDOW)] == [[]] * 2 * WINDOW
    [message] = make_rules().step(equal | {"rewards/format/mean": 0.0})
    assert "format asks for <think> and <answer> tags; name them in data.prompt_template" in message
    assert message.endswith(" demonstrations first (--stages=[sft,grpo]).")
    rules = make_rules(stages=("sft", "grpo"))
    [message] = rules.step(equal)
    assert message.endswith(" more demonstrations (a larger sft.max_steps).")
    rules = make_rules()
    assert [rules.step(values) for values in (HEALTHY, equal, equal)] == [[]] * 3
    rules = make_rules()
    rules.config.rewards = {}
    assert [rules.step({"loss": 1.0, "grad_norm": 1.0}) for _ in range(WINDOW)] == [[]] * WINDOW


def test_tags_are_not_advised_if_the_answer_has_none():
    """The note before the first step has already advised to leave out the reward `format`."""
    never = HEALTHY | {"rewards/format/mean": 0.0, "rewards/format/std": 0.0}
    for values, count in ((never | {"rewards/accuracy/std": 0.0}, 1), (never, 0)):
        rules = make_rules()
        rules.config.data.answer_format = "whole"
        message = [text for _ in range(WINDOW) for text in rules.step(values)]
        assert len(message) == count and "tags" not in str(message)


HELD_OUT = "eval/accuracy_sampled", "eval/accuracy_greedy"


@pytest.mark.parametrize(("steps", "values", "count"), [
    (10, (0.19, 0.1), 1), (10, (0.21, 0.1), 0), (10, (0.1, 0.21), 0), (9, (0.19, 0.1), 0), (10, (), 0),
])  # fmt: skip
def test_rows_that_are_learned_by_heart_are_reported(steps, values, count):
    rules = make_rules()
    rules.recent.extend([HEALTHY] * steps)
    found = [*rules.memorized(dict(zip(HELD_OUT, values, strict=False)) | {"eval/format_sampled": 0.9})]
    expected = "The mean of reward accuracy is 0.5 on training rows, but only 0.19 on held-out rows. If "
    assert [text.startswith(expected) for text in found] == [True] * count


@pytest.mark.parametrize(("stage", "before", "after", "rows", "expected"), [
    ("dpo", 0.98, 0.63, 60, "has fallen from 0.98 to 0.63 in this stage. Lower dpo.learning_rate, or keep the chosen"),
    ("grpo", 0.98, 0.63, 60, "has fallen from 0.98 to 0.63 in this stage. Lower grpo.learning_rate."),
    ("grpo", 0.5, 0.35, 1000, None), ("grpo", 0.5, 0.25, 20, None), ("grpo", 0.3, 0.9, 60, None),
    ("grpo", 9, 0, 60, None),
], ids=["dpo", "grpo", "a small fall", "noise", "a rise", "no share"])  # fmt: skip
def test_held_out_rows_that_the_model_forgets_are_reported(stage, before, after, rows, expected):
    """The sampled accuracy falls less than the greedy accuracy, and the pair accuracy is no reward."""
    names = *HELD_OUT, "eval/pair_accuracy"
    rules = make_rules(stage=stage, evaluated=zip(names, (before - 0.1, before, 1.0), strict=True))
    found = [*rules.unlearned(dict(zip(names, (after, after, 0.0), strict=True)), rows)]
    assert [text.startswith(f"eval/accuracy_greedy {expected}") for text in found] == [True] * bool(expected)


def test_a_penalty_may_be_zero_and_may_fall():
    """A reward with a negative weight is best at 0, so none of the warnings about low rewards fits."""
    rules = make_rules(evaluated=dict.fromkeys(HELD_OUT, 0.9), accuracy=-1.0)
    groups = groups_of("cat", "cat")
    values = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 0.0]])
    for _ in range(2 * WINDOW):
        assert rules.step(HEALTHY | {"rewards/accuracy/mean": 0.0}, rollout_with(values, groups)) == []
    rules.recent.extend([HEALTHY] * WINDOW)
    low = dict.fromkeys(HELD_OUT, 0.0)
    assert [*rules.unlearned(low, 60)] == [*rules.memorized(low | {"eval/format_sampled": 0.9})] == []


def rollout_with(rewards, groups=None):
    rewards = torch.as_tensor(rewards)
    groups = groups or groups_of(*[None] * len(rewards))
    return SimpleNamespace(groups=groups, samples=rewards, rewards=rewards)


def test_success_is_reported_once():
    """Near the highest possible reward, equal rewards and zero gradients are reported as success."""
    changes = [SAME, {"frac_reward_zero_std": 1.0}, {"grad_norm": 0.0}, {}]
    message = {}
    for reward in (1.45, 1.2):  # the highest possible reward is 1.5
        rules = make_rules()
        rules.step(HEALTHY, rollout_with([[0.0, 0.0], [1.0, 1.0], [math.nan, math.nan]]))
        sentences = []
        for change in changes * 2:
            sentences += [rules.step(HEALTHY | {"reward": reward} | change) for _ in range(WINDOW)]
        message[reward] = list(chain(*sentences))
    [sentence] = message[1.45]
    assert sentence.startswith("The mean reward is 1.45, close to the highest reward of any completion so far (1.5). ")
    assert len(message[1.2]) == 6 and "The rewards are equal for all completions" in message[1.2][0]


def test_a_run_in_which_one_reward_never_rises_is_no_success():
    """The policy has learned the reward for the format, but no answer is right."""
    rules = make_rules()
    step = HEALTHY | {"reward": 0.5, "rewards/accuracy/mean": 0.0, "frac_reward_zero_std": 1.0}
    rules.step(step, rollout_with([[0.0, 0.0], [1.0, 0.0]]))
    message = list(chain(*(rules.step(step) for _ in range(WINDOW))))
    assert len(message) == 2 and message[0].startswith("All completions of each group have the same reward")
    assert message[1].startswith("Reward accuracy is 0 for all completions")


@pytest.mark.parametrize("killed", [1, 22, 50])
def test_a_resumed_run_gives_the_same_warnings(killed):
    def rollout(number):  # NaN marks a completion that a reward could not score
        rewards = torch.tensor([[1.0, 1.0], [0.0, math.nan]] if number % 2 else [[1.0, 0.1], [0.0, 0.0]])
        if number >= 50:
            rewards = torch.ones(2, 2)
        return rollout_with(rewards, groups_of("cat", "dog"))

    def step(rules, number):
        flat = (SAME if 12 < number < 30 else {}) | {"loss": math.nan}
        if number > 52:
            flat |= SAME | {"reward": 1.5}
        return rules.step(HEALTHY | flat, rollout(number))

    whole, first, second = (make_rules() for _ in range(3))
    expected = [step(whole, number) for number in range(100)]
    assert sum(map(len, expected)) >= 2 and "The mean reward is 1.5" in str(expected)
    message = [step(first, number) for number in range(killed)]
    second.restore(first.state())
    assert message + [step(second, number) for number in range(killed, 100)] == expected


def test_a_resumed_run_may_have_other_rewards():
    """Metrics of another section `rewards` are dropped."""
    first, same, other = make_rules(), make_rules(), make_rules(accuracy=2.0)
    for _ in range(WINDOW - 2):
        first.step(HEALTHY)
    for rules in (same, other):
        rules.restore(first.state())
    assert [len(rules.recent) for rules in (same, other)] == [WINDOW - 2, 0]


def test_weights_without_a_gradient_are_reported():
    model = torch.nn.ModuleDict({"visual": torch.nn.Linear(1, 1), "model": torch.nn.Linear(1, 1)})
    rules = make_rules(model=model, state=set(model["model"].parameters()))
    steps = [rules.step(HEALTHY) for _ in range(WINDOW)]
    assert "2 trainable parameters never had a gradient, for example visual.weight" in steps[-1][0]
    model.requires_grad_(False)
    assert list(make_rules(model=model).unused_parameters()) == []


@pytest.mark.parametrize(("dtypes", "engine", "bound"), [
    (("float64", None), "native", 1e-5), (("float32", None), "native", 1e-5),  # 0.01 outside of tests
    (("float32", "bfloat16"), "native", 0.05), (("float32", None), "vllm", 0.1),
])  # fmt: skip
def test_a_sampler_that_disagrees_with_the_trainer_stops_the_run(dtypes, engine, bound):
    model = SimpleNamespace(dtype=dtypes[0], compute_dtype=dtypes[1])
    sampling = SamplingOptions(engine=engine)
    run = SimpleNamespace(rollout=RolloutOptions(), adapter=LoRAOptions(), model=model, sampling=sampling)
    metric = "rollout/logp_mismatch_rms"
    check_mismatch(run, {metric: 0.9 * bound, "rollout/logp_mismatch": 9.0})
    check_mismatch(run, {"loss": 1.0})
    with pytest.raises(ValueError, match=rf"^{metric} is .* nats, but at most .* is allowed: .*\.inf disables the"):
        check_mismatch(run, {metric: 1.5 * bound})
    run.adapter.dropout = 0.1
    check_mismatch(run, {metric: 1.5 * bound})


def test_another_temperature_in_training_stops_the_run(stage, monkeypatch):
    monkeypatch.setattr(metrics_module, "EXACT_LIMIT", 0.01)
    run = stage("grpo", "--sampling.temperature=0.9")
    run.trainer.temperature = 1.0
    with pytest.raises(ValueError, match="such as another temperature"):
        run.go(1)
