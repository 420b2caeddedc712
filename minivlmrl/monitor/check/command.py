"""Check a recipe, its dataset and its rewards for problems before training.

minivlmrl check RECIPE [--section.name=value ...]

`check` reads the rows, tries the rewards on correct answers and other texts, and prints problems with cause and fix.
`check` writes no files and samples no completions. The first ten training steps report truncated completions, missing
answer tags and equal rewards. Exit status: 1 if there are problems, else 0.
"""

from collections.abc import Iterator, Sequence

from minivlmrl.config.loading import load_config
from minivlmrl.config.options import RunConfig
from minivlmrl.data.file_dataset import FileDataset
from minivlmrl.data.loader import next_readable, readable_prompt
from minivlmrl.data.processor import Processor
from minivlmrl.data.rows import Row
from minivlmrl.distributed import process_group
from minivlmrl.monitor.check.evaluation import check_evaluation
from minivlmrl.monitor.check.preflight import find_mistakes
from minivlmrl.monitor.check.rewards import check_contradictions, check_demonstrations, check_rewards, make_trial
from minivlmrl.monitor.check.rows import check_rows, solutions_of
from minivlmrl.rewards.registry import held_out_rewards
from minivlmrl.run.callbacks import default_callbacks
from minivlmrl.run.setup import prepare
from minivlmrl.trainers.registry import find_trainers


def main(arguments: list[str]) -> int:
    if not arguments or "--help" in arguments:
        print(__doc__)
        return 0
    sentences = dict.fromkeys(check(load_config(arguments[0], arguments[1:])))
    print("\n".join(f"- {sentence}" for sentence in sentences) or "No problems were found.")
    return int(bool(sentences))


def check(config: RunConfig) -> Iterator[str]:
    """Yield problems in a recipe, its rows and its rewards."""
    stages = find_trainers(config)
    callbacks = default_callbacks(config)
    for callback in callbacks:
        callback.on_recipe(config, stages)
    world = process_group.setup(config.num_threads, config.timeout, config.uses_fsdp)
    _, processor, datasets = prepare(config, stages, world, callbacks)
    if config.data.skip_unreadable:
        for stage, trainer in stages.items():
            rows = datasets[stage]
            if isinstance(rows, FileDataset):  # generated rows are always readable
                datasets[stage] = ReadableRows(rows, processor, trainer.answers)
    online = [stage for stage, trainer in stages.items() if trainer.samples_completions]
    yield from find_mistakes(config, datasets)
    for stage, trainer in stages.items():
        yield from check_rows(config, datasets[stage], trainer.answers, processor)
        yield from check_contradictions(held_out_rewards(config), datasets[stage], trainer, processor)
    yield from check_evaluation(config, datasets, processor)
    rows_of = {trainer.needs: datasets[stage] for stage, trainer in reversed(stages.items())}
    if online and "demonstrations" in rows_of:
        yield from check_demonstrations(make_trial(config, rows_of["demonstrations"], processor))
    if "prompts" in rows_of:
        rows = rows_of["prompts"]
        trial = make_trial(config, rows, processor)
        if (trial.weights > 0).any():
            yield from check_rewards(trial, solutions_of(rows))
    process_group.shutdown(world)


class ReadableRows(FileDataset):
    """Return the next readable row instead of an unreadable one, as training does."""

    def __init__(self, rows: FileDataset, processor: Processor, answers: Sequence[str]):
        self.facts = rows.facts
        self.rows = rows
        self.processor = processor
        self.answers = answers

    def __getitem__(self, index: int) -> Row:
        def read(row: Row):
            return readable_prompt(row, self.processor, self.answers)

        row, *_ = next_readable(self.rows, index, read)
        return row
