package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/openai/openai-go/v3"
	"github.com/openai/openai-go/v3/azure"
	"github.com/openai/openai-go/v3/option"
	"github.com/openai/openai-go/v3/responses"
)

// order is what a client in any language is to do.
type order struct {
	Client     string        `json:"client"` // OpenAI or AzureOpenAI
	URL        string        `json:"url"`    // its base URL or, of AzureOpenAI, its endpoint
	APIVersion string        `json:"api_version"`
	Calls      []orderedCall `json:"calls"`
	Retries    *int          `json:"retries,omitempty"` // nil: the SDK's default
	Pause      string        `json:"pause,omitempty"`   // a URL to ask in the middle of a call
}

type orderedCall struct {
	Name  string `json:"name"`
	Model string `json:"model"`
}

// outcome is what came of a call, as the SDK tells it.
type outcome struct {
	Backend    string   `json:"backend"` // that served it
	Text       string   `json:"text"`
	Deltas     int      `json:"deltas"` // pieces of the text
	Finish     string   `json:"finish"`
	Tokens     int64    `json:"tokens"`
	Dimensions int      `json:"dimensions"` // of an embedding
	Models     string   `json:"models"`     // with commas between them
	Error      apiError `json:"error"`
}

type apiError struct {
	Class      string `json:"class"` // empty in Go, which has but one
	Status     int    `json:"status"`
	Code       string `json:"code"`
	Type       string `json:"type"`
	Message    string `json:"message"`
	RequestID  string `json:"request_id"`
	RetryAfter string `json:"retry_after"`
}

// languages are those of the SDKs.
var languages = []struct {
	name string
	run  func(t *testing.T, s *site, o order) []outcome
}{
	{"Go", runGo},
	{"Node", runNode},
	{"Python", runPython},
}

func runNode(t *testing.T, s *site, o order) []outcome {
	node := lookPath(t, "node")
	if err := installNode(); err != nil {
		t.Fatal(err)
	}
	return runScript(t, o, "NODE_EXTRA_CA_CERTS="+s.root, node, "node/client.mjs")
}

func runPython(t *testing.T, s *site, o order) []outcome {
	lookPath(t, "python3")
	if err := installPython(); err != nil {
		t.Fatal(err)
	}
	return runScript(t, o, "SSL_CERT_FILE="+s.root, "python/.venv/bin/python", "python/client.py")
}

func lookPath(t *testing.T, name string) string {
	path, err := exec.LookPath(name)
	if err == nil {
		return path
	}
	if os.Getenv("CI") == "true" {
		t.Fatalf("%s is needed: %v", name, err)
	}
	t.Skipf("skipped without %s: %v", name, err)
	return ""
}

// runScript has a script carry out the order and reads the line it prints.
func runScript(t *testing.T, o order, trust string, command ...string) (got []outcome) {
	arg, _ := json.Marshal(o)
	runJSON(t, string(arg), &got, trust, command...)
	return got
}

// runJSON runs a command with one more argument, and reads the JSON that it
// prints.
func runJSON(t *testing.T, arg string, got any, trust string, command ...string) {
	ctx, cancel := context.WithTimeout(t.Context(), 6*patience) // LiteLLM alone takes some seconds to load
	defer cancel()
	var stdout, stderr bytes.Buffer
	cmd := exec.CommandContext(ctx, command[0], append(command[1:], arg)...)
	cmd.Env = append(os.Environ(), trust)
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		t.Fatalf("%v: %v\n%s", command, err, &stderr)
	}
	if err := json.Unmarshal(stdout.Bytes(), got); err != nil {
		t.Fatalf("%v: %v\n%s", command, err, &stdout)
	}
}

var (
	installNode = sync.OnceValue(func() error {
		return install("node", "package-lock.json", "node_modules", "npm ci --no-audit --no-fund")
	})
	installPython = sync.OnceValue(func() error {
		return install("python", "requirements.txt", ".venv",
			"python3 -m venv --clear .venv && .venv/bin/pip install --disable-pip-version-check -r requirements.txt")
	})
)

// install runs the command that makes what is wanted of a list, unless it was
// made of the same list before.
func install(dir, list, made, command string) error {
	wanted, err := os.ReadFile(filepath.Join(dir, list))
	if err != nil {
		return err
	}
	marker := filepath.Join(dir, made, ".made-of")
	if have, err := os.ReadFile(marker); err == nil && bytes.Equal(have, wanted) {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), 8*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, "sh", "-c", command)
	cmd.Dir = dir
	cmd.WaitDelay = time.Second
	if output, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w\n%s", command, err, output)
	}
	return os.WriteFile(marker, wanted, 0o644)
}

func runGo(t *testing.T, s *site, o order) []outcome {
	options := []option.RequestOption{option.WithHTTPClient(s.client)}
	if o.Client == "AzureOpenAI" {
		options = append(options, azure.WithEndpoint(o.URL, o.APIVersion), azure.WithAPIKey("client-key"),
			azure.WithUnsafeAllowHTTP()) // for the container, whose ingress ends TLS
	} else {
		options = append(options, option.WithBaseURL(o.URL), option.WithAPIKey("client-key"))
	}
	if o.Retries != nil {
		options = append(options, option.WithMaxRetries(*o.Retries))
	}
	client := openai.NewClient(options...)
	calls := map[string]func(goClient, context.Context, option.RequestOption) (outcome, error){
		"chat":               goClient.chat,
		"streamed chat":      goClient.streamedChat,
		"embeddings":         goClient.embeddings,
		"responses":          goClient.responses,
		"streamed responses": goClient.streamedResponses,
		"transcription":      goClient.transcription,
		"models":             goClient.models,
		"conversation":       goClient.conversation,
		"stored response":    goClient.storedResponse,
		"resumed stream":     goClient.resumedStream,
		"file":               goClient.file,
		"batch":              goClient.batch,
		"vector store":       goClient.vectorStore,
	}
	ctx, cancel := context.WithTimeout(t.Context(), 2*patience)
	defer cancel()
	var results []outcome
	for _, call := range o.Calls {
		var res *http.Response
		got, err := calls[call.Name](goClient{client, call.Model, o.Pause}, ctx, option.WithResponseInto(&res))
		var refused *openai.Error
		switch {
		case errors.As(err, &refused):
			header := refused.Response.Header
			got = outcome{Error: apiError{Status: refused.StatusCode, Code: refused.Code, Type: refused.Type,
				Message: refused.Message, RequestID: header.Get("x-request-id"), RetryAfter: header.Get("retry-after")}}
		case err != nil:
			t.Fatalf("%s: %v", call.Name, err)
		default:
			if res != nil {
				got.Backend = res.Header.Get("x-simulator")
			}
		}
		results = append(results, got)
	}
	return results
}

// goClient makes the calls that client.mjs and client.py make.
type goClient struct {
	openai.Client
	model string
	pause string
}

func (c goClient) question() openai.ChatCompletionNewParams {
	return openai.ChatCompletionNewParams{
		Model:    c.model,
		Messages: []openai.ChatCompletionMessageParamUnion{openai.UserMessage("Hello?")},
	}
}

func (c goClient) chat(ctx context.Context, o option.RequestOption) (outcome, error) {
	completion, err := c.Chat.Completions.New(ctx, c.question(), o)
	if err != nil {
		return outcome{}, err
	}
	choice := completion.Choices[0]
	return outcome{Text: choice.Message.Content, Finish: choice.FinishReason, Tokens: completion.Usage.CompletionTokens}, nil
}

func (c goClient) streamedChat(ctx context.Context, o option.RequestOption) (outcome, error) {
	question := c.question()
	question.StreamOptions.IncludeUsage = openai.Bool(true)
	stream := c.Chat.Completions.NewStreaming(ctx, question, o)
	defer stream.Close()
	var got outcome
	for stream.Next() {
		chunk := stream.Current()
		got.Tokens = max(got.Tokens, chunk.Usage.CompletionTokens)
		for _, choice := range chunk.Choices {
			if choice.Delta.Content != "" {
				got.Text += choice.Delta.Content
				got.Deltas++
			}
			got.Finish += choice.FinishReason
		}
	}
	return got, stream.Err()
}

func (c goClient) embeddings(ctx context.Context, o option.RequestOption) (outcome, error) {
	list, err := c.Embeddings.New(ctx, openai.EmbeddingNewParams{
		Model: c.model,
		Input: openai.EmbeddingNewParamsInputUnion{OfString: openai.String("Hello?")},
	}, o)
	if err != nil {
		return outcome{}, err
	}
	return outcome{Dimensions: len(list.Data[0].Embedding)}, nil
}

func (c goClient) response() responses.ResponseNewParams {
	return responses.ResponseNewParams{
		Model: c.model,
		Input: responses.ResponseNewParamsInputUnion{OfString: openai.String("Hello?")},
	}
}

func (c goClient) responses(ctx context.Context, o option.RequestOption) (outcome, error) {
	response, err := c.Responses.New(ctx, c.response(), o)
	if err != nil {
		return outcome{}, err
	}
	return outcome{Text: response.OutputText(), Finish: string(response.Status), Tokens: response.Usage.OutputTokens}, nil
}

func (c goClient) streamedResponses(ctx context.Context, o option.RequestOption) (outcome, error) {
	stream := c.Responses.NewStreaming(ctx, c.response(), o)
	defer stream.Close()
	var got outcome
	for stream.Next() {
		switch event := stream.Current(); event.Type {
		case "response.output_text.delta":
			got.Text += event.Delta
			got.Deltas++
		case "response.completed":
			got.Finish, got.Tokens = string(event.Response.Status), event.Response.Usage.OutputTokens
		}
	}
	return got, stream.Err()
}

func (c goClient) transcription(ctx context.Context, o option.RequestOption) (outcome, error) {
	transcription, err := c.Audio.Transcriptions.New(ctx, openai.AudioTranscriptionNewParams{
		Model: c.model,
		File:  openai.File(strings.NewReader("RIFF\x04\x00\x00\x00WAVE\r\n--\xff"), "hello.wav", "audio/wav"),
	}, o)
	if err != nil {
		return outcome{}, err
	}
	return outcome{Text: transcription.Text}, nil
}

func (c goClient) models(ctx context.Context, o option.RequestOption) (outcome, error) {
	list, err := c.Models.List(ctx, o)
	if err != nil {
		return outcome{}, err
	}
	var ids []string
	for _, model := range list.Data {
		ids = append(ids, model.ID)
	}
	return outcome{Models: strings.Join(ids, ", ")}, nil
}
