from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

SFTTrainer(model="Qwen/Qwen3-0.6B-Base", args=SFTConfig(output_dir="runs/sft", max_length=512))
GRPOTrainer(
    model="runs/sft",
    reward_funcs="reasoning_accuracy_reward",
    args=GRPOConfig(output_dir="runs/grpo", num_generations=4, max_steps=60, save_steps=20),
)
