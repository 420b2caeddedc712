"""Train minimal.py's built-in task with the diff on each page in docs/papers, and draw the accuracies.

    python benchmarks/papers.py --seeds 0 1 2 3 4         # all pages; runs in curves.json are skipped
    python benchmarks/papers.py --only gspo --seeds 0     # only these, for example on a busy machine
    python benchmarks/papers.py --draw                    # only draw what was measured

With one seed, all methods start from the same SFT model. A run takes about a minute. Accuracies are added to
docs/papers/curves.json, and the pages and pictures in docs/papers are written again.
"""

import argparse
import importlib.util
import itertools
import json
import random
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import ModuleType

import PIL.Image
import torch

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "papers"
CURVES = FOLDER / "curves.json"  # {method: {seed: [accuracy after 0, EVERY, 2 * EVERY, ... steps]}}
BLIND = FOLDER / "blind.json"  # {method: {seed: last accuracy with gray images}}
STEPS, EVERY = 60, 20
HELD_OUT = 128  # held-out images; two sampled answers each

# {page: method to compare with, which lacks only the page's diff}; pages apply in this order
COMPARED = {
    "several_steps": "grpo",
    "opd": "grpo",
    "papo": "grpo",
    "gspo": "several_steps",
    "dppo": "several_steps",
    "cispo": "several_steps",
    "dr_grpo": "grpo",
    "rloo": "grpo",
    "dapo": "grpo",
    "ppo": "grpo",
    "mpo": "dpo",
    "kto": "dpo",
    "reference": "grpo",
    "lora": "grpo",
}
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
    "grpo": "GRPO",
    "dpo": "DPO",
    "several_steps": "several steps",
    "gspo": "GSPO",
    "dapo": "DAPO",
    "dr_grpo": "Dr. GRPO",
    "cispo": "CISPO",
    "rloo": "RLOO",
    "ppo": "PPO",
    "mpo": "MPO",
    "kto": "KTO",
    "reference": "moving reference",
    "lora": "LoRA",
    "opd": "on-policy distillation",
    "papo": "PAPO",
    "dppo": "DPPO",
}
METHODS = ["grpo", "dpo", *COMPARED]


def is_dpo(method: str) -> bool:
    return "dpo" in (method, COMPARED.get(method))


def pages_of(method: str) -> list[str]:
    """Return the pages to apply."""
    if method not in COMPARED:
        return []
    return ["several_steps", method] if COMPARED[method] == "several_steps" else [method]


def pairs() -> list[tuple[str, str]]:
    """Return all pairs of pages that apply together."""
    return [(a, b) for a, b in itertools.combinations(COMPARED, 2) if not PARTS[a] & PARTS[b]]


def load_patched(pages: list[str]) -> ModuleType:
    """Import a copy of minimal.py with the diffs on some pages applied."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(shutil.copy(ROOT / "minimal.py", folder))
        for page in pages:
            before = file.read_text()
            subprocess.run(["git", "apply", FOLDER / f"{page}.md"], cwd=folder, check=True)
            if file.read_text() == before:  # git changes nothing if the folder is inside another repository
                raise RuntimeError(f"git apply did not change {file}; set TMPDIR to a folder outside of repositories")
        spec = importlib.util.spec_from_file_location("_".join(["minimal", *pages]), file)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module


def seed_all(seed: int):
    random.seed(seed)
    torch.manual_seed(seed)


def demonstrated(seed: int, cache: Path) -> Path:
    """Return the folder with a seed's SFT model, as in minimal.train_tiny; train it if it is missing."""
    folder = cache / f"sft-{seed}"
    if not (folder / "model.safetensors").exists():
        minimal = load_patched([])
        seed_all(seed)
        minimal.make_folder(cache / f"random-{seed}")
        model = minimal.load(cache / f"random-{seed}")
        options = argparse.Namespace(
            max_steps=40, prompts_per_step=32, learning_rate=3e-3, warmup_steps=10, beta=0.0, num_generations=8,
            max_new_tokens=20,
        )  # fmt: skip
        minimal.train(model, [minimal.draw_row(wrong=0.5) for _ in range(96)], minimal.sft, options)
        minimal.save(model, folder)
    return folder


def measure(method: str, seed: int, cache: Path, steps: int = STEPS) -> tuple[list[float], float]:
    """Train a method; return accuracies after 0, EVERY, 2 * EVERY, ... steps, and after all steps with gray images."""
    folder = demonstrated(seed, cache)
    module = load_patched(pages_of(method))
    module.TEACHER = cache / f"grpo-{seed}"
    if method == "opd" and not module.TEACHER.exists():
        measure("grpo", seed, cache)
    seed_all(seed)
    held_out = [module.draw_row() for _ in range(HELD_OUT)]
    rows = [module.draw_row() for _ in range(16 * STEPS)]
    model = module.load(folder)
    accuracies = []

    def accuracy(rows) -> float:
        with torch.random.fork_rng():  # so that evaluations do not change the run's random numbers
            torch.manual_seed(seed)
            return round(module.accuracy(model, rows), 4)

    def report(stage, step, max_steps, metrics):
        if step % EVERY == 0:
            accuracies.append(accuracy(held_out))
            print(f"{method}, seed {seed}, step {step}: {accuracies[-1]:.3f}", flush=True)

    module.report = report
    report(None, 0, steps, [])
    options = argparse.Namespace(
        max_steps=steps, prompts_per_step=16, learning_rate=3e-4, warmup_steps=5, beta=1.0 if is_dpo(method) else 0.02,
        num_generations=8, max_new_tokens=20, reward=module.reward,
    )  # fmt: skip
    module.train(model, rows, module.dpo if is_dpo(method) else module.grpo, options)
    if method == "grpo" and steps == STEPS:
        module.save(model, module.TEACHER)
    return accuracies, accuracy([row | {"images": [PIL.Image.new("RGB", (56, 56), "gray")]} for row in held_out])


# ---- pictures and pages

WIDTH, HEIGHT, LEFT, TOP = 420, 230, 40, 14
STYLE = """<style>text{font:12px sans-serif;fill:#555} .grid{stroke:#8884} path{fill:none;stroke-width:2}
.base{stroke:#888;fill:#888} .page{stroke:#4051b5;fill:#4051b5} .band{stroke:none;opacity:.18}
@media (prefers-color-scheme:dark){text{fill:#bbb} .page{stroke:#8c9eff;fill:#8c9eff}}</style>"""


def common_seeds(curves: dict, method: str) -> list[str]:
    """Return the seeds with which both a method and its comparison were measured."""
    return sorted(curves.get(method, {}).keys() & curves.get(COMPARED[method], {}).keys(), key=int)


def line(runs: list[list[float]], kind: str) -> list[str]:
    """Draw the mean over runs, and a band from minimum to maximum."""
    points = range(len(runs[0]))
    x = [LEFT + (WIDTH - LEFT - 10) * i / (len(points) - 1) for i in points]
    y = [[TOP + (HEIGHT - TOP - 30) * (1 - run[i]) for run in runs] for i in points]
    upper = " ".join(f"{x[i]:.1f},{min(y[i]):.1f}" for i in points)
    lower = " ".join(f"{x[i]:.1f},{max(y[i]):.1f}" for i in reversed(points))
    mean = " L".join(f"{x[i]:.1f},{sum(y[i]) / len(runs):.1f}" for i in points)
    return [
        f'<polygon class="{kind} band" points="{upper} {lower}"/>',
        f'<path class="{kind}" style="fill:none" d="M{mean}"/>',
    ]


def picture(curves: dict, method: str) -> str:
    """Draw accuracies for a method and its comparison."""
    seeds = common_seeds(curves, method)
    bottom = HEIGHT - 30
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}">', STYLE]
    for accuracy in (0, 0.5, 1):
        height = TOP + (bottom - TOP) * (1 - accuracy)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - 10}" y1="{height}" y2="{height}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{height + 4}" text-anchor="end">{accuracy}</text>')
    for step in range(0, STEPS + 1, EVERY):
        x = LEFT + (WIDTH - LEFT - 10) * step / STEPS
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - 12}" text-anchor="middle">{step}</text>')
    for name, kind, y in ((COMPARED[method], "base", bottom - 8), (method, "page", bottom - 26)):
        parts += line([curves[name][seed] for seed in seeds], kind)
        parts.append(f'<rect class="{kind}" x="{WIDTH - 170}" y="{y - 7}" width="14" height="3"/>')
        parts.append(f'<text x="{WIDTH - 150}" y="{y}">{NAMES[name]}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def spread(last: list[float]) -> str:
    """Return mean, minimum and maximum of accuracies."""
    if len(last) < 2:
        return f"{last[0]:.2f}" if last else ""
    return f"{sum(last) / len(last):.2f} ({min(last):.2f} to {max(last):.2f})"


def ending(curves: dict, method: str) -> str:
    """Return the text to write after a page's diff."""
    if not common_seeds(curves, method):
        return ""
    alt = f"Accuracy over {STEPS} steps: {NAMES[method]} and {NAMES[COMPARED[method]]}"
    return f"\n[![{alt}]({method}.svg)](README.md#pages-and-results)\n"


def changed_lines(page: str) -> int:
    """Count the lines that a page's diff removes or adds."""
    return len(re.findall(r"^[+-](?!\+\+ |-- )", (FOLDER / f"{page}.md").read_text().partition("```diff\n")[2], re.M))


def table(curves: dict, blind: dict) -> str:
    seeds = sorted(curves.get("grpo", {}), key=int)
    rows = []
    for method in METHODS:
        is_page = method not in ("grpo", "dpo")
        name, lines = (f"[{NAMES[method]}]({method}.md)", changed_lines(method)) if is_page else (NAMES[method], "")
        runs = curves.get(method, {})
        accuracy = spread([runs[seed][-1] for seed in seeds]) if runs.keys() >= {*seeds} else ""
        gray = spread([blind[method][seed] for seed in seeds if seed in blind.get(method, {})])
        parts = ", ".join(sorted(PARTS.get(method, ())))
        rows.append(f"| {name} | {lines} | {parts} | {NAMES.get(COMPARED.get(method), '')} | {accuracy} | {gray} |")
    return (
        f"""## Pages and results

A tiny task and {len(seeds)} seeds do not show which method is better for your model. All methods start from the same
model after 40 SFT steps, and train for {STEPS} steps, without tuning; GSPO, CISPO and DPPO with several steps per
rollout. The GRPO model is the teacher in on-policy distillation. Accuracy: two sampled answers to each of {HELD_OUT}
images in the built-in task, mean (lowest to highest) over the seeds; a guess has 0.08. With gray images, a single
number is seed 0. Measured at 9091b662, where the KL lacked its factor r; LoRA was not measured.

| page | changed lines | changed parts | compare with | accuracy | with gray images |
|---|---|---|---|---|---|
"""
        + "\n".join(rows)
        + """

`python benchmarks/papers.py --seeds 0 1 2 3 4` measures what [curves.json](curves.json) lacks, and writes this section.
"""
    )


def written(curves: dict, blind: dict) -> dict[str, str]:
    """Return {file in docs/papers: text} for all pages with their endings, and pictures."""
    texts = {}
    for method in COMPARED:
        page = (FOLDER / f"{method}.md").read_text()
        diff_end = page.index("\n```\n", page.index("```diff\n")) + len("\n```\n")
        texts[f"{method}.md"] = page[:diff_end] + ending(curves, method)
        if common_seeds(curves, method):
            texts[f"{method}.svg"] = picture(curves, method)
    readme = (FOLDER / "README.md").read_text()
    texts["README.md"] = readme.partition("## Pages and results")[0] + table(curves, blind)
    return texts


def read(file: Path) -> dict:
    return json.loads(file.read_text()) if file.exists() else {}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=METHODS, default=METHODS, metavar="METHOD")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=STEPS, help=f"other than {STEPS}: print, and write nothing")
    parser.add_argument("--draw", action="store_true", help="train nothing")
    parser.add_argument("--blind", action="store_true", help="repeat runs that blind.json lacks")
    parser.add_argument("--cache", type=Path, default=ROOT / "build" / "papers", help="folder for models after SFT")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for seed in options.seeds:
        for method in options.only:
            if options.draw or str(seed) in read(BLIND if options.blind else CURVES).get(method, {}):
                continue
            accuracies, blind = measure(method, seed, options.cache, options.steps)
            if options.steps != STEPS:
                continue
            for file, result in ((CURVES, accuracies), (BLIND, blind)):
                results = read(file)  # read again, because another process may have added a run
                results.setdefault(method, {})[str(seed)] = result
                lines = [f' "{name}": {json.dumps(runs)}' for name, runs in results.items()]
                file.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    if options.steps == STEPS:
        for name, text in written(read(CURVES), read(BLIND)).items():
            (FOLDER / name).write_text(text)


if __name__ == "__main__":
    main()
