"""File format of a recorded optimizer step: tensor names, and types and bounds of step.json fields.

docs/library.md explains the tensors.
"""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from minivlmrl.config.parsing import Reader
from minivlmrl.config.types import Count, Dtype, Finite
from minivlmrl.errors import error_context, require
from minivlmrl.losses.grpo import TERMS, check_bounds
from minivlmrl.losses.preference import Divergence, check_dpo_options

names = str.split
NEEDED = names("input_ids completion_mask per_token_logps")  # required tensors
# tensors (n, S) for n rows with S tokens, or (n, T) for only the last T tokens
BY_TOKEN = NEEDED + names(
    "attention_mask prompt_mask tool_mask old_per_token_logps ref_per_token_logps sampler_logps "
    "log_sum_sq_probs logps_gradient"
)
# tensors with n rows, (n, ...)
BY_ROW = BY_TOKEN + names(
    "advantages micro_batch row pair chosen importance_sampling_ratio rollout_step rollout_tokens"
)
MODELS = names("model old_model ref_model")  # step.json fields that name model folders
# step.json fields with the names of options in TRL's GRPOConfig
OPTIONS_OF_A_ROLLOUT = names(
    "num_generations scale_rewards reward_weights multi_objective_aggregation temperature max_completion_length "
    "mask_truncated_completions"
)
# sampling filters in TRL: {option: values that turn it off}
FILTERS = {"top_k": [None, 0, -1], "top_p": [None, 1], "min_p": [None, 0]}


@dataclass
class PolicyOptions:
    loss_type: str = "dapo"
    importance_sampling_level: str = "token"
    epsilon_low: Annotated[float, "[0, inf]"] = 0.2
    epsilon_high: Annotated[float, "[0, inf]"] = 0.2
    beta: Annotated[float, "[0, inf)"] = 0.0
    kl_estimator: str = "k3"
    use_bias_correction_kl: bool = True
    delta: float | None = None
    off_policy_mask_threshold: float | None = None
    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0

    def __post_init__(self):
        check_bounds(self.epsilon_low, self.epsilon_high, self.beta)


@dataclass
class DPOOptions:
    loss_type: list[str] = field(default_factory=lambda: ["sigmoid"])
    loss_weights: list[float] | None = None
    beta: Annotated[float, "(0, inf)"] = 0.1
    label_smoothing: float = 0.0
    f_divergence_type: Divergence = "reverse_kl"
    f_alpha_divergence_coef: float = 0.5
    ld_alpha: Annotated[float, "[0, 1]"] | None = None
    use_weighting: bool = False
    discopop_tau: float = 0.05

    def __post_init__(self):
        check_dpo_options(
            self.loss_type, self.loss_weights, self.label_smoothing, self.f_divergence_type, self.use_weighting
        )


@dataclass
class SFTOptions:
    loss_type: str = "nll"


OPTIONS = {"grpo": PolicyOptions, "dpo": DPOOptions, "sft": SFTOptions}


@dataclass
class OptimizerFields:
    name: str = ""  # optimizer name; only the weight update of "adamw" is checked
    learning_rate: Finite = 0.0
    betas: tuple[Finite, Finite] = (0.9, 0.999)
    eps: Finite = 1e-8
    weight_decay: Finite = 0.0
    max_grad_norm: Finite | None = None
    step: Count = 1  # optimizer step number, from 1
    no_decay: list[str] = field(default_factory=list)  # parameters without weight decay


@dataclass
class ScheduleFields:
    type: str = ""
    learning_rate: Finite = 0.0
    warmup_steps: Annotated[int, ">= 0"] = 0
    max_steps: Annotated[int, ">= 0"] = 0
    step: Annotated[int, ">= 0"] = 0  # scheduler step number, from 0
    rates: list[Finite] = field(default_factory=list)  # learning rates in earlier steps


@dataclass
class StepFields:
    """Fields of step.json; all are optional."""

    loss: dict = field(default_factory=dict)  # options of grpo_loss, dpo_loss or sft_loss
    num_generations: Count | None = None
    scale_rewards: Literal["group", "batch", "none"] | None = None
    reward_weights: list[Finite] | None = None
    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] | None = None
    temperature: Annotated[float, "(0, inf)"] = 1.0
    top_k: int | None = None
    top_p: Finite | None = None
    min_p: Finite | None = None
    max_completion_length: Count | None = None
    mask_truncated_completions: bool | None = None
    stop_token_ids: list[int] | None = None
    pad_token_id: int | None = None
    image_token_id: int | None = None
    # loss divisors that cannot be counted in this step
    rollout_tokens: Annotated[float, "[0, inf)"] | None = None
    steps_per_rollout: Annotated[float, "(0, inf)"] = 1.0
    world_size: Count = 1
    mean_over: Literal["step", "micro_batch"] | None = None
    optimizer: OptimizerFields = field(default_factory=OptimizerFields)
    schedule: ScheduleFields = field(default_factory=ScheduleFields)
    # model folders, relative to the step folder; {} in "../{}/model" = number of the step that sampled a row
    model: str | None = None
    old_model: str | None = None
    ref_model: str | None = None
    dtype: Dtype = "float64"
    autocast: Literal["bfloat16", "float16"] | None = None
    some: bool = False  # True if only some model parameters were recorded
    training: list[str] = field(default_factory=list)


def check_fields(about: dict):
    """Check types and bounds of step.json fields, and loss option names.

    Unknown fields are ignored: a trainer may add its own.
    """
    with error_context("step.json"):
        reader = Reader(json=True)
        reader.read_section(StepFields, about, "")
        options = OPTIONS[about["kind"]]
        names = options.__dataclass_fields__
        loss = about.get("loss", {})
        for name in loss:
            require(name in names, "a name in loss", name, f"one of {', '.join(names)}")
        reader.read_section(options, loss, "loss")


def options_of(kind: str, values: dict) -> dict:
    """Select the loss options for a step kind (grpo, dpo or sft)."""
    return {name: values[name] for name in OPTIONS[kind].__dataclass_fields__ if name in values}


def term_arguments(options: PolicyOptions) -> dict:
    """Return the loss options to pass as keyword arguments for this GRPO loss_type."""
    names = TERMS[options.loss_type].__kwdefaults__ or {}
    return {name: getattr(options, name) for name in names.keys() & vars(options).keys()}
