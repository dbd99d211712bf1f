"""Cache policies: who is admitted, who stays, who leaves. One file a policy; importing this package registers
them all."""

from shade.policy import belady, fifo, lfu, plan, shade, static
from shade.policy.base import POLICIES, CachePolicy, EpochPlan, Verdict

__all__ = [
    "POLICIES",
    "CachePolicy",
    "EpochPlan",
    "Verdict",
    "belady",
    "fifo",
    "lfu",
    "lru",
    "plan",
    "shade",
    "static",
]
