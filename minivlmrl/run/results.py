"""What a run leaves in its folder beside metrics: config.yaml, summary.json, two reports and the checkpoint."""

import math
from pathlib import Path

from minivlmrl.hub.checkpoint import save_model
from minivlmrl.hub.folder import write_json
from minivlmrl.run.config import RunConfig, to_yaml
from minivlmrl.run.evaluate import Evaluation, evaluate
from minivlmrl.run.metrics import METRICS
from minivlmrl.tasks.table import get_task
from minivlmrl.tools.page import write_page
from minivlmrl.tools.report import print_table, write_report

SUMMARY = "summary.json"


def check_folder(config: RunConfig):
    """Refuse to begin in the folder of a finished run, or of any run if nothing is trained (ValueError).

    A folder with states is left to scale/resume.py.
    """
    folder, metrics = Path(config.output_dir), Path(config.output_dir) / METRICS
    finished = (folder / SUMMARY).exists() or (not config.stages and metrics.exists() and metrics.stat().st_size)
    if finished and config.resume != "never" and not any((folder / "states").glob("[0-9]*")):
        ways = "--overwrite=true begins anew there, another --output_dir leaves it alone"
        raise ValueError(f"output_dir: {folder} holds the results of a run; {ways}")


class Results:
    """Evaluations of a run, which are added to `results`, and its folder; without held_out nothing is evaluated."""

    def __init__(self, config: RunConfig, model, processor, world, held_out, results: dict[str, Evaluation]):
        self.config, self.model, self.processor, self.world = config, model, processor, world
        self.held_out, self.results, self.folder = held_out, results, Path(config.output_dir)
        if world.is_main:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / "config.yaml").write_text(to_yaml(config))

    def measure(self, name: str, algorithm=None):
        """Evaluate the model as it is now; an algorithm may also rank held-out pairs."""
        if self.held_out is None:
            return
        options = self.config.data.eval_rewards, self.config.rollout.gather_weights
        try:
            result = evaluate(self.model, self.processor, self.held_out, self.config.sampling, self.world, *options)
        except FloatingPointError as error:
            raise ValueError(f"evaluation {name}: {error}; try a lower learning rate") from error
        result.pairs = None if algorithm is None else algorithm.pair_accuracy(self.held_out)
        self.results[name] = result

    def write(self, seconds: dict[str, float], algorithm=None):
        """Write the table of the run and draw its picture; after that, which may fill the disk, save the weights."""
        if self.world.is_main:
            self.write_summary(seconds)
        if algorithm is not None:
            algorithm.save(self.folder)
        save_model(self.folder / "checkpoint", self.model, self.processor, self.world)

    def write_summary(self, seconds: dict[str, float]):
        """Print and write the table of the run, and draw its picture."""
        task = self.config.data.task and get_task(self.config.data.task)
        chance, chance_name = (task.chance(self.held_out), task.chance_name) if task else (None, "chance")
        summary = {"chance": chance, **{name: row(result) for name, result in self.results.items()}, "seconds": seconds}
        write_json(self.folder / SUMMARY, summary)
        print_table(summary, chance_name, len(self.held_out or ()))
        write_report(self.folder, summary, self.held_out, self.results, chance_name)
        write_page([self.folder], self.folder / "page.html")


def row(result: Evaluation) -> dict[str, float]:
    """One row of the table; nothing is reported where no row could be judged: held-out pairs need no solution."""
    metrics = {name: getattr(result, name) for name in ("sampled", "greedy", "format")}
    metrics = {name: value for name, value in metrics.items() if not math.isnan(value)} | result.more
    return metrics | ({} if result.pairs is None else {"pairs": result.pairs})
