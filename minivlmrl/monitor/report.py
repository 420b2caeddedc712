"""Write an HTML report on one run, or on two runs side by side: curves and completions.

minivlmrl report runs/shapes                  # writes runs/shapes/report.html
minivlmrl report runs/a runs/b --out ab.html  # compares two runs
minivlmrl report runs/a/seed* --against runs/b/seed*  # compares two groups of seeds
"""

import argparse
import base64
import math
import re
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic as clock
from typing import Annotated

from minivlmrl.config.options import RunConfig
from minivlmrl.config.parsing import build
from minivlmrl.errors import UserError, error_context, require, truncate
from minivlmrl.files import RUN_CONFIG, file_inside, file_to_write
from minivlmrl.json_files import json_text, read_json, write_file
from minivlmrl.load_extra import load_extra
from minivlmrl.run.callbacks import Callback
from minivlmrl.run.evaluate import noise
from minivlmrl.run.metrics import (
    EVALUATIONS,
    METRICS,
    SPEED_STEPS,
    TIMINGS,
    WARNINGS,
    MetricsLog,
    describe_speed,
    short_names,
)
from minivlmrl.run.results import SUMMARY
from minivlmrl.run.rollout_log import COMPLETIONS, IMAGES, LogLine, check_numbers, read_lines, read_metrics
from minivlmrl.trainers.base import Step, Trainer

FOLDERS = re.compile(r"(?<![\w.:/<])/(?:[^/\s'\",:]+/)+")  # absolute folder, such as /home/ann/ in /home/ann/cat.jpg

PAGE = "report.html"
TEMPLATE = Path(__file__).with_suffix(".html")
SECONDS = 60  # seconds between page updates
POINTS = 500  # maximum points per curve and stage
STEPS = 60  # maximum training steps whose completions are shown
PROMPTS = 4  # maximum prompts shown per step


Number = Annotated[float, "[-1e300, 1e300]"]


@dataclass
class TimingLine(LogLine):
    step_time: Number
    tokens_per_second: Number
    phases: dict[str, Number] = field(default_factory=dict)
    allocated_memory_gib: Number | None = None
    reserved_memory_gib: Number | None = None
    free_memory_gib: Number | None = None


@dataclass
class WarningLine(LogLine):
    warning: str


@dataclass
class ShownCompletion:
    pictures: list[str] = field(default_factory=list)


@dataclass
class CompletionLine(LogLine):
    completions: list[ShownCompletion]
    images: list[str]


@dataclass
class Summary:
    chance: Annotated[float, "[0, 1]"] | None = None  # accuracy of random guessing


class ReportPage(Callback):
    """Write report.html once per minute during training, and at the end."""

    def on_run_begin(self, config: RunConfig, log: MetricsLog):
        self.folder = Path(config.output_dir)
        self.is_main = log.world.is_main
        self.next_time = 0.0  # time.monotonic() of the next update
        self.refresh()

    def on_step_end(self, trainer: Trainer, step: Step, number: int, values: dict):
        self.refresh()

    def on_run_end(self):
        if self.is_main:
            self.write()

    def refresh(self):
        """Write the page if a minute has passed since the last update."""
        begin = clock()
        if self.is_main and begin >= self.next_time:
            self.write(SECONDS)
            duration = clock() - begin
            # spend at most 1 % of the training time on updates
            self.next_time = clock() + max(SECONDS, 100 * duration)

    def write(self, seconds: float = 0):
        """Write report.html, and print errors, which must not end the run."""
        try:
            write_page([self.folder], self.folder / PAGE, seconds)
        except Exception as error:
            print(f"{self.folder / PAGE} was not written: {type(error).__name__}: {error}", file=sys.stderr, flush=True)


def write_page(folders: list[Path], out: Path, seconds: float = 0):
    """Write an HTML page about one or two runs. Browsers reload it every `seconds`, 0 = never."""
    runs: list[dict] = [collect_run(folder) | {"reload": seconds} for folder in folders]
    join_stages(runs)
    text = json_text(runs)
    for run in runs:  # remove folder names such as /home/ann/, because users may publish the report
        places = [line.get("where") for line in run["completions"]]
        warnings = [line["warning"] for line in run["warnings"]]
        texts = filter(None, [run["config"], *places, *warnings])
        found = FOLDERS.findall("\n".join(texts))
        for name in sorted({*found}, key=len, reverse=True):
            text = text.replace(json_text(name)[1:-1], "")
    text = text.replace("<", "\\u003c")  # </script> in the data would end the script
    page = TEMPLATE.read_text("utf-8").replace("{{DATA}}", text)
    write_file(out, page.encode())


def join_stages(runs: list[dict]):
    """Rename two runs' last stages, such as grpo and mine to grpo|mine, to draw them in one chart.

    Earlier stages are paired in the same way, from the last to the first.
    """
    orders = [list(run["steps_per_point"]) for run in runs]
    for names in zip(*map(reversed, orders), strict=False):
        if len(runs) == 2 and names[0] not in orders[1] and names[1] not in orders[0]:
            joined = "|".join(names)
            for run, name in zip(runs, names, strict=True):
                steps_per_point = run["steps_per_point"]
                steps_per_point[joined] = steps_per_point.pop(name)
                for kind in ("metrics", "timings", "warnings", "completions"):
                    for line in run[kind]:
                        if line["stage"] == name:
                            line["stage"] = joined


def collect_run(folder: Path) -> dict:
    """Read what the page shows about a run: metrics, completions, images, warnings and configuration."""
    config_file = file_inside(folder, RUN_CONFIG)
    summary_file = file_inside(folder, SUMMARY)
    with error_context(config_file):
        config = config_file.read_text("utf-8") if config_file.is_file() else None
    summary = read_json(summary_file) if summary_file.is_file() else {}
    build(Summary, summary, str(summary_file), json=True)
    for name, values in summary.items():
        if name != "chance":
            require(isinstance(values, dict), f"{summary_file}: {name}", values, "an object with names and numbers")
            check_numbers(values, f"{summary_file}: {name}")
    evaluated = re.search(r"evaluated on (\d+) rows", config or "")
    num_held_out = int(evaluated[1]) if evaluated else 0
    metrics = read_metrics(file_inside(folder, METRICS))
    first_steps: dict[str, int] = {}  # {stage: number of steps in all stages before it}
    for number, line in enumerate(metrics):
        first_steps.setdefault(line["stage"], number)
    evaluations = []
    for line in read_metrics(file_inside(folder, EVALUATIONS)):
        step = line.pop("step") + first_steps.get(line.pop("stage"), 0)
        evaluations.append({"step": step} | line)
    completions = collect_completions(folder)
    timings = read_lines(file_inside(folder, TIMINGS), TimingLine)
    warnings = read_lines(file_inside(folder, WARNINGS), WarningLine)
    for line in (*completions, *metrics, *timings, *warnings):
        line["step"] += 1  # log files count from 0, the page from 1
    last_timings = [lines[-1] | {"speed": describe_speed(lines[-SPEED_STEPS:])} for lines in by_stage(timings).values()]
    # average adjacent steps, to draw at most POINTS points
    points = []
    steps_per_point = {}
    for stage, lines in by_stage(metrics).items():
        size = math.ceil(len(lines) / POINTS)
        steps_per_point[stage] = size
        points += [join_steps(lines[begin : begin + size]) for begin in range(0, len(lines), size)]
    return {
        "name": folder.resolve().name,
        "config": config,
        "held_out": num_held_out,
        "change": describe_change(summary, num_held_out),
        "metrics": points,
        "steps_per_point": steps_per_point,
        "timings": last_timings,
        "warnings": warnings,
        "evaluations": evaluations,
        "summary": summary or None,
        "completions": completions,
        "images": collect_images(folder, completions),
    }


def describe_change(summary: dict, num_rows: int) -> str | None:
    """Describe how each stage changed the first evaluation metric, and whether this may be noise."""
    evaluations = {name: row for name, row in summary.items() if isinstance(row, dict) and name != "seconds"}
    name = next(iter(next(iter(evaluations.values()), {})), "")
    values = [row[name] for row in evaluations.values() if row.get(name) is not None]  # summary.json stores NaN as null
    is_complete = len(values) == len(evaluations) > 1 and all(0 <= value <= 1 for value in values)
    if not (is_complete and num_rows):
        return None
    changes = []
    for when, before, after in zip([*evaluations][1:], values, values[1:], strict=False):
        size = "can be noise" if abs(after - before) <= noise(before, after, num_rows) else "more than noise"
        changes.append(f"{after - before:+.3f} in {when.removeprefix('after_')} ({size})")
    name = short_names([name])[0].removeprefix("eval/")
    return f"{name} on {num_rows} held-out rows changed by {', '.join(changes)}."


def by_stage(lines: list[dict]) -> dict[str, list[dict]]:
    """Group log lines by stage."""
    stages = defaultdict(list)
    for line in lines:
        stages[line["stage"]].append(line)
    return stages


def join_steps(lines: list[dict]) -> dict:
    """Average metrics over several steps, but take the minimum of min_length and the maximum of max_length."""
    joined = {}
    for name in dict.fromkeys(name for line in lines for name in line):
        values = [line[name] for line in lines if line.get(name) is not None]
        kind = name.rpartition("/")[2].partition("_")[0]  # metric prefix, such as min in completions/min_length
        if len(lines) == 1 or not values or name in ("stage", "step"):
            joined[name] = lines[-1].get(name)
        elif kind in ("min", "max"):
            joined[name] = min(values) if kind == "min" else max(values)
        else:
            joined[name] = sum(values) / len(values)
    return joined


def collect_completions(folder: Path) -> list[dict]:
    """Choose which completions to show: from at most 60 steps, evenly spaced."""
    lines_of_step = defaultdict(list)  # {(stage, step): log lines}
    for line in read_lines(file_inside(folder, COMPLETIONS), CompletionLine):
        lines_of_step[line["stage"], line["step"]].append(line)
    steps = list(lines_of_step)
    stride = max(1, math.ceil(len(steps) / STEPS))
    shown_steps = dict.fromkeys([*steps[::stride], *steps[-1:]])
    return [line for step in shown_steps for line in lines_of_step[step][:PROMPTS]]


def collect_images(folder: Path, completions: list[dict]) -> dict[str, str]:
    """Return the images for these completions as {path: data URI}."""
    paths = set()
    for line in completions:
        paths.update(line["images"], *(completion.get("pictures", ()) for completion in line["completions"]))
    with error_context(folder / COMPLETIONS):
        return {path: data_uri(folder, path) for path in sorted(paths)}


def data_uri(folder: Path, path: str) -> str:
    """Return a run's image file as a data URI."""
    # reject files outside images/: a manipulated completions.jsonl may name them
    name = Path(path).name
    file = file_inside(file_inside(folder, IMAGES), name)
    if path != f"{IMAGES}/{name}" or not file.is_file():
        raise UserError(f"{truncate(path, 80)} is not an image in the run's folder {IMAGES}/")
    return f"data:image/webp;base64,{base64.b64encode(file.read_bytes()).decode()}"


def main(arguments: list[str]):
    p = argparse.ArgumentParser("minivlmrl report", description=str(__doc__).splitlines()[0])
    p.add_argument("runs", nargs="+", metavar="RUN", help="output_dir of a run; one or two runs")
    p.add_argument("--against", nargs="+", default=[], metavar="RUN", help="compare with these runs, paired by seed")
    p.add_argument("--out", help="output file; defaults to report.html in the first run's folder")
    options = p.parse_args(arguments)
    folders = [Path(run) for run in options.runs]
    if options.against:
        print_comparison = load_extra("minivlmrl.extras.compare:print_comparison", "report --against")
        return print_comparison(folders, [Path(run) for run in options.against])
    if len(folders) > 2:
        raise UserError(
            f"a report shows one or two runs, but {len(folders)} were given; to compare two groups of runs, write "
            "--against before the second group"
        )
    for folder in folders:
        if not (folder / METRICS).is_file():
            raise UserError(f"{folder} has no metrics.jsonl; pass the output_dir of a run")
    out = file_to_write(options.out or folders[0] / PAGE)
    write_page(folders, out)
    print(f"open {out} in a browser")
