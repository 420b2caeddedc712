"""Published GRPO methods as options: `--method=gspo` sets these, and later options override them."""

from dataclasses import dataclass

from minivlmrl.config.types import Plain
from minivlmrl.errors import UserError, did_you_mean


@dataclass
class Method:
    """A published method, as options in the recipe section `grpo`."""

    title: str
    paper: str  # arXiv number
    options: dict[str, Plain]
    page: str | None = None  # file name in docs/papers/


METHODS = {
    # eq. 4: the KL has no ratio
    "grpo": Method("GRPO", "2402.03300", {"loss_type": "grpo", "use_bias_correction_kl": False}),
    "dr_grpo": Method("Dr. GRPO", "2503.20783", {"loss_type": "dr_grpo", "scale_rewards": "none"}, "dr_grpo"),
    "dapo": Method(
        "DAPO", "2503.14476", {"loss_type": "dapo", "epsilon_high": 0.28, "max_num_gen_batches": 3, "beta": 0.0}, "dapo"
    ),
    "gspo": Method(
        "GSPO",
        "2507.18071",
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_low": 3e-4, "epsilon_high": 4e-4}
        | {"steps_per_generation": 4},
        "gspo",
    ),
    # epsilon_high is from ScaleRL (arXiv 2510.13786), because MiniMax-M1, the source of CISPO, gives no value
    "cispo": Method(
        "CISPO", "2506.13585", {"loss_type": "cispo", "epsilon_high": 5.0, "steps_per_generation": 4}, "cispo"
    ),
    "sapo": Method("SAPO", "2511.20347", {"loss_type": "sapo"}),
    "vespo": Method("VESPO", "2602.10693", {"loss_type": "vespo"}),
    "luspo": Method("LUSPO", "2602.05261", {"loss_type": "luspo", "importance_sampling_level": "sequence"}),
    "rloo": Method("RLOO", "2402.14740", {"loss_type": "rloo"}, "rloo"),
}


def method_options(name: str) -> dict[str, Plain]:
    """Return method options: {"grpo.loss_type": "rloo"} for "rloo".

    Raises:
        UserError: unknown method.
    """
    if name not in METHODS:
        raise UserError(
            f"--method is {name!r}, but it must be one of {', '.join(METHODS)}{did_you_mean(name, METHODS)}"
        )
    return {f"grpo.{option}": value for option, value in METHODS[name].options.items()}
