"""Cache policies: who is admitted, who stays, who leaves. Importing this package registers them."""

from shade.policy import controls, plan, shade
from shade.policy.base import POLICIES, CachePolicy, EpochPlan, Verdict

__all__ = ["POLICIES", "CachePolicy", "EpochPlan", "Verdict", "controls", "plan", "shade"]
