"""Saves checkpoints of DeepSpeed into our tiers, by its plug-in interface `CheckpointEngine`.

::

    engine, *_ = deepspeed.initialize(model=model, config=config)
    engine.checkpoint_engine = ShadeCheckpointEngine(persist_to="/mnt/ckpt", store="redis+cluster://10.0.0.1:7000")
    engine.save_checkpoint("/mnt/runs/bert")
    engine.load_checkpoint("/mnt/runs/bert")

The states that each rank passes for a tag become one snapshot, committed completely or not at all. At each path lies a
small note that names the snapshot, so DeepSpeed's own search for files works. A random number is in both, so that a
copied note, and one of another folder or tag whose step has the same number, name their own. The strategy decides how
far a save has come when `save_checkpoint` returns: ``mlc-base``: committed; ``sync``: durable; ``copy``: copied and in
progress. Then ``latest`` may name a snapshot that never came to exist, which loading reports. Nothing is pickled.
Decision 0030.
"""

from __future__ import annotations

import copy
import json
import os
import re
import secrets
from enum import Enum
from pathlib import Path
from typing import Any, Final

import torch

from shade.checkpoint._capture.flatten import part_of, tensors_in, unflatten
from shade.checkpoint._interchange.export import STAND_IN
from shade.checkpoint._restore.reader import ChunkReads, Snapshot
from shade.checkpoint._restore.restore import Arena
from shade.checkpoint._session.checkpointer import group_of, tiers_of
from shade.checkpoint._session.state_dict_checkpointer import StateDictCheckpointer
from shade.errors import CheckpointError, ConfigError, CorruptCheckpointError
from shade.installation import install_hint
from shade.process import replacing
from shade.types import StrategyName

try:
    from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo, CheckpointEngine
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address
except ImportError as error:
    raise ConfigError.of(
        "the deepspeed package", None, f"{install_hint('deepspeed')} (DS_BUILD_OPS=0 without a compiler)"
    ) from error

NOTE: Final = "shade.deepspeed"
"""Key that marks a note of this module; its value is the version."""
_VERSION: Final = 1
_NUMBER: Final = re.compile(r"(\d{1,18})$")


class ShadeCheckpointEngine(CheckpointEngine):  # type: ignore[misc]  # DeepSpeed is not typed
    """Saves and loads on one rank; create one on every rank after `deepspeed.initialize`, and close it at the end.

    Args:
        store: URL of the cluster whose memory takes snapshots; None: storage alone.
        persist_to: Path or URL of durable storage; None: memory alone.
        run: Id of the run; one live process each.
        strategy: Decides how far a save has come when `save_checkpoint` returns; see the top of the file.
        keep: Retention rules of the storage: see `_format.retention.Keep`; DeepSpeed itself never removes any.
        **options: As in `Checkpointer`.

    Raises:
        ConfigError: See `Checkpointer`.
    """

    def __init__(
        self,
        store: str | None = None,
        *,
        persist_to: str | os.PathLike[str] | None = None,
        run: str = "deepspeed",
        strategy: StrategyName = "mlc-base",
        keep: str = "all",
        **options: Any,
    ) -> None:
        super().__init__()
        self.name = "shade"
        self.checkpointer = StateDictCheckpointer(
            store, persist_to=persist_to, run=run, strategy=strategy, keep=keep, **options
        )
        self._files: dict[str, tuple[Path, Any]] = {}

    # ── saving ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def create(self, info: CheckpointCommitInfo) -> None:
        """Begins a checkpoint."""
        self._files.clear()

    def save(self, state_dict: Any, path: str) -> None:
        """Takes a state, which must not change before `commit` saves it with all others."""
        where = Path(path)
        self._files[f"{where.parent.name}/{where.name}"] = where, state_dict

    def commit(self, info: CheckpointCommitInfo) -> bool:
        """Saves the states that this rank was given since `create`. Collective. Returns True; raises ConfigError if
        something in a state cannot be saved, and CheckpointError if no tier took it: DeepSpeed continues with the
        previous ``latest``."""
        files, self._files = self._files, {}
        step = self._step_of(str(info.tag))
        states = {name: plain(state) for name, (_, state) in files.items()}
        number = secrets.token_hex(8)
        self.checkpointer.save_state({"tag": str(info.tag), "id": number, "files": states}, step)
        self.checkpointer.wait_copy_complete()
        handle = self.checkpointer.latest
        assert handle is not None, "it has just been saved"
        if self.checkpointer.config.save_waits_for not in ("begun", "copied"):
            handle.committed.result()
        for name, (path, _) in files.items():
            self._write_note(path, name, str(info.tag), step, number)
        return True

    def _step_of(self, tag: str) -> int:
        """Returns the number at the end of a tag, as in ``global_step120``; else the last step plus one."""
        found = _NUMBER.search(tag)
        return int(found[1]) if found else self.checkpointer.step_count + 1

    def _write_note(self, path: Path, name: str, tag: str, step: int, number: str) -> None:
        """Writes the note that names a state's snapshot to the state's path, to be there after a power cut too."""
        rank = group_of(self.checkpointer).rank
        note = {NOTE: _VERSION, "run": self.checkpointer.run, "step": step, "tag": tag, "rank": rank, "file": name}
        note["id"] = number
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, durable=True) as beside:
            beside.write_text(json.dumps(note) + "\n", encoding="utf-8")

    # ── loading ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def load(self, path: str, map_location: Any = None) -> Any:
        """Reads a state, verified. Each rank by itself.

        Args:
            path: Path of a note.
            map_location: Device to move tensors to; a function, as DeepSpeed passes it for the CPU, leaves them there.

        Returns:
            The state as `save` was given it.

        Raises:
            CheckpointError: There is no note, or the snapshot never came to exist, or was removed.
            CorruptCheckpointError: It is lost in every copy.
        """
        note = _note_at(Path(path), self.checkpointer.run)
        device = torch.device(map_location) if isinstance(map_location, str | torch.device) else None
        return from_plain(self._read(*self._snapshot(note), note), device)

    def _snapshot(self, note: dict[str, Any]) -> tuple[Snapshot, Any]:
        """Returns the snapshot that a note names, and the tree of the states that the note's rank saved."""
        found, reader = self.checkpointer.list(), tiers_of(self.checkpointer).reader
        for snapshot in found:
            if snapshot.record.step == note["step"] and note["rank"] < snapshot.record.world_size:
                tree = _only_child(part_of(reader.manifest(snapshot, note["rank"]).tree, ["state"]))
                if unflatten(part_of(tree, ["id"]), {}).get("id") == note["id"]:
                    return snapshot, _only_child(part_of(tree, ["files"]))
        known = ", ".join(str(each) for each in sorted({snapshot.record.step for snapshot in found})) or "none"
        raise CheckpointError.of(
            f"a snapshot of step {note['step']} for {note['tag']!r}",
            f"others, of steps {known}",
            "load one of those by its tag",
        )

    def _read(self, snapshot: Snapshot, files: Any, note: dict[str, Any]) -> Any:
        """Reads one rank's state: its part of that rank's tree, and the chunks that it needs."""
        reader = tiers_of(self.checkpointer).reader
        wanted = part_of(files, [note["file"]])
        names = tensors_in(wanted)
        tensors: dict[str, torch.Tensor] = {}
        with ChunkReads(reader, snapshot) as reads:
            for rank in range(snapshot.record.world_size):
                manifest = reader.manifest(snapshot, rank)
                entries = {name: entry for name, entry in manifest.tensors.items() if name in names}
                if entries:
                    arena, numbers = Arena(manifest.num_bytes), manifest.chunks_of(entries)
                    reads.begin(manifest, arena.chunks(manifest, numbers), shared=numbers)
                    tensors |= arena.tensors(entries)
            reads.finish_all()
        return unflatten(wanted, tensors)[note["file"]]

    # ── the rest of the interface ───────────────────────────────────────────────────────────────────────────────────

    def preserves_storage_sharing(self) -> bool:
        """Returns False: only a view's own elements are saved, so nothing has to be cloned first."""
        return False

    def cleanup(self) -> None:
        """Waits until the saves are committed, then closes; raises CheckpointError if the last one is in no tier. Safe
        to call twice."""
        self.checkpointer.close()


def _note_at(path: Path, run: str) -> dict[str, Any]:
    """Returns the content of a note."""
    cure = "load a checkpoint that was saved through ShadeCheckpointEngine, or leave the engine as DeepSpeed has it"
    try:
        with path.open("rb") as file:
            note = json.loads(file.read(2**16))
        wanted = {"run": str, "step": int, "tag": str, "rank": int, "file": str, "id": str}
        is_ours = note[NOTE] == _VERSION and all(type(note[key]) is kind for key, kind in wanted.items())
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError.of(f"a note of ours at {path}", repr(error), cure) from error
    if not is_ours or note["run"] != run:
        raise CheckpointError.of(f"a note of run {run!r} at {path}", note, "name the run that saved it")
    return dict(note)


def _only_child(tree: Any) -> Any:
    """Returns the only child in a part of a tree."""
    try:
        (thing,) = tree["dict"][1]
    except (TypeError, KeyError, ValueError, IndexError) as error:
        raise CorruptCheckpointError(f"expected a state of DeepSpeed in the snapshot, got another: {error}") from error
    return thing


# ── DeepSpeed's own classes in states ───────────────────────────────────────────────────────────────────────────────

_CLASSES: Final[dict[str, type[Any]]] = {
    each.__qualname__: each for each in (LossScaler, DynamicLossScaler, ZeroStageEnum, fragment_address)
}
"""Classes that its optimizers put into their states; no other name from a snapshot is looked up."""


def plain(state: Any) -> Any:
    """Returns a state with each object of DeepSpeed's replaced by a dict of its class and fields. The given state is
    not changed. Raises `ConfigError` if it has a dict that looks like such a replacement already."""
    kind = type(state)
    if _CLASSES.get(kind.__qualname__) is kind:
        return {STAND_IN: kind.__qualname__, "fields": state.value if isinstance(state, Enum) else plain(vars(state))}
    if isinstance(state, dict):
        if STAND_IN in state:
            raise ConfigError.of(f"no key {STAND_IN!r} in a state", sorted(map(str, state)), "give it another name")
        made = {key: plain(each) for key, each in state.items()}
        if all(made[key] is each for key, each in state.items()):
            return state
        changed = copy.copy(state)  # a module's OrderedDict has an attribute, too
        changed.update(made)
        return changed
    if kind in (list, tuple):
        items = [plain(each) for each in state]
        return state if all(here is there for here, there in zip(items, state, strict=True)) else kind(items)
    return state


def from_plain(state: Any, device: torch.device | None = None) -> Any:
    """Returns the state that `plain` was given, its tensors on a device (None: where they are); changes dicts in place.
    Raises `CorruptCheckpointError` if an object has an unknown class."""
    kind = type(state)
    if isinstance(state, torch.Tensor):
        return state if device is None else state.to(device)
    if isinstance(state, dict):
        for key, each in state.items():
            state[key] = from_plain(each, device)
        return _object(state[STAND_IN], state.get("fields")) if STAND_IN in state else state
    return kind(from_plain(each, device) for each in state) if kind in (list, tuple) else state


def _object(name: Any, fields: Any) -> Any:
    found = _CLASSES.get(str(name))
    if found is None:
        raise CorruptCheckpointError(f"expected one of {', '.join(_CLASSES)} in a state of DeepSpeed, got {name!r}")
    if issubclass(found, Enum):
        return found(fields)
    made = object.__new__(found)
    vars(made).update(fields)
    return made
