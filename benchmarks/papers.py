"""Train minimal.py with the diff on each page of docs/papers, on the smallest task where its claim can be seen.

    python benchmarks/papers.py                          # all pages, five seeds: 20 minutes on one core
    python benchmarks/papers.py --only used --seeds 0 1  # one task

TASKS and CLAIMS were committed before the first run with these seeds; sizes were tried with seed 100. All methods of a
task start from the same SFT model, which knows the form of an answer, and guesses. Runs in docs/curves/papers.json are
not repeated. At the end, pages and pictures are written.
"""

import argparse
import importlib.util
import itertools
import random
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean
from types import ModuleType
from typing import NamedTuple

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
import minimal  # noqa: E402
from benchmarks import common  # noqa: E402
from docs.scripts.it_learns import chart, write_tables  # noqa: E402
from docs.scripts.picture import BLUES, ORANGES, Picture  # noqa: E402
from minivlmrl.extras.compare import difference  # noqa: E402

FOLDER = ROOT / "docs" / "papers"
CURVES = ROOT / "docs" / "curves" / "papers.json"
CACHE = ROOT / "build" / "papers"  # models after SFT
STEPS, EVERY, SEEDS = 48, 16, 5
REUSE = 16  # steps for which a copy of the model samples
SAMPLES = 384  # answers of an evaluation


# ---- rows; `completions` are what the model imitates before a method starts


def answer(name: str) -> str:
    return f"<answer>{name}</answer>"


def next_name(place=None, usual: int = 1, share: float = 0.4, before: int = 0, equal: float = 0.0):
    """Ask for the next of six names.

    Args:
        place: place of the name in the question, None = random.
        usual, share: name that a share of the completions have, 1 = the right one; the others have a random one.
        before: words before the answer.
        equal: share of questions to which all answers are right.
    """
    place = random.randrange(6) if place is None else place
    names = [*minimal.COLORS][place:] + [*minimal.COLORS][:place]
    row = {"images": [], "problem": names[0], "solution": names[1], "completions": []}
    row |= {"chosen": answer(names[1]), "rejected": answer(names[3])}
    for _ in range(16):
        words = "".join(f" {name}" for name in random.choices(names, k=before))
        name = names[usual] if random.random() < share else random.choice(names)
        row["completions"].append(words + answer(name))
    if random.random() < equal:
        row |= {"problem": "What is it?", "solution": ""}
    return row


def two_colors(place=None) -> dict:
    """Ask which of two colors a picture has; each completion is one of them."""
    right, other = random.sample([*minimal.COLORS], 2)
    image = minimal.draw_object(right, random.choice(["square", "triangle"]))
    problem = " or ".join(random.sample([right, other], 2))
    completions = [answer(name) for name in random.choices([right, other], k=16)]
    return {"images": [image], "problem": problem, "solution": right, "completions": completions}


def is_right(text: str, solution: str) -> float:
    return float(not solution or (text.count("<answer>") == 1 and answer(solution) in text))


# ---- tasks and claims


@dataclass
class Task:
    """Rows and sizes, the same for all methods."""

    text: str
    row: Callable
    begin: dict = field(default_factory=dict)  # arguments of `row`
    options: dict = field(default_factory=dict)
    tested: dict = field(default_factory=dict)  # arguments of `row` for held-out rows
    places: int = 6  # number of held-out rows
    stage: str = "grpo"


SIZES = {"max_steps": STEPS, "prompts_per_step": 4, "num_generations": 16, "learning_rate": 1e-3, "warmup_steps": 5}
SIZES |= {"beta": 0.0, "max_new_tokens": 12}
TASKS = {
    "used": Task(
        f"The model names the next of six colors after four random words, and its copy samples for {REUSE} steps; at "
        "first, a wrong name is usual.",
        next_name, {"before": 4, "usual": 3, "share": 0.6},
    ),
    "equal": Task(
        "The model names the next of six colors; to three of four questions, every answer is right.",
        next_name, {"equal": 0.75}, tested={"equal": 0.0},
    ),
    "names": Task(
        "The model names the next of six colors; at first, a wrong name is usual.",
        next_name, {"usual": 3, "share": 0.6},
    ),
    "held": Task(
        "The model names the next of six colors, with a KL of weight 1; at first, a wrong name is usual.",
        next_name, {"usual": 3, "share": 0.6}, {"beta": 1.0},
    ),
    "pairs": Task(
        "The model names the next of six colors; pairs prefer the right name to a wrong one that is usual at first.",
        next_name, {"usual": 3, "share": 0.6}, {"beta": 0.1}, stage="dpo",
    ),
    "words": Task(
        "The model names the next of six colors after four random words; at first, a wrong name is usual.",
        next_name, {"before": 4, "usual": 3, "share": 0.6},
    ),
    "picture": Task(
        "The question names two colors, and the picture shows one: the text alone answers half.",
        two_colors, places=48,
    ),
}  # fmt: skip


class Claim(NamedTuple):
    """What is compared after the last step; it shows if a 95 % interval over seeds is above `least`."""

    task: str
    base: str  # method to compare with
    text: str
    least: float = 0.0


CLAIMS = {
    "several_steps": Claim("used", "unclipped", "with the clip, used samples teach more"),
    "gspo": Claim("used", "several_steps", "with one ratio per completion, used samples teach more"),
    "dppo": Claim("used", "several_steps", "with a limit for probabilities, used samples teach more"),
    "cispo": Claim("used", "several_steps", "with a clipped weight, used samples teach more"),
    "dapo": Claim("equal", "grpo", "new prompts for equal rewards make more of each step"),
    "opd": Claim("names", "grpo", "a teacher that learned the right names teaches more than rewards"),
    "papo": Claim("picture", "grpo", "a term for looking makes more answers right"),
    "rloo": Claim("words", "ppo", "rewards of the others teach more than a critic"),
    "ppo": Claim("words", "grpo", "a critic tells which tokens were good"),
    "mpo": Claim("pairs", "dpo", "imitation makes pairs teach more"),
    "kto": Claim("pairs", "dpo", "labels of single answers teach at least as much as pairs"),
    "reference": Claim("held", "grpo", "a reference that follows holds the policy back less"),
    "lora": Claim("names", "grpo", "adapters learn at most 0.1 less than all weights", -0.1),
}
# pages apply in this order
# {page: parts of minimal.py that it changes}; pages with different parts apply together
PARTS = {
    "several_steps": {"sampler"},
    "opd": {"advantages", "reference"},
    "papo": {"sum"},
    "gspo": {"limits", "ratio"},
    "dppo": {"limits", "ratio"},
    "cispo": {"limits", "ratio", "average", "sum"},
    "dr_grpo": {"advantages", "average"},
    "rloo": {"advantages", "ratio"},
    "dapo": {"limits", "average", "sum"},
    "ppo": {"advantages", "average", "sum", "ratio"},
    "mpo": {"pairs"},
    "kto": {"pairs"},
    "reference": {"reference"},
    "lora": {"weights"},
}
NAMES = {
    "unclipped": "no clip",
    "several_steps": "several steps",
    "dr_grpo": "Dr. GRPO",
    "reference": "moving reference",
    "lora": "LoRA",
    "opd": "on-policy distillation",
}


def name_of(method: str) -> str:
    return NAMES.get(method, method.upper())


def pages_of(method: str) -> list[str]:
    """Return the pages to apply: the page of a method, after several_steps if it needs it."""
    needs = method == "unclipped" or (method in CLAIMS and CLAIMS[method].task == "used")
    return list(dict.fromkeys(["several_steps"] * needs + [method] * (method in PARTS)))


def all_runs() -> list[tuple[str, str]]:
    """Return all (task, method)."""
    return list(dict.fromkeys((x.task, method) for page, x in CLAIMS.items() for method in (x.base, page)))


def pairs() -> list[tuple[str, str]]:
    """Return all pairs of pages that apply together."""
    return [(a, b) for a, b in itertools.combinations(PARTS, 2) if not PARTS[a] & PARTS[b]]


def load_patched(pages: list[str], changes: dict[str, str] | None = None) -> ModuleType:
    """Import a copy of minimal.py with the diffs on some pages applied, and lines changed."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(shutil.copy(ROOT / "minimal.py", folder))
        for page in pages:
            before = file.read_text()
            subprocess.run(["git", "apply", FOLDER / f"{page}.md"], cwd=folder, check=True)
            if file.read_text() == before:  # git changes nothing if the folder is inside another repository
                raise RuntimeError(f"git apply did not change {file}; set TMPDIR to a folder outside of repositories")
        for old, new in (changes or {}).items():
            file.write_text(file.read_text().replace(old, new))
        spec = importlib.util.spec_from_file_location("_".join(["minimal", *pages]), file)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module


def seed_all(seed: int):
    random.seed(seed)
    torch.manual_seed(seed)


def imitate(model, reference, rows, options):
    """Yield the SFT losses of rows with several completions, as a stage of minimal.py."""
    for row in rows:
        ids, mask = minimal.tokenize_answers(model, row["completions"])
        loss = minimal.sft_loss(minimal.log_probabilities(model, minimal.make_prompt(model, row), ids), mask)
        yield loss / len(rows), loss.detach()


def train_sft(task: Task, folder: Path):
    """Train a new model, of two layers, on completions; save it."""
    module = load_patched([])
    module.report = lambda *arguments: None
    module.DECODER["num_hidden_layers"] = 2
    module.make_folder(folder)
    model = module.load(folder)
    rows = [task.row(**task.begin) for _ in range(512)]
    options = {"max_steps": 100, "prompts_per_step": 4, "learning_rate": 3e-3, "warmup_steps": 10, "beta": 0.0}
    module.train(model, rows, imitate, argparse.Namespace(**options))
    module.save(model, folder)


def measure(task: str, method: str, seed: int) -> dict[str, list[float]]:
    """Train a method on a task; return the success after 0, EVERY, 2 * EVERY, ... steps."""
    return {"success": train(TASKS[task], CACHE / f"{task}-{seed}", method, seed)}


def train(task: Task, folder: Path, method: str, seed: int) -> list[float]:
    """Train a method from the SFT model in a folder, which is written if it is missing; return measures of success."""
    changes = {"step % 4 == 0": f"step % {REUSE} == 0"}
    if method == "unclipped":
        changes |= {f"epsilon_{side}=0.2": f"epsilon_{side}=1e9" for side in ("low", "high")}
    module = load_patched(pages_of(method), changes)
    if not (folder / "minivlmrl.yaml").exists():
        seed_all(seed)
        train_sft(task, folder)
    if method == "opd":
        module.TEACHER = CACHE / f"teacher-{seed}"
        seed_all(seed)
        train_sft(replace(task, begin={"share": 1.0}), module.TEACHER)
    seed_all(seed)
    held_out = [task.row(place, **task.begin | task.tested) for place in range(task.places)]
    rows = [task.row(**task.begin) for _ in range(512)]
    model = module.load(folder)
    options = argparse.Namespace(**SIZES | task.options, reward=is_right)
    if method == "lora":
        module.add_adapters(model)
        options.learning_rate *= 2
    curve = []

    def report(stage, step, max_steps, metrics):
        if step % EVERY == 0:
            with torch.random.fork_rng(), torch.no_grad():  # evaluations do not change the run's random numbers
                torch.manual_seed(seed)
                curve.append(round(success(module, model, held_out, options.max_new_tokens), 4))

    module.report = report
    report(None, 0, STEPS, [])
    module.train(model, rows, getattr(module, task.stage), options)
    return curve


def success(module: ModuleType, model, rows: list[dict], max_new_tokens: int) -> float:
    """Return the share of right answers to some rows."""
    right = []
    for row in rows:
        prompt = module.make_prompt(model, row)
        texts = module.decode(model, *module.sample(model, prompt, SAMPLES // len(rows), max_new_tokens))
        right += [is_right(text, row["solution"]) for text in texts]
    return mean(right)


# ---- pictures and pages


def compared(page: str, results: dict) -> list[list]:
    """Return a page's curves and those without it, a list per seed; [] if a seed is missing."""
    claim = CLAIMS[page]
    ours, theirs = (
        {run["seed"]: run["success"] for run in results["runs"] if (run["task"], run["method"]) == (claim.task, method)}
        for method in (page, claim.base)
    )
    seeds = sorted(ours.keys() & theirs.keys())
    return [[ours[seed] for seed in seeds], [theirs[seed] for seed in seeds]] if len(seeds) >= SEEDS else []


def picture(page: str, ours: list, theirs: list) -> str:
    """Draw a page's curves and those without it."""
    drawn = Picture(400, 320, f"Success with {name_of(page)}")
    steps = range(0, STEPS + 1, EVERY)
    curves = []
    for x, method, colors, runs in ((60, CLAIMS[page].base, ORANGES, theirs), (220, page, BLUES, ours)):
        drawn.text(x, 32, name_of(method), 15, colors[0], "start", bold=True)
        curves += [(steps, run, colors[1], 1) for run in runs]
        curves.append((steps, [mean(values) for values in zip(*runs, strict=True)], colors[0], 4))
    chart(drawn, 60, STEPS, "GRPO steps", curves)
    return drawn.svg()


def verdict(page: str, ours: list, theirs: list) -> tuple[str, str]:
    """Return the numbers of a comparison, and whether the page's claim shows."""
    ends = [(without[-1], run[-1]) for run, without in zip(ours, theirs, strict=True)]
    gap, half = difference(ends)
    low, high = gap - half, gap + half
    without, with_page = map(mean, zip(*ends, strict=True))
    base = name_of(CLAIMS[page].base)
    numbers = f"{with_page:.2f} against {without:.2f} with {base} ({low:+.2f} to {high:+.2f})"
    least = CLAIMS[page].least
    return numbers, "shows" if low > least else "does the opposite" if high < least else "does not show"


def ending(page: str, ours: list, theirs: list) -> str:
    """Return the text to write after a page's diff."""
    claim = CLAIMS[page]
    alt = f"Success over {STEPS} steps: {name_of(page)} and {name_of(claim.base)}"
    numbers, shown = verdict(page, ours, theirs)
    text = f"{TASKS[claim.task].text} The claim that {claim.text} **{shown}** here. Success "
    text += f"after {STEPS} steps: {numbers}."
    return f"\n[![{alt}]({page}.svg)](README.md#pages-and-results)\n\n{textwrap.fill(text, 120)}\n"


def rows(results: dict) -> list[str]:
    """Return the table rows: one per page."""
    found = []
    for page, parts in PARTS.items():
        diff = (FOLDER / f"{page}.md").read_text().partition("```diff\n")[2].partition("\n```\n")[0]
        changed = len(re.findall(r"^[+-](?!\+\+ |-- )", diff, re.M))  # lines
        text, numbers, shown = "[tested exactly](../claims.md#what-was-seen)", "", ""
        if page in CLAIMS:
            text = CLAIMS[page].text
            curves = compared(page, results)
            numbers, shown = verdict(page, *curves) if curves else ("", "")
        link = f"[{name_of(page)}]({page}.md)"
        found.append(f"| {link} | {changed} | {', '.join(sorted(parts))} | {text} | {shown} | {numbers} |")
    return found


def written(results: dict) -> dict[str, str]:
    """Return {file in docs/papers: text}: the table, pages with their endings, and pictures."""
    texts = {"README.md": write_tables(FOLDER / "README.md", {"page": lambda: rows(results)})}
    for page in CLAIMS:
        if curves := compared(page, results):
            diff = (FOLDER / f"{page}.md").read_text().rpartition("\n```\n")[0]
            texts[f"{page}.md"] = diff + "\n```\n" + ending(page, *curves)
            texts[f"{page}.svg"] = picture(page, *curves)
    return texts


def main():
    options = common.study_options(__doc__, json=CURVES, arms=TASKS, seeds=range(SEEDS)).parse_args()
    torch.set_num_threads(1)
    keys = [
        {"task": task, "method": method, "seed": seed}
        for seed in options.seeds for task, method in all_runs() if task in options.only
    ]  # fmt: skip
    common.study(options.json, keys, measure)
    for name, text in written(common.read(CURVES)).items():
        (FOLDER / name).write_text(text)


if __name__ == "__main__":
    main()
