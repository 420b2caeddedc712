"""Checkpoints of weights that may be cut: every rank calls, the first one writes."""

from collections.abc import Callable
from pathlib import Path

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from minivlmrl.decoder import Qwen2_5_VL
from minivlmrl.hub.checkpoint import save_checkpoint
from minivlmrl.rows import Processor
from minivlmrl.scale.ranks import World
from minivlmrl.scale.sharding import reshard


def save_model(
    folder: Path,
    model: Qwen2_5_VL,
    processor: Processor,
    world: World,
    more: Callable[[Path], None] = lambda aside: None,
):
    """Write a Hugging Face folder; see save_checkpoint.

    Sharded weights are made whole one by one, so that no rank holds more of them than one file has.

    Raises:
        OSError, ValueError: what rank 0 met; on the other ranks an OSError that says the same.
    """
    reshard(model)
    weights, failure = WholeWeights(model), None
    if world.is_main:
        try:
            save_checkpoint(folder, model, processor, more, weights=weights)
        except (OSError, ValueError) as error:
            failure = error  # raised when no rank waits for this one any more
    weights.make_rest()
    said = world.gather_objects(failure and str(failure))[0]
    if failure is not None:
        raise failure
    if said is not None:
        raise OSError(said)


class WholeWeights(dict):
    """Parameters by name: items and values are this rank's parts, but what is looked up by its name is made whole.

    Making one whole is joint work, so all ranks have to go through all names in their order: rank 0 by looking them up
    as it writes, the others with make_rest.
    """

    def __init__(self, model: nn.Module):
        # named_parameters lists a tied head once, under the embedding's name, as the hub's checkpoints do
        super().__init__(model.named_parameters())
        self.waiting = list(self)

    def __getitem__(self, name: str) -> Tensor:
        assert self.waiting.pop(0) == name, "the ranks would wait for each other"
        parameter = super().__getitem__(name)
        return parameter.full_tensor().cpu() if isinstance(parameter, DTensor) else parameter

    def make_rest(self):
        while self.waiting:
            self[self.waiting[0]]
