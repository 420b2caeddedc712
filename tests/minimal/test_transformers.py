"""Compare minimal.py with transformers in float64, from the image file to the log-probabilities."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import minimal
from tests.helpers.hub_configs import real_config
from tests.minimal import pairs

transformers = pytest.importorskip("transformers", reason="oracle missing: pip install transformers==5.23.0")

from tests.helpers import oracle  # noqa: E402 (asks for transformers too)

RECORDED = Path(__file__).parents[1] / "recorded"
TOLERANCE = 1e-12  # for log-probabilities, relative to the largest


def parts_of(name: str) -> list[dict]:
    """Return the content of a message as the chat template of transformers takes it."""
    problem, sizes = pairs.ROWS[name]
    if "<image>" not in problem:
        problem = "<image>" * len(sizes) + problem
    first, *texts = problem.split("<image>")
    parts = [{"type": "text", "text": first}]
    for text in texts:
        parts += [{"type": "image"}, {"type": "text", "text": text}]
    return [part for part in parts if part.get("text") != ""]


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def theirs(request, tmp_path_factory, published):
    """Return a folder by transformers, and for each row transformers' log-probabilities of completions."""
    from transformers.models.qwen2_5_vl import Qwen2_5_VLProcessor

    folder = tmp_path_factory.mktemp("theirs")
    model = pairs.write_folder(folder, request.param)
    images = transformers.AutoImageProcessor.from_pretrained(folder)
    given = tmp_path_factory.mktemp("p"), pairs.TOKENIZER, published("qwen2_5_vl"), images
    processor = oracle.their_processor(Qwen2_5_VLProcessor, *given)
    rows = {}
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        oracle.in_float64(patch, "qwen2_5_vl")
        for name in pairs.ROWS:
            messages = [{"role": "user", "content": parts_of(name)}]
            text = processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            inputs = processor(
                text=[text], images=pairs.row_of(*pairs.ROWS[name])["images"] or None, return_tensors="pt"
            )
            logps = []
            for answer in pairs.completions():
                ids = torch.cat([inputs["input_ids"], answer[None]], 1)
                kinds = torch.nn.functional.pad(inputs["mm_token_type_ids"], (0, len(answer)))
                whole = inputs | {"input_ids": ids, "mm_token_type_ids": kinds}
                whole["attention_mask"] = torch.ones_like(ids)
                logits = model(**whole).logits[0, -len(answer) - 1 : -1]
                logps.append(logits.log_softmax(-1).gather(1, answer[:, None])[:, 0])
            rows[name] = torch.cat(logps)
    return SimpleNamespace(folder=folder, rows=rows)


def test_log_probabilities_equal_transformers(theirs):
    model = pairs.in_float64(theirs.folder)
    ids, mask = pairs.padded(pairs.completions())
    for name, expected in theirs.rows.items():
        with torch.no_grad():
            logps = minimal.log_probabilities(model, minimal.make_prompt(model, pairs.row_of(*pairs.ROWS[name])), ids)
        assert pairs.largest_difference(logps[mask], expected) <= TOLERANCE, name


VERSIONS = ("4.49.0", "4.51.3", "4.52.4", "4.57.6")
TEXT = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
TEXT += ("vocab_size", "rms_norm_eps", "rope_theta", "image_token_id", "tie_word_embeddings")


@pytest.mark.parametrize("version", VERSIONS)
def test_configs_that_transformers_saved_have_the_values_of_the_hub(tmp_path, version):
    """The 3B is tied and the 7B untied; configs of transformers 4.52.4 were recorded for the 3B only."""
    record = json.loads((RECORDED / f"checkpoints_transformers_{version}.json").read_text())
    for size in {"Qwen2.5-VL-3B", "Qwen2.5-VL-7B"} & record["configs"].keys():
        (tmp_path / "config.json").write_text(json.dumps(record["configs"][size]))
        config, hub = minimal.read_config(tmp_path), real_config(size)
        assert {name: config[name] for name in TEXT} == {name: hub[name] for name in TEXT}
        assert config["rope_scaling"]["mrope_section"] == hub["rope_scaling"]["mrope_section"]
        vision = config["vision_config"]
        for name in minimal.VISION_DEFAULTS:
            assert vision[name] == hub["vision_config"][name]


def test_null_in_a_config_does_not_replace_a_value_of_the_text_model(tiny, tmp_path):
    config = minimal.read_json(tiny / "config.json")
    config |= {"hidden_size": None, "text_config": {"hidden_size": config["hidden_size"]}}
    minimal.write_json(tmp_path / "config.json", config)
    assert minimal.read_config(tmp_path)["hidden_size"] == minimal.read_config(tiny)["hidden_size"]
