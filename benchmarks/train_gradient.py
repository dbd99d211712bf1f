"""Trains one task with one way of exchanging gradients, and prints a JSON line for each step and each look at it.

Started once per rank, by torchrun or by hand with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in the environment:

    torchrun --nproc-per-node 2 benchmarks/train_gradient.py --task resnet18 --method engine --density 0.01 --steps 100

Rank 0 prints to stdout, one object a line:

    setup   what is trained: parameters, the share of them without a gradient, FLOPs of one rank's step, settings
    played  with --played: `seconds` of forward and backward
    step    loss of rank 0's batch, and what all steps up to here took: `seconds`, `cpu_seconds` of rank 0's process,
            `bytes_sent`, `bytes_received`
    eval    held-out `loss` and `accuracy` (a fraction) after so many steps
    end     `step_seconds`, CPU seconds and bytes per step: means over all but the first four, which compile and warm
            caches up; what a method still has to bring home after the last step is in `seconds` alone

Seconds run while it trains: looking at the result stops the clock. Bytes are those that rank 0's network interface has
counted, whoever sent them; on a loopback interface both directions of all ranks are in them. With --controller the
density follows the link.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fcntl
import json
import os
import socket
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import torch
import torch.distributed as dist
from gradient_methods import METHODS, Method, Settings
from gradient_played import Played
from gradient_tasks import TASKS, Folder, Large, Task, without_gradient
from torch.utils.flop_counter import FlopCounterMode

SETTLING_STEPS = 4
"""Left out of the means."""
SIOCGIFADDR = 0x8915


def interface_of(address: str) -> str:
    """The network interface that has an IPv4 address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            try:
                told = fcntl.ioctl(asked, SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:
                continue  # it has no IPv4 address
            if socket.inet_ntoa(told[20:24]) == address:
                return name
    raise SystemExit(f"train_gradient: no network interface here has the address {address}; `ip address` lists them")


class Meter:
    """Seconds, CPU time and bytes of the training alone."""

    def __init__(self, interface: str) -> None:
        self.interface = interface
        self.seconds, self.cpu_seconds, self.sent, self.received = 0.0, 0.0, 0, 0

    def counters(self) -> tuple[int, int]:
        """Bytes that the interface has sent and received so far."""
        for line in Path("/proc/self/net/dev").read_text().splitlines():
            name, _, numbers = line.partition(":")
            if name.strip() == self.interface:
                words = numbers.split()
                return int(words[8]), int(words[0])
        return 0, 0

    def start(self) -> None:
        """Counts from here …"""
        self.begun, self.cpu_begun, self.before = time.perf_counter(), time.process_time(), self.counters()

    def stop(self) -> None:
        """… to here."""
        self.seconds += time.perf_counter() - self.begun
        self.cpu_seconds += time.process_time() - self.cpu_begun
        sent, received = self.counters()
        self.sent += sent - self.before[0]
        self.received += received - self.before[1]

    def lap(self) -> dict[str, Any]:
        """What there is so far, the clock running on."""
        self.stop()
        self.start()
        totals = {"seconds": self.seconds, "cpu_seconds": self.cpu_seconds}
        return totals | {"bytes_sent": self.sent, "bytes_received": self.received}


def flops_of(task: Task, batch_size: int) -> int:
    """Of forward and backward of one rank's batch, from a step whose gradients are thrown away."""
    inputs, targets = next(task.batches(0, 1, batch_size))
    state = {name: tensor.clone() for name, tensor in task.model.state_dict().items()}
    with FlopCounterMode(display=False) as counter:
        task.loss(task.model(inputs), targets).backward()
    task.model.zero_grad()
    task.model.load_state_dict(state)
    return int(counter.get_total_flops())


@contextlib.contextmanager
def all_threads() -> Iterator[None]:
    """The whole machine for this rank, while the others wait for it."""
    before = torch.get_num_threads()
    torch.set_num_threads(os.cpu_count() or 1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def say(kind: str, **what: Any) -> None:
    """One line of rank 0."""
    if dist.get_rank() == 0:
        print(json.dumps({"kind": kind} | what), flush=True)


def train(task: Task, method: Method, given: argparse.Namespace, meter: Meter) -> None:
    """All steps, looking at the result every so often and at the end."""
    batches = task.batches(dist.get_rank(), dist.get_world_size(), method.settings.batch_size)
    last = given.stop_after or given.steps
    row: dict[str, Any] = {"step": 0, "seconds": 0.0, "cpu_seconds": 0.0, "bytes_sent": 0, "bytes_received": 0}
    settled = row
    dist.barrier()
    meter.start()
    for step in range(1, last + 1):
        inputs, targets = next(batches)
        loss = task.loss(method.model(inputs), targets)
        method.step(loss)
        row = {"step": step} | meter.lap()
        say("step", loss=loss.item(), density=method.density, **row)
        if step == SETTLING_STEPS:
            settled = row
        if step == last or (given.eval_every and step % given.eval_every == 0):
            method.settle()
            meter.stop()
            count = given.final_samples if step == last else given.eval_samples
            if dist.get_rank() == 0 and count:
                with all_threads():
                    held_out_loss, accuracy = task.evaluate(count)
                say("eval", step=step, loss=held_out_loss, accuracy=accuracy, seconds=meter.seconds)
            dist.barrier()
            meter.start()
    meter.stop()
    names = ("seconds", "cpu_seconds", "bytes_sent", "bytes_received")
    count = max(1, last - settled["step"])
    means = {f"step_{name}": (row[name] - settled[name]) / count for name in names}
    say("end", steps=last, seconds=meter.seconds, **means)


def build_parser() -> argparse.ArgumentParser:
    """The flags."""
    parser = argparse.ArgumentParser(
        prog="train_gradient", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--task", choices=[*TASKS, "imagenet"], default="resnet18", help="what is trained")
    parser.add_argument("--data", metavar="FOLDER", type=Path, help="train/CLASS/… and val/CLASS/…; imagenet")
    parser.add_argument("--network", default="resnet18", help="imagenet: one of benchmarks/networks.py")
    parser.add_argument("--workers", type=int, default=0, help="imagenet: processes that read images")
    parser.add_argument("--method", choices=list(METHODS), default="engine", help="how gradients are exchanged")
    parser.add_argument("--steps", type=int, default=100, help="that the learning rate's schedule is made for")
    parser.add_argument("--epochs", type=int, help="imagenet with --data: instead of --steps")
    parser.add_argument("--stop-after", type=int, metavar="STEPS", help="end before the schedule does")
    parser.add_argument("--batch-size", type=int, help="of each rank; default: the task's")
    parser.add_argument("--lr", type=float, help="its peak; default: the task's")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compressor", default="threshold-v", help="engine and hook: what chooses")
    parser.add_argument("--density", type=float, default=0.01, help="engine and hook: kept fraction of the gradient")
    parser.add_argument("--quantiser", default="bf16", help="engine and hook: none, bf16 or int8 on the wire")
    parser.add_argument("--staleness", type=int, choices=(0, 1), default=1, help="engine: steps the exchange may lag")
    parser.add_argument("--controller", action="store_true", help="engine: the density follows the link")
    parser.add_argument(
        "--correction", action="store_true", help="engine and hook: momentum or Adam's moments before the choice"
    )
    parser.add_argument("--density-warm-up", type=int, default=0, metavar="STEPS", help="engine and hook: begin denser")
    parser.add_argument("--inner-steps", type=int, default=20, help="diloco: steps between two exchanges")
    parser.add_argument("--fragments", type=int, default=1, help="local-updates: groups that are exchanged in turns")
    parser.add_argument("--delay", type=int, default=0, help="local-updates: steps beside which one is exchanged")
    parser.add_argument("--outer-lr", type=float, default=0.7, help="diloco-bf16: rate of the outer optimizer")
    parser.add_argument(
        "--played", nargs="?", const=0.0, type=float, metavar="SECONDS",
        help="forward and backward as on an accelerator that takes so long; default: as long as they take here",
    )  # fmt: skip
    parser.add_argument("--eval-every", type=int, default=0, metavar="STEPS", help="default: at the end only")
    parser.add_argument("--eval-samples", type=int, default=1024, help="held-out samples of each look")
    parser.add_argument("--final-samples", type=int, help="of the last look; default: as many as of each")
    parser.add_argument(
        "--address", help="this machine's, whose interface is used; default: GLOO_SOCKET_IFNAME's, or lo"
    )
    return parser


def build_task(given: argparse.Namespace, device: torch.device) -> Task:
    """The network and its data."""
    if given.task != "imagenet":
        return TASKS[given.task](given.seed, device)
    if given.data is None:
        return Large(given.seed, device, given.network)
    for part in ("train", "val"):
        if not (given.data / part).is_dir():
            raise SystemExit(f"train_gradient: expected {given.data / part}/CLASS/*.jpg, found no such folder")
    return Folder(given.seed, device, given.data, given.network, given.workers)


def main(argv: list[str] | None = None) -> None:
    """Builds what the flags say, and trains."""
    given = build_parser().parse_args(argv)
    if given.final_samples is None:
        given.final_samples = given.eval_samples
    if given.address:
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = interface_of(given.address)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", local_rank % torch.cuda.device_count()) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    torch.manual_seed(given.seed)
    task = build_task(given, device)
    batch_size = given.batch_size or task.recipe.batch_size
    if given.epochs and isinstance(task, Folder):
        given.steps = given.epochs * task.steps_per_epoch(dist.get_world_size(), batch_size)
    names = (
        "steps",
        "compressor",
        "density",
        "quantiser",
        "staleness",
        "controller",
        "inner_steps",
        "fragments",
        "delay",
        "outer_lr",
    )
    names += ("correction", "density_warm_up")
    settings = Settings(
        optimizer=task.recipe.optimizer,
        lr=given.lr or task.recipe.lr,
        batch_size=batch_size,
        **{name: getattr(given, name) for name in names},
    )
    if dist.get_rank() == 0:
        about = {
            "task": given.task,
            "method": given.method,
            "world_size": dist.get_world_size(),
            "parameters": sum(parameter.numel() for parameter in task.model.parameters()),
            "flops_per_step": flops_of(task, batch_size),
            "without_gradient": without_gradient(task, batch_size=batch_size),
            "settings": dataclasses.asdict(settings),
            "device": torch.cuda.get_device_name() if on_gpu else "cpu",
            "torch": torch.__version__,
        }
        say("setup", **about)
    if given.played is not None:
        dist.barrier()  # so that both measure while both compute
        task = Played(task, dist.get_rank(), dist.get_world_size(), batch_size, given.played or None)
        say("played", seconds=task.seconds)
    method = METHODS[given.method](task.model, settings)
    try:
        train(task, method, given, Meter(os.environ["GLOO_SOCKET_IFNAME"]))
    finally:
        method.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
