"""Assertions for other people's tests of their trainer; tensors may be of torch or numpy."""

import torch

from minivlmrl_audit.audit import checked, gaps, report


def assert_step(folder):
    """Assert that the audit finds nothing in a step (ValueError: or nothing was compared)."""
    findings, d = checked(folder)
    assert all(finding.ok for finding in findings), f"{folder}\n{report(findings, d)}"


def assert_split_invariant(
    gradients, rows: int, tolerance: float = 1e-6, sizes=None, parts_name: str = "micro-batches"
):
    """Assert that the gradient of a step does not depend on how its rows are split.

    gradients: (list of lists of row indices) -> {name: tensor}, added up over these parts as your
    trainer does.
    """
    assert rows > 1, f"rows is {rows}: one row cannot be split, and nothing is compared"
    sizes = sizes or (2, rows - 1, rows)  # of rows - 1 parts one has more rows than the others
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
    """Deal rows out to so many parts, one by one."""
    return [list(range(part, rows, parts)) for part in range(parts)]


def as_doubles(gradients) -> dict[str, torch.Tensor]:
    """Make float64 of tensors or arrays by name."""
    return {name: torch.as_tensor(x).double() for name, x in gradients.items()}


def assert_rank_invariant(gradients, rows: int, ranks=(2, 4), tolerance: float = 1e-6):
    """Assert that the summed gradient of ranks is that of one; a list of rows for each."""
    assert_split_invariant(gradients, rows, tolerance, ranks, "ranks")


def assert_same_logps(sampler, trainer, mask=1, tolerance: float = 1e-3):
    """Assert that log-probabilities (n, T), nats, are equal where the mask is 1."""
    a = torch.as_tensor(sampler).double()
    b = torch.as_tensor(trainer).double()
    is_counted = torch.as_tensor(mask) > 0
    assert is_counted.any(), "the mask counts no token: nothing is compared"
    errors = gaps(a, b, 1.0).where(is_counted, 0.0)
    row, token = divmod(int(errors.argmax()), a.shape[1])
    assert errors.max() <= tolerance, (
        f"row {row}, token {token}: {a[row, token]:.4f} and {b[row, token]:.4f} nats"
    )
