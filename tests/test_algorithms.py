"""What algorithms do with rollouts and pairs, beside the loss: what is stored, resampled, masked, shared, saved."""

import json
import math
import weakref

import PIL.Image
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from minivlmrl import grpo as grpo_file
from minivlmrl import train
from minivlmrl.algorithms import online as online_file
from minivlmrl.algorithms.value_model import load_value_model
from minivlmrl.batch import pack
from minivlmrl.hub.checkpoint import random_model
from minivlmrl.logprobs import completion_states, per_token_logps
from minivlmrl.rewards import REWARDS
from minivlmrl.rows import Processor, Row
from minivlmrl.run.config import load_config
from minivlmrl.run.optimizer import build_optimizer
from minivlmrl.scale.ranks import World
from minivlmrl.tasks import shapes
from minivlmrl.tasks.shapes import Shapes

from tiny import RUN_MODEL

RATE = 1e-2
STAGE = {"max_steps": 3, "prompts_per_step": 4, "micro_batch_size": 2, "learning_rate": RATE}
RECIPE = {
    "num_threads": 1,
    "model": {"config": "model.json"},
    "data": {"task": "shapes", "demonstrations": 8, "eval_rows": 2, "pairs": 8},
    "sampling": {"max_new_tokens": 6},
    "rewards": {"letters": 1.0},
    "sft": STAGE,
    "dpo": STAGE,
    "reward_model": STAGE,
    "grpo": STAGE | {"num_generations": 3},
    "ppo": STAGE | {"num_generations": 2},
}
STAGES = ("sft", "dpo", "reward_model", "grpo", "ppo")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recipe")
    for tied in (False, True):
        model = RUN_MODEL | {"tie_word_embeddings": tied}
        (folder / f"{'tied' if tied else 'model'}.json").write_text(json.dumps(model))
    (folder / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    return folder


def letters(completions, **columns):
    return [sum(c.isalpha() for c in completion) / 6 for completion in completions]


@pytest.fixture(autouse=True)
def lively(monkeypatch):
    """Let an untrained model earn different rewards at different lengths: a reward for letters, many stop tokens."""
    monkeypatch.setitem(REWARDS, "letters", letters)
    monkeypatch.setattr(Processor, "stop_token_ids", property(lambda self: tuple(range(7, len(self.tokenizer), 8))))
    monkeypatch.setattr(train, "write_report", lambda *_: None)


ONE = World(0, 1, torch.device("cpu"))


class Second(World):
    """The second of two ranks, alone: the first one's figures are the same as its own, its rewards all 9."""

    def sum(self, *values):
        return [2 * value for value in values]

    def gather_objects(self, value):
        if not isinstance(value, tuple):
            return [value, value]
        places, rewards = value
        return [([place - len(places) for place in places], torch.full_like(rewards, 9.0)), value]


SECOND = Second(1, 2, torch.device("cpu"))


class Stage:
    """An algorithm and its optimizer, to go step by step."""

    def __init__(
        self, folder, stage, *overrides, rows=None, held_out=None, dtype=torch.float64, model="model", world=ONE
    ):
        options = [f"--output_dir={folder / 'out'}", f"--stages={stage}", *overrides]
        config = load_config(folder / "recipe.yaml", options)
        train.ALGORITHMS[stage].check(config)
        self.model, processor = random_model(folder / f"{model}.json", shapes.tokenizer(), 0)
        self.model.to(dtype)
        rows = Shapes(8, "rows") if rows is None else rows
        self.algorithm = train.ALGORITHMS[stage](config, self.model, processor, rows, world, held_out)
        self.config = getattr(config, stage)
        self.optimizer = build_optimizer(self.algorithm.trained, self.config)
        self.algorithm.begin()
        self.work = self.algorithm.batches()
        self.step = None

    def next(self):
        """The next step's micro-batches, not yet trained on."""
        self.step = next(self.work)
        return self.step.batches

    def update(self):
        norm = self.config.max_grad_norm
        return train.optimizer_step(self.algorithm, self.step, self.optimizer, RATE, norm)

    def go(self, steps=1):
        """Figures of the next steps."""
        return [(self.next(), self.update())[1] for _ in range(steps)]


@pytest.fixture
def stage(folder):
    return lambda *arguments, **options: Stage(folder, *arguments, **options)


@pytest.fixture
def samples(monkeypatch):
    """All rollouts that are drawn, as they come."""
    seen, original = [], online_file.rollout
    monkeypatch.setattr(online_file, "rollout", lambda *a: seen.append(original(*a)) or seen[-1])
    return seen


@pytest.fixture
def asked(monkeypatch):
    """What grpo_loss is given, call by call: its log-probabilities and everything else."""
    calls, original = [], grpo_file.grpo_loss

    def spy(logps, advantages, mask, **options):
        if logps.requires_grad:
            logps.retain_grad()
        calls.append({"logps": logps, "advantages": advantages, "mask": mask, **options})
        return original(logps, advantages, mask, **options)

    monkeypatch.setattr(grpo_file, "grpo_loss", spy)
    return calls


def snapshot(module):
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def scripted(monkeypatch, *script):
    """Rewards that are written down: a list for each rollout, or one number for all of it."""
    script = list(script)

    def reward(completions, **columns):
        values = script.pop(0)
        return values if isinstance(values, list) else [values] * len(completions)

    monkeypatch.setitem(REWARDS, "letters", reward)
    return script


# rollouts that are trained on more than once


def test_stored_log_probabilities(stage, asked, samples):
    """2 iterations over rollouts of 2 steps: in the first of 4 steps the ratio is exactly 1, later it is not."""
    run = stage("grpo", "--grpo.num_iterations=2", "--grpo.steps_per_generation=2", dtype=torch.float32)
    lines = run.go(8)
    assert len(samples) == 2
    assert [len(result.prompts) for result in samples] == [8, 8]
    assert len(asked) == 16  # two micro-batches a step
    ratio_is_one = [torch.equal(call["logps"] * call["mask"], call["old_per_token_logps"]) for call in asked]
    assert ratio_is_one == [True] * 2 + [False] * 6 + [True] * 2 + [False] * 6
    for first, again in zip(asked[:4], asked[4:8], strict=True):  # the second iteration meets the same micro-batches
        assert first["old_per_token_logps"] is again["old_per_token_logps"]
        assert first["advantages"] is again["advantages"]
        assert not torch.equal(first["logps"], again["logps"])
    assert ["rollout/logp_mismatch" in line for line in lines] == [True, False, False, False] * 2


@pytest.mark.parametrize(("name", "stale"), [("num_iterations", 2), ("steps_per_generation", 2)])
def test_either_option_makes_the_policy_older_than_its_rollout(stage, asked, name, stale):
    stage("grpo", f"--grpo.{name}={stale}", "--grpo.micro_batch_size=4", dtype=torch.float32).go(4)
    assert [torch.equal(call["logps"] * call["mask"], call["old_per_token_logps"]) for call in asked] == [
        True, False, True, False,
    ]  # fmt: skip


def test_a_rollout_that_is_used_once_needs_none(stage, asked, samples):
    stage("grpo").go(3)
    assert len(samples) == 3
    assert all(call["old_per_token_logps"] is None for call in asked)


def test_steps_of_a_rollout_have_their_own_prompts_and_counts(stage, samples):
    run = stage("grpo", "--grpo.steps_per_generation=2", "--grpo.micro_batch_size=4")
    both = [run.next()[0] for _ in range(2)]
    lengths = [[len(c.ids) for group in samples[0].completions[i : i + 4] for c in group] for i in (0, 4)]
    assert [batch.group.layout.row_lengths for batch in both] == lengths
    assert [(batch.num_sequences, batch.num_tokens) for batch in both] == [(12, sum(own)) for own in lengths]


def test_the_number_of_rollouts_of_ppo(stage, samples):
    run = stage("ppo", "--ppo.num_mini_batches=2", "--ppo.num_ppo_epochs=2", dtype=torch.float32)
    lines = run.go(8)
    assert [len(result.prompts) for result in samples] == [8, 8]
    assert [line["ratio"] == 1 and line["approx_kl"] == 0 for line in lines] == [True, False, False, False] * 2


# the reference


@pytest.mark.parametrize("name", ["dpo", "grpo", "ppo"])
def test_the_reference_moves_at_its_steps_and_not_elsewhere(stage, name):
    options = ["sync_ref_model=true", "ref_model_mixup_alpha=0.3", "ref_model_sync_steps=2"]
    weight = {"dpo": "beta", "grpo": "beta", "ppo": "kl_coef"}[name]
    run = stage(name, *(f"--{name}.{option}" for option in (*options, f"{weight}=0.1")))
    reference = run.algorithm.reference.model
    expected = snapshot(run.model)
    for step in range(6):
        run.next()
        for parameter, value in reference.named_parameters():
            torch.testing.assert_close(value, expected[parameter], rtol=1e-12, atol=1e-15)
        run.update()
        if step % 2 == 1:
            policy = snapshot(run.model)
            expected = {key: 0.7 * value + 0.3 * policy[key] for key, value in expected.items()}
    assert (expected["lm_head.weight"] - policy["lm_head.weight"]).abs().max() > 1e-4


def test_dpo_is_measured_against_the_reference_of_its_step(stage):
    run = stage("dpo", "--dpo.sync_ref_model=true", "--dpo.ref_model_sync_steps=1", "--dpo.ref_model_mixup_alpha=1")
    for _ in range(3):  # the reference becomes the policy after every step
        [first, _] = run.next()
        with torch.no_grad():
            policy = first.group.pad(per_token_logps(run.model, first.group)[0])
        torch.testing.assert_close(first.ref_per_token_logps, policy, rtol=1e-12, atol=1e-12)
        assert run.update()["loss"] == pytest.approx(math.log(2), rel=1e-12)


@pytest.mark.parametrize("model", ["model", "tied"])
@pytest.mark.parametrize("name", ["dpo", "grpo", "ppo"])
def test_shared_layers_exist_once_and_stay(stage, name, model):
    weight = {"dpo": "beta", "grpo": "beta", "ppo": "kl_coef"}[name]
    run = stage(name, f"--{name}.num_shared_layers=1", f"--{name}.{weight}=0.1", model=model)
    policy, reference = run.model, run.algorithm.reference.model
    below = ("visual.", "model.embed_tokens.", "model.layers.0.")
    theirs = dict(reference.named_parameters())
    for parameter, value in policy.named_parameters():
        shared = parameter.startswith(below)
        assert (theirs[parameter] is value) == shared, parameter
        assert (theirs[parameter].data_ptr() == value.data_ptr()) == shared, parameter
        assert value.requires_grad != shared and not theirs[parameter].requires_grad, parameter
    assert (reference.lm_head.weight is policy.lm_head.weight) == (model == "tied")
    before, frozen = snapshot(policy), snapshot(reference)
    run.go(2)
    for parameter, value in policy.named_parameters():
        assert torch.equal(value, before[parameter]) == parameter.startswith(below), parameter
    for parameter, value in reference.named_parameters():
        assert torch.equal(value, frozen[parameter]), parameter


def test_a_shared_reference_is_as_good_as_a_copy(stage):
    """Nothing but memory is saved: with all weights below frozen by hand a full copy gives the same steps."""
    shared = stage("dpo", "--dpo.num_shared_layers=1")
    copied = stage("dpo")
    for p, q in zip(copied.model.parameters(), shared.model.parameters(), strict=True):
        p.requires_grad_(q.requires_grad)
    copied.optimizer = build_optimizer(copied.model, copied.config)
    for one, other in zip(shared.go(3), copied.go(3), strict=True):
        assert one == pytest.approx(other, rel=1e-12, abs=1e-14)


@pytest.mark.parametrize("following", STAGES)
def test_a_later_stage_trains_everything_again(stage, following):
    run = stage("dpo", "--dpo.num_shared_layers=2")
    assert not run.model.model.embed_tokens.weight.requires_grad
    first = run.algorithm
    first.run.stages, first.run.dpo.num_shared_layers = [following], 0
    algorithm = train.ALGORITHMS[following](first.run, run.model, first.processor, first.dataset, first.world)
    assert all(p.requires_grad for p in run.model.parameters())
    alone = {name for name, p in algorithm.trained.named_parameters() if not p.requires_grad}
    assert alone == ({"backbone.lm_head.weight"} if following == "reward_model" else set())


def test_all_layers_can_be_shared_and_not_more(stage):
    run = stage("grpo", "--grpo.num_shared_layers=2", "--grpo.beta=0.1")
    assert {name for name, p in run.model.named_parameters() if p.requires_grad} == {
        "model.norm.weight", "lm_head.weight",
    }  # fmt: skip
    with pytest.raises(ValueError, match="num_shared_layers is 3, the model has 2 layers"):
        stage("grpo", "--grpo.num_shared_layers=3", "--grpo.beta=0.1")


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("grpo", []),
        ("ppo", ["--ppo.kl_coef=0"]),
        ("dpo", ["--dpo.reference_free=true"]),
        ("dpo", ["--dpo.precompute_ref_log_probs=true"]),
    ],
)
def test_no_reference_is_kept_where_none_is_asked(stage, name, options):
    run = stage(name, *options)
    run.go(2)
    assert run.algorithm.reference is None


# grpo: which completions count, and how much

PAIRS = ["--grpo.num_generations=2", "--grpo.scale_rewards=none"]
LIVE, DEAD = [1.0, 0.0], [0.5, 0.5]


def test_groups_with_equal_rewards_are_sampled_anew(stage, samples, monkeypatch):
    left = scripted(monkeypatch, DEAD + LIVE + DEAD + DEAD, LIVE + DEAD + LIVE + DEAD, LIVE * 4, [9.0] * 8)
    run = stage("grpo", *PAIRS, "--grpo.max_num_gen_batches=5")
    batches = run.next()
    assert len(samples) == 3 and left == [[9.0] * 8]
    wanted = [(0, 1), (1, 0), (1, 2), (2, 0)]  # rollout and group, as they came; what is left over is dropped
    drawn = [c.ids for rollout, group in wanted for c in samples[rollout].completions[group]]
    assert torch.equal(torch.cat([batch.group.completion_ids for batch in batches]), torch.cat(drawn))
    assert torch.cat([batch.advantages for batch in batches]).tolist() == [0.5, -0.5] * 4
    figures = run.update()
    assert figures["num_gen_batches"] == 3
    assert figures["frac_reward_zero_std"] == 0
    assert figures["reward"] == 0.5


def test_sampling_anew_ends_and_keeps_the_size_of_the_batch(stage, samples, monkeypatch):
    scripted(monkeypatch, DEAD * 4, DEAD + LIVE + DEAD * 2, DEAD * 4, 9.0)
    run = stage("grpo", *PAIRS, "--grpo.max_num_gen_batches=3")
    batches = run.next()
    assert len(samples) == 3
    wanted = [(1, 1), (0, 0), (0, 1), (0, 2)]  # the one that teaches, then the first of the others
    drawn = [c.ids for rollout, group in wanted for c in samples[rollout].completions[group]]
    assert torch.equal(torch.cat([batch.group.completion_ids for batch in batches]), torch.cat(drawn))
    figures = run.update()
    assert figures["num_gen_batches"] == 3
    assert figures["frac_reward_zero_std"] == 0.75


def test_without_dynamic_sampling_every_rollout_is_taken(stage, samples, monkeypatch):
    scripted(monkeypatch, 1.0)
    run = stage("grpo", *PAIRS)
    [line] = run.go()
    assert len(samples) == 1
    assert "num_gen_batches" not in line
    assert line["frac_reward_zero_std"] == 1 and line["grad_norm"] == 0


def test_overlong_completions_are_punished(stage, samples):
    """max_new_tokens 6 and a cache of 4: free up to 2 tokens, then -1/4 for each one more."""
    run = stage("grpo", "--grpo.soft_punish_cache=4", "--grpo.scale_rewards=none", "--grpo.micro_batch_size=4")
    [batch] = run.next()
    lengths = torch.tensor([len(c.ids) for group in samples[0].completions for c in group])
    assert len(set(lengths.tolist())) > 3
    rewards = torch.tensor(letters(samples[0].texts)) - (lengths - 2).clamp(min=0) / 4
    expected = (rewards.view(4, 3) - rewards.view(4, 3).mean(1, keepdim=True)).flatten()
    torch.testing.assert_close(batch.advantages, expected)
    figures = run.update()
    assert figures["reward"] == pytest.approx(rewards.mean().item())
    assert figures["rewards/letters"] == pytest.approx(torch.tensor(letters(samples[0].texts)).mean().item())


def test_a_group_whose_lengths_are_punished_differently_teaches(stage, samples, monkeypatch):
    scripted(monkeypatch, *[0.5] * 9)
    run = stage("grpo", "--grpo.soft_punish_cache=4")
    result = run.algorithm.sample({i: i for i in range(8)})
    lengths = [{max(len(c.ids), 2) for c in group} for group in result.completions]  # 2 tokens and fewer are free
    live, dead = run.algorithm.split(result)
    assert live == [i for i in range(8) if len(lengths[i]) > 1]
    assert dead == [i for i in range(8) if len(lengths[i]) == 1]


def test_rewards_that_cancel_teach_where_each_is_normalized(stage, monkeypatch):
    """Their sums are equal, and still GDPO has something to learn."""
    monkeypatch.setitem(REWARDS, "letters", lambda completions, **_: [1.0, 0.0] * (len(completions) // 2))
    monkeypatch.setitem(REWARDS, "format", lambda completions, **_: [0.0, 1.0] * (len(completions) // 2))
    options = ["--grpo.num_generations=2", "--rewards={letters: 1, format: 1}"]
    for way, teaching in (("sum_then_normalize", 0), ("normalize_then_sum", 4)):
        run = stage("grpo", *options, f"--grpo.multi_objective_aggregation={way}")
        result = run.algorithm.sample({i: i for i in range(4)})
        assert len(run.algorithm.split(result)[0]) == teaching


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "rloo"])
def test_cut_completions_teach_nothing(stage, asked, samples, loss_type):
    run = stage(
        "grpo", "--grpo.mask_truncated_completions=true", f"--grpo.loss_type={loss_type}", "--grpo.beta=0.1",
        "--grpo.micro_batch_size=4", "--grpo.entropy_coef=0.1",
    )  # fmt: skip
    run.go(2)
    for result, call in zip(samples, asked, strict=True):
        completions = [c for group in result.completions for c in group]
        stopped = torch.tensor([c.stopped for c in completions])
        assert 0 < stopped.sum() < len(stopped)
        assert torch.equal(call["mask"].bool().any(1), stopped)
        assert not call["logps"].grad[~stopped].any()
        assert (call["logps"].grad[stopped].abs().sum(1) > 0).any()
        assert call["num_tokens"] == sum(len(c.ids) for c in completions if c.stopped)
        assert call["num_sequences"] == 12


def test_a_step_of_cut_completions_only_changes_nothing(stage, monkeypatch):
    monkeypatch.setattr(Processor, "stop_token_ids", (300,))
    run = stage("grpo", "--grpo.mask_truncated_completions=true", "--grpo.top_entropy_quantile=0.5")
    before = snapshot(run.model)
    [line] = run.go()
    assert line["completions/clipped_ratio"] == 1 and line["grad_norm"] == 0
    assert all(torch.equal(value, before[name]) for name, value in run.model.named_parameters())


def test_completions_that_nobody_can_judge_have_no_advantage(stage, monkeypatch):
    scripted(monkeypatch, [1.0, None, 0.0] * 4)
    run = stage("grpo", "--grpo.scale_rewards=none", "--grpo.micro_batch_size=4")
    [batch] = run.next()
    assert batch.advantages.tolist() == [0.5, 0.0, -0.5] * 4
    assert run.update()["reward"] == 0.5


def test_rloo_by_hand(stage, samples, asked):
    """Rewards are clipped, then lose beta times the completion's k1 KL, then meet the mean of the others."""
    run = stage(
        "grpo", "--grpo.loss_type=rloo", "--grpo.beta=0.2", "--grpo.reward_clip_range=[0.2, 0.6]",
        "--grpo.micro_batch_size=4",
    )  # fmt: skip
    run.go(2)
    [batch] = run.next()
    result = samples[-1]
    with torch.no_grad():
        logps, ref = (
            batch.group.split(per_token_logps(model, batch.group)[0])
            for model in (run.model, run.algorithm.reference.model)
        )
    kl = torch.stack([(a - b).sum() for a, b in zip(logps, ref, strict=True)])
    assert kl.abs().min() > 1e-3
    plain = torch.tensor(letters(result.texts))
    assert plain.min() < 0.2 and plain.max() > 0.6
    rewards = (plain.clamp(0.2, 0.6) - 0.2 * kl).view(4, 3)
    others = (rewards.sum(1, keepdim=True) - rewards) / 2
    torch.testing.assert_close(batch.advantages, (rewards - others).flatten(), rtol=1e-6, atol=1e-6)
    figures = run.update()
    assert asked[-1]["beta"] == 0 and "kl" not in figures
    assert figures["reward"] == pytest.approx(plain.mean().item())
    expected = (batch.advantages - batch.advantages.mean()) / (batch.advantages.std() + 1e-4)
    again = run.algorithm.config
    again.normalize_advantages = True
    torch.testing.assert_close(run.algorithm.advantages(rewards.flatten(), None), expected, rtol=1e-5, atol=1e-5)


def test_a_drifting_sampler_is_corrected_by_its_own_log_probabilities(stage, asked, samples):
    """Weights pi / sampler of each token, from what the trainer computes and the sampler said."""
    run = stage("grpo", "--grpo.rollout_correction=token_truncate", "--grpo.rollout_correction_max=1.5",
                "--grpo.micro_batch_size=4")  # fmt: skip
    original = run.algorithm.sample

    def drift(rows):
        result = original(rows)
        for group in result.completions:
            for c in group:
                c.logps = c.logps + (c.ids % 5 - 2) / 2
        return result

    run.algorithm.sample = drift
    run.go()
    [call] = asked
    said = torch.cat([c.logps for group in samples[0].completions for c in group])
    real = call["mask"].bool()
    expected = (call["logps"].detach()[real] - said).exp().clamp(max=1.5)
    torch.testing.assert_close(call["importance_sampling_ratio"][real], expected, rtol=1e-9, atol=1e-9)
    assert (call["importance_sampling_ratio"][~real] == 1).all()
    assert torch.equal(call["sampling_per_token_logps"][real], said)


def test_shuffled_rewards_are_the_same_ones_elsewhere(stage, samples):
    run = stage("grpo", "--grpo.shuffle_rewards=true", "--grpo.micro_batch_size=4", "--grpo.loss_type=rloo",
                "--grpo.num_generations=2")  # fmt: skip
    [batch] = run.next()
    rewards = torch.tensor(letters(samples[0].texts)).view(4, 2)
    plain = (rewards - rewards.flip(1)).flatten()
    assert not torch.allclose(batch.advantages, plain)
    assert run.update()["reward"] == pytest.approx(rewards.mean().item())


@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_a_reward_of_wrong_length_is_named(stage, monkeypatch, name):
    scripted(monkeypatch, [1.0])
    with pytest.raises(ValueError, match=r"reward letters returned 1 values for \d+ completions"):
        stage(name).go()


def test_the_upper_share_of_a_steps_tokens_is_found_in_all_its_micro_batches(stage):
    """By the entropies of the policy that sampled."""
    options = ["--grpo.top_entropy_quantile=0.3", "--grpo.steps_per_generation=2"]
    run, thresholds = stage("grpo", *options), []
    for _ in range(2):
        batches = run.next()
        entropies = torch.cat([batch.old_entropies[batch.completion_mask.bool()] for batch in batches])
        threshold = torch.quantile(entropies, 0.7).item()
        for batch in batches:
            assert batch.entropy_threshold == pytest.approx(threshold, rel=1e-6)
            assert batch.num_entropy_tokens == (entropies > threshold - 1e-6).sum() < len(entropies) / 2
        thresholds.append(threshold)
    assert thresholds[0] != thresholds[1]


# ranks


def test_a_rank_gives_its_completions_their_own_advantages(stage, samples):
    run = stage("grpo", "--grpo.scale_rewards=none", "--grpo.prompts_per_step=8", world=SECOND)
    batches = run.next()
    rewards = torch.tensor(letters(samples[0].texts)).view(4, 3)
    expected = (rewards - rewards.mean(1, keepdim=True)).flatten()
    torch.testing.assert_close(torch.cat([batch.advantages for batch in batches]), expected)
    assert run.step.metrics["reward"] == pytest.approx((9 + rewards.mean().item()) / 2)
    lengths = sum(len(c.ids) for group in samples[0].completions for c in group)
    assert (batches[0].num_sequences, batches[0].num_tokens) == (24, 2 * lengths)


def test_ppo_whitens_over_all_ranks(stage):
    """Both ranks have the same advantages here: twice as many, so that n - 1 tells."""
    batches = stage("ppo", world=SECOND).next()
    real = [batch.completion_mask.bool() for batch in batches]
    plain = torch.cat([(b.returns - b.old_values)[mask] for b, mask in zip(batches, real, strict=True)])
    found = torch.cat([b.advantages[mask] for b, mask in zip(batches, real, strict=True)])
    deviation = (torch.cat([plain, plain]).var() + 1e-8).sqrt()
    torch.testing.assert_close(found, (plain - plain.mean()) / deviation, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", STAGES)
def test_ranks_share_the_rows_of_a_step(stage, name):
    ranks = [stage(name, world=World(rank, 2, torch.device("cpu"))).algorithm.numbers(4) for rank in range(2)]
    for _, own in zip(range(3), stage(name).algorithm.numbers(4), strict=False):
        assert [number for rank in ranks for number in next(rank)] == own


def test_ranks_share_the_pairs_that_are_judged(stage):
    rows = [Shapes(5, "x")[i] for i in range(5)]
    ranks = [stage("dpo", held_out=Rows(rows), world=World(rank, 2, torch.device("cpu"))) for rank in range(2)]
    assert [[rows.index(row) for row in rank.algorithm.held_out_rows()] for rank in ranks] == [[0, 2, 4], [1, 3]]


# dpo


@pytest.mark.parametrize("options", [[], ["--dpo.ld_alpha=0.5"], ["--dpo.use_weighting=true"]])
def test_precomputed_references_are_the_references(stage, options):
    kept = stage("dpo", *options)
    precomputed = stage("dpo", *options, "--dpo.precompute_ref_log_probs=true")
    one, other = kept.go(3), precomputed.go(3)
    for a, b in zip(one, other, strict=True):
        skip = {"rewards/accuracies"} if abs(a["rewards/margins"]) < 1e-9 else set()  # rounding decides
        assert {k: v for k, v in b.items() if k not in skip} == pytest.approx(
            {k: v for k, v in a.items() if k not in skip}, rel=1e-6, abs=1e-9
        )
    assert one[-1]["rewards/margins"] != 0


def test_precomputing_scores_what_the_stage_meets_and_no_more(stage):
    run = stage("dpo", "--dpo.precompute_ref_log_probs=true", "--dpo.max_steps=1", held_out=Shapes(3, "other"))
    assert len(run.algorithm.precomputed) == 4 + 3 + 1  # and the spare pair, for more ranks that may resume the run
    assert all(not logps.requires_grad for logps in run.algorithm.precomputed.values())
    run.go()
    assert run.algorithm.pair_accuracy() is not None


def test_precomputing_tells_images_of_one_colour_apart_by_their_form(stage):
    """A wide and a high image of one colour have equal patches and equally many tokens."""
    rows = [Shapes(1, "x")[0] for _ in range(2)]
    for row, size in zip(rows, ((56, 28), (28, 56)), strict=True):
        row.images = [PIL.Image.new("RGB", size, "red")]
    options = ["--dpo.prompts_per_step=2", "--dpo.micro_batch_size=1"]
    both = [stage("dpo", *options, *more, rows=Rows(rows)) for more in ([], ["--dpo.precompute_ref_log_probs=true"])]
    kept, precomputed = (torch.stack([batch.ref_per_token_logps for batch in run.next()]) for run in both)
    assert (kept[0] - kept[1]).abs().max() > 1e-6
    torch.testing.assert_close(precomputed, kept, rtol=1e-9, atol=1e-9)


def test_precomputing_holds_the_images_of_one_micro_batch_at_a_time(stage, monkeypatch):
    alive = []

    class Counted(Shapes):
        def __getitem__(self, index):
            row = super().__getitem__(index)
            alive.append(weakref.ref(row.images[0]))
            assert sum(image() is not None for image in alive) <= 2 + 2, "all images are held at once"
            return row

    stage("dpo", "--dpo.precompute_ref_log_probs=true", rows=Counted(8, "rows"), held_out=Counted(4, "other"))
    assert len(alive) == 8 + 4


def test_the_first_step_of_dpo_is_log_2(stage):
    [line] = stage("dpo").go()
    assert line["loss"] == pytest.approx(math.log(2), rel=1e-12)
    assert line["rewards/chosen"] == line["rewards/rejected"] == 0
    assert line["grad_norm"] > 1e-3


@pytest.mark.parametrize("name", ["dpo", "reward_model"])
def test_both_answers_share_their_prompt_and_its_image(stage, name):
    run = stage(name)
    for batch, rows in zip(run.next(), ((0, 1), (2, 3)), strict=True):
        assert len(batch.group.layout.prompt_lengths) == len(rows) and len(batch.completion_mask) == 2 * len(rows)
        assert len(batch.group.image_grid_thw) == len(rows)
        assert len(batch.group.pixel_values) == 16 * len(rows)  # 56 pixels are 4 patches a side
        prompts, answers = batch.group.layout.prompt_lengths, batch.group.layout.row_lengths
        assert len(batch.group.input_ids) == sum(prompts) + sum(answers) - len(answers)


@pytest.mark.parametrize("name", ["dpo", "reward_model"])
def test_chosen_answers_come_first(stage, name):
    run = stage(name)
    rows = next(stage(name).algorithm.rows(4))[:2]
    [batch, _] = run.next()
    ids = batch.group.split(batch.group.completion_ids)
    expected = [answer for row in rows for answer in (row.chosen, row.rejected)]
    length = None if name == "dpo" else -1  # the reward model's runs go one token further
    assert [run.algorithm.processor.tokenizer.decode(x[:length].tolist()) for x in ids] == [
        f"{answer}<|im_end|>" for answer in expected
    ]


def test_of_several_turns_only_the_assistants_are_learnt(stage):
    """What the user says between two turns of an answer has no gradient and counts nowhere."""

    class Turns(Shapes):
        def __getitem__(self, index):
            row = super().__getitem__(index)
            for name in ("chosen", "rejected", "completion"):
                said = getattr(row, name)
                turns = [("assistant", said), ("user", "what?"), ("assistant", said + "!")]
                setattr(row, name, [{"role": role, "content": text} for role, text in turns])
            return row

    for name in ("dpo", "sft"):
        run = stage(name, rows=Turns(8, "rows"))
        batches = run.next()
        learnt, tokens = (sum(int(x.sum()) for x in xs) for xs in (
            [b.completion_mask[:: 2 if name == "dpo" else 1] for b in batches],
            [b.group.completion_mask[:: 2 if name == "dpo" else 1] for b in batches],
        ))  # fmt: skip
        assert batches[0].num_tokens == learnt < tokens
        assert run.update()["grad_norm"] > 0


# pairs that are judged


class Rows(list):
    """A dataset of rows that are given."""


def ranked(stage_of, number, flips):
    """Rows whose chosen answer has the larger number, but the other way round where flips says so."""
    rows = []
    for row, flip in zip((Shapes(8, "ranked")[i] for i in range(8)), flips, strict=True):
        better = number(row, row.chosen) > number(row, row.rejected)
        if better == flip:
            row.chosen, row.rejected = row.rejected, row.chosen
        rows.append(row)
    stage_of.algorithm.held_out = Rows(rows)
    return stage_of.algorithm.pair_accuracy()


FLIPS = {1.0: [False] * 8, 0.0: [True] * 8, 0.75: [False, True, False, False] * 2}


@pytest.mark.parametrize("share", FLIPS)
def test_pair_accuracy_of_dpo(stage, share):
    """Without a reference the likelier answer wins."""
    run = stage("dpo", "--dpo.reference_free=true", held_out=Shapes(1, "x"))

    @torch.no_grad()
    def likelihood(row: Row, answer):
        processor = run.algorithm.processor
        prompt, ids = processor(row.messages, row.images), processor.encode_completion(row.messages, answer)[0]
        batch = pack([prompt], [[ids]], run.model.config)
        return per_token_logps(run.model, batch)[0].sum().item()

    assert ranked(run, likelihood, FLIPS[share]) == share


@pytest.mark.parametrize("share", FLIPS)
def test_pair_accuracy_of_the_reward_model(stage, share):
    run = stage("reward_model", held_out=Shapes(1, "x"))
    torch.nn.init.normal_(run.algorithm.trained.score.weight, generator=torch.Generator().manual_seed(0))

    @torch.no_grad()
    def number(row: Row, answer):
        pair = run.algorithm.pairs([Row(row.messages, row.images, chosen=answer, rejected=answer)])
        return run.algorithm.trained.at_end(run.algorithm.micro_batch(pair, (1, 1), [None]).group)[0].item()

    assert ranked(run, number, FLIPS[share]) == share


@pytest.mark.parametrize("options", [[], ["--dpo.precompute_ref_log_probs=true"]])
def test_dpo_wins_the_pairs_that_it_learns(stage, options):
    rows = Shapes(4, "rows")
    run = stage("dpo", *options, "--dpo.max_steps=12", rows=rows, held_out=rows)
    if not options:
        assert run.algorithm.pair_accuracy() == 0  # nothing has moved: a draw is no win
    run.go(12)
    assert run.algorithm.pair_accuracy() == 1


@pytest.mark.parametrize("name", ["dpo", "reward_model"])
def test_rows_without_both_answers_are_not_judged(stage, name):
    rows = [Shapes(3, "x")[i] for i in range(3)]
    rows[0].rejected = rows[1].chosen = None
    run = stage(name, held_out=Rows(rows))
    assert run.algorithm.pair_accuracy() in (0.0, 1.0)
    for held_out in (Rows(rows[:2]), Rows(), None):
        run.algorithm.held_out = held_out
        assert run.algorithm.pair_accuracy() is None


def test_other_stages_judge_no_pairs(stage):
    for name in ("sft", "grpo", "ppo"):
        assert stage(name, held_out=Shapes(2, "x")).algorithm.pair_accuracy() is None


# the reward model


def main(folder, tmp_path, name, *overrides):
    train.main([str(folder / "recipe.yaml"), f"--output_dir={tmp_path / name}", *overrides])
    lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


JUDGED = "--rewards={letters: 0.5, reward_model: 1}"


def test_the_policy_stays_as_it_was(stage):
    run = stage("reward_model")
    before, judge = snapshot(run.model), snapshot(run.algorithm.trained)
    run.go(3)
    assert all(torch.equal(value, before[name]) for name, value in run.model.named_parameters())
    moved = {name for name, value in run.algorithm.trained.named_parameters() if not torch.equal(value, judge[name])}
    assert moved == set(judge) - {"backbone.lm_head.weight"}
    assert all(p.grad is None for p in run.model.parameters())


def test_margins_of_rows_are_heeded(stage):
    """The first step's rewards are all 0: -log sigmoid(-margin), for a row without one log 2."""

    class Margins(Shapes):
        def __getitem__(self, index):
            row = super().__getitem__(index)
            row.columns |= {"margin": None if index % 2 else 1.0}
            return row

    run = stage("reward_model", rows=Margins(4, "rows"))
    [line] = run.go()
    assert line["loss"] == pytest.approx((math.log(1 + math.e) + math.log(2)) / 2, rel=1e-6)


def test_the_saved_folder_gives_equal_numbers(stage, tmp_path):
    run = stage("reward_model")
    run.go(3)
    run.algorithm.save(tmp_path)
    loaded = load_value_model(tmp_path / "reward_model")
    batch = run.next()[0].group
    assert torch.equal(loaded.at_end(batch), run.algorithm.trained.at_end(batch))
    assert loaded.at_end(batch).abs().min() > 0


@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_the_reward_model_judges_in_the_same_run_and_by_its_path(folder, tmp_path, name, samples):
    one = main(folder, tmp_path, "one", f"--stages=[reward_model, {name}]", JUDGED, f"--{name}.max_steps=2")[-2:]
    judge = load_value_model(tmp_path / "one" / "reward_model")
    texts, result = samples[0].texts, samples[0]
    with torch.no_grad():
        numbers = [
            judge.at_end(pack([prompt], [[torch.cat([c.ids, c.ids[-1:]])]], judge.backbone.config)).item()
            for prompt, group in zip(result.prompts, result.completions, strict=True)
            for c in group
        ]
    assert torch.tensor(numbers).std() > 0
    torch.testing.assert_close(result.rewards[:, 1], torch.tensor(numbers), rtol=1e-4, atol=1e-5)
    assert one[0]["rewards/reward_model"] == pytest.approx(sum(numbers) / len(numbers), rel=1e-4)
    assert one[0]["reward"] == pytest.approx(sum(numbers) / len(texts) + 0.5 * one[0]["rewards/letters"], rel=1e-4)
    path = f"--reward_model.path={tmp_path / 'one' / 'reward_model'}"
    two = main(folder, tmp_path, "two", f"--stages={name}", JUDGED, path, f"--{name}.max_steps=2")
    assert one == two  # the policy of the first run was still the random one


def test_a_path_goes_before_the_model_that_is_trained_here(folder, tmp_path):
    main(folder, tmp_path, "judge", "--stages=reward_model", "--reward_model.max_steps=1")
    path = f"--reward_model.path={tmp_path / 'judge' / 'reward_model'}"
    alone = main(folder, tmp_path, "alone", "--stages=grpo", JUDGED, path)
    both = main(folder, tmp_path, "both", "--stages=[reward_model, grpo]", JUDGED, path)[-3:]
    assert alone == both


def test_the_judge_is_not_trained(folder, tmp_path, stage):
    main(folder, tmp_path, "judge", "--stages=reward_model")
    run = stage("grpo", JUDGED, f"--reward_model.path={tmp_path / 'judge' / 'reward_model'}")
    before = snapshot(run.algorithm.reward_model)
    run.go(2)
    for name, value in run.algorithm.reward_model.named_parameters():
        assert torch.equal(value, before[name]) and not value.requires_grad and value.grad is None


def test_what_is_no_reward_model_is_refused(folder, tmp_path, stage):
    main(folder, tmp_path, "plain", "--stages=[]")
    with pytest.raises(ValueError, match=r"checkpoint: this model has no score head .*; train one with stages"):
        stage("grpo", JUDGED, f"--reward_model.path={tmp_path / 'plain' / 'checkpoint'}")
    with pytest.raises(ValueError, match="/gone: no such folder; a reward model"):
        stage("ppo", JUDGED, "--reward_model.path=/gone")
    for stages in ("grpo", "[ppo]", "[sft, grpo]", "[grpo, reward_model]"):
        with pytest.raises(ValueError, match=r"rewards\.reward_model: there is no reward model for (grpo|ppo); set"):
            main(folder, tmp_path, "none", f"--stages={stages}", JUDGED)
    assert not (tmp_path / "none").exists()  # before anything is computed


def test_a_judge_with_another_vocabulary_is_refused(folder, tmp_path, stage, monkeypatch):
    main(folder, tmp_path, "judge", "--stages=reward_model", "--reward_model.max_steps=1")
    file = tmp_path / "judge" / "reward_model" / "config.json"
    values = json.loads(file.read_text())
    weights = file.with_name("model.safetensors")
    tensors = load_file(weights)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = torch.cat([tensors[name], tensors[name][:1]])
    save_file(tensors, weights)
    file.write_text(json.dumps(values | {"vocab_size": len(tensors["lm_head.weight"])}))
    with pytest.raises(ValueError, match="this model has another vocabulary than the policy"):
        stage("grpo", JUDGED, f"--reward_model.path={tmp_path / 'judge' / 'reward_model'}")


# ppo


@pytest.mark.parametrize("whiten", [False, True])
def test_advantages_and_returns_by_hand(stage, samples, whiten):
    """Plain loops over every completion: KL penalty, score at the end, GAE, whitening over the rollout."""
    run = stage(
        "ppo", "--ppo.num_ppo_epochs=1", "--ppo.kl_coef=0.2", "--ppo.gamma=0.9", "--ppo.lam=0.8",
        "--ppo.missing_eos_penalty=0.7", "--sampling.temperature=1.5", f"--ppo.whiten_rewards={str(whiten).lower()}",
    )  # fmt: skip
    run.go(2)
    policy, reference = run.model, run.algorithm.reference.model
    batches = run.next()
    completions = [c for group in samples[-1].completions for c in group]
    prompts = [p for p in samples[-1].prompts for _ in range(2)]
    scores = letters(samples[-1].texts)
    every_reward, every_value, advantages, returns = [], [], [], []
    for prompt, completion, score in zip(prompts, completions, scores, strict=True):
        batch = pack([prompt], [[completion.ids]], policy.config)
        with torch.no_grad():
            logps, ref = (per_token_logps(m, batch, 1.5)[0].tolist() for m in (policy, reference))
            values = run.algorithm.critic(completion_states(policy, batch))[:, 0].tolist()
        rewards = [-0.2 * (a - b) for a, b in zip(logps, ref, strict=True)]
        rewards[-1] += score - (0 if completion.stopped else 0.7)
        every_reward.append(rewards)
        every_value.append(values)
    if whiten:  # to variance 1, around the mean that they have
        flat = torch.tensor([r for rewards in every_reward for r in rewards], dtype=torch.float64)
        flat = (flat - flat.mean()) / (flat.var() + 1e-8).sqrt() + flat.mean()
        every_reward = [part.tolist() for part in flat.split([len(rewards) for rewards in every_reward])]
    for rewards, values in zip(every_reward, every_value, strict=True):
        following, next_value, own = 0.0, 0.0, []
        for reward, value in zip(reversed(rewards), reversed(values), strict=True):
            following = reward + 0.9 * next_value - value + 0.9 * 0.8 * following
            next_value = value
            own.insert(0, following)
        advantages.append(own)
        returns.append([a + v for a, v in zip(own, values, strict=True)])
    flat = torch.tensor([a for own in advantages for a in own], dtype=torch.float64)
    whitened = ((flat - flat.mean()) / (flat.var() + 1e-8).sqrt()).split([len(own) for own in advantages])
    assert any(abs(v) > 1e-3 for v in values)
    found = [row[: len(c.ids)] for row, c in zip(
        (row for b in batches for row in b.advantages), completions, strict=True)]  # fmt: skip
    found_returns = [row for b in batches for row in b.returns]
    for row, theirs, own, expected in zip(found, found_returns, whitened, returns, strict=True):
        torch.testing.assert_close(row.double(), own, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(
            theirs[: len(expected)].double(), torch.tensor(expected, dtype=torch.float64), rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize("critic", ["shared", "separate"])
def test_what_the_first_epoch_sees_is_what_was_stored(stage, critic):
    run = stage("ppo", f"--ppo.critic={critic}", dtype=torch.float32)
    for line, expected in zip(run.go(5), [True, False, False, False, True], strict=True):
        assert (line["ratio"] == 1) == expected
        if expected:
            assert line["approx_kl"] == line["clip_ratio/policy"] == line["clip_ratio/value"] == 0


def test_a_cut_completion_is_fined(stage, samples):
    run = stage("ppo", "--ppo.missing_eos_penalty=0.5")
    result = run.algorithm.sample({i: i for i in range(4)})
    stopped = torch.tensor([c.stopped for group in result.completions for c in group])
    assert 0 < stopped.sum() < len(stopped)
    combined = run.algorithm.combined(result)
    fines = combined - run.algorithm.scores(result, combined)
    assert torch.allclose(fines, torch.where(stopped, 0.0, 0.5))


def test_completions_that_nobody_can_judge_are_masked(stage, samples, monkeypatch):
    scripted(monkeypatch, [1.0, None, 0.0, 0.5, None, None, 1.0, 0.0])
    run = stage("ppo", "--ppo.micro_batch_size=4")
    [batch] = run.next()
    assert batch.completion_mask.any(1).tolist() == [True, False, True, True, False, False, True, True]
    lengths = [len(c.ids) for group in samples[0].completions for c in group]
    assert batch.num_tokens == sum(n for n, kept in zip(lengths, batch.completion_mask.any(1), strict=True) if kept)
    assert not batch.advantages[~batch.completion_mask.bool()].any()
    line = run.update()
    assert line["reward"] == 0.5 and math.isfinite(line["loss"])


def test_the_shared_critic_is_a_head_on_the_policy(stage, tmp_path):
    run = stage("ppo")
    assert {name.partition(".")[0] for name, _ in run.algorithm.trained.named_parameters()} == {"policy", "critic"}
    assert [name for name, _ in run.algorithm.trained.named_parameters() if name.startswith("critic")] == [
        "critic.weight"
    ]
    assert not run.algorithm.critic.weight.any()
    run.go(2)
    assert run.algorithm.critic.weight.any()
    run.algorithm.save(tmp_path)
    saved = load_file(tmp_path / "value_head.safetensors")
    assert list(saved) == ["score.weight"]
    assert torch.equal(saved["score.weight"], run.algorithm.critic.weight)
    assert (tmp_path / "checkpoint" / "model.safetensors").is_file()


def test_the_separate_critic_begins_with_the_policy_and_goes_its_own_way(stage, tmp_path):
    run = stage("ppo", "--ppo.critic=separate")
    before = snapshot(run.model)
    for name, value in run.algorithm.critic.backbone.named_parameters():
        assert torch.equal(value, before[name])
        assert value.data_ptr() != dict(run.model.named_parameters())[name].data_ptr()
    run.go(3)
    run.algorithm.save(tmp_path)
    loaded, trained = load_value_model(tmp_path / "critic"), snapshot(run.algorithm.critic)
    assert all(torch.equal(value, trained[name]) for name, value in loaded.named_parameters())
    assert not torch.equal(trained["backbone.model.norm.weight"], before["model.norm.weight"])
    assert not (tmp_path / "value_head.safetensors").exists()


@pytest.mark.parametrize("critic", ["shared", "separate"])
def test_values_pull_at_the_policy_only_where_it_is_shared(stage, critic):
    """At another vf_coef a separate critic leaves the policy's steps as they are."""
    ends = []
    for weight in (0.1, 10.0):
        run = stage("ppo", f"--ppo.critic={critic}", f"--ppo.vf_coef={weight}", "--ppo.max_grad_norm=1e9")
        run.go(3)
        ends.append(run.model.model.norm.weight.detach().clone())
    assert torch.equal(*ends) == (critic == "separate")


def test_a_critic_can_begin_with_a_reward_model(folder, tmp_path, stage):
    main(folder, tmp_path, "judge", "--stages=reward_model")
    path = tmp_path / "judge" / "reward_model"
    run = stage("ppo", "--ppo.critic=separate", f"--ppo.critic_path={path}", dtype=torch.float32)
    expected = snapshot(load_value_model(path))
    assert expected["score.weight"].any()
    assert all(torch.equal(value, expected[name]) for name, value in run.algorithm.critic.named_parameters())
    run.go(2)
    assert not torch.equal(run.algorithm.critic.score.weight, expected["score.weight"])
    with pytest.raises(ValueError, match="no score head"):
        stage("ppo", "--ppo.critic=separate", f"--ppo.critic_path={tmp_path / 'judge' / 'checkpoint'}")
    with pytest.raises(ValueError, match="/gone: no such folder"):
        stage("ppo", "--ppo.critic=separate", "--ppo.critic_path=/gone")


def test_ppo_shares_layers_with_its_reference_but_not_with_its_critic(stage):
    run = stage("ppo", "--ppo.critic=separate", "--ppo.num_shared_layers=1")
    critic = run.algorithm.critic
    assert all(p.requires_grad for name, p in critic.named_parameters() if name != "backbone.lm_head.weight")
    before = snapshot(critic)
    run.go(3)
    assert not torch.equal(critic.backbone.model.embed_tokens.weight, before["backbone.model.embed_tokens.weight"])


def test_ppo_learns_its_reward(stage):
    run = stage("ppo", "--ppo.num_generations=8", "--ppo.kl_coef=0.01", dtype=torch.float32)
    lines = run.go(60)
    first, last = (sum(line["reward"] for line in part) / 8 for part in (lines[:8], lines[-8:]))
    assert last > first + 0.2


def test_the_reward_model_learns_its_pairs(stage):
    rows = Shapes(4, "rows")
    run = stage("reward_model", rows=rows, held_out=rows, dtype=torch.float32)
    lines = run.go(20)
    assert lines[0]["loss"] == pytest.approx(math.log(2), rel=1e-6)
    assert lines[-1]["loss"] < 0.3
    assert run.algorithm.pair_accuracy() == 1
