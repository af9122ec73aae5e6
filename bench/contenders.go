package main

import (
	"cmp"
	"embed"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"text/template"
)

//go:embed contenders
var configs embed.FS

const (
	backendKey = "backend-key"
	clientKey  = "sk-client-key-of-bench"
	model      = "gpt-4o"
	// renamedModel is the model's name at the backends, where the name is to be
	// replaced.
	renamedModel = "gpt-4o-eastus2-large"
	// sdkTimeout is the default, in seconds, of OpenAI's SDK for Python, of
	// which Microsoft's balancer is made to be the transport.
	sdkTimeout  = 600
	bifrostHTTP = "BIFROST_HTTP" // names a program
)

// contender is something that people put between clients and deployments.
type contender struct {
	name  string
	about string
	// ready finds what it needs, and returns its version, or what is missing.
	ready func(t tools) (version string, err error)
	// argv is the command that runs it, and env what that finds in its
	// environment, besides the configuration in contenders/<name>.
	argv func(t tools, s setup) []string
	env  func(s setup) []string
	// isGo, hasTLS and streams say what can be measured of it. It fails over if
	// it sends a request again after a 429.
	isGo, hasTLS, streams, failsOver bool
	checksKeys                       bool   // refuses clients without a key
	provider                         string // what it wants before the name of a model
	// perRequest says that its configuration comes with each request.
	perRequest bool
	// wait is its option of that name. It takes part only where requests come
	// at random then.
	wait string
	// files is the folder of its configuration in contenders. Empty: its name.
	files string
}

// The balancer that this is about, and what all are compared with.
const (
	ours     = "openai_lb"
	plain    = "caddy"
	bestRest = "caddy_best"
)

var contenders = []contender{
	{
		name: ours, about: "this module", ready: caddyReady, argv: caddyRun, env: caddyEnv,
		isGo: true, hasTLS: true, streams: true, failsOver: true, checksKeys: true,
	},
	{
		name: ours + "_wait", about: "this module with `wait 2s`", ready: caddyReady, argv: caddyRun, env: caddyEnv,
		isGo: true, hasTLS: true, streams: true, failsOver: true, checksKeys: true, wait: "2s", files: ours,
	},
	{
		name: plain, about: "Caddy's reverse_proxy: random, request_buffers, one header_up",
		ready: caddyReady, argv: caddyRun, env: caddyEnv, isGo: true, hasTLS: true, streams: true, checksKeys: true,
	},
	{
		name: bestRest, about: "the best that Caddy's reverse_proxy can do: passive health and lb_retry_match besides",
		ready: caddyReady, argv: caddyRun, env: caddyEnv, isGo: true, hasTLS: true, streams: true, failsOver: true,
	},
	{
		name: "httputil", about: "a bare httputil.ReverseProxy of Go's, random",
		ready: func(t tools) (string, error) { return output(`go(\S+)`, "go", "version") },
		argv: func(t tools, s setup) []string {
			return []string{
				t.httputil, "-address", s.Address, "-tls-address", s.TLSAddress, "-admin", s.Admin,
				"-cert", s.Cert, "-cert-key", s.CertKey, "-key", s.Key, "-backends", s.addresses(","),
			}
		},
		isGo: true, hasTLS: true, streams: true,
	},
	{
		name: "nginx", about: "Debian's nginx: passive health, proxy_next_upstream",
		ready: func(tools) (string, error) { return output(`nginx/(\S+)`, "nginx", "-v") },
		argv: func(_ tools, s setup) []string {
			return []string{"nginx", "-p", s.Dir, "-c", s.Dir + "/nginx.conf"}
		},
		hasTLS: true, streams: true, failsOver: true,
	},
	{
		name: "haproxy", about: "Debian's HAProxy: passive health, retry-on (5xx and timeouts; this version knows no 429 there)",
		ready:  func(tools) (string, error) { return output(`version (\S+)`, "haproxy", "-v") },
		argv:   func(_ tools, s setup) []string { return []string{"haproxy", "-db", "-f", s.Dir + "/haproxy.cfg"} },
		hasTLS: true, streams: true,
	},
	{
		name: "portkey", about: "Portkey's gateway: fallback over load-balanced targets (streams end in a 500 with this package, under Node 20 and 24)",
		ready: func(t tools) (string, error) {
			return t.install("portkey", "node_modules/@portkey-ai/gateway/package.json", `"version": "(.*)"`,
				"npm", "install", "--silent", "--no-audit", "--no-fund", "@portkey-ai/gateway@1.15.2")
		},
		argv: func(t tools, s setup) []string {
			return []string{"node", t.cache + "/portkey/node_modules/@portkey-ai/gateway/build/start-server.js",
				"--headless", "--port=" + s.port()}
		},
		env: func(s setup) []string {
			var hosts []string
			for _, b := range s.Backends {
				hosts = append(hosts, b.Host)
			}
			return []string{"NODE_ENV=production", "TRUSTED_CUSTOM_HOSTS=" + strings.Join(hosts, ",")}
		},
		failsOver: true, perRequest: true,
	},
	{
		name: "litellm", about: "LiteLLM's proxy: simple-shuffle, order, retries, cooldowns, production mode",
		ready: func(t tools) (string, error) { return t.installPython("litellm", "litellm", "litellm[proxy]==1.106.2") },
		argv: func(t tools, s setup) []string {
			return []string{t.cache + "/litellm/bin/litellm", "--config", s.Dir + "/config.yaml", "--host", "127.0.0.1",
				"--port", s.port()}
		},
		env: func(setup) []string {
			return []string{"LITELLM_MODE=PRODUCTION", "LITELLM_LOG=ERROR", "LITELLM_LOCAL_MODEL_COST_MAP=True",
				"AIOHTTP_CONNECTOR_LIMIT=10000", "AIOHTTP_CONNECTOR_LIMIT_PER_HOST=10000"}
		},
		streams: true, failsOver: true, checksKeys: true,
	},
	{
		name: "bifrost", about: "Bifrost's gateway, the program that BIFROST_HTTP names: a key of its provider azure for each deployment, with weights; it has no priorities of keys",
		ready: func(tools) (string, error) {
			program, err := exec.LookPath(os.Getenv(bifrostHTTP))
			if err != nil {
				return "", fmt.Errorf("name the program bifrost-http in %s: %w", bifrostHTTP, err)
			}
			version, _ := output(`main\.Version=(\S+?)["\s]`, "go", "version", "-m", program)
			return version, nil
		},
		argv: func(_ tools, s setup) []string {
			return []string{os.Getenv(bifrostHTTP), "-app-dir", s.Dir, "-host", "127.0.0.1", "-port", s.port(),
				"-log-level", "error"}
		},
		streams: true, failsOver: true, provider: "azure/",
	},
	{
		name: "microsoft", about: "Microsoft's openai-priority-loadbalancer, with uvicorn before it",
		ready: func(t tools) (string, error) {
			return t.installPython("microsoft", "openai_priority_loadbalancer",
				"openai_priority_loadbalancer==1.1.1", "uvicorn==0.54.0", "uvloop", "httptools", "httpx==0.28.1")
		},
		argv: func(t tools, s setup) []string {
			return []string{t.cache + "/microsoft/bin/uvicorn", "app:app", "--no-access-log", "--log-level", "error",
				"--port", s.port()}
		},
		env: func(s setup) []string {
			var backends []string
			for _, b := range s.Backends {
				backends = append(backends, fmt.Sprintf("%s=%d", b.Host, b.Priority))
			}
			return []string{
				"BACKENDS=" + strings.Join(backends, " "), "BACKEND_PORT=" + s.Backends[0].Port, "BACKEND_KEY=" + s.Key,
				"TIMEOUT=" + strconv.Itoa(cmp.Or(s.HeaderTimeout, sdkTimeout)),
			}
		},
		failsOver: true,
	},
}

func caddyReady(t tools) (string, error) {
	return output(`(?s)github.com/caddyserver/caddy/v2\s+(\S+)`, "go", "version", "-m", t.caddy)
}

func caddyRun(t tools, s setup) []string {
	return []string{t.caddy, "run", "--adapter", "caddyfile", "--config", s.Dir + "/Caddyfile"}
}

func caddyEnv(s setup) []string {
	return []string{"XDG_DATA_HOME=" + s.Dir, "XDG_CONFIG_HOME=" + s.Dir}
}

// setup has the settings of a contender. Its fields fill in the configurations.
type setup struct {
	Dir                 string // for its files
	Address, TLSAddress string // where it listens
	RenamingAddress     string // where openai_lb listens and renames the model
	Admin               string // where a Go program reports on itself
	Cert, CertKey       string
	Key                 string // what the backends ask for
	ClientKey           string
	Model, Renamed      string // of the model
	Backends            []upstream
	// Cooldown is for how many seconds it leaves a backend alone that does not
	// say for how long: what the operator of these backends would choose. With
	// 0, it forgets at once.
	Cooldown int
	// Longest is how long a backend may ask to be left alone, in seconds.
	Longest int
	// HeaderTimeout is how many seconds a backend has to begin its reply. 0:
	// the contender's default.
	HeaderTimeout int
	ChecksKeys    bool   // refuse others than ClientKey, and have metrics
	Wait          string // how long requests may wait. Empty: not at all
}

// upstream is a backend as contenders are told of it. All backends of a setup
// have one port, each on an address of its own, for Microsoft's balancer takes
// no ports.
type upstream struct {
	Address, Host, Port string
	Priority            int
}

func newUpstream(host string, port, priority int) upstream {
	p := strconv.Itoa(port)
	return upstream{Address: net.JoinHostPort(host, p), Host: host, Port: p, Priority: priority}
}

// Retries is how often a request may be sent again: once to every backend.
func (s setup) Retries() int { return max(1, len(s.Backends)-1) }

// Tiers says whether some backends are to be preferred to others.
func (s setup) Tiers() bool {
	return slices.ContainsFunc(s.Backends, func(b upstream) bool { return b.Priority > s.Backends[0].Priority })
}

// Attempts is where each attempt of a request may go.
func (s setup) Attempts() (attempts [][]upstream) {
	for _, b := range s.Backends {
		attempts = append(attempts, slices.DeleteFunc(slices.Clone(s.Backends), func(other upstream) bool {
			return other.Priority != b.Priority
		}))
	}
	return attempts
}

func (s setup) port() string {
	_, port, _ := net.SplitHostPort(s.Address)
	return port
}

func (s setup) addresses(separator string) string {
	var all []string
	for _, b := range s.Backends {
		all = append(all, b.Address)
	}
	return strings.Join(all, separator)
}

// running is a contender that runs.
type running struct {
	contender
	*process
	setup   setup
	headers map[string]string // what its clients send
}

// naming returns a body in which the model has the name that the contender
// wants.
func (r *running) naming(body string) string {
	return strings.Replace(body, `"model":"`, `"model":"`+r.provider, 1)
}

// run starts a contender, and waits until it is there.
func (c contender) run(t tools, s setup) (*running, error) {
	s.Dir = filepath.Join(t.dir, c.name)
	s.Address, s.TLSAddress = fmt.Sprintf("127.0.0.1:%d", freePort()), fmt.Sprintf("127.0.0.1:%d", freePort())
	s.RenamingAddress = fmt.Sprintf("127.0.0.1:%d", freePort())
	s.Key, s.ClientKey, s.Model, s.Renamed = backendKey, clientKey, model, renamedModel
	s.Cert, s.CertKey, s.Wait = t.cert, t.cert+".key", c.wait
	if c.isGo {
		s.Admin = fmt.Sprintf("127.0.0.1:%d", freePort())
	}
	if err := c.configure(s); err != nil {
		return nil, err
	}
	var env []string
	if c.env != nil {
		env = c.env(s)
	}
	p, err := start(c.name, s.Dir, env, c.argv(t, s)...)
	if err != nil {
		return nil, err
	}
	p.admin = s.Admin
	if err := p.listening(s.Address); err != nil {
		return nil, err
	}
	r := &running{contender: c, process: p, setup: s, headers: map[string]string{
		"Authorization": "Bearer " + clientKey, "Content-Type": "application/json",
	}}
	if c.perRequest {
		config, err := os.ReadFile(filepath.Join(s.Dir, "config.json"))
		if err != nil {
			return nil, err
		}
		var compact any
		if err := json.Unmarshal(config, &compact); err != nil {
			return nil, err
		}
		config, _ = json.Marshal(compact)
		r.headers["x-portkey-config"] = string(config)
	}
	return r, nil
}

// configure writes a contender's files, filled in.
func (c contender) configure(s setup) error {
	if err := os.MkdirAll(s.Dir, 0o700); err != nil {
		return err
	}
	files, err := template.ParseFS(configs, "contenders/"+cmp.Or(c.files, c.name)+"/*")
	if err != nil {
		return err
	}
	for _, f := range files.Templates() {
		out, err := os.Create(filepath.Join(s.Dir, f.Name()))
		if err != nil {
			return err
		}
		if err := f.Execute(out, s); err != nil {
			return err
		}
		if err := out.Close(); err != nil {
			return err
		}
	}
	return nil
}

// runAll starts contenders at the same time, each with its own setup, and says
// which of them do not start.
func (b *bench) runAll(which []contender, setupOf func(n int) setup) (all []*running) {
	started, errs := make([]*running, len(which)), make([]error, len(which))
	var done sync.WaitGroup
	for n, c := range which {
		done.Go(func() { started[n], errs[n] = c.run(b.tools, setupOf(n)) })
	}
	done.Wait()
	for n, err := range errs {
		if err != nil {
			b.problem("%s is left out: %s", which[n].name, err)
		}
	}
	return slices.DeleteFunc(started, func(r *running) bool { return r == nil })
}

func stopAll(all []*running) {
	for _, r := range all {
		r.stop()
	}
}
