"""The tables of the pages are what the result files say, and what they say is shown."""

from __future__ import annotations

from typing import Any

from benchmarks.tools import tables


def test_the_pages_say_what_the_files_say() -> None:
    for path in tables.PAGES:
        page = path.read_text(encoding="utf-8")
        assert tables.render(page, tables.read()) == page, "run `python -m benchmarks.tools.tables`"


def test_the_pages_have_every_table_once() -> None:
    pages = "".join(path.read_text(encoding="utf-8") for path in tables.PAGES)
    assert [match[1] for match in tables.MARKED.findall(pages)] == list(tables.TABLES)


SOME_SHAPE = {
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
MACHINE = {
    "cpu": "A processor",
    "threads": 2,
    "torch": "9.9",
    "transformers": "8.8",
    "commit": "0123456789abcdef with changes",
}


def step_case(trl: list[float], grouper: list[float]) -> dict[str, Any]:
    return {
        "completion_tokens": 16384,
        "seconds": {"trl": trl, "grouper": grouper},
        "trl_generate_seconds": [1.5, 2.5],
        "grouper_split": [{"sample": 0.5, "update": 0.25}, {"sample": 0.7, "update": 0.35}],
        "ratio": 2.5,
        "gradient_norm_on_the_same_rollouts": {"trl": 2.0, "grouper": 2.002},
        "machine": {**MACHINE, "trl": "1.16.0"},
    }


def records() -> dict[str, Any]:
    def tried(**changes: Any) -> dict[str, Any]:
        settings = {"micro_batch": 16, "checkpointing": False, "cache": None, **changes}
        return {"settings": settings, "median": 3.0 - len(changes)}

    sampled = {
        "tokens": 500,
        "seconds": {
            "grouper": [1.0, 2.0, 1.5],
            "generate": [3.0],
            "generate, static cache": [4.0],
            "vllm": [0.5],
        },
        "ratio": 2.0,
        "ratio_to_vllm": 0.33,
        "logprob_gap": {"grouper": {"mean": 1e-7, "max": 2e-6}},
    }
    part = {"seconds": 4.0, "kinds": {"products": 3.0, "between": 1.0}, "products_tflops": 0.5}
    parts = {"sample": 0.5, "update": 0.9, "step": 0.7}
    return {
        "cpu_step": {
            "25M bf16": step_case([5.0, 4.0], [2.0, 1.0]),
            "SmolLM2": {
                **step_case([60.0, 60.0], [20.0, 20.0]),
                "pretrained": True,
                "dtype": "float32",
                "peak_bytes": {"trl": 3 << 30, "grouper": 3 << 29},
            },
        },
        "cpu_step_tries": {
            "0.5M": {
                "trl": [tried(), tried(checkpointing=True)],
                "grouper": [{"settings": {"budget": 4096, "threads": 1}, "median": 0.4}],
                "prompts": 8,
                "machine": MACHINE,
            }
        },
        "cpu_sampler": {
            "machine": MACHINE,
            "bfloat16": {"fixed": sampled},
            "float32": {"ragged": {**sampled, "ratio_to_vllm": None}},
        },
        "lora_sampling": {
            "machine": MACHINE,
            "cases": {
                "25M bf16": {
                    "seconds": {"trained": [5.0, 6.0, 7.0], "copy": [2.0], "merged": [1.6]},
                    "ratio": 3.0,
                    "price": 1.25,
                    "logprob_gap": {
                        "trained": {"mean": 1e-3},
                        "copy": {"mean": 1e-3},
                        "merged": {"mean": 2e-3},
                    },
                }
            },
        },
        "lora_rounding": {
            "machine": MACHINE,
            "steps": {
                "0": {"sampler_gap": 0.04},
                "5": {
                    "exact_change": 0.015,
                    "beside": {"gap": 0.0},
                    "nearest": {"exact_share": 0.09, "exact_gap": 0.014, "weight_share": 0.02},
                    "random": {"exact_share": 1.04, "exact_gap": 0.002},
                    "sampler_gap": 0.038,
                },
            },
        },
        "cost_table": {
            "machine": MACHINE,
            "rows": [
                {
                    "model": "0.5B",
                    "kind": "LoRA",
                    "gib": 12.34,
                    "cards": {
                        "24": {"card": "A", "hours": 1.26},
                        "40": {"card": "B", "hours": None},
                    },
                }
            ],
        },
        "families": {
            "machine": MACHINE,
            "models": {
                "Some 1B": {
                    "shape": SOME_SHAPE,
                    "refused": None,
                    "same_greedy": True,
                    "logprob_gap": 2.5e-6,
                    "finite_gradients": False,
                },
                "Other 2B": {"shape": SOME_SHAPE, "refused": "It has sinks."},
            },
        },
        "cpu_sft": {
            "25M bf16": {
                "tokens": 16384,
                "seconds": {"trl": [6.0, 4.0], "grouper": [2.0, 3.0]},
                "ratio": 2.0,
                "peak_bytes": {"trl": 3 << 30, "grouper": 3 << 29},
                "machine": MACHINE,
            }
        },
        "kernel_parts": {
            "0.5M": {
                "prompts": 16,
                "seconds": {"all on": [0.2, 0.4], "drawing": [0.5, 0.5]},
                "off_over_on": {"all on": 1.0, "drawing": 1.25},
                "machine": MACHINE,
            }
        },
        "gpu": {
            "sections": {
                "step": {
                    "marks": [{"what": "a", "value": 2.5, "wanted": "3", "passed": False}],
                    "not_measured": ["TRL itself"],
                    "problem": "Traceback\nRuntimeError: no",
                    "machine": {**MACHINE, "device": "A card"},
                }
            }
        },
        "time_to_accuracy": {
            "machine": MACHINE,
            "start": {"accuracy": 0.4, "low": 0.35, "high": 0.45},
            "runs": {
                "0": {
                    "grouper": [
                        {"step": 4, "seconds": 50.0, "accuracy": 0.5, "low": 0.45, "high": 0.55}
                    ],
                    "trl": [
                        {"step": 4, "seconds": 200.0, "accuracy": 0.5, "low": 0.45, "high": 0.55}
                    ],
                }
            },
            "summary": {"accuracy": 0.5, "ratios": {"0": 4.0}, "ratio": 4.0},
        },
        "resampling": {"50% flat": {"rounds": {"seconds": 4.1, "tokens": 54397}}},
        "teacher": {
            "machine": MACHINE,
            "seconds": {"none": [2.0, 2.0], "sampled": [3.0, 3.0]},
            "ratio": {"none": 1.0, "sampled": 1.5},
        },
        "cpu_profile": {"0.5M": {"machine": MACHINE, "sample": part, "update": part}},
        "scaling": {
            "machine": MACHINE,
            "base": {
                "prompts": 8,
                "prompt_tokens": 64,
                "group": 4,
                "new_tokens": 32,
                "vocabulary": 2048,
                "dtype": "float32",
                "shape": {"num_hidden_layers": 4, "hidden_size": 256},
            },
            "factors": {
                "layers": {
                    "sizes": [2, 4],
                    "seconds": {"sample": [1.0, 2.0], "update": [1.0, 2.0], "step": [2.0, 4.0]},
                    "exponent": parts,
                    "exponent_of_the_arithmetic": {**parts, "step": 1.0},
                }
            },
        },
    }


SHOWN = {
    "real-steps": "| SmolLM2, float32 | 16,384 | 60.00 (60.00-60.00) | 2.00 "
    "| 20.00 (20.00-20.00) | 0.60 | 0.30 | **2.50** | 3.0 | 1.5 |",
    "step": "| 25M bf16 | 16,384 | 4.50 (4.00-5.00) | 2.00 | 1.50 (1.00-2.00) | 0.60 | 0.30 "
    "| **2.50** | 2 (3) |",
    "gradients": "| 25M bf16 | 2 | 2.002 | 1.0e-03 |",
    "time-to-accuracy": "| 0 | 4 | 50 | 50.0 [45.0, 55.0] | 200 | 50.0 [45.0, 55.0] |",
    "teacher": "| sampled | 3.00 (3.00-3.00) | 1.50 |",
    "tries": "| micro_batch 16, checkpointing on, cache dynamic | **2.00** |",
    "sft": "| 25M bf16 | 16,384 | 5.00 (4.00-6.00) | 2.50 (2.00-3.00) | **2.00** | 1.3 "
    "| 3.00 | 1.50 |",
    "gpu": "| step | a | 2.5 | 3 | **no** |",
    "resampling": "| 50% flat | rounds | 4.10 | 54,397 |",
    "parts": "| drawing off | 1.25 |",
    "sampler": "| bfloat16, fixed | 500 | 1.50 (1.00-2.00) | 3.00 (3.00-3.00) "
    "| 4.00 (4.00-4.00) | **2.00** | 3 | 0.50 (0.50-0.50) | 0.33 |",
    "logprobs": "| float32, ragged | grouper | 1.0e-07 | 2.0e-06 |",
    "lora-rounding": "| 5 | 0.015 | 0.000 | 9%, 0.014 | 104%, 0.002 | 2% | 0.038 |",
    "lora": (
        "| 25M bf16 | 6.00 (5.00-7.00) | 2.00 (2.00-2.00) | 1.60 (1.60-1.60) | **3.00** | 1.25 | "
        "1.0e-03 | 1.0e-03 | 2.0e-03 |"
    ),
    "families": "| Some 1B | 1,024 | 16 (8) | 128 | yes | yes | 2.5e-06 | **no** |",
    "profiles": "| 0.5M, sampling | 75 % | 25 % | 0.50 |",
    "cost": "| 0.5B | LoRA | 12 | 1.3 h | - |",
    "scaling": "| layers | 2, 4 | 2.00, 4.00 | 0.50 (0.50) | 0.90 (0.90) | 0.70 (1.00) |",
}


def test_a_measurement_becomes_a_row() -> None:
    assert SHOWN.keys() == tables.TABLES.keys()
    for name, row in SHOWN.items():
        page = f"before\n<!-- table: {name} -->\nold\n<!-- end -->\nafter"
        made = tables.render(page, records())
        assert row in made.split("\n"), made
        assert "old" not in made
        assert made.startswith("before\n")
        assert made.endswith("\nafter")
        assert tables.render(made, records()) == made
    made = tables.render("<!-- table: step -->\n<!-- end -->", records())
    assert "torch 9.9, transformers 8.8, trl 1.16.0; commit 0123456789 with changes." in made


def test_tries_have_their_threads_in_each_row_and_nowhere_else() -> None:
    made = tables.render("<!-- table: tries -->\n<!-- end -->", records())
    assert "threads 1" in made
    assert "thread(s)" not in made


def test_a_refused_model_has_its_sentence() -> None:
    made = tables.render("<!-- table: families -->\n<!-- end -->", records())
    assert "| Other 2B | 1,024 | 16 (8) | 128 | no: It has sinks. |  |  |  |" in made.split("\n")


def test_what_was_not_measured_says_so() -> None:
    made = tables.render("<!-- table: step -->\n<!-- end -->", {})
    assert made == "<!-- table: step -->\n\nNot measured here.\n\n<!-- end -->"
