package attempt

import (
	"context"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/bubble"
	"github.com/openai-lb/caddy-openai-lb/internal/keys"
	"github.com/openai-lb/caddy-openai-lb/internal/replay"
	"github.com/openai-lb/caddy-openai-lb/internal/sse"
)

func TestAClientThatReadsSlowlyIsNotAStall(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		backend, wire := io.Pipe()
		ctx, cancel := context.WithCancelCause(t.Context())
		b := &body{response: new(http.Response), fields: All{}, source: backend, idle: 10 * time.Second, deadline: &deadline{cancel: cancel}}
		go func() {
			for range 3 {
				io.WriteString(wire, "x")
			}
			<-ctx.Done()
			wire.CloseWithError(ctx.Err())
		}()
		for range 3 {
			if n, err := b.Read(make([]byte, 1)); n != 1 || err != nil {
				t.Fatal(n, err)
			}
			time.Sleep(time.Hour) // the client's pause
		}
		start := time.Now()
		if _, err := b.Read(make([]byte, 1)); err != ErrIdle || time.Since(start) != 10*time.Second {
			t.Errorf("a backend that stalls gives %v after %s", err, time.Since(start))
		}
	})
}

// timedReads is a reply whose reads take so long each. The last one finds the
// cut.
type timedReads []time.Duration

func (s *timedReads) Read([]byte) (int, error) {
	time.Sleep((*s)[0])
	if *s = (*s)[1:]; len(*s) == 0 {
		return 0, io.ErrUnexpectedEOF
	}
	return 1, nil
}

func (*timedReads) Close() error { return nil }

func TestACutIsTheBackendsUnlessItsClientKeptItWaiting(t *testing.T) {
	const ms, s = time.Millisecond, time.Second
	for name, c := range map[string]struct {
		reads  timedReads
		pauses []time.Duration // before each read
		given  bool
	}{
		"at once":                            {timedReads{0}, []time.Duration{0}, false},
		"a prompt client":                    {timedReads{s, s, s}, []time.Duration{ms, ms, ms}, false},
		"right after some content":           {timedReads{s, 0}, []time.Duration{ms, ms}, false},
		"a burst to a prompt client":         {timedReads{s, 0, 0, 0, 0}, []time.Duration{ms, ms, ms, ms, ms}, false},
		"a client that paused":               {timedReads{s, 0}, []time.Duration{ms, 3 * s}, true},
		"a client that never read":           {timedReads{0}, []time.Duration{3 * s}, true},
		"buffers that lasted for some reads": {timedReads{s, 0, 0, 0, 0}, []time.Duration{ms, 3 * s, ms, ms, ms}, true},
		"a client that is slow all the time": {timedReads{s, 0, 0, 0, 0, 0, 0, 0}, []time.Duration{ms, 100 * ms, 100 * ms, 100 * ms, 100 * ms, 100 * ms, 100 * ms, 100 * ms}, true},
		"a client that paused long ago":      {timedReads{s, s, s, s, s, s}, []time.Duration{ms, 3 * s, ms, ms, ms, ms}, false},
	} {
		t.Run(name, func(t *testing.T) {
			bubble.Test(t, func(t *testing.T) {
				b := &body{response: new(http.Response), fields: All{}, source: &c.reads, idle: time.Hour, deadline: &deadline{}}
				b.deadline.start(time.Hour, ErrIdle)
				time.Sleep(3 * s) // until the reply begins
				b.deadline.stop()
				b.deadline.end()
				time.Sleep(3 * s) // while it is held back
				b.goOut(nil)
				for _, pause := range c.pauses[:len(c.pauses)-1] {
					time.Sleep(pause)
					if _, err := b.Read(make([]byte, 1)); err != nil {
						t.Fatal(err)
					}
				}
				time.Sleep(c.pauses[len(c.pauses)-1])
				if _, err := b.Read(make([]byte, 1)); !errors.Is(err, io.ErrUnexpectedEOF) {
					t.Errorf("the client gets %v, want the cut", err)
				}
				if got := b.givenUp(io.ErrUnexpectedEOF); got != c.given {
					t.Errorf("it is %t that the backend gave up, want %t", got, c.given)
				}
				if b.givenUp(ErrInStream) {
					t.Error("an error that the backend tells of counts as a cut")
				}
				b.Close()
			})
		})
	}
}

// hesitant is a backend that thinks, begins to tell of an error, and breaks
// off.
type hesitant struct{ reads int }

func (h *hesitant) Read(p []byte) (int, error) {
	if h.reads++; h.reads > 1 {
		return 0, io.ErrUnexpectedEOF
	}
	time.Sleep(700 * time.Millisecond)
	return copy(p, "event: error\ndata: {\"error\":{\"message\":\"x"), nil
}

func (*hesitant) Close() error { return nil }

func TestTheBackendsOwnPauseIsNotItsClients(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		_, cancel := context.WithCancelCause(t.Context())
		b := body{source: new(hesitant), response: new(http.Response), fields: All{}, idle: time.Minute, secrets: keys.Secrets{"sk-1234567890abcdef"},
			deadline: &deadline{cancel: cancel}, watch: new(sse.Watcher)}
		reply := &Reply{sent: &Outgoing{Incoming: httptest.NewRequest("POST", "/", nil), Body: new(replay.Body)}}
		b.goOut(reply)
		_, err := io.Copy(io.Discard, &b)
		if end := reply.End(); err == nil || end.Broken == nil || end.Paused {
			t.Errorf("the reply ended with %v, %+v", err, end)
		}
	})
}

func TestEventsThatCameTogetherGoOnTogether(t *testing.T) {
	burst := strings.Repeat("data: {\"choices\":[{\"delta\":{\"content\":\"Hello\"}}]}\n\n", 300)
	b := body{source: io.NopCloser(strings.NewReader(burst)), response: new(http.Response), fields: All{}, idle: time.Minute, deadline: &deadline{}}
	if failure, err := b.openStream(); failure != nil || err != nil {
		t.Fatal(failure, err)
	}
	if n, err := b.Read(make([]byte, 32<<10)); n != len(burst) || err != nil {
		t.Errorf("the first read brings %d of %d bytes, and %v", n, len(burst), err)
	}
}

// TestAReaderOfAnySizeGetsEachByteOfAnErrorOnce in order: the end of a read may
// be the beginning of a key, and be held back.
func TestAReaderOfAnySizeGetsEachByteOfAnErrorOnce(t *testing.T) {
	const key = "sk-1234567890abcdef"
	event := "data: {\"choices\":[]}\n\nevent: error\ndata: {\"error\":{\"message\":\"no sk-12345, sk-1234567890abcde " + key + " sk-\"}}\n\n"
	for size := range 80 {
		size++
		b := body{source: io.NopCloser(iotest.OneByteReader(strings.NewReader(event))), response: new(http.Response), fields: All{}, idle: time.Minute,
			secrets: keys.Secrets{key}, deadline: &deadline{}, watch: new(sse.Watcher)}
		var got []byte
		for p := make([]byte, size); ; {
			if n, err := b.Read(nil); n != 0 || err != nil {
				t.Fatalf("a read of nothing brings %d bytes, and %v", n, err)
			}
			n, err := b.Read(p)
			if got = append(got, p[:n]...); err == io.EOF {
				break
			} else if err != nil {
				t.Fatal(err)
			}
		}
		starred := strings.ReplaceAll(event, key, strings.Repeat("*", len(key)))
		if string(got) != starred && (size > len(key) || string(got) != event) {
			t.Errorf("by %d bytes it gets %q", size, got)
		}
	}
}

// TestAKeyIsReplacedWhereverItIs in a reply: an error may be written in any
// way, and may come after content.
func TestAKeyIsReplacedWhereverItIs(t *testing.T) {
	const key, short = "sk-1234567890abcdef", "password"
	const content = "data: {\"type\":\"response.output_text.delta\",\"delta\":\"your password\"}\n\n"
	for name, reply := range map[string]string{
		"an error with its members in order": content + "data: {\"code\":\"invalid_api_key\",\"message\":\"Incorrect API key: " + key + "\",\"type\":\"error\"}\n\n",
		"an error without a type":            content + "data: {\"detail\":\"refused " + key + "\"}\n\n" + content,
		"a delta":                            content + "data: {\"type\":\"response.output_text.delta\",\"delta\":\"" + key + "\"}\n\n" + content,
		"an event that is long":              "data: {\"x\":\"" + strings.Repeat("x", 2*sse.MaxEvent) + key + "\"}\n\n",
		"no stream":                          "{\"detail\":\"the password of " + key + "\"}",
	} {
		for size, reader := range map[string]io.Reader{"at once": strings.NewReader(reply), "byte by byte": iotest.OneByteReader(strings.NewReader(reply))} {
			b := body{source: io.NopCloser(reader), response: new(http.Response), fields: All{}, idle: time.Minute,
				secrets: keys.Secrets{key, short}, random: keys.Secrets{key, short}.Random(), deadline: new(deadline)}
			if name != "no stream" {
				b.watch = new(sse.Watcher)
			}
			got, err := io.ReadAll(&b)
			if want := strings.ReplaceAll(reply, key, strings.Repeat("*", len(key))); err != nil || string(got) != want {
				t.Errorf("%s, %s: the client gets %.300q, %v", name, size, got, err)
			}
		}
	}
}

// TestEchoesAreHeldBackWithinALimit has many streams that do not come to
// content, and checks what all of them hold.
func TestEchoesAreHeldBackWithinALimit(t *testing.T) {
	echo := "event: response.created\ndata: {\"type\":\"response.created\",\"instructions\":\"" + strings.Repeat("x", echoLimit) + "\"}\n\n"
	bubble.Test(t, func(t *testing.T) {
		var all []*body
		for range 2 * echoesLimit / echoLimit {
			b := &body{source: io.NopCloser(strings.NewReader(echo)), response: new(http.Response), fields: All{}, idle: time.Minute, deadline: new(deadline)}
			if failure, err := b.openStream(); failure != nil || err != nil {
				t.Fatal(failure, err)
			}
			if all = append(all, b); echoes.Load() > echoesLimit {
				t.Fatalf("%d streams hold %d bytes", len(all), echoes.Load())
			}
		}
		if held := echoes.Load(); held < echoesLimit*9/10 {
			t.Errorf("all streams hold %d bytes", held)
		}
		for i, b := range all {
			if i%2 == 0 {
				if n, err := io.Copy(io.Discard, b); int(n) != len(echo) || err != nil {
					t.Errorf("stream %d has %d bytes of %d: %v", i, n, len(echo), err)
				}
			}
			b.Close()
		}
		if held := echoes.Load(); held != 0 {
			t.Errorf("%d bytes are held of streams that are over", held)
		}
	})
}
