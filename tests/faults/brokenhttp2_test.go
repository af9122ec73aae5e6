package faults

import (
	"io"
	"net"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/net/http2"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

func TestWhateverGoesWrongOverHTTP2IsFailedOverOrFelt(t *testing.T) {
	config, trust := backendTLS(t)
	var faults []fault
	faults = append(faults, fault{"it goes away before there is a request", overTLS(config, func(conn net.Conn) {
		framer := http2.NewFramer(conn, conn)
		framer.WriteSettings()
		framer.WriteGoAway(0, http2.ErrCodeNo, nil)
		conn.Close()
	}), false, "failed", 502})
	for _, f := range []struct {
		name  string
		steps []func(frames)
		after bool
		class string
		code  int
	}{
		{"it goes away before the request is seen", []func(frames){goesAway(false, http2.ErrCodeNo), hangsUp}, false, "failed", 502},
		{"it goes away before the request is seen, and lingers", []func(frames){goesAway(false, http2.ErrCodeNo)}, false, "failed", 502},
		{"it goes away for an error before the request is seen", []func(frames){goesAway(false, http2.ErrCodeEnhanceYourCalm), hangsUp}, false, "failed", 502},
		{"it goes away after the request is seen", []func(frames){goesAway(true, http2.ErrCodeNo), hangsUp}, false, "failed", 502},
		{"it goes away after the request is seen, and says no more", []func(frames){goesAway(true, http2.ErrCodeNo)}, false, "timeout", 504},
		{"the stream is refused", []func(frames){isReset(http2.ErrCodeRefusedStream)}, false, "failed", 502},
		{"the stream is a protocol error", []func(frames){isReset(http2.ErrCodeProtocol)}, false, "failed", 502},
		{"the stream is reset before its headers", []func(frames){isReset(http2.ErrCodeInternal)}, false, "failed", 502},
		{"the connection is cut before the headers", []func(frames){isCut}, false, "failed", 502},
		{"nothing comes", []func(frames){isSilent}, false, "timeout", 504},
		{"what comes is not HTTP/2", []func(frames){isGarbage}, false, "failed", 502},
		{"it switches protocols", []func(frames){sendsHeaders("101"), beginsStream, brings(lbtest.StreamContent), ends}, false, "failed", 502},
		{"the stream is reset after its headers", []func(frames){beginsStream, isReset(http2.ErrCodeInternal)}, false, "failed", 502},
		{"the connection is cut after the headers", []func(frames){beginsStream, isCut}, false, "failed", 502},
		{"it goes away and hangs up after the headers", []func(frames){beginsStream, goesAway(true, http2.ErrCodeNo), hangsUp}, false, "failed", 502},
		{"the stream ends after its headers", []func(frames){beginsStream, ends}, false, "failed", 502},
		{"the stream is reset after content", []func(frames){beginsStream, brings(lbtest.StreamContent), isReset(http2.ErrCodeInternal)}, true, "broken_stream", 200},
		{"the stream is cancelled after content", []func(frames){beginsStream, brings(lbtest.StreamContent), isReset(http2.ErrCodeCancel)}, true, "broken_stream", 200},
		{"the stream is reset for no error after content", []func(frames){beginsStream, brings(lbtest.StreamContent), isReset(http2.ErrCodeNo)}, true, "broken_stream", 200},
		{"the connection is cut after content", []func(frames){beginsStream, brings(lbtest.StreamContent), isCut}, true, "broken_stream", 200},
		{"the connection is closed after content", []func(frames){beginsStream, brings(lbtest.StreamContent), hangsUp}, true, "broken_stream", 200},
		{"it goes away and hangs up after content", []func(frames){beginsStream, brings(lbtest.StreamContent), goesAway(true, http2.ErrCodeNo), hangsUp}, true, "broken_stream", 200},
		{"garbage comes after content", []func(frames){beginsStream, brings(lbtest.StreamContent), isGarbage}, true, "broken_stream", 200},
		{"nothing comes after content", []func(frames){beginsStream, brings(lbtest.StreamContent)}, true, "", 200},
		{"the reply is shorter than it says", []func(frames){begins("content-type", "application/json", "content-length", "200000"), brings(strings.Repeat("x", 10_000)), ends}, true, "broken_stream", 200},
	} {
		faults = append(faults, fault{f.name, overTLS(config, answers(f.steps...)), f.after, f.class, f.code})
	}
	failOverOrFelt(t, "https", trust, faults)
}

func TestABackendThatTakesNoRequestIsAskedTwiceAndNotForEver(t *testing.T) {
	config, trust := backendTLS(t)
	s := lbtest.NewSites(t, "http")
	var rows []lbtest.Row
	for name, refuses := range map[string]func(frames){
		"it goes away":          goesAway(false, http2.ErrCodeNo),
		"it refuses the stream": isReset(http2.ErrCodeRefusedStream),
	} {
		var asked atomic.Int32
		counts := func(frames) { asked.Add(1) }
		address := rawBackend(t, overTLS(config, answers(counts, refuses)))
		_, serverB := lbtest.Listen(t, "b")
		url := s.Add("openai_lb {\nbackend https://" + address + "\nbackend " + serverB.URL + " {\npriority 2\n}\nfail_duration 1ms\n" + trust + "\n}")
		rows = append(rows, lbtest.Row{Name: name, Test: func(t *testing.T) {
			lbtest.Ask(s.NewClient(t, 1), url).WantServed(t, "b")
			if n := asked.Load(); n != 2 {
				t.Errorf("it was asked %d times, want 2", n)
			}
			time.Sleep(10 * time.Millisecond) // the cooldown ends
			res, err := s.NewClient(t, 1).Get(strings.Replace(url, "chat/completions", "anything", 1))
			if err != nil {
				t.Fatal(err)
			}
			res.Body.Close()
			if n := asked.Load(); n != 4 || res.Header.Get("X-Backend") != "b" {
				t.Errorf("without a body, it was asked %d times in all, want 4, and %q served", n, res.Header.Get("X-Backend"))
			}
		}})
	}
	s.Serve(t)
	lbtest.SideBySide(t, rows)
}

func TestABackendThatTakesNoRequestIsAskedTwiceWithoutTLSToo(t *testing.T) {
	s := lbtest.NewSites(t, "http")
	var asked atomic.Int32
	address := rawBackend(t, answers(func(frames) { asked.Add(1) }, isReset(http2.ErrCodeRefusedStream)))
	url := s.Add("openai_lb {\nbackend http://" + address + "\nresponse_header_timeout 20s\ntransport http {\nversions h2c\n}\n}")
	s.Serve(t)
	for want := range int32(2) {
		lbtest.Ask(s.NewClient(t, 1), url).WantError(t, 502, "upstream_unreachable")
		if n := asked.Load(); n != 2*(want+1) {
			t.Fatalf("it was asked %d times, want %d", n, 2*(want+1))
		}
	}
}

func TestARequestOutlivesAConnectionThatGoesAwayUnderIt(t *testing.T) {
	config, trust := backendTLS(t)
	s := lbtest.NewSites(t, "http")
	var connections atomic.Int32
	address := rawBackend(t, overTLS(config, func(conn net.Conn) {
		if connections.Add(1) == 1 {
			answers(goesAway(false, http2.ErrCodeNo))(conn)
		}
		answers(begins("x-backend", "a", "content-type", "text/event-stream"), brings(lbtest.StreamContent), ends)(conn)
	}))
	b, serverB := lbtest.Listen(t, "b")
	url := s.Add("openai_lb {\nbackend https://" + address + " {\nname a\n}\nbackend " + serverB.URL + " {\npriority 2\n}\n" + trust + "\n}")
	s.Serve(t)
	for range 3 {
		lbtest.Ask(s.NewClient(t, 1), url).WantServed(t, "a")
	}
	if _, cooldown := s.LoggedOf(t, "a"); cooldown != nil || len(b.Received()) != 0 || connections.Load() != 2 {
		t.Errorf("after %d connections to a, it has the cooldown %+v, and b has had %d requests", connections.Load(), cooldown, len(b.Received()))
	}
}

func TestStreamsInFlightOutliveAConnectionThatGoesAway(t *testing.T) {
	s := lbtest.NewSites(t, "http")
	a, serverA, trust := lbtest.ListenTLS(t, "a", true)
	whole := make(chan struct{})
	a.Replies(lbtest.Streams(lbtest.StreamContent, func() { <-whole }, lbtest.StreamContent, lbtest.StreamEnd))
	url := s.Add("openai_lb {\nbackend " + serverA.URL + " {\nname a\n}\n" + trust + "\n}")
	s.Serve(t)
	client := s.NewClient(t, 1)
	var open []*http.Response
	for range 3 {
		open = append(open, lbtest.BeginStream(t, client, url))
	}
	old := a.Received()[0].Request.RemoteAddr
	// net/http's server has the connection go away that a reply like this is
	// for
	a.Replies(lbtest.Says(200, "{}", "Connection", "close"))
	lbtest.Ask(client, url).WantServed(t, "a")
	a.Recovers()
	lbtest.WaitFor(t, func() bool {
		lbtest.Ask(client, url).WantServed(t, "a")
		calls := a.Received()
		return calls[len(calls)-1].Request.RemoteAddr != old
	})
	close(whole)
	for _, res := range open {
		if rest, err := io.ReadAll(res.Body); string(rest) != lbtest.StreamContent+lbtest.StreamEnd || err != nil {
			t.Errorf("a stream ended with %q, %v", rest, err)
		}
	}
	for _, call := range a.Received()[:4] {
		if call.Request.RemoteAddr != old {
			t.Errorf("the streams came by %s and %s: they do not show what they are to show", old, call.Request.RemoteAddr)
		}
	}
	if _, cooldown := s.LoggedOf(t, "a"); cooldown != nil {
		t.Errorf("a got the cooldown %+v", cooldown)
	}
}
