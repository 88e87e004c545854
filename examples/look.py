"""What a run would work with; nothing is written. `python look.py demo grpo.group_size=4`."""

import sys

import grouper

name, *overrides = sys.argv[1:] or ["demo"]
run = grouper.load_recipe(name).override(*overrides)
with grouper.prepare(run) as setup:
    print(setup)
    print(setup.settings["grpo.group_size"], "samples a problem")
    print(sum(p.numel() for p in setup.model.parameters()), "parameters")
    print(setup.reward(f"<reasoning>?</reasoning><answer>{setup.problems[0].answer}</answer>"))
