"""Train recipes/two_steps.yaml with and without thinking.

    python benchmarks/two_steps.py vlm work --json docs/curves/two_steps.json    # two hours on one core

`vlm` is a folder written by recipes/from_text_model.py. `work` keeps all outputs, and finished runs are not repeated.
"""

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from benchmarks import common  # noqa: E402
from benchmarks.sums import call, read_lines  # noqa: E402
from recipes import two_steps  # noqa: E402

DIRECT = ["--data.answer_format=whole", "--data.prompt_template={problem} Answer with the number only."]


def train(model: Path, work: Path, name: str, demonstrations: str, options: list[str]) -> dict:
    """Train a model unless its folder is complete; return curves and CPU seconds."""
    folder = work / name.replace(" ", "_")
    if not (folder / "run.json").exists():
        files = [f"--data.{kind}_file={work / f'two_steps_{kind}.jsonl'}" for kind in ("train", "eval")]
        files.append(f"--data.files={{sft: {work / f'two_steps_{demonstrations}.jsonl'}}}")
        command = ["train", "recipes/two_steps.yaml", f"--model.path={model}", f"--output_dir={folder}"]
        cost = call([*command, "--num_threads=1", *files, *options])
        (folder / "run.json").write_text(json.dumps(cost))
    evaluations = read_lines(folder / "evaluations.jsonl")
    metrics = [line for line in read_lines(folder / "metrics.jsonl") if line["stage"] == "grpo"]
    return {
        "run": name,
        "at": [f"{line['stage']} {line['step']}" for line in evaluations],
        **{way: [line[f"eval/accuracy_{way}"] for line in evaluations] for way in ("sampled", "greedy")},
        "reward": [line["rewards/accuracy/mean"] for line in metrics],
        "length": [line["completions/mean_length"] for line in metrics],
        **json.loads((folder / "run.json").read_text()),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    model, work = options.model.resolve(), options.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    two_steps.main(work)
    runs = [train(model, work, "with thinking", "think", []), train(model, work, "number only", "direct", DIRECT)]
    results = {**common.about(), "commit": common.commit(), "runs": runs}
    options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
