package e2e

import (
	"cmp"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

// outage is something that goes wrong, and what an operator sees of it.
type outage struct {
	name       string
	begin, end func(*outageSite)
	// problems are sentences that say what has happened, and what to do. The
	// page as JSON has these and no others, and the page as HTML and the
	// command have each. "<time>" stands for a time, and "<dir>" for the folder
	// of the first replica.
	problems []string
	// log are parts of lines that say what has happened, and over those that
	// say that it is over: all of a list are in a line.
	log, over [][]string
	// recent are the beginnings of rows of the recent list of the page after
	// the outage, of which each says that it is over.
	recent []string
	// alerts fire, and no others.
	alerts []string
	// redis reports whether there are two replicas with a Redis, and browser
	// whether a browser looks, too.
	redis, browser bool
}

const (
	silentNext  = "meanwhile: One request tries it after 1, 2, 4, 8 and then every 16 s. If it stays silent, check the status page of the provider."
	expiredNext = "needs action: Renew its certificate, or trust the issuer with tls_trust_pool."
	dnsNext     = "needs action: Correct the host in its URL, or the DNS zone or resolver."
	diskNext    = "needs action: Free space on the disk, or fix the disk or the storage. A restart now loses what is not saved."
	keyNext     = "needs action: Replace its key with a valid one."
)

var outages = []outage{
	{
		name:     "one backend hangs",
		begin:    func(s *outageSite) { s.backends["east"].hang() },
		end:      func(s *outageSite) { s.backends["east"].answer() },
		problems: []string{"east accepts requests and sends nothing. " + silentNext},
		log:      [][]string{{`"backend silent"`, `"east"`}},
		over:     [][]string{{`"backend answers again"`, `"east"`}},
		recent:   []string{"east silent, " + outageModel},
		alerts:   []string{"OpenAILBBackendSilent"},
	},
	{
		name:     "a certificate has expired",
		begin:    func(s *outageSite) { s.certify(s.backends["east"], -time.Hour) },
		end:      func(s *outageSite) { s.certify(s.backends["east"], time.Hour) },
		problems: []string{"east has a certificate that is not accepted: it expired at <time>. " + expiredNext},
		log:      [][]string{{`"error"`, `"cooldown started"`, `"east"`, `"certificate"`, "expired"}},
		over:     [][]string{{`"cooldown ended"`, `"east"`, `"unreachable"`}},
		recent:   []string{"east unreachable: "},
		alerts:   []string{"OpenAILBBackendMisconfigured", "OpenAILBBackendUnreachable"},
	},
	{
		name:  "all backends hang",
		begin: func(s *outageSite) { s.each((*outageBackend).hang) },
		end:   func(s *outageSite) { s.each((*outageBackend).answer) },
		problems: slices.Concat([]string{
			"no backend is available. needs action: Solve the problems of its backends.",
			"requests wait and get no byte. needs action: See which backends hang, and check the status page of their provider. Add or resume other backends.",
		}, of(outageBackends, "accepts requests and sends nothing. "+silentNext)),
		log: [][]string{
			{`"backend silent"`, `"east"`}, {`"backend silent"`, `"last"`},
			{`"error"`, `"no backend is available"`, outageModel, `"next"`}, {`"error"`, `"requests wait and get no byte"`, `"next"`},
		},
		over: [][]string{
			{`"backend answers again"`, `"east"`}, {`"backend answers again"`, `"last"`},
			{`"info"`, `"a backend is available again"`, outageModel, `"seconds"`}, {`"info"`, `"requests no longer wait"`, `"seconds"`},
		},
		recent: []string{"no backend is available, " + outageModel, "requests wait and get no byte", "east silent, " + outageModel},
		alerts: []string{"OpenAILBBackendSilent", "OpenAILBModelNotServed", "OpenAILBNoFirstByte"},
	},
	{
		name:     "a name is gone from DNS",
		begin:    func(s *outageSite) { s.setName("east", false) },
		end:      func(s *outageSite) { s.setName("east", true) },
		problems: []string{"east has a host name without an address: there is no such name. " + dnsNext},
		log:      [][]string{{`"error"`, `"cooldown started"`, `"east"`, `"dns"`, "no such host"}},
		over:     [][]string{{`"cooldown ended"`, `"east"`, `"unreachable"`}},
		recent:   []string{"east unreachable: "},
		alerts:   []string{"OpenAILBBackendMisconfigured", "OpenAILBBackendUnreachable"},
	},
	{
		name:     "a key is revoked",
		begin:    func(s *outageSite) { s.backends["east"].revoke() },
		end:      func(s *outageSite) { s.giveKey(s.backends["east"], "second-key-of-east") },
		problems: []string{"east refuses its key. " + keyNext},
		log:      [][]string{{`"error"`, `"cooldown started"`, `"east"`, `"credential"`, "401"}},
		over:     [][]string{{`"cooldown ended"`, `"east"`, `"credential"`}},
		alerts:   []string{"OpenAILBCredentialRefused"},
	},
	{
		name:     "Redis is gone",
		begin:    func(s *outageSite) { s.redis.stop() },
		end:      func(s *outageSite) { s.redis.start() },
		problems: []string{"not connected to other replicas. meanwhile: This replica works on its own, and tries to connect. See whether it reaches the engine of state."},
		log:      [][]string{{`"warn"`, `"not connected to other replicas"`}},
		over:     [][]string{{`"connected to other replicas"`, `"seconds"`}},
		alerts:   []string{"OpenAILBReplicaNotConnected"},
		redis:    true,
	},
	{
		name:  "the disk is full",
		begin: func(s *outageSite) { s.setDiskFull(true) },
		end:   func(s *outageSite) { s.setDiskFull(false) },
		problems: []string{
			"not saved: the bill, in <dir>/storage. " + diskNext, "not saved: the journal of the bill, in <dir>/storage/openai_lb/journal. " + diskNext,
			"not saved: the use of limits, in <dir>/storage. " + diskNext,
		},
		log:    [][]string{{`"error"`, "could not save", "file too large"}},
		over:   [][]string{{`"info"`, `"storage works again"`, `"bill"`}, {`"info"`, "journal is written again"}},
		alerts: []string{"OpenAILBNotSaved"},
	},
	{
		name:     "a reload is wrong",
		begin:    func(s *outageSite) { s.reload("/east-key}", "/esat-key}\nweight 2", false) },
		end:      func(s *outageSite) { s.reload("/esat-key}", "/east-key}", true) },
		problems: []string{"the latest configuration could not be loaded. needs action: The log says what is wrong with it. Correct it, and reload, or go back with reload --force. A restart now would fail."},
		log:      [][]string{{`"error"`, "esat-key"}},
		over:     [][]string{{`"load complete"`}},
		alerts:   []string{"OpenAILBReloadFailed"},
	},
	{
		name: "four at once",
		begin: func(s *outageSite) {
			s.backends["east"].hang()
			s.certify(s.backends["west"], -time.Hour)
			s.backends["north"].revoke()
			s.setName("south", false)
		},
		end: func(s *outageSite) {
			s.backends["east"].answer()
			s.certify(s.backends["west"], time.Hour)
			s.giveKey(s.backends["north"], "second-key-of-north")
			s.setName("south", true)
		},
		problems: []string{
			"east accepts requests and sends nothing. " + silentNext,
			"west has a certificate that is not accepted: it expired at <time>. " + expiredNext,
			"north refuses its key. " + keyNext,
			"south has a host name without an address: there is no such name. " + dnsNext,
		},
		log: [][]string{
			{`"backend silent"`, `"east"`}, {`"error"`, `"cooldown started"`, `"west"`, `"certificate"`},
			{`"error"`, `"cooldown started"`, `"north"`, `"credential"`}, {`"error"`, `"cooldown started"`, `"south"`, `"dns"`},
		},
		over: [][]string{
			{`"backend answers again"`, `"east"`}, {`"cooldown ended"`, `"west"`},
			{`"cooldown ended"`, `"north"`}, {`"cooldown ended"`, `"south"`},
		},
		alerts:  []string{"OpenAILBBackendMisconfigured", "OpenAILBBackendSilent", "OpenAILBBackendUnreachable", "OpenAILBCredentialRefused"},
		browser: true,
	},
}

// of returns a sentence about each of them.
func of(names []string, what string) (sentences []string) {
	for _, name := range names {
		sentences = append(sentences, name+" "+what)
	}
	return sentences
}

// TestEachOutageIsSeenAndSoIsItsEnd has each outage happen to a Caddy of its
// own, all at the same time.
func TestEachOutageIsSeenAndSoIsItsEnd(t *testing.T) {
	promtool := tool(t, "promtool")
	documented := documentedOutages(t)
	for _, o := range outages {
		its := documented[o.name]
		if slices.Sort(its); its != nil && !slices.Equal(its, o.alerts) { // a row may point to others
			t.Errorf("docs/operations.md has the alerts %q for %q, want %q", its, o.name, o.alerts)
		}
	}
	if len(documented) != len(outages) {
		t.Errorf("docs/operations.md has %d outages, the test has %d", len(documented), len(outages))
	}
	withRedis := sync.OnceValues(func() (string, error) {
		if os.Getenv("E2E_CADDY") != "" {
			return caddy, nil
		}
		program := filepath.Join(shared, "caddy-with-redis")
		build := exec.Command("go", "build", "-o", program, "./cmd/caddy")
		build.Dir = "../redis"
		if output, err := build.CombinedOutput(); err != nil {
			return "", fmt.Errorf("%w\n%s", err, output)
		}
		return program, nil
	})
	var running sync.WaitGroup
	for _, o := range outages {
		running.Go(func() {
			t.Run(o.name, func(t *testing.T) {
				program := caddy
				if o.browser {
					lookPath(t, "node")
					lookPath(t, "chromium")
				}
				if o.redis {
					if _, err := exec.LookPath("redis-server"); err != nil {
						t.Skip(err)
					}
					var err error
					if program, err = withRedis(); err != nil {
						t.Fatal(err)
					}
				}
				o.happen(t, program, promtool)
			})
		})
	}
	running.Wait()
}

const (
	// healthyFor is how long a site is healthy before its outage, and lasts is
	// how long each outage takes at least.
	healthyFor, lasts = 20 * time.Second, 30 * time.Second
	// overWithin is how long page, log and command have to say that an outage
	// is over: a minute, and half of one for a machine that is slow.
	overWithin = 90 * time.Second
)

func (o outage) happen(t *testing.T, program, promtool string) {
	s := startOutageSite(t, program, o.redis)
	s.load()
	stop := s.record()
	time.Sleep(healthyFor)
	s.await("before it", patience, func() []string { return s.missing(program, 0, nil, nil, nil) })
	stop()

	begin, began := len(s.replicas[0].output.String()), time.Now()
	o.begin(s)
	stop = s.record()
	s.await("during it", patience, func() []string { return s.missing(program, begin, o.problems, o.log, nil) })
	t.Logf("%s is seen after %s", o.name, time.Since(began).Round(time.Second))
	if o.browser {
		o.watch(s, "during", len(o.problems))
	}
	time.Sleep(time.Until(began.Add(lasts)))
	stop()

	begin, began = len(s.replicas[0].output.String()), time.Now()
	o.end(s)
	stop = s.record()
	s.await("after it", overWithin, func() []string { return s.missing(program, begin, nil, o.over, o.recent) })
	t.Logf("the end of %s is seen after %s", o.name, time.Since(began).Round(time.Second))
	if o.browser {
		o.watch(s, "after", 0)
	}
	time.Sleep(time.Until(began.Add(2 * scrapeInterval)))
	stop()
	s.wantAlerts(promtool, o.alerts)
}

// await waits until nothing is missing.
func (s *outageSite) await(when string, patience time.Duration, missing func() []string) {
	s.Helper()
	for deadline := time.Now().Add(patience); ; time.Sleep(time.Second) {
		its := missing()
		if len(its) == 0 {
			return
		}
		if time.Now().After(deadline) {
			s.Fatalf("%s:\n%s", when, strings.Join(its, "\n"))
		}
	}
}

// missing returns what the page, the log and the command do not show, or show
// too much. Without problems, all is well.
func (s *outageSite) missing(program string, begin int, problems []string, lines [][]string, recent []string) (missing []string) {
	now, err := s.look(program, begin)
	if err != nil {
		return []string{err.Error() + "\n" + now.command}
	}
	want := func(ok bool, format string, args ...any) {
		if !ok {
			missing = append(missing, fmt.Sprintf(format, args...))
		}
	}
	slices.Sort(now.problems)
	problems = slices.Sorted(func(yield func(string) bool) {
		for _, problem := range problems {
			if !yield(strings.ReplaceAll(problem, "<dir>", s.folderOf(0))) {
				return
			}
		}
	})
	want(slices.Equal(now.problems, problems), "the page has the problems\n%s\nwant\n%s", strings.Join(now.problems, "\n"), strings.Join(problems, "\n"))
	for _, problem := range problems {
		what, next, _ := strings.Cut(problem, ". ")
		_, next, _ = strings.Cut(next, ": ")
		if name, of, _ := strings.Cut(what, " "); s.backends[name] != nil {
			what = of
		}
		want(strings.Contains(now.html, what) && strings.Contains(now.html, next), "the page as HTML does not say %q", problem)
		want(strings.Contains(now.command, " "+problem+"\n"), "the command does not say %q:\n%s", problem, now.command)
	}
	if problems == nil {
		want(!strings.Contains(now.html, "Needs action") && !strings.Contains(now.html, "Retried"), "the page as HTML has problems")
		want(!strings.Contains(now.command, "needs action") && !strings.Contains(now.command, "meanwhile"), "the command has problems:\n%s", now.command)
		want(strings.Count(now.command, " available ") == len(s.backends), "the command does not show all backends as available:\n%s", now.command)
	}
	table := strings.Index(now.command, "POOL ")
	want(!strings.Contains(now.command[max(0, table):], "needs action"), "the command has what needs action below the table:\n%s", now.command)
	for _, row := range recent {
		want(slices.ContainsFunc(now.recent, func(its string) bool { return strings.HasPrefix(its, row) && strings.Contains(its, " over at ") }),
			"the recent list has no row that begins with %q, and is over: %q", row, now.recent)
	}
	for _, parts := range lines {
		found := slices.ContainsFunc(strings.Split(now.log, "\n"), func(line string) bool {
			return !slices.ContainsFunc(parts, func(part string) bool { return !strings.Contains(line, part) })
		})
		want(found, "the log has no line with %q", parts)
	}
	return missing
}

// watch has a browser look at the page.
func (o outage) watch(s *outageSite, when string, problems int) {
	s.Helper()
	node, chromium := lookPath(s.T, "node"), lookPath(s.T, "chromium")
	if err := installBrowser(); err != nil {
		s.Fatal(err)
	}
	var looked []struct {
		watched
		Shown struct{ Problems []string }
	}
	folder := cmp.Or(os.Getenv("E2E_SCREENSHOTS"), s.TempDir())
	runBrowser(s.T, &looked, node, "browser/outage.mjs", chromium, s.replicas[0].url+"/status", fmt.Sprint(problems), folder, "outage-"+when)
	if len(looked) != 4 {
		s.Errorf("got %+v", looked)
	}
	for _, l := range looked {
		l.checkPage(s.T)
		if len(l.Shown.Problems) != problems {
			s.Errorf("%s: %q", l.Name, l.Shown.Problems)
		}
	}
}
