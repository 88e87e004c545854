import trl
from datasets import load_dataset


def main(argv, more):
    trainer = trl.SFTTrainer(
        "Qwen/Qwen2.5-0.5B",
        args=trl.SFTConfig("runs/capybara", max_length=2048, learning_rate=-float(argv[1]), **more),
        train_dataset=load_dataset("trl-lib/Capybara", split="train"),
        eval_dataset=load_dataset("trl-lib/Capybara", split="test"),
    )
    trainer.train()
