"""Check which log-probs in a forward pass depend on which tokens and images."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import pad

from minivlmrl.errors import UserError, pluralize

Place = tuple[int, int]  # row and token index


@dataclass
class Faults:
    """Faults in a forward pass, and where they were found."""

    places: dict[str, list[str]] = field(default_factory=dict)

    def add(self, says: str, where: str):
        self.places.setdefault(says, []).append(where)

    def sentences(self) -> list[str]:
        return [f"{says} ({pluralize(len(where), 'time')}; first: {where[0]})" for says, where in self.places.items()]


def depends(
    logps: Callable[..., Tensor],
    ids: Tensor,
    document: Tensor,
    pixel_values: Tensor | None = None,
    image_grid_thw: Tensor | None = None,
    image_token_id: int | None = None,
    vocabulary: int = 0,
    tolerance: float = 1e-9,
    only_images: bool = False,
) -> list[str]:
    """Change one token or image at a time, and report log-probs that change but should not.

    A token may change only its own and later log-probs in its document, and must change the next one. An image may
    change only later log-probs in its document, and must change at least one. The probabilities of all values for a
    token must add up to 1. `depends` therefore finds leaks between packed documents, rows, and the answers in a pair,
    masks that show later tokens or padding, unshifted labels, and unused or exchanged images.

    The check needs a forward pass per token and per vocabulary entry, so use a tiny model. With only_images=True, a
    pass per image is enough, and the model may have any size.

    Args:
        logps: function (ids) -> (B, K), log-probabilities of the last K tokens per row, in nats, as your trainer
            computes them; with images, (ids, pixel_values, image_grid_thw) -> (B, K). K = T - 1 checks all tokens.
        ids: (B, T), token ids.
        document: (B, T), document number per token, 0 for padding. A document is a prompt with its answer, or one of
            several texts in a packed row.
        pixel_values: (P, D), patches of all images, one image after the other.
        image_grid_thw: (N, 3), grid per image.
        image_token_id: placeholder id of images; placeholders are not changed.
        vocabulary: number of token ids, 0 = largest id + 1.
        tolerance: maximum rounding error, in nats; 1e-9 for float64, about 1e-4 for float32.
        only_images: change only images.

    Returns:
        A sentence per fault, with its first position; empty if there are none.

    Raises:
        ValueError: ids, document, log-probs or images have inconsistent shapes.
    """
    if ids.dim() != 2 or ids.shape != document.shape:
        raise UserError(
            f"ids have the shape {tuple(ids.shape)} and document {tuple(document.shape)}; both must be (B, T)"
        )
    pictures = () if pixel_values is None else (pixel_values, image_grid_thw)
    forward = Forward(logps, ids, pictures, tolerance)
    values = [value for value in range(vocabulary or int(ids.max()) + 1) if value != image_token_id]
    is_picture = ids == (-1 if image_token_id is None else image_token_id)
    images = placeholders(is_picture)
    if len(images) != (0 if image_grid_thw is None else len(image_grid_thw)) or (only_images and not images):
        grids = "has no rows" if image_grid_thw is None else f"has {pluralize(len(image_grid_thw), 'row')}"
        raise UserError(f"ids have placeholders for {pluralize(len(images), 'image')}, but image_grid_thw {grids}")
    faults = Faults()
    for row, token in forward.not_finite():
        if is_scored(document, row, token):
            faults.add("a log-probability is not finite", f"token {token} of row {row}")
    if faults.places:
        return faults.sentences()
    for image, place in enumerate(images):
        judge_image(forward, faults, document, image, place)
    if only_images:
        return faults.sentences()
    for row, token in (~is_picture).nonzero().tolist():
        judge_token(forward, faults, document, (row, token), values)
    judge_probabilities(forward, faults, document, is_picture, values)
    return faults.sentences()


class Forward:
    """A trainer's forward pass, to call again with changed token ids and images."""

    def __init__(self, logps: Callable[..., Tensor], ids: Tensor, pictures: tuple, tolerance: float):
        self.logps = logps
        self.ids = ids
        self.pictures = pictures
        self.tolerance = tolerance
        self.usual = self(ids, *pictures)
        B, T = ids.shape
        if self.usual.dim() != 2 or len(self.usual) != B or not 0 < self.usual.shape[1] <= T:
            raise UserError(
                f"logps returned the shape {tuple(self.usual.shape)} for ids of shape {(B, T)}, but it must return "
                f"(B, K), with K at most {T}"
            )
        self.first = T - self.usual.shape[1]  # token index of the first log-probability

    @torch.no_grad()
    def __call__(self, *inputs: Tensor) -> Tensor:
        return self.logps(*inputs)

    def not_finite(self) -> list[Place]:
        return [(row, self.first + column) for row, column in (~self.usual.isfinite()).nonzero().tolist()]

    def moved(self, *inputs: Tensor) -> list[Place]:
        """Return the tokens whose log-probs change with these inputs."""
        change = (self(*inputs) - self.usual).abs()
        is_moved = ~(change <= self.tolerance)  # NaN counts as a change
        return [(row, self.first + column) for row, column in is_moved.nonzero().tolist()]


def is_scored(document: Tensor, row: int, token: int) -> bool:
    """Return whether a token can have a log-prob: not padding, and not the first in its document."""
    number = document[row, token]
    return bool(number and token and document[row, token - 1] == number)


def allowed_moves(forward: Forward, faults: Faults, document: Tensor, place: Place, says: str, *inputs) -> list[Place]:
    """Return tokens that the input at `place` affects and may affect; record others as faults."""
    row, token = place
    number = int(document[place])
    allowed = []
    for other in forward.moved(*inputs):
        if not is_scored(document, *other):
            continue
        where = f"{says} moves token {other[1]} of row {other[0]}"
        if not number:
            faults.add("padding moves a log-probability", where)
        elif other[0] != row:
            faults.add("a row depends on another row", where)
        elif document[other] != number:
            faults.add(f"document {document[other]} depends on document {number} in the same row", where)
        elif other[1] < token:
            faults.add("a token depends on a later token", where)
        else:
            allowed.append(other)
    return allowed


def judge_token(forward: Forward, faults: Faults, document: Tensor, place: Place, values: list[int]):
    """Change one token, and record faults."""
    row, token = place
    says = f"token {token} of row {row}"
    ids = forward.ids.clone()
    ids[place] = next(value for value in values if value != ids[place])
    allowed = allowed_moves(forward, faults, document, place, says, ids, *forward.pictures)
    following = (row, token + 1)
    is_inside = forward.first <= token + 1 < ids.shape[1]
    if document[place] and is_inside and document[following] == document[place] and following not in allowed:
        faults.add("a token does not move the log-probability of the next token", says)


def placeholders(is_picture: Tensor) -> list[tuple[int, int, int]]:
    """Return (row, first placeholder, last placeholder) per image, in row order."""
    edges = pad(is_picture.int(), (1, 1)).diff(dim=1)
    firsts, ends = (edges == 1).nonzero().tolist(), (edges == -1).nonzero().tolist()
    return [(row, first, end - 1) for (row, first), (_, end) in zip(firsts, ends, strict=True)]


def judge_image(forward: Forward, faults: Faults, document: Tensor, image: int, place: tuple[int, int, int]):
    """Negate one image's pixels, and record faults."""
    row, first, last = place
    says = f"image {image} in row {row}"
    pixel_values, grids = forward.pictures
    parts = list(pixel_values.split(grids.prod(1).tolist()))
    parts[image] = -parts[image]
    # the first placeholder is predicted before the image is seen
    start = row, min(first + 1, last)
    allowed = allowed_moves(forward, faults, document, start, says, forward.ids, torch.cat(parts), grids)
    if all(token <= last for _, token in allowed):
        faults.add("an image moves no later token of its document", says)


def judge_probabilities(forward: Forward, faults: Faults, document: Tensor, is_picture: Tensor, values: list[int]):
    """Check that the probabilities of all token ids add up to 1, at one position per row."""
    # image placeholders are not tried, as they need pixels, but may have some probability
    missing = 0.5 if forward.pictures else 0.0
    places = list(last_scored(forward, document, is_picture))
    totals = [0.0] * len(places)
    for value in values:
        ids = forward.ids.clone()
        for place in places:
            ids[place] = value
        logps = forward(ids, *forward.pictures)
        for i, (row, token) in enumerate(places):
            totals[i] += logps[row, token - forward.first].exp().item()
    for (row, token), total in zip(places, totals, strict=True):
        rounding = max(1e-6, len(values) * forward.tolerance)
        if not 1 - missing - rounding <= total <= 1 + rounding:
            says = "the probabilities of all values of a token do not add up to 1, so the prediction sees the token"
            faults.add(says, f"token {token} of row {row}, {total:.2f}")


def last_scored(forward: Forward, document: Tensor, is_picture: Tensor) -> Iterator[Place]:
    for row in range(len(document)):
        for token in range(document.shape[1] - 1, forward.first - 1, -1):
            if is_scored(document, row, token) and not is_picture[row, token]:
                yield row, token
                break
