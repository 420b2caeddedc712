TASK = """
Lay out one prompt and its completions as a list `spans` with one Span each; model/packing.py defines the fields of
Span. The ids, position_ids and grids of the prompt already exist. A completion's ids are completion.ids, and its
position_ids have the shape (3, n). image_ids equal the ids, but are -1 for tokens that the policy wrote
(completion.policy_mask, bool for each token of completion.ids), because images are searched in image_ids. The last
token of a completion predicts nothing, so leave it out. You may ignore images inside completions.
"""

HINT = """
An image takes fewer positions than tokens, so the first position of a completion is one past the largest position of
its prompt. All completions of a prompt begin at this position. A completion is text, which counts up on all three
axes. The Span of the prompt is Span(ids, ids, position_ids, [prompt.pixel_values], [grids]).
"""

COMPLETION = """
        ids=completion.ids[:-1],
        # a written <|image_pad|> is text
        image_ids=completion.ids.masked_fill(completion.policy_mask, -1)[:-1],
        position_ids=next_position + torch.arange(len(completion.ids) - 1).expand(3, -1),
"""
WHOLE = COMPLETION.replace("[:-1]", "").replace(" - 1", "")

WRONG = {
    "you include the last token of a completion; it predicts nothing and is left out": (COMPLETION, WHOLE),
    "you left out the first token of each completion; leave out the last one": (
        " ids=completion.ids[:-1]",
        " ids=completion.ids[1:]",
    ),
    "positions are not token counts, because an image takes fewer positions; use the largest position": (
        "int(position_ids.max()) + 1",
        "len(ids)",
    ),
    "a completion must begin one past the largest position of its prompt": (
        "int(position_ids.max()) + 1",
        "int(position_ids.max())",
    ),
    "all completions of a prompt begin at the same position; yours begin one after the other": (
        "spans.append(span)",
        "spans.append(span)\n    next_position += len(span.ids)",
    ),
    "image_ids must be -1 for tokens that the policy wrote, because they are text even if they look like an image": (
        "completion.ids.masked_fill(completion.policy_mask, -1)[:-1]",
        "completion.ids[:-1]",
    ),
    "image_ids of a prompt must equal its ids, because images are searched there": [
        ("Span(ids, ids, position_ids", "Span(ids, torch.full_like(ids, -1), position_ids"),
        ("Span(ids, ids, position_ids", "Span(ids, ids[:0], position_ids"),
    ],
    "image_ids must be as long as the ids; the last token of a completion is in neither": (
        "masked_fill(completion.policy_mask, -1)[:-1]",
        "masked_fill(completion.policy_mask, -1)",
    ),
}


def tries(lay_group):
    from types import SimpleNamespace

    import torch

    from minivlmrl.data.rows import Completion, Prompt

    vision = SimpleNamespace(spatial_merge_size=2, tokens_per_second=2)
    config = SimpleNamespace(image_token_id=1, video_token_id=2, vision_config=vision)

    def prompt(*ids, grids):
        patches = sum(t * h * w for t, h, w in grids)
        grids = torch.tensor(grids, dtype=torch.long).view(-1, 3)
        return Prompt(torch.tensor(ids), torch.zeros(patches, 1176), grids)

    written = Completion(torch.tensor([11, 1, 13]))
    answered = Completion(torch.tensor([21, 1, 22]), policy_mask=torch.tensor([True, False, True]))
    group = [written, answered]
    prompts = {
        "text": prompt(7, 8, 9, grids=[]),
        "an image": prompt(7, *[1] * 6, 8, grids=[(1, 4, 6)]),
        "a video": prompt(7, *[2] * 4, 8, grids=[(2, 4, 2)]),
    }
    for what, asked in prompts.items():
        spans = lay_group(asked, group, config)
        image_ids = torch.cat([span.image_ids for span in spans])
        image_tokens = (image_ids == config.image_token_id) | (image_ids == config.video_token_id)
        answer = {
            "ids": torch.cat([span.ids for span in spans]),
            "positions": torch.cat([span.position_ids for span in spans], dim=1),
            "where the image tokens are": image_tokens.nonzero()[:, 0],
        }
        yield what, answer
