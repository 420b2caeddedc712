"""Benchmark helpers: timers, runs of a recipe, the option --toy, and numbers as JSON lines for first_gpu_hour.py."""

import argparse
import datetime
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
CARD = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def seconds_of(call: Callable) -> float:
    """Return a call's duration in seconds, including its work on the GPU."""
    synchronize()
    begin = time.perf_counter()
    call()
    synchronize()
    return time.perf_counter() - begin


def synchronize():
    if CARD.type == "cuda":
        torch.cuda.synchronize()


def read_options(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Add the option --toy to a script that needs a GPU, and parse the options."""
    parser.add_argument("--toy", action="store_true", help="toy size in float32, even on a CPU")
    options = parser.parse_args()
    if CARD.type == "cpu" and not options.toy:
        sys.exit("This benchmark needs a GPU; pass --toy to run it at toy size on a CPU")
    return options


def about() -> dict:
    """Return device, date and package versions."""
    versions = {}
    for name in ("torch", "triton", "transformers"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "not installed"
    card = torch.cuda.get_device_name() if CARD.type == "cuda" else platform.machine()
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


def train(recipe: str, model: Path, folder: Path, *options: str) -> dict:
    """Train a model with one reward, accuracy, unless its folder is complete; return curves and cost."""
    file = folder / "run.json"
    if not file.exists():
        command = ["train", f"recipes/{recipe}.yaml", f"--model.path={model}", f"--output_dir={folder}"]
        file.write_text(json.dumps(call([*command, "--num_threads=1", *options])))
    # a stage ends with an evaluation, even after that of the last step
    last = {(line["stage"], line["step"]): line for line in read_lines(folder / "evaluations.jsonl")}
    evaluations = [*last.values()]
    metrics = [line for line in read_lines(folder / "metrics.jsonl") if line["stage"] == "grpo"]
    return {
        "at": [f"{line['stage']} {line['step']}" for line in evaluations],
        "steps": [line["step"] for line in evaluations],
        **{way: [line[f"eval/accuracy_{way}"] for line in evaluations] for way in ("sampled", "greedy")},
        "reward": [line["rewards/accuracy/mean"] for line in metrics if "rewards/accuracy/mean" in line],
        "length": [line["completions/mean_length"] for line in metrics],
        **json.loads(file.read_text()),
    }


def study_options(description: str | None) -> argparse.ArgumentParser:
    """Return a parser for a study of a recipe: a model, a folder of all outputs, and the file of the results."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=lambda text: Path(text).resolve())
    parser.add_argument("work", type=lambda text: Path(text).resolve())
    parser.add_argument("--json", type=Path, required=True)
    return parser


def run_part(description: str, parts: Mapping[str, Callable]):
    """Run the part named on the command line; `parts`: {name: function}."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("part", choices=[name for name, x in parts.items() if getattr(x, "is_part", False)])
    parser.add_argument("arguments", nargs="*")
    options = read_options(parser)
    print(json.dumps(about()), flush=True)
    parts[options.part](options.toy, *options.arguments)


def part(function: Callable) -> Callable:
    """Mark a function(toy, *arguments) as a part for first_gpu_hour.py."""
    function.is_part = True
    return function


def report(name: str, value: float, unit: str):
    """Print a number with four significant digits."""
    show(name, value=float(f"{value:.4g}"), unit=unit)


def report_skipped(name: str, reason: str):
    """Print why a number was not measured."""
    show(name, skipped=reason)


def show(name: str, **fields):
    print(json.dumps({"card": about()["card"], "name": name, **fields}), flush=True)
