"""Compare the methods of recipes/methods with GRPO over seeds, on rows of which half can be answered blind.

    python benchmarks/methods.py work --json docs/curves/methods.json    # twenty CPU minutes
    python benchmarks/methods.py work --json part.json --seeds 7 --only grpo vppo

`work` keeps all outputs, and finished runs are not repeated. For each seed, SFT runs once, and every method continues
from its weights with the options of GRPO: same rows, same seed, same number of sampled completions. There is no KL
penalty, because ASPO's loss has none, and two updates per rollout, because the first one of ASPO is GRPO's.

Criterion, written before the first run of seeds 5 to 9; options were chosen with SFT and plain GRPO on seeds 10 to 12.
In a study with 100 steps and a learning rate of 6e-4 (9be83b70, seeds 0 to 4), GRPO's own gain was not shown, because
its seeds ended between 0.52 and 0.74; so steps are doubled, the rate is halved, and seeds are new.

Measures: accuracy is that of greedy answers to 256 held-out rows at the last step, blind accuracy that of the same rows
with gray pictures. What a model sees is the difference of the two. Runs are paired by seed, and the interval is the
95 % interval of the mean difference to GRPO (Student's t, four degrees of freedom).

1. The task can tell methods apart if, over seeds, the mean blind accuracy after SFT is at least 0.35, and the interval
   of GRPO's gain in accuracy over SFT lies above 0.
2. A method helps if the interval of accuracy lies above 0, and hurts if it lies below. Otherwise nothing is shown.
3. It sees more, or less, if the same holds for accuracy minus blind accuracy.
"""

import json
import sys
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from benchmarks import common  # noqa: E402
from minivlmrl.extras.compare import difference  # noqa: E402

FOLDER = "recipes/methods"
STEPS = 200
COMMON = [
    f"--data.task={FOLDER}/half_blind.py:TASK", "--data.eval_rows=256", "--data.eval_without_images=true",
    "--eval_on_start=false", "--state_minutes=0", "--resume=auto", "--log_completions=0",
    "--sft.max_steps=100",
    f"--grpo.max_steps={STEPS}", "--grpo.prompts_per_step=8", "--grpo.micro_batch_size=8",
    "--grpo.num_iterations=2", "--grpo.learning_rate=3e-4", "--grpo.loss_type=dapo", "--grpo.beta=0",
]  # fmt: skip
NOISY = f"{FOLDER}/noisy_rollout.py:NoisyRollout(steps={STEPS})"
# {arm: stages and options}
ARMS = {
    "sft": ["--stages=[sft]"],
    "grpo": ["--stages=[grpo]"],
    "vppo": [f"--stages=[{FOLDER}/vppo.py:VPPO]"],
    "papo": [f"--stages=[{FOLDER}/papo.py:PAPO]"],
    "noisy_rollout": ["--stages=[grpo]", f"--sampling.engine={NOISY}", "--rollout.max_logp_mismatch=.inf"],
    "pgpo": [f"--stages=[{FOLDER}/pgpo.py:PGPO]"],
    "nsr": ["--stages=[grpo]", f"--grpo.advantages={FOLDER}/functions.py:nsr(right=1.5)"],
    "aspo": ["--stages=[grpo]", f"--grpo.loss_type={FOLDER}/functions.py:aspo"],
}
CURVES = {"accuracy": "accuracy_greedy", "sampled": "accuracy_sampled", "blind": "accuracy_gray_image"}
# measures of the criterion, of a run
MEASURES: dict[str, Callable[[dict], float]] = {
    "accuracy": lambda run: run["accuracy"][-1],
    "blind": lambda run: run["blind"][-1],
    "sees": lambda run: run["accuracy"][-1] - run["blind"][-1],
}


def train(work: Path, arm: str, seed: int) -> dict:
    """Train an arm, after SFT, unless its folder is complete; return its curves and cost."""
    folder = work / f"{arm}_{seed}"
    options = [f"--seed={seed}", *COMMON, *ARMS[arm]]
    if arm != "sft":
        train(work, "sft", seed)
        options += ["--model.config=null", f"--model.path={work}/sft_{seed}/checkpoint"]
    return common.train("shapes", folder, *options, curves=CURVES)


def verdict(pairs: list[tuple[float, float]]) -> dict:
    """Apply the criterion to pairs (GRPO, method): mean difference, half width of its interval, verdict."""
    found = difference(pairs)
    if found is None:
        return {}
    mean, half = found
    words = "more" if mean - half > 0 else "less" if mean + half < 0 else "not shown"
    return {"difference": mean, "half_width": half, "verdict": words}


def compare(runs: list[dict]) -> dict[str, dict]:
    """Return {arm: {measure: mean over seeds, and the verdict against GRPO}}; for GRPO, against SFT."""
    found = {}
    for arm in ARMS:
        by_seed = {run["seed"]: run for run in runs if run["arm"] == arm}
        other = {run["seed"]: run for run in runs if run["arm"] == ("sft" if arm == "grpo" else "grpo")}
        found[arm] = {"seeds": len(by_seed)}
        for name, measure in MEASURES.items() if by_seed else ():
            pairs = [(measure(other[seed]), measure(run)) for seed, run in by_seed.items() if seed in other]
            against = {} if arm == "sft" else verdict(pairs)
            found[arm][name] = {"mean": fmean(map(measure, by_seed.values())), **against}
    return found


def main():
    options = common.study_options(__doc__, "work", arms=ARMS, seeds=range(5, 10)).parse_args()
    keys = [{"arm": arm, "seed": seed} for seed, arm in product(options.seeds, options.only)]
    train_arm = partial(train, options.work)
    results = common.study(options.json, keys, train_arm, lambda runs: {"comparison": compare(runs)})
    for arm, found in results["comparison"].items():
        print(arm, json.dumps(found))


if __name__ == "__main__":
    main()
