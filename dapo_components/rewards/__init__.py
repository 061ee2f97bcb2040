"""Rewards: what a response scores, and whether it is right."""

from dapo_components.rewards.compose import RewardScores, RewardSet
from dapo_components.rewards.functions import RewardFunction
from dapo_components.rewards.math_answer import AnswerCheck, check_answer, extract_answer, verify_answer
from dapo_components.rewards.math_reward import MathReward
from dapo_components.rewards.overlong import SoftOverlongPunishment
from dapo_components.rewards.reference_kl import ReferenceKLPenalty
from dapo_components.rewards.result import RewardResult

__all__ = [
    "AnswerCheck",
    "MathReward",
    "ReferenceKLPenalty",
    "RewardFunction",
    "RewardResult",
    "RewardScores",
    "RewardSet",
    "SoftOverlongPunishment",
    "check_answer",
    "extract_answer",
    "verify_answer",
]
