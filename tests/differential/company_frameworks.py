"""Combined scripts whose loop a framework runs, as the examples have it: Hugging Face's Trainer, and Lightning's."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from tests.differential.company_data import collate
from tests.differential.company_models import digest, make_model, make_optimizer

if TYPE_CHECKING:
    from tests.differential.company_training import Life


class _Steps:
    """Notes the steps of a life, and ends it where its script says."""

    def __init__(self, life: Life, begins: int) -> None:
        self._life, self._count = life, begins

    def takes(self, epoch: int, x_BW: torch.Tensor, label_B: torch.Tensor, index_B: torch.Tensor) -> None:
        """Before a step."""
        self._life.say(epoch=epoch, indices=index_B.tolist(), read=digest(x_BW, label_B))

    def saved(self) -> None:
        """After a step, and after the framework's checkpoint of it."""
        self._count += 1
        if self._life.life == 0 and self._count == self._life.script.step:
            self._life.end(None)


def _newest(folder: Path, pattern: str) -> tuple[Path | None, int]:
    """The newest checkpoint in a folder, and its step."""
    found = {int("".join(filter(str.isdigit, path.stem.split("-")[-1]))): path for path in folder.glob(pattern)}
    return (found[max(found)], max(found)) if found else (None, 0)


def _as_inputs(batch: list[Any]) -> dict[str, torch.Tensor]:
    return dict(zip(("x", "labels", "indices"), collate(batch), strict=True))


def run_trainer(life: Life) -> None:
    """As examples/transformers_trainer.py."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    script, storage = life.script, life.folder / "storage"
    dataset = life.make_dataset()
    sampler = life.make_sampler(dataset)
    loader = life.make_loader(dataset, sampler, _as_inputs)
    model = make_model(script)
    optimizer = make_optimizer(script, model)
    life.see_weights(model, optimizer)
    checkpoint, begins = _newest(storage, "checkpoint-*")
    steps = _Steps(life, begins)

    class Ours(Trainer):
        def get_train_dataloader(self) -> Any:
            return loader

        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **options: Any) -> Any:
            x_BW, label_B, index_B = inputs["x"], inputs["labels"], inputs["indices"]
            loss_B = F.cross_entropy(model(x_BW), label_B, reduction="none")
            sampler.report(index_B, loss_B.detach())
            steps.takes(sampler.epoch, x_BW, label_B, index_B)
            return (loss_B * sampler.weights(index_B)).mean()

    class Place(TrainerCallback):
        def is_over(self) -> bool:
            return sampler.steps_done >= sampler.num_steps

        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if checkpoint is not None:
                sampler.load_state_dict(torch.load(checkpoint / "sampler.pt", weights_only=True))

        def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if self.is_over() and sampler.epoch + 1 < state.num_train_epochs:
                sampler.set_epoch(sampler.epoch + 1)

        def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if self.is_over() and sampler.epoch + 1 >= state.num_train_epochs:
                control.should_training_stop = True

        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            torch.save(sampler.state_dict(), storage / f"checkpoint-{state.global_step}" / "sampler.pt")

    class End(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_save = bool(script.saves) and state.global_step % script.every == 0

        # The Trainer saves after `on_step_end`; what comes next is the next step, or the epoch's end.
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.ended(state)

        def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.ended(state)

        def ended(self, state: Any) -> None:
            while steps._count < state.global_step:
                steps.saved()

    arguments = TrainingArguments(
        output_dir=str(storage),
        use_cpu=True,
        num_train_epochs=script.epochs,
        max_grad_norm=0.0,
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        ignore_data_skip=True,
        remove_unused_columns=False,
    )
    constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    trainer = Ours(
        model, arguments, train_dataset=dataset, optimizers=(optimizer, constant), callbacks=[Place(), End()]
    )
    trainer.model_accepts_loss_kwargs = False
    life.say(begins=begins)
    trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    life.say_end(model)
    if script.closes:
        sampler.close()
        dataset.close()


def run_lightning(life: Life) -> None:
    """As examples/lightning_trainer.py."""
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint
    from torch.utils.data import DataLoader

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    script, storage = life.script, life.folder / "storage"
    model = make_model(script)
    optimizer = make_optimizer(script, model)
    life.see_weights(model, optimizer)
    checkpoint, begins = _newest(storage, "*.ckpt")
    steps = _Steps(life, begins)

    class EpochLoader(DataLoader[Any]):
        def __len__(self) -> int:
            return self.sampler.num_steps  # type: ignore[no-any-return, attr-defined]

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            pass

    class Data(lightning.LightningDataModule):
        def setup(self, stage: str) -> None:
            self.dataset = life.make_dataset()
            self.sampler = life.make_sampler(self.dataset)

        def train_dataloader(self) -> Any:
            self.sampler.set_epoch(self.trainer.current_epoch)
            options: dict[str, Any] = {"num_workers": script.workers, "collate_fn": collate}
            if script.workers:
                options |= {"multiprocessing_context": script.context, "persistent_workers": script.persistent}
            return EpochLoader(self.dataset, self.sampler.batch_size, sampler=self.sampler, **options)

        def state_dict(self) -> dict[str, Any]:
            return self.sampler.state_dict()  # type: ignore[no-any-return]

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.sampler.load_state_dict(state_dict)

        def teardown(self, stage: str) -> None:
            if script.closes:
                self.sampler.close()
                self.dataset.close()

    class Ours(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, number: int) -> torch.Tensor:
            x_BW, label_B, index_B = batch
            sampler = self.trainer.datamodule.sampler
            loss_B = F.cross_entropy(self.model(x_BW), label_B, reduction="none")
            sampler.report(index_B, loss_B)
            steps.takes(sampler.epoch, x_BW, label_B, index_B)
            return (loss_B * sampler.weights(index_B)).mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer

    class End(lightning.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            steps.saved()

    callbacks: list[Any] = []
    if script.saves:
        callbacks.append(
            ModelCheckpoint(storage, "{step}", every_n_train_steps=script.every, save_top_k=-1, save_on_exception=False)
        )
    trainer = lightning.Trainer(
        max_epochs=script.epochs,
        reload_dataloaders_every_n_epochs=1,
        accelerator="cpu",
        default_root_dir=life.folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=bool(script.saves),
        callbacks=callbacks,
    )
    trainer.callbacks.append(End())  # after the checkpoint's
    life.say(begins=begins)
    trainer.fit(Ours(), datamodule=Data(), ckpt_path=None if checkpoint is None else str(checkpoint))
    life.say_end(model)


RUNS = {"trainer": run_trainer, "lightning": run_lightning}
