"""Print hashes of the weights and metrics of six short runs on the CPU, to compare two commits byte by byte.

    python benchmarks/same_bytes.py            # about two minutes
    python benchmarks/same_bytes.py mpo ppo    # some of the runs

Compare hashes that the same machine printed with the same packages. A process has one thread.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import PIL.Image

ROOT = Path(__file__).resolve().parents[1]
SHORT = [
    f"--{stage}.{option}" for stage in ("sft", "dpo", "grpo", "ppo") for option in ("max_steps=2", "warmup_steps=1")
]
SMALL = ["--data.eval_rows=4", "--num_threads=1", "--state_minutes=0", *SHORT]
FEW = [f"--{stage}.prompts_per_step=4" for stage in ("sft", "dpo", "grpo", "ppo")]
ROWS = "ROWS"  # placeholder for a folder with two data files
RUNS = {  # name: (processes, recipe, options)
    "default": (1, "shapes.yaml", []),
    "mpo": (1, "shapes_mpo.yaml", []),
    "ppo": (1, "shapes_ppo.yaml", ["--ppo.critic=separate", "--ppo.steps_per_generation=2"]),
    "lora_nf4": (1, "shapes.yaml", ["--adapter={r: 4, quantize: nf4, dropout: 0.1}", "--grpo.num_iterations=2"]),
    "mixture": (
        1,
        "shapes.yaml",
        [
            "--stages=grpo",
            "--data.task=null",
            f"--data.train=[{{file: {ROWS}/a.jsonl, weight: 0.5}}, {{file: {ROWS}/b.jsonl, weight: 2}}]",
            f"--rewards={{format: 0.5, {ROWS}/letters.py:letters: 1}}",
            "--grpo.max_num_gen_batches=3",
            "--grpo.max_tokens_per_micro_batch=200",
            "--grpo.steps_per_generation=2",
            "--grpo.top_entropy_quantile=0.5",
        ],
    ),
    "two_ranks": (2, "shapes.yaml", ["--sharding.enabled=true", "--grpo.num_iterations=2"]),
}


# completions rarely get equal rewards, even with random weights
REWARD = "def letters(completions, **columns):\n    return [len({*text}) / 10 for text in completions]\n"


def write_rows(folder: Path):
    (folder / "letters.py").write_text(REWARD)
    colors = ("red", "green", "blue", "gray")
    for file, size in (("a", 28), ("b", 42)):
        lines = []
        for color in colors:
            PIL.Image.new("RGB", (size, 28), color).save(folder / f"{file}_{color}.png")
            lines.append({"problem": "Which color?", "image": f"{file}_{color}.png", "solution": color})
        (folder / f"{file}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def hash_of(name: str, rows: Path) -> str:
    """Train one of RUNS; return a hash of weight files and metrics."""
    processes, recipe, options = RUNS[name]
    launcher = [sys.executable]
    if processes > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    with tempfile.TemporaryDirectory() as output:
        options = [option.replace(ROWS, str(rows)) for option in options]
        command = [*launcher, "train.py", recipe, f"--output_dir={output}/run", *SMALL, *FEW, *options]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "-1"}
        subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL)
        total = hashlib.sha256()
        for file in sorted(Path(output).rglob("*.safetensors")):
            total.update(f"{file.relative_to(output)}\n".encode())
            total.update(file.read_bytes())
        # metric names contain the reward's path
        metrics = (Path(output) / "run" / "metrics.jsonl").read_bytes().replace(str(rows).encode(), b"")
        total.update(metrics)
        return total.hexdigest()[:16]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", default=[*RUNS], help=", ".join(RUNS))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as rows:
        write_rows(Path(rows))
        for name in options.runs:
            print(f"{name:10} {hash_of(name, Path(rows))}", flush=True)


if __name__ == "__main__":
    main()
