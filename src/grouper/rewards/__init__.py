"""Rewards: small pure functions by name, with weights, called with the arguments that TRL uses."""

from grouper.rewards import builtin  # noqa: F401 - defines the rewards
from grouper.rewards.attacks import probe as probe
from grouper.rewards.call import RewardLog as RewardLog
from grouper.rewards.core import REWARDS as REWARDS
from grouper.rewards.core import Completed as Completed
from grouper.rewards.core import Group as Group
from grouper.rewards.core import RewardStack as RewardStack
from grouper.rewards.core import build_rewards as build_rewards
from grouper.rewards.core import reward as reward
