"""All cells: every loss and option of ours that TRL has too."""

from minivlmrl.audit import policy_cells, preference_cells
from minivlmrl.audit.compare import Cell


def families() -> dict[str, list[Cell]]:
    """The cells by family, the rows of the table in order."""
    table: dict[str, list[Cell]] = {}
    for generator in (*policy_cells.ALL, *preference_cells.ALL):
        for cell in generator():
            table.setdefault(cell.family, []).append(cell)
    return table
