package observe

import (
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"go.opentelemetry.io/otel/codes"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"go.opentelemetry.io/otel/trace"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

// traced gives each request a span, as Caddy's tracing does. It returns where
// spans go that are over.
func traced(w *lbtest.World, sampler sdktrace.Sampler) *tracetest.InMemoryExporter {
	exporter := tracetest.NewInMemoryExporter()
	provider := sdktrace.NewTracerProvider(sdktrace.WithSyncer(exporter), sdktrace.WithSampler(sampler))
	w.Prepares = func(r *http.Request) *http.Request {
		ctx, _ := provider.Tracer("test").Start(r.Context(), "request")
		return r.WithContext(ctx)
	}
	return exporter
}

func attributesOf(span tracetest.SpanStub) map[string]string {
	attributes := make(map[string]string)
	for _, a := range span.Attributes {
		attributes[string(a.Key)] = a.Value.String()
	}
	return attributes
}

func TestEachAttemptHasASpan(t *testing.T) {
	lbtest.InBubble(t, `openai_lb {
		pool traced
		backend http://ptu {
			auth api_key
			api_key key-of-ptu
			deployment gpt-4o-ptu
		}
		backend http://east:8443 {
			priority 2
		}
		backend http://west {
			priority 3
		}
	}`, func(t *testing.T, w *lbtest.World) {
		exporter := traced(w, sdktrace.AlwaysSample())
		w.Backends["ptu"].Replies(lbtest.Throttled("60"))
		w.Backends["east"].Replies(lbtest.Aborts)
		w.Backends["west"].Replies(lbtest.Streams(lbtest.StreamContent, "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":12,\"completion_tokens\":3}}\n\n", lbtest.StreamEnd))
		w.Post(`{"model":"gpt-4o","stream":true}`).WantStatus(t, 200)
		spans := exporter.GetSpans()
		if len(spans) != 3 {
			t.Fatalf("there are %d spans", len(spans))
		}
		for i, want := range []map[string]string{
			{"gen_ai.provider.name": "azure.ai.openai", "gen_ai.operation.name": "chat", "gen_ai.request.model": "gpt-4o-ptu", "gen_ai.request.stream": "true",
				"server.address": "ptu", "server.port": "80", "http.request.method": "POST", "http.response.status_code": "429", "error.type": "throttled",
				"openai_lb.pool": "traced", "openai_lb.backend": "ptu"},
			{"gen_ai.provider.name": "openai", "gen_ai.operation.name": "chat", "gen_ai.request.model": "gpt-4o", "gen_ai.request.stream": "true",
				"server.address": "east", "server.port": "8443", "http.request.method": "POST", "error.type": "failed",
				"openai_lb.pool": "traced", "openai_lb.backend": "east:8443"},
			{"gen_ai.provider.name": "openai", "gen_ai.operation.name": "chat", "gen_ai.request.model": "gpt-4o", "gen_ai.request.stream": "true",
				"server.address": "west", "server.port": "80", "http.request.method": "POST", "http.response.status_code": "200",
				"openai_lb.pool": "traced", "openai_lb.backend": "west", "gen_ai.usage.input_tokens": "12", "gen_ai.usage.output_tokens": "3"},
		} {
			span := spans[i]
			if got := attributesOf(span); fmt.Sprint(got) != fmt.Sprint(want) {
				t.Errorf("span %d has %v, want %v", i, got, want)
			}
			if span.SpanKind != trace.SpanKindClient || !span.Parent.IsValid() || span.Parent.TraceID() != span.SpanContext.TraceID() {
				t.Errorf("span %d is %v of %v", i, span.SpanKind, span.Parent)
			}
			if _, failed := want["error.type"]; failed != (span.Status.Code == codes.Error) {
				t.Errorf("the status of span %d is %v", i, span.Status)
			}
		}
		if got := spans[0].Name + ", " + spans[2].Name; got != "chat gpt-4o-ptu, chat gpt-4o" {
			t.Errorf("they are called %s", got)
		}
	})
}

func TestSpansAreNamedByWhatIsAsked(t *testing.T) {
	lbtest.InBubble(t, "openai_lb {\nbackend http://a\n}", func(t *testing.T, w *lbtest.World) {
		exporter := traced(w, sdktrace.AlwaysSample())
		for want, op := range map[string][2]string{
			"embeddings e":         {http.MethodPost, "/v1/embeddings"},
			"text_completion e":    {http.MethodPost, "/openai/deployments/e/completions"},
			"chat e":               {http.MethodPost, "/v1/responses"},
			"images_generations e": {http.MethodPost, "/v1/images/generations"},
			"GET":                  {http.MethodGet, "/v1/files/file-1"},
			"POST":                 {http.MethodPost, "/v1/files"},
		} {
			exporter.Reset()
			w.Send(w.Request(op[0], op[1], strings.NewReader(`{"model":"e"}`)))
			if spans := exporter.GetSpans(); len(spans) != 1 || spans[0].Name != want {
				t.Errorf("%s gives %v", op, spans)
			}
		}
	})
}

func TestEverySpanEnds(t *testing.T) {
	for name, reply := range map[string]http.HandlerFunc{
		"served": nil, "client_error": lbtest.Status(400), "broken_stream": func(rw http.ResponseWriter, r *http.Request) {
			lbtest.Streams(lbtest.StreamContent)(rw, r)
			panic(http.ErrAbortHandler)
		}, "quota": lbtest.Status(402),
	} {
		lbtest.InBubble(t, "openai_lb {\nbackend http://a\n}", func(t *testing.T, w *lbtest.World) {
			exporter := traced(w, sdktrace.AlwaysSample())
			w.Backends["a"].Replies(reply)
			w.Post(fmt.Sprintf(`{"model":"gpt-4o","stream":%v}`, name == "broken_stream"))
			spans := exporter.GetSpans()
			if len(spans) != 1 || name != "served" && attributesOf(spans[0])["error.type"] != name {
				t.Errorf("%s gives %v", name, spans)
			}
		})
	}
}

func TestWithoutARecordedSpanThereIsNone(t *testing.T) {
	lbtest.InBubble(t, "openai_lb {\nbackend http://a\n}", func(t *testing.T, w *lbtest.World) {
		exporter := traced(w, sdktrace.NeverSample())
		w.Post(`{}`).WantStatus(t, 200)
		if spans := exporter.GetSpans(); len(spans) > 0 {
			t.Errorf("there are %v", spans)
		}
	})
}

func TestABackendGetsTheContextOfATraceIfItIsAskedTo(t *testing.T) {
	names := []string{"Traceparent", "Tracestate", "Baggage", "B3", "X-B3-Traceid", "Uber-Trace-Id", "X-Amzn-Trace-Id", "Ot-Tracer-Traceid"}
	const parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
	for _, c := range []struct {
		option        string
		traced, wants bool
	}{{"", false, false}, {"", true, false}, {"trace_context", false, true}, {"trace_context", true, true}} {
		t.Run(fmt.Sprintf("%s %t", c.option, c.traced), func(t *testing.T) {
			lbtest.InBubble(t, "openai_lb {\nbackend http://a {\n"+c.option+"\n}\n}", func(t *testing.T, w *lbtest.World) {
				exporter := tracetest.NewInMemoryExporter()
				if c.traced {
					exporter = traced(w, sdktrace.AlwaysSample())
				}
				r := w.Request(http.MethodPost, "/v1/chat/completions", strings.NewReader(`{}`))
				for _, name := range names {
					r.Header.Set(name, "of the client")
				}
				r.Header.Set("Traceparent", parent)
				w.Send(r).WantStatus(t, 200)
				header := w.Backends["a"].Received()[0].Request.Header
				got := slices.DeleteFunc(slices.Clone(names), func(name string) bool { return header.Get(name) == "" })
				if c.wants && len(got) != len(names) || !c.wants && len(got) > 0 {
					t.Errorf("it got %v", got)
				}
				want := ""
				switch {
				case c.wants && c.traced:
					span := exporter.GetSpans()[0].SpanContext
					want = "00-" + span.TraceID().String() + "-" + span.SpanID().String() + "-01"
				case c.wants:
					want = parent
				}
				if header.Get("Traceparent") != want {
					t.Errorf("it got the parent %q, want %q", header.Get("Traceparent"), want)
				}
			})
		})
	}
}

// An exporter of spans drops its whole batch for one text that is no UTF-8.
func TestWhateverAClientNamesIsShownAsUTF8(t *testing.T) {
	long := "a" + strings.Repeat("é", 200)
	for name, path := range map[string]string{
		"a long name":              "/v1/chat/completions",
		"a long name in a path":    "/openai/deployments/" + url.PathEscape(long) + "/chat/completions",
		"an invalid name":          "/openai/deployments/gpt-4o%FF%FE/chat/completions",
		"a long and invalid name":  "/openai/deployments/" + strings.Repeat("%E2%82", 200) + "/chat/completions",
		"an invalid end":           "/openai/deployments/" + strings.Repeat("a", 255) + "%FFb/chat/completions",
		"a rune longer than fits":  "/openai/deployments/" + strings.Repeat("a", 254) + "%F0%9F%98%80/chat/completions",
		"no model, in a long path": "/v1/responses/" + url.PathEscape(long),
	} {
		lbtest.InBubble(t, "openai_lb {\nbackend http://a\n}", func(t *testing.T, w *lbtest.World) {
			exporter := traced(w, sdktrace.AlwaysSample())
			w.Backends["a"].Replies(lbtest.Says(404, `{"error":{"code":"DeploymentNotFound","message":"no"}}`))
			w.Send(w.Request(http.MethodPost, path, strings.NewReader(`{"model":"`+long+`"}`)))
			valid := func(what, text string) {
				if !utf8.ValidString(text) || len(text) > 300 {
					t.Errorf("%s: %s is %q", name, what, text)
				}
			}
			spans := exporter.GetSpans()
			if len(spans) != 1 {
				t.Errorf("%s: there are %d spans", name, len(spans))
			}
			for _, span := range spans {
				valid("the name of the span", span.Name)
				for key, value := range attributesOf(span) {
					valid(key, value)
				}
			}
			for _, entry := range w.Logs.All() {
				for key, value := range entry.ContextMap() {
					if key != "request" { // which is Caddy's, with the whole URI
						valid("in the log, "+key, fmt.Sprint(value))
					}
				}
			}
		})
	}
}
