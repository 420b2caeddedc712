"""Compare Qwen3.5 with transformers 5.23: packed groups, decoding and saved files."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from minivlmrl.config.options import RunConfig
from minivlmrl.data.row_sizes import RowSize
from minivlmrl.distributed.saving import save_model
from minivlmrl.generation.generate import Decode, prefill
from minivlmrl.model import build, checkpoint, config_json
from minivlmrl.model.attention import GroupAttention
from minivlmrl.model.families.registry import find_family
from minivlmrl.monitor.memory.estimate import BatchShape, MemoryEstimator
from minivlmrl.tasks import shapes
from tests.extras.families.test_qwen3_vl import film_prompt, qwen3_vl_name
from tests.helpers import tiny
from tests.helpers.hub_configs import real_config

transformers = pytest.importorskip("transformers", reason="oracle missing: pip install transformers==5.23.0")


@pytest.mark.parametrize(("size", "count"), [("Qwen3.5-0.8B", 852_985_920), ("Qwen3.5-27B", None)])
def test_models_on_the_hub_have_the_tensors_of_transformers(size, count, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(real_config(size)))
    with torch.device("meta"):
        model = find_family("qwen3_5").build_model(config_json.from_dict(real_config(size)))
        config = transformers.AutoConfig.from_pretrained(tmp_path)
        theirs = transformers.Qwen3_5ForConditionalGeneration._from_config(config)
    expected = {qwen3_vl_name(name): p.shape for name, p in theirs.named_parameters()}
    assert {name: p.shape for name, p in model.named_parameters()} == expected
    assert count in (None, sum(p.numel() for p in model.parameters()))


def test_tensors_for_multi_token_prediction_are_not_read(tmp_path):
    """The model does not use tensors whose names begin with `mtp.`; all others must be known."""
    (tmp_path / "model.json").write_text(json.dumps(tiny.RUN_QWEN35))
    model, processor = build.random_model(tmp_path / "model.json", shapes.tokenizer(), 0)
    save_model(tmp_path / "base", model, processor)
    file = tmp_path / "base" / "model.safetensors"
    weights = load_file(file)
    save_file(weights | {"mtp.norm.weight": torch.tensor([torch.nan])}, file, metadata={"format": "pt"})
    loaded = dict(checkpoint.load_model(tmp_path / "base").named_parameters())
    assert all(torch.equal(loaded[name], parameter) for name, parameter in model.named_parameters())
    save_file(weights | {"mtq.fc.weight": torch.zeros(2)}, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"the tensor mtq\.fc\S* is not a parameter of the model"):
        checkpoint.load_model(tmp_path / "base")


def mixed_group():
    """Return four prompts (with one image, two images, no image, and a video) and their completions."""
    generator = torch.Generator().manual_seed(1)
    rows = [tiny.prompt(generator, grids, dtype=torch.float64) for grids in ([(1, 4, 6)], [(1, 8, 2), (1, 4, 4)], [])]
    film, _ = film_prompt(generator, (1, 2, 2), (3, 4, 6), (2, 4, 2))
    lengths = ((5, 2, 7), (1, 4), (3, 1, 1), (6, 90))
    return [*rows, film], [[tiny.completion(generator, n) for n in group] for group in lengths]


def test_recurrent_states_take_the_estimated_memory():
    """Each completion has one state, whose size does not depend on its length."""
    config = tiny.config(model_type="qwen3_5")
    costs, sizes = MemoryEstimator(config), []
    for work in (BatchShape((RowSize(10, 4),) * 2, 3, tokens) for tokens in (5, 50)):
        model = tiny.model_of(config)
        packing = tiny.pack([tiny.prompt(torch.Generator().manual_seed(0), [(1, 4, 4)], text=4)] * 2, [[], []], config)
        assert packing.layout.prompt_lengths == [14] * 2
        owner = torch.arange(2).repeat_interleave(3)
        with torch.no_grad():
            _, attention = prefill(model, packing, owner, work.completion_tokens, Decode())
        held = [x for layer in attention.layer_states.values() for x in layer]
        held += [x for layer in (*attention.prompt_kv, *attention.row_kv) for x in layer]
        sizes.append(sum(x.nbytes for x in held))
        _, estimated = costs.prefill(RunConfig(), costs.build(RunConfig()), work)
        assert estimated == pytest.approx(sizes[-1], abs=7000)  # also positions, which do not grow with the model
        assert len(attention.row_kv) == 1 and len(attention.layer_states) == 2
    keys = 2 * config.num_key_value_heads * config.head_dim * 4
    assert sizes[1] - sizes[0] == 2 * 3 * 45 * keys  # keys and values of the only attention layer


def test_states_are_float32_in_16_bits():
    model = tiny.model(model_type="qwen3_5", dtype=torch.bfloat16)
    rows, completions = mixed_group()
    packing = tiny.pack(rows[:2], completions[:2], model.config)
    attention = GroupAttention(packing.layout, keep_keys=True)
    with torch.no_grad():
        model(packing, attention)
    assert [x.dtype for x in attention.layer_states[0]] == [torch.bfloat16, torch.float32]
