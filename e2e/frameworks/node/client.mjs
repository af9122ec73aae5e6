// Makes the calls that its argument orders, one after the other, with Vercel's
// AI SDK, and prints what came of each as one line of JSON.
import { createAzure } from "@ai-sdk/azure";
import { createOpenAI } from "@ai-sdk/openai";
import { APICallError, embed, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const order = JSON.parse(process.argv[2]);
const deployments = { apiVersion: order.api_version, useDeploymentBasedUrls: true };
const provider = (apiKey) => {
  if (order.client === "AI SDK") return createOpenAI({ apiKey, baseURL: order.url });
  const [path, options] = order.client === "AI SDK by deployment" ? ["/openai", deployments] : ["/openai/v1", {}];
  return createAzure({ apiKey, baseURL: order.url + path, ...options });
};
const ai = provider("client-key-of-alice");

const prompt = "What is the weather in Paris?";
const common = { prompt, maxRetries: 0 };
const tools = {
  weather: tool({
    description: "Tells the weather.",
    inputSchema: z.object({ city: z.string() }),
    execute: () => "sunny",
  }),
};
const agent = { ...common, tools, stopWhen: stepCountIs(5) };
const called = (steps) => steps.flatMap(({ toolCalls }) => toolCalls).map((c) => `${c.toolName} in ${c.input.city}: `).join("");

async function whole(model) {
  const { text, finishReason, usage } = await generateText({ ...common, model });
  return { text, finish: finishReason, tokens: usage.outputTokens };
}

async function streamed(model) {
  let error;
  const stream = streamText({ ...common, model, onError: (e) => ({ error } = e) });
  const got = { text: "", deltas: 0 };
  for await (const piece of stream.textStream) {
    got.text += piece;
    got.deltas++;
  }
  if (error) throw error;
  return { ...got, finish: await stream.finishReason, tokens: (await stream.usage).outputTokens };
}

async function streamedTools(model) {
  const stream = streamText({ ...agent, model });
  await stream.consumeStream();
  return { text: called(await stream.steps) + (await stream.text), finish: await stream.finishReason };
}

const calls = {
  chat: () => whole(ai.chat("gpt-4o")),
  "streamed chat": () => streamed(ai.chat("gpt-4o")),
  responses: () => whole(ai.responses("gpt-4o")),
  "streamed responses": () => streamed(ai.responses("gpt-4o")),

  async tools() {
    const { text, finishReason, steps } = await generateText({ ...agent, model: ai.chat("gpt-4o") });
    return { text: called(steps) + text, finish: finishReason };
  },
  "streamed tools": () => streamedTools(ai.chat("gpt-4o")),
  "streamed tools in responses": () => streamedTools(ai.responses("gpt-4o")),

  async embeddings() {
    const { embedding } = await embed({
      model: ai.embeddingModel("embedder"),
      value: prompt,
      maxRetries: 0,
      providerOptions: { openai: { dimensions: 64 } },
    });
    return { dimensions: embedding.length };
  },

  "other dialect": () => whole(ai.chat("elsewhere")),
  throttled: () => whole(ai.chat("busy")),
  "wrong key": () => whole(provider("another-key").chat("gpt-4o")),
};

const results = [];
for (const { name } of order.calls) {
  try {
    results.push(await calls[name]());
  } catch (err) {
    if (!APICallError.isInstance(err)) throw err;
    results.push({ error: { class: err.name, status: err.statusCode, message: err.message } });
  }
}
console.log(JSON.stringify(results));
