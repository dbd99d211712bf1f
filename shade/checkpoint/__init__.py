"""Snapshots in shared memory, in the cluster's memory and in storage, restored from the nearest intact copy.

`Checkpointer` is what a training script holds. The life of a snapshot through the private packages, in order:
`_session` opens the tiers; `_capture` flattens the attached state; a strategy (`_strategies`) copies it into a buffer
(`_buffer`); `_save` packs, hashes and writes it; `_commit` makes it count on all ranks at once, in each tier
(`_tiers`); `_flush` moves it to storage; `_restore` reads it back, verified. `_format` is the data format, `_codecs`
how a chunk is encoded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shade._lazy import lazy

__all__ = [
    "CODECS",
    "Checkpointer",
    "CommitResult",
    "Communicator",
    "RecoveryEstimate",
    "RemoteNode",
    "Restored",
    "SaveHandle",
    "Snapshot",
    "StateDictCheckpointer",
    "TrainNode",
    "destroy_ACUTE",
    "destroy_DASH",
    "destroy_acute",
    "destroy_dash",
    "init_ACUTE",
    "init_DASH",
    "init_acute",
    "init_dash",
    "load_weights",
]

if TYPE_CHECKING:
    from shade.checkpoint._codecs.base import CODECS
    from shade.checkpoint._integrations.acute import (
        Communicator,
        RemoteNode,
        TrainNode,
        destroy_ACUTE,
        destroy_acute,
        destroy_DASH,
        destroy_dash,
        init_ACUTE,
        init_acute,
        init_DASH,
        init_dash,
    )
    from shade.checkpoint._preemption.recovery_estimate import RecoveryEstimate
    from shade.checkpoint._restore.reader import Snapshot
    from shade.checkpoint._restore.restore import Restored
    from shade.checkpoint._save.async_writer import CommitResult, SaveHandle
    from shade.checkpoint._session.checkpointer import Checkpointer, load_weights
    from shade.checkpoint._session.state_dict_checkpointer import StateDictCheckpointer
else:
    __getattr__, __dir__ = lazy(
        __name__,
        {
            "shade.checkpoint._codecs.base": ["CODECS"],
            "shade.checkpoint._integrations.acute": [
                "Communicator",
                "RemoteNode",
                "TrainNode",
                "destroy_ACUTE",
                "destroy_DASH",
                "destroy_acute",
                "destroy_dash",
                "init_ACUTE",
                "init_DASH",
                "init_acute",
                "init_dash",
            ],
            "shade.checkpoint._preemption.recovery_estimate": ["RecoveryEstimate"],
            "shade.checkpoint._restore.reader": ["Snapshot"],
            "shade.checkpoint._restore.restore": ["Restored"],
            "shade.checkpoint._save.async_writer": ["CommitResult", "SaveHandle"],
            "shade.checkpoint._session.checkpointer": ["Checkpointer", "load_weights"],
            "shade.checkpoint._session.state_dict_checkpointer": ["StateDictCheckpointer"],
        },
    )
