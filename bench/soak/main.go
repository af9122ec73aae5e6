// Command soak holds many streams open through the balancer while clients
// leave, a backend throttles and the configuration is reloaded, and compares
// what that costs with a plain reverse_proxy.
package main

import (
	"bufio"
	"bytes"
	"cmp"
	"errors"
	"flag"
	"fmt"
	"io"
	"log"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

var (
	streams = flag.Int("streams", 3000, "how many streams are open at a time")
	length  = flag.Duration("length", 2*time.Minute, "how long each stream lasts")
	leave   = flag.Float64("leave", 0.2, "which share of the clients leaves midway")
	prompt  = flag.Int("prompt", 20<<10, "bytes of a prompt")
)

func main() {
	flag.Parse()
	if !soak() {
		os.Exit(1)
	}
}

// soak holds the streams open through both kinds of proxy.
func soak() (ok bool) {
	dir, err := os.MkdirTemp("", "soak")
	check(err)
	defer os.RemoveAll(dir)
	binary := filepath.Join(dir, "caddy")
	build := exec.Command("go", "build", "-o", binary, "./cmd/caddy")
	build.Dir = ".."
	build.Stderr = os.Stderr
	check(build.Run())

	tokens := int(*length / time.Second)
	simulators := []string{freeAddress(), freeAddress(), freeAddress()}
	var config strings.Builder
	fmt.Fprintf(&config, "{\nadmin off\nlog {\noutput discard\n}\n}\n")
	for i, address := range simulators {
		limit := ""
		if i == 0 {
			limit = "requests_per_minute 600\n" // throttles while the streams begin
		}
		fmt.Fprintf(&config, "http://%s {\nopenai_simulator {\noutput_tokens %d\ntoken_latency 1s\n%s}\n}\n", address, tokens, limit)
	}
	backends := start(binary, dir, "simulators", config.String(), simulators[0])
	defer backends.stop()

	fmt.Printf("%d streams of %s, %.0f %% of the clients leave, prompts of %d bytes\n", *streams, *length, 100**leave, *prompt)
	ok = true
	for _, proxy := range []struct{ name, directive string }{
		{"reverse_proxy", "reverse_proxy " + strings.Join(simulators[1:], " ")},
		{"openai_lb", "openai_lb {\nbackend http://" + simulators[0] + "\nbackend http://" + simulators[1] +
			" {\npriority 2\n}\nbackend http://" + simulators[2] + " {\npriority 2\n}\n}"},
	} {
		ok = run(binary, dir, proxy.name, proxy.directive) && ok
	}
	return ok
}

// run holds the streams open through one kind of proxy, and reports.
func run(binary, dir, name, directive string) (ok bool) {
	address, admin := freeAddress(), freeAddress()
	config := func(n int) string {
		return fmt.Sprintf("{\nadmin %s\nlog {\noutput discard\n}\n}\nhttp://%s {\nheader X-Config %d\n%s\n}\n", admin, address, n, directive)
	}
	proxy := start(binary, dir, name, config(0), address)
	defer proxy.stop()
	proxy.admin = admin
	idle := proxy.usage()

	transport := &http.Transport{MaxIdleConnsPerHost: *streams, DisableCompression: true}
	client := &http.Client{Transport: transport}
	var open, whole, left, lost, throttled atomic.Int64
	var clients sync.WaitGroup
	for n := range *streams {
		clients.Go(func() {
			time.Sleep(time.Duration(n) * 15 * time.Second / time.Duration(*streams))
			open.Add(1)
			defer open.Add(-1)
			stays := time.Duration(0)
			if rand.Float64() < *leave {
				stays = time.Duration(rand.Float64() * float64(*length) * 0.8)
			}
			switch err := stream(client, "http://"+address, stays); {
			case errors.Is(err, errLeft):
				left.Add(1)
			case errors.Is(err, errThrottled):
				throttled.Add(1)
			case err != nil:
				if lost.Add(1) <= 5 {
					fmt.Println("  lost:", err)
				}
			default:
				whole.Add(1)
			}
		})
	}
	time.Sleep(15*time.Second + 5*time.Second)
	busyStreams, busy := open.Load(), proxy.usage()
	for n := range 2 {
		time.Sleep(*length / 5)
		proxy.reload(config(n + 1))
	}
	clients.Wait()
	transport.CloseIdleConnections()
	var after usage
	for range 30 { // the idle connections to the backends end after 90 s
		time.Sleep(5 * time.Second)
		if after = proxy.usage(); after.goroutines <= idle.goroutines+20 && after.files <= idle.files+20 {
			break
		}
	}
	for range 3 { // what sync.Pool keeps goes with the second collection
		after = proxy.usage()
	}
	fmt.Printf("%s:\n  %d whole, %d left by their clients, %d lost, %d refused\n", name, whole.Load(), left.Load(), lost.Load(), throttled.Load())
	fmt.Printf("  idle:   %s\n  open:   %s (%d streams: %.1f KiB each)\n  after:  %s\n", idle, busy, busyStreams,
		float64(busy.memory-idle.memory)/1024/float64(busyStreams), after)
	return lost.Load() == 0 && throttled.Load() == 0
}

var (
	errLeft      = errors.New("the client left")
	errThrottled = errors.New("the client was refused")
)

// stream asks for one stream and reads it to its end, or leaves it after a
// time. A connection that breaks before the reply is tried again, as SDKs do.
func stream(client *http.Client, url string, stays time.Duration) error {
	body := fmt.Sprintf(`{"model":"gpt-4o","stream":true,"messages":[{"role":"user","content":"%s"}]}`, strings.Repeat("x", *prompt))
	var res *http.Response
	var err error
	for range 3 {
		if res, err = client.Post(url+"/v1/chat/completions", "application/json", strings.NewReader(body)); err == nil {
			break
		}
	}
	if err != nil {
		return err
	}
	defer res.Body.Close()
	if res.StatusCode != http.StatusOK {
		return fmt.Errorf("%w: %s", errThrottled, res.Status)
	}
	if stays > 0 {
		timer := time.AfterFunc(stays, func() { res.Body.Close() })
		defer timer.Stop()
	}
	done := false
	lines := bufio.NewScanner(res.Body)
	for lines.Scan() {
		done = done || lines.Text() == "data: [DONE]"
	}
	switch {
	case done:
		return nil
	case stays > 0:
		return errLeft
	}
	return fmt.Errorf("it ended early: %w", cmp.Or(lines.Err(), io.ErrUnexpectedEOF))
}

// process is a Caddy that runs.
type process struct {
	command *exec.Cmd
	admin   string
}

func start(binary, dir, name, config, address string) *process {
	file := filepath.Join(dir, name+".Caddyfile")
	check(os.WriteFile(file, []byte(config), 0o600))
	command := exec.Command(binary, "run", "--adapter", "caddyfile", "--config", file)
	command.Env = append(os.Environ(), "XDG_DATA_HOME="+dir, "XDG_CONFIG_HOME="+dir)
	var output bytes.Buffer
	command.Stdout, command.Stderr = &output, &output
	check(command.Start())
	for range 200 {
		if conn, err := net.Dial("tcp", address); err == nil {
			conn.Close()
			return &process{command: command}
		}
		time.Sleep(50 * time.Millisecond)
	}
	log.Fatalf("%s did not start:\n%s", name, output.String())
	return nil
}

func (p *process) stop() {
	_ = p.command.Process.Kill()
	_ = p.command.Wait()
}

func (p *process) reload(config string) {
	res, err := http.Post("http://"+p.admin+"/load", "text/caddyfile", strings.NewReader(config))
	check(err)
	defer res.Body.Close()
	if res.StatusCode != http.StatusOK {
		text, _ := io.ReadAll(res.Body)
		log.Panicf("reload: %s %s", res.Status, text)
	}
}

// usage is what a process holds.
type usage struct {
	memory, goroutines, files int64
}

func (u usage) String() string {
	return fmt.Sprintf("%.1f MiB of heap and stacks, %d goroutines, %d files", float64(u.memory)/(1<<20), u.goroutines, u.files)
}

var numbers = regexp.MustCompile(`# (HeapAlloc|Stack) = (\d+)|goroutine profile: total (\d+)`)

func (p *process) usage() usage {
	var u usage
	for _, profile := range []string{"heap?gc=1&debug=1", "goroutine?debug=1"} {
		res, err := http.Get("http://" + p.admin + "/debug/pprof/" + profile)
		check(err)
		text, err := io.ReadAll(res.Body)
		res.Body.Close()
		check(err)
		for _, m := range numbers.FindAllStringSubmatch(string(text), -1) {
			n, _ := strconv.ParseInt(m[2]+m[3], 10, 64)
			if m[3] != "" {
				u.goroutines = n
			} else {
				u.memory += n
			}
		}
	}
	files, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", p.command.Process.Pid))
	check(err)
	u.files = int64(len(files))
	return u
}

func freeAddress() string {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	check(err)
	defer l.Close()
	return l.Addr().String()
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
