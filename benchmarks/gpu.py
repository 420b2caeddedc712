"""Test and measure this repository on a GPU: DIR/PART.json for each part.

    python benchmarks/gpu.py DIR                # everything, on one GPU with 80 GB or more
    python benchmarks/gpu.py DIR --only step    # one part
    python benchmarks/gpu.py DIR --toy          # tests this script with a tiny model, even on a CPU

A part is a command with a time limit in seconds. If it fails, the next one runs. Parts that are done are not repeated.
Nothing is downloaded: the 3B has random weights, and its row has an image with 1,024 tokens. JSON has the end of what
the command printed, and what the run logged: times of phases, memory, differences between sampler and trainer. The exit
status is the number of failed parts.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from benchmarks import common  # noqa: E402
from minivlmrl.distributed.saving import save_model  # noqa: E402
from minivlmrl.model.build import random_model  # noqa: E402
from minivlmrl.tasks import shapes  # noqa: E402

STEPS = (
    "--model.path=DIR/model --data.train_file=DIR/rows.jsonl --data.eval_rows=0 --data.min_pixels=802816 "
    '--data.max_pixels=802816 --rewards={"benchmarks/gpu.py:letters":1} --sampling.stop_token_ids=[] '
    "--grpo.max_steps=4 --grpo.warmup_steps=1 --grpo.prompts_per_step=8 --output_dir=DIR/PART"
)
TOY_STEPS = "--data.min_pixels=3136 --data.max_pixels=3136 --sampling.max_new_tokens=4 --grpo.max_steps=1"
MINIMAL = (
    "minimal.py DIR/model DIR/rows.jsonl --max_steps=2 --warmup_steps=1 --prompts_per_step=1 --output_dir=DIR/PART"
)
PARTS = {  # {part: (time limit, command, options with --toy)}, most important first
    "self_test": (60, "-m minivlmrl.kernels.self_test", "cpu float32_matmul"),
    "tests": (120, "-m pytest -m gpu -n 0 tests/kernels tests/model tests/generation", "--co"),
    "memory": (60, "-m minivlmrl memory recipes/own_data.yaml --gpu_memory=80 --model=DIR/model", ""),
    "step": (120, f"train.py recipes/own_data.yaml {STEPS}", TOY_STEPS),
    "lora": (120, f"train.py recipes/own_data_one_card.yaml {STEPS}", TOY_STEPS),
    "nf4": (120, f"train.py recipes/own_data_one_card.yaml --adapter.quantize=nf4 {STEPS}", TOY_STEPS),
    "minimal_grpo": (120, MINIMAL, "--max_new_tokens=4"),
    "minimal_dpo": (120, f"{MINIMAL} --dpo", ""),
    "default_run": (90, "train.py --output_dir=DIR/PART", "--sft.max_steps=1 --grpo.max_steps=1 --data.eval_rows=2"),
    "vllm_tests": (300, "-m pytest -m slow -n 0 tests/extras/test_vllm.py", "--co"),
    "vllm_step": (
        120,
        f"train.py recipes/own_data.yaml --sampling.engine=vllm {STEPS}",
        f"{TOY_STEPS} --sampling.engine=native",
    ),
}


def letters(completions, **columns) -> list[float]:
    """Count distinct characters: a reward that differs between random completions."""
    return [float(len(set(text))) for text in completions]


def write_inputs(folder: Path, toy: bool):
    """Write a model with random weights, and a row that has all columns."""
    config = ROOT / "recipes" / "shapes_model.json"
    if not toy:
        config = folder / "3b.json"
        recorded = json.loads((ROOT / "tests" / "recorded" / "hub_configs.json").read_text())
        config.write_text(json.dumps(recorded["Qwen2.5-VL-3B"]))
    model, processor = random_model(config, shapes.tokenizer(), seed=0)
    save_model(folder / "model", model.bfloat16(), processor)
    shapes.draw_picture("red square", random.Random(0)).save(folder / "a.png")
    answers = {"completion": "red " * 60, "chosen": "red " * 60, "rejected": "blue " * 60}
    line = {"image": "a.png", "problem": "What is it?", "solution": "red"} | answers
    (folder / "rows.jsonl").write_text(json.dumps(line) + "\n")


def run(part: str, folder: Path, toy: bool) -> dict:
    """Run a part; return what it printed and logged."""
    seconds, command, small = PARTS[part]
    words = f"{command} {small if toy else ''}".replace("PART", part).replace("DIR", str(folder)).split()
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    if part == "vllm_tests":
        environment["MINIVLMRL_TEST_GPU"] = "1"  # otherwise tests hide GPUs
    limit = ["timeout", "--kill-after=1", str(seconds)]  # `timeout` also ends child processes
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    begin = time.monotonic()
    done = subprocess.run([*limit, sys.executable, *words], cwd=ROOT, env=environment, **output)
    spent = round(time.monotonic() - begin, 1)
    found = {"command": " ".join(words), "status": done.returncode, "seconds": spent}
    found["printed"] = done.stdout.splitlines()[-30:]
    for name in ("timings", "metrics"):
        file = folder / part / f"{name}.jsonl"
        found[name] = common.read_lines(file) if file.exists() else []
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=lambda text: Path(text).resolve(), metavar="DIR")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=[*PARTS], metavar="PART")
    parser.add_argument("--toy", action="store_true")
    options = parser.parse_args()
    if not (options.folder / "rows.jsonl").exists():
        options.folder.mkdir(parents=True, exist_ok=True)
        write_inputs(options.folder, options.toy)
    failed = 0
    for part in options.only:
        file = options.folder / f"{part}.json"
        if file.exists() and json.loads(file.read_text())["status"] == 0:
            continue
        found = run(part, options.folder, options.toy)
        file.write_text(json.dumps({**common.provenance(), **found}, indent=1) + "\n")
        failed += found["status"] != 0
        print(f"{part}: exit status {found['status']} after {found['seconds']} s", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
