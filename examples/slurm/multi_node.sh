#!/usr/bin/env bash
# Train on all nodes of a Slurm job but the last, and sample from a vLLM server on the last one.
#
# Usage, within a job: multi_node.sh METHOD RUN_FILE [--field value ...]
# Dry run, anywhere:   DRY_RUN=1 NODES="a b c d e" examples/slurm/multi_node.sh grpo examples/slurm/grpo_70b.yaml
#
# GPUS           GPUs of a node                                 8
# CONFIG         accelerate config: fsdp2, zero3 or a file      fsdp2
# MODEL          what the server loads; the run file's model
# SERVER_PORT    of vLLM                                        8000
# MAIN_PORT      where the training processes meet              29500
# SERVER_FLAGS   more flags of `covey vllm-serve`
set -euo pipefail

if [ $# -lt 2 ]; then
    echo "usage: multi_node.sh METHOD RUN_FILE [--field value ...]" >&2
    exit 2
fi
method=$1 run_file=$2
shift 2
gpus=${GPUS:-8} config=${CONFIG:-fsdp2} server_port=${SERVER_PORT:-8000} main_port=${MAIN_PORT:-29500}
model=${MODEL:-$(sed -n 's/^model: *\([^ #]*\).*/\1/p' "$run_file")}

read -r -a nodes <<<"${NODES:-$(scontrol show hostnames "$SLURM_JOB_NODELIST" | tr '\n' ' ')}"
if [ "${#nodes[@]}" -lt 2 ]; then
    echo "multi_node.sh needs two nodes or more, one of them for vLLM; this job has: ${nodes[*]}" >&2
    exit 2
fi
server=${nodes[-1]}
training=("${nodes[@]:0:${#nodes[@]}-1}")
machines=${#training[@]}

# Other machines may reach the server, so it asks for a key. It travels in the environment, where no log shows it.
export VLLM_API_KEY=${VLLM_API_KEY:-$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')}

run() { # prints a command as one could type it, and runs it unless this is a dry run
    printf '+'
    printf ' %q' "$@"
    printf '\n'
    [ -n "${DRY_RUN:-}" ] || "$@"
}

serve=(covey vllm-serve --model "$model" --host "$server" --port "$server_port" --tensor-parallel-size "$gpus")
# shellcheck disable=SC2206  # flags are words
serve+=(${SERVER_FLAGS:-})
# Each node starts the processes of its own GPUs. Which node it is, it learns from Slurm when it runs.
train=(covey "$method" --config "$run_file" --accelerate_config "$config"
    --num_processes $((machines * gpus)) --num_machines "$machines" --machine_rank RANK
    --main_process_ip "${training[0]}" --main_process_port "$main_port"
    --vllm_server_base_url "http://$server:$server_port" "$@")
printf -v on_each_node ' %q' "${train[@]}"
on_each_node="exec${on_each_node/ --machine_rank RANK/ --machine_rank \$SLURM_PROCID}"

one_task=(--ntasks-per-node=1 --gpus-per-node="$gpus" --kill-on-bad-exit=1)
run srun --nodes=1 --ntasks=1 --nodelist="$server" "${one_task[@]}" "${serve[@]}" &
serving=$!
[ -n "${DRY_RUN:-}" ] && wait "$serving" # so that commands are printed in their order
# The trainer waits for the server to be up (vllm_server_timeout), so both may start now. The server ends with it.
trap 'kill "$serving" 2>/dev/null || true' EXIT
nodelist=$(
    IFS=,
    echo "${training[*]}"
)
run srun --nodes="$machines" --ntasks="$machines" --nodelist="$nodelist" "${one_task[@]}" bash -c "$on_each_node"
