"""Check that a trainer's log-probabilities depend on the images of the same row."""

import torch
from torch import Tensor

from minivlmrl.errors import counted


def check_images(
    my_logps,
    input_ids: Tensor,
    pixel_values: Tensor,
    image_grid_thw: Tensor,
    image_token_id: int,
    tolerance: float = 1e-3,
) -> str:
    """Check that a trainer uses the right images, in the right order, for its log-probabilities.

    check_images inverts the pixels of one image after the other. An inverted image must change the log-probabilities of
    later tokens, and of no earlier token. A row must have the same log-probabilities in a batch as alone.

    Args:
        my_logps: function (input_ids (B, L), pixel_values (B * P, D), image_grid_thw (B * N, 3)) -> (B, T),
            log-probabilities for each row's last T tokens. With T = L - 1, the check also finds a wrong image order.
        input_ids: (L,), ids for one row with N images, as a Qwen processor returns them.
        pixel_values: (P, D), patches, one image after the other.
        image_grid_thw: (N, 3); use images of different sizes, so that a wrong order can be found.
        tolerance: rounding error in my_logps in nats; about 0.1 in bfloat16.

    Returns:
        A fault description with its size in nats; "" if all images are used correctly.

    Raises:
        ValueError: a tensor has another shape, or the row has no image, or not as many as image_grid_thw.
    """
    for name, x, dims, expected in (
        ("input_ids", input_ids, 1, "(L,), the token ids of one row"),
        ("image_grid_thw", image_grid_thw, 2, "(N, 3), a row for each image"),
        ("pixel_values", pixel_values, 2, "(P, D), a row for each patch"),
    ):
        if x.dim() != dims:
            raise ValueError(f"{name} is of shape {tuple(x.shape)}, but it must be a tensor of shape {expected}")
    # index of each image's first placeholder
    starts = 1 + ((input_ids == image_token_id).int().diff() == 1).nonzero()
    N = len(image_grid_thw)
    if not len(starts) == N > 0:
        raise ValueError(
            f"input_ids contain {counted(len(starts), 'image')}, but image_grid_thw has {N}; both must be "
            "equal and at least 1"
        )
    signs = 1 - 2 * torch.eye(N + 1, N).to(pixel_values)  # the last row keeps all images
    rows = pixel_values * signs.repeat_interleave(image_grid_thw.prod(1), 1)[:, :, None]
    alone = torch.cat([my_logps(input_ids[None], row, image_grid_thw) for row in rows])
    batch = my_logps(input_ids.repeat(N + 1, 1), rows.flatten(0, 1), image_grid_thw.repeat(N + 1, 1))
    changes = (alone[:-1] - alone[-1]).abs()  # (N, T), effect of negating each image
    for image in range(N):
        change = changes[image]
        largest_change = change.max()
        if not largest_change > tolerance:
            return f"image {image} has no effect: negating it changes log-probabilities by {largest_change:.1e} nats"
        early_change = change[: starts[image] + 1 - len(input_ids)].sum()
        if early_change > tolerance:
            return (
                f"images are used in a wrong order: negating image {image} "
                f"changes tokens before it by {early_change:.1e} nats"
            )
    difference = (batch - alone).abs().max()
    if difference > changes.amax(1).min() / 2:
        return f"rows use the images of other rows: a batch differs from its single rows by {difference:.1e} nats"
    return ""
