"""Run all tests and measurements that need a GPU, most important first, and write the results to one page.

python benchmarks/first_gpu_hour.py --minutes 9 --out DIR   # repeat until no part is printed as "later"
python benchmarks/first_gpu_hour.py --toy                   # test of the script: toy sizes, also on a CPU

Each part is a process with a time limit; its output is written to DIR/PART.txt. After each part, DIR/gpu_status.md is
written again. A part with a file DIR/PART.md is done, even if it failed, and is skipped in later calls. With --minutes,
a part is only started if its time limit fits. Nothing is downloaded; weights are random and of the real size.
"""

import argparse
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
LINES = 120  # number of lines of a part's output that the page shows


class Part(NamedTuple):
    """A command with its time limit. {out} is replaced with the folder of the page; `toy` is appended at toy size."""

    minutes: float
    command: str
    toy: str


SHORT = "--sft.max_steps=1 --grpo.max_steps=1 --grpo.prompts_per_step=2 --data.eval_rows=2"
RUN = "train.py --resume=never --sft.max_steps=60 --grpo.max_steps=20 --data.eval_rows=32 --output_dir={out}/run_"
NF4 = "--adapter.r=8 --adapter.quantize=nf4 --model.dtype=bfloat16 --rollout.max_logp_mismatch=.inf"
NAMES = "model/test_attention", "kernels/test_window_attention", "kernels/test_backend", "generation/test_cuda_graphs"
FILES = " ".join(f"tests/{name}.py" for name in NAMES)
PARTS = {
    "tests": Part(4, f"-m pytest -m 'slow or not slow' -k gpu {FILES}", "--collect-only"),
    "run_bfloat16": Part(1.5, f"{RUN}bfloat16 --model.compute_dtype=bfloat16", SHORT),
    "run_float32": Part(1.5, f"{RUN}float32", SHORT),
    "run_nf4": Part(1.5, f"{RUN}nf4 {NF4}", SHORT),
    "step": Part(6, "benchmarks/gpu_step.py --repeats=3 --json={out}/step.json", "--toy --repeats=1"),
    "grpo": Part(3, "benchmarks/gpu_grpo.py --json={out}/grpo.json", "--toy --steps=1"),
    "decode": Part(5, "benchmarks/decode.py --json={out}/decode.json", "--toy --repeats=1"),
    "vllm_tests": Part(5, "-m pytest -m slow tests/generation/test_vllm.py", "--collect-only"),
    "vllm_run": Part(
        2, f"{RUN}vllm --model.compute_dtype=bfloat16 --sampling.engine=vllm", f"{SHORT} --sampling.engine=native"
    ),
    "vllm_speed": Part(2, "benchmarks/vllm_speed.py", ""),
    "kernels": Part(8, "benchmarks/gpu_kernels.py --minutes=7 --json={out}/kernels.json", "--toy"),
}


def main() -> int:
    """Run the parts; return the number of failed parts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--toy", action="store_true", help="every part at toy size")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no part that may end later")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "gpu", help="folder of the page")
    o = parser.parse_args()
    out = o.out.resolve()
    failed = 0
    ends = time.monotonic() + 60 * o.minutes
    out.mkdir(parents=True, exist_ok=True)
    for name, part in PARTS.items():
        if (out / f"{name}.md").exists():
            continue
        if time.monotonic() + 60 * part.minutes > ends:
            print(f"later   {name}")
            continue
        ok = run(name, part, o.toy, out)
        failed += not ok
        print(f"{'done  ' if ok else 'FAILED'}  {name}", flush=True)
        sections = [out / f"{other}.md" for other in PARTS]
        (out / "gpu_status.md").write_text("\n".join(path.read_text() for path in sections if path.exists()))
    print(out / "gpu_status.md")
    return failed


def run(name: str, part: Part, toy: bool, out: Path) -> bool:
    """Run a part, write its section of the page, and return whether the part succeeded."""
    command = shlex.split(f"{part.command} {part.toy if toy else ''}".format(out=out))
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}", "PYTHONUNBUFFERED": "1"}
    begin = time.monotonic()
    printed = out / f"{name}.txt"
    limit = ["timeout", "--kill-after=1", f"{60 * part.minutes}"]  # also ends child processes
    with printed.open("w") as file:
        both = {"stdout": file, "stderr": subprocess.STDOUT}
        code = subprocess.run([*limit, sys.executable, *command], cwd=ROOT, env=environment, **both).returncode
    state = f"{time.monotonic() - begin:.0f} s"
    if code:
        state += f", **failed**: {f'stopped after {part.minutes} minutes' if code in (124, 137) else f'exit {code}'}"
    lines = "\n".join(printed.read_text().splitlines()[-LINES:])
    (out / f"{name}.md").write_text(f"## {name}\n\n`python {shlex.join(command)}`: {state}\n\n```text\n{lines}\n```\n")
    return code == 0


if __name__ == "__main__":
    sys.exit(main())
