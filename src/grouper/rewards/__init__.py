"""Rewards: small pure functions by name, with weights, in the signature TRL users know."""

from grouper.rewards.base import RewardFunction
from grouper.rewards.probes import ProbeResult, probe
from grouper.rewards.registry import REWARDS
from grouper.rewards.stack import RewardStack, build_rewards

__all__ = [
    "REWARDS",
    "ProbeResult",
    "RewardFunction",
    "RewardStack",
    "build_rewards",
    "probe",
]
