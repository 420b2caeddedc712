"""Repeat a training step: `minivlmrl replay RUN --step 73 --prompt 4`.

RUN is a run folder or a recipe. `replay` trains up to the step, from the last checkpoint before it or from the start,
and writes nothing to RUN. On the same machine, completions and metrics equal those in completions.jsonl and
metrics.jsonl.
"""

import argparse
import shutil
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch.optim import Optimizer

from minivlmrl.config.loading import load_config
from minivlmrl.config.options import RunConfig
from minivlmrl.data.loader import Batches
from minivlmrl.data.messages import text_of
from minivlmrl.data.processor import encode_answer
from minivlmrl.data.rows import Row
from minivlmrl.distributed import process_group
from minivlmrl.errors import UserError
from minivlmrl.json_files import json_text, parse_json
from minivlmrl.model.logprobs import per_token_logps
from minivlmrl.model.packing import pack_turns
from minivlmrl.run import loop
from minivlmrl.run.callbacks import Callback, default_callbacks
from minivlmrl.run.metrics import METRICS
from minivlmrl.run.rollout_log import LogLine, groups, read_lines
from minivlmrl.run.states import COMPLETE, state_folders
from minivlmrl.run.trainer_state import read_trainer_state
from minivlmrl.trainers.base import Step, Trainer


def build_parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser("minivlmrl replay", description=__doc__, allow_abbrev=False)
    add = p.add_argument
    add("run", help="folder of a run, or a recipe with options --section.name=value")
    add("--recipe", help="recipe (default: config.yaml of the run, if it names no Python code)")
    add("--stage", help="stage of the step (default: the last stage)")
    add("--step", type=int, default=0, help="number of the step in its stage, counted from 0")
    add("--prompt", type=int, default=0, help="number of the prompt to print, counted from 0")
    return p


def main(arguments: list[str]) -> int:
    """Replay a step, and print a prompt with its completions; return 1 if the logs differ."""
    options, overrides = build_parser().parse_known_args(arguments)
    folder, number = Path(options.run), options.step
    for override in overrides:
        if folder.is_dir() and not override.startswith("--num_threads="):
            raise UserError(
                f"{folder}: a run is replayed with its own options, so {override} is not allowed. "
                "To change options, give a recipe instead of the folder of a run."
            )
    config = run_config(folder, options.recipe, overrides)
    stage = options.stage or ["none", *config.stage_names][-1]
    trainer, optimizer, step, rows = go_to(config, stage, number)
    print_group(trainer, step, rows, options.prompt)
    metrics = loop.optimizer_step(trainer, step, optimizer, number)
    # completions.jsonl has completions from all ranks
    parts = trainer.world.gather_objects(groups(trainer, step))
    process_group.shutdown(trainer.world)
    completions = [line for part in parts for line in part]
    same = compare(folder, stage, number, completions, metrics)
    for name, is_same in same.items():
        difference = (
            "differs from the replayed step. Possible reasons are a different CPU, number of threads, number of "
            "ranks or version of torch, and options that were changed before the run was resumed."
        )
        print(f"{name} {'equals the replayed step' if is_same else difference}")
    if not same:
        print(f"The logs of the run do not contain this step: {log_end(folder / METRICS)}.")
    return int(not all(same.values()))


def run_config(folder: Path, recipe: str | None, overrides: list[str]) -> RunConfig:
    # replay a recipe from step 0: checkpoints in output_dir may belong to another run
    if not folder.is_dir():
        return load_config(folder, ["--resume=never", *overrides])
    overrides = [f"--output_dir={folder}", *overrides]
    return load_config(recipe or folder / "config.yaml", overrides, is_found=recipe is None)


class Reached(Exception):
    """Raised when training reaches the step to replay; args: trainer, optimizer, step, rows."""


class StopBefore(Callback):
    def __init__(self, stage: str, number: int):
        self.wanted = stage, number

    def on_step_begin(self, trainer: Trainer, optimizer: Optimizer, step: Step, number: int, batches: Batches):
        if (trainer.stage, number) != self.wanted:
            return
        last_batch = Batches(batches.dataset, trainer, batches.batches_consumed - 1)
        rows = [group[0].row for group in step.groups] or next(last_batch)
        raise Reached(trainer, optimizer, step, rows)


def go_to(config: RunConfig, stage: str, number: int) -> tuple[Trainer, Optimizer, Step, Sequence[Row]]:
    """Train up to a step, starting from the last checkpoint before it."""
    if stage not in config.stage_names:
        raise UserError(
            f"--stage {stage}: the run has no stage with this name. Choose one of its stages: "
            f"{', '.join(config.stage_names)}"
        )
    max_steps = getattr(config, stage).max_steps
    if not 0 <= number < max_steps:
        raise UserError(f"--step {number}: the stage {stage} has only the steps 0 to {max_steps - 1}")
    checkpoint = None
    wanted_step = config.stage_names.index(stage), number
    states = [] if config.resume == "never" else state_folders(Path(config.output_dir) / "states")
    for path in states:
        if (path / COMPLETE).is_file():  # skip checkpoints that are damaged or being deleted
            state = read_trainer_state(path)
            if (state.stage, state.step) <= wanted_step:
                checkpoint = path
    print(f"{stage} step {number}, replayed from {checkpoint or 'the start of the run'}")

    data = replace(config.data, eval_rows=0)
    with TemporaryDirectory() as scratch:
        reward_model = Path(config.output_dir) / "reward_model"
        if checkpoint and reward_model.is_dir():
            shutil.copytree(reward_model, Path(scratch) / "reward_model")
        config = replace(
            config, output_dir=scratch, resume=str(checkpoint) if checkpoint else "never", report_to=[],
            eval_steps=0, save_steps=0, best_metric=None, data=data,
        )  # fmt: skip
        try:
            with redirect_stdout(sys.stderr):
                exit_code = loop.run_training(config, [*default_callbacks(config), StopBefore(stage, number)])
        except Reached as reached:
            return reached.args
    if exit_code:
        raise UserError(f"--step {number}: a signal stopped the replay before this step. Run the command again.")
    raise UserError(
        f"--step {number}: the stage {stage} has fewer steps, because max_epochs ends it earlier. "
        "Choose an earlier step."
    )


@torch.no_grad()
def print_group(trainer: Trainer, step: Step, rows: Sequence[Row], index: int):
    """Print a prompt and, per completion, log-prob sum in nats, answer and rewards."""
    if not 0 <= index < len(rows):
        raise UserError(f"--prompt {index}: the step has only the prompts 0 to {len(rows) - 1}")
    row = rows[index]
    temperature = 1.0
    if step.groups:
        completions = [sample.completion for sample in step.groups[index]]
        temperature = trainer.config.sampling.temperature
        table = []
        explanations = []
        for line in groups(trainer, step)[index]["completions"]:
            table.append(line["rewards"] | {"reward": line["reward"], "advantage": line["advantage"]})
            reasons = [f"{name}: {reason}" for name, reason in line["why"].items()]
            explanations.append([f"answer: {line['answer']!r}", *reasons])
    else:
        answers = [getattr(row, name) for name in trainer.answers]
        completions = [encode_answer(trainer.processor, row, x) for x in answers]
        table = [{"answer": name} for name in trainer.answers]
        explanations = [[] for _ in answers]
    prompts = [row.prompt(trainer.processor)]
    group = pack_turns(prompts, [completions], trainer.policy.config, trainer.world.device)
    logps, _ = per_token_logps(trainer.policy, group, temperature)
    logps_of_rows = zip(group.pad(logps.cpu()), group.layout.row_lengths, strict=True)
    logps = [row_logps[:length] for row_logps, length in logps_of_rows]
    print(f"row {row.index} {row.where}: {text_of(row.messages[-1])!r}, solution {row.columns.get('solution')!r}")
    for i, completion in enumerate(completions):
        trained = logps[i][completion.policy_mask]
        line = table[i] | {"tokens": len(trained), "trained": trained.sum().item()}
        if completion.logps is not None:  # answers from the dataset have no sampler log-probs
            sampled = completion.logps[completion.policy_mask]
            line |= {"sampled": sampled.sum().item(), "differ by": (trained - sampled).abs().max().item()}
        if i == 0:
            print("completion", *(f"{name:>10}" for name in line))
        values = [f"{x:.4g}" if isinstance(x, float) else str(x) for x in line.values()]
        print(f"{i:<10}", *(f"{value:>10}" for value in values))
        print(f"    {trainer.processor.decode(completion.ids)!r}")
        for explanation in explanations[i]:
            print(f"    {explanation}")


def compare(folder: Path, stage: str, number: int, completions: list[dict], metrics: dict) -> dict[str, bool]:
    """Compare logged lines with the replayed ones; return {log file: whether all lines are equal}."""
    same = {}
    for name, lines in (("completions.jsonl", completions), ("metrics.jsonl", [metrics])):
        replayed_lines = parse_json(json_text(lines))
        for line in read_lines(folder / name, LogLine):
            if (line["stage"], line["step"]) == (stage, number):
                same[name] = same.get(name, True) and any(line == line | other for other in replayed_lines)
    return same


def log_end(path: Path) -> str:
    lines = read_lines(path, LogLine)
    if not lines:
        return f"{path.parent} contains no metrics"
    last_line = lines[-1]
    end = f"{path} ends with {last_line['stage']} step {last_line['step']}"
    if not path.read_bytes().endswith(b"\n"):
        end += ", followed by a line that is incomplete, because the run is writing it or was killed"
    return end
