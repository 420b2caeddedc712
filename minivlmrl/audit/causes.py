"""Known causes of a wrong step, one table: a deviation of a stage, what it says, where it is written, what it costs.

The search takes them in this order, each alone and then in pairs; `change` is what the stage's function understands.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Cause:
    """One deviation of a stage from its definition."""

    name: str
    stages: str  # names, or a prefix of names: "logps" is each of the three
    change: tuple  # ((key, value), ...)
    sentence: str
    source: str = ""  # a line of a paper or of code, or a thread
    cost: str = ""


def cause(name: str, stages: str, sentence: str, source: str = "", cost: str = "", **change) -> Cause:
    return Cause(name, stages, tuple(change.items()), sentence, source, cost)


LEFT, OTHER = "advantages.py: centred / (std + EPSILON)", "losses.py: AVERAGES"
STEP, MASKS = "losses.py: Counts, of the whole optimizer step", "generate.py: a stop token ends a completion"
RATIO, KL = "losses.py: importance_ratio (GSPO eq. 7, DeepSeekMath eq. 3)", "losses.py: kl_term (DeepSeekMath eq. 4)"
CLIP, ADAMW = "losses.py: clipped (PPO eq. 7)", "AdamW, arXiv 1711.05101, algorithm 2"
BIAS = "another weight for long and short completions"
STEPS = "the learning rate means something else"
CAUSES = [
    # advantages from rewards
    cause("ddof 0", "advantages", "the standard deviation divides by n, not n - 1", LEFT, "larger by 1/sqrt(1 - 1/G)", ddof=0),
    *(cause(f"epsilon {e:g}", "advantages", f"{e:g} is added to the standard deviation, not 1e-4", LEFT, epsilon=e,
            cost="none, but for groups with nearly equal rewards") for e in (0.0, 1e-8, 1e-6, 1e-5, 1e-3, 1e-2, 0.1, 1.0)),
    cause("epsilon inside", "advantages", "epsilon is added to the variance", LEFT, inside=True),
    *(cause(f"scaled by {s}", "advantages", f"divided by the standard deviation of: {s}", "Dr. GRPO, arXiv 2503.20783",
            "weights hard and easy prompts otherwise", scale=s) for s in ("none", "group", "batch")),
    *(cause(f"centred on {c}", "advantages", f"the baseline is the mean of: {c}", "DeepSeekMath eq. 21",
            "a baseline of other prompts adds variance, none rewards everything", centre=c)
      for c in ("batch", "none", "median", "others", "best")),
    *(cause(f"groups: {g}", "advantages", f"completions are compared with the wrong group ({g})", "R1-V PR 49 and 54",
            "rewards of other prompts become the baseline", group=g) for g in ("next", "interleaved", "double", "halves")),
    cause("reward weights ignored", "advantages", "all rewards count 1", "grpo.py: combine", weights="ones"),
    cause("reward weights averaged", "advantages", "weights are divided by their number", "grpo.py: combine", weights="mean"),
    cause("missing is 0", "advantages", "a completion that nothing judged has reward 0", "TRL up to 1.5", missing=True),
    cause("the other aggregation", "advantages", "rewards are normalised before (GDPO) or after their sum", "GDPO",
          **{"other aggregation": True}),
    cause("normalised twice", "advantages", "advantages are normalised once more over the batch", LEFT, again=True),
    *(cause(f"advantages {a}", "advantages rows", f"advantages are {a}", "R1-V PR 54, issue 146",
            "completions are rewarded for what others did", after=a)
      for a in ("negative", "rolled", "rolled back", "reversed", "positive", "clipped", "absolute", "zero")),
    cause("rows not shuffled", "rows", "rows were shuffled, their advantages were not", "R1-V PR 54", order="unshuffled"),
    # which tokens count
    cause("truncated counted", "mask", "truncated completions count", "DAPO, overlong filtering", truncated="kept"),
    cause("truncated dropped", "mask", "truncated completions do not count", "TRL mask_truncated_completions", truncated="dropped"),
    *(cause(f"mask: {m}", "mask loss", s, MASKS, c, mask=m) for m, s, c in (
        ("no end", "the end token is not trained on", "the policy never learns to stop"),
        ("padding", "padding is counted as completion", BIAS), ("prompt", "prompt tokens are counted", "the prompt is learned"),
        ("no first", "the first token is not trained on", ""), ("later", "the mask is shifted by one, to later tokens", ""),
        ("earlier", "the mask is shifted by one, to earlier tokens", "the end token is lost, a prompt token counted"),
        ("everything", "every column is counted", BIAS), ("next row", "the mask is that of another row", ""),
        ("only end", "only the last token is counted", ""))),
    # averages
    cause("mean of means", "loss", "each micro-batch is averaged by itself, then these means", STEP + "; arXiv 2604.23747",
          "tokens of short micro-batches weigh more", over="micro_batch"),
    cause("mean of the step", "loss", "the mean is over the step, not each micro-batch", STEP, over="step"),
    *(cause(f"averaged as {a}", "grpo", f"the average is that of loss_type {a}", OTHER, BIAS, average=a)
      for a in ("grpo", "dapo", "dr_grpo", "luspo", "bnpo")),
    cause("mean of rows", "sft", "each row is averaged by itself, then these means", STEP, BIAS, rows=True),
    cause("divided by padded length", "loss", "sums are divided by padding too", OTHER, BIAS, divide="padding"),
    cause("divided by prompt and completion", "loss", "sums are divided by prompt tokens too", OTHER, BIAS, divide="prompt"),
    # the ratio, the clip, the KL
    *(cause(n, st, s, src, c, inputs=i) for st, n, i, s, src, c in (
        ("grpo", "old ignored", "no old", "the ratio is 1: old log-probabilities are the present ones", RATIO, "nothing is clipped"),
        ("grpo", "gradient of the ratio is 0", "live old", "old log-probabilities carry the gradient too", "mlx-lm-lora 55", "nothing is learned"),
        ("grpo", "ratio without gradient", "frozen ratio", "the ratio is detached", RATIO, "nothing is learned"),
        ("grpo", "ratio inverted", "inverted ratio", "the ratio is old / new", RATIO, "good completions become less likely"),
        ("grpo", "old is the reference", "old is reference", "the ratio is to the reference", RATIO, "the clip binds for good"),
        ("grpo", "old of another row", "old of next row", "old log-probabilities are of another row", RATIO, "random ratios"),
        ("grpo", "old one token later", "old later", "old log-probabilities are shifted by one", RATIO, "random ratios"),
        ("grpo", "old one token earlier", "old earlier", "old log-probabilities are shifted by one", RATIO, "random ratios"),
        ("grpo", "sequence mean over padding", "padded length", "the sequence's ratio divides by the padded length", RATIO, ""),
        ("grpo", "KL reversed", "reversed KL", "policy and reference are exchanged in the KL", KL, "another divergence is bounded"),
        ("grpo", "KL without gradient", "frozen KL", "the KL is detached", KL, "beta does nothing"),
        ("grpo dpo", "reference carries gradient", "live reference", "the reference is the policy itself", KL, "beta does nothing"),
        ("grpo dpo", "reference is the policy", "reference is policy", "the reference moves with the policy", KL, "beta does nothing"),
        ("grpo", "reference is old", "reference is old", "the reference is the old policy", KL, "nothing holds the policy"),
        ("grpo dpo", "no reference", "no reference", "the reference is left out (its log-probabilities are 0)", "DPO eq. 7", "another objective"),
        ("grpo dpo", "policy and reference exchanged", "swapped", "policy and reference are exchanged", "DPO eq. 7", "preferences are unlearned"),
        ("grpo dpo", "reference of another row", "reference of next row", "reference log-probabilities are of another row", KL, ""),
        ("grpo dpo", "reference one token later", "reference later", "reference log-probabilities are shifted by one", KL, ""),
        ("grpo dpo", "reference one token earlier", "reference earlier", "reference log-probabilities are shifted by one", KL, ""))),
    cause("KL with the wrong sign", "grpo", "the KL is subtracted", KL, "the policy is driven away", KL=-1.0),
    cause("no KL", "grpo", "beta is ignored", KL, "nothing holds the policy", KL=0.0),
    *(cause(f"KL times {k:g}", "grpo", f"the KL counts {k:g} times", KL, KL=k) for k in (0.5, 2.0)),
    cause("KL corrected the other way", "grpo", "the KL is (not) weighed with the ratio", "losses.py: correct_kl", "a biased gradient of the KL",
          use_bias_correction_kl=lambda o: not o.use_bias_correction_kl),
    *(cause(f"KL {k}", "grpo", f"the estimator of the KL is {k}", "losses.py: kl_term, its table", kl_estimator=k) for k in ("k1", "k2", "k3")),
    cause("clip on the wrong side", "grpo", "the larger of both terms is taken", CLIP, "only ratios that left the range move", flip=True),
    cause("no clip", "grpo", "ratios are not clipped", CLIP, "large updates off-policy", epsilon_low=1e9, epsilon_high=1e9),
    cause("no clip below", "grpo", "ratios are not clipped below", CLIP, epsilon_low=1e9),
    cause("no clip above", "grpo", "ratios are not clipped above", CLIP, epsilon_high=1e9),
    cause("clip sides exchanged", "grpo", "epsilon_low and epsilon_high are exchanged", "DAPO, clip higher",
          epsilon_low=lambda o: o.epsilon_high, epsilon_high=lambda o: o.epsilon_low),
    cause("epsilon_high ignored", "grpo", "both sides are clipped by epsilon_low", "DAPO, clip higher", epsilon_high=lambda o: o.epsilon_low),
    cause("epsilon_low ignored", "grpo", "both sides are clipped by epsilon_high", "DAPO", epsilon_low=lambda o: o.epsilon_high),
    cause("no delta", "grpo", "the bound delta is ignored", "INTELLECT-2, arXiv 2505.07291", delta=None),
    *(cause(f"ratio by {level}", "grpo", f"the ratio is by {level}", RATIO, importance_sampling_level=level)
      for level in ("token", "sequence", "sequence_sum", "sequence_token")),
    *(cause(f"term of {t}", "grpo", f"the term is that of {t}", "policy_losses.py", loss_type=t) for t in ("grpo", "cispo", "sapo", "vespo")),
    cause("no correction of the sampler", "grpo", "the sampler's ratio is left out", "policy_losses.py", **{"no correction": True}),
    cause("all tokens", "grpo", "top_entropy_quantile is ignored", "arXiv 2506.01939", top_entropy_quantile=1.0),
    cause("entropy with the wrong sign", "grpo", "entropy is punished", "policy_losses.py", "early collapse", entropy_coef=lambda o: -o.entropy_coef),
    cause("no entropy bonus", "grpo", "entropy_coef is ignored", "policy_losses.py", entropy_coef=0.0),
    *(cause(f"advantages {a} in the loss", "grpo", f"the loss takes advantages that are {a}", "R1-V PR 54", advantages=a)
      for a in ("negative", "rolled", "rolled back", "reversed", "positive", "clipped", "absolute")),
    cause("advantages whitened", "grpo", "each micro-batch normalises advantages again", STEP, "depends on the split", whitened=True),
    cause("chosen and rejected exchanged", "dpo", "the rejected answer is preferred", "DPO eq. 7", "preferences are unlearned", exchanged=True),
    cause("mean log-probabilities", "dpo", "log-probabilities are averaged over tokens", "DPO eq. 7", BIAS, mean=True),
    *(cause(f"beta {b:g}", "dpo", f"beta is {b:g}", "DPO eq. 7", beta=b) for b in (1.0, 0.1, 0.5)),
    *(cause(f"loss {t}", "sft", f"the loss is {t}", "DFT eq. 9", loss_type=t) for t in ("nll", "dft")),
    # log-probabilities by the model
    *(cause(n, "logps", s, src, c, **{k: v}) for n, k, v, s, src, c in (
        ("temperature left out", "temperature", "none", "logits are not divided by the temperature", "TRL PR 3029, 4159", "ratios are not 1 on-policy"),
        ("temperature twice", "temperature", "twice", "logits are divided twice by the temperature", "TRL PR 3029", ""),
        ("temperature inverse", "temperature", "inverse", "logits are multiplied with the temperature", "TRL PR 3029", ""),
        ("picture ignored", "images", "none", "the model sees no picture", "unsloth PR 11031", "ratio and KL compare two models"),
        ("picture of another row", "images", "next row", "pictures go to other rows", "R1-V PR 49", "answers are about other pictures"),
        ("text positions", "positions", "text", "positions are 1-D, without M-RoPE", "transformers PR 40490, TRL 5279", "another model than at inference"),
        ("one token later", "shift", "later", "log-probabilities are shifted by one", "logprobs.py", "each token has its neighbour's"),
        ("one token earlier", "shift", "earlier", "log-probabilities are shifted by one", "logprobs.py", "each token has its neighbour's"),
        ("bfloat16", "dtype", "bfloat16", "computed in bfloat16", "verl, NeMo-RL: sampler and trainer differ", "ratios with noise"))),
    # gradients and update
    cause("only the last micro-batch", "gradients", "gradients of earlier micro-batches are dropped", "arXiv 2604.23747", "a smaller batch", parts="last"),
    cause("only the first micro-batch", "gradients", "gradients of later micro-batches are dropped", "arXiv 2604.23747", "a smaller batch", parts="first"),
    cause("clipped before accumulation", "gradients", "each micro-batch is clipped by itself", "train.py: optimizer_step", "another direction", **{"clipped parts": True}),
    *(cause(f"no gradient: {n}", "gradients", f"{n} gets no gradient", "VLM-R1 52", "it is not trained", without=p) for n, p in (
        ("the vision tower", r"^visual\."), ("the merger", "merger"), ("the head", "lm_head"), ("embeddings", "embed_tokens"), ("the decoder", r"^model\."))),
    *(cause(n, "clip", s, "train.py: optimizer_step", c, clip=k) for n, k, s, c in (
        ("not clipped", "none", "gradients are not clipped", "one bad step"), ("clipped by value", "value", "entries are clipped, not the norm", "another direction"),
        ("each tensor clipped", "each", "each parameter is clipped by its own norm", "another direction"),
        ("always scaled", "always", "short gradients are made longer", STEPS))),
    cause("norm after clipping", "clip", "the norm that is logged is that of clipped gradients", "train.py", "hides large gradients", logged="clipped"),
    *(cause(n, "update", s, ADAMW, c, **{k: v}) for n, k, v, s, c in (
        ("decay exchanged", "decay", "exchanged", "weights that are excluded from decay decay, the others do not", ""),
        ("decay on norms", "decay", "all", "norms and biases decay too", "norms shrink over long runs"), ("no decay", "decay", "none", "nothing decays", ""),
        ("L2 instead of decay", "coupled", True, "decay is part of the gradient (Adam)", "decay depends on the gradient's size"),
        ("betas exchanged", "betas", True, "beta1 and beta2 are exchanged", ""), ("no bias correction", "uncorrected", True, "moments are not corrected", "large first steps"),
        ("epsilon inside", "inside", True, "epsilon is inside the root", ""), ("state lost", "reset", True, "moments begin anew", "each step is Adam's first"),
        ("updated twice", "times", 2, "the update is done twice", STEPS), ("not clipped", "unclipped", True, "the update takes gradients before clipping", ""),
        ("SGD", "rule", "sgd", "the update is the gradient", STEPS), ("sign", "rule", "sign", "the update is the sign of the gradient", STEPS),
        ("vision tower frozen", "frozen", r"visual\.", "the vision tower does not move", "it is not trained"), ("head frozen", "frozen", "lm_head", "the head does not move", ""),
        ("embeddings frozen", "frozen", "embed_tokens", "embeddings do not move", ""), ("norms frozen", "frozen", "norm", "norms do not move", ""))),
    cause("one step late", "schedule", "the rate is that of the step before", "train.py: learning_rate", STEPS, late=-1),
    cause("one step early", "schedule", "the rate is that of the step after", "train.py: learning_rate", STEPS, late=1),
    cause("steps by micro-batch", "schedule", "the schedule counts micro-batches", "accelerate: step_with_optimizer", "it ends early", micro=True),
    cause("no warmup", "schedule", "warmup_steps are ignored", "train.py: learning_rate", **{"no warmup": True}),
    cause("steps twice", "schedule", "the schedule moves twice a step", "accelerate: split_batches", "it ends early", steps=2),
    *(cause(f"schedule {t}", "schedule", f"the schedule is {t}", "train.py: learning_rate", type=t) for t in ("linear", "cosine", "constant")),
]  # fmt: skip
