"""The day a card is there: everything that wants to be measured on it, in 40 minutes and on one page.

python benchmarks/first_gpu_hour.py                      # writes gpu.md and a JSON file for each part into runs/gpu/
python benchmarks/first_gpu_hour.py --only decode vllm
python benchmarks/first_gpu_hour.py --toy                # every part at toy size, on a CPU too: that it runs

The parts run one after the other, each in a process of its own with a limit of minutes. A part that fails or takes too
long is reported with its last lines, and the next one goes on. The page grows after each part. Nothing is downloaded:
weights are random, of the real size. docs/gpu.md has the prediction.
"""

import argparse
import datetime
import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LINES = 120  # of a part's output that the page shows


@dataclass
class Part:
    """A command; {out} in it is the folder of the page."""

    title: str
    minutes: float
    command: list[str]
    toy: list[str]  # what the command has in addition at toy size


def script(name: str, *arguments: str) -> list[str]:
    return [f"benchmarks/{name}.py", *arguments]


SHORT = ["--sft.max_steps=1", "--grpo.max_steps=1", "--grpo.prompts_per_step=2", "--data.eval_rows=2"]
PARTS = {
    "tests": Part(
        "Tests that need a GPU", 4,
        ["-m", "pytest", "-m", "slow or not slow", "-k", "gpu", "tests/test_attention.py",
         "tests/test_window_attention.py", "tests/test_backend.py", "tests/test_captured.py"], ["--collect-only"],
    ),
    "run": Part(
        "The default run, SFT and GRPO of a tiny model", 3,
        ["train.py", "--output_dir={out}/run", "--overwrite"], SHORT,
    ),
    "kernels": Part("Kernels against their peers", 8, script("gpu_kernels", "--json={out}/kernels.json"), ["--toy"]),
    "step": Part(
        "Qwen2.5-VL-3B: rollout, scoring and step of one prompt, beside transformers", 8,
        script("gpu_step", "--json={out}/step.json"), ["--toy", "--repeats=1"],
    ),
    "decode": Part(
        "Qwen2.5-VL-3B: tokens a second, as a graph and eager, beside transformers and the roofline", 5,
        script("decode", "--json={out}/decode.json"), ["--toy", "--repeats=1"],
    ),
    "vllm": Part("vLLM, as many tokens", 4, script("decode", "--ways=vllm", "--json={out}/vllm.json"), ["--toy"]),
    "ours": Part(
        "Qwen2.5-VL-3B: a GRPO step, beside the roofline and `plan`", 3,
        script("gpu_grpo", "ours", "--json={out}/ours.json"), ["--toy", "--steps=1"],
    ),
    "trl": Part(
        "Qwen2.5-VL-3B: the same step with TRL", 5,
        script("gpu_grpo", "trl", "--json={out}/trl.json"), ["--toy", "--steps=1"],
    ),
}  # fmt: skip


def main() -> int:
    """Returns the number of parts that failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--toy", action="store_true", help="every part at toy size")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "gpu", help="folder of the page")
    o = parser.parse_args()
    o.out.mkdir(parents=True, exist_ok=True)
    page, failed = o.out.resolve() / "gpu.md", 0
    page.write_text(f"# A GPU, {datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC\n\n```text\n{card()}\n```\n")
    for part in (PARTS[name] for name in o.only):
        ok, text = run(part, o.toy, page.parent)
        failed += not ok
        with page.open("a") as file:
            file.write(f"\n## {part.title}\n\n{text}")
        print(f"{'done  ' if ok else 'FAILED'} {part.title}", flush=True)
    print(page)
    return failed


def run(part: Part, toy: bool, out: Path) -> tuple[bool, str]:
    """Whether a part's process succeeded, and its part of the page."""
    command = [word.format(out=out) for word in part.command + part.toy * toy]
    begin, pipe = time.monotonic(), subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, *command], cwd=ROOT, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    ) as process:
        try:
            output, errors = process.communicate(timeout=60 * part.minutes)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # with the processes that it has started
            output, errors = process.communicate()
            errors += f"\nstopped after {part.minutes} minutes"
    ok = process.returncode == 0
    shown = output.splitlines()[-LINES:] + ([] if ok else errors.splitlines()[-LINES // 4 :])
    state = f"{time.monotonic() - begin:.0f} s" + ("" if ok else ", **failed**")
    lines = "\n".join(shown)
    return ok, f"`python {shlex.join(command)}`: {state}\n\n```text\n{lines}\n```\n"


def card() -> str:
    """What nvidia-smi says, or why it does not."""
    try:
        return subprocess.run(["nvidia-smi"], capture_output=True, text=True, check=True).stdout.strip()
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        return f"no GPU: {error}"


if __name__ == "__main__":
    sys.exit(main())
