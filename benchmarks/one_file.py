"""Compare minimal.py with the package: seconds per GRPO step, and memory for log-probabilities.

    python benchmarks/one_file.py --json docs/curves/one_file.json    # half a minute

Both programs train the same tiny model on the same rows, one after the other, with one thread. Memory is the peak in a
separate process, minus the peak in a process that only makes the inputs. README's table "What the package adds" has
both ratios.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from timeit import timeit

import torch
from common import provenance
from grpo_step import make_rows, our_side

from minivlmrl.kernels.linear_log_softmax import linear_log_softmax
from minivlmrl.model.checkpoint import load_model, load_processor

NEW_TOKENS, PROMPTS, STEPS = 14, 16, 8
TOKENS, WIDTH, VOCABULARY = 2048, 256, 151936  # eight completions with 256 tokens; vocabulary of Qwen2.5-VL


def step_ratio() -> float:
    """Return the step time of minimal.py relative to the package: 16 prompts, 8 completions with 14 tokens."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    import minimal

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        minimal.make_folder(folder)
        model = minimal.load(folder)
        rows = make_rows(56, PROMPTS)
        theirs = our_side(load_model(folder), load_processor(folder), rows, NEW_TOKENS)
        minimal.decode = lambda model, ids, mask: ["".join(map(chr, row)) for row in ids.tolist()]
        questions = [{"images": row.images, "problem": "What is it? Name it.", "solution": ""} for row in rows]
        options = argparse.Namespace(
            max_steps=1,
            prompts_per_step=PROMPTS,
            num_generations=8,
            max_new_tokens=NEW_TOKENS,
            beta=0.02,
            reward=lambda text, solution: float(len(set(text))),
            learning_rate=3e-4,
            warmup_steps=1,
        )
        ours, package = [], []
        for _ in range(STEPS):
            ours.append(timeit(lambda: minimal.train(model, questions, minimal.grpo, options), number=1))
            package.append(timeit(theirs.step, number=1))
    return statistics.median(ours[1:]) / statistics.median(package[1:])


def log_probabilities(way: str):
    """Compute log-probabilities and gradients, with all logits or in vocabulary blocks."""
    torch.manual_seed(0)
    states = torch.randn(TOKENS, WIDTH, requires_grad=True)
    weight = (torch.randn(VOCABULARY, WIDTH) / WIDTH**0.5).requires_grad_()
    ids = torch.randint(VOCABULARY, (TOKENS,))
    weight.grad = torch.zeros_like(weight)
    if way == "all":
        logps = (states @ weight.T).log_softmax(-1).gather(-1, ids[:, None])
        logps.sum().backward()
    elif way == "blocks":
        linear_log_softmax(states, weight, ids)[0].sum().backward()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--memory", choices=["inputs", "all", "blocks"], help="print the peak of one way in GiB")
    parser.add_argument("--json", type=Path, help="file of the results")
    options = parser.parse_args()
    if options.memory:
        log_probabilities(options.memory)
        return
    results = {**provenance(), "step_ratio": step_ratio()}
    print(f"minimal.py's step takes {results['step_ratio']:.1f} times as long as the package's")
    peaks = {}
    for way in ("inputs", "all", "blocks"):
        command = [sys.executable, __file__, f"--memory={way}"]
        peaks[way] = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    results["gib"] = {way: peaks[way] - peaks["inputs"] for way in ("all", "blocks")}
    print(f"{TOKENS} log-probabilities with gradients, GiB: {results['gib']}")
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
