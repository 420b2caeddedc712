"""Result of checking a loss, with its printed form."""

from collections.abc import Sequence
from dataclasses import dataclass, field

SHOWN = 4  # number of differing cases to print


@dataclass
class Verdict:
    """Result of a comparison with TRL's losses, or of a check of laws.

    A difference from TRL is a "design" if public projects do the same on purpose, or if only the loss value differs,
    not the gradient. Other differences are "mistakes".
    """

    count: int  # compared test cases, or tested laws
    says: str  # first line to print
    differences: Sequence[str] = ()  # one line per differing case
    names: Sequence[str] = ()  # lines about causes of differences from TRL, such as "mistake: beta is 0.1"
    broken: dict[str, str] = field(default_factory=dict)  # {broken law: error message}
    notes: list[str] = field(default_factory=list)  # what was not tested, and properties that may be deliberate

    @property
    def kinds(self) -> list[str]:
        """List "mistake" or "design" for each cause found."""
        kinds = [line.partition(":")[0] for line in self.names]
        return [kind for kind in kinds if kind in ("mistake", "design")]

    @property
    def agrees(self) -> bool:
        return not (self.differences or self.broken or self.kinds)

    @property
    def passes(self) -> bool:
        """Return whether the loss has no mistake; designs are allowed."""
        return self.agrees or {*self.kinds} == {"design"}

    def __str__(self) -> str:
        lines = [self.says, *self.differences[:SHOWN]]
        if len(self.differences) > SHOWN:
            lines.append(f"... and {len(self.differences) - SHOWN} more")
        lines += self.names
        lines += [f"broken law: {says}" for says in self.broken.values()]
        lines += [f"note: {says}" for says in self.notes]
        return "\n".join(lines)
