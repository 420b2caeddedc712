"""`python -m minivlmrl merge`: a base and its adapter become one plain Hugging Face folder."""

import argparse

from minivlmrl.adapters.lora import merge_adapters, quantize_base
from minivlmrl.adapters.peft_folder import load_adapter
from minivlmrl.scale.checkpoint import load_model, load_processor, save_model


def main(arguments: list[str]) -> int:
    """Write base plus adapter, in the dtype of the base; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m minivlmrl merge", description=__doc__)
    parser.add_argument(
        "--model", required=True, help="the base: a Hugging Face folder or the id of a repository"
    )
    parser.add_argument("--adapter", required=True, help="a folder that PEFT or a run wrote")
    parser.add_argument("--out", required=True, help="the folder to write")
    parser.add_argument(
        "--quantize",
        choices=["nf4"],
        help="as adapter.quantize of the run: its base, unpacked again",
    )
    options = parser.parse_args(arguments)
    model = load_model(options.model)
    load_adapter(model, options.adapter)
    if options.quantize:
        quantize_base(model)
    merge_adapters(model)
    save_model(options.out, model, load_processor(options.model))
    print(f"written: {options.out}")
    return 0
