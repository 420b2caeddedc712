"""What report.html shows of a run's folder: curves, and what the policy wrote."""

import base64
import math
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic as clock

from torch.optim import Optimizer

from minivlmrl.config.options import RunConfig
from minivlmrl.config.parsing import json_text, read_json
from minivlmrl.files import read_lines
from minivlmrl.run.callbacks import Callback
from minivlmrl.run.metrics import EVALUATIONS, METRICS, TIMINGS, WARNINGS, MetricsLog
from minivlmrl.run.rollout_log import COMPLETIONS, IMAGES, Logged
from minivlmrl.run.trainer_state import TrainerState
from minivlmrl.trainers.base import Step, Trainer

PAGE = "report.html"
TEMPLATE = Path(__file__).with_suffix(".html")
EXPERT_STEPS = 10  # the last ones, whose tokens the picture of experts counts
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


class ReportPage(Callback):
    """Writes report.html while the run goes on, every report_minutes, and when it ends."""

    def on_run_begin(self, config: RunConfig, log: MetricsLog):
        self.folder = Path(config.output_dir)
        self.is_main = log.world.is_main
        self.seconds = 60 * config.report_minutes
        self.next_time = 0.0  # when the page is written again
        self.refresh()

    def on_stage_begin(self, trainer: Trainer, optimizer: Optimizer, state: TrainerState):
        self.refresh()

    def on_step_end(self, trainer: Trainer, step: Step, number: int, values: dict):
        self.refresh()

    def on_run_end(self):
        if self.is_main:
            write_page([self.folder], self.folder / PAGE)

    def refresh(self):
        """Write the page if it is time, in a long run for at most a hundredth of its time."""
        begin = clock()
        if self.is_main and self.seconds and begin >= self.next_time:
            write_page([self.folder], self.folder / PAGE, self.seconds)
            self.next_time = clock() + max(self.seconds, 100 * (clock() - begin))


def write_page(folders: list[Path], out: Path, seconds: float = 0):
    """Write the page of these runs' folders, which loads itself again after so many seconds.

    0: it does not, as the runs have ended.
    """
    runs = [collect_run(folder) | {"reload": seconds} for folder in folders]
    fill_template(TEMPLATE, json_text(runs), out)


def fill_template(template: Path, text: str, out: Path):
    """Write a page with JSON in it; a browser that reads it meanwhile has the page of before."""
    text = text.replace("<", "\\u003c")  # no </script> in it
    draft = out.with_suffix(".partial")
    draft.write_bytes(template.read_text("utf-8").replace("{{DATA}}", text).encode())
    draft.replace(out)


def collect_run(folder: Path) -> dict:
    """Collect what the page shows of a run; its steps are counted from 1, as the terminal does."""
    summary_file = folder / "summary.json"
    config_file = folder / "config.yaml"
    metrics = read_lines(folder / METRICS, Logged)
    evaluations = collect_evaluations(folder, metrics)
    completions = collect_completions(folder)
    timings = read_lines(folder / TIMINGS, Logged)
    warnings = read_lines(folder / WARNINGS, Logged)
    for line in (*completions, *metrics, *timings, *warnings):
        line["step"] += 1
    for line in metrics[:-EXPERT_STEPS]:
        line.pop("experts/tokens", None)  # a page has to open
    last_timings = {line["stage"]: line for line in timings}
    return {
        "name": folder.resolve().name,
        "config": config_file.read_text(encoding="utf-8") if config_file.is_file() else None,
        "metrics": metrics,
        "timings": list(last_timings.values()),
        "warnings": warnings,
        "evaluations": evaluations,
        "summary": read_json(summary_file) if summary_file.is_file() else None,
        "completions": completions,
        "images": collect_images(folder, completions),
    }


def collect_evaluations(folder: Path, metrics: list[dict]) -> list[dict]:
    """Read evaluations as curves over the steps of all stages."""
    first_steps = {}  # stage -> steps of the stages before it
    for number, line in enumerate(metrics):
        first_steps.setdefault(line["stage"], number)
    evaluations = []
    for line in read_lines(folder / EVALUATIONS, Logged):
        step = line.pop("step") + first_steps.get(line.pop("stage"), 0)
        evaluations.append({"step": step} | line)
    return evaluations


def collect_completions(folder: Path) -> list[dict]:
    """Read the lines of STEPS logged steps at most, with the last one."""
    lines = read_lines(folder / COMPLETIONS, Shown)
    steps = list(dict.fromkeys((line["stage"], line["step"]) for line in lines))
    stride = max(1, math.ceil(len(steps) / STEPS))
    shown_steps = {*steps[::stride], *steps[-1:]}
    return [line for line in lines if (line["stage"], line["step"]) in shown_steps]


def collect_images(folder: Path, completions: list[dict]) -> dict[str, str]:
    """Embed the images of prompts, and the pictures that completions asked for."""
    paths = set()
    for line in completions:
        paths.update(line["images"])
        for completion in line.get("completions", ()):
            paths.update(completion.get("pictures", ()))
    return {path: data_uri(folder, path) for path in sorted(paths)}


def data_uri(folder: Path, path: str) -> str:
    """A picture of completions.jsonl (ValueError: it names another file, which could be any)."""
    file = (folder / path).resolve()
    if file.parent != folder.resolve() / IMAGES or not file.is_file():
        raise ValueError(f"{folder / COMPLETIONS}: {path!r:.80} is no picture in its {IMAGES}/")
    return f"data:image/webp;base64,{base64.b64encode(file.read_bytes()).decode()}"
