# SPDX-License-Identifier: Apache-2.0
"""What the detection of slow ranks costs a step, on ranks of this machine.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 benchmarks/straggler_detection.py
    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 benchmarks/straggler_detection.py --tensor-model-parallel-size 2

The model has 5 million parameters unless flags say otherwise. Other programs change the time of a step by far more than the
detection does, so its parts are measured: the number of calls in a step times the CPU time of one, the CPU time of all
threads in the exchange and the decision after a step, and that of the thread that notices pauses. The last figure compares
CPU times of steps with and without detection, ten of each in turns; it needs an idle machine.
"""

import argparse
import statistics
import time

import pretrain_gpt
from megatron.settings import rank_env
from megatron.settings.parse import parse_pretrain
from megatron.telemetry.rank_times import PULSE, HostTimes, RankTimes
from megatron.training.build import build_run
from megatron.training.rules import resolve
from megatron.training.step import train_step

MODEL = """--num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 256 --mock-data --vocab-size 4096 --lr 1e-3
    --micro-batch-size 2 --global-batch-size 16 --eval-iters 0 --train-iters 1000000 --device cpu --log-interval 1000000"""
STEPS = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    asked, flags = parser.parse_known_args()
    config = resolve(parse_pretrain([*MODEL.split(), *flags]), rank_env.ranks().world_size or 1)
    run = build_run(config, pretrain_gpt.recipe())
    for stage in run.stages:
        stage.train()
    with run.ranks.measuring():
        spent, after = rounds(run, asked.rounds)
        calls = calls_of_a_step(run)
    step = statistics.median(spent[False])
    each, data = seconds_of("F"), seconds_of("data")
    parts = {
        f"{calls:.0f} calls": calls * each + data,
        "exchange and decision": after,
        "looking for pauses": seconds_of_a_look() / PULSE * step,
    }
    ratios = [on / off - 1 for on, off in zip(spent[True], spent[False], strict=True)]
    if run.context.is_rank_zero:
        words = ", ".join(f"{name} {1e6 * seconds:.1f} us" for name, seconds in parts.items())
        whole = sum(parts.values())
        print(f"a step of {1000 * step:.1f} ms of CPU time: {words}: {1e6 * whole:.0f} us, {100 * whole / step:.2f} %")
        print(f"with and without detection in turns: {100 * statistics.median(ratios):+.1f} %")
    run.close()


def rounds(run, count: int) -> tuple[dict[bool, list[float]], float]:
    """(CPU seconds of a step with and without detection, those of `after_step`)."""
    spent, after, times = {True: [], False: []}, [], run.ranks.times
    for number in range(2 * count + 2):
        measured = number % 4 in (0, 3)  # both orders
        run.ranks.times = RankTimes.active = times if measured else None
        begun, outside = time.process_time(), 0.0
        for _ in range(STEPS):
            train_step(run)
            mark = time.process_time()
            run.ranks.after_step(run)
            outside += time.process_time() - mark
        if number >= 2:
            spent[measured].append((time.process_time() - begun) / STEPS)
            after += [outside / STEPS] * measured
    run.ranks.times = RankTimes.active = times
    return spent, statistics.median(after)


def calls_of_a_step(run) -> float:
    """The number of parts that a step enters."""
    enter, count = RankTimes.enter, [0]

    def counted(times, part):
        count[0] += 1
        enter(times, part)

    RankTimes.enter = counted
    for _ in range(STEPS):
        train_step(run)
    RankTimes.enter = enter
    return count[0] / STEPS


def seconds_of(phase: str, count: int = 5000) -> float:
    """CPU seconds to enter and leave a part: the least of several tries."""
    span, tries = HostTimes(waits=False).spans[phase], []
    for _ in range(7):
        begun = time.thread_time()
        for _ in range(count):
            with span:
                pass
        tries.append((time.thread_time() - begun) / count)
    return min(tries)


def seconds_of_a_look(seconds: float = 2.0) -> float:
    """CPU seconds of a look of the thread that notices pauses: of a sleep with it, without that of other threads."""

    def sleep(waits: bool) -> float:
        with RankTimes.measuring(HostTimes(waits)):
            begun = time.process_time()
            time.sleep(seconds)
            return time.process_time() - begun

    return max(0.0, sleep(True) - sleep(False)) * PULSE / seconds


if __name__ == "__main__":
    main()
