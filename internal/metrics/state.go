package metrics

import (
	"slices"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/openai-lb/caddy-openai-lb/internal/pool"
	"github.com/openai-lb/caddy-openai-lb/internal/pools"
	"github.com/openai-lb/caddy-openai-lb/internal/ratelimit"
	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
)

// state collects the gauges of the pools in use.
type state struct{}

func desc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc(prometheus.BuildFQName(namespace, subsystem, name), help, labels, nil)
}

var (
	availableDesc = desc("backend_available",
		"Whether a backend is neither cooling down nor failing active health checks: 1 or 0. Without a deployment: for every one.",
		"pool", "backend", "deployment")
	remainingDesc = desc("cooldown_remaining_seconds",
		"How long a backend is still cooling down. Without a deployment: for every one.", "pool", "backend", "deployment")
	drainedDesc = desc("backend_drained",
		"Whether a backend is used only when no other is left: 1 or 0.", "pool", "backend")
	reasonsDesc = desc("backend_unavailable",
		"1 for each class for which a backend is cooling down, and each cause of unreachable. Except for throttled, that lasts until a request has shown that it is over.",
		"pool", "backend", "deployment", "class", "cause")
	infoDesc = desc("backend_info",
		"Always 1: the priority and the weight that the config gives a backend.", "pool", "backend", "priority", "weight")
	silentDesc = desc("silent",
		"Whether a backend has sent nothing to any request since several waited for too long: 1 or 0.",
		"pool", "backend", "deployment")
	slowDesc = desc("slow", "Whether a backend was silent, and has since sent bytes, but none in time: 1 or 0.",
		"pool", "backend", "deployment")
	usualDesc = desc("usual_first_byte_seconds", "The usual wait for the first byte of a reply, streamed or whole: of the sizes of requests, the longest.",
		"pool", "backend", "deployment", "kind")
	inFlightDesc  = desc("requests_in_flight", "Requests that a backend serves.", "pool", "backend")
	ratelimitDesc = desc("ratelimit_remaining",
		"What a backend last said is left of its rate limit.", "pool", "backend", "deployment", "type")
	quotaDesc = desc("quota_left_ratio",
		"The part that is left of a backend's limit, by its newest reply and what was sent since.",
		"pool", "backend", "deployment", "type")
	quotaUsedDesc = desc("backend_quota_used_ratio",
		"Which part of a quota of a backend is used, 0 to 1 and above.", "pool", "backend", "kind", "window")
	utilizationDesc = desc("deployment_utilization_ratio",
		"What a provisioned Azure deployment last said of its utilization, 0 to 1 and above.", "pool", "backend", "deployment")
	writtenDesc = desc("record_written_timestamp_seconds",
		"When the bill, its journal, the use of limits and quotas, or stored objects' owners were last written.",
		"pool", "record")
	unwrittenDesc = desc("record_unwritten_seconds",
		"How long the oldest change of the bill, its journal, the use of limits and quotas, or stored objects' owners waits to be written.",
		"pool", "record")
	staleDesc = desc("secret_stale",
		"Whether a secret in a file could not be reloaded, so that an older one is in use: 1 or 0.", "pool", "secret")
)

// Describe implements prometheus.Collector.
func (state) Describe(descs chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{
		availableDesc, remainingDesc, reasonsDesc, silentDesc, slowDesc, usualDesc, drainedDesc, infoDesc, inFlightDesc,
		ratelimitDesc, quotaDesc, quotaUsedDesc, utilizationDesc, limitUsedDesc, estimateDesc, forgottenDesc, staleDesc,
		writtenDesc, unwrittenDesc, waitingFirstDesc, oldestFirstDesc, overdueFirstDesc, soundDesc,
	} {
		descs <- d
	}
}

// Collect implements prometheus.Collector.
func (state) Collect(metrics chan<- prometheus.Metric) {
	now := time.Now()
	seen, named, callers := make(map[[2]string]bool), make(map[string]bool), newCallerGauges()
	for _, entry := range pools.Default.Entries() {
		p, states := Of(entry.Name), entry.Pool.Snapshot(now)
		if !named[p.name] { // others share the label of all that have none of their own
			named[p.name] = true
			p.FirstBytes.collect(p.name, now, metrics)
			collectSound(p.name, states, now, metrics)
		}
		for _, s := range states {
			b := p.Backend(s.Member.Name)
			if key := [2]string{p.name, b.name}; !seen[key] { // a plain reverse_proxy may have an upstream twice
				seen[key] = true
				b.collect(s, now, metrics)
				if entry.Quota != nil {
					b.collectQuotas(entry.Quota(s.Member, now), metrics)
				}
			}
		}
		callers.add(p.name, entry.Callers, now)
		for _, secret := range entry.Secrets.Secrets() {
			metrics <- prometheus.MustNewConstMetric(staleDesc, prometheus.GaugeValue, bit(!secret.StaleSince.IsZero()),
				p.name, clean(secret.Name))
		}
		collectRecords(p.name, entry.States(), now, metrics)
	}
	callers.collect(metrics)
}

// collectRecords collects when a pool's records on disk were last written.
func collectRecords(name string, records []pools.State, now time.Time, metrics chan<- prometheus.Metric) {
	for _, r := range records {
		waits := 0.0
		if !r.Waits.IsZero() {
			waits = now.Sub(r.Waits).Seconds()
		}
		metrics <- prometheus.MustNewConstMetric(unwrittenDesc, prometheus.GaugeValue, waits, name, r.Name)
		if !r.Written.IsZero() {
			metrics <- prometheus.MustNewConstMetric(writtenDesc, prometheus.GaugeValue,
				float64(r.Written.Unix()), name, r.Name)
		}
	}
}

func (b *Backend) collect(s pool.State, now time.Time, metrics chan<- prometheus.Metric) {
	gauge := func(d *prometheus.Desc, value float64, labels ...string) {
		metrics <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, value,
			append([]string{b.pool.name, b.name}, labels...)...)
	}
	gauge(drainedDesc, bit(s.Drained))
	gauge(infoDesc, 1, strconv.Itoa(s.Member.Priority), strconv.Itoa(s.Member.Weight))
	gauge(inFlightDesc, float64(s.InFlight))
	for _, r := range reasonsOf(s) {
		gauge(reasonsDesc, 1, r.deployment, r.class, r.cause)
	}
	b.collectLatencies(s, gauge)
	collectLimits(s, gauge)
	for _, deployment := range modelsOf(s.Member) {
		left := remaining(s, deployment, now)
		gauge(availableDesc, bit(left == 0 && s.Healthy), deployment)
		gauge(remainingDesc, left.Seconds(), deployment)
		last := b.last.seen(deployment)
		if last == nil {
			continue
		}
		for _, number := range []struct {
			*number
			kind string
		}{{&last.requests, "requests"}, {&last.tokens, "tokens"}} {
			if number.known.Load() {
				gauge(ratelimitDesc, number.value(), deployment, number.kind)
			}
		}
		if last.utilization.known.Load() {
			gauge(utilizationDesc, last.utilization.value(), deployment)
		}
	}
}

// collectQuotas collects which part of each of the backend's quotas is used.
func (b *Backend) collectQuotas(uses []ratelimit.Use, metrics chan<- prometheus.Metric) {
	for _, u := range uses {
		metrics <- prometheus.MustNewConstMetric(quotaUsedDesc, prometheus.GaugeValue, u.Ratio(), b.pool.name, b.name,
			u.Limit.Kind.String(), u.Limit.Unit.String())
	}
}

// collectLatencies collects the usual waits and the silences. For models that
// share a label, the longest wait counts, and any silence.
func (b *Backend) collectLatencies(s pool.State, gauge func(d *prometheus.Desc, value float64, labels ...string)) {
	usual, silent, slow := make(map[[2]string]time.Duration), make(map[string]bool), make(map[string]bool)
	for _, p := range s.Latencies {
		deployment := Deployment(s.Member, p.Model)
		silent[deployment] = silent[deployment] || !p.Since.IsZero() && !p.Slow
		slow[deployment] = slow[deployment] || p.Slow
		for kind, wait := range map[string]time.Duration{"whole": p.Whole, "streamed": p.Streamed} {
			usual[[2]string{deployment, kind}] = max(usual[[2]string{deployment, kind}], wait)
		}
	}
	for deployment, isSilent := range silent {
		gauge(silentDesc, bit(isSilent), deployment)
		gauge(slowDesc, bit(slow[deployment]), deployment)
	}
	for key, wait := range usual {
		if wait > 0 {
			gauge(usualDesc, wait.Seconds(), key[0], key[1])
		}
	}
}

// collectLimits collects how much is left of limits. For models that share a
// label, the smallest part counts.
func collectLimits(s pool.State, gauge func(d *prometheus.Desc, value float64, labels ...string)) {
	left := make(map[[2]string]float64)
	for _, l := range s.Limits {
		key := [2]string{Deployment(s.Member, l.Model), l.Kind}
		if least, ok := left[key]; l.HasRatio && (!ok || l.Ratio < least) {
			left[key] = l.Ratio
		}
	}
	for key, ratio := range left {
		gauge(quotaDesc, ratio, key[0], key[1])
	}
}

// Utilization returns the latest utilization of the member's provisioned
// deployments, by their names.
func (b *Backend) Utilization(m *pool.Member) map[string]float64 {
	ratios := make(map[string]float64)
	for _, model := range modelsOf(m) {
		if last := b.last.seen(model); last != nil && last.utilization.known.Load() {
			ratios[model] = last.utilization.value()
		}
	}
	return ratios
}

func bit(b bool) float64 {
	if b {
		return 1
	}
	return 0
}

// modelsOf returns the labels of a member's deployments: an empty one for all
// deployments together, one for each that the config names, and one for all
// other deployments.
func modelsOf(m *pool.Member) []string {
	names := []string{""}
	for _, name := range m.Models {
		names = append(names, clean(name))
	}
	if m.AnyModel {
		names = append(names, Other)
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// Deployment returns the label for the member's name of a model.
func Deployment(m *pool.Member, name string) string {
	switch {
	case name == "":
		return ""
	case slices.Contains(m.Models, name):
		return clean(name)
	}
	return Other
}

// remaining returns how long the member still cools down for a deployment. With
// an empty deployment, only cooldowns for all models count.
func remaining(s pool.State, deployment string, now time.Time) (left time.Duration) {
	for _, c := range s.Cooldowns {
		if c.Whole || !s.Member.Spares(c) && deployment != "" && Deployment(s.Member, c.Model) == deployment {
			left = max(left, c.Until.Sub(now))
		}
	}
	return left
}

// reason is the reason why a backend cools down. The cause is empty unless it
// has a separate remedy, because providers have any number of codes.
type reason struct {
	attempt
	cause string
}

// reasonsOf returns the reasons why the member cools down, without duplicates.
// A throttle ends when its time has passed. Any other reason, such as a refused
// key, stays after that until a request shows that it has ended. It does not
// stay for a model that a client made up, because there may be no further
// request.
func reasonsOf(s pool.State) (reasons []reason) {
	due := slices.DeleteFunc(slices.Clone(s.Due), func(c pool.Cooldown) bool {
		return c.Class == string(verdict.Throttled) || !c.Whole && !s.Member.Knows(c.Model)
	})
	for _, c := range slices.Concat(s.Cooldowns, due) {
		if s.Member.Spares(c) && c.Operation == "" {
			continue // other requests are served, and nobody need act
		}
		r := reason{attempt{Deployment(s.Member, c.Model), c.Class},
			verdict.RemedyOf(verdict.Class(c.Class), c.Cause).Cause}
		if !slices.Contains(reasons, r) {
			reasons = append(reasons, r)
		}
	}
	return reasons
}
