"""`python -m minivlmrl merge`: a base and its adapter become one plain Hugging Face folder."""

import argparse
import filecmp

from minivlmrl.data.download import find_folder
from minivlmrl.files import INFERENCE_CONFIG
from minivlmrl.model.checkpoint import load_model, load_processor, save_model
from minivlmrl.model.lora import quantize_base
from minivlmrl.model.peft import WEIGHTS, find_adapter, load_adapter


def main(arguments: list[str]):
    """Write base plus adapter, in the dtype of the base."""
    parser = argparse.ArgumentParser(prog="python -m minivlmrl merge", description=__doc__)
    add = parser.add_argument
    add("--model", required=True, help="the base: a folder, or an id on the hub")
    add("--adapter", required=True, help="a folder that PEFT wrote, or a run")
    add("--out", required=True, help="the folder to write")
    add("--quantize", choices=["nf4"], help="as adapter.quantize of the run")
    options = parser.parse_args(arguments)
    folder = find_folder(options.model)
    adapter = find_adapter(options.adapter)
    adapter_file = adapter / WEIGHTS
    merged_file = folder / "adapter" / WEIGHTS  # which a run writes beside weights that have it
    if (
        merged_file.is_file()
        and adapter_file.is_file()
        and filecmp.cmp(merged_file, adapter_file, shallow=False)
    ):
        raise ValueError(f"{folder}: has this adapter in its weights already; give its base")
    model = load_model(folder)
    processor = load_processor(folder)
    load_adapter(model, adapter)
    if options.quantize:
        quantize_base(model)
    if (adapter / INFERENCE_CONFIG).is_file():
        processor.tokenizer.files[INFERENCE_CONFIG] = (adapter / INFERENCE_CONFIG).read_bytes()
    save_model(options.out, model, processor, base=options.model)
    print(f"written: {options.out}")
