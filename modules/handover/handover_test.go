package handover

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"testing"
)

func TestAfterTheHandoverOnlyConnectionsFromBeforeAreServed(t *testing.T) {
	inner, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var w Handover
	server := http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "served") })}
	ended := make(chan error, 1)
	l := w.WrapListener(inner)
	go func() { ended <- server.Serve(l) }()

	dials := 0
	client := http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, network, address string) (net.Conn, error) {
		dials++
		return new(net.Dialer).DialContext(ctx, network, address)
	}}}
	ask := func() {
		t.Helper()
		res, err := client.Get("http://" + inner.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer res.Body.Close()
		if body, err := io.ReadAll(res.Body); err != nil || string(body) != "served" || dials != 1 {
			t.Errorf("got %q, %v, by connection %d", body, err, dials)
		}
	}
	ask()
	w.handOver()
	w.handOver()
	ask()
	next, err := net.Listen("tcp", inner.Addr().String())
	if err != nil {
		t.Errorf("another process cannot take the port: %v", err)
	} else {
		next.Close()
	}
	select {
	case err := <-ended:
		t.Errorf("the server ended: %v", err)
	default:
	}
	client.CloseIdleConnections()
	if err := server.Shutdown(t.Context()); err != nil {
		t.Error(err)
	}
	if err := <-ended; !errors.Is(err, http.ErrServerClosed) {
		t.Error(err)
	}
	if err := l.Close(); err != nil {
		t.Errorf("a second close fails: %v", err)
	}
}

func TestAListenerThatIsNotTCPIsNotWrapped(t *testing.T) {
	inner, err := net.Listen("unix", t.TempDir()+"/s")
	if err != nil {
		t.Fatal(err)
	}
	defer inner.Close()
	if l := new(Handover).WrapListener(inner); l != inner {
		t.Errorf("it is a %T", l)
	}
}
