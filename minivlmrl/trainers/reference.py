"""The reference model: what the policy is held near, by default the policy as a stage found it."""

from collections.abc import Iterator
from contextlib import contextmanager
from operator import attrgetter

import torch
from torch import Tensor, nn

from minivlmrl.config.options import ReferenceOptions
from minivlmrl.config.parsing import check_field
from minivlmrl.data.download import find_folder
from minivlmrl.data.processor import Processor
from minivlmrl.data.tokenizer import load_tokenizer
from minivlmrl.distributed.process_group import World
from minivlmrl.distributed.weights import copy_model, reshard
from minivlmrl.model.checkpoint import load_model, read_config
from minivlmrl.model.decoder import Qwen2_5_VL
from minivlmrl.model.logprobs import per_token_logps
from minivlmrl.model.packing import GroupBatch
from minivlmrl.model.plain_weights import has_adapters
from minivlmrl.model.trainable import trained_parameters

# fields of ModelConfig that a prompt's patches and positions, and the head's rows, depend on
ALIKE = [
    "model_type",
    "vocab_size",
    "vision_config.patch_dim",
    "vision_config.spatial_merge_size",
    "vision_config.tokens_per_second",
]


class Reference:
    """The policy or its trained parameters, copied, or a model of a folder; without gradients.

    It moves if config.sync_ref_model says so: TR-DPO (arXiv 2404.09656), of adapters A and B each.

    Source: TRL 1.16's create_reference_model and SyncRefModelCallback.
    """

    def __init__(
        self, policy: Qwen2_5_VL, config: ReferenceOptions, processor: Processor, world: World
    ):
        self.policy = policy
        self.config = config
        freeze_shared(policy, config)
        to_compute = not config.sync_ref_model
        if config.path is not None:
            check_alike(policy, config.path)
            model = load_frozen(config.path, policy, processor, world, to_compute)
            same_shapes = shapes(model) == shapes(policy)
            if config.sync_ref_model and not same_shapes:
                raise ValueError(
                    f"reference.sync_ref_model: the parameters of {config.path} are not the "
                    "policy's; leave one of the two out"
                )
        elif has_adapters(policy) or config.num_shared_layers is not None:
            trained = [name for name, p in policy.named_parameters() if p.requires_grad]
            model = SwappedParameters(policy, trained)
        else:
            model = copy_model(policy, to_compute)
        self.model = model.requires_grad_(False)

    @torch.no_grad()
    def logps(self, group: GroupBatch, temperature: float = 1.0) -> Tensor:
        """Compute log-probabilities of a batch's completions, (R, T) nats."""
        with swapped_in(self.model, self.policy) as model:
            logps, _ = per_token_logps(model, group, temperature)
            reshard(model)
        return group.pad(logps)

    @torch.no_grad()
    def after_step(self, steps: int):
        """Move towards the policy after every ref_model_sync_steps of a stage's optimizer steps."""
        config = self.config
        if not config.sync_ref_model or steps % config.ref_model_sync_steps:
            return
        reshard(self.policy)
        reshard(self.model)
        policy_parameters = self.policy.parameters()
        if isinstance(self.model, SwappedParameters):
            policy_parameters = self.model.originals()
        for kept, moved in zip(self.model.parameters(), policy_parameters, strict=True):
            kept.lerp_(moved, config.ref_model_mixup_alpha)


class SwappedParameters(nn.Module):
    """Some parameters of a model as they are now; the model itself has all others.

    Args:
        names: of these parameters, such as those of its adapters.
    """

    def __init__(self, model: Qwen2_5_VL, names: list[str]):
        super().__init__()
        self.models = [model]  # in a list: its parameters are no part of this
        self.names = names
        copies = [parameter.detach().clone() for parameter in self.originals()]
        self.copies = nn.ParameterList(copies).requires_grad_(False)

    def originals(self) -> list[nn.Parameter]:
        """List the model's own parameters of these names; a sharded one must not be gathered."""
        parameters = dict(self.models[0].named_parameters())
        return [parameters[name] for name in self.names]

    @contextmanager
    def swapped_in(self) -> Iterator[Qwen2_5_VL]:
        """Yield the model with these values; a sharded one must not be gathered at the ends."""
        self._exchange()
        try:
            yield self.models[0]
        finally:
            self._exchange()

    def _exchange(self):
        # .data is unseen by autograd: what an older graph has saved is there again when it is used
        for kept_copy, parameter in zip(self.copies, self.originals(), strict=True):
            old_value = parameter.detach().clone()
            parameter.data.copy_(kept_copy)
            kept_copy.data.copy_(old_value)


@contextmanager
def swapped_in(model: Qwen2_5_VL | SwappedParameters, policy: Qwen2_5_VL) -> Iterator[Qwen2_5_VL]:
    """Give a model that computes beside the policy; copied parameters compute with its others."""
    reshard(policy)
    if not isinstance(model, SwappedParameters):
        yield model
        return
    with model.swapped_in() as changed:
        yield changed
        reshard(changed)


def freeze_shared(policy: Qwen2_5_VL, config: ReferenceOptions):
    """Freeze what the reference shares: all before layer num_shared_layers (ValueError: all is)."""
    if config.num_shared_layers is None:
        return
    layer_name = config.pattern.replace("{layer}", str(config.num_shared_layers))
    for name, parameter in policy.named_parameters():
        if layer_name in name:
            break
        parameter.requires_grad_(False)
    if not trained_parameters(policy):
        raise ValueError(
            f"reference.num_shared_layers is {config.num_shared_layers}, nothing is left to train: "
            f"no layer matched {layer_name!r}, or model.freeze names the rest"
        )


def shapes(model: nn.Module) -> dict[str, torch.Size]:
    """Name the parameters of a model, with their sizes."""
    return {name: parameter.shape for name, parameter in model.named_parameters()}


def check_alike(policy: Qwen2_5_VL, path: str):
    """Refuse a folder (ValueError) whose model reads or predicts something else than the policy."""
    file = find_folder(path) / "config.json"
    other = read_config(file.parent)
    for name in ALIKE:
        expected = attrgetter(name)(policy.config)
        value = attrgetter(name)(other)
        check_field(value == expected, f"{file}: {name}", value, f"{expected!r}, as the policy's")


def load_frozen(
    path: str, policy: Qwen2_5_VL, processor: Processor, world: World, to_compute: bool = True
) -> Qwen2_5_VL:
    """Load a model with the policy's tokenizer (ValueError: it has another), without gradients.

    Args:
        to_compute: in the dtype that a sharded policy computes in, else in that of its parameters.
    """
    ids = processor.tokenizer.backend.get_vocab()
    other_ids = load_tokenizer(find_folder(path) / "tokenizer.json").backend.get_vocab()
    differing = [token for token in ids if other_ids.get(token) != ids[token]]
    if differing:
        raise ValueError(
            f"{path}: {len(differing)} tokens of the policy are others here, "
            f"such as {differing[0]!r}; take a model with the policy's tokenizer"
        )
    dtype = policy.lm_head.weight.dtype
    sharding = policy.sharding
    if sharding is not None and to_compute:
        dtype = sharding.compute_dtype
    return load_model(path, dtype, world.device, sharding).requires_grad_(False)
