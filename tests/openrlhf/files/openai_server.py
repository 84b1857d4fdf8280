"""An agent that talks to its own OpenAI server over `llm_engine`, in OpenRLHF's format: two turns of one session, whose
tokens are kept on the server's side and stitched to one sample.
"""

import socket
import threading
import time
from urllib.request import urlopen
from uuid import uuid4

import uvicorn
from fastapi import FastAPI, HTTPException, Request
from openai import AsyncOpenAI
from openrlhf.utils.agent import AgentExecutorBase
from vllm import SamplingParams


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class AgentExecutor(AgentExecutorBase):
    def serve(self, llm_engine, hf_tokenizer):
        self.sessions = {}
        self.model = getattr(hf_tokenizer, "name_or_path", "policy")
        app = FastAPI()

        @app.get("/health")
        async def health():
            return {"status": "healthy"}

        @app.get("/v1/models")
        async def models():
            return {"object": "list", "data": [{"id": self.model, "object": "model"}]}

        @app.post("/v1/chat/completions")
        async def completions(request: Request):
            body = await request.json()
            session = self.sessions.setdefault(body["session_id"], {"text": "", "tokens": [], "ranges": []})
            text = hf_tokenizer.apply_chat_template(body["messages"], tokenize=False, add_generation_prompt=True)
            if not text.startswith(session["text"]):
                raise HTTPException(400, f"{text!r} does not go on from {session['text']!r}")
            more = hf_tokenizer.encode(text[len(session["text"]) :], add_special_tokens=False)
            if more[:1] == session["tokens"][-1:]:
                more = more[1:]
            tokens = session["tokens"] + more
            room = self.max_length - len(tokens)
            if room <= 0:
                raise HTTPException(400, "the prompt is too long")
            params = SamplingParams(
                max_tokens=min(body["max_tokens"], room),
                temperature=body["temperature"],
                top_p=body["top_p"],
                logprobs=body["top_logprobs"] if body["logprobs"] else None,
            )
            output = (await llm_engine.generate(tokens, params)).outputs[0]
            sampled = list(output.token_ids)
            session["ranges"].append((len(tokens), len(tokens) + len(sampled)))
            session["tokens"], session["text"] = tokens + sampled, text + output.text
            session["finish"] = output.finish_reason
            content = [
                {"token": hf_tokenizer.decode([token]), "logprob": known[token].logprob, "top_logprobs": []}
                for token, known in zip(sampled, output.logprobs, strict=True)
            ]
            return {
                "id": f"chatcmpl-{uuid4().hex}",
                "object": "chat.completion",
                "created": int(time.time()),
                "model": self.model,
                "choices": [
                    {
                        "index": 0,
                        "message": {"role": "assistant", "content": output.text},
                        "finish_reason": output.finish_reason,
                        "logprobs": {"content": content},
                    }
                ],
            }

        port = free_port()
        config = uvicorn.Config(app, host="127.0.0.1", port=port, log_level="error", loop="asyncio")
        self.server = uvicorn.Server(config)
        threading.Thread(target=self.server.run, daemon=True).start()
        for _ in range(600):
            try:
                urlopen(f"http://127.0.0.1:{port}/health", timeout=2).close()
                break
            except OSError:
                time.sleep(0.05)
        else:
            raise RuntimeError("the server did not start")
        self.client = AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="EMPTY", max_retries=0)

    async def run_agent(self, prompt, session_id):
        messages = [{"role": "user", "content": prompt}]
        for turn in range(2):
            answer = await self.client.chat.completions.create(
                model=self.model,
                messages=messages,
                max_tokens=self.sampling_params.max_tokens,
                temperature=self.sampling_params.temperature,
                top_p=self.sampling_params.top_p,
                logprobs=self.sampling_params.logprobs is not None,
                top_logprobs=self.sampling_params.logprobs or 1,
                extra_body={"session_id": session_id},
            )
            said = answer.choices[0].message.content
            messages += [{"role": "assistant", "content": said}]
            if turn == 0:
                messages += [{"role": "user", "content": "Again."}]
        return said

    async def execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine):
        self.sampling_params, self.max_length = sampling_params, max_length
        if not hasattr(self, "client"):
            self.serve(llm_engine, hf_tokenizer)
        session_id = uuid4().hex
        try:
            said = await self.run_agent(prompt, session_id)
            session = self.sessions[session_id]
        finally:
            self.sessions.pop(session_id, None)
        return {
            "prompt": prompt,
            "label": label,
            "observation_tokens": session["tokens"],
            "action_ranges": session["ranges"],
            "truncated": session["finish"] == "length",
            "reward": len(said) / 100,
            "scores": float(said == str(label)),
            "extra_logs": {"letters": len(said)},
        }
