// Command instructions counts how many instructions a chat costs in builds of
// Caddy, and in a plain reverse_proxy of the last one.
//
// Each build runs in QEMU's user mode, with a plugin that counts. The counts of
// packages that serve a request are the same in each run, even on a busy
// machine, so a change of one percent is visible. What runs by the clock counts
// more if the machine is slow: timers of the runtime, and the bill, which is
// written once a second. The counts say nothing of caches and of the kernel:
// for these, see the other benchmarks. A build must have symbols (no
// -ldflags=-s).
//
//	go run ./instructions before/caddy after/caddy
//
// It needs Linux on amd64, qemu-user and gcc.
package main

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"debug/elf"
	_ "embed"
	"errors"
	"flag"
	"fmt"
	"io"
	"log"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"
)

//go:embed plugin/count.c
var plugin []byte

var (
	requests = flag.Int("requests", 1000, "how many requests are measured")
	stream   = flag.Bool("stream", false, "measure streams of 50 events")
	rows     = flag.Int("rows", 30, "how many packages are listed")
)

func main() {
	flag.Parse()
	if flag.NArg() == 0 {
		log.Fatal("expected the paths of builds of Caddy")
	}
	if err := run(flag.Args()); err != nil {
		log.Fatal(err)
	}
}

// run measures the builds, and prints a table with a column for each.
func run(builds []string) error {
	folder, err := os.MkdirTemp("", "instructions")
	if err != nil {
		return err
	}
	defer os.RemoveAll(folder)
	source, library := filepath.Join(folder, "count.c"), filepath.Join(folder, "count.so")
	if err := os.WriteFile(source, plugin, 0o600); err != nil {
		return err
	}
	//nolint:gosec // it is our own source
	if out, err := exec.Command("gcc", "-shared", "-fPIC", "-O2", "-o", library, source).CombinedOutput(); err != nil {
		return fmt.Errorf("gcc: %w\n%s", err, out)
	}
	upstream := httptest.NewServer(http.HandlerFunc(reply))
	defer upstream.Close()
	var columns []map[string]float64
	names := slices.Clone(builds)
	for _, build := range builds {
		column, err := measure(folder, library, build, fmt.Sprintf(balanced, upstream.URL, upstream.URL))
		if err != nil {
			return fmt.Errorf("%s: %w", build, err)
		}
		columns = append(columns, column)
	}
	plain, err := measure(folder, library, builds[len(builds)-1], fmt.Sprintf(proxied, upstream.URL, upstream.URL))
	if err != nil {
		return err
	}
	printTable(append(names, "reverse_proxy"), append(columns, plain))
	return nil
}

const (
	// balanced and proxied are the sites that are compared.
	balanced = `	openai_lb {
		backend %s {
			auth api_key
			api_key key-of-backend-1
		}
		backend %s {
			auth api_key
			api_key key-of-backend-2
		}
	}`
	proxied = `	reverse_proxy %s %s {
		request_buffers 32MiB
		header_up Api-Key key-of-backend
		lb_retries 1
	}`
	config = `{
	admin off
	auto_https off
	persist_config off
	log {
		level ERROR
	}
}
http://%s {
%s
}
`
	// warmUp is how many requests pass before the measured ones.
	warmUp = 300
)

// measure returns how many instructions a request takes, by package. It takes
// the difference between a short and a long run, so that the start of the
// program does not count.
func measure(folder, library, build, site string) (map[string]float64, error) {
	short, err := count(folder, library, build, site, warmUp)
	if err != nil {
		return nil, err
	}
	long, err := count(folder, library, build, site, warmUp+*requests)
	if err != nil {
		return nil, err
	}
	for name, n := range short {
		long[name] -= n
	}
	for name := range long {
		long[name] /= float64(*requests)
	}
	return long, nil
}

// count runs a build while it gets n requests, and returns its instructions by
// package. Garbage is not collected, because that happens at any time.
func count(folder, library, build, site string, n int) (map[string]float64, error) {
	address, err := freeAddress()
	if err != nil {
		return nil, err
	}
	caddyfile, counts := filepath.Join(folder, "Caddyfile"), filepath.Join(folder, "counts")
	if err := os.WriteFile(caddyfile, fmt.Appendf(nil, config, address, site), 0o600); err != nil {
		return nil, err
	}
	var output bytes.Buffer
	//nolint:gosec // a person named the build
	cmd := exec.Command("qemu-x86_64", "-cpu", "max", "-plugin", library, build, "run", "--config", caddyfile)
	cmd.Env = append(os.Environ(), "COUNTS="+counts, "GOMAXPROCS=1", "GOGC=off",
		"XDG_DATA_HOME="+folder, "XDG_CONFIG_HOME="+folder)
	cmd.Stdout, cmd.Stderr = &output, &output
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	err = errors.Join(send("http://"+address+"/v1/chat/completions", n), cmd.Process.Signal(syscall.SIGTERM))
	if ended := cmd.Wait(); err != nil {
		return nil, fmt.Errorf("%w (%w)\n%s", err, ended, output.Bytes())
	}
	return byPackage(build, counts)
}

func freeAddress() (string, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	defer l.Close()
	return l.Addr().String(), nil
}

// send sends n requests, one after the other, as soon as Caddy listens.
func send(url string, n int) error {
	body := fmt.Sprintf(`{"model":"gpt-4o-mini","stream":%t,"messages":[{"role":"user","content":%q}]}`, *stream,
		strings.Repeat("What is the first letter of the alphabet? ", 40))
	for end := time.Now().Add(time.Minute); ; time.Sleep(100 * time.Millisecond) {
		err := post(url, body)
		if err == nil {
			break
		}
		if !errors.Is(err, syscall.ECONNREFUSED) || time.Now().After(end) {
			return err
		}
	}
	for range n - 1 {
		if err := post(url, body); err != nil {
			return err
		}
	}
	return nil
}

func post(url, body string) error {
	r, err := http.NewRequestWithContext(context.Background(), http.MethodPost, url, strings.NewReader(body))
	if err != nil {
		return err
	}
	r.Header.Set("Content-Type", "application/json")
	r.Header.Set("Authorization", "Bearer client-key")
	res, err := http.DefaultClient.Do(r)
	if err != nil {
		return err
	}
	defer res.Body.Close()
	if _, err := io.Copy(io.Discard, res.Body); err != nil {
		return err
	}
	if res.StatusCode != http.StatusOK {
		return fmt.Errorf("got status %d", res.StatusCode)
	}
	return nil
}

// reply answers as a backend does.
func reply(w http.ResponseWriter, r *http.Request) {
	_, _ = io.Copy(io.Discard, r.Body)
	if !*stream {
		w.Header().Set("Content-Type", "application/json")
		_, _ = io.WriteString(w, `{"id":"chatcmpl-123","object":"chat.completion","created":1677652288,"model":"gpt-4o-mini",`+
			`"choices":[{"index":0,"message":{"role":"assistant","content":"It is the letter A."},"finish_reason":"stop"}],`+
			`"usage":{"prompt_tokens":420,"completion_tokens":6,"total_tokens":426}}`)
		return
	}
	w.Header().Set("Content-Type", "text/event-stream")
	for range 50 {
		_, _ = io.WriteString(w, `data: {"id":"chatcmpl-123","object":"chat.completion.chunk","created":1677652288,"model":"gpt-4o-mini",`+
			`"choices":[{"index":0,"delta":{"content":"Hello"},"finish_reason":null}]}`+"\n\n")
	}
	_, _ = io.WriteString(w, "data: [DONE]\n\n")
}

// byPackage adds up the counts that the plugin has written.
func byPackage(build, counts string) (map[string]float64, error) {
	symbols, err := functions(build)
	if err != nil {
		return nil, err
	}
	file, err := os.Open(counts) //nolint:gosec // it is ours
	if err != nil {
		return nil, err
	}
	defer file.Close()
	sums := make(map[string]float64)
	for lines := bufio.NewScanner(file); lines.Scan(); {
		var address, length, n uint64
		if _, err := fmt.Sscanf(lines.Text(), "%x %d %d", &address, &length, &n); err != nil {
			return nil, err
		}
		i, found := slices.BinarySearchFunc(symbols, address,
			func(s elf.Symbol, at uint64) int { return cmp.Compare(s.Value, at) })
		if !found {
			i--
		}
		name := "?"
		if i >= 0 && address < symbols[i].Value+max(1, symbols[i].Size) {
			name = packageOf(symbols[i].Name)
		}
		sums[name] += float64(length * n)
	}
	return sums, nil
}

// functions returns the functions of a build, by address.
func functions(build string) ([]elf.Symbol, error) {
	file, err := elf.Open(build)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	symbols, err := file.Symbols()
	if err != nil {
		return nil, err
	}
	symbols = slices.DeleteFunc(symbols, func(s elf.Symbol) bool { return elf.ST_TYPE(s.Info) != elf.STT_FUNC })
	slices.SortFunc(symbols, func(a, b elf.Symbol) int { return cmp.Compare(a.Value, b.Value) })
	return symbols, nil
}

// packageOf returns the package of a function. Those of the runtime are in
// several packages, and are assembly without one.
func packageOf(function string) string {
	name, _, _ := strings.Cut(function, "[")
	slash := strings.LastIndexByte(name, '/') + 1
	folder, last := name[:slash], name[slash:]
	last, _, hasPackage := strings.Cut(last, ".")
	switch name = folder + last; {
	case !hasPackage, strings.HasPrefix(name, "internal/runtime"), strings.HasPrefix(name, "runtime"):
		return "runtime"
	}
	return name
}

// printTable prints the sums of all packages, and the packages with the most
// instructions.
func printTable(names []string, columns []map[string]float64) {
	line := func(name string, cell func(column map[string]float64) float64) {
		fmt.Printf("%-60s", name)
		for _, column := range columns {
			fmt.Printf(" %10.0f", cell(column))
		}
		fmt.Println()
	}
	for i, name := range names {
		fmt.Printf("column %d: %s\n", i+1, name)
	}
	sum := func(without string) func(map[string]float64) float64 {
		return func(column map[string]float64) (sum float64) {
			for name, n := range column {
				if name != without {
					sum += n
				}
			}
			return sum
		}
	}
	line("all", sum(""))
	line("all without the runtime", sum("runtime"))
	last := columns[len(columns)-2]
	packages := slices.SortedFunc(maps.Keys(last), func(a, b string) int { return cmp.Compare(last[b], last[a]) })
	for _, name := range packages[:min(len(packages), *rows)] {
		line(name, func(column map[string]float64) float64 { return column[name] })
	}
}
