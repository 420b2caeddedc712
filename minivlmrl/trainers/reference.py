"""The reference model, from which the KL is measured: by default the policy at the stage's start."""

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

# fields of ModelConfig that policy and reference must share, because the patches and positions of
# prompts and the rows of the output head depend on them
MATCHING_FIELDS = [
    "model_type",
    "vocab_size",
    "vision_config.patch_dim",
    "vision_config.spatial_merge_size",
    "vision_config.tokens_per_second",
]


class Reference:
    """Reference model without gradients: a copy of the policy, or a model loaded from a folder.

    If the policy has adapters or num_shared_layers is set, only its trained parameters are copied.
    With sync_ref_model the reference moves towards the policy (TR-DPO, arXiv 2404.09656); of
    adapters, A and B are averaged separately.

    Source: TRL 1.16's create_reference_model and SyncRefModelCallback.
    """

    def __init__(
        self, policy: Qwen2_5_VL, config: ReferenceOptions, processor: Processor, world: World
    ):
        self.policy = policy
        self.config = config
        freeze_shared_layers(policy, config)
        # a reference that is updated needs the precision of the policy's parameters
        in_compute_dtype = not config.sync_ref_model
        if config.path is not None:
            check_compatible(policy, config.path)
            model = load_frozen(config.path, policy, processor, world, in_compute_dtype)
            same_shapes = shapes(model) == shapes(policy)
            if config.sync_ref_model and not same_shapes:
                raise ValueError(
                    f"reference.sync_ref_model: the model in {config.path} has other parameters "
                    "than the policy, so it cannot be moved towards the policy; remove "
                    "sync_ref_model or reference.path"
                )
        elif has_adapters(policy) or config.num_shared_layers is not None:
            trained = [name for name, p in policy.named_parameters() if p.requires_grad]
            model = SwappedParameters(policy, trained)
        else:
            model = copy_model(policy, in_compute_dtype)
        self.model = model.requires_grad_(False)

    @torch.no_grad()
    def logps(self, group: GroupBatch, temperature: float = 1.0) -> Tensor:
        """Compute log-probabilities (R, T) of the completions of a batch, in nats."""
        with swapped_in(self.model, self.policy) as model:
            logps, _ = per_token_logps(model, group, temperature)
            reshard(model)
        return group.pad(logps)

    @torch.no_grad()
    def after_step(self, steps: int):
        """Move the reference towards the policy every ref_model_sync_steps optimizer steps.

        Args:
            steps: number of optimizer steps of the stage so far.
        """
        config = self.config
        if not config.sync_ref_model or steps % config.ref_model_sync_steps:
            return
        reshard(self.policy)
        reshard(self.model)
        policy_parameters = self.policy.parameters()
        if isinstance(self.model, SwappedParameters):
            policy_parameters = self.model.originals()
        for parameter, target in zip(self.model.parameters(), policy_parameters, strict=True):
            parameter.lerp_(target, config.ref_model_mixup_alpha)


class SwappedParameters(nn.Module):
    """Copies of some parameters, which can be swapped into a model for a forward pass.

    All other parameters are shared with the model, so that a reference needs little memory.

    Args:
        names: names of the copied parameters, for example of all adapters.
    """

    def __init__(self, model: Qwen2_5_VL, names: list[str]):
        super().__init__()
        self.models = [model]  # in a list, so that the model is not registered as a submodule
        self.names = names
        copies = [parameter.detach().clone() for parameter in self.originals()]
        self.copies = nn.ParameterList(copies).requires_grad_(False)

    def originals(self) -> list[nn.Parameter]:
        """Return the parameters of the model that have copies; a sharded model must be resharded."""
        parameters = dict(self.models[0].named_parameters())
        return [parameters[name] for name in self.names]

    @contextmanager
    def swapped_in(self) -> Iterator[Qwen2_5_VL]:
        """Yield the model with the copies swapped in, and restore its parameters afterwards.

        A sharded model must be resharded before this context begins and before it ends.
        """
        self._exchange()
        try:
            yield self.models[0]
        finally:
            self._exchange()

    def _exchange(self):
        # Autograd does not track changes of .data. This is safe, because the values that an earlier
        # graph has saved are restored before its backward.
        for saved_copy, parameter in zip(self.copies, self.originals(), strict=True):
            old_value = parameter.detach().clone()
            parameter.data.copy_(saved_copy)
            saved_copy.data.copy_(old_value)


@contextmanager
def swapped_in(model: Qwen2_5_VL | SwappedParameters, policy: Qwen2_5_VL) -> Iterator[Qwen2_5_VL]:
    """Yield the reference as a complete model; SwappedParameters are swapped into the policy."""
    reshard(policy)
    if not isinstance(model, SwappedParameters):
        yield model
        return
    with model.swapped_in() as changed:
        yield changed
        reshard(changed)


def freeze_shared_layers(policy: Qwen2_5_VL, config: ReferenceOptions):
    """Freeze all parameters before layer num_shared_layers, which the reference shares.

    Raises:
        ValueError: no trainable parameter remains.
    """
    if config.num_shared_layers is None:
        return
    layer_name = config.pattern.replace("{layer}", str(config.num_shared_layers))
    for name, parameter in policy.named_parameters():
        if layer_name in name:
            break
        parameter.requires_grad_(False)
    if not trained_parameters(policy):
        raise ValueError(
            f"reference.num_shared_layers is {config.num_shared_layers}, so no parameter can be "
            f"trained: no layer matches {layer_name!r}, or model.freeze covers all other "
            "parameters; lower num_shared_layers"
        )


def shapes(model: nn.Module) -> dict[str, torch.Size]:
    """Return the shapes of a model's parameters, by name."""
    return {name: parameter.shape for name, parameter in model.named_parameters()}


def check_compatible(policy: Qwen2_5_VL, path: str):
    """Raise ValueError if the model in a folder has other inputs or outputs than the policy."""
    file = find_folder(path) / "config.json"
    other = read_config(file.parent)
    for name in MATCHING_FIELDS:
        expected = attrgetter(name)(policy.config)
        value = attrgetter(name)(other)
        check_field(value == expected, f"{file}: {name}", value, f"{expected!r}, as the policy's")


def load_frozen(
    path: str, policy: Qwen2_5_VL, processor: Processor, world: World, in_compute_dtype: bool = True
) -> Qwen2_5_VL:
    """Load a model without gradients, sharded like the policy.

    Args:
        in_compute_dtype: load the weights in the dtype in which a sharded policy computes; False
            takes the dtype of the policy's parameters.
    Raises:
        ValueError: the model has another tokenizer than the policy.
    """
    ids = processor.tokenizer.backend.get_vocab()
    other_ids = load_tokenizer(find_folder(path) / "tokenizer.json").backend.get_vocab()
    differing = [token for token in ids if other_ids.get(token) != ids[token]]
    if differing:
        raise ValueError(
            f"{path}: {len(differing)} tokens of the policy have other ids in this model or are "
            f"missing, for example {differing[0]!r}; use a model with the policy's tokenizer"
        )
    dtype = policy.lm_head.weight.dtype
    sharding = policy.sharding
    if sharding is not None and in_compute_dtype:
        dtype = sharding.compute_dtype
    return load_model(path, dtype, world.device, sharding).requires_grad_(False)
