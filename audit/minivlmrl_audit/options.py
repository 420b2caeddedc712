"""One dataclass of options for each loss, with TRL's names, so that the audit can change each option."""

from dataclasses import dataclass

from minivlmrl_audit.minivlmrl_api import TERMS, DPOLossOptions, GRPOLossOptions


@dataclass
class PolicyOptions(GRPOLossOptions):
    """All options of GRPO and its variants: options of the loss, its terms, and the token weights."""

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


@dataclass
class DPOOptions(DPOLossOptions):
    """DPOLossOptions, and the option that dpo_loss accepts as a separate argument."""

    discopop_tau: float = 0.05


@dataclass
class SFTOptions:
    """Options of sft_loss."""

    loss_type: str = "nll"


# class of the loss options for each kind of step
OPTIONS = {"grpo": PolicyOptions, "dpo": DPOOptions, "sft": SFTOptions}


def options_of(kind: str, values: dict) -> dict:
    """Select the loss options of a kind of step from a dict of named values."""
    return {name: values[name] for name in OPTIONS[kind].__dataclass_fields__ if name in values}


def arguments(options: PolicyOptions | DPOOptions) -> dict:
    """Return the options that dpo_loss, or the term of GRPO's loss_type, accepts as keyword arguments."""
    if isinstance(options, DPOOptions):
        return {"discopop_tau": options.discopop_tau}
    names = TERMS[options.loss_type].__kwdefaults__ or {}
    return {name: getattr(options, name) for name in names.keys() & vars(options).keys()}
