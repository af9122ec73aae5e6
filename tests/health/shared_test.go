package health

import (
	"bufio"
	"fmt"
	"io"
	"net/http"
	"net/textproto"
	"strings"
	"sync"
	"testing"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

// TestAChangedHeaderKeepsWhatIsKnown compares two sites that reach one backend
// with other headers, as a config before and after a reload does.
func TestAChangedHeaderKeepsWhatIsKnown(t *testing.T) {
	for _, c := range []struct {
		name, before, after string
		keeps               bool
	}{
		{"another team", "header X-Team red", "header X-Team blue", true},
		{"a new header", "", "header OpenAI-Beta assistants=v2", true},
		{"no header any more", "header X-Team red", "", true},
		{"another account", "header Ocp-Apim-Subscription-Key key-of-one", "header Ocp-Apim-Subscription-Key key-of-another", false},
		{"another gateway token", "header Cf-Aig-Authorization \"Bearer one\"", "header Cf-Aig-Authorization \"Bearer another\"", false},
		{"the first secret", "", "header X-Api-Key key-of-another", false},
		{"the same secret, and another team", "header X-Api-Key key-of-one\nheader X-Team red", "header X-Api-Key key-of-one\nheader X-Team blue", true},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := lbtest.NewSites(t, "http")
			a, serverA := lbtest.Listen(t, "a")
			_, serverB := lbtest.Listen(t, "b")
			var urls []string
			for _, header := range []string{c.before, c.after} {
				urls = append(urls, s.Add(fmt.Sprintf("openai_lb {\nbackend %s {\nname a\napi_key key-of-a\nmax_requests 1\n%s\n}\nbackend %s {\nname b\npriority 2\n}\n}", serverA.URL, header, serverB.URL)))
			}
			s.Serve(t)
			client := s.NewClient(t, 1)
			want := "a"
			if c.keeps {
				want = "b"
			}
			// a request that is on its way takes its place at a
			arrived, leave := make(chan struct{}), make(chan struct{})
			letGo := sync.OnceFunc(func() { close(leave) })
			t.Cleanup(letGo)
			a.Replies(func(http.ResponseWriter, *http.Request) {
				close(arrived)
				<-leave
			})
			done := make(chan lbtest.Reply, 1)
			go func() { done <- lbtest.Ask(client, urls[0]) }()
			<-arrived
			a.Recovers()
			lbtest.Ask(client, urls[1]).WantServed(t, want)
			letGo()
			(<-done).WantServed(t, "a")
			// a promise holds
			a.Replies(lbtest.Throttled("120"))
			lbtest.Ask(client, urls[0]).WantServed(t, "b")
			a.Recovers()
			lbtest.Ask(client, urls[1]).WantServed(t, want)
		})
	}
}

func TestACooldownOutlivesAReloadThatChangesAHeader(t *testing.T) {
	a, serverA := lbtest.Listen(t, "a")
	_, serverB := lbtest.Listen(t, "b")
	port := lbtest.FreePort(t)
	n := 0
	config := func(headers string) string {
		n++
		return fmt.Sprintf("{\nadmin off\n}\nhttp://127.0.0.1:%d {\nbind 127.0.0.1\nheader X-Config %d\nopenai_lb {\nbackend %s {\napi_key key-of-a\n%s\n}\nbackend %s {\npriority 2\n}\n}\n}", port, n, serverA.URL, headers, serverB.URL)
	}
	a.Replies(lbtest.Throttled("120"))
	lbtest.Run(t, config("header X-Team red"))
	url := fmt.Sprintf("http://127.0.0.1:%d/v1/chat/completions", port)
	lbtest.Ask(lbtest.NewClient(t), url).WantServed(t, "b")
	a.Recovers()
	reloaded := func(headers string) lbtest.Reply {
		lbtest.Reload(t, config(headers))
		return lbtest.Ask(lbtest.ClientOf(t, fmt.Sprint(n), url), url)
	}
	for _, headers := range []string{"header X-Team blue", "", "header X-Team red\nheader X-Other 1"} {
		reloaded(headers).WantServed(t, "b")
	}
	reloaded("header Api-Key of-another-account").WantServed(t, "a")
}

// TestAPlainReverseProxyChoosesWhenTheBodyIsThere has a backend throttle while
// the body of a request is still on its way.
func TestAPlainReverseProxyChoosesWhenTheBodyIsThere(t *testing.T) {
	a, serverA := lbtest.Listen(t, "a")
	b, serverB := lbtest.Listen(t, "b")
	address := lbtest.ServeAt(t, fmt.Sprintf("reverse_proxy %[1]s %[2]s {\nlb_policy openai_lb {\nupstream %[2]s {\npriority 2\n}\n}\ntransport openai_lb\n}", serverA.Listener.Addr(), serverB.Listener.Addr()))
	conn := lbtest.Dial(t, address)
	io.WriteString(conn, "POST /x HTTP/1.1\r\nHost: lb\r\nExpect: 100-continue\r\nContent-Length: 10\r\n\r\n")
	replies := bufio.NewReader(conn)
	// who asks for the body waits for it now
	if line, err := textproto.NewReader(replies).ReadLine(); err != nil || !strings.Contains(line, " 100 ") {
		t.Fatalf("got %q (%v)", line, err)
	}
	textproto.NewReader(replies).ReadMIMEHeader()
	a.Replies(lbtest.Throttled("120"))
	client := lbtest.NewClient(t)
	lbtest.Ask(client, "http://"+address+"/x").WantServed(t, "b")
	a.Recovers()
	io.WriteString(conn, "0123456789")
	res, err := http.ReadResponse(replies, nil)
	for err == nil && res.StatusCode == http.StatusContinue { // that is the backend's
		res, err = http.ReadResponse(replies, nil)
	}
	if err != nil {
		t.Fatal(err)
	}
	res.Body.Close()
	if got := res.Header.Get("X-Backend"); res.StatusCode != 200 || got != "b" {
		t.Errorf("the late body was answered with %d by %q, want b: a rests", res.StatusCode, got)
	}
	lbtest.Ask(client, "http://"+address+"/x").WantServed(t, "b")
	if n, m := len(a.Received()), len(b.Received()); n != 1 || m != 3 {
		t.Errorf("a was called %d times and b %d, want 1 and 3", n, m)
	}
}
