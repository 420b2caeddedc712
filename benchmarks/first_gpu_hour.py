"""Run all tests and measurements that need a GPU, most important first, and write the numbers to one page.

python benchmarks/first_gpu_hour.py --out DIR          # seven minutes on one GPU with 80 GB or more
python benchmarks/first_gpu_hour.py --out DIR          # seven minutes again, for the parts that were "later"
python benchmarks/first_gpu_hour.py --out DIR --toy    # tests the script: toy size, even on a CPU

A part is a process with a time limit. If it fails, for example for lack of GPU memory, its numbers so far are kept, and
the next part runs. DIR/PART.txt has its output, DIR/summary.jsonl one JSON line per number, and DIR/summary.md the same
in tables. A later call with the same DIR skips finished parts and repeats failed ones. A part begins only if its time
limit fits into --minutes. Nothing is downloaded: weights are random, in the real size. docs/results.md says what the
parts should show. The exit status is the number of failed parts.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from common import commit

ROOT = Path(__file__).resolve().parents[1]


class Part(NamedTuple):
    """Time limit in seconds, command in benchmarks/, and required packages."""

    seconds: int
    command: str
    needs: tuple[str, ...] = ()


# most important first; the first seven-minute call runs parts up to `lora`, a second one up to `minimal_dpo`
PARTS = {
    "self_test": Part(35, "gpu.py self_test"),
    "tests": Part(60, "gpu.py tests", ("pytest", "xdist")),
    "step": Part(60, "gpu.py step"),
    "kernels": Part(45, "gpu_kernels.py kernels"),
    "transformers": Part(60, "gpu.py transformers", ("transformers",)),
    "minimal_grpo": Part(90, "gpu_minimal.py minimal grpo"),
    "lora": Part(60, "gpu.py lora"),
    "nf4": Part(70, "gpu.py nf4"),
    "default_run": Part(45, "gpu.py train"),
    "minimal_dpo": Part(50, "gpu_minimal.py minimal dpo"),
    "vllm_tests": Part(300, "gpu.py vllm_tests", ("vllm", "pytest", "xdist")),
    "vllm_run": Part(120, "gpu.py train -- --model.compute_dtype=bfloat16 --sampling.engine=vllm", ("vllm",)),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--toy", action="store_true", help="every part at toy size")
    parser.add_argument("--minutes", type=float, default=7, help="begin no part that may end later")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "gpu", help="folder of the results")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help="run these parts")
    options = parser.parse_args()
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    ends = time.monotonic() + 60 * options.minutes
    failed = 0
    for name in options.only:
        part = PARTS[name]
        if is_done(out, name):
            continue
        missing = [package for package in part.needs if find_spec(package) is None]
        begin = time.monotonic()
        if missing:
            state = f"skipped: {missing[0]} is not installed"
        elif begin + part.seconds > ends:
            state = f"later: its time limit is {part.seconds} s"
        else:
            state = run(part, options.toy, out / f"{name}.txt")
        failed += state.startswith("failed")
        print(f"{name:13} {state}", flush=True)
        end = {"state": state, "seconds": round(time.monotonic() - begin), "command": part.command, "commit": commit()}
        lines = [*read_lines(out / f"{name}.txt"), end]
        write_lines(out / f"{name}.jsonl", [{"part": name} | line for line in lines])
        write_summary(out)
    print(out / "summary.md")
    return failed


def is_done(out: Path, name: str) -> bool:
    return any(line.get("state") == "done" for line in read_lines(out / f"{name}.jsonl"))


def run(part: Part, toy: bool, output: Path) -> str:
    """Run a part's process; return "done", or "failed: " with the reason.

    Args:
        output: file for the process output.
    """
    script, *words = part.command.split()
    command = [sys.executable, str(ROOT / "benchmarks" / script), *(["--toy"] if toy else []), *words]
    environment = os.environ | {
        "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}", "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1",
        "MINIVLMRL_KERNELS": "auto",
    }  # fmt: skip
    limit = ["timeout", "--kill-after=1", str(part.seconds)]  # `timeout` also ends child processes
    begin = time.monotonic()
    with output.open("w") as file:
        process = subprocess.run([*limit, *command], env=environment, stdout=file, stderr=subprocess.STDOUT)
    if process.returncode == 0:
        return "done"
    if time.monotonic() - begin >= part.seconds:
        return f"failed: stopped after {part.seconds} s"
    printed = [line for line in output.read_text(errors="replace").splitlines() if line.strip()]
    return f"failed: exit status {process.returncode}, {printed[-1] if printed else 'no output':.200}"


def read_lines(path: Path) -> list[dict]:
    """Return the JSON lines in a file; [] if there is no file."""
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.startswith(('{"card": ', '{"part": ')) and line.endswith("}")]


def write_lines(path: Path, lines: list[dict]):
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def write_summary(out: Path):
    """Write DIR/summary.jsonl and DIR/summary.md from all results so far."""
    lines = [line for name in PARTS for line in read_lines(out / f"{name}.jsonl")]
    write_lines(out / "summary.jsonl", lines)
    setups = dict.fromkeys(describe(line) for line in lines if "versions" in line)
    ends = [line for line in lines if "state" in line]
    text = ["# Measurements on one GPU", *setups, f"Commit {commit()}."]
    text.append(table("part", "state", "seconds", rows=[(end["part"], end["state"], end["seconds"]) for end in ends]))
    for end in ends:
        numbers = [line for line in lines if line["part"] == end["part"] and "name" in line]
        if numbers:
            text += [
                f"## {end['part']}",
                f"`{end['command']}`",
                table("name", "value", "unit", rows=map(cells, numbers)),
            ]
    (out / "summary.md").write_text("\n\n".join(text) + "\n")


def describe(line: dict) -> str:
    versions = [f"{name} {version}" for name, version in line["versions"].items()]
    return f"{line['card']}, {line['date']}: {', '.join(versions)}."


def cells(line: dict) -> tuple[str, str, str]:
    if "skipped" in line:
        return line["name"], f"skipped: {line['skipped']}", ""
    return line["name"], f"{line['value']:g}", line["unit"]


def table(*columns: str, rows: Iterable[tuple]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "/") for cell in line) + " |" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
