"""All cells: every loss and option that both minivlmrl and TRL have."""

from tests.parity import policy_cells as policy
from tests.parity import preference_cells as preference
from tests.parity.compare import Cell, questions

CELLS = {  # section in families.yaml: function that creates a cell from an entry
    "policy": policy.grpo_cell, "together": policy.together_cell, "advantages": policy.advantages_cell,
    "rloo": policy.rloo_advantages_cell, "correction": policy.correction_cell, "overlong": policy.overlong_cell,
    "dpo": preference.dpo_cell, "kto": preference.kto_cell, "sft": preference.sft_cell,
    "reward": preference.reward_cell,
}  # fmt: skip


def families() -> dict[str, list[Cell]]:
    """Return the cells by family, in the same order as the table rows."""
    table: dict[str, list[Cell]] = {}
    for kind, cell in CELLS.items():
        for question in questions(kind):
            table.setdefault(question.family, []).append(cell(question))
    return table
