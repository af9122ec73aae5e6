package admin

import (
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
)

// TestAQuestionIsAskedAgainIfAReloadDropsIt has a server that closes the first
// connection without an answer, as Caddy's may while it is replaced. An order
// may have been executed, so it is not sent again.
func TestAQuestionIsAskedAgainIfAReloadDropsIt(t *testing.T) {
	for method, want := range map[string]int{http.MethodGet: 2, http.MethodPost: 1} {
		asked := 0
		server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			if asked++; asked > 1 {
				return
			}
			conn, _, err := http.NewResponseController(w).Hijack()
			if err != nil {
				t.Error(err)
				return
			}
			conn.(*net.TCPConn).Close()
		}))
		_, err := Ask(strings.TrimPrefix(server.URL, "http://"), method, "/", nil)
		server.Close()
		if asked != want || (err == nil) != (want == 2) {
			t.Errorf("%s: asked %d times, want %d, with the error %v", method, asked, want, err)
		}
	}
}
