"""Check a trainer: which tokens and images change its log-probs, and whether micro-batches change its gradients."""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

from minivlmrl.errors import UserError, pluralize

Place = tuple[int, int]  # row and token index


def depends(
    logps: Callable[..., Tensor],
    ids: Tensor,
    document: Tensor,
    pixel_values: Tensor | None = None,
    image_grid_thw: Tensor | None = None,
    image_token_id: int = -1,
    vocabulary: int = 0,
    tolerance: float = 1e-9,
    only_images: bool = False,
) -> list[str]:
    """Change one token or image at a time, and report log-probs that wrongly change or stay the same.

    A token may affect only its own and later log-probs in its document, and must affect the next log-prob. An image may
    affect only later log-probs in its document, and must affect at least one. Probabilities must add up to 1 over the
    vocabulary. `depends` finds leaks between packed documents, rows and the answers in a pair, wrong attention masks,
    unshifted labels, and unused or swapped images.

    Use a tiny model: each image, token and vocabulary entry costs a forward pass.

    Args:
        logps: your trainer's function from ids, or from (ids, pixel_values, image_grid_thw), to log-probs (B, K) of the
            last K tokens in each row, in nats. K = T - 1 checks all tokens.
        ids: (B, T), token ids.
        document: (B, T), document number per token, 0 for padding. A document is a prompt with its answer, or one of
            several texts in a packed row.
        pixel_values: (P, D), patches of all images.
        image_grid_thw: (N, 3), patches along time, height and width per image.
        image_token_id: token id of image placeholders, which are not changed.
        vocabulary: number of token ids, 0 = largest id + 1.
        tolerance: maximum rounding error, in nats; 1e-9 for float64, about 1e-4 for float32.
        only_images: change only images, not tokens.

    Returns:
        one sentence per kind of fault, with its first position

    Raises:
        ValueError: log-probs or images have wrong shapes.
    """
    pictures = () if pixel_values is None else (pixel_values, image_grid_thw)
    forward = Forward(logps, ids, document, pictures, tolerance)
    values = [value for value in range(vocabulary or int(ids.max()) + 1) if value != image_token_id]
    is_picture = ids == image_token_id
    images = placeholders(is_picture)
    grids = 0 if image_grid_thw is None else len(image_grid_thw)
    if len(images) != grids or (only_images and not images):
        raise UserError(
            f"ids have placeholders for {pluralize(len(images), 'image')}, but image_grid_thw has "
            f"{pluralize(grids, 'row')}"
        )
    for row, token in (~forward.usual.isfinite() & forward.is_scored).nonzero().tolist():
        forward.add("a log-probability is not finite", f"token {token} of row {row}")
    if forward.faults:
        return forward.sentences()
    for image, place in enumerate(images):
        forward.judge_image(image, place)
    if only_images:
        return forward.sentences()
    for row, token in (~is_picture).nonzero().tolist():
        forward.judge_token((row, token), values)
    forward.judge_probabilities(is_picture, values)
    return forward.sentences()


def placeholders(is_picture: Tensor) -> list[tuple[int, int, int]]:
    """Return (row, column of first placeholder, column of last) per image, in row order."""
    edges = pad(is_picture.int(), (1, 1)).diff(dim=1)
    firsts = (edges == 1).nonzero().tolist()
    ends = (edges == -1).nonzero().tolist()
    return [(row, first, end - 1) for (row, first), (_, end) in zip(firsts, ends, strict=True)]


class Forward:
    """Run a trainer's forward pass, and record log-probs that wrongly change or stay the same."""

    def __init__(self, logps: Callable[..., Tensor], ids: Tensor, document: Tensor, pictures: tuple, tolerance: float):
        self.logps = logps
        self.ids = ids
        self.document = document
        self.pictures = pictures
        self.tolerance = tolerance
        self.faults: dict[str, list[str]] = {}  # {fault, such as "a row depends on another row": token positions}
        # (B, T) mask of tokens with a log-prob: no padding, no first token of a document
        self.is_scored = (document != 0) & (document == pad(document, (1, -1)))
        self.usual = self(ids, *pictures)

    @torch.no_grad()
    def __call__(self, *inputs: Tensor) -> Tensor:
        """Run the forward pass; return log-probs (B, T), 0 where the user's function returns none."""
        logps = self.logps(*inputs)
        B, T = self.ids.shape
        if logps.dim() != 2 or len(logps) != B or not 0 < logps.shape[1] <= T:
            raise UserError(
                f"logps returned the shape {tuple(logps.shape)} for ids of shape {(B, T)}, but it must return "
                f"(B, K), with K at most {T}"
            )
        before = T - logps.shape[1]
        self.is_scored[:, :before] = False
        return pad(logps, (before, 0))

    def add(self, says: str, where: str):
        """Record a fault at a token position."""
        self.faults.setdefault(says, []).append(where)

    def sentences(self) -> list[str]:
        """Describe faults by kind, with count and first position."""
        lines = []
        for says, where in self.faults.items():
            times = pluralize(len(where), "time")
            lines.append(f"{says} ({times}; first: {where[0]})")
        return lines

    def allowed_moves(self, place: Place, says: str, *inputs: Tensor) -> list[Place]:
        """Run inputs that were changed at one token, and return the positions of log-probs that may and do change.

        Log-probs may change from this token to the end of its document. Changes elsewhere are recorded as faults.

        Args:
            place: position of the token.
            says: changed token or image, for messages.
        """
        row, token = place
        number = int(self.document[place])
        is_same = (self(*inputs) - self.usual).abs() <= self.tolerance  # NaN counts as a change
        allowed = []
        for other_row, other in (~is_same & self.is_scored).nonzero().tolist():
            where = f"{says} moves token {other} of row {other_row}"
            other_number = int(self.document[other_row, other])
            if not number:
                self.add("padding moves a log-probability", where)
            elif other_row != row:
                self.add("a row depends on another row", where)
            elif other_number != number:
                self.add(f"document {other_number} depends on document {number} in the same row", where)
            elif other < token:
                self.add("a token depends on a later token", where)
            else:
                allowed.append((other_row, other))
        return allowed

    def judge_token(self, place: Place, values: list[int]):
        """Change one token id; record a fault if unrelated log-probs change, or the next token's log-prob does not."""
        row, token = place
        says = f"token {token} of row {row}"
        ids = self.ids.clone()
        ids[place] = next(value for value in values if value != ids[place])
        allowed = self.allowed_moves(place, says, ids, *self.pictures)
        following = (row, token + 1)
        if token + 1 < ids.shape[1] and self.is_scored[following] and following not in allowed:
            self.add("a token does not move the log-probability of the next token", says)

    def judge_image(self, image: int, place: tuple[int, int, int]):
        """Negate all pixels in one image; record a fault if unrelated log-probs change, or no later one does."""
        row, first, last = place
        says = f"image {image} in row {row}"
        pixel_values, grids = self.pictures
        parts = list(pixel_values.split(grids.prod(1).tolist()))
        parts[image] = -parts[image]
        # the first placeholder is predicted from tokens before the image
        start = row, min(first + 1, last)
        allowed = self.allowed_moves(start, says, self.ids, torch.cat(parts), grids)
        if all(token <= last for _, token in allowed):
            self.add("an image moves no later token of its document", says)

    def judge_probabilities(self, is_picture: Tensor, values: list[int]):
        """Require that the probabilities of all token ids add up to 1, at the last text token in every row."""
        rounding = max(1e-6, len(values) * self.tolerance)
        # the sum excludes image_token_id, so allow this token a probability up to 0.5
        smallest = (0.5 if self.pictures else 1.0) - rounding
        could_change = self.is_scored & ~is_picture
        last = could_change & (could_change.cumsum(1) == could_change.sum(1, keepdim=True))
        total = torch.zeros_like(self.usual)
        for value in values:
            total += self(self.ids.masked_fill(last, value), *self.pictures).exp()
        is_one = (total >= smallest) & (total <= 1 + rounding)
        for row, token in (last & ~is_one).nonzero().tolist():
            says = "the probabilities of all values of a token do not add up to 1, so the prediction sees the token"
            self.add(says, f"token {token} of row {row}, {total[row, token]:.2f}")


def assert_split_invariant(gradients, rows: int, tolerance: float = 1e-6, sizes=None):
    """Assert that gradients do not depend on how rows are split into micro-batches or ranks.

    Args:
        gradients: your trainer's function from micro-batches of row indices, such as [[0, 2], [1, 3]], to
            {parameter name: accumulated gradient}.
        rows: number of rows in the step, at least 2.
        tolerance: maximum difference, relative to the largest gradient without micro-batches.
        sizes: numbers of micro-batches to test; default: 2, rows - 1 and rows.
    """
    __tracebackhide__ = True
    assert rows > 1, f"rows is {rows}, but at least 2 rows are needed to compare different splits"

    def split(parts: int) -> tuple[list[list[int]], dict[str, torch.Tensor]]:
        """Return micro-batches of row indices, such as [[0, 2, 4], [1, 3]], and accumulated gradients."""
        indices = [list(range(part, rows, parts)) for part in range(parts)]
        found = gradients(indices)
        return indices, {name: torch.as_tensor(x).double() for name, x in found.items()}

    _, whole_gradients = split(1)
    unit = max(x.abs().max() for x in whole_gradients.values())
    assert unit > 0, "all gradients are zero, so nothing was compared; use rows with a nonzero loss"
    # rows - 1 micro-batches have unequal sizes (2, 1, 1, ...): this exposes a mean of micro-batch means
    for size in sizes or (2, rows - 1, rows):
        parts, split_gradients = split(size)
        names = sorted(whole_gradients.keys() ^ split_gradients.keys())
        assert not names, (
            f"micro-batches {parts}: the parameter {names[0]} has a gradient either only with this split, or only "
            "without it"
        )
        for name, x in split_gradients.items():
            error = ((x - whole_gradients[name]).abs() / unit).nan_to_num(math.inf).max()
            assert error <= tolerance, (
                f"micro-batches {parts}: the gradient of {name} differs from the gradient of the whole "
                f"step by {error:.1e} times the largest gradient"
            )
