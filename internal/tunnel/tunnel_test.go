package tunnel

import (
	"io"
	"net"
	"net/http"
	"testing"
	"testing/synctest"
	"time"
)

// side is the backend's. Its other end is a pipe's.
type side struct {
	net.Conn
	closed chan time.Time
}

func (*side) CloseWrite() error { return nil }

func (s *side) Close() error {
	select {
	case s.closed <- time.Now():
	default:
	}
	return s.Conn.Close()
}

// client is a ResponseWriter that knows its deadlines.
type client struct {
	http.ResponseWriter
	read, write time.Time
}

func (c *client) SetReadDeadline(at time.Time) error  { c.read = at; return nil }
func (c *client) SetWriteDeadline(at time.Time) error { c.write = at; return nil }

func TestATunnelEndsAGracePeriodAfterOneOfItsSides(t *testing.T) {
	for name, c := range map[string]struct {
		ends func(tunnel io.ReadWriteCloser, backend net.Conn)
		want time.Duration // 0: at once
		both bool
	}{
		"the client": {func(tunnel io.ReadWriteCloser, _ net.Conn) {
			tunnel.(interface{ CloseWrite() error }).CloseWrite()
			tunnel.Read(make([]byte, 1)) // until it is closed
		}, Grace, true},
		"the backend": {func(tunnel io.ReadWriteCloser, backend net.Conn) {
			backend.Close()
			tunnel.Read(make([]byte, 1))
			time.Sleep(time.Minute)
		}, Grace, true},
		"one soon after the other": {func(tunnel io.ReadWriteCloser, backend net.Conn) {
			tunnel.(interface{ CloseWrite() error }).CloseWrite()
			time.Sleep(time.Second)
			backend.Close()
			tunnel.Read(make([]byte, 1))
			time.Sleep(time.Second)
		}, 2 * time.Second, true},
		"neither": {func(io.ReadWriteCloser, net.Conn) { time.Sleep(time.Hour) }, time.Hour, false},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				near, far := net.Pipe()
				begin, backend, client := time.Now(), &side{near, make(chan time.Time, 1)}, new(client)
				tunnel := Between(client, backend)
				c.ends(tunnel, far)
				tunnel.Close()
				if got := (<-backend.closed).Sub(begin); got != c.want {
					t.Errorf("the backend's side is closed after %s, want %s", got, c.want)
				}
				if until := begin.Add(Grace); c.both && (!client.read.Equal(until) || !client.write.Equal(until)) || !c.both && !client.read.IsZero() {
					t.Errorf("the client's side ends at %s and %s", client.read, client.write)
				}
				tunnel.(interface{ CloseWrite() error }).CloseWrite()
				far.Close()
			})
		})
	}
}

func TestASideThatCannotBeHalfClosedEndsTheTunnel(t *testing.T) {
	near, far := net.Pipe()
	defer far.Close()
	tunnel := Between(new(client), near)
	defer tunnel.Close()
	if err := tunnel.(interface{ CloseWrite() error }).CloseWrite(); err == nil {
		t.Error("reverse_proxy would wait for the other side")
	}
}
