"""One GRPO update from its pieces: two answers to one question, the first one right."""

import torch

from grouper.algorithms import pieces

logits = torch.zeros(2, 3, 5, requires_grad=True)  # [responses, tokens, vocabulary]
tokens, mask = torch.tensor([[1, 2, 0], [3, 4, 4]]), torch.tensor([[1, 1, 0], [1, 1, 1]])
log_probs = logits.log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
advantages, rewards, said = pieces.group_normalized_rewards(
    lambda response, truth: {"reward": float(response == truth)}, ["4", "5"], ["4", "4"], 2
)
loss, metrics = pieces.grpo_microbatch_step(
    log_probs,
    mask,
    accumulation_steps=1,
    loss_type="grpo_clip",
    advantages=advantages[:, None],
    old_log_probs=log_probs.detach(),
)
raised = (logits.grad.gather(-1, tokens[..., None])[..., 0] < 0).tolist()
print(rewards.tolist(), [round(a, 3) for a in advantages.tolist()], raised)
