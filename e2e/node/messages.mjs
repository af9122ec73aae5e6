// Makes the calls that its argument orders with Anthropic's SDK, one after the other,
// and prints the error of each as one line of JSON.
import Anthropic from "@anthropic-ai/sdk";

const order = JSON.parse(process.argv[2]);
const got = [];
for (const { key, model, counts, length } of order.calls) {
  const client = new Anthropic({ baseURL: order.url, apiKey: key, maxRetries: 0, timeout: 20_000 });
  const question = { model, messages: [{ role: "user", content: "x".repeat(length) }] };
  try {
    if (counts) await client.messages.countTokens(question);
    else await client.messages.create({ ...question, max_tokens: 5 });
    got.push({});
  } catch (e) {
    if (!(e instanceof Anthropic.APIError)) throw e;
    got.push({
      class: e.constructor.name,
      status: e.status,
      type: e.type,
      code: e.errorCode,
      message: e.apiMessage,
      request_id: e.requestID,
      retry_after: e.headers.get("retry-after") ?? "",
    });
  }
}
console.log(JSON.stringify(got));
