"""Test that folders of every published layout load, and that logits equal those of transformers."""

import json
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from minivlmrl.model.checkpoint import load_model
from minivlmrl.model.families.registry import hub_name, module_name
from tests.helpers import tiny
from tests.helpers.hub_configs import tiny_config
from tests.helpers.oracle import CLASSES, EAGER, in_float64, our_logits, their_inputs, transformers

TOLERANCE = 1e-13  # largest logit difference, relative to the largest logit
ROWS = [[(1, 4, 4), (1, 20, 18)], [], [(1, 6, 10)]]  # one batch: two images, no image, one image


@dataclass
class Source:
    """A transformers model, and the contents from which its folder is written."""

    configs: dict[str, dict]  # content of config.json: "published" on the Hub, or "nested" by transformers 5.23
    weights: dict[str, torch.Tensor]  # keys are the names on the Hub
    rows: list  # prompts
    logits: list[torch.Tensor]  # logits of transformers for each prompt


@pytest.fixture(
    scope="module",
    params=[(model_type, tied) for model_type in CLASSES for tied in (True, False)],
    ids=lambda pair: f"{pair[0]}-{'tied' if pair[1] else 'untied'}",
)
def source(request, tmp_path_factory):
    model_type, _ = request.param
    published = tiny_config(*request.param)
    folder = tmp_path_factory.mktemp("config")
    (folder / "config.json").write_text(json.dumps(published))
    config = transformers.AutoConfig.from_pretrained(folder)
    model = CLASSES[model_type]._from_config(config, **EAGER).double().eval()
    tiny.telling_weights(model)
    model.tie_weights()
    model.config.save_pretrained(folder / "saved")
    nested = json.loads((folder / "saved" / "config.json").read_text())
    assert "text_config" in nested and "hidden_size" not in nested and "rope_scaling" not in nested
    make = partial(tiny.prompt, torch.Generator().manual_seed(0), dtype=torch.float64)
    rows = [make(grids) for grids in ROWS]
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        in_float64(patch, model_type)
        logits = [model(**their_inputs(row)).logits[0] for row in rows]
    weights = {hub_name(name): p.detach() for name, p in model.named_parameters()}
    assert ("lm_head.weight" in weights) != published["tie_word_embeddings"]
    return Source({"published": published, "nested": nested}, weights, rows, logits)


def write(folder: Path, source: Source, shards: bool, keys: str, form: str):
    (folder / "config.json").write_text(json.dumps(source.configs[form]))
    weights = {module_name(name) if keys == "new" else name: tensor for name, tensor in source.weights.items()}
    if not shards:
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        return
    files = {name: f"model-{i % 3 + 1:05d}-of-00003.safetensors" for i, name in enumerate(weights)}
    for file in set(files.values()):
        save_file({name: weights[name] for name in weights if files[name] == file}, folder / file)
    index = {"metadata": {"total_size": sum(w.nbytes for w in weights.values())}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


LAYOUTS = [*product(("one file", "shards"), ("old", "new"), ("published", "nested"))]
OFTEN = {0, 3, 5, 6}  # every combination of two choices occurs in one of these layouts


@pytest.mark.parametrize(
    ("files", "keys", "form"),
    [pytest.param(*layout, marks=[pytest.mark.slow] * (i not in OFTEN)) for i, layout in enumerate(LAYOUTS)],
)
def test_the_folder_loads_with_the_logits_of_transformers(source, tmp_path, files, keys, form):
    write(tmp_path, source, files == "shards", keys, form)
    model = load_model(tmp_path, torch.float64)
    with torch.no_grad():
        for ours, theirs in zip(our_logits(model, source.rows), source.logits, strict=True):
            assert ((ours - theirs).abs().max() / theirs.abs().max()).item() <= TOLERANCE
