package reverseproxy

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

func TestMain(m *testing.M) { lbtest.Main(m) }

const (
	chat   = `{"model":"gpt-4o","messages":[]}`
	stream = `{"model":"gpt-4o","messages":[],"stream":true}`
	costly = `{"model":"gpt-4o","messages":[],"max_tokens":100000}`
)

// TestAPlainReverseProxyTreatsUpstreamsAsTheDirectiveTreatsBackends compares
// what clients get, how often each upstream is called, and what is counted.
func TestAPlainReverseProxyTreatsUpstreamsAsTheDirectiveTreatsBackends(t *testing.T) {
	all := func(reply http.HandlerFunc) map[string]http.HandlerFunc {
		return map[string]http.HandlerFunc{"a": reply, "b": reply, "c": reply}
	}
	a := func(reply http.HandlerFunc) map[string]http.HandlerFunc {
		return map[string]http.HandlerFunc{"a": reply}
	}
	recovered := map[string]http.HandlerFunc{"a": nil, "b": nil, "c": nil}
	for name, c := range map[string]struct {
		options string                      // of passive health
		retries string                      // lb_retries, if there are any
		path    string                      // Default: chat completions
		bodies  []string                    // of the requests. A body that is empty has all upstreams recover
		replies map[string]http.HandlerFunc // of the upstreams
		want    string                      // what the client of the first request gets
	}{
		"a throttle":                                    {replies: a(lbtest.Throttled("300")), bodies: []string{chat, chat}, want: "200 b"},
		"a throttle that names no time":                 {replies: a(lbtest.Status(429)), bodies: []string{chat, chat}, want: "200 b"},
		"a failure":                                     {replies: a(lbtest.Status(500)), bodies: []string{chat, chat}, want: "200 b"},
		"a failure of all":                              {replies: all(lbtest.Status(500)), bodies: []string{chat, "", chat}, want: "500 c"},
		"a failure of all, and one retry":               {replies: all(lbtest.Status(500)), bodies: []string{chat, "", chat}, retries: "1", want: "500 b"},
		"throttles of all":                              {replies: all(lbtest.Throttled("40")), bodies: []string{chat, "", chat}, want: "429  rate_limit_exceeded retry-after"},
		"throttles of all for what costs much":          {replies: all(lbtest.Throttled("40")), bodies: []string{costly, "", chat, chat}, want: "429  rate_limit_exceeded retry-after"},
		"a throttle, and failures":                      {replies: map[string]http.HandlerFunc{"a": lbtest.Throttled("40"), "b": lbtest.Status(500), "c": lbtest.Aborts}, bodies: []string{chat, "", chat}, want: "500 b"},
		"an overload of all":                            {replies: all(lbtest.Status(503, "Retry-After", "7")), bodies: []string{chat, chat}, want: "503 c retry-after"},
		"a budget that is used up":                      {replies: a(lbtest.Says(429, `{"error":{"code":"insufficient_quota","message":"x"}}`)), bodies: []string{chat, chat}, want: "200 b"},
		"a rejected key":                                {replies: a(lbtest.Status(401)), bodies: []string{chat, chat}, want: "200 b"},
		"a key that all reject":                         {replies: all(lbtest.Status(401)), bodies: []string{chat, "", chat}, want: "502  upstream_credentials_rejected"},
		"a model that is missing":                       {replies: a(lbtest.Says(404, `{"error":{"code":"DeploymentNotFound","message":"x"}}`)), bodies: []string{chat, chat}, want: "200 b"},
		"a path that is missing":                        {replies: a(lbtest.Says(404, `{"detail":"Not Found"}`)), bodies: []string{chat, chat}, want: "200 b"},
		"pages of a firewall":                           {replies: a(lbtest.Says(403, "<html>")), bodies: []string{chat, chat, chat + " ", chat + "  ", chat}, want: "200 b"},
		"a failure that is unclear, of all":             {replies: all(lbtest.Says(200, `{"object":"response","status":"failed","error":{"code":"mass_persuasion"}}`)), path: "/v1/responses", bodies: []string{chat}, want: "500 b x-should-retry"},
		"a prompt that is too long":                     {replies: a(lbtest.Says(400, `{"error":{"code":"context_length_exceeded","message":"x"}}`)), bodies: []string{chat, chat}, want: "400 a"},
		"a mistake of the client's":                     {replies: a(lbtest.Status(400)), bodies: []string{chat, chat}, want: "400 a"},
		"a connection that breaks":                      {replies: a(lbtest.Aborts), bodies: []string{chat, chat}, want: "200 b"},
		"connections that all break":                    {replies: all(lbtest.Aborts), bodies: []string{chat, "", chat}, want: "502  upstream_unreachable"},
		"a stream that is cut":                          {replies: a(lbtest.Streams(lbtest.StreamContent, lbtest.Abort)), bodies: []string{stream, chat}, want: "200 a cut"},
		"a stream that begins with an error":            {replies: a(lbtest.Streams(lbtest.StreamError)), bodies: []string{stream, chat}, want: "200 b"},
		"a stream that does not begin":                  {replies: a(lbtest.Hangs), bodies: []string{stream, chat}, options: "stream_first_event_timeout 1s", want: "200 b"},
		"no answer of all":                              {replies: all(lbtest.Hangs), bodies: []string{chat}, options: "response_header_timeout 1s", want: "504  upstream_timeout"},
		"a body that is not kept":                       {replies: a(lbtest.Status(500)), bodies: []string{chat + strings.Repeat(" ", 5000), chat}, options: "request_buffers 1KiB", want: "500 a"},
		"a failure of what must not be done twice":      {replies: a(lbtest.Status(502)), bodies: []string{`{}`}, path: "/v1/batches", want: "502 a x-should-retry"},
		"a connection that breaks in what is done once": {replies: a(lbtest.Aborts), bodies: []string{`{}`, `{}`}, path: "/v1/batches", want: "502  upstream_unreachable x-should-retry"},
		"no answer to what is done once":                {replies: a(lbtest.Hangs), bodies: []string{`{}`}, path: "/v1/batches", options: "response_header_timeout 1s", want: "504  upstream_timeout x-should-retry"},
		"a throttle of what is done once":               {replies: a(lbtest.Throttled("300")), bodies: []string{`{}`, `{}`}, path: "/v1/batches", want: "200 b"},
	} {
		t.Run(name, func(t *testing.T) {
			directive := run(t, c.replies, recovered, c.path, c.bodies, func(pool string, servers []string) string {
				var block strings.Builder
				for i, server := range servers {
					fmt.Fprintf(&block, "backend http://%s {\npriority %d\n}\n", server, i+1)
				}
				if c.retries != "" {
					block.WriteString("lb_retries " + c.retries + "\n")
				}
				return fmt.Sprintf("openai_lb {\npool %s\n%s%s\n}", pool, &block, c.options)
			})
			plain := run(t, c.replies, recovered, c.path, c.bodies, func(pool string, servers []string) string {
				var block strings.Builder
				for i, server := range servers {
					fmt.Fprintf(&block, "upstream %s {\npriority %d\n}\n", server, i+1)
				}
				retries := ""
				if c.retries != "" {
					retries = "lb_retries " + c.retries
				}
				return fmt.Sprintf("reverse_proxy %s {\nlb_policy openai_lb {\npool %s\n%s}\n%s\ntransport openai_lb {\n%s\n}\n}", strings.Join(servers, " "), pool, &block, retries, c.options)
			})
			if !slices.Equal(plain.seen, directive.seen) {
				t.Errorf("with the modules:\n%s\nwith the directive:\n%s", strings.Join(plain.seen, "\n"), strings.Join(directive.seen, "\n"))
			}
			if plain.seen[0] != c.want {
				t.Errorf("client got %q, want %q", plain.seen[0], c.want)
			}
			if !slices.Equal(plain.counts, directive.counts) {
				t.Errorf("with the modules, metrics count %v, and with the directive %v", plain.counts, directive.counts)
			}
		})
	}
}

type outcome struct {
	// seen is what the clients get, and how often the upstreams are called.
	seen []string
	// counts are the sums that metrics have.
	counts []string
}

func run(t *testing.T, replies, recovered map[string]http.HandlerFunc, path string, bodies []string, config func(pool string, servers []string) string) outcome {
	t.Helper()
	o, pool, calls := outcome{}, lbtest.Unique("p"), 0
	backends, servers := make(map[string]*lbtest.Backend), []string(nil)
	for _, name := range []string{"a", "b", "c"} {
		backend, server := lbtest.Listen(t, name)
		backend.Replies(replies[name])
		backends[name], servers = backend, append(servers, server.Listener.Addr().String())
	}
	if path == "" {
		path = "/v1/chat/completions"
	}
	url, client := "http://"+lbtest.ServeAt(t, config(pool, servers))+path, lbtest.NewClient(t)
	for _, body := range bodies {
		if body == "" {
			for name, reply := range recovered {
				backends[name].Replies(reply)
			}
			continue
		}
		o.seen = append(o.seen, describe(lbtest.Post(client, url, body)))
	}
	for _, name := range []string{"a", "b", "c"} {
		n := len(backends[name].Received())
		o.seen = append(o.seen, fmt.Sprintf("%s was called %d times", name, n))
		calls += n
	}
	lbtest.WaitFor(t, func() bool { // the last attempt is counted when its reply is over
		return lbtest.Scrape(t).Sum("attempts_total", map[string]string{"pool": pool}) == float64(calls)
	})
	o.counts = counts(t, pool)
	return o
}

func describe(reply lbtest.Reply) string {
	text := fmt.Sprintf("%d %s", reply.Status, reply.Backend)
	for _, code := range []string{"rate_limit_exceeded", "upstream_credentials_rejected", "upstream_unreachable", "upstream_timeout"} {
		if strings.Contains(reply.Body, `"`+code+`"`) {
			text += " " + code
		}
	}
	if reply.Header.Get("Retry-After") != "" {
		text += " retry-after"
	}
	if reply.Header.Get("X-Should-Retry") == "false" {
		text += " x-should-retry"
	}
	if reply.Err != nil {
		text += " cut"
	}
	return text
}

func counts(t *testing.T, pool string) (sums []string) {
	scraped := lbtest.Scrape(t)
	for _, name := range []string{"attempts_total", "failovers_total", "cooldowns_total", "hints_total", "all_throttled_total"} {
		sums = append(sums, fmt.Sprint(name, scraped.Sum(name, map[string]string{"pool": pool})))
	}
	return sums
}

func TestAClientThatLeavesStartsNoCooldown(t *testing.T) {
	a, serverA := lbtest.Listen(t, "a")
	_, serverB := lbtest.Listen(t, "b")
	pool, came := lbtest.Unique("p"), make(chan struct{})
	a.Replies(func(w http.ResponseWriter, r *http.Request) {
		close(came)
		lbtest.Hangs(w, r)
	})
	addresses := []string{serverA.Listener.Addr().String(), serverB.Listener.Addr().String()}
	url := "http://" + lbtest.ServeAt(t, fmt.Sprintf("reverse_proxy %[1]s %[2]s {\nlb_policy openai_lb {\npool %[3]s\nupstream %[1]s\nupstream %[2]s {\npriority 2\n}\n}\ntransport openai_lb\n}",
		addresses[0], addresses[1], pool)) + "/v1/chat/completions"
	ctx, leave := context.WithCancel(t.Context())
	go func() {
		lbtest.Within(t, "the request's coming to a", came)
		leave()
	}()
	if _, err := lbtest.NewClient(t).Do(lbtest.NewRequest(t, http.MethodPost, url, strings.NewReader(chat)).WithContext(ctx)); err == nil {
		t.Fatal("the client got a reply")
	}
	left := map[string]string{"pool": pool, "class": "client_left_waiting"}
	lbtest.WaitFor(t, func() bool { return lbtest.SumOf(t, "attempts_total", left) == 1 })
	a.Recovers()
	lbtest.Post(lbtest.NewClient(t), url, chat).WantServed(t, "a")
	if n := lbtest.SumOf(t, "cooldowns_total", map[string]string{"pool": pool}); n != 0 {
		t.Errorf("%v cooldowns started", n)
	}
}

func TestAPolicyChoosesAmongUpstreamsOfOnePriority(t *testing.T) {
	a, serverA := lbtest.Listen(t, "a")
	_, serverB := lbtest.Listen(t, "b")
	_, serverC := lbtest.Listen(t, "c")
	address := lbtest.ServeAt(t, fmt.Sprintf("reverse_proxy %[3]s %[1]s %[2]s {\nlb_policy openai_lb {\npool %[4]s\nupstream %[3]s {\npriority 2\n}\nlb_policy first\n}\ntransport openai_lb\n}",
		serverA.Listener.Addr(), serverB.Listener.Addr(), serverC.Listener.Addr(), lbtest.Unique("p")))
	client, url := lbtest.NewClient(t), "http://"+address+"/v1/chat/completions"
	for range 20 { // at random, one in a million runs would pass
		lbtest.Post(client, url, chat).WantServed(t, "a")
	}
	a.Replies(lbtest.Throttled("300"))
	for range 2 {
		lbtest.Post(client, url, chat).WantServed(t, "b")
	}
}
