"""Teach a model from recipes/from_parts.py to see, and compare GRPO with its controls.

    python recipes/from_parts.py TEXT_MODEL vlm --depth=4 --patch_size=7
    python benchmarks/from_parts.py vlm work --seeds 0 1 2 --runs grpo      # a quarter of an hour a seed on one core
    python benchmarks/from_parts.py vlm work --seeds 0                      # with the controls

SFT is run once per seed; then each of RUNS starts from its model. Options of recipes/from_parts.yaml come last, for
example `--options --data.eval_rows=64`. Results are added to docs/from_parts.json. The folder `work` keeps the outputs
of all runs; a finished run is not repeated. Each run saves its model, which takes 2.5 GB for half a billion parameters.
docs/scripts/from_parts.py makes a picture of them.
"""

import argparse
import json
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "from_parts.json"
SFT_STEPS = 150  # of the control that continues SFT; they take about as long as GRPO
# runs that start from the model after SFT
RUNS = {
    "grpo": ["--stages=[grpo]"],
    "shuffled rewards": [
        "--stages=[grpo]",
        "--rewards={recipes/shuffled.py:shuffled: 1.0}",
        "--data.eval_rewards=[accuracy]",
    ],
    "exchanged images": ["--stages=[grpo]", "exchange_images=True"],
    "more sft": ["--stages=[sft]", f"--sft.max_steps={SFT_STEPS}"],
}


def main(arguments: list[str] | None = None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="folder that recipes/from_parts.py wrote")
    parser.add_argument("work", type=Path, help="folder for the outputs of the runs")
    parser.add_argument("--data", default="/usr/share/datasets/fashion-mnist", help="folder of Fashion-MNIST")
    parser.add_argument("--runs", nargs="*", choices=RUNS, default=list(RUNS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--json", type=Path, default=RESULTS, help="file to which the results are added")
    parser.add_argument("--options", nargs=argparse.REMAINDER, default=[], help="of the recipe; they come last")
    options = parser.parse_args(arguments)
    for seed in options.seeds:
        start = options.work / f"sft_{seed}"
        for name in ("sft", *options.runs):
            folder = options.work / f"{name.replace(' ', '_')}_{seed}"
            model = options.model if name == "sft" else start / "checkpoint"
            if not (folder / "run.json").exists():
                train(model, folder, seed, options.data, [*RUNS.get(name, ["--stages=[sft]"]), *options.options])
            result = {"run": name, "seed": seed, **read(folder)}
            print(json.dumps({key: value for key, value in result.items() if key != "rewards"}), flush=True)
            add(result, options.json)


def train(model: Path, folder: Path, seed: int, data: str, options: list[str]):
    """Run train.py in a new process, and write the seconds of training and the peak of its memory to run.json."""
    arguments = [f"folder={data!r}", *(option for option in options if not option.startswith("--"))]
    command = [
        sys.executable,
        "train.py",
        "recipes/from_parts.yaml",
        f"--model.path={model.resolve()}",
        f"--data.task=recipes/fashion.py:TASK({', '.join(arguments)})",
        f"--output_dir={folder.resolve()}",
        f"--seed={seed}",
        "--num_threads=1",
        *(option for option in options if option.startswith("--")),
    ]
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "log.txt").open("w") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
        peak = [0]
        threading.Thread(target=watch, args=(process, peak), daemon=True).start()
        if process.wait():
            raise SystemExit(f"the run failed; see {folder / 'log.txt'}")
    shutil.rmtree(folder / "states")  # another 2.5 GB, which only a killed run needs
    [seconds] = json.loads((folder / "summary.json").read_text())["seconds"].values()
    (folder / "run.json").write_text(json.dumps({"seconds": round(seconds), "gigabytes": round(peak[0] / 1e6, 1)}))


def watch(process: subprocess.Popen, peak: list[int]):
    """Keep the largest resident memory of a process, in kB, as Linux reports it."""
    while process.poll() is None:
        lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        peak[0] = max([peak[0], *(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))])
        time.sleep(2)


def read(folder: Path) -> dict:
    """Read the held-out accuracies before and after a run, and the mean reward of each step of GRPO."""
    evaluations, metrics = (
        [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
        for name in ("evaluations", "metrics")
    )
    accuracies = {
        kind: [round(line[f"eval/accuracy_{kind}"], 4) for line in evaluations] for kind in ("sampled", "greedy")
    }
    rewards = [round(line["reward"], 4) for line in metrics if "reward" in line]
    return {**accuracies, "rewards": rewards, **json.loads((folder / "run.json").read_text())}


def add(result: dict, file: Path):
    """Replace the result with the same name and seed in the file, one line for each."""
    results = json.loads(file.read_text()) if file.exists() else []
    results = [old for old in results if (old["run"], old["seed"]) != (result["run"], result["seed"])] + [result]
    order = ["sft", *RUNS]
    results.sort(key=lambda old: (order.index(old["run"]), old["seed"]))
    file.write_text("[\n" + ",\n".join(map(json.dumps, results)) + "\n]\n")


if __name__ == "__main__":
    main()
