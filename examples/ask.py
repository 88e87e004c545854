"""Ask a trained model and keep the answers. `python ask.py outputs/demo "A question?"`."""

import sys

import grouper

with grouper.load_generator(sys.argv[1]) as generator:
    for question in sys.argv[2:]:
        solution = grouper.solve(question, generator)
        print(solution.response, "->", solution.answer)
        grouper.append_jsonl("answers.jsonl", solution)
