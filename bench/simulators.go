package main

import (
	"cmp"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"time"
)

// simulators are the processes of a scenario: the n-th one is the n-th
// deployment of every contender, so that all of them fall silent together.
type simulators struct {
	processes []*process
	upstreams [][]upstream // of each contender
}

func (b *bench) startSimulators(s worthScenario, part float64) (sims *simulators, err error) {
	sims = &simulators{upstreams: make([][]upstream, len(b.contenders))}
	port := freePort()
	for n, d := range s.deployments {
		scaled := func(d time.Duration) time.Duration { return time.Duration(part * float64(d)) }
		options := d.options + fmt.Sprintf("\nfirst_token_latency %s", cmp.Or(scaled(s.latency), latency))
		if s.p95 > 0 {
			options += fmt.Sprintf("\nfirst_token_latency_p95 %s", scaled(s.p95))
		}
		if s.silence > 0 && n == 0 {
			options += fmt.Sprintf("\nfault silent for %s every %s", scaled(s.silence), scaled(s.round))
		}
		config := "{\nadmin off\nauto_https off\nlog {\nlevel ERROR\n}\n}\n"
		for c := range b.contenders {
			host := fmt.Sprintf("127.0.%d.%d", 10+c, n+1)
			sims.upstreams[c] = append(sims.upstreams[c], newUpstream(host, port, d.priority))
			config += fmt.Sprintf("http://:%d {\nbind %s\nopenai_simulator {\nname s%d\napi_key %s\noutput_tokens %d\nearly_grace %s\n%s\n}\n}\n",
				port, host, n, backendKey, maxTokens, grace, options)
		}
		name := fmt.Sprintf("simulator%d", n)
		dir := filepath.Join(b.tools.dir, name)
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return sims, err
		}
		if err := os.WriteFile(dir+"/Caddyfile", []byte(config), 0o600); err != nil {
			return sims, err
		}
		p, err := start(name, dir, caddyEnv(setup{Dir: dir}), caddyRun(b.tools, setup{Dir: dir})...)
		if err != nil {
			return sims, err
		}
		sims.processes = append(sims.processes, p)
		if err := p.listening(sims.upstreams[0][n].Address); err != nil {
			return sims, err
		}
	}
	return sims, nil
}

func (s *simulators) stop() {
	for _, p := range s.processes {
		p.stop()
	}
}

// status has the counters of a contender's simulators.
type status struct{ requests, early, admittedPaid float64 }

func (s *simulators) status(contender int, deployments []deployment) (sum status, err error) {
	for n, u := range s.upstreams[contender] {
		res, err := http.Get("http://" + u.Address + "/_simulator/status")
		if err != nil {
			return sum, err
		}
		var one struct{ Requests, Early, Admitted float64 }
		err = json.NewDecoder(res.Body).Decode(&one)
		res.Body.Close()
		if err != nil {
			return sum, err
		}
		sum.requests += one.Requests
		sum.early += one.Early
		if deployments[n].paid > 0 {
			sum.admittedPaid += one.Admitted
		}
	}
	return sum, nil
}

// reset forgets all that the simulators of a contender have counted.
func (s *simulators) reset(contender int) error {
	for _, u := range s.upstreams[contender] {
		res, err := http.Post("http://"+u.Address+"/_simulator/status", "", nil)
		if err != nil {
			return err
		}
		res.Body.Close()
	}
	return nil
}
