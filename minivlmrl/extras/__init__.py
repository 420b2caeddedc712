"""Optional features. A recipe that uses no optional feature runs the same without the folder extras/.

The core loads the modules of extras/ by name. Every run loads the callbacks that watch it (run/callbacks.py lists
them). The other modules are loaded only if a recipe, a command line or a model's config.json names the feature:

| here | what it is | named by |
|---|---|---|
| answers/ | answers to one prompt (chat) or to a file of rows (evaluate, generate) | `minivlmrl chat` |
| agents/ | tools, environments and trajectories | `sampling.environment` |
| check/ | problems in a recipe, found before training | each run, and `minivlmrl check` |
| convert/ | conversion of rows between our form and those of other projects | `minivlmrl convert` |
| families/ | Qwen3-VL, Qwen3.5, and mixtures of experts | `model_type` in config.json |
| adamw8bit.py | AdamW with moments in 8 bits | `optimizer.name: adamw_8bit` |
| kto.py | the KTO loss | a stage of your own |
| inputs.py | texts and images that the first step's loss ignores | each run |
| memory/ | the GPU memory and the shortest time that a run needs | each run, and `minivlmrl memory` |
| names.py | what docs/coming_from.md and docs/changelog.md say about a name | a name that is not an option |
| merge.py | an adapter merged into its base model | `minivlmrl merge` |
| moving_reference.py | a reference model that follows the policy | `reference.sync_ref_model` |
| parity/ | mistakes in a loss, or in a step of any trainer | `minivlmrl parity` |
| reward_model.py | a stage for reward models, and their reward | `stages` and `rewards: {reward_model: 1}` |
| reference_logps.py | DPO without a second model | `dpo.precompute_ref_log_probs` |
| report.py | the page report.html of a run | each run, and `minivlmrl report` |
| replay.py | a repeated step of a run | `minivlmrl replay` |
| tensorboard.py, weights_and_biases.py | trackers of metrics | `report_to` |
| trl.py, trl_inputs.py | our loss and our input check in TRL's trainers | your own script |
| video_files.py | the frames of video files | a row with a video file |
| vllm.py | rollouts from vLLM's logits | `sampling.engine: vllm` |
| warnings.py | signs that a run does not learn | each run |
"""
