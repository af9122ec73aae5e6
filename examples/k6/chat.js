// Sends chats to a balancer at a rate that rises to the double of what you expect, then falls, with k6
// (https://grafana.com/docs/k6):
//
//	k6 run -e URL=https://llm.example.com/v1 -e KEY=... -e MODEL=gpt-5.5 -e RATE=20 examples/k6/chat.js
//
// It fails if a reply is cut, or is neither a 200 nor a 429. How many were refused (`throttled`), and which backend
// served, if the reply says so (X-Simulator), is in the summary.
import http from 'k6/http';
import { check } from 'k6';
import { Counter, Rate, Trend } from 'k6/metrics';

const url = (__ENV.URL || 'http://localhost:8080/v1') + '/chat/completions';
const rate = Number(__ENV.RATE || 20); // requests a second
const model = __ENV.MODEL || 'gpt-5.5';

const throttled = new Rate('throttled');
const retryAfter = new Trend('retry_after_seconds');
const servedBy = {};
for (const name of (__ENV.BACKENDS || 'ptu,paygo-east,paygo-west').split(',')) {
  servedBy[name] = new Counter('served_by_' + name.replace(/[^A-Za-z0-9_]/g, '_'));
}

export const options = {
  scenarios: {
    chats: {
      executor: 'ramping-arrival-rate',
      startRate: rate,
      timeUnit: '1s',
      preAllocatedVUs: 10 * rate,
      stages: [
        { target: rate, duration: __ENV.STAGE || '30s' },
        { target: 2 * rate, duration: __ENV.STAGE || '30s' },
        { target: rate, duration: __ENV.STAGE || '30s' },
      ],
    },
  },
  thresholds: { checks: ['rate==1'], dropped_iterations: ['count==0'] },
};

export default function () {
  const stream = Math.random() < 0.5;
  const reply = http.post(
    url,
    JSON.stringify({ model, stream, max_tokens: 50, messages: [{ role: 'user', content: 'Hello' }] }),
    {
      headers: { 'Content-Type': 'application/json', Authorization: 'Bearer ' + (__ENV.KEY || 'none') },
      responseCallback: http.expectedStatuses(200, 429),
      timeout: '120s',
    },
  );
  throttled.add(reply.status === 429);
  if (reply.status === 429) {
    retryAfter.add(Number(reply.headers['Retry-After']));
  }
  const name = reply.headers['X-Simulator'];
  if (servedBy[name]) {
    servedBy[name].add(1);
  }
  check(reply, {
    'a whole reply, or an honest 429': (r) =>
      r.status === 429 ? Number(r.headers['Retry-After']) > 0 : r.status === 200 && (stream ? r.body.trimEnd().endsWith('data: [DONE]') : 'choices' in r.json()),
  });
}
