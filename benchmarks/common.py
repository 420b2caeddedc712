"""Benchmark helpers: where results come from, and runs of recipes."""

import argparse
import datetime
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
CURVES = {"sampled": "accuracy_sampled", "greedy": "accuracy_greedy"}  # {name in results: name of an evaluation}


def provenance() -> dict:
    """Return where results come from: machine, date, versions, commit and command."""
    versions = {}
    for name in ("torch", "triton", "transformers", "trl"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "not installed"
    return {
        "card": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "versions": versions,
        "processor": processor(),
        "commit": commit(),
        "command": shlex.join(["python", *sys.argv]),
    }


def processor() -> str:
    """Return the processor's name on Linux, otherwise its architecture."""
    file = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.*)", file.read_text()) if file.exists() else []
    return names[0] if names else platform.machine()


def commit() -> str:
    """Return the repository's commit, "unknown" without git history."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip() or "unknown"


def call(command: list[str]) -> int:
    """Run a minivlmrl command on one thread; return its CPU seconds."""
    begun = sum(os.times()[2:4])
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-m", "minivlmrl", *command], cwd=ROOT, env=environment, check=True)
    return round(sum(os.times()[2:4]) - begun)


def read_lines(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def data_files(folder: Path, recipe: str, demonstrations: str | None = None) -> list[str]:
    """Return options for the rows that a recipe's script wrote to a folder."""
    options = [f"--data.{kind}_file={folder / f'{recipe}_{kind}.jsonl'}" for kind in ("train", "eval")]
    return options + ([f"--data.files={{sft: {folder / demonstrations}}}"] if demonstrations else [])


def train(recipe: str, folder: Path, *options: str, curves: Mapping[str, str] = CURVES) -> dict:
    """Train a recipe unless its folder is complete; return curves, cost and command."""
    file = folder / "run.json"
    if not file.exists():
        command = ["train", f"recipes/{recipe}.yaml", f"--output_dir={folder}", "--num_threads=1", *options]
        shown = f"minivlmrl {shlex.join(command)}".replace(str(folder.parent), "work")
        file.write_text(json.dumps({"cpu_seconds": call(command), "command": shown}))
    # a stage ends with an evaluation, even after that of the last step
    last = {(line["stage"], line["step"]): line for line in read_lines(folder / "evaluations.jsonl")}
    evaluations = [*last.values()]
    metrics = read_lines(folder / "metrics.jsonl")
    return {
        "at": [f"{line['stage']} {line['step']}" for line in evaluations],
        "steps": [line["step"] for line in evaluations],
        **{name: [line[f"eval/{key}"] for line in evaluations] for name, key in curves.items()},
        "reward": [round(line["reward"], 4) for line in metrics if "reward" in line],
        **json.loads(file.read_text()),
    }


def evaluate(model: Path, rows: Path, out: Path, *options: str):
    """Answer rows greedily, unless `out` is complete."""
    if not out.with_suffix(".summary.json").exists():  # `evaluate` writes its summary last
        call(["evaluate", f"--model={model}", f"--data={rows}", f"--out={out}", "--num_threads=1", *options])


def read(file: Path) -> dict:
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def study(file: Path, keys: Iterable[dict], run: Callable, summarize: Callable = lambda runs: {}, **more) -> dict:
    """Run what a file of results lacks; write it, with where the results come from, after each run.

    Args:
        keys: arguments of `run`, such as {"arm": "grpo", "seed": 0}; they name a run in the file.
        run: returns numbers. CPU seconds and the commit are added.
        summarize: {"runs": list of runs} -> further results.
    """
    results = {"runs": [], **read(file), **provenance(), **more}
    for key in keys:
        if any(key.items() <= old.items() for old in results["runs"]):
            continue
        begun = sum(os.times()[:4])  # with child processes
        numbers = run(**key)
        seconds = round(sum(os.times()[:4]) - begun, 1)
        results["runs"].append({**key, "cpu_seconds": seconds, **numbers, "commit": results["commit"]})
        results |= summarize(results["runs"])
        file.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return results


def study_options(description: str | None, *paths: str, json: Path | None = None, arms=(), seeds=()):
    """Return a parser for a study: positional paths, a file of results, and which arms and seeds to run."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for path in paths:
        parser.add_argument(path, type=lambda text: Path(text).resolve())
    parser.add_argument("--json", type=Path, default=json, required=json is None)
    if arms:
        parser.add_argument("--only", nargs="+", choices=arms, default=[*arms], metavar="NAME")
    if seeds:
        parser.add_argument("--seeds", nargs="+", type=int, default=[*seeds])
    return parser
