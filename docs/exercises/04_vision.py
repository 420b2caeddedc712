TASK = """
In the loop, handle one image or video of t frames with rows x cols merged tokens. Find the window of each token;
windows have side x side tokens and begin at the top left. Sort the tokens by window. Append the raster index of each
token to `order`, in window order. Append the number of patches of each window to window_lengths, and of each frame to
frame_lengths. Then move `offset` past the tokens of this image.
"""

HINT = """
A stable argsort of the window numbers keeps the raster order inside a window. Windows at the right and bottom edges
are smaller, so count their tokens. How many windows are in a row if side does not divide cols? Lengths are in
patches, and a token has merge x merge patches. Every frame of a video has its own windows.
"""

WRONG = {
    "the last, narrower window of a row is missing; round cols / side up": ("math.ceil(cols / side)", "cols // side"),
    "your lengths count tokens; each token has merge x merge patches": ("bincount() * merge**2)", "bincount())"),
    "the windows are in the wrong order; go along the rows first, as in text": (
        "window_row * windows_a_row + window_col",
        "window_row + window_col * math.ceil(rows / side)",
    ),
    "your tokens are still in raster order; sort them by window": (
        "window.flatten().argsort(stable=True)",
        "torch.arange(rows * cols)",
    ),
    "you return the place of each token; return the token for each place": (
        "argsort(stable=True)",
        "argsort(stable=True).argsort(stable=True)",
    ),
    "offset is missing; the tokens of the second image must continue after those of the first": (
        "rows * cols + offset",
        "rows * cols + 0",
    ),
    "you count every window as full; windows at the edges are smaller": (
        "(window.flatten().bincount() * merge**2).tolist()",
        "[side**2 * merge**2] * int(window.max() + 1)",
    ),
    "the tokens of the second frame must continue after those of the first": (
        "torch.arange(t)[:, None] * rows * cols",
        "torch.zeros(t, 1, dtype=torch.long)",
    ),
    "frame_lengths must have one number for each frame": ("[h * w] * t", "[h * w]"),
    "your frame lengths count tokens; count patches, as for windows": ("[h * w] * t", "[rows * cols] * t"),
    "each frame of a video has its own windows; repeat their lengths t times": (
        "merge**2).tolist() * t",
        "merge**2).tolist()",
    ),
}


def named(answer):
    return dict(zip(("order", "window_lengths", "frame_lengths"), answer, strict=True))


def tries(window_order):
    from types import SimpleNamespace

    import torch

    config = SimpleNamespace(spatial_merge_size=2, window_size=112, patch_size=14)
    for grids in ([(1, 6, 10)], [(1, 10, 20)], [(2, 8, 12), (1, 4, 12)]):
        yield f"grids {grids}, windows of 4 x 4 tokens", named(window_order(torch.tensor(grids), config))
    config.window_size = None
    yield "no windows", named(window_order(torch.tensor([(1, 4, 4)]), config))
