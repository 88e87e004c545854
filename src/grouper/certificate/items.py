"""The items of a certificate: what might be wrong with a result, and what the record says of it.

Each item is one function of the evidence and its row in `ITEMS`. It passes, fails, or is missing,
where the record does not say; a missing item names the command that would supply it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from grouper.certificate.cause_items import (
    judge_attacks,
    judge_control,
    judge_payment,
    judge_reasoning,
    judge_tokens,
)
from grouper.certificate.comparison_items import (
    judge_base_prompt,
    judge_checkpoint,
    judge_conditions,
    judge_gain,
    judge_seeds,
)
from grouper.certificate.contamination_items import (
    judge_leaks,
    judge_probe,
    judge_test_set,
    judge_twins,
)
from grouper.certificate.evidence import Evidence
from grouper.certificate.finding import Finding
from grouper.certificate.record_items import judge_grades, judge_records


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """A row of the certificate."""

    question: str
    """What it answers."""
    judge: Callable[[Evidence], Finding]


ITEMS: dict[str, Item] = {
    "gain": Item(question="Is the trained model better?", judge=judge_gain),
    "seeds": Item(question="Was it luck?", judge=judge_seeds),
    "conditions": Item(question="Were both measured in the same way?", judge=judge_conditions),
    "base prompt": Item(question="Had the base a fair prompt?", judge=judge_base_prompt),
    "checkpoint": Item(question="Was the model chosen by its result?", judge=judge_checkpoint),
    "records": Item(question="Is the record whole?", judge=judge_records),
    "grades": Item(question="Are the answers right?", judge=judge_grades),
    "test set": Item(question="Is it the whole test set?", judge=judge_test_set),
    "leaks": Item(question="Was the test set trained on?", judge=judge_leaks),
    "probe": Item(question="Has the model read the test set?", judge=judge_probe),
    "twins": Item(question="Does it hold with other numbers?", judge=judge_twins),
    "reasoning": Item(question="Is it more than the format?", judge=judge_reasoning),
    "tokens": Item(question="Is it more than a larger budget?", judge=judge_tokens),
    "control": Item(question="Was it the reward?", judge=judge_control),
    "attacks": Item(question="Can the reward be cheated?", judge=judge_attacks),
    "payment": Item(question="Was the reward cheated?", judge=judge_payment),
}
"""Name -> item, in the order of the page; `replay`, which trains, follows them."""
