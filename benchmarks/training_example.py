"""ACUTE's example, as its users have it: data-parallel training that saves every few epochs, and goes on where it was.

Read it from top to bottom. What a plain DDP script does not have are five lines: `init_acute`, `restore`,
`wait_copy_complete` before the optimizer's step, `save` after an epoch, `destroy_acute`. The flags are the original's.

Start it with torchrun, or with mpirun, on every node::

    shade cache up --dir memory_node                           # on the memory node: prints the URL
    shade checkpoint flush URL --persist-to DIR                   # there too
    torchrun --nproc-per-node 2 --master-addr 10.0.0.1 --master-port 1234 \\
        benchmarks/training_example.py 10 1 10.0.0.1 1234 --batch_size 128 --store URL --persist-to DIR
    torchrun … benchmarks/training_example.py … --snapshot_path latest        # goes on

`execute_example.sh` beside this file does all of it on one machine, kills a trainer if asked to, and resumes.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import networks
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset
from torchvision import transforms
from torchvision.datasets import ImageFolder

import shade
from shade.checkpoint import TrainNode

DIGITS = Path(__file__).resolve().parent.parent / ".cache" / "digits" / "train"


def boolean(text: str) -> bool:
    """``True`` and ``False`` as the original's users type them; there, any word was true."""
    words = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    if text.lower() not in words:
        raise argparse.ArgumentTypeError(f"expected True or False, got {text!r}")
    return words[text.lower()]


def arguments() -> argparse.Namespace:
    """The original's flags, and ours."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("total_epochs", type=int, help="the last epoch")
    parser.add_argument("save_period", type=int, help="epochs from one save to the next")
    parser.add_argument("training_master_addr", help="where the trainers meet, if torchrun does not say")
    parser.add_argument("training_master_port", help="and on which port")
    parser.add_argument("--starting_epoch", type=int, default=1, metavar="N", help="the first epoch (1)")
    parser.add_argument("--batch_size", type=int, default=32, metavar="N", help="samples per rank and step (32)")
    parser.add_argument("--remote_buffer_size", type=int, default=2, metavar="N", help="snapshots in memory, ≥ 2 (2)")
    parser.add_argument("--shard_size", type=int, default=1, metavar="N", help="accepted; all ranks send their share")
    parser.add_argument("--model_name", default="user_model", metavar="NAME", help="the snapshots' name (user_model)")
    for name, short, text in (
        ("file_name_include_datetime", "file_date", "add when the run began to the name, and keep all snapshots"),
        ("file_save_in_dictionary", "file_dictionary", "in a folder of the model's name"),
    ):
        parser.add_argument(
            f"--{name}", f"--{short}", type=boolean, nargs="?", const=True, default=False, metavar="BOOL", help=text
        )
    parser.add_argument("--snapshot_path", metavar="PATH", help="go on from: latest, a snapshot's folder, or a file")
    parser.add_argument("--store", metavar="URL", help="the memory node (SHADE_CHECKPOINT; none: storage alone)")
    parser.add_argument("--persist-to", metavar="DIR", help="durable storage (SHADE_PERSIST_TO; ./checkpoints)")
    parser.add_argument("--data", type=Path, metavar="DIR", help="images in a folder a class (digits; else made up)")
    parser.add_argument("--network", metavar="NAME", help="of networks.py (resnet152 on a GPU, as the original; cnn)")
    parser.add_argument("--learning_rate", type=float, default=0.001, metavar="RATE", help="of Adam (0.001)")
    return parser.parse_args()


def load_data(folder: Path | None) -> tuple[Dataset, int, int]:
    """The training set, its classes and its image size."""
    if folder is None and not DIGITS.is_dir():
        targets = torch.randint(10, (512,), generator=torch.Generator().manual_seed(0))
        images = torch.rand(512, 3, 32, 32, generator=torch.Generator().manual_seed(1))
        images[torch.arange(512), 0, targets * 3] += 1.0  # a bright line, whose height tells the class
        return TensorDataset(images, targets), 10, 32
    images = ImageFolder(str(folder or DIGITS), transforms.ToTensor())
    height, width = images[0][0].shape[1:]
    return images, len(images.classes), min(height, width)


def train_epoch(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: DataLoader,
    device: torch.device,
    train_node: TrainNode,
) -> float:
    """One pass over the data; the mean loss over all ranks."""
    total = torch.zeros(2, dtype=torch.float64, device=device)
    for images, targets in loader:
        loss = F.cross_entropy(model(images.to(device)), targets.to(device))
        loss.backward()
        train_node.wait_copy_complete()  # what was saved last is still being copied: it must not change before
        optimizer.step()
        optimizer.zero_grad()
        total += torch.stack([loss.detach().double(), torch.ones_like(loss, dtype=torch.float64)])
    dist.all_reduce(total)
    return float(total[0] / total[1])


def main() -> None:
    """One rank's whole run."""
    args = arguments()
    communicator, train_node, remote_node = shade.init_acute(args)
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    torch.manual_seed(0)

    dataset, num_classes, image_size = load_data(args.data)
    sampler = DistributedSampler(dataset, communicator.world_size, communicator.rank, shuffle=True)
    loader = DataLoader(dataset, args.batch_size, sampler=sampler, drop_last=True)
    network = networks.build(args.network or ("resnet152" if on_gpu else "cnn"), num_classes, image_size).to(device)
    model = DistributedDataParallel(network, device_ids=[device.index] if on_gpu else None)
    optimizer = torch.optim.Adam(network.parameters(), lr=args.learning_rate)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)

    state = train_node.restore()
    if state is not None:
        network.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
    if communicator.rank == 0:
        print(f"{remote_node.run}: epochs {args.starting_epoch} to {args.total_epochs}", flush=True)

    for epoch in range(args.starting_epoch, args.total_epochs + 1):
        begun = time.perf_counter()
        sampler.set_epoch(epoch)
        loss = train_epoch(model, optimizer, loader, device, train_node)
        scheduler.step(loss)
        if epoch % args.save_period == 0 or epoch == args.total_epochs:
            train_node.save(
                {
                    "model": network.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "scheduler": scheduler.state_dict(),
                    "epoch": epoch,
                }
            )
        if communicator.rank == 0:
            print(f"epoch {epoch}: loss {loss:.9f} in {time.perf_counter() - begun:.2f} s", flush=True)
    shade.destroy_acute()


if __name__ == "__main__":
    main()
