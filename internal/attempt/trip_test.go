package attempt

import (
	"bytes"
	"context"
	"errors"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/textproto"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/bubble"
	"github.com/openai-lb/caddy-openai-lb/internal/replay"
)

// broken is a connection of which every write fails.
type broken struct{ net.Conn }

func (broken) Write([]byte) (int, error) { return 0, syscall.ECONNRESET }

func TestAnUploadThatNeverBeganHoldsBackNoWriteOfOthers(t *testing.T) {
	for name, fails := range map[string]func(sent *trip, again func() net.Conn){
		"net/http refuses to send it": func(sent *trip, _ func() net.Conn) {
			sent.failure(errors.New("http2: " + headerListTooLarge))
		},
		"net/http takes another connection": func(sent *trip, again func() net.Conn) {
			httptrace.ContextClientTrace(sent).GotConn(httptrace.GotConnInfo{Conn: again()})
		},
	} {
		t.Run(name, func(t *testing.T) {
			bubble.Test(t, func(t *testing.T) {
				dial := func() net.Conn {
					conn, _ := Dialing(func(context.Context, string, string) (net.Conn, error) { return broken{}, nil })(t.Context(), "tcp", "")
					return conn
				}
				upload := bytes.Repeat([]byte("x"), 100<<10)
				r, _ := http.NewRequest(http.MethodPost, "http://a", bytes.NewReader(upload))
				var body replay.Body
				if err := body.Buffer(r, 1<<20); err != nil {
					t.Fatal(err)
				}
				var trip trip
				trip.begin(t.Context())
				defer trip.cancel(nil)
				trip.upload = body.Attach(r, &replay.Options{})
				shared := dial() // as HTTP/2 shares it
				httptrace.ContextClientTrace(&trip).GotConn(httptrace.GotConnInfo{Conn: shared})
				fails(&trip, dial)
				begin := time.Now()
				if shared.Write(make([]byte, 1000)); time.Since(begin) > 0 {
					t.Errorf("a write of another request waited for %s", time.Since(begin))
				}
			})
		})
	}
}

// reverse_proxy writes interim replies to the client. It lets none through
// after its round trip, which several attempts have in common.
func TestAnInterimReplyOfAnAttemptThatIsOverReachesNoClient(t *testing.T) {
	passed := 0
	ctx := httptrace.WithClientTrace(t.Context(), &httptrace.ClientTrace{
		Got1xxResponse: func(int, textproto.MIMEHeader) error { passed++; return nil },
	})
	trip := trip{interims: new(atomic.Int32)}
	trip.begin(ctx)
	defer trip.cancel(nil)
	arrives := func() { _ = httptrace.ContextClientTrace(&trip).Got1xxResponse(http.StatusEarlyHints, nil) }
	arrives()
	trip.endInterim()
	arrives()
	if passed != 1 {
		t.Errorf("%d interim replies reached the client, want the first one alone", passed)
	}
}
