"""Rewards: small pure functions by name, with weights, in the signature TRL users know."""

from grouper.rewards import builtin  # noqa: F401 - defines the rewards
from grouper.rewards.attacks import probe
from grouper.rewards.calling import Notes
from grouper.rewards.core import (
    REWARDS,
    Completed,
    Group,
    RewardStack,
    build_rewards,
    reward,
)

__all__ = [
    "REWARDS",
    "Completed",
    "Group",
    "Notes",
    "RewardStack",
    "build_rewards",
    "probe",
    "reward",
]
