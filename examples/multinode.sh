#!/bin/sh
# Pretraining on several hosts without a scheduler: start the same command on each of them.
#
#   sh examples/multinode.sh HOSTS FIRST FLAGS...
#
# HOSTS: how many there are; 1:4 goes on with one to four, as many as there are. FIRST: one of them, by the address at
# which all others reach it. FLAGS: those of pretrain_gpt.py. On two hosts:
#
#   sh examples/multinode.sh 2 10.0.0.1 @examples/llama_7b_tp_pp.args --exit-signal-handler
#
# After a failure all processes start again, RESTARTS times at most, and continue from --load's newest checkpoint.
# PROCESSES (per host; default: one per GPU, or one), PORT, JOB (a name that no other run on FIRST has), RESTARTS and
# PYTHON may be set.
set -eu
if [ $# -lt 3 ]; then
    echo "usage: sh examples/multinode.sh HOSTS FIRST FLAGS..." >&2
    exit 2
fi
hosts=$1
first=$2
shift 2

python=${PYTHON:-python}
processes=${PROCESSES:-auto}
if [ "$processes" = auto ] && ! command -v nvidia-smi >/dev/null; then
    processes=1
fi

# This host's address on the way to FIRST, and whether it is FIRST. torchrun would take the host's own name, which others
# often don't know; it finds out for itself only where all run on one machine.
here=$("$python" -c 'import ipaddress, socket, sys
family, kind, _, _, first = socket.getaddrinfo(sys.argv[1], 1, type=socket.SOCK_DGRAM)[0]
route = socket.socket(family, kind)
route.connect(first)  # sends nothing
own = route.getsockname()[0]
print(own, "" if ipaddress.ip_address(own).is_loopback else f"is_host={own == first[0]}")' "$first")

# Or else agents of torch 2.13 may meet at the place of an earlier round when hosts have come or gone.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

exec "$python" -m torch.distributed.run --nnodes "$hosts" --nproc-per-node "$processes" \
    --rdzv-backend c10d --rdzv-endpoint "$first:${PORT:-29500}" --rdzv-id "${JOB:-megalite}" \
    --rdzv-conf "${here#* }" --local-addr "${here% *}" \
    --max-restarts "${RESTARTS:-3}" --shutdown-timeout 600 \
    "$(dirname "$0")/../pretrain_gpt.py" "$@"
