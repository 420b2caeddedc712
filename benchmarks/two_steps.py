"""Train recipes/two_steps.yaml with and without thinking.

    python benchmarks/two_steps.py vlm work --json docs/curves/two_steps.json    # two hours on one core

`vlm` is a folder written by recipes/from_text_model.py. `work` keeps all outputs, and finished runs are not repeated.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from benchmarks import common  # noqa: E402
from recipes import two_steps  # noqa: E402

DIRECT = ["--data.answer_format=whole", "--data.prompt_template={problem} Answer with the number only."]


def main():
    options = common.study_options(__doc__).parse_args()
    work = options.work
    work.mkdir(parents=True, exist_ok=True)
    two_steps.main(work)
    files = [f"--data.{kind}_file={work / f'two_steps_{kind}.jsonl'}" for kind in ("train", "eval")]

    def runs() -> Iterator[dict]:
        for name, demonstrations, changes in (("with thinking", "think", []), ("number only", "direct", DIRECT)):
            shown = f"--data.files={{sft: {work / f'two_steps_{demonstrations}.jsonl'}}}"
            folder = work / name.replace(" ", "_")
            yield {"run": name, **common.train("two_steps", options.model, folder, *files, shown, *changes)}

    common.collect(options.json, runs())


if __name__ == "__main__":
    main()
