"""Train recipes/two_steps.yaml with and without thinking.

    python benchmarks/two_steps.py vlm work --json docs/curves/two_steps.json    # two hours on one core

`vlm` is a folder written by recipes/from_text_model.py. `work` keeps all outputs, and finished runs are not repeated.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from benchmarks import common  # noqa: E402
from recipes import two_steps  # noqa: E402

# {run: (demonstrations, options)}
RUNS = {
    "with thinking": ("think", []),
    "number only": (
        "direct", ["--data.answer_format=whole", "--data.prompt_template={problem} Answer with the number only."],
    ),
}  # fmt: skip


def main():
    options = common.study_options(__doc__, "model", "work").parse_args()
    work = options.work
    work.mkdir(parents=True, exist_ok=True)
    two_steps.main(work)

    def train(run: str) -> dict:
        shown, changes = RUNS[run]
        files = common.data_files(work, "two_steps", f"two_steps_{shown}.jsonl")
        folder = work / run.replace(" ", "_")
        return common.train("two_steps", folder, f"--model.path={options.model}", *files, *changes)

    common.study(options.json, [{"run": run} for run in RUNS], train)


if __name__ == "__main__":
    main()
