package e2e

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/net/dns/dnsmessage"
	"golang.org/x/sys/unix"
)

// outageSite is a balancer with everything around it that an outage can take:
// six backends with certificates, keys in files and names in a DNS zone, a
// disk, a configuration, and perhaps a Redis and a second replica.
type outageSite struct {
	*testing.T
	program  string
	dir      string
	zone     *zone
	issuer   *issuer
	backends map[string]*outageBackend
	replicas []*replica
	redis    *redisServer

	// scrapes are those of all replicas, by phases.
	scrapes  [][]scrape
	counters map[string]bool
}

// replica is a Caddy.
type replica struct {
	*process
	caddyfile, url, admin string
	output                *output
}

// output is what a process has written, which may be read meanwhile.
type output struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (o *output) Write(text []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.text.Write(text)
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.text.String()
}

var outageBackends = []string{"east", "west", "north", "south", "spare", "last"}

const outageModel = "gpt-5.5"

// startOutageSite runs a balancer until the test ends, or with a Redis two of
// them.
func startOutageSite(t *testing.T, program string, withRedis bool) *outageSite {
	t.Helper()
	s := &outageSite{T: t, program: program, dir: t.TempDir(), issuer: newIssuer(t), zone: startZone(t), backends: make(map[string]*outageBackend), counters: make(map[string]bool)}
	var backends strings.Builder
	for _, name := range outageBackends {
		b := s.startBackend(name)
		s.backends[name] = b
		fmt.Fprintf(&backends, "backend https://%s:%s {\nname %s\nauth bearer\napi_key {file.%s}\nmodel %s\n}\n", b.host(), b.port, name, b.keyFile, outageModel)
	}
	writeFile(t, filepath.Join(s.dir, "ca.pem"), string(s.issuer.pem))
	state, replicas := "", 1
	if withRedis {
		s.redis = startRedis(t)
		state, replicas = "state redis {\naddress "+s.redis.address+"\n}", 2
	}
	for i := range replicas {
		s.replicas = append(s.replicas, s.startReplica(i, program, backends.String()+state))
	}
	t.Cleanup(func() {
		if !t.Failed() {
			return
		}
		for _, r := range s.replicas {
			lines := strings.Split(r.output.String(), "\n")
			t.Logf("%s\n%s", readFile(t, r.caddyfile), strings.Join(lines[max(0, len(lines)-60):], "\n"))
		}
	})
	return s
}

func (s *outageSite) startReplica(i int, program, options string) *replica {
	s.Helper()
	var err error
	for range 3 { // a port that was free may be taken by the time Caddy starts
		var addresses []string
		if addresses, err = freeAddresses(2); err != nil {
			break
		}
		dir := s.folderOf(i)
		if err = os.MkdirAll(dir, 0o700); err != nil {
			break
		}
		r := &replica{caddyfile: filepath.Join(dir, "Caddyfile"), url: "http://" + addresses[0], admin: addresses[1], output: new(output)}
		writeFile(s.T, r.caddyfile, fmt.Sprintf(`{
	admin %s
	auto_https off
	persist_config off
	storage file_system %s/storage
}
%s {
	metrics /metrics
	openai_lb_status /status
	openai_lb {
		pool llm
		client_key alice client-key-of-alice
		caller alice {
			requests 1000000/day
		}
		%s
		transport http {
			tls_trust_pool file %s/ca.pem
			resolvers %s
		}
	}
}
`, r.admin, dir, r.url, strings.ReplaceAll(options, "\n", "\n\t\t"), s.dir, s.zone.address))
		cmd := exec.Command(program, "run", "--adapter", "caddyfile", "--config", r.caddyfile)
		cmd.Env = append(os.Environ(), "HOME="+dir, "XDG_DATA_HOME="+dir, "XDG_CONFIG_HOME="+dir)
		cmd.Stdout, cmd.Stderr = r.output, r.output
		if r.process, err = begin(s.T, cmd, r.caddyfile); err != nil {
			continue
		}
		if err = r.await(func() error { return answers(r.url + "/status") }); err == nil {
			return r
		}
	}
	s.Fatal(err)
	return nil
}

// outageBackend is a backend that serves, unless an outage takes it.
type outageBackend struct {
	*httptest.Server
	name, port, keyFile string
	certificate         atomic.Pointer[tls.Certificate]
	key                 atomic.Pointer[string]
	// hangs is closed when the backend does not hang any more. It is nil while
	// the backend answers.
	hangs atomic.Pointer[chan struct{}]
}

func (b *outageBackend) host() string { return b.name + ".test" }

func (s *outageSite) startBackend(name string) *outageBackend {
	s.Helper()
	b := &outageBackend{name: name, keyFile: filepath.Join(s.dir, name+"-key")}
	b.Server = httptest.NewUnstartedServer(b)
	b.TLS = &tls.Config{GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return b.certificate.Load(), nil }}
	b.EnableHTTP2 = true
	s.certify(b, time.Hour)
	b.StartTLS()
	s.Cleanup(func() {
		b.answer()
		b.CloseClientConnections()
		b.Close()
	})
	_, b.port, _ = net.SplitHostPort(b.Listener.Addr().String())
	s.zone.set(b.host(), true)
	s.giveKey(b, "first-key-of-"+name)
	return b
}

// certify gives a backend a certificate, as at a new start: that ends its
// connections.
func (s *outageSite) certify(b *outageBackend, validFor time.Duration) {
	b.certificate.Store(s.issuer.issue(s.T, b.host(), validFor))
	if b.URL != "" {
		b.CloseClientConnections()
	}
}

// giveKey makes a key for a backend, and has the balancer use it.
func (s *outageSite) giveKey(b *outageBackend, key string) {
	b.key.Store(&key)
	writeFile(s.T, b.keyFile, key)
}

func (b *outageBackend) revoke() { b.key.Store(new(string)) }

func (b *outageBackend) hang() { b.hangs.Store(new(make(chan struct{}))) }

func (b *outageBackend) answer() {
	if over := b.hangs.Swap(nil); over != nil {
		close(*over)
	}
}

func (b *outageBackend) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	_, _ = io.Copy(io.Discard, r.Body)
	if over := b.hangs.Load(); over != nil {
		select {
		case <-*over:
		case <-r.Context().Done():
			return
		}
	}
	w.Header().Set("Content-Type", "application/json")
	if r.Header.Get("Authorization") != "Bearer "+*b.key.Load() {
		w.WriteHeader(http.StatusUnauthorized)
		_, _ = io.WriteString(w, `{"error":{"message":"Incorrect API key provided.","type":"invalid_request_error","param":null,"code":"invalid_api_key"}}`)
		return
	}
	_, _ = io.WriteString(w, `{"id":"chatcmpl-1","object":"chat.completion","choices":[{"index":0,"message":{"role":"assistant","content":"Hello"},`+
		`"finish_reason":"stop"}],"usage":{"prompt_tokens":9,"completion_tokens":1,"total_tokens":10}}`)
}

// issuer is a certificate authority.
type issuer struct {
	certificate *x509.Certificate
	key         *ecdsa.PrivateKey
	pem         []byte
}

func newIssuer(t *testing.T) *issuer {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "issuer"}, NotBefore: time.Now().Add(-72 * time.Hour), NotAfter: time.Now().Add(72 * time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	return &issuer{template, key, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})}
}

// issue issues a certificate that expires then, perhaps in the past.
func (i *issuer) issue(t *testing.T, host string, validFor time.Duration) *tls.Certificate {
	t.Helper()
	template := &x509.Certificate{
		SerialNumber: big.NewInt(2), Subject: pkix.Name{CommonName: host}, DNSNames: []string{host},
		NotBefore: time.Now().Add(-48 * time.Hour), NotAfter: time.Now().Add(validFor),
	}
	der, err := x509.CreateCertificate(rand.Reader, template, i.certificate, &i.key.PublicKey, i.key)
	if err != nil {
		t.Fatal(err)
	}
	return &tls.Certificate{Certificate: [][]byte{der}, PrivateKey: i.key}
}

// zone is a DNS server for some names, which are all at 127.0.0.1.
type zone struct {
	address string
	mu      sync.Mutex
	names   []string
}

func startZone(t *testing.T) *zone {
	t.Helper()
	conn, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	z := &zone{address: conn.LocalAddr().String()}
	go func() {
		packet := make([]byte, 1500)
		for {
			n, from, err := conn.ReadFrom(packet)
			if err != nil {
				return
			}
			if reply := z.reply(packet[:n]); reply != nil {
				_, _ = conn.WriteTo(reply, from)
			}
		}
	}()
	return z
}

func (z *zone) set(name string, known bool) {
	z.mu.Lock()
	defer z.mu.Unlock()
	if z.names = slices.DeleteFunc(z.names, func(n string) bool { return n == name }); known {
		z.names = append(z.names, name)
	}
}

func (z *zone) reply(packet []byte) []byte {
	var query dnsmessage.Message
	if query.Unpack(packet) != nil || len(query.Questions) != 1 {
		return nil
	}
	question := query.Questions[0]
	reply := dnsmessage.Message{Header: dnsmessage.Header{ID: query.ID, Response: true, Authoritative: true, RecursionAvailable: true}, Questions: query.Questions}
	z.mu.Lock()
	known := slices.Contains(z.names, strings.TrimSuffix(question.Name.String(), "."))
	z.mu.Unlock()
	switch {
	case !known:
		reply.RCode = dnsmessage.RCodeNameError
	case question.Type == dnsmessage.TypeA:
		reply.Answers = []dnsmessage.Resource{{
			Header: dnsmessage.ResourceHeader{Name: question.Name, Type: question.Type, Class: question.Class},
			Body:   &dnsmessage.AResource{A: [4]byte{127, 0, 0, 1}},
		}}
	}
	packed, err := reply.Pack()
	if err != nil {
		return nil
	}
	return packed
}

// redisServer is a Redis that can go and come back.
type redisServer struct {
	*testing.T
	address string
	process *exec.Cmd
}

func startRedis(t *testing.T) *redisServer {
	t.Helper()
	addresses, err := freeAddresses(1)
	if err != nil {
		t.Fatal(err)
	}
	r := &redisServer{T: t, address: addresses[0]}
	r.start()
	t.Cleanup(r.stop)
	return r
}

func (r *redisServer) start() {
	r.Helper()
	_, port, _ := net.SplitHostPort(r.address)
	r.process = exec.Command("redis-server", "--bind", "127.0.0.1", "--port", port, "--save", "", "--appendonly", "no")
	r.process.Dir = r.TempDir()
	if err := r.process.Start(); err != nil {
		r.Fatal(err)
	}
	for deadline := time.Now().Add(patience); ; time.Sleep(20 * time.Millisecond) {
		if conn, err := net.Dial("tcp", r.address); err == nil {
			conn.Close()
			return
		} else if time.Now().After(deadline) {
			r.Fatal(err)
		}
	}
}

func (r *redisServer) stop() {
	if r.process != nil {
		_ = r.process.Process.Kill()
		_ = r.process.Wait()
		r.process = nil
	}
}

// each does something with each backend.
func (s *outageSite) each(do func(*outageBackend)) {
	for _, b := range s.backends {
		do(b)
	}
}

// setName puts the name of a backend into the zone, or takes it out. The
// connections that it has end.
func (s *outageSite) setName(backend string, known bool) {
	b := s.backends[backend]
	s.zone.set(b.host(), known)
	b.CloseClientConnections()
}

// reload changes the configuration of the first replica, and reloads it.
func (s *outageSite) reload(before, after string, works bool) {
	s.Helper()
	r := s.replicas[0]
	writeFile(s.T, r.caddyfile, strings.Replace(string(readFile(s.T, r.caddyfile)), before, after, 1))
	reload := exec.CommandContext(s.Context(), s.program, "reload", "--adapter", "caddyfile", "--config", r.caddyfile, "--address", r.admin)
	if output, err := reload.CombinedOutput(); (err == nil) != works {
		s.Fatalf("the reload: %v\n%s", err, output)
	}
}

// setDiskFull has no file of the first replica grow any more, or ends that.
// Nothing has to be mounted for that.
func (s *outageSite) setDiskFull(full bool) {
	s.Helper()
	pid := s.replicas[0].command.Process.Pid
	var limit unix.Rlimit
	err := unix.Prlimit(pid, unix.RLIMIT_FSIZE, nil, &limit)
	if limit.Cur = limit.Max; full {
		limit.Cur = 0
	}
	if err = errors.Join(err, unix.Prlimit(pid, unix.RLIMIT_FSIZE, &limit, nil)); err != nil {
		s.Fatal(err)
	}
}

// load sends requests to all replicas in turn until the test ends. Its clients
// wait for long.
func (s *outageSite) load() {
	ctx, stop := context.WithCancel(s.Context())
	var sent sync.WaitGroup
	client := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 100}}
	send := func(url string) {
		r, err := http.NewRequestWithContext(ctx, http.MethodPost, url+"/v1/chat/completions", strings.NewReader(`{"model":"`+outageModel+`","messages":[]}`))
		if err != nil {
			s.Error(err)
			return
		}
		r.Header.Set("Authorization", "Bearer client-key-of-alice")
		r.Header.Set("Content-Type", "application/json")
		if res, err := client.Do(r); err == nil {
			_, _ = io.Copy(io.Discard, res.Body)
			res.Body.Close()
		}
	}
	sent.Go(func() {
		for n := 0; ctx.Err() == nil; n++ {
			sent.Go(func() { send(s.replicas[n%len(s.replicas)].url) })
			time.Sleep(time.Second / 6)
		}
	})
	s.Cleanup(func() {
		stop()
		sent.Wait()
		client.CloseIdleConnections()
	})
}

// seen is what a person sees of the first replica.
type seen struct {
	problems           []string // of the page as JSON: the sentences that say what happened and what to do
	html, log, command string
	// recent are the rows of the recent list, without their time.
	recent []string
}

var (
	timeOfExpiry = regexp.MustCompile(`\bexpired at \S+Z\b`)
	recentRow    = regexp.MustCompile(`<li><span class="when">[^<]*</span> (<span class="what">.*)</li>`)
	htmlTag      = regexp.MustCompile(`<[^>]*>`)
)

// folderOf returns the folder of a replica.
func (s *outageSite) folderOf(replica int) string {
	return filepath.Join(s.dir, fmt.Sprint("replica-", replica))
}

// look looks at the page, the log and `caddy openai-lb status`. The log begins
// after so many bytes.
func (s *outageSite) look(program string, begin int) (now seen, err error) {
	r := s.replicas[0]
	text, err := getText(r.url + "/status?json")
	if err != nil {
		return now, err
	}
	var page struct {
		Pools []struct {
			Problems []struct {
				Backend, Meaning, Next string
				NeedsOperator          bool `json:"needs_operator"`
			}
		}
	}
	if err := json.Unmarshal([]byte(text), &page); err != nil {
		return now, err
	}
	for _, pool := range page.Pools {
		for _, p := range pool.Problems {
			how := "meanwhile"
			if p.NeedsOperator {
				how = "needs action"
			}
			now.problems = append(now.problems, fmt.Sprintf("%s. %s: %s", strings.TrimSpace(p.Backend+" "+p.Meaning), how, p.Next))
		}
	}
	if now.html, err = getText(r.url + "/status"); err != nil {
		return now, err
	}
	_, recent, _ := strings.Cut(now.html, "<h3>Recent cooldowns and silences</h3>")
	for _, row := range recentRow.FindAllStringSubmatch(recent, -1) {
		now.recent = append(now.recent, htmlTag.ReplaceAllString(row[1], ""))
	}
	now.log = r.output.String()[begin:]
	command, err := exec.CommandContext(s.Context(), program, "openai-lb", "status", "--address", r.admin).CombinedOutput()
	now.command = timeOfExpiry.ReplaceAllString(string(command), "expired at <time>")
	now.html = timeOfExpiry.ReplaceAllString(now.html, "expired at <time>")
	for i := range now.problems {
		now.problems[i] = timeOfExpiry.ReplaceAllString(now.problems[i], "expired at <time>")
	}
	return now, err
}

func getText(url string) (string, error) {
	client := &http.Client{Timeout: patience}
	res, err := client.Get(url)
	if err != nil {
		return "", err
	}
	defer res.Body.Close()
	text, err := io.ReadAll(res.Body)
	if err == nil && res.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s", url, res.Status)
	}
	return string(text), err
}
