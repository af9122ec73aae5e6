// Command bench measures openai_lb beside what people would use in its place:
// what it costs, how it fails over, and what it is worth. README.md says more.
package main

import (
	"cmp"
	"flag"
	"fmt"
	"log"
	"os"
	"os/signal"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"time"
)

func main() {
	log.SetFlags(0)
	var (
		quick   = flag.Bool("quick", false, "a smoke test of some minutes; its figures mean nothing")
		only    = flag.String("only", "", "a regular expression for the titles of the scenarios to run")
		names   = flag.String("contenders", "", "a list of those to compare (all)")
		rounds  = flag.Int("rounds", 5, "how often each contender is measured in each cost and failover scenario")
		slice   = flag.Duration("slice", 800*time.Millisecond, "for how long each time")
		parts   = flag.Int("worth-rounds", 1, "how many rounds a worth scenario has")
		results = flag.String("results", "", "the folder for the results (results, or none with -quick)")
		serve   = flag.String("serve-backends", "", "be the backends, told what to do at this address")
	)
	flag.Parse()
	if *serve != "" {
		log.Fatal(serveBackends(*serve, flag.Arg(0), flag.Args()[1:]))
	}

	b := &bench{
		only: regexp.MustCompile("(?i)" + *only), rounds: *rounds, slice: *slice,
		streams: []int{1000, 3000}, worthRounds: *parts, results: cmp.Or(*results, "results"),
	}
	if *quick {
		b.rounds, b.slice, b.streams = 1, 200*time.Millisecond, []int{20, 50}
		b.worthRounds, b.worthRound, b.results = 1, time.Second, *results
	}
	if err := b.run(strings.FieldsFunc(*names, func(r rune) bool { return r == ',' })); err != nil {
		log.Fatal(err)
	}
}

// bench is one run of the command.
type bench struct {
	only        *regexp.Regexp
	rounds      int           // of the cost and failover scenarios
	slice       time.Duration // of one contender in one such round
	streams     []int         // how many idle ones, each time
	worthRounds int
	worthRound  time.Duration // 0: as the scenario says

	results    string // the folder for them; empty: none
	tools      tools
	contenders []contender
	waiting    []contender // those of which requests wait
	report     *report
}

// run measures what is asked for with the named contenders, or with all.
func (b *bench) run(names []string) error {
	// Each stream has a file at either end, and programs inherit the limit.
	var limit syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &limit); err == nil {
		limit.Cur = limit.Max
		_ = syscall.Setrlimit(syscall.RLIMIT_NOFILE, &limit)
	}
	dir, err := os.MkdirTemp("", "openai-lb-bench")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	stopOnInterrupt(dir)
	if b.tools, err = build(dir); err != nil {
		return err
	}
	b.report = newReport(b.results)
	if err := b.findContenders(names); err != nil {
		return err
	}
	for _, section := range []struct {
		name string
		run  func() error
	}{{"cost", b.runCost}, {"failover", b.runFailover}, {"worth", b.runWorth}, {"beside", b.runBeside}} {
		// Do not start what nothing is asked of.
		if !slices.ContainsFunc(titles(section.name), b.only.MatchString) {
			continue
		}
		if err := section.run(); err != nil {
			b.problem("%s: %s", section.name, err) // the others' figures are worth having
		}
	}
	return nil
}

// titles are those of a section, as -only finds them.
func titles(section string) (all []string) {
	switch section {
	case "cost":
		for _, s := range costScenarios {
			all = append(all, "cost: "+s.name)
		}
		return append(all, "cost: idle streams")
	case "failover":
		return []string{"failover: not at all", "failover: once", "failover: twice"}
	case "beside":
		return []string{"beside: large prompts", "beside: wrong keys"}
	}
	for _, s := range worthScenarios {
		all = append(all, "worth: "+s.name)
	}
	return all
}

// findContenders keeps those that are here, and says why others are not.
func (b *bench) findContenders(names []string) error {
	for _, name := range names {
		if !slices.ContainsFunc(contenders, func(c contender) bool { return c.name == name }) {
			return fmt.Errorf("there is no contender %q", name)
		}
	}
	for _, c := range contenders {
		if len(names) > 0 && !slices.Contains(names, c.name) {
			continue
		}
		version, err := c.ready(b.tools)
		if err != nil {
			fmt.Printf("%s is skipped: %s\n", c.name, err)
			b.report.leftOut[c.name] = err.Error()
			continue
		}
		fmt.Printf("%s %s\n", c.name, version)
		b.report.versions[c.name] = version
		if c.wait != "" {
			b.waiting = append(b.waiting, c)
			continue
		}
		b.contenders = append(b.contenders, c)
	}
	return nil
}

// problem is something that the reader of the figures must know.
func (b *bench) problem(format string, args ...any) {
	text := fmt.Sprintf(format, args...)
	fmt.Println("!", text)
	b.report.problems = append(b.report.problems, text)
}

// stopOnInterrupt leaves nothing behind: what was started is in process groups
// of its own, which an interrupt at the terminal does not reach.
func stopOnInterrupt(dir string) {
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM)
	go func() {
		<-signals
		started.Lock()
		for _, p := range started.all {
			p.stop()
		}
		os.RemoveAll(dir)
		os.Exit(1)
	}()
}
