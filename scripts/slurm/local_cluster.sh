#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A real SLURM on this machine alone: a controller and a few nodes as processes of this user, to try jobs before a
# cluster sees them. Everything lies in one folder; nothing of the system is touched, apart from `install`.
#
#   bash scripts/slurm/local_cluster.sh install                 Debian and Ubuntu: apt-get install slurm-wlm munge
#   bash scripts/slurm/local_cluster.sh start DIR [NODES]       then: export SLURM_CONF=DIR/slurm.conf
#   bash scripts/slurm/local_cluster.sh stop DIR
set -euo pipefail

# What SLURM shall believe that a node has. There is nothing behind the GPUs (6 at most).
CPUS=${NODE_CPUS:-4} GPUS=${NODE_GPUS:-0}

fail() {
    printf 'error: %s\n' "$1" >&2
    [ $# -lt 2 ] || printf '  -> %s\n' "$2" >&2
    exit 1
}

install() { # packages start daemons of their own where this is not forbidden for a moment
    [ "$(id -u)" -eq 0 ] || fail "install needs root" "sudo bash $0 install"
    local policy=/usr/sbin/policy-rc.d
    if [ ! -e "$policy" ]; then
        printf '#!/bin/sh\nexit 101\n' >"$policy"
        chmod +x "$policy"
        trap 'rm -f /usr/sbin/policy-rc.d' EXIT
    fi
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends slurm-wlm munge
}

free_port() { # and the ones after it: $1 ports that nobody listens on, between those of jobs (_launch.sh) and of clients
    local port=$((30000 + RANDOM % 2700)) number
    for ((number = port; number < port + $1; number++)); do
        if (exec 3<>"/dev/tcp/127.0.0.1/$number") 2>/dev/null; then
            free_port "$1"
            return
        fi
    done
    echo "$port"
}

write_configuration() { # nodes
    local user host port number
    user=$(id -un) host=$(hostname -s) port=$(free_port $(($1 + 1)))
    # A requeued job waits as long as credentials live: two minutes, if nothing is said.
    cat >"$DIR/slurm.conf" <<END
ClusterName=local
SlurmctldHost=$host(127.0.0.1)
SlurmUser=$user
SlurmdUser=$user
AuthType=auth/munge
AuthInfo=socket=$DIR/munge.socket,cred_expire=5
CredType=cred/munge
SlurmctldPort=$port
SlurmctldPidFile=$DIR/slurmctld.pid
SlurmctldLogFile=$DIR/slurmctld.log
SlurmdPidFile=$DIR/slurmd.%n.pid
SlurmdLogFile=$DIR/slurmd.%n.log
SlurmdSpoolDir=$DIR/spool.%n
StateSaveLocation=$DIR/state
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
JobRequeue=1
SchedulerParameters=sched_interval=2,bf_interval=2
ReturnToService=2
KillWait=10
MinJobAge=3600
SlurmdParameters=config_overrides
END
    if [ "$GPUS" -gt 0 ]; then
        echo "GresTypes=gpu" >>"$DIR/slurm.conf"
        echo "AutoDetect=off" >"$DIR/gres.conf"
        local devices=(null zero full random urandom tty) # files that exist everywhere: they are only counted
        printf 'Name=gpu File=/dev/%s\n' "${devices[@]:0:GPUS}" >>"$DIR/gres.conf"
    fi
    for ((number = 1; number <= $1; number++)); do
        mkdir -p "$DIR/spool.n$number"
        echo "NodeName=n$number NodeHostname=$host NodeAddr=127.0.0.1 Port=$((port + number))" \
            "CPUs=$CPUS RealMemory=8000 $([ "$GPUS" -eq 0 ] || echo "Gres=gpu:$GPUS")" >>"$DIR/slurm.conf"
    done
    echo "PartitionName=local Nodes=n[1-$1] Default=YES MaxTime=INFINITE State=UP" >>"$DIR/slurm.conf"
}

start() { # nodes
    local program number
    for program in munged slurmctld slurmd sbatch; do
        PATH=$PATH:/usr/sbin command -v "$program" >/dev/null ||
            fail "$program is not installed" "bash $0 install (Debian, Ubuntu), or the packages of slurm and munge"
    done
    mkdir -p "$DIR/state"
    chmod 755 "$DIR"
    (umask 077 && head -c 1024 /dev/urandom >"$DIR/munge.key")
    munged --force --key-file "$DIR/munge.key" --socket "$DIR/munge.socket" --pid-file "$DIR/munged.pid" \
        --log-file "$DIR/munged.log" --seed-file "$DIR/munge.seed" 2>/dev/null
    write_configuration "$1"
    export SLURM_CONF=$DIR/slurm.conf
    slurmctld
    for ((number = 1; number <= $1; number++)); do
        slurmd -N "n$number"
    done
    for ((number = 0; number < 100; number++)); do
        [ "$(timeout 10 sinfo --noheader --format %D --states idle 2>/dev/null | head -n 1)" != "$1" ] || break
        sleep 0.2
    done
    sinfo
    printf '\nexport SLURM_CONF=%q\n' "$SLURM_CONF"
}

stop() {
    local file
    SLURM_CONF=$DIR/slurm.conf scancel --user "$(id -un)" 2>/dev/null || true
    for file in "$DIR"/slurmd.*.pid "$DIR"/slurmctld.pid "$DIR"/munged.pid; do
        [ ! -s "$file" ] || kill "$(cat "$file")" 2>/dev/null || true
    done
}

PATH=$PATH:/usr/sbin:/sbin
case ${1:-} in
    install) install ;;
    start | stop)
        [ -n "${2:-}" ] || fail "in which folder?" "bash $0 $1 DIR"
        if [ "$1" = stop ]; then
            [ -f "$2/slurm.conf" ] || fail "no cluster was started in $2"
        else
            [[ ${3:-2} =~ ^[1-9][0-9]?$ ]] || fail "NODES is $3, and it must be a number from 1 to 99"
            [[ $GPUS =~ ^[0-6]$ ]] || fail "NODE_GPUS is $GPUS, and it must be a number from 0 to 6"
            [[ $CPUS =~ ^[1-9][0-9]*$ ]] || fail "NODE_CPUS is $CPUS, and it must be a number from 1 on"
            mkdir -p "$2"
            ! kill -0 "$(cat "$2/slurmctld.pid" 2>/dev/null)" 2>/dev/null ||
                fail "a cluster runs in $2" "bash $0 stop $2, or another folder"
        fi
        DIR=$(cd "$2" && pwd)
        if [ "$1" = start ]; then start "${3:-2}"; else stop; fi
        ;;
    *)
        sed -n '3,8s/^# \{0,1\}//p' "$0"
        exit 2
        ;;
esac
