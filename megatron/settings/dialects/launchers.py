# SPDX-License-Identifier: Apache-2.0
"""Launchers of other suites, translated to flags of torchrun, which `megatron.tools.launch` takes too.

One table serves all of them: a flag has the same meaning in each. torchrun's own flags are unchanged. A row may
translate to flags of this suite, if a launcher sets up training (accelerate's --mixed_precision), or to `NAME=value`
of the environment.
"""

from collections.abc import Mapping

from megatron.settings.declare import dashed
from megatron.settings.dialects.table import VARIABLE, Dialect, FlagLine, NoEffect, unread

MACHINES = (
    "start it on each machine, with --rdzv-backend c10d --rdzv-endpoint FIRST:PORT, or --node-rank and --master-addr"
)
TORCHRUNS = """--nnodes --nproc_per_node --node_rank --master_addr --master_port --local_addr --rdzv_backend --rdzv_endpoint
    --rdzv_id --rdzv_conf --max_restarts --monitor_interval --start_method --role --redirects --tee --local_ranks_filter
    --numa_binding --event_log_handler --logs_specs --signals_to_handle --shutdown_timeout --duplicate_stdout_filters
    --duplicate_stderr_filters --virtual_local_rank"""
WORDS = f"""
=  {" ".join(TORCHRUNS.split())} --gradient_accumulation_steps
--num_gpus|-np|-n|--np|-c|-npernode|--npernode|-ppn  --nproc-per-node
--num_nodes|--num_machines                --nnodes
--rank|--machine_rank                     --node-rank
--main_process_ip                         --master-addr
--main_process_port                       --master-port
--job_id                                  --rdzv-id
--max_restart                             --max-restarts
--mixed_precision=fp16                    --fp16; --amp-level O1
--mixed_precision=bf16                    --bf16; --amp-level O1
--cpu|--use_cpu                           --device cpu
--zero_stage                              --sharding-stage
--offload_optimizer_device=cpu            --optimizer-cpu-offload
--offload_param_device=cpu                --param-cpu-offload
--gradient_clipping                       --clip-grad
--use_fsdp                                --sharding-stage 3
--distributed_type=fsdp                   --sharding-stage 3
--distributed_type=multi_cpu              --device cpu
--distributed_type=no                     --nproc-per-node 1
--fsdp_sharding_strategy=full_shard|1     --sharding-stage 3
--fsdp_sharding_strategy=shard_grad_op|2  --sharding-stage 2
--fsdp_sharding_strategy=no_shard|3       --sharding-stage 0
--fsdp_offload_params=true                --param-cpu-offload; --optimizer-cpu-offload
--fsdp_activation_checkpointing           --recompute-granularity full
--dynamo_backend=inductor                 --torch-compile
-  --run_mode=collective --num_gpus|--num_nodes=-1 --no_ssh --no_local_rank --module -m --mixed_precision=no
-  --offload_optimizer_device|--offload_param_device=none --distributed_type=multi_gpu|deepspeed --dynamo_backend=no
-  --compute_environment=local_machine --multi_gpu --use_deepspeed
"""
IDLE = {
    "ranks meet, share cores and print as torchrun has it": """--log_* --enable_gpu_log --sort_ip --legacy --bind_*
        --same_network --main_training_function --debug --quiet -q --enable_cpu_affinity --downcast_bf16 --tpu_*
        --zero3_* --use_xpu --ipex""",
    "how units are cut and fetched is this suite's: a layer each": "--fsdp_*",
}
LOST = {
    "parameter servers are not part of this suite": "--run_mode --servers --trainers --*_num --with_gloo --gloo_port",
    "python -m megatron.tools.supervise restarts a job on the remaining machines": "--*elastic_*",
    "the rendezvous chooses its ports: --master-port, or --rdzv-endpoint HOST:PORT": "--start_port",
    "give each machine its CUDA_VISIBLE_DEVICES": "--auto_*_config --exclude -e",
    f"machines are not entered by ssh: {MACHINES}": """--hostfile -H --include -i --launcher* --force_multi --ssh*
        --venv_script --deepspeed_* -x""",
    "--auto-parallel searches the layout": "--autotuning",
    "a program that is not Python is started by torchrun --no-python": "--no_python",
    "formats are --bf16 and --fp16; --bf16 --fp8-format hybrid has fp8 products": "--mixed_precision --fp8_*",
    "state is on the device, on the host, or in files: --nvme-offload-fraction": "--offload_*",
    "it is one of --torch-compile's choices, which are torch's own": "--dynamo_*",
    "layouts are --tensor-model-parallel-size and other flags": "--use_megatron_lm --megatron_lm_* --parallelism_*",
}


DEVICES = [f"--{name}" for name in ("gpus", "devices", "xpus", "npus", "selected_gpus", "gpu_ids")]


def cards(words, given):
    """Translate a list of devices to their number, and to CUDA_VISIBLE_DEVICES unless they are the first ones."""
    last = [one for one in given.values() if one.key in DEVICES][-1:]
    if last and last[0].words != words:
        raise NoEffect(f"{last[0].text} overrides it")
    numbers = [number for word in words for number in word.split(",") if number]
    if any(map(VARIABLE.search, words)):  # torchrun counts them
        count = [("--nproc-per-node", ["gpu"])] * (not {"--nproc_per_node", "--num_processes"} & set(given))
        return [(f"CUDA_VISIBLE_DEVICES={','.join(words)}", []), *count]
    if numbers == ["all"]:
        return [("--nproc-per-node", ["gpu"])]
    first = [str(number) for number in range(len(numbers))]
    hidden = [(f"CUDA_VISIBLE_DEVICES={','.join(numbers)}", [])] * (numbers != first)
    counted = {"--nproc_per_node", "--num_processes"} & set(given)
    ranks = given["--nproc_per_node"].value if "--nproc_per_node" in given else str(len(numbers))
    if ranks.isdecimal() and int(ranks) != len(numbers):
        raise ValueError(
            f"these are {len(numbers)} devices, and --nproc_per_node says {ranks} ranks: one for each is wanted"
        )
    return hidden + [("--nproc-per-node", [str(len(numbers))])] * (not counted)


def slots(words, given):
    """Translate DeepSpeed's hosts and their devices: `worker-0:0,1@worker-1:0,1`."""
    if VARIABLE.search(words[0]):
        raise ValueError(unread(words[0]))
    hosts = [host.partition(":") for host in words[0].split("@")]
    if len({devices for _, _, devices in hosts}) > 1:
        raise ValueError("hosts with devices of their own: start torchrun on each of them, with CUDA_VISIBLE_DEVICES")
    devices = cards([hosts[0][2]], given) if hosts[0][2] else []
    return devices if len(hosts) == 1 else [*devices, *first_of([",".join(host for host, _, _ in hosts)], given)]


def first_of(words, given):
    """Translate a list of machines to their number and the address of the first one."""
    hosts = ",".join(words).split(",")
    if not {"--nnodes", "--num_nodes"} & set(given) and any(map(VARIABLE.search, words)):
        raise ValueError(f"{unread(hosts[0])}, or how many there are: --nnodes N --master-addr FIRST")
    own = [("--master-addr", hosts[:1])] * ("--master_addr" not in given)
    return own + [("--nnodes", [str(len(hosts))])] * (not {"--nnodes", "--num_nodes"} & set(given))


def endpoint(words, given):
    host, colon, port = words[0].rpartition(":")
    if VARIABLE.match(words[0]) and not colon:  # it holds host and port
        return [("--rdzv-backend", ["c10d"]), ("--rdzv-endpoint", words)]
    if not colon or not (port.isdecimal() or VARIABLE.match(port)) or "/" in host:
        raise ValueError(
            "the place of the first machine is HOST:PORT; with etcd say --rdzv-backend and --rdzv-endpoint"
        )
    return [("--master-addr", [host]), ("--master-port", [port])]


def each_machine(words, given):
    """Translate accelerate's --num_processes, which counts the ranks of all machines."""
    machines = given["--num_machines"].value if "--num_machines" in given else "1"
    if machines == "1":
        return [("--nproc-per-node", words)]
    count, rest = divmod(int(words[0]), int(machines))
    if rest or not count:
        raise ValueError(f"{words[0]} ranks on {machines} machines: say --nproc-per-node on each")
    return [("--nproc-per-node", [str(count)])]


def torchruns_words(words, given):
    """Translate `--extra_launch_args a=1,b=2` of colossalai run."""
    pairs = [pair.partition("=") for pair in ",".join(words).split(",")]
    return [(dashed(name), [value] if value else []) for name, _, value in pairs]


COMPUTED = {
    **dict.fromkeys(DEVICES, cards),
    **{flag: first_of for flag in ("--ips", "--cluster_node_ips")},
    **{
        flag: lambda words, given: [("--log-dir", words), ("-r", ["3"])]
        for flag in ("--log_dir", "--enable_each_rank_log")
    },
    "--master": endpoint,
    "--num_processes": each_machine,
    "--num_cpu_threads_per_process": lambda words, given: [(f"OMP_NUM_THREADS={words[0]}", [])],
    "--extra_launch_args": torchruns_words,
}


def launcher(name: str, *programs: str, lost: Mapping[str, str] = LOST, **more) -> Dialect:
    return Dialect(name, name, WORDS, idle=IDLE, lost=lost, computed=COMPUTED | more, programs=(programs or (name,)))


TORCHRUN = Dialect(
    "torchrun",
    "torchrun",
    idle={"ranks come from the environment": "--use_env --use-env"},
    programs=("torchrun", "torch.distributed.run", "torch.distributed.launch", "megatron.tools.launch"),
)
LAUNCHERS = (
    TORCHRUN,
    launcher(
        "paddle.distributed.launch",
        "paddle.distributed.launch",
        "paddle.distributed.fleet.launch",
        "fleetrun",
        lost={**LOST, "a machine has one address, and a job one backend": "--host --backend"},
    ),
    launcher("deepspeed", "deepspeed", "ds", "deepspeed.launcher.runner", **{"--include": slots, "-i": slots}),
    launcher("accelerate", "accelerate", "accelerate.commands.launch"),
    launcher("colossalai run", "colossalai", **{"--host": first_of, "-H": first_of}),
    launcher("mpirun", "mpirun", "mpiexec", "mpiexec.hydra", "orterun"),
)
# environment variables that only other suites read
UNREAD = "FLAGS_* PADDLE_* ACCELERATE_* DS_* HF_* TRANSFORMERS_* COLOSSALAI_* TOKENIZERS_PARALLELISM GLOG_* BKCL_*"


def meeting(start: list[FlagLine]) -> tuple[list[FlagLine], list[str]]:
    """Complete torchrun's flags for a rendezvous of several machines: (lines, sentences about what is missing).

    >>> lines, _ = meeting([FlagLine("--nnodes", ["2"], None), FlagLine("--master-addr", ["a"], None)])
    >>> [(line.flag, *line.words) for line in lines]
    [('--nnodes', '2'), ('--rdzv-backend', 'c10d'), ('--rdzv-endpoint', 'a:29500')]
    """
    said = {line.flag: line for line in start}
    if "--nnodes" not in said or said["--nnodes"].words == ["1"] or {"--node-rank", "--rdzv-endpoint"} & set(said):
        return start, []
    if "--master-addr" not in said:
        return start, [f"{said['--nnodes'].words[0]} machines: {MACHINES}"]
    first, port = said["--master-addr"], said.get("--master-port")
    place = f"{first.words[0]}:{port.words[0] if port else 29500}"
    rest = [line for line in start if line.flag not in ("--master-addr", "--master-port")]
    return [
        *rest,
        FlagLine("--rdzv-backend", ["c10d"], first.source),
        FlagLine("--rdzv-endpoint", [place], first.source),
    ], []
