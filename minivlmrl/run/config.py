"""Every knob of a run, declared once. A recipe (YAML) sets some of them, --section.name=value on top of it others."""

import dataclasses
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path

import yaml

SPACES = ("original", "resized", "thousandths", "unit")  # as in data/boxes.py


@dataclass
class ModelSection:
    """Which weights to train: `path`, a Hugging Face folder, or `config`, a config.json to fill with random ones."""

    path: str | None = None
    config: str | None = None
    dtype: str = "float32"  # of the parameters
    activation_checkpointing: bool = False  # keep only the inputs of blocks and compute the rest again in the backward


@dataclass
class VideoSection:
    """Which frames of a video the model sees, and how large: see data/video.py. A row can ask for its own."""

    fps: float | None = None  # frames taken from a second; None: 2
    min_frames: int | None = None  # bounds of their number; None: 4 and 768
    max_frames: int | None = None
    min_pixels: int | None = None  # bounds of a frame's area; None: 128 and 768 tokens
    max_pixels: int | None = None
    total_pixels: int | None = None  # most of all frames together; None: 90 % of 128000 tokens


@dataclass
class DataSection:
    """Where rows come from: `task`, an embedded one, or `train_file` and `eval_file`, JSON lines of your own."""

    task: str | None = None  # "shapes" or "localisation"
    train_file: str | None = None  # rows with problem or prompt, image(s), and what the stages need: see sources.py
    eval_file: str | None = None  # rows with problem or prompt, image(s), and solution or chosen and rejected
    eval_rows: int = 256  # held-out rows that are evaluated, at most
    prompt_template: str = "{problem}"  # what the user message says; {problem} is the row's
    system_prompt: str | None = None  # None: Qwen's default
    min_pixels: int | None = None  # bounds of an image's area; None: as the model's folder says
    max_pixels: int | None = None
    resize: str | None = None  # how images are resized: "pil" or "torch", see data/image.py; None: as the folder says
    video: VideoSection = field(default_factory=VideoSection)
    allow_urls: bool = False  # fetch images and videos of rows that name an http(s) URL
    add_vision_id: bool = False  # number the images and videos of a prompt: "Picture 1: "
    box_space: str = "resized"  # what coordinates in answers mean: "original", "resized", "thousandths" or "unit"
    eval_rewards: list[str] = field(default_factory=lambda: ["accuracy", "format"])  # the first is what counts
    demonstrations: int = 96  # embedded tasks: rows for sft
    wrong_demonstrations: float = 0.5  # embedded tasks: share of them whose label or box is drawn at random
    pairs: int = 1024  # shapes: rows for dpo and reward_model
    jitter: int = 7  # localisation: pixels by which demonstrated coordinates may be off
    objects: list[int] = field(default_factory=lambda: [1, 1])  # localisation: fewest and most in a picture
    thinking: str = "name"  # localisation: what is thought, "name" the object or its "position"

    def __post_init__(self):
        _require(self.eval_rows >= 1, "eval_rows", self.eval_rows, "1 or more")
        _require(self.resize in (None, "pil", "torch"), "resize", self.resize, "'pil' or 'torch'")
        _require(self.demonstrations >= 1, "demonstrations", self.demonstrations, "1 or more")
        _require(self.pairs >= 1, "pairs", self.pairs, "1 or more")
        _require(self.box_space in SPACES, "box_space", self.box_space, f"one of {SPACES}")
        _require(len(self.eval_rewards) >= 2, "eval_rewards", self.eval_rewards, "names of rewards: what counts, form")
        judged = "reward_model" not in self.eval_rewards
        _require(judged, "eval_rewards", self.eval_rewards, "without reward_model, which judges training only")
        few, many = (*self.objects, 0, 0)[:2]
        _require(len(self.objects) == 2 and 1 <= few <= many <= 3, "objects", self.objects, "[fewest, most], 1 to 3")
        _require(self.jitter >= 0, "jitter", self.jitter, "0 or more")
        _require(self.thinking in ("name", "position"), "thinking", self.thinking, "'name' or 'position'")
        share = self.wrong_demonstrations
        _require(0 <= share <= 1, "wrong_demonstrations", share, "in [0, 1]")


# keys of a generation_config.json that change what is drawn and have no counterpart here, at their neutral values
NOT_HONOURED = {
    "num_beams": 1, "num_beam_groups": 1, "diversity_penalty": 0, "penalty_alpha": 0, "dola_layers": None,
    "top_h": None, "typical_p": 1, "epsilon_cutoff": 0, "eta_cutoff": 0, "encoder_repetition_penalty": 1,
    "no_repeat_ngram_size": 0, "encoder_no_repeat_ngram_size": 0, "bad_words_ids": None, "force_words_ids": None,
    "constraints": None, "min_length": 0, "max_time": None, "forced_bos_token_id": None, "forced_eos_token_id": None,
    "exponential_decay_length_penalty": None, "suppress_tokens": None, "begin_suppress_tokens": None,
    "sequence_bias": None, "guidance_scale": 1, "watermarking_config": None, "token_healing": False,
}  # fmt: skip


@dataclass
class SamplingConfig:
    """How completions are drawn and where they end. A folder's generation_config.json counts only when asked for."""

    temperature: float = 1.0  # divides the logits; 0 takes the likeliest token, whatever top_k, top_p and min_p are
    top_k: int = 0  # keep the k likeliest tokens (ties with the k-th stay); 0 keeps all
    top_p: float = 1.0  # keep the likeliest tokens that together reach this probability; 1 keeps all
    min_p: float = 0.0  # drop tokens less likely than this times the likeliest; 0 keeps all
    repetition_penalty: float = 1.0  # logits of tokens seen in prompt or completion: / if positive, x if negative
    max_new_tokens: int = 256  # a completion that has not stopped by then is cut
    max_length: int | None = None  # one that has so many together with its prompt is cut too
    min_new_tokens: int = 0  # no stop token is drawn before so many (a stop string may be)
    stop_token_ids: list[int] | None = None  # each ends a completion; by default <|im_end|>, <|endoftext|>
    stop_strings: list[str] = field(default_factory=list)  # the token that completes one ends the completion

    def __post_init__(self):
        _require(self.temperature >= 0, "temperature", self.temperature, "0 or more")
        _require(self.top_k >= 0, "top_k", self.top_k, "0 or more")
        _require(0 < self.top_p <= 1, "top_p", self.top_p, "in (0, 1]")
        _require(0 <= self.min_p <= 1, "min_p", self.min_p, "in [0, 1]")
        _require(self.repetition_penalty > 0, "repetition_penalty", self.repetition_penalty, "over 0")
        _require(self.max_new_tokens >= 1, "max_new_tokens", self.max_new_tokens, "1 or more")
        _require(self.max_length is None or self.max_length >= 2, "max_length", self.max_length, "2 or more")
        few, most = self.min_new_tokens, self.max_new_tokens
        _require(0 <= few <= most, "min_new_tokens", few, f"from 0 to max_new_tokens ({most})")
        ids = self.stop_token_ids
        _require(ids is None or min(ids, default=0) >= 0, "stop_token_ids", ids, "token ids")
        _require(all(self.stop_strings), "stop_strings", self.stop_strings, "without an empty text")

    @classmethod
    def from_generation_config(cls, values: dict, **overrides) -> "SamplingConfig":
        """Draw what transformers' generate draws by a generation_config.json.

        Without do_sample that is the likeliest token, whatever else the file says; with do_sample and without top_k it
        is one of the 50 likeliest. Only a length that it leaves open stays ours: transformers would stop at 20 tokens.

        Args:
            values: the file; null counts as missing. Qwen2.5-VL's samples with temperature 1e-6 and repetition_penalty
                1.05. What does not change the draw (use_cache, pad_token_id ...) is passed over.
            overrides: fields of this class, which win; a temperature over 0 asks for sampling.
        Raises:
            ValueError: a key that changes the draw and has no counterpart here, or a value out of bounds (named).
        Source: GenerationConfig and generate of transformers 5.23.
        """
        values = {name: value for name, value in values.items() if value is not None}
        for name in values.keys() & NOT_HONOURED:
            if values[name] != NOT_HONOURED[name]:
                raise ValueError(
                    f"generation_config: {name} = {values[name]!r} changes what is drawn and is not supported; "
                    "do without the generation_config and set what you need of it yourself"
                )
        kept = ["repetition_penalty", "max_new_tokens", "min_new_tokens", "stop_strings"]
        asked = {"temperature": 0.0}
        if overrides.get("temperature", values.get("do_sample")):
            asked = {"temperature": 1.0, "top_k": 50}
            kept += ["temperature", "top_k", "top_p", "min_p"]
        if "max_length" in values and "max_new_tokens" not in values | overrides:  # which of both transformers heeds
            asked["max_new_tokens"] = values["max_length"]
            kept += ["max_length"]
        if "eos_token_id" in values:
            stop = values["eos_token_id"]
            asked["stop_token_ids"] = stop if isinstance(stop, list) else [stop]
        asked |= {name: values[name] for name in kept if name in values}
        return _build(cls, asked | overrides, "generation_config")


@dataclass
class RolloutSection:
    gather_weights: bool = True  # sharded: weights are whole on every rank during a rollout; False: layer by layer


@dataclass
class ShardingSection:
    """Weights, gradients and optimizer state cut into one part a rank (FSDP2). Off: each rank has them all."""

    enabled: bool = False
    compute_dtype: str | None = None  # of gathered weights and activations; None: model.dtype, which the optimizer has
    replicas: int = 1  # groups of ranks that hold a whole model each; one a node keeps gathering within nodes
    cpu_offload: bool = False  # parts, gradients and optimizer state lie in host memory

    def __post_init__(self):
        _require(self.replicas >= 1, "replicas", self.replicas, "1 or more")
        for name in ("compute_dtype", "replicas", "cpu_offload"):
            value, left_out = getattr(self, name), getattr(type(self), name)
            _require(self.enabled or value == left_out, name, value, f"{left_out!r} unless sharding is enabled")


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
    freeze_vision_tower: bool = False  # merger included; the rest is trained
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
    loss_type: str = "nll"  # or "dft", see losses/sft.py


@dataclass
class ReferenceConfig(StageConfig):
    """Of stages that hold the policy near a reference: the policy as the stage found it."""

    sync_ref_model: bool = False  # move the reference towards the policy on the way
    ref_model_mixup_alpha: float = 0.6  # reference = (1 - alpha) * reference + alpha * policy ...
    ref_model_sync_steps: int = 512  # ... every so many optimizer steps
    num_shared_layers: int = (
        0  # vision tower, embeddings and so many layers: frozen, one copy for both (not if sharded); 0: none
    )

    def __post_init__(self):
        super().__post_init__()
        alpha, steps = self.ref_model_mixup_alpha, self.ref_model_sync_steps
        _require(0 <= alpha <= 1, "ref_model_mixup_alpha", alpha, "in [0, 1]")
        _require(steps >= 1, "ref_model_sync_steps", steps, "1 or more")
        _require(self.num_shared_layers >= 0, "num_shared_layers", self.num_shared_layers, "0 or more")


@dataclass
class DPOConfig(ReferenceConfig):
    """See losses/preference.py for what the loss options mean."""

    loss_type: list[str] = field(default_factory=lambda: ["sigmoid"])  # MPO: [sigmoid, bco_pair, sft] ...
    loss_weights: list[float] | None = None  # ... with weights [0.8, 0.2, 1.0]; None: 1 each
    beta: float = 0.1
    label_smoothing: float = 0.0
    smooth_sigmoid: bool = False
    f_divergence_type: str = "reverse_kl"
    f_alpha_divergence_coef: float = 0.5
    ld_alpha: float | None = None
    use_weighting: bool = False  # WPO
    reference_free: bool = False
    discopop_tau: float = 0.05
    precompute_ref_log_probs: bool = False  # score all rows before the first step; then no reference is kept in memory

    def __post_init__(self):
        super().__post_init__()
        _require(self.beta > 0, "beta", self.beta, "over 0")
        _require(self.ld_alpha is None or 0 <= self.ld_alpha <= 1, "ld_alpha", self.ld_alpha, "in [0, 1]")
        _require(self.discopop_tau > 0, "discopop_tau", self.discopop_tau, "over 0")


@dataclass
class RewardModelConfig(StageConfig):
    path: str | None = None  # what rewards.reward_model asks: a folder of this stage's; None: the one trained here
    center_rewards_coefficient: float | None = None  # weight of (chosen + rejected)^2


@dataclass
class GRPOConfig(ReferenceConfig):
    """See losses/policy.py for what the loss options mean."""

    num_generations: int = 8  # completions for each prompt: the group
    steps_per_generation: int = 1  # a rollout has the prompts of so many optimizer steps, made one after the other
    num_iterations: int = 1  # times each rollout is gone through
    loss_type: str = "dapo"
    importance_sampling_level: str = "token"  # "sequence" is GSPO, "sequence_token" GSPO-token
    epsilon_low: float = 0.2
    epsilon_high: float = 0.2  # cispo: the bound itself, its paper takes 5
    delta: float | None = None  # upper bound of the unclipped ratio
    beta: float = 0.0  # weight of the KL to the reference; 0: there is no reference model
    kl_estimator: str = "k3"
    kl_straight_through: bool = False
    use_bias_correction_kl: bool = True
    top_entropy_quantile: float = 1.0
    entropy_coef: float = 0.0
    off_policy_mask_threshold: float | None = None
    rollout_correction: str | None = None  # a mode of rollout_importance_ratio
    rollout_correction_max: float | None = 3.0
    rollout_correction_min: float | None = None
    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0
    mask_truncated_completions: bool = False  # completions that were cut at max_new_tokens teach nothing
    soft_punish_cache: int = 0  # overlong shaping: rewards fall over the last so many tokens before max_new_tokens
    max_num_gen_batches: int = 1  # over 1: groups whose rewards are all equal are sampled anew, at most so often
    scale_rewards: str = "group"  # advantages divided by the standard deviation of the "group", "batch" or "none"
    multi_objective_aggregation: str = "sum_then_normalize"  # or "normalize_then_sum" (GDPO)
    normalize_advantages: bool = False  # rloo: over the batch
    reward_clip_range: list[float] | None = None  # rloo: [low, high], before the KL
    shuffle_rewards: bool = False  # a control: rewards permuted over the batch carry no information, so none is learnt

    def __post_init__(self):
        super().__post_init__()
        scales, ways = ("group", "batch", "none"), ("sum_then_normalize", "normalize_then_sum")
        _require(self.scale_rewards in scales, "scale_rewards", self.scale_rewards, f"one of {scales}")
        way = self.multi_objective_aggregation
        _require(way in ways, "multi_objective_aggregation", way, f"one of {ways}")
        for name in ("num_iterations", "steps_per_generation", "max_num_gen_batches"):
            _require(getattr(self, name) >= 1, name, getattr(self, name), "1 or more")
        for name in ("beta", "soft_punish_cache", "epsilon_low"):
            _require(getattr(self, name) >= 0, name, getattr(self, name), "0 or more")
        _require(
            self.epsilon_high >= self.epsilon_low, "epsilon_high", self.epsilon_high,
            f"at least epsilon_low ({self.epsilon_low})",
        )  # fmt: skip
        quantile, clip = self.top_entropy_quantile, self.reward_clip_range
        _require(0 < quantile <= 1, "top_entropy_quantile", quantile, "in (0, 1]")
        _require(clip is None or (len(clip) == 2 and clip[0] < clip[1]), "reward_clip_range", clip, "[low, high]")
        _require(
            self.num_generations >= 2, "num_generations", self.num_generations,
            "2 or more: the advantage of a completion is measured against the others of its group",
        )  # fmt: skip


@dataclass
class PPOConfig(ReferenceConfig):
    num_generations: int = 1  # completions for each prompt
    num_mini_batches: int = 1  # a rollout has the prompts of so many optimizer steps, made one after the other
    num_ppo_epochs: int = 4  # times each rollout is gone through
    critic: str = "shared"  # a value head on the policy's own backbone; or "separate": a model of its own
    critic_path: str | None = None  # separate: begin with this trained critic or reward model; None: with the policy
    cliprange: float = 0.2
    cliprange_value: float = 0.2
    vf_coef: float = 0.1
    kl_coef: float = 0.05  # weight of the KL to the reference in each token's reward; 0: there is no reference model
    kl_estimator: str = "k1"  # or "k3"
    gamma: float = 1.0
    lam: float = 0.95
    whiten_rewards: bool = False
    missing_eos_penalty: float | None = None  # taken from the score of a completion that was cut

    def __post_init__(self):
        super().__post_init__()
        for name in ("num_generations", "num_mini_batches", "num_ppo_epochs"):
            _require(getattr(self, name) >= 1, name, getattr(self, name), "1 or more")
        _require(self.critic in ("shared", "separate"), "critic", self.critic, "'shared' or 'separate'")
        _require(
            self.critic_path is None or self.critic == "separate", "critic_path", self.critic_path,
            "left out unless critic is 'separate'",
        )  # fmt: skip
        _require(self.kl_estimator in ("k1", "k3"), "kl_estimator", self.kl_estimator, "'k1' or 'k3'")
        for name in ("kl_coef", "vf_coef", "cliprange", "cliprange_value"):
            _require(getattr(self, name) >= 0, name, getattr(self, name), "0 or more")
        for name in ("gamma", "lam"):
            _require(0 <= getattr(self, name) <= 1, name, getattr(self, name), "in [0, 1]")


@dataclass
class RunConfig:
    """A whole run."""

    seed: int = 0
    output_dir: str = "runs/default"
    stages: list[str] = field(default_factory=lambda: ["grpo"])  # algorithms, one after the other
    num_threads: int | None = None  # CPU threads of this process; None: cores of the machine / its ranks
    state_steps: int = 0  # save the state every so many optimizer steps and after each stage; 0: only when signalled
    keep_states: int = 2  # the newest so many states; one more than 1, for the case that the newest is damaged
    resume: str | None = None  # "auto": from the newest state in output_dir, if any; "never"; or the folder of a state
    timeout: float = 600.0  # seconds that a rank waits for another before the run ends with an error
    model: ModelSection = field(default_factory=ModelSection)
    data: DataSection = field(default_factory=DataSection)
    sharding: ShardingSection = field(default_factory=ShardingSection)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    rollout: RolloutSection = field(default_factory=RolloutSection)
    rewards: dict[str, float] = field(default_factory=lambda: {"format": 0.5, "accuracy": 1.0})  # name -> weight
    sft: SFTConfig = field(default_factory=SFTConfig)
    dpo: DPOConfig = field(default_factory=DPOConfig)
    reward_model: RewardModelConfig = field(default_factory=RewardModelConfig)
    grpo: GRPOConfig = field(default_factory=GRPOConfig)
    ppo: PPOConfig = field(default_factory=PPOConfig)

    def __post_init__(self):
        _require(self.state_steps >= 0, "state_steps", self.state_steps, "0 or more")
        _require(self.keep_states >= 1, "keep_states", self.keep_states, "1 or more")
        _require(self.timeout > 0, "timeout", self.timeout, "over 0")


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
    files = ((config.data, "train_file"), (config.data, "eval_file"), (config.ppo, "critic_path"))
    for section, name in ((config.model, "path"), (config.reward_model, "path"), *files):
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
    if container is list and inner[0] is str and isinstance(value, str):
        value = [value]  # --dpo.loss_type=ipo
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
