"""Options of a loss in one object, by TRL's names: the audit changes one at a time."""

from dataclasses import dataclass

from minivlmrl_audit.minivlmrl_api import TERMS, DPOLossOptions, GRPOLossOptions


@dataclass
class PolicyOptions(GRPOLossOptions):
    """All options of GRPO's family: of the loss, of its terms, and of the weights of tokens."""

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
    """DPOLossOptions, and what dpo_loss takes as an argument."""

    discopop_tau: float = 0.05


@dataclass
class SFTOptions:
    """What sft_loss takes."""

    loss_type: str = "nll"


OPTIONS = {"grpo": PolicyOptions, "dpo": DPOOptions, "sft": SFTOptions}  # of each kind of step


def options_of(kind: str, values: dict) -> dict:
    """Pick the options of a kind's loss out of named values."""
    return {name: values[name] for name in OPTIONS[kind].__dataclass_fields__ if name in values}


def arguments(options: PolicyOptions | DPOOptions) -> dict:
    """List the options that the loss, or the term of its loss_type, takes as arguments."""
    if isinstance(options, DPOOptions):
        return {"discopop_tau": options.discopop_tau}
    names = TERMS[options.loss_type].__kwdefaults__ or {}
    return {name: getattr(options, name) for name in names.keys() & vars(options).keys()}
