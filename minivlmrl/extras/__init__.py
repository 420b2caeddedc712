"""Optional features. A recipe that uses no optional feature runs the same without the folder extras/.

The core imports a module of extras/ only when a recipe, a command line or a model's config.json names the feature:

| here | what it is | named by |
|---|---|---|
| agents/ | tools, environments and trajectories | `sampling.environment` |
| check/ | problems of a recipe before training | `python -m minivlmrl check` |
| convert/ | rows of other projects, in our form or theirs | `python -m minivlmrl convert` |
| families/ | Qwen3.5, and mixtures of experts | `model_type` in config.json |
| adamw8bit.py | AdamW with moments in 8 bits | `optimizer.name: adamw_8bit` |
| kto.py | the KTO loss | a stage of your own |
| memory/ | the GPU memory and the shortest time that a run needs | `python -m minivlmrl memory` |
| parity/ | mistakes in a loss, or in a step of any trainer | `python -m minivlmrl parity` |
| reward_model.py | a stage for reward models, and their reward | `stages` and `rewards: {reward_model: 1}` |
| replay.py | a step of a run again | `python -m minivlmrl replay` |
| tensorboard.py, weights_and_biases.py | trackers of metrics | `report_to` |
| trl.py, trl_inputs.py | our loss and our input check in TRL's trainers | your own script |
| video_files.py | the frames of video files | a row with a video file |
| vllm.py | rollouts from vLLM's logits | `sampling.engine: vllm` |
"""
