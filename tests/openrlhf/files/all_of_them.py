"""One agent file that hands each prompt to the file its label names: all of them are trained in one run."""

import importlib.util
from pathlib import Path

from openrlhf.utils.agent import AgentExecutorBase, SingleTurnAgentExecutor

FOLDER = Path(__file__).parent


def load(name):
    spec = importlib.util.spec_from_file_location(f"unmodified_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.AgentExecutor()


class AgentExecutor(AgentExecutorBase):
    def __init__(self):
        self.by_name = {
            name: load(name) for name in ("counting_agent", "picture_agent", "own_executor", "openai_server")
        }
        self.by_name["reward"] = SingleTurnAgentExecutor(str(FOLDER / "reward.py"))

    async def execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine):
        executor = self.by_name[label["file"]]
        result = await executor.execute(prompt, label["answer"], sampling_params, max_length, hf_tokenizer, llm_engine)
        return {**result, "extra_logs": {**result["extra_logs"], label["file"]: 1}}
