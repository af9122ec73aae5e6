package faults

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"golang.org/x/net/http2"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

const tooLarge = "HTTP/1.1 413 Payload Too Large\r\nContent-Type: application/json\r\nContent-Length: 28\r\nConnection: close\r\n\r\n" +
	`{"error":{"code":"too big"}}`

// refusesEarly answers as soon as it has the header, and closes a connection
// that still brings the body. Linux then resets it.
func refusesEarly(conn net.Conn) {
	if _, err := http.ReadRequest(bufio.NewReader(conn)); err == nil {
		io.WriteString(conn, tooLarge)
	}
}

func TestAnEarlyReplyToAnUploadIsTheClients(t *testing.T) {
	plain := rawBackend(t, refusesEarly)
	config, trust := backendTLS(t)
	config.NextProtos = nil
	secured := rawBackend(t, overTLS(config, refusesEarly))
	for name, site := range map[string]string{
		"plain":        "backend http://" + plain,
		"TLS":          "backend https://" + secured + "\n" + trust,
		"with a limit": "backend http://" + plain + "\ntransport http {\nread_timeout 1m\n}",
	} {
		t.Run(name, func(t *testing.T) {
			other, server := lbtest.Listen(t, "b")
			address := lbtest.ServeAt(t, "openai_lb {\n"+site+"\nbackend "+server.URL+" {\npriority 2\n}\n}")
			client, body := lbtest.NewClient(t), bytes.Repeat([]byte("x"), 12<<20)
			for range 20 {
				res, err := client.Post("http://"+address+"/v1/chat/completions", "application/json", bytes.NewReader(body))
				if err != nil {
					t.Fatal(err)
				}
				text, err := io.ReadAll(res.Body)
				if res.Body.Close(); err != nil || res.StatusCode != 413 || string(text) != `{"error":{"code":"too big"}}` {
					t.Errorf("client got %d %s (%v), want the backend's 413", res.StatusCode, text, err)
				}
			}
			if n := len(other.Received()); n > 0 {
				t.Errorf("the body went on %d times to another backend", n)
			}
		})
	}
}

// breaksUploads resets a connection in the midst of the body.
func breaksUploads(conn net.Conn) {
	if r, err := http.ReadRequest(bufio.NewReader(conn)); err == nil {
		io.CopyN(io.Discard, r.Body, 1<<20)
		reset(conn)
	}
}

func TestABreakDuringAnUploadFailsOverAndStartsNoCooldown(t *testing.T) {
	s := lbtest.NewSites(t, "https")
	b, server := lbtest.Listen(t, "b")
	url := s.Add("openai_lb {\nbackend http://" + rawBackend(t, breaksUploads) + " {\nname bad\n}\nbackend " + server.URL + " {\nname b\npriority 2\n}\n}")
	s.Serve(t)
	client, body := s.NewClient(t, 1), []byte(`{"model":"m","messages":[{"role":"user","content":"`+strings.Repeat("x", 12<<20)+`"}]}`)
	for range 3 {
		res, err := client.Post(url, "application/json", bytes.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		if res.Body.Close(); res.StatusCode != 200 {
			t.Errorf("client got %d", res.StatusCode)
		}
	}
	attempt, cooldown := s.LoggedOf(t, "bad")
	if attempt.Class != "failed" || cooldown != nil || len(b.Received()) != 3 {
		t.Errorf("the attempt was %+v, the cooldown %+v, and b had %d requests", attempt, cooldown, len(b.Received()))
	}
}

// takesAnUpload reads a body for so long, and then answers, or breaks the
// connection if there is no answer. Over HTTP/1.1, a handler of net/http cannot
// answer while it reads.
func takesAnUpload(patience time.Duration, answer string) http.HandlerFunc {
	return func(rw http.ResponseWriter, r *http.Request) {
		if r.ProtoMajor == 2 {
			go io.Copy(io.Discard, r.Body)
			time.Sleep(patience)
			if answer == "" {
				lbtest.Abort()
			}
			rw.WriteHeader(408)
			return
		}
		conn, received, err := http.NewResponseController(rw).Hijack()
		if err != nil {
			panic(err)
		}
		defer conn.Close()
		go io.Copy(io.Discard, received)
		time.Sleep(patience)
		io.WriteString(conn, answer)
	}
}

// TestAnUploadThatItsClientStallsIsTheClientsFault has a client send more than
// is buffered, and then nothing, or next to nothing, until the backend gives
// up.
func TestAnUploadThatItsClientStallsIsTheClientsFault(t *testing.T) {
	part := []byte(lbtest.Noise(200 << 10))
	for name, answer := range map[string]string{
		"a 408":               "HTTP/1.1 408 Request Timeout\r\nContent-Length: 0\r\n\r\n",
		"a closed connection": "",
	} {
		for kind, rest := range map[string]func(io.Writer){
			"stalls": func(upload io.Writer) {
				time.Sleep(40 * time.Second)
				io.WriteString(upload, "xxx")
			},
			"trickles": func(upload io.Writer) {
				for range 80 {
					time.Sleep(500 * time.Millisecond)
					io.WriteString(upload, "xxx")
				}
			},
			"stalls, and ends": func(upload io.Writer) {
				time.Sleep(40 * time.Second)
				io.WriteString(upload, "xxx")
				upload.(io.Closer).Close()
			},
		} {
			t.Run(kind+", "+name, func(t *testing.T) {
				lbtest.OverAllVersions(t, "request_buffers 100KiB", func(t *testing.T, w *lbtest.World) {
					w.Backends["a"].Replies(takesAnUpload(20*time.Second, answer))
					body, upload := io.Pipe()
					go func() {
						upload.Write(part)
						rest(upload)
					}()
					defer upload.Close()
					r := w.Request(http.MethodPost, "/v1/files", body)
					r.Header.Set("X-Early", "a")
					w.Send(r).WantError(t, 408, "request_timeout")
					w.WantNobodyBlamed()
					time.Sleep(time.Minute)
				})
			})
		}
	}
}

// A connection that is closed before the rest of an upload was read is reset,
// and with that the client may lose the answer.
func TestAnUploadIsReadAfterItsAnswer(t *testing.T) {
	lbtest.InBubble(t, "openai_lb {\nbackend http://a\nrequest_buffers 100KiB\n}", func(t *testing.T, w *lbtest.World) {
		w.Backends["a"].Replies(takesAnUpload(20*time.Second, ""))
		conn, err := w.Dial(t.Context(), "", "lb:80")
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		answers := make(chan *http.Response, 1)
		go func() {
			res, _ := http.ReadResponse(bufio.NewReader(conn), nil)
			answers <- res
		}()
		send := func(parts ...string) {
			for _, part := range parts {
				if _, err := io.WriteString(conn, part); err != nil {
					t.Fatal(err)
				}
			}
		}
		part := lbtest.Noise(200 << 10)
		send("POST /v1/files HTTP/1.1\r\nHost: lb\r\nX-Early: a\r\nTransfer-Encoding: chunked\r\n\r\n", fmt.Sprintf("%x\r\n%s\r\n", len(part), part))
		time.Sleep(40 * time.Second)
		send("3\r\nxxx\r\n")
		time.Sleep(100 * time.Millisecond)
		send("0\r\n\r\n")
		if res := <-answers; res == nil || res.StatusCode != http.StatusRequestTimeout || !res.Close {
			t.Errorf("the client got %+v, want a 408 with which the connection ends", res)
		}
	})
}

func TestABackendThatStopsReadingAnUploadIsAtFault(t *testing.T) {
	for kind, pause := range map[string]time.Duration{"at once": 0, "after a pause": 9 * time.Second} {
		t.Run(kind, func(t *testing.T) {
			lbtest.OverAllVersions(t, "request_buffers 100KiB\nresponse_header_timeout 10s", func(t *testing.T, w *lbtest.World) {
				over := make(chan struct{})
				defer close(over)
				w.Backends["a"].Replies(func(http.ResponseWriter, *http.Request) { <-over })
				body, upload := io.Pipe()
				go func() {
					part := []byte(lbtest.Noise(200 << 10))
					upload.Write(part)
					time.Sleep(pause)
					for range 30 {
						upload.Write(part)
					}
					upload.Close()
				}()
				r := w.Request(http.MethodPost, "/v1/files", body)
				r.Header.Set("X-Early", "a")
				w.Send(r).WantStatus(t, 504)
				if n := len(w.Logged("cooldown started")); n != 1 {
					t.Errorf("the backend got %d cooldowns, want 1", n)
				}
			})
		})
	}
}

// HTTP/2 guarantees that such a request was not processed (RFC 9113 sections
// 6.8 and 8.7).
func TestAnUploadThatWasNotProcessedMayBeSentAgain(t *testing.T) {
	config, trust := backendTLS(t)
	for name, refuses := range map[string]func(frames){
		"it refuses the stream":     isReset(http2.ErrCodeRefusedStream),
		"it goes away":              goesAway(false, http2.ErrCodeNo),
		"it goes away for an error": goesAway(false, http2.ErrCodeEnhanceYourCalm),
	} {
		for _, path := range []string{"files", "audio/transcriptions"} {
			t.Run(name+", "+path, func(t *testing.T) {
				s := lbtest.NewSites(t, "http")
				url := s.Add("openai_lb {\nbackend https://" + rawBackend(t, overTLS(config, answers(refuses))) + " {\nname a\n}\nrequest_buffers 4KiB\n" + trust + "\n}")
				s.Serve(t)
				reply := lbtest.Post(s.NewClient(t, 1), strings.Replace(url, "chat/completions", path, 1), lbtest.Noise(30<<10))
				reply.WantError(t, 503, "upstream_unreachable")
				if reply.Header.Get("Retry-After") != "1" || reply.Header["X-Should-Retry"] != nil || strings.Contains(reply.Body, "may have been executed") {
					t.Errorf("the client got %v %s", reply.Header, reply.Body)
				}
				if _, cooldown := s.LoggedOf(t, "a"); cooldown != nil {
					t.Errorf("a got the cooldown %+v", cooldown)
				}
			})
		}
	}
}
