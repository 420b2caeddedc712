"""Simulate the vLLM classes that our sampler uses; tests/recorded/vllm_0.32.0.json has results from vLLM itself."""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch

from minivlmrl.config.import_utils import load_name
from minivlmrl.data.rows import Completion, Prompt
from minivlmrl.generation.sampler import ENGINES
from minivlmrl.model import checkpoint, logprobs, packing
from minivlmrl.model.families.registry import find_family, hub_name


class LLM:
    def __init__(self, folder, logits_processors, load_format, mm_device_do_normalize, dtype, **options):
        self.llm_engine, self.normalizes = self, mm_device_do_normalize
        config = checkpoint.read_config(Path(folder))
        self.model = find_family(config.model_type).build_model(config).to(dtype)
        self.choosing = logits_processors[0](None)
        self.batch = []
        self.reset_encoder_cache = self.reset_prefix_cache = lambda: None
        self.has_unfinished_requests = lambda: bool(self.batch)

    def collective_rpc(self, name, kwargs):
        self.model.load_state_dict({hub_name(k): x.clone() for k, x in kwargs["weights_iterator"]}, strict=False)

    def add_request(self, name, given, params):
        self.batch.append(SimpleNamespace(name=name, given=given, params=params, ids=[]))

    def abort_request(self, names):
        self.batch = [row for row in self.batch if row.name not in names]

    @torch.no_grad()
    def step(self):
        self.choosing.update_state([(i, row.params, None, row.ids) for i, row in enumerate(self.batch)])
        ids = [[Completion(torch.tensor([*row.ids, 0]))] for row in self.batch]
        group = packing.pack([self.prompt(row.given) for row in self.batch], ids, self.model.config, "cpu")
        last = torch.tensor([len(one.ids) for [one] in ids]).cumsum(0) - 1  # the state before a token predicts it
        logits = logprobs.completion_states(self.model, group)[last] @ self.model.lm_head.weight.T
        for row, token in zip(self.batch, self.choosing.apply(logits.float()).argmax(-1).tolist(), strict=True):
            row.ids.append(token)
        LLM.abort_request(self, [row.name for row in self.batch if len(row.ids) == row.params.max_tokens])

    def prompt(self, given):
        ids = torch.tensor(given["prompt_token_ids"])
        pictures = given.get("mm_kwargs")
        if pictures is None:
            return Prompt(ids, torch.zeros(0, 1176), torch.zeros(0, 3).long())
        pixels = (pictures.pixel_values - 0.45) / 0.27 if self.normalizes else pictures.pixel_values
        return Prompt(ids, pixels, pictures.image_grid_thw)


def update(rows, batch, row_of):
    rows.clear()  # vLLM's function gets only changes
    rows.update({index: row_of(*request) for index, *request in batch})


GIVEN = ("prompt_token_ids", "mm_kwargs", "mm_hashes", "mm_placeholders")
MODULES = {
    "vllm": dict(LLM=LLM, SamplingParams=SimpleNamespace),
    "vllm.inputs.engine": dict(
        mm_input=lambda *given: dict(zip(GIVEN, given, strict=True), type="multimodal"),
        tokens_input=lambda ids: dict(prompt_token_ids=ids, type="token"),
    ),
    "vllm.multimodal.inputs": dict(
        PlaceholderRange=lambda offset, length: SimpleNamespace(offset=offset, length=length),
        MultiModalFieldConfig=SimpleNamespace(flat_from_sizes=lambda *_: 0, batched=lambda *_, **__: 0),
        MultiModalKwargsItems=SimpleNamespace(from_hf_inputs=lambda values, fields: SimpleNamespace(**values)),
    ),
    "vllm.multimodal": {},  # importing it creates its attribute `inputs`
    "vllm.v1.sample.logits_processor": dict(LogitsProcessor=type("V1", (), {})),
    "vllm.v1.sample.logits_processor.builtin": dict(process_dict_updates=update),
    "vllm.v1.worker.gpu.sample.logits_processor": dict(LogitsProcessor=type("V2", (), {})),
}


def install(monkeypatch):
    for name, content in MODULES.items():
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
        vars(sys.modules[name]).update(content)
    return sys.modules[load_name(ENGINES["vllm"]).__module__]
