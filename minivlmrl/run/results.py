"""Write results: config.yaml, evaluations, summary.json and weights."""

import os
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import chain
from operator import attrgetter
from pathlib import Path

from minivlmrl.config.loading import to_yaml
from minivlmrl.config.options import RunConfig
from minivlmrl.data.messages import text_of
from minivlmrl.data.processor import Processor
from minivlmrl.data.rows import Dataset, seed_user_code
from minivlmrl.distributed.saving import save_model
from minivlmrl.errors import UserError, error_phase, pluralize, require
from minivlmrl.files import CARD, RUN_CONFIG
from minivlmrl.json_files import write_file, write_json
from minivlmrl.model.decoder import VisionLanguageModel
from minivlmrl.rewards.text import normalize, solution_text
from minivlmrl.run.callbacks import Callback
from minivlmrl.run.evaluate import ANSWER_METRICS, IMAGE_ABLATIONS, evaluate, lowered_metrics, metrics_by_name
from minivlmrl.run.metrics import FILES, METRICS, MetricsLog, short_names
from minivlmrl.run.model_card import model_card
from minivlmrl.run.recipe_changes import MODELS
from minivlmrl.run.rollout_log import COMPLETIONS, IMAGES
from minivlmrl.run.states import check_resume
from minivlmrl.tasks.registry import get_task
from minivlmrl.trainers.base import Trainer

SUMMARY, BEST, STATES = "summary.json", "best", "states"
SAVED = "checkpoint", BEST  # weight folders
# files and folders written by a run, besides trackers
OUTPUTS = *SAVED, STATES, RUN_CONFIG, *FILES, COMPLETIONS, IMAGES, SUMMARY, "report.html", "reward_model", "critic"
MARK = ".minivlmrl"  # marker file of a run folder, in which a run may overwrite all OUTPUTS


def check_outputs(config: RunConfig, trainers: dict[str, type[Trainer]]):
    """Raise UserError if best_metric is unknown, or torchrun restarts failed ranks but --resume=auto is missing."""
    for path in (Path(config.output_dir), *Path(config.output_dir).parents):
        require(not path.is_file(), "output_dir", str(path), "a folder, and this is a file")
    rewards = config.eval_rewards
    ways = ["sampled", "greedy", *(IMAGE_ABLATIONS if config.data.eval_without_images else ())]
    names = [*metrics_by_name(rewards, dict.fromkeys(ways, [0.0] * len(rewards)))]
    kinds = [trainer.needs for trainer in trainers.values()]
    names += [name for kind, name in ANSWER_METRICS.items() if kind in kinds]
    require(config.best_metric in (None, *names), "best_metric", config.best_metric, f"one of {', '.join(names)}")
    if int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) and config.resume != "auto":
        raise UserError(
            "resume: torchrun's --max-restarts only works with --resume=auto, because a restarted "
            "process has to continue the run"
        )


def check_output_dir(config: RunConfig):
    """Raise UserError if the run would overwrite earlier results or the user's files."""
    states = check_resume(config)
    folder = Path(config.output_dir)
    metrics_file = folder / METRICS
    names = (*OUTPUTS, *config.report_to)
    found = [name for name in names if (folder / name).exists()]
    if found and not (folder / MARK).is_file():
        raise UserError(
            f"output_dir: {folder} contains {', '.join(found)}, which the run would replace, but no file {MARK}, which "
            "marks the folder of a run; choose another --output_dir, or move them. If an earlier version of minivlmrl "
            f"wrote them, mark the folder: touch {folder / MARK}"
        )
    for name in names:
        target = (folder / name).resolve()
        # allow a link from states/ to another disk, but not into another run
        if (folder / name).is_symlink() and (name != STATES or (target.parent / RUN_CONFIG).is_file()):
            raise UserError(
                f"output_dir: {folder / name} is a link to {target}, and a run replaces no files outside its folder; "
                "remove the link, or choose another --output_dir"
            )
    for option in MODELS if config.stages else ():
        model = attrgetter(option)(config)
        if model and any(Path(model).resolve().is_relative_to((folder / name).resolve()) for name in SAVED):
            raise UserError(
                f"output_dir: the run would replace {model}, which it reads as {option}, also after a resume; choose "
                "another --output_dir"
            )
    # a run without stages only evaluates, and must not overwrite metrics.jsonl of a training run
    results = [folder / SUMMARY] if config.stages else [folder / SUMMARY, metrics_file]
    has_results = any(file.exists() and file.stat().st_size > 0 for file in results)
    if has_results and not states and config.resume != "never":
        raise UserError(
            f"output_dir: {folder} contains the results of an earlier run; use --resume=never to "
            "delete them and start again, or another --output_dir to keep them"
        )


def mark_output_dir(config: RunConfig):
    write_file(Path(config.output_dir, MARK), b"A run of minivlmrl may replace its files in this folder.\n")


class Results:
    """Evaluate a run and write its results.

    Args:
        held_out: rows for evaluations, None = no evaluations.
    """

    def __init__(
        self,
        config: RunConfig,
        model: VisionLanguageModel,
        processor: Processor,
        log: MetricsLog,
        held_out: Dataset | None,
        callbacks: Sequence[Callback],
    ):
        self.config = config
        self.model = model
        self.processor = processor
        self.log = log
        self.world = log.world
        self.held_out = held_out
        self.state = log.state
        self.callbacks = callbacks
        self.folder = Path(config.output_dir)
        processor.tokenizer.files[CARD] = model_card(config, self.state.results)

    def write_config(self):
        if self.world.is_main:
            rows = f"evaluated on {pluralize(len(self.held_out), 'row')}" if self.held_out else "not evaluated"
            # the first line of config.yaml, which report.html shows
            text = f"# {self.config.recipe}; {rows}\n{to_yaml(self.config)}"
            write_file(self.folder / RUN_CONFIG, text.encode())

    def measure(self, name: str, trainer: Trainer | None = None):
        """Evaluate before the first stage or after a stage, and keep the metrics for summary.json."""
        if self.held_out is not None:
            self.state.results[name] = self.evaluate(name, trainer, trainer.options.max_steps if trainer else 0)

    def evaluate_if_due(self, trainer: Trainer, steps_done: int, is_due: bool = False):
        config = self.config
        is_due |= bool(config.eval_steps and steps_done % config.eval_steps == 0)
        if is_due and self.held_out is not None:
            self.evaluate(f"after step {steps_done} of {trainer.stage}", trainer, steps_done)
        if config.save_steps and steps_done % config.save_steps == 0:
            self.save(trainer, self.folder)

    def save(self, trainer: Trainer, folder: Path):
        trainer.save(folder, merge=self.config.save != "adapter")

    def evaluate(self, name: str, trainer: Trainer | None, steps_done: int) -> dict[str, float]:
        """Evaluate, save the weights if best_metric improved, and return the metrics."""
        begin = time.perf_counter()
        config = self.config
        stage = trainer.stage if trainer else next(iter(config.stage_names), name)
        held_out = self.held_out
        assert held_out is not None
        seed_user_code(f"{config.seed}/evaluation/{name}/{self.world.rank}")
        try:
            steps = steps_done, getattr(config, stage, config.grpo).max_steps or 1
            values = evaluate(self.model, self.processor, held_out, config, self.world, steps)
        except FloatingPointError as error:
            cause = "The training has probably diverged; try a lower learning rate"
            if trainer is None:
                cause = (
                    "Nothing has been trained yet, so the weights are damaged or the activations overflow; try "
                    "--model.compute_dtype=float32"
                )
            raise UserError(f"evaluation {name}: {error}. {cause}") from error
        if trainer is not None:
            with error_phase("evaluation"):
                values |= trainer.evaluate(held_out)
        self.log.evaluation(stage, steps_done, values, time.perf_counter() - begin)
        self.processor.tokenizer.files[CARD] = model_card(config, self.state.results | {name: values})
        for callback in self.callbacks:
            callback.on_evaluation(stage, steps_done, len(held_out))
        self.world.barrier()
        score = values.get(str(config.best_metric))
        if trainer is not None and score is not None:
            if config.best_metric in lowered_metrics(config):
                score = -score
            if self.state.best is None or score > self.state.best:
                self.state.best = score
                self.save(trainer, self.folder / BEST)
        # leave eval/loss out of the results table, because only some stages have it
        values.pop("eval/loss", None)
        return values

    def chance(self) -> float | None:
        """Return the accuracy of guessing without the image, or None if the first reward is not `accuracy`.

        For data files, the guess is the most frequent solution for the same question or, if the question occurs only
        once, of all rows.
        """
        if self.held_out is None or self.config.eval_rewards[0] != "accuracy":
            return None
        if self.config.data.task:
            return get_task(self.config.data.task).chance
        counts = defaultdict(Counter)  # {question: {solution: number of rows}}
        for row in self.held_out:
            if answer := normalize(solution_text(row.columns.get("solution"))):
                counts["\n".join(map(text_of, row.messages))][answer] += 1
        total = sum(counts.values(), Counter())
        if not total:
            return None
        commonest = total.most_common(1)[0][0]
        right = (max(count.values()) if count.total() > 1 else count[commonest] for count in counts.values())
        return sum(right) / total.total()

    def write(self, trainer: Trainer | None = None):
        """Write summary.json, and then the weights, which may fill the disk."""
        if self.world.is_main:
            chance = self.chance()
            results = self.state.results
            seconds = self.state.seconds
            write_json(self.folder / SUMMARY, {"chance": chance, **results, "seconds": seconds})
            if results:
                columns = [*dict.fromkeys(chain.from_iterable(results.values()))]
                titles = [name.removeprefix("eval/") for name in short_names(columns)]
                # chance level: only for accuracies, which are the first two columns (sampled, greedy)
                rows = {} if chance is None else {"chance": dict.fromkeys(columns[:2], chance)}
                table = {f"held-out {len(self.held_out or ())}": titles}
                for name, row in (rows | results).items():
                    table[name.replace("_", " ")] = [f"{row[title]:.3f}" if title in row else "" for title in columns]
                first_width = max(12, *(len(name) + 1 for name in table))
                widths = [max(9, len(title) + 2) for title in titles]
                print()
                for name, values in table.items():
                    print((name.ljust(first_width) + "".join(map(str.rjust, values, widths))).rstrip())
            print(f"training: {', '.join(f'{name} {value:.1f} s' for name, value in seconds.items())}")
        if trainer is not None:
            trainer.save(self.folder)
        if trainer is None or not trainer.trains_policy:
            base = self.config.model.path
            save_model(self.folder / "checkpoint", self.model, self.processor, self.world, base)
