package faults

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/textproto"
	"strings"
	"testing"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

func TestAClientGetsTwentyInterimRepliesAtMost(t *testing.T) {
	config, trust := backendTLS(t)
	early := func(n int) string { return strings.Repeat("HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n", n) }
	const final = "HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\nContent-Type: application/json\r\n\r\n{}"
	earlyFrames := func(n int) func(frames) {
		return func(f frames) {
			for range n {
				sendsHeaders("103", "link", "</x>")(f)
			}
		}
	}
	plain := func(replies func(net.Conn)) string { return "http://" + rawBackend(t, reads(replies)) }
	s := lbtest.NewSites(t, "https")
	var rows []lbtest.Row
	for _, c := range []struct {
		name     string
		backends func() []string
		want     int
	}{
		{"three", func() []string { return []string{plain(sends(early(3) + final))} }, 3},
		{"twenty", func() []string { return []string{plain(sends(early(20) + final))} }, 20},
		{"thousands", func() []string { return []string{plain(sends(early(5000) + final))} }, 20},
		{"thousands over HTTP/2", func() []string {
			return []string{"https://" + rawBackend(t, overTLS(config, answers(earlyFrames(5000), begins("content-type", "application/json"), brings("{}"), ends)))}
		}, 20},
		{"of two backends", func() []string { return []string{plain(resets(early(15))), plain(sends(early(15) + final))} }, 20},
	} {
		for _, version := range []int{1, 2} {
			site := "openai_lb {\n" + trust + "\n"
			for n, backend := range c.backends() { // with no cooldown of the other version
				site += fmt.Sprintf("backend %s {\npriority %d\n}\n", backend, n+1)
			}
			url := s.Add(site + "}")
			rows = append(rows, lbtest.Row{Name: fmt.Sprintf("%s, client by HTTP/%d", c.name, version), Test: func(t *testing.T) {
				got := 0
				r := lbtest.NewRequest(t, http.MethodPost, url, strings.NewReader("{}"))
				r = r.WithContext(httptrace.WithClientTrace(r.Context(), &httptrace.ClientTrace{Got1xxResponse: func(int, textproto.MIMEHeader) error {
					got++
					return nil
				}}))
				if res := lbtest.Do(t, s.NewClient(t, version), r); res.StatusCode != 200 || got != c.want {
					t.Errorf("the client got %d after %d interim replies, want 200 after %d", res.StatusCode, got, c.want)
				}
			}})
		}
	}
	s.Serve(t)
	lbtest.SideBySide(t, rows)
}

// Such a client would take the first of them for its reply (RFC 9110 section
// 15.2).
func TestAClientOfHTTP10GetsNoInterimReplies(t *testing.T) {
	backend := rawBackend(t, reads(sends("HTTP/1.1 103 Early Hints\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Type: application/json\r\n\r\n{}")))
	conn := lbtest.Dial(t, lbtest.ServeAt(t, "openai_lb {\nbackend http://"+backend+"\n}"))
	io.WriteString(conn, "POST /v1/chat/completions HTTP/1.0\r\nHost: example.com\r\nContent-Length: 2\r\n\r\n{}")
	if res, err := http.ReadResponse(bufio.NewReader(conn), nil); err != nil || res.StatusCode != 200 {
		t.Errorf("the client got %v, %v, want 200", res, err)
	}
}
