"""Open datasets: training rows per stage, and held-out rows."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from itertools import chain

from minivlmrl.config.options import FileOptions, RowOptions, RunConfig
from minivlmrl.config.types import RewardName
from minivlmrl.data.file_dataset import FileDataset
from minivlmrl.data.rows import Dataset
from minivlmrl.distributed.process_group import World
from minivlmrl.errors import UserError, did_you_mean, error_context
from minivlmrl.rewards.registry import held_out_rewards, required_columns, training_rewards
from minivlmrl.tasks.registry import get_task
from minivlmrl.trainers.base import Trainer

# {kind of training rows: required columns besides the prompt}
NEEDS = {
    "prompts": (),
    "demonstrations": ("completion",),
    "pairs": ("chosen", "rejected"),
    "labels": ("completion", "label"),
}


def load_datasets(
    config: RunConfig,
    stages: Mapping[str, str],
    reward_columns: Iterable[str] = (),
    eval_columns: Iterable[str] = ("solution",),
    world: World | None = None,
    reads: Collection[str] | None = None,
) -> dict[str, Dataset]:
    """Open the training rows of all stages, as {stage: dataset}; held-out rows, if any, have the key "eval".

    Only rank 0 checks if image and video files exist; all ranks raise its error.

    Args:
        stages: {stage: kind of training rows}, such as {"dpo": "pairs"}.
        reward_columns: dataset columns that training rewards require, unless a data.train file names its own rewards.
        reads: columns read by training stages and rewards, None = all.
    """
    world = world or World()
    return world.run_on_all_ranks(
        partial(_load_datasets, config, stages, {*reward_columns}, eval_columns, world.is_main, reads)
    )


def columns_read(config: RunConfig, stages: Mapping[str, type[Trainer]]) -> set[str] | None:
    """Return the columns to read; None (all) for an environment, a user-defined stage or a reward with **columns."""
    is_scored = any(trainer.needs == "prompts" for trainer in stages.values())
    rewards = [
        *(training_rewards(config) if is_scored else []),
        *(held_out_rewards(config) if config.data.eval_file else []),
    ]
    own_stages = [trainer for trainer in stages.values() if not trainer.__module__.startswith("minivlmrl.")]
    if config.sampling.environment or own_stages or any(reward.receives_all for reward in rewards):
        return None
    columns: list[Iterable[str]] = [reward.optional_columns for reward in rewards]
    for name, trainer in stages.items():
        columns += NEEDS[trainer.needs], trainer.columns(getattr(config, name))
    return {*chain(*columns)}


def _load_datasets(
    config: RunConfig,
    stages: Mapping[str, str],
    reward_columns: set[str],
    eval_columns: Iterable[str],
    checks_files: bool,
    reads: Collection[str] | None,
) -> dict[str, Dataset]:
    options = config.data
    row_options = {option.name: getattr(options, option.name) for option in fields(RowOptions)}
    sources = [name for name in ("task", "train_file", "train") if getattr(options, name)]
    has_files = bool(stages) and stages.keys() <= options.files.keys()
    is_clear = len(sources) == 1 or (not sources and has_files)
    if not is_clear or (sources == ["task"] and options.files):
        raise UserError(
            "data: set exactly one of data.task, data.train_file and data.train, or set data.files for every stage "
            f"(not together with data.task); the options that the recipe sets are: {', '.join(sources) or 'none'}. "
            "--data.task=null removes the task of a recipe"
        )
    if options.task is not None:
        return load_task(config, stages)

    def open_file(
        path: str, columns: Iterable[str], limit: int | None = None, rewards: Sequence[RewardName] = (), **changed: str
    ) -> FileDataset:
        required = ("problem", *sorted(columns))
        # a constant column, which overrides a column named row_rewards in the file
        constants = {"row_rewards": rewards or None}
        return FileDataset(path, required, limit, constants, checks_files, reads, **row_options | changed)

    # parse every file only once: stages with the same file share a dataset
    shared: dict[str | None, list[str]] = {}
    for stage in stages:
        shared.setdefault(options.files.get(stage, options.train_file), []).append(stage)
    datasets: dict[str, Dataset] = {}
    for path, names in shared.items():
        kinds = {stages[stage] for stage in names}
        columns = {*chain.from_iterable(NEEDS[kind] for kind in kinds)}
        scores = reward_columns if "prompts" in kinds else set()
        if path is None:
            parts = [_open_section(config, section, columns, scores, open_file) for section in options.train]
            rows = mix(parts, options.train)
        else:
            rows = open_file(path, columns | scores)
        datasets |= dict.fromkeys(names, rows)
    if options.eval_file and options.eval_rows:
        # if all stages train on pairs, evaluate on pairs without sampling
        if set(stages.values()) == {"pairs"}:
            eval_columns = NEEDS["pairs"]
        datasets["eval"] = open_file(options.eval_file, eval_columns, options.eval_rows)
    # check data.columns only for training files: an evaluation file may already have the new column names
    if stages:
        columns = {name for rows in datasets.values() if isinstance(rows, FileDataset) for name in rows.columns}
        for name in options.columns:
            if name not in columns:
                own = sorted(columns - {*options.columns.values()})
                raise UserError(
                    f"data.columns renames {name!r}, but no row has this column; the columns are "
                    f"{', '.join(sorted(columns))}{did_you_mean(name, own)}"
                )
    return {name: datasets[name] for name in [*stages, "eval"] if name in datasets}


def load_task(config: RunConfig, stages: Mapping[str, str]) -> dict[str, Dataset]:
    """Generate training and held-out rows for data.task."""
    assert config.data.task is not None
    training, held_out = get_task(config.data.task).datasets(config.data, config.seed)
    datasets = {}
    for stage, needs in stages.items():
        if needs not in training:
            raise UserError(
                f"stages: {stage} needs {needs}, but data.task {config.data.task} does not generate "
                "such rows; remove the stage, or use a file of rows (data.train_file)"
            )
        datasets[stage] = training[needs]
    if config.data.eval_rows:
        datasets["eval"] = held_out
    return datasets


def _open_section(
    config: RunConfig, section: FileOptions, columns: set[str], scores: set[str], open_file: Callable[..., FileDataset]
) -> FileDataset:
    """Open a file listed in data.train.

    Args:
        scores: dataset columns that the recipe's rewards require; empty if no stage computes rewards.
    """
    for name in section.rewards:
        if name not in config.rewards:
            raise UserError(
                f"data.train: {section.file}: unknown reward {name!r}; the rewards of the recipe "
                f"are: {', '.join(config.rewards)}{did_you_mean(name, config.rewards)}"
            )
    if scores and section.rewards:
        scores = {*required_columns([r for r in training_rewards(config) if r.name in section.rewards])}
    own = {"image_root": section.image_root, "prompt_template": section.prompt_template}
    changed_options = {name: value for name, value in own.items() if value is not None}
    return open_file(section.file, columns | scores, rewards=section.rewards, **changed_options)


def mix(parts: Sequence[FileDataset], sections: Sequence[FileOptions]) -> FileDataset:
    """Concatenate data files; a file with weight 2 occurs twice."""
    facts = []
    for rows, section in zip(parts, sections, strict=True):
        with error_context(section.file):
            indices = repeat(range(len(rows)), section.weight)
            if not indices:
                raise UserError(
                    f"weight {section.weight} takes none of its {len(rows)} rows; raise it, or remove the file from "
                    "data.train"
                )
        facts += [rows.facts[index] for index in indices]
    return parts[0].select(facts)


def repeat(chosen: Sequence[int], weight: float) -> list[int]:
    """Repeat a list `weight` times.

    Example: with weight 2.5, all items occur twice, and half of them again at the end.
    """
    repeats = int(weight)
    items = [item for item in chosen for _ in range(repeats)]
    num_extra = round(weight * len(chosen)) - len(items)
    return items + [chosen[i * len(chosen) // num_extra] for i in range(num_extra)]
