"""Optional features. Recipes that use none of them run the same without the folder extras/.

The core loads these modules by name: watchers (run/callbacks.py) in every run, others if a recipe, a command or a
model's config.json names them.

| here | what it is | named by |
|---|---|---|
| answers/ | answers to one prompt (chat) or to a file of rows (evaluate, generate) | `minivlmrl chat` |
| agents/ | tools, environments, trajectories | `sampling.environment` |
| check/ | recipe problems, found before training | each run, and `minivlmrl check` |
| convert/ | row conversion between our format and other projects | `minivlmrl convert` |
| families/ | Qwen3-VL, Qwen3.5, mixtures of experts | `model_type` in config.json |
| adamw8bit.py | AdamW with 8-bit moments | `optimizer.name: adamw_8bit` |
| kto.py | KTO loss | a stage of your own |
| inputs.py | warnings about texts and images without effect on the loss | each run |
| memory/ | GPU memory and minimum time for a run | each run, and `minivlmrl memory` |
| names.py | answers from docs/coming_from.md and docs/changelog.md | a name that is not an option |
| merge.py | merge an adapter into its base model | `minivlmrl merge` |
| moving_reference.py | reference model that follows the policy | `reference.sync_ref_model` |
| parity/ | mistakes in a loss, or in a step of any trainer | `minivlmrl parity` |
| reward_model.py | reward-model stage, and its reward | `stages` and `rewards: {reward_model: 1}` |
| reference_logps.py | DPO without a second model | `dpo.precompute_ref_log_probs` |
| report.py | report.html for a run | each run, and `minivlmrl report` |
| replay.py | repeat a training step | `minivlmrl replay` |
| tensorboard.py, weights_and_biases.py | metric trackers | `report_to` |
| trl.py, trl_inputs.py | our loss and input check in TRL's trainers | your own script |
| video_files.py | frames from video files | a row with a video file |
| vllm.py | rollouts from vLLM's logits | `sampling.engine: vllm` |
| warnings.py | signs that a run does not learn | each run |
"""
