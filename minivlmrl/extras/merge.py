"""Merge a LoRA adapter into its base model, and save a Hugging Face model folder."""

import argparse
import filecmp
import re
from pathlib import Path

from minivlmrl.config.loading import trained_quantization
from minivlmrl.data.download import find_folder
from minivlmrl.distributed.saving import save_model
from minivlmrl.errors import UserError
from minivlmrl.files import INFERENCE_CONFIG, unchanged
from minivlmrl.model.checkpoint import carried_files, load_model, load_processor
from minivlmrl.model.lora import quantize_base
from minivlmrl.model.peft import WEIGHTS, find_adapter, load_adapter


def main(arguments: list[str]):
    """Run `minivlmrl merge`. The merged weights have the base model's dtype."""
    parser = argparse.ArgumentParser(prog="minivlmrl merge", description=__doc__)
    add = parser.add_argument
    add("--model", required=True, help="base model: a folder, or a repository id on the Hub")
    add("--adapter", required=True, help="folder of a PEFT adapter or of a run")
    add("--out", required=True, help="folder for the merged model")
    add("--quantize", choices=["nf4"], help="value of adapter.quantize in the adapter's run; defaults to its file")
    options = parser.parse_args(arguments)
    folder = find_folder(options.model)
    adapter = find_adapter(options.adapter)
    if Path(options.out).resolve() == folder.resolve():
        raise UserError(f"--out is {options.out}, the base model, which would be lost; choose another folder")
    adapter_file = adapter / WEIGHTS
    merged_file = folder / "adapter" / WEIGHTS  # runs save their adapter beside the merged weights
    has_both = merged_file.is_file() and adapter_file.is_file()
    if has_both and filecmp.cmp(merged_file, adapter_file, shallow=False):
        raise UserError(f"the weights in {folder} already contain this adapter; pass the base model as --model")
    with unchanged(folder, adapter):
        model = load_model(folder)
        processor = load_processor(folder)
        load_adapter(model, adapter)
    if options.quantize or trained_quantization(adapter / INFERENCE_CONFIG):
        quantize_base(model)
    processor.tokenizer.files |= carried_files(adapter, re.compile(re.escape(INFERENCE_CONFIG)))
    save_model(options.out, model, processor, base=options.model)
    print(f"wrote {options.out}")
