"""All cells: every loss and option of ours that TRL has too."""

from tests.parity import policy_cells as policy
from tests.parity import preference_cells as preference
from tests.parity.compare import Cell, questions

CELLS = {  # a section of families.yaml: what makes a cell of it
    "policy": policy.grpo_cell, "together": policy.together_cell, "advantages": policy.advantages_cell,
    "rloo": policy.rloo_advantages_cell, "correction": policy.correction_cell, "overlong": policy.overlong_cell,
    "dpo": preference.dpo_cell, "kto": preference.kto_cell, "sft": preference.sft_cell,
    "reward": preference.reward_cell,
}  # fmt: skip


def families() -> dict[str, list[Cell]]:
    """The cells by family, the rows of the table in order."""
    table: dict[str, list[Cell]] = {}
    for kind, cell in CELLS.items():
        for question in questions(kind):
            table.setdefault(question.family, []).append(cell(question))
    return table
