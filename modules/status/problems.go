package status

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/apierror"
	"github.com/openai-lb/caddy-openai-lb/internal/cli"
	"github.com/openai-lb/caddy-openai-lb/internal/metrics"
	"github.com/openai-lb/caddy-openai-lb/internal/pool"
	"github.com/openai-lb/caddy-openai-lb/internal/ratelimit"
	"github.com/openai-lb/caddy-openai-lb/internal/seam"
	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
)

// Problem is a reason why clients may not be served, or only by another
// backend.
type Problem struct {
	// NeedsOperator reports whether the problem lasts until an operator solves
	// it.
	NeedsOperator bool `json:"needs_operator"`
	// Backend is empty if the problem is about all backends of the models, or
	// about none.
	Backend string `json:"backend"`
	Class   string `json:"class"`
	Status  int    `json:"status"`
	Cause   string `json:"cause"`
	// Detail is more specific than the cause: that a certificate has expired,
	// or the folder that is full. It may be empty.
	Detail string `json:"detail"`
	// Models are the models that the problem is about. Without any, it is about
	// the whole backend.
	Models []string `json:"models"`
	// Until and UntilReached are from the cooldown, if there is one.
	Since        *time.Time `json:"since"`
	Until        *time.Time `json:"until"`
	UntilReached bool       `json:"until_reached"`
	// Meaning is the problem in words, and Next what an operator must do, or
	// what the balancer does meanwhile.
	Meaning string `json:"meaning"`
	Next    string `json:"next"`
	// RunbookURL is the page that says what to do.
	RunbookURL string `json:"runbook_url"`
	// Replicas are the replicas that have the problem. It is empty if all have
	// it, or only one was asked.
	Replicas []string `json:"replicas,omitempty"`
}

// The classes of problems that are not classes of a reply. Package verdict
// describes them.
const (
	Unhealthy     = string(verdict.Unhealthy)
	OverQuota     = string(verdict.OverQuota) // the cause is the quota's kind and window
	Unavailable   = string(verdict.Unavailable)
	NotInTouch    = string(verdict.NotInTouch)
	NoFirstByte   = string(verdict.NoFirstByte)
	StaleSecret   = string(verdict.StaleSecret)   // the cause is the secret's name
	NotWritten    = string(verdict.NotWritten)    // the cause is the name of the record, the detail its folder
	ReloadFailed  = string(verdict.ReloadFailed)  //
	ConfigDiffers = string(verdict.ConfigDiffers) // the cause are the hosts of the others
)

// Problems returns the problems of the pool and of its models. A backend that
// throttles is not a problem while another one serves, because a provisioned
// deployment throttles by design. A problem that needs an operator stays after
// its cooldown, until a request shows that it is solved. states are the state
// engines.
func (p Pool) Problems(now time.Time, models []Model, states []seam.EngineStatus) []Problem {
	list := problemList{}
	if metrics.ReloadFailed() {
		list.add(Problem{Class: ReloadFailed})
	}
	for _, r := range p.Records {
		if r.Unwritten(now) {
			list.add(Problem{Class: NotWritten, Cause: r.Name, Detail: r.Folder, Since: &r.Waits})
		}
	}
	// A single request may just be slow.
	if metrics.Of(p.Name).FirstBytes.At(now).Stuck() {
		list.add(Problem{Class: NoFirstByte})
	}
	if others, since := seam.Differing(states, p.Name); len(others) > 0 && now.Sub(since) >= tolerance {
		list.add(Problem{Class: ConfigDiffers, Cause: hostsOf(others), Since: &since})
	}
	for _, s := range states {
		if !s.InTouch && slices.Contains(s.Pools, p.Name) {
			list.add(Problem{Class: NotInTouch})
		}
	}
	list.addModels(models)
	for _, secret := range p.Secrets {
		if since := secret.StaleSince; !since.IsZero() {
			list.add(Problem{Class: StaleSecret, Cause: secret.Name, Since: &since})
		}
	}
	for _, b := range p.Backends {
		list.addBackend(b)
	}
	list.sort()
	return list
}

// PoolProblem is a problem and its pool.
type PoolProblem struct {
	Pool string `json:"pool"`
	Problem
}

// about returns the first models that the problem is about, as the beginning of
// a line.
func (p Problem) about() string {
	if len(p.Models) == 0 {
		return ""
	}
	return firstOf(p.Models) + ":"
}

// allProblems returns the problems of these pools that this replica knows.
func allProblems(now time.Time, inPool func(string) bool) []PoolProblem {
	all, states := []PoolProblem{}, seam.Statuses()
	for _, p := range Pools(now, nil) {
		if !inPool(p.Name) {
			continue
		}
		for _, problem := range p.Problems(now, p.Models(p.others()...), states) {
			all = append(all, PoolProblem{p.Name, problem})
		}
	}
	return all
}

// problemList is a list of problems without duplicates.
type problemList []Problem

func (l problemList) sort() {
	rank := func(p Problem) (rank int) {
		if !p.NeedsOperator {
			rank = 2
		}
		return rank + min(len(p.Backend), 1) // those of no backend come first
	}
	slices.SortStableFunc(l, func(a, b Problem) int { return cmp.Compare(rank(a), rank(b)) })
}

// add adds a problem that no cooldown has: whether it needs an operator is in
// the table of remedies.
func (l *problemList) add(p Problem) {
	p.NeedsOperator = verdict.RemedyOf(verdict.Class(p.Class), p.Cause).NeedsOperator
	l.merge(p)
}

// merge adds a problem, or its models to an equal one.
func (l *problemList) merge(p Problem) {
	i := slices.IndexFunc(*l, func(q Problem) bool {
		return p.Backend == q.Backend && p.Class == q.Class && p.Status == q.Status && p.Cause == q.Cause &&
			p.NeedsOperator == q.NeedsOperator
	})
	if i < 0 {
		if p.Models == nil {
			p.Models = []string{}
		}
		p.describe()
		*l = append(*l, p)
		return
	}
	same := &(*l)[i]
	same.Models, same.Replicas = append(same.Models, p.Models...), append(same.Replicas, p.Replicas...)
	if p.Since != nil && (same.Since == nil || p.Since.Before(*same.Since)) {
		same.Since = p.Since
	}
	if p.Until != nil && (same.Until == nil || p.Until.After(*same.Until)) {
		same.Until = p.Until
	}
	if same.Detail == "" && p.Detail != "" {
		same.Detail = p.Detail
		same.describe()
	}
}

// describe sets the texts of the problem.
func (p *Problem) describe() {
	remedy := verdict.RemedyOf(verdict.Class(p.Class), p.Cause)
	p.Meaning, p.Next, p.RunbookURL = remedy.Meaning, remedy.Next, RunbookURL(p.Class)
	about := p.Detail
	switch p.Class {
	case StaleSecret:
		about = p.Cause
	case ConfigDiffers:
		about = pool.CutText(p.Cause, maxWord)
	case NotWritten:
		about = recordNames[p.Cause] + ", in " + cmp.Or(p.Detail, "Caddy's storage")
	}
	if about != "" {
		p.Meaning += ": " + about
	}
}

// recordNames describes the records of a pool on disk, by their names.
var recordNames = map[string]string{
	"bill": "the bill", "journal": "the journal of the bill", "limits": "the use of limits", "quotas": "the use of quotas", "stored_objects": "who owns stored objects",
}

func (l *problemList) addModels(models []Model) {
	for _, m := range models {
		if class := WhyNone(m); class != "" {
			l.add(Problem{Class: class, Models: []string{m.Model}})
		}
	}
}

func (l *problemList) addBackend(b Backend) {
	var problems problemList
	if !b.Healthy {
		problems.add(Problem{Backend: b.Name, Class: Unhealthy})
	}
	for _, s := range b.Silences {
		problems.add(Problem{Backend: b.Name, Class: s.Class(), Models: []string{s.Model}, Since: &s.Since})
	}
	for _, q := range b.Quotas {
		if q.isUsedUp() {
			problems.add(q.problem(b.Name))
		}
	}
	for i, cooldown := range slices.Concat(b.Cooldowns, b.Due) {
		due := i >= len(b.Cooldowns)
		if cooldown.Class == string(verdict.Throttled) || cooldown.ServiceTier != "" || due && !cooldown.NeedsOperator {
			continue
		}
		p := Problem{
			NeedsOperator: cooldown.NeedsOperator, Backend: b.Name, Class: cooldown.Class, Status: cooldown.Status,
			Cause: cooldown.Cause, Detail: cooldown.Detail,
			Since: &cooldown.Since, Until: &cooldown.Until, UntilReached: cooldown.UntilReached,
		}
		if cooldown.Scope == ModelScope {
			p.Models = []string{cooldown.Model}
		}
		problems.merge(p)
	}
	for _, p := range problems.withoutContradictions() {
		l.merge(p)
	}
}

// isUsedUp reports whether a quota by the day or the month has a hundredth or
// less left: most requests need more than a few tokens. Shorter quotas get room
// back bit by bit, so that they would be used up at one moment and not at the
// next.
func (q Quota) isUsedUp() bool {
	return (q.Window == ratelimit.Day.String() || q.Window == ratelimit.Month.String()) &&
		q.Used > 0 && q.Left <= q.Limit/100
}

// problem returns the problem of a backend whose quota is used up.
func (q Quota) problem(backend string) Problem {
	return Problem{Backend: backend, Class: OverQuota, Cause: q.Kind + "/" + q.Window, Until: &q.Ends,
		Detail: fmt.Sprintf("%d %s per %s, until %s", q.Limit, q.Kind, q.Window, cli.UTC(q.Ends))}
}

// nearness says how near to an answer a backend is that has a problem of the
// class: one that is not reached accepts no request, and one that is silent has
// accepted it.
func nearness(class string) int {
	switch class {
	case string(verdict.Unreachable):
		return 0
	case Unhealthy:
		return 1
	case Silent:
		return 2
	case Slow:
		return 3
	}
	return 4
}

// Current returns the silences of the backend that are true at the same time as
// its other problems, and what it has not been tried for.
func (b Backend) Current() (silences []Silence, untried []Untried) {
	var problems problemList
	problems.addBackend(b)
	for _, s := range b.Silences {
		if slices.ContainsFunc(problems,
			func(p Problem) bool { return p.Class == s.Class() && slices.Contains(p.Models, s.Model) }) {
			silences = append(silences, s)
		}
	}
	if !slices.ContainsFunc(problems, func(p Problem) bool { return nearness(p.Class) < nearness(Silent) }) {
		untried = b.Untried
	}
	return silences, untried
}

// withoutContradictions returns those of a backend's problems that can be true
// at the same time. While a backend recovers, it has passed one test and fails
// the next one, and what was found out earlier has not been tested again: a
// backend that cannot be reached is not called silent, too, and one that is
// silent for a model is not said to be slow for it. A problem that needs an
// operator stays.
func (l problemList) withoutContradictions() (kept []Problem) {
	for _, p := range l {
		models := slices.Clone(p.Models)
		hidden := !p.NeedsOperator && slices.ContainsFunc(l, func(q Problem) bool {
			if nearness(q.Class) >= nearness(p.Class) {
				return false
			}
			if len(q.Models) == 0 {
				return true
			}
			if len(models) == 0 {
				return false
			}
			models = slices.DeleteFunc(models, func(model string) bool { return slices.Contains(q.Models, model) })
			return len(models) == 0
		})
		if !hidden {
			p.Models = models
			kept = append(kept, p)
		}
	}
	return kept
}

// tolerance is how long configs may differ before that is a problem, because
// replicas are updated one after another. The alert has the same limit.
const tolerance = 5 * time.Minute

// hostsOf returns the hosts of the first replicas, and how many more there are.
func hostsOf(peers []seam.Peer) string {
	hosts := make([]string, len(peers))
	for i, p := range peers {
		hosts[i] = cmp.Or(p.Host, p.ID)
	}
	return firstOf(hosts)
}

// maxNamed is how many names a list shows.
const maxNamed = 3

// firstOf lists the first names, and how many more there are.
func firstOf(names []string) string {
	text := strings.Join(names[:min(maxNamed, len(names))], ", ")
	if more := len(names) - maxNamed; more > 0 {
		text += fmt.Sprintf(", %d more", more)
	}
	return text
}

// WhyNone returns the reason why no backend can serve the model. It is empty if
// one can.
func WhyNone(m Model) (class string) {
	class = apierror.AllThrottled
	for _, b := range m.Backends {
		switch {
		case b.Class == "" && b.Healthy && b.State != Silent: // it may be drained, and is used nevertheless
			return ""
		case b.Class != string(verdict.Throttled):
			class = Unavailable
		}
	}
	if len(m.Backends) == 0 {
		return "" // a model that a client made up
	}
	return class
}

// Troubleshooting is the docs page about problems.
const Troubleshooting = "https://github.com/openai-lb/caddy-openai-lb/blob/main/docs/troubleshooting.md"

// runbooks maps the class of a problem or of an answer to a section of that
// page.
var runbooks = map[string]string{
	Unavailable:                  "no-backend-is-available",
	NotInTouch:                   "a-replica-is-not-connected",
	NoFirstByte:                  "requests-wait-and-get-no-byte",
	Unhealthy:                    "a-backend-gets-no-requests",
	StaleSecret:                  "a-new-key-is-not-accepted",
	NotWritten:                   "the-disk-is-full",
	ReloadFailed:                 "a-reload-has-failed",
	ConfigDiffers:                "replicas-have-different-configurations",
	OverQuota:                    "a-backend-has-used-up-its-quota",
	Silent:                       "a-backend-is-silent",
	Slow:                         "a-backend-is-silent",
	apierror.OwnerThrottled:      "429-the-account-that-stores--is-rate-limited",
	apierror.AllThrottled:        "all-backends-throttle",
	apierror.AllBusy:             "429-all-backends-are-busy",
	apierror.RetryLater:          "429-some-backends-are-rate-limited",
	apierror.CallerLimited:       "callers-get-errors",
	apierror.NoSuchModel:         "404-for-a-model",
	apierror.Unauthenticated:     "everything-is-a-401",
	apierror.InvalidRequest:      "404-unknown_url",
	string(verdict.Credential):   "502-upstream_credentials_rejected",
	string(verdict.NoCredential): "503-upstream_credential_unavailable",
	string(verdict.NotPermitted): "502-upstream_credentials_rejected",
	string(verdict.Quota):        "429-and-it-stays-for-minutes",
	string(verdict.NoModel):      "404-for-a-model",
	string(verdict.Unreachable):  "502-upstream_unreachable",
	string(verdict.Timeout):      "504-upstream_timeout",
	string(verdict.Throttled):    "429-while-a-backend-is-idle",
	string(verdict.BrokenStream): "a-stream-breaks-off",

	string(verdict.ClientLeftWaiting): "a-backend-is-silent",
}

// RunbookURL returns the URL of the section about a class. It may be empty for
// mistakes of callers.
func RunbookURL(class string) string {
	section, ok := runbooks[class]
	switch {
	case ok:
	case metrics.FaultOf(class) == metrics.ServiceFault:
		section = "many-requests-fail"
	default:
		return ""
	}
	return Troubleshooting + "#" + section
}
