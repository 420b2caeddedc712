"""Check a loss function against laws: properties of every correct loss, such as "padding changes nothing".

The checks need no reference implementation. Error messages show the smallest batch on which the loss fails.

    common_laws.py: all losses (NaN, masked tokens, padding, row order, micro-batches)
    policy_laws.py: policy losses (advantages, importance ratios, clipping, averages, KL)
    preference_laws.py: DPO losses (gradient signs, beta, label smoothing, averages) and SFT losses (average)
"""

from collections.abc import Callable
from dataclasses import dataclass

from minivlmrl.errors import UserError
from minivlmrl.extras.parity.calling import loss_forms
from minivlmrl.extras.parity.common_laws import COMMON_LAWS
from minivlmrl.extras.parity.examined import DEFAULTS, Examined, Finding
from minivlmrl.extras.parity.policy_laws import POLICY_LAWS, POLICY_NEEDS, use_its_own_numbers
from minivlmrl.extras.parity.preference_laws import DPO_LAWS, DPO_NEEDS, SFT_LAWS, recognize_ipo

LAWS = {"grpo": POLICY_LAWS, "dpo": DPO_LAWS, "sft": SFT_LAWS}
NEEDS = POLICY_NEEDS | DPO_NEEDS


@dataclass
class LawReport:
    """Findings of all tested laws."""

    findings: dict[str, list[Finding]]  # {tested property: violations and notes}

    def sentences(self, kind: str) -> list[str]:
        """List what findings of a kind say, such as "broken"."""
        return [finding.says for found in self.findings.values() for finding in found if finding.kind == kind]

    def laws_with(self, *kinds: str) -> list[str]:
        """List the names of laws with a finding of these kinds."""
        return [law for law, found in self.findings.items() if any(finding.kind in kinds for finding in found)]

    def broken_laws(self) -> list[str]:
        return self.laws_with("broken")

    @property
    def tested(self) -> int:
        return len(self.findings) - len(self.laws_with("not tested"))

    @property
    def passes(self) -> bool:
        return not self.broken_laws()

    def __str__(self) -> str:
        broken, ways = len(self.broken_laws()), len(self.sentences("broken"))
        head = f"the loss breaks {broken} of {self.tested} laws" if broken else f"the loss obeys all {self.tested} laws"
        if ways > broken:
            head += f", in {ways} ways"
        lines = [f"{kind}: {says}" for kind in ("broken", "note", "not tested") for says in self.sentences(kind)]
        return "\n".join([head, *lines])


def laws(my_loss: Callable, kind: str = "grpo", tolerance: float = 1e-6, framework: str = "torch", **options) -> int:
    """Check that a loss has the properties of every correct loss (laws); return how many were tested.

    Args:
        my_loss: loss function, see `check`.
        kind: grpo, dpo or sft.
        tolerance: maximum rounding error; float32 losses need 1e-5.
        framework: torch, jax or mlx, see `check`.
        options: loss options; loss_type="dapo", for example, also requires DAPO's average and clipping.

    Raises:
        AssertionError: the loss lacks required properties; the message lists each, with the smallest failing batch.
        ValueError: unknown `kind` or option, or a loss that is not a scalar tensor.
    """
    __tracebackhide__ = True
    report = examine(my_loss, kind, tolerance, framework, **options)
    if not report.passes:
        raise AssertionError(str(report))
    return report.tested


def examine(
    my_loss: Callable, kind: str = "grpo", tolerance: float = 1e-6, framework: str = "torch", **options
) -> LawReport:
    """Check a loss for the properties that `laws` tests; return a report instead of raising AssertionError."""
    if kind not in LAWS:
        raise UserError(f"kind is {kind!r}, but it must be one of {', '.join(LAWS)}")
    for name in options:
        if name not in DEFAULTS[kind]:
            known = ", ".join(DEFAULTS[kind])
            raise UserError(f"{name!r} is not an option of the kind {kind}; the options are {known}")
    loss = Examined(loss_forms(my_loss, framework)[0], kind, options, tolerance)
    if kind == "grpo":
        use_its_own_numbers(loss)
    if kind == "dpo":
        recognize_ipo(loss)
    report = LawReport({})
    for law in (*COMMON_LAWS, *LAWS[kind]):
        needs = {needed.__name__ for needed in NEEDS.get(law, ())}
        if needs & set(report.laws_with("broken", "not tested")):
            continue  # skip a test if a test that it requires failed or could not run
        report.findings[law.__name__] = list(law(loss))
    return report
