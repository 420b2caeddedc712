"""One dataclass of options for each loss, with TRL's names, so that the audit can change each option."""

from dataclasses import dataclass, field
from typing import Annotated

from minivlmrl_audit.minivlmrl_api import TERMS, Divergence, check_bounds, check_dpo_options


@dataclass
class PolicyOptions:
    """All options of GRPO and its variants: options of the loss, its terms, and the token weights."""

    loss_type: str = "dapo"
    importance_sampling_level: str = "token"
    epsilon_low: Annotated[float, "[0, inf]"] = 0.2
    epsilon_high: Annotated[float, "[0, inf]"] = 0.2
    beta: Annotated[float, "[0, inf)"] = 0.0
    kl_estimator: str = "k3"
    use_bias_correction_kl: bool = True
    top_entropy_quantile: float = 1.0
    entropy_coef: float = 0.0
    delta: float | None = None
    kl_straight_through: bool = False
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
    """Options of dpo_loss."""

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
    """Options of sft_loss."""

    loss_type: str = "nll"


# class of the loss options for each kind of step
OPTIONS = {"grpo": PolicyOptions, "dpo": DPOOptions, "sft": SFTOptions}


def options_of(kind: str, values: dict) -> dict:
    """Select the loss options of a kind of step from a dict of named values."""
    return {name: values[name] for name in OPTIONS[kind].__dataclass_fields__ if name in values}


def term_arguments(options: PolicyOptions) -> dict:
    """Return the options that the term of GRPO's loss_type accepts as keyword arguments."""
    names = TERMS[options.loss_type].__kwdefaults__ or {}
    return {name: getattr(options, name) for name in names.keys() & vars(options).keys()}
