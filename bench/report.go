package main

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"time"
)

// table is the outcome of one scenario: a row for each contender, in which
// each cell is the median of its runs.
type table struct {
	Title string
	About string
	// Of names the rows, if they are not contenders.
	Of string
	// Base is the contender that the ratios refer to.
	Base    string
	Columns []column
	Rows    []row
}

// column is something that was measured.
type column struct {
	Name   string
	Unit   string
	Digits int
	// Ratio says whether a cell also has its ratio to the base.
	Ratio bool
	// Better says which values are better: "lower" or "higher", or neither.
	Better string
}

type row struct {
	Contender string
	Cells     []cell
}

// cell has the value of each run. No runs: it cannot be measured.
type cell struct {
	Runs  []float64
	Value float64
	// Ratio is the median of each run's ratio to the same run of the base.
	Ratio float64
}

// add takes one run of a contender, a value for each column. NaN: it cannot be
// measured.
func (t *table) add(contender string, values ...float64) {
	n := slices.IndexFunc(t.Rows, func(r row) bool { return r.Contender == contender })
	if n < 0 {
		n = len(t.Rows)
		t.Rows = append(t.Rows, row{contender, make([]cell, len(t.Columns))})
	}
	for i, v := range values {
		if c := &t.Rows[n].Cells[i]; !math.IsNaN(v) && !math.IsInf(v, 0) {
			c.Runs = append(c.Runs, v)
		}
	}
}

// finish computes the medians and the ratios.
func (t *table) finish() {
	base := slices.IndexFunc(t.Rows, func(r row) bool { return r.Contender == t.Base })
	for _, r := range t.Rows {
		for i := range r.Cells {
			c := &r.Cells[i]
			if len(c.Runs) == 0 {
				continue
			}
			c.Value = median(c.Runs)
			if base < 0 || !t.Columns[i].Ratio || r.Contender == direct {
				continue
			}
			var ratios []float64
			for n, of := range t.Rows[base].Cells[i].Runs[:min(len(c.Runs), len(t.Rows[base].Cells[i].Runs))] {
				if of > 0 {
					ratios = append(ratios, c.Runs[n]/of)
				}
			}
			if len(ratios) > 0 {
				c.Ratio = median(ratios)
			}
		}
	}
}

func median(values []float64) float64 {
	sorted := slices.Sorted(slices.Values(values))
	n := len(sorted)
	return (sorted[(n-1)/2] + sorted[n/2]) / 2
}

// markdown is the table as it is in a file, and on the terminal.
func (t *table) markdown() string {
	lines := [][]string{{cmp.Or(t.Of, "contender")}, {"---"}}
	for _, c := range t.Columns {
		name := c.Name
		if c.Unit != "" {
			name += ", " + c.Unit
		}
		lines[0], lines[1] = append(lines[0], name), append(lines[1], "---:")
	}
	for _, r := range t.Rows {
		line := []string{r.Contender}
		for i, c := range r.Cells {
			line = append(line, c.text(t.Columns[i]))
		}
		lines = append(lines, line)
	}
	width := make([]int, len(lines[0]))
	for _, line := range lines {
		for i, text := range line {
			width[i] = max(width[i], len([]rune(text)))
		}
	}
	var b strings.Builder
	fmt.Fprintf(&b, "## %s\n\n%s", t.Title, t.About)
	if slices.ContainsFunc(t.Columns, func(c column) bool { return c.Ratio }) {
		fmt.Fprintf(&b, " In brackets: the ratio to `%s`.", t.Base)
	}
	b.WriteString("\n\n")
	for _, line := range lines {
		for i, text := range line {
			pad := strings.Repeat(" ", width[i]-len([]rune(text)))
			if i == 0 {
				text += pad
			} else {
				text = pad + text
			}
			b.WriteString("| " + text + " ")
		}
		b.WriteString("|\n")
	}
	if lost := t.lost(); lost != "" {
		fmt.Fprintf(&b, "\nNot the best here is `%s` in %s.\n", ours, lost)
	}
	return b.String()
}

func (c cell) text(of column) string {
	if len(c.Runs) == 0 {
		return "–"
	}
	text := fmt.Sprintf("%.*f", of.Digits, c.Value)
	if of.Ratio && c.Ratio > 0 {
		text += fmt.Sprintf(" (%.2f)", c.Ratio)
	}
	return text
}

// lost says in which columns ours is not the best, and who is. What reads the
// same is the same.
func (t *table) lost() string {
	n := slices.IndexFunc(t.Rows, func(r row) bool { return r.Contender == ours })
	if n < 0 {
		return ""
	}
	var all []string
	for i, c := range t.Columns {
		mine := t.Rows[n].Cells[i]
		if c.Better == "" || len(mine.Runs) == 0 {
			continue
		}
		best := t.Rows[n]
		for _, r := range t.Rows {
			theirs := r.Cells[i]
			if r.Contender != direct && len(theirs.Runs) > 0 && (theirs.Value < best.Cells[i].Value) == (c.Better == "lower") {
				best = r
			}
		}
		plainNumbers := column{Digits: c.Digits}
		if theirs := best.Cells[i].text(plainNumbers); theirs != mine.text(plainNumbers) {
			all = append(all, fmt.Sprintf("%s (%s: %s)", c.Name, best.Contender, theirs))
		}
	}
	return strings.Join(all, ", ")
}

// sections are the files of a report, and the first words of the titles of
// their tables.
var sections = []string{"Cost", "Failover", "Worth", "Beside"}

// report is a whole run.
type report struct {
	command, date, machine string
	versions               map[string]string
	// leftOut says which contenders could not take part, and why.
	leftOut map[string]string
	// problems are notes that the reader of the figures needs.
	problems []string
	tables   []*table

	begun time.Time
	dir   string // where it is written to; empty: nowhere
}

func newReport(results string) *report {
	now := time.Now().UTC()
	return &report{
		begun: now, dir: results,
		command: strings.Join(append([]string{"go run ."}, os.Args[1:]...), " "),
		date:    now.Format("2006-01-02 15:04 MST"),
		machine: machine(), versions: make(map[string]string), leftOut: make(map[string]string),
	}
}

// print shows a table as soon as it is there, and writes all that there is: a
// run takes long, and may not come to its end.
func (r *report) print(t *table) {
	t.finish()
	fmt.Printf("\n%s", t.markdown())
	r.tables = append(r.tables, t)
	if err := r.write(); err != nil {
		fmt.Println("!", err)
	}
	fmt.Printf("\n(%s so far)\n", r.took())
}

func (r *report) took() time.Duration { return time.Since(r.begun).Round(time.Second) }

// write writes each section that has tables into its file.
func (r *report) write() error {
	if r.dir == "" {
		return nil
	}
	if err := os.MkdirAll(r.dir, 0o755); err != nil {
		return err
	}
	for _, section := range sections {
		tables := ""
		for _, t := range r.tables {
			if strings.HasPrefix(t.Title, section+":") {
				tables += "\n" + t.markdown()
			}
		}
		if tables == "" {
			continue
		}
		text := "# " + section + "\n\n" + r.circumstances() + tables
		if err := os.WriteFile(filepath.Join(r.dir, strings.ToLower(section)+".md"), []byte(text), 0o644); err != nil {
			return err
		}
	}
	return nil
}

// circumstances describes the measurement: its subject, time and machine, and
// notes for the reader.
func (r *report) circumstances() string {
	var b strings.Builder
	fmt.Fprintf(&b, "`%s`, %s, took %s, on %s.\n\n", r.command, r.date, r.took(), r.machine)
	for _, c := range contenders {
		if version, ok := r.versions[c.name]; ok {
			fmt.Fprintf(&b, "- `%s` %s: %s\n", c.name, version, c.about)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(r.leftOut)) {
		fmt.Fprintf(&b, "- `%s` did not take part: %s\n", name, r.leftOut[name])
	}
	for _, problem := range r.problems {
		fmt.Fprintf(&b, "- Note: %s\n", problem)
	}
	return b.String()
}

// machine describes what this runs on.
func machine() string {
	name := runtime.GOARCH
	text, _ := os.ReadFile("/proc/cpuinfo")
	if _, rest, ok := strings.Cut(string(text), "model name\t: "); ok {
		name, _, _ = strings.Cut(rest, "\n")
	}
	kernel, _ := os.ReadFile("/proc/sys/kernel/osrelease")
	return fmt.Sprintf("%d × %s, Linux %s, %s", runtime.NumCPU(), name, strings.TrimSpace(string(kernel)),
		runtime.Version())
}
