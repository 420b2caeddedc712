"""Write report.html, a page with the curves and the completions of one or several runs."""

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
from minivlmrl.run.rollout_log import COMPLETIONS, IMAGES, LogLine
from minivlmrl.run.trainer_state import TrainerState
from minivlmrl.trainers.base import Step, Trainer

PAGE = "report.html"
TEMPLATE = Path(__file__).with_suffix(".html")
EXPERT_STEPS = 10  # number of last steps whose expert tokens the page counts
STEPS = 60  # maximum number of steps with completions, so that the page stays small


@dataclass
class ReportCompletion:
    """Fields of a logged completion whose types are validated, because the page trusts them.

    The page escapes all other fields.
    """

    reward: float | None = None
    boxes: list[list[float]] = field(default_factory=list)
    pictures: list[str] = field(default_factory=list)


@dataclass
class ReportLogLine(LogLine):
    """Fields of a line of completions.jsonl with validated types, because the page trusts them."""

    images: list[str]
    row: int = 0
    truth: list[list[float]] = field(default_factory=list)
    completions: list[ReportCompletion] = field(default_factory=list)


class ReportPage(Callback):
    """Writes report.html every report_minutes during a run, and at its end."""

    def on_run_begin(self, config: RunConfig, log: MetricsLog):
        self.folder = Path(config.output_dir)
        self.is_main = log.world.is_main
        self.seconds = 60 * config.report_minutes
        self.next_time = 0.0  # clock time in seconds of the next update
        self.refresh()

    def on_stage_begin(self, trainer: Trainer, optimizer: Optimizer, state: TrainerState):
        self.refresh()

    def on_step_end(self, trainer: Trainer, step: Step, number: int, values: dict):
        self.refresh()

    def on_run_end(self):
        if self.is_main:
            write_page([self.folder], self.folder / PAGE)

    def refresh(self):
        """Update the page if this is due; updates take at most about 1 % of the training time."""
        begin = clock()
        if self.is_main and self.seconds and begin >= self.next_time:
            write_page([self.folder], self.folder / PAGE, self.seconds)
            self.next_time = clock() + max(self.seconds, 100 * (clock() - begin))


def write_page(folders: list[Path], out: Path, seconds: float = 0):
    """Write one page about several runs.

    Args:
        folders: folders of the runs.
        out: file of the page.
        seconds: interval at which a browser reloads the page; 0 disables it for finished runs.
    """
    runs = [collect_run(folder) | {"reload": seconds} for folder in folders]
    fill_template(TEMPLATE, json_text(runs), out)


def fill_template(template: Path, text: str, out: Path):
    """Insert JSON into a template; replace `out` atomically, as a browser may be loading it."""
    text = text.replace("<", "\\u003c")  # so that the data cannot contain </script>
    draft = out.with_suffix(".partial")
    draft.write_bytes(template.read_text("utf-8").replace("{{DATA}}", text).encode())
    draft.replace(out)


def collect_run(folder: Path) -> dict:
    """Collect the data of a run for the page, with steps counted from 1 as in the terminal."""
    summary_file = folder / "summary.json"
    config_file = folder / "config.yaml"
    metrics = read_lines(folder / METRICS, LogLine)
    evaluations = collect_evaluations(folder, metrics)
    completions = collect_completions(folder)
    timings = read_lines(folder / TIMINGS, LogLine)
    warnings = read_lines(folder / WARNINGS, LogLine)
    for line in (*completions, *metrics, *timings, *warnings):
        line["step"] += 1
    for line in metrics[:-EXPERT_STEPS]:
        line.pop("experts/tokens", None)  # so that the page stays small
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
    """Read evaluations.jsonl, with steps counted over all stages."""
    first_steps = {}  # {stage: number of steps of all earlier stages}
    for number, line in enumerate(metrics):
        first_steps.setdefault(line["stage"], number)
    evaluations = []
    for line in read_lines(folder / EVALUATIONS, LogLine):
        step = line.pop("step") + first_steps.get(line.pop("stage"), 0)
        evaluations.append({"step": step} | line)
    return evaluations


def collect_completions(folder: Path) -> list[dict]:
    """Read completions of at most about STEPS logged steps, including the last step."""
    lines = read_lines(folder / COMPLETIONS, ReportLogLine)
    steps = list(dict.fromkeys((line["stage"], line["step"]) for line in lines))
    stride = max(1, math.ceil(len(steps) / STEPS))
    shown_steps = {*steps[::stride], *steps[-1:]}
    return [line for line in lines if (line["stage"], line["step"]) in shown_steps]


def collect_images(folder: Path, completions: list[dict]) -> dict[str, str]:
    """Return {path: data URI} of all images of the prompts and of tool results."""
    paths = set()
    for line in completions:
        paths.update(line["images"])
        for completion in line.get("completions", ()):
            paths.update(completion.get("pictures", ()))
    return {path: data_uri(folder, path) for path in sorted(paths)}


def data_uri(folder: Path, path: str) -> str:
    """Encode an image that completions.jsonl names.

    Raises:
        ValueError: the path is not a file of the run's images folder. Any file of the computer
            could be copied into the page otherwise.
    """
    file = (folder / path).resolve()
    if file.parent != folder.resolve() / IMAGES or not file.is_file():
        raise ValueError(
            f"{folder / COMPLETIONS}: {path!r:.80} is not an image in the folder {IMAGES}/ of the "
            "run"
        )
    return f"data:image/webp;base64,{base64.b64encode(file.read_bytes()).decode()}"
