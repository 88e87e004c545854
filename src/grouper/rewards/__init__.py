"""Rewards: small pure functions by name, with weights, in the signature TRL users know."""

from grouper.rewards import builtin, published  # noqa: F401 - in the order of the list
from grouper.rewards.attacks import ProbeResult, probe, score_texts
from grouper.rewards.calling import Notes, RewardFunction
from grouper.rewards.core import REWARDS, Completed, RewardStack, build_rewards, reward

__all__ = [
    "REWARDS",
    "Completed",
    "Notes",
    "ProbeResult",
    "RewardFunction",
    "RewardStack",
    "build_rewards",
    "probe",
    "reward",
    "score_texts",
]
