package observe

import (
	"context"
	"net/http"
	"strconv"
	"strings"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"

	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
	"github.com/openai-lb/caddy-openai-lb/internal/pool"
)

// scope names the library that makes the spans.
const scope = "github.com/openai-lb/caddy-openai-lb"

// Attempt describes an attempt that begins.
type Attempt struct {
	// Method and Operation are the request's. Operation is openaiapi.Route's.
	Method, Operation string
	// Model is the backend's name for the model.
	Model  string
	Stream bool
	// Pool and Backend are their names.
	Pool, Backend string
	// Azure reports whether the backend is one of Azure's.
	Azure bool
	// Address is the host and port of the backend.
	Address string
}

// Span is the span of OpenTelemetry of one attempt at a backend, with the
// attributes of its semantic conventions 1.41 for generative AI. Its methods
// can be called on nil, which is the span of an attempt that is not traced, and
// costs nothing.
type Span struct {
	span trace.Span
	ctx  context.Context
}

// StartSpan begins the span of an attempt, if the request that ctx belongs to
// has a span that is recorded. Otherwise describe is not called.
func StartSpan(ctx context.Context, describe func() Attempt) *Span {
	parent := trace.SpanFromContext(ctx)
	if !parent.IsRecording() {
		return nil
	}
	a := describe()
	ctx, span := parent.TracerProvider().Tracer(scope).Start(ctx, a.name(),
		trace.WithSpanKind(trace.SpanKindClient), trace.WithAttributes(a.attributes()...))
	return &Span{span, ctx}
}

// name returns the span's name: the operation and the model, or the method.
func (a *Attempt) name() string {
	operation := a.genAI()
	switch {
	case operation == "":
		return a.Method
	case a.Model == "":
		return operation
	}
	return operation + " " + pool.ModelKey(a.Model)
}

// genAI returns the name of the operation in the conventions. It is empty if
// the operation is not inference, and our own if the conventions have no name
// for it.
func (a *Attempt) genAI() string {
	if !openaiapi.IsInference(a.Method, a.Operation) {
		return ""
	}
	switch operation := strings.Trim(a.Operation, "/"); operation {
	case "chat/completions", "responses", "messages":
		return "chat"
	case "completions":
		return "text_completion"
	default:
		return strings.ReplaceAll(operation, "/", "_")
	}
}

func (a *Attempt) attributes() []attribute.KeyValue {
	provider := "openai"
	if a.Azure {
		provider = "azure.ai.openai"
	}
	attributes := []attribute.KeyValue{
		attribute.String("gen_ai.provider.name", provider),
		attribute.String("http.request.method", a.Method),
		attribute.String("openai_lb.pool", pool.ValidText(a.Pool)),
		attribute.String("openai_lb.backend", pool.ValidText(a.Backend)),
	}
	if operation := a.genAI(); operation != "" {
		attributes = append(attributes, attribute.String("gen_ai.operation.name", operation))
	}
	if a.Model != "" {
		attributes = append(attributes, attribute.String("gen_ai.request.model", pool.ModelKey(a.Model)))
	}
	if a.Stream {
		attributes = append(attributes, attribute.Bool("gen_ai.request.stream", true))
	}
	host := a.Address
	if i := strings.LastIndexByte(a.Address, ':'); i >= 0 {
		if port, err := strconv.Atoi(a.Address[i+1:]); err == nil {
			host = a.Address[:i]
			attributes = append(attributes, attribute.Int("server.port", port))
		}
	}
	return append(attributes, attribute.String("server.address", strings.Trim(host, "[]")))
}

// End ends the span. status is the reply's, or 0. class is the class of the
// reply, and served reports whether the class is a success.
func (s *Span) End(status int, class string, served bool) {
	if s == nil {
		return
	}
	if status != 0 {
		s.span.SetAttributes(attribute.Int("http.response.status_code", status))
	}
	if !served {
		s.span.SetAttributes(attribute.String("error.type", class))
		s.span.SetStatus(codes.Error, "")
	}
	s.span.End()
}

// Used records the tokens that the reply reported.
func (s *Span) Used(input, output int64) {
	if s != nil {
		s.span.SetAttributes(attribute.Int64("gen_ai.usage.input_tokens", input),
			attribute.Int64("gen_ai.usage.output_tokens", output))
	}
}

// IsTraceContext reports whether a header, by its canonical name, carries the
// context of a trace, in any of the formats that Caddy's tracing knows. It may
// say more about the client than a provider needs to know.
func IsTraceContext(name string) bool {
	switch name {
	case "Traceparent", "Tracestate", "Baggage", "B3", "Uber-Trace-Id", "X-Amzn-Trace-Id":
		return true
	}
	return strings.HasPrefix(name, "X-B3-") || strings.HasPrefix(name, "Ot-") || strings.HasPrefix(name, "Uberctx-")
}

// Inject makes the span the parent of the backend's spans.
func (s *Span) Inject(header http.Header) {
	if s != nil {
		propagation.TraceContext{}.Inject(s.ctx, propagation.HeaderCarrier(header))
	}
}
