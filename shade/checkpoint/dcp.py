"""Sharded state (FSDP2, DTensor) in our tiers, by the plug-ins of `torch.distributed.checkpoint` (DCP).

``dcp.save(state, storage_writer=ShadeWriter(…))``, ``dcp.async_save(…, async_stager=ShadeStager())`` and
``dcp.load(state, storage_reader=ShadeReader(…))``: which rank has which part of what is DCP's business, resharding
included; that it is hashed, verified, mended, committed whole or not at all, and not pickled, is ours.
"""

from shade.checkpoint._integrations.dcp_reader import ShadeReader
from shade.checkpoint._integrations.dcp_stager import ShadeStager
from shade.checkpoint._integrations.dcp_writer import ShadeWriter

__all__ = ["ShadeReader", "ShadeStager", "ShadeWriter"]
