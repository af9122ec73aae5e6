package admin

import (
	"context"
	"slices"
	"strings"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/ledger"
)

// Replicas may share a storage, or have one each. So each lists its pages first, and this one then asks for those that it
// lacks, or has an earlier version of: some rows at a time, because an answer has a bound.

// listing is a page without its rows, and their number.
type listing struct {
	ledger.Page
	Rows int `json:"rows"`
}

const (
	// pagesPatience is how long replicas have for an answer about pages, which may be in a slow storage.
	pagesPatience = 5 * time.Second
	// maxPagesAtOnce and maxRowsAtOnce bound one question, and its answer, unless a page alone is larger.
	maxPagesAtOnce, maxRowsAtOnce = 80, 20_000
)

// listPages lists the pages of a period.
func listPages(days string, inPool func(string) bool) (all []listing, err error) {
	of, err := periodOf(days)
	if err != nil {
		return nil, err
	}
	pages, err := ledger.Pages(func(w ledger.Where) bool { return of.has(w.Day) && inPool(w.Pool) })
	for _, p := range pages {
		all = append(all, listing{p, len(p.Rows)})
	}
	return all, err
}

// pagesWith returns the pages with these ids.
func pagesWith(ids []string, inPool func(string) bool) ([]ledger.Page, error) {
	pages, err := ledger.Pages(func(w ledger.Where) bool { return slices.Contains(ids, w.ID) && inPool(w.Pool) })
	return append([]ledger.Page{}, pages...), err
}

// allPages returns the pages of all replicas, or of one. own are those of this one.
func allPages(ctx context.Context, replica string, of period, inPool func(string) bool, own []ledger.Page) (a All[ledger.Page], err error) {
	ctx, cancel := context.WithTimeout(ctx, time.Minute) // however many pages somebody lists
	defer cancel()
	keep := func(where ledger.Page, shared func(string) bool) bool {
		return of.has(where.Day) && inPool(where.Pool) && shared(where.Pool)
	}
	list, listed, err := askAll(ctx, replica, pagesQuestion+" "+string(of), pagesPatience, func(l listing, shared func(string) bool) bool { return keep(l.Page, shared) })
	if err != nil {
		return a, err
	}
	a = All[ledger.Page]{Connected: list.Connected, Replicas: list.Replicas, Rows: own}
	have := make(map[ledger.Where]int64)
	add := func(pages []ledger.Page) {
		for _, p := range pages {
			where := ledger.Where{Day: p.Day, Pool: p.Pool, ID: p.ID}
			have[where] = max(have[where], p.Changes)
		}
	}
	add(own)
	var ids []string
	rows := 0
	fetch := func() {
		if len(ids) > 0 {
			_, more, _ := askAll(ctx, everyReplica, pageQuestion+" "+strings.Join(ids, " "), pagesPatience, keep)
			for _, answer := range more {
				add(answer.rows)
				a.Rows = append(a.Rows, answer.rows...)
			}
		}
		ids, rows = nil, 0
	}
	lacks := func(l listing) bool {
		changes, known := have[ledger.Where{Day: l.Day, Pool: l.Pool, ID: l.ID}]
		return !known || changes < l.Changes
	}
	for _, its := range listed {
		for _, l := range its.rows {
			if !lacks(l) || slices.Contains(ids, l.ID) || len(l.ID) > 32 {
				continue
			}
			if ids = append(ids, l.ID); len(ids) >= maxPagesAtOnce || rows+l.Rows > maxRowsAtOnce {
				fetch()
			} else {
				rows += l.Rows
			}
		}
	}
	fetch()
	wanted := make(map[string]bool)
	for _, its := range listed {
		for _, l := range its.rows {
			wanted[l.ID] = true
		}
		its.seen.Included = its.seen.Included && !slices.ContainsFunc(its.rows, lacks)
	}
	if withoutSelf(listed) {
		a.Rows = slices.DeleteFunc(a.Rows, func(p ledger.Page) bool { return !wanted[p.ID] }) // another replica's alone
	}
	a.Rows = ledger.Newest(a.Rows)
	return a, nil
}
