"""Open the datasets of a run: the rows of each training stage, and the held-out rows."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from itertools import chain

from minivlmrl.config.options import DataOptions, FileOptions, RowOptions, RunConfig
from minivlmrl.config.types import RewardName
from minivlmrl.data.file_rows import FileRows
from minivlmrl.data.rows import Dataset
from minivlmrl.distributed.process_group import World
from minivlmrl.errors import check_field, did_you_mean
from minivlmrl.rewards.registry import held_out_rewards, required_columns, training_rewards
from minivlmrl.tasks.registry import get_task
from minivlmrl.trainers.base import Trainer

# {kind of training rows: columns that a data file needs besides the prompt}
NEEDS = {
    "prompts": (),
    "demonstrations": ("completion",),
    "pairs": ("chosen", "rejected"),
    "labels": ("completion", "label"),
}


def load_datasets(
    run: RunConfig,
    stages: Mapping[str, str],
    reward_columns: Iterable[str] = (),
    eval_columns: Iterable[str] = ("solution",),
    world: World | None = None,
    reads: Collection[str] | None = None,
) -> dict[str, Dataset]:
    """Return the rows of each stage, {stage: dataset}; the key "eval" has the held-out rows, if there are any.

    All ranks read the rows. Only rank 0 looks for missing image and video files, but all ranks raise the error.

    Args:
        run: the recipe.
        stages: {stage: the kind of rows that it needs, a key in NEEDS}.
        reward_columns: columns that rewards need in training rows, unless a file in data.train lists its rewards.
        eval_columns: columns that rewards need in held-out rows.
        world: the ranks; None is a single process.
        reads: all columns that a stage or a reward may read; None stands for any column.
    """
    world = world or World()
    load = partial(_load_datasets, run, stages, reward_columns, eval_columns, world.is_main, reads)
    return world.run_on_all_ranks(load, "open the data files")


def columns_read(run: RunConfig, stages: Mapping[str, type[Trainer]]) -> set[str] | None:
    """Return the columns of the data files that the stages, the rewards or the evaluations of a recipe read.

    Returns:
        None if an environment, a stage from outside minivlmrl, or a reward with **columns may read any column.
    """
    is_scored = any(trainer.needs == "prompts" for trainer in stages.values())
    rewards = [*(training_rewards(run) if is_scored else []), *(held_out_rewards(run) if run.data.eval_file else [])]
    own_stages = [trainer for trainer in stages.values() if not trainer.__module__.startswith("minivlmrl.")]
    if run.sampling.environment or own_stages or any(reward.reads_all for reward in rewards):
        return None
    needed = [NEEDS[trainer.needs] for trainer in stages.values()]
    return {*chain(*needed, *(trainer.columns for trainer in stages.values()), *(r.optional_columns for r in rewards))}


def _load_datasets(
    run: RunConfig,
    stages: Mapping[str, str],
    reward_columns: Iterable[str],
    eval_columns: Iterable[str],
    checks_files: bool,
    reads: Collection[str] | None,
) -> dict[str, Dataset]:
    config = run.data
    open_file = partial(_file_rows, config, checks_files, reads)
    files = config.files
    sources = [name for name in ("task", "train_file", "train") if getattr(config, name)]
    every_stage_has_a_file = bool(stages) and stages.keys() <= files.keys()
    is_clear = len(sources) == 1 or (not sources and every_stage_has_a_file)
    if not is_clear or (sources == ["task"] and files):
        raise ValueError(
            "data: set exactly one of data.task, data.train_file and data.train, or set data.files for every stage "
            f"(not together with data.task); the options that the recipe sets are: {', '.join(sources) or 'none'}. "
            "--data.task=null removes the task of a recipe"
        )
    if config.task is not None:
        return load_task(run, stages)
    columns = NEEDS | {"prompts": tuple(reward_columns)}
    datasets: dict[str, Dataset] = {}
    for stage, needs in stages.items():
        datasets[stage] = _training_rows(run, files.get(stage), columns[needs], needs == "prompts", open_file)
    if config.eval_file and config.eval_rows:
        # A recipe that trains only on pairs is evaluated on held-out pairs, without sampling.
        if set(stages.values()) == {"pairs"}:
            eval_columns = NEEDS["pairs"]
        datasets["eval"] = open_file(config.eval_file, eval_columns, config.eval_rows)
    if stages:  # without a stage, the evaluation file alone may already have the new names
        _check_renamed(config.columns, datasets)
    return datasets


def _check_renamed(renamed: Mapping[str, str], datasets: Mapping[str, Dataset]):
    """Raise ValueError if the option data.columns renames a column that no data file has."""
    columns = set()
    for rows in datasets.values():
        for part in getattr(rows, "parts", [rows]):
            columns.update(part.columns)
    for name in renamed:
        if name not in columns:
            own = sorted(columns - {*renamed.values()})
            raise ValueError(
                f"data.columns renames {name!r}, but no row has this column; the columns are "
                f"{', '.join(sorted(columns))}{did_you_mean(name, own)}"
            )


def load_task(run: RunConfig, stages: Mapping[str, str]) -> dict[str, Dataset]:
    """Generate the training and held-out rows of the built-in task that the option data.task names."""
    assert run.data.task is not None
    training, held_out = get_task(run.data.task).datasets(run.data, run.seed)
    datasets = {}
    for stage, needs in stages.items():
        if needs not in training:
            raise ValueError(
                f"stages: {stage} needs {needs}, but data.task {run.data.task} does not generate "
                "such rows; remove the stage, or use a file of rows (data.train_file)"
            )
        datasets[stage] = training[needs]
    if run.data.eval_rows:
        datasets["eval"] = held_out
    return datasets


def check_shares(stage: str, prompts_per_step: int, ranks: int):
    """Raise ValueError if the prompts of an optimizer step cannot be divided equally among the ranks."""
    fits = prompts_per_step % ranks == 0
    name = f"{stage}.prompts_per_step"
    check_field(fits, name, prompts_per_step, f"a multiple of {ranks}, the number of ranks")


def _training_rows(
    run: RunConfig, file: str | None, columns: Sequence[str], is_scored: bool, open_file: Callable[..., FileRows]
) -> Dataset:
    """Open the training rows of a stage."""
    from minivlmrl.data.mixture import mix

    config = run.data
    path = file or config.train_file
    if path is not None:
        return open_file(path, columns)
    parts = []
    for section in config.train:
        needed_columns = _columns_of_file(run, section, columns, is_scored) if section.rewards else columns
        own = {"image_root": section.image_root, "prompt_template": section.prompt_template}
        changed_options = {name: value for name, value in own.items() if value is not None}
        constants = {"row_rewards": section.rewards} if section.rewards else {}
        parts.append(open_file(section.file, needed_columns, constants=constants, **changed_options))
    return mix(parts, config.train)


def _columns_of_file(run: RunConfig, section: FileOptions, columns: Sequence[str], is_scored: bool) -> Sequence[str]:
    """Return the columns that the rewards of a file in data.train need."""
    for name in section.rewards:
        if name not in run.rewards:
            raise ValueError(
                f"data.train: {section.file}: unknown reward {name!r}; the rewards of the recipe "
                f"are: {', '.join(run.rewards)}{did_you_mean(name, run.rewards)}"
            )
    if not is_scored:
        return columns
    return required_columns([r for r in training_rewards(run) if r.name in section.rewards])


def _file_rows(
    config: DataOptions,
    checks_files: bool,
    reads: Collection[str] | None,
    path: str,
    columns: Iterable[str],
    limit: int | None = None,
    constants: Mapping[str, list[RewardName]] | None = None,
    **changed_options: str,
) -> FileRows:
    """Open a data file, and add the columns in `constants`, which are equal in all rows."""
    from minivlmrl.data.file_dataset import FileDataset

    options = {option.name: getattr(config, option.name) for option in fields(RowOptions)}
    return FileDataset(path, ("problem", *columns), limit, constants, checks_files, reads, **options | changed_options)
