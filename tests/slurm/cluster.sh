#!/bin/bash
# A real SLURM on one machine, for the tests beside this file: munge and slurmctld on the host, and for each node
# one slurmd in network, UTS, PID, IPC and mount namespaces of its own, with its own address, host name and /dev/shm.
# The disk is shared, as on a cluster. Needs root; edits nothing under /etc.
#
#   cluster.sh install       SLURM from the distribution's packages, if it is missing
#   cluster.sh start|stop    everything is in $SLURM_TEST_DIR, whose path must be short (munge's socket is there)
#   cluster.sh crash N       end node N and all that runs on it at once, as a loss of power does
#   cluster.sh boot N        start it again
set -euo pipefail
dir=${SLURM_TEST_DIR:-/tmp/stageline-slurm}
nodes=${SLURM_TEST_NODES:-2}
net=10.213.77 bridge=stgl-br prefix=stgl
export SLURM_CONF=$dir/slurm.conf PATH=$PATH:/usr/sbin:/sbin

install() {
  local program missing=
  for program in slurmctld slurmd munged sbatch ip nsenter; do command -v $program >/dev/null || missing=1; done
  [[ -n $missing ]] || return 0
  export DEBIAN_FRONTEND=noninteractive
  timeout 120 apt-get update -qq
  timeout 240 apt-get install -y -qq --no-install-recommends slurmctld slurmd slurm-client munge iproute2
}

configure() {
  # As most clusters, if it can: by control groups a signal reaches the processes that srun started, and only those.
  local track=linuxproc i
  [[ -w /sys/fs/cgroup/freezer/cgroup.procs ]] && track=cgroup
  { echo "127.0.0.1 localhost"
    for i in $(seq "$nodes"); do echo "$net.$i node$i"; done
    echo "$net.254 $(hostname)"; } >"$dir/hosts"
  # No name servers on the nodes: each look-up that nobody answers takes ten seconds.
  { grep -v '^hosts:' /etc/nsswitch.conf; echo "hosts: files"; } >"$dir/nsswitch"
  echo "CgroupAutomount=no" >"$dir/cgroup.conf"
  cat >"$SLURM_CONF" <<CONF
ClusterName=stageline
SlurmctldHost=$(hostname -s)($net.254)
SlurmctldPort=16877
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$dir/munge.sock,cred_expire=5
CredType=cred/munge
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool-%n
SlurmctldPidFile=$dir/slurmctld.pid
SlurmdPidFile=$dir/slurmd-%n.pid
SlurmctldLogFile=$dir/log/slurmctld.log
SlurmdLogFile=$dir/log/slurmd-%n.log
ProctrackType=proctrack/$track
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=10
MessageTimeout=5
KillWait=20
JobRequeue=1
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
NodeName=DEFAULT CPUs=8 RealMemory=32000
$(for i in $(seq "$nodes"); do echo "NodeName=node$i NodeAddr=$net.$i"; done)
PartitionName=test Nodes=ALL Default=YES MaxTime=INFINITE State=UP
CONF
}

boot() {  # the number of a node
  local space=$prefix$1
  ip netns add "$space"
  ip link add "${space}h" type veth peer name "${space}n"
  ip link set "${space}h" master $bridge up
  ip link set "${space}n" netns "$space" name eth0
  ip -n "$space" addr add "$net.$1/24" dev eth0
  ip -n "$space" link set lo up
  ip -n "$space" link set eth0 up
  ip -n "$space" route add default via "$net.254"
  mkdir -p "$dir/spool-node$1"
  # bash is process 1 of the node: when it is killed, the kernel kills all that runs there.
  setsid nsenter --net=/run/netns/"$space" unshare --uts --ipc --mount --pid --fork --kill-child --mount-proc \
    bash -c 'hostname "$1"; mount --bind "$2/hosts" /etc/hosts; mount --bind "$2/nsswitch" /etc/nsswitch.conf
             mount -t tmpfs -o size=2g shm /dev/shm
             slurmd -D -N "$1" -f "$2/slurm.conf" & wait $!' slurmnode "node$1" "$dir" \
    </dev/null >"$dir/log/node$1.out" 2>&1 &
  echo $! >"$dir/node$1.pid"
}

crash() {
  local space=$prefix$1 pid
  pid=$(cat "$dir/node$1.pid" 2>/dev/null || true)
  if [[ -n $pid ]] && grep -qsa unshare "/proc/$pid/cmdline"; then kill -KILL "$pid" || true; fi
  for _ in $(seq 100); do [[ -z $(ip netns pids "$space" 2>/dev/null) ]] && break; sleep 0.05; done
  ip netns pids "$space" 2>/dev/null | xargs -r kill -KILL 2>/dev/null || true
  ip link del "${space}h" 2>/dev/null || true
  ip netns del "$space" 2>/dev/null || true
  rm -f "$dir/node$1.pid"
}

end_daemon() {  # its name; its process id is in a file
  local pid; pid=$(cat "$dir/$1.pid" 2>/dev/null || true)
  [[ -n $pid && $(cat "/proc/$pid/comm" 2>/dev/null) == "$1" ]] || return 0
  kill "$pid" || true
  for _ in $(seq 100); do [[ -d /proc/$pid ]] || return 0; sleep 0.05; done
  kill -KILL "$pid" || true
}

start() {
  [[ $(id -u) == 0 ]] || { echo "needs root" >&2; return 1; }
  mkdir -p "$dir"
  stop
  rm -rf "$dir/state" "$dir"/spool-* "$dir/log"
  mkdir -p "$dir/state" "$dir/log"
  chmod 755 "$dir"
  configure
  [[ -s $dir/munge.key ]] || (umask 077; head -c 128 /dev/urandom >"$dir/munge.key")
  munged --force --socket="$dir/munge.sock" --key-file="$dir/munge.key" --pid-file="$dir/munged.pid" \
    --seed-file="$dir/munged.seed" --log-file="$dir/log/munged.log" </dev/null
  ip link show $bridge >/dev/null 2>&1 || ip link add $bridge type bridge
  ip addr replace "$net.254/24" dev $bridge
  ip link set $bridge up
  slurmctld -f "$SLURM_CONF" </dev/null >"$dir/log/slurmctld.out" 2>&1
  local i
  for i in $(seq "$nodes"); do boot "$i"; done
  for _ in $(seq 300); do
    [[ $(timeout 5 sinfo -h -N -t idle -o %N 2>/dev/null | sort -u | wc -l) == "$nodes" ]] && return 0
    sleep 0.1
  done
  echo "the nodes did not come up" >&2
  tail -n 20 "$dir"/log/* >&2
  return 1
}

stop() {
  local i
  for i in $(seq "$nodes"); do crash "$i"; done
  end_daemon slurmctld
  end_daemon munged
  ip link del $bridge 2>/dev/null || true
  for i in $(seq "$nodes"); do
    [[ -d /sys/fs/cgroup/freezer/slurm_node$i ]] || continue
    find "/sys/fs/cgroup/freezer/slurm_node$i" -depth -type d -exec rmdir {} + 2>/dev/null || true
  done
}

case ${1:-} in
  install | start | stop) "$1" ;;
  crash | boot) "$1" "$2" ;;
  *) sed -n '2,10p' "$0"; exit 2 ;;
esac
