package statuspage

import (
	"cmp"
	"fmt"
	"html"
	"maps"
	"math"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/admin"
	"github.com/openai-lb/caddy-openai-lb/modules/status"
)

const (
	// maxCallers is how many callers of a pool the view of callers shows, and
	// topCallers how many the first page does.
	maxCallers, topCallers = 100, 10
	// maxSearch is how many letters of a search count.
	maxSearch = 64
)

// view is which part of the page a browser looks at.
type view struct {
	// callers reports whether it is that of callers, of which search finds some
	// by their names and tiers.
	callers bool
	search  string
}

func viewOf(r *http.Request) view {
	query := r.URL.Query()
	letters := []rune(strings.TrimSpace(strings.ToValidUTF8(query.Get("search"), "")))
	return view{query.Has("callers"), string(letters[:min(len(letters), maxSearch)])}
}

// of returns what the view shows of a status.
func (v view) of(s Status) Status {
	s.Pools = slices.Clone(s.Pools)
	search := strings.ToLower(v.search)
	for i := range s.Pools {
		p := &s.Pools[i]
		p.Callers = []status.Caller{}
		p.Found = 0
		for _, c := range p.callers {
			if strings.Contains(strings.ToLower(c.Name+"\n"+c.Tier), search) {
				if p.Found++; p.Found <= maxCallers {
					p.Callers = append(p.Callers, c)
				}
			}
		}
		p.MoreCallers = p.Found - len(p.Callers)
	}
	return s
}

// tools returns the links between the views, and the search, as HTML. They are
// outside of the part of the page that changes.
func (v view) tools() string {
	const links = `<nav class="views" aria-label="Views"><a href="?"%s>Backends</a> <a href="?callers"%s>Callers</a></nav>`
	const current = ` aria-current="page"`
	if !v.callers {
		return fmt.Sprintf(links, current, "")
	}
	return fmt.Sprintf(links, "", current) + `<form id="find" role="search"><input type="hidden" name="callers"><label for="search">Search callers and tiers</label> ` +
		`<input type="search" id="search" name="search" maxlength="64" autocomplete="off" spellcheck="false" value="` +
		html.EscapeString(v.search) + `"> <button>Search</button></form>`
}

// The methods below are for the template.

// TopCallers returns the callers that the first page shows.
func (s poolStatus) TopCallers() []status.Caller { return s.Callers[:min(topCallers, len(s.Callers))] }

// NumberOfCallers returns how many callers there are.
func (s poolStatus) NumberOfCallers() int { return len(s.callers) }

// AllCallers returns the text of the link to the view of callers.
func (s poolStatus) AllCallers() string {
	if len(s.callers) == 1 {
		return "The caller"
	}
	return "All " + several(len(s.callers), "caller")
}

// CallersSummary returns a sentence about all callers of the pool, and those
// that were found.
func (s poolStatus) CallersSummary() string {
	var refused, refusals int64
	for _, c := range s.callers {
		if n := refusedOf(c); n > 0 {
			refused, refusals = refused+1, refusals+int64(n)
		}
	}
	were, of := "were", fmt.Sprintf(" of %d of them", refused)
	if refusals == 1 {
		were = "was"
	}
	if len(s.callers) == 1 {
		of = ""
	}
	sentence := fmt.Sprintf("%s. In the last hour, %s%s %s refused.",
		several(len(s.callers), "caller"), several(refusals, "request"), of, were)
	if s.Found < len(s.callers) {
		sentence = fmt.Sprintf("%d found of ", s.Found) + sentence
	}
	return sentence
}

// fresh is how old the answers of other replicas are before the page says so.
const fresh = 10 * time.Second

// From returns a sentence about the replicas that the page shows sums over. It
// is empty if this one is alone.
func (s Status) From() string {
	var from, missing []string
	for _, seen := range s.SumsOver {
		name := replicaName(seen)
		switch {
		case seen.Self:
			from = append([]string{name + " (this one)"}, from...)
		case seen.Included:
			from = append(from, name)
		default:
			missing = append(missing, name)
		}
	}
	list := func(names []string) string {
		if more := len(names) - maxShown; more > 1 {
			names = append(slices.Clip(names[:maxShown]), fmt.Sprintf("%d more", more))
		}
		return strings.Join(names, ", ")
	}
	asOf := ""
	if s.Time.Sub(s.asked) >= fresh || s.cutOff {
		asOf = " As of " + s.asked.UTC().Format(time.TimeOnly) + " UTC."
	}
	if s.cutOff {
		asOf += " Not connected to other replicas now."
	}
	switch {
	case len(s.SumsOver) == 0:
		return ""
	case !s.connected:
		return "Not connected to other replicas: this one alone."
	case len(missing) > 0:
		return fmt.Sprintf("Sums over %s: %s. Without an answer: %s.%s",
			several(len(from), "replica"), list(from), list(missing), asOf)
	case len(from) == 1:
		return "No other replica: " + list(from) + "."
	}
	return fmt.Sprintf("Sums over %d replicas: %s.%s", len(from), list(from), asOf)
}

func replicaName(seen admin.Seen) string {
	return cut(cmp.Or(seen.Host, "replica")) + " " + cut(seen.ID[:min(8, len(seen.ID))])
}

// refusedOf returns how many requests of a caller were refused in the last
// hour.
func refusedOf(c status.Caller) (sum uint64) {
	for _, n := range c.LastHour.Refused {
		sum += n
	}
	return sum
}

// refusals returns what has refused requests of a caller in the last hour, the
// most frequent first.
func refusals(c status.Caller) (texts []string) {
	refused := c.LastHour.Refused
	names := slices.SortedFunc(maps.Keys(refused),
		func(a, b string) int { return cmp.Or(cmp.Compare(refused[b], refused[a]), cmp.Compare(a, b)) })
	for _, name := range names {
		texts = append(texts, short(float64(refused[name]))+" "+cut(words(name)))
	}
	return texts
}

// limitView is what the page shows of a limit of a caller.
type limitView struct {
	// Text says how much is used, as `1.2 M of 5 M tokens/day`, Then the tier
	// of requests over the limit, and Resets when nothing is used any more.
	Text, Percent, Then, Resets string
	Width                       float64
	Full                        bool
}

// limitsOf returns the limits of a caller.
func limitsOf(c status.Caller) (views []limitView) {
	for _, l := range c.Limits {
		ratio, resets := l.UsedRatio(), ""
		if l.Resets != nil {
			layout := "15:04:05"
			if l.Window == "day" || l.Window == "month" {
				layout = "2 Jan 15:04"
			}
			resets = l.Resets.UTC().Format(layout)
		}
		text := fmt.Sprintf("%s of %s %s/%s", short(float64(l.Used)), short(float64(l.Limit)), cut(l.Kind),
			cut(l.Window))
		if l.Model != "" {
			text += " of " + cut(l.Model)
		}
		views = append(views, limitView{text, percent(&ratio), l.Then, resets,
			math.Round(100 * min(1, max(0, ratio))), ratio >= 1})
	}
	return views
}

// UnlimitedKeys returns the callers without limits as a sentence.
func (s poolStatus) UnlimitedKeys() string {
	return "Client keys without limits, because their callers have no block: " +
		firstOf(maxCallers, s.Unlimited, cut) + "."
}
