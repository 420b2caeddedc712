"""Hold claims of papers against runs of the default task, with controls: docs/claims.md is the page.

python benchmarks/claims.py --jobs 2                 # every run that is not in docs/claims.json yet, then the page
python benchmarks/claims.py "One example is enough" # of one claim alone; --seeds: how many
python benchmarks/claims.py --again "late 8" 3       # one run again, and how near it comes (status 1: not the same)
python benchmarks/claims.py --page                   # the page and its pictures alone

A seed's SFT is done once; each arm goes on from its checkpoint on one thread, with rows and draws of that seed. An arm
is recipes/shapes.yaml with changed options, or a change of claims_parts.py. Bars were fixed before the runs.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise, product
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "docs" / "claims.json"
RUNS = Path(tempfile.gettempdir()) / "minivlmrl_claims"  # checkpoints after SFT, and runs that go on
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
import claims_parts as parts  # noqa: E402

PICTURES, DRAWN = 128, 32  # held out, and answers to each
# of the 95 % interval of a mean of so many seeds, Student's t
T = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26, 20: 2.09}


@dataclass
class Arm:
    """One way to train."""

    options: list[str] = field(default_factory=list)  # on top of recipes/shapes.yaml
    change: Callable | None = None  # called once a run; returns a change of claims_parts.py
    start: str | None = "sft"  # the arm whose checkpoint it goes on from; None: it is SFT


def grpo(*options: str, change=None, start="sft") -> Arm:
    """An arm by options of the section grpo, without KL unless they say one; others begin with --."""
    return Arm([text if text[0] == "-" else f"--grpo.{text}" for text in ("beta=0", *options)], change, start)


def rewards(**weights: float) -> str:
    return f"--rewards={json.dumps(weights)}"


HERE = "benchmarks/claims_parts.py"
SHUFFLED = {
    "recipes/shuffled.py:shuffled(reward='format')": 0.5,
    "recipes/shuffled.py:shuffled(reward='accuracy')": 1.0,
}
COMBINATIONS = f"--data.task={HERE}:COMBINATIONS"
SILENT = "--data.answer=whole"
RIGHT = f"--data.task={HERE}:COMBINATIONS(demonstrations={{}}, wrong=0)"
LORA = ["--adapter.target=[language, vision, merger]", "learning_rate=1e-3"]
MORE_SFT = ["--stages=[sft]", "--sft.max_steps=160", "--sft.learning_rate=3e-4", "--sft.lr_scheduler_type=linear"]
FOUR = ["num_iterations=4", "max_steps=240"]
TRUNCATED = ["rollout_correction=token_truncate", "rollout_correction_bounds=[null, 2.0]"]
NO_BOUND = "--rollout.max_logp_mismatch=.inf"
ARMS = {
    "sft": Arm(start=None),
    "sft, no thought": Arm([SILENT], start=None),
    "sft, combinations": Arm([COMBINATIONS], start=None),
    "grpo": grpo(),
    "kl 0.02": grpo("beta=0.02"),
    "kl 5": grpo("beta=5"),
    "4 passes": grpo(*FOUR),
    "4 passes, 0.28": grpo(*FOUR, "epsilon_high=0.28"),
    "4 passes, entropy bonus": grpo(*FOUR, "entropy_coef=0.02"),
    "4 passes, sequence": grpo(*FOUR, "importance_sampling_level=sequence", "epsilon_low=3e-4", "epsilon_high=4e-4"),
    "4 passes, sequence 0.2": grpo(*FOUR, "importance_sampling_level=sequence"),
    "negative": grpo(change=lambda: parts.sign(-1)),
    "positive": grpo(change=lambda: parts.sign(1)),
    "entropy fifth": grpo("top_entropy_quantile=0.2"),
    "any fifth": grpo(change=lambda: parts.some_tokens(0.2)),
    "shuffled": grpo(rewards(**SHUFFLED)),
    "1 picture": grpo(f"--data.task={HERE}:FEW(prompts=1)"),
    "256 pictures": grpo(f"--data.task={HERE}:FEW(prompts=256)"),
    "majority": grpo(rewards(format=0.5, **{f"{HERE}:vote": 1.0})),
    "any vote": grpo(rewards(format=0.5, **{f"{HERE}:vote(winner='any')": 1.0})),
    "no thought": grpo(SILENT, rewards(accuracy=1.0), start="sft, no thought"),
    "rank 1": grpo("--adapter.r=1", *LORA),
    "rank 1, rate of full": grpo("--adapter.r=1", LORA[0]),
    "unseen, grpo": grpo(COMBINATIONS, start="sft, combinations"),
    "unseen, sft on 96": Arm([RIGHT.format(96), *MORE_SFT], start="sft, combinations"),
    "unseen, sft on 2,560": Arm([RIGHT.format(2560), *MORE_SFT], start="sft, combinations"),
    "64 groups of 2": grpo("num_generations=2", "prompts_per_step=64", "micro_batch_size=64"),
    "16 groups of 2": grpo("num_generations=2"),
    "late 8": grpo("max_steps=168", NO_BOUND, change=lambda: parts.late(8, corrected=False)),
    "late 32": grpo("max_steps=192", NO_BOUND, change=lambda: parts.late(32, corrected=False)),
    "late 32, ratio": grpo("max_steps=192", NO_BOUND, change=lambda: parts.late(32, corrected=True)),
    "3 bits": grpo(NO_BOUND, change=lambda: parts.rounds(3)),
    "3 bits, truncated ratio": grpo(NO_BOUND, *TRUNCATED, change=lambda: parts.rounds(3)),
    "16 bits": grpo(NO_BOUND, change=lambda: parts.rounds(16)),
}


@dataclass
class Result:
    """What one run left."""

    right: list[int]  # of the DRAWN answers to each picture
    unseen: list[bool]  # whether a picture's combination was held out
    entropy: list[float]  # nats a token, means of tenths of the run
    reward: list[float]  # of training, so too
    length: float  # tokens of a held-out answer
    cpu_seconds: float

    @property
    def accuracy(self) -> float:
        """Share of right answers, which is pass@1."""
        return self.passed(1)

    def passed(self, k: int, unseen=False) -> float:
        """pass@k: 1 - C(n - c, k) / C(n, k), mean over pictures, or over the unseen ones."""
        kept = [c for c, held_out in zip(self.right, self.unseen, strict=True) if held_out or not unseen]
        return statistics.mean(1 - math.comb(DRAWN - c, k) / math.comb(DRAWN, k) for c in kept)

    @property
    def end_entropy(self) -> float:
        """Mean over the last three tenths."""
        return statistics.mean(self.entropy[-3:])


def train_once(name: str, seed: int, folder: Path):
    """Train one arm, from its start's checkpoint, and answer held-out pictures: folder/result.json."""
    from minivlmrl.config.loading import load_config
    from minivlmrl.run import loop  # torch takes seconds, and the page needs none
    from minivlmrl.run.callbacks import Callback, default_callbacks

    arm = ARMS[name]
    options = ["--stages=[sft]"]
    if arm.start:
        checkpoint = run(arm.start, seed)[1] / "checkpoint"
        options = ["--stages=[grpo]", f"--model.path={checkpoint}", "--model.config=null"]
    run_options = ["--resume=never", f"--seed={seed}", f"--output_dir={folder}", "--num_threads=1"]
    options += [*arm.options, *run_options, "--data.eval_rows=16"]
    config = load_config(ROOT / "recipes" / "shapes.yaml", options)
    change = arm.change and arm.change()
    algorithms = []

    class Change(Callback):
        """Applies the arm's change before each step."""

        def on_step_begin(self, algorithm, optimizer, step, number, batches):
            algorithms[:] = [algorithm]
            if change:
                change(algorithm, step, number)

    loop.start(config, [*default_callbacks(config), Change()])
    right, unseen, lengths = answer_pictures(algorithms[0], config)
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    times = os.times()
    result = {
        "right": right,
        "unseen": unseen,
        "entropy": tenths([line["entropy"] for line in metrics if "entropy" in line]),
        "reward": tenths([line["reward"] for line in metrics if "reward" in line]),
        "length": round(statistics.mean(lengths), 2),
        "cpu_seconds": round(times.user + times.system),
    }
    (folder / "result.part").write_text(json.dumps(result) + "\n")
    (folder / "result.part").rename(folder / "result.json")


def answer_pictures(algorithm, config) -> tuple[list[int], list[bool], list[int]]:
    """Of each held-out picture the number of right answers and whether it is unseen; of each answer its tokens."""
    from dataclasses import replace

    from minivlmrl.generation.sampler import make_sampler
    from minivlmrl.rewards.registry import get_reward
    from minivlmrl.run.evaluate import draw
    from minivlmrl.tasks.shapes import Shapes

    sampling = replace(config.sampling, temperature=1.0)
    pictures = Shapes(PICTURES, "claims")
    right = []
    lengths = []
    for first in range(0, PICTURES, 16):
        rows = [replace(pictures[i], key=f"claims/{i}", index=i) for i in range(first, first + 16)]
        sample = make_sampler(algorithm.policy, algorithm.processor, sampling, algorithm.world)
        earned, groups = draw(sample, rows, DRAWN, [get_reward("accuracy")])
        right += [int(rewards.sum()) for rewards in earned.view(-1, DRAWN)]
        for group in groups:
            lengths += [len(completion.ids) for completion in group]
    return right, [parts.is_unseen(pictures[i]) for i in range(PICTURES)], lengths


def tenths(values: list[float]) -> list[float]:
    """Means of ten parts of a curve; none if it has no points."""
    size = len(values) / 10
    ends = [round(i * size) for i in range(11)] if values else []
    return [round(statistics.mean(values[first:last]), 4) for first, last in pairwise(ends)]


def run(name: str, seed: int, anew=False) -> tuple[dict, Path]:
    """A run's result and folder; it is made in a process of its own if it is not there."""
    folder = RUNS / f"{name.replace(' ', '_').replace(',', '')}-{seed}"
    if anew or not (folder / "result.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, str(Path(__file__)), "--one", name, str(seed), str(folder)]
        with (folder / "log.txt").open("w") as log:
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            if subprocess.run(command, cwd=ROOT, stdout=log, stderr=log, env=environment).returncode:
                raise RuntimeError(f"{name}, seed {seed}: {folder / 'log.txt'} says why it failed")
    return json.loads((folder / "result.json").read_text()), folder


def exact() -> dict[str, list[float]]:
    """Arms of formulas, without a run: of 20 random policies, and of prompts by how often they are solved."""
    import torch

    random = {"generator": torch.Generator().manual_seed(1), "dtype": torch.float64}
    slopes = [length_slopes(random) for _ in range(20)]
    arms = {f"loss_type {loss}": [slope[loss] for slope in slopes] for loss in slopes[0]}
    for scale in ("group", "none"):
        for solved in (0.05, 0.5):
            arms[f"{scale}, solved in {solved:.0%}"] = [expected_weight(solved, scale)]
    return arms


def length_slopes(random: dict) -> dict[str, float]:
    """By loss: how fast a step of it makes wrong answers longer, for a random policy and random right answers."""
    import torch

    from docs import bias
    from minivlmrl.losses.grpo import GRPOLossOptions

    lengths = bias.MASK.sum(1)
    logits = torch.randn(bias.POLICY.shape, **random)
    right = (torch.rand(len(bias.ALL), **random) < 0.3).double()

    def length_of_wrong(logps):
        chance = bias.chances(logps) * (1 - right)
        return chance @ lengths / chance.sum()

    growth = bias.gradient(length_of_wrong, logits)
    slopes = {}
    for loss in ("grpo", "dr_grpo", "luspo"):
        step = -bias.gradient(bias.expected_policy_loss, logits, right, GRPOLossOptions(loss))
        slopes[loss] = (growth @ step / step.norm()).item()
    return slopes


def expected_weight(p: float, scale: str, G: int = 8) -> float:
    """The expected gradient of a prompt that is solved with chance p, in multiples of the gradient of p."""
    import torch

    from minivlmrl.losses.advantages import group_advantages

    total = 0.0
    for k in range(G + 1):
        rewards = (torch.arange(G) < k).double()
        share = group_advantages(rewards, G, scale) * (rewards / p - (1 - rewards) / (1 - p))
        total += math.comb(G, k) * p**k * (1 - p) ** (G - k) * share.mean().item()
    return total


def wanted(title: str | None, seeds: int, found: dict) -> list[tuple[str, int]]:
    """The runs of a claim, or of all, that the file lacks; SFT first, then seed by seed."""
    from docs.claims import CLAIMS

    named = dict.fromkeys(name for claim in CLAIMS if title in (None, claim.title) for name in claim.arms)
    starts = dict.fromkeys(ARMS[name].start for name in named if ARMS[name].start)
    jobs = [*product(starts, range(seeds)), *((name, seed) for seed, name in product(range(seeds), named))]
    return [job for job in dict.fromkeys(jobs) if str(job[1]) not in found["runs"].get(job[0], {})]


def main() -> int | None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("claim", nargs="?", help="its title; default: all")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, one thread each")
    parser.add_argument("--again", nargs=2, metavar=("ARM", "SEED"), help="make one run of the file again and compare")
    parser.add_argument("--page", action="store_true", help="make no runs")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        name, seed, folder = options.one
        return train_once(name, int(seed), Path(folder))
    found = json.loads(FILE.read_text()) if FILE.exists() else {"runs": {}}
    if options.again:
        return again(*options.again, found)
    if not options.page:
        make_runs(wanted(options.claim, options.seeds, found), options.jobs, found)
    from docs import claims  # it imports this file

    claims.main()
    return 0


def make_runs(jobs: list[tuple[str, int]], at_a_time: int, found: dict):
    """Add runs to what was found and to the file."""
    with ThreadPoolExecutor(at_a_time) as pool:
        for (name, seed), (result, _) in zip(jobs, pool.map(lambda job: run(*job), jobs), strict=True):
            found["runs"].setdefault(name, {})[str(seed)] = result
            FILE.write_text(as_lines(found))
            right = sum(result["right"]) / PICTURES / DRAWN
            print(f"{name}, seed {seed}: {right:.3f} right, {result['cpu_seconds']} CPU s", flush=True)
    if jobs:  # what made the runs that are kept stays
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
        found.update(exact=exact(), machine=machine(), commit=commit.stdout.strip())
        FILE.write_text(as_lines(found))


def again(name: str, seed: str, found: dict) -> int:
    """Make a run of the file again and print how near it comes; returns 0 if all of its numbers are the same."""
    made = run(name, int(seed), anew=True)[0]
    kept = found["runs"][name][seed]
    same = made | {"cpu_seconds": 0} == kept | {"cpu_seconds": 0}
    accuracy = [sum(result["right"]) / PICTURES / DRAWN for result in (made, kept)]
    others = sum(mine != theirs for mine, theirs in zip(made["right"], kept["right"], strict=True))
    print(
        f"{name}, seed {seed}: {'the same' if same else 'another'} result as in {FILE.name}: {accuracy[0]:.3f} right, "
        f"there {accuracy[1]:.3f}; {others} of {PICTURES} pictures have another count"
    )
    return int(not same)


def machine() -> str:
    """The processor's name and torch's version."""
    import torch

    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return f"{names[0].partition(': ')[2]}, torch {torch.__version__}"


def as_lines(found: dict) -> str:
    """JSON with a line for each run."""
    arms = []
    for name, results in sorted(found["runs"].items()):
        lines = [f"  {json.dumps(seed)}: {json.dumps(results[seed])}" for seed in sorted(results, key=int)]
        arms.append(f" {json.dumps(name)}: {{\n" + ",\n".join(lines) + "\n }")
    about = "".join(f"{json.dumps(name)}: {json.dumps(value)},\n" for name, value in found.items() if name != "runs")
    return "{" + about + '"runs": {\n' + ",\n".join(arms) + "\n}}\n"


if __name__ == "__main__":
    sys.exit(main())
