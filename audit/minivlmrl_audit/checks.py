"""Assertions for other people's tests of their trainer; tensors may be of torch or numpy."""

import torch

from minivlmrl_audit.audit import checked, report


def assert_step(folder):
    """Assert that the audit finds nothing in a step (ValueError: or nothing was compared)."""
    findings, d = checked(folder)
    assert all(finding.ok for finding in findings), f"{folder}\n{report(findings, d)}"


def assert_split_invariant(
    gradients, rows: int, tolerance: float = 1e-6, splits=None, what: str = "micro-batches"
):
    """Assert that the gradient of a step does not depend on how its rows are split.

    gradients: (list of lists of row indices) -> {name: tensor}, added up over these parts as your
    trainer does.
    """
    assert rows > 1, f"rows is {rows}: one row cannot be split, and nothing is compared"
    every = list(range(rows))
    if splits is None:
        splits = [every[::2], every[1::2]], [every[:1], every[1:]], [[row] for row in every]
    whole = {name: torch.as_tensor(x).double() for name, x in gradients([every]).items()}
    unit = max(x.abs().nan_to_num(torch.inf).max().item() for x in whole.values())
    assert unit > 0, "all gradients are zero: the step teaches nothing, and nothing is compared"
    for parts in splits:
        parted = {name: torch.as_tensor(x).double() for name, x in gradients(parts).items()}
        other = sorted(whole.keys() ^ parted.keys())
        assert not other, f"{what} {parts}: {other[0]} has a gradient in one of both alone"
        gaps = {name: (x - whole[name]).abs().max() / unit for name, x in parted.items()}
        apart = {name: gap.nan_to_num(torch.inf) for name, gap in gaps.items()}
        worst = max(apart, key=apart.get)
        says = f"{what} {parts}: {worst} differs by {apart[worst]:.1e} of the largest"
        assert apart[worst] <= tolerance, says


def assert_rank_invariant(gradients, rows: int, ranks=(2, 4), tolerance: float = 1e-6):
    """Assert that the summed gradient of ranks is that of one; a list of rows for each."""
    splits = [[list(range(rank, rows, size)) for rank in range(size)] for size in ranks]
    assert_split_invariant(gradients, rows, tolerance, splits, "ranks")


def assert_image_matters(logps, pixel_values, tolerance: float = 1e-3):
    """Assert that another picture changes logps(pixel_values), nats, and the same one does not."""
    pixels = torch.as_tensor(pixel_values)
    shown = pixels, pixels.clone(), pixels.flip(0) * -1
    same, again, other = (torch.as_tensor(logps(x)).double() for x in shown)
    says = "one picture, other log-probabilities: is dropout on?"
    assert (same - again).abs().max() <= tolerance / 100, says
    moved = (same - other).abs().max().item()
    says = f"another picture changes log-probabilities by {moved:.1e} nats only: is it ignored?"
    assert moved > tolerance, says


def assert_same_logps(sampler, trainer, mask=None, tolerance: float = 1e-3):
    """Assert that log-probabilities (n, T), nats, are equal where the mask is 1."""
    a = torch.as_tensor(sampler).double()
    b = torch.as_tensor(trainer).double()
    mask = torch.ones_like(a) if mask is None else torch.as_tensor(mask).double()
    assert mask.any(), "the mask counts no token: nothing is compared"
    gap = far(a - b, mask)
    row, token = divmod(int(gap.argmax()), a.shape[1])
    shifted = [far(a - b.roll(s, 1), mask)[:, 1:-1] for s in (1, -1)]
    shift = any(x.numel() and x.max() <= tolerance for x in shifted)
    says = f"row {row}, token {token}: {a[row, token]:.4f} and {b[row, token]:.4f} nats"
    assert gap.max() <= tolerance, says + "; they agree when shifted by one token" * shift


def far(gap, mask):
    """Return how large a gap is where the mask is 1, and 0 elsewhere; NaN is as far as can be."""
    return gap.abs().nan_to_num(torch.inf).where(mask > 0, 0.0)
