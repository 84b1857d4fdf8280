"""An executor of its own, in OpenRLHF's format: it asks twice, the second time with a context that it made anew."""

from copy import deepcopy
from typing import Any

from openrlhf.utils.agent import AgentExecutorBase
from openrlhf.utils.logging_utils import init_logger

logger = init_logger(__name__)


class AgentExecutor(AgentExecutorBase):
    async def execute(
        self, prompt: Any, label: Any, sampling_params: Any, max_length: int, hf_tokenizer: Any, llm_engine: Any
    ) -> dict[str, Any]:
        tokens = hf_tokenizer(prompt, add_special_tokens=False, return_tensors="pt")["input_ids"][0].tolist()
        ranges, log_probs = [], [0.0] * len(tokens)
        for turn in range(2):
            params = deepcopy(sampling_params)
            params.max_tokens = min(8, max_length - len(tokens))
            output = await llm_engine.generate(tokens, params)
            action = output.outputs[0].token_ids
            ranges.append((len(tokens), len(tokens) + len(action)))
            log_probs += [entry[token].logprob for token, entry in zip(action, output.outputs[0].logprobs, strict=True)]
            tokens = tokens + action
            if turn == 0:
                more = hf_tokenizer("\nAgain: ", add_special_tokens=False)["input_ids"]
                tokens, log_probs = tokens + more, log_probs + [0.0] * len(more)
        text = hf_tokenizer.decode(tokens[ranges[-1][0] :])
        return {
            "prompt": prompt,
            "label": label,
            "observation_tokens": tokens,
            "action_ranges": ranges,
            "rollout_log_probs": log_probs,
            "reward": len(text) / 100,
            "scores": float(str(label) in text),
            "extra_logs": {"letters": len(text)},
        }
