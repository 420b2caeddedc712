#!/usr/bin/env bash
# Two hosts on one machine: network namespaces joined by a virtual cable, one torchrun and one rank in each (Linux, root,
# iproute2). The script shows two things. (1) Two hosts end with the same bytes as two ranks on one host, although the
# cable is cut during the run. The cut ends the job with an error within a minute, and the same two commands
# resume it. (2) If a rank dies, torchrun restarts it, and the job continues.
#
#     tests/two_hosts.sh [FOLDER]        # about four minutes; PYTHON=... chooses the interpreter
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python}
folder=${1:-$(mktemp -d)}
mkdir -p "$folder"
one=minivlmrl-one-$$ two=minivlmrl-two-$$
limit=20 # seconds that a rank waits for another
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
options=(recipes/shapes.yaml --sft.max_steps=30 --grpo.max_steps=12 --grpo.num_iterations=2 --grpo.steps_per_generation=2
  --data.eval_rows=8 --num_threads=1 --state_steps=4 --timeout="$limit" --max_wait_hours=0.01 --resume=auto)
by_rank=(--node_rank=RANK --master_addr=10.77.0.1 --master_port=29500)
elastic=(--rdzv_backend=c10d --rdzv_endpoint=10.77.0.1:29500 --rdzv_id=night --max-restarts=1)

clean() {
  for host in "$one" "$two"; do
    ip netns pids "$host" 2>/dev/null | xargs -r kill -9 2>/dev/null || true
    ip netns del "$host" 2>/dev/null || true
  done
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

# start OUTPUT LAUNCHER...: run torchrun on both hosts in the background, as $first and $second. is_host tells torchrun
# where the rendezvous is; otherwise it would compare the names of the hosts.
start() {
  local output=$1
  shift
  for host in "$one cable-one 0 10.77.0.1" "$two cable-two 1 10.77.0.2"; do
    read -r name cable rank address <<<"$host"
    ip netns exec "$name" env GLOO_SOCKET_IFNAME="$cable" TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 \
      "$python" -m torch.distributed.run --nnodes=2 --nproc_per_node=1 --local_addr="$address" \
      "${@/RANK/$rank}" "--rdzv_conf=is_host=$((1 - rank))" \
      train.py "${options[@]}" --output_dir="$output" >"$output-$rank.log" 2>&1 &
    [ "$rank" = 0 ] && first=$! || second=$!
  done
}

# reached OUTPUT STATE: wait until a state is written
reached() {
  until [ -e "$1/states/$2" ]; do
    kill -0 $first 2>/dev/null && kill -0 $second 2>/dev/null || { cat "$1"-*.log; exit 1; }
    sleep 0.1
  done
}

same() {
  cmp "$folder/together/metrics.jsonl" "$1/metrics.jsonl"
  cmp "$folder/together/checkpoint/model.safetensors" "$1/checkpoint/model.safetensors"
  echo "   the same bytes as on one host: metrics.jsonl and the weights"
}

echo "== two ranks on one host"
"$python" -m torch.distributed.run --standalone --nproc_per_node=2 train.py "${options[@]}" \
  --output_dir="$folder/together" >"$folder/together.log" 2>&1

echo "== two hosts, the cable is cut after 34 steps"
start "$folder/cut" "${by_rank[@]}"
reached "$folder/cut" 000034
ip -n "$two" link set cable-two down
begin=$SECONDS code=0 other=0
wait $first || code=$?
wait $second || other=$?
echo "   exit codes $code and $other, $((SECONDS - begin)) s after the cut (limit of a rank: $limit s)"
[ $code != 0 ] && [ $other != 0 ] && [ $((SECONDS - begin)) -le 60 ]
grep -ho "rank [01] lost the connection to another rank" "$folder"/cut-[01].log | sort -u

echo "== the cable is back, the same commands"
ip -n "$two" link set cable-two up
start "$folder/cut" "${by_rank[@]}"
wait $first
wait $second
grep -h "resuming from" "$folder/cut-0.log"
same "$folder/cut"

echo "== two hosts under --max-restarts=1, the second rank is killed after 34 steps"
start "$folder/dead" "${elastic[@]}"
reached "$folder/dead" 000034
ip netns pids "$two" | while read -r process; do
  grep -aq "torch.distributed.run" "/proc/$process/cmdline" || kill -9 "$process"
done
wait $first
wait $second
grep -h "resuming from" "$folder"/dead-?.log
same "$folder/dead"
