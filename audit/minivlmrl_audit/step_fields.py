"""Types and bounds of the fields of step.json; docs/audit.md explains their meaning."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from minivlmrl_audit.minivlmrl_api import Count, Dtype, Finite, Reader, check_field, error_context
from minivlmrl_audit.options import OPTIONS


@dataclass
class OptimizerFields:
    """Fields of `optimizer`."""

    name: str = ""
    learning_rate: Finite = 0.0
    betas: tuple[Finite, Finite] = (0.9, 0.999)
    eps: Finite = 1e-8
    weight_decay: Finite = 0.0
    max_grad_norm: Finite | None = None
    step: Count = 1
    no_decay: list[str] = field(default_factory=list)


@dataclass
class ScheduleFields:
    """Fields of `schedule`."""

    type: str = ""
    learning_rate: Finite = 0.0
    warmup_steps: Annotated[int, ">= 0"] = 0
    max_steps: Annotated[int, ">= 0"] = 0
    step: Annotated[int, ">= 0"] = 0
    rates: list[Finite] = field(default_factory=list)


@dataclass
class StepFields:
    """All fields that the audit reads; every field may be missing, and only some may be null."""

    loss: dict = field(default_factory=dict)
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
    rollout_tokens: Annotated[float, "[0, inf)"] | None = None
    steps_per_rollout: Annotated[float, "(0, inf)"] = 1.0
    world_size: Count = 1
    step_rows: Annotated[float, "(0, inf)"] = 1.0
    mean_over: Literal["step", "micro_batch"] | None = None
    optimizer: OptimizerFields = field(default_factory=OptimizerFields)
    schedule: ScheduleFields = field(default_factory=ScheduleFields)
    model: str | None = None
    old_model: str | None = None
    ref_model: str | None = None
    dtype: Dtype = "float64"
    autocast: Literal["bfloat16", "float16"] | None = None
    some: bool = False
    training: list[str] = field(default_factory=list)


def check_fields(about: dict):
    """Check the types and bounds of all fields of a step, and the names of its loss options.

    Unknown fields are ignored, because a trainer may note more in step.json.

    Raises ValueError with the field, its value and the expected value.
    """
    with error_context("step.json"):
        reader = Reader(json=True)
        reader.read_section(StepFields, about, "")
        options = OPTIONS[about["kind"]]
        names = options.__dataclass_fields__
        loss = about.get("loss", {})
        for name in loss:
            check_field(name in names, "a name in loss", name, f"one of {', '.join(names)}")
        reader.read_section(options, loss, "loss")
