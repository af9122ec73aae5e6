package ledger

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
)

// Columns are the columns by which use can be summed.
var Columns = []string{"day", "pool", "caller", "model", "backend", "service_tier"}

// Entry is a row of a page, with its day and pool.
type Entry struct {
	Day, Pool string
	Row
}

// Entries returns the rows of pages.
func Entries(pages []Page) (entries []Entry) {
	for _, p := range pages {
		for _, row := range p.Rows {
			entries = append(entries, Entry{p.Day, p.Pool, row})
		}
	}
	return entries
}

// column returns the entry's value in a column.
func (e *Entry) column(name string) string {
	switch name {
	case "day":
		return e.Day
	case "pool":
		return e.Pool
	case "caller":
		return e.Caller
	case "model":
		return e.Model
	case "backend":
		return e.Backend
	}
	return e.ServiceTier
}

// Sum is the use and the cost of all entries with the same values in some
// columns.
type Sum struct {
	Values []string
	Use
	// Cost is valid only if Priced is true, which means that each of these
	// entries has a price.
	Cost   float64
	Priced bool
}

// SumBy sums entries by columns, and sorts the sums by these. prices may be
// nil. unpriced are the models, with their service tiers, that have tokens and
// no price.
func SumBy(columns []string, entries []Entry, prices Prices) (all []*Sum, unpriced []string) {
	sums := make(map[string]*Sum)
	for _, e := range entries {
		values := make([]string, len(columns))
		for i, name := range columns {
			values[i] = e.column(name)
		}
		id := strings.Join(values, "\x00")
		s := sums[id]
		if s == nil {
			s = &Sum{Values: values, Priced: true}
			sums[id] = s
			all = append(all, s)
		}
		s.Add(e.Use)
		if prices == nil {
			continue
		}
		cost, ok := prices.cost(&e.Row)
		s.Cost += cost
		if s.Priced = s.Priced && ok; !ok {
			unpriced = append(unpriced,
				fmt.Sprintf("%s (service tier %s)", cmp.Or(e.Model, "without a name"), e.ServiceTier))
		}
	}
	slices.SortFunc(all, func(a, b *Sum) int { return slices.Compare(a.Values, b.Values) })
	slices.Sort(unpriced)
	return all, slices.Compact(unpriced)
}
