"""Run a trainer step by step on a tiny model; more helpers for trainer tests."""

import functools
import json
from types import SimpleNamespace

import pytest
import torch
import yaml

from minivlmrl.commands.train import train_recipe
from minivlmrl.config.loading import load_config
from minivlmrl.data.loader import Batches
from minivlmrl.data.processor import Processor
from minivlmrl.distributed.process_group import World
from minivlmrl.model.build import random_model
from minivlmrl.model.lora import init_adapters, inject_adapters
from minivlmrl.rewards.registry import READS_MESSAGES, REWARDS
from minivlmrl.run import loop
from minivlmrl.run.optimizer import build_optimizer
from minivlmrl.tasks import shapes
from minivlmrl.trainers import grpo, registry
from minivlmrl.trainers.rollout import RolloutTrainer
from tests.helpers.runs import metrics
from tests.helpers.tiny import RUN_MODEL, RUN_QWEN3, RUN_QWEN3_MOE, RUN_QWEN35, RUN_QWEN35_MOE, recipe

STAGE = {
    "max_steps": 3, "prompts_per_step": 4, "micro_batch_size": 2, "learning_rate": 1e-2,
    "lr_scheduler_type": "constant",
}  # fmt: skip
DATA = {"task": "shapes(demonstrations=8, pairs=8)", "eval_rows": 2}
RECIPE = recipe(STAGE, data=DATA, rewards={"letters": 1.0})
STAGES = ("sft", "dpo", "reward_model", "grpo", "ppo")
ONE = World()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recipe")
    write_recipe(folder)
    return folder


def write_recipe(folder, recipe=RECIPE):
    """Write recipe.yaml, and model configs with separate head, with tied head, and for other families."""
    for tied in (False, True):
        model = RUN_MODEL | {"tie_word_embeddings": tied}
        (folder / f"{'tied' if tied else 'model'}.json").write_text(json.dumps(model))
    for model in (RUN_QWEN3, RUN_QWEN35, RUN_QWEN3_MOE, RUN_QWEN35_MOE):
        (folder / f"{model['model_type']}.json").write_text(json.dumps(model))
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))


def letters(completions, **columns):
    return [sum(c.isalpha() for c in completion) / 6 for completion in completions]


@pytest.fixture
def varied_rollouts(monkeypatch):
    """Vary rewards and lengths of an untrained model: rewards for letters, many stop tokens."""
    monkeypatch.setitem(REWARDS, "letters", "tests.helpers.stages:letters")
    monkeypatch.setattr(Processor, "stop_token_ids", property(lambda self: tuple(range(7, len(self.tokenizer), 8))))


class Stage:
    """A trainer and its optimizer, to run step by step."""

    def __init__(
        self, folder, stage, *overrides, rows=None, held_out=None, dtype=torch.float64, model="model", world=ONE
    ):
        options = [f"--output_dir={folder / 'out'}", f"--stages={stage}", *overrides]
        config = load_config(folder / "recipe.yaml", options)
        trainer = registry.find_trainer(stage, config)
        trainer.check(config)
        self.model, processor = random_model(folder / f"{model}.json", shapes.tokenizer(), 0)
        self.model.to(world.device, dtype)
        inject_adapters(self.model, config.adapter)
        init_adapters(self.model, config.seed)
        self.trainer = trainer(config, self.model, processor, world)
        self.options, self.held_out, self.number = self.trainer.options, held_out, 0
        if rows is None:
            rows = shapes.Shapes(8, "rows")
        self.batches = Batches(rows, self.trainer)
        self.optimizer = build_optimizer(self.trainer.trained, self.options, config.optimizer)
        self.work = self.trainer.steps(self.batches)
        self.step = None

    def next(self):
        """Prepare the next optimizer step, and return its micro-batches."""
        self.step = next(self.work)
        return self.step.micro_batches

    def update(self):
        metrics = loop.optimizer_step(self.trainer, self.step, self.optimizer, self.number)
        self.number += 1
        return metrics

    def go(self, steps=1):
        return [(self.next(), self.update())[1] for _ in range(steps)]

    def accuracy(self):
        return self.trainer.evaluate(self.held_out).get("eval/pair_accuracy")


@pytest.fixture
def stage(folder, varied_rollouts):
    return lambda *arguments, **options: Stage(folder, *arguments, **options)


@pytest.fixture
def loss_calls(monkeypatch):
    """Return a list to which grpo_loss calls append their arguments."""
    calls = []
    original = grpo.grpo_loss

    @functools.wraps(original)
    def spy(per_token_logps, advantages, mask, **given):
        per_token_logps.retain_grad()
        calls.append(SimpleNamespace(logps=per_token_logps, advantages=advantages, mask=mask, **given))
        return original(per_token_logps, advantages, mask, **given)

    monkeypatch.setattr(grpo, "grpo_loss", spy)
    return calls


@pytest.fixture
def samples(monkeypatch):
    seen = []
    original = RolloutTrainer.sample_and_score
    monkeypatch.setattr(RolloutTrainer, "sample_and_score", lambda *a: seen.append(original(*a)) or seen[-1])
    return seen


@pytest.fixture
def script(monkeypatch):
    """Return a function that sets the reward `letters` in the next rollouts: lists, or one number per rollout."""

    def script(*values):
        left = list(values)

        def reward(completions, **columns):
            values = left.pop(0)
            return values if isinstance(values, list) else [values] * len(completions)

        monkeypatch.setitem(REWARDS, "letters", reward)
        monkeypatch.setitem(READS_MESSAGES, "letters", False)  # else a first call with one completion would pop a value
        return left

    return script


def letter_rewards(trainer, rollout):
    return torch.tensor(letters([trainer.processor.decode(c.ids) for c in completions_of(rollout)]))


def completions_of(rollout):
    return [sample.completion for sample in rollout.samples]


class SecondRank(World):
    """Simulate rank 1 of 2; rank 0 has the same sums, and all values gathered from it are 9."""

    def sum(self, *values):
        return [2 * value for value in values]

    def all_gather(self, tensor):
        return torch.cat([torch.full_like(tensor, 9), tensor])

    def gather_objects(self, value):
        return [value, value]


SECOND_RANK = SecondRank(1, 2, torch.device("cpu"))


@pytest.fixture
def one_rank():
    """Initialize a process group with this process as its only rank."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


class Rows(list):
    """A list of rows as a dataset."""


def snapshot(module):
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def main(folder, tmp_path, name, *overrides):
    """Train the whole recipe, and return the lines in metrics.jsonl."""
    train_recipe([str(folder / "recipe.yaml"), f"--output_dir={tmp_path / name}", *overrides])
    return metrics(tmp_path / name)
