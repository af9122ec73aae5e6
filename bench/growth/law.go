package main

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"os"
	"slices"
	"strconv"
	"strings"
)

// result has the measurements of a row, by its points.
type result struct {
	row         row
	ours, plain []float64
	chat        float64 // what a plain chat costs in this run
}

// law is a line through points: what is paid anyway, and what is paid for each
// unit.
type law struct{ constant, slope float64 }

// fit returns the line through the points with the median of the slopes between
// any two of them, which one bad point does not bend (Theil and Sen).
func fit(points []int, costs []float64) law {
	var slopes, constants []float64
	for i := range points {
		for j := range i {
			slopes = append(slopes, (costs[i]-costs[j])/float64(points[i]-points[j]))
		}
	}
	slope := median(slopes)
	for i := range points {
		constants = append(constants, costs[i]-slope*float64(points[i]))
	}
	return law{median(constants), slope}
}

func median[T cmp.Ordered](values []T) T {
	slices.Sort(values)
	return values[len(values)/2]
}

// relative is the slope of openai_lb in thousandths of what is compared with: a
// plain chat if the row measures time, or one unit of whatever else it
// measures.
func (r *result) relative() float64 {
	slope := fit(r.row.points, r.ours).slope
	if r.row.unit == microseconds {
		return 1000 * slope / r.chat
	}
	return 1000 * slope
}

// line is the row of the table in Markdown.
func (r *result) line() string {
	ours, plain := fit(r.row.points, r.ours), fit(r.row.points, r.plain)
	last := len(r.ours) - 1
	return fmt.Sprintf("| %s | %s | %s | %s + %s | %s + %s | %s | %s |\n", r.row.name, r.row.grows, r.row.unit,
		figure(ours.constant), figure(ours.slope), figure(plain.constant), figure(plain.slope),
		ratio(r.ours[last], r.plain[last]), figure(r.relative()))
}

func ratio(ours, plain float64) string {
	if plain <= 0 {
		return "–"
	}
	return strconv.FormatFloat(ours/plain, 'f', 2, 64)
}

// figure writes a number with three digits that count.
func figure(f float64) string {
	switch size := math.Abs(f); {
	case size < 0.0005:
		return "0"
	case size >= 100:
		return strconv.FormatFloat(f, 'f', 0, 64)
	}
	return strconv.FormatFloat(f, 'g', 3, 64)
}

const (
	head = "| row | for each | in | openai_lb | plain | at the last point | slope, ‰ |\n|---|---|---|--:|--:|--:|--:|\n"
	// beginTable and endTable are the lines around the table.
	beginTable = "<!-- made by: go run . -write -->\n"
	endTable   = "<!-- end -->\n"
)

// table returns the text of the file before the table, the table, and the text
// after it.
func table(file string) (before, rows, after string, err error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return "", "", "", err
	}
	before, rest, found := strings.Cut(string(text), beginTable)
	rows, after, ends := strings.Cut(rest, endTable)
	if !found || !ends {
		return "", "", "", fmt.Errorf("%s has no table between %q and %q", file, beginTable, endTable)
	}
	return before, rows, after, nil
}

// writeTable replaces the rows that were measured, and keeps all others.
func writeTable(file string, results []result) error {
	before, old, after, err := table(file)
	if err != nil {
		return err
	}
	var rows strings.Builder
	for _, row := range allNames() {
		line := lineOf(old, row)
		for i := range results {
			if results[i].row.name == row {
				line = results[i].line()
			}
		}
		rows.WriteString(line)
	}
	return os.WriteFile(file, []byte(before+beginTable+head+rows.String()+endTable+after), 0o644)
}

func allNames() (names []string) {
	for _, row := range rows() {
		names = append(names, row.name)
	}
	return names
}

func lineOf(table, name string) string {
	for line := range strings.Lines(table) {
		if strings.HasPrefix(line, "| "+name+" |") {
			return line
		}
	}
	return ""
}

// compareWithTable returns an error that names each row whose slope is over
// twice that of the table, and by so much that it is no noise: a slope of which
// even the last point costs less than a quarter of a plain chat is not
// compared.
func compareWithTable(file string, results []result) error {
	_, old, _, err := table(file)
	if err != nil {
		return err
	}
	var problems []error
	for i := range results {
		r := &results[i]
		cells := strings.Split(strings.TrimSpace(lineOf(old, r.row.name)), "|")
		if len(cells) < 3 {
			problems = append(problems, fmt.Errorf("%s: the table has no such row", r.row.name))
			continue
		}
		was, err := strconv.ParseFloat(strings.TrimSpace(cells[len(cells)-2]), 64)
		if err != nil {
			return fmt.Errorf("%s: %w", r.row.name, err)
		}
		now, last := r.relative(), float64(r.row.points[len(r.row.points)-1])
		if now > 2*was && (now-was)*last > r.row.noise {
			problems = append(problems,
				fmt.Errorf("%s: the slope is %s, over twice the %s of %s", r.row.name, figure(now), figure(was), file))
		}
	}
	return errors.Join(problems...)
}
