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


def about() -> dict:
    """Return device, date and package versions."""
    versions = {}
    for name in ("torch", "triton", "transformers"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "not installed"
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    return {"card": card, "date": datetime.datetime.now(datetime.UTC).date().isoformat(), "versions": versions}


def provenance(*packages: str) -> dict:
    """Return where results come from: machine, date, versions (also of `packages`), commit and command."""
    found = about()
    found["versions"] |= {name: version(name) for name in packages}
    return found | {"processor": processor(), "commit": commit(), "command": shlex.join(["python", *sys.argv])}


def processor() -> str:
    """Return the processor's name on Linux, otherwise its architecture."""
    file = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.*)", file.read_text()) if file.exists() else []
    return names[0] if names else platform.machine()


def commit() -> str:
    """Return the repository's commit, "unknown" without git history."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip() or "unknown"


def call(command: list[str]) -> dict:
    """Run a minivlmrl command on one thread; return CPU seconds, and peak memory over all commands so far."""
    import resource  # Windows has no such module

    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-m", "minivlmrl", *command], cwd=ROOT, env=environment, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"cpu_seconds": round(seconds), "peak_gib": round(after.ru_maxrss / 2**20, 1)}


def read_lines(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def train(recipe: str, model: Path | None, folder: Path, *options: str, curves: Mapping[str, str] = CURVES) -> dict:
    """Train a model with the reward accuracy unless its folder is complete; return curves, cost and command.

    Args:
        model: folder of the model, None = the recipe's, or in `options`.
    """
    file = folder / "run.json"
    if not file.exists():
        command = ["train", f"recipes/{recipe}.yaml", f"--output_dir={folder}", "--num_threads=1", *options]
        if model:
            command.append(f"--model.path={model}")
        shown = f"minivlmrl {shlex.join(command)}".replace(str(folder.parent), "work")
        file.write_text(json.dumps({**call(command), "command": shown}))
    # a stage ends with an evaluation, even after that of the last step
    last = {(line["stage"], line["step"]): line for line in read_lines(folder / "evaluations.jsonl")}
    evaluations = [*last.values()]
    metrics = [line for line in read_lines(folder / "metrics.jsonl") if "rewards/accuracy/mean" in line]
    return {
        "at": [f"{line['stage']} {line['step']}" for line in evaluations],
        "steps": [line["step"] for line in evaluations],
        **{name: [line[f"eval/{key}"] for line in evaluations] for name, key in curves.items()},
        "reward": [line["rewards/accuracy/mean"] for line in metrics],
        "length": [line["completions/mean_length"] for line in metrics],
        **json.loads(file.read_text()),
    }


def collect(file: Path, runs: Iterable[dict], summarize: Callable = lambda runs: {}, **more) -> dict:
    """Write runs, with where they come from and summarize(runs), to a file after each run."""
    results = {**provenance(), **more, "runs": []}
    for run in runs:
        results["runs"].append(run)
        results |= summarize(results["runs"])
        file.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return results


def study_options(description: str | None) -> argparse.ArgumentParser:
    """Return a parser for a study of a recipe: a model, a folder of all outputs, and the file of the results."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=lambda text: Path(text).resolve())
    parser.add_argument("work", type=lambda text: Path(text).resolve())
    parser.add_argument("--json", type=Path, required=True)
    return parser
