// Makes the calls that its argument orders, one after the other, and prints
// what came of each as one line of JSON.
import { APIError, AzureOpenAI, OpenAI, toFile } from "openai";

const order = JSON.parse(process.argv[2]);
const options = { apiKey: "client-key", timeout: 20_000 };
if (order.retries !== undefined) options.maxRetries = order.retries;
const client =
  order.client === "AzureOpenAI"
    ? new AzureOpenAI({ ...options, endpoint: order.url, apiVersion: order.api_version })
    : new OpenAI({ ...options, baseURL: order.url });

const messages = [{ role: "user", content: "Hello?" }];
const input = "Hello?";

const calls = {
  async chat(model) {
    const { data, response } = await client.chat.completions.create({ model, messages }).withResponse();
    const [choice] = data.choices;
    return {
      backend: response.headers.get("x-simulator"),
      text: choice.message.content,
      finish: choice.finish_reason,
      tokens: data.usage.completion_tokens,
    };
  },

  async "streamed chat"(model) {
    const { data, response } = await client.chat.completions
      .create({ model, messages, stream: true, stream_options: { include_usage: true } })
      .withResponse();
    const got = { backend: response.headers.get("x-simulator"), text: "", deltas: 0 };
    for await (const chunk of data) {
      got.tokens = chunk.usage?.completion_tokens ?? got.tokens;
      for (const { delta, finish_reason } of chunk.choices) {
        if (delta.content) {
          got.text += delta.content;
          got.deltas++;
        }
        got.finish = finish_reason ?? got.finish;
      }
    }
    return got;
  },

  async embeddings(model) {
    const { data, response } = await client.embeddings.create({ model, input }).withResponse();
    return { backend: response.headers.get("x-simulator"), dimensions: data.data[0].embedding.length };
  },

  async responses(model) {
    const { data, response } = await client.responses.create({ model, input }).withResponse();
    return {
      backend: response.headers.get("x-simulator"),
      text: data.output_text,
      finish: data.status,
      tokens: data.usage.output_tokens,
    };
  },

  async "streamed responses"(model) {
    const { data, response } = await client.responses.create({ model, input, stream: true }).withResponse();
    const got = { backend: response.headers.get("x-simulator"), text: "", deltas: 0 };
    for await (const event of data) {
      if (event.type === "response.output_text.delta") {
        got.text += event.delta;
        got.deltas++;
      } else if (event.type === "response.completed") {
        got.finish = event.response.status;
        got.tokens = event.response.usage.output_tokens;
      }
    }
    return got;
  },

  async transcription(model) {
    const file = await toFile(Buffer.from("RIFF\x04\0\0\0WAVE\r\n--\xff", "latin1"), "hello.wav", { type: "audio/wav" });
    const { data, response } = await client.audio.transcriptions.create({ model, file }).withResponse();
    return { backend: response.headers.get("x-simulator"), text: data.text };
  },

  async models() {
    const { data, response } = await client.models.list().withResponse();
    return { backend: response.headers.get("x-simulator"), models: data.data.map(({ id }) => id).join(", ") };
  },
};

const results = [];
for (const { name, model } of order.calls) {
  try {
    results.push(await calls[name](model));
  } catch (err) {
    if (!(err instanceof APIError)) throw err;
    results.push({
      error: {
        class: err.constructor.name,
        status: err.status,
        code: err.code,
        type: err.type,
        message: err.message,
        request_id: err.requestID,
        retry_after: err.headers?.get("retry-after"),
      },
    });
  }
}
console.log(JSON.stringify(results));
