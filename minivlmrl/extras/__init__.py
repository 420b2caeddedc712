"""Optional features. Recipes that use none of these features run the same without the folder extras/.

The core loads these modules by name: watchers (run/callbacks.py) in every run, others if a recipe, a command or a
model's config.json names them.

| here | what it is | named by |
|---|---|---|
| answers/ | chat, evaluate and generate | `minivlmrl chat` |
| agents/ | tools, environments, trajectories | `sampling.environment` |
| check/ | checks before training | each run, and `minivlmrl check` |
| convert/ | row conversion to and from other formats | `minivlmrl convert` |
| families/ | Qwen3-VL, Qwen3.5, mixtures of experts | `model_type` in config.json |
| adamw8bit.py | AdamW with 8-bit moments | `optimizer.name: adamw_8bit` |
| kto.py | KTO loss | a stage of your own |
| inputs.py | check that the loss depends on all inputs | each run |
| memory/ | GPU memory and minimum time for a run | each run, and `minivlmrl memory` |
| names.py | suggestions for unknown options | an unknown option |
| merge.py | merge an adapter into its base model | `minivlmrl merge` |
| moving_reference.py | reference model that follows the policy | `reference.sync_ref_model` |
| parity/ | mistakes in a loss, or in a step of any trainer | `minivlmrl parity` |
| reward_model.py | reward-model stage, and its reward | `stages` and `rewards: {reward_model: 1}` |
| reference_logps.py | DPO without a second model | `dpo.precompute_ref_log_probs` |
| report.py | report.html for a run | each run, and `minivlmrl report` |
| replay.py | repeat a training step | `minivlmrl replay` |
| tensorboard.py, weights_and_biases.py | metric trackers | `report_to` |
| trl.py, trl_inputs.py | loss and input check for TRL's trainers | your own script |
| video_files.py | frames from video files | a row with a video file |
| vllm.py | rollouts from vLLM's logits | `sampling.engine: vllm` |
| warnings.py | signs that a run does not learn | each run |
"""
