"""Every option that a recipe can set, one dataclass for each of its sections.

A recipe is a YAML file with the fields of RunConfig; `--grpo.beta=0.04` sets one on the command
line, and `python train.py --help grpo` prints the comments below. An option without an effect beside
the others is refused, see config/validation.py. A stage in a file of your own declares its section
in that file.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from minivlmrl.config.types import (
    Code,
    Count,
    Dtype,
    FilePath,
    MinPixels,
    Part,
    RecipePath,
    RewardName,
    Weights,
)

Whole = Annotated[int, "[1, 1e15)"]

# ------------------------------------------------------------------------------ model and adapters


@dataclass
class ModelOptions:
    """Which weights to train: `path`, a folder, or `config`, a config.json for random ones."""

    path: FilePath | None = None  # a Hugging Face folder or the id of a repository
    config: RecipePath | None = None  # a config.json, relative to the recipe
    dtype: Dtype = "float32"  # of parameters, gradients and AdamW
    compute_dtype: Dtype | None = None  # of layers and activations
    freeze: list[Part] = field(default_factory=list)  # not trained; vision is without the merger
    activation_checkpointing: bool = False  # keep blocks' inputs alone, compute the rest again


@dataclass
class LoRAOptions:
    """Which layers get an adapter (LoRA), and its size; all weights of the base are frozen then."""

    # begin with the adapters of this PEFT folder, whose sizes r, alpha, ... must be
    path: FilePath | None = None
    r: Annotated[int, ">= 0"] = 0  # rank of the matrices; 0: there are no adapters
    alpha: Annotated[float, "(0, inf)"] = 32.0  # what an adapter adds is scaled by alpha / r
    # share of the inputs of A that is 0 in training, see model/lora.py
    dropout: Annotated[float, "[0, 1)"] = 0.0
    # also vision, merger, experts (with their routers), or a regex of layers' names
    target: list[str] = field(default_factory=lambda: ["language"])
    # frozen weights of the decoder, and of what else has adapters, in 4 bits a value (QLoRA)
    quantize: Literal["nf4"] | None = None


@dataclass
class ReferenceOptions:
    """The model that stages hold the policy near."""

    # a Hugging Face folder or the id of a repository; None: the policy as the stage found it
    path: FilePath | None = None
    sync_ref_model: bool = False  # move the reference towards the policy on the way (TR-DPO)
    # reference = (1 - alpha) reference + alpha policy ...
    ref_model_mixup_alpha: Annotated[float, "[0, 1]"] = 0.6
    ref_model_sync_steps: Annotated[int, ">= 1"] = 512  # ... every so many optimizer steps
    # all parameters before this layer are frozen and shared by both models; None: nothing is
    num_shared_layers: Annotated[int, ">= 0"] | None = None
    pattern: str = "model.layers.{layer}"  # what names of parameters of that layer contain

    def __post_init__(self):
        if self.path is not None and self.num_shared_layers is not None:
            raise ValueError(
                "num_shared_layers: a model of path shares none; leave one of them out"
            )


# -------------------------------------------------------------------------------------------- data


@dataclass
class ImageOptions:
    """How large the model sees an image: options beside its source, as in qwen-vl-utils."""

    # bounds of the area (of a frame)
    min_pixels: MinPixels | None = None
    max_pixels: Whole | None = None
    resized_height: Whole | None = None  # instead of the image's own size
    resized_width: Whole | None = None

    def __post_init__(self):
        if (self.resized_height is None) != (self.resized_width is None):
            raise ValueError("resized_height and resized_width belong together: give both")


@dataclass
class VideoOptions(ImageOptions):
    """How large the frames of a video are, and which of a file are seen: see data/video.py."""

    total_pixels: Whole | None = None  # upper bound of all frames together
    fps: Annotated[float, "(0, 1e15)"] | None = None
    nframes: Whole | None = None
    min_frames: Whole | None = None
    max_frames: Whole | None = None
    video_start: Annotated[float, "[0, 1e15)"] | None = None  # seconds
    video_end: Annotated[float, "[0, 1e15)"] | None = None


@dataclass
class RowOptions:
    """How rows of files are read."""

    image_root: FilePath | None = None  # the folder that paths of images begin at; None: the file's
    # column of a file -> its name here: {label: solution}
    columns: dict[str, str] = field(default_factory=dict)
    # what the (last) user turn says; {problem} is replaced by the row's question; without it rows
    # bring no question
    prompt_template: str = "{problem}"
    system_prompt: str | None = None  # None: Qwen's default
    # by which filter images are resized, see image.py; None: as the folder says. [height, width]:
    # to this size, rounded to tokens, all images of files that have no options of their own
    resize: Literal["pil", "torch"] | tuple[Count, Count] | None = None
    # options of videos that do not say them, such as {fps: 1}: see VideoOptions
    video: dict = field(default_factory=dict)


@dataclass
class FileOptions:
    """One file of data.train."""

    file: FilePath  # see data/row_files.py
    # how often a pass has each of its rows; 0.5: every second row once
    weight: Annotated[float, "(0, 1000]"] = 1.0
    sampling: str = "all"  # or first:N, end:N, random:N of its rows, or N% of them
    # the folder that paths of its images begin at; None: data.image_root
    image_root: FilePath | None = None
    # those of the recipe that judge its rows; none named: all
    rewards: list[RewardName] = field(default_factory=list)
    prompt_template: str | None = None  # what their user turns say; None: data.prompt_template


@dataclass
class DataOptions(RowOptions):
    """Where rows come from: `task`, an embedded one, or files of your own: docs/data.md."""

    task: Code | None = None  # "shapes" or "file.py:TASK", beside the recipe, maybe with options
    train_file: FilePath | None = None  # problem or prompt, image(s), and what the stages need
    train: list[FileOptions] = field(default_factory=list)  # several files instead of one
    files: dict[str, FilePath] = field(default_factory=dict)  # of stages: {sft: rows.jsonl}
    eval_file: FilePath | None = None  # problem or prompt, image(s), solution or chosen, rejected
    max_prompt_tokens: Annotated[int, ">= 1"] | None = None  # leave out longer training rows
    eval_rows: Annotated[int, ">= 0"] = 256  # held-out rows that are evaluated, at most; 0: none
    eval_without_images: bool = (
        False  # on grey pictures and those of other rows too: docs/metrics.md
    )
    # bounds of an image's area; None: as the model's folder says
    min_pixels: MinPixels | None = None
    max_pixels: Count | None = None  # upper bound of the area
    image_workers: Annotated[int, "[0, 64]"] = 2  # threads that prepare prompts; 0: steps wait
    skip_unreadable: bool = False  # leave out training rows whose image is broken, and count them
    template: dict = field(default_factory=dict)  # values for its chat: {enable_thinking: false}
    # of coordinates in answers; None: as the model's family writes them
    box_space: Literal["original", "resized", "thousandths", "unit"] | None = None
    answer: Literal["tags", "whole", "last_line"] = "tags"  # where it is: docs/rewards.md
    # the first is what counts
    eval_rewards: list[RewardName] = field(
        default_factory=lambda: [RewardName("accuracy"), RewardName("format")]
    )

    def __post_init__(self):
        if "{problem}" not in self.prompt_template and self.task:
            raise ValueError(
                f"prompt_template is {self.prompt_template!r:.80}, it must be "
                "a text with {problem} in it, the task's question"
            )
        if not self.eval_rewards:
            raise ValueError(
                "eval_rewards is [], it must be names of rewards; the first is what counts"
            )
        if "reward_model" in self.eval_rewards:
            raise ValueError("eval_rewards: reward_model judges training only; leave it out")


# ---------------------------------------------------------------------------- sampling and rollouts


# Filters that remove tokens, each with the value at which it removes none. A filter that is missing
# here is never applied: `truncates` below reads this table, and so do the checks of options.
NO_TRUNCATION = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}


@dataclass
class SamplingOptions:
    """How completions are drawn and where they end."""

    temperature: Annotated[float, ">= 0"] = 1.0  # divides the logits; 0 takes the likeliest token
    max_new_tokens: Annotated[int, ">= 1"] = 256  # a completion is cut there
    stop_token_ids: list[Annotated[int, ">= 0"]] | None = None  # default <|im_end|>, <|endoftext|>
    # keep the k likeliest tokens (ties with the k-th stay); 0 keeps all
    top_k: Annotated[int, ">= 0"] = 0
    # keep the likeliest tokens that together reach this probability
    top_p: Annotated[float, "(0, 1]"] = 1.0
    min_p: Annotated[float, "[0, 1]"] = 0.0  # drop tokens less likely than this times the likeliest
    # of tokens seen before, divides a positive logit and multiplies a negative one
    repetition_penalty: Annotated[float, "> 0"] = 1.0
    # the token that completes one ends the completion
    stop_strings: list[str] = field(default_factory=list)
    # tokens of prompts and completions that are sampled together, at full length; None: all
    max_batch_tokens: Annotated[int, ">= 1"] | None = None
    # tools that a completion may call: file.py:NAME, docs/tools.md
    environment: Code | None = None
    # rounds with pictures in what a turn is written from, docs/agents.md; None: a completion grows
    history: Annotated[int, ">= 1"] | None = None
    graph: Literal["auto", "never"] = "auto"  # on a GPU decode steps are a CUDA graph
    # computes the logits of rollouts: the policy itself, vLLM (docs/vllm.md) or the class of a file;
    # filters and sampling are the same for all
    engine: Literal["own", "vllm"] | Code = "own"
    vllm: dict[str, Any] = field(default_factory=dict)  # options of vllm.LLM: dtype, max_model_len

    def __post_init__(self):
        if self.environment and self.engine != "own":
            raise ValueError(f"engine is {self.engine!r}, it must be own with an environment")
        if not all(self.stop_strings):
            raise ValueError(
                f"stop_strings is {self.stop_strings!r:.80}, it must be without an empty text"
            )

    @property
    def truncates(self) -> bool:
        """Tell whether a filter removes tokens: training then normalises over those that are left."""
        return self.temperature > 0 and any(
            getattr(self, name) != off for name, off in NO_TRUNCATION.items()
        )

    @property
    def filtered(self) -> bool:
        """Tell whether sampling needs generation/filters.py."""
        return self.truncates or self.repetition_penalty != 1


@dataclass
class RolloutOptions:
    """How a model samples while it is trained."""

    # nats by which sampler and trainer may differ about a token; in 16 bits a tenth, on average
    max_logp_mismatch: Annotated[float, "> 0"] = 1.0
    gather_weights: bool = True  # full ones on every rank in a rollout; False: layer by layer


# ------------------------------------------------------------------------------ optimizer and ranks


@dataclass
class OptimizerOptions:
    """What all stages share of an optimizer; learning rate and adam_beta2 are each stage's own."""

    # AdamW with moments of the weights' dtype or of 8 bits a value; a file's is called as they are,
    # (parameters, learning rate, betas=, weight_decay=), and keeps all in tensors of its `state`
    name: Literal["adamw", "adamw_8bit"] | Code = "adamw"
    weight_decay: Annotated[float, "[0, inf)"] = 0.0  # for all weights
    max_grad_norm: Annotated[float, "> 0; .inf does not clip"] = 1.0  # scale gradients to this norm


@dataclass
class ShardingOptions:
    """Weights, gradients, optimizer state sharded over the ranks. Off: each rank has them all."""

    enabled: bool = False  # shard weights, gradients and optimizer state over the ranks (FSDP2)
    # groups of ranks that hold a full model each; one a node gathers within nodes
    replicas: Annotated[int, ">= 1"] = 1
    cpu_offload: bool = False  # shards, gradients and optimizer state are in host memory


# ------------------------------------------------------------------------------------------ stages


@dataclass
class TrainingOptions:
    """What every stage has: its length, its batch and its learning rate."""

    max_steps: Annotated[int, ">= 0"] = 100  # optimizer steps
    prompts_per_step: Annotated[int, ">= 1"] = 32  # prompts in one optimizer step, over all ranks
    micro_batch_size: Annotated[int, ">= 1"] = 32  # prompts in one forward and backward
    learning_rate: Annotated[float, "(0, inf)"] = 1e-6  # of AdamW, after the warmup
    lr_scheduler_type: Literal["linear", "cosine", "constant"] = "linear"  # after the warmup
    min_lr_ratio: Annotated[float, "[0, 1]"] = 0.0  # the rate at the end, as a share
    warmup_steps: Annotated[int, ">= 0"] = 0  # steps over which the learning rate rises
    adam_beta2: Annotated[float, "[0, 1)"] = 0.99  # decay of the mean squared gradient
    router_aux_loss_coef: Annotated[float, "[0, inf)"] = 0.0  # of load_balancing_loss

    def without_effect(self) -> Iterator[tuple[str, str]]:
        """Yield (option, reason) for options of this section that have no effect with the others.

        Such an option is refused if its value is not the default, see config/validation.py. The
        section of a stage in your own file can extend the method, here for an option `warmdown`:

            def without_effect(self):
                yield from super().without_effect()
                if self.max_steps == 0:
                    yield "warmdown", "there are no steps unless max_steps > 0"
        """
        if self.lr_scheduler_type == "constant":
            yield "min_lr_ratio", "lr_scheduler_type constant keeps the learning rate as it is"


@dataclass
class SFTOptions(TrainingOptions):
    """Supervised fine-tuning."""

    loss_type: Literal["nll", "dft"] = "nll"  # see sft_loss


@dataclass
class DPOOptions(TrainingOptions):
    """Preference losses on pairs, see dpo_loss."""

    loss_type: list[str] = field(default_factory=lambda: ["sigmoid"])  # of DPO_LOSSES
    loss_weights: list[float] | None = None  # None: 1 each; of MPO [0.8, 0.2, 1.0]
    beta: Annotated[float, "> 0"] = 0.1  # weight of a log ratio; large: near the reference
    # share of wrong labels, for sigmoid, exo_pair, robust, aot, aot_unpaired
    label_smoothing: float = 0.0
    # what is bounded, see f_score
    f_divergence_type: Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"] = (
        "reverse_kl"
    )
    f_alpha_divergence_coef: float = 0.5  # alpha of alpha_divergence
    ld_alpha: Annotated[float, "[0, 1]"] | None = None  # LD-DPO: weight beyond the shorter answer
    use_weighting: bool = False  # WPO: weight pairs by the policy's own probability of them
    # score all pairs once before the first step, but for rows that bring ref_chosen_logps and
    # ref_rejected_logps; then no reference is kept in memory
    precompute_ref_log_probs: bool = False
    reference_free: bool = False  # no reference: its log-probabilities are taken to be 0


@dataclass
class RewardModelOptions(TrainingOptions):
    """The reward model."""

    center_rewards_coefficient: float | None = None  # weight of (chosen + rejected)^2
    path: FilePath | None = None  # whose scores the reward gives; None: of the one trained here


@dataclass
class GRPOOptions(TrainingOptions):
    """GRPO and its family: one trainer, whose options select functions of losses/."""

    num_generations: Annotated[int, ">= 2"] = 8  # G, completions of each prompt: the group
    steps_per_generation: Annotated[int, ">= 1"] = 1  # optimizer steps with prompts of one rollout
    num_iterations: Annotated[int, ">= 1"] = 1  # passes over each rollout
    # tokens of one forward and backward, prompts once; a group may be divided. None: any number
    max_tokens_per_micro_batch: Annotated[int, ">= 1"] | None = None
    max_num_gen_batches: Annotated[int, ">= 1"] = 1  # over 1: sample equal groups again

    scale_rewards: Literal["group", "batch", "none"] = "group"  # see group_advantages
    # normalise the weighted sum of the rewards, or each reward before it is added (GDPO)
    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = (
        "sum_then_normalize"
    )
    soft_punish_cache: Annotated[int, ">= 0"] = 0  # last tokens over which rewards fall
    mask_truncated_completions: bool = False  # completions that were cut teach nothing

    # term and average, see grpo_loss; or a function with the signature of grpo_loss
    loss_type: (
        Literal["grpo", "bnpo", "dr_grpo", "dapo", "luspo", "rloo", "cispo", "sapo", "vespo"] | Code
    ) = "dapo"
    importance_sampling_level: Literal["token", "sequence", "sequence_token"] = "token"  # GSPO
    epsilon_low: Annotated[float, ">= 0"] = 0.2  # the ratio is clipped at 1 - epsilon_low
    epsilon_high: Annotated[float, ">= 0"] = 0.2  # and at 1 + epsilon_high
    beta: Annotated[float, ">= 0"] = 0.0  # weight of the KL; 0: there is no reference model
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"  # see kl_term
    use_bias_correction_kl: bool = True  # weigh the KL with the ratio, which corrects its gradient
    top_entropy_quantile: Annotated[float, "(0, 1]"] = 1.0  # upper share of entropies that counts
    entropy_coef: float = 0.0  # weight of the mean entropy, which is to grow
    # of the sampler's mismatch, see rollout_importance_ratio
    rollout_correction: (
        Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] | None
    ) = None
    rollout_correction_bounds: tuple[float | None, float | None] = (None, 3.0)  # of that ratio

    def __post_init__(self):
        if not 0 <= self.epsilon_low <= self.epsilon_high:  # refuses NaN too
            raise ValueError(
                f"epsilon_low is {self.epsilon_low}, it must be from 0 to epsilon_high, "
                f"{self.epsilon_high}"
            )


@dataclass
class PPOOptions(TrainingOptions):
    """PPO with a critic."""

    num_generations: Annotated[int, ">= 1"] = 1  # completions for each prompt
    num_mini_batches: Annotated[int, ">= 1"] = 1  # optimizer steps with prompts of one rollout
    num_ppo_epochs: Annotated[int, ">= 1"] = 4  # passes over each rollout
    # tokens of one forward and backward, prompts once. None: any number
    max_tokens_per_micro_batch: Annotated[int, ">= 1"] | None = None
    # the ratio is clipped to [1 - cliprange, 1 + cliprange], a value to old value -+ cliprange
    cliprange: Annotated[float, ">= 0"] = 0.2
    vf_coef: Annotated[float, ">= 0"] = 0.1  # weight of the value loss
    critic: Literal["shared", "separate"] = "shared"  # a head on the policy, or a model of its own
    # what a separate critic begins as: a critic's or reward model's folder; None: the policy
    critic_path: FilePath | None = None
    kl_coef: Annotated[float, ">= 0"] = 0.05  # weight of a token's KL; 0: no reference model
    kl_estimator: Literal["k1", "k3"] = "k1"  # of that KL, see token_rewards
    # taken from the score of a completion without an end token, as TRL's; None: nothing
    missing_eos_penalty: float | None = None
    gamma: Annotated[float, "[0, 1]"] = 1.0  # see gae
    lam: Annotated[float, "[0, 1]"] = 0.95  # see gae

    # what GRPO calls these options
    steps_per_generation = property(lambda self: self.num_mini_batches)
    num_iterations = property(lambda self: self.num_ppo_epochs)
    beta = property(lambda self: self.kl_coef)
    max_num_gen_batches = 1  # every completion teaches, whatever the others of its prompt earn


# ------------------------------------------------------------------------------------------ the run


@dataclass
class RunConfig:
    """A whole run."""

    seed: int = 0  # of weights, rows and draws
    output_dir: str = "runs/default"  # the run's folder
    # algorithms, one after the other; also file.py:Class, whose section has the name Class.stage
    stages: list[Code] = field(default_factory=lambda: [Code("grpo")])
    max_epochs: Annotated[float, "(0, 1e6]"] | None = None  # passes over rows that end a stage
    num_threads: Annotated[int, "[1, 4096]"] | None = None  # of a rank; None: its share of all
    checkpoint_minutes: Annotated[float, ">= 0"] = (
        10.0  # save the state so often, and after a stage
    )
    checkpoint_steps: Annotated[int, ">= 0"] = 0  # and every so many steps; both 0: after a signal
    # "auto": from the newest state in output_dir, if any; the folder of a state; or "never": anew
    # in a folder that holds a run
    resume: str | None = None
    eval_steps: Annotated[int, ">= 0"] = 0  # evaluate every so many too; 0: between stages only
    save_steps: Annotated[int, ">= 0"] = 0  # checkpoint/ every so many too; 0: after a stage only
    log_completions: Annotated[int, ">= 0"] = 10  # every so many steps, to completions.jsonl
    report_minutes: Annotated[float, ">= 0"] = (
        1.0  # write report.html so often; 0: when the run ends
    )
    # weights of the best such result, in best/
    best_metric: Literal["sampled", "greedy", "pairs", "loss"] | None = None
    # metrics too; a file's function (config, steps, closing) -> log(values, steps)
    report_to: list[Literal["tensorboard", "wandb"] | Code] = field(default_factory=list)
    check_memory: bool = True  # refuse a model that does not fit its GPUs by `minivlmrl memory`
    timeout: Annotated[float, "(0, 1e9)"] = 600.0  # seconds that a rank waits for another
    model: ModelOptions = field(default_factory=ModelOptions)
    adapter: LoRAOptions = field(default_factory=LoRAOptions)
    data: DataOptions = field(default_factory=DataOptions)
    sharding: ShardingOptions = field(default_factory=ShardingOptions)
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    rollout: RolloutOptions = field(default_factory=RolloutOptions)
    # name -> weight
    rewards: Weights = field(
        default_factory=lambda: {RewardName("format"): 0.5, RewardName("accuracy"): 1.0}
    )
    optimizer: OptimizerOptions = field(default_factory=OptimizerOptions)
    reference: ReferenceOptions = field(default_factory=ReferenceOptions)
    sft: SFTOptions = field(default_factory=SFTOptions)
    dpo: DPOOptions = field(default_factory=DPOOptions)
    reward_model: RewardModelOptions = field(default_factory=RewardModelOptions)
    grpo: GRPOOptions = field(default_factory=GRPOOptions)
    ppo: PPOOptions = field(default_factory=PPOOptions)

    def __post_init__(self):
        # not options, but what load_config says of the recipe
        self.recipe = ""  # what it was read from
        # sections of stages in a file that an override of `stages` leaves out
        self.unused_sections: list[str] = []
        self.names_of_files: dict[str, str] = {}  # "file.py:Class" of `stages` -> Class.stage
        if self.rewards and not any(self.rewards.values()):
            raise ValueError(f"rewards are {self.rewards}: all weights are 0, nothing is learned")

    @property
    def stage_names(self) -> list[str]:
        """Name the stages as their sections are: kto for recipes/kto.py:KTO."""
        return [self.names_of_files.get(stage, stage) for stage in self.stages]

    @property
    def uses_fsdp(self) -> bool:
        """Say whether FSDP2 holds the weights: sharded, or layers with a dtype of their own."""
        return self.sharding.enabled or self.model.compute_dtype is not None
