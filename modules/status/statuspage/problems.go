package statuspage

import (
	"cmp"
	"slices"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/apierror"
	"github.com/openai-lb/caddy-openai-lb/internal/keys"
	"github.com/openai-lb/caddy-openai-lb/internal/metrics"
	"github.com/openai-lb/caddy-openai-lb/internal/pools"
	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
	"github.com/openai-lb/caddy-openai-lb/modules/status"
)

// problem is why clients may not be served, or only by another backend.
type problem struct {
	// NeedsOperator reports whether the problem lasts until an operator solves it.
	NeedsOperator bool `json:"needs_operator"`
	// Backend is empty if the problem is about all backends of the models, or about none.
	Backend string `json:"backend"`
	Class   string `json:"class"`
	Status  int    `json:"status"`
	Cause   string `json:"cause"`
	// Models are the models that the problem is about. Without any, it is about the whole
	// backend.
	Models []string `json:"models"`
	// Until and UntilReached are from the bench, if there is one.
	Since        *time.Time `json:"since"`
	Until        *time.Time `json:"until"`
	UntilReached bool       `json:"until_reached"`
	// Meaning is the problem in words, and Next what an operator must do, or what the balancer does meanwhile.
	Meaning string `json:"meaning"`
	Next    string `json:"next"`
	// RunbookURL is the page that says what to do.
	RunbookURL string `json:"runbook_url"`
}

// The classes of problems that are not classes of a reply.
const (
	// unhealthy: the backend fails active health checks.
	unhealthy = "unhealthy"
	// unavailable: no backend can serve a model.
	unavailable = "unavailable"
	// notInTouch: this replica cannot reach the engine of state.
	notInTouch = "not_in_touch"
	// noFirstByte: requests wait for much longer than is usual, and have got no byte.
	noFirstByte = "no_first_byte"
	// staleSecret: a secret could not be reloaded from its file. The cause is its name.
	staleSecret = "stale_secret"
	// notWritten: changes wait to be written to a disk. The cause is what they are of.
	notWritten = "not_written"
	// configDiffers: other replicas have other configurations. The cause is their hosts.
	configDiffers = "config_differs"
)

// problemsOf returns the problems of a pool. That a backend throttles is not a problem
// while another one serves: a provisioned deployment throttles by design. A problem
// that needs an operator outlives its bench, until a request shows that it is solved.
func problemsOf(backends []backendStatus, models []modelStatus, secrets []keys.Secret) []problem {
	problems := []problem{}
	add := func(p problem) {
		i := slices.IndexFunc(problems, func(q problem) bool {
			return p.Backend == q.Backend && p.Class == q.Class && p.Status == q.Status && p.Cause == q.Cause && p.NeedsOperator == q.NeedsOperator
		})
		if i < 0 {
			if p.Models == nil {
				p.Models = []string{}
			}
			problems = append(problems, p.explained())
			return
		}
		same := &problems[i]
		same.Models = append(same.Models, p.Models...)
		if p.Since != nil && p.Since.Before(*same.Since) {
			same.Since = p.Since
		}
		if p.Until != nil && p.Until.After(*same.Until) {
			same.Until = p.Until
		}
	}
	for _, m := range models {
		if class := whyNone(m.Model); class != "" {
			add(problem{NeedsOperator: class == unavailable, Class: class, Models: []string{m.Model.Model}})
		}
	}
	for _, secret := range secrets {
		if since := secret.StaleSince; !since.IsZero() {
			add(problem{NeedsOperator: true, Class: staleSecret, Cause: secret.Name, Since: &since})
		}
	}
	for _, b := range backends {
		if !b.Healthy {
			add(problem{Backend: b.Name, Class: unhealthy})
		}
		for _, s := range b.Silences {
			add(problem{Backend: b.Name, Class: s.Class(), Models: []string{s.Model}, Since: &s.Since})
		}
		for i, bench := range slices.Concat(b.Benches, b.Due) {
			due := i >= len(b.Benches)
			if bench.Class == string(verdict.Throttled) || bench.ServiceTier != "" || due && !bench.NeedsOperator {
				continue
			}
			p := problem{
				NeedsOperator: bench.NeedsOperator, Backend: b.Name, Class: bench.Class, Status: bench.Status, Cause: bench.Cause,
				Since: &bench.Since, Until: &bench.Until, UntilReached: bench.UntilReached,
			}
			if bench.Scope == status.ModelScope {
				p.Models = []string{bench.Model}
			}
			add(p)
		}
	}
	rank := func(p problem) (rank int) {
		if !p.NeedsOperator {
			rank = 2
		}
		return rank + min(len(p.Backend), 1) // those of no backend come first
	}
	slices.SortStableFunc(problems, func(a, b problem) int { return cmp.Compare(rank(a), rank(b)) })
	return problems
}

// remedies are those of the classes that are not classes of a reply.
var remedies = map[string]verdict.Remedy{
	unavailable:           {Meaning: "no backend is available", Next: "Solve the problems of its backends."},
	unhealthy:             {Meaning: "fails health checks", Next: "It is checked again at each health_interval. The log has the cause."},
	noFirstByte:           {Meaning: "requests wait and get no byte", Next: "See which backends hang, and how their provider is. Add or resume others."},
	status.Slow:           {Meaning: "answers much later than usual", Next: "Requests go to others first. It ends with a reply in time."},
	apierror.AllThrottled: {Meaning: "all backends throttle", Next: "Each has said when it accepts requests again. If that is usual, add capacity."},
}

// explained returns the problem with its meaning, its remedy and its runbook.
func (p problem) explained() problem {
	its := remedyOf(p)
	p.Meaning, p.Next, p.RunbookURL = its.Meaning, its.Next, runbookURL(p.Class)
	return p
}

// remedyOf returns how a problem ends.
func remedyOf(p problem) verdict.Remedy {
	switch p.Class {
	case staleSecret:
		return verdict.Remedy{Meaning: "could not reload " + p.Cause, Next: "Mend the file. The log says what is wrong with it."}
	case notWritten:
		return verdict.Remedy{Meaning: "not saved: " + recordNames[p.Cause], Next: "Free or mend the disk or the storage that the log names. A restart now loses it."}
	case configDiffers:
		return verdict.Remedy{Meaning: "configured differently: " + cut(p.Cause), Next: "Load the same configuration at each replica."}
	}
	if its, ok := remedies[p.Class]; ok {
		return its
	}
	return verdict.RemedyOf(verdict.Class(p.Class), p.Cause)
}

// recordNames are what pools keep on disk, in words, by the names of the records.
var recordNames = map[string]string{"bill": "the bill", "journal": "the journal of the bill", "limits": "the use of limits", "stored_objects": "who owns stored objects"}

// unwritten returns the problems that what a pool keeps is not on disk.
func unwritten(records []pools.State, now time.Time) (problems []problem) {
	for _, r := range records {
		if r.Unwritten(now) {
			problems = append(problems, problem{NeedsOperator: true, Class: notWritten, Cause: r.Name, Models: []string{}, Since: &r.Waits}.explained())
		}
	}
	return problems
}

// waits returns the problem that several requests have waited for too long, if they have. One alone may be slow by itself.
func (s poolStatus) waits() []problem {
	if !s.Waiting.Stuck() {
		return []problem{}
	}
	return []problem{problem{NeedsOperator: true, Class: noFirstByte, Models: []string{}}.explained()}
}

// whyNone returns why no backend can serve the model. It is empty if one can.
func whyNone(m status.Model) (class string) {
	class = apierror.AllThrottled
	for _, b := range m.Backends {
		switch {
		case b.Class == "" && b.Healthy && b.State != status.Silent: // it may be drained, and is used nevertheless
			return ""
		case b.Class != string(verdict.Throttled):
			class = unavailable
		}
	}
	if len(m.Backends) == 0 {
		return "" // a model that a client made up
	}
	return class
}

// troubleshooting is the page that says what to do about problems.
const troubleshooting = "https://github.com/openai-lb/caddy-openai-lb/blob/main/docs/troubleshooting.md"

// runbooks are its sections, by the class of a problem or of an answer.
var runbooks = map[string]string{
	unavailable:                  "the-readiness-probe-fails",
	notInTouch:                   "a-replica-is-not-connected",
	noFirstByte:                  "requests-wait-and-get-no-byte",
	unhealthy:                    "a-backend-gets-no-requests",
	staleSecret:                  "a-new-key-is-not-accepted",
	notWritten:                   "the-disk-is-full",
	configDiffers:                "replicas-have-different-configurations",
	status.Silent:                "a-backend-is-silent",
	status.Slow:                  "a-backend-is-silent",
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

// runbookURL returns the section that says what to do about a class. For mistakes of
// callers it may be empty.
func runbookURL(class string) string {
	section, ok := runbooks[class]
	switch {
	case ok:
	case metrics.FaultOf(class) == metrics.ServiceFault:
		section = "many-requests-fail"
	default:
		return ""
	}
	return troubleshooting + "#" + section
}
