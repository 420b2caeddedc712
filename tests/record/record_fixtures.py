"""What TRL and transformers answer, for minivlmrl/objectives/fixtures/:

    PYTHONPATH=audit:audit/tests:tests:tests/helpers python tests/record/record_fixtures.py

losses.safetensors: batches, values and gradients of TRL's losses, of a batch that is the step and of one that is a
part of it. tiny_qwen2_5_vl.safetensors: a tiny checkpoint, one
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

from minivlmrl.objectives.preference_losses import DPO_LOSSES

FOLDER = Path(__file__).parents[2] / "minivlmrl" / "objectives" / "fixtures"


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

    losses_of_grpo = FAMILIES["policy"][0]["options"]["loss_type"]
    grid = [(w, t, v, b) for w in (True, False) for t in losses_of_grpo for v in LEVELS for b in (0.0, 0.1)]
    for number, (whole_step, loss_type, level, beta) in enumerate(grid):
        options = {"loss_type": loss_type, "importance_sampling_level": level, "beta": beta}
        high = 0.2 if whole_step else 0.28
        batch = policy_batch(number % (len(grid) // 2))
        tokens = int(batch["mask"].sum()) if whole_step else ITEMS
        constants = {"max_completion_length": MAX_LENGTH, "use_bias_correction_kl": True, "epsilon_high": high}
        batch.pop("entropies")
        given = batch | {"entropies": batch["per_token_logps"] * 0}
        found = answer(trl_oracle.grpo_loss, given, items=tokens, epsilon=0.2, **options, **constants)
        about = {"whole_step": whole_step, "tokens": tokens, "epsilon_low": 0.2}
        add("grpo", batch, options | constants | about, found)
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
