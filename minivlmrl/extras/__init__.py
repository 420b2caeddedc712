"""Optional features: a recipe that uses none of them also runs without the folder extras/.

Each module is loaded by name when a recipe, a command or a model's config.json needs it.

| module | used by |
|---|---|
| answers/ | `minivlmrl chat`, `evaluate` and `generate` |
| agents/ | `sampling.environment` (tools) |
| compare.py | `minivlmrl report --against` |
| convert/ | `minivlmrl convert` |
| families/ | `model_type` in config.json (Qwen3-VL, Qwen3.5, MoE) |
| adamw8bit.py | `optimizer.name: adamw_8bit` |
| kto.py | your own training stage |
| names.py | errors about unknown options, to suggest others |
| merge.py | `minivlmrl merge` |
| moving_reference.py | `reference.sync_ref_model` |
| parity/ | `minivlmrl parity` |
| reward_model.py | stage `reward_model`, `rewards: {reward_model: 1}` |
| reference_logps.py | `dpo.precompute_ref_log_probs` |
| tensorboard.py, trackio_tracker.py, weights_and_biases.py | `report_to` |
| trl.py | your own TRL script |
| video_files.py | rows with video files |
| vllm.py | `sampling.engine: vllm` |
"""
