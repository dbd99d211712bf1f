"""Sharded state (FSDP2, DTensor) in our tiers, by the plug-ins of `torch.distributed.checkpoint` (DCP).

``dcp.save(state, storage_writer=ShadeWriter(…))`` and ``dcp.load(state, storage_reader=ShadeReader(…))``: who needs
which part is DCP's business; that it is hashed, verified, mended, committed whole or not at all, unpickled, is ours.
"""

from shade.checkpoint._integrations.dcp_reader import ShadeReader
from shade.checkpoint._integrations.dcp_writer import ShadeWriter

__all__ = ["ShadeReader", "ShadeWriter"]
