#!/usr/bin/env bash
# Two hosts on one machine: network namespaces joined by a virtual cable, one torchrun and one rank in each (Linux, root,
# iproute2). Shows that (1) they end with the figures and weights of two ranks on one host, (2) a cut cable ends the job
# with an error within the time limit, (3) the same two commands, started again, go on and end as if nothing had been.
#
#     tests/two_hosts.sh [FOLDER]        # about two minutes; PYTHON=... chooses the interpreter
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python}
folder=${1:-$(mktemp -d)}
one=minivlmrl-one-$$ two=minivlmrl-two-$$
limit=20 # seconds that a rank waits for another
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
steps=${STEPS:-40}
options=(recipes/shapes.yaml "--stages=[grpo]" --grpo.max_steps="$steps" --grpo.num_iterations=2 --grpo.steps_per_generation=2
  --data.eval_rows=8 --num_threads=1 --state_steps=4 --timeout="$limit" --resume=auto)

clean() {
  ip netns pids "$one" 2>/dev/null | xargs -r kill -9 2>/dev/null || true
  ip netns pids "$two" 2>/dev/null | xargs -r kill -9 2>/dev/null || true
  ip netns del "$one" 2>/dev/null || true
  ip netns del "$two" 2>/dev/null || true
}
trap clean EXIT

ip netns add "$one"
ip netns add "$two"
ip link add cable-one netns "$one" type veth peer name cable-two netns "$two"
ip -n "$one" addr add 10.77.0.1/24 dev cable-one
ip -n "$two" addr add 10.77.0.2/24 dev cable-two
for host in "$one:cable-one" "$two:cable-two"; do
  ip -n "${host%%:*}" link set lo up
  ip -n "${host%%:*}" link set "${host##*:}" up
done

# host NAME CABLE NODE_RANK OUTPUT: torchrun on one of the two hosts
host() {
  ip netns exec "$1" env GLOO_SOCKET_IFNAME="$2" NCCL_SOCKET_IFNAME="$2" "$python" -m torch.distributed.run \
    --nnodes=2 --node_rank="$3" --nproc_per_node=1 --master_addr=10.77.0.1 --master_port=29500 \
    train.py "${options[@]}" --output_dir="$4"
}

echo "== two ranks on one host"
"$python" -m torch.distributed.run --standalone --nproc_per_node=2 train.py "${options[@]}" --output_dir="$folder/together" \
  >"$folder/together.log" 2>&1

echo "== two hosts, the cable is cut on the way"
host "$one" cable-one 0 "$folder/apart" >"$folder/one.log" 2>&1 &
first=$!
host "$two" cable-two 1 "$folder/apart" >"$folder/two.log" 2>&1 &
second=$!
until [ -e "$folder/apart/states/000008" ]; do
  kill -0 $first || { cat "$folder/one.log"; exit 1; }
  sleep 0.1
done
ip -n "$two" link set cable-two down
cut=$SECONDS
code=0; wait $first || code=$?
other=0; wait $second || other=$?
echo "exit codes $code and $other, $((SECONDS - cut)) s after the cut (limit of a rank: $limit s)"
[ $code != 0 ] && [ $other != 0 ] && [ $((SECONDS - cut)) -le 60 ]
grep -h "Error" "$folder/one.log" "$folder/two.log" | sort | uniq -c | sort -rn | head -5

echo "== the cable is back, the same commands"
ip -n "$two" link set cable-two up
host "$one" cable-one 0 "$folder/apart" >"$folder/one.log" 2>&1 &
first=$!
host "$two" cable-two 1 "$folder/apart" >"$folder/two.log" 2>&1 &
second=$!
wait $first
wait $second
grep -h "resumes from" "$folder/one.log"
cmp "$folder/together/metrics.jsonl" "$folder/apart/metrics.jsonl"
cmp "$folder/together/checkpoint/model.safetensors" "$folder/apart/checkpoint/model.safetensors"
echo "== the same bytes: metrics.jsonl and the weights after $steps steps"
