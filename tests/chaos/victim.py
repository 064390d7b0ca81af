# SPDX-License-Identifier: Apache-2.0
"""A training job that something happens to: pretrain_gpt.py with a fault in one of its functions, once.

    torchrun --nproc-per-node 2 -m tests.chaos.victim '{"place": "forward", "rank": 1, ...}' pretrain_gpt.py ...

The product knows nothing of this: functions are replaced by others that do what the fault says and then what the function
does. `arm` does the same to a rank that was forked.
"""

import functools
import importlib
import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Optional

from megatron.errors import run_main

ALL = -1


@dataclass(frozen=True)
class Fault:
    """What happens, where and when.

    place:   a key of `PLACES`: which function
    marker:  a file that stands for "it has happened"; the fault happens while there is none. Ranks leave their process
             ids beside it
    rank:    the rank whose function it is; None: that of whichever rank comes first
    target:  the rank that is hurt, by a signal of the other; None: the same; ALL: every rank
    step:    of this process; 0: also before the first
    call:    the how-manieth call of the function from that step on
    action:  names of signals, sent one after the other; "close": nobody reads standard output any more; "shut": there
             is none; "nan", "inf"
    module:  at the place "value": see `spoil`; at the place "bit": the parameter
    again:   the fault happens again when the step is repeated
    delay:   seconds from the call to what happens, in which the function goes on
    wanted:  a file that asks for the fault: it happens whenever there is one, and takes it away. Instead of the marker
    pace:    seconds that each step takes longer, as with a slow data loader
    """

    place: str
    marker: str
    rank: Optional[int] = 0
    target: Optional[int] = None
    step: int = 0
    call: int = 1
    action: str = "SIGKILL"
    module: str = ""
    again: bool = False
    delay: float = 0.0
    wanted: str = ""
    pace: float = 0.0

    def text(self) -> str:
        """For a command line."""
        return json.dumps(asdict(self))


def main(argv: list[str]) -> None:
    """Read the fault, arm it, train."""
    import pretrain_gpt

    arm(Fault(**json.loads(argv[0])), int(os.environ.get("RANK", "0")))
    pretrain_gpt.main(argv[2:])  # behind the script's name, which is there for the supervisor


def arm(fault: Optional[Fault], rank: int) -> None:
    """From now on the fault waits in this process."""
    if fault is None:
        return
    if not fault.wanted:
        Path(f"{fault.marker}.pid{rank}").write_text(str(os.getpid()))
        if os.path.exists(fault.marker) or fault.rank not in (None, rank):
            return
    trap = Trap(fault, rank)
    wrap("megatron.training.loop", "train_step", trap.count_steps)
    PLACES[fault.place](trap)


class Trap:
    """A fault that waits for its moment."""

    def __init__(self, fault: Fault, rank: int):
        self.fault, self.rank = fault, rank
        self.step = self.calls = 0

    def count_steps(self, train_step: Callable) -> Callable:
        def counting(*args, **keys):
            self.step += 1
            time.sleep(self.fault.pace)
            return train_step(*args, **keys)

        return counting

    def due(self) -> bool:
        """Whether this call is the one; if so, it is noted that it has happened."""
        fault = self.fault
        if fault.wanted:
            try:
                os.unlink(fault.wanted)  # by one rank, if several want it
            except OSError:
                return False
            return True
        if self.step < fault.step or (os.path.exists(fault.marker) and not (fault.again and self.step == fault.step)):
            return False
        self.calls += 1
        if self.calls < fault.call:
            return False
        Path(fault.marker).write_text(str(self.step))
        return True

    def hit(self) -> None:
        """Do it, if it is time."""
        if not self.due():
            return
        if self.fault.delay:
            threading.Timer(self.fault.delay, self.act).start()
        else:
            self.act()

    def act(self) -> None:
        """Send the signals, this process last."""
        if self.fault.action == "close":
            reader, writer = os.pipe()
            os.close(reader)
            os.dup2(writer, 1)
            return
        if self.fault.action == "shut":
            os.close(1)
            sys.stdout = None  # as Python has it that was started like this
            return
        target = self.rank if self.fault.target is None else self.fault.target
        hurt = {self.rank: os.getpid()}
        if target != self.rank:
            files = Path(self.fault.marker).parent.glob(f"{Path(self.fault.marker).name}.pid*")
            pids = {int(path.suffix[4:]): int(path.read_text()) for path in files}
            hurt = {rank: pid for rank, pid in sorted(pids.items()) if target in (rank, ALL)}
        for pid in sorted(hurt.values(), key=lambda pid: pid == os.getpid()):
            for name in self.fault.action.split():
                os.kill(pid, getattr(signal, name))
                time.sleep(0.001)  # a signal to this process is taken note of now


def wrap(module: str, name: str, around: Callable[[Callable], Callable]) -> None:
    """Replace `module.name` (of a class: `Class.method`) by `around` of it."""
    owner = importlib.import_module(module)
    *path, last = name.split(".")
    for part in path:
        owner = getattr(owner, part)
    setattr(owner, last, around(getattr(owner, last)))


def before(module: str, name: str) -> Callable[[Trap], None]:
    """The fault happens at the start of a function."""

    def lay(trap: Trap) -> None:
        def around(function):
            @functools.wraps(function)
            def trapped(*args, **keys):
                trap.hit()
                return function(*args, **keys)

            return trapped

        wrap(module, name, around)

    return lay


# ---- places where a function's start will not do ----------------------------------------------------------------------


def backward(trap: Trap) -> None:
    """In the backward pass, when the gradient of a layer's output is known and that of its input is not."""

    def around(forward):
        def trapped(self, *args):
            y = forward(self, *args)
            if y.requires_grad:
                y.register_hook(lambda gradient: trap.hit())
            return y

        return trapped

    wrap("megatron.model.layer", "Layer.forward", around)


def collective(trap: Trap) -> None:
    """In an all-reduce that has begun."""

    def around(all_reduce):
        def trapped(x, *args, **keys):
            if keys.get("async_op"):
                return all_reduce(x, *args, **keys)
            work = all_reduce(x, *args, **keys, async_op=True)
            trap.hit()
            work.wait()

        return trapped

    wrap("torch.distributed", "all_reduce", around)


def optimizer(trap: Trap) -> None:
    """When main weights and moments are updated and the model's weights are not."""
    before("megatron.optimizer.zero", "DistributedOptimizer.copy_main_params_to_model_params")(trap)


def evaluation(trap: Trap) -> None:
    """In a forward pass that no backward pass follows."""
    import torch

    def around(forward):
        def trapped(self, *args):
            if not torch.is_grad_enabled():
                trap.hit()
            return forward(self, *args)

        return trapped

    wrap("megatron.model.gpt.module", "GPT.forward", around)


def shard_write(trap: Trap) -> None:
    """When half of a block is written."""

    def around(write_all):
        def trapped(file, data):
            write_all(file, data[: len(data) // 2])
            trap.hit()
            write_all(file, data[len(data) // 2 :])

        return trapped

    wrap("megatron.checkpoint.store", "_write_all", around)


def before_rename(trap: Trap) -> None:
    """When a checkpoint is complete and has not got its name."""

    def around(rename):
        def trapped(source, target):
            if Path(target).name.startswith("iter_"):
                trap.hit()
            return rename(source, target)

        return trapped

    wrap("os", "rename", around)


def retention(trap: Trap) -> None:
    """When a checkpoint that goes has lost its name and its first file."""

    def around(rmtree):
        def trapped(path, *args, **keys):
            if Path(path).name.startswith(".tmp-gone-"):
                next(Path(path).iterdir()).unlink()
                trap.hit()
            return rmtree(path, *args, **keys)

        return trapped

    wrap("shutil", "rmtree", around)
    assert shutil.rmtree.__module__ == __name__


# ---- values -----------------------------------------------------------------------------------------------------------


def spoil(trap: Trap) -> None:
    """One value of a module's output, or of the gradient of it, becomes NaN or Inf; or one weight of the module.

    fault.module: "blocks.1.mlp" (forward), "blocks.1.mlp<" (backward), "blocks.1.mlp.up.weight=" (a parameter)
    """
    import torch

    name, kind = trap.fault.module.rstrip("<="), trap.fault.module[-1]
    bad = float(trap.fault.action)

    def spoiled(x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        x.view(-1)[x.numel() // 2] = bad
        return x

    def forward_hook(module, inputs, output):
        if not (torch.is_grad_enabled() and trap.due()):
            return output
        *others, last = output if isinstance(output, tuple) else (output,)  # a norm may give a sum before its result
        if kind != "<":
            return (*others, spoiled(last)) if others else spoiled(last)
        last.register_hook(spoiled)
        return output

    def weight_hook(module, inputs):
        parameter = dict(module.named_parameters()).get(name)  # which it has got after it was built
        if parameter is not None and torch.is_grad_enabled() and trap.due():
            parameter.data.view(-1)[parameter.numel() // 2] = bad

    def around(build_model):
        def building(*args, **keys):
            model = build_model(*args, **keys)
            if kind == "=":
                model.register_forward_pre_hook(weight_hook)
            elif module := dict(model.named_modules()).get(name):
                module.register_forward_hook(forward_hook)
            return model

        return building

    wrap("pretrain_gpt", "build_model", around)


def flip(trap: Trap) -> None:
    """The lowest bit of one weight is another after a step: what a broken memory does, and nobody sees."""
    import torch

    def around(train_step):
        def stepping(run):
            step = train_step(run)
            if trap.due():
                found = [dict(stage.named_parameters()).get(trap.fault.module) for stage in run.stages]
                [parameter] = [parameter for parameter in found if parameter is not None]
                with torch.no_grad():
                    parameter.data.view(-1).view(torch.int32)[7] ^= 1
            return step

        return stepping

    wrap("megatron.training.loop", "train_step", around)


PLACES: dict[str, Callable[[Trap], Any]] = {
    "rendezvous": before("torch.distributed", "init_process_group"),
    "index build": before("megatron.data.gpt_dataset", "build_index_maps"),
    "data": before("megatron.data.loader", "MicroBatchLoader.step"),
    "forward": before("megatron.model.kinds.mlp.module", "MLP.forward"),
    "backward": backward,
    "collective": collective,
    "optimizer": optimizer,
    "eval": evaluation,
    "save": before("megatron.checkpoint.folder", "Saver.save"),
    "shard write": shard_write,
    "before manifest": before("megatron.checkpoint.folder", "commit"),
    "before rename": before_rename,
    "before tracker": before("megatron.checkpoint.backends", "replace_file"),
    "retention": retention,
    "value": spoil,
    "bit": flip,
}


if __name__ == "__main__":
    run_main(main, sys.argv[1:])
