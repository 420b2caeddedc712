"""All recipe options, one dataclass per section.

A recipe is a YAML file with RunConfig's fields. `--grpo.beta=0.04` sets an option, and `python train.py --help grpo`
prints a section with the comments below.
"""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, get_args

from minivlmrl.config.types import (
    LAYERS,
    BoxSpace,
    Code,
    Count,
    Dtype,
    FilePath,
    Finite,
    Frozen,
    MinPixels,
    Part,
    RecipePath,
    RewardName,
    VisualPart,
    Weights,
)
from minivlmrl.errors import UserError

Whole = Annotated[int, "[1, 1e15)"]
CorrectionBound = Annotated[float, "[0, inf)"] | None

# ------------------------------------------------------------------------------ model and adapters


@dataclass
class ModelOptions:
    """The model to train: a folder with weights (`path`), or random weights (`config`)."""

    path: FilePath | None = None  # model folder or Hugging Face repository id
    config: RecipePath | None = None  # config.json of a model to train from random weights
    dtype: Dtype = "float32"  # dtype of parameters, gradients and AdamW moments
    # dtype in forward and backward passes, such as bfloat16; None uses `dtype`
    compute_dtype: Dtype | None = None
    # dtype of saved weights; None uses the dtype of the weight files in `path`, or `dtype` for random weights
    save_dtype: Dtype | None = None
    # parts to freeze: vision (tower), merger (vision-language projector), language, embeddings, or layers such as
    # layers.0-11 and visual.blocks.7. The reference model shares frozen weights with the policy
    freeze: list[Frozen] = field(default_factory=list)
    # recompute activations in the backward pass, storing only transformer block inputs
    activation_checkpointing: bool = False

    def __post_init__(self):
        for text in self.freeze:
            if text not in get_args(Part) and not LAYERS.fullmatch(text):
                raise UserError(
                    f"freeze contains {text!r}, but each item must be {', '.join(get_args(Part))}, or a range of "
                    "layers such as layers.0-11 or visual.blocks.0-7"
                )


@dataclass
class LoRAOptions:
    """LoRA adapters; the base model is frozen, except modules_to_save."""

    # PEFT adapter folder to continue training from; r, alpha and target must match it
    path: FilePath | None = None
    r: Annotated[int, ">= 0"] = 0  # LoRA rank; 0 for no adapters
    alpha: Annotated[float, "(0, inf)"] = 32.0  # adapter output is scaled by alpha / r
    # dropout on adapter inputs during training
    dropout: Annotated[float, "[0, 1)"] = 0.0
    # layers with adapters: language (the decoder), vision, merger, a name specific to the model family (see
    # docs/memory.md), or a regular expression for layer names
    target: list[str] = field(default_factory=lambda: ["language"])
    # parts to train in full in addition to adapters, such as a new vision tower or merger
    modules_to_save: list[VisualPart] = field(default_factory=list)
    # nf4 stores frozen weights in 4 bits (QLoRA): all linear decoder layers, and other layers with adapters
    quantize: Literal["nf4"] | None = None

    def __post_init__(self):
        if self.path and not self.r:
            raise UserError(
                f"path is {self.path}, but r is 0, so the model would be trained without the adapters of this folder; "
                "set r to the rank of the adapters, or path to null"
            )


@dataclass
class ReferenceOptions:
    """The reference model for the KL penalty and the DPO loss; it is not trained."""

    # reference model folder or Hub repository id; None copies the policy when the stage starts
    path: FilePath | None = None
    # move the reference model toward the policy during training (TR-DPO); see extras/moving_reference.py
    sync_ref_model: bool = False
    # alpha in reference = alpha * policy + (1 - alpha) * reference; 1 copies the policy
    ref_model_mixup_alpha: Annotated[float, "(0, 1]"] = 0.6
    ref_model_sync_steps: Annotated[int, ">= 1"] = 512  # optimizer steps between reference model updates


# -------------------------------------------------------------------------------------------- data


@dataclass
class ImageOptions:
    """Bounds on image sizes, with option names from qwen-vl-utils."""

    # smallest and largest image or video frame, in pixels
    min_pixels: MinPixels | None = None
    max_pixels: Whole | None = None
    resized_height: Whole | None = None  # resize images to this height, in pixels
    resized_width: Whole | None = None

    def __post_init__(self):
        if (self.resized_height is None) != (self.resized_width is None):
            raise UserError("resized_height and resized_width must be given together; set both or neither")


@dataclass
class VideoOptions(ImageOptions):
    """Video frame sizes and frame sampling; see data/video.py."""

    total_pixels: Whole | None = None  # maximum total area over all frames, in pixels
    fps: Annotated[float, "(0, 1e15)"] | None = None  # frames to sample per second
    nframes: Whole | None = None  # number of frames to sample, instead of fps
    # bounds on the number of frames when sampling by fps
    min_frames: Whole | None = None
    max_frames: Whole | None = None
    # start and end of the video to sample from, in seconds
    video_start: Annotated[float, "[0, 1e15)"] | None = None
    video_end: Annotated[float, "[0, 1e15)"] | None = None


@dataclass
class RowOptions:
    """Options for reading rows from files."""

    # folder for relative image paths; None uses the folder of the data file
    image_root: FilePath | None = None
    # your function, as file.py:name, that converts a row (dict) to the columns in docs/data.md
    format: Code | None = None
    # columns to rename: {label: solution} reads `label` as `solution`
    columns: dict[str, str] = field(default_factory=dict)
    # text of the last user turn; {problem} is replaced by the question. Leave {problem} out if rows have no question
    prompt_template: str = "{problem}"
    system_prompt: str | None = None  # system message; None uses the chat template's default
    # image size for rows without one, such as {resized_height: 384, resized_width: 384}; see ImageOptions
    image: Annotated[dict, ImageOptions] = field(default_factory=dict)
    # video options, such as {fps: 1}; options in a row take precedence; see VideoOptions
    video: Annotated[dict, VideoOptions] = field(default_factory=dict)


@dataclass
class FileOptions:
    """A data file listed in data.train."""

    file: FilePath  # data file; see data/row_files.py
    # how often an epoch uses a row; 2 uses every row twice, 0.5 every second row
    weight: Annotated[float, "(0, 1000]"] = 1.0
    # folder for relative image paths; None uses data.image_root
    image_root: FilePath | None = None
    # reward names for rows in this file; [] uses all rewards in the recipe
    rewards: list[RewardName] = field(default_factory=list)
    prompt_template: str | None = None  # replaces data.prompt_template for rows in this file


@dataclass
class DataOptions(RowOptions):
    """Training and evaluation rows: a built-in `task`, or data files; see docs/data.md."""

    # task to generate rows: the built-in "shapes", or your own as "file.py:TASK"; options may follow in parentheses
    task: Code | None = None
    # data file with training rows
    train_file: FilePath | None = None
    train: list[FileOptions] = field(default_factory=list)  # several training files, instead of train_file
    # training files for individual stages, such as {sft: rows.jsonl}
    files: dict[str, FilePath] = field(default_factory=dict)
    # data file with held-out rows
    eval_file: FilePath | None = None
    # maximum prompt length in tokens; longer training rows are skipped. Stages with dataset answers, such as SFT, count
    # prompt plus longest answer
    max_prompt_tokens: Annotated[int, ">= 1"] | None = None
    eval_rows: Annotated[int, ">= 0"] = 256  # maximum evaluation rows; 0 for no evaluation
    # also evaluate with gray images and with images of other rows, to measure how much answers depend on the image
    eval_without_images: bool = False
    # smallest image area in pixels; None: as in the model folder
    min_pixels: MinPixels | None = None
    # largest image area in pixels; None: as in the model folder
    max_pixels: Count | None = None
    # threads that prepare prompts during optimizer steps; 0 prepares them between steps
    image_workers: Annotated[int, "[0, 64]"] = 2
    skip_unreadable: bool = False  # skip training rows with unreadable images, with a warning for every row
    # variables for the chat template, such as {enable_thinking: false}
    chat_template_kwargs: dict = field(default_factory=dict)
    # unit of box coordinates in answers: pixels of the original or resized image, thousandths of the image size, or,
    # for unit, fractions from 0 to 1. None: as in the model family
    box_space: BoxSpace | None = None
    # where the answer is in a completion: in <answer> tags, the whole text, or the last line
    answer_format: Literal["tags", "whole", "last_line"] = "tags"
    # rewards for evaluation; the first is reported in most detail. None uses the training rewards
    eval_rewards: list[RewardName] | None = None

    def __post_init__(self):
        if "{problem}" not in self.prompt_template and self.task:
            raise UserError(
                f"prompt_template is {self.prompt_template!r}, but it must be "
                "a string that contains {problem}, which is replaced by the question of the task"
            )
        if self.task and self.eval_file:
            raise UserError(
                f"eval_file is {self.eval_file}, but evaluations would use the rows of the task {self.task}; set "
                "task to null and train_file to a file of rows, or set eval_file to null"
            )
        if "reward_model" in (self.eval_rewards or ()):
            raise UserError(
                "eval_rewards contains reward_model, which can only score training rows; remove "
                "reward_model from the list"
            )


# ---------------------------------------------------------------------------- sampling and rollouts


# sampling options with which no unlikely tokens are dropped
NO_TRUNCATION = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}


@dataclass
class SamplingOptions:
    """Sampling parameters and stop conditions."""

    temperature: Annotated[float, "[0, inf)"] = 1.0  # sampling temperature; 0 for greedy decoding
    max_new_tokens: Annotated[int, "[1, 1048576]"] = 256  # maximum completion length, in tokens
    # ids that end a completion; None: <|im_end|>, <|endoftext|>, and the end tokens of generation_config.json
    stop_token_ids: list[Annotated[int, ">= 0"]] | None = None
    # sample from the k likeliest tokens, including ties with the k-th; 0 keeps all tokens
    top_k: Annotated[int, ">= 0"] = 0
    # sample from the likeliest tokens whose probabilities add up to top_p (nucleus sampling)
    top_p: Annotated[float, "(0, 1]"] = 1.0
    min_p: Annotated[float, "[0, 1]"] = 0.0  # drop tokens below min_p times the largest probability
    # penalty on tokens in the prompt and completion so far: divides positive logits, multiplies negative ones
    repetition_penalty: Annotated[float, "(0, inf)"] = 1.0
    # strings that end a completion; the completion keeps the stop string and the rest of its last token
    stop_strings: list[str] = field(default_factory=list)
    # maximum tokens per sampling batch, counting max_new_tokens per completion; None samples all prompts at once
    max_batch_tokens: Annotated[int, ">= 1"] | None = None
    # environment with tools, as file.py:NAME; see docs/agents.md
    environment: Code | None = None
    # number of past turns whose images stay in the prompt (docs/agents.md); None keeps all images
    history: Annotated[int, ">= 1"] | None = None
    cuda_graph: Literal["auto", "never"] = "auto"  # auto runs decoding as a CUDA graph if there is a GPU
    # engine for rollouts: the trained model (native), vLLM (docs/use.md), or your own class, as file.py:Class(option=1)
    engine: Literal["native", "vllm"] | Code = "native"
    # arguments for vllm.LLM, such as dtype and max_model_len
    vllm: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        if self.environment and self.engine != "native":
            raise UserError(
                f"engine is {self.engine!r}, but it must be native with an environment, because "
                "only the native engine can call tools"
            )
        if not all(self.stop_strings):
            raise UserError(f"stop_strings is {self.stop_strings!r}, but it must not contain an empty string")

    @property
    def truncates(self) -> bool:
        """Whether top_k, top_p or min_p drops tokens; if so, training also normalizes over the kept tokens."""
        return self.temperature > 0 and any(getattr(self, name) != off for name, off in NO_TRUNCATION.items())

    @property
    def filtered(self) -> bool:
        """Whether top_k, top_p, min_p or the repetition penalty changes the sampling probabilities."""
        return self.truncates or self.repetition_penalty != 1


@dataclass
class RolloutOptions:
    """Options for sampling during training."""

    # stop if log-probs from sampling and training differ too much; a factor for the limit, which is 0.01 nats (root
    # mean square per token) in float32, 0.05 in 16 bits, and 0.1 with another engine
    max_logp_mismatch: Annotated[float, "(0, inf]; .inf disables the check"] = 1.0
    # gather all sharded weights before sampling; False gathers one layer at a time, in every forward pass
    gather_weights: bool = True


# ------------------------------------------------------------------------------ optimizer and ranks


@dataclass
class OptimizerOptions:
    """Optimizer for all stages; learning rate and adam_beta2 are stage options."""

    # AdamW, AdamW with 8-bit moments, or your own optimizer as file.py:name, called with (parameters, learning rate,
    # betas=, weight_decay=) and, if it takes them, names=; its state may only contain tensors
    name: Literal["adamw", "adamw_8bit"] | Code = "adamw"
    weight_decay: Annotated[float, "[0, inf)"] = 0.0  # weight decay for all weights
    max_grad_norm: Annotated[float, "(0, inf]; .inf does not clip"] = 1.0  # maximum gradient norm, for clipping


@dataclass
class ShardingOptions:
    """FSDP2: shard weights, gradients and optimizer state over the ranks."""

    enabled: bool = False  # shard the model; False keeps a full copy on each rank
    # model replicas (HSDP); with one replica per node, no weights are sent between nodes
    replicas: Annotated[int, ">= 1"] = 1
    cpu_offload: bool = False  # keep shards, gradients and optimizer state in CPU memory
    # gather weights and reduce gradients once per optimizer step, not per micro-batch: faster, but GPUs must hold all
    # weights, and all gradients in float32
    once_per_step: bool = False


# ------------------------------------------------------------------------------------------ stages


@dataclass
class TrainingOptions:
    """Options for all training stages."""

    max_steps: Annotated[int, ">= 0"] = 100  # optimizer steps
    prompts_per_step: Annotated[int, ">= 1"] = 32  # prompts per optimizer step, over all ranks
    micro_batch_size: Annotated[int, ">= 1"] = 32  # prompts per forward and backward pass
    learning_rate: Annotated[float, "(0, inf)"] = 1e-6  # learning rate after the warmup
    lr_scheduler_type: Literal["linear", "cosine", "constant"] = "linear"  # learning rate schedule after warmup
    min_lr_ratio: Annotated[float, "[0, 1]"] = 0.0  # final learning rate as a fraction of learning_rate
    warmup_steps: Annotated[int, ">= 0"] = 0  # steps of linear warmup
    adam_beta2: Annotated[float, "[0, 1)"] = 0.99  # AdamW's second-moment decay

    steps_per_generation = 1  # one batch of rows per optimizer step
    num_iterations = 1


@dataclass
class RolloutTrainingOptions(TrainingOptions):
    """Options for stages that sample completions."""

    steps_per_generation: Annotated[int, ">= 1"] = 1  # optimizer steps per pass over a rollout
    num_iterations: Annotated[int, ">= 1"] = 1  # passes over each rollout
    # maximum tokens per forward and backward pass, None = no limit. Completions of a group share their prompt tokens
    # if they are in the same pass
    max_tokens_per_micro_batch: Annotated[int, ">= 1"] | None = None


@dataclass
class SFTOptions(TrainingOptions):
    """Options for supervised fine-tuning."""

    loss_type: Literal["nll", "dft"] = "nll"  # loss: negative log-likelihood or DFT; see losses/sft.py


@dataclass
class DPOOptions(TrainingOptions):
    """Options for DPO and other losses on preference pairs."""

    loss_type: list[str] = field(default_factory=lambda: ["sigmoid"])  # one or more losses from losses/preference.py
    loss_weights: list[Finite] | None = None  # loss weights, None for 1 each; MPO: [0.8, 0.2, 1.0]
    # scale of the log-ratios between policy and reference; larger values keep the policy closer to the reference
    beta: Annotated[float, "(0, inf)"] = 0.1
    # assumed fraction of mislabeled pairs, for the losses sigmoid, exo_pair, robust, aot and aot_unpaired
    label_smoothing: Finite = 0.0
    # divergence that keeps the policy near the reference model
    f_divergence_type: Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"] = "reverse_kl"
    f_alpha_divergence_coef: Finite = 0.5  # alpha for f_divergence_type=alpha_divergence
    ld_alpha: Annotated[float, "[0, 1]"] | None = None  # LD-DPO: weight for tokens beyond the shorter answer's length
    reference_free: bool = False  # train without a reference model, with 0 for its log-probabilities
    # compute reference log-probabilities before the first step, then train without a reference model in memory
    precompute_ref_log_probs: bool = False


@dataclass
class RewardModelOptions(TrainingOptions):
    """Reward model training on preference pairs."""

    # weight on (chosen score + rejected score)^2, which keeps the mean score near 0
    center_rewards_coefficient: Finite | None = None
    # model folder for the reward `reward_model`; None uses the model trained in the stage reward_model
    path: FilePath | None = None


@dataclass
class GRPOOptions(RolloutTrainingOptions):
    """GRPO and its variants, such as GSPO, DAPO and RLOO."""

    num_generations: Annotated[int, ">= 2"] = 8  # G, completions per prompt (group size)
    # dynamic sampling: skip prompts whose completions all have equal rewards, and sample other prompts instead, up to
    # this many batches per step; 1 disables it
    max_num_gen_batches: Annotated[int, ">= 1"] = 1

    # advantages: a name in losses/advantages.py, or your own function as file.py:name. None: rloo for
    # loss_type=rloo, gdpo for multi_objective_aggregation=normalize_then_sum, otherwise grpo
    advantages: Literal["grpo", "gdpo", "rloo"] | Code | None = None
    # divide advantages by the standard deviation of rewards in the group or batch; none: do not divide
    scale_rewards: Literal["group", "batch", "none"] = "group"
    # with several rewards, normalize their weighted sum, or every reward before the sum (GDPO)
    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = "sum_then_normalize"
    # DAPO's length penalty grows over the last N tokens before max_new_tokens; 0 disables it
    soft_punish_cache: Annotated[int, ">= 0"] = 0
    # no loss for completions cut off at max_new_tokens (DAPO's overlong filtering)
    mask_truncated_completions: bool = False

    # policy loss: a grpo_loss variant, or your own function with the same arguments, as file.py:name
    loss_type: Literal["grpo", "bnpo", "dr_grpo", "dapo", "luspo", "rloo", "cispo", "sapo", "vespo"] | Code = "dapo"
    # compute the policy ratio per token, per sequence (GSPO), or per sequence with token gradients (GSPO-token)
    importance_sampling_level: Literal["token", "sequence", "sequence_token"] = "token"
    # clip the policy ratio pi / pi_old to [1 - epsilon_low, 1 + epsilon_high]
    epsilon_low: Annotated[float, "[0, inf]; .inf does not clip"] = 0.2
    epsilon_high: Annotated[float, "[0, inf]; .inf does not clip"] = 0.2  # upper clip range; see epsilon_low
    beta: Annotated[float, "[0, inf)"] = 0.0  # KL penalty weight; 0 needs no reference model
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"  # KL estimator; see losses/grpo.py
    # multiply the KL penalty by pi / pi_old, for an unbiased gradient
    use_bias_correction_kl: bool = True
    # train only on the tokens with the highest entropy; this is their fraction
    top_entropy_quantile: Annotated[float, "(0, 1]"] = 1.0
    entropy_coef: Finite = 0.0  # entropy bonus weight
    # correct for different log-probs in sampling and training by importance sampling; None = no correction
    rollout_correction: Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] | None = None
    # (lower, upper) bounds on the importance ratio, None = no bound, for grpo.rollout_correction
    rollout_correction_bounds: tuple[CorrectionBound, CorrectionBound] = (None, 3.0)

    def __post_init__(self):
        if not 0 <= self.epsilon_low <= self.epsilon_high:  # comparisons with NaN are False, so NaN is rejected
            raise UserError(
                f"epsilon_low is {self.epsilon_low}, but it must be between 0 and epsilon_high, "
                f"which is {self.epsilon_high}"
            )
        if self.loss_type == "cispo" and self.epsilon_high < 1:
            raise UserError(
                f"epsilon_high is {self.epsilon_high}, but for loss_type cispo it is the largest weight of a token, "
                "so it must be at least 1; write 5.0, as --method=cispo does"
            )

    @property
    def advantages_name(self) -> str:
        """Advantage function name, chosen from other options if grpo.advantages is None."""
        if self.advantages is not None:
            return self.advantages
        if self.loss_type == "rloo":
            return "rloo"
        return "gdpo" if self.multi_objective_aggregation == "normalize_then_sum" else "grpo"


@dataclass
class PPOOptions(RolloutTrainingOptions):
    """PPO with a critic."""

    num_generations: Annotated[int, ">= 1"] = 1  # completions per prompt
    num_iterations: Annotated[int, ">= 1"] = 4  # passes over each rollout; num_ppo_epochs in TRL
    # clip the policy ratio pi / pi_old to 1 +- cliprange, and changes in critic values to +- cliprange
    cliprange: Annotated[float, "[0, inf]; .inf does not clip"] = 0.2
    vf_coef: Annotated[float, "[0, inf)"] = 0.1  # critic loss weight
    critic: Literal["shared", "separate"] = "shared"  # value head on the policy, or a separate critic model
    # critic or reward model folder to initialize a separate critic; None copies the policy
    critic_path: FilePath | None = None
    kl_coef: Annotated[float, "[0, inf)"] = 0.05  # KL penalty weight; 0 needs no reference model
    kl_estimator: Literal["k1", "k3"] = "k1"  # KL estimator; see losses/ppo.py
    # penalty subtracted from the reward if a completion has no end token; None = no penalty
    missing_eos_penalty: Finite | None = None
    gamma: Annotated[float, "[0, 1]"] = 1.0  # GAE discount factor
    lam: Annotated[float, "[0, 1]"] = 0.95  # GAE lambda


# ------------------------------------------------------------------------------------------ the run


@dataclass
class RunConfig:
    """All options for a training run."""

    # seed for weights, data order, sampling, and what your own code draws from torch, numpy and random
    seed: int = 0
    output_dir: str = "runs/default"  # folder for all run files
    # training stages, in order; your own as file.py:Class, with the section name in Class.stage
    stages: list[Code] = field(default_factory=lambda: [Code("grpo")])
    # maximum epochs per stage; repeated passes over a rollout do not count as epochs
    max_epochs: Annotated[float, "(0, 1e6]"] | None = None
    # CPU threads per rank; None uses OMP_NUM_THREADS, or an equal share of cores
    num_threads: Annotated[int, "[1, 4096]"] | None = None
    # minutes between saved states, from which a run can resume; a state is also saved at the end of a stage
    state_minutes: Annotated[float, "[0, inf)"] = 10.0
    # also save a state every N steps; if this and state_minutes are 0, a state is saved only after a signal such as
    # SIGTERM
    state_steps: Annotated[int, ">= 0"] = 0
    # "auto" resumes from the newest state in output_dir, if there is one; a path resumes from that state; "never"
    # deletes all states in output_dir, and starts over
    resume: str | None = None
    eval_steps: Annotated[int, ">= 0"] = 0  # also evaluate every N steps; 0 evaluates only between stages
    # evaluate before the first step; turn it off if an earlier run has evaluated the model
    eval_on_start: bool = True
    # also write a checkpoint (weights) to checkpoint/ every N steps; 0 writes them only after a stage
    save_steps: Annotated[int, ">= 0"] = 0
    # what save_steps and best_metric save: all weights with the adapter merged, or only the adapter. Final weights are
    # always merged
    save: Literal["merged", "adapter"] = "merged"
    log_completions: Annotated[int, ">= 0"] = 10  # steps between entries in completions.jsonl; 0 logs no completions
    # evaluation metric that selects the weights saved in best/, such as eval/accuracy_greedy
    best_metric: str | None = None
    # metric trackers, or your own function as file.py:name, which is called with (config, steps, closing) and returns a
    # function log(values, steps)
    report_to: list[Literal["tensorboard", "trackio", "wandb"] | Code] = field(default_factory=list)
    # refuse to start if the memory estimate exceeds GPU memory
    check_memory: bool = True
    # seconds that a rank waits for others in an optimizer step; sampling, rewards and saving may take longer
    timeout: Annotated[float, "(0, 1e9)"] = 600.0
    # hours to wait for a rank that hangs, for example in a reward or while reading an image, before the run ends
    max_wait_hours: Annotated[float, "(0, 720]"] = 24.0
    model: ModelOptions = field(default_factory=ModelOptions)
    adapter: LoRAOptions = field(default_factory=LoRAOptions)
    data: DataOptions = field(default_factory=DataOptions)
    sharding: ShardingOptions = field(default_factory=ShardingOptions)
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    rollout: RolloutOptions = field(default_factory=RolloutOptions)
    # weighted sum that GRPO and PPO maximize: {reward name: weight}, such as {accuracy: 1.0}
    rewards: Weights = field(default_factory=lambda: {RewardName("format"): 0.5, RewardName("accuracy"): 1.0})
    optimizer: OptimizerOptions = field(default_factory=OptimizerOptions)
    reference: ReferenceOptions = field(default_factory=ReferenceOptions)
    sft: SFTOptions = field(default_factory=SFTOptions)
    dpo: DPOOptions = field(default_factory=DPOOptions)
    reward_model: RewardModelOptions = field(default_factory=RewardModelOptions)
    grpo: GRPOOptions = field(default_factory=GRPOOptions)
    ppo: PPOOptions = field(default_factory=PPOOptions)

    def __post_init__(self):
        # set by load_config; not recipe options
        self.recipe = ""
        # recipe sections without effect, because their stages are not in --stages
        self.unused_sections: list[str] = []
        # {user-defined stage: its recipe section}, such as {"my_stage.py:Again": "again"}
        self.names_of_files: dict[str, str] = {}
        if self.rewards and not any(self.rewards.values()):
            raise UserError(
                f"rewards are {self.rewards}; at least one weight must not be 0, because otherwise nothing is learned"
            )

    def __getattr__(self, name: str):
        """Raise AttributeError for an unknown attribute, with advice if a recipe section has an option of this name."""
        stages = [stage for stage, section in vars(self).items() if name in getattr(section, "__dict__", ())]
        hint = f"; the sections {', '.join(stages)} have it: a stage reads self.options.{name}" if stages else ""
        raise AttributeError(f"the recipe has no option {name!r}{hint}", name=name, obj=self)

    @property
    def stage_names(self) -> list[str]:
        """Stage names, which are also section names, such as `again` for my_stage.py:Again."""
        return [self.names_of_files.get(stage, stage) for stage in self.stages]

    @property
    def eval_rewards(self) -> list[RewardName]:
        """Evaluation rewards: data.eval_rewards, by default the training rewards.

        Training rewards are sorted by weight, the largest first, with format rewards last. Evaluations skip the
        reward `reward_model`, which only a trainer computes; without other rewards, they use accuracy and format.
        """
        names = [name for name in self.rewards if name != "reward_model"]
        names.sort(key=lambda name: (name.endswith("format"), -self.rewards[name]))
        return self.data.eval_rewards or names or [RewardName("accuracy"), RewardName("format")]

    @property
    def uses_fsdp(self) -> bool:
        """Whether FSDP2 wraps the model, for sharding or for model.compute_dtype."""
        return self.sharding.enabled or self.model.compute_dtype is not None
