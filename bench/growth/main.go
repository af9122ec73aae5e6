// Command growth measures how the cost of openai_lb grows with what its users
// have: backends, callers, models, the length of bodies and of streams. Each
// row of its table grows one of these, and measures openai_lb and a plain
// reverse_proxy in turns, in one process, in front of backends in memory. So it
// shows the cost of the code alone: no network, no kernel.
//
// For each side it fits a line through the points: a constant, and a slope for
// each further unit. A slope is compared with what a plain chat costs in the
// same run, so that the machine matters little.
//
//	go run .               measure all rows, and print the table
//	go run . -write        ... and write it into ../README.md
//	go run . -quick        measure few rounds, and fail if a slope is twice what ../README.md says
//	go run . -rows bodies  measure only the rows whose names match
package main

import (
	"flag"
	"fmt"
	"log"
	"os"
	"regexp"
	"runtime"
	"runtime/debug"
)

const readme = "../README.md"

func main() {
	log.SetFlags(0)
	var (
		quick  = flag.Bool("quick", false, "measure few rounds, and fail if a slope is twice what the table says")
		write  = flag.Bool("write", false, "write the table into "+readme)
		only   = flag.String("rows", "", "a regular expression for the names of the rows to measure")
		points = flag.Bool("points", false, "print each point, too")
	)
	flag.Parse()
	effort := effort{rounds: 30, batch: 100}
	if *quick {
		effort.rounds, effort.batch = 8, 50
	}
	if err := run(effort, regexp.MustCompile(*only), *points, *quick, *write); err != nil {
		log.Fatal(err)
	}
}

// effort says how much is measured: so many rounds, each of so many requests at
// most.
type effort struct{ rounds, batch int }

func run(e effort, only *regexp.Regexp, points, compare, write bool) error {
	debug.SetGCPercent(400) // the garbage of both sides is collected as rarely
	folder, err := os.MkdirTemp("", "growth")
	if err != nil {
		return err
	}
	defer os.RemoveAll(folder)
	if err := prepareCaddy(folder); err != nil {
		return err
	}
	chat, err := plainChat(e)
	if err != nil {
		return err
	}
	results := []result{}
	for _, row := range rows() {
		if !only.MatchString(row.name) {
			continue
		}
		r := result{row: row, chat: chat}
		for _, n := range row.points {
			ours, plain, err := row.measure(e, n)
			if err != nil {
				return fmt.Errorf("%s, %d %s: %w", row.name, n, row.grows, err)
			}
			r.ours, r.plain = append(r.ours, ours), append(r.plain, plain)
			if points {
				fmt.Printf("%s: %d %s: openai_lb %.4g, plain %.4g %s\n", row.name, n, row.grows, ours, plain, row.unit)
			}
			runtime.GC()
		}
		fmt.Print(r.line())
		results = append(results, r)
	}
	switch {
	case write:
		return writeTable(readme, results)
	case compare:
		return compareWithTable(readme, results)
	}
	return nil
}
