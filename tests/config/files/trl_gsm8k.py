import re

import torch
from datasets import load_dataset
from my_rewards import brevity
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import accuracy_reward

raise SystemExit("this file is read, and never run")


def xmlcount_reward_func(completions, **kwargs) -> list[float]:
    return [float(bool(re.search("<answer>", c[0]["content"]))) for c in completions]


def get_gsm8k_questions(split="train"):
    return load_dataset("openai/gsm8k", "main")[split]


dataset = get_gsm8k_questions()
model_name = "Qwen/Qwen2.5-1.5B-Instruct"

if "Llama" in model_name:
    output_dir = "outputs/Llama-1B-GRPO"
    print("gated on the Hub")
else:
    output_dir = "outputs/Qwen-1.5B-GRPO"

training_args = GRPOConfig(
    output_dir=output_dir,
    run_name="Qwen-1.5B-GRPO-gsm8k",
    learning_rate=5e-6,
    adam_beta1=0.9,
    adam_beta2=0.99,
    weight_decay=0.1,
    warmup_ratio=0.1,
    lr_scheduler_type="cosine",
    logging_steps=1,
    bf16=True,
    per_device_train_batch_size=16,
    gradient_accumulation_steps=4,
    num_generations=16,
    max_prompt_length=256,
    max_completion_length=786,
    num_train_epochs=1,
    save_steps=100,
    max_grad_norm=0.1,
    report_to="wandb",
    log_on_each_node=False,
)
peft_config = LoraConfig(
    r=16,
    lora_alpha=64,
    target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj", "gate_proj"],
    task_type="CAUSAL_LM",
    lora_dropout=0.05,
)
model = AutoModelForCausalLM.from_pretrained(
    model_name, torch_dtype=torch.bfloat16, attn_implementation="flash_attention_2", device_map=None
).to("cuda")
tokenizer = AutoTokenizer.from_pretrained(model_name)
trainer = GRPOTrainer(
    model=model,
    processing_class=tokenizer,
    reward_funcs=[xmlcount_reward_func, brevity, accuracy_reward],
    args=training_args,
    train_dataset=dataset,
)
trainer.train()
