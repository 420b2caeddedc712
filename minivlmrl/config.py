"""Every knob of a run, declared once. A recipe (YAML) sets some of them, --section.name=value on top of it others."""

import dataclasses
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path

import yaml


@dataclass
class ModelSection:
    """Which weights to train: `path`, a Hugging Face folder, or `config`, a config.json to fill with random ones."""

    path: str | None = None
    config: str | None = None
    dtype: str = "float32"  # of the parameters


@dataclass
class DataSection:
    """Where rows come from: `task`, an embedded one, or `train_file` and `eval_file`, JSON lines of your own."""

    task: str | None = None  # "shapes"
    train_file: str | None = None  # rows with problem, image(s) and solution, for grpo; completion, for sft
    eval_file: str | None = None  # rows with problem, image(s) and solution
    eval_rows: int = 256  # held-out rows that are evaluated, at most
    prompt_template: str = "{problem}"  # what the user message says; {problem} is the row's
    system_prompt: str | None = None  # None: Qwen's default
    min_pixels: int | None = None  # bounds of an image's area; None: as the model's folder says
    max_pixels: int | None = None
    demonstrations: int = 96  # shapes: rows for sft
    wrong_demonstrations: float = 0.5  # shapes: share of them whose label is drawn at random

    def __post_init__(self):
        _require(self.eval_rows >= 1, "eval_rows", self.eval_rows, "1 or more")
        _require(self.demonstrations >= 1, "demonstrations", self.demonstrations, "1 or more")
        share = self.wrong_demonstrations
        _require(0 <= share <= 1, "wrong_demonstrations", share, "in [0, 1]")


@dataclass
class SamplingConfig:
    """How completions are drawn. Nothing is read from a checkpoint's generation_config."""

    temperature: float = 1.0  # divides the logits; 0 takes the likeliest token
    top_k: int = 0  # keep the k likeliest tokens (ties with the k-th stay); 0 keeps all
    top_p: float = 1.0  # keep the likeliest tokens that together reach this probability; 1 keeps all
    min_p: float = 0.0  # drop tokens less likely than this times the likeliest; 0 keeps all
    repetition_penalty: float = 1.0  # logits of tokens seen in prompt or completion: / if positive, x if negative
    max_new_tokens: int = 256  # a completion that has not stopped by then is cut

    def __post_init__(self):
        _require(self.temperature >= 0, "temperature", self.temperature, "0 or more")
        _require(self.top_k >= 0, "top_k", self.top_k, "0 or more")
        _require(0 < self.top_p <= 1, "top_p", self.top_p, "in (0, 1]")
        _require(0 <= self.min_p <= 1, "min_p", self.min_p, "in [0, 1]")
        _require(self.repetition_penalty > 0, "repetition_penalty", self.repetition_penalty, "over 0")
        _require(self.max_new_tokens >= 1, "max_new_tokens", self.max_new_tokens, "1 or more")


@dataclass
class StageConfig:
    """What every stage has: its length, its batch and its optimizer (AdamW)."""

    max_steps: int = 100  # optimizer steps
    prompts_per_step: int = 32  # prompts in one optimizer step, over all ranks
    micro_batch_size: int = 32  # prompts (with all their completions) in one forward and backward on one rank
    learning_rate: float = 1e-6
    lr_scheduler_type: str = "linear"  # after the warmup: "linear", "cosine" or "constant"
    min_lr_ratio: float = 0.0  # the schedule ends at this share of learning_rate
    warmup_steps: int = 0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.99
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0  # gradients are scaled down to this norm
    save_steps: int = 0  # write the checkpoint every so many steps; 0: at the end of the run only

    def __post_init__(self):
        for name in ("prompts_per_step", "micro_batch_size"):
            _require(getattr(self, name) >= 1, name, getattr(self, name), "1 or more")
        schedules = ("linear", "cosine", "constant")
        _require(
            self.lr_scheduler_type in schedules, "lr_scheduler_type", self.lr_scheduler_type, f"one of {schedules}"
        )


@dataclass
class SFTConfig(StageConfig):
    pass


@dataclass
class GRPOConfig(StageConfig):
    num_generations: int = 8  # completions for each prompt: the group
    num_iterations: int = 1  # optimizer steps on each batch of completions
    loss_type: str = "dapo"  # see training/losses.py
    importance_sampling_level: str = "token"  # "sequence" is GSPO
    epsilon_low: float = 0.2
    epsilon_high: float = 0.2
    delta: float | None = None  # upper bound of the unclipped ratio
    beta: float = 0.0  # weight of the KL to the reference; 0: there is no reference model
    use_bias_correction_kl: bool = True
    scale_rewards: str = "group"  # advantages divided by the standard deviation of the "group", "batch" or "none"
    shuffle_rewards: bool = False  # a control: rewards permuted over the batch carry no information, so none is learnt

    def __post_init__(self):
        super().__post_init__()
        levels, scales = ("token", "sequence"), ("group", "batch", "none")
        level, scale = self.importance_sampling_level, self.scale_rewards
        _require(level in levels, "importance_sampling_level", level, f"one of {levels}")
        _require(scale in scales, "scale_rewards", scale, f"one of {scales}")
        _require(self.num_iterations >= 1, "num_iterations", self.num_iterations, "1 or more")
        _require(self.beta >= 0, "beta", self.beta, "0 or more")
        _require(
            self.num_generations >= 2, "num_generations", self.num_generations,
            "2 or more: the advantage of a completion is measured against the others of its group",
        )  # fmt: skip


@dataclass
class RunConfig:
    """A whole run."""

    seed: int = 0
    output_dir: str = "runs/default"
    stages: list[str] = field(default_factory=lambda: ["grpo"])  # algorithms, one after the other
    num_threads: int | None = None  # CPU threads of this process; None: cores of the machine / its ranks
    model: ModelSection = field(default_factory=ModelSection)
    data: DataSection = field(default_factory=DataSection)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    rewards: dict[str, float] = field(default_factory=lambda: {"format": 0.5, "accuracy": 1.0})  # name -> weight
    sft: SFTConfig = field(default_factory=SFTConfig)
    grpo: GRPOConfig = field(default_factory=GRPOConfig)


def load_config(recipe: str | Path, overrides: list[str] = ()) -> RunConfig:
    """Read a recipe and apply overrides.

    Args:
        recipe: a YAML file with the fields of RunConfig.
        overrides: such as "--seed=1" or "--grpo.learning_rate=1e-4"; the value is read as YAML.
    Raises:
        ValueError: the file cannot be read, or a key or value in it or in an override is not valid (named, with the
            valid keys).
    """
    path = Path(recipe)
    if not path.is_file():
        raise ValueError(f"{recipe}: no such recipe")
    try:
        values = yaml.safe_load(path.read_text()) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{recipe}: not YAML ({error})") from error
    config = _build(RunConfig, values, str(recipe))
    for override in overrides:
        key, separator, text = override.removeprefix("--").partition("=")
        if not override.startswith("--") or not separator:
            raise ValueError(f"{override!r}: an override has the form --section.name=value")
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ValueError(f"command line: the value of {key} is not YAML, quote it ({error})") from error
        values = _replace(values, key.split("."), value)
    config = _build(RunConfig, values, "command line")
    if config.model.config:  # beside the recipe; the others below from where the command runs
        config.model.config = str((path.parent / config.model.config).resolve())
    for section, name in ((config.model, "path"), (config.data, "train_file"), (config.data, "eval_file")):
        if getattr(section, name) and Path(getattr(section, name)).exists():
            setattr(section, name, str(Path(getattr(section, name)).resolve()))
    return config


def to_yaml(config: RunConfig) -> str:
    """The resolved config as a recipe that reproduces it."""
    return yaml.safe_dump(dataclasses.asdict(config), sort_keys=False)


def _replace(values, path: list[str], value):
    """`values` with what stands at `path` replaced, and sections on the way made where they are missing."""
    name, *rest = path
    inside = values if isinstance(values, dict) else {}
    return {**inside, name: _replace(inside.get(name), rest, value) if rest else value}


def _build(cls, values, where: str, prefix: str = ""):
    """Make a dataclass of a nested dict, checking every key and type on the way."""
    if not isinstance(values, dict):
        raise ValueError(f"{where}: {prefix.rstrip('.') or 'the recipe'} must hold names and values, it is {values!r}")
    hints = typing.get_type_hints(cls)
    for name in values:
        if name not in hints:
            raise ValueError(f"{where}: unknown key {prefix}{name}; valid keys here: {', '.join(sorted(hints))}")
    try:
        return cls(**{name: _coerce(hints[name], v, where, f"{prefix}{name}") for name, v in values.items()})
    except _InvalidError as error:
        raise ValueError(f"{where}: {prefix}{error}") from None


def _coerce(kind, value, where: str, key: str):
    if dataclasses.is_dataclass(kind):
        return _build(kind, value, where, key + ".")
    choices = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    if value is None and types.NoneType in choices:
        return None
    kind = next(choice for choice in choices if choice is not types.NoneType)
    container, inner = typing.get_origin(kind), typing.get_args(kind)
    if container is list and isinstance(value, list):
        return [_coerce(inner[0], item, where, key) for item in value]
    if container is dict and isinstance(value, dict):
        return {name: _coerce(inner[1], item, where, f"{key}.{name}") for name, item in value.items()}
    if kind is float and isinstance(value, int | str) and not isinstance(value, bool):
        value = _number(value)  # YAML reads 1e-4 as text
    if container is None and type(value) is kind:
        return value
    raise ValueError(f"{where}: {key} is {value!r}, it must be of type {kind if container else kind.__name__}")


def _number(value: int | str) -> float | str:
    try:
        return float(value)
    except ValueError:
        return value


class _InvalidError(ValueError):
    """A value out of bounds; _build adds where it stands."""


def _require(valid: bool, name: str, value, bounds: str):
    if not valid:
        raise _InvalidError(f"{name} is {value!r}, it must be {bounds}")
