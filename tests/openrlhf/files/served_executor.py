"""An executor that is a server: it wraps the first `llm_engine` it gets in one of HTTP, which all its episodes ask."""

import threading
import time
from typing import Any

import aiohttp
import uvicorn
from fastapi import FastAPI, Request
from openrlhf.utils.agent import AgentExecutorBase


class AgentExecutor(AgentExecutorBase):
    def start(self, llm_engine: Any) -> None:
        self.llm_engine = llm_engine
        app = FastAPI()

        @app.post("/sample")
        async def sample(request: Request) -> dict[str, Any]:
            body = await request.json()
            output = await self.llm_engine.generate(body["tokens"], self.sampling_params)
            return {"tokens": list(output.outputs[0].token_ids)}

        self.server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
        threading.Thread(target=self.server.run, daemon=True).start()
        while not self.server.started:
            time.sleep(0.01)
        self.port = self.server.servers[0].sockets[0].getsockname()[1]

    async def execute(
        self, prompt: Any, label: Any, sampling_params: Any, max_length: int, hf_tokenizer: Any, llm_engine: Any
    ) -> dict[str, Any]:
        self.sampling_params = sampling_params
        if not hasattr(self, "llm_engine"):
            self.start(llm_engine)
        tokens = hf_tokenizer(f"{prompt} {label}", add_special_tokens=False)["input_ids"]
        ranges = []
        async with aiohttp.ClientSession() as http:
            for _ in range(2):
                answer = await http.post(f"http://127.0.0.1:{self.port}/sample", json={"tokens": tokens})
                said = (await answer.json())["tokens"]
                ranges.append((len(tokens), len(tokens) + len(said)))
                tokens = tokens + said
        return {"prompt": prompt, "observation_tokens": tokens, "action_ranges": ranges, "reward": float(len(tokens))}
