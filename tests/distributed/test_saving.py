"""Compare the division of a model's tensors into files with huggingface_hub."""

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from hypothesis import given, settings
from hypothesis import strategies as st

from minivlmrl.distributed.saving import divide


@settings(deadline=None)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=20), st.integers(1, 60))
def test_files_are_those_of_huggingface_hub(sizes, limit):
    sizes = {f"layer.{i}": size for i, size in enumerate(sizes)}
    tensors = {name: torch.empty(size, dtype=torch.uint8, device="meta") for name, size in sizes.items()}
    theirs = split_torch_state_dict_into_shards(tensors, max_shard_size=limit)
    assert list(divide(sizes, limit).items()) == list(theirs.filename_to_tensors.items())
