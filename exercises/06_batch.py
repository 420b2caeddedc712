TASK = """
Inside the loop, for one prompt and its completions: add the ids of the run to `ids`, the (3, n) positions of the
prompt, position_ids, and of its completions to `positions`, to `vision_index` where in the run the prompt's
image tokens are, and move `start` to where the next prompt begins. The last token of a completion is predicted but
predicts nothing: it is not in the run.
"""

HINT = """
An image takes fewer positions than tokens, so a completion's first position is one past the largest of its prompt, and
all completions of a prompt begin at the same one. torch.isin finds the placeholders of images and videos.
"""

WRONG = {
    "the last token of a completion predicts nothing: it is not in the run": ("completion[:-1]", "completion"),
    "you left out the first token of each completion; it is the last one that goes": (
        "completion[:-1]",
        "completion[1:]",
    ),
    "positions are not token counts: an image takes fewer, so look for the largest position": (
        "int(position_ids.max()) + 1",
        "len(prompt.input_ids)",
    ),
    "a completion begins one past its prompt's largest position": (
        "int(position_ids.max()) + 1",
        "int(position_ids.max())",
    ),
    "all completions of a prompt begin at the same position; yours follow one another": (
        "for c in group for i in range(len(c) - 1)]",
        "for i in range(sum(len(c) - 1 for c in group))]",
    ),
    "videos are forgotten: their placeholder is another one than that of images": (
        "torch.isin(prompt.input_ids, placeholders)",
        "(prompt.input_ids == config.image_token_id)",
    ),
    "image tokens are numbered in the run, not in their prompt: start is missing": (
        "nonzero()[:, 0] + start)",
        "nonzero()[:, 0])",
    ),
    "the next prompt begins after this one's completions, too": (
        "len(prompt.input_ids) + len(following)",
        "len(prompt.input_ids)",
    ),
    "a completion of n tokens takes n - 1 in the run": (
        "len(prompt.input_ids) + len(following)",
        "len(prompt.input_ids) + sum(len(completion) for completion in group)",
    ),
}


def tries(pack):
    from types import SimpleNamespace

    import torch

    from minivlmrl.rows import Prompt

    vision = SimpleNamespace(spatial_merge_size=2, tokens_per_second=2)
    config = SimpleNamespace(image_token_id=1, video_token_id=2, vision_config=vision)

    def prompt(*ids, grids):
        patches = sum(t * h * w for t, h, w in grids)
        grids = torch.tensor(grids, dtype=torch.long).view(-1, 3)
        return Prompt(torch.tensor(ids), torch.zeros(patches, 1176), grids)

    image, text = prompt(7, *[1] * 6, 8, grids=[(1, 4, 6)]), prompt(7, 8, 9, grids=[])
    completions = [torch.tensor([11, 12, 13]), torch.tensor([21, 22])]
    video = prompt(7, *[2] * 4, 8, grids=[(2, 4, 2)])
    pairs = {"text, then text": [text, text], "an image, then text": [image, text], "two images": [image, image]}
    pairs["an image, then a video"] = [image, video]
    for what, prompts in pairs.items():
        batch = pack(prompts, [completions] * 2, config)
        made = {"ids": batch.input_ids, "positions": batch.position_ids}
        yield what, {**made, "where the image tokens are": batch.vision_index}
