package ledger

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"slices"
	"strings"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/admin"
	"github.com/openai-lb/caddy-openai-lb/internal/seam"
)

// Replicas may share a storage, or have separate ones. So each replica first
// lists its pages. This replica then asks for the pages that it lacks, or of
// which it has an earlier version. It asks for some rows at a time, because the
// size of an answer is limited.

// listing is a page without its rows, and their number.
type listing struct {
	Page
	Rows int `json:"rows"`
}

// The first words of the questions about pages.
const (
	pagesQuestion = "pages" // of a period: without their rows
	pageQuestion  = "page"  // the pages of these ids
)

func init() {
	admin.Answer(pagesQuestion, func(ctx context.Context, days string, shared seam.SharedPools) (any, error) {
		return listPages(ctx, days, shared)
	})
	admin.Answer(pageQuestion, func(ctx context.Context, ids string, shared seam.SharedPools) (any, error) {
		return pagesWith(ctx, strings.Fields(ids), shared)
	})
}

const (
	// pagesPatience is how long replicas have for an answer about pages, which
	// may be in a slow storage.
	pagesPatience = 5 * time.Second
	// maxPagesAtOnce and maxRowsAtOnce limit one question, and its answer,
	// unless a single page is larger.
	maxPagesAtOnce, maxRowsAtOnce = 80, 20_000
	// maxSumRows limits the rows of all pages from other replicas.
	maxSumRows = 2_000_000
)

// ofEngine reports whether replicas that share a state engine exchange pages of
// the pool. A pool that was removed or renamed has no engine, but its pages are
// exchanged, too.
func ofEngine(shared seam.SharedPools, pool string) bool {
	return slices.Contains(shared.Pools, pool) || !slices.Contains(shared.Elsewhere, pool)
}

// listPages lists the pages of a period.
func listPages(ctx context.Context, days string, shared seam.SharedPools) (all []listing, err error) {
	of, err := periodOf(days)
	if err != nil || string(of) != days {
		return nil, cmp.Or(err, errors.New("not a period"))
	}
	pages, err := Pages(ctx, func(w Where) bool { return of.has(w.Day) && ofEngine(shared, w.Pool) })
	for _, p := range pages {
		all = append(all, listing{p, len(p.Rows)})
	}
	return all, err
}

// pagesWith returns the pages with these ids.
func pagesWith(ctx context.Context, ids []string, shared seam.SharedPools) ([]Page, error) {
	pages, err := Pages(ctx, func(w Where) bool { return slices.Contains(ids, w.ID) && ofEngine(shared, w.Pool) })
	return append([]Page{}, pages...), err
}

// lists is the list of another replica.
type lists struct {
	id   string
	rows []listing
}

// unread is a page whose rows are not read yet.
type unread struct {
	Page
	Rows json.RawMessage `json:"rows"`
}

// pageSum collects the pages of a period and of some pools from several
// replicas.
type pageSum struct {
	of     period
	inPool func(string) bool
	pages  []Page
	// have has the number of changes in the latest version of each page. rows
	// is how many rows came from other replicas.
	have map[Where]int64
	rows int
}

func (s *pageSum) add(p Page) {
	s.have[p.Where()] = max(s.have[p.Where()], p.Changes)
	s.pages = append(s.pages, p)
}

// lacks reports whether p is later than the version of the page that the sum
// has.
func (s *pageSum) lacks(p Page) bool {
	changes, known := s.have[p.Where()]
	return !known || changes < p.Changes
}

// wants reports whether a page in a replica's answer belongs to the sum.
func (s *pageSum) wants(a seam.PeerAnswer, p Page) bool {
	return s.of.has(p.Day) && s.inPool(p.Pool) && ofEngine(a.SharedPools, p.Pool) && IsID(p.ID)
}

// list asks the replicas with this name for lists of their pages.
func (s *pageSum) list(ctx context.Context, replica string) (listed []lists, r admin.Read, err error) {
	number := 0
	r, err = admin.AskAll(ctx, replica, pagesQuestion+" "+string(s.of), pagesPatience,
		admin.MaxRow, func(a seam.PeerAnswer, l listing) (pool string, full bool) {
			if !s.wants(a, l.Page) {
				return "", false
			}
			if len(listed) == 0 || listed[len(listed)-1].id != a.ID {
				listed = append(listed, lists{id: a.ID})
			}
			list := &listed[len(listed)-1]
			list.rows = append(list.rows, l)
			number++
			return l.Pool, number >= admin.MaxSum
		})
	return listed, r, err
}

// fetch asks for the pages with these ids. It ignores errors: pages of a
// replica that does not answer are still lacking afterwards.
func (s *pageSum) fetch(ctx context.Context, ids []string) {
	if len(ids) == 0 {
		return
	}
	_, _ = admin.AskAll(ctx, admin.EveryReplica, pageQuestion+" "+strings.Join(ids, " "), pagesPatience,
		admin.MaxAnswer, func(a seam.PeerAnswer, p unread) (pool string, full bool) {
			if !s.wants(a, p.Page) || !slices.Contains(ids, p.ID) || !s.lacks(p.Page) {
				return "", false
			}
			ok := admin.ReadRows(bytes.NewReader(p.Rows), maxSumRows-s.rows, admin.MaxRow, func(row Row) bool {
				p.Page.Rows = append(p.Page.Rows, row)
				return true
			})
			if ok {
				s.rows += len(p.Page.Rows)
				s.add(p.Page)
			}
			return p.Pool, !ok
		})
}

// fetchAll asks for the listed pages that are lacking, some at a time.
func (s *pageSum) fetchAll(ctx context.Context, listed []lists) {
	var ids []string
	rows := 0
	for _, list := range listed {
		for _, l := range list.rows {
			if !s.lacks(l.Page) || slices.Contains(ids, l.ID) {
				continue
			}
			ids, rows = append(ids, l.ID), rows+l.Rows
			if len(ids) >= maxPagesAtOnce || rows > maxRowsAtOnce {
				s.fetch(ctx, ids)
				ids, rows = nil, 0
			}
		}
	}
	s.fetch(ctx, ids)
}

// allPages returns the pages of all replicas, or of one. local are this
// replica's pages.
func allPages(ctx context.Context, replica string, of period, inPool func(string) bool,
	local []Page) (all admin.All[Page], err error) {
	ctx, cancel := context.WithTimeout(ctx, time.Minute) // however many pages somebody lists
	defer cancel()
	s := pageSum{of: of, inPool: inPool, have: make(map[Where]int64)}
	for _, p := range local {
		s.add(p)
	}
	listed, r, err := s.list(ctx, replica)
	if err != nil {
		return all, err
	}
	s.fetchAll(ctx, listed)
	wanted := make(map[string]bool)
	for _, list := range listed {
		for _, l := range list.rows {
			wanted[l.ID] = true
		}
		if slices.ContainsFunc(list.rows, func(l listing) bool { return s.lacks(l.Page) }) {
			r.Replicas[slices.IndexFunc(r.Replicas,
				func(seen admin.Seen) bool { return seen.ID == list.id })].Included = false
		}
	}
	if !r.Self {
		s.pages = slices.DeleteFunc(s.pages, func(p Page) bool { return !wanted[p.ID] }) // another replica's alone
	}
	return admin.All[Page]{Connected: r.Connected, Replicas: r.Replicas, Rows: Newest(s.pages)}, nil
}
