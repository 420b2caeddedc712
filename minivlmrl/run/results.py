"""What a run leaves beside metrics: config.yaml, summary.json, its page and its checkpoints."""

import os
import time
from pathlib import Path

from minivlmrl.hub.folder import write_json
from minivlmrl.run.config import RunConfig, to_yaml
from minivlmrl.run.evaluate import evaluate
from minivlmrl.run.metrics import METRICS, MetricsLog, check_trackers
from minivlmrl.run.report import write_page
from minivlmrl.run.resume import check_resume
from minivlmrl.scale.checkpoint import save_model
from minivlmrl.tasks.task import get_task

SUMMARY, BEST = "summary.json", "best"


def check_outputs(config: RunConfig):
    """Refuse (ValueError) the folder of a finished run, or of any run if nothing is trained.

    Also refuse a tracker that is not installed, and evaluations without held-out rows.
    """
    check_trackers(config.report_to)
    asked = [name for name in ("eval_steps", "keep_best") if getattr(config, name)]
    if asked and not config.data.task and not config.data.eval_file:
        raise ValueError(f"{asked[0]}: there are no held-out rows; set data.eval_file")
    if int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) and config.resume != "auto":
        raise ValueError("resume: torchrun's --max-restarts needs --resume=auto")
    folder = Path(config.output_dir)
    metrics = Path(config.output_dir) / METRICS
    nothing = not config.stages and metrics.exists() and metrics.stat().st_size
    ended = (folder / SUMMARY).exists() or nothing
    if not check_resume(config) and ended and config.resume != "never":
        ways = "--resume=never begins anew there, another --output_dir leaves it alone"
        raise ValueError(f"output_dir: {folder} holds the results of a run; {ways}")


class Results:
    """Evaluations of a run, added to progress.results, and its folder; held_out may be None."""

    def __init__(self, config: RunConfig, model, processor, log: MetricsLog, held_out, progress):
        self.config, self.log, self.world = config, log, log.world
        self.model, self.processor = model, processor
        self.held_out, self.progress, self.results = held_out, progress, progress.results
        self.folder = Path(config.output_dir)
        if self.world.is_main:
            rows = f"evaluated on {len(held_out)} rows" if held_out else "not evaluated"
            head = f"# {config.recipe}; {rows}\n"  # the page shows it
            (self.folder / "config.yaml").write_bytes(f"{head}{to_yaml(config)}".encode())
            print(f"output: {self.folder}", flush=True)

    def measure(self, name: str, algorithm=None):
        """Evaluate the model before the first stage or at the end of one, for the table."""
        if self.held_out is not None:
            done = algorithm.config.max_steps if algorithm else 0
            self.results[name] = self.evaluate(name, algorithm, done)

    def after_step(self, algorithm, done: int):
        """Evaluate and save if it is time after `done` steps; at the end measure() evaluates."""
        config, stage = self.config, algorithm.stage
        due = config.eval_steps and done % config.eval_steps == 0
        if due and done < algorithm.config.max_steps:
            self.evaluate(f"after step {done} of {stage}", algorithm, done)
        if config.save_steps and done % config.save_steps == 0:
            algorithm.save(self.folder)

    def evaluate(self, name: str, algorithm, done: int) -> dict[str, float]:
        """Evaluate the model, save it if it is the best, and return what the table shows."""
        begin = time.perf_counter()
        config = self.config
        try:
            values = evaluate(self.model, self.processor, self.held_out, config, self.world)
        except FloatingPointError as error:
            raise ValueError(f"evaluation {name}: {error}; try a lower learning rate") from error
        stage = config.stages[0] if config.stages else name
        if algorithm is not None:
            stage, values = algorithm.stage, values | algorithm.evaluate(self.held_out)
        rows = len(self.held_out)
        self.log.evaluation(stage, done, values, time.perf_counter() - begin, rows)
        kind, best = config.keep_best, self.progress.best
        if algorithm is not None and kind in values:
            value = -values[kind] if kind == "loss" else values[kind]
            if best is None or value > best:
                self.progress.best = value
                algorithm.save(self.folder / BEST)
        return {name: value for name, value in values.items() if name != "loss"}  # of some stages

    def write(self, seconds: dict[str, float], algorithm=None):
        """Write the table and the page, and then, as this may fill the disk, the weights."""
        if self.world.is_main:
            task = self.config.data.task and get_task(self.config.data.task)
            chance = task.chance(self.held_out) if task else None
            summary = {"chance": chance, **self.results, "seconds": seconds}
            write_json(self.folder / SUMMARY, summary)
            print_table(summary, task.chance_name if task else "", len(self.held_out or ()))
            write_page([self.folder], self.folder / "page.html")
        if algorithm is not None:
            algorithm.save(self.folder)
        if algorithm is None or not algorithm.trains_policy:
            base = self.config.model.path
            save_model(self.folder / "checkpoint", self.model, self.processor, self.world, base)


def print_table(summary: dict, chance_name: str, rows: int):
    """Print summary.json as a table: what was measured on so many held-out rows."""
    stages = {name: row for name, row in summary.items() if name not in ("chance", "seconds")}
    widths = {name: max(9, len(name) + 2) for row in stages.values() for name in row}
    first = max(12, len(chance_name) + 1, *(len(name) + 1 for name in stages))
    if stages:
        titles = "".join(f"{name:>{width}}" for name, width in widths.items())
        print(f"\n{f'held-out {rows}':<{first}}{titles}")
    if summary["chance"] is not None:
        print(f"{chance_name:<{first}}" + f"{summary['chance']:>9.3f}" * 2)
    for name, row in stages.items():
        cells = (f"{row[key]:>{n}.3f}" if key in row else "" for key, n in widths.items())
        print(f"{name.replace('_', ' '):<{first}}" + "".join(cells))
    seconds = (f"{name} {value:.1f} s" for name, value in summary["seconds"].items())
    print(f"training: {', '.join(seconds)}")
