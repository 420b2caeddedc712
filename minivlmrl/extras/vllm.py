"""Sample rollouts with vLLM; see docs/use.md.

    sampling: {engine: vllm, vllm: {max_model_len: 4096}}

vLLM receives the policy weights before each rollout, and prompts as token ids and patches. vLLM computes only the
logits, and minivlmrl samples from them. Completions do not depend on the other rows of a batch and, in float32, equal
those without vLLM. To change the integration, copy vllm.py and set sampling.engine=my_vllm.py:VLLMSampler.

Dimensions: r rows in the batch, V vocabulary size.
"""

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from importlib import import_module
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

# run the vLLM engine in the training process, which has the policy weights
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

from minivlmrl.config.options import RunConfig, SamplingOptions
from minivlmrl.config.parsing import check_values
from minivlmrl.config.types import Count, Dtype
from minivlmrl.data.download import find_folder
from minivlmrl.data.processor import Processor
from minivlmrl.data.rows import Completion, Prompt, Row
from minivlmrl.distributed.process_group import World
from minivlmrl.errors import UserError, is_out_of_memory
from minivlmrl.generation.generate import TokenSampler, to_completions
from minivlmrl.generation.sampler import Sampler
from minivlmrl.json_files import read_json
from minivlmrl.model.checkpoint import DTYPES, file_weights, write_settings
from minivlmrl.model.decoder import VisionLanguageModel
from minivlmrl.model.families.registry import FAMILIES, find_family
from minivlmrl.model.logprobs import per_token_logps
from minivlmrl.model.packing import pack
from minivlmrl.model.plain_weights import gather_full_tensor

# vllm.LLM arguments that recipes cannot change
FIXED_OPTIONS = {
    "mm_device_do_normalize": False,  # pixels are already normalized
    "limit_mm_per_prompt": {"video": 0},  # no video prompts, so no memory profiling with the longest video
    "mm_processor_cache_gb": 0,
    # TokenChooser must run exactly once per token
    "async_scheduling": False,
    "enable_chunked_prefill": False,
    "load_format": "dummy",  # random weights, replaced before each rollout
    "generation_config": "vllm",
}


@dataclass
class VLLMOptions:
    """vllm.LLM arguments that recipes may set. No argument can load code, because recipes may be untrusted."""

    block_size: Count | None = None
    cpu_offload_gb: Annotated[float, "[0, inf)"] | None = None
    cudagraph_capture_sizes: list[Count] | None = None
    disable_cascade_attn: bool | None = None
    dtype: Dtype | None = None
    enable_prefix_caching: bool | None = None
    enable_sleep_mode: bool | None = None
    enforce_eager: bool | None = None
    gpu_memory_utilization: Annotated[float, "(0, 1]"] | None = None
    kv_cache_dtype: Literal["auto", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2"] | None = None
    kv_cache_memory_bytes: Count | None = None
    max_model_len: Count | None = None
    max_num_batched_tokens: Count | None = None
    max_num_seqs: Count | None = None
    quantization: Literal["fp8"] | None = None
    seed: int | None = None
    skip_mm_profiling: bool | None = None
    swap_space: Annotated[float, "[0, inf)"] | None = None


# {policy: its vllm.LLM}; all training stages share the engine
STARTED = WeakKeyDictionary()


class Sampling:
    """Sample tokens from vLLM's logits, and record them per completion."""

    def __init__(self, sample_token: TokenSampler, num_rows: int):
        self.sample_token = sample_token
        # per decode step: batch rows, token ids, log-probs, and whether completions ended; all (r,)
        self.steps: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        self.counts = torch.zeros(num_rows, dtype=torch.long)  # tokens sampled so far, per row
        self.ended: list[str] = []  # vLLM request ids that ended in the latest decode step

    def sample(self, logits: Tensor, rows: list[int]) -> Tensor:
        """Sample tokens from logits (r, V). Return logits that make vLLM select the same tokens: 0, else -inf."""
        index = torch.tensor(rows, device=logits.device)
        counts = self.counts[rows].to(logits.device)
        ids, logps, ends = self.sample_token(logits, index, counts)
        self.steps.append((index, ids, logps, ends))
        self.counts[rows] += 1
        self.ended = [str(row) for row in index[ends].tolist()]
        forced = torch.full_like(logits, -torch.inf)
        return forced.scatter_(1, ids[:, None], 0.0)


class TokenChooser:
    """Logits processor for vLLM that samples with minivlmrl, and makes vLLM select the sampled tokens."""

    sampling: Sampling | None = None  # set on the class, because vLLM creates the instance

    def __init__(self, vllm_config, *_):
        self.rows: dict[int, int] = {}  # {position in vLLM's batch: row in ours}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update):  # called by the vLLM V1 model runner
        builtin = import_module("vllm.v1.sample.logits_processor.builtin")
        builtin.process_dict_updates(self.rows, batch_update, row_of_request)

    def add_request(self, slot: int, params) -> bool:  # called by the vLLM V2 model runner
        self.rows[slot] = (params.extra_args or {}).get("row", -1)  # -1 for warmup requests
        return True

    def apply(self, logits: Tensor, context=None) -> Tensor:
        """Sample tokens from logits (r, V); return logits that make vLLM select the same tokens.

        Args:
            context: batch indices from the vLLM V2 model runner, None from V1.
        """
        slots = context.idx_mapping_np.tolist() if context else sorted(self.rows)
        rows = [self.rows[slot] for slot in slots]
        sampling = TokenChooser.sampling
        return sampling.sample(logits, rows) if sampling else logits


def row_of_request(params, prompt_ids, output_ids) -> int:
    return params.extra_args["row"]


class VLLMSampler(Sampler):
    """Sample completions from vLLM's logits; the option sampling.vllm sets vllm.LLM arguments."""

    @classmethod
    def check(cls, config: RunConfig):
        try:
            import_module("vllm")
        except ImportError as error:
            raise UserError(
                f"sampling.engine=vllm needs vLLM; install it as docs/use.md describes: {error!r}"
            ) from error
        check_values(VLLMOptions, config.sampling.vllm, "sampling.vllm")
        limit = cls.most_tokens(config.sampling)
        if limit and limit <= config.sampling.max_new_tokens:
            raise UserError(
                f"sampling.vllm.max_model_len is {limit}, which leaves no room for a prompt, because "
                f"sampling.max_new_tokens is {config.sampling.max_new_tokens}"
            )
        model_config = config.model.config
        if config.model.path is not None:
            model_config = find_folder(config.model.path) / "config.json"
        if model_config is None:  # build_model later reports that config.json is missing
            return
        model_type = read_json(Path(model_config)).get("model_type")
        if model_type in list(FAMILIES) and not find_family(model_type).in_vllm:
            raise UserError(f"sampling.engine vllm does not support the model type {model_type}; use engine native")

    @classmethod
    def most_tokens(cls, sampling: SamplingOptions) -> int | None:
        return sampling.vllm.get("max_model_len")

    @classmethod
    def engine_bytes(cls, sampling: SamplingOptions, num_parameters: int, dtype: torch.dtype) -> dict[str, int]:
        return {"vLLM's weights": num_parameters * engine_dtype(sampling, dtype).itemsize}

    def __init__(
        self, model: VisionLanguageModel, processor: Processor, sampling: SamplingOptions, world: World, *_, **__
    ):
        super().__init__(model, processor, sampling, world)
        if model not in STARTED:
            STARTED[model] = start_engine(model, processor, sampling.vllm, world)
        self.llm = STARTED[model]
        self.sleeps = world.device.type == "cuda"
        self.is_verified = False

    def __call__(self, prompts: Sequence[Prompt], num_generations: int, keys: Sequence[str]) -> list[list[Completion]]:
        """Load the gathered weights, with merged adapters, into vLLM, and sample. All ranks must call this."""
        if self.sleeps:
            self.llm.wake_up(tags=["weights"])
        weights = ((name, gather_full_tensor(x)) for name, x in file_weights(self.model).items())
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        if self.sleeps:
            self.llm.wake_up(tags=["kv_cache"])
        self.llm.reset_prefix_cache()
        # discard image embeddings computed with the old weights
        self.llm.llm_engine.reset_encoder_cache()
        completions = super().__call__(prompts, num_generations, keys)
        if self.sleeps:
            self.llm.sleep(level=2)
        return completions

    def sample_with(
        self, prompts: Sequence[Prompt], num_generations: int, sample_token: TokenSampler
    ) -> list[list[Completion]]:
        """Sample completions, one vLLM request each."""
        vllm = import_module("vllm")
        engine = self.llm.llm_engine
        num_rows = len(prompts) * num_generations
        sampling = Sampling(sample_token, num_rows)
        inputs_of_prompts = [self.make_input(prompt) for prompt in prompts]
        for row in range(num_rows):
            params = vllm.SamplingParams(
                max_tokens=self.sampling.max_new_tokens,
                ignore_eos=True,
                temperature=0,  # greedy: TokenChooser sets all logits but the sampled token to -inf
                detokenize=False,
                extra_args={"row": row},
            )
            engine.add_request(str(row), inputs_of_prompts[row // num_generations], params)
        TokenChooser.sampling = sampling
        with torch.inference_mode():
            while engine.has_unfinished_requests():
                engine.step()
                engine.abort_request(sampling.ended)
        TokenChooser.sampling = None
        groups = to_completions(sampling.steps, num_generations)
        if self.filters is not None:
            self.filters.record_masks(chain(*groups))
        return groups

    def make_input(self, prompt: Prompt) -> dict:
        """Convert a prompt to vLLM inputs, because vLLM must not tokenize or preprocess it again."""
        engine = import_module("vllm.inputs.engine")
        inputs = import_module("vllm.multimodal.inputs")
        ids = prompt.input_ids
        config = self.model.config
        name = prompt.row.name if prompt.row else "a prompt"
        if (ids == config.video_token_id).any():
            raise UserError(
                f"{name}: the prompt contains a video, which vLLM does not support here; set sampling.engine=native"
            )
        limit = self.most_tokens(self.sampling)
        num_new = self.sampling.max_new_tokens
        if limit and len(ids) + num_new > limit:  # vLLM truncates completions at max_model_len
            raise UserError(
                f"{name}: the prompt has {len(ids)} tokens, which together with max_new_tokens ({num_new}) exceeds "
                f"sampling.vllm.max_model_len ({limit})"
            )
        if not len(prompt.image_grid_thw):
            return engine.tokens_input(ids.tolist())
        num_patches = prompt.image_grid_thw.prod(-1)
        num_tokens = (num_patches // config.vision_config.spatial_merge_size**2).tolist()
        places = (ids == config.image_token_id).nonzero()[:, 0]
        spans = []
        for index in places.split(num_tokens):
            spans.append(inputs.PlaceholderRange(int(index[0]), len(index)))
        pixels = prompt.pixel_values.split(num_patches.tolist())
        hashes = []
        for grid, patches in zip(prompt.image_grid_thw, pixels, strict=True):
            patch_bytes = patches.view(torch.uint8).numpy().tobytes()  # uint8, because NumPy has no bfloat16
            hashes.append(sha256(grid.numpy().tobytes() + patch_bytes).hexdigest())
        field_config = inputs.MultiModalFieldConfig
        fields = {
            "pixel_values": field_config.flat_from_sizes("image", num_patches),
            "image_grid_thw": field_config.batched("image", keep_on_cpu=True),
        }
        items = inputs.MultiModalKwargsItems.from_hf_inputs(vars(prompt), fields)
        return engine.mm_input(ids.tolist(), items, {"image": hashes}, {"image": spans})

    @torch.no_grad()
    def verify_logps(
        self,
        rows: Sequence[Row],
        prompts: Sequence[Prompt],
        completions: Sequence[Sequence[Completion]],
        max_logp_mismatch: float,
    ):
        """Raise UserError if log-probabilities from vLLM and the policy differ in the first rollout.

        In float32, a token may differ by max_logp_mismatch * 1e-3 nats. In float16 or bfloat16, the completions of a
        prompt may have a root mean square difference of max_logp_mismatch * 0.5 nats.
        """
        if self.is_verified:
            return
        policy_dtype = computed_dtype(self.model)
        in_16_bits = 2 in (policy_dtype.itemsize, engine_dtype(self.sampling, policy_dtype).itemsize)
        bound = 0.5 if in_16_bits else 1e-3
        worst = (0.0, "")
        for row, prompt, group in zip(rows, prompts, completions, strict=True):
            batch = pack([prompt], [group], self.model.config, self.device)
            logps, _ = per_token_logps(self.model, batch, self.sampling.temperature)
            vllm_logps = torch.cat([completion.sampled_logps for completion in group])
            mismatch = (logps - vllm_logps.to(self.device)).abs()
            mismatch = mismatch.square().mean().sqrt() if in_16_bits else mismatch.max()
            worst = max(worst, (mismatch.item(), row.name))
        mismatch, where = max(self.world.gather_objects(worst))
        if mismatch > bound * max_logp_mismatch:
            raise UserError(
                f"vLLM computes a different policy: its log-probabilities for {where} differ from the policy's by "
                f"{mismatch:.3g} nats, but at most {bound} * rollout.max_logp_mismatch = {bound * max_logp_mismatch:g} "
                "nats are accepted; see docs/use.md"
            )
        self.is_verified = True


def computed_dtype(model: VisionLanguageModel) -> torch.dtype:
    """Return the dtype in which a policy computes, which may differ from its weight dtype if sharded."""
    sharding = getattr(model, "sharding", None)
    return sharding.compute_dtype if sharding else model.lm_head.weight.dtype


def is_news(record: logging.LogRecord) -> bool:
    """Hide vLLM's warning that it could not load rotary embedding weights, which do not exist."""
    return "RotaryEmbedding: Failed to load weights" not in record.getMessage()


def engine_dtype(sampling: SamplingOptions, policy_dtype: torch.dtype) -> torch.dtype:
    """Return the vLLM weight dtype."""
    return DTYPES.get(sampling.vllm.get("dtype", ""), policy_dtype)


def start_engine(model: VisionLanguageModel, processor: Processor, options: dict, world: World):
    """Start a vllm.LLM in the training process, without policy weights."""
    v1 = import_module("vllm.v1.sample.logits_processor")
    v2 = import_module("vllm.v1.worker.gpu.sample.logits_processor")
    logger = logging.getLogger("vllm.model_executor.model_loader.reload.layerwise")
    logger.addFilter(is_news)
    token_chooser = type("VLLMTokenChooser", (TokenChooser, v1.LogitsProcessor, v2.LogitsProcessor), {})
    on_gpu = world.device.type == "cuda"
    defaults = {
        "dtype": computed_dtype(model),
        "enable_sleep_mode": on_gpu,
        "skip_mm_profiling": not on_gpu,
        "enforce_eager": not on_gpu,  # on a CPU, compilation takes longer than it saves
    }
    if world.size > 1:
        defaults["distributed_executor_backend"] = "external_launcher"
    options = defaults | options
    vllm = import_module("vllm")
    with TemporaryDirectory() as folder:
        write_settings(Path(folder), model, processor)
        try:
            llm = vllm.LLM(folder, logits_processors=[token_chooser], **FIXED_OPTIONS, **options)
        except (TypeError, RuntimeError, ValueError) as error:
            if is_out_of_memory(error):
                raise
            raise UserError("sampling.vllm: " + " ".join(str(error).split())) from error
    # vLLM destroys the process group when it ends
    world.ends_group = False
    if on_gpu:
        llm.sleep(level=2)
    return llm
