"""A trainer that goes step by step on tiny models, and what tests of trainers share."""

import json

import pytest
import torch
import yaml
from runs import metrics

from minivlmrl.commands.train import train_recipe
from minivlmrl.config.loading import load_config
from minivlmrl.data.loader import Batches
from minivlmrl.data.processor import Processor
from minivlmrl.distributed.process_group import World
from minivlmrl.model.build import random_model
from minivlmrl.model.lora import init_adapters, inject_adapters
from minivlmrl.rewards.registry import REWARDS
from minivlmrl.run import loop
from minivlmrl.run.optimizer import build_optimizer
from minivlmrl.tasks import shapes
from minivlmrl.tasks.shapes import Shapes
from minivlmrl.trainers import registry
from minivlmrl.trainers.grpo import GRPOTrainer

from tiny import FILES, RUN_MODEL, RUN_QWEN3, RUN_QWEN3_MOE, RUN_QWEN35, RUN_QWEN35_MOE, of_file, recipe

STAGE = {
    "max_steps": 3, "prompts_per_step": 4, "micro_batch_size": 2, "learning_rate": 1e-2,
    "lr_scheduler_type": "constant",
}  # fmt: skip
DATA = {"task": "shapes(demonstrations=8, pairs=8)", "eval_rows": 2}
RECIPE = recipe(STAGE, data=DATA, rewards={"letters": 1.0})
STAGES = ("sft", "dpo", "reward_model", "grpo", "ppo")
MORE = {"distill": {"num_generations": 3}}  # options of stages of a file
ONE = World()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recipe")
    write_recipe(folder)
    return folder


def write_recipe(folder, recipe=RECIPE):
    """Write recipe.yaml and configs: of a model with a head of its own, with a tied head, of other families."""
    for tied in (False, True):
        model = RUN_MODEL | {"tie_word_embeddings": tied}
        (folder / f"{'tied' if tied else 'model'}.json").write_text(json.dumps(model))
    for model in (RUN_QWEN3, RUN_QWEN35, RUN_QWEN3_MOE, RUN_QWEN35_MOE):
        (folder / f"{model['model_type']}.json").write_text(json.dumps(model))
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))


def letters(completions, **columns):
    return [sum(c.isalpha() for c in completion) / 6 for completion in completions]


@pytest.fixture
def lively(monkeypatch):
    """Let an untrained model earn different rewards at different lengths: a reward for letters, many stop tokens."""
    monkeypatch.setitem(REWARDS, "letters", "stages:letters")
    monkeypatch.setattr(Processor, "stop_token_ids", property(lambda self: tuple(range(7, len(self.tokenizer), 8))))


class Stage:
    """A trainer and its optimizer, to go step by step."""

    def __init__(
        self, folder, stage, *overrides, rows=None, held_out=None, dtype=torch.float64, model="model", world=ONE
    ):
        named = of_file(stage, STAGE | MORE.get(stage, {})) if stage in FILES else [f"--stages={stage}"]
        config = load_config(folder / "recipe.yaml", [f"--output_dir={folder / 'out'}", *named, *overrides])
        trainer = registry.find_trainer(stage, config)
        trainer.check(config)
        self.model, processor = random_model(folder / f"{model}.json", shapes.tokenizer(), 0)
        self.model.to(world.device, dtype)
        inject_adapters(self.model, config.adapter)
        init_adapters(self.model, config.seed)
        self.trainer = trainer(config, self.model, processor, world)
        self.config, self.held_out, self.number = self.trainer.config, held_out, 0
        if rows is None:
            rows = Shapes(8, "rows", labelled=stage == "kto")
        self.batches = Batches(rows, self.trainer)
        self.optimizer = build_optimizer(self.trainer.trained, self.config, config.optimizer)
        self.kept = self.trainer.on_stage_begin(self.batches, held_out, None)
        self.work = self.trainer.steps(self.batches)
        self.step = None

    def next(self):
        """The next step's micro-batches, not yet trained on."""
        self.step = next(self.work)
        return self.step.micro_batches

    def update(self):
        metrics = loop.optimizer_step(self.trainer, self.step, self.optimizer, self.number)
        self.number += 1
        return metrics

    def go(self, steps=1):
        """Metrics of the next steps."""
        return [(self.next(), self.update())[1] for _ in range(steps)]

    def accuracy(self):
        return self.trainer.evaluate(self.held_out).get("eval/pair_accuracy")


@pytest.fixture
def stage(folder, lively):
    return lambda *arguments, **options: Stage(folder, *arguments, **options)


@pytest.fixture
def samples(monkeypatch):
    """All rollouts that are drawn, as they come."""
    seen = []
    original = GRPOTrainer.sample_rollout
    monkeypatch.setattr(GRPOTrainer, "sample_rollout", lambda *a: seen.append(original(*a)) or seen[-1])
    return seen


@pytest.fixture
def script(monkeypatch):
    """script(list or number, ...): what `letters` says of each rollout; a number is for all of its completions."""

    def script(*values):
        left = list(values)

        def reward(completions, **columns):
            values = left.pop(0)
            return values if isinstance(values, list) else [values] * len(completions)

        monkeypatch.setitem(REWARDS, "letters", reward)
        return left

    return script


def without_idle_rows(stage, script, rewards, *options):
    """Hold the first micro-batch of a step against that with all completions, by loss and gradients.

    Returns both.
    """
    found = []
    for everything in (False, True):
        script(rewards)
        run = stage("grpo", *options)
        if everything:
            run.trainer.rows_with_signal = lambda rows, advantages: rows
        batch = run.next()[0]
        loss, _ = run.trainer.loss(batch)
        loss.backward()
        found.append((batch, loss.detach(), {name: p.grad for name, p in run.model.named_parameters()}))
    (some, loss, gradients), (all_rows, expected, theirs) = found
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-14)
    assert any(gradient.abs().max() > 1e-6 for gradient in theirs.values())
    torch.testing.assert_close(gradients, theirs, rtol=1e-10, atol=1e-13)
    return some, all_rows


def earned(trainer, rollout):
    """What `letters` says of a rollout's completions, (n,)."""
    return torch.tensor(letters([trainer.processor.decode(c.ids) for c in drawn(rollout)]))


def drawn(rollout):
    """A rollout's completions, in order."""
    return [completion for group in rollout.completions for completion in group]


class Second(World):
    """The second of two ranks, alone: sums of the first one are the same as its own, its rewards are all 9."""

    def sum(self, *values):
        return [2 * value for value in values]

    def all_gather(self, tensor):
        return torch.cat([torch.full_like(tensor, 9), tensor])

    def gather_objects(self, value):
        return [value, value]


SECOND = Second(1, 2, torch.device("cpu"))


@pytest.fixture
def alone():
    """A process group of this process alone."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


class Rows(list):
    """A dataset of rows that are given."""


def snapshot(module):
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def main(folder, tmp_path, name, *overrides):
    """A whole run; returns the lines of its metrics.jsonl."""
    train_recipe([str(folder / "recipe.yaml"), f"--output_dir={tmp_path / name}", *overrides])
    return metrics(tmp_path / name)
