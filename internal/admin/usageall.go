package admin

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"slices"
	"strings"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/ledger"
	"github.com/openai-lb/caddy-openai-lb/internal/replicas"
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
	// maxSumRows bounds the rows of all pages of others.
	maxSumRows = 2_000_000
)

// ofEngine reports whether replicas that share an engine tell each other pages of the pool. One that was removed or renamed has
// no engine any more, but it has pages.
func ofEngine(shared replicas.Shared, pool string) bool {
	return slices.Contains(shared.Pools, pool) || !slices.Contains(shared.Elsewhere, pool)
}

// listPages lists the pages of a period.
func listPages(ctx context.Context, days string, shared replicas.Shared) (all []listing, err error) {
	of, err := periodOf(days)
	if err != nil || string(of) != days {
		return nil, cmp.Or(err, errors.New("not a period"))
	}
	pages, err := ledger.Pages(ctx, func(w ledger.Where) bool { return of.has(w.Day) && ofEngine(shared, w.Pool) })
	for _, p := range pages {
		all = append(all, listing{p, len(p.Rows)})
	}
	return all, err
}

// pagesWith returns the pages with these ids.
func pagesWith(ctx context.Context, ids []string, shared replicas.Shared) ([]ledger.Page, error) {
	pages, err := ledger.Pages(ctx, func(w ledger.Where) bool { return slices.Contains(ids, w.ID) && ofEngine(shared, w.Pool) })
	return append([]ledger.Page{}, pages...), err
}

// isID reports whether it may be the id of a page.
func isID(id string) bool {
	return id != "" && len(id) <= 32 && strings.Trim(id, "0123456789abcdef") == ""
}

// lists is what another replica has listed.
type lists struct {
	id   string
	rows []listing
}

// unread is a page whose rows are not read yet.
type unread struct {
	ledger.Page
	Rows json.RawMessage `json:"rows"`
}

// allPages returns the pages of all replicas, or of one. own are those of this one.
func allPages(ctx context.Context, replica string, of period, inPool func(string) bool, own []ledger.Page) (all All[ledger.Page], err error) {
	ctx, cancel := context.WithTimeout(ctx, time.Minute) // however many pages somebody lists
	defer cancel()
	keep := func(a replicas.Answer, where ledger.Page) bool {
		return of.has(where.Day) && inPool(where.Pool) && ofEngine(a.Shared, where.Pool) && isID(where.ID)
	}
	var listed []lists
	number := 0
	r, err := askAll(ctx, replica, pagesQuestion+" "+string(of), pagesPatience, maxRow, func(a replicas.Answer, l listing) (pool string, full bool) {
		if !keep(a, l.Page) {
			return "", false
		}
		if len(listed) == 0 || listed[len(listed)-1].id != a.ID {
			listed = append(listed, lists{id: a.ID})
		}
		its := &listed[len(listed)-1]
		number++
		its.rows = append(its.rows, l)
		return l.Pool, number >= maxSum
	})
	if err != nil {
		return all, err
	}
	all = All[ledger.Page]{Connected: r.connected, Replicas: r.replicas, Rows: own}
	have := make(map[ledger.Where]int64)
	sumRows := 0
	add := func(p ledger.Page) {
		where := ledger.Where{Day: p.Day, Pool: p.Pool, ID: p.ID}
		have[where] = max(have[where], p.Changes)
	}
	for _, p := range own {
		add(p)
	}
	var ids []string
	rows := 0
	fetch := func() {
		if len(ids) > 0 {
			_, _ = askAll(ctx, everyReplica, pageQuestion+" "+strings.Join(ids, " "), pagesPatience, maxAnswer, func(a replicas.Answer, p unread) (pool string, full bool) {
				changes, known := have[ledger.Where{Day: p.Day, Pool: p.Pool, ID: p.ID}]
				if !keep(a, p.Page) || !slices.Contains(ids, p.ID) || known && changes >= p.Changes {
					return "", false
				}
				ok := readRows(bytes.NewReader(p.Rows), maxSumRows-sumRows, maxRow, func(row ledger.Row) bool {
					p.Page.Rows = append(p.Page.Rows, row)
					return true
				})
				if ok {
					sumRows += len(p.Page.Rows)
					add(p.Page)
					all.Rows = append(all.Rows, p.Page)
				}
				return p.Pool, !ok
			})
		}
		ids, rows = nil, 0
	}
	lacks := func(l listing) bool {
		changes, known := have[ledger.Where{Day: l.Day, Pool: l.Pool, ID: l.ID}]
		return !known || changes < l.Changes
	}
	for _, its := range listed {
		for _, l := range its.rows {
			if !lacks(l) || slices.Contains(ids, l.ID) {
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
		if i := slices.IndexFunc(all.Replicas, func(s Seen) bool { return s.ID == its.id }); slices.ContainsFunc(its.rows, lacks) {
			all.Replicas[i].Included = false
		}
	}
	if !r.self {
		all.Rows = slices.DeleteFunc(all.Rows, func(p ledger.Page) bool { return !wanted[p.ID] }) // another replica's alone
	}
	all.Rows = ledger.Newest(all.Rows)
	return all, nil
}
