"""Train with TRL's and with our GRPO, DPO and SFT trainers, and compare the weights after each of 50 steps.

    python -m tests.parity.trl_runs docs/curves/trl_runs.json    # prints a table; two minutes on one core

All runs start with the same tiny Qwen2.5-VL in float64 and random pictures. Runs have warm-up, a decaying learning
rate, weight decay, clipped gradients and ratios, two micro-batches per step, and tokens inside completions that are
not trained on. TRL's GRPO gets the completions of our sampler. DESIGNS are the places where TRL computes something
else on purpose. TRL is changed to agree with us, and the table also shows runs in which TRL keeps one design, or all.
"""

import argparse
import json
import os
import tempfile
from contextlib import redirect_stdout
from itertools import chain
from pathlib import Path

import numpy
import PIL.Image
import pytest
import torch
import trl
import yaml

from benchmarks.common import provenance
from minivlmrl.config.loading import load_config
from minivlmrl.generation.sampler import Sampler
from minivlmrl.model.families.registry import hub_name
from minivlmrl.rewards.columns import call_rewards
from minivlmrl.run.callbacks import Callback
from minivlmrl.run.loop import run_training
from tests.helpers.oracle import in_float64
from tests.helpers.talk import assistant, user
from tests.record import trl_fixtures

STEPS, SHOWN = 50, (1, 10, 50)
PASSES, PARTS, MICRO_BATCHES = 2, 2, 2  # passes over a rollout, optimizer steps in a pass, micro-batches in a step
TEMPERATURE = 0.7
SAME = {"learning_rate": 1e-3, "warmup_steps": 4, "adam_beta2": 0.999}
OPTIMIZER = {"weight_decay": 0.1, "max_grad_norm": 2.0}
OFFLINE = {"prompts_per_step": 4, "micro_batch_size": 2}
OFFLINE_TRL = {"per_device_train_batch_size": 2, "max_length": None, "train_sampling_strategy": "sequential"}
KINDS = {  # trainer: options of both, our options, TRL's options
    "grpo": (
        {"lr_scheduler_type": "cosine", "beta": 0.04, "num_generations": 3, "num_iterations": PASSES},
        {"epsilon_low": 0.02, "epsilon_high": 0.03, "steps_per_generation": PARTS}
        | {"prompts_per_step": 2, "micro_batch_size": 1},
        {"epsilon": 0.02, "epsilon_high": 0.03, "steps_per_generation": PARTS * MICRO_BATCHES}
        | {"per_device_train_batch_size": 3, "shuffle_dataset": False, "temperature": TEMPERATURE},
    ),
    "dpo": ({"lr_scheduler_type": "linear", "beta": 0.1}, OFFLINE, OFFLINE_TRL),
    "sft": ({"lr_scheduler_type": "linear"}, OFFLINE, OFFLINE_TRL),
}  # fmt: skip
ANSWERS = {"grpo": (), "dpo": ("chosen", "rejected"), "sft": ("completion",)}  # columns of a row


def make_folder(folder: Path):
    """Write a tiny model, and rows with random pictures of two sizes and texts of several lengths."""
    trl_fixtures.write_model(folder)
    numbers, lines = numpy.random.default_rng(0), []
    for i in range(8):
        PIL.Image.fromarray(numbers.integers(0, 256, (56, 56 + 28 * (i % 2), 3), numpy.uint8)).save(folder / f"{i}.png")
        text = {"problem": "What is it" + "?" * (i % 3), "completion": "a ball" * (1 + i % 3)}
        lines.append(text | {"image": f"{i}.png"})
        lines[-1] |= {"chosen": "a red ball" * (1 + i % 2), "rejected": "no" * (1 + i)}
    (folder / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def variety(completion_ids, **_) -> list[float]:
    """Reward completions by the number of different ids, modulo 5."""
    return [len(set(ids)) % 5 / 3 for ids in completion_ids]


def is_trained(length: int) -> torch.Tensor:
    """Return a mask of the trained tokens of a completion; the other tokens could be the answer of a tool."""
    return torch.arange(length) % 5 != 2


class MaskedSampler(Sampler):
    """Sample completions with untrained tokens, and without placeholders of images, on which TRL cannot train."""

    def token_sampler(self, *given):
        sample, image = super().token_sampler(*given), torch.tensor([self.model.config.image_token_id])
        return lambda logits, *rest: sample(logits.index_fill(1, image, -torch.inf), *rest)

    def sample(self, *given):
        groups = super().sample(*given)
        for completion in chain(*groups):
            completion.policy_mask = is_trained(len(completion.ids))
        return groups


class OurRun(Callback):
    """Record our run: rows and completions in order, and weights and metrics after each step."""

    def __init__(self):
        self.rows, self.completions, self.weights, self.metrics = [], [], [], []

    def on_stage_begin(self, trainer, optimizer, state):
        self.weights.append(copies(trainer.policy))

    def on_step_begin(self, trainer, optimizer, step, number, batches):
        if step.rollout is None:
            self.rows += [prompt.row.index for batch in step.micro_batches for prompt in batch.group.prompts]
        elif number % (PASSES * PARTS) == 0:
            self.rows += [group[0].row.index for group in step.rollout.groups]
            self.completions += [sample.completion for sample in step.rollout.samples]

    def on_step_end(self, trainer, step, number, values):
        self.weights.append(copies(trainer.policy))
        self.metrics.append(values)


def copies(model) -> dict[str, torch.Tensor]:
    return {hub_name(name.removeprefix("module.")): p.detach().clone() for name, p in model.named_parameters()}


def our_run(kind: str, folder: Path, steps: int) -> OurRun:
    both, options, _ = KINDS[kind]
    recipe = {
        "stages": [kind], kind: SAME | both | options | {"max_steps": steps}, "optimizer": OPTIMIZER,
        "output_dir": str(folder / "ours"), "resume": "never", "state_minutes": 0, "num_threads": 1,
        "model": {"path": str(folder / "model"), "dtype": "float64"},
        "data": {"train_file": str(folder / "rows.jsonl")},
    }  # fmt: skip
    if kind == "grpo":
        ends = list(range(0, 360, 6))  # so many end tokens that most completions end before max_new_tokens
        recipe["sampling"] = {"engine": f"{__file__}:MaskedSampler", "max_new_tokens": 10, "stop_token_ids": ends}
        recipe["sampling"]["temperature"] = TEMPERATURE
        recipe["rewards"] = {f"{__file__}:variety": 1.0}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    run = OurRun()
    with pytest.MonkeyPatch.context() as patch, open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        patch.setattr("minivlmrl.trainers.rollout.call_rewards", lambda *given: call_rewards(*given).double())
        run_training(load_config(str(folder / "recipe.yaml"), []), [run])
    return run


class PlainHead:
    """TRL's fused head, computed in the dtype of the hidden states instead of float32."""

    @staticmethod
    def apply(hidden, weight, bias, labels, temperature, *_):
        logps = (hidden @ weight.T / temperature).log_softmax(-1)
        entropy, squares = -(logps.exp() * logps).sum(-1), (2 * logps).logsumexp(-1)
        return logps.gather(1, labels[:, None])[:, 0], entropy, squares, hidden[:, 0] * 0, logps.argmax(-1) == labels


def compute_in_float64(trainer, patch):
    in_float64(patch, "qwen2_5_vl")
    patch.setattr(trl.trainer.utils, "_ChunkedLogProbFunction", PlainHead)
    if hasattr(trainer, "_calculate_rewards"):
        rewards = trainer._calculate_rewards
        trainer._calculate_rewards = lambda *given: rewards(*given).double()


def begin_above_zero(trainer, patch):
    """Let each warm-up step of TRL have the learning rate of the next step."""
    create = trainer.create_scheduler

    def create_scheduler(*given, **named):
        schedule = create(*given, **named)
        warmup, rates = SAME["warmup_steps"], schedule.lr_lambdas
        schedule.lr_lambdas = [lambda step, rate=rate: rate(step + (step < warmup)) for rate in rates]
        for group in trainer.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * schedule.lr_lambdas[0](0)
        return schedule

    trainer.create_scheduler = create_scheduler


def end_at_the_end_token(trainer, patch):
    newline = "<|im_end|>{{ '\\n' if message.role != 'assistant' }}"
    trainer.processing_class.chat_template = trainer.processing_class.chat_template.replace("<|im_end|>\n", newline)


def count_tokens_of_the_step(trainer, patch):
    prepare = trainer._prepare_inputs

    def prepared(rows):
        inputs = prepare(rows)
        first = trainer._step % (PARTS * MICRO_BATCHES) // MICRO_BATCHES * MICRO_BATCHES
        window = trainer._buffered_inputs[first : first + MICRO_BATCHES]
        tokens = sum((part["completion_mask"] * part["tool_mask"]).sum() for part in window)
        return inputs | {"num_items_in_batch": tokens * PARTS}  # TRL divides it by the number of steps

    trainer._prepare_inputs = prepared


# what TRL computes differently: (its trainers that do, the change that makes TRL agree with us)
DESIGNS = {
    "head, norms and rewards in float32": ("grpo dpo sft", compute_in_float64),
    "a warm-up that begins at 0": ("grpo dpo sft", begin_above_zero),
    "no decay of biases and norms": ("grpo dpo sft", lambda trainer, patch: patch.setattr(
        trainer, "get_decay_parameter_names", lambda model: [name for name, _ in model.named_parameters()])),
    "completions shuffled over the steps": ("grpo", lambda trainer, patch: patch.setattr(
        trl.trainer.grpo_trainer, "shuffle_sequence_dict", lambda rows: rows)),
    "tokens of an average step": ("grpo", count_tokens_of_the_step),
    "newline after the answer": ("dpo sft", end_at_the_end_token),
    "means of micro-batches": ("sft", lambda trainer, patch: patch.setattr(trainer, "model_accepts_loss_kwargs", True)),
}  # fmt: skip


def designs_of(kind: str) -> list[str]:
    return [name for name, (kinds, _) in DESIGNS.items() if kind in kinds.split()]


def their_run(kind: str, folder: Path, ours: OurRun, kept=()) -> tuple[list[dict], list[float]]:
    """Run TRL's trainer on the rows and completions of our run, and return the weights and the losses of its steps.

    Args:
        kept: the DESIGNS that TRL keeps.
    """
    both, _, options = KINDS[kind]
    options = SAME | OPTIMIZER | both | options | {"gradient_accumulation_steps": MICRO_BATCHES}
    lines, rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()], []
    for line in (lines[index] for index in ours.rows):
        answers = {name: [assistant(line[name])] for name in ANSWERS[kind]}
        rows.append({"prompt": [user(line["problem"])], "images": [PIL.Image.open(folder / line["image"])], **answers})
    policy, processor = trl_fixtures.model(folder / "model", torch.float64), trl_fixtures.processor(folder / "model")
    options["max_steps"], rewards = len(ours.metrics), {"reward_funcs": [variety]} if kind == "grpo" else {}
    trainer = trl_fixtures.build(kind.upper(), policy, folder / "theirs", rows, options, processor, **rewards)
    if kind == "grpo":
        generate, completions = trainer._generate, iter(ours.completions)
        trainer._generate = lambda prompts: with_masks(generate(prompts))
        trainer._generate_single_turn = lambda prompts, *_: ([next(completions).ids.tolist() for _ in prompts], None)
    weights, losses, take_micro_batch = [], [], trainer.training_step

    def training_step(*given, **named):
        weights.append(copies(policy))
        losses.append(take_micro_batch(*given, **named))
        return losses[-1]

    trainer.training_step = training_step
    with pytest.MonkeyPatch.context() as patch, open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        for name in designs_of(kind):
            if name not in kept:
                DESIGNS[name][1](trainer, patch)
        trainer.train()
    losses = torch.stack(losses).view(-1, MICRO_BATCHES).sum(1).tolist()
    return [*weights[::MICRO_BATCHES], copies(policy)], losses


def with_masks(generated: tuple) -> tuple:
    """Add TRL's tool_mask to generated completions."""
    return *generated[:2], [is_trained(len(ids)).long().tolist() for ids in generated[1]], *generated[3:]


def differences(some: list[dict], others: list[dict]) -> list[float]:
    """Return the largest difference of a weight before the first step, and after each step."""
    pairs = zip(some, others, strict=True)
    return [max((a[name] - b[name]).abs().max().item() for name in a.keys() | b.keys()) for a, b in pairs]


def main(file: str | None = None):
    """Print a table, and write its numbers to a file."""
    torch.set_num_threads(1)
    runs = []
    print("| trainer | TRL keeps | weights after 1, 10, 50 steps | by how far they moved | loss |\n" + "|---" * 5 + "|")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_folder(folder)
        for kind in KINDS:
            ours = our_run(kind, folder, STEPS)
            moved = differences(ours.weights, ours.weights[:1] * (STEPS + 1))
            designs = designs_of(kind)
            for kept in ([], *([design] for design in designs), designs):
                weights, losses = their_run(kind, folder, ours, kept)
                apart = differences(ours.weights, weights)
                losses = [abs(line["loss"] - loss) for line, loss in zip(ours.metrics, losses, strict=True)]
                what = "all" if len(kept) > 1 else "".join(kept)
                runs.append(
                    {
                        "trainer": kind,
                        "kept": what,
                        "weights": [float(f"{x:.3g}") for x in apart[1:]],
                        "loss": [float(f"{x:.3g}") for x in losses],
                    }
                )
                numbers = [[apart[n], apart[n] / moved[n], losses[n - 1]] for n in SHOWN]
                cells = [", ".join(f"{x:.0e}" for x in column) for column in zip(*numbers, strict=True)]
                print(f"| {kind} | {what or 'nothing'} | {' | '.join(cells)} |", flush=True)
            clipped = sum(line["grad_norm"] > OPTIMIZER["max_grad_norm"] for line in ours.metrics)
            print(f"{kind}: weights moved by {moved[-1]:.3f}; gradients were clipped in {clipped} of {STEPS} steps")
            runs.append({"trainer": kind, "moved": moved[-1]})
    if file:
        Path(file).write_text(json.dumps(provenance() | {"runs": runs}) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", help="JSON file of the results")
    main(parser.parse_args().file)
