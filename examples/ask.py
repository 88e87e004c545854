"""Ask a trained model and keep the answers. `python ask.py outputs/demo "A question?"`."""

import sys

import grouper

path, *questions = sys.argv[1:] or ["outputs/demo", "What is 3 + 4?"]
with grouper.load_generator(path) as generator:
    for question in questions:
        solution = grouper.solve(question, generator)
        print(solution.response, "->", solution.answer)
        grouper.append_jsonl("answers.jsonl", solution)
