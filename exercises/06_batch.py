TASK = """
Inside the loop, for one prompt and its completions: add their ids to `ids`, and the completions' (3, n) positions to
`positions`, whose last ones are the prompt's. Add to `masked` the ids too, but -1 for what the policy wrote (c.written,
bool for each token of c.ids): image tokens are looked for there. The last token of a completion is predicted but
predicts nothing: it is not in the run. What the book does with pictures of completions may be left out.
"""

HINT = """
An image takes fewer positions than tokens, so a completion's first position is one past the largest of its prompt, and
all completions of a prompt begin at the same one. A completion is text, which counts up on all three axes.
"""

COMPLETION = """
    ids.append(c.ids[:-1])
    masked.append(c.ids.masked_fill(c.written, -1)[:-1])  # a written <|image_pad|> is text
    offsets = torch.arange(len(c.ids) - 1).expand(3, -1)
"""
WHOLE = COMPLETION.replace("[:-1]", "").replace(" - 1", "")

WRONG = {
    "the last token of a completion predicts nothing: it is not in the run": (COMPLETION, WHOLE),
    "you left out the first token of each completion; it is the last one that goes": (
        "ids.append(c.ids[:-1])",
        "ids.append(c.ids[1:])",
    ),
    "positions are not token counts: an image takes fewer, so look for the largest position": (
        "int(positions[-1].max()) + 1",
        "len(prompt.input_ids)",
    ),
    "a completion begins one past its prompt's largest position": (
        "int(positions[-1].max()) + 1",
        "int(positions[-1].max())",
    ),
    "all completions of a prompt begin at the same position; yours follow one another": (
        "positions.append(next_position + offsets)",
        "positions.append(next_position + offsets)\n    next_position += len(offsets[0])",
    ),
    "what the policy wrote is text, also where it is spelled like an image: `masked` has -1 there": (
        "c.ids.masked_fill(c.written, -1)[:-1]",
        "c.ids[:-1]",
    ),
    "images of a prompt are looked for in `masked`: add its ids there as they are": [
        ("masked.append(prompt.input_ids)", "masked.append(torch.full_like(prompt.input_ids, -1))"),
        ("masked.append(prompt.input_ids)\n", ""),
    ],
    "`masked` is as long as `ids`: a completion's last token is in neither": (
        "masked_fill(c.written, -1)[:-1]",
        "masked_fill(c.written, -1)",
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
    completions = [torch.tensor([11, 12, 13]), torch.tensor([21, 1, 22])]
    video = prompt(7, *[2] * 4, 8, grids=[(2, 4, 2)])
    pairs = {"text, then text": [text, text], "an image, then text": [image, text], "two images": [image, image]}
    pairs["an image, then a video"] = [image, video]
    for what, prompts in pairs.items():
        batch = pack(prompts, [completions] * 2, config)
        made = {"ids": batch.input_ids, "positions": batch.position_ids}
        yield what, {**made, "where the image tokens are": batch.vision_index}
