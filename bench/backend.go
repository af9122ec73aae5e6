package main

import (
	"bytes"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// What a backend of the cost and failover scenarios answers. It takes no time
// and has no limits, for what is measured is what stands in front of it.
const (
	replyChat   = "chat"   // a chat completion of 1 KB
	replyStream = "stream" // as many events as Events says, and the end
	replyIdle   = "idle"   // one event, and then nothing until Hold is over
)

// Why a backend refuses a request.
const (
	// refuseLarge is about this request alone: whoever remembers nothing else
	// of a 429 is asked again with the next one.
	refuseLarge = "too_large"
	// refuseThrottle asks everybody to stay away for a moment.
	refuseThrottle = "throttle"
)

// behaviour says how all backends of a process answer.
type behaviour struct {
	Reply  string
	Events int
	Hold   time.Duration
	// Refusing is how many backends refuse, from the first one on, and Refusal
	// how they do it.
	Refusing int
	Refusal  string
}

// observed counts the requests of the backends since they were last told how to
// behave.
type observed struct {
	Calls int64
	// Model is the one that the latest request named.
	Model string
	// Gaps are the times from the sending of a refusal until the next request
	// came to another backend, which is the same one if clients send one at a
	// time.
	Gaps []time.Duration
}

// backends is the program that answers as told. It listens on one port of
// several addresses, and is told on another.
type backends struct {
	behaviour atomic.Pointer[behaviour]
	calls     atomic.Int64

	// model is the one that the latest request named, if that is all before its
	// prompt.
	model atomic.Pointer[string]

	mu      sync.Mutex
	refused time.Time // when the latest refusal was sent that no other backend has made up for
	refuser int
	gaps    []time.Duration
}

var (
	chatReply = []byte(`{"id":"chatcmpl-123","object":"chat.completion","created":1677652288,"model":"gpt-4o","choices":[{"index":0,"message":{"role":"assistant","content":"` +
		strings.Repeat("Hello there, how may I assist you today? ", 20) + `"},"logprobs":null,"finish_reason":"stop"}],"usage":{"prompt_tokens":9,"completion_tokens":12,"total_tokens":21}}`)
	// No two events in a row are the same: LiteLLM takes that for a model that
	// repeats itself.
	streamEvents = [2][]byte{streamEvent("Hello"), streamEvent("there")}
	streamEnd    = []byte("data: [DONE]\n\n")
	tooLarge     = []byte(`{"error":{"message":"Request too large for gpt-4o on tokens per min (TPM): Limit 30000, Requested 30601.","type":"tokens","param":null,"code":"rate_limit_exceeded"}}`)
	throttled    = []byte(`{"error":{"message":"Too many requests","type":"too_many_requests","param":null,"code":"rate_limit_exceeded"}}`)
)

func streamEvent(content string) []byte {
	return []byte(`data: {"id":"chatcmpl-123","object":"chat.completion.chunk","created":1677652288,"model":"gpt-4o","choices":[{"index":0,"delta":{"content":"` +
		content + `"},"finish_reason":null}]}` + "\n\n")
}

// serveBackends runs the program: at port of all hosts, and at control.
func serveBackends(control string, port string, hosts []string) error {
	b := new(backends)
	b.behaviour.Store(&behaviour{Reply: replyChat})
	failed := make(chan error)
	for n, host := range hosts {
		l, err := net.Listen("tcp", net.JoinHostPort(host, port))
		if err != nil {
			return err
		}
		go func() {
			failed <- http.Serve(l,
				http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { b.answer(n, w, r) }))
		}()
	}
	go func() { failed <- http.ListenAndServe(control, http.HandlerFunc(b.control)) }()
	return <-failed
}

func (b *backends) answer(n int, w http.ResponseWriter, r *http.Request) {
	arrived := time.Now()
	b.read(r.Body)
	b.calls.Add(1)
	does := b.behaviour.Load()
	if does.Refusing > 0 {
		b.came(n, arrived)
	}
	if n < does.Refusing {
		b.refuse(n, w, does.Refusal)
		return
	}
	if does.Reply == replyChat {
		w.Header().Set("Content-Type", "application/json")
		_, _ = w.Write(chatReply)
		return
	}
	w.Header().Set("Content-Type", "text/event-stream")
	flush := http.NewResponseController(w).Flush
	if does.Reply == replyIdle {
		_, _ = w.Write(streamEvents[0])
		_ = flush()
		select {
		case <-time.After(does.Hold):
		case <-r.Context().Done():
		}
	}
	for n := range does.Events {
		_, _ = w.Write(streamEvents[n%2])
		_ = flush()
	}
	_, _ = w.Write(streamEnd)
}

// read reads a body, of which it keeps no more than the model.
func (b *backends) read(body io.Reader) {
	var beginning [64]byte
	n, _ := io.ReadFull(body, beginning[:])
	_, _ = io.Copy(io.Discard, body)
	var name []byte
	if rest, ok := bytes.CutPrefix(beginning[:n], []byte(`{"model":"`)); ok {
		name, _, _ = bytes.Cut(rest, []byte(`"`))
	}
	if known := b.model.Load(); known == nil || *known != string(name) {
		b.model.Store(new(string(name)))
	}
}

func (b *backends) refuse(n int, w http.ResponseWriter, how string) {
	body := tooLarge
	if how == refuseThrottle {
		body = throttled
		w.Header().Set("retry-after-ms", "10")
	}
	w.Header().Set("retry-after", "0")
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(http.StatusTooManyRequests)
	_, _ = w.Write(body)
	b.mu.Lock()
	b.refused, b.refuser = time.Now(), n
	b.mu.Unlock()
	_ = http.NewResponseController(w).Flush() // this sends it
}

// came records that the n-th backend has a request. If it is the one that
// refused the last one, no request went on.
func (b *backends) came(n int, arrived time.Time) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.refused.IsZero() && n != b.refuser {
		b.gaps = append(b.gaps, arrived.Sub(b.refused))
	}
	b.refused = time.Time{}
}

// control sets the behaviour, or returns what was observed.
func (b *backends) control(w http.ResponseWriter, r *http.Request) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if r.Method == http.MethodGet {
		saw := observed{Calls: b.calls.Load(), Gaps: b.gaps}
		if model := b.model.Load(); model != nil {
			saw.Model = *model
		}
		_ = json.NewEncoder(w).Encode(saw)
		return
	}
	does := new(behaviour)
	if err := json.NewDecoder(r.Body).Decode(does); err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	b.behaviour.Store(does)
	b.calls.Store(0)
	b.refused, b.gaps = time.Time{}, nil
}

// told is the program with the backends, from outside.
type told struct {
	*process
	control   string
	upstreams []upstream
}

// startBackends starts three of them.
func startBackends(t tools, priorities ...int) (*told, error) {
	b := &told{control: "127.0.0.1:" + itoa(freePort())}
	port := freePort()
	argv := []string{t.self, "-serve-backends", b.control, itoa(port)}
	for n, priority := range priorities {
		host := "127.0.1." + itoa(n+1)
		argv = append(argv, host)
		b.upstreams = append(b.upstreams, newUpstream(host, port, priority))
	}
	var err error
	if b.process, err = start("backends", t.dir, nil, argv...); err != nil {
		return nil, err
	}
	return b, b.listening(b.control)
}

func (b *told) behave(does behaviour) error {
	body, _ := json.Marshal(does)
	res, err := http.Post("http://"+b.control, "application/json", strings.NewReader(string(body)))
	if err != nil {
		return err
	}
	return res.Body.Close()
}

func (b *told) observed() (o observed, err error) {
	res, err := http.Get("http://" + b.control)
	if err != nil {
		return o, err
	}
	defer res.Body.Close()
	return o, json.NewDecoder(res.Body).Decode(&o)
}
