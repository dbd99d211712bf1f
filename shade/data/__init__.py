"""What a script uses: `ShadeSampler` draws, `ShadeDataset` fetches through the cache, `ShadeLoader` loads.
`MixtureSampler` and `PackedDataset` mix token data sets and pack them into full sequences. `Recorded` makes a map-style
data set of a stream.

The private packages: `_sampler` draws an epoch and plans the cache; `_dataset` reads samples from their source;
`_shards` reads them in tars and tables, `_recorded` records streams; `_loader` is the pipeline of threads; `_decode`
and `_transforms` turn files into pixels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shade._lazy import lazy

__all__ = [
    "ForgottenCallWarning",
    "MixtureReceipt",
    "MixtureSampler",
    "PackedDataset",
    "RangeParts",
    "Recorded",
    "RecordedSampler",
    "RemoteImageFolder",
    "ShadeDataset",
    "ShadeLoader",
    "ShadeSampler",
    "ShardFile",
    "ShardFormat",
    "ShardScan",
    "Shards",
    "cu_seqlens",
]

if TYPE_CHECKING:
    from shade.data._dataset.dataset import ShadeDataset
    from shade.data._loader.loader import ShadeLoader
    from shade.data._mixture.mixture import MixtureReceipt, MixtureSampler
    from shade.data._mixture.packed import PackedDataset, cu_seqlens
    from shade.data._origin.remote_image_folder import RemoteImageFolder
    from shade.data._recorded.recorded import Recorded
    from shade.data._recorded.recorded_sampler import RecordedSampler
    from shade.data._sampler.sampler import ForgottenCallWarning, ShadeSampler
    from shade.data._shards.index import RangeParts, ShardFile, ShardFormat, ShardScan
    from shade.data._shards.shards import Shards
else:
    __getattr__, __dir__ = lazy(
        __name__,
        {
            "shade.data._dataset.dataset": ["ShadeDataset"],
            "shade.data._origin.remote_image_folder": ["RemoteImageFolder"],
            "shade.data._loader.loader": ["ShadeLoader"],
            "shade.data._mixture.mixture": ["MixtureReceipt", "MixtureSampler"],
            "shade.data._mixture.packed": ["PackedDataset", "cu_seqlens"],
            "shade.data._recorded.recorded": ["Recorded"],
            "shade.data._recorded.recorded_sampler": ["RecordedSampler"],
            "shade.data._sampler.sampler": ["ForgottenCallWarning", "ShadeSampler"],
            "shade.data._shards.index": ["RangeParts", "ShardFile", "ShardFormat", "ShardScan"],
            "shade.data._shards.shards": ["Shards"],
        },
    )
