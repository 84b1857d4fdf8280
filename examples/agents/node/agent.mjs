// An agent in another language: the npm package `openai` behind the agent protocol. Nothing in `run` knows of training.
//
//   npm install && PORT=9000 node agent.mjs
//   agentrl train --agent http://127.0.0.1:9000 --env calculator_math

import { createServer } from "node:http";
import OpenAI from "openai";

const parameters = { type: "object", properties: { expression: { type: "string" } }, required: ["expression"] };
const tools = [{ type: "function", function: { name: "calculator", description: "Evaluate arithmetic.", parameters } }];

/** Reward 1 for the right number at the end of the last answer; every reply is streamed. */
async function run(task, client) {
  const messages = [{ role: "user", content: task.prompt }];
  for (let turn = 0; turn < 4; turn++) {
    const stream = client.chat.completions.stream({ model: "policy", messages, tools });
    const { message } = (await stream.finalChatCompletion()).choices[0];
    messages.push(message);
    if (!message.tool_calls?.length) {
      const numbers = (message.content ?? "").match(/-?\d+/g) ?? [];
      return { reward: Number(Number(numbers.at(-1)) === task.label) };
    }
    for (const call of message.tool_calls) {
      messages.push({ role: "tool", tool_call_id: call.id, content: calculate(call.function.arguments) });
    }
  }
  return { reward: 0 };
}

/** The value of `a*b`, `a+b` or `a-b`, or what is wrong with the call. */
function calculate(text) {
  try {
    const [, a, sign, b] = JSON.parse(text).expression.match(/^\s*(-?\d+)\s*([-+*])\s*(-?\d+)\s*$/);
    return String({ "*": a * b, "+": Number(a) + Number(b), "-": a - b }[sign]);
  } catch {
    return "error: give {\"expression\": \"17*23\"}";
  }
}

// The agent protocol: an order is answered at once with 202, and its end is asked for with a long poll.
const episodes = new Map();
const KEPT_MS = 600_000;

function begin(order) {
  const known = episodes.get(order.episode_id);
  if (known?.order.idempotency_key === order.idempotency_key) return known;
  if (known && order.attempt <= known.order.attempt) return null;
  const client = new OpenAI({ baseURL: order.policy.base_url, apiKey: order.policy.api_key });
  const episode = { order, reply: null };
  episode.ended = run(order.task, client).then(
    (outcome) => (episode.reply = [200, { ...outcome, attempt: order.attempt }]),
    (error) => (episode.reply = [500, failure("AgentError", String(error))]),
  );
  episode.ended.then(() => setTimeout(forget, KEPT_MS, episode).unref());
  episodes.set(order.episode_id, episode);
  return episode;
}

function forget(episode) {
  if (episodes.get(episode.order.episode_id) === episode) episodes.delete(episode.order.episode_id);
}

const failure = (kind, message) => ({ error: { class: kind, message, retryable: false } });

async function answer(method, path, query, body) {
  const id = path.split("/")[3];
  if (method === "POST" && path === "/v1/episodes") {
    return begin(JSON.parse(body)) ? [202, {}] : [409, failure("OtherAttempt", "a later attempt is known")];
  }
  const episode = episodes.get(id);
  if (!episode) return [404, failure("NotFound", "there is no such episode here")];
  if (query.has("attempt") && Number(query.get("attempt")) !== episode.order.attempt) {
    return [409, failure("OtherAttempt", "another attempt is the newest")];
  }
  if (method === "DELETE") return episodes.delete(id) && [200, {}];
  const patience = new Promise((over) => setTimeout(over, 1000 * Number(query.get("wait_s") ?? 0)).unref());
  await Promise.race([episode.ended, patience]);
  return episode.reply ?? [202, {}];
}

const server = createServer(async (request, response) => {
  const url = new URL(request.url, "http://localhost");
  let body = "";
  for await (const piece of request) body += piece;
  const [status, reply] = await answer(request.method, url.pathname, url.searchParams, body).catch((error) => [
    400, failure("BadRequest", String(error)),
  ]);
  response.writeHead(status, { "Content-Type": "application/json" }).end(JSON.stringify(reply));
});
server.listen(Number(process.env.PORT ?? 9000), "127.0.0.1", () => {
  console.log(`listening on http://127.0.0.1:${server.address().port}`);
});
