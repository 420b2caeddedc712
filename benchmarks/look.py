"""Train recipes/look.yaml: GRPO beside more SFT from the same model, several seeds, and controls.

    python benchmarks/look.py vlm work --json docs/curves/look.json    # two hours on one core
    python benchmarks/look.py vlm work --signs --seeds 0 1 --json docs/curves/look_signs.json

`vlm` is a folder written by recipes/from_text_model.py, as recipes/look.yaml says. `work` keeps all outputs, and
finished runs are not repeated. All runs but two start from the model after the recipe's SFT. More SFT gets the CPU time
of GRPO. After a run, all rows of look_eval.jsonl are answered greedily.

Criterion, written before the first run. GRPO teaches the tower to see if all of these hold:

1. On 320 held-out sums, every seed is more accurate after GRPO than the model that it started from.
2. The mean difference between GRPO and more SFT over seeds is above 0, and so is its 95 % interval (bootstrap over
   seeds and rows, paired by row).
3. With shuffled rewards, accuracy is not above that of the start.
4. With blank pictures and with another row's pictures, accuracy after GRPO is at most that of the most frequent sum,
   plus two standard errors.

Single digits, which GRPO never asks for, rise if the same interval for GRPO minus start is above 0.

History of the start, from which all arms are compared. With 60 steps of SFT, criterion 2 failed for seed 0 (0.52 after
GRPO, 0.57 after more SFT), because the loss of SFT was still 0.4. With 72 further steps at a constant learning rate,
two seeds of GRPO and one of more SFT met it. The recipe now has one schedule of 132 steps. Before its first run: the
criterion stays, and seeds 0, 1, 2, ... of both arms are run, alternating, as many as the time allows. After them, SFT
on the sums was added, as an upper bound: it sees the right sums from which GRPO's rewards come.

With --signs, SFT demonstrates digits, sums, differences and the larger of two, and GRPO rewards only sums and the
larger. Differences are held out. Arm "signs" answers at once, and "aloud" first writes the problem in numbers.
Criterion, before the first of these runs: what GRPO teaches transfers if GRPO minus its start is above 0 on 160
differences, and so is its 95 % interval (bootstrap over seeds and rows). Reading aloud helps if the same holds for
aloud minus signs, both after GRPO.
"""

import json
import shutil
import sys
from collections import Counter, defaultdict
from functools import partial
from itertools import product
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from benchmarks import common  # noqa: E402
from minivlmrl.data.tokenizer import load_tokenizer  # noqa: E402
from minivlmrl.distributed.saving import save_model  # noqa: E402
from minivlmrl.model.build import random_model  # noqa: E402
from recipes import look  # noqa: E402

# {run: stages and options}
RUNS = {
    "sft": ["--stages=[sft]", "--eval_steps=44"],
    "grpo": ["--stages=[grpo]"],
    "more sft": [
        "--stages=[sft]", "--sft.max_steps=72", "--sft.learning_rate=2e-4", "--sft.lr_scheduler_type=constant",
        "--eval_steps=36",
    ],
    # GRPO's sums, from which its rewards come, as demonstrations
    "sft on the sums": [
        "--stages=[sft]", "--sft.max_steps=72", "--sft.learning_rate=2e-4", "--sft.lr_scheduler_type=constant",
        "--eval_steps=36",
    ],
    "shuffled rewards": [
        "--stages=[grpo]", "--rewards={recipes/shuffled.py:shuffled: 1.0}", "--data.eval_rewards=[accuracy]",
        "--grpo.max_steps=15",
    ],
    "random decoder": ["--stages=[sft]", "--eval_steps=44"],
}  # fmt: skip
SEEDED = "grpo", "more sft"  # runs with all seeds
CONTROLS = "sft on the sums", "shuffled rewards", "random decoder"
ARMS = {"sums": [], "signs": [], "aloud": ["--data.answer_format=last_line", "--sampling.max_new_tokens=12"]}


def begin(name: str, vlm: Path, work: Path) -> Path:
    """Return the folder of the model from which a run starts."""
    if name == "sft":
        return vlm
    if name != "random decoder":
        return work / "sft_0/checkpoint"
    folder = work / "random_decoder"
    if not folder.exists():
        tokenizer = load_tokenizer(vlm / "tokenizer.json")
        save_model(folder, *random_model(vlm / "config.json", tokenizer, 0))
    return folder


def train(vlm: Path, folder: Path, arm: str, run: str, seed: int) -> dict:
    """Train a model and answer look_eval.jsonl unless its folder is complete; return curves, answers and cost."""
    work = folder / arm
    out = work / f"{run.replace(' ', '_')}_{seed}"
    rows, answers = work / "look_eval.jsonl", out / "answers.jsonl"
    demonstrations = "look_demonstrations.jsonl"
    if run == "sft on the sums":
        demonstrations = "look_sums.jsonl"
        lines = [row | {"completion": row["solution"]} for row in common.read_lines(work / "look_train.jsonl")]
        (work / demonstrations).write_text("".join(json.dumps(line) + "\n" for line in lines))
    files = common.data_files(work, "look", demonstrations)
    model = f"--model.path={begin(run, vlm, work)}"
    options = [model, f"--seed={seed}", "--state_minutes=5", "--resume=auto", *files, *RUNS[run], *ARMS[arm]]
    curves = common.train("look", out, *options)
    common.evaluate(out / "checkpoint", rows, answers)
    if run != "sft":
        shutil.rmtree(out / "checkpoint", ignore_errors=True)  # 2.5 GB
    right, solutions = defaultdict(str), defaultdict(Counter)
    for row, line in zip(common.read_lines(rows), common.read_lines(answers), strict=True):
        right[row["kind"]] += f"{line['answers'][0]['rewards']['accuracy']:.0f}"
        solutions[row["kind"]][row["solution"]] += 1
    most_frequent = {kind: max(counts.values()) / counts.total() for kind, counts in solutions.items()}
    return {"right": right, "most_frequent": most_frequent, **curves}


def main():
    parser = common.study_options(__doc__, "model", "work", seeds=range(5))
    parser.add_argument("--signs", action="store_true")
    options = parser.parse_args()
    arms, runs, controls = (["signs", "aloud"], ["grpo"], []) if options.signs else (["sums"], SEEDED, CONTROLS)
    keys = []
    for arm in arms:
        look.main(options.work / arm, signs=options.signs, aloud=arm == "aloud")
        keys.append({"arm": arm, "run": "sft", "seed": 0})
        keys += [{"arm": arm, "run": run, "seed": seed} for seed, run in product(options.seeds, runs)]
        keys += [{"arm": arm, "run": run, "seed": 0} for run in controls]
    common.study(options.json, keys, partial(train, options.model, options.work))


if __name__ == "__main__":
    main()
