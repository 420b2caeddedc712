"""What page.html shows of a run's folder: curves, and what the policy wrote."""

import base64
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path

from minivlmrl.hub.folder import json_text, read_json, read_lines
from minivlmrl.hub.recipe_values import build, naming, parse_yaml
from minivlmrl.run.completions import COMPLETIONS, IMAGES, Logged
from minivlmrl.run.config import RunConfig, flat, load_config, recipes_folder
from minivlmrl.run.metrics import EVALUATIONS, METRICS, TIMINGS, WARNINGS, curves

TEMPLATE = Path(__file__).with_suffix(".html")
# of a recipe, what every run has of its own, or the page shows by itself
OWN = {"output_dir", "resume", "model.path", "model.config"}
STEPS = 60  # logged steps on a page, at most: a page has to open


@dataclass
class Earned:
    """Of a completion what the page shows as it is; all else is escaped there."""

    reward: float | None = None
    boxes: list[list[float]] = field(default_factory=list)
    pictures: list[str] = field(default_factory=list)


@dataclass
class Shown(Logged):
    """Of a line of completions.jsonl what the page shows as it is."""

    images: list[str]
    row: int = 0
    truth: list[list[float]] = field(default_factory=list)
    completions: list[Earned] = field(default_factory=list)


def write_page(folders: list[Path], out: Path):
    """Write the page of these runs' folders."""
    # no </script> in it
    text = json_text([collect(folder) for folder in folders]).replace("<", "\\u003c")
    out.write_bytes(TEMPLATE.read_text("utf-8").replace("{{DATA}}", text).encode())
    print(f"open {out} in a browser")


def collect(folder: Path) -> dict:
    """Collect what the page shows of a run: STEPS logged steps at most, with the last one."""
    lines = read_lines(folder / COMPLETIONS, Shown)
    steps = list(dict.fromkeys((line["stage"], line["step"]) for line in lines))
    kept = set(steps[:: -(-len(steps) // STEPS) or 1]) | set(steps[-1:])
    lines = [line for line in lines if (line["stage"], line["step"]) in kept]
    shown = [one for line in lines for one in line.get("completions", ())]
    paths = {path for line in lines for path in line["images"]}
    paths |= {path for one in shown for path in one.get("pictures", ())}
    summary = folder / "summary.json"
    metrics = read_lines(folder / METRICS, Logged)
    timings, warnings = (read_lines(folder / name, Logged) for name in (TIMINGS, WARNINGS))
    for line in (*lines, *metrics, *timings, *warnings):
        line["step"] += 1  # as the terminal counts
    # steps of earlier stages
    before = {line["stage"]: number for number, line in reversed(list(enumerate(metrics)))}
    evaluations = []
    for line in read_lines(folder / EVALUATIONS, Logged):
        step = line.pop("step") + before.get(line.pop("stage"), 0)
        evaluations.append({"step": step} | curves(line))
    return {
        "name": folder.resolve().name,
        "about": about(folder),
        "metrics": metrics,
        "timings": list({line["stage"]: line for line in timings}.values()),  # the last ones
        "warnings": warnings,
        "evaluations": evaluations,
        "summary": read_json(summary) if summary.is_file() else None,
        "completions": lines,
        "images": {path: data_uri(folder, path) for path in sorted(paths)},
    }


def about(folder: Path) -> dict | None:
    """Recipe, model and date of a run, and what it says otherwise than ours of that name."""
    if not (file := folder / "config.yaml").is_file():
        return None
    with naming(file):
        said = parse_yaml(file.read_bytes())
    run = build(RunConfig, said, str(file), json=True)
    head = file.read_text(encoding="utf-8").partition("\n")[0]
    head = head.removeprefix("# ") if head.startswith("# ") else ""
    ours = recipes_folder() / Path(head.partition(";")[0]).name
    values = flat(asdict(run))
    base = flat(asdict(load_config(ours) if ours.is_file() else RunConfig()))
    new = [name for name in values.keys() - OWN if values[name] != base.get(name)]
    date = datetime.fromtimestamp((folder / METRICS).stat().st_mtime)
    return {
        "recipe": head,
        "model": run.model.path or f"random weights of {run.model.config}",
        "date": f"{date:%Y-%m-%d %H:%M}",
        "changes": [f"{name}={values[name]}"[:100] for name in sorted(new)],
    }


def data_uri(folder: Path, path: str) -> str:
    """A picture of completions.jsonl (ValueError: it names another file, which could be any)."""
    found = (folder / path).resolve()
    if found.parent != folder.resolve() / IMAGES or not found.is_file():
        raise ValueError(f"{folder / COMPLETIONS}: {path!r:.80} is no picture in its {IMAGES}/")
    return f"data:image/webp;base64,{base64.b64encode(found.read_bytes()).decode()}"
