"""One HTML file of a run, or of two beside each other: curves, and what the policy wrote; no
server, no network.

python -m minivlmrl page runs/shapes                 # writes runs/shapes/page.html, also while the run goes on
python -m minivlmrl page runs/a runs/b --out ab.html
"""

import argparse
import base64
import json
from pathlib import Path

from minivlmrl.run.completions import COMPLETIONS
from minivlmrl.run.metrics import EVALUATIONS, METRICS, TIMINGS, WARNINGS
from minivlmrl.run.trackers import curves

TEMPLATE = Path(__file__).with_suffix(".html")
STEPS = 60  # logged steps on a page, at most: a page has to open


def main(arguments: list[str]):
    """Write the page of one or two runs."""
    p = argparse.ArgumentParser("python -m minivlmrl page", description=__doc__.splitlines()[0])
    p.add_argument("runs", nargs="+", metavar="RUN", help="output_dir of a run, or of two")
    p.add_argument("--out", help="the file to write; default: page.html in the first run's folder")
    options = p.parse_args(arguments)
    if len(options.runs) > 2:
        raise ValueError("page shows one run or two")
    folders = [Path(run) for run in options.runs]
    for folder in folders:
        if not (folder / METRICS).is_file():
            raise ValueError(f"{folder}: has no metrics.jsonl; give the output_dir of a run")
    out = Path(options.out) if options.out else folders[0] / "page.html"
    write_page(folders, out)


def write_page(folders: list[Path], out: Path):
    """Write the page of these runs' folders."""
    # no </script> in it
    text = json.dumps([collect(folder) for folder in folders]).replace("<", "\\u003c")
    out.write_text(TEMPLATE.read_text(encoding="utf-8").replace("{{DATA}}", text), encoding="utf-8")
    print(f"wrote {out}")


def collect(folder: Path) -> dict:
    """What the page shows of a run; at most STEPS logged steps, evenly spread, with the last
    one."""
    lines = read_lines(folder / COMPLETIONS)
    steps = list(dict.fromkeys((line["stage"], line["step"]) for line in lines))
    kept = set(steps[:: -(-len(steps) // STEPS) or 1]) | set(steps[-1:])
    lines = [line for line in lines if (line["stage"], line["step"]) in kept]
    paths = sorted({path for line in lines for path in line["images"]})
    summary, metrics = folder / "summary.json", read_lines(folder / METRICS)
    # the last of each stage
    timings = {line["stage"]: line for line in read_lines(folder / TIMINGS)}
    # steps of earlier stages
    before = {line["stage"]: number for number, line in reversed(list(enumerate(metrics)))}
    evaluations = []
    for line in read_lines(folder / EVALUATIONS):
        step = line.pop("step") + before.get(line.pop("stage"), 0)
        evaluations.append({"step": step} | curves(line))
    return {
        "name": folder.resolve().name,
        "metrics": metrics,
        "timings": list(timings.values()),
        "warnings": read_lines(folder / WARNINGS),
        "evaluations": evaluations,
        "summary": json.loads(summary.read_text()) if summary.is_file() else None,
        "completions": lines,
        "images": {path: data_uri(folder / path) for path in paths},
    }


def read_lines(path: Path) -> list[dict]:
    """The whole lines of a JSON lines file; a run may be writing the last one.
    No file: no lines."""
    text = path.read_text() if path.is_file() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def data_uri(path: Path) -> str:
    return f"data:image/webp;base64,{base64.b64encode(path.read_bytes()).decode()}"
