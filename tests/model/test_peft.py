"""Test that adapters are exchanged with PEFT in both directions, with equal logits."""

from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file

from minivlmrl.distributed.saving import save_model
from minivlmrl.errors import user_error_message
from minivlmrl.model import peft as peft_files
from minivlmrl.model.checkpoint import load_model
from tests.helpers import tiny
from tests.model.test_checkpoint import edit_json
from tests.model.test_lora import adapted

peft = pytest.importorskip("peft", reason="oracle missing: pip install peft")

from tests.helpers.oracle import CLASSES, ROUNDING, worst_difference  # noqa: E402 (asks for transformers too)


def prompts():
    generator = torch.Generator().manual_seed(5)
    return [tiny.prompt(generator, [(1, 4, 8)]), tiny.prompt(generator, [])]


def base(tmp_path, model_type, tied):
    save_model(tmp_path / "base", tiny.model(tied, model_type=model_type), tiny.processor())
    return CLASSES[model_type].from_pretrained(tmp_path / "base", attn_implementation="eager").eval()


OPTIONS = [
    {"target_modules": "all-linear"}, {"target_modules": ["down_proj", "qkv"]},
]  # fmt: skip


@pytest.mark.parametrize("whole", [False, True], ids=["adapters", "modules_to_save"])
@pytest.mark.parametrize(("number", "model_type"), enumerate(CLASSES))
def test_adapters_go_from_peft_to_us_and_back(tmp_path, number, model_type, whole):
    theirs, ours = base(tmp_path, model_type, tied=number % 2 == 1), load_model(tmp_path / "base")
    options = {"lora_alpha": 8, "lora_dropout": 0.1, **OPTIONS[number % 2]}
    if whole:
        module = ("model.visual", "visual.merger")[number % 2]
        options = {"target_modules": r".*layers.*_proj", "modules_to_save": [module]}
    torch.manual_seed(7)  # PEFT samples lora_A
    theirs = peft.get_peft_model(theirs, peft.LoraConfig(r=4, **options)).eval()
    for name, parameter in theirs.named_parameters():
        if "modules_to_save" in name or "lora_B" in name:
            parameter.data.mul_(0.7).add_(0.1 * torch.randn_like(parameter))
    theirs.save_pretrained(tmp_path / "adapter")
    assert worst_difference(theirs, ours, prompts()) > 1e-2
    peft_files.load_adapter(ours, tmp_path / "adapter")
    assert worst_difference(theirs, ours, prompts()) < ROUNDING[model_type]
    parts = (["merger"] if number % 2 else ["merger", "vision"]) if whole else []
    assert peft_files.adapter_options(tmp_path / "adapter").modules_to_save == ours.modules_to_save == parts
    for name, parameter in ours.named_parameters():
        if name.endswith("lora_B") or (whole and name.startswith("visual.merger")):
            parameter.data.mul_(-1.2)
    peft_files.gather_adapter(ours)(tmp_path / "again")
    again = CLASSES[model_type].from_pretrained(tmp_path / "base", attn_implementation="eager").eval()
    again = peft.PeftModel.from_pretrained(again, tmp_path / "again").eval()
    assert worst_difference(again, ours, prompts()) < ROUNDING[model_type]


def test_an_adapter_that_is_replaced_while_it_is_read_is_refused(saved, monkeypatch):
    original = peft_files._read_config

    def read_and_replace(file):
        values = original(file)
        file.write_text(file.read_text() + " ")
        return values

    monkeypatch.setattr(peft_files, "_read_config", read_and_replace)
    with pytest.raises(ValueError, match="was replaced while it was read"):
        peft_files.load_adapter(tiny.model(), saved)


@pytest.fixture
def saved(tmp_path):
    peft_files.gather_adapter(adapted([r".+\.0\..+\.q_proj"], dtype=torch.float32))(tmp_path / "adapter")
    return tmp_path / "adapter"


@pytest.mark.parametrize(("change", "expected"), [
    ({"peft_type": "LOHA"}, "peft_type is 'LOHA'"),
    ({"use_dora": True}, "use_dora is True, which is not supported"),
    ({"alpha_pattern": {"q_proj": 8}}, "alpha_pattern is {'q_proj': 8}, which is not supported. Merge"),
])  # fmt: skip
def test_options_that_would_change_the_result_are_refused(saved, change, expected):
    edit_json(saved / "adapter_config.json", **change)
    with pytest.raises(ValueError, match=rf"adapter_config\.json: .*{expected}"):
        peft_files.load_adapter(tiny.model(), saved)


MERGE = "Merge the adapter into its base model with PEFT, and load the merged model"
A = "base_model.model.model.language_model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.mark.parametrize(("change", "expected"), [
    (lambda t: t.pop(A), r"shapes {'lora_B': \(64, 4\)}, but this model needs lora_A \(r, 64\) and lora_B \(64, r\)"),
    (lambda t: t.update({A.replace("q_proj", "p_proj"): t.pop(A)}), "p_proj is not a linear layer|has the shapes"),
    *[(lambda t, name=name: t.update({f"base_model.model.{name}": t[A].clone()}), f"{cause}.*{MERGE}")
      for name, cause in {
          "lm_head.weight": "lm_head.weight is not a lora_A or lora_B of a linear layer, or of the vision tower",
          "lm_head.lora_A.weight": "layer lm_head is not a linear layer of this model, or is the head",
          "model.language_model.embed_tokens.lora_A.weight": "layer model.embed_tokens is not a linear layer",
      }.items()],
    (lambda t: t.update({"base_model.model.model.visual.merger.mlp.9.bias": t[A].clone()}),
     r"visual.merger.mlp.9.bias has the shape .*, but this model's shape is None. Load the adapter's own base model"),
    (lambda t: t.clear(), "the file does not contain any tensors"),
    (lambda t: t.update({A: t[A][0, 0].clone()}), r"'lora_A': \(\).*, but this model needs"),
    (lambda t: t.update({A: t[A] * torch.nan}), r"lora_A.weight contains NaN or infinite values"),
])  # fmt: skip
def test_wrong_tensors_are_refused(saved, change, expected):
    tensors = load_file(saved / "adapter_model.safetensors")
    change(tensors)
    save_file(tensors, saved / "adapter_model.safetensors")
    with pytest.raises(ValueError, match=rf"adapter_model\.safetensors: .*({expected})"):
        peft_files.load_adapter(tiny.model(), saved)


@pytest.mark.parametrize("content", [b"", b"\x08\0\0\0\0\0\0\0{}", {"layers.0.q_proj.lora_A.weight": torch.zeros(())}])
def test_a_damaged_adapter_is_named_before_the_model_is_loaded(tmp_path, content):
    source = adapted(["language"])
    peft_files.gather_adapter(source)(tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        save_file({f"base_model.model.model.{name}": tensor for name, tensor in content.items()}, file)
    for read in (peft_files.adapter_options, partial(peft_files.load_adapter, source)):
        with pytest.raises(ValueError, match=rf"^{file}: ") as caught:
            read(tmp_path)
        assert user_error_message(caught.value)
