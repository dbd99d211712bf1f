"""The first bytes of a shard's file: what makes it a safetensors file that others read without us.

Eight bytes of length (little endian), JSON, and spaces up to a multiple of 4096, so that the data behind it can be
written and mapped page by page. It is a pure function of the manifest: whoever has the manifest knows where each chunk
lies without asking the file, so a header that rots hides nothing from us, and is written anew by a repair.
"""

from __future__ import annotations

import json
import struct
from typing import Final

from shade.checkpoint._format.manifest import FORMAT, Manifest

ALIGNMENT: Final = 4096
_LENGTH: Final = struct.Struct("<Q")


def safetensors_header(manifest: Manifest) -> bytes:
    """The header of a shard whose chunks follow it as they are, which is so with the codec ``none``.

    Args:
        manifest: Its tensors become entries; run, step and rank go into the metadata, as text.

    Returns:
        Bytes, a multiple of `ALIGNMENT` of them; tensor offsets in it count from its end.
    """
    metadata = {
        "format": "pt",
        "written_by": f"{FORMAT} {manifest.version}",
        "run": manifest.run,
        "step": str(manifest.step),
        "rank": str(manifest.rank),
        "world_size": str(manifest.world_size),
    }
    entries: dict[str, object] = {"__metadata__": metadata}
    for name, tensor in manifest.tensors.items():
        offsets = [tensor.start, tensor.stop]
        entries[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": offsets}
    body = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    body += b" " * (-(_LENGTH.size + len(body)) % ALIGNMENT)
    return _LENGTH.pack(len(body)) + body
