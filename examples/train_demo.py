"""The demonstration from Python. Settings can be given: `python train_demo.py grpo.steps=20`."""

import sys

from grouper import Run, load_recipe, train

with Run(load_recipe("demo", sys.argv[1:]), resume=True) as run:
    result = train(run)
for measured in result.results:
    print(f"{measured.name}: {measured.accuracy:.1%} of {len(measured.items)} problems")
