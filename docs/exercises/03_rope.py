TASK = """
Each token gets a position on three axes: time, height and width. In the loop, handle one image or video: append the
(3, n) positions of the text before it to `pieces`, and then the positions of its own tokens. Set `position` to the
position of the next token, and `done` to the number of tokens that have positions. For text, all three axes count up
together. _grid_positions returns the positions of a grid that begins at 0.
"""

HINT = """
The docstring has an example: after an image of 2 x 3 tokens that begins at position 2, text resumes at 5, not at 8.
image_grid_thw has the grid of patches, but the decoder gets one token for merge x merge patches. The image itself
begins where the text before it ended.
"""

WRONG = {
    "you count the tokens of an image one by one, like text; that is not M-RoPE": (
        "grid = _grid_positions(t, h // merge, w // merge, seconds, config.vision_config)",
        "grid = torch.arange(length).expand(3, -1)",
    ),
    "your text resumes after as many positions as the image has tokens; it must resume one past the largest position": (
        "position += int(grid.max()) + 1",
        "position += length",
    ),
    "your text resumes at the largest position of the image; it must resume one past it": (
        "position += int(grid.max()) + 1",
        "position += int(grid.max())",
    ),
    "you gave a position to each patch; merge x merge patches form one token": (
        "h // merge, w // merge, seconds",
        "h, w, seconds",
    ),
    "rows and columns are swapped; the height comes first": ("h // merge, w // merge,", "w // merge, h // merge,"),
    "your image begins at position 0; it must begin where the text before it ended": (
        "pieces.append(grid + position)",
        "pieces.append(grid)",
    ),
    "your positions leave out the text before an image, which needs positions, too": (
        "position += begin - done",
        "position += 0",
    ),
    "the time positions of a video are seconds times tokens_per_second; you counted its frames": (
        "pieces.append(grid + position)",
        "grid[0] = torch.arange(t).repeat_interleave(length // t)\npieces.append(grid + position)",
    ),
    "each image or video has its own seconds; use its index": ("second_per_grid_ts[index]", "second_per_grid_ts[0]"),
    "the distance between the time positions of a video must depend on its seconds": (
        "1.0 if second_per_grid_ts is None else second_per_grid_ts[index].item()",
        "1.0",
    ),
}


def tries(get_rope_index):
    from types import SimpleNamespace

    import torch

    vision = SimpleNamespace(spatial_merge_size=2, tokens_per_second=2)
    config = SimpleNamespace(image_token_id=1, video_token_id=2, vision_config=vision)
    prompts = {
        "text alone": ([0] * 4, [], None),
        "2 of text, an image of 2 x 3 tokens, 1 of text": ([0, 0, *[1] * 6, 0], [(1, 4, 6)], None),
        "two images": ([0, *[1] * 6, 0, *[1] * 3, 0, 0], [(1, 6, 4), (1, 2, 6)], None),
        "a video of 3 steps of 0.75 s": ([0, *[2] * 12, 0, 0], [(3, 4, 4)], torch.tensor([0.75])),
        "an image, then a video": ([*[1] * 2, 0, *[2] * 4, 0], [(1, 2, 4), (2, 2, 4)], torch.tensor([0.0, 1.5])),
    }
    for what, (ids, grids, seconds) in prompts.items():
        grids = torch.tensor(grids, dtype=torch.long).view(-1, 3)
        yield what, get_rope_index(torch.tensor(ids), grids, config, seconds)
