"""A folder's generation_config.json as options: draw what transformers' generate would draw."""

from minivlmrl.hub.checker import build
from minivlmrl.sampling.filters import SamplingOptions

# keys of a generation_config.json that change draws and have no counterpart: neutral values
NOT_SUPPORTED = {
    "num_beams": 1, "num_beam_groups": 1, "diversity_penalty": 0, "penalty_alpha": 0, "dola_layers": None,
    "top_h": None, "typical_p": 1, "epsilon_cutoff": 0, "eta_cutoff": 0, "encoder_repetition_penalty": 1,
    "no_repeat_ngram_size": 0, "encoder_no_repeat_ngram_size": 0, "bad_words_ids": None, "force_words_ids": None,
    "constraints": None, "min_length": 0, "max_time": None, "forced_bos_token_id": None, "forced_eos_token_id": None,
    "exponential_decay_length_penalty": None, "suppress_tokens": None, "begin_suppress_tokens": None,
    "sequence_bias": None, "guidance_scale": 1, "watermarking_config": None, "token_healing": False,
}  # fmt: skip


def from_generation_config(values: dict, **overrides) -> SamplingOptions:
    """Read a generation_config.json as transformers 5.23 does (ValueError: not supported, wrong).

    Without do_sample each token is the likeliest one, whatever else the file says; with do_sample
    and without top_k it is one of the 50 likeliest. A length that the file leaves open stays ours:
    transformers would stop at 20 tokens. What does not change the draw (use_cache) is ignored.

    Args:
        overrides: fields of SamplingOptions, which win; a temperature over 0 asks for sampling.
    """
    values = {name: value for name, value in values.items() if value is not None}
    for name in values.keys() & NOT_SUPPORTED:
        if values[name] != NOT_SUPPORTED[name]:
            found = f"{name} = {values[name]!r} changes what is drawn and is not supported"
            raise ValueError(f"generation_config: {found}; do without the file")
    asked = {"temperature": 0.0}
    kept = ["repetition_penalty", "max_new_tokens", "min_new_tokens", "stop_strings"]
    if overrides.get("temperature", values.get("do_sample")):
        asked = {"temperature": 1.0, "top_k": 50}
        kept += ["temperature", "top_k", "top_p", "min_p"]
    # transformers heeds one of both
    if "max_length" in values and "max_new_tokens" not in values | overrides:
        raise ValueError("generation_config: max_length counts the prompt; give max_new_tokens")
    if (stop := values.get("eos_token_id")) is not None:
        asked["stop_token_ids"] = stop if isinstance(stop, list) else [stop]
    asked |= {name: values[name] for name in kept if name in values}
    return build(SamplingOptions, asked | overrides, "generation_config")
