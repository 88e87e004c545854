"""Train with a reward of your own, this file's. `python own_reward.py demo name=brief`."""

import sys


def brevity(completion_ids, **_):
    """One where a completion has fewer than 30 tokens."""
    return [1.0 if len(ids) < 30 else 0.0 for ids in completion_ids]


if __name__ == "__main__":
    import grouper

    rewards = [{"name": "correctness"}, {"name": f"{__file__}:brevity", "weight": 0.1}]
    name, *overrides = sys.argv[1:] or ["demo", "name=brief"]
    run = grouper.load_recipe(name).override(*overrides, rewards=rewards)
    prepared = grouper.prepare(run)
    for measured in grouper.train(prepared).results:
        print(f"{measured.name}: {measured.accuracy:.1%}")
