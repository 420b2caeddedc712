"""`python -m minivlmrl replay RUN --step 73 --prompt 4`: one step of a run again.

RUN is the folder of a run, or a recipe. The nearest state before the step is read, or the run
begins anew; the steps in between are trained, and nothing is written in RUN. Draws depend on keys
alone, so what completions.jsonl and metrics.jsonl say of the step is compared to the last bit.
"""

import argparse
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext, redirect_stdout
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from minivlmrl import train
from minivlmrl.algorithms.reward_model import FOLDER as REWARD_MODEL
from minivlmrl.batch import pack
from minivlmrl.data.turns import text_of
from minivlmrl.hub.folder import json_text, parse_json, read_json, read_lines
from minivlmrl.hub.recipe_values import build
from minivlmrl.logprobs import per_token_logps
from minivlmrl.run.batches import Batches
from minivlmrl.run.completions import COMPLETIONS, IMAGES, Logged, groups, is_past
from minivlmrl.run.config import check_found, load_config
from minivlmrl.run.resume import RUN, Progress, state_folders
from minivlmrl.scale import ranks
from minivlmrl.tools.lines import Film


def main(arguments: list[str]) -> int:
    """Replay a step and print one of its groups; 1 if a file of the run says something else."""
    about = {"description": __doc__, "allow_abbrev": False}
    parser = argparse.ArgumentParser("python -m minivlmrl replay", **about)
    parser.add_argument("run", help="the folder of a run; or a recipe, with --section.name=value")
    parser.add_argument("--recipe", help="default: config.yaml of the run, if it names no code")
    parser.add_argument("--stage", help="by default the last one")
    parser.add_argument("--step", type=int, default=0, help="of the stage, from 0")
    parser.add_argument("--prompt", type=int, default=0, help="of the step, from 0")
    lines = "write the step line by line, of the book; with ,FOLDER or ,FILE.py of these too"
    parser.add_argument("--lines", metavar="FILE.html", help=lines)
    options, overrides = parser.parse_known_args(arguments)
    folder = Path(options.run)
    number = options.step
    changed = [word for word in overrides if not word.startswith("--num_threads=")]
    if folder.is_dir() and changed:
        raise ValueError(f"{folder}: a run is replayed as it was; only a recipe takes {changed[0]}")
    config = run_config(folder, options.recipe, overrides)
    stage = options.stage or ["none", *config.stages][-1]
    page, *words = options.lines.split(",") if options.lines else [None]
    if page and (not Path(page).absolute().parent.is_dir() or "RANK" in os.environ):
        raise ValueError(f"--lines={page}: name a file in a folder that is there, without torchrun")
    film = Film(words, stage, number) if page else None
    try:
        algorithm, optimizer, step, rows = go_to(config, stage, number, film)
        show(algorithm, step, rows, options.prompt)
        with film or nullcontext():
            metrics = train.optimizer_step(algorithm, step, optimizer, number)
    finally:
        if film and film.calls:  # of a step that fails too
            film.write(Path(page), f"{options.run}, {stage} step {number}")
    ranks.shutdown()
    same = compare(folder, algorithm, step, number, metrics)
    other = "something else: another CPU, number of threads or ranks, or version of torch?"
    said = [f"{name} says {'the same' if equal else other}" for name, equal in same.items()]
    print(*said or ["nothing to compare with: no file of a run has this step"], sep="\n")
    return int(not all(same.values()))


def run_config(folder: Path, recipe: str | None, overrides: list[str]):
    """Read the recipe of a run's folder, or another one (ValueError: it names code unasked)."""
    if not folder.is_dir():
        return load_config(folder, overrides)
    given = recipe or folder / "config.yaml"
    config = load_config(given, [f"--output_dir={folder}", *overrides])
    if not recipe:
        check_found(given, config, overrides)
    return config


class Reached(Exception):
    """The step that was asked for comes next; its arguments are what train.start shows of it."""


def go_to(config, stage: str, number: int, film: Film | None = None) -> tuple:
    """Train until a step is next: algorithm, optimizer, Step, rows (ValueError: there is none).

    A copy of the run, cut back to its nearest state before the step, is resumed by train itself.
    """
    if stage not in config.stages:
        raise ValueError(f"--stage {stage}: the run has {', '.join(config.stages)}")
    if not 0 <= number < (steps := getattr(config, stage).max_steps):
        raise ValueError(f"--step {number}: {stage} has the steps 0 to {steps - 1}")
    folder = Path(config.output_dir)
    begin = None
    wanted = config.stages.index(stage), number
    for path in state_folders(folder / "states"):
        progress = read_json(path / RUN)
        if (progress["stage"], progress["step"]) <= wanted:
            begin = path
    print(f"{stage} step {number}, trained again from {begin or 'the beginning'}")

    def see(algorithm, optimizer, step, done, batches):
        if (algorithm.stage, done) == (stage, number):
            if film:
                film.pause(algorithm, step)
            rows = Batches(batches.dataset, algorithm, batches.draws - 1)
            rows = step.rollout.rows if step.rollout else next(rows)
            raise Reached(algorithm, optimizer, step, rows)

    with TemporaryDirectory() as scratch:
        less = {"eval_steps": 0, "save_steps": 0, "data": replace(config.data, eval_rows=1)}
        if film:
            less["data"].image_workers = 0  # a row is made in the step that trains on it
        try:
            with film or nullcontext():
                train_again(replace(config, **less), begin, Path(scratch) / "run", see)
        except Reached as reached:
            return reached.args
    raise ValueError(f"--step {number}: {stage} has fewer steps, its rows end with max_epochs")


def train_again(config, state: Path | None, folder: Path, see: Callable, **options) -> int:
    """Let train resume a copy of a run, cut back to a state or to nothing; returns its exit code.

    Args:
        folder: of the copy (ValueError: it is there).
        see: before_step of train.start.
        options: fields of the recipe.
    """
    if is_first():  # the other ranks wait for it in train.start
        if folder.exists():
            raise ValueError(f"{folder}: is there already; remove it")
        folder.mkdir()
        for name in earlier_files(Path(config.output_dir), state) if state else ():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(Path(config.output_dir) / name, folder / name)
    resume = str(state) if state else "never"
    options |= {"output_dir": str(folder), "resume": resume, "report_to": []}
    with redirect_stdout(sys.stderr):
        return train.start(replace(config, **options), see)


def earlier_files(run: Path, state: Path) -> Iterator[Path]:
    """Name the files that a state does not hold: completions so far, a trained reward model."""
    progress = build(Progress, read_json(state / RUN), str(state / RUN), json=True)
    if (run / COMPLETIONS).is_file():
        yield Path(COMPLETIONS)
    for line in read_lines(run / COMPLETIONS, Logged):
        if is_past(line, progress):
            drawn = (path for one in line["completions"] for path in one.get("pictures", ()))
            yield from (Path(IMAGES, Path(path).name) for path in (*line["images"], *drawn))
    for path in (run / REWARD_MODEL).rglob("*"):
        if path.is_file():
            yield path.relative_to(run)


def is_first() -> bool:
    """Whether this process is the first rank, before and after the run."""
    return os.environ.get("RANK", "0") == "0"


@torch.no_grad()
def show(algorithm, step, rows, index: int):
    """Print a prompt of a step and its completions; log-probabilities are sums, in nats."""
    prompts = step.prompts if step.rollout else range(len(rows))
    if not 0 <= index < len(prompts):
        raise ValueError(f"--prompt {index}: the step has the prompts 0 to {len(prompts) - 1}")
    row = rows[prompts[index]]
    temperature = 1.0
    if step.rollout:
        answers = step.rollout.completions[prompts[index]]
        temperature = algorithm.run.sampling.temperature
        earned = list(groups(algorithm, step))[index][1]["completions"]
        names = "reward", "advantage"
        table = [one["rewards"] | {name: one[name] for name in names} for one in earned]
    else:
        _, [answers] = algorithm.encode([row])
        table = [{"answer": name} for name in algorithm.answers]
    prompt = row.prompt(algorithm.processor)
    policy = algorithm.policy
    group = pack([prompt], [answers], policy.config, algorithm.world.device)
    trained = group.split(per_token_logps(policy, group, temperature)[0].cpu())
    for line, now, completion in zip(table, trained, answers, strict=True):
        now = now[completion.written]
        line |= {"tokens": len(now), "trained": now.sum().item()}
        if completion.logps is not None:  # given answers were not drawn
            sampled = completion.logps[completion.written]
            worst = (now - sampled).abs().max().item()
            line |= {"sampled": sampled.sum().item(), "differ by": worst}
    said = f"{text_of(row.messages[-1])!r}, solution {row.columns.get('solution')!r}"
    print(f"row {row.index} {row.where}: {said}")
    print("completion", *(f"{name:>10}" for name in table[0]))
    for number, (line, own) in enumerate(zip(table, answers, strict=True)):
        values = [f"{x:.4g}" if isinstance(x, float) else str(x) for x in line.values()]
        print(f"{number:<10}", *(f"{value:>10}" for value in values))
        print(f"    {algorithm.processor.decode(own.ids)!r}")


def compare(folder: Path, algorithm, step, number: int, metrics: dict) -> dict[str, bool]:
    """Which files of the run know the step, and whether they say what the replay says."""
    said = [line for _, line in groups(algorithm, step)] if step.rollout else []
    at = (algorithm.stage, number)
    same = {}
    for name, lines in (("completions.jsonl", said), ("metrics.jsonl", [metrics])):
        written = read_lines(folder / name, Logged)
        logged = [line for line in written if (line["stage"], line["step"]) == at]
        again = {line.get("row"): line for line in parse_json(json_text(lines))}
        if logged:
            known = [line | again.get(line.get("row"), {"row": None}) for line in logged]
            same[name] = known == logged
    return same
