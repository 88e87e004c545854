"""What a run would work with; nothing is written. `python look.py demo grpo.group_size=4`."""

import sys

import grouper

name, *overrides = sys.argv[1:] or ["demo"]
run = grouper.load_recipe(name).override(*overrides)
with grouper.prepare(run) as prepared:
    print(prepared)
    print(prepared.settings["grpo.group_size"], "samples per problem")
    print(sum(p.numel() for p in prepared.model.parameters()), "parameters")
    print(
        prepared.reward(f"<reasoning>?</reasoning><answer>{prepared.problems[0].answer}</answer>")
    )
