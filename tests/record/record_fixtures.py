"""What TRL and transformers answer, for minivlmrl/audit/fixtures/:

    PYTHONPATH=tests:tests/helpers python tests/record/record_fixtures.py

losses.safetensors: batches, values and gradients of TRL's losses. tiny_qwen2_5_vl.safetensors: a tiny checkpoint, one
prompt with a picture, its patches, positions, windows and logits by transformers.
"""

import json
import tempfile
from pathlib import Path

import patients
import torch
import transformers
from parity import trl_oracle
from parity.compare import FAMILIES
from parity.policy_cells import ITEMS, LEVELS, MAX_LENGTH, policy_batch
from parity.preference_cells import preference_batch
from safetensors.torch import load_file, save_file
from transformers.vision_utils import get_vision_window_index

from minivlmrl.algorithms.preference_losses import DPO_LOSSES

FOLDER = Path(__file__).parents[2] / "minivlmrl" / "audit" / "fixtures"


def answer(question, batch: dict, **options):
    logps = batch["per_token_logps"].clone().requires_grad_()
    loss, _ = question(batch | {"per_token_logps": logps}, **options)
    return {"loss": loss.detach(), "gradient": torch.autograd.grad(loss, logps)[0]}


def losses():
    cases, tensors = {}, {}

    def add(kind, batch, options, found):
        name = f"{kind}{len(cases)}"
        cases[name] = {"kind": kind, **options}
        tensors.update({f"{name}/{key}": x.contiguous().clone() for key, x in (batch | found).items()})

    constants = {"tokens": ITEMS, "max_completion_length": MAX_LENGTH, "epsilon_low": 0.2, "epsilon_high": 0.28}
    for number, (loss_type, level, beta) in enumerate(
        (t, v, b) for t in FAMILIES["policy"][0]["options"]["loss_type"] for v in LEVELS for b in (0.0, 0.1)
    ):
        options = {"loss_type": loss_type, "importance_sampling_level": level, "beta": beta}
        batch = policy_batch(number)
        asked = options | {
            "epsilon": 0.2,
            "epsilon_high": 0.28,
            "max_completion_length": MAX_LENGTH,
            "use_bias_correction_kl": True,
        }
        batch.pop("entropies")
        found = answer(trl_oracle.grpo_loss, batch | {"entropies": batch["per_token_logps"] * 0}, items=ITEMS, **asked)
        add("grpo", batch, options | constants, found)
    for number, loss_type in enumerate(DPO_LOSSES):
        smoothing = 0.1 if loss_type in ("exo_pair", "robust", "aot", "aot_unpaired") else 0.0
        options = {"loss_type": [loss_type], "beta": 0.3, "label_smoothing": smoothing}
        batch = preference_batch(number)
        add("dpo", batch, options, answer(trl_oracle.dpo_loss, batch, loss_weights=None, **options))
    for number, loss_type in enumerate(("nll", "dft")):
        batch = {name: x for name, x in policy_batch(number).items() if name in ("per_token_logps", "mask")}
        add("sft", batch, {"loss_type": loss_type}, answer(trl_oracle.sft_loss, batch, items=None, loss_type=loss_type))
    save_file(tensors, FOLDER / "losses.safetensors", {"cases": json.dumps(cases), "trl": trl_oracle.VERSION})


def checkpoint():
    with tempfile.TemporaryDirectory() as folder:
        path = patients.write_model(Path(folder))
        model, processor = patients.model(path).double(), patients.processor(path)
        config, weights = (path / "config.json").read_text(), load_file(path / "model.safetensors")
    image = patients.picture(0).resize((84, 56))
    content = [{"type": "image", "image": image}, {"type": "text", "text": "What is it?"}]
    chat, how = [{"role": "user", "content": content}], {"return_dict": True, "return_tensors": "pt"}
    given = processor.apply_chat_template(chat, tokenize=True, add_generation_prompt=True, **how)
    grids, vision = given["image_grid_thw"], model.config.vision_config
    with torch.no_grad():
        logits = model(**given).logits[0]
    kinds = given["mm_token_type_ids"]
    positions, _ = model.model.get_rope_index(given["input_ids"], kinds, image_grid_thw=grids)
    merge, patch = vision.spatial_merge_size, vision.patch_size
    windows, _ = get_vision_window_index(grids, merge, vision.window_size, patch)
    tensors = {f"model/{name}": x for name, x in weights.items()}
    tensors["image"] = torch.tensor(list(image.tobytes()), dtype=torch.uint8).view(56, 84, 3)
    tensors |= {"input_ids": given["input_ids"][0], "image_grid_thw": grids, "pixel_values": given["pixel_values"]}
    tensors |= {"position_ids": positions[:, 0], "window_index": torch.as_tensor(windows), "logits": logits}
    about = {"config": config, "transformers": transformers.__version__}
    save_file({n: x.contiguous() for n, x in tensors.items()}, FOLDER / "tiny_qwen2_5_vl.safetensors", about)


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    losses()
    checkpoint()
