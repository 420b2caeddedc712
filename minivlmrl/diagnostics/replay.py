"""`python -m minivlmrl replay RUN --step 73 --prompt 4`: one step of a run again.

RUN is the folder of a run, or a recipe. The nearest state of the run before the step is read, or it
begins anew; the steps in between are trained, and nothing is written in RUN. Draws depend on keys
alone, so what completions.jsonl and metrics.jsonl say of the step is compared to the last bit.
"""

import argparse
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch.optim import Optimizer

from minivlmrl.config.loading import load_config
from minivlmrl.config.options import RunConfig
from minivlmrl.config.parsing import json_text, parse_json
from minivlmrl.data.loader import Batches
from minivlmrl.data.messages import text_of
from minivlmrl.data.processor import encode_completion
from minivlmrl.data.rows import Completion, Row
from minivlmrl.diagnostics.trace import Film
from minivlmrl.distributed import process_group
from minivlmrl.files import read_lines
from minivlmrl.generation.environments import pack_rollout
from minivlmrl.model.logprobs import per_token_logps
from minivlmrl.run import loop
from minivlmrl.run.callbacks import Callback, default_callbacks
from minivlmrl.run.checkpoints import COMPLETE, state_folders
from minivlmrl.run.metrics import METRICS
from minivlmrl.run.process import is_first
from minivlmrl.run.rollout_log import COMPLETIONS, IMAGES, Logged, groups, is_past
from minivlmrl.run.trainer_state import read_trainer_state
from minivlmrl.trainers.base import Step, Trainer
from minivlmrl.trainers.reward_model import FOLDER as REWARD_MODEL


def build_parser() -> argparse.ArgumentParser:
    """The command line; what it does not know are fields of the recipe."""
    p = argparse.ArgumentParser(
        "python -m minivlmrl replay", description=__doc__, allow_abbrev=False
    )
    p.add_argument("run", help="the folder of a run; or a recipe, with --section.name=value")
    p.add_argument("--recipe", help="default: config.yaml of the run, if it names no code")
    p.add_argument("--stage", help="by default the last one")
    p.add_argument("--step", type=int, default=0, help="of the stage, from 0")
    p.add_argument("--prompt", type=int, default=0, help="of the step, from 0")
    p.add_argument(
        "--lines",
        metavar="FILE.html",
        help="write the step line by line, of README's reading list; with ,FOLDER or ,FILE.py of these too",
    )
    return p


def main(arguments: list[str]) -> int:
    """Replay a step and print one of its groups; 1 if a file of the run says something else."""
    options, overrides = build_parser().parse_known_args(arguments)
    folder = Path(options.run)
    number = options.step
    for override in overrides:
        if folder.is_dir() and not override.startswith("--num_threads="):
            raise ValueError(
                f"{folder}: a run is replayed as it was; only a recipe takes {override}"
            )
    config = run_config(folder, options.recipe, overrides)
    stage = options.stage or ["none", *config.stage_names][-1]
    film = None
    if options.lines:
        page, *names = options.lines.split(",")
        if not Path(page).absolute().parent.is_dir() or "RANK" in os.environ:
            raise ValueError(
                f"--lines={page}: name a file in a folder that is there, without torchrun"
            )
        film = Film(names, stage, number)
    try:
        trainer, optimizer, step, rows = go_to(config, stage, number, film)
        print_group(trainer, step, rows, options.prompt)
        with film or nullcontext():
            metrics = loop.optimizer_step(trainer, step, optimizer, number)
    finally:
        if film and film.calls:  # of a step that fails too
            film.write(Path(page), f"{options.run}, {stage} step {number}")
    process_group.shutdown(trainer.world)
    same = compare(folder, trainer, step, number, metrics)
    for name, is_same in same.items():
        other = (
            "something else: another CPU, number of threads or ranks, version of torch, or other "
            "options before a resume?"
        )
        print(f"{name} says {'the same' if is_same else other}")
    if not same:
        print(f"nothing to compare with: {log_end(folder / METRICS)}")
    return int(not all(same.values()))


def run_config(folder: Path, recipe: str | None, overrides: list[str]) -> RunConfig:
    """Read the recipe of a run's folder, or another one (ValueError: it names code unasked)."""
    if not folder.is_dir():  # a recipe: what is in its output_dir is another run's
        return load_config(folder, ["--resume=never", *overrides])
    given = recipe or folder / "config.yaml"
    asked_for = None if recipe else overrides
    return load_config(given, [f"--output_dir={folder}", *overrides], asked_for)


class Reached(Exception):
    """The requested step comes next. Its arguments are trainer, optimizer, Step and rows."""


class StopBefore(Callback):
    """Raises Reached before the update of a step."""

    def __init__(self, stage: str, number: int, film: Film | None = None):
        self.wanted = stage, number
        self.film = film

    def on_step_begin(
        self, trainer: Trainer, optimizer: Optimizer, step: Step, number: int, batches: Batches
    ):
        if (trainer.stage, number) != self.wanted:
            return
        if self.film:
            self.film.pause(trainer, step)
        last_batch = Batches(batches.dataset, trainer, batches.draws - 1)
        rows = step.rollout.rows if step.rollout else next(last_batch)
        raise Reached(trainer, optimizer, step, rows)


def go_to(
    config: RunConfig, stage: str, number: int, film: Film | None = None
) -> tuple[Trainer, Optimizer, Step, Sequence[Row]]:
    """Train until a step is next: trainer, optimizer, Step, rows (ValueError: there is none).

    A copy of the run, cut back to its nearest state before the step, is resumed by train itself.
    """
    if stage not in config.stage_names:
        raise ValueError(f"--stage {stage}: the run has {', '.join(config.stage_names)}")
    max_steps = getattr(config, stage).max_steps
    if not 0 <= number < max_steps:
        raise ValueError(f"--step {number}: {stage} has the steps 0 to {max_steps - 1}")
    state = None
    wanted_step = config.stage_names.index(stage), number
    states = [] if config.resume == "never" else state_folders(Path(config.output_dir) / "states")
    for path in states:
        if not (path / COMPLETE).is_file():  # it is damaged, or the run goes on and has removed it
            continue
        progress = read_trainer_state(path)
        if (progress.stage, progress.step) <= wanted_step:
            state = path
    print(f"{stage} step {number}, trained again from {state or 'the beginning'}")

    data = replace(config.data, eval_rows=0)
    if film:
        data.image_workers = 0  # a row is made in the step that trains on it
    with TemporaryDirectory() as scratch:
        try:
            with film or nullcontext():
                folder = Path(scratch) / "run"
                stop = StopBefore(stage, number, film)
                nothing_else = {"eval_steps": 0, "save_steps": 0, "best_metric": None, "data": data}
                exit_code = train_again(config, state, folder, stop, **nothing_else)
        except Reached as reached:
            return reached.args
    if exit_code:
        raise ValueError(f"--step {number}: a signal has stopped the replay before it")
    raise ValueError(f"--step {number}: {stage} has fewer steps, its rows end with max_epochs")


def train_again(
    config: RunConfig, state: Path | None, folder: Path, callback: Callback, **options
) -> int:
    """Let train resume a copy of a run, cut back to a state or to nothing; returns its exit code.

    Args:
        folder: of the copy (ValueError: it is there).
        callback: called in addition to the default callbacks.
        options: fields of the recipe.
    """
    if is_first():  # the other ranks wait for it in run_training
        if folder.exists():
            raise ValueError(f"{folder}: is there already; remove it")
        folder.mkdir()
        for name in earlier_files(Path(config.output_dir), state) if state else ():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(Path(config.output_dir) / name, folder / name)
    resume = str(state) if state else "never"
    config = replace(config, output_dir=str(folder), resume=resume, report_to=[], **options)
    with redirect_stdout(sys.stderr):
        return loop.run_training(config, [*default_callbacks(config), callback])


def earlier_files(run: Path, state: Path) -> Iterator[Path]:
    """Name the files that a state does not hold: completions so far, a trained reward model."""
    progress = read_trainer_state(state)
    if (run / COMPLETIONS).is_file():
        yield Path(COMPLETIONS)
    for line in read_lines(run / COMPLETIONS, Logged):
        if is_past(line, progress):
            paths = list(line["images"])
            for completion in line["completions"]:
                paths += completion.get("pictures", ())
            yield from (Path(IMAGES, Path(path).name) for path in paths)
    for path in (run / REWARD_MODEL).rglob("*"):
        if path.is_file():
            yield path.relative_to(run)


@torch.no_grad()
def print_group(trainer: Trainer, step: Step, rows: Sequence[Row], index: int):
    """Print a prompt of a step and its completions; log-probabilities are sums, in nats."""
    prompts = step.prompts if step.rollout else range(len(rows))
    if not 0 <= index < len(prompts):
        raise ValueError(f"--prompt {index}: the step has the prompts 0 to {len(prompts) - 1}")
    row = rows[prompts[index]]
    temperature = 1.0
    if step.rollout:
        completions = step.rollout.completions[prompts[index]]
        temperature = trainer.run.sampling.temperature
        logged_group = list(groups(trainer, step))[index]
        table = []
        for line in logged_group["completions"]:
            totals = {"reward": line["reward"], "advantage": line["advantage"]}
            table.append(line["rewards"] | totals)
    else:
        answers = [getattr(row, name) for name in trainer.answers]
        completions = [encode_completion(trainer.processor, row.messages, x) for x in answers]
        table = [{"answer": name} for name in trainer.answers]
    logps = logps_now(trainer, row, completions, temperature)
    question = f"{text_of(row.messages[-1])!r}, solution {row.columns.get('solution')!r}"
    print(f"row {row.index} {row.where}: {question}")
    for i, completion in enumerate(completions):
        line = table[i] | compare_logps(completion, logps[i])
        if i == 0:
            print("completion", *(f"{name:>10}" for name in line))
        values = [f"{x:.4g}" if isinstance(x, float) else str(x) for x in line.values()]
        print(f"{i:<10}", *(f"{value:>10}" for value in values))
        print(f"    {trainer.processor.decode(completion.ids)!r}")


def logps_now(
    trainer: Trainer, row: Row, completions: list[Completion], temperature: float
) -> list[torch.Tensor]:
    """Compute log-probabilities of completions by the policy as it is before the step."""
    policy = trainer.policy
    prompt = row.prompt(trainer.processor)
    group = pack_rollout([prompt], [completions], policy.config, trainer.world.device)
    logps, _ = per_token_logps(policy, group, temperature)
    rows = zip(group.pad(logps.cpu()), group.layout.row_lengths, strict=True)
    return [row_logps[:length] for row_logps, length in rows]


def compare_logps(completion: Completion, logps: torch.Tensor) -> dict[str, float]:
    """Sum log-probabilities of the written tokens, those of training and of sampling."""
    trained_logps = logps[completion.policy_mask]
    line = {"tokens": len(trained_logps), "trained": trained_logps.sum().item()}
    if completion.logps is not None:  # given answers were not drawn
        sampled_logps = completion.logps[completion.policy_mask]
        line["sampled"] = sampled_logps.sum().item()
        line["differ by"] = (trained_logps - sampled_logps).abs().max().item()
    return line


def compare(
    folder: Path, trainer: Trainer, step: Step, number: int, metrics: dict
) -> dict[str, bool]:
    """Which files of the run know the step, and whether they say what the replay says."""
    completions = list(groups(trainer, step)) if step.rollout else []
    same = {}
    for name, lines in (("completions.jsonl", completions), ("metrics.jsonl", [metrics])):
        replayed_lines = {line.get("row"): line for line in parse_json(json_text(lines))}
        for line in read_lines(folder / name, Logged):
            if (line["stage"], line["step"]) == (trainer.stage, number):
                replayed_line = replayed_lines.get(line.get("row"), {"row": None})
                same[name] = same.get(name, True) and line == line | replayed_line
    return same


def log_end(path: Path) -> str:
    """Say where the metrics of a run end."""
    lines = read_lines(path, Logged)
    if not lines:
        return f"{path.parent} has no metrics of a run"
    last_line = lines[-1]
    end = f"{path} ends with {last_line['stage']} step {last_line['step']}"
    if not path.read_bytes().endswith(b"\n"):
        end += " and a part of a line, which is written now or was cut by a kill"
    return end
