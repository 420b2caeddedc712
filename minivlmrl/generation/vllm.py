"""Rollouts by vLLM: it computes logits, all else stays what Sampler does (docs/vllm.md).

In a recipe, `vllm` is the name of this file; a copy beside it has its own, my_vllm.py:VLLMSampler:
    sampling: {engine: vllm, vllm: {max_model_len: 4096}}

It gets the trainer's weights before each rollout, and prompts as our ids and patches: nothing is
tokenized, resized or normalised a second time. Tokens are chosen here, so no row's draws depend on
its batch, and in float32 they are those of the policy itself. r running rows, V vocabulary.
vLLM is imported where it is needed: the plan of memory asks without it.
"""

import dataclasses
import logging
import os
from hashlib import sha256
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # in this process: weights are handed over
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # else it binds the trainer's threads
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

from minivlmrl.config.import_utils import load_name
from minivlmrl.config.options import SamplingOptions
from minivlmrl.config.parsing import naming
from minivlmrl.data.rows import Completion, Prompt
from minivlmrl.files import find_folder, read_json
from minivlmrl.generation.generate import TokenSampler, collect
from minivlmrl.generation.sampler import Sampler
from minivlmrl.model.checkpoint import DTYPES, file_weights, write_settings
from minivlmrl.model.logprobs import per_token_logps
from minivlmrl.model.lora import full
from minivlmrl.model.packing import pack

# what the options of a recipe cannot change
FIXED_OPTIONS = {
    "mm_device_do_normalize": False,  # our patches are normalised
    "limit_mm_per_prompt": {"video": 0},  # else vLLM would try the longest that there can be
    "mm_processor_cache_gb": 0,
    "async_scheduling": False,  # this and the next: each token is chosen once
    "enable_chunked_prefill": False,
    "load_format": "dummy",  # weights are handed over before each rollout
    "generation_config": "vllm",
}
OURS = {*FIXED_OPTIONS, "model", "tokenizer", "logits_processors"}
STARTED = WeakKeyDictionary()  # model -> vllm.LLM: the stages of a run share one


class Rollout:
    """What is chosen while vLLM draws some rows."""

    def __init__(self, choose: TokenSampler, num_rows: int):
        # see generate.collect
        self.choose = choose
        self.steps = []
        self.counts = torch.zeros(num_rows, dtype=torch.long)  # tokens of each row so far
        self.ended: list[str] = []  # the rows that ended last, as vLLM knows them

    def leave_chosen(self, logits: Tensor, rows: list[int]) -> Tensor:
        """TokenSampler the next token of these rows, and leave it alone in their logits (r, V)."""
        index = torch.tensor(rows, device=logits.device)
        ids, logps, ends = self.choose(logits, index, self.counts[rows].to(logits.device))
        self.steps.append((index, ids, logps, ends))
        self.counts[rows] += 1
        self.ended = [str(row) for row in index[ends].tolist()]
        return torch.full_like(logits, -torch.inf).scatter_(1, ids[:, None], 0.0)


class Choosing:
    """Has a Rollout choose tokens: update_state is for vLLM's runner V1, add_request for V2.

    start_engine makes vLLM's LogitsProcessors of it.
    """

    # vLLM makes the object from this class, so the class knows what is drawn; None: vLLM warms up
    rollout: Rollout | None = None

    def __init__(self, vllm_config, *_):
        self.rows: dict[int, int] = {}  # slot in the batch -> row

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update):
        from vllm.v1.sample.logits_processor.builtin import process_dict_updates

        process_dict_updates(self.rows, batch_update, row_of_request)

    def add_request(self, slot: int, params) -> bool:
        self.rows[slot] = (params.extra_args or {}).get("row")  # none while vLLM warms up
        return True

    def apply(self, logits: Tensor, context=None) -> Tensor:
        """Take the logits (r, V) of the rows in the batch; context is V2's."""
        slots = context.idx_mapping_np.tolist() if context else sorted(self.rows)
        rows = [self.rows[slot] for slot in slots]
        rollout = Choosing.rollout
        return rollout.leave_chosen(logits, rows) if rollout else logits


def row_of_request(params, prompt_ids, output_ids) -> int:
    """Tell vLLM what to keep of a request that enters the batch: its row."""
    return params.extra_args["row"]


class VLLMSampler(Sampler):
    """Draws as Sampler does, on logits of vLLM; sampling.vllm has options of vllm.LLM."""

    @classmethod
    def check(cls, run):
        """Refuse what vLLM cannot do (ValueError), before anything is loaded."""
        with naming("sampling.engine: install vLLM as docs/vllm.md says"):
            fields = dataclasses.fields(load_name("vllm:EngineArgs"))
        names = {field.name for field in fields} - OURS
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
        config = run.model.config or find_folder(run.model.path) / "config.json"
        model_type = read_json(Path(config)).get("model_type")
        if model_type in ("qwen3_5", "qwen3_5_moe", "qwen3_vl_moe"):
            raise ValueError(
                f"sampling.engine is vllm, which refuses {model_type} as it is asked here; take own"
            )

    @classmethod
    def most_tokens(cls, sampling: SamplingOptions) -> int | None:
        return sampling.vllm.get("max_model_len")

    @classmethod
    def engine_bytes(cls, sampling: SamplingOptions, num_parameters: int, dtype) -> dict[str, int]:
        return {"vLLM's weights": num_parameters * engine_dtype(sampling, dtype).itemsize}

    def __init__(self, model, processor, sampling, world, *_, **__):
        super().__init__(model, processor, sampling, world)
        if model not in STARTED:
            STARTED[model] = start_engine(model, processor, sampling.vllm, world)
        self.llm = STARTED[model]
        self.sleeps = world.device.type == "cuda"
        self.proven = False

    def __call__(self, prompts, num_generations, keys) -> list[list[Completion]]:
        """Hand over the weights, merged and gathered, and sample; all ranks call this."""
        if self.sleeps:
            self.llm.wake_up(tags=["weights"])  # empty memory, which is filled now
        weights = ((name, full(x)) for name, x in file_weights(self.model).items())
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        if self.sleeps:
            self.llm.wake_up(tags=["kv_cache"])
        self.llm.reset_prefix_cache()
        self.llm.llm_engine.reset_encoder_cache()  # else a picture keeps what the old tower saw
        completions = super().__call__(prompts, num_generations, keys)
        if self.sleeps:
            self.llm.sleep(level=2)  # gives the memory of weights and keys back
        return completions

    def sample_with(self, prompts, num_generations, choose) -> list[list[Completion]]:
        from vllm import SamplingParams

        engine = self.llm.llm_engine
        num_rows = len(prompts) * num_generations
        rollout = Rollout(choose, num_rows)
        inputs_of_prompts = [self.make_input(prompt) for prompt in prompts]
        for row in range(num_rows):
            params = SamplingParams(
                max_tokens=self.sampling.max_new_tokens,
                ignore_eos=True,
                temperature=0,  # the argmax: `leave_chosen` leaves one token
                detokenize=False,
                extra_args={"row": row},
            )
            engine.add_request(str(row), inputs_of_prompts[row // num_generations], params)
        Choosing.rollout = rollout
        with torch.inference_mode():
            while engine.has_unfinished_requests():
                engine.step()
                engine.abort_request(rollout.ended)
        Choosing.rollout = None
        groups = collect(rollout.steps, num_generations)
        if self.filters is not None:
            self.filters.record_masks(chain(*groups))
        return groups

    def make_input(self, prompt: Prompt) -> dict:
        """Make vLLM's input of a prompt, past its own processor."""
        from vllm.inputs.engine import mm_input, tokens_input
        from vllm.multimodal import inputs

        ids = prompt.input_ids
        config = self.model.config
        if (ids == config.video_token_id).any():
            raise ValueError(f"{prompt.row.where}: a video needs sampling.engine=own")
        limit = self.most_tokens(self.sampling)
        num_new = self.sampling.max_new_tokens
        if limit and len(ids) + num_new > limit:  # it would cut the completion
            raise ValueError(
                f"{prompt.row.where or f'row {prompt.row.index}'}: its prompt of {len(ids)} tokens "
                f"and {num_new} new ones are over sampling.vllm: max_model_len, {limit}"
            )
        if not len(prompt.image_grid_thw):
            return tokens_input(ids.tolist())
        num_patches = prompt.image_grid_thw.prod(-1)  # of each image
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
        return mm_input(ids.tolist(), items, {"image": hashes}, {"image": spans})

    @torch.no_grad()
    def verify_logps(self, rollout, max_logp_mismatch: float):
        """Refuse the first rollout (ValueError) unless vLLM has the policy's log-probabilities."""
        if self.proven:
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
            recorded = torch.cat([completion.logps for completion in completions])
            mismatch = (logps - recorded.to(self.device)).abs()
            mismatch = mismatch.square().mean().sqrt() if in_16_bits else mismatch.max()
            worst = max(worst, (mismatch.item(), row.where or f"row {row.index}"))
        mismatch, where = max(self.world.gather_objects(worst))
        if mismatch > bound * max_logp_mismatch:
            raise ValueError(
                f"vLLM computes another policy: log-probabilities of {where} differ by "
                f"{mismatch:.3g} nats, over {bound} x rollout.max_logp_mismatch"
            )
        self.proven = True


def computed_dtype(model) -> torch.dtype:
    """Return the dtype in which the layers of a policy compute."""
    sharding = getattr(model, "sharding", None)
    return sharding.compute_dtype if sharding else model.lm_head.weight.dtype


def is_news(record: logging.LogRecord) -> bool:
    """Drop, at each hand-over, what vLLM says of rotary tables: these are computed, no weights."""
    return "RotaryEmbedding: Failed to load weights" not in record.getMessage()


def engine_dtype(sampling: SamplingOptions, policy_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which vLLM computes: the policy's, unless an option says another."""
    return DTYPES.get(sampling.vllm.get("dtype"), policy_dtype)


def start_engine(model, processor, options: dict, world):
    """Start a vllm.LLM without weights in this process (ValueError: it refuses an option)."""
    import vllm
    from vllm.v1.sample.logits_processor import LogitsProcessor
    from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as LogitsProcessorV2

    logger = logging.getLogger("vllm.model_executor.model_loader.reload.layerwise")
    logger.addFilter(is_news)
    chooses = type("VLLMChoosing", (Choosing, LogitsProcessor, LogitsProcessorV2), {})
    on_gpu = world.device.type == "cuda"
    defaults = {
        "dtype": computed_dtype(model),
        "enable_sleep_mode": on_gpu,
        "skip_mm_profiling": not on_gpu,
        "enforce_eager": not on_gpu,  # to compile takes longer than CPUs gain
    }
    if world.size > 1:
        defaults["distributed_executor_backend"] = "external_launcher"
    options = defaults | options
    with TemporaryDirectory() as folder:
        write_settings(Path(folder), model, processor)
        try:
            llm = vllm.LLM(folder, logits_processors=[chooses], **FIXED_OPTIONS, **options)
        except (TypeError, RuntimeError, ValueError) as error:
            raise ValueError("sampling.vllm: " + " ".join(str(error).split())) from error
    world.ends_group = False  # vLLM ends it with its own groups
    if on_gpu:
        llm.sleep(level=2)
    return llm
