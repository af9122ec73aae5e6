package openailb_test

import (
	"bytes"
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"github.com/openai-lb/caddy-openai-lb/internal/apierror"
	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
	"github.com/openai-lb/caddy-openai-lb/internal/observe"
	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
	"github.com/openai-lb/caddy-openai-lb/internal/pool"
	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
)

// TestErrorsInTheDocsAreThoseOfTheCode takes the errors that the docs show, as
// JSON or as a sentence in quotation marks: people search for them.
func TestErrorsInTheDocsAreThoseOfTheCode(t *testing.T) {
	var bodies, messages []string
	for _, e := range []apierror.Error{
		apierror.MissingKey, apierror.WrongKey, apierror.CompressedBody, apierror.UnknownPath, apierror.NoWebSocket, apierror.HeadersTooLarge, apierror.InvalidHeaders,
		apierror.UpstreamError, apierror.CredentialsRejected, apierror.Unreachable, apierror.BrokenOff, apierror.TimedOut,
		apierror.PerhapsExecuted, apierror.PerhapsStillExecuted, apierror.NotReady,
		apierror.RateLimited(time.Second, true, ""), apierror.RateLimited(9*time.Second, false, ""), apierror.Busy(time.Second, true, ""),
		apierror.RateLimited(9*time.Second, true, "the response 'resp_68f0'"),
		apierror.UnknownModel("gpt-5.6-sol", []string{"gpt-5.5", "gpt-5.6-luna"}), apierror.MissingModel([]string{"gpt-5.5", "gpt-5.6-luna"}),
		apierror.InvalidPath(openaiapi.CheckPath("//v1")), apierror.ModelBeyondBuffer(32 << 20),
	} {
		body, err := io.ReadAll(e.Response(httptest.NewRequest(http.MethodPost, "/", http.NoBody)).Body)
		if err != nil {
			t.Fatal(err)
		}
		bodies, messages = append(bodies, string(body)), append(messages, e.Message)
	}
	found := 0
	for _, b := range docsBlocks(t) {
		for line := range strings.Lines(b.text) {
			if line = strings.TrimSpace(line); !strings.HasPrefix(line, `{"error":`) {
				continue
			}
			if found++; !slices.Contains(bodies, line) {
				t.Errorf("%s: no error of the balancer is %s", b.where, line)
			}
		}
	}
	for _, page := range []string{"docs/clients.md", "docs/replies.md", "docs/troubleshooting.md"} {
		text := lbtest.ReadFile(t, page)
		for _, quote := range regexp.MustCompile(`“([A-Z][^”…]*\.)”`).FindAllStringSubmatch(strings.ReplaceAll(string(text), "\n", " "), -1) {
			if found++; !slices.Contains(messages, quote[1]) {
				t.Errorf("%s: no error of the balancer is “%s”", page, quote[1])
			}
		}
	}
	if found < 5 {
		t.Errorf("found %d errors in the docs, expected more", found)
	}
}

// TestLogLinesInTheDocsAreThoseOfTheCode takes the lines about benches that the
// docs show, and has each of them logged.
func TestLogLinesInTheDocsAreThoseOfTheCode(t *testing.T) {
	benched := 0
	for _, b := range docsBlocks(t) {
		for line := range strings.Lines(b.text) {
			if line = strings.TrimSpace(line); !strings.HasPrefix(line, `{"level"`) {
				continue
			}
			var l struct {
				Msg, Pool, Backend, Deployment string
				Seconds                        float64
				Elsewhere                      bool
				pool.Bench
			}
			if err := json.Unmarshal([]byte(line), &l); err != nil {
				t.Fatalf("%s: %v", b.where, err)
			}
			happening := map[string]pool.Happening{"backend benched": pool.Began, "backend recovered": pool.Ended}[l.Msg]
			if happening == 0 {
				continue
			}
			l.Model = l.Deployment
			l.Until = l.Since.Add(time.Duration(l.Seconds * float64(time.Second)).Round(time.Microsecond))
			var logged bytes.Buffer
			logger := zap.New(zapcore.NewCore(zapcore.NewJSONEncoder(zapcore.EncoderConfig{
				LevelKey: "level", NameKey: "logger", MessageKey: "msg", EncodeLevel: zapcore.LowercaseLevelEncoder, SkipLineEnding: true,
			}), zapcore.AddSync(&logged), zap.DebugLevel)).Named("http.handlers.openai_lb")
			observe.NewLog(logger, l.Pool).Happened(pool.Event{
				Happening: happening, Member: &pool.Member{Name: l.Backend}, Bench: l.Bench, Remote: l.Elsewhere,
			})
			if logged.String() != line {
				t.Errorf("%s: the docs have\n%s\nand the log\n%s", b.where, line, logged.String())
			}
			if happening != pool.Began {
				continue
			}
			benched++
			if l.Class != string(verdict.Throttled) && l.Cause == "" || l.Status == 0 && l.Error == "" {
				t.Errorf("%s: the log says why: %s", b.where, line)
			}
		}
	}
	if benched < 8 {
		t.Errorf("found %d benches in the docs, expected more", benched)
	}
}
