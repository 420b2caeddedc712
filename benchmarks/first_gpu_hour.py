"""The day a card is there: everything that wants to be measured on it, in order of value and on one page.

python benchmarks/first_gpu_hour.py --minutes 9 --out DIR   # again until no part is left for later
python benchmarks/first_gpu_hour.py                         # all of it, 43 minutes at most; runs/gpu/gpu.md
python benchmarks/first_gpu_hour.py --only decode vllm      # these parts, also those that were done
python benchmarks/first_gpu_hour.py --toy                   # every part at toy size, on a CPU too: that it runs

The parts run one after the other, each in a process of its own with a limit of minutes. A part that fails or takes too
long is reported with its last lines, and the next one goes on. What a part prints is in DIR/PART.txt as it is printed,
and the page grows after each; a part with a section DIR/PART.md is done. With --minutes no part begins whose limit no
longer fits. Nothing is downloaded: weights are random, of the real size. docs/gpu.md has the prediction.
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
STEPS = ["--sft.max_steps=60", "--grpo.max_steps=20", "--data.eval_rows=32"]
NF4 = ["--adapter.r=8", "--adapter.quantize=nf4", "--model.dtype=bfloat16", "--rollout.max_logp_mismatch=.inf"]
PARTS = {
    "tests": Part(
        "Tests that need a GPU", 4,
        ["-m", "pytest", "-m", "slow or not slow", "-k", "gpu", "tests/test_attention.py",
         "tests/test_window_attention.py", "tests/test_decode_attention.py", "tests/test_backend.py",
         "tests/test_captured.py"], ["--collect-only"],
    ),
    **{
        f"run_{name}": Part(
            f"A run of a tiny model, {name}", 1.5,
            ["train.py", "--output_dir={out}/run_" + name, "--resume=never", *STEPS, *options], SHORT,
        )
        for name, options in {"bfloat16": ["--model.compute_dtype=bfloat16"], "float32": [], "nf4": NF4}.items()
    },
    "step": Part(
        "Qwen2.5-VL-3B: rollout, scoring and step of one prompt, beside transformers", 6,
        script("gpu_step", "--repeats=3", "--json={out}/step.json"), ["--toy", "--repeats=1"],
    ),
    "profile": Part("Where the time goes: the kernels of each phase", 3.5, script("gpu_profile"), ["--toy"]),
    "ours": Part(
        "Qwen2.5-VL-3B: a GRPO step, beside the roofline and `plan`", 3,
        script("gpu_grpo", "ours", "--json={out}/ours.json"), ["--toy", "--steps=1"],
    ),
    "decode": Part(
        "Qwen2.5-VL-3B: tokens a second, as a graph and eager, beside transformers and the roofline", 5,
        script("decode", "--json={out}/decode.json"), ["--toy", "--repeats=1"],
    ),
    "kernels": Part(
        "Kernels against their peers", 8, script("gpu_kernels", "--minutes=7", "--json={out}/kernels.json"), ["--toy"]
    ),
    "vllm": Part("vLLM, as many tokens", 4, script("decode", "--ways=vllm", "--json={out}/vllm.json"), ["--toy"]),
    "trl": Part(
        "Qwen2.5-VL-3B: the same step with TRL", 5,
        script("gpu_grpo", "trl", "--json={out}/trl.json"), ["--toy", "--steps=1"],
    ),
}  # fmt: skip


def main() -> int:
    """Returns the number of parts that failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--toy", action="store_true", help="every part at toy size")
    parser.add_argument("--only", nargs="+", choices=PARTS, help="these parts, also those that were done")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no part that may end later")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "gpu", help="folder of the page")
    o = parser.parse_args()
    out, failed, ends = o.out.resolve(), 0, time.monotonic() + 60 * o.minutes
    out.mkdir(parents=True, exist_ok=True)
    for name in o.only or [name for name in PARTS if not (out / f"{name}.md").exists()]:
        if time.monotonic() + 60 * PARTS[name].minutes > ends:
            print(f"later   {PARTS[name].title}")
            continue
        ok, text = run(PARTS[name], o.toy, out / f"{name}.txt")
        failed += not ok
        (out / f"{name}.md").write_text(f"## {PARTS[name].title}\n\n{text}")
        print(f"{'done  ' if ok else 'FAILED'}  {PARTS[name].title}", flush=True)
        sections = [out / f"{name}.md" for name in PARTS]
        head = f"# A GPU, {datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC\n\n```text\n{card()}\n```\n"
        text = "\n".join([head, *(section.read_text() for section in sections if section.exists())])
        (out / "gpu.md").write_text(text)
    print(out / "gpu.md")
    return failed


def run(part: Part, toy: bool, printed: Path) -> tuple[bool, str]:
    """Whether a part's process succeeded, and its part of the page; what it prints goes to a file."""
    command = [word.format(out=printed.parent) for word in part.command + part.toy * toy]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
    options = {"cwd": ROOT, "env": environment, "text": True, "start_new_session": True}
    begin = time.monotonic()
    with (
        printed.open("w") as file,
        subprocess.Popen([sys.executable, *command], stdout=file, stderr=subprocess.PIPE, **options) as process,
    ):
        try:
            _, errors = process.communicate(timeout=60 * part.minutes)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # with the processes that it has started
            _, errors = process.communicate()
            errors += f"\nstopped after {part.minutes} minutes"
    ok = process.returncode == 0
    shown = printed.read_text().splitlines()[-LINES:] + ([] if ok else errors.splitlines()[-LINES // 4 :])
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
