r"""Completions without a box, as models write them: real references in many styles of concluding.

`completions` draws (text, reference, right): a body of reasoning, a conclusion from a template and
sometimes a remark after it. A spoiled completion concludes with another answer and mentions the
reference elsewhere: in the body, or as a number beside the answer.

In a template `{i}` is the answer within a line (bare, bold, or in dollars), `{d}` the answer as a
formula of its own lines, `{n}` and `{m}` are numbers that are not the answer, and `{o}` is another
thing to count. Templates marked `#` make sense for numbers alone.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

# The lenient reading was written with the first 46 of these at hand. The next 53 and 50 were
# written afterwards without a look at what it makes of them: at the first try it found 95.0 % and
# 85.0 % of the right ones and accepted 1.9 % and 6.4 % of the spoiled ones. Then it was mended.
TUNED: tuple[str, ...] = (
    "The answer is {i}.",
    "**Answer:** {i}",
    "Answer: {i}",
    "The final answer is {i}.",
    "Therefore, the final answer is: {i}",
    "Therefore, the answer is:\n\n{d}",
    "The answer is\n{d}",
    "### Final Answer\n\n{i}",
    "**Final Answer**\n{d}",
    "Final answer:\n{d}\nI hope this helps!",
    "So the value is {i}.",
    "Thus, we have found that it equals {i}.",
    "Hence, the result is {i}.",
    "Therefore, the expression is equal to {i}.",
    "Hence we get\n{d}",
    "Putting this together gives\n\n{d}",
    "{d}",
    "Simplifying,\n{d}",
    "So the solution is {i}, which is what we wanted.",
    "Therefore, the required value is {i} when $k = {n}$.",
    "The result is the same as {n} less. We work it out again.\n\nTherefore, the value is {i}.",
    "One may think that the answer is {n}. That leaves out a case.\n\nSo it is {i}.",
    "The answer is easy to find. Thus it must be {i}.",
    "We want the answer to the question with $n = {n}$. This gives {i}.",
    "# Therefore, Maria has {i} {o} left after {n} days.",
    "# So, she eats {i} {o} in {n} days.",
    "# Thus, Tom needs {i} {o} for his {n} friends.",
    "# In total, they sold {i} {o} over {n} weeks.",
    "# Therefore, there are {i} {o} in the box.",
    "# So he will need {i} more {o}.",
    "# It takes {i} {o} to fill {n} of them.",
    "# Therefore, {i} {o} are left.",
    "# So the total number of {o} is {i}.",
    "# The {n} children have {i} {o} in all.",
    "# Therefore, each of the {n} friends gets {i} {o}.",
    "# In {n} years she will have {i} {o}.",
    "# Hence, Jason earns {i} {o} per week, since he works {n} hours.",
    "# The total is {n} {o} before the sale.\n\nThus {i} {o} remain at the end.",
    "# $$\n\\text{Total} = {n} + {m} = {a}\n$$",
    "# \\[ {n} \\times {m} - {n} = {a} \\]\n\nSo Maria has {i} {o}.",
    "# {n} + {m} = {a}",
    "# So {n} + {m} = {a} {o} are needed.",
    "# **Total: {i} {o}**",
    "# She therefore has $x = {a}$ {o}.",
    "# 1. There are {n} boxes.\n2. Each box holds {m} {o}.\n3. So there are {i} {o}.",
    "# The answer is {i} {o}. Check: {n} + {m} is right.",
    "Consequently, the desired quantity equals {i}.",
    "We conclude that the answer must be {i}.",
    "Thus the correct answer is {i}!",
    "And so our final result is {i}",
    "The simplified form of the expression is:\n\n{d}",
    "So, the final answer to the problem is:\n{d}",
    "Therefore:\n{d}",
    "This simplifies to {i}.",
    "Solving the equation yields {i}.",
    "Adding everything up, we obtain\n\n{d}\n\nas required.",
    "## Answer\n{i}",
    "**Solution:** {i}",
    "Result: {i}",
    "Ans: {i}",
    "The answer: {i}",
    "Our answer is {i}, and not {n}.",
    "Wait, {n} is wrong. Let me redo it.\n\nThe correct value is {i}.",
    "At first the answer is {n}, but that ignores one condition. With it, the answer is {i}.",
    "The answer is not {n}. Rather, we get {i}.",
    "If $t = {n}$, then the left side becomes {i}.",
    "Substituting $a = {n}$ and $b = {m}$ gives {i}.",
    "Since $k = {n}$, the required quantity is {i}.",
    "Thus, when $n = {n}$, we have {i} as the answer.",
    "Evaluating at ${n}$, we find that the value is {i}.",
    "From the above, it is clear that {i} is the answer.",
    "{i} is the final answer.",
    "The required answer is therefore {i}. \u2713",
    "- The first number is {n}.\n- The second number is {m}.\n\nSo the result is {i}.",
    "Answer:\n\n{d}\n\nExplanation: this uses {n} and {m}.",
    "In conclusion, the problem has the answer {i}.",
    "# Therefore, it will take Sam {i} {o} to paint {n} rooms.",
    "# So they have to sell {i} {o} to make up for the {n} that were lost.",
    "# Alice bought {i} {o} with {n} coupons.",
    "# The farmer ends up with {i} {o} after selling {n} of them.",
    "# Therefore, Peter's age is {i}.",
    "# Ben is {i} years old, while his brother is {n}.",
    "# The cost of {n} {o} is {i}.",
    "# Altogether, the {n} boys and {m} girls collected {i} {o}.",
    "# So after {n} hours, there will be {i} {o} remaining.",
    "# Lily can make {i} {o} out of {n} sheets.",
    "# That means each person must contribute {i} {o}.",
    "# Therefore, he has read {i} {o} by the end of day {n}.",
    "# The shop therefore made a profit of {i} {o}.",
    "# Subtracting: {n} - {m} = {a}. So {i} {o} remain.",
    "# She has {n} + {m} - {m} = {a} {o} now.",
    "# Total {o} = {n} + {m} = {a}",
    "# $$ {n} \\cdot {m} = {a} \\text{ {o}} $$",
    "# The number of {o} (including the {n} old ones) is {i}.",
    "# Tom had {n} {o} and lost {m}, so he now has {i} {o}.",
    "# There were {n} {o} at first. Now there are {i} {o}.",
    "# The answer is that {i} {o} are needed for {n} guests.",
    "# Step {m}: divide by {n}.\n\nThe quotient is {i}.",
    "# Mia saves {i} {o} each month for {n} months.",
    "As a result, the quantity we are after is {i}.",
    "It turns out to be {i}.",
    "After simplification, this leaves us with {i}.",
    "Combining both parts:\n{d}",
    "Our final value comes out as {i}.",
    "Because of this the only possibility is {i}.",
    "And that gives us the answer, {i}.",
    "Hence {i}.",
    "$\\therefore$ the answer is {i}",
    "=> {i}",
    "**The answer is {i}.** This can also be seen from ${n} + {m}$.",
    "<b>Answer</b>: {i}",
    "Final Result:\n\n{d}\n",
    "The problem asks for the value, and that is {i}.",
    "What remains is {i}. (Here we used that {n} is less than {m}.)",
    "Thus, using step {n}, one sees that the quantity is {i}.",
    "We need to be careful: {n} is not allowed. So only {i} is possible.",
    "First try: {n}. Second try: {m}. Neither works.\n\nThe correct choice is {i}.",
    "Let's verify: {n} fits. {m} fits as well.\n\nTherefore the answer is {i}.",
    "Therefore, we can write the answer as {i}.",
    "The answer is the same for ${n}$ and ${m}$.\n\nIn both cases it is {i}.",
    "The expression evaluates to {i}, not to {n}.",
    "Here is the answer:\n\n> {i}",
    "My answer is: {i}. It does not depend on {n}.",
    "Answer = {i}",
    "The answer would be {n} if there were no limit. As there is one, the answer is {i}.",
    "# Therefore, Emma had {i} {o} before she gave away {n}.",
    "# So the baker sold a total of {i} {o} on the {n} days.",
    "# Each of the {n} workers therefore gets {i} {o}.",
    "# Hence the tank holds {i} {o} when it is {n} percent full.",
    "# Kim walked {i} {o} more than Lee, who walked {n}.",
    "# Thus, the {n} teams will play {i} games altogether.",
    "# It would cost {i} {o} to send {n} letters.",
    "# We get {i} {o}, since each of the {n} bags has {m}.",
    "# If she works {n} hours, she makes {i} {o}.",
    "# So out of {n} people, {i} like {o}.",
    "# The difference is {n} - {m} = {a}.",
    "# {o}: {n}, others: {m}, total: {i}",
    "# Now we divide: {n} / {m} = {a}\n\nEach person gets {i} {o}.",
    "# $x = {n}$, $y = {m}$, therefore $x + y = {a}$.",
    "# Adding ${n}$ and ${m}$ results in ${a}$.",
    "# Consequently, Noah must buy {i} packs of {n} {o}.",
    "# The trip took {i} hours at a speed of {n} {o} per hour.",
    "# So the perimeter of the figure with {n} sides is {i} cm.",
    "# Thus after {n} years, the price of the {o} rises to {i}.",
    "# That leaves {i} {o} for the other {n} children.",
    "# Max ate {n} of them on Monday and {m} on Tuesday, which leaves {i} {o}.",
    "# Tim's share is therefore {i} {o} (one of {n} equal parts).",
    "# The number of {o} needed = {n} x {m} = {a}.",
    "# So there are {i} {o} in {n} rows of {m}.",
)


# Written after that, in the same way: 96.3 % and 2.0 % at the first try, and then mended, too.
LATER: tuple[str, ...] = (
    "To summarize, the value we were looking for is {i}.",
    "This leads to the final answer {i}.",
    "The final answer, then, is {i}.",
    "So our answer becomes\n\n{d}",
    "Finally, we arrive at {i}.",
    "We can now state the result:\n{d}",
    "Thus the answer to the original question is\n\n{d}\n",
    "Therefore, the correct option is {i}.",
    "Using the formula with $r = {n}$, the result comes to {i}.",
    "Setting $x = {n}$ we see that it must be {i}.",
    "Since ${n} < {m}$, we must have {i}.",
    "Therefore the minimum value, attained at $x = {n}$, is {i}.",
    "The required value equals {i} (for $n = {n}$).",
    "Hence, for $n = {n}$, the value is {i}.",
    "In summary: {i}.",
    "**Conclusion:** The value is {i}.",
    "Conclusion: we get {i}",
    "The solution is:\n\n{d}\n\nThis completes the solution.",
    "The correct answer is: {i}. Explanation: we used {n} and {m}.",
    "Answer\n\n{i}",
    "My first guess was {n}. After checking, the answer is {i}.",
    "I first got {n}, but I made a mistake.\n\nThe right value is {i}.",
    "The answer cannot be {n}. Therefore it is {i}.",
    "Note that {n} is too small and {m} is too large.\n\nHence {i} is what we want.",
    "Let us call this quantity $q$. Then\n{d}",
    "We obtain $$ {a} $$",
    "So $f({n}) = {a}$.",
    "This is equivalent to {i}, so we are done.",
    "By the above, the answer is simply {i}.",
    "The desired result is thus given by {i}.",
    "# So, Sarah will have {i} {o} remaining after giving {n} away.",
    "# Therefore, the class collected {i} {o} over the course of {n} days.",
    "# So each person will pay {i} {o}.",
    "# Thus, Mark needs to buy {i} more {o} to reach his goal of {n}.",
    "# Anna has {i} {o} while Bob has {n}.",
    "# Therefore, in {n} hours, the machine produces {i} {o}.",
    "# So it would take {n} workers {i} hours to finish.",
    "# The bakery uses {i} {o} per day and is open {n} days a week.",
    "# Thus, the cost for {n} tickets is {i} {o}.",
    "# This means that {i} {o} were sold on Tuesday.",
    "# Therefore, David drove a total distance of {i} miles in {n} hours.",
    "# Hence, there were {i} {o} to begin with.",
    "# He originally had {i} {o}.",
    "# Therefore, {i} of the {n} {o} are red.",
    "# John's total earnings for the {n} weeks are {i} dollars.",
    "# Total cost: {n} + {m} = {a} dollars",
    "# Total cost = ${a}$ dollars (for {n} people)",
    "# Remaining: {n} - {m} = **{a}**",
    "# Jane is {i} years old.",
    "# So at the end of the week she had walked {i} miles.",
    "# That's {n} + {m} = {a} {o} altogether.",
    "# So Rita is left with {i} {o}.",
    "# The teacher should order {i} {o} for the {n} students in her class.",
    "# We multiply {n} by {m} to get {i}.",
    "# The average is ({n} + {m}) / 2 = {a}.",
)

# Written last, and not one of them was looked at to mend the reading: at the first try, with 3,600
# completions each, 99.9 % of the right ones were found and none of the spoiled ones accepted.
UNSEEN: tuple[str, ...] = (
    "So our final value: {i}.",
    "The answer that satisfies all of this is {i}.",
    "We end with {i}.",
    "Since $k$ cannot be {n}, the value has to be {i}.",
    "The value in question is thus {i}, which completes the argument.",
    "Therefore, $$Q = {a}$$",
    "Finally:\n{d}",
    "This shows that the requested value is {i}.",
    "I am confident that the answer is {i}.",
    "Answer (after {n} steps): {i}",
    "All in all, it must be {i}.",
    "From here the result follows: {i}.",
    "Reading off, we find {i}.",
    "It follows at once that\n\n{d}\n\nand we are finished.",
    "Some get {n} here, but the right answer is {i}.",
    "Note: {n} would be wrong. The answer is {i}.",
    "**Final answer: {i}**",
    "Final answer -> {i}",
    "The correct value of the expression is therefore\n{d}",
    "Plugging in $n = {n}$ one obtains {i} as the final value.",
    "# So the store sold {i} {o} that week.",
    "# Therefore, {i} {o} will be enough for {n} guests.",
    "# Paul now owns {i} {o}.",
    "# After giving away {n}, Julia still has {i} {o}.",
    "# The total weight is {i} kg.",
    "# It will be {i} minutes before all {n} are done.",
    "# Hence she needs to save for {i} more weeks.",
    "# So every one of the {n} kids received {i} {o}.",
    "# Their combined age is {i}.",
    "# That is {n} + {m} = {a} in total.",
    "# The bus carries {i} people on its {n} trips.",
    "# So the {o} cost him {i} dollars altogether.",
    "# In the end, {i} {o} were not sold.",
    "# Thus the final price, after a discount of {n}%, is {i} dollars.",
    "# Dan ran {i} miles this week and {n} miles last week.",
    "# {i} {o} is what remains.",
)

_BODIES = (
    "We first look at what is given.",
    "Step 1: note that {n} is given.\nStep 2: from {n} and {m} we get what is needed.",
    "Let $x$ be the unknown. From $x + {n} = {m}$ we could go on.\n\nBut there is a shorter way.",
    "To solve this, we need to find the answer step by step. First we have {n}, then {m}.",
    "At first sight the answer might be {n}. But that is only a guess.",
    "Start with {n}.\n\n\\[ {n} + {m} \\]\n\nThis is what the problem asks about.",
    "Since there are {n} of one kind, we compare with {m} of the other kind.",
)
_REMARKS = ("", "", "", "", "\n\nI hope this helps!", "\n\nLet me know if you have questions.")
_THINGS = ("apples", "dollars", "carrots", "books", "students", "minutes", "cookies", "miles")


class Completion(NamedTuple):
    """One completion without a box, its reference, and whether it is to be accepted."""

    text: str
    reference: str
    right: bool
    template: str


def references(folder: Path) -> dict[str, list[str]]:
    """The reference answers of each problem set, once each."""

    def rows(name: str) -> list[dict[str, str]]:
        return [json.loads(line) for line in (folder / name).open(encoding="utf-8")]

    gsm8k = {row["answer"].rpartition("####")[2].strip() for row in rows("gsm8k/train.jsonl")}
    math = {row["answer"] for row in rows("math/train.jsonl") + rows("math/validation.jsonl")}
    svamp = {str(row["Answer"]).removesuffix(".0") for row in rows("svamp.jsonl")}
    amc = {str(row["answer"]).removesuffix(".0") for row in rows("amc23.jsonl")}
    return {
        "gsm8k": sorted(gsm8k),
        "math": sorted(math - {""}),
        "svamp": sorted(svamp),
        "amc": sorted(amc),
    }


_PLAIN = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_NUMBER = re.compile(r"-?(?:\d+|\d{1,3}(?:,\d{3})+)(?:\.\d+)?")


def _in_line(answer: str, rng: random.Random) -> str:
    styles = ["${}$", "\\({}\\)", "**${}$**", "$ {} $"]
    if _PLAIN.fullmatch(answer):
        styles += ["{}", "{}", "{}", "**{}**", "*{}*", "`{}`"]
    elif not re.search(r"\\(?:text|mbox|begin)|[,;]", answer):
        styles += ["{}"]
    return rng.choice(styles).replace("{}", answer)


def _displayed(answer: str, rng: random.Random) -> str:
    styles = ["\\[{}\\]", "\\[\n{}\n\\]", "$${}$$", "\\[ {}. \\]", "${}$"]
    if not re.search(r"[=<>,]|\\(?:le|ge|text|mbox|in|cup)", answer):
        styles += [
            "\\[ x = {} \\]",
            "$$\nx = {}\n$$",
            "\\begin{align*}\nx &= y + z \\\\\n&= {}\n\\end{align*}",
        ]
    return rng.choice(styles).replace("{}", answer)


def _filled(template: str, **slots: str) -> str:
    return re.sub(r"\{([nmaoidr])\}", lambda slot: slots[slot[1]], template)


def completions(
    folder: Path, templates: Sequence[str], count: int, seed: int, *, spoiled: bool
) -> list[Completion]:
    """As many completions, of all problem sets and templates in turn."""
    rng = random.Random(seed)
    pools = references(folder)
    numbers = [r for pool in pools.values() for r in pool if _NUMBER.fullmatch(r)]
    drawn = []
    while len(drawn) < count:
        template = templates[len(drawn) % len(templates)]
        pool = pools[rng.choice(["gsm8k", "math", "math", "math", "svamp", "amc"])]
        reference = rng.choice(numbers if template.startswith("#") else pool)
        answer = reference
        if spoiled:
            similar = numbers if _PLAIN.fullmatch(reference) else pools["math"]
            answer = rng.choice([other for other in rng.sample(similar, 2) if other != reference])
        distractors = [str(rng.randint(2, 99)) for _ in "nm"]
        body = rng.choice(_BODIES)
        if spoiled and _PLAIN.fullmatch(reference):
            distractors[rng.randrange(2)] = reference
        elif spoiled:
            body += " For now we note that {r} is one of the values."
        n, m = distractors
        text = _filled(
            f"{body}\n\n{template.removeprefix('# ')}",
            n=n,
            m=m,
            r=f"${reference}$",
            a=answer,
            o=rng.choice(_THINGS),
            i=_in_line(answer, rng),
            d=_displayed(answer, rng),
        )
        drawn.append(Completion(text + rng.choice(_REMARKS), reference, not spoiled, template))
    return drawn
