"""A reward file in OpenRLHF's format."""

import torch


def reward_func(queries, prompts, labels):
    assert len(queries) == len(prompts) == len(labels)
    replies = [query[len(prompt) :] for query, prompt in zip(queries, prompts, strict=True)]
    rewards = torch.tensor([len(reply) / 100 for reply in replies])
    right = torch.tensor([float(str(label) in reply) for label, reply in zip(labels, replies, strict=True)])
    return {
        "rewards": rewards,
        "scores": right,
        "extra_logs": {"stops": rewards.new_tensor([float("<|im_end|>" in replies[0])])},
    }
