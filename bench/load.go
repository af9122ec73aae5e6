package main

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	cryptorand "crypto/rand"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

func itoa(n int) string { return strconv.Itoa(n) }

// chatRequest is the body of a chat whose prompt has so many characters.
func chatRequest(prompt int, stream bool) string {
	text := strings.Repeat("What is the first letter of the alphabet? ", prompt/42+1)[:prompt]
	return fmt.Sprintf(`{"model":"%s","messages":[{"role":"user","content":"%s"}],"max_tokens":%d,"stream":%t}`,
		model, text, maxTokens, stream)
}

const maxTokens = 16

// closedLoop is a number of clients of which each sends its next request when
// the last one is answered. It writes the same bytes each time and reads no
// more than it must, so that it takes little from those it measures.
type closedLoop struct {
	address string
	tls     bool
	headers map[string]string
	body    string
	clients int
	pause   time.Duration // between a reply and the next request
	// varies is a part of the headers instead of which each request has another
	// one.
	varies string
}

// of returns the same load for a contender.
func (l closedLoop) of(r *running) closedLoop {
	l.address, l.headers, l.body = r.setup.Address, r.headers, r.naming(l.body)
	return l
}

// loopResult has the outcomes that the clients saw.
type loopResult struct {
	elapsed time.Duration
	took    []time.Duration // of each request that was answered, sorted
	failed  int
	failure error // one of them
}

// request returns the bytes that the clients write for each request.
func (l closedLoop) request() []byte {
	var request bytes.Buffer
	fmt.Fprintf(&request, "POST /v1/chat/completions HTTP/1.1\r\nHost: %s\r\nContent-Length: %d\r\n",
		l.address, len(l.body))
	for name, value := range l.headers {
		fmt.Fprintf(&request, "%s: %s\r\n", name, value)
	}
	fmt.Fprintf(&request, "\r\n%s", l.body)
	return request.Bytes()
}

func (l closedLoop) run(length time.Duration) loopResult {
	request := l.request()
	var result loopResult
	var mu sync.Mutex
	var all sync.WaitGroup
	begun := time.Now()
	for range l.clients {
		all.Go(func() {
			took, failed, failure := l.client(request, begun.Add(length))
			mu.Lock()
			defer mu.Unlock()
			result.took = append(result.took, took...)
			result.failed += failed
			if failure != nil {
				result.failure = failure
			}
		})
	}
	all.Wait()
	result.elapsed = time.Since(begun)
	slices.Sort(result.took)
	return result
}

func (l closedLoop) client(request []byte, until time.Time) (took []time.Duration, failed int, failure error) {
	var conn net.Conn
	var reader *bufio.Reader
	request = slices.Clone(request)
	varying := bytes.Index(request, []byte(l.varies))
	for time.Now().Before(until) {
		if l.varies != "" {
			copy(request[varying:varying+len(l.varies)], cryptorand.Text())
		}
		begun := time.Now()
		err := func() (err error) {
			if conn == nil {
				if conn, err = l.dial(); err != nil {
					return err
				}
				reader = bufio.NewReaderSize(conn, 16<<10)
			}
			return exchange(conn, reader, request)
		}()
		if err == nil {
			took = append(took, time.Since(begun))
		} else {
			failed, failure = failed+1, err
			if conn != nil && !errors.Is(err, errStatus) {
				conn.Close()
				conn = nil
			}
		}
		if l.pause > 0 {
			time.Sleep(l.pause)
		}
	}
	if conn != nil {
		conn.Close()
	}
	return took, failed, failure
}

func (l closedLoop) dial() (net.Conn, error) {
	conn, err := net.Dial("tcp", l.address)
	if err == nil && l.tls {
		conn = tls.Client(conn, &tls.Config{InsecureSkipVerify: true})
	}
	return conn, err
}

var (
	errStatus = errors.New("not a 200")
	errCut    = errors.New("the reply is not whole")
)

// exchange sends a request and reads its reply, which must be whole.
func exchange(conn net.Conn, reader *bufio.Reader, request []byte) error {
	_ = conn.SetDeadline(time.Now().Add(20 * time.Second))
	if _, err := conn.Write(request); err != nil {
		return err
	}
	res, err := http.ReadResponse(reader, nil)
	if err != nil {
		return err
	}
	reply, err := io.ReadAll(res.Body)
	if err != nil {
		return err
	}
	end := reply[max(0, len(reply)-64):]
	if res.StatusCode != http.StatusOK {
		return fmt.Errorf("%w: %s, …%s", errStatus, res.Status, end)
	}
	if !whole(res, end) {
		return fmt.Errorf("%w: …%s", errCut, end)
	}
	return nil
}

// whole reports whether this is the end of a reply that is whole.
func whole(res *http.Response, end []byte) bool {
	mark := "}"
	if strings.HasPrefix(res.Header.Get("Content-Type"), "text/event-stream") {
		mark = "[DONE]"
	}
	return bytes.HasSuffix(bytes.TrimSpace(end), []byte(mark))
}

// idleStreams opens a number of streams and reads the first event of each.
func (l closedLoop) idleStreams(n int) (open []net.Conn, err error) {
	request := l.request()
	var mu sync.Mutex
	var all sync.WaitGroup
	var begun atomic.Int64
	for range l.clients {
		all.Go(func() {
			for begun.Add(1) <= int64(n) {
				conn, failure := l.dial()
				if failure == nil {
					failure = firstEvent(conn, request)
				}
				mu.Lock()
				if conn != nil {
					open = append(open, conn)
				}
				err = cmp.Or(err, failure)
				mu.Unlock()
				if failure != nil {
					return
				}
			}
		})
	}
	all.Wait()
	return open, err
}

func firstEvent(conn net.Conn, request []byte) error {
	_ = conn.SetDeadline(time.Now().Add(20 * time.Second))
	if _, err := conn.Write(request); err != nil {
		return err
	}
	reader := bufio.NewReader(conn)
	res, err := http.ReadResponse(reader, nil)
	if err != nil {
		return err
	}
	if res.StatusCode != http.StatusOK {
		return fmt.Errorf("%w: %s", errStatus, res.Status)
	}
	_, err = res.Body.Read(make([]byte, 1))
	return err
}

// What became of a request of the worth scenarios.
type outcome int

const (
	served   outcome = iota
	refused          // 429
	failed           // any other error, or a reply that is not whole
	timedOut         // the client gave up
)

// arrival is one request of an open loop: it comes when it comes, however slow
// the ones before it are.
type arrival struct {
	at   time.Duration // from the beginning
	came outcome
	took time.Duration
}

// arrivals are those of independent clients, in bursts of a size. In each
// window there are as many of them as the rate says.
func arrivals(rate float64, burst int, length time.Duration) (all []arrival) {
	random := rand.New(rand.NewPCG(1, uint64(rate*1000)))
	perWindow := rate * window.Seconds() / float64(burst)
	for n := 0.0; time.Duration(n)*window < length; n++ {
		for range int((n+1)*perWindow) - int(n*perWindow) {
			when := time.Duration((n + random.Float64()) * float64(window))
			for range burst {
				all = append(all, arrival{at: when})
			}
		}
	}
	slices.SortFunc(all, func(a, b arrival) int { return cmp.Compare(a.at, b.at) })
	return slices.DeleteFunc(all, func(a arrival) bool { return a.at >= length })
}

// poisson returns the times of requests that come at random, independently of
// each other: a Poisson process. It has exactly as many of them as the rate
// says in the time that is measured, and in the time after it. Otherwise ten
// minutes "at the quotas" may have one percent more requests than those allow.
func poisson(rate float64, measured, after time.Duration) (all []arrival) {
	random := rand.New(rand.NewPCG(2, uint64(rate*1000)))
	draw := func(from, length time.Duration) {
		for range int(rate * length.Seconds()) {
			all = append(all, arrival{at: from + time.Duration(random.Float64()*float64(length))})
		}
	}
	draw(0, measured)
	draw(measured, after)
	slices.SortFunc(all, func(a, b arrival) int { return cmp.Compare(a.at, b.at) })
	return all
}

// openLoop sends the requests of a schedule to a contender, all clients with
// the same patience, and fills in what became of them. It goes on until enough
// is closed or the schedule ends, and calls done for each request that is over.
func openLoop(r *running, body string, schedule []arrival, patience time.Duration, enough <-chan struct{},
	done func(arrival)) {
	client := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 1000, DisableCompression: true}}
	defer client.CloseIdleConnections()
	var all sync.WaitGroup
	defer all.Wait()
	begun := time.Now()
	for n := range schedule {
		a := &schedule[n]
		select {
		case <-time.After(a.at - time.Since(begun)):
		case <-enough:
			return
		}
		all.Go(func() {
			sent := time.Now()
			a.came = ask(client, r, body, patience)
			a.took = time.Since(sent)
			done(*a)
		})
	}
}

// ask sends a request and returns what became of it.
func ask(client *http.Client, r *running, body string, patience time.Duration) outcome {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+r.setup.Address+"/v1/chat/completions",
		strings.NewReader(r.naming(body)))
	if err != nil {
		return failed
	}
	for name, value := range r.headers {
		req.Header.Set(name, value)
	}
	var reply []byte
	res, err := client.Do(req)
	if err == nil {
		reply, err = io.ReadAll(res.Body)
		res.Body.Close()
	}
	switch {
	case ctx.Err() != nil:
		return timedOut
	case err != nil:
		return failed
	case res.StatusCode == http.StatusTooManyRequests:
		return refused
	case res.StatusCode != http.StatusOK, bytes.Contains(reply, []byte(`"error"`)), !whole(res, reply):
		return failed
	}
	return served
}

// percentile is that of sorted values, or NaN if there are none.
func percentile(sorted []time.Duration, share float64) float64 {
	if len(sorted) == 0 {
		return math.NaN()
	}
	return float64(sorted[min(len(sorted)-1, int(share*float64(len(sorted))))])
}
