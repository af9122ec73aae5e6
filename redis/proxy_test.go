package redis

import (
	"bytes"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// proxy passes bytes on, or does worse.
type proxy struct {
	net.Listener
	mode atomic.Int32
}

const (
	passes int32 = iota
	delays
	drops
	cuts
	babbles
	isFar
	dawdles
)

// dawdling is how long a proxy that dawdles pauses after each command.
const dawdling = 300 * time.Millisecond

// distance is how long what is sent by a proxy that is far takes to arrive.
const distance = 10 * time.Millisecond

func newProxy(t testing.TB, to string) *proxy {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &proxy{Listener: l}
	var tasks sync.WaitGroup
	var mu sync.Mutex
	open := make(map[net.Conn]bool)
	track := func(c net.Conn) net.Conn {
		mu.Lock()
		defer mu.Unlock()
		open[c] = true
		return c
	}
	tasks.Go(func() {
		for {
			client, err := l.Accept()
			if err != nil {
				return
			}
			server, err := net.Dial("tcp", to)
			if err != nil {
				client.Close()
				continue
			}
			track(client)
			track(server)
			tasks.Go(func() { p.pass(server, client, false) })
			tasks.Go(func() { p.pass(client, server, true) })
		}
	})
	t.Cleanup(func() {
		l.Close()
		mu.Lock()
		for c := range open {
			c.Close()
		}
		mu.Unlock()
		tasks.Wait()
	})
	return p
}

// pass passes bytes on. reply tells that they come from the server.
func (p *proxy) pass(to, from net.Conn, reply bool) {
	defer to.Close()
	defer from.Close()
	buf := make([]byte, 64<<10)
	for {
		n, err := from.Read(buf)
		if err != nil {
			return
		}
		b := buf[:n]
		switch mode := p.mode.Load(); {
		case mode == delays:
			time.Sleep(2 * time.Second)
		case mode == isFar:
			time.Sleep(distance)
		case mode == dawdles && !reply:
			commands := bytes.SplitAfter(b, []byte("\r\n*"))
			for _, command := range commands[:len(commands)-1] {
				to.Write(command[:len(command)-1])
				time.Sleep(dawdling)
				b = append([]byte("*"), b[len(command):]...)
			}
		case mode == drops && reply:
			continue // in one direction only
		case mode == cuts && reply:
			to.Write(b[:n/2])
			return
		case mode == babbles && reply:
			io.WriteString(to, "HTTP/1.1 400 Bad Request\r\n\r\n*99999999\r\n$-5\r\n")
			continue
		}
		if _, err := to.Write(b); err != nil {
			return
		}
	}
}
