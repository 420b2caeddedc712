"""Sample rollouts with logits that vLLM computes; see docs/vllm.md.

    sampling: {engine: vllm, vllm: {max_model_len: 4096}}

vLLM gets the weights of the policy before each rollout, and prompts as our ids and patches, so that
nothing is tokenized, resized or normalised a second time. vLLM computes only the logits; this file
samples the tokens. So samples do not depend on the other rows of a batch, and in float32 they equal
the samples of the policy itself. To change this engine, copy the file and set
sampling.engine=my_vllm.py:VLLMSampler.

vLLM is imported inside functions, because the estimate of memory works without it.

Dimension letters: r rows in the batch, V vocabulary size.
"""

import dataclasses
import logging
import os
from collections.abc import Sequence
from hashlib import sha256
from importlib import import_module
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

# run the engine in this process, because it has the weights
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault(
    "VLLM_CPU_OMP_THREADS_BIND", "nobind"
)  # otherwise vLLM binds the trainer's threads to cores
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

from minivlmrl.config.import_utils import load_name
from minivlmrl.config.options import RunConfig, SamplingOptions
from minivlmrl.config.parsing import error_context, read_json
from minivlmrl.data.download import find_folder
from minivlmrl.data.processor import Processor
from minivlmrl.data.rows import Completion, Prompt
from minivlmrl.distributed.process_group import World
from minivlmrl.generation.generate import TokenSampler, to_completions
from minivlmrl.generation.sampler import SampledRows, Sampler
from minivlmrl.model.checkpoint import DTYPES, file_weights, write_settings
from minivlmrl.model.decoder import Qwen2_5_VL
from minivlmrl.model.families.registry import FAMILIES
from minivlmrl.model.logprobs import per_token_logps
from minivlmrl.model.packing import pack
from minivlmrl.model.plain_weights import gather_full_tensor

# options of vLLM that a recipe cannot change
FIXED_OPTIONS = {
    "mm_device_do_normalize": False,  # our patches are normalised
    "limit_mm_per_prompt": {"video": 0},  # otherwise vLLM profiles the longest possible video
    "mm_processor_cache_gb": 0,
    # with this option and the next, each token is sampled exactly once
    "async_scheduling": False,
    "enable_chunked_prefill": False,
    "load_format": "dummy",  # weights are loaded before each rollout
    "generation_config": "vllm",
}
RESERVED_OPTIONS = {*FIXED_OPTIONS, "model", "tokenizer", "logits_processors"}
STARTED = WeakKeyDictionary()  # model -> vllm.LLM, because the stages of a run share an engine


class Sampling:
    """Sample tokens from vLLM's logits, and record the sampled tokens of each row."""

    def __init__(self, sample_token: TokenSampler, num_rows: int):
        self.sample_token = sample_token
        self.steps: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []  # rows, ids, logps, ends
        self.counts = torch.zeros(num_rows, dtype=torch.long)  # tokens of each row so far
        self.ended: list[str] = []  # names of the requests that ended in the latest step

    def sample(self, logits: Tensor, rows: list[int]) -> Tensor:
        """Sample the next token of these rows from logits (r, V).

        Returns:
            Logits (r, V) that are 0 for the sampled token and -inf for all others, so that vLLM
            selects the same token.
        """
        index = torch.tensor(rows, device=logits.device)
        ids, logps, ends = self.sample_token(logits, index, self.counts[rows].to(logits.device))
        self.steps.append((index, ids, logps, ends))
        self.counts[rows] += 1
        self.ended = [str(row) for row in index[ends].tolist()]
        return torch.full_like(logits, -torch.inf).scatter_(1, ids[:, None], 0.0)


class TokenChooser:
    """Make vLLM select the tokens that `Sampling` samples, as a logits processor of vLLM.

    vLLM's V1 runner calls update_state, its V2 runner calls add_request. start_engine makes a
    subclass that also inherits from both LogitsProcessor classes of vLLM.
    """

    # a class attribute, because vLLM constructs the object; None while vLLM warms up
    sampling: Sampling | None = None

    def __init__(self, vllm_config, *_):
        self.rows: dict[int, int] = {}  # slot in vLLM's batch -> index of our row

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update):
        builtin = import_module("vllm.v1.sample.logits_processor.builtin")
        builtin.process_dict_updates(self.rows, batch_update, row_of_request)

    def add_request(self, slot: int, params) -> bool:
        self.rows[slot] = (params.extra_args or {}).get("row", -1)  # -1 while vLLM warms up
        return True

    def apply(self, logits: Tensor, context=None) -> Tensor:
        """Replace the logits (r, V) of the rows in vLLM's batch; the V2 runner passes a context."""
        slots = context.idx_mapping_np.tolist() if context else sorted(self.rows)
        rows = [self.rows[slot] for slot in slots]
        sampling = TokenChooser.sampling
        return sampling.sample(logits, rows) if sampling else logits


def row_of_request(params, prompt_ids, output_ids) -> int:
    """Return the row index of a request, which vLLM stores when the request enters the batch."""
    return params.extra_args["row"]


class VLLMSampler(Sampler):
    """Sample with logits that vLLM computes; sampling.vllm has the options of vllm.LLM."""

    @classmethod
    def check(cls, run: RunConfig):
        with error_context("sampling.engine: install vLLM as docs/vllm.md says"):
            fields = dataclasses.fields(load_name("vllm:EngineArgs"))
        names = {field.name for field in fields} - RESERVED_OPTIONS
        unknown = sorted(run.sampling.vllm.keys() - names)
        if unknown:
            raise ValueError(
                f"sampling.vllm has {unknown[0]!r}, which vllm.EngineArgs does not have, or which is "
                "set here; take it out"
            )
        limit = cls.most_tokens(run.sampling)
        if limit and limit <= run.sampling.max_new_tokens:
            raise ValueError(
                f"sampling.vllm: max_model_len is {limit}, it must be sampling.max_new_tokens, "
                f"{run.sampling.max_new_tokens}, and the longest prompt together"
            )
        config = run.model.config
        if run.model.path is not None:
            config = find_folder(run.model.path) / "config.json"
        if config is None:  # build_model raises an error in this case
            return
        model_type = read_json(Path(config)).get("model_type")
        if model_type in list(FAMILIES) and not FAMILIES[model_type].in_vllm:
            raise ValueError(
                f"sampling.engine is vllm, which refuses {model_type} as it is asked here; take native"
            )

    @classmethod
    def most_tokens(cls, sampling: SamplingOptions) -> int | None:
        return sampling.vllm.get("max_model_len")

    @classmethod
    def engine_bytes(
        cls, sampling: SamplingOptions, num_parameters: int, dtype: torch.dtype
    ) -> dict[str, int]:
        return {"vLLM's weights": num_parameters * engine_dtype(sampling, dtype).itemsize}

    def __init__(
        self, model: Qwen2_5_VL, processor: Processor, sampling: SamplingOptions, world: World,
        *_, **__,
    ):  # fmt: skip
        super().__init__(model, processor, sampling, world)
        if model not in STARTED:
            STARTED[model] = start_engine(model, processor, sampling.vllm, world)
        self.llm = STARTED[model]
        self.sleeps = world.device.type == "cuda"
        self.is_verified = False

    def __call__(
        self, prompts: Sequence[Prompt], num_generations: int, keys: Sequence[str]
    ) -> list[list[Completion]]:
        """Load the merged and gathered weights into vLLM, then sample; all ranks must call this.

        See Sampler.__call__ for the arguments.
        """
        if self.sleeps:
            self.llm.wake_up(tags=["weights"])  # allocates the memory that reload_weights fills
        weights = ((name, gather_full_tensor(x)) for name, x in file_weights(self.model).items())
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        if self.sleeps:
            self.llm.wake_up(tags=["kv_cache"])
        self.llm.reset_prefix_cache()
        # the cached image embeddings were computed with the old weights
        self.llm.llm_engine.reset_encoder_cache()
        completions = super().__call__(prompts, num_generations, keys)
        if self.sleeps:
            self.llm.sleep(level=2)  # frees the memory of weights and keys
        return completions

    def sample_with(
        self, prompts: Sequence[Prompt], num_generations: int, sample_token: TokenSampler
    ) -> list[list[Completion]]:
        vllm = import_module("vllm")
        engine = self.llm.llm_engine
        num_rows = len(prompts) * num_generations
        sampling = Sampling(sample_token, num_rows)
        inputs_of_prompts = [self.make_input(prompt) for prompt in prompts]
        for row in range(num_rows):
            params = vllm.SamplingParams(
                max_tokens=self.sampling.max_new_tokens,
                ignore_eos=True,
                temperature=0,  # selects the argmax, which is the token that `Sampling` sampled
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
        """Convert a prompt to an input of vLLM, without vLLM's own tokenizer and image processor.

        Raises:
            ValueError: the prompt has a video, or is too long for max_model_len.
        """
        engine = import_module("vllm.inputs.engine")
        inputs = import_module("vllm.multimodal.inputs")
        ids = prompt.input_ids
        config = self.model.config
        name = "a prompt"
        if prompt.row is not None:
            name = prompt.row.where or f"row {prompt.row.index}"
        if (ids == config.video_token_id).any():
            raise ValueError(f"{name}: a video needs sampling.engine=native")
        limit = self.most_tokens(self.sampling)
        num_new = self.sampling.max_new_tokens
        if limit and len(ids) + num_new > limit:  # vLLM would truncate the completion
            raise ValueError(
                f"{name}: its prompt of {len(ids)} tokens "
                f"and {num_new} new ones are over sampling.vllm: max_model_len, {limit}"
            )
        if not len(prompt.image_grid_thw):
            return engine.tokens_input(ids.tolist())
        num_patches = prompt.image_grid_thw.prod(-1)  # per image
        num_tokens = (num_patches // config.vision_config.spatial_merge_size**2).tolist()
        spans = []
        for index in (ids == config.image_token_id).nonzero()[:, 0].split(num_tokens):
            spans.append(inputs.PlaceholderRange(int(index[0]), len(index)))
        hashes = []
        pixels = prompt.pixel_values.split(num_patches.tolist())
        for grid, patches in zip(prompt.image_grid_thw, pixels, strict=True):
            content = grid.numpy().tobytes() + patches.numpy().tobytes()
            hashes.append(sha256(content).hexdigest())
        field_config = inputs.MultiModalFieldConfig
        fields = {
            "pixel_values": field_config.flat_from_sizes("image", num_patches),
            "image_grid_thw": field_config.batched("image", keep_on_cpu=True),
        }
        items = inputs.MultiModalKwargsItems.from_hf_inputs(vars(prompt), fields)
        return engine.mm_input(ids.tolist(), items, {"image": hashes}, {"image": spans})

    @torch.no_grad()
    def verify_logps(self, rollout: SampledRows, max_logp_mismatch: float):
        """Compare vLLM's log-probabilities of the first rollout with those of the policy.

        If the policy or vLLM computes in 16 bits, the bound is a root mean square of 0.5 nats per
        group, otherwise a maximum of 1e-3 nats. max_logp_mismatch scales the bound.

        Raises:
            ValueError: a group exceeds the bound.
        """
        if self.is_verified:
            return
        policy_dtype = computed_dtype(self.model)
        dtypes = policy_dtype, engine_dtype(self.sampling, policy_dtype)
        in_16_bits = min(dtype.itemsize for dtype in dtypes) == 2
        bound = 0.5 if in_16_bits else 1e-3
        worst = (0.0, "")
        groups = zip(rollout.rows, rollout.prompts, rollout.completions, strict=True)
        for row, prompt, completions in groups:
            batch = pack([prompt], [completions], self.model.config, self.device)
            logps, _ = per_token_logps(self.model, batch, self.sampling.temperature)
            recorded = torch.cat([completion.sampled_logps for completion in completions])
            mismatch = (logps - recorded.to(self.device)).abs()
            mismatch = mismatch.square().mean().sqrt() if in_16_bits else mismatch.max()
            worst = max(worst, (mismatch.item(), row.where or f"row {row.index}"))
        mismatch, where = max(self.world.gather_objects(worst))
        if mismatch > bound * max_logp_mismatch:
            raise ValueError(
                f"vLLM computes another policy: log-probabilities of {where} differ by "
                f"{mismatch:.3g} nats, over {bound} x rollout.max_logp_mismatch"
            )
        self.is_verified = True


def computed_dtype(model: Qwen2_5_VL) -> torch.dtype:
    """Return the dtype in which the layers of the policy compute."""
    sharding = getattr(model, "sharding", None)
    return sharding.compute_dtype if sharding else model.lm_head.weight.dtype


def is_news(record: logging.LogRecord) -> bool:
    """Return False for vLLM's warning about unloaded rotary tables, which are not weights."""
    return "RotaryEmbedding: Failed to load weights" not in record.getMessage()


def engine_dtype(sampling: SamplingOptions, policy_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which vLLM computes, by default the dtype of the policy."""
    return DTYPES.get(sampling.vllm.get("dtype", ""), policy_dtype)


def start_engine(model: Qwen2_5_VL, processor: Processor, options: dict, world: World):
    """Start a vllm.LLM in this process, without weights (ValueError if vLLM rejects an option)."""
    v1 = import_module("vllm.v1.sample.logits_processor")
    v2 = import_module("vllm.v1.worker.gpu.sample.logits_processor")
    logger = logging.getLogger("vllm.model_executor.model_loader.reload.layerwise")
    logger.addFilter(is_news)
    token_chooser = type(
        "VLLMTokenChooser", (TokenChooser, v1.LogitsProcessor, v2.LogitsProcessor), {}
    )
    on_gpu = world.device.type == "cuda"
    defaults = {
        "dtype": computed_dtype(model),
        "enable_sleep_mode": on_gpu,
        "skip_mm_profiling": not on_gpu,
        "enforce_eager": not on_gpu,  # compiling takes longer than it saves on a CPU
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
            raise ValueError("sampling.vllm: " + " ".join(str(error).split())) from error
    world.ends_group = False  # vLLM destroys the process group with its own groups
    if on_gpu:
        llm.sleep(level=2)
    return llm
