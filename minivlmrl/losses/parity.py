"""Check your own loss against values and gradients recorded from TRL 1.16, without TRL.

`check` compares a loss with the recorded cases and names known mistakes that explain a difference, see
docs/numerical_parity.md. `check_images` checks that a trainer's log-probabilities depend on the images in their row.

In a clone, `pytest tests/parity` compares all losses and options in minivlmrl with the installed TRL.
"""

import importlib
import importlib.util
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

SHOWN = 4  # differing cases that are printed
# losses from TRL 1.16, and a tiny model from transformers 5.23, each written by a removed script:
# git show bc4e311f:tests/record/record_losses.py, and git show cfba8c8:tests/record/record_fixtures.py
FIXTURES = Path(__file__).parent / "fixtures"


def check(my_loss, tolerance: float = 1e-6, kind: str = "grpo", seconds: float = 5.0, **only) -> int:
    """Compare a loss with values and gradients recorded from TRL; return the number of cases.

    `my_loss` gets a batch of B completions or pairs with T tokens, as a dict of float64 tensors:

        per_token_logps      (B, T); dpo: (B, 2, T), with the chosen answer first
        mask                 the same shape; 1 for tokens of a completion
        ref_per_token_logps  the same shape, for grpo and dpo
        old_per_token_logps  (B, T), for grpo
        advantages           (B,), for grpo

    Some batches are extreme: completions without tokens, which still count in the mean over completions, and log-ratios
    of 25 nats. `options` is a dict with these arguments of a loss:

        grpo  loss_type, importance_sampling_level, beta, epsilon_low, epsilon_high,
              use_bias_correction_kl, whole_step (True if the batch is the whole step, and not a micro-batch), and the
              divisors tokens (of the whole step, for dapo) and max_completion_length (for dr_grpo); delta=3.0
              selects cases with TRL's dual clip
        dpo   loss_type (a list with one name), beta, label_smoothing
        sft   loss_type: nll or dft

    Args:
        my_loss: function (batch, options) -> scalar loss; its gradient with respect to per_token_logps is compared,
            too.
        tolerance: largest error in value and gradient, relative to TRL's largest absolute value or to 1, whichever is
            larger.
        kind: loss kind: grpo, dpo or sft.
        seconds: time after which the search for a name ends.
        only: options that a case must have, for example loss_type="dapo" and whole_step=True.

    Raises:
        ValueError: no case has these options; the message lists the recorded values.
        AssertionError: some cases differ from TRL. The message lists these cases, and the mistakes and designs that
            explain the differences, see `judge`.
    """
    verdict = judge(my_loss, tolerance, kind, seconds, **only)
    if verdict.differences:
        raise AssertionError(str(verdict))
    return verdict.cases


@dataclass
class Verdict:
    """What `judge` has found.

    A finding is a "mistake", or a "design": a choice that some project makes on purpose.
    """

    cases: int
    differences: list[str]  # one line for each case that differs
    where: str = ""  # options that all these cases and no others have
    gradients_differ: bool = False
    kinds: Sequence[str] = ()  # "mistake" or "design" for each finding; empty if nothing was named
    names: Sequence[str] = ()  # lines about the findings

    def __str__(self) -> str:
        differing = len(self.differences)
        if not differing:
            return f"all {self.cases} cases agree with TRL in value and gradient"
        head = f"{differing} of {self.cases} cases differ from TRL{self.where}"
        more = [f"... and {differing - SHOWN} more"] if differing > SHOWN else []
        return "\n".join([head, *self.differences[:SHOWN], *more, *self.names])


def judge(my_loss, tolerance: float = 1e-6, kind: str = "grpo", seconds: float = 5.0, **only) -> Verdict:
    """Compare a loss with TRL's, and name the mistakes or designs that reproduce it in all cases; see `check`."""
    steps = []  # arguments to `known_mistakes` for all cases
    found = []
    differences: list = []
    agreeing, differing = [], []  # options
    for case, options, batch, value, slope in cases(kind=kind, **only):
        result = compare(my_loss, options, batch, value, slope)
        found.append((result, value))
        steps.append((batch, options, result.loss, result.gradient))
        if result.error <= tolerance:
            agreeing.append(options)
        else:
            differing.append(options)
            differences.append((case, options, result))
    everything = agreeing + differing
    varied = [name for name in everything[0] if any(x.get(name) != everything[0][name] for x in everything)]
    for i, (case, options, result) in enumerate(differences):
        chosen = ", ".join(f"{name}={options.get(name)}" for name in varied)
        differences[i] = f"{case} ({chosen}): {result}"
    verdict = Verdict(len(found), differences, where=shared(differing, agreeing))
    if not differences:
        return verdict
    verdict.gradients_differ = not all(result.gradient_error <= tolerance for result, _ in found)
    if verdict.gradients_differ:
        verdict.kinds, verdict.names = known_mistakes(steps, tolerance, seconds)
    else:
        verdict.kinds, verdict.names = ["design"], [value_line(found, tolerance)]
    return verdict


def shared(differing: list[dict], agreeing: list[dict]) -> str:
    """Describe an option that all differing cases and no agreeing case have."""
    for name in differing[0] if differing and agreeing else ():
        values = [options.get(name) for options in differing]
        if all(x == values[0] for x in values) and all(options.get(name) != values[0] for options in agreeing):
            return f", which are those with {name} = {values[0]}"
    return ""


def value_line(found: list[tuple], tolerance: float) -> str:
    """Describe a loss whose gradients are right in all cases, although values differ."""
    constants = [(result.loss - value).item() for result, value in found]
    says = "design: the values differ, but the gradients are equal in all cases, so training is the same"
    if max(constants) - min(constants) <= tolerance:
        return f"{says}; the value has a constant of {constants[0]:.6g}"
    return says


@dataclass
class Comparison:
    """A loss and its gradient, and their largest differences from TRL, relative as in `distance`."""

    loss: Tensor
    gradient: Tensor
    loss_error: float
    gradient_error: float

    @property
    def error(self) -> float:
        """Return the larger error."""
        return max(self.loss_error, self.gradient_error)

    def __str__(self) -> str:
        return f"value differs by {self.loss_error:.1e}, gradient by {self.gradient_error:.1e}"


def compare(my_loss, options: dict, batch: dict, value: Tensor, gradient: Tensor) -> Comparison:
    """Compute a loss and its gradient for a recorded case, and compare them with TRL's.

    Raises:
        ValueError: `my_loss` does not return a scalar tensor.
    """
    logps = batch["per_token_logps"].requires_grad_()
    loss = my_loss(batch, options)
    if not isinstance(loss, Tensor) or loss.dim():
        raise ValueError(f"my_loss returned {loss!r:.60}, but it must return a tensor of shape ()")
    # 0 * sum is added, so that a detached loss's gradient is 0 instead of an error
    [ours] = torch.autograd.grad(loss + 0 * logps.sum(), logps)
    loss = loss.detach()
    return Comparison(loss, ours, distance(loss, value), distance(ours, gradient))


def cases(**only) -> Iterator[tuple[str, dict, dict[str, Tensor], Tensor, Tensor]]:
    """Yield (name, options, batch, value, gradient) for each recorded case with these options.

    Raises:
        ValueError: no case has these options; the message lists the recorded values.
    """
    with safe_open(FIXTURES / "losses.safetensors", framework="pt") as file:
        tensor_names = list(file.keys())
        recorded = json.loads(file.metadata()["cases"])  # {case: options}
        known = set().union(*recorded.values())
        for name in sorted(only.keys() - known):
            hint = "; TRL's epsilon is epsilon_low and epsilon_high" if name == "epsilon" else ""
            raise ValueError(
                f"no recorded case has the option {name!r}; the options are {', '.join(sorted(known))}{hint}"
            )
        chosen = {case: options for case, options in recorded.items() if has(options, only)}
        if not chosen:
            kind = [options for options in recorded.values() if options["kind"] == only["kind"]]
            recorded_values = {}
            for key in only:
                values = [str(options.get(key)) for options in kind or recorded.values()]
                recorded_values[key] = list(dict.fromkeys(values))
            raise ValueError(f"No recorded case has the options {only}; choose from {recorded_values}")
        for case, options in chosen.items():
            batch = {}
            for name in tensor_names:
                if name.startswith(f"{case}/"):
                    batch[name.partition("/")[2]] = file.get_tensor(name)
            yield case, options, batch, batch.pop("loss"), batch.pop("gradient")


def has(options: dict, only: dict) -> bool:
    """Return True if a case has these options; a case with TRL's dual clip, delta, has to be asked for.

    A value also equals a list that contains only this value, as loss_type of a dpo case does.
    """
    if "delta" in options and "delta" not in only:
        return False
    return all(key in options and options[key] in (x, [x]) for key, x in only.items())


def known_mistakes(steps: list[tuple], tolerance: float, seconds: float) -> tuple[list[str], list[str]]:
    """Return the kinds and the lines of the findings that reproduce the loss in all cases.

    If the package minivlmrl-audit is not installed, the only line explains how to install this package.

    Args:
        steps: (batch, options, loss, gradient) for each case.
    """
    if importlib.util.find_spec("minivlmrl_audit") is None:  # it is a separate distribution
        return [], ["To name the mistake, install minivlmrl-audit: pip install ./audit in a clone"]
    module = importlib.import_module("minivlmrl_audit.losses")
    steps = [module.as_step(*case) for case in steps]
    names = module.find_names(steps, tolerance, seconds)
    return [part[0].kind for part in names.parts], module.lines_of(names, steps)


def check_shape(name: str, tensor: Tensor, expected: str, dims: int, last: int | None = None):
    """Raise ValueError unless a tensor has `dims` dimensions, the last one with size `last`."""
    shape = tuple(tensor.shape) if isinstance(tensor, Tensor) else None
    if shape is None or len(shape) != dims or last not in (None, shape[-1]):
        found = f"of type {type(tensor).__name__}" if shape is None else f"of shape {shape}"
        raise ValueError(f"{name} is {found}, but it must be a tensor of shape {expected}")


def distance(ours: Tensor, expected: Tensor) -> float:
    """Compute the largest difference between two tensors, relative to max(1, largest |expected|).

    The result is inf if the shapes differ, or if the tensors have NaN at different positions.
    """
    ours, expected = ours.double(), expected.double()
    if ours.shape != expected.shape or not torch.equal(ours.isnan(), expected.isnan()):
        return math.inf
    if not expected.numel():
        return 0.0
    difference = (ours - expected).nan_to_num(0.0).abs().max()
    scale = expected.nan_to_num(0.0).abs().max().clamp(min=1)
    return (difference / scale).item()


def check_images(
    my_logps,
    input_ids: Tensor,
    pixel_values: Tensor,
    image_grid_thw: Tensor,
    image_token_id: int,
    tolerance: float = 1e-3,
) -> str:
    """Check that a trainer uses the right images, in the right order, for its log-probabilities.

    Each image in turn is replaced by its negative, which must change log-probabilities of tokens after the image and no
    log-probabilities of tokens before the image. In addition, rows that differ in one image must have the same
    log-probabilities in one batch as alone in a batch.

    Args:
        my_logps: function (input_ids (B, L), pixel_values (B * P, D), image_grid_thw (B * N, 3))
            -> (B, T), log-probabilities for each row's last T tokens. With T = L - 1, the check
            also finds a wrong image order.
        input_ids: (L,), ids for one row with N images, as a Qwen processor returns them.
        pixel_values: (P, D), patches, one image after the other.
        image_grid_thw: (N, 3); use images of different sizes, so that a wrong order can be found.
        tolerance: rounding error in my_logps in nats; about 0.1 in bfloat16.

    Returns:
        A fault description with its size in nats; "" if all images are used correctly.

    Raises:
        ValueError: a tensor has another shape, or the row has no image, or not as many as image_grid_thw.
    """
    check_shape("input_ids", input_ids, "(L,), the token ids of one row", dims=1)
    check_shape("image_grid_thw", image_grid_thw, "(N, 3), a row for each image", dims=2, last=3)
    check_shape("pixel_values", pixel_values, "(P, D), a row for each patch", dims=2)
    num_patches = int(image_grid_thw.prod(1).sum())
    if len(pixel_values) != num_patches:
        raise ValueError(
            f"pixel_values have {len(pixel_values)} patches, but image_grid_thw stands for "
            f"{num_patches}; pass both as the processor returned them for the row"
        )
    # index of each image's first placeholder
    starts = 1 + ((input_ids == image_token_id).int().diff() == 1).nonzero()
    N = len(image_grid_thw)
    if not len(starts) == N > 0:
        raise ValueError(
            f"input_ids contain {len(starts)} images, but image_grid_thw has {N}; the numbers must "
            "be equal and at least 1"
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
