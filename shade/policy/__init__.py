"""Cache policies: who is admitted, who stays, who leaves. Importing this package registers them."""

from shade.policy import baselines, plan, shade
from shade.policy.base import POLICIES, CachePolicy, EpochPlan, Verdict

__all__ = ["POLICIES", "CachePolicy", "EpochPlan", "Verdict", "baselines", "plan", "shade"]
