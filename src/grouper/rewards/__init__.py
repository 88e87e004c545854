"""Rewards: small pure functions by name, with weights, in the signature TRL users know."""

from grouper.rewards.base import RewardFunction, RewardLayout
from grouper.rewards.probes import ProbeResult, probe
from grouper.rewards.registry import REWARDS
from grouper.rewards.stack import RewardStack, build_rewards
from grouper.rewards.stacks import STACKS, expand_stacks, stack

__all__ = [
    "REWARDS",
    "STACKS",
    "ProbeResult",
    "RewardFunction",
    "RewardLayout",
    "RewardStack",
    "build_rewards",
    "expand_stacks",
    "probe",
    "stack",
]
