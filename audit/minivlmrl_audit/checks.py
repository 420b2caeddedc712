"""Assertions for tests of your own trainer. Tensors may be torch tensors or numpy arrays."""

import torch

from minivlmrl_audit.audit import checked, gaps, report


def assert_step(folder):
    """Assert that all stages of a dumped step agree with the audit's recomputation.

    ValueError: the folder holds no step, or nothing of the step could be compared.
    """
    findings, d = checked(folder)
    assert all(finding.ok for finding in findings), f"{folder}\n{report(findings, d)}"


def assert_split_invariant(
    gradients, rows: int, tolerance: float = 1e-6, sizes=None, parts_name: str = "micro-batches"
):
    """Assert that the gradient of a step does not depend on how its rows are split.

    Args:
        gradients: function from a list of lists of row indices to {name: tensor}. The function
            accumulates the gradients over these parts as your trainer does.
        rows: number of rows of the step, at least 2.
        tolerance: largest allowed difference, relative to the largest gradient of the whole step.
        sizes: numbers of parts to try; by default 2, rows - 1 and rows.
    """
    assert rows > 1, f"rows is {rows}: one row cannot be split, and nothing is compared"
    # rows - 1 parts are tried, because then one part is larger than all other parts
    sizes = sizes or (2, rows - 1, rows)
    whole_gradients = as_doubles(gradients(strided(rows, 1)))
    unit = max(gaps(x, 0.0, 1.0).max() for x in whole_gradients.values())
    assert unit > 0, "all gradients are zero: the step teaches nothing, and nothing is compared"
    for size in sizes:
        parts = strided(rows, size)
        split_gradients = as_doubles(gradients(parts))
        names = sorted(whole_gradients.keys() ^ split_gradients.keys())
        assert not names, f"{parts_name} {parts}: {names[0]} has a gradient in one of both alone"
        errors = {
            name: gaps(x, whole_gradients[name], unit).max() for name, x in split_gradients.items()
        }
        worst = max(errors, key=errors.get)
        assert errors[worst] <= tolerance, (
            f"{parts_name} {parts}: {worst} differs by {errors[worst]:.1e} of the largest"
        )


def strided(rows: int, parts: int) -> list[list[int]]:
    """Split row indices into `parts` lists: part i gets rows i, i + parts, i + 2 * parts, ..."""
    return [list(range(part, rows, parts)) for part in range(parts)]


def as_doubles(gradients) -> dict[str, torch.Tensor]:
    """Convert named tensors or arrays to float64 tensors."""
    return {name: torch.as_tensor(x).double() for name, x in gradients.items()}


def assert_rank_invariant(gradients, rows: int, ranks=(2, 4), tolerance: float = 1e-6):
    """Assert that the gradient summed over ranks equals the gradient of a single rank.

    See assert_split_invariant; here each list holds the row indices of one rank.
    """
    assert_split_invariant(gradients, rows, tolerance, ranks, "ranks")


def assert_same_logps(sampler, trainer, mask=1, tolerance: float = 1e-3):
    """Assert that log-probabilities (n, T) in nats agree within `tolerance` where mask is 1."""
    a = torch.as_tensor(sampler).double()
    b = torch.as_tensor(trainer).double()
    is_counted = torch.as_tensor(mask) > 0
    assert is_counted.any(), "the mask counts no token: nothing is compared"
    errors = gaps(a, b, 1.0).where(is_counted, 0.0)
    row, token = divmod(int(errors.argmax()), a.shape[1])
    assert errors.max() <= tolerance, (
        f"row {row}, token {token}: {a[row, token]:.4f} and {b[row, token]:.4f} nats"
    )
