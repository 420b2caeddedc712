"""Kill runs at any moment, go on with them, and compare every file with that of a run that was not killed.

python benchmarks/kills.py --kills 300      # a tiny model on one thread; exit status 1 if a file differs

A run is a forked process of train.main with a state after every step. It gets SIGKILL after a random time, or after a
random file of it was seen to change: a state that is being written, a log, a checkpoint, the page. Then it is started
again with --resume=auto, until it ends by itself. Only seconds and dates may differ.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "audit"), str(ROOT / "tests" / "helpers")]

from minivlmrl import train  # noqa: E402
from minivlmrl.run import report  # noqa: E402
from minivlmrl_audit.difference import difference  # noqa: E402

import tiny  # noqa: E402

STAGE = {"max_steps": 4, "prompts_per_step": 4, "micro_batch_size": 2, "learning_rate": 3e-3}
RECIPE = tiny.recipe(
    STAGE,
    data={"task": "shapes(demonstrations=8, pairs=8)", "eval_rows": 2},
    grpo={"num_iterations": 2, "steps_per_generation": 2, "beta": 0.1, "max_steps": 8},
    ppo={"num_mini_batches": 2},
    rewards={"format": 0.5, "accuracy": 1.0, f"{ROOT}/recipes/lengths.py:cosine(max_length=6)": 0.1},
)
ALWAYS = ["--log_completions=1", "--eval_steps=2", "--save_steps=2", "--keep_best=sampled"]
ALWAYS += ["--state_steps=1"]
CASES = {
    "sft": ["--stages=[sft]"],
    "sft, 8-bit AdamW": ["--stages=[sft]", "--optimizer.name=adamw_8bit"],
    "grpo, long enough for warnings": ["--stages=[grpo]", "--grpo.max_steps=14"],
    "sft, grpo with LoRA": ["--stages=[sft, grpo]", "--adapter.r=4", "--adapter.dropout=0.3"],
    "grpo with LoRA on NF4": ["--stages=[grpo]", "--adapter.r=2", "--adapter.quantize=nf4"],
    "dpo": ["--stages=[dpo]", "--keep_best=pairs"],
    "kto": ["--stages=[kto]"],
    "sft, reward_model": ["--stages=[sft, reward_model]"],
    "ppo": ["--stages=[ppo]"],
    "sft, ppo with LoRA": ["--stages=[sft, ppo]", "--adapter.r=4"],
}


def begin(recipe: Path, output: Path, options: list[str]) -> int:
    """Fork a run, which writes what it says to log.txt beside its folder; its process."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setpgid(0, 0)
            log = os.open(f"{output}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 1), os.dup2(log, 2)
            code = train.main([str(recipe), f"--output_dir={output}", *ALWAYS, *options])
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)
    return child


def newest(folder: Path) -> float:
    """When a file of a run last changed; files come and go meanwhile."""
    times = [0.0]
    for inside, _, names in os.walk(folder):  # leaves out folders that are gone
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                times.append(os.stat(f"{inside}/{name}").st_mtime)
    return max(times)


def killed(child: int, output: Path, seconds: float, draw: random.Random) -> bool:
    """Kill a run somewhere, or let it end (RuntimeError: it failed); whether it was killed."""
    end = time.monotonic() + draw.uniform(0, seconds)
    changes = draw.randrange(12)
    seen = newest(output)
    aimed = draw.random() < 0.5
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            if status:
                raise RuntimeError(Path(f"{output}.log").read_text()[-3000:])
            return False
        now = newest(output) if aimed else seen
        changes, seen = changes - (now != seen), now
        if (aimed and changes < 0) or (not aimed and time.monotonic() > end):
            os.kill(child, signal.SIGKILL)
            return os.waitpid(child, 0)[1] != 0
        time.sleep(0.002)


def differing(one: Path, other: Path) -> list[str]:
    """Name the files of two runs that differ; of states none is compared, of pages what they show."""
    names = {str(path.relative_to(run)) for run in (one, other) for path in run.rglob("*") if path.is_file()}
    names = {name for name in names if not name.startswith("states/") and name not in (".lock", "page.html")}
    whole = {name for name in names if (one / name).is_file() and (other / name).is_file()}
    wrong = sorted(names - whole) + sorted(name for name in whole if difference(one / name, other / name))
    pages = [report.collect(run) for run in (one, other)]
    parts = "metrics", "warnings", "evaluations", "completions", "images"
    return wrong + [f"page.html: {part}" for part in parts if pages[0][part] != pages[1][part]]


def main():
    p = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    p.add_argument("--kills", type=int, default=300, help="of all cases together")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--json", help="write the counts there")
    options = p.parse_args()
    counts = {}
    wrong = []
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        (home / "model.json").write_text(json.dumps(tiny.RUN_MODEL))
        (home / "recipe.yaml").write_text(json.dumps(RECIPE))
        draw = random.Random(options.seed)
        straight = {}
        number = 0
        while sum(counts.values()) < options.kills:
            name = list(CASES)[number % len(CASES)]
            if name not in straight:
                start = time.monotonic()
                whole = home / f"straight-{number}"
                if os.waitpid(begin(home / "recipe.yaml", whole, CASES[name]), 0)[1]:
                    raise RuntimeError(Path(f"{whole}.log").read_text())
                # states take time too
                straight[name] = whole, 1.5 * (time.monotonic() - start)
            output = home / f"run-{number}"
            (expected, seconds) = straight[name]
            while killed(begin(home / "recipe.yaml", output, [*CASES[name], "--resume=auto"]), output, seconds, draw):
                counts[name] = counts.get(name, 0) + 1
            if other := differing(expected, output):
                wrong.append(f"{name}, run {number}: {', '.join(other)}")
            number += 1
            print(f"{sum(counts.values())} kills, {number} runs, {len(wrong)} differ", *wrong[-1:], flush=True)
    for name, count in counts.items():
        print(f"{name:32}{count:5} kills")
    if options.json:
        Path(options.json).write_text(json.dumps({"kills": counts, "runs": number, "differ": wrong}))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
